"""The kernel: what clients and server hold, and the pure functions that every engine runs.

One communication round is, for each client that takes part, ``client_init``, ``client_step_`` for each batch and ``client_final``; then
the uploads are folded (``folding``). Clients and servers are plain values, so an engine may keep them in a dictionary,
in another process or on another machine. ``client_step_`` is ``compute_gradients`` (those of the ``compute_objective``, ``transform_gradients`` by the
rules) followed by ``update_``; the last three also work under ``torch.vmap``, so that an engine can run many clients in
one tensor program.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..nn.dropout import dropout_key
from ..utils.profiling import timed_section
from ..utils.state import State, add_prefix, clone, entries_under, pick
from .plan import Plan, compute_outputs, to_memory_format
from .rule import RuleContext


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientState:
    """All that a client keeps between rounds; none of it leaves the client. ``steps``: local steps done so far."""

    personal: State
    optimizer: State = field(default_factory=dict)
    memory: State = field(default_factory=dict)
    steps: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class ServerState:
    """What the server holds: rounds done, and, broadcast, the shared entries and its rules' memory.

    ``optimizer``: state of the server optimizer, which never leaves the server.
    """

    round: int
    shared: State
    memory: State = field(default_factory=dict)
    optimizer: State = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Update:
    """The whole uplink of one client in one round; nothing else ever leaves it.

    ``weight``: samples used this round. ``steps``: local steps of this round.
    """

    shared: State
    memory: State
    weight: float
    steps: int


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalTrainingState:
    """Local work in flight; ``params`` and ``optimizer`` are its own, ``rest`` holds buffers and frozen parameters.

    ``frozen``: whether BatchNorm's statistics are frozen. ``planned_steps``: steps that the round will have. ``apart``:
    whether the steps are those that train the rules' own parameters apart (:attr:`Rule.epochs`), which do not count.
    """

    params: State
    rest: State
    global_params: State
    optimizer: State
    memory: State
    server_memory: State
    lr: float
    start: int
    done: int
    planned_steps: int
    frozen: bool
    samples: int = 0
    apart: bool = False


def init_server(plan: Plan) -> ServerState:
    """The server before the first round."""
    common = pick(plan.initial, plan.trained & plan.loaded)
    memory: State = {}
    for index, rule in enumerate(plan.method.rules):
        memory |= add_prefix(plan.rule_prefix(index), rule.server_memory(common))
    optimizer = plan.method.server.init(pick(plan.initial, plan.trained & plan.sent)) if plan.method.server else {}
    return ServerState(round=0, shared=pick(plan.initial, plan.sent), memory=memory, optimizer=optimizer)


def init_client(plan: Plan) -> ClientState:
    """A client that has not taken part yet; its entries share memory with the plan's until it does."""
    params, rest = pick(plan.initial, plan.trained), pick(plan.initial, frozenset(plan.initial) - plan.trained)
    memory: State = dict(plan.extra_entries)
    for index, rule in enumerate(plan.method.rules):
        memory |= add_prefix(plan.rule_prefix(index), rule.client_memory(params, rest))
    return ClientState(personal=pick(plan.initial, plan.personal), memory=memory)


def _merge_loaded_and_personal(plan: Plan, client: ClientState, server: ServerState) -> State:
    state = {**pick(server.shared, plan.loaded), **client.personal}
    return {name: state[name] for name in plan.initial}


def _context_between_rounds(plan: Plan, client: ClientState, server: ServerState, index: int) -> RuleContext:
    """What the rule at ``index`` may read between rounds."""
    prefix = plan.rule_prefix(index)
    memory = entries_under(prefix, client.memory)
    own = entries_under(prefix, pick(client.memory, plan.extra_entries))
    return RuleContext(
        global_params=pick(server.shared, plan.loaded),
        memory={name: tensor for name, tensor in memory.items() if name not in own},
        extra_entries=own,
        server_memory=entries_under(prefix, server.memory),
    )


def personal_state(plan: Plan, client: ClientState, server: ServerState) -> State:
    """The model that the client would use now: what it loads, with its own entries, as its rules make it."""
    state = _merge_loaded_and_personal(plan, client, server)
    for index, rule in enumerate(plan.method.rules):
        state = rule.personal_model(state, _context_between_rounds(plan, client, server, index))
    return state


def trained_state(plan: Plan, client: ClientState, update: Update, server: ServerState) -> State:
    """The client's model just after local work, before aggregation; ``server``: what its work began from."""
    return personal_state(plan, client, replace(server, shared=update.shared))


def global_state(plan: Plan, server: ServerState) -> State | None:
    """The server's model, or None where it holds none."""
    return {name: server.shared[name] for name in plan.initial} if plan.has_global else None


def client_init(plan: Plan, client: ClientState, server: ServerState, planned_steps: int = 0) -> LocalTrainingState:
    """Start a client's local work of ``planned_steps`` steps: load the shared entries, keep the personal ones."""
    job = load_state(plan, client, server, planned_steps)
    return replace(job, params=plan.clone_for_training(job.params), optimizer=clone(job.optimizer))


def load_state(plan: Plan, client: ClientState, server: ServerState, planned_steps: int = 0) -> LocalTrainingState:
    """:func:`client_init`, but the job's tensors are still the server's and the client's own: copy before a step."""
    state = _merge_loaded_and_personal(plan, client, server)
    for index, rule in enumerate(plan.method.rules):
        state = rule.init_local(state, _context_between_rounds(plan, client, server, index))
    state |= pick(client.memory, plan.extra_entries)
    trained = plan.trained | plan.extra_trained
    params = pick(state, trained)
    return LocalTrainingState(
        params=params,
        rest={name: tensor for name, tensor in state.items() if name not in trained},
        global_params=pick(server.shared, plan.loaded),
        optimizer=client.optimizer or plan.optimizer.init(params),
        memory={name: tensor for name, tensor in client.memory.items() if name not in plan.extra_entries},
        server_memory=server.memory,
        lr=plan.optimizer.lr_in_round(server.round),
        start=client.steps,
        done=client.steps,
        planned_steps=planned_steps,
        frozen=server.round >= plan.freeze_from,
    )


def _rule_context(plan: Plan, job: LocalTrainingState, index: int, key: Tensor | None = None) -> RuleContext:
    prefix = plan.rule_prefix(index)
    return RuleContext(
        global_params=job.global_params,
        memory=entries_under(prefix, job.memory),
        extra_entries=entries_under(prefix, {**job.params, **job.rest}) if plan.extra_entries else {},
        server_memory=entries_under(prefix, job.server_memory),
        rest=pick(job.rest, plan.initial),
        lr=job.lr,
        steps=job.done - job.start,
        planned_steps=job.planned_steps if plan.method.rules[index].needs_step_budget else 0,
        key=key,
    )


def compute_objective(
    plan: Plan, job: LocalTrainingState, params: State, x: Tensor, y: Tensor, key: Tensor
) -> tuple[Tensor, Tensor, State]:
    """What a step descends at ``params``, on one batch; with the data loss, and the state beside the parameters after.

    ``x [B, ...]``, ``y [B]``; ``key``: int64 scalar from which dropout masks are drawn. In steps ``apart`` the model is
    not run, and the data loss is 0. Pure.
    """
    plan.set_mode(training=True, frozen=job.frozen)
    rest = clone(job.rest)

    def data_loss(state: State) -> Tensor:
        return plan.loss(compute_outputs(plan, state, x), y)

    with dropout_key(key):
        if job.apart:
            total = loss = torch.zeros((), dtype=plan.dtype, device=x.device)
        else:
            total = loss = data_loss(
                pick({**params, **rest}, plan.initial) if plan.extra_entries else {**params, **rest}
            )
        for index, rule in enumerate(plan.method.rules):
            if bool(rule.epochs) != job.apart:
                continue
            own = entries_under(plan.rule_prefix(index), {**params, **rest}) if plan.extra_entries else {}
            total = rule.transform_loss(
                total, params, replace(_rule_context(plan, job, index, key), extra_entries=own, data_loss=data_loss)
            )
    return total, loss, rest


def compute_gradients(
    plan: Plan, job: LocalTrainingState, x: Tensor, y: Tensor, key: Tensor
) -> tuple[State, State, Tensor]:
    """The gradients that the optimizer sees, the state beside the parameters after the batch, and the data loss.

    Arguments as of :func:`compute_objective`. Pure.
    """
    x = to_memory_format(x, plan.image_format)
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in job.params.items()}
    with torch.enable_grad():
        total, loss, rest = compute_objective(plan, job, leaves, x, y, key)
    found = torch.autograd.grad(total, tuple(leaves.values()), materialize_grads=True)
    after = {name: tensor.detach() for name, tensor in rest.items()}
    return transform_gradients(plan, job, dict(zip(leaves, found, strict=True)), key), after, loss.detach()


def transform_gradients(plan: Plan, job: LocalTrainingState, grads: State, key: Tensor) -> State:
    """What the rules make of the objective's gradients."""
    for index, rule in enumerate(plan.method.rules):
        grads = rule.transform_grads(grads, job.params, _rule_context(plan, job, index, key))
    return grads


def update_(plan: Plan, job: LocalTrainingState, grads: State, rest: State, samples: int) -> LocalTrainingState:
    """The job after the optimizer's step along ``grads`` on ``samples`` samples, in the memory of ``job``."""
    active = frozenset(job.params)
    for index, rule in enumerate(plan.method.rules):
        active = rule.trainable_at_step(active, _rule_context(plan, job, index))
    if not job.apart:
        plan.optimizer.update_(pick(job.params, active & plan.trained), grads, job.optimizer, job.lr)
    for index, rule in enumerate(plan.method.rules if plan.extra_trained else ()):
        if bool(rule.epochs) != job.apart:
            continue
        own = {name: tensor for name, tensor in job.params.items() if name.startswith(f"{plan.rule_prefix(index)}/")}
        plan.optimizer.update_(pick(own, active), grads, job.optimizer, job.lr * rule.lr_scale)
    if job.apart:
        return replace(job, rest=rest)
    return replace(job, rest=rest, done=job.done + 1, samples=job.samples + samples)


def client_step_(
    plan: Plan, job: LocalTrainingState, x: Tensor, y: Tensor, key: Tensor
) -> tuple[LocalTrainingState, Tensor]:
    """One local step on a batch, in the memory of ``job``. Returns the job after it and the data loss."""
    with timed_section("forward and backward"):
        grads, rest, loss = compute_gradients(plan, job, x, y, key)
    with timed_section("update"):
        return update_(plan, job, grads, rest, len(y)), loss


def client_step(
    plan: Plan, job: LocalTrainingState, x: Tensor, y: Tensor, key: Tensor
) -> tuple[LocalTrainingState, Tensor]:
    """:func:`client_step_` on a copy of the job: pure."""
    return client_step_(plan, replace(job, params=clone(job.params), optimizer=clone(job.optimizer)), x, y, key)


def client_final(plan: Plan, job: LocalTrainingState) -> tuple[ClientState, Update]:
    """End local work: what the client keeps, and what it uploads."""
    together = {**job.params, **job.rest}
    state = {name: together[name] for name in plan.initial}
    memory: State = {}
    upload: State = {}
    for index, rule in enumerate(plan.method.rules):
        kept, sent = rule.finalize(job.params, _rule_context(plan, job, index))
        memory |= add_prefix(plan.rule_prefix(index), kept)
        upload |= add_prefix(plan.rule_prefix(index), sent)
    memory |= pick(together, plan.extra_entries)
    client = ClientState(
        personal=pick(state, plan.personal),
        optimizer=job.optimizer if plan.optimizer.keep else {},
        memory=memory,
        steps=job.done,
    )
    shared = pick(state, plan.sent)
    return client, Update(shared=shared, memory=upload, weight=float(job.samples), steps=job.done - job.start)
