"""FedFA: feature maps get other means and deviations, from Gaussians as wide as clients, and the federation, differ.

Zhou and Konukoglu 2023 (ICLR), arXiv:2301.12995, by its abstract, memory of its equations and the authors' public code
(tfzhou/FedFA). In training each layer acts with probability p on a batch. With mean m and deviation s of each channel
of each image, x becomes s' (x - m) / s + m', where m' ~ N(m, V_m) and s' ~ N(s, V_s) are drawn for each image. V_m =
(1 + g_m) var(m), var over the batch, and g_m = C k / sum(k) over the C channels with k = 1 / (1 + 1 / v_m), v_m being
the variance over clients of their moving mean of m; V_s likewise. The moving means go momentum of the way to the
batch's in each step in which the layer acts; they are averaged with the model and go on from there, as in that code,
while they restart in each round in the paper.

That code takes v over clients and channels at once, so that g is 1 for every channel and clients' differences have no
effect; here v is each channel's. Its variances of a batch are unbiased, here they are the paper's. It stands behind
five stages of AlexNet, which is in front of the next convolution and of the pooling that ends the maps, as here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ..core.means import cast_to, stack_entry
from ..core.method import Method, method, require
from ..core.rule import Declared, Folded, Network, Rule, Server, State
from ..nn.dropout import Keyed, draw_normal, draw_uniform, take_draws
from ..nn.surgery import replace_modules
from ..utils.errors import UsageError

DRAWS = 5
"""Numbers of draws that a layer takes."""
EPS = 1e-6
KINDS = ("mean", "std")


class FeatureAugmentation(Keyed):
    """Samples new means and deviations for channels of feature maps ``[B, C, ...]`` in training with probability ``p``.

    ``running_mean`` and ``running_std [C]`` are moving means of both, ``var_mean`` and ``var_std [C]`` their variances
    over clients.
    """

    var_mean: Tensor

    def __init__(self, channels: int, p: float, momentum: float) -> None:
        super().__init__()
        self.p, self.momentum = p, momentum
        self.register_buffer("running_mean", torch.zeros(channels))
        for name in ("running_std", "var_mean", "var_std"):
            self.register_buffer(name, torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return maps of the same shape."""
        if x.ndim < 3:
            raise UsageError(
                f"fedfa changes feature maps [B, C, ...], and a layer that it was asked for reads {list(x.shape)}: "
                "name others (layers=)"
            )
        if not self.training:
            return x
        key, first = take_draws(self, DRAWS)
        acts = draw_uniform(key, first, 1) < self.p
        maps = x.flatten(2).to(self.var_mean.dtype)
        mean_BC, std_BC = maps.mean(dim=2), (maps.var(dim=2, correction=0) + EPS).sqrt()
        moved = []
        for at, (kind, value_BC) in enumerate(zip(KINDS, (mean_BC, std_BC), strict=True)):
            running_C = getattr(self, f"running_{kind}")
            running_C += torch.where(acts, self.momentum * (value_BC.detach().mean(dim=0) - running_C), 0.0)
            kernel_C = 1 / (1 + 1 / (getattr(self, f"var_{kind}") + EPS))
            fused_C = (1 + len(kernel_C) * kernel_C / kernel_C.sum()) * (value_BC.var(dim=0, correction=0) + EPS)
            noise_BC = draw_normal(key, first + 1 + 2 * at, value_BC.shape).to(value_BC.dtype)
            moved.append(value_BC + noise_BC * fused_C.sqrt())
        made = moved[1][..., None] * (maps - mean_BC[..., None]) / std_BC[..., None] + moved[0][..., None]
        return torch.where(acts, made.reshape(x.shape).to(x.dtype), x)


@dataclass(frozen=True)
class AugmentFeatures:
    """Surgery that inserts a FeatureAugmentation in front of ``layers``; None: see :func:`fedfa`."""

    p: float
    momentum: float
    layers: str | None

    def __call__(self, module: nn.Module) -> nn.Module:
        """Change ``module``; :class:`UsageError` where it has no such layers behind a convolution."""
        chosen: dict[nn.Module, nn.Module] = {}
        like, ended, named = None, False, dict(module.named_modules())
        for name, layer in named.items():
            if like is not None and self._is_chosen(name, layer, ended=ended):
                channels = layer.in_channels if isinstance(layer, _ConvNd) else like.out_channels
                augmentation = FeatureAugmentation(channels, self.p, self.momentum).to(like.weight)
                chosen[layer] = nn.Sequential(augmentation, layer)
            ended = not isinstance(layer, _ConvNd) and (ended or _ends_maps(layer))
            like = layer if isinstance(layer, _ConvNd) else like
        if not chosen:
            near = get_close_matches(self.layers or "", filter(None, named), cutoff=0.3)
            raise UsageError(
                f"fedfa changes feature maps in front of layers behind the first convolution, and of these none "
                f"{f'matches layers={self.layers!r}' if self.layers else 'is another convolution or pooling'}"
                f"{'; near it are ' + ', '.join(near) if near else ''}: name layers of the model (layers=)"
            )
        return replace_modules(module, lambda _, layer: chosen.get(layer))

    def _is_chosen(self, name: str, layer: nn.Module, *, ended: bool) -> bool:
        if self.layers is not None:
            return fnmatchcase(name, self.layers)
        return isinstance(layer, _ConvNd) or (_ends_maps(layer) and not ended)


def _ends_maps(layer: nn.Module) -> bool:
    """Return whether ``layer`` makes a vector of feature maps, or maps of a fixed size."""
    return isinstance(layer, nn.AdaptiveAvgPool2d | nn.AdaptiveAvgPool3d | nn.Flatten)


class SharedVariances(Rule):
    """The variances over clients, which the server computes; ``layers``: names of layers with the dot behind them."""

    layers: tuple[str, ...] = field(default=(), repr=False)

    def bind(self, network: Network) -> Declared:
        owned = [entry.name for entry in network.entries if isinstance(entry.owner, FeatureAugmentation)]
        layers = tuple(name.removesuffix("var_mean") for name in owned if name.endswith("var_mean"))
        sets = frozenset(f"{layer}var_{kind}" for layer in layers for kind in KINDS)
        return Declared(replace(self, layers=layers), entries=True, sets=sets)

    def fold(self, server: Server) -> Folded:
        sent, made = [each.entries for each in server.received], State()
        for layer in self.layers:
            for kind in KINDS:
                var_C = stack_entry(sent, f"{layer}running_{kind}").var(dim=0, correction=0)
                made[f"{layer}var_{kind}"] = cast_to(var_C, server.before.shared[f"{layer}var_{kind}"].dtype)
        return Folded({}, made)


@method
def fedfa(base: Method, *, p: float = 0.5, momentum: float = 0.01, layers: str | None = None) -> Method:
    """Change mean and deviation of feature maps in the local work of ``base`` as clients and federation differ.

    ``p``: probability that a layer acts on a batch, in [0, 1]. ``momentum``: fraction by which moving means move toward
    a batch's, in (0, 1]. ``layers``: layers in front of which maps are changed, a pattern such as
    ``"layer[23].*.conv1"``; None: all convolutions but the first, and the pooling or flattening that ends the maps.
    """
    require(0 <= p <= 1, f"p={p:g}: give a probability in [0, 1]")
    require(0 < momentum <= 1, f"momentum={momentum:g}: give a number in (0, 1], 1 for only the last batch's")
    return base.with_surgery(AugmentFeatures(p, momentum, layers)).with_rule(SharedVariances())
