"""GReg: predictions with the statistics of a batch must agree with those under the federation's BatchNorm statistics.

"Improving Batch Normalization in Federated Learning with Non-IID Features", openreview.net/forum?id=225qfh0CoD, by its
abstract and its public reviews; neither its text nor code was at hand. Clients train with the statistics of batches,
which differ where data look different, but the shared model is used with their average. Each batch therefore passes the
network twice: as always, with predictions p, and with BatchNorm normalizing by the running statistics that the server
sent, with predictions q. The loss includes lam (KL(p, q) + KL(q, p)) / 2, the mean over the batch. Gradients flow
through both passes. The second has no dropout and changes no statistics.
"""

from dataclasses import field, replace

from torch import Tensor

from ..core.method import Method, method, require
from ..core.rule import Declared, Network, Rule, Step
from ..core.selection import norm_statistics
from ..utils.errors import UsageError
from ..utils.state import pick


class Consistency(Rule):
    """The divergence of strength ``lam`` of predictions with loaded statistics; ``statistics``: their entries."""

    lam: float
    statistics: frozenset[str] = field(default=frozenset(), repr=False)
    needs_classes = "GReg compares probabilities of classes"

    def bind(self, network: Network) -> Declared:
        statistics = frozenset(each.name for each in network.entries if norm_statistics(each))
        if not statistics:
            lost = f"{network.norm_replacers} replaces: remove one of the two"
            why = lost if network.norm_replacers else "the model does not have: use another model"
            raise UsageError(f"GReg compares statistics of BatchNorm, which {why}")
        if kept := statistics - network.loaded:
            raise network.refuse_kept("GReg compares with statistics that clients share", kept)
        return Declared(replace(self, statistics=statistics))

    def loss(self, loss: Tensor, step: Step) -> Tensor:
        shared = step.run(step.params | pick(step.loaded, self.statistics), training=False)
        log_p, log_q = (outputs.log_softmax(dim=1) for outputs in (step.outputs, shared.outputs))
        return loss + self.lam * ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(dim=1).mean() / 2


@method
def greg(base: Method, *, lam: float = 1.0) -> Method:
    """Bring predictions of ``base`` on batches close to those under the shared BatchNorm statistics.

    ``lam``: strength of the divergence.
    """
    require(0 <= lam < float("inf"), f"lam={lam:g}: give a finite strength, 0 (no divergence) or more")
    return base.with_rule(Consistency(lam))
