"""The kernel: the states of clients and server, and the pure functions that every engine runs.

One communication round is, for each client that takes part, ``client_init``, one ``client_step_`` for each batch and
``client_final``; then the uploads are aggregated (:mod:`fedshift.core.server_round`). States are plain values, so an
engine may keep them in a dictionary, in another process or on another machine. A step is ``compute_gradients`` (of
``compute_objective``, changed by the rules in ``transform_gradients``), then ``update_``; these parts also work
under ``torch.vmap``, so that an engine can run many clients in one tensor program.

A method's rules have one memory each: ``memory[i]`` and ``server_memory[i]`` belong to rule ``i``. While a client
works, a rule's own entries lie beside the model's (:attr:`fedshift.core.plan.Plan.own_names`), so that the
optimizer changes them all; between rounds they are part of the rule's memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..nn.dropout import draw_bits, dropout_key
from ..nn.linear import use_torch_func
from ..utils.profiling import timed_section
from ..utils.state import State, clone, nbytes, pick
from .aggregation import Mixes
from .contexts import (
    EndContext,
    ForwardPass,
    Glimpse,
    Hook,
    LookContext,
    LossContext,
    Owned,
    RoundContext,
    StepContext,
)
from .disclosure import check_end
from .plan import Apart, Plan, Updated, compute_features, compute_outputs, forward, to_memory_format

SAMPLE_GRADIENTS = 2**27
"""Bytes of single samples' gradients that are held at a time."""
SAMPLE_KEYS = 2**22
"""Number of the draws of samples' keys under a step's key, beyond any that dropout layers or rules make."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientState:
    """State that a client keeps between rounds; none of it leaves the client.

    Args:
        personal: Entries that the client keeps instead of loading them.
        optimizer: State of the local optimizer, where that survives a round.
        memory: One state for each rule, its own entries included.
        steps: Local steps done so far.

    """

    personal: State
    optimizer: State = field(default_factory=dict)
    memory: tuple[State, ...] = ()
    steps: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class ServerState:
    """State of the server: ``shared`` entries and the rules' ``memory`` are broadcast, ``optimizer`` and ``kept`` stay.

    ``round``: rounds done. ``optimizer``: the server optimizer's state. ``kept``: what the aggregation keeps.
    ``mixes``: what :func:`broadcast` sends to some clients in place of ``shared``, where the aggregation makes mixes.
    """

    round: int
    shared: State
    memory: tuple[State, ...] = ()
    optimizer: State = field(default_factory=dict)
    kept: State = field(default_factory=dict)
    mixes: Mixes | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Update:
    """The whole upload of one client in one round; nothing else ever leaves it.

    ``memory``: one state for each rule. ``weight``: samples used this round. ``steps``: local steps of this round.
    """

    shared: State
    memory: tuple[State, ...] = ()
    weight: float
    steps: int


class Seen(NamedTuple):
    """The part of a client's samples that rules see before local work; empty where none reads it.

    ``targets``: those of all training samples, ``[N, ...]``. ``x [B, ...]`` and ``y [B, ...]``: the round's first
    samples. ``key``: that of its first step.
    """

    targets: Tensor
    x: Tensor
    y: Tensor
    key: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalTrainingState:
    """A client's local work in progress.

    Args:
        params: Parameters that are trained, the rules' included; owned by the job, like ``optimizer``.
        rest: Buffers and frozen parameters.
        global_params: Entries as loaded this round.
        optimizer: State of the local optimizer.
        memory: One state for each rule, without its own entries.
        server_memory: One state for each rule, as broadcast.
        round: Rounds done before this one.
        lr: Learning rate of the round.
        start: Steps that the client had done before the round.
        done: Steps that it has done now.
        planned_steps: Steps that the round will have.
        frozen: Whether BatchNorm's statistics are frozen.
        samples: Samples used this round.
        apart: The phase whose passes these are, which train a rule's own parameters alone, and do not count.
        prelude: This is the exchange before round 1, which has no steps.

    """

    params: State
    rest: State
    global_params: State
    optimizer: State
    memory: tuple[State, ...]
    server_memory: tuple[State, ...]
    round: int
    lr: float
    start: int
    done: int
    planned_steps: int
    frozen: bool
    samples: int = 0
    apart: Apart | None = None
    prelude: bool = False
    counter: Tensor | None = None

    @property
    def steps(self) -> Tensor:
        """Steps of the round so far, an int64 scalar."""
        return torch.tensor(self.done - self.start) if self.counter is None else self.counter

    @property
    def state(self) -> State:
        """All entries, the rules' included."""
        return {**self.params, **self.rest}


def init_server(plan: Plan) -> ServerState:
    """Return the server before the first round."""
    common = pick(plan.initial, plan.trained & plan.loaded)
    return ServerState(
        round=0,
        shared=pick(plan.initial, plan.sent),
        memory=tuple(dict(bound.own.server) for bound in plan.rules),
        optimizer=plan.method.server.init(common) if plan.method.server else {},
    )


def broadcast(server: ServerState, name: str) -> ServerState:
    """Return the server as client ``name`` sees it: with its mix, where there is one, in place of shared entries."""
    if server.mixes is None:
        return server
    return replace(server, shared=server.shared | server.mixes.mix(name), mixes=None)


def init_client(plan: Plan) -> ClientState:
    """Return a client that has not taken part yet; its entries share memory with the plan's until it does."""
    memory = tuple(bound.own.kept for bound in plan.rules)
    return ClientState(personal=pick(plan.initial, plan.personal), memory=memory)


def _merge_loaded_and_personal(plan: Plan, client: ClientState, server: ServerState) -> State:
    state = {**pick(server.shared, plan.loaded), **personal_entries(plan, client, server)}
    return {name: state[name] for name in plan.initial}


def personal_entries(plan: Plan, client: ClientState, server: ServerState) -> State:
    """Return the entries that a client does not load: its own, of which some are the server's until it has begun."""
    return client.personal if client.steps else client.personal | pick(server.shared, plan.adopted)


def _context_between_rounds(plan: Plan, client: ClientState, server: ServerState, index: int) -> RoundContext:
    """Return what the rule at ``index`` may read between rounds."""
    kept, bound = client.memory[index], plan.rules[index]
    return RoundContext(
        bound=bound,
        loaded=pick(server.shared, plan.loaded),
        memory={name: kept[name] for name in bound.own.memory},
        own=Owned(*(pick(kept, part) for part in (bound.own.model, bound.own.params, bound.own.buffers))),
        server=server.memory[index],
        round=server.round,
        lr=plan.optimizer.lr_in_round(server.round),
    )


def personal_state(plan: Plan, client: ClientState, server: ServerState) -> State:
    """Return the model that the client would use now: entries that it loads and its own, as its rules combine them."""
    state = _merge_loaded_and_personal(plan, client, server)
    for index in plan.defines("personalize"):
        state = plan.rules[index].rule.personalize(state, _context_between_rounds(plan, client, server, index))
    return state


def trained_state(plan: Plan, client: ClientState, update: Update, server: ServerState) -> State:
    """Return the client's model just after local work, before aggregation; ``server``: the one that it loaded from."""
    return personal_state(plan, client, replace(server, shared=update.shared))


def global_state(plan: Plan, server: ServerState) -> State | None:
    """Return the server's model, or None where it holds none."""
    return {name: server.shared[name] for name in plan.initial} if plan.has_global else None


def client_init(
    plan: Plan, client: ClientState, server: ServerState, planned_steps: int = 0, seen: Seen | None = None
) -> LocalTrainingState:
    """Start a client's local work of ``planned_steps`` steps: load the shared entries, keep the personal ones.

    ``seen``: the samples that rules look at; None: they do not look.
    """
    job = load_state(plan, client, server, planned_steps, seen)
    return replace(job, params=plan.clone_for_training(job.params), optimizer=clone(job.optimizer))


def load_state(
    plan: Plan,
    client: ClientState,
    server: ServerState,
    planned_steps: int = 0,
    seen: Seen | None = None,
    *,
    prelude: bool = False,
) -> LocalTrainingState:
    """Return :func:`client_init`'s job over the tensors of server and client themselves: copy before a step."""
    contexts = [_context_between_rounds(plan, client, server, index) for index in range(len(plan.rules))]
    merged = _merge_loaded_and_personal(plan, client, server)
    state = _begin(plan, merged, contexts)
    if seen is not None and plan.defines("look"):
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
    """Return the model that local work starts from, given the entries that the client loads and keeps."""
    for index in plan.defines("personalize"):
        rule = plan.rules[index].rule
        state = rule.personalize(state, contexts[index]) if rule.personalizes == "start" else state
    return state


def look(
    plan: Plan, contexts: Sequence[RoundContext], state: State, seen: Seen, *, prelude: bool
) -> list[RoundContext]:
    """Return the rules' contexts with their memories for the round, having looked at the model under ``state``."""
    return [
        replace(each, memory=each.bound.rule.look(_look_context(plan, each, state, seen, prelude=prelude)))
        if index in plan.defines("look") and (each.bound.prelude or not prelude)
        else each
        for index, each in enumerate(contexts)
    ]


def _look_context(plan: Plan, context: RoundContext, state: State, seen: Seen, *, prelude: bool) -> LookContext:
    count = context.bound.reads.first
    x, y, layers = seen.x[:count], seen.y[:count], dict(plan.module.named_modules())

    def run(hooks: Mapping[str, Hook]) -> None:
        handles = [layers[name].register_forward_pre_hook(hook) for name, hook in hooks.items()]
        try:
            forward(plan, clone(state), x, training=True, key=seen.key)
        finally:
            for handle in handles:
                handle.remove()

    def loss_at(entries: State) -> Tensor:
        return plan.loss(forward(plan, clone({**state, **entries}), x, training=False), y)

    given = {each.name: getattr(context, each.name) for each in fields(context)}
    return LookContext(**given, prelude=prelude, _targets=seen.targets, _first=Glimpse(len(x), run, loss_at))


def restart(plan: Plan, job: LocalTrainingState) -> LocalTrainingState:
    """Return a job that has taken no steps but those ``apart`` with the model that its rules now start from. Pure."""
    together = job.state
    state = {name: job.global_params.get(name, together[name]) for name in plan.initial}
    contexts = [_round_context(plan, job, index) for index in range(len(plan.rules))]
    fresh = together | _begin(plan, state, contexts)
    return replace(job, params=pick(fresh, job.params), rest=pick(fresh, job.rest), apart=None)


def _own(plan: Plan, index: int, state: State) -> Owned:
    own, names = plan.rules[index].own, plan.own_names[index]
    return Owned(*({entry: state[names[entry]] for entry in part} for part in (own.model, own.params, own.buffers)))


def _client_facts(plan: Plan, job: LocalTrainingState, index: int, state: State) -> dict[str, Any]:
    """Return the fields of the :class:`ClientContext` of the rule at ``index``; ``state``: all current entries."""
    return {
        "bound": plan.rules[index],
        "loaded": job.global_params,
        "memory": job.memory[index],
        "own": _own(plan, index, state),
        "server": job.server_memory[index],
        "lr": job.lr,
    }


def _round_context(plan: Plan, job: LocalTrainingState, index: int) -> RoundContext:
    return RoundContext(**_client_facts(plan, job, index, job.state), round=job.round)


def _step_facts(plan: Plan, job: LocalTrainingState, index: int, state: State, key: Tensor) -> dict[str, Any]:
    """Return the fields of the :class:`StepContext` of the rule at ``index``."""
    return _client_facts(plan, job, index, state) | {
        "params": {name: state[name] for name in plan.params},
        "buffers": {name: job.rest[name] for name in plan.buffers},
        "steps": job.steps,
        "_round": job.round,
        "_key": key,
    }


def list_updates(plan: Plan, job: LocalTrainingState) -> tuple[Updated, ...]:
    """Return what the coming step of ``job`` trains."""
    return plan.updates_in(job.done - job.start, job.planned_steps, job.apart)


def list_active(plan: Plan, job: LocalTrainingState) -> list[str]:
    """Return the parameters of ``job`` that its coming step trains, in order."""
    active = frozenset[str]().union(*(each.names for each in list_updates(plan, job)))
    return [name for name in job.params if name in active]


def compute_objective(
    plan: Plan, job: LocalTrainingState, params: State, x: Tensor, y: Tensor, key: Tensor
) -> tuple[Tensor, Tensor, State]:
    """Return the training objective at ``params`` on one batch, the data loss, and the updated ``rest``. Pure.

    ``x [B, ...]``, ``y [B]``; ``key``: int64 scalar that keys dropout masks. In steps ``apart`` the model is not run,
    and the data loss is 0.
    """
    plan.set_mode(training=True, frozen=job.frozen)
    rest = clone(job.rest)
    state = {**params, **rest}
    model = {name: state[name] for name in plan.initial} if len(state) > len(plan.initial) else state
    with dropout_key(key):
        for index in plan.defines("batch"):
            facts = _step_facts(plan, job, index, {**params, **job.rest}, key)
            x, y = plan.rules[index].rule.batch(x, y, StepContext(**facts))
        batch = _Batch(plan, job, params, x, y, key)
        if job.apart:
            total = loss = torch.zeros((), dtype=plan.dtype, device=x.device)
        else:
            batch.passed = compute_features(plan, model, x)
            total = loss = plan.loss(batch.passed[0], y)
        for index in plan.defines("loss"):
            if job.apart[0] == index if job.apart else not plan.rules[index].is_apart:
                total = plan.rules[index].rule.loss(total, batch.make_context(index, state))
    return total, loss, rest


class _Batch:
    """The batch of a step, on which rules run networks."""

    def __init__(self, plan: Plan, job: LocalTrainingState, params: State, x: Tensor, y: Tensor, key: Tensor) -> None:
        self._plan, self._job, self._params, self._x, self._y, self._key = plan, job, params, x, y, key
        self.passed: tuple[Tensor, dict[int, Tensor]] | None = None

    def make_context(self, index: int, state: State) -> LossContext:
        """Return what the rule at ``index`` may read; ``state``: all entries, as layers and losses write into them."""
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
        """Return a model's entries: ``entries`` as they are, and copies of the model's own buffers beside these."""
        return {
            name: entries[name] if name in entries else self._params[name] if name in self._params
            else self._job.rest[name].clone()
            for name in self._plan.initial
        }  # fmt: skip

    def _loss_at(self, entries: State) -> Tensor:
        return self._plan.loss(compute_outputs(self._plan, self._fill(entries), self._x), self._y)

    def _run(self, index: int, entries: State, x: Tensor, *, training: bool) -> ForwardPass:
        self._plan.set_mode(training=training, frozen=self._job.frozen)
        try:
            with dropout_key(self._key):
                found = compute_features(self._plan, self._fill(entries), x)
        finally:
            self._plan.set_mode(training=True, frozen=self._job.frozen)
        return self._name(index, x, found)

    def _make_pass(self, index: int) -> ForwardPass:
        if self.passed is None:
            with dropout_key(self._key):
                self.passed = compute_features(self._plan, self._fill({}), self._x)
        return self._name(index, self._x, self.passed)

    def _name(self, index: int, x: Tensor, found: tuple[Tensor, dict[int, Tensor]]) -> ForwardPass:
        outputs, features = found
        bound = self._plan.rules[index]
        return ForwardPass(bound=bound, x=x, y=self._y, outputs=outputs, _features=features.get(index, outputs))


def compute_gradients(
    plan: Plan, job: LocalTrainingState, x: Tensor, y: Tensor, key: Tensor
) -> tuple[State, State, Tensor]:
    """Return the gradients that the optimizer receives, ``rest`` after the batch, and the data loss. Pure.

    Arguments as of :func:`compute_objective`.
    """
    x = to_memory_format(x, plan.image_format)
    if plan.method.gradient is not None:
        grads, rest, loss = combine_samples(plan, job, x, y, key)
        return transform_gradients(plan, job, grads, key), rest, loss
    leaves = {name: job.params[name].detach().requires_grad_() for name in list_active(plan, job)}
    with torch.enable_grad():
        total, loss, rest = compute_objective(plan, job, {**job.params, **leaves}, x, y, key)
    found = torch.autograd.grad(total, tuple(leaves.values()), materialize_grads=True)
    after = {name: tensor.detach() for name, tensor in rest.items()}
    return transform_gradients(plan, job, dict(zip(leaves, found, strict=True)), key), after, loss.detach()


def combine_samples(
    plan: Plan, job: LocalTrainingState, x: Tensor, y: Tensor, key: Tensor
) -> tuple[State, State, Tensor]:
    """Return what ``Method.gradient`` makes of a batch's samples, ``rest`` as it is, and the mean data loss. Pure.

    Arguments as of :func:`compute_objective`. Each sample is a separate batch with a separate key, and no buffer
    that its forward pass writes is kept. As many samples are differentiated together as ``SAMPLE_GRADIENTS`` holds.
    """
    assert plan.method.gradient is not None

    def objective(params: State, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
        return compute_objective(plan, job, {**job.params, **params}, x[None], y[None], key)[0]

    descend = torch.vmap(torch.func.grad_and_value(objective), in_dims=(None, 0, 0, 0), randomness="different")
    keys_B = key ^ draw_bits(key, SAMPLE_KEYS, len(y))
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
        grads = plan.method.gradient.combine(differentiate(), key)
    return grads, job.rest, torch.cat(losses).mean()


def transform_gradients(plan: Plan, job: LocalTrainingState, grads: State, key: Tensor) -> State:
    """Return the objective's gradients after every rule has changed the model's, and those of networks it treats alike.

    No rule changes the gradients of another's own parameters otherwise.
    """
    state = job.state
    for index in plan.defines("gradients"):
        rule, facts = plan.rules[index].rule, _step_facts(plan, job, index, state, key)
        changed = pick(grads, plan.trained)
        if changed:
            changed = rule.gradients(changed, StepContext(**facts | {"params": pick(facts["params"], changed)}))
        for other, bound in enumerate(plan.rules) if rule.on_copies else ():
            names = {entry: plan.own_names[other][entry] for entry in bound.own.model}
            found = {entry: grads[name] for entry, name in names.items() if name in grads}
            if found:
                copy = {entry: state[name] for entry, name in names.items()}
                rest = {entry: tensor for entry, tensor in copy.items() if entry not in found}
                at_copy = StepContext(**facts | {"params": pick(copy, found), "buffers": rest, "loaded": {}})
                changed |= {names[entry]: grad for entry, grad in rule.gradients(found, at_copy).items()}
        grads = grads | changed
    return grads


def update_(plan: Plan, job: LocalTrainingState, grads: State, rest: State, samples: int) -> LocalTrainingState:
    """Take the optimizer's step along ``grads``, found on ``samples`` samples, in the memory of ``job``."""
    for each in list_updates(plan, job):
        optimizer = plan.optimizer if each.decay else plan.undecayed_optimizer
        optimizer.update_(pick(job.params, each.names), grads, job.optimizer, job.lr * each.lr_scale)
        if each.rule is not None:
            _put_back_(plan, job, each.rule)
    if job.apart:
        return replace(job, rest=rest)
    return replace(job, rest=rest, done=job.done + 1, samples=job.samples + samples)


def _put_back_(plan: Plan, job: LocalTrainingState, index: int) -> None:
    """Put the own parameters of the rule at ``index`` back within their bounds."""
    for entry, bounds in plan.rules[index].own.bounds.items():
        values = job.params[plan.own_names[index][entry]]
        values.copy_(values.clamp(*bounds))  # clamp_ has no batching rule


def client_step_(
    plan: Plan, job: LocalTrainingState, x: Tensor, y: Tensor, key: Tensor
) -> tuple[LocalTrainingState, Tensor]:
    """Take one local step on a batch, in the memory of ``job``. Returns the job after it and the data loss."""
    with timed_section("forward and backward"):
        grads, rest, loss = compute_gradients(plan, job, x, y, key)
    with timed_section("update"):
        return update_(plan, job, grads, rest, len(y)), loss


def client_step(
    plan: Plan, job: LocalTrainingState, x: Tensor, y: Tensor, key: Tensor
) -> tuple[LocalTrainingState, Tensor]:
    """Take :func:`client_step_` on a copy of the job: pure."""
    return client_step_(plan, replace(job, params=clone(job.params), optimizer=clone(job.optimizer)), x, y, key)


def client_final(plan: Plan, job: LocalTrainingState) -> tuple[ClientState, Update]:
    """End local work. Returns the client's new state and its upload.

    Raises :class:`UsageError` where a rule would upload or keep anything but what it declares.
    """
    together = job.state
    state = {name: together[name] for name in plan.initial}
    memory, uploads = [], []
    for index, bound in enumerate(plan.rules):
        kept, sent = {name: job.memory[index][name] for name in bound.own.memory}, State()
        if index in plan.defines("end") and (bound.prelude or not job.prelude):
            facts, end = _client_facts(plan, job, index, together), bound.rule.end
            params, rest = ({name: together[name] for name in part} for part in (plan.params, plan.buffers))
            steps = job.done - job.start
            facts |= {"params": params, "buffers": rest, "steps": steps, "prelude": job.prelude}
            kept, sent = end(EndContext(**facts, round=job.round))
        check_end(plan, index, kept, sent, prelude=job.prelude)
        memory.append(kept | {entry: together[name] for entry, name in plan.own_names[index].items()})
        uploads.append(sent)
    client = ClientState(
        personal=pick(state, plan.personal),
        optimizer=job.optimizer if plan.optimizer.keep else {},
        memory=tuple(memory),
        steps=job.done,
    )
    shared, steps = {} if job.prelude else pick(state, plan.sent), job.done - job.start
    return client, Update(shared=shared, memory=tuple(uploads), weight=float(job.samples), steps=steps)


def client_prelude(plan: Plan, samples: int, seen: Seen | None) -> Update:
    """Return the upload of a client with ``samples`` in the exchange before round 1, which is of its data and the plan.

    Server and clients start from the plan, so that nothing has to be received, and whoever asks again gets the same.

    Raises :class:`UsageError` where a rule would upload or keep anything but what it declares.
    """
    job = load_state(plan, init_client(plan), init_server(plan), 0, seen, prelude=True)
    return client_final(plan, replace(job, samples=samples))[1]
