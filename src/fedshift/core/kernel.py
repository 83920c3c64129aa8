"""The kernel: what clients and server hold, and the pure functions that every engine runs.

One communication round is, for each client that takes part, ``begin``, ``step_`` for each batch and ``finish``; then
the uploads are folded (``folding``). Clients and servers are plain values, so an engine may keep them in a dictionary,
in another process or on another machine. ``step_`` is ``gradients`` (those of the ``objective``, ``corrected`` by the
rules) followed by ``update_``; the last three also work under ``torch.vmap``, so that an engine can run many clients in
one tensor program.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..base.profiling import part
from ..base.state import State, clone, pick, prefixed, under
from ..nn.dropout import dropout_key
from .plan import Plan, laid, outputs
from .rule import Local


@dataclass(frozen=True, kw_only=True, eq=False)
class Client:
    """All that a client keeps between rounds; none of it leaves the client. ``steps``: local steps done so far."""

    personal: State
    optimizer: State = field(default_factory=dict)
    memory: State = field(default_factory=dict)
    steps: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Server:
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
class Job:
    """Local work in flight; ``params`` and ``optimizer`` are its own, ``rest`` holds buffers and frozen parameters.

    ``frozen``: whether BatchNorm's statistics are frozen. ``planned``: steps that the round will have. ``apart``:
    whether the steps are those that train the rules' own parameters apart (:attr:`Rule.epochs`), which do not count.
    """

    params: State
    rest: State
    anchor: State
    optimizer: State
    memory: State
    server_memory: State
    lr: float
    start: int
    done: int
    planned: int
    frozen: bool
    samples: int = 0
    apart: bool = False


def init_server(plan: Plan) -> Server:
    """The server before the first round."""
    common = pick(plan.initial, plan.trained & plan.loaded)
    memory: State = {}
    for index, rule in enumerate(plan.method.rules):
        memory |= prefixed(plan.rule_memory(index), rule.server_memory(common))
    optimizer = plan.method.server.init(pick(plan.initial, plan.trained & plan.sent)) if plan.method.server else {}
    return Server(round=0, shared=pick(plan.initial, plan.sent), memory=memory, optimizer=optimizer)


def init_client(plan: Plan) -> Client:
    """A client that has not taken part yet; its entries share memory with the plan's until it does."""
    params, rest = pick(plan.initial, plan.trained), pick(plan.initial, frozenset(plan.initial) - plan.trained)
    memory: State = dict(plan.own)
    for index, rule in enumerate(plan.method.rules):
        memory |= prefixed(plan.rule_memory(index), rule.client_memory(params, rest))
    return Client(personal=pick(plan.initial, plan.personal), memory=memory)


def _loaded(plan: Plan, client: Client, server: Server) -> State:
    state = {**pick(server.shared, plan.loaded), **client.personal}
    return {name: state[name] for name in plan.initial}


def _kept(plan: Plan, client: Client, server: Server, index: int) -> Local:
    """What the rule at ``index`` may read between rounds."""
    prefix = plan.rule_memory(index)
    memory = under(prefix, client.memory)
    own = under(prefix, pick(client.memory, plan.own))
    return Local(
        anchor=pick(server.shared, plan.loaded),
        memory={name: tensor for name, tensor in memory.items() if name not in own},
        own=own,
        server=under(prefix, server.memory),
    )


def personal_state(plan: Plan, client: Client, server: Server) -> State:
    """The model that the client would use now: what it loads, with its own entries, as its rules make it."""
    state = _loaded(plan, client, server)
    for index, rule in enumerate(plan.method.rules):
        state = rule.personal(state, _kept(plan, client, server, index))
    return state


def trained_state(plan: Plan, client: Client, update: Update, server: Server) -> State:
    """The client's model just after local work, before aggregation; ``server``: what its work began from."""
    return personal_state(plan, client, replace(server, shared=update.shared))


def global_state(plan: Plan, server: Server) -> State | None:
    """The server's model, or None where it holds none."""
    return {name: server.shared[name] for name in plan.initial} if plan.has_global else None


def begin(plan: Plan, client: Client, server: Server, planned: int = 0) -> Job:
    """Start a client's local work of ``planned`` steps: load the shared entries, keep the personal ones."""
    job = arrive(plan, client, server, planned)
    return replace(job, params=plan.owned(job.params), optimizer=clone(job.optimizer))


def arrive(plan: Plan, client: Client, server: Server, planned: int = 0) -> Job:
    """:func:`begin`, but the job's tensors are still the server's and the client's own: copy before a step."""
    state = _loaded(plan, client, server)
    for index, rule in enumerate(plan.method.rules):
        state = rule.start(state, _kept(plan, client, server, index))
    state |= pick(client.memory, plan.own)
    trained = plan.trained | plan.own_trained
    params = pick(state, trained)
    return Job(
        params=params,
        rest={name: tensor for name, tensor in state.items() if name not in trained},
        anchor=pick(server.shared, plan.loaded),
        optimizer=client.optimizer or plan.optimizer.init(params),
        memory={name: tensor for name, tensor in client.memory.items() if name not in plan.own},
        server_memory=server.memory,
        lr=plan.optimizer.rate(server.round),
        start=client.steps,
        done=client.steps,
        planned=planned,
        frozen=server.round >= plan.freeze_from,
    )


def _local(plan: Plan, job: Job, index: int, key: Tensor | None = None) -> Local:
    prefix = plan.rule_memory(index)
    return Local(
        anchor=job.anchor,
        memory=under(prefix, job.memory),
        own=under(prefix, {**job.params, **job.rest}) if plan.own else {},
        server=under(prefix, job.server_memory),
        rest=pick(job.rest, plan.initial),
        lr=job.lr,
        steps=job.done - job.start,
        planned=job.planned if plan.method.rules[index].paced else 0,
        key=key,
    )


def objective(plan: Plan, job: Job, params: State, x: Tensor, y: Tensor, key: Tensor) -> tuple[Tensor, Tensor, State]:
    """What a step descends at ``params``, on one batch; with the data loss, and the state beside the parameters after.

    ``x [B, ...]``, ``y [B]``; ``key``: int64 scalar from which dropout masks are drawn. In steps ``apart`` the model is
    not run, and the data loss is 0. Pure.
    """
    plan.switch(training=True, frozen=job.frozen)
    rest = clone(job.rest)

    def data_loss(state: State) -> Tensor:
        return plan.loss(outputs(plan, state, x), y)

    with dropout_key(key):
        if job.apart:
            total = loss = torch.zeros((), dtype=plan.dtype, device=x.device)
        else:
            total = loss = data_loss(pick({**params, **rest}, plan.initial) if plan.own else {**params, **rest})
        for index, rule in enumerate(plan.method.rules):
            if bool(rule.epochs) != job.apart:
                continue
            own = under(plan.rule_memory(index), {**params, **rest}) if plan.own else {}
            total = rule.loss(total, params, replace(_local(plan, job, index, key), own=own, data_loss=data_loss))
    return total, loss, rest


def gradients(plan: Plan, job: Job, x: Tensor, y: Tensor, key: Tensor) -> tuple[State, State, Tensor]:
    """The gradients that the optimizer sees, the state beside the parameters after the batch, and the data loss.

    Arguments as of :func:`objective`. Pure.
    """
    x = laid(x, plan.image_format)
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in job.params.items()}
    with torch.enable_grad():
        total, loss, rest = objective(plan, job, leaves, x, y, key)
    found = torch.autograd.grad(total, tuple(leaves.values()), materialize_grads=True)
    after = {name: tensor.detach() for name, tensor in rest.items()}
    return corrected(plan, job, dict(zip(leaves, found, strict=True)), key), after, loss.detach()


def corrected(plan: Plan, job: Job, grads: State, key: Tensor) -> State:
    """What the rules make of the objective's gradients."""
    for index, rule in enumerate(plan.method.rules):
        grads = rule.grads(grads, job.params, _local(plan, job, index, key))
    return grads


def update_(plan: Plan, job: Job, grads: State, rest: State, samples: int) -> Job:
    """The job after the optimizer's step along ``grads`` on ``samples`` samples, in the memory of ``job``."""
    active = frozenset(job.params)
    for index, rule in enumerate(plan.method.rules):
        active = rule.active(active, _local(plan, job, index))
    if not job.apart:
        plan.optimizer.update_(pick(job.params, active & plan.trained), grads, job.optimizer, job.lr)
    for index, rule in enumerate(plan.method.rules if plan.own_trained else ()):
        if bool(rule.epochs) != job.apart:
            continue
        own = {name: tensor for name, tensor in job.params.items() if name.startswith(f"{plan.rule_memory(index)}/")}
        plan.optimizer.update_(pick(own, active), grads, job.optimizer, job.lr * rule.speed)
    if job.apart:
        return replace(job, rest=rest)
    return replace(job, rest=rest, done=job.done + 1, samples=job.samples + samples)


def step_(plan: Plan, job: Job, x: Tensor, y: Tensor, key: Tensor) -> tuple[Job, Tensor]:
    """One local step on a batch, in the memory of ``job``. Returns the job after it and the data loss."""
    with part("forward and backward"):
        grads, rest, loss = gradients(plan, job, x, y, key)
    with part("update"):
        return update_(plan, job, grads, rest, len(y)), loss


def step(plan: Plan, job: Job, x: Tensor, y: Tensor, key: Tensor) -> tuple[Job, Tensor]:
    """:func:`step_` on a copy of the job: pure."""
    return step_(plan, replace(job, params=clone(job.params), optimizer=clone(job.optimizer)), x, y, key)


def finish(plan: Plan, job: Job) -> tuple[Client, Update]:
    """End local work: what the client keeps, and what it uploads."""
    together = {**job.params, **job.rest}
    state = {name: together[name] for name in plan.initial}
    memory: State = {}
    upload: State = {}
    for index, rule in enumerate(plan.method.rules):
        kept, sent = rule.finish(job.params, _local(plan, job, index))
        memory |= prefixed(plan.rule_memory(index), kept)
        upload |= prefixed(plan.rule_memory(index), sent)
    memory |= pick(together, plan.own)
    client = Client(
        personal=pick(state, plan.personal),
        optimizer=job.optimizer if plan.optimizer.keep else {},
        memory=memory,
        steps=job.done,
    )
    shared = pick(state, plan.sent)
    return client, Update(shared=shared, memory=upload, weight=float(job.samples), steps=job.done - job.start)
