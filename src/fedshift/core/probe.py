"""The probe of a network: a few steps before training that show whether one instance can serve every client.

In: a network and a sample. Out: :class:`~fedshift.core.network.Traits`, or a refusal that names layer and attribute. A
course is two steps and an evaluation from given entries. A network whose outputs depend on its entries alone takes the
same course again after another client's, on another instance, and after many calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from ..nn.attributes import Attribute, list_attributes, list_changed, set_back
from ..nn.dropout import dropout_key
from ..utils.errors import UsageError
from ..utils.random_streams import peek_generators, torch_stream
from ..utils.state import State, clone, pick
from ..utils.user_code import describe_error
from .network import Network, Traits, compute_features, forward, to_inputs, to_memory_format

SAMPLES = 4
"""Number of samples in a batch of the probe."""
STEPS = ("first", "second")
"""Steps of a course."""
FAR = 18_018_000
"""Number of calls that the probe writes into counters, to see whether a later, or every n-th, call differs.

It is a multiple of 1 to 16, 20, 25, 50, 100, 500 and 1000.
"""
ROUNDING = 64
"""Factor of the rounding error, or of its square root for changes, up to which engines may differ."""
CLOSE = 1e-5
"""Relative tolerance of equal courses, for devices on which sums depend on the order of threads."""


def probe_network(network: Network, sample: Tensor, remake: Callable[[], nn.Module]) -> Traits:
    """Return what the probe shows about ``network``.

    Args:
        network: The network.
        sample: Inputs ``[1, ...]``.
        remake: Makes another instance of the template.

    Raises:
        UsageError: Calls change, outside of the network's entries, what a later call returns.

    """
    x = make_batch(network, sample)
    network = replace(network, traits=Traits(contiguous=_needs_torch_format(network, x)))
    probe, start = _Probe(network, x), _refuse_copies(network.module)
    first = probe.run(network.initial)
    entries = dict((*network.module.named_parameters(), *network.module.named_buffers()))
    if new := entries.keys() - network.initial.keys():
        raise UsageError(
            f"the model makes {min(new)!r} at its first call, so that no optimizer trains it: make it in __init__, or "
            "run one batch through the model before its function returns it"
        )
    middle = list_attributes(network.module)
    other = probe.run(probe.others)
    writes_in_evaluation = probe.writes_in_evaluation()  # a seventh call, so that cycles of 2 to 6 calls are found, too
    end = list_attributes(network.module)
    moved = list_changed(middle, end).values()
    counters = [
        each for each in moved if type(each.value) in (int, float) or isinstance(each.value, Tensor | np.ndarray)
    ]
    for counter in counters:
        counter.write(FAR - 1 if type(counter.value) is int else counter.value + FAR)
    if not probe.repeats(first):
        raise _describe_state(probe.find_cause(start, first))
    for counter in counters:
        counter.write(counter.value)
    changed = [*list_changed(start, end).values()]
    if changed and not is_close(other, _Probe(replace(network, module=remake()), x).run(probe.others)):
        raise _describe_state(changed)
    changing = {
        name for name in network.initial.keys() - network.trained for step in STEPS
        if not _equal(network.initial[name], first[f"{step}/{name}"])
    }  # fmt: skip
    return network.traits._replace(
        draws=probe.draws, exchange=probe.compare_exchange(), writes_inputs=probe.writes_inputs,
        writes_in_evaluation=writes_in_evaluation, changing=frozenset(changing),
    )  # fmt: skip


def weigh_outputs(outputs: Tensor, _: Tensor) -> Tensor:
    """Return a mean of ``outputs [B, ...]`` with a weight for each, a loss whose gradient reaches every output."""
    weights = torch.linspace(-1, 1, outputs.numel(), dtype=outputs.dtype, device=outputs.device)
    return (outputs * weights.reshape(outputs.shape)).mean()


def make_batch(network: Network, sample: Tensor) -> Tensor:
    """Return :data:`SAMPLES` inputs in the range of ``sample [1, ...]``; its whole numbers stay valid, rounded down."""
    x = to_inputs(network, sample).expand(SAMPLES, *sample.shape[1:]).clone()
    if not x.is_floating_point():
        return x
    low, high = x.nan_to_num_().aminmax()
    share, more = torch.from_numpy(np.random.Generator(np.random.Philox(0)).random((2, *x.shape))).to(x)
    x.mul_(share).add_(more / 2)
    return x.clamp_(low, high) if low < high else x


class _Probe:
    """Courses of a network on inputs ``x [B, ...]``, and what they show; ``others``: the entries of another client."""

    def __init__(self, network: Network, x: Tensor) -> None:
        self.network, self.x, self.draws, self.writes_inputs = network, x, False, False
        self.others = {
            name: tensor * 1.1 + 0.01 if name in network.trained else tensor for name, tensor in network.initial.items()
        }

    def run(self, state: State) -> State:
        """Return the entries after each of two steps from ``state``, and then outputs in evaluation."""
        network, x, course, state = self.network, self.x.clone(), State(), self.network.clone_for_training(state)
        with torch_stream(0, "probe"):
            before = peek_generators()
            for step in STEPS:
                for name, grad in self._differentiate(state, x, first=step == STEPS[0]).items():
                    state[name].sub_(grad, alpha=0.1)
                course |= {f"{step}/{name}": tensor.clone() for name, tensor in state.items()}
            outputs = forward(network, state, x)
            self.draws |= before != peek_generators()
        self.writes_inputs |= not torch.equal(x, self.x)
        return course | {"outputs": outputs}

    def writes_in_evaluation(self) -> bool:
        """Return whether evaluation changes the entries ``others``, in which a copy of a weight is not equal to it."""
        state = clone(self.others)
        forward(self.network, state, self.x.clone())
        return not all(_equal(tensor, self.others[name]) for name, tensor in state.items())

    def repeats(self, first: State) -> bool:
        """Return whether a course is ``first`` once more."""
        with suppress(Exception):  # a user's network may raise any type, such as an IndexError
            return is_close(first, self.run(self.network.initial))
        return False

    def find_cause(self, start: Mapping[str, Attribute], first: State) -> list[Attribute]:
        """Return the attributes in which calls keep what changes the course ``first``.

        Attributes are set back to ``start`` one by one, until the course is as at first: the last of them is the cause.
        """
        changed = list_changed(start, list_attributes(self.network.module))
        known = [path for path in changed if path in start]
        for number, path in enumerate(known, 1):
            set_back(self.network.module, {earlier: start[earlier] for earlier in known[:number]})
            if self.repeats(first):
                return [changed[path]]
        return [*changed.values()]

    def compare_exchange(self) -> str:
        """Return where a pass with other tensors in place of the network's own goes wrong; empty: nowhere."""
        with torch_stream(0, "probe"):
            expected = self._differentiate(self.network.clone_for_training(self.others), self.x.clone())
        try:
            found = self._differentiate_exchanged(self.network.clone_for_training(self.others))
        except Exception as error:  # a user's network may raise any type
            return describe_error(error)
        noise = 1e-6 * max(map(_find_largest, expected.values()), default=0.0)  # a bias before BatchNorm has only that
        for name in sorted(self.network.trained):
            if not is_close(pick(found, [name]), pick(expected, [name]), 1e-3, noise):
                return f"the gradient of {name!r} is lost or another"
        return ""

    def _differentiate(self, state: State, x: Tensor, *, first: bool = True) -> State:
        """Return gradients as in plain PyTorch; ``state`` takes what the network writes into its entries."""
        network = self.network
        with network.resident(pick(state, network.trained), network.trained) as leaves, torch.enable_grad():
            entries = {**state, **leaves}
            self._compute_loss(entries, x, in_place=True, first=first).backward()  # type: ignore[no-untyped-call]
            grads = {name: leaf.grad.to_dense() for name, leaf in leaves.items() if leaf.grad is not None}
        state |= {name: entries[name].detach() for name in state.keys() - network.trained}
        return grads

    def _differentiate_exchanged(self, state: State) -> State:
        """Return gradients of a pass with ``state`` in place of the network's tensors, before another client's pass."""
        with torch_stream(0, "probe"), torch.enable_grad():
            leaves = {name: tensor.requires_grad_() for name, tensor in pick(state, self.network.trained).items()}
            loss = self._compute_loss(state, self.x.clone(), in_place=False)
            with torch.no_grad():
                self._compute_loss(clone(self.network.initial), self.x.clone(), in_place=True)
            grads = torch.autograd.grad(loss, tuple(leaves.values()), allow_unused=True)
        return {name: grad.to_dense() for name, grad in zip(leaves, grads, strict=True) if grad is not None}

    def _compute_loss(self, state: State, x: Tensor, *, in_place: bool, first: bool = True) -> Tensor:
        network, x = self.network, to_memory_format(x, self.network.image_format)
        with dropout_key(torch.zeros((), dtype=torch.int64, device=x.device)):
            outputs, _ = compute_features(network, state, x, {}, training=True, first=first, in_place=in_place)
        return weigh_outputs(outputs, x)


def _needs_torch_format(network: Network, x: Tensor) -> bool:
    """Return whether the network is wrong on channels-last images, as one that depends on their layout."""

    def run(traits: Traits) -> State:
        with torch_stream(0, "probe"):
            return {"": forward(replace(network, traits=traits), clone(network.initial), x.clone())}

    if network.image_format == torch.contiguous_format:
        return False
    with suppress(Exception):  # reported by the first course, if torch's format does not help
        outputs = run(Traits())
        return not is_close(outputs, run(Traits(contiguous=True)))
    return True


def find_difference(network: Network, before: State, found: State, expected: State) -> str | None:
    """Return the entry whose change from ``before`` is not the ``expected`` one up to rounding; None if there is none.

    Sums in another order change small gradients by percents of the entry's largest in float32, and gradients that are
    zero in exact numbers (of a bias before BatchNorm) by a small share of the largest of all.
    """
    rounding = torch.finfo(network.autocast or network.dtype).eps
    moved = {name: _find_largest(tensor.double() - before[name].double()) for name, tensor in expected.items()}
    most = max((moved[name] for name, tensor in expected.items() if tensor.is_floating_point()), default=0.0)
    for name, tensor in expected.items():
        slack = ROUNDING * (rounding**0.5 * moved[name] + rounding * _find_largest(tensor.double()))
        slack += ROUNDING**2 * rounding * most
        if not torch.allclose(tensor.double(), found[name].double(), rtol=0.0, atol=slack, equal_nan=True):
            return name
    return None


def _find_largest(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def is_close(one: State, other: State, tolerance: float = CLOSE, noise: float = 0.0) -> bool:
    """Return whether states are equal up to ``tolerance`` times the largest value and ``noise``; NaN equals NaN."""
    return one.keys() == other.keys() and all(_is_close(one[name], other[name], tolerance, noise) for name in one)


def _is_close(one: Tensor, other: Tensor, tolerance: float, noise: float) -> bool:
    if one.shape != other.shape or one.is_complex():
        return _equal(one, other)
    one, other = one.double(), other.double()
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * _find_largest(one) + noise, equal_nan=True)


def _equal(one: Tensor, other: Tensor) -> bool:
    same = one.shape == other.shape and one.dtype == other.dtype
    return same and torch.equal(one.nan_to_num(), other.nan_to_num())


def _describe_state(attributes: list[Attribute]) -> UsageError:
    """Return the error for state outside of entries, in one of ``attributes``; none: in an unknown place."""
    if not attributes:
        return UsageError(
            "the model returns something else for the same inputs at each call, by what it keeps outside of its "
            "entries: make that a buffer (self.register_buffer), and each client keeps one, which is saved"
        )
    first = attributes[0]
    names = " or ".join(dict.fromkeys(repr(each.name) for each in attributes if each.where == first.where))
    return UsageError(
        f"{first.where} keeps {names} outside of its entries, and a call changes what the next one returns: clients "
        f"would share it, and a resumed run would lose it. Make it a buffer (self.register_buffer({first.name!r}, "
        "...)), and each client keeps one, which is saved"
    )


def _refuse_copies(module: nn.Module) -> dict[str, Attribute]:
    """Return the attributes of ``module``; raise :class:`UsageError` if another tensor holds an entry's values."""
    attributes = list_attributes(module)
    for attribute in attributes.values():
        if attribute.entry:
            raise UsageError(
                f"{attribute.where} keeps the values of {attribute.entry!r} in {attribute.name!r} as another tensor, "
                "which training would not change: keep the parameter itself, or take its values in forward"
            )
    return attributes
