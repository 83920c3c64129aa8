"""The kernel: the states of clients and server, and the pure functions that every engine runs.

One communication round is, for each client that takes part, ``client_init``, one ``client_step_`` for each batch and
``client_final``; then the uploads are aggregated (:mod:`fedshift.core.server_round`). States are plain values, so an
engine may keep them in a dictionary, in another process or on another machine. A step is ``compute_gradients`` (of
``compute_objective``, changed by the rules in ``transform_gradients``), then ``update_``; these parts also work
under ``torch.vmap``, so that an engine can run many clients in one tensor program.

A method's rules have one memory each: ``memory[i]`` and ``server_memory[i]`` belong to rule ``i``. While a client
works, a rule's extra entries lie beside the model's (:attr:`fedshift.core.plan.Plan.extra_names`), so that the
optimizer changes them all; between rounds they are part of the rule's memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..nn.dropout import draw_bits, dropout_key
from ..nn.linear import use_torch_func
from ..utils.profiling import timed_section
from ..utils.state import State, clone, nbytes, pick
from .aggregation import Mixes
from .disclosure import check_sends
from .plan import Plan, compute_features, compute_outputs, forward, to_memory_format
from .rule import ForwardPass, Hook, Rule, RuleContext

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
        memory: One state for each rule, its extra entries included.
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


class FirstSamples(NamedTuple):
    """The first samples of a client's round: inputs ``x [B, ...]``, and the ``key`` of its first step."""

    x: Tensor
    key: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalTrainingState:
    """A client's local work in progress.

    Args:
        params: Parameters that are trained, the rules' included; owned by the job, like ``optimizer``.
        rest: Buffers and frozen parameters.
        global_params: Entries as loaded this round.
        optimizer: State of the local optimizer.
        memory: One state for each rule, without its extra entries.
        server_memory: One state for each rule, as broadcast.
        lr: Learning rate of the round.
        start: Steps that the client had done before the round.
        done: Steps that it has done now.
        planned_steps: Steps that the round will have.
        frozen: Whether BatchNorm's statistics are frozen.
        samples: Samples used this round.
        apart: Whether the steps train the rules' own parameters only (:attr:`Rule.epochs`); these do not count.

    """

    params: State
    rest: State
    global_params: State
    optimizer: State
    memory: tuple[State, ...]
    server_memory: tuple[State, ...]
    lr: float
    start: int
    done: int
    planned_steps: int
    frozen: bool
    samples: int = 0
    apart: bool = False


def init_server(plan: Plan) -> ServerState:
    """Return the server before the first round."""
    common = pick(plan.initial, plan.trained & plan.loaded)
    return ServerState(
        round=0,
        shared=pick(plan.initial, plan.sent),
        memory=tuple(rule.server_memory(common) for rule in plan.method.rules),
        optimizer=plan.method.server.init(common) if plan.method.server else {},
    )


def broadcast(server: ServerState, name: str) -> ServerState:
    """Return the server as client ``name`` sees it: with its mix, where there is one, in place of shared entries."""
    if server.mixes is None:
        return server
    return replace(server, shared=server.shared | server.mixes.mix(name), mixes=None)


def init_client(plan: Plan) -> ClientState:
    """Return a client that has not taken part yet; its entries share memory with the plan's until it does."""
    params, rest = pick(plan.initial, plan.trained), pick(plan.initial, frozenset(plan.initial) - plan.trained)
    extra = zip(plan.extra_params, plan.extra_rest, strict=True)
    memory = tuple(
        {**own, **other, **rule.client_memory(params, rest)}
        for rule, (own, other) in zip(plan.method.rules, extra, strict=True)
    )
    return ClientState(personal=pick(plan.initial, plan.personal), memory=memory)


def _merge_loaded_and_personal(plan: Plan, client: ClientState, server: ServerState) -> State:
    state = {**pick(server.shared, plan.loaded), **personal_entries(plan, client, server)}
    return {name: state[name] for name in plan.initial}


def personal_entries(plan: Plan, client: ClientState, server: ServerState) -> State:
    """Return the entries that a client does not load: its own, of which some are the server's until it has begun."""
    return client.personal if client.steps else client.personal | pick(server.shared, plan.adopted)


def _memory_alone(plan: Plan, client: ClientState, index: int) -> State:
    extra = plan.extra_names[index]
    return {name: tensor for name, tensor in client.memory[index].items() if name not in extra}


def _context_between_rounds(plan: Plan, client: ClientState, server: ServerState, index: int) -> RuleContext:
    """Return what the rule at ``index`` may read between rounds."""
    return RuleContext(
        global_params=pick(server.shared, plan.loaded),
        memory=_memory_alone(plan, client, index),
        extra_entries=pick(client.memory[index], plan.extra_names[index]),
        server_memory=server.memory[index],
    )


def personal_state(plan: Plan, client: ClientState, server: ServerState) -> State:
    """Return the model that the client would use now: entries that it loads and its own, as its rules combine them."""
    state = _merge_loaded_and_personal(plan, client, server)
    for index, rule in enumerate(plan.method.rules):
        state = rule.personal_model(state, _context_between_rounds(plan, client, server, index))
    return state


def trained_state(plan: Plan, client: ClientState, update: Update, server: ServerState) -> State:
    """Return the client's model just after local work, before aggregation; ``server``: the one that it loaded from."""
    return personal_state(plan, client, replace(server, shared=update.shared))


def global_state(plan: Plan, server: ServerState) -> State | None:
    """Return the server's model, or None where it holds none."""
    return {name: server.shared[name] for name in plan.initial} if plan.has_global else None


def client_init(
    plan: Plan,
    client: ClientState,
    server: ServerState,
    planned_steps: int = 0,
    targets: Tensor | None = None,
    first: FirstSamples | None = None,
) -> LocalTrainingState:
    """Start a client's local work of ``planned_steps`` steps: load the shared entries, keep the personal ones.

    ``targets``: those of all its training samples, ``[N, ...]``, for rules that read them. ``first``: samples on which
    rules see the model run.
    """
    job = load_state(plan, client, server, planned_steps, targets, first)
    return replace(job, params=plan.clone_for_training(job.params), optimizer=clone(job.optimizer))


def load_state(
    plan: Plan,
    client: ClientState,
    server: ServerState,
    planned_steps: int = 0,
    targets: Tensor | None = None,
    first: FirstSamples | None = None,
) -> LocalTrainingState:
    """Return :func:`client_init`'s job over the tensors of server and client themselves: copy before a step."""
    state = _merge_loaded_and_personal(plan, client, server)
    for index, rule in enumerate(plan.method.rules):
        state = rule.init_local(state, _context_between_rounds(plan, client, server, index))
    for kept, names in zip(client.memory, plan.extra_names, strict=True):
        state |= {name: kept[entry] for entry, name in names.items()}
    trained = plan.trained.union(*plan.extra_trained)
    params = pick(state, trained)
    memory = tuple(_memory_alone(plan, client, index) for index in range(len(plan.method.rules)))
    if targets is not None:
        memory = tuple(rule.read_targets(own, targets) for rule, own in zip(plan.method.rules, memory, strict=True))
    if first is not None:
        memory = tuple(
            _observe(plan, rule, own, state, first) if rule.observes else own
            for rule, own in zip(plan.method.rules, memory, strict=True)
        )
    return LocalTrainingState(
        params=params,
        rest={name: tensor for name, tensor in state.items() if name not in trained},
        global_params=pick(server.shared, plan.loaded),
        optimizer=client.optimizer or plan.optimizer.init(params),
        memory=memory,
        server_memory=server.memory,
        lr=plan.optimizer.lr_in_round(server.round),
        start=client.steps,
        done=client.steps,
        planned_steps=planned_steps,
        frozen=server.round >= plan.freeze_from,
    )


def _observe(plan: Plan, rule: Rule, memory: State, state: State, first: FirstSamples) -> State:
    """Return the rule's memory after it has seen the model run under ``state``."""
    x, layers = first.x[: rule.observes], dict(plan.module.named_modules())

    def run(hooks: Mapping[str, Hook]) -> None:
        handles = [layers[name].register_forward_pre_hook(hook) for name, hook in hooks.items()]
        try:
            forward(plan, clone(pick(state, plan.initial)), x, training=True, key=first.key)
        finally:
            for handle in handles:
                handle.remove()

    return rule.observe(memory, len(x), run)


def restart(plan: Plan, job: LocalTrainingState) -> LocalTrainingState:
    """Return a job that has taken no steps but those ``apart`` with the model that its rules now start from. Pure."""
    together = {**job.params, **job.rest}
    state = {name: job.global_params.get(name, together[name]) for name in plan.initial}
    for index, rule in enumerate(plan.method.rules):
        state = rule.init_local(state, _rule_context(plan, job, index))
    fresh = {name: state.get(name, tensor) for name, tensor in together.items()}
    return replace(job, params=pick(fresh, job.params), rest=pick(fresh, job.rest), apart=False)


def _extra_entries(plan: Plan, index: int, params: State, rest: State) -> State:
    return {entry: params[name] if name in params else rest[name] for entry, name in plan.extra_names[index].items()}


def _rule_context(plan: Plan, job: LocalTrainingState, index: int, key: Tensor | None = None) -> RuleContext:
    return RuleContext(
        global_params=job.global_params,
        memory=job.memory[index],
        extra_entries=_extra_entries(plan, index, job.params, job.rest),
        server_memory=job.server_memory[index],
        rest=pick(job.rest, plan.initial) if any(plan.extra_names) else job.rest,
        lr=job.lr,
        steps=job.done - job.start,
        planned_steps=job.planned_steps if plan.method.rules[index].requires.step_budget else 0,
        key=key,
    )


def compute_objective(
    plan: Plan, job: LocalTrainingState, params: State, x: Tensor, y: Tensor, key: Tensor
) -> tuple[Tensor, Tensor, State]:
    """Return the training objective at ``params`` on one batch, the data loss, and the updated ``rest``. Pure.

    ``x [B, ...]``, ``y [B]``; ``key``: int64 scalar that keys dropout masks. In steps ``apart`` the model is not run,
    and the data loss is 0.
    """
    plan.set_mode(training=True, frozen=job.frozen)
    rest = clone(job.rest)

    def data_loss(state: State) -> Tensor:
        return plan.loss(compute_outputs(plan, state, x), y)

    def run_model(index: int, state: State, other: Tensor | None = None, *, training: bool = True) -> ForwardPass:
        given = x if other is None else other
        plan.set_mode(training=training, frozen=job.frozen)
        try:
            with dropout_key(key):
                outputs, features = compute_features(plan, state, given)
        finally:
            plan.set_mode(training=True, frozen=job.frozen)
        return ForwardPass(given, y, outputs, features[index])

    with dropout_key(key):
        if job.apart:
            total = loss = torch.zeros((), dtype=plan.dtype, device=x.device)
        else:
            state = {**params, **rest}
            outputs, features = compute_features(plan, pick(state, plan.initial) if any(plan.extra_names) else state, x)
            total = loss = plan.loss(outputs, y)
        for index, rule in enumerate(plan.method.rules):
            if bool(rule.epochs) == job.apart:
                context = replace(
                    _rule_context(plan, job, index, key),
                    extra_entries=_extra_entries(plan, index, params, rest),
                    forward_pass=None if job.apart else ForwardPass(x, y, outputs, features[index]),
                    run_model=partial(run_model, index),
                    criterion=plan.loss,
                    data_loss=data_loss,
                )
                total = rule.transform_loss(total, params, context)
    return total, loss, rest


def compute_gradients(
    plan: Plan, job: LocalTrainingState, x: Tensor, y: Tensor, key: Tensor
) -> tuple[State, State, Tensor]:
    """Return the gradients that the optimizer receives, ``rest`` after the batch, and the data loss. Pure.

    Arguments as of :func:`compute_objective`.
    """
    x = to_memory_format(x, plan.image_format)
    if plan.combining is not None:
        grads, rest, loss = combine_samples(plan, job, x, y, key)
        return transform_gradients(plan, job, grads, key), rest, loss
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in job.params.items()}
    with torch.enable_grad():
        total, loss, rest = compute_objective(plan, job, leaves, x, y, key)
    found = torch.autograd.grad(total, tuple(leaves.values()), materialize_grads=True)
    after = {name: tensor.detach() for name, tensor in rest.items()}
    return transform_gradients(plan, job, dict(zip(leaves, found, strict=True)), key), after, loss.detach()


def combine_samples(
    plan: Plan, job: LocalTrainingState, x: Tensor, y: Tensor, key: Tensor
) -> tuple[State, State, Tensor]:
    """Return what a rule makes of the gradients of a batch's samples, ``rest`` as it is, and the mean data loss. Pure.

    Arguments as of :func:`compute_objective`. Each sample is a separate batch with a separate key, and no buffer
    that its forward pass writes is kept. As many samples are differentiated together as ``SAMPLE_GRADIENTS`` holds.
    """
    assert plan.combining is not None

    def objective(params: State, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
        return compute_objective(plan, job, params, x[None], y[None], key)[0]

    descend = torch.vmap(torch.func.grad_and_value(objective), in_dims=(None, 0, 0, 0), randomness="different")
    keys_B = key ^ draw_bits(key, SAMPLE_KEYS, len(y))
    together = max(1, SAMPLE_GRADIENTS // max(1, nbytes(job.params)))
    losses = []

    def differentiate() -> Iterator[State]:
        for start in range(0, len(y), together):
            part = slice(start, start + together)
            grads, loss = descend(job.params, x[part], y[part], keys_B[part])
            losses.append(loss)
            yield grads

    with use_torch_func():
        context = _rule_context(plan, job, plan.combining, key)
        grads = plan.method.rules[plan.combining].combine_samples(differentiate(), context)
    return grads, job.rest, torch.cat(losses).mean()


def transform_gradients(plan: Plan, job: LocalTrainingState, grads: State, key: Tensor) -> State:
    """Return the objective's gradients after every rule has changed the model's, and those of networks it treats alike.

    No rule changes the gradients of another's own parameters otherwise.
    """
    for index, rule in enumerate(plan.method.rules):
        if type(rule).transform_grads is Rule.transform_grads:
            continue
        context, params = _rule_context(plan, job, index, key), pick(job.params, plan.trained)
        changed = rule.transform_grads(pick(grads, plan.trained), params, context)
        for network in filter(None, plan.networks if rule.on_copies else ()):
            found, weights = ({entry: state[name] for entry, name in network.items()} for state in (grads, job.params))
            found = rule.transform_grads(found, weights, replace(context, global_params={}))
            changed = changed | {network[entry]: grad for entry, grad in found.items()}
        grads = grads | changed
    return grads


def update_(plan: Plan, job: LocalTrainingState, grads: State, rest: State, samples: int) -> LocalTrainingState:
    """Take the optimizer's step along ``grads``, found on ``samples`` samples, in the memory of ``job``."""
    active = frozenset(job.params)
    for index, rule in enumerate(plan.method.rules):
        active = rule.trainable_at_step(active, _rule_context(plan, job, index))
    if not job.apart:
        plan.optimizer.update_(pick(job.params, active & plan.trained), grads, job.optimizer, job.lr)
    for index, (rule, names) in enumerate(zip(plan.method.rules, plan.extra_trained, strict=True)):
        if names and bool(rule.epochs) == job.apart:
            for optimizer, own in (
                (plan.optimizer, names & plan.decayed),
                (plan.undecayed_optimizer, names - plan.decayed),
            ):
                optimizer.update_(pick(job.params, active & own), grads, job.optimizer, job.lr * rule.lr_scale)
            rule.restrict_(_extra_entries(plan, index, job.params, job.rest))
    if job.apart:
        return replace(job, rest=rest)
    return replace(job, rest=rest, done=job.done + 1, samples=job.samples + samples)


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

    Raises :class:`UsageError` where a rule would upload anything but what it declares (:meth:`Rule.sends`).
    """
    together = {**job.params, **job.rest}
    state = {name: together[name] for name in plan.initial}
    memory, uploads = [], []
    for index, rule in enumerate(plan.method.rules):
        kept, sent = rule.finalize(job.params, _rule_context(plan, job, index))
        check_sends(plan, index, sent)
        memory.append({**kept, **_extra_entries(plan, index, job.params, job.rest)})
        uploads.append(sent)
    client = ClientState(
        personal=pick(state, plan.personal),
        optimizer=job.optimizer if plan.optimizer.keep else {},
        memory=tuple(memory),
        steps=job.done,
    )
    shared, steps = pick(state, plan.sent), job.done - job.start
    return client, Update(shared=shared, memory=tuple(uploads), weight=float(job.samples), steps=steps)
