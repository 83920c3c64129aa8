"""HBN: training normalizes by a mix of the batch's statistics and the federation's, in a part that each client learns.

Chen et al. 2025 (ICML), arXiv:2505.21877, by the authors' public code (Hongyao-Chen/HybridBN). In training mean and
variance are (1 - a) global + a batch, a = sigmoid(factor) by channel; factors are trained, sent and averaged, but each
client goes on from its own, having begun with the server's. Before local work client k runs the model that it received
once, in training mode, and sends the mixed mean m_k and variance v_k of each layer with the number n_k of samples, each
counted once. The server makes of them M = sum n_k m_k / N and V = sum n_k (v_k + (m_k - M)^2) / (N - 1), N = sum n_k,
toward which the global statistics move by the part ``momentum``.

The authors test with M and V in place of the global statistics, from one more exchange after the round. Here they are
those of the round itself, which were measured on the model before it: evaluation is one model behind, and no exchange
is added. Their code measures the first samples in the order of its files, of one or two classes where these are sorted;
here they are the first ones of the round's shuffled order. It clips gradients to a norm of 10, which is left out.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from typing_extensions import override

from ..core.contexts import EndContext, FoldContext, Folded, Hook, LookContext
from ..core.declarations import Bound, Reads, Send
from ..core.means import cast_to, stack_entry
from ..core.method import Method, method
from ..core.plan import Plan
from ..core.rule import Rule
from ..core.selection import hybrid_factors
from ..nn.hybrid_batch_norm import HybridBatchNorm
from ..nn.surgery import BatchNormToHybrid
from ..utils.errors import UsageError
from ..utils.state import State

KINDS = ("mean", "var")
GROUPS = ("global", "running")


@dataclass(frozen=True)
class Measurement(Rule):
    """Statistics that clients measure before local work, and the server pools.

    ``layers``: the names of the HybridBatchNorm layers with the dot behind them, which the network itself has not.
    """

    momentum: float
    observes: int
    layers: tuple[str, ...] = field(default=(), repr=False)

    @override
    def bind(self, plan: Plan) -> Bound:
        owned = [entry.name for entry in plan.entries if isinstance(entry.owner, HybridBatchNorm)]
        layers = tuple(name.removesuffix("running_mean") for name in owned if name.endswith("running_mean"))
        bound = replace(self, layers=layers)
        return Bound(
            bound,
            reads=Reads(first=self.observes),
            sends=Send.like(bound._blank(plan.initial), "image" if self.observes == 1 else "client"),
            sets=frozenset(f"{layer}{group}_{kind}" for layer in layers for group in GROUPS for kind in KINDS),
        )

    @override
    def look(self, client: LookContext) -> State:
        found: State = {}

        def note(layer: str) -> Hook:
            def measure(module: nn.Module, given: tuple[Tensor, ...]) -> None:
                assert isinstance(module, HybridBatchNorm)
                mixed = zip(KINDS, module.mix_statistics(*given), strict=True)
                found.update({f"{kind}/{layer}": tensor for kind, tensor in mixed})

            return measure

        client.run({layer.removesuffix("."): note(layer) for layer in self.layers})
        return found | {"samples": torch.tensor(client.samples, device=next(iter(found.values())).device)}

    @override
    def end(self, client: EndContext) -> tuple[State, State]:
        return {}, self._blank(client.buffers) | client.memory

    def _blank(self, rest: State) -> State:
        """Return an upload of no samples, which a client that has not begun would send."""
        kinds = [(kind, layer) for layer in self.layers for kind in KINDS]
        blank = {f"{kind}/{layer}": torch.zeros_like(rest[f"{layer}running_{kind}"]) for kind, layer in kinds}
        return blank | {"samples": torch.zeros((), dtype=torch.int64, device=next(iter(blank.values())).device)}

    @override
    def fold(self, server: FoldContext) -> Folded:
        counts_K1, previous = stack_entry(server.uploads, "samples")[:, None], server.server.shared
        made, total = State(), counts_K1.sum()
        for layer in self.layers:
            means_KC, vars_KC = (stack_entry(server.uploads, f"{kind}/{layer}") for kind in KINDS)
            mean_C = (counts_K1 * means_KC).sum(dim=0) / total
            spread_KC = vars_KC + (means_KC - mean_C).square()
            var_C = (counts_K1 * spread_KC).sum(dim=0) / (total - 1).clamp(min=1)
            for kind, pooled_C in zip(KINDS, (mean_C, var_C), strict=True):
                before_C = previous[f"{layer}global_{kind}"]
                moved_C = self.momentum * pooled_C + (1 - self.momentum) * before_C.double()
                made[f"{layer}global_{kind}"] = cast_to(moved_C, before_C.dtype)
                made[f"{layer}running_{kind}"] = cast_to(pooled_C, before_C.dtype)
        return Folded({}, made)


@method
def hbn(base: Method, *, momentum: float = 0.002, samples: int = 64) -> Method:
    """Replace BatchNorm in the network of ``base`` by normalization with a mix of batch and global statistics.

    Args:
        base: FedAvg unless given.
        momentum: Part of the way that the global statistics move to those of a round, in (0, 1].
        samples: Samples of a client's round on which it measures statistics, as many as the round has at most.

    """
    if not 0 < momentum <= 1:
        raise UsageError(f"momentum={momentum:g}: give a number in (0, 1], 1 for a round's statistics alone")
    if samples < 1:
        raise UsageError(f"samples={samples}: give 1 or more")
    changed = base.with_surgery(BatchNormToHybrid()).with_rule(Measurement(float(momentum), samples))
    scope = replace(base.scope, load=base.scope.load & ~hybrid_factors, begin=hybrid_factors)
    return replace(changed, scope=scope)
