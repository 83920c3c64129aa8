"""HBN: training normalizes by a mix of the batch's and the federation's statistics, with weights that clients learn.

Chen et al. 2025 (ICML), arXiv:2505.21877, following the authors' public code (Hongyao-Chen/HybridBN). In training, mean
and variance are (1 - a) global + a batch, a = sigmoid(factor) by channel; factors are trained, sent and averaged, but
each client loads the server's factors only before its first round and keeps its own afterwards. Before local work,
client k runs the received model once in training mode, and sends the mixed mean m_k and variance v_k of each layer with
the number n_k of distinct samples. The server computes M = sum n_k m_k / N and V = sum n_k (v_k + (m_k - M)^2) / (N -
1), N = sum n_k, and moves the global statistics toward them by the fraction ``momentum``. Evaluation uses M and V,
which the authors measure in an exchange after the round, and here lag by one round.
"""

from dataclasses import field, replace
from functools import partial

import torch
from torch import Tensor, nn

from ..core.means import cast_to, stack_entry
from ..core.method import Method, method, require
from ..core.rule import Client, Declared, Folded, Network, Rule, Send, Server, State
from ..core.selection import hybrid_factors
from ..nn.hybrid_batch_norm import HybridBatchNorm
from ..nn.surgery import BatchNormToHybrid

KINDS = ("mean", "var")
GROUPS = ("global", "running")
GROUPS = ("global", "running")


class Measurement(Rule):
    """Statistics that clients measure before local work, and the server pools.

    ``layers``: names of the HybridBatchNorm layers with a final dot (empty for the network itself).
    """

    momentum: float
    observes: int
    layers: tuple[str, ...] = field(default=(), repr=False)

    def bind(self, network: Network) -> Declared:
        owned = [entry.name for entry in network.entries if isinstance(entry.owner, HybridBatchNorm)]
        layers = tuple(name.removesuffix("running_mean") for name in owned if name.endswith("running_mean"))
        bound = replace(self, layers=layers)
        return Declared(
            bound,
            samples_before_work=self.observes,
            sends=Send.like(bound._blank(network.initial), "image" if self.observes == 1 else "client"),
            sets=frozenset(f"{layer}{group}_{kind}" for layer in layers for group in GROUPS for kind in KINDS),
        )

    def start(self, client: Client) -> State:
        measured: State = {}

        def measure(layer: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            assert isinstance(module, HybridBatchNorm)
            mixed = zip(KINDS, module.mix_statistics(*inputs), strict=True)
            measured.update({f"{kind}/{layer}": tensor for kind, tensor in mixed})

        client.run({layer.removesuffix("."): partial(measure, layer) for layer in self.layers})
        return measured | {"samples": torch.tensor(client.samples, device=next(iter(measured.values())).device)}

    def end(self, client: Client) -> tuple[State, State]:
        return {}, self._blank(client.buffers) | client.memory

    def _blank(self, rest: State) -> State:
        """Return the upload for zero samples, in the format of every upload."""
        kinds = [(kind, layer) for layer in self.layers for kind in KINDS]
        blank = {f"{kind}/{layer}": torch.zeros_like(rest[f"{layer}running_{kind}"]) for kind, layer in kinds}
        return blank | {"samples": torch.zeros((), dtype=torch.int64, device=next(iter(blank.values())).device)}

    def fold(self, server: Server) -> Folded:
        counts_K1, previous = stack_entry(server.uploads, "samples")[:, None], server.before.shared
        pooled, total = State(), counts_K1.sum()
        for layer in self.layers:
            means_KC, vars_KC = (stack_entry(server.uploads, f"{kind}/{layer}") for kind in KINDS)
            mean_C = (counts_K1 * means_KC).sum(dim=0) / total
            spread_KC = vars_KC + (means_KC - mean_C).square()
            var_C = (counts_K1 * spread_KC).sum(dim=0) / (total - 1).clamp(min=1)
            for kind, pooled_C in zip(KINDS, (mean_C, var_C), strict=True):
                before_C = previous[f"{layer}global_{kind}"]
                moved_C = self.momentum * pooled_C + (1 - self.momentum) * before_C.double()
                pooled[f"{layer}global_{kind}"] = cast_to(moved_C, before_C.dtype)
                pooled[f"{layer}running_{kind}"] = cast_to(pooled_C, before_C.dtype)
        return Folded({}, pooled)


@method
def hbn(base: Method, *, momentum: float = 0.002, samples: int = 64) -> Method:
    """Replace BatchNorm in the network of ``base`` by normalization with a mix of batch and global statistics.

    ``momentum``: fraction by which the global statistics move toward a round's, in (0, 1]. ``samples``: maximum number
    of samples in a client's round on which it measures statistics.
    """
    require(0 < momentum <= 1, f"momentum={momentum:g}: give a number in (0, 1], 1 for only the round's statistics")
    require(samples >= 1, f"samples={samples}: give 1 or more")
    changed = base.with_surgery(BatchNormToHybrid()).with_rule(Measurement(momentum, samples))
    scope = replace(base.scope, load=base.scope.load & ~hybrid_factors, begin=hybrid_factors)
    return replace(changed, scope=scope)
