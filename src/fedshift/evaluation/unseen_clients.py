"""Models for clients that never trained, with methods that keep state on clients.

The policies (``policies``) are the same during a run (``unseen``) and after it (``new_clients``). Averaging and
comparing models requires access to all clients' entries, which a simulation has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property

from ..core.aggregation import StreamingMean
from ..core.kernel import ClientState, ServerState, broadcast, global_state, init_client, personal_state
from ..core.plan import Plan
from ..core.preparation import add_extra_entries
from ..core.rule import Rule
from ..core.selection import batch_norm
from ..data.augmentation import Augmentation
from ..data.samples import Samples
from ..engines.sequential import Sequential
from ..tasks.classification import CLASSIFICATION
from ..tasks.task import Task
from ..utils.errors import Ref, UsageError
from ..utils.state import State, pick
from .adaptation_rates import Rates, adapt_by, find_directions, learn_rates
from .input_adaptation import (
    MINIMIZERS,
    iterate_inputs,
    measure_distance,
    minimize_entropy,
    mix_statistics,
    reestimate_statistics,
)
from .metrics import BATCH, evaluate
from .policies import POLICIES, SKIP, Policy, hides_clients, list_batch_norm_parameters, parse_policy

SMALLEST = 1e-14
"""Minimum distance by which ``weighted`` divides."""


class UnseenClientModels:
    """Models for clients that never trained, made from the state of ``server`` and of clients that did.

    ``samples``: number of training samples of each trained client, by its name in ``clients``, which are read one at a
    time. ``augment``: augmentation of training images. ``measured``: the federation's task and its number of classes;
    None: classification. ``start``: model in place of the average, if no clients are available. ``learning``: returns
    the labeled data on which clients learn rates for ``atp``.
    """

    def __init__(
        self, plan: Plan, server: ServerState, clients: Mapping[str, ClientState], samples: Mapping[str, int],
        augment: Augmentation | None = None, measured: tuple[Task, int] | None = None, start: State | None = None,
        learning: Callable[[], Mapping[str, Samples]] = dict,
    ) -> None:  # fmt: skip
        self.plan, self.server, self.augment, self._measured, self._start = plan, server, augment, measured, start
        self._clients, self._samples, self._learning = clients, samples, learning
        self._rates: dict[Policy, Rates] = {}

    def make_state(self, policy: str, name: str, train: Samples, rounds: int = 1) -> State | None:
        """Return the model of client ``name`` with training data ``train``; None with ``skip`` or before any training.

        ``rounds``: rounds of local work of ``finetune`` and ``finetune_bn``. With a method that has one global model,
        ``average`` is that model. Raises ``Diverged`` if training diverges.
        """
        if policy == SKIP:
            return None
        made = parse_policy(policy)
        whole = self.plan.has_global or self._start is not None
        if not (self._samples or (whole and not made.compares)):
            return None
        match made.name:
            case "average":
                return self._averaged
            case "reestimate":
                return reestimate_statistics(self.plan, self._averaged, train)
            case "mixed":
                return mix_statistics(self.plan, self._averaged, train, **made.arguments)
            case "tent" | "sar":
                return self._minimize_entropy(made, train)
            case "atp":
                return self._adapt_by_rates(made, train)
            case "nearest":
                return self._find_nearest(lambda state: self._measure_loss(state, train))
            case "nearest_statistics":
                return self._find_nearest(lambda state: measure_distance(self.plan, state, train))
            case "weighted":
                return self._complete(self._average_entries(lambda client: 1 / self._measure_gap(client, train)))
            case "finetune":
                return finetune(self.plan, self._averaged, self.server, name, train, rounds, self.augment)
            case _:
                return self._learn_batch_norm(name, train, rounds)

    @property
    def _task(self) -> Task:
        return self._measured[0] if self._measured else CLASSIFICATION

    def _minimize_entropy(self, policy: Policy, train: Samples) -> State:
        arguments = dict(policy.arguments)
        passes = {name: arguments.pop(name) for name in ("steps", "batch_size") if name in arguments}
        minimizer = MINIMIZERS[policy.name](self.plan, self._averaged, self._task.entropy, **arguments)
        return minimize_entropy(self.plan, train, minimizer, **passes)

    def _adapt_by_rates(self, policy: Policy, train: Samples) -> State:
        """Return the average after a step on ``train``, at rates that the clients learn once per server state."""
        plan, entropy = self.plan, self._task.entropy
        if policy not in self._rates:
            self._rates[policy] = learn_rates(plan, self._averaged, self._learning(), entropy, **policy.arguments)
        batches = iterate_inputs(plan, train, BATCH, "atp")
        return adapt_by(
            plan, self._averaged, find_directions(plan, self._averaged, batches, entropy), self._rates[policy]
        )

    def _find_nearest(self, distance: Callable[[State], float]) -> State:
        """Return the model of the client with the smallest distance; NaN counts as the largest."""
        models = (self._personal_state(name) for name in sorted(self._samples))

        def measure(state: State) -> float:
            found = distance(state)
            return math.inf if math.isnan(found) else found

        return min(models, key=measure)

    def _personal_state(self, name: str) -> State:
        return personal_state(self.plan, self._clients[name], broadcast(self.server, name))

    def _measure_loss(self, state: State, train: Samples) -> float:
        measured = self._measured or (CLASSIFICATION, int(train.y.max()) + 1)
        return float(evaluate(self.plan, state, train, *measured)["loss_sum"])

    def _measure_gap(self, client: str, train: Samples) -> float:
        """Return the positive distance of a client's statistics from those of ``train``; infinite if it is NaN."""
        found = measure_distance(self.plan, self._personal_state(client), train)
        return math.inf if math.isnan(found) else max(found, SMALLEST)

    def _learn_batch_norm(self, name: str, train: Samples, rounds: int) -> State:
        """Return the model of a client that joins now, with BatchNorm learned on its data and all else unchanged.

        Personal BatchNorm entries start from the clients' initial values, shared ones from the server's. Statistics are
        estimated on its inputs; then weight and bias are trained with the run's batches, optimizer and loss, and the
        statistics are updated as in training. The method's rules do not apply.
        """
        plan = self.plan
        own = frozenset(entry.name for entry in plan.entries if batch_norm(entry))
        start = reestimate_statistics(plan, {**self._averaged, **pick(plan.initial, own & plan.personal)}, train)
        method = replace(plan.method, rules=())
        alone = replace(plan, method=method, trained=list_batch_norm_parameters(plan), extra_params=(), extra_rest=())
        return {**start, **pick(finetune(alone, start, self.server, name, train, rounds, self.augment), own)}

    @cached_property
    def _averaged(self) -> State:
        if self._start is not None:
            return self._start
        state = global_state(self.plan, self.server)
        if state is not None:
            return state
        if hides_clients(self.plan):  # policies that keep some of these entries do not apply
            return self._complete(self.plan.initial | pick(self.server.shared, self.plan.loaded))

        def weigh(name: str) -> float:
            return self.plan.method.weigh(samples=self._samples[name], used=self._samples[name])

        return self._complete(self._average_entries(weigh))

    def _complete(self, entries: State) -> State:
        """Return the server's entries completed by ``entries``, those that clients keep."""
        state = {**pick(self.server.shared, self.plan.loaded), **entries}
        return {name: state[name] for name in self.plan.initial}

    def _average_entries(self, weigh: Callable[[str], float]) -> State:
        """Return the mean of the clients' personal entries, weighted by ``weigh``, loading one client at a time."""
        mean, weights = StreamingMean(), {name: weigh(name) for name in sorted(self._samples)}
        for name, weight in weights.items():
            if weight or not any(weights.values()):
                mean.add(self._clients[name].personal, weight or 1.0)
        return mean.result()


def make_personal_state(
    plan: Plan, client: ClientState, server: ServerState, name: str, train: Samples, augment: Augmentation | None
) -> State:
    """Return the model that client ``name``, which has trained, would use now: fine-tuned if the method requires it."""
    state = personal_state(plan, client, server)
    return finetune(plan, state, server, name, train, plan.finetune_rounds, augment) if plan.finetune_rounds else state


def finetune(
    plan: Plan, start: State, server: ServerState, name: str, train: Samples, rounds: int,
    augment: Augmentation | None,
) -> State:  # fmt: skip
    """Return ``start`` after local work as in a client's first rounds, at the learning rate of the last round.

    The client loads its own uploads, as in a federation of one client. Parameters that a rule leaves untrained in the
    federation are trained, without that rule.
    """
    rules = plan.method.rules
    kept = [index for index, rule in enumerate(rules) if type(rule).trainable is Rule.trainable]
    if len(kept) < len(rules):
        free = frozenset(name for name, tensor in plan.module.named_parameters() if tensor.requires_grad)
        method = replace(plan.method, rules=tuple(rules[index] for index in kept))
        plan = replace(plan, method=method, trained=free & plan.initial.keys())
    plan = add_extra_entries(replace(plan, initial=start))
    common, known = pick(start, plan.trained & plan.loaded), [server.memory[index] for index in kept]
    memory = tuple(
        {**rule.server_memory(common), **state} for rule, state in zip(plan.method.rules, known, strict=True)
    )
    round = max(0, server.round - 1)
    server = replace(server, round=round, shared=pick(start, plan.sent), memory=memory, mixes=None)
    client = init_client(plan)
    engine = Sequential(plan, {name: train}, plan.seed, augment=augment)
    for _ in range(rounds):
        trained = engine.train_client(server, name, client)
        client, server = trained.client, replace(server, shared=trained.update.shared)
    return personal_state(plan, client, server)


def make_lone_state(
    plan: Plan, server: ServerState, policy: str, name: str, train: Samples, augment: Augmentation | None,
    measured: tuple[Task, int], may_train: bool = True,
) -> State | None:  # fmt: skip
    """Return the model of client ``name`` without other clients' entries, as at a site that never trained.

    If the server holds a complete model, or lacks only BatchNorm entries that the policy replaces, the result is the
    model of :class:`UnseenClientModels`. None with ``skip``. ``may_train``: whether a message may suggest policies that
    train. Raises :class:`UsageError` with the alternatives if the policy needs other clients' entries, or samples that
    the client lacks.
    """
    if policy == SKIP:
        return None

    def is_possible(asked: Policy) -> bool:
        possible = not asked.takes_others(plan) and (may_train or not asked.trains)
        return possible and not asked.excuse(plan, measured[0])

    made = parse_policy(policy)
    if not is_possible(made):
        others = [repr(name) for name in POLICIES if is_possible(parse_policy(name))]
        own = f"entries that {plan.method.name} keeps at its clients"
        taken = "other clients' labeled data" if made.learns else own
        raise UsageError(
            f"unseen={policy!r} takes {taken}, which never leave them: use "
            + (
                " or ".join(filter(None, (", ".join(others[:-1]), *others[-1:])))
                or "a method with a global model, or one that keeps BatchNorm statistics alone (silobn)"
            )
        )
    if made.data and len(train) < max(1, plan.smallest_batch):
        raise UsageError(f"{{}} takes training samples, of which client {name!r} has {len(train)}", Ref(unseen=policy))
    start = None if plan.has_global else {**plan.initial, **pick(server.shared, plan.loaded)}
    return UnseenClientModels(plan, server, {}, {}, augment, measured, start).make_state(policy, name, train)
