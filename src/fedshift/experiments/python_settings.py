"""Settings given as Python values: texts as on the command line, or objects, checked before anything starts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from ..config.given_settings import make_settings
from ..config.spec import CompareSpec, DataSpec, Spec
from ..utils.errors import FedshiftError, UsageError, unknown_name
from ..utils.user_code import locate_error
from .experiment import Experiment
from .factory import make_experiment, make_optimizer


def make_python_experiment(given: Mapping[str, Any]) -> Experiment:
    """Return the experiment with the settings ``given`` to :func:`make_spec`; its data are not checked for errors."""
    return make_experiment(make_spec(given, CompareSpec))


S = TypeVar("S", bound=DataSpec)


def make_spec(given: Mapping[str, Any], kind: type[S]) -> S:
    """Return settings of the ``kind``, ``given`` as on the command line or as Python values.

    Raises :class:`UsageError` listing each setting with an invalid value, and the allowed values.
    """
    values = {name: simplify(name, value) for name, value in given.items()}
    spec = make_settings(values, kind)
    if isinstance(spec, Spec) and not isinstance(spec.optimizer, str):
        make_optimizer(spec, values)  # refuses other values beside it
    return spec


def simplify(name: str, value: Any) -> Any:
    """Return the value of a setting in command-line form, if that form is equivalent."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Iterator) and name != "data":
        value = tuple(value)  # it can be read once
    if isinstance(value, Path) and name in ("root", "weights", "plan"):
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


@contextmanager
def note_user_code() -> Iterator[None]:
    """Add file and line to an exception raised in the user's code."""
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
