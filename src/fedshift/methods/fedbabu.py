"""FedBABU: the federation trains the body alone; the head stays as it was drawn, and is trained for personal use.

Oh et al. 2022, arXiv:2106.06042: as all clients have one head that never moves, their bodies learn features for the
same directions. A client's model is the global one, fine-tuned as a whole on its own data. Here that happens whenever
the model is measured or handed out, and nothing of it returns to the federation.
"""

from dataclasses import dataclass

from typing_extensions import override

from ..core.contexts import RoundContext
from ..core.method import Method, method
from ..core.requirements import Requirements
from ..core.rule import Rule
from ..core.selection import Entry, parse_selection
from ..utils.errors import UsageError
from ..utils.state import State


@dataclass(frozen=True)
class UntrainedHead(Rule):
    """Federated training without the last ``layers`` layers, or those of a pattern."""

    layers: int | str
    finetune_rounds: int
    personalizes = "use"
    requires = Requirements(shared_entries="FedBABU fine-tunes the body that clients share")

    @override
    def trainable(self, names: frozenset[str], entries: tuple[Entry, ...]) -> frozenset[str]:
        return names - parse_selection(self.layers).names(entries)

    @override
    def personalize(self, state: State, client: RoundContext) -> State:
        return state


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
    return base.with_rule(UntrainedHead(layers, rounds))
