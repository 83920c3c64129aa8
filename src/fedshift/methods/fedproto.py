"""FedProto: features are pulled to the mean features of their class over all clients, the class's prototype.

Tan et al. 2022, arXiv:2105.00243; formulas from the authors' public code (yuetan031/FedProto). A client's prototype of
a class is the mean feature of its samples of that class, as met in its last pass of a round; the server takes the mean
of the clients' prototypes by their numbers of samples, where that code takes the plain mean. The loss gains lam times
the mean square of the difference between each feature and its class's prototype, as in that code; a class that has none
yet adds nothing. In the paper nothing but prototypes travels, and models stay on clients: that is ``fedproto+single``.
On FedAvg, models are averaged as well. Predictions are the classifier's;
that code measures those by the nearest prototype, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from ..core.declarations import PlannedEntries, Send
from ..core.method import Method, method
from ..core.requirements import Requirements
from ..core.rule import Rule, RuleContext
from ..core.selection import Entry, find_classifier
from ..utils.errors import UsageError
from ..utils.state import State


@dataclass(frozen=True)
class Prototypes(Rule):
    """A pull of strength ``lam`` to class prototypes, which are averaged over clients.

    ``zeros``: for each class and feature, ``[K, D]``.
    """

    lam: float
    zeros: Tensor | None = field(default=None, repr=False, compare=False)
    features = "last"
    requires = Requirements(unique=True, classes="prototypes are mean features of classes")

    @property
    def _blank(self) -> Tensor:
        assert self.zeros is not None
        return self.zeros

    @override
    def bind(self, entries: tuple[Entry, ...]) -> Self:
        classifier = find_classifier(entries, self.source_method)
        return replace(self, zeros=torch.zeros_like(classifier.weight, requires_grad=False))

    @override
    def client_memory(self, params: State, rest: State) -> State:
        return {"samples": self._blank.new_zeros(())}

    @override
    def read_targets(self, memory: State, targets: Tensor) -> State:
        return {"samples": torch.full_like(memory["samples"], len(targets))}

    @override
    def extra_entries(self, params: State, rest: State) -> tuple[State, State]:
        return {}, {"sums": self._blank.clone(), "counts": self._blank[:, 0].clone()}

    @override
    def server_memory(self, initial: State) -> State:
        return {"prototypes": self._blank.clone(), "known": self._blank[:, 0].clone()}

    @override
    def transform_loss(self, loss: Tensor, params: State, context: RuleContext) -> Tensor:
        assert context.forward_pass is not None
        z_BD, y_B = context.forward_pass.features, context.forward_pass.y
        assert z_BD is not None
        sums_KD, counts_K = context.extra_entries["sums"], context.extra_entries["counts"]
        within_pass = (counts_K.sum() < context.memory["samples"]).to(z_BD.dtype) * (context.steps > 0)
        member_BK = nn.functional.one_hot(y_B, len(self._blank)).to(z_BD.dtype)
        sums_KD.mul_(within_pass).add_(member_BK.T @ z_BD.detach())
        counts_K.mul_(within_pass).add_(member_BK.sum(0))
        return loss + self.lam * self.pull(z_BD, y_B, context.server_memory)

    def pull(self, z_BD: Tensor, y_B: Tensor, memory: State) -> Tensor:
        """Return the loss of features ``z_BD`` of classes ``y_B``, given the server's memory."""
        square_B = (z_BD - memory["prototypes"][y_B]).square().mean(dim=1)
        return (memory["known"][y_B] * square_B).mean()

    @override
    def sends(self, plan: PlannedEntries) -> Mapping[str, Send]:
        prototypes = Send.like({"prototypes": self._blank}, "class", passed_on=True)  # where one client has the class
        return prototypes | Send.like({"counts": self._blank[:, 0]}, "class")

    @override
    def finalize(self, params: State, context: RuleContext) -> tuple[State, State]:
        counts_K = context.extra_entries["counts"]
        means_KD = context.extra_entries["sums"] / counts_K.clamp(min=1)[:, None]
        return context.memory, {"prototypes": means_KD, "counts": counts_K}

    @override
    def aggregate_memory(self, memory: State, uploads: Sequence[State], shares: Sequence[float]) -> State:
        counts_NK = torch.stack([upload["counts"].double() for upload in uploads])
        means_NKD = torch.stack([upload["prototypes"].double() for upload in uploads])
        total_K = counts_NK.sum(dim=0)
        mean_KD = (counts_NK[:, :, None] * means_NKD).sum(dim=0) / total_K.clamp(min=1)[:, None]
        met_K = total_K > 0
        return {
            "prototypes": torch.where(met_K[:, None], mean_KD.to(self._blank.dtype), memory["prototypes"]),
            "known": torch.where(met_K, torch.ones_like(memory["known"]), memory["known"]),
        }


@method
def fedproto(base: Method, *, lam: float = 1.0) -> Method:
    """Pull the features of ``base`` to class prototypes of all clients with strength ``lam``.

    On FedAvg, models are averaged as well; ``fedproto+single`` is the paper's, in which prototypes alone travel.
    """
    if lam < 0:
        raise UsageError(f"lam={lam:g} is negative; it must be 0 (no pull) or more")
    return base.with_rule(Prototypes(lam))
