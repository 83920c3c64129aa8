"""fedshift: federated learning for clients whose data differ, above all in how they look (feature shift).

Everything below is imported when first used, so that the command line answers at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .api import Comparison, compare
    from .core.aggregation import Uploads
    from .core.method import Freeze, Method
    from .core.optimizer import SGD, AdamW, Cosine, Exponential, StepDecay
    from .core.rule import Rule, RuleContext
    from .core.selection import (
        Scope,
        batch_norm,
        everything,
        last_layers,
        name_matches,
        norm_layers,
        norm_statistics,
        nothing,
        of_type,
    )
    from .core.work import Work
    from .data.digits import digits
    from .data.federation import Federation, federation
    from .data.files.folder import read_folder
    from .methods.agc import agc
    from .methods.centralized import centralized
    from .methods.ditto import ditto
    from .methods.dp import dp
    from .methods.fedadagrad import fedadagrad
    from .methods.fedadam import fedadam
    from .methods.fedavg import fedavg
    from .methods.fedavgm import fedavgm
    from .methods.fedbn import fedbn
    from .methods.fedmmb import fedmmb
    from .methods.fednova import fednova
    from .methods.fedper import fedper
    from .methods.fedprox import fedprox
    from .methods.fedrep import fedrep
    from .methods.fedsmb import fedsmb
    from .methods.fedwon import fedwon
    from .methods.fedyogi import fedyogi
    from .methods.fixbn import fixbn
    from .methods.geometric_median import geometric_median
    from .methods.gn import gn
    from .methods.krum import krum
    from .methods.ln import ln
    from .methods.median import median
    from .methods.multi_krum import multi_krum
    from .methods.nonorm import nonorm
    from .methods.partialfed_adaptive import partialfed_adaptive
    from .methods.partialfed_fix import partialfed_fix
    from .methods.scaffold import scaffold
    from .methods.silobn import silobn
    from .methods.single import single
    from .methods.trimmed_mean import trimmed_mean
    from .methods.tuned import tuned
    from .utils.errors import FedshiftError, UsageError

_HOME = {
    "api": ("Comparison", "compare"),
    "utils.errors": ("FedshiftError", "UsageError"),
    "core.aggregation": ("Uploads",),
    "core.method": ("Freeze", "Method"),
    "core.optimizer": ("SGD", "AdamW", "Cosine", "Exponential", "StepDecay"),
    "core.rule": ("RuleContext", "Rule"),
    "core.selection": (
        "Scope", "batch_norm", "everything", "last_layers", "name_matches", "norm_layers", "norm_statistics", "nothing", "of_type",
    ),
    "core.work": ("Work",),
    "data.digits": ("digits",),
    "data.federation": ("Federation", "federation"),
    "data.files.folder": ("read_folder",),
    **{
        f"methods.{name}": (name,)
        for name in (
            "agc", "centralized", "ditto", "dp", "fedadagrad", "fedadam", "fedavg", "fedavgm", "fedbn", "fedmmb",
            "fednova", "fedper", "fedprox", "fedrep", "fedsmb", "fedwon", "fedyogi", "fixbn", "geometric_median",
            "gn", "krum", "ln", "median", "multi_krum", "nonorm", "partialfed_adaptive", "partialfed_fix",
            "scaffold", "silobn", "single", "trimmed_mean", "tuned",
        )
    },
}  # fmt: skip
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "SGD",
    "AdamW",
    "Comparison",
    "Cosine",
    "Exponential",
    "Federation",
    "FedshiftError",
    "Freeze",
    "Method",
    "Rule",
    "RuleContext",
    "Scope",
    "StepDecay",
    "Uploads",
    "UsageError",
    "Work",
    "agc",
    "batch_norm",
    "centralized",
    "compare",
    "digits",
    "ditto",
    "dp",
    "everything",
    "fedadagrad",
    "fedadam",
    "fedavg",
    "fedavgm",
    "fedbn",
    "federation",
    "fedmmb",
    "fednova",
    "fedper",
    "fedprox",
    "fedrep",
    "fedsmb",
    "fedwon",
    "fedyogi",
    "fixbn",
    "geometric_median",
    "gn",
    "krum",
    "last_layers",
    "ln",
    "median",
    "multi_krum",
    "name_matches",
    "nonorm",
    "norm_layers",
    "norm_statistics",
    "nothing",
    "of_type",
    "partialfed_adaptive",
    "partialfed_fix",
    "read_folder",
    "scaffold",
    "silobn",
    "single",
    "trimmed_mean",
    "tuned",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
