"""The same experiment across machines, on Flower (``pip install 'fedshift[flower]'``), and parts for apps that exist.

What an app takes is imported when first used, so that ``quiet`` comes before anything of ``flwr``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import quiet as quiet

if TYPE_CHECKING:
    from .dropin import clip_gradients_, operated
    from .local import keep_local, local_entries
    from .strategy import MethodStrategy

_HOME = {
    "MethodStrategy": "strategy", "clip_gradients_": "dropin", "keep_local": "local", "local_entries": "local",
    "operated": "dropin",
}  # fmt: skip

__all__ = ["MethodStrategy", "clip_gradients_", "keep_local", "local_entries", "operated"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
