"""The kernel: the start and end of a client's round, as pure functions that every engine runs.

In a communication round, each participant runs ``client_init``, ``client_step_`` for each batch
(:mod:`fedshift.core.step`) and ``client_final``; then the server aggregates the uploads
(:mod:`fedshift.core.server_round`). Before round 1, each client may run ``client_prelude``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from torch import Tensor

from ..nn.recognition import placed_hooks
from ..utils.state import State, clone, pick
from .buffers import fit_spectral_norms
from .checks import check_sends
from .contexts import EndContext, Glimpse, Hook, LookContext, Owned, RoundContext
from .plan import Plan, forward
from .states import ClientState, LocalTrainingState, Seen, ServerState, Update
from .step import client_facts


def init_server(plan: Plan) -> ServerState:
    """Return the server's state before the first round."""
    common = pick(plan.initial, plan.trained & plan.loaded)
    return ServerState(
        round=0,
        shared=pick(plan.initial, plan.sent),
        memory=tuple(dict(bound.server) for bound in plan.rules),
        optimizer=plan.method.server.init(common) if plan.method.server else {},
    )


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


def _context_between_rounds(plan: Plan, client: ClientState, server: ServerState, index: int) -> RoundContext:
    """Return the context of the rule at ``index`` between rounds."""
    kept, bound = client.memory[index], plan.rules[index]
    return RoundContext(
        bound=bound,
        loaded=pick(server.shared, plan.loaded),
        memory={name: kept[name] for name in bound.memory},
        own=Owned(*(pick(kept, part) for part in (bound.model, bound.params, bound.buffers))),
        server=server.memory[index],
        round=server.round,
        lr=plan.optimizer.lr_in_round(server.round),
    )


def personal_state(plan: Plan, client: ClientState, server: ServerState) -> State:
    """Return the client's current model: loaded and personal entries, as its rules combine them."""
    state = _merge_loaded_and_personal(plan, client, server)
    for index in plan.defines("personalize"):
        state = plan.rules[index].rule.personalize(state, _context_between_rounds(plan, client, server, index))
    return fit_spectral_norms(plan, state) if plan.mixes or plan.defines("personalize") else state


def trained_state(plan: Plan, client: ClientState, update: Update, server: ServerState) -> State:
    """Return the client's model after local work and before aggregation; ``server``: the state that it loaded."""
    return personal_state(plan, client, replace(server, shared=update.shared))


def global_state(plan: Plan, server: ServerState) -> State | None:
    """Return the server's model, or None if it holds no complete model."""
    complete = plan.initial | server.shared  # buffers that are not persistent are not sent
    return {name: complete[name] for name in plan.initial} if plan.has_global else None


def client_init(
    plan: Plan, client: ClientState, server: ServerState, planned_steps: int = 0, seen: Seen | None = None
) -> LocalTrainingState:
    """Start ``planned_steps`` local steps of a client from the shared and the personal entries.

    ``seen``: samples for :meth:`Rule.start`; None: skip that hook.
    """
    job = load_state(plan, client, server, planned_steps, seen)
    return replace(job, params=plan.clone_for_training(job.params), optimizer=clone(job.optimizer))


def load_state(
    plan: Plan, client: ClientState, server: ServerState, planned_steps: int = 0, seen: Seen | None = None, *,
    prelude: bool = False,
) -> LocalTrainingState:  # fmt: skip
    """Return the job of :func:`client_init` without copying tensors of server and client: copy before a step."""
    contexts = [_context_between_rounds(plan, client, server, index) for index in range(len(plan.rules))]
    merged = _merge_loaded_and_personal(plan, client, server)
    state = _begin(plan, merged, contexts)
    if seen is not None and plan.defines("start"):
        contexts = look(plan, contexts, state, seen, prelude=prelude)
        state = _begin(plan, merged, contexts)
    for index, names in enumerate(plan.own_names):
        state = state | {name: client.memory[index][entry] for entry, name in names.items()}
    trained = plan.trained.union(*plan.own_trained)
    params = pick(state, trained)
    return LocalTrainingState(
        params=params,
        rest={name: tensor for name, tensor in state.items() if name not in trained},
        global_params=pick(server.shared, plan.loaded),
        personal=pick(merged, plan.personal) if plan.rules else {},
        optimizer=client.optimizer or plan.optimizer.init(params),
        memory=tuple(context.memory for context in contexts),
        server_memory=server.memory,
        round=server.round,
        lr=plan.optimizer.lr_in_round(server.round),
        start=client.steps,
        done=client.steps,
        planned_steps=planned_steps,
        frozen=server.round >= plan.freeze_from,
        prelude=prelude,
    )


def _begin(plan: Plan, state: State, contexts: Sequence[RoundContext]) -> State:
    """Return the model that local work starts from, given the loaded and the personal entries."""
    for index in plan.defines("personalize"):
        rule = plan.rules[index].rule
        state = rule.personalize(state, contexts[index]) if rule.personalizes == "start" else state
    return state


def look(
    plan: Plan, contexts: Sequence[RoundContext], state: State, seen: Seen, *, prelude: bool
) -> list[RoundContext]:
    """Call the rules' :meth:`Rule.start` on the model ``state``; return their contexts with the new memories."""
    return [
        replace(each, memory=each.bound.rule.start(_look_context(plan, each, state, seen, prelude=prelude)))
        if index in plan.defines("start") and (each.bound.prelude or not prelude)
        else each
        for index, each in enumerate(contexts)
    ]


def _look_context(plan: Plan, context: RoundContext, state: State, seen: Seen, *, prelude: bool) -> LookContext:
    count = context.bound.samples_before_work
    x, y, layers = seen.x[:count], seen.y[:count], dict(plan.module.named_modules())

    def run(hooks: Mapping[str, Hook]) -> None:
        with placed_hooks(layers[name].register_forward_pre_hook(hook) for name, hook in hooks.items()):
            forward(plan, clone(state), x, training=True, key=seen.key)

    def loss_at(entries: State) -> Tensor:
        return plan.loss(forward(plan, clone({**state, **entries}), x, training=False), y)

    common = {each.name: getattr(context, each.name) for each in fields(context)}
    return LookContext(**common, prelude=prelude, _targets=seen.targets, _first=Glimpse(len(x), run, loss_at))


def restart(plan: Plan, job: LocalTrainingState) -> LocalTrainingState:
    """Restart the model from its rules' :meth:`Rule.personalize` after separate phases. Pure."""
    together = job.state
    state = {name: job.global_params.get(name, together[name]) for name in plan.initial}
    facts = (client_facts(plan, job, index, together) for index in range(len(plan.rules)))
    contexts = [RoundContext(**each, round=job.round) for each in facts]
    fresh = together | _begin(plan, state, contexts)
    return replace(job, params=pick(fresh, job.params), rest=pick(fresh, job.rest), separate_phase=None)


def client_final(plan: Plan, job: LocalTrainingState) -> tuple[ClientState, Update]:
    """End local work. Returns the client's new state and its upload.

    Raises :class:`UsageError` if a rule's upload differs from its declarations.
    """
    together = job.state
    state = {name: together[name] for name in plan.initial}
    memory, uploads, steps = [], [], job.done - job.start
    for index, bound in enumerate(plan.rules):
        kept, sent = {name: job.memory[index][name] for name in bound.memory}, State()
        if index in plan.defines("end") and (bound.prelude or not job.prelude):
            facts, end = client_facts(plan, job, index, together), bound.rule.end
            params, rest = ({name: together[name] for name in part} for part in (plan.params, plan.buffers))
            facts |= {"params": params, "buffers": rest, "steps": steps, "prelude": job.prelude}
            kept, sent = end(EndContext(**facts, round=job.round))
        check_sends(plan, index, sent, prelude=job.prelude)
        memory.append(kept | {entry: together[name] for entry, name in plan.own_names[index].items()})
        uploads.append(sent)
    client = ClientState(
        personal=pick(state, plan.personal),
        optimizer=job.optimizer if plan.optimizer.keep else {},
        memory=tuple(memory),
        steps=job.done,
    )
    shared = {} if job.prelude else pick(state, plan.sent)
    return client, Update(shared=shared, memory=tuple(uploads), weight=float(job.samples), steps=steps)


def client_prelude(plan: Plan, samples: int, seen: Seen | None) -> Update:
    """Return the upload of a client with ``samples`` training samples in the exchange before round 1.

    It depends only on the plan and the client's data, so that the client receives nothing, and a repeated call returns
    the same upload.

    Raises :class:`UsageError` if a rule's upload differs from its declarations.
    """
    job = load_state(plan, init_client(plan), init_server(plan), 0, seen, prelude=True)
    return client_final(plan, replace(job, samples=samples))[1]
