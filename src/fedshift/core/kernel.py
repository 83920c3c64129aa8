"""The kernel: the start and end of a client's round, as pure functions that every engine runs.

In: a plan, and the states of a client and of the server. Out: local work in progress, then the client's new state and
its upload. In a communication round, each participant runs ``client_init``, ``client_step_`` for each batch
(:mod:`fedshift.core.step`) and ``client_final``; then the server aggregates the uploads
(:mod:`fedshift.core.server_round`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from ..utils.state import State, clone, pick
from .buffers import fit_spectral_norms
from .checks import check_sends
from .plan import Plan
from .rule import Client
from .states import ClientState, LocalTrainingState, SamplesBeforeWork, ServerState, Update


def init_server(plan: Plan) -> ServerState:
    """Return the server's state before the first round."""
    memory = tuple(dict(bound.server) for bound in plan.rules)
    kept = tuple(dict(bound.kept) for bound in plan.rules)
    return ServerState(round=0, shared=pick(plan.initial, plan.sent), memory=memory, kept=kept)


def broadcast(server: ServerState, name: str) -> ServerState:
    """Return the server's state as client ``name`` receives it, with the client's mix, if any, as shared entries."""
    if server.mixes is None:
        return server
    return replace(server, shared=server.shared | server.mixes.mix(name), mixes=None)


def init_client(plan: Plan) -> ClientState:
    """Return the state of a client before its first round; its entries share memory with the plan's."""
    memory = tuple(bound.on_client for bound in plan.rules)
    return ClientState(personal=pick(plan.initial, plan.personal), memory=memory)


def _merge_loaded_and_personal(plan: Plan, client: ClientState, server: ServerState) -> State:
    state = {**pick(server.shared, plan.loaded), **personal_entries(plan, client, server)}
    return {name: state[name] for name in plan.initial}


def personal_entries(plan: Plan, client: ClientState, server: ServerState) -> State:
    """Return the entries that a client keeps; before its first step, adopted entries are the server's."""
    return client.personal if client.steps else client.personal | pick(server.shared, plan.adopted)


def personal_state(plan: Plan, client: ClientState, server: ServerState) -> State:
    """Return the client's current model: loaded and personal entries, as its rules combine them."""
    if not (plan.mixes or plan.defines("personalize")):
        return _merge_loaded_and_personal(plan, client, server)
    job = _assemble(plan, client, server)
    return fit_spectral_norms(plan, _personalize(plan, job, plan.defines("personalize")))


def trained_state(plan: Plan, client: ClientState, update: Update, server: ServerState) -> State:
    """Return the client's model after local work and before aggregation; ``server``: the state that it loaded."""
    return personal_state(plan, client, replace(server, shared=update.shared))


def global_state(plan: Plan, server: ServerState) -> State | None:
    """Return the server's model, or None if it holds no complete model."""
    complete = plan.initial | server.shared  # buffers that are not persistent are not sent
    return {name: complete[name] for name in plan.initial} if plan.has_global else None


def client_init(
    plan: Plan, client: ClientState, server: ServerState, planned_steps: int = 0, seen: SamplesBeforeWork | None = None
) -> LocalTrainingState:
    """Start ``planned_steps`` local steps of a client from the shared and the personal entries.

    ``seen``: samples for :meth:`Rule.start`; None: skip that hook.
    """
    job = load_state(plan, client, server, planned_steps, seen)
    return replace(job, params=plan.clone_for_training(job.params), optimizer=clone(job.optimizer))


def load_state(
    plan: Plan, client: ClientState, server: ServerState, planned_steps: int = 0, seen: SamplesBeforeWork | None = None
) -> LocalTrainingState:
    """Return the job of :func:`client_init` without copying tensors of server and client: copy before a step."""
    job = replace(_assemble(plan, client, server), planned_steps=planned_steps, lr=plan.find_lr(server.round))
    if seen is not None and plan.defines("start"):
        at, memory = restart(plan, job), [*job.memory]
        for index in plan.defines("start"):
            bound = plan.rules[index]
            memory[index] = bound.rule.start(Client(plan, bound, index, at, at.state, seen))
        job = replace(job, memory=tuple(memory))
    job = restart(plan, job)
    return job if job.optimizer else replace(job, optimizer=plan.optimizer.init(job.params))


def _assemble(plan: Plan, client: ClientState, server: ServerState) -> LocalTrainingState:
    """Return a job with the loaded and personal entries, before rules personalize them; it takes no step."""
    state = merged = _merge_loaded_and_personal(plan, client, server)
    for bound, memory in zip(plan.rules, client.memory, strict=True):
        state = state | {name: memory[entry] for entry, name in bound.names.items()}
    trained = plan.trained.union(*plan.own_trained)
    own = zip(plan.rules, client.memory, strict=True)
    return LocalTrainingState(
        params=pick(state, trained), rest=pick(state, state.keys() - trained),
        global_params=pick(server.shared, plan.loaded), personal=pick(merged, plan.personal) if plan.rules else {},
        optimizer=client.optimizer, memory=tuple({name: kept[name] for name in bound.memory} for bound, kept in own),
        server_memory=server.memory, round=server.round, lr=math.nan, start=client.steps, done=client.steps,
        planned_steps=0, frozen=server.round >= plan.freeze_from,
    )  # fmt: skip


def _personalize(plan: Plan, job: LocalTrainingState, rules: Iterable[int]) -> State:
    """Return the model as ``rules`` combine the loaded entries and the client's."""
    together = job.state
    state = {name: job.global_params.get(name, together[name]) for name in plan.initial}
    for index in rules:
        bound = plan.rules[index]
        state = bound.rule.personalize(state, Client(plan, bound, index, job, together))
    return state


def restart(plan: Plan, job: LocalTrainingState) -> LocalTrainingState:
    """Start the model from the loaded entries and the client's, as rules combine them for local work. Pure."""
    starting = [index for index in plan.defines("personalize") if plan.rules[index].rule.personalizes == "start"]
    fresh = job.state | _personalize(plan, job, starting) if starting or job.separate_phase else job.state
    return replace(job, params=pick(fresh, job.params), rest=pick(fresh, job.rest), separate_phase=None)


def client_final(plan: Plan, job: LocalTrainingState) -> tuple[ClientState, Update]:
    """End local work. Returns the client's new state and its upload.

    Raises :class:`UsageError` if a rule's upload differs from its declarations.
    """
    together = job.state
    state = {name: together[name] for name in plan.initial}
    memory, uploads = [], []
    for index, bound in enumerate(plan.rules):
        kept, sent = {name: job.memory[index][name] for name in bound.memory}, State()
        if index in plan.defines("end"):
            kept, sent = bound.rule.end(Client(plan, bound, index, job, together))
        check_sends(plan, index, sent)
        memory.append(kept | {entry: together[name] for entry, name in bound.names.items()})
        uploads.append(sent)
    optimizer, steps = job.optimizer if plan.optimizer.keep else {}, job.done - job.start
    personal, shared = pick(state, plan.personal), pick(state, plan.sent)
    client = ClientState(personal=personal, optimizer=optimizer, memory=tuple(memory), steps=job.done)
    return client, Update(shared=shared, memory=tuple(uploads), weight=float(job.samples), steps=steps)
