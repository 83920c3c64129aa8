"""A step of local work: the objective on a batch, its gradients, and the optimizer's update, each modified by rules.

In: a job and a batch. Out: the job one step further, and the loss. A step is ``compute_gradients`` (of
``compute_objective``, then modified by rules in ``transform_gradients``) followed by ``update_``. All of them work
under ``torch.vmap``, so that an engine can run many clients in one tensor program.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from ..nn.dropout import derive_key, draw_bits, dropout_key
from ..utils.profiling import timed_section
from ..utils.state import State, clone, nbytes, pick
from .network import compute_features, to_memory_format
from .plan import Plan
from .rule import Batch, Step
from .states import LocalTrainingState

SAMPLE_GRADIENTS = 2**27
"""Maximum size, in bytes, of the gradients of single samples in memory at a time."""


def list_active(plan: Plan, job: LocalTrainingState) -> frozenset[str]:
    """Return the parameters that the next step of ``job`` trains."""
    return frozenset[str]().union(*(each.names for each in plan.list_updates(job)))


def compute_objective(
    plan: Plan, job: LocalTrainingState, params: State, x: Tensor, y: Tensor, key: Tensor, *,
    in_place: bool | None = None,
) -> tuple[Tensor, Tensor, State]:  # fmt: skip
    """Return the training objective at ``params`` on one batch, the data loss, and the updated ``rest``. Pure.

    ``x [B, ...]``, ``y [B]``; ``key``: int64 scalar that keys dropout masks. In separate phases the model does not run,
    and the data loss is 0.
    """
    rest = clone(job.rest)
    state = {**params, **rest}
    model = {name: state[name] for name in plan.initial} if len(state) > len(plan.initial) else state
    batch = Batch(plan, plan.rules, plan.feature_layers, job, params, x, y, key)
    with dropout_key(key) if plan.keyed else nullcontext():
        for index in plan.defines("batch"):
            step = Step(batch, index, {**params, **job.rest})
            batch.x, batch.y = plan.rules[index].rule.batch(batch.x, batch.y, step)
        if job.separate_phase:
            vars(batch).pop("passed", None)  # of the batch before rules changed it
            total = loss = torch.zeros((), dtype=plan.dtype, device=x.device)
        else:
            passed = compute_features(
                plan, model, batch.x, plan.feature_layers, training=True, frozen=job.frozen,
                first=job.done == job.start, in_place=in_place,
            )  # fmt: skip
            rest |= {name: model[name] for name in rest if name in model}
            batch.passed = (batch.change_outputs(passed, state), passed[1]) if plan.defines("outputs") else passed
            total = loss = plan.loss(batch.passed[0], batch.y)
        for index in plan.defines("loss"):
            if job.separate_phase[0] == index if job.separate_phase else index not in plan.separate:
                total = plan.rules[index].rule.loss(total, Step(batch, index, state))
    return total, loss, rest


def compute_gradients(
    plan: Plan, job: LocalTrainingState, x: Tensor, y: Tensor, key: Tensor
) -> tuple[State, State, Tensor]:
    """Return the gradients for the optimizer, ``rest`` after the batch, and the data loss. Pure.

    For arguments, see :func:`compute_objective`.
    """
    x = to_memory_format(x, plan.image_format)
    if plan.estimator:
        grads, rest, loss = combine_samples(plan, job, x, y, key)
        return transform_gradients(plan, job, grads, key), rest, loss
    with plan.resident(job.params, list_active(plan, job)) as leaves, torch.enable_grad():
        total, loss, rest = compute_objective(plan, job, {**job.params, **leaves}, x, y, key, in_place=True)
        total.backward()  # type: ignore[no-untyped-call]
        grads = {
            name: leaf.grad.to_dense() if leaf.grad.is_sparse else leaf.grad
            for name, leaf in leaves.items()
            if leaf.grad is not None
        }
    after = {name: tensor.detach() for name, tensor in rest.items()}
    grads = transform_gradients(plan, job, grads, key) if plan.defines("gradients") else grads
    return grads, after, loss.detach()


def combine_samples(
    plan: Plan, job: LocalTrainingState, x: Tensor, y: Tensor, key: Tensor
) -> tuple[State, State, Tensor]:
    """Return the batch gradient by :meth:`Rule.combine_samples`, ``rest`` unchanged, and the mean data loss. Pure.

    For arguments, see :func:`compute_objective`. Each sample is a separate batch with a separate key; buffers written
    by its forward pass are discarded. ``SAMPLE_GRADIENTS`` limits the number of samples differentiated at a time.
    """
    assert plan.estimator

    def objective(params: State, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
        return compute_objective(plan, job, {**job.params, **params}, x[None], y[None], key)[0]

    descend = torch.vmap(torch.func.grad_and_value(objective), in_dims=(None, 0, 0, 0), randomness="different")
    keys_B = key ^ draw_bits(derive_key(key, "keys of samples"), 0, len(y))
    params = pick(job.params, list_active(plan, job))
    together = max(1, SAMPLE_GRADIENTS // max(1, nbytes(params)))
    losses = []

    def differentiate() -> Iterator[State]:
        for start in range(0, len(y), together):
            part = slice(start, start + together)
            grads, loss = descend(params, x[part], y[part], keys_B[part])
            losses.append(loss)
            yield grads

    grads = plan.estimator.combine_samples(differentiate(), derive_key(key, "gradient estimator"))
    return grads, job.rest, torch.cat(losses).mean()


def transform_gradients(plan: Plan, job: LocalTrainingState, grads: State, key: Tensor) -> State:
    """Return the objective's gradients after every rule has transformed the model's.

    A rule with :attr:`Rule.on_copies` also transforms the gradients of other rules' ``Declared.model``; no rule changes
    the gradients of other rules' parameters otherwise.
    """
    state, nothing = job.state, torch.empty(0)
    batch = Batch(plan, plan.rules, {}, job, job.params, nothing, nothing, key)
    for index in plan.defines("gradients"):
        rule, step = plan.rules[index].rule, Step(batch, index, state)
        changed = pick(grads, plan.trained)
        if changed:
            changed = rule.gradients(changed, step.at({name: state[name] for name in changed}))
        for other in plan.rules if rule.on_copies else ():
            names = {entry: other.names[entry] for entry in other.model}
            of_copy = {entry: grads[name] for entry, name in names.items() if name in grads}
            if of_copy:
                copy = {entry: state[name] for entry, name in names.items()}
                there = step.at(pick(copy, of_copy), pick(copy, copy.keys() - of_copy.keys()))
                changed |= {names[entry]: grad for entry, grad in rule.gradients(of_copy, there).items()}
        grads = grads | changed
    return grads


def update_(plan: Plan, job: LocalTrainingState, grads: State, rest: State, samples: int) -> LocalTrainingState:
    """Take the optimizer's step along ``grads``, computed on ``samples`` samples, in place in ``job``'s tensors."""
    for each in plan.list_updates(job):
        optimizer = plan.optimizer if each.decay else replace(plan.optimizer, weight_decay=0.0)
        optimizer.update_(pick(job.params, each.names & grads.keys()), grads, job.optimizer, job.lr * each.lr_scale)
        if each.rule is not None:
            bound = plan.rules[each.rule]
            for entry, limits in bound.limits.items():
                values = job.params[bound.names[entry]]
                values.copy_(values.clamp(*limits))  # clamp_ has no batching rule
    if job.separate_phase:
        return replace(job, rest=rest)
    return replace(job, rest=rest, done=job.done + 1, samples=job.samples + samples)


def client_step_(
    plan: Plan, job: LocalTrainingState, x: Tensor, y: Tensor, key: Tensor
) -> tuple[LocalTrainingState, Tensor]:
    """Take one local step on a batch, in place in ``job``'s tensors. Returns the new job and the data loss."""
    with timed_section("forward and backward"):
        grads, rest, loss = compute_gradients(plan, job, x, y, key)
    with timed_section("update"):
        return update_(plan, job, grads, rest, len(y)), loss
