"""HarmoFL: images get the federation's mean amplitudes, and each step follows the gradient at perturbed weights.

Jiang, Wang and Dou 2022 (AAAI), arXiv:2112.10775, following the authors' public code (med-air/HarmoFL). In the first
round each client measures the mean amplitudes of its images; the server averages them once, counting clients equally,
and all later images use these amplitudes and keep their phases. A local step at weights w with gradient g follows the
gradient at w + alpha g / |g|, which leads to flat minima, in which the mean of all clients' models still performs well
(Foret et al. 2021, arXiv:2010.01412). BatchNorm's statistics are of unperturbed weights. Images are unchanged until the
server has averaged. A channel's zero frequency, its brightness, keeps its sign, so that shifted inputs fare alike.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ..core.means import cast_to, stack_entry
from ..core.method import Method, method, require
from ..core.rule import Client, Declared, Folded, Network, Rule, Send, Server, State, Step
from ..nn.amplitude_norm import AmplitudeNorm, find_first_convolution
from ..nn.surgery import replace_modules
from ..utils.errors import UsageError


@dataclass(frozen=True)
class NormalizeAmplitudes:
    """Surgery that inserts an AmplitudeNorm before the network's first convolution."""

    frequencies: int

    def __call__(self, module: nn.Module) -> nn.Module:
        """Change ``module``; raise :class:`UsageError` if its first convolution is not a Conv2d."""
        if any(isinstance(layer, AmplitudeNorm) for layer in module.modules()):
            raise UsageError("amplitudes are normalized twice: remove one of the two")
        first = find_first_convolution(module, "amplitudes are measured")
        normalized = nn.Sequential(AmplitudeNorm(first.in_channels, self.frequencies).to(first.weight), first)
        return replace_modules(module, lambda _, layer: normalized if layer is first else None)


class MeanAmplitude(Rule):
    """Amplitudes of the clients' first images, which the server averages once; ``entry``: the one that holds them."""

    observes: int
    entry: str = field(default="", repr=False)

    def bind(self, network: Network) -> Declared:
        (name,) = (entry.name for entry in network.entries if isinstance(entry.owner, AmplitudeNorm))
        return Declared(
            replace(self, entry=name),
            samples_before_work=self.observes,
            sends=Send.like({"amplitude": network.initial[name]}, "image" if self.observes == 1 else "client"),
            sets=frozenset({name}),
        )

    def start(self, client: Client) -> State:
        measured: State = {}

        def measure(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            assert isinstance(module, AmplitudeNorm)
            mean = module.measure(*inputs).mean(dim=0)
            measured["amplitude"] = torch.where(module.is_measured, module.amplitude, mean)

        client.run({self.entry.removesuffix(".amplitude"): measure})
        return measured

    def end(self, client: Client) -> tuple[State, State]:
        return {}, {"amplitude": torch.zeros_like(client.buffers[self.entry])} | client.memory

    def fold(self, server: Server) -> Folded:
        before = server.before.shared[self.entry]
        mean = cast_to(stack_entry(server.uploads, "amplitude").mean(dim=0), before.dtype)
        return Folded({}, {self.entry: torch.where((before != 0).any(), before, mean)})


class PerturbedWeights(Rule):
    """Uses the gradient at weights moved by a distance of ``alpha`` along the gradient."""

    alpha: float

    def loss(self, loss: Tensor, step: Step) -> Tensor:
        grads = step.gradient_at(step.params)
        norm = torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt()
        scale = self.alpha / (norm + 1e-12)
        perturbed = {name: tensor + scale * grads[name] for name, tensor in step.params.items()}
        return loss - step.criterion(step.outputs, step.y) + step.loss_at(perturbed)


@method
def harmofl(base: Method, *, alpha: float = 0.05, frequencies: int = 0, samples: int = 128) -> Method:
    """Normalize amplitudes of images and perturb weights in the local work of ``base``.

    ``alpha``: distance of the perturbed weights at which the gradient is computed; 0: none. ``frequencies``: number of
    low frequencies in each direction with normalized amplitudes; 0: only the mean brightness. ``samples``: maximum
    number of a client's images in the first round for measuring the mean amplitudes.
    """
    require(0 <= alpha < float("inf"), f"alpha={alpha:g}: give a finite distance, 0 (no perturbation) or more")
    require(frequencies >= 0, f"frequencies={frequencies}: give 0 (only brightness) or more")
    require(samples >= 1, f"samples={samples}: give 1 or more")
    changed = base.with_surgery(NormalizeAmplitudes(frequencies)).with_rule(MeanAmplitude(samples))
    return changed.with_rule(PerturbedWeights(alpha)) if alpha else changed
