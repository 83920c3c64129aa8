"""Comparisons started, continued and read from Python, in five lines.

>>> import fedshift
>>> result = fedshift.compare(["fedavg", "fedbn"], data="digits", samples=64, rounds=2, seeds=2, lr=0.03)
>>> list(result.table().index)
['pen', 'photo', 'print', 'faded', 'worn', 'macro', 'pooled', 'worst client']
>>> print(result)  # doctest: +ELLIPSIS
BatchNorm's running statistics lag behind the weights: ...
Test accuracy of the personal model in percent with re-estimated BatchNorm statistics, mean (std) over 2 seeds, ...
>>> result.model("fedbn", client="photo").bn1.running_mean.shape
torch.Size([16])
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import wraps
from pathlib import Path
from threading import Event
from types import NoneType
from typing import Any, ParamSpec, TypeVar, get_type_hints
from weakref import finalize

from ..config.expressions import find_functions, trust_only
from ..config.given_settings import read_help
from ..config.settings_file import FILE
from ..config.spec import CompareSpec, DataSpec
from ..console.printing import Console
from ..console.terminal import show_progress
from ..data.checks.quality import check_data
from ..data.federation import Federation
from ..data.sources import load_federation
from ..diagnosis.checked_experiment import make_checked
from ..experiments.callbacks import CALLBACKS, Callback
from ..experiments.compare_arguments import CompareArguments
from ..experiments.experiment import Experiment
from ..experiments.python_settings import make_python_experiment, make_spec, note_user_code, refuse_unknown, simplify
from ..experiments.restoration import read_python_settings
from ..results.summary import holds_run, read_summary
from ..utils.errors import UsageError, unknown_name
from ..utils.files import ScratchDirectory, require_writable
from ..utils.threads import limit_threads
from ..utils.warning import warn_of
from .comparison import Comparison

P = ParamSpec("P")
A = TypeVar("A")
R = TypeVar("R")


def _take_fields_of(kind: Callable[P, A]) -> Callable[[Callable[[A, Collection[str]], R]], Callable[P, R]]:
    """Return a decorator that turns the fields of dataclass ``kind`` into a function's arguments, with their help.

    The function receives them as one value, and the names of those that were given.
    """

    def decorate(function: Callable[[A, Collection[str]], R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in help_of:
                    raise TypeError(f"{function.__name__}(): {unknown_name('argument', name, help_of)}")
            try:
                named = signature.bind(*args, **kwargs).arguments.keys()
            except TypeError as error:
                raise TypeError(f"{function.__name__}(): {error}") from None
            return function(kind(*args, **kwargs), named)

        assert isinstance(kind, type)
        help_of, types = read_help(kind), get_type_hints(kind)
        takes = dict(inspect.signature(vars(kind)["__init__"]).parameters)
        order = (*vars(kind)["__annotations__"], *takes)
        found = [takes.pop(name).replace(annotation=types[name]) for name in order if name in takes and name != "self"]
        signature = inspect.Signature(found, return_annotation=function.__annotations__["return"])
        lines = "\n".join(f"        {one.name}: {help_of[one.name]}" for one in found)
        call.__doc__ = str(function.__doc__).replace("    Returns:", f"    Args:\n{lines}\n\n    Returns:", 1)
        vars(call)["__signature__"] = signature
        return call

    return decorate


@_take_fields_of(CompareArguments)
def compare(given: CompareArguments, named: Collection[str]) -> Comparison:
    """Train every method with every seed on ``data`` and measure each client's test set after aggregation.

    The arguments are the fields of :class:`CompareArguments`. The run directory equals the one that ``fedshift
    compare`` writes with the same settings: it can be reported, adapted and resumed from the command line. Its
    ``config.toml`` lists functions of a notebook and other values that a file cannot store; pass them again to resume.

    Returns:
        The :class:`Comparison`.

    Raises:
        UsageError: a setting is invalid; raised before anything starts, with the allowed values.
        FedshiftError: training diverges, or writing to disk fails.

    """
    with note_user_code():
        directory, resume = _choose_directory(given)
        if directory:
            require_writable(directory)
        callbacks = CALLBACKS.parse_all(given.callbacks)
        for name, kind in (("progress", bool), ("stop", Event)):
            value = getattr(given, name)
            if value is not None and not isinstance(value, kind):
                raise UsageError(f"{name}={value!r}: give {'True or False' if kind is bool else f'an {kind.__name__}'}")
        if given.jobs != "auto" and (type(given.jobs) is not int or given.jobs < 1):
            raise UsageError(f"jobs={given.jobs!r}: give a number of trials of 1 or more, or 'auto'")
        values = {each.name: getattr(given, each.name) for each in fields(CompareSpec) if each.name in named}
        experiment = make_checked(make_spec(values, CompareSpec))
        scratch = None if directory else ScratchDirectory()
        path = scratch.path if scratch else Path(directory or "")
        if resume:
            experiment = experiment.keep_labels(path)
        result = Comparison(experiment, path)
        try:
            with limit_threads(given.threads), _observe(given, callbacks) as callback:
                experiment.run(path, resume=resume, callback=callback, stop=given.stop, jobs=given.jobs)
        except BaseException as error:
            if holds_run(path) and not isinstance(error, UsageError):
                if scratch:
                    scratch.keep()
                said = repr(str(path))
                error.add_note(
                    f"Completed work is saved: compare(..., resume={said}) continues it, read_run({said}) shows it."
                )
            elif scratch:
                scratch.close()
            raise
    if scratch:
        finalize(result, ScratchDirectory.close, scratch)
    return result


def read_run(directory: str | Path, *, code: str | Sequence[str] = (), **given: Any) -> Comparison:
    """Return the results of a run, finished or not, that ``compare`` or the command line wrote to ``directory``.

    Args:
        directory: Run directory.
        code: Your functions, ``package.module:function``, that the directory's settings may call. No others are
            called, because directories may come from others. Functions in ``given`` need not be listed.
        given: Arguments of :func:`compare` that replace the directory's, such as ``model=...`` if the run used a
            function that a file cannot store. Only :meth:`Comparison.model`, :meth:`~Comparison.adapt` and
            :meth:`~Comparison.features` need them: tables, figures and the page are made only from records.

    Raises:
        UsageError: there is no run, or no such argument.

    """
    path = Path(directory)
    refuse_unknown("argument", given, CompareSpec)
    read_summary(path)
    texts = [each for value in given.values() for each in (value if isinstance(value, list | tuple) else (value,))]
    typed = [name for text in texts if isinstance(text, str) for name in find_functions(text)]
    allowed = [*((code,) if isinstance(code, str) else code), *typed]

    def make() -> Experiment:
        with trust_only(allowed, path / FILE):
            return make_python_experiment(read_python_settings(path, given, allowed)).keep_labels(path)

    return Comparison(make, path)


def load_data(data: Any, **settings: Any) -> Federation:
    """Return the clients that :func:`compare` would train on, for inspection; printing the result lists them.

    Args:
        data: As for :func:`compare`.
        settings: Settings of :func:`compare` that concern data: ``domains``, ``split``, ``samples``, ``validation``,
            ``image_size``, ``normalize``, ``target``, ``client_column`` and others.

    Warns:
        UserWarning: the data have errors that a comparison would report.

    Raises:
        UsageError: the data are not usable, or a setting is unknown.

    """
    refuse_unknown("setting of data", settings, DataSpec)
    with note_user_code():
        spec = make_spec(settings, DataSpec)
        loaded = load_federation(simplify("data", data), spec)
        made = check_data(loaded, spec.on_data_error)
    warn_of(notice for notice in made.notices if notice not in loaded.notices)
    return made


def _choose_directory(given: CompareArguments) -> tuple[Path | None, bool]:
    """Return the directory to keep the run in (None: a temporary one), and whether to continue a run there."""
    for name, value in (("out", given.out), ("resume", given.resume)):
        if not isinstance(value, str | Path | (bool if name == "resume" else NoneType)):
            raise UsageError(
                f"{name}={value!r}: give a directory{', True or False' if name == 'resume' else ', or None'}"
            )
    if isinstance(given.resume, bool):
        if given.resume and given.out is None:
            raise UsageError("resume=True: say which run to continue (out=DIRECTORY, or resume=DIRECTORY)")
        return given.out if given.out is None else Path(given.out), given.resume
    if given.out is not None and Path(given.out) != Path(given.resume):
        raise UsageError(
            f"out={str(given.out)!r} and resume={str(given.resume)!r}: a resumed run stays in its directory; give one"
        )
    return Path(given.resume), True


@contextmanager
def _observe(given: CompareArguments, callbacks: Sequence[Callback]) -> Iterator[Callback]:
    """Yield a callback that calls ``callbacks``, and shows progress if asked for."""
    with show_progress(Console(quiet=not given.progress), callbacks) as shown:
        yield shown
