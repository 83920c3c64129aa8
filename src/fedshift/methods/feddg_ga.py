"""FedDG-GA: clients whose data the shared model fits worse than their own model gain weight in the mean.

Zhang et al. 2023 ("Federated Domain Generalization with Generalization Adjustment", CVPR), following the authors'
public code; it replaces the weights of FedAvg (McMahan et al. 2017, arXiv:1602.05629). Client k's generalization gap is
the loss of the shared model minus the loss of its own model before aggregation, both on k's data. Weights start equal;
in each round a_k = a_k + step gap_k / max_j |gap_j|, clamped to [0, 1] and normalized; ``step`` is ``step_size`` by the
number of clients. Both losses are of the next round's training batches, in training mode, so that clients send only one
number and each batch runs three models. The gap of a client in its first round is zero.
"""

import torch
from torch import Tensor

from ..core.means import weighted_mean
from ..core.method import Method, method, require
from ..core.rule import Client, Declared, Folded, Network, Rule, Send, Server, State, Step
from ..utils.state import add_prefix, entries_under, pick


class GeneralizationGap(Rule):
    """On clients the gap of the shared model to their own before aggregation, on the server weights adjusted by it."""

    step_size: float
    rounds: int | None
    aggregates = True
    weighs = False
    keeps = True
    needs_shared = "FedDG-GA compares each client's model with the shared model"

    def bind(self, network: Network) -> Declared:
        first = next(iter(network.params.values()))
        gap, begun = {"gap": first.new_zeros(())}, first.new_zeros((), dtype=torch.bool)
        memory = {"begun": begun} | add_prefix("last", network.params)
        return Declared(self, buffers=gap, memory=memory, sends=Send.like(gap, "client"))

    def loss(self, loss: Tensor, step: Step) -> Tensor:
        last, gap = entries_under("last", step.memory), step.own.buffers["gap"]
        shared = last | pick(step.loaded, last)
        of_shared, of_last = (step.loss_at(state) for state in (shared, last))
        gap.mul_(step.steps > 0).add_((of_shared - of_last).detach())
        return loss

    def end(self, client: Client) -> tuple[State, State]:
        begun = client.memory["begun"]
        gap = client.own.buffers["gap"] * begun / max(client.steps, 1)
        return {"begun": torch.ones_like(begun)} | add_prefix("last", client.params), {"gap": gap}

    def fold(self, server: Server) -> Folded:
        weights = self._weigh(server)
        kept = {
            each.client: torch.tensor(weight, dtype=torch.float64)
            for each, weight in zip(server.received, weights, strict=True)
        }
        entries = weighted_mean([each.entries for each in server.received], weights)
        return Folded(entries=entries, kept=server.kept | kept)

    def _weigh(self, server: Server) -> list[float]:
        """Return the participants' weights, which sum to one."""
        clients, gaps = len(server.received), [float(upload["gap"]) for upload in server.uploads]
        largest = max(map(abs, gaps))
        left = max(0.0, 1 - server.before.round / self.rounds) if self.rounds else 1.0
        step = self.step_size * left / clients / largest if largest else 0.0
        before = [float(server.kept.get(each.client, 1 / clients)) for each in server.received]
        moved = [min(max(weight + step * gap, 0.0), 1.0) for weight, gap in zip(before, gaps, strict=True)]
        return [weight / sum(moved) for weight in moved] if sum(moved) else [1 / clients] * clients


@method
def feddg_ga(base: Method, *, step_size: float = 0.2, rounds: int | None = None) -> Method:
    """Adjust the weights of the clients of ``base`` by their generalization gaps.

    ``step_size``: change of the weight with the largest gap, times the number of clients, in (0, 1]. ``rounds``: number
    of rounds over which the step decays to zero; None: constant.
    """
    allowed = 0 < step_size <= 1 and (rounds is None or rounds >= 1)
    require(allowed, f"step_size={step_size:g} and rounds={rounds}: give a number in (0, 1], and rounds of 1 or more")
    return base.with_rule(GeneralizationGap(step_size, rounds))
