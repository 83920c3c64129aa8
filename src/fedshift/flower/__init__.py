"""Experiments across machines on Flower (``pip install 'fedshift[flower]'``), and parts for existing Flower apps.

These parts are imported when first used, after this module has silenced Flower.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .apps.mod import keep_local, load_client_model
    from .apps.plans import list_local_entries, prepare_model, transform_gradients_
    from .apps.strategy import MethodStrategy

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""Environment that stops Flower's programs from reporting usage and from checking for updates, even for --help.

Flower reads the first variable when ``flwr`` is imported, so importing this package disables telemetry in this process
and its children.
"""
os.environ.update(QUIET)

_HOME = {"MethodStrategy": "strategy", "keep_local": "mod", "load_client_model": "mod"}
"""Modules of :mod:`.apps` by public name; other names are in ``plans``."""

__all__ = [
    "MethodStrategy",
    "keep_local",
    "list_local_entries",
    "load_client_model",
    "prepare_model",
    "transform_gradients_",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".apps.{_HOME.get(name, 'plans')}", __name__), name)


def __dir__() -> list[str]:
    return __all__
