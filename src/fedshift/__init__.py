"""Federated learning for clients whose data differ, especially in appearance (feature shift).

Public names are imported when first used, so that the command line answers at once.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from .utils.version import __version__ as __version__

# isort: off
if TYPE_CHECKING:  # for editors and type checkers; at run time every public name is found without this list
    from .api import (
        Comparison as Comparison,
        advise as advise,
        compare as compare,
        load_data as load_data,
        read_run as read_run,
    )

    from .core.declarations import Phase as Phase
    from .core.declarations import Send as Send
    from .core.rule import Client as Client
    from .core.rule import Declared as Declared
    from .core.rule import Folded as Folded
    from .core.method import (
        Method as Method,
        method as method,
        modifier as modifier,
    )
    from .core.optimizer import (
        SGD as SGD,
        AdamW as AdamW,
    )
    from .core.rule import Rule as Rule
    from .core.rule import Server as Server
    from .core.rule import Step as Step
    from .core.schedule import (
        Cosine as Cosine,
        Exponential as Exponential,
        StepDecay as StepDecay,
    )
    from .core.selection import (
        Scope as Scope,
        batch_norm as batch_norm,
        everything as everything,
        last_layers as last_layers,
        name_matches as name_matches,
        norm_layers as norm_layers,
        norm_statistics as norm_statistics,
        nothing as nothing,
        of_type as of_type,
    )
    from .core.work import Work as Work
    from .evaluation.policy import policy as policy
    from .data.digits import digits as digits
    from .data.nuclei import nuclei as nuclei
    from .data.arrays import LazyDataset as LazyDataset
    from .data.assembly import (
        federation as federation,
        read_folder as read_folder,
    )
    from .data.federation import Federation as Federation
    from .experiments.callbacks import Callback as Callback
    from .export.loading import load as load
    from .methods.agc import agc as agc
    from .methods.apfl import apfl as apfl
    from .methods.centralized import centralized as centralized
    from .methods.ditto import ditto as ditto
    from .methods.dp import dp as dp
    from .methods.dp_sgd import dp_sgd as dp_sgd
    from .methods.fedadagrad import fedadagrad as fedadagrad
    from .methods.fedadam import fedadam as fedadam
    from .methods.fedala import fedala as fedala
    from .methods.fedap import fedap as fedap
    from .methods.fedavg import fedavg as fedavg
    from .methods.fedavgm import fedavgm as fedavgm
    from .methods.fedbabu import fedbabu as fedbabu
    from .methods.fedbn import fedbn as fedbn
    from .methods.fedcac import fedcac as fedcac
    from .methods.feddecorr import feddecorr as feddecorr
    from .methods.feddg_elcfs import feddg_elcfs as feddg_elcfs
    from .methods.feddg_ga import feddg_ga as feddg_ga
    from .methods.feddyn import feddyn as feddyn
    from .methods.fedfa import fedfa as fedfa
    from .methods.fedgma import fedgma as fedgma
    from .methods.fedheal import fedheal as fedheal
    from .methods.fedlc import fedlc as fedlc
    from .methods.fedmmb import fedmmb as fedmmb
    from .methods.fednova import fednova as fednova
    from .methods.fedntd import fedntd as fedntd
    from .methods.fedpac import fedpac as fedpac
    from .methods.fedper import fedper as fedper
    from .methods.fedplvm import fedplvm as fedplvm
    from .methods.fedproto import fedproto as fedproto
    from .methods.fedprox import fedprox as fedprox
    from .methods.fedrdn import fedrdn as fedrdn
    from .methods.fedrep import fedrep as fedrep
    from .methods.fedrod import fedrod as fedrod
    from .methods.fedsmb import fedsmb as fedsmb
    from .methods.fedsr import fedsr as fedsr
    from .methods.fedwon import fedwon as fedwon
    from .methods.fedyogi import fedyogi as fedyogi
    from .methods.fixbn import fixbn as fixbn
    from .methods.fn import fn as fn
    from .methods.fpl import fpl as fpl
    from .methods.geometric_median import geometric_median as geometric_median
    from .methods.gn import gn as gn
    from .methods.gperxan import gperxan as gperxan
    from .methods.greg import greg as greg
    from .methods.harmofl import harmofl as harmofl
    from .methods.hbn import hbn as hbn
    from .methods.krum import krum as krum
    from .methods.ln import ln as ln
    from .methods.median import median as median
    from .methods.moon import moon as moon
    from .methods.multi_krum import multi_krum as multi_krum
    from .methods.nonorm import nonorm as nonorm
    from .methods.partialfed_adaptive import partialfed_adaptive as partialfed_adaptive
    from .methods.partialfed_fix import partialfed_fix as partialfed_fix
    from .methods.scaffold import scaffold as scaffold
    from .methods.silobn import silobn as silobn
    from .methods.single import single as single
    from .methods.trimmed_mean import trimmed_mean as trimmed_mean
    from .methods.tuned import tuned as tuned
    from .new_clients.own_network import adapt_network as adapt_network
    from .utils.errors import (
        FedshiftError as FedshiftError,
        UsageError as UsageError,
    )

# isort: on
_HOME = {
    "api": ("Comparison", "advise", "compare", "load_data", "read_run"),
    "utils.errors": ("FedshiftError", "UsageError"),
    "core.declarations": ("Phase", "Send"),
    "core.method": ("Method", "method", "modifier"),
    "core.optimizer": ("SGD", "AdamW"),
    "core.rule": ("Client", "Declared", "Folded", "Rule", "Server", "Step"),
    "core.schedule": ("Cosine", "Exponential", "StepDecay"),
    "core.selection": (
        "Scope", "batch_norm", "everything", "last_layers", "name_matches", "norm_layers", "norm_statistics", "nothing",
        "of_type",
    ),
    "core.work": ("Work",),
    "evaluation.policy": ("policy",),
    "data.digits": ("digits",),
    "data.nuclei": ("nuclei",),
    "experiments.callbacks": ("Callback",),
    "data.arrays": ("LazyDataset",),
    "data.assembly": ("federation", "read_folder"),
    "data.federation": ("Federation",),
    "export.loading": ("load",),
    "new_clients.own_network": ("adapt_network",),
    **{
        f"methods.{found.name}": (found.name,)
        for found in iter_modules([str(Path(__file__).parent / "methods")])
        if not found.name.startswith("_")
    },
}  # fmt: skip
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE)
_PACKAGES = ("aggregation", "flower", "models", "tasks")
"""Packages with public names of their own."""


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f".{name}", __name__)
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES, "__version__"])
