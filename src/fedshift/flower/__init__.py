"""The same experiment across machines, on Flower (``pip install 'fedshift[flower]'``)."""

from __future__ import annotations

from . import quiet as quiet
