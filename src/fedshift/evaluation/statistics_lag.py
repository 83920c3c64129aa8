"""BatchNorm statistics of the reported models, re-estimated where the running ones lag behind the weights.

Running statistics move by r <- (1 - m) r + m b with the statistics b of each batch (momentum m, torch's form of Ioffe
and Szegedy 2015, arXiv:1502.03167). They describe models that training, or averaging over clients, has changed since,
and after few steps also their initial values. At the reported round, models are therefore measured once more:

- Statistics that a client keeps (FedBN, SiloBN, single, personal models) are estimated on its own training samples.
- Shared statistics (FedAvg) are estimated by each client on its own training samples, in the model that it would use,
  and averaged by the method's weights of uploads, or mixed by the server's mixes. Each client's own estimate would be
  another method, SiloBN. They are not estimated across machines, where estimates would have to leave the sites.
- Frozen statistics (FixBN after the switch) are part of the model that was trained, and HBN's belong to the round
  itself. Neither lags. Models that a policy makes for clients that never trained keep the statistics that it gives.

Training is not affected. Which statistics a report shows is chosen without test data
(:func:`fedshift.results.schema.choose_statistics`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..core.kernel import broadcast, global_state
from ..core.means import StreamingMean
from ..core.plan import Plan
from ..core.states import ServerState
from ..data.samples import Samples
from ..results.schema import Row, compute_metric, rows_to_frame
from ..utils.random_streams import stream
from ..utils.state import State, pick
from .batch_norm import list_batch_norms, name_statistics, reestimate_statistics
from .metrics import BATCH

Statistics = Mapping[str | None, State]
"""Re-estimated entries of clients' models, by client; None: of the server's model."""
BATCHES = 4
"""Most batches of 250 training samples of a client on which statistics are estimated."""


def may_lag(plan: Plan, server: ServerState) -> bool:
    """Return whether models have running statistics that are not frozen."""
    frozen = server.round > plan.freeze_from  # the last round's number from 0 is one less
    return bool(list_batch_norms(plan)) and not frozen


def reestimate_models(
    plan: Plan,
    server: ServerState,
    training: Mapping[str, Samples],
    personal: Callable[[str], State | None],
    participants: Sequence[str] = (),
    *,
    alone: bool = False,
) -> Statistics:
    """Return the re-estimated statistics of the server's model and of clients' models.

    Args:
        plan: the trial's plan.
        server: the server's state.
        training: training samples by client; with a pooled method, the samples of all clients together.
        personal: returns the model that a client in ``training`` would use, None if it has not trained.
        participants: clients whose uploads the server's mixes hold, in order.
        alone: whether other clients' estimates are out of reach, so that models with shared statistics are left out.

    """
    names = frozenset(name for layer in list_batch_norms(plan) for name in name_statistics(layer))

    def estimate(state: State, client: str) -> State:
        return pick(reestimate_statistics(plan, state, training[client], BATCHES), names)

    def average(estimates: Iterable[tuple[str, State]]) -> State:
        mean = StreamingMean()
        for client, state in estimates:
            size = len(training[client])
            mean.add(state, plan.method.weigh(samples=size, used=size))
        return mean.result()

    found: dict[str | None, State] = {}
    common = None if alone else global_state(plan, server)
    if common is not None:
        found[None] = average((client, estimate(common, client)) for client in training)
    if not plan.personalizes:
        return found
    fresh, loaded = dict[str, State](), dict[str, frozenset[str]]()
    for client in training:
        if (state := personal(client)) is not None:
            fresh[client] = estimate(state, client)
            loaded[client] = list_loaded(names, broadcast(server, client), state)
    if any(loaded.values()) and not alone:
        mixes = server.mixes and replace(server.mixes, uploads=tuple(fresh[client] for client in participants))
        server = replace(server, shared=server.shared | average(fresh.items()), mixes=mixes)
    for client, own in fresh.items():
        if not (alone and loaded[client]):
            found[client] = own | pick(broadcast(server, client).shared, loaded[client])
    return found


def list_loaded(names: Iterable[str], server: ServerState, state: State) -> frozenset[str]:
    """Return those of the entries ``names`` in a client's model ``state`` that are the server's, bit for bit."""
    return frozenset(name for name in names if name in server.shared and torch.equal(state[name], server.shared[name]))


def draw_seen(seed: int, samples: Samples, most: int) -> Samples:
    """Return training samples that show whether statistics lag: at most a batch of evaluation, of cases ``most``."""
    count = min(len(samples), BATCH if samples.patches is None else most)
    return samples.take(torch.from_numpy(stream(seed, "seen").permutation(len(samples))[:count]))


def find_moves(metric: str, before: Sequence[Row], after: Sequence[Row]) -> list[dict[str, Any]]:
    """Return client, split, and the metric with ``running`` and ``reestimated`` statistics, where both define it.

    ``before`` and ``after``: measurements of each client and split.
    """
    frames = (rows_to_frame(rows).set_index(["client", "split"]) for rows in (before, after))
    running, reestimated = (compute_metric(frame, metric).astype(float).rename(None) for frame in frames)
    both = running.to_frame("running").join(reestimated.to_frame("reestimated"), how="inner").dropna()
    return [dict(zip(("client", "split", *both), row, strict=True)) for row in both.reset_index().to_numpy().tolist()]
