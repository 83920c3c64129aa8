"""FedBABU: the federation trains the body alone; the head stays as it was drawn, and is trained for personal use.

Oh et al. 2022, arXiv:2106.06042: as all clients have one head that never moves, their bodies learn features for the
same directions. A client's model is the global one, fine-tuned as a whole on its own data. Here that happens whenever
the model is measured or handed out, and nothing of it returns to the federation.
"""

from ..core.method import Method, method
from ..core.selection import parse_selection
from ..utils.errors import UsageError


@method
def fedbabu(base: Method, *, layers: int | str = 1, rounds: int = 5) -> Method:
    """Leave the head of ``base`` untrained in the federation, and fine-tune each client's model for use.

    Args:
        base: FedAvg unless given.
        layers: The head: that many last layers, or a pattern such as ``"head.*"``.
        rounds: Rounds of the run's local work that a client's model takes from the global one; 0: none.

    """
    if rounds < 0:
        raise UsageError(f"rounds={rounds}: give 0 (the global model) or more")
    return base.leave_untrained(parse_selection(layers)).with_finetuning(rounds)
