"""Settings given as Python values, each converted to the text of a settings file and, if needed, an object.

A run from Python writes the same settings as one from the command line. An object is written as text if parsing that
text makes an equal object; otherwise, as for a function of a notebook, a description is written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ..config.expressions import EMBEDDED, find_user_function
from ..config.spec import PYTHON, CompareSpec, DataSpec, check_settings
from ..core.loss import LOSSES
from ..core.method import Method
from ..core.optimizer import OPTIMIZERS, SCHEDULES, Optimizer, as_optimizer
from ..data.augmentation import AUGMENTATIONS
from ..data.federation import Federation
from ..data.readers import FORMS
from ..data.sources import load_source, prepare_clients
from ..methods import METHODS
from ..models import MODELS
from ..tasks import TASKS, Task
from ..utils.errors import FedshiftError, Ref, UsageError, unknown_name
from ..utils.user_code import describe_function, find_import_path, locate_error
from .experiment import Experiment
from .factory import GivenObjects, make_experiment, make_optimizer
from .initial_weights import as_initial_weights

DEFAULTS: Mapping[str, Any] = {setting.name: setting.default for setting in fields(CompareSpec)}
OF_OPTIMIZER = ("optimizer", "lr", "schedule")
"""Settings that an optimizer object replaces."""
SIGNS = frozenset(",*?[]")
"""Characters with a special meaning in lists of client names."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A setting given in Python: its ``value``, and the equivalent ``texts`` of settings or a description."""

    value: Any
    texts: Mapping[str, Any] = field(default_factory=dict)
    described: str = ""


def make_python_experiment(given: Mapping[str, Any]) -> Experiment:
    """Return the experiment with the settings ``given``, as on the command line or as Python values.

    Raises :class:`UsageError` listing each setting with an invalid value, and the allowed values.
    """
    values = {**DEFAULTS} | {name: simplify(name, value) for name, value in given.items()}
    objects = {name: value for name, value in values.items() if name in READERS and not _is_plain(name, value)}
    values |= {name: DEFAULTS[name] for name in objects}
    check_settings(SimpleNamespace(**values), CompareSpec)
    if schedule := objects.pop("schedule", None):
        objects["optimizer"] = objects.get("optimizer", values["optimizer"]), schedule
    found: dict[str, Any] = {}
    described: dict[str, str] = {}
    for name, value in objects.items():
        reading = READERS[name](value, values)
        found[name] = reading.value
        values |= reading.texts
        if reading.described:
            described[name] = reading.described
    spec = CompareSpec(**values)
    experiment = make_experiment(spec, given=GivenObjects(**found))
    hidden = {*described, *(OF_OPTIMIZER if "optimizer" in described else ())}
    written = {name: value for name, value in experiment.config.items() if name not in hidden}
    return replace(experiment, config=written | ({PYTHON: described} if described else {}))


def load_python_data(data: Any, given: Mapping[str, Any]) -> Federation:
    """Return the clients in ``data``, split, scaled and checked by the settings ``given``; targets stay as they are."""
    values = {name: simplify(name, value) for name, value in {**given, "data": data}.items()}
    data, task = values.pop("data"), values.get("task")
    if not _is_plain("task", task):
        task = TASKS.parse(values.pop("task"))
    defaults = {setting.name: setting.default for setting in fields(DataSpec)}
    check_settings(SimpleNamespace(**defaults | values), DataSpec)
    spec = DataSpec(**values)
    made = load_source(data, spec, task=task if isinstance(task, Task) else None)
    return prepare_clients(made.fit_images(spec.image_size), spec)


def simplify(name: str, value: Any) -> Any:
    """Return the value of a setting in command-line form, if that form is equivalent."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Path) and name in ("root", "weights"):
        return str(value)
    if isinstance(value, Path) and name == "data":
        if not value.exists():
            raise UsageError(f"data: there is no {value.resolve()}: give a directory or a table that exists")
        return str(value) if len(value.parts) > 1 else f"./{value}"  # not to be read as the name of a benchmark
    if isinstance(value, torch.device):
        return str(value)
    if name == "batch_size" and value is None:
        return 0
    return value


def _is_plain(name: str, value: Any) -> bool:
    """Return whether ``value`` is in command-line form, or can only be a mistaken attempt at it."""
    return isinstance(value, str) or (value is None and DEFAULTS[name] is None)


def read_methods(value: Any, _values: Mapping[str, Any]) -> Reading:
    """Read a text, a method, a function that makes one, or a list of these."""
    methods: list[Method] = []
    texts: list[str | None] = []
    for one in [value] if isinstance(value, Method) or not isinstance(value, Iterable) else value:
        made = METHODS.parse_all(one) if isinstance(one, str) else (METHODS.parse(one),)
        methods += made
        texts.append(one if isinstance(one, str) else METHODS.write(made[0]) or find_import_path(one))
    if None not in texts:
        return Reading(value=tuple(methods), texts={"methods": ",".join(map(str, texts))})
    return Reading(value=tuple(methods), described=", ".join(method.label for method in methods))


def read_data(value: Any, _values: Mapping[str, Any]) -> Reading:
    """Read a federation, or another object that contains clients."""
    if value is None:
        raise UsageError(f"{{}}: give {FORMS}", Ref(data=None))
    if not isinstance(value, Federation):
        return Reading(value=value, described=f"a {type(value).__name__} in memory")
    if value.name in EMBEDDED and value.fingerprint == find_user_function("data", EMBEDDED[value.name])().fingerprint:
        return Reading(value=value, texts={"data": value.name})
    return Reading(value=value, described=f"a Federation {value.name!r} of {len(value.clients)} clients")


def read_model(value: Any, _values: Mapping[str, Any]) -> Reading:
    """Read a function that makes a network."""
    model = MODELS.parse(value)
    if text := MODELS.write(model):
        return Reading(value=model, texts={"model": text})
    return Reading(value=model, described=f"function {describe_function(model)}")


def read_loss(value: Any, _values: Mapping[str, Any]) -> Reading:
    """Read a loss, a torch loss, or a function."""
    loss = LOSSES.parse(value)
    if text := LOSSES.write(loss):
        return Reading(value=loss, texts={"loss": text})
    return Reading(value=loss, described=f"function {describe_function(getattr(loss, 'function', loss))}")


def read_optimizer(value: Any, values: Mapping[str, Any]) -> Reading:
    """Read an optimizer or a torch optimizer; or a pair of an optimizer (or its text) and a schedule."""
    value, schedule = value if isinstance(value, tuple) else (value, None)
    if schedule is not None:
        SCHEDULES.parse(schedule)
    said = make_optimizer(CompareSpec(**{name: values[name] for name in (*OF_OPTIMIZER, "rounds")}))
    if isinstance(value, str):
        return _write_optimizer(replace(said, schedule=schedule or said.schedule), values["rounds"])
    given = {name for name in OF_OPTIMIZER if values[name] != DEFAULTS[name]} | ({"schedule"} if schedule else set())
    made = as_optimizer(value, values["lr"], schedule or said.schedule)
    if made is not value:  # a torch optimizer has no schedule, and as a class no learning rate
        given -= {"schedule", *(["lr"] if made.lr == values["lr"] else [])}
    for name in sorted(given):
        raise UsageError(f"{name} beside optimizer={made}: give {name} to the optimizer alone")
    return _write_optimizer(made, values["rounds"])


def _write_optimizer(made: Optimizer, rounds: int) -> Reading:
    schedule = SCHEDULES.write(made.schedule, rounds=rounds)
    text = OPTIMIZERS.write(made, lr=made.lr, schedule=made.schedule)
    if schedule is None or text is None:
        return Reading(value=made, described=repr(made))
    return Reading(value=made, texts={"optimizer": text, "lr": made.lr, "schedule": schedule})


def read_augment(value: Any, _values: Mapping[str, Any]) -> Reading:
    """Read an augmentation, or a user's function."""
    augment = AUGMENTATIONS.parse(value)
    if text := AUGMENTATIONS.write(augment):
        return Reading(value=augment, texts={"augment": text})
    return Reading(value=augment, described=f"function {describe_function(value)}")


def read_weights(value: Any, values: Mapping[str, Any]) -> Reading:
    """Read a state dictionary; files are given as text."""
    weights = as_initial_weights(value, skip_classifier=values["weights_skip_classifier"])
    return Reading(value=weights, described="a state dictionary in memory")


def read_newcomers(value: Any, _values: Mapping[str, Any]) -> Reading:
    """Read the exact names of clients."""
    if not isinstance(value, Sequence | set | frozenset) or not all(isinstance(name, str) for name in value):
        raise UsageError("{}: give names of clients, in a list or a text with commas", Ref(newcomers=value))
    names = tuple(value)
    if any(SIGNS & set(name) for name in names):
        return Reading(value=names, described=f"the clients {', '.join(map(repr, names))}")
    return Reading(value=names, texts={"newcomers": ",".join(names) or None})


def read_task(value: Any, _values: Mapping[str, Any]) -> Reading:
    """Read a task, or a class of tasks, which is called without arguments."""
    task = TASKS.parse(value)
    if text := TASKS.write(task):
        return Reading(value=task, texts={"task": text})
    return Reading(value=task, described=f"{task!r} of {describe_function(type(task))}")


READERS: Mapping[str, Callable[[Any, Mapping[str, Any]], Reading]] = {
    "methods": read_methods, "data": read_data, "model": read_model, "loss": read_loss, "optimizer": read_optimizer,
    "schedule": read_optimizer, "augment": read_augment, "newcomers": read_newcomers,
    "weights": read_weights, "task": read_task,
}  # fmt: skip
"""Settings that may also be Python objects, and the function that reads each."""


@contextmanager
def note_user_code() -> Iterator[None]:
    """Make an exception of the user's code tell its place there."""
    try:
        yield
    except FedshiftError:
        raise
    except Exception as error:
        if where := locate_error(error):
            error.add_note(f"It arose in {where}, which fedshift called.")
        raise


def refuse_unknown(kind: str, given: Iterable[str], spec: type[DataSpec], apart: Collection[str] = ()) -> None:
    """Raise :class:`UsageError` for a name in ``given`` that is not a field of ``spec``, or that is in ``apart``."""
    known = [each.name for each in fields(spec) if each.name not in apart]
    for name in given:
        if name not in known:
            raise unknown_name(kind, name, known)
