"""The same experiment across machines, on Flower (``pip install 'fedshift[flower]'``), and parts for apps that exist.

What an app takes is imported when first used, so that ``quiet`` comes before anything of ``flwr``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .transport import no_telemetry as no_telemetry

if TYPE_CHECKING:
    from .compat.dropin import clip_gradients_, prepare_model
    from .compat.local_entries import keep_local, list_local_entries
    from .compat.strategy import MethodStrategy

_HOME = {
    "MethodStrategy": "compat.strategy", "clip_gradients_": "compat.dropin", "keep_local": "compat.local_entries", "list_local_entries": "compat.local_entries",
    "prepare_model": "compat.dropin",
}  # fmt: skip

__all__ = ["MethodStrategy", "clip_gradients_", "keep_local", "list_local_entries", "prepare_model"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
