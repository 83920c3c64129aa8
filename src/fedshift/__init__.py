"""Federated learning for clients whose data differ, above all in how they look (feature shift).

Public names are imported when first used, so that the command line answers at once.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from .utils.version import __version__ as __version__

if TYPE_CHECKING:  # for type checkers; methods are found in their directory
    from .api import Comparison as Comparison
    from .api import compare as compare
    from .core.aggregation import Uploads as Uploads
    from .core.method import Freeze as Freeze
    from .core.method import Method as Method
    from .core.optimizer import SGD as SGD
    from .core.optimizer import AdamW as AdamW
    from .core.optimizer import Cosine as Cosine
    from .core.optimizer import Exponential as Exponential
    from .core.optimizer import StepDecay as StepDecay
    from .core.rule import Rule as Rule
    from .core.rule import RuleContext as RuleContext
    from .core.selection import Scope as Scope
    from .core.selection import batch_norm as batch_norm
    from .core.selection import everything as everything
    from .core.selection import last_layers as last_layers
    from .core.selection import name_matches as name_matches
    from .core.selection import norm_layers as norm_layers
    from .core.selection import norm_statistics as norm_statistics
    from .core.selection import nothing as nothing
    from .core.selection import of_type as of_type
    from .core.work import Work as Work
    from .data.digits import digits as digits
    from .data.federation import Federation as Federation
    from .data.federation import federation as federation
    from .data.files.folder import read_folder as read_folder
    from .utils.errors import FedshiftError as FedshiftError
    from .utils.errors import UsageError as UsageError

_NAMES = {
    "api": "Comparison compare",
    "core.aggregation": "Uploads",
    "core.method": "Freeze Method",
    "core.optimizer": "SGD AdamW Cosine Exponential StepDecay",
    "core.rule": "Rule RuleContext",
    "core.selection": "Scope batch_norm everything last_layers name_matches norm_layers norm_statistics"
    " nothing of_type",
    "core.work": "Work",
    "data.digits": "digits",
    "data.federation": "Federation federation",
    "data.files.folder": "read_folder",
    "utils.errors": "FedshiftError UsageError",
}
_METHODS = [module.name for module in iter_modules([str(Path(__file__).parent / "methods")]) if module.name[0] != "_"]
_MODULE = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULE |= {name: f"methods.{name}" for name in _METHODS}

__all__ = sorted(_MODULE)


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
