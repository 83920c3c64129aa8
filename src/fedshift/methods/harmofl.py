"""HarmoFL: images get the federation's mean amplitudes, and each step follows the gradient at perturbed weights.

Jiang, Wang and Dou 2022 (AAAI), arXiv:2112.10775, by the authors' public code (med-air/HarmoFL). In the first
round each client measures the mean amplitudes of its images; the server averages them once, counting clients equally,
and from then on every image takes these amplitudes and keeps its phases. A local step at weights w, whose loss has the
gradient g, follows the gradient at w + alpha g / |g|, so that it seeks flat places, in which the mean of all clients'
models is still good (Foret et al. 2021, arXiv:2010.01412).

The code takes the amplitude of the zero frequency alone, which is the mean brightness of each channel
(``frequencies=0``), while the paper speaks of the spectrum. Its pixels are 0 and more; here the zero frequency counts
with its sign, so that shifted inputs are harmonized like these. In the code's first round each client normalizes by its
own first batch, where here images pass as they are until the server has averaged. Its networks have BatchNorm without
affine parameters or statistics; here BatchNorm is the network's, and its statistics see the weights before they are
perturbed.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from typing_extensions import override

from ..core.contexts import EndContext, FoldContext, Folded, LookContext, LossContext
from ..core.declarations import Bound, Reads, Send
from ..core.means import cast_to, stack_entry
from ..core.method import Method, method
from ..core.plan import Plan
from ..core.rule import Rule
from ..nn.amplitude_norm import AmplitudeNorm
from ..nn.surgery import replace_modules
from ..utils.errors import UsageError
from ..utils.state import State

TINY = 1e-12


@dataclass(frozen=True)
class NormalizeAmplitudes:
    """The surgery that puts an AmplitudeNorm before the network's first convolution."""

    frequencies: int

    def __call__(self, module: nn.Module) -> nn.Module:
        """Change ``module``; :class:`UsageError` where it has no convolution of images."""
        if any(isinstance(layer, AmplitudeNorm) for layer in module.modules()):
            raise UsageError("amplitudes are normalized twice: remove one of the two")
        first = next((layer for layer in module.modules() if isinstance(layer, _ConvNd)), None)
        if not isinstance(first, nn.Conv2d):
            raise UsageError(
                "amplitudes are those of images, which the model's first convolution (Conv2d) sees, and it has none: "
                "use another method"
            )

        def make(name: str, layer: nn.Module) -> nn.Module | None:  # noqa: ARG001
            if layer is not first:
                return None
            return nn.Sequential(AmplitudeNorm(first.in_channels, self.frequencies).to(first.weight), first)

        return replace_modules(module, make)


@dataclass(frozen=True)
class MeanAmplitude(Rule):
    """Amplitudes of the clients' first images, which the server averages once; ``layer``: the AmplitudeNorm's name."""

    observes: int
    layer: str = field(default="", repr=False)

    @property
    def entry(self) -> str:
        """Name of the entry that holds the amplitudes."""
        return f"{self.layer}.amplitude"

    @override
    def bind(self, plan: Plan) -> Bound:
        (name,) = (entry.name for entry in plan.entries if isinstance(entry.owner, AmplitudeNorm))
        bound = replace(self, layer=name.removesuffix(".amplitude"))
        return Bound(
            bound,
            reads=Reads(first=self.observes),
            sends=Send.like({"amplitude": plan.initial[name]}, "image" if self.observes == 1 else "client"),
            sets=frozenset({name}),
        )

    @override
    def look(self, client: LookContext) -> State:
        found: State = {}

        def measure(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            assert isinstance(module, AmplitudeNorm)
            mean = module.measure(*given).mean(dim=0)
            found["amplitude"] = torch.where(module.is_measured, module.amplitude, mean)

        client.run({self.layer: measure})
        return found

    @override
    def end(self, client: EndContext) -> tuple[State, State]:
        return {}, {"amplitude": torch.zeros_like(client.buffers[self.entry])} | client.memory

    @override
    def fold(self, server: FoldContext) -> Folded:
        before = server.server.shared[self.entry]
        mean = cast_to(stack_entry(server.uploads, "amplitude").mean(dim=0), before.dtype)
        return Folded({}, {self.entry: torch.where((before != 0).any(), before, mean)})


@dataclass(frozen=True)
class PerturbedWeights(Rule):
    """The gradient at weights that are ``alpha`` farther along the gradient."""

    alpha: float

    @override
    def loss(self, loss: Tensor, step: LossContext) -> Tensor:
        grads = step.gradient_at(step.params)
        norm = torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt()
        scale = self.alpha / (norm + TINY)
        there = {name: tensor + scale * grads[name] for name, tensor in step.params.items()}
        return loss - step.criterion(step.outputs, step.y) + step.loss_at(there)


@method
def harmofl(base: Method, *, alpha: float = 0.05, frequencies: int = 0, samples: int = 128) -> Method:
    """Normalize amplitudes of images and perturb weights in the local work of ``base``.

    Args:
        base: FedAvg unless given.
        alpha: Distance to the weights at which the gradient is taken; 0: none.
        frequencies: Low frequencies in each direction whose amplitudes are normalized; 0: the mean brightness alone.
        samples: Images of a client in the first round of which the mean amplitudes are measured, at most.

    """
    if not 0 <= alpha < float("inf"):
        raise UsageError(f"alpha={alpha:g}: give a finite distance, 0 (no perturbation) or more")
    if frequencies < 0:
        raise UsageError(f"frequencies={frequencies}: give 0 (brightness alone) or more")
    if samples < 1:
        raise UsageError(f"samples={samples}: give 1 or more")
    changed = base.with_surgery(NormalizeAmplitudes(frequencies)).with_rule(MeanAmplitude(samples))
    return changed.with_rule(PerturbedWeights(float(alpha))) if alpha else changed
