"""A step of local work: the objective on a batch, its gradients, and the optimizer's update, each modified by rules.

A step is ``compute_gradients`` (of ``compute_objective``, then modified by rules in ``transform_gradients``) followed
by ``update_``. All of them work under ``torch.vmap``, so that an engine can run many clients in one tensor program.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..nn.dropout import derive_key, draw_bits, dropout_key
from ..nn.linear import use_torch_func
from ..utils.profiling import timed_section
from ..utils.state import State, clone, nbytes, pick
from .contexts import ForwardPass, LossContext, Owned, StepContext
from .plan import Plan, Updated, compute_features, to_memory_format
from .states import LocalTrainingState

SAMPLE_GRADIENTS = 2**27
"""Maximum size, in bytes, of the gradients of single samples in memory at a time."""


def client_facts(plan: Plan, job: LocalTrainingState, index: int, state: State) -> dict[str, Any]:
    """Return the fields of the :class:`ClientContext` of the rule at ``index``; ``state``: all current entries."""
    own, names = plan.rules[index], plan.own_names[index]
    parts = ({entry: state[names[entry]] for entry in part} for part in (own.model, own.params, own.buffers))
    return {
        "bound": plan.rules[index],
        "loaded": job.global_params,
        "memory": job.memory[index],
        "own": Owned(*parts),
        "server": job.server_memory[index],
        "lr": job.lr,
    }


def _step_facts(plan: Plan, job: LocalTrainingState, index: int, state: State, key: Tensor) -> dict[str, Any]:
    """Return the fields of the :class:`StepContext` of the rule at ``index``."""
    return client_facts(plan, job, index, state) | {
        "params": {name: state[name] for name in plan.params},
        "buffers": {name: job.rest[name] for name in plan.buffers},
        "steps": job.steps,
        "_personal": job.personal,
        "_key": derive_key(key, plan.rule_names[index]) if plan.rules[index].draws else key,
    }


def list_updates(plan: Plan, job: LocalTrainingState) -> tuple[Updated, ...]:
    """Return the updates of the next step of ``job``."""
    return plan.updates_in(job.done - job.start, job.planned_steps, job.separate_phase)


def list_active(plan: Plan, job: LocalTrainingState) -> list[str]:
    """Return the parameters that the next step of ``job`` trains, in order."""
    active = frozenset[str]().union(*(each.names for each in list_updates(plan, job)))
    return [name for name in job.params if name in active]


def compute_objective(
    plan: Plan,
    job: LocalTrainingState,
    params: State,
    x: Tensor,
    y: Tensor,
    key: Tensor,
    *,
    in_place: bool | None = None,
) -> tuple[Tensor, Tensor, State]:
    """Return the training objective at ``params`` on one batch, the data loss, and the updated ``rest``. Pure.

    ``x [B, ...]``, ``y [B]``; ``key``: int64 scalar that keys dropout masks. In separate phases the model does not run,
    and the data loss is 0.
    """
    plan.set_mode(training=True, frozen=job.frozen, first=job.done == job.start)
    rest = clone(job.rest)
    state = {**params, **rest}
    model = {name: state[name] for name in plan.initial} if len(state) > len(plan.initial) else state
    with dropout_key(key):
        for index in plan.defines("batch"):
            facts = _step_facts(plan, job, index, {**params, **job.rest}, key)
            x, y = plan.rules[index].rule.batch(x, y, StepContext(**facts))
        batch = _Batch(plan, job, params, x, y, key)
        if job.separate_phase:
            total = loss = torch.zeros((), dtype=plan.dtype, device=x.device)
        else:
            batch.passed = compute_features(plan, model, x, in_place=in_place)
            rest |= {name: model[name] for name in rest if name in model}
            batch.passed = batch.change_outputs(*batch.passed, state)
            total = loss = plan.loss(batch.passed[0], y)
        for index in plan.defines("loss"):
            separate = plan.rules[index].has_separate_passes
            if job.separate_phase[0] == index if job.separate_phase else not separate:
                total = plan.rules[index].rule.loss(total, batch.make_context(index, state))
    return total, loss, rest


class _Batch:
    """The batch of a step, on which rules run networks."""

    def __init__(self, plan: Plan, job: LocalTrainingState, params: State, x: Tensor, y: Tensor, key: Tensor) -> None:
        self._plan, self._job, self._params, self._x, self._y, self._key = plan, job, params, x, y, key
        self.passed: tuple[Tensor, dict[int, Tensor]] | None = None

    def make_context(self, index: int, state: State) -> LossContext:
        """Return the context of the rule at ``index``; ``state``: all entries, with buffers written in this step."""
        return LossContext(
            **_step_facts(self._plan, self._job, index, state, self._key),
            x=self._x,
            y=self._y,
            criterion=self._plan.loss,
            _make_pass=partial(self._make_pass, index),
            _run=partial(self._run, index),
            _loss_at=self._loss_at,
        )

    def _fill(self, entries: State) -> State:
        """Complete ``entries``, which are not copied, by copies of the model's buffers and untrained parameters."""
        rest = self._job.rest
        return {name: entries[name] if name in entries else rest[name].clone() for name in self._plan.initial}

    def change_outputs(
        self, outputs: Tensor, features: dict[int, Tensor], state: State
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Return a pass with the outputs that rules return; ``state``: all entries, including the network's."""
        passed = self.passed
        for index in self._plan.defines("outputs"):
            self.passed = outputs, features
            outputs = self._plan.rules[index].rule.outputs(outputs, self.make_context(index, state))
        self.passed = passed
        return outputs, features

    def _loss_at(self, entries: State) -> Tensor:
        model = self._fill(entries)
        passed = compute_features(self._plan, model, self._x)
        outputs, _ = self.change_outputs(*passed, {**self._params, **self._job.rest, **model})
        return self._plan.loss(outputs, self._y)

    def _run(self, index: int, entries: State, x: Tensor, *, training: bool) -> ForwardPass:
        self._plan.set_mode(training=training, frozen=self._job.frozen)
        try:
            with dropout_key(self._key):
                result = compute_features(self._plan, self._fill(entries), x)
        finally:
            self._plan.set_mode(training=True, frozen=self._job.frozen, first=False)
        return self._wrap(index, x, result)

    def _make_pass(self, index: int) -> ForwardPass:
        if self.passed is None:
            with dropout_key(self._key):
                self.passed = compute_features(self._plan, self._fill(self._params), self._x)
        return self._wrap(index, self._x, self.passed)

    def _wrap(self, index: int, x: Tensor, result: tuple[Tensor, dict[int, Tensor]]) -> ForwardPass:
        outputs, features = result
        bound = self._plan.rules[index]
        return ForwardPass(bound=bound, x=x, y=self._y, outputs=outputs, _features=features.get(index, outputs))


def compute_gradients(
    plan: Plan, job: LocalTrainingState, x: Tensor, y: Tensor, key: Tensor
) -> tuple[State, State, Tensor]:
    """Return the gradients for the optimizer, ``rest`` after the batch, and the data loss. Pure.

    For arguments, see :func:`compute_objective`.
    """
    x = to_memory_format(x, plan.image_format)
    if plan.method.gradient is not None:
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
    return transform_gradients(plan, job, grads, key), after, loss.detach()


def combine_samples(
    plan: Plan, job: LocalTrainingState, x: Tensor, y: Tensor, key: Tensor
) -> tuple[State, State, Tensor]:
    """Return the batch gradient by ``Method.gradient``, ``rest`` unchanged, and the mean data loss. Pure.

    For arguments, see :func:`compute_objective`. Each sample is a separate batch with a separate key; buffers written
    by its forward pass are discarded. ``SAMPLE_GRADIENTS`` limits the number of samples differentiated at a time.
    """
    assert plan.method.gradient is not None

    def objective(params: State, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
        return compute_objective(plan, job, {**job.params, **params}, x[None], y[None], key)[0]

    descend = torch.vmap(torch.func.grad_and_value(objective), in_dims=(None, 0, 0, 0), randomness="different")
    keys_B = key ^ draw_bits(derive_key(key, "keys of samples"), 0, len(y))
    params = {name: job.params[name] for name in list_active(plan, job)}
    together = max(1, SAMPLE_GRADIENTS // max(1, nbytes(params)))
    losses = []

    def differentiate() -> Iterator[State]:
        for start in range(0, len(y), together):
            part = slice(start, start + together)
            grads, loss = descend(params, x[part], y[part], keys_B[part])
            losses.append(loss)
            yield grads

    with use_torch_func():
        grads = plan.method.gradient.combine(differentiate(), derive_key(key, "gradient estimator"))
    return grads, job.rest, torch.cat(losses).mean()


def transform_gradients(plan: Plan, job: LocalTrainingState, grads: State, key: Tensor) -> State:
    """Return the objective's gradients after every rule has transformed the model's.

    A rule with :attr:`Rule.on_copies` also transforms the gradients of other rules' ``Declared.model``; no rule changes
    the gradients of other rules' parameters otherwise.
    """
    state = job.state
    for index in plan.defines("gradients"):
        rule, facts = plan.rules[index].rule, _step_facts(plan, job, index, state, key)
        changed = pick(grads, plan.trained)
        if changed:
            changed = rule.gradients(changed, StepContext(**facts | {"params": pick(facts["params"], changed)}))
        for other, bound in enumerate(plan.rules) if rule.on_copies else ():
            names = {entry: plan.own_names[other][entry] for entry in bound.model}
            copy_grads = {entry: grads[name] for entry, name in names.items() if name in grads}
            if copy_grads:
                copy = {entry: state[name] for entry, name in names.items()}
                rest = {entry: tensor for entry, tensor in copy.items() if entry not in copy_grads}
                at_copy = StepContext(**facts | {"params": pick(copy, copy_grads), "buffers": rest, "loaded": {}})
                changed |= {names[entry]: grad for entry, grad in rule.gradients(copy_grads, at_copy).items()}
        grads = grads | changed
    return grads


def update_(plan: Plan, job: LocalTrainingState, grads: State, rest: State, samples: int) -> LocalTrainingState:
    """Take the optimizer's step along ``grads``, computed on ``samples`` samples, in place in ``job``'s tensors."""
    for each in list_updates(plan, job):
        optimizer = plan.optimizer if each.decay else replace(plan.optimizer, weight_decay=0.0)
        optimizer.update_(pick(job.params, each.names & grads.keys()), grads, job.optimizer, job.lr * each.lr_scale)
        if each.rule is not None:
            for entry, bounds in plan.rules[each.rule].limits.items():
                values = job.params[plan.own_names[each.rule][entry]]
                values.copy_(values.clamp(*bounds))  # clamp_ has no batching rule
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


def client_step(
    plan: Plan, job: LocalTrainingState, x: Tensor, y: Tensor, key: Tensor
) -> tuple[LocalTrainingState, Tensor]:
    """Take :func:`client_step_` on a copy of the job. Pure."""
    return client_step_(plan, replace(job, params=clone(job.params), optimizer=clone(job.optimizer)), x, y, key)
