"""FedProto: features are attracted to the mean features of their class over all clients (prototypes).

Tan et al. 2022, arXiv:2105.00243; formulas from the authors' public code (yuetan031/FedProto). A client's prototype of
a class is the mean feature of its samples of that class, as seen in the last epoch of a round; the server averages the
clients' prototypes, weighted by their numbers of samples (the code uses the plain mean). As in that code, the loss
includes lam times the mean square of the difference between each feature and the prototype of its class; a class
without a prototype adds nothing. The classifier predicts; that code also evaluates predictions by the nearest one.
"""

import torch
from torch import Tensor, nn

from ..core.means import stack_entry
from ..core.method import Method, method, require
from ..core.rule import Client, Declared, Folded, Network, Rule, Send, Server, State, Step
from ..core.selection import find_classifier


class Prototypes(Rule):
    """Attracts features to class prototypes, which are averaged over clients, with strength ``lam``."""

    lam: float
    needs_classes = "prototypes are mean features of classes"

    def bind(self, network: Network) -> Declared:
        classifier = find_classifier(network.entries, self.source_method)
        zeros_KD = torch.zeros_like(classifier.weight)
        counts_K = zeros_KD[:, 0].clone()
        sent = Send.like({"prototypes": zeros_KD}, "class", passed_on=True)  # if only one client has the class
        return Declared(
            self,
            buffers={"sums": zeros_KD, "counts": counts_K},
            memory={"samples": zeros_KD.new_zeros(())},
            server={"prototypes": zeros_KD, "known": counts_K},
            targets=True,
            features="last",
            sends=sent | Send.like({"counts": counts_K}, "class"),
        )

    def start(self, client: Client) -> State:
        return {"samples": torch.full_like(client.memory["samples"], len(client.targets))}

    def loss(self, loss: Tensor, step: Step) -> Tensor:
        z_BD, (sums_KD, counts_K) = step.features, (step.own.buffers["sums"], step.own.buffers["counts"])
        within_epoch = (counts_K.sum() < step.memory["samples"]).to(z_BD.dtype) * (step.steps > 0)
        member_BK = nn.functional.one_hot(step.y, len(counts_K)).to(z_BD.dtype)
        sums_KD.mul_(within_epoch).add_(member_BK.T @ z_BD.detach())
        counts_K.mul_(within_epoch).add_(member_BK.sum(0))
        return loss + self.lam * self.pull(z_BD, step.y, step.server)

    def pull(self, z_BD: Tensor, y_B: Tensor, memory: State) -> Tensor:
        """Return the loss of features ``z_BD`` of classes ``y_B``, given the server's memory."""
        square_B = (z_BD - memory["prototypes"][y_B]).square().mean(dim=1)
        return (memory["known"][y_B] * square_B).mean()

    def end(self, client: Client) -> tuple[State, State]:
        sums_KD, counts_K = client.own.buffers["sums"], client.own.buffers["counts"]
        return client.memory, {"prototypes": sums_KD / counts_K.clamp(min=1)[:, None], "counts": counts_K}

    def fold(self, server: Server) -> Folded:
        memory = server.memory
        counts_NK, means_NKD = (stack_entry(server.uploads, name) for name in ("counts", "prototypes"))
        total_K = counts_NK.sum(dim=0)
        mean_KD = (counts_NK[:, :, None] * means_NKD).sum(dim=0) / total_K.clamp(min=1)[:, None]
        present_K = total_K > 0
        before_KD = memory["prototypes"]
        prototypes = torch.where(present_K[:, None], mean_KD.to(before_KD.dtype), before_KD)
        return Folded({"prototypes": prototypes, "known": torch.where(present_K, 1.0, memory["known"])})


@method
def fedproto(base: Method, *, lam: float = 1.0) -> Method:
    """Attract the features of ``base`` to the class prototypes of all clients with strength ``lam``.

    On FedAvg, models are averaged as well; ``fedproto+single`` is the paper's method, which exchanges only prototypes.
    """
    require(lam >= 0, f"lam={lam:g} is negative; it must be 0 (no attraction) or more")
    return base.with_rule(Prototypes(lam))
