"""Lag of BatchNorm's running statistics behind the models that are measured, shown by re-estimating them.

Running statistics move by r <- (1 - m) r + m b with the statistics b of each batch (momentum m, torch's form of Ioffe
and Szegedy 2015, arXiv:1502.03167), so that after n updates they still hold the part (1 - m)^n of their initial values,
and the rest comes from models that training, or averaging over clients, has changed since. In short runs this can
decide which method appears best. A model is therefore measured once more with statistics of training samples:

- Statistics that a client keeps (FedBN, SiloBN, single, personal models) are estimated on its own training samples.
- Shared statistics (FedAvg) are estimated by each client on its own training samples, in the model that it would use,
  and averaged by the method's weights of uploads, as averaging makes them. Each client's own estimate would be another
  method, SiloBN. They are not measured across machines, where estimates would have to leave the sites.
- Frozen statistics (FixBN after the switch) are part of the model that was trained, and HBN's belong to the round
  itself. Neither lags.

Training and the measurements that tables report are not affected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch

from ..core.kernel import global_state
from ..core.means import StreamingMean
from ..core.plan import Plan
from ..core.states import ServerState
from ..data.federation import ClientData
from ..data.samples import Samples
from ..results.schema import REESTIMATED, Row
from ..tasks.task import Task
from ..utils.random_streams import stream
from ..utils.state import State, pick
from .batch_norm import list_batch_norms, name_statistics, reestimate_statistics
from .metrics import evaluate

T = TypeVar("T")

NEGLIGIBLE = 1e-6
"""Remaining part of the initial values that is too small for statistics to be re-estimated.

Initial variances are 1, and variances of a layer's inputs may be as small as 1e-4.
"""
BATCHES = 4
"""Most batches of 250 training samples of a client on which statistics are estimated."""
CLIENTS = 100
"""Most clients that are measured again."""


def list_statistics(plan: Plan) -> frozenset[str]:
    """Return the entries of running means and variances."""
    return frozenset(name for layer in list_batch_norms(plan) for name in name_statistics(layer))


def count_updates(plan: Plan, server: ServerState, steps: Iterable[int]) -> int:
    """Return how often statistics were updated since the initial model.

    Shared statistics come with a counter, the mean over clients; where clients keep theirs, it is the smallest of the
    clients' numbers of ``steps``.
    """
    counters = (f"{layer}.num_batches_tracked".lstrip(".") for layer in list_batch_norms(plan))
    shared = [name for name in counters if name in server.shared and name in plan.loaded]
    if shared:
        return min(int(server.shared[name]) - int(plan.initial[name]) for name in shared)
    return min(steps, default=0)


def remaining_part(plan: Plan, updates: int) -> float:
    """Return the part of their initial values that running statistics still hold after ``updates`` updates.

    It is the largest of all layers. A layer without momentum averages all batches equally, and holds no initial values
    after the first.
    """
    momenta = (layer.momentum for layer in list_batch_norms(plan).values())
    return max(((0.0 if updates else 1.0) if m is None else (1 - m) ** updates for m in momenta), default=0.0)


def may_lag(plan: Plan, server: ServerState, updates: int) -> bool:
    """Return whether the statistics of the models after ``updates`` updates are worth re-estimating."""
    layers = list_batch_norms(plan).values()
    frozen = server.round > plan.freeze_from  # the last round's number from 0 is one less
    whole = any(layer.momentum is None for layer in layers)
    return bool(layers) and not frozen and (whole or remaining_part(plan, updates) >= NEGLIGIBLE)


def holds_shared_statistics(plan: Plan, server: ServerState, state: State) -> bool:
    """Return whether the statistics of a client's model ``state`` are the server's, bit for bit."""
    names = list_statistics(plan)
    return names <= server.shared.keys() and all(torch.equal(state[name], server.shared[name]) for name in names)


def evaluate_reestimated(
    plan: Plan,
    server: ServerState,
    clients: Iterable[ClientData],
    training: Mapping[str, Samples],
    splits: tuple[str, ...],
    measured: tuple[Task, int],
    personal: Callable[[ClientData], State | None],
    *,
    alone: bool = False,
) -> list[Row]:
    """Return one row per client, split and existing model, with re-estimated statistics (moment ``reestimated``).

    Args:
        plan: the trial's plan.
        server: the server's state.
        clients: clients to measure; at most :data:`CLIENTS` of them are measured.
        training: training samples of training clients, by name; with a pooled method, the samples of all clients
            together.
        splits: splits to measure.
        measured: the federation's task and its number of classes.
        personal: returns the model that a client would use, None if it has none.
        alone: whether other clients' estimates are out of reach, so that shared statistics are not measured.

    """
    names, chosen = list_statistics(plan), _draw(plan, list(clients))
    common = global_state(plan, server)

    def estimate(state: State, samples: Samples) -> State:
        return pick(reestimate_statistics(plan, state, samples, BATCHES), names)

    def weigh(name: str) -> float:
        return plan.method.weigh(samples=len(training[name]), used=len(training[name]))

    def measure(client: ClientData, model: str, state: State) -> list[Row]:
        place = {"client": client.name, "model": model, "moment": REESTIMATED}
        return [{**place, "split": split, **evaluate(plan, state, client.splits[split], *measured)} for split in splits]

    rows: list[Row] = []
    if common is not None and not alone:
        mean = StreamingMean()
        for name in _draw(plan, list(training)):
            mean.add(estimate(common, training[name]), weigh(name))
        state = {**common, **mean.result()}
        rows = [row for client in chosen for row in measure(client, "global", state)]
    if not plan.personalizes:
        return rows + [{**row, "model": "personal"} for row in rows]
    loading, mean = list[ClientData](), StreamingMean()
    for client in chosen:
        own = personal(client) if client.name in training else None
        if own is None:
            continue
        fresh = estimate(own, training[client.name])
        if not holds_shared_statistics(plan, server, own):
            rows += measure(client, "personal", {**own, **fresh})
        elif not alone:
            loading.append(client)
            mean.add(fresh, weigh(client.name))
    for client in loading:
        own = personal(client)
        assert own is not None
        rows += measure(client, "personal", {**own, **mean.result()})
    return rows


def _draw(plan: Plan, several: list[T]) -> list[T]:
    """Return at most :data:`CLIENTS` of ``several``, in their order."""
    if len(several) <= CLIENTS:
        return several
    drawn = stream(plan.seed, "reestimated clients").permutation(len(several))[:CLIENTS]
    return [several[number] for number in sorted(drawn)]
