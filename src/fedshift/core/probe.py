"""The probe of a network: a few steps before training that show whether one instance can serve every client.

In: a plan, of which only the network counts, and a sample. Out: :class:`~fedshift.core.plan.Traits`, or a refusal that
names layer and attribute. A course is two steps and an evaluation from given entries. A network whose outputs depend on
its entries alone takes the same course again after another client's, on another instance, and after many calls.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from ..nn.attributes import Attribute, list_attributes
from ..nn.dropout import dropout_key
from ..utils.errors import UsageError
from ..utils.random_streams import peek_generators, torch_stream
from ..utils.state import State, clone
from ..utils.user_code import describe_error
from .kernel import client_init, init_client, init_server
from .network import Traits, compute_outputs, forward, to_inputs, to_memory_format
from .optimizer import SGD
from .plan import Plan
from .step import client_step_

SAMPLES = 4
"""Number of samples in a batch of the probe."""
FAR = 18_018_000
"""Number of calls that the probe writes into counters, to see whether a later, or every n-th, call differs.

It is a multiple of 1 to 16, 20, 25, 50, 100, 500 and 1000.
"""
ROUNDING = 64
"""Factor of the rounding error, or of its square root for changes, up to which engines may differ."""
CLOSE = 1e-5
"""Relative tolerance of equal courses, for devices on which sums depend on the order of threads."""


def probe_network(plan: Plan, sample: Tensor, remake: Callable[[], nn.Module]) -> Traits:
    """Return what the probe shows about the network of ``plan``.

    Args:
        plan: The plan; its method and loss do not matter.
        sample: Inputs ``[1, ...]``.
        remake: Makes another instance of the network.

    Raises:
        UsageError: Calls change, outside of the network's entries, what a later call returns.

    """
    plan = replace(plan, loss=weigh_outputs, optimizer=SGD(lr=0.1))
    x = make_batch(plan, sample)
    plan = replace(plan, traits=Traits(contiguous=_needs_torch_format(plan, x)))
    probe, entries, start = _Probe(plan, x), _list_entries(plan.module), _refuse_copies(plan.module)
    first = probe.run(plan.initial)
    if new := _list_entries(plan.module) - entries:
        raise UsageError(
            f"the model makes {min(new)!r} at its first call, so that no optimizer trains it: make it in __init__, or "
            "run one batch through the model before its function returns it"
        )
    middle = list_attributes(plan.module)
    other = probe.run(probe.others)
    probe.writes_in_evaluation()  # a seventh call, so that cycles of 2 to 6 calls are found, too
    if not is_close(first, probe.run(plan.initial)):
        raise _refuse_state(start, lambda: is_close(first, probe.run(plan.initial)), plan.module)
    end = list_attributes(plan.module)
    if changed := _list_changed(start, end):
        if not is_close(other, _Probe(replace(plan, module=remake()), x).run(probe.others)):
            raise _describe_state(changed)
        probe.advance(_list_changed(middle, end), first)
    return plan.traits._replace(
        draws=probe.draws,
        exchange=probe.compare_exchange(),
        writes_inputs=probe.writes_inputs(),
        writes_in_evaluation=probe.writes_in_evaluation(),
        changing=frozenset(
            name for name in plan.initial.keys() - plan.trained for step in ("first", "second")
            if not _equal(plan.initial[name], first[f"{step}/{name}"])
        ),
    )  # fmt: skip


def weigh_outputs(outputs: Tensor, _: Tensor) -> Tensor:
    """Return a mean of ``outputs [B, ...]`` with a weight for each, a loss whose gradient reaches every output."""
    weights = torch.linspace(-1, 1, outputs.numel(), dtype=outputs.dtype, device=outputs.device)
    return (outputs * weights.reshape(outputs.shape)).mean()


def make_batch(plan: Plan, sample: Tensor) -> Tensor:
    """Return :data:`SAMPLES` inputs in the range of ``sample [1, ...]``; its whole numbers stay valid, rounded down."""
    x = to_inputs(plan, sample).expand(SAMPLES, *sample.shape[1:]).clone()
    if not x.is_floating_point():
        return x
    low, high = x.nan_to_num_().aminmax()
    share, more = torch.from_numpy(np.random.Generator(np.random.Philox(0)).random((2, *x.shape))).to(x)
    x.mul_(share).add_(more / 2)
    return x.clamp_(low, high) if low < high else x


class _Probe:
    """Courses of a plan on inputs ``x [B, ...]``; ``others``: the entries of another client."""

    def __init__(self, plan: Plan, x: Tensor) -> None:
        self.plan, self.x, self.draws = plan, x, False
        self.others = {
            name: tensor * 1.1 + 0.01 if name in plan.trained else tensor for name, tensor in plan.initial.items()
        }

    def run(self, state: State) -> State:
        """Return the entries after each of two steps from ``state``, and then outputs in evaluation."""
        plan, x = self.plan, self.x
        key, y = torch.zeros((), dtype=torch.int64, device=x.device), x.new_zeros(len(x), dtype=torch.int64)
        course = State()
        with torch_stream(0, "probe"):
            before = peek_generators()
            job = client_init(plan, init_client(plan), replace(init_server(plan), shared=clone(state)))
            for step in ("first", "second"):
                job, _ = client_step_(plan, job, x.clone(), y, key)
                course |= {f"{step}/{name}": tensor.clone() for name, tensor in job.rest.items()}
            outputs = forward(plan, clone(job.state), x.clone())
            self.draws |= before != peek_generators()
            return course | job.params | {"outputs": outputs}

    def advance(self, counters: list[Attribute], first: State) -> None:
        """Raise :class:`UsageError` if the course is not ``first`` after many more calls, counted by ``counters``."""
        counters = [counter for counter in counters if counter.is_number]
        for counter in counters:
            counter.write(FAR - 1 if type(counter.value) is int else counter.value + FAR)
        try:
            same = not counters or is_close(first, self.run(self.plan.initial))
        except Exception:  # a user's network may raise any type, such as an IndexError
            same = False
        for counter in counters:
            counter.write(counter.value)
        if not same:
            raise _describe_state(counters)

    def compare_exchange(self) -> str:
        """Return where a pass with other tensors in place of the network's own goes wrong; empty: nowhere."""
        plan, state = self.plan, {**self.others}
        active = sorted(plan.trained)
        with torch_stream(0, "probe"), torch.enable_grad(), plan.resident(clone(state), active) as leaves:
            plan.set_mode(training=True)
            weigh_outputs(self._run({**clone(state), **leaves}, in_place=True), self.x).backward()  # type: ignore[no-untyped-call]
            expected = {name: leaf.grad.to_dense() for name, leaf in leaves.items() if leaf.grad is not None}
        try:
            with torch_stream(0, "probe"), torch.enable_grad():
                inputs = {name: state[name].detach().clone().requires_grad_() for name in active}
                loss = weigh_outputs(self._run({**clone(state), **inputs}, in_place=False), self.x)
                with torch.no_grad():  # as between two clients
                    self._run(clone(plan.initial), in_place=True)
                found = torch.autograd.grad(loss, tuple(inputs.values()), allow_unused=True)
        except Exception as error:  # a user's network may raise any type
            return describe_error(error)
        grads = {name: grad.to_dense() for name, grad in zip(active, found, strict=True) if grad is not None}
        wrong = [
            name for name in active
            if (name in grads) != (name in expected)
            or (name in grads and not is_close({"": grads[name]}, {"": expected[name]}, 1e-3))
        ]  # fmt: skip
        return f"the gradient of {wrong[0]!r} is lost or another" if wrong else ""

    def _run(self, state: State, *, in_place: bool) -> Tensor:
        plan, key = self.plan, torch.zeros((), dtype=torch.int64, device=self.x.device)
        with dropout_key(key):
            x = to_memory_format(self.x.clone(), plan.image_format)
            return compute_outputs(plan, state, x, in_place=in_place)

    def writes_inputs(self) -> bool:
        given = self.x.clone()
        for training in (True, False):
            forward(self.plan, clone(self.plan.initial), given, training=training)
        return not torch.equal(given, self.x)

    def writes_in_evaluation(self) -> bool:
        state = clone(self.others)  # in which a copy of a weight is not equal to it
        forward(self.plan, state, self.x.clone())
        return not all(_equal(tensor, self.others[name]) for name, tensor in state.items())


def _needs_torch_format(plan: Plan, x: Tensor) -> bool:
    """Return whether the network is wrong on channels-last images, as one that depends on their layout."""
    if plan.image_format == torch.contiguous_format:
        return False
    usual = replace(plan, traits=Traits(contiguous=True))
    try:
        with torch_stream(0, "probe"):
            outputs = forward(plan, clone(plan.initial), x.clone())
    except Exception:  # reported by the first course, if torch's format does not help
        return True
    with torch_stream(0, "probe"):
        return not is_close({"": outputs}, {"": forward(usual, clone(plan.initial), x.clone())})


def find_difference(plan: Plan, before: State, found: State, expected: State) -> str | None:
    """Return the entry whose change from ``before`` is not the ``expected`` one up to rounding; None if there is none.

    Sums in another order change small gradients by percents of the entry's largest in float32, and gradients that are
    zero in exact numbers (of a bias before BatchNorm) by a small share of the largest of all.
    """
    rounding = torch.finfo(plan.autocast or plan.dtype).eps
    moved = {name: _find_largest(tensor.double() - before[name].double()) for name, tensor in expected.items()}
    for name, tensor in expected.items():
        slack = ROUNDING * rounding**0.5 * moved[name] + ROUNDING * rounding * _find_largest(tensor.double())
        slack += ROUNDING**2 * rounding * max(moved[other] for other in moved if expected[other].is_floating_point())
        if not torch.allclose(tensor.double(), found[name].double(), rtol=0.0, atol=slack, equal_nan=True):
            return name
    return None


def _find_largest(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def is_close(one: State, other: State, tolerance: float = CLOSE) -> bool:
    """Return whether two states are equal up to ``tolerance`` times the largest value; NaN equals NaN."""
    return one.keys() == other.keys() and all(
        tensor.shape == other[name].shape
        and (torch.equal(tensor, other[name]) or _differ_little(tensor.double(), other[name].double(), tolerance))
        for name, tensor in one.items()
    )


def _differ_little(one: Tensor, other: Tensor, tolerance: float) -> bool:
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * _find_largest(one), equal_nan=True)


def _equal(one: Tensor, other: Tensor) -> bool:
    same = one.shape == other.shape and one.dtype == other.dtype
    return same and (torch.equal(one, other) or torch.equal(one.nan_to_num(), other.nan_to_num()))


def _list_entries(module: nn.Module) -> set[str]:
    return {name for name, _ in (*module.named_parameters(), *module.named_buffers())}


def _list_changed(before: dict[str, Attribute], after: dict[str, Attribute]) -> list[Attribute]:
    """Return the attributes of ``after`` that differ from ``before``."""
    return [attribute for path, attribute in after.items() if not attribute.equals(before.get(path))]


def _refuse_state(start: dict[str, Attribute], retry: Callable[[], bool], module: nn.Module) -> UsageError:
    """Return the error for a course that calls changed; ``retry``: takes it again and says if it is as at first.

    Attributes are set back to ``start`` one by one, until the course is as at first: the last of them is the cause.
    """
    changed = [path for path, each in list_attributes(module).items() if not each.equals(start.get(path))]
    for number, path in enumerate(changed, 1):
        for earlier in changed[:number]:
            now = list_attributes(module)
            if earlier in now and earlier in start:
                value = start[earlier].value
                now[earlier].write(value.clone() if isinstance(value, Tensor) else value)
        with suppress(Exception):  # a user's network may raise any type
            if retry():
                return _describe_state([start[path]])
    now = list_attributes(module)
    return _describe_state([now[path] for path in changed if path in now])


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
