"""The kernel: what clients and server hold, and the pure functions that every engine runs.

One communication round is, for each client that takes part, ``begin``, ``step`` for each batch and ``finish``; then
``server_round`` once. Clients and servers are plain values, so an engine may keep them in a dictionary, in another
process or on another machine. ``step`` is pure and works under ``torch.vmap``; ``step_`` gives the same result but
reuses the memory that the job owns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor
from torch.func import functional_call, grad

from ..base.state import State, clone, pick, prefixed, under
from ..nn.dropout import dropout_key
from .plan import Plan, scratch
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
    """What the server holds and broadcasts: rounds done, the shared entries, and its rules' memory."""

    round: int
    shared: State
    memory: State = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Update:
    """The whole uplink of one client in one round; nothing else ever leaves it. ``weight``: samples used this round."""

    shared: State
    memory: State
    weight: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """Local work in flight; ``params`` and ``optimizer`` are its own, ``rest`` holds buffers and frozen parameters."""

    params: State
    rest: State
    anchor: State
    optimizer: State
    memory: State
    server_memory: State
    lr: float
    start: int
    done: int
    samples: int = 0


def init_server(plan: Plan) -> Server:
    """The server before the first round."""
    shared = pick(plan.initial, plan.trained & plan.loaded)
    memory: State = {}
    for index, rule in enumerate(plan.method.rules):
        memory |= prefixed(plan.rule_memory(index), rule.server_memory(shared))
    return Server(round=0, shared=pick(plan.initial, plan.sent), memory=memory)


def init_client(plan: Plan) -> Client:
    """A client that has not taken part yet; its personal entries share memory with the plan's until it does."""
    trainable = pick(plan.initial, plan.trained)
    memory: State = {}
    for index, rule in enumerate(plan.method.rules):
        memory |= prefixed(plan.rule_memory(index), rule.client_memory(trainable))
    return Client(personal=pick(plan.initial, plan.personal), memory=memory)


def personal_state(plan: Plan, client: Client, server: Server) -> State:
    """The model that the client would use now: what it loads, with its own entries."""
    state = {**pick(server.shared, plan.loaded), **client.personal}
    return {name: state[name] for name in plan.initial}


def global_state(plan: Plan, server: Server) -> State | None:
    """The server's model, or None where it holds none."""
    return {name: server.shared[name] for name in plan.initial} if plan.has_global else None


def begin(plan: Plan, client: Client, server: Server) -> Job:
    """Start a client's local work: load the shared entries, keep the personal ones, prepare the optimizer."""
    state = personal_state(plan, client, server)
    params = clone(pick(state, plan.trained))
    return Job(
        params=params,
        rest={name: tensor for name, tensor in state.items() if name not in plan.trained},
        anchor=pick(server.shared, plan.loaded),
        optimizer=clone(client.optimizer) or plan.optimizer.init(params),
        memory=client.memory,
        server_memory=server.memory,
        lr=plan.optimizer.rate(server.round),
        start=client.steps,
        done=client.steps,
    )


def _local(plan: Plan, job: Job, index: int) -> Local:
    prefix = plan.rule_memory(index)
    return Local(
        anchor=job.anchor,
        memory=under(prefix, job.memory),
        server=under(prefix, job.server_memory),
        lr=job.lr,
        steps=job.done - job.start,
    )


def gradients(plan: Plan, job: Job, x: Tensor, y: Tensor, key: Tensor) -> tuple[State, State, Tensor]:
    """Gradients of the objective on one batch, the state beside the parameters after it, and the data loss.

    ``x [B, ...]``, ``y [B]``; ``key``: int64 scalar from which dropout masks are drawn. Pure.
    """
    plan.module.train()
    chain = [(rule, _local(plan, job, index)) for index, rule in enumerate(plan.method.rules)]

    def objective(params: State) -> tuple[Tensor, tuple[Tensor, State]]:
        rest, weights = clone(job.rest), params
        for rule, local in chain:
            weights = rule.resolve(weights, local)
        with dropout_key(key):
            outputs = functional_call(plan.module, {**weights, **rest, **scratch(plan.module)}, (x,))
        data_loss = plan.loss(outputs, y)
        total = data_loss
        for rule, local in chain:
            total = rule.loss(total, params, local)
        return total, (data_loss, rest)

    grads, (loss, rest) = grad(objective, has_aux=True)(job.params)
    for rule, local in chain:
        grads = rule.grads(grads, job.params, local)
    return grads, rest, loss


def step_(plan: Plan, job: Job, x: Tensor, y: Tensor, key: Tensor) -> tuple[Job, Tensor]:
    """One local step on a batch, in the memory of ``job``. Returns the job after it and the data loss."""
    grads, rest, loss = gradients(plan, job, x, y, key)
    plan.optimizer.update_(job.params, grads, job.optimizer, job.lr)
    return replace(job, rest=rest, done=job.done + 1, samples=job.samples + len(y)), loss


def step(plan: Plan, job: Job, x: Tensor, y: Tensor, key: Tensor) -> tuple[Job, Tensor]:
    """:func:`step_` on a copy of the job: pure, and fit for ``torch.vmap``."""
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
    client = Client(
        personal=pick(state, plan.personal),
        optimizer=job.optimizer if plan.optimizer.keep else {},
        memory=memory,
        steps=job.done,
    )
    return client, Update(shared=pick(state, plan.sent), memory=upload, weight=float(job.samples))


def server_round(plan: Plan, server: Server, updates: Mapping[str, Update], population: int) -> Server:
    """Fold the uploads of the clients that took part (by client name) into the server; ``population``: all clients.

    Uploads are taken in the order of the clients' names, whatever order they arrived in.
    """
    ordered = [updates[name] for name in sorted(updates)]
    raw = [update.weight if plan.method.weighting == "samples" else 1.0 for update in ordered]
    weights = [weight / sum(raw) for weight in raw]
    memory: State = {}
    for index, rule in enumerate(plan.method.rules):
        prefix = plan.rule_memory(index)
        uploads = [under(prefix, update.memory) for update in ordered]
        memory |= prefixed(prefix, rule.fold(under(prefix, server.memory), uploads, weights, population))
    shared = plan.method.aggregate([update.shared for update in ordered], weights)
    return Server(round=server.round + 1, shared=shared, memory=memory)
