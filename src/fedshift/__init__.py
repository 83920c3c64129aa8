"""fedshift: federated learning for clients whose data differ, above all in how they look (feature shift).

Everything below is imported when first used, so that the command line answers at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .api import Comparison, compare
    from .base.errors import FedshiftError, UsageError
    from .core.method import Method
    from .core.optimizer import SGD, AdamW, Cosine, Exponential, StepDecay
    from .core.rule import Local, Rule
    from .core.select import Scope, batch_norm, everything, named, norm_layers, norm_statistics, nothing, of_type
    from .core.work import Work
    from .data.digits import digits
    from .data.federation import Federation, federation
    from .data.folder import read_folder
    from .methods.centralized import centralized
    from .methods.fedavg import fedavg
    from .methods.fedbn import fedbn
    from .methods.fedprox import fedprox
    from .methods.scaffold import scaffold
    from .methods.silobn import silobn
    from .methods.single import single

_HOME = {
    "api": ("Comparison", "compare"),
    "base.errors": ("FedshiftError", "UsageError"),
    "core.method": ("Method",),
    "core.optimizer": ("SGD", "AdamW", "Cosine", "Exponential", "StepDecay"),
    "core.rule": ("Local", "Rule"),
    "core.select": (
        "Scope", "batch_norm", "everything", "named", "norm_layers", "norm_statistics", "nothing", "of_type",
    ),
    "core.work": ("Work",),
    "data.digits": ("digits",),
    "data.federation": ("Federation", "federation"),
    "data.folder": ("read_folder",),
    "methods.centralized": ("centralized",),
    "methods.fedavg": ("fedavg",),
    "methods.fedbn": ("fedbn",),
    "methods.fedprox": ("fedprox",),
    "methods.scaffold": ("scaffold",),
    "methods.silobn": ("silobn",),
    "methods.single": ("single",),
}  # fmt: skip
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "SGD", "AdamW", "Comparison", "Cosine", "Exponential", "Federation", "FedshiftError", "Local", "Method", "Rule",
    "Scope", "StepDecay", "UsageError", "Work", "batch_norm", "centralized", "compare", "digits", "everything",
    "fedavg", "fedbn", "federation", "fedprox", "named", "norm_layers", "norm_statistics", "nothing", "of_type",
    "read_folder", "scaffold", "silobn", "single",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
