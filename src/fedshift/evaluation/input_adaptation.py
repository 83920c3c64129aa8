"""Models adapted to a client's inputs, without labels: BatchNorm statistics, Tent, SAR, distances of statistics.

``policies`` cites the sources. Only BatchNorm layers are in training mode, so that dropout stays off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..core.plan import Plan, compute_outputs, to_memory_format
from ..core.rule import Hook
from ..core.work import Work
from ..data.samples import Samples
from ..engines.engine import Diverged
from ..utils.random_streams import stream
from ..utils.state import State, clone
from .metrics import BATCH
from .policies import list_norm_parameters

LOWER = 0.75
"""Fraction of normalization layers, from the first, that ``sar`` trains: its authors skip the last of four stages."""


class Moments:
    """Mean and variance of each channel over all batches ``[B, C, ...]`` together (Chan et al. 1979)."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, torch.zeros(()), torch.zeros(())

    def __call__(self, _: nn.Module, given: tuple[Tensor, ...]) -> None:
        """Accumulate a layer's inputs."""
        x = given[0].detach().double()
        count, together = x.numel() // x.shape[1], self.count + x.numel() // x.shape[1]
        variance, mean = torch.var_mean(x, dim=[0, *range(2, x.ndim)], correction=0)
        gap = mean - self.mean
        self.squares = self.squares + variance * count + gap.square() * (self.count * count / together)
        self.mean, self.count = self.mean + gap * (count / together), together

    @property
    def variance(self) -> Tensor:
        """Unbiased variance; 0 of a single value."""
        return self.squares / max(1, self.count - 1)


def list_batch_norms(plan: Plan) -> dict[str, _BatchNorm]:
    """Return the BatchNorm layers that have statistics, by name."""
    layers = {name: layer for name, layer in plan.module.named_modules() if isinstance(layer, _BatchNorm)}
    return {name: layer for name, layer in layers.items() if layer.running_mean is not None}


def name_statistics(layer: str) -> tuple[str, str]:
    """Return the entries of mean and variance of the BatchNorm layer called ``layer``."""
    return f"{layer}.running_mean".lstrip("."), f"{layer}.running_var".lstrip(".")


@contextmanager
def _observe(plan: Plan, hooks: dict[str, list[Hook]], *, training: bool) -> Iterator[None]:
    """Call ``hooks`` with the inputs of each BatchNorm layer in this block; ``training``: these layers' mode."""
    plan.module.eval()
    layers = list_batch_norms(plan)
    for layer in layers.values():
        layer.training = training  # not that of a dropout or an activation which the layer may hold
    handles = [layers[name].register_forward_pre_hook(hook) for name, each in hooks.items() for hook in each]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def iterate_inputs(plan: Plan, data: Samples, batch_size: int, purpose: str) -> Iterator[Tensor]:
    """Yield all inputs in batches, in a random order keyed by ``purpose``."""
    order = torch.from_numpy(stream(plan.seed, purpose).permutation(len(data))).to(data.y.device)
    for start, stop in Work(batch_size=batch_size, epochs=1).batch_bounds(len(data), plan.smallest_batch):
        yield data.inputs(order[start:stop], plan.dtype)


@torch.no_grad()
def reestimate_statistics(plan: Plan, state: State, data: Samples, batches: int | None = None) -> State:
    """Return ``state`` with BatchNorm statistics replaced by mean and variance of each layer's inputs over ``data``.

    Labels are not used. Layers normalize by batches of 250 samples in a keyed order, so that with more samples the
    inputs of a second BatchNorm layer depend on the batches. With too few samples to train the model, ``state`` is
    returned unchanged. ``batches``: most batches to use; None: all.
    """
    state, scratch = dict(state), clone(state)  # layers in training mode update their buffers
    found = {name: Moments() for name in list_batch_norms(plan)}
    if len(data) < plan.smallest_batch or not found:
        return state
    with _observe(plan, {name: [moments] for name, moments in found.items()}, training=True):
        for x in islice(iterate_inputs(plan, data, BATCH, "reestimate"), batches):
            compute_outputs(plan, scratch, to_memory_format(x, plan.image_format))
    for layer, moments in found.items():
        mean, variance = name_statistics(layer)
        state[mean], state[variance] = moments.mean.to(state[mean]), moments.variance.to(state[variance])
    return state


@torch.no_grad()
def mix_statistics(plan: Plan, state: State, data: Samples, *, alpha: float | None, prior: float) -> State:
    """Return ``state`` with BatchNorm statistics mixed with those of ``data`` (the policy ``mixed``).

    Each layer normalizes a batch of 250 samples by the mix with the statistics of this batch (variances unbiased, as in
    the authors' code), so that later layers get the inputs they will get in use; the result mixes in the statistics of
    all samples. With too few samples to train the model, ``state`` is returned unchanged.
    """
    layers, mixture = list_batch_norms(plan), dict(state)
    if len(data) < plan.smallest_batch or not layers:
        return mixture
    share = prior / (prior + len(data)) if alpha is None else alpha
    found = {name: Moments() for name in layers}

    def mix(layer: str, moments: Moments) -> State:
        return {
            name: (share * state[name].double() + (1 - share) * measured).to(state[name])
            for name, measured in zip(name_statistics(layer), (moments.mean, moments.variance), strict=True)
        }

    def normalizer(layer: str) -> Hook:
        def normalize(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            moments = Moments()
            moments(module, given)
            module._buffers["running_mean"], module._buffers["running_var"] = mix(layer, moments).values()

        return normalize

    with _observe(plan, {name: [moments, normalizer(name)] for name, moments in found.items()}, training=False):
        for x in iterate_inputs(plan, data, BATCH, "reestimate"):
            compute_outputs(plan, state, x)  # also restores the layers' buffers
    for layer, moments in found.items():
        mixture |= mix(layer, moments)
    return mixture


class EntropyMinimizer:
    """Tent on one batch after another: ``state`` is the model so far, except BatchNorm statistics.

    ``entropy``: entropy of each prediction of a batch's outputs (``Task.entropy``).
    """

    name = "tent"

    def __init__(self, plan: Plan, state: State, entropy: Callable[[Tensor], Tensor], *, lr: float) -> None:
        self._plan, self._entropy, self._scratch = plan, entropy, clone(state)
        self._initial, self._lr = state, lr
        self._begin()

    def _begin(self) -> None:
        self._learned = {name: self._initial[name].clone().requires_grad_() for name in self._list_learned()}
        self._optimizer = self._make_optimizer()

    def _list_learned(self) -> list[str]:
        return sorted(list_norm_parameters(self._plan))

    def _make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self._learned.values(), lr=self._lr)

    @property
    def state(self) -> State:
        """The model so far; the tensors are copies."""
        return {**self._initial, **{name: tensor.detach().clone() for name, tensor in self._learned.items()}}

    def step(self, x: Tensor) -> None:
        """Take one step on a batch ``x [B, ...]``; raise ``Diverged`` if the entropy is not finite."""
        self._update(self._differentiate(self._entropy(self._compute_outputs(x))))

    def _compute_outputs(self, x: Tensor) -> Tensor:
        with _observe(self._plan, {}, training=True), torch.enable_grad():
            return compute_outputs(self._plan, {**self._scratch, **self._learned}, x)

    def _differentiate(self, entropies: Tensor) -> tuple[Tensor, ...]:
        """Return the gradient of the mean of ``entropies`` for each learned entry."""
        mean = entropies.mean()
        grads = torch.autograd.grad(mean, tuple(self._learned.values()), materialize_grads=True)
        if not all(bool(tensor.isfinite().all()) for tensor in (mean, *grads)):
            raise Diverged(
                f"{self.name} diverged: the entropy of predictions or its gradient is not finite; try a smaller lr"
            )
        return grads

    def _update(self, grads: tuple[Tensor, ...]) -> None:
        for tensor, grad in zip(self._learned.values(), grads, strict=True):
            tensor.grad = grad
        self._optimizer.step()


class ReliableMinimizer(EntropyMinimizer):
    """SAR on one batch after another: Tent on certain predictions only, toward flat minima (the policy ``sar``).

    ``margin`` and ``reset`` are fractions of the highest entropy of a prediction, reached when all outputs are equal.
    """

    name = "sar"

    def __init__(
        self, plan: Plan, state: State, entropy: Callable[[Tensor], Tensor], *, lr: float, margin: float, rho: float,
        reset: float,
    ) -> None:  # fmt: skip
        self._margin, self._rho, self._reset = margin, rho, reset
        super().__init__(plan, state, entropy, lr=lr)

    def _begin(self) -> None:
        super()._begin()
        self._average: float | None = None

    def _list_learned(self) -> list[str]:
        learned = list_norm_parameters(self._plan)
        entries = [entry for entry in self._plan.entries if entry.name in learned]
        layers = list(dict.fromkeys(entry.owner for entry in entries))
        lower = layers[: max(1, int(LOWER * len(layers)))]
        return [entry.name for entry in entries if entry.owner in lower]

    def _make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self._learned.values(), lr=self._lr, momentum=0.9)

    def step(self, x: Tensor) -> None:
        """Take one step on a batch ``x [B, ...]``; raise ``Diverged`` if the entropy is not finite."""
        outputs = self._compute_outputs(x)
        entropies, highest = self._entropy(outputs), self._entropy(torch.zeros_like(outputs))
        certain = entropies < self._margin * highest
        if not certain.any():
            return
        grads = self._differentiate(entropies[certain])
        climb = self._rho / (torch.stack([grad.norm() for grad in grads]).norm() + 1e-12)
        before = self._learned
        self._learned = {
            name: (tensor + climb * grad).detach().requires_grad_()
            for (name, tensor), grad in zip(before.items(), grads, strict=True)
        }
        entropies = self._entropy(self._compute_outputs(x))
        certain &= entropies < self._margin * highest
        grads = self._differentiate(entropies[certain]) if certain.any() else ()
        self._learned = before
        if not grads:
            return
        self._update(grads)
        value = float(entropies[certain].detach().mean())
        self._average = value if self._average is None else 0.9 * self._average + 0.1 * value
        if self._average < self._reset * float(highest.max()):
            self._begin()


MINIMIZERS = {made.name: made for made in (EntropyMinimizer, ReliableMinimizer)}
"""Minimizers by the names of their policies."""


def minimize_entropy(
    plan: Plan, data: Samples, minimizer: EntropyMinimizer, *, steps: int = 1, batch_size: int
) -> State:
    """Return the model of ``minimizer`` after one pass over ``data``, with BatchNorm statistics of all samples.

    With too few samples to train the model, it is returned unchanged. Raises ``Diverged`` if the entropy is not finite.
    """
    if len(data) < plan.smallest_batch:
        return minimizer.state
    for x in iterate_inputs(plan, data, batch_size, minimizer.name):
        for _ in range(steps):
            minimizer.step(x)
    return reestimate_statistics(plan, minimizer.state, data)


@torch.no_grad()
def measure_distance(plan: Plan, state: State, data: Samples) -> float:
    """Return the distance between the BatchNorm statistics of ``state`` and of ``data`` in its network.

    Layers normalize by the statistics of ``state``. The distance is the sum over layers of the Wasserstein distance
    between normal distributions of independent channels (the policy ``nearest_statistics``).
    """
    found = {name: Moments() for name in list_batch_norms(plan)}
    with _observe(plan, {name: [moments] for name, moments in found.items()}, training=False):
        for x in iterate_inputs(plan, data, BATCH, "reestimate"):
            compute_outputs(plan, state, x)
    total = 0.0
    for layer, moments in found.items():
        mean, variance = (state[name].double() for name in name_statistics(layer))
        gap = (mean - moments.mean).square().sum() + (variance.sqrt() - moments.variance.sqrt()).square().sum()
        total += float(gap.sqrt())
    return total
