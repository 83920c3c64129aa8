"""FedBABU: the federation trains only the body; the head keeps its initial values until clients fine-tune the model.

Oh et al. 2022, arXiv:2106.06042: all clients share a fixed head, so that their bodies learn features for the same
directions. A client's model is the global model, fully fine-tuned on the client's data. Here this happens whenever the
model is evaluated or exported, and does not affect federated training.
"""

from ..core.method import Method, method, require
from ..core.selection import parse_selection


@method
def fedbabu(base: Method, *, layers: int | str = 1, rounds: int = 5) -> Method:
    """Leave the head of ``base`` untrained in the federation, and fine-tune each client's model for use.

    ``layers``: the head: number of last layers, or a pattern such as ``"head.*"``. ``rounds``: rounds of local work
    that fine-tune a client's model; 0: none.
    """
    require(rounds >= 0, f"rounds={rounds}: give 0 (the global model) or more")
    return base.leave_untrained(parse_selection(layers)).with_finetuning(rounds)
