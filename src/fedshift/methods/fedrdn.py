"""FedRDN: each training image is normalized by the channels' mean and deviation of a client that is drawn for it.

Yan, Fu, Li, Xie, Ma, Yang and Zhu 2025 (CVPR), arXiv:2306.09363, by its abstract and the authors' public code
(IAMJackYan/FedRDN). Client k sends m_k and s_k, the means over its images of each image's mean and (unbiased)
deviation by channel, and receives all clients' values. In training an image x becomes (x - m_j) / s_j, where client j
is drawn among all for each image and step; in evaluation, client k normalizes by (x - m_k) / s_k.

That code draws once per batch, separately for mean and deviation, reads all of a client's images, and exchanges values
before training. Here they come with every upload: images of the first round are normalized by the client's own values,
later ones by those of the last round's clients. A layer before the first convolution always normalizes by the client's
values, which it keeps, and a batch is shifted and scaled so that the result is normalized by the drawn client's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ..core.means import cast_to, stack_entry
from ..core.method import Method, method, require
from ..core.rule import Client, Declared, Folded, Network, Rule, Send, Server, State, Step
from ..core.selection import of_type
from ..nn.amplitude_norm import AmplitudeNorm
from ..nn.dropout import draw_bits
from ..nn.surgery import replace_modules
from ..utils.errors import UsageError

KINDS = ("mean", "deviation")


class InputScaling(nn.Module):
    """Subtracts ``mean [C]`` from the channels of inputs ``[B, C, ...]`` and divides them by ``deviation [C]``."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("deviation", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return inputs of the same shape."""
        return (x - _along(self.mean, x)) / _along(self.deviation, x)


def _along(values: Tensor, x: Tensor) -> Tensor:
    """Return values of channels ``[..., C]`` in the shape that applies them to ``x [B, C, ...]``."""
    return values.reshape(*values.shape, *[1] * (x.ndim - 2))


@dataclass(frozen=True)
class ScaleInputs:
    """The surgery that puts an InputScaling before the network's first convolution."""

    def __call__(self, module: nn.Module) -> nn.Module:
        """Change ``module``; :class:`UsageError` where it has no convolution."""
        if any(isinstance(layer, AmplitudeNorm) for layer in module.modules()):
            raise UsageError("images are normalized before their amplitudes are: write harmofl+fedrdn")
        first = next((layer for layer in module.modules() if isinstance(layer, _ConvNd)), None)
        if first is None:
            raise UsageError(
                "fedrdn normalizes the channels that a model's first convolution sees, but the model has none"
            )
        scaling = InputScaling(first.in_channels).to(first.weight)
        return replace_modules(module, lambda _, layer: nn.Sequential(scaling, first) if layer is first else None)


class ClientStatistics(Rule):
    """Statistics of the clients' images, sent with every upload; ``layer``: the InputScaling's name."""

    samples: int
    layer: str = field(default="", repr=False)
    personalizes = "start"
    buffers_alone = True
    needs_shared = "FedRDN normalizes by statistics of clients with which a model is shared"
    needs_one_input = "FedRDN normalizes the channels of images"

    def bind(self, network: Network) -> Declared:
        name = next(entry.name for entry in network.entries if isinstance(entry.owner, InputScaling))
        zeros_C = torch.zeros_like(network.initial[name])
        blank = dict.fromkeys(KINDS, zeros_C)
        return Declared(
            replace(self, layer=name.rpartition(".")[0]),
            memory=blank,  # no deviation is 0 once measured
            server=dict.fromkeys(KINDS, zeros_C[None]),
            growing=dict.fromkeys(KINDS, (0,)),
            samples_before_work=self.samples,
            draws=True,
            sends=Send.like(blank, "image" if self.samples == 1 else "client", passed_on=True),
        )

    def start(self, client: Client) -> State:
        if client.memory["deviation"].any():
            return client.memory
        seen: list[Tensor] = []
        client.run(dict.fromkeys(("", self.layer), lambda _, inputs: seen.append(inputs[0])))
        x, scaled = seen[0], seen[-1]
        if not torch.equal(x, scaled):
            raise UsageError(
                "fedrdn normalizes the inputs of the model, but its first convolution sees them changed: move what "
                "changes them into the data, or use another method"
            )
        pixels, like = x.flatten(2), client.memory["mean"]
        deviation_C = pixels.std(dim=2).mean(dim=0).to(like.dtype)
        return {
            "mean": pixels.mean(dim=(0, 2)).to(like.dtype),
            "deviation": torch.where(deviation_C > 0, deviation_C, 1.0),  # a channel that never varies stays
        }

    def personalize(self, state: State, client: Client) -> State:
        measured = client.memory["deviation"] > 0
        own = client.memory | {"deviation": torch.where(measured, client.memory["deviation"], 1.0)}
        return state | {f"{self.layer}.{kind}": own[kind] for kind in KINDS}

    def batch(self, x: Tensor, y: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        drawn_B = draw_bits(step.key, 0, len(x)) % len(step.server["mean"])
        mean, deviation = (_along(step.server[kind].index_select(0, drawn_B), x) for kind in KINDS)
        own_mean, own_deviation = (_along(step.buffers[f"{self.layer}.{kind}"], x) for kind in KINDS)
        drawn = own_mean + own_deviation * (x - mean) / torch.where(deviation > 0, deviation, 1.0)
        return torch.where(deviation > 0, drawn, x), y

    def end(self, client: Client) -> tuple[State, State]:
        return client.memory, client.memory

    def fold(self, server: Server) -> Folded:
        dtype = server.memory["mean"].dtype
        return Folded({kind: cast_to(stack_entry(server.uploads, kind), dtype) for kind in KINDS})


@method
def fedrdn(base: Method, *, samples: int = 256) -> Method:
    """Normalize training images of ``base`` by the statistics of a client that is drawn for each, and others by own.

    ``samples``: images of a client on which it measures its statistics, as many as its first pass has at most.
    """
    require(samples >= 1, f"samples={samples}: give 1 or more")
    changed = base.with_surgery(ScaleInputs()).keep_on_client(of_type(InputScaling))
    return changed.with_rule(ClientStatistics(samples))
