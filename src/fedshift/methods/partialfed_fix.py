"""PartialFed-Fix: a client does not load a given set of layers, but sends all of them.

Sun et al. 2021 (NeurIPS 34, "PartialFed"), compared in table 17 of FedWon (arXiv:2306.05879). Unlike FedBN's, its
server holds a whole model, the mean of what clients send.
"""

from dataclasses import replace

from ..core.method import Method, method
from ..core.selection import parse_selection


@method
def partialfed_fix(base: Method, *, layers: int | str = 1) -> Method:
    """Let clients of ``base`` load all but the last ``layers`` layers, or all but those of a pattern.

    ``layers="batch_norm"`` gives each client the model that FedBN gives it.
    """
    return replace(base, scope=replace(base.scope, load=base.scope.load & ~parse_selection(layers)))
