"""Models for clients that never trained, with methods that keep state on clients.

Policies (``policy``) make them from a :class:`PolicyContext`, during a run (``unseen``) and after it (``new_clients``).
Averaging and comparing models requires access to all clients' entries, which a simulation has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from ..core.buffers import fit_spectral_norms
from ..core.kernel import broadcast, global_state, init_client, personal_state
from ..core.means import weighted_mean
from ..core.plan import Plan
from ..core.preparation import bind_rules
from ..core.selection import everything
from ..core.states import ClientState, ServerState
from ..data.augmentation import Augmentation
from ..data.samples import Samples
from ..engines.sequential import Sequential
from ..tasks.task import Task
from ..utils.state import State, pick

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyContext:
    """What a policy knows of a run and of the client that never trained.

    Args:
        plan: The method, resolved against the model.
        server: The server's state.
        clients: States of the clients that trained, by name, which are read one at a time.
        samples: Number of training samples of each of these clients.
        task: The federation's task.
        classes: Its number of classes.
        augment: Augmentation of training images.
        start: Model in place of the average, if no clients are available.
        client: Name of the new client.
        rounds: Rounds of local work of policies that perform the run's.

    """

    plan: Plan
    server: ServerState
    clients: Mapping[str, ClientState] = field(default_factory=dict)
    samples: Mapping[str, int] = field(default_factory=dict)
    task: Task
    classes: int
    augment: Augmentation | None = None
    start: State | None = None
    client: str = ""
    rounds: int = 1
    _known: dict[Any, Any] = field(default_factory=dict)

    @property
    def average(self) -> State:
        """The server's entries, completed by the mean of the clients' personal ones."""
        return self.once(PolicyContext._average)

    def once(self, compute: Callable[..., T], *given: Any) -> T:
        """Return ``compute(context, *given)``, the same for all new clients, computed once for a server's state."""
        if (compute, given) not in self._known:
            self._known[compute, given] = compute(self, *given)
        return cast("T", self._known[compute, given])

    def get_model(self, client: str) -> State:
        """Return the model of ``client``, which trained."""
        return personal_state(self.plan, self.clients[client], broadcast(self.server, client))

    def find_nearest(self, distance: Callable[[State], float]) -> State:
        """Return the model of the client with the smallest distance; NaN counts as the largest."""

        def measure(state: State) -> float:
            found = distance(state)
            return math.inf if math.isnan(found) else found

        return min(map(self.get_model, sorted(self.samples)), key=measure)

    def finetune(self, start: State, train: Samples, plan: Plan | None = None) -> State:
        """Return ``start`` after the new client's ``rounds`` of local work on ``train``, of the run or of ``plan``."""
        return finetune(plan or self.plan, start, self.server, self.client, train, self.rounds, self.augment)

    def _average(self) -> State:
        if self.start is not None:
            return self.start
        state = global_state(self.plan, self.server)
        if state is not None:
            return state
        if hides_clients(self.plan):  # policies that keep some of these entries do not apply
            return self._complete(self.plan.initial | pick(self.server.shared, self.plan.loaded))
        weights = {n: self.plan.method.weigh(samples=size, used=size) for n, size in sorted(self.samples.items())}
        counted = {name: weight or 1.0 for name, weight in weights.items() if weight or not any(weights.values())}
        personal = [self.clients[name].personal for name in counted]
        mean = weighted_mean(personal, list(counted.values()), self.plan.whole)
        return fit_spectral_norms(self.plan, self._complete(mean))

    def _complete(self, entries: State) -> State:
        """Return the server's entries completed by ``entries``, those that clients keep."""
        state = {**pick(self.server.shared, self.plan.loaded), **entries}
        return {name: state[name] for name in self.plan.initial}


def hides_clients(plan: Plan) -> bool:
    """Return whether the aggregation of ``plan`` hides each client in noise (``analysis.privacy.Mechanism``)."""
    return bool(getattr(plan.method.aggregator, "noise_multiplier", 0))


def make_personal_state(
    plan: Plan, client: ClientState, server: ServerState, name: str, train: Samples, augment: Augmentation | None
) -> State:
    """Return the model that client ``name``, which has trained, would use now: fine-tuned if the method requires it."""
    state = personal_state(plan, client, server)
    rounds = plan.method.finetune
    return finetune(plan, state, server, name, train, rounds, augment) if rounds else state


def finetune(
    plan: Plan, start: State, server: ServerState, name: str, train: Samples, rounds: int,
    augment: Augmentation | None,
) -> State:  # fmt: skip
    """Return ``start`` after local work as in a client's first rounds, at the learning rate of the last round.

    The client loads its own uploads, as in a federation of one client. Parameters that the federation leaves untrained
    are trained.
    """
    if plan.method.trains is not everything:
        free = plan.trainable
        plan = replace(plan, method=replace(plan.method, trains=everything), trained=free & plan.initial.keys())
    plan = bind_rules(replace(plan, initial=start))
    known = zip(plan.rules, server.memory, strict=False)  # which may be a plan without rules
    memory = tuple({**bound.server, **state} for bound, state in known)
    round = max(0, server.round - 1)
    server = replace(server, round=round, shared=pick(start, plan.sent), memory=memory, mixes=None)
    client = init_client(plan)
    engine = Sequential(plan, {name: train}, plan.seed, augment=augment)
    for _ in range(rounds):
        trained = engine.train_client(server, name, client)
        client, server = trained.client, replace(server, shared=trained.update.shared)
    return personal_state(plan, client, server)
