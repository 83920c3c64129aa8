"""PartialFed-Fix: clients send all layers, but do not load a fixed set of them.

Sun et al. 2021 (NeurIPS 34, "PartialFed"), compared in table 17 of FedWon (arXiv:2306.05879). Unlike in FedBN, the
server holds a complete model, the mean of the uploads.
"""

from dataclasses import replace

from ..core.method import Method, method
from ..core.selection import parse_selection


@method
def partialfed_fix(base: Method, *, layers: int | str = 1) -> Method:
    """Load all layers of ``base`` except the last ``layers`` layers, or except layers that match a pattern.

    With ``layers="batch_norm"``, clients have the same models as with FedBN.
    """
    return replace(base, scope=replace(base.scope, load=base.scope.load & ~parse_selection(layers)))
