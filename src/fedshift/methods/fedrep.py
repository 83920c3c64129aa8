"""FedRep: each round trains first the head, which stays on the client, then the shared body.

Collins et al. 2021, arXiv:2102.07078, Algorithm 1; its experiments use 10 local epochs for the head and 1 for the body.
By default the steps of a round are divided in that ratio, so that FedRep has the same budget as every other method;
``head_epochs`` and ``body_epochs`` follow the paper.
"""

from ..core.method import Method, method, require
from ..core.rule import Declared, Network, Phase, Rule
from ..core.selection import parse_selection


class HeadThenBody(Rule):
    """Trains the head for a fraction ``share`` of the round's steps, then the body, each for at least one step."""

    share: float
    layers: int | str

    def bind(self, network: Network) -> Declared:
        head = parse_selection(self.layers).names(network.entries)
        body = frozenset(network.initial) - head
        first, then = Phase(trains=head, share=(0.0, self.share)), Phase(trains=body, share=(self.share, 1.0))
        return Declared(self, phases=(first, then))


@method
def fedrep(
    base: Method, *, layers: int | str = 1, head: int = 10, body: int = 1, head_epochs: int | None = None,
    body_epochs: int | None = None,
) -> Method:  # fmt: skip
    """Keep the last ``layers`` layers of ``base`` (or a pattern) local; ``head : body`` divides the steps of a round.

    ``head_epochs`` and ``body_epochs``: number of epochs for the head and then for the body, which replace the
    experiment's epochs, batches or steps.
    """
    require(head >= 1 and body >= 1, f"head={head} and body={body}: give 1 or more for each")
    if head_epochs is not None or body_epochs is not None:
        require((head, body) == (10, 1), f"head={head} and body={body} divide a round: leave them out with epochs")
        text = f"head_epochs={head_epochs} and body_epochs={body_epochs}"
        head, body = head_epochs or 0, body_epochs or 0
        require(head >= 1 and body >= 1, f"{text}: give 1 or more for each, or neither")
        base = base.with_work(epochs=head + body)
    return base.keep_on_client(parse_selection(layers)).with_rule(HeadThenBody(head / (head + body), layers))
