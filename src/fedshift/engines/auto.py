"""The engine chosen for a trial: by what the work needs, and by a step of each engine timed on this machine.

Timings are kept in the cache directory by everything they depend on, so that the same work on the same machine gets the
same engine again, and with it the same rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch

from ..base.processors import processors
from ..base.remembered import remembered
from ..base.state import nbytes, pick
from ..core.kernel import begin, init_client, init_server, step
from ..core.plan import Plan
from .cost import at_most, operations, seconds
from .engine import Data
from .identity import Identity
from .pool import Pool
from .stacked import Stacked, lanes_at_once, stacked_step

LITTLE = 1e11
"""Operations in all below which a run takes about a second whatever the engine."""
ALONE = " on one thread"
"""What the name of an engine ends with where torch is to use one thread."""
START = 3.0
"""Seconds until worker processes are ready."""
COPY = 4e9
"""Bytes a second that a process copies, at least."""
HANDED = 2e-3
"""Seconds it takes to hand a client to a worker and back, beside copying."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The engine for a trial, and why, in a sentence without its full stop; ``threads``: of torch, None: all it has."""

    engine: str
    why: str
    threads: int | None = None


def choose(
    plan: Plan, data: Data, *, clients: int, rounds: int, workers: int | None = None, apart: bool = False
) -> Choice:
    """The engine for ``rounds`` rounds in which ``clients`` of those in ``data`` take part.

    ``apart``: each client's model after its work is needed, not only what they average to.
    """
    if not apart and Identity.refusal(plan, data) is None:
        return Choice(engine="identity", why="each client does one plain step, so a round is one step on all batches")
    samples = sum(map(len, data.values())) / len(data)
    bounds = plan.work.bounds(ceil(samples), plan.smallest_batch)
    steps = len(plan.work.steps(0, len(bounds)))
    batch = min(plan.work.batch_size or ceil(samples), ceil(samples))
    one, held = operations(plan, data), nbytes(pick(plan.initial, plan.trained))
    total = one * batch * steps * clients * rounds
    needs = f"{one / 1e6:.3g} MFLOP a sample, {held / 1e6:.3g} MB of parameters"
    if total < LITTLE:
        few = f"{needs}: {total / 1e9:.3g} GFLOP in all are too few to gain from more"
        return Choice(engine="sequential", threads=1, why=few)
    found = _calibrated(plan, data, batch, clients, workers)
    many = steps * clients * rounds
    took = {name: many * value for name, value in found.items() if name != "pool"}
    if "pool" in found:
        hands = min(workers or processors(), clients)
        moved = 3 * nbytes(plan.initial) / COPY
        took["pool"] = START + rounds * ceil(clients / hands) * (steps * found["pool"] + moved + HANDED)
    best = min(took, key=lambda name: took[name])
    each = ", ".join(f"{name} {_time(value)}" for name, value in sorted(took.items(), key=lambda item: item[1]))
    threads = 1 if best.endswith(ALONE) else None
    why = f"{needs}; by a step timed on each, training would take: {each}"
    return Choice(engine=best.removesuffix(ALONE), threads=threads, why=why)


def _time(value: float) -> str:
    return f"{value:.1f} s" if value < 100 else f"{value / 60:.1f} min"


def _calibrated(plan: Plan, data: Data, batch: int, clients: int, workers: int | None) -> dict[str, float]:
    """Seconds of a client's step on each engine that can run the plan, measured here or remembered."""
    hands = min(workers or processors(), clients)
    split = next(iter(data.values()))
    machine = torch.__version__, torch.get_num_threads(), hands, str(split.y.device)
    shapes = [tuple(tensor.shape) for tensor in plan.initial.values()]
    work = batch, lanes_at_once(plan, data, clients), split.shape, plan.optimizer, plan.loss, plan.augment
    facts = machine, plan.method.text, str(plan.module), shapes, str(plan.dtype), plan.precision, str(work)
    return remembered("engines.json", facts, lambda: _timed(plan, data, batch, clients, hands))


def _timed(plan: Plan, data: Data, batch: int, clients: int, hands: int) -> dict[str, float]:
    split = max(data.values(), key=len)
    index = torch.arange(batch, device=split.y.device) % len(split)
    x, y = split.inputs(index, plan.dtype), split.y[index]
    key = torch.zeros((), dtype=torch.int64, device=split.y.device)
    job = begin(plan, init_client(plan), init_server(plan), planned=1)
    lanes = lanes_at_once(plan, data, clients)
    stackable = lanes > 1 and Stacked.refusal(plan, data) is None
    found = {}
    for threads, how in ((None, ""), (1, ALONE)) if torch.get_num_threads() > 1 else ((1, ""),):
        with at_most(threads):
            found[f"sequential{how}"] = seconds(lambda: step(plan, job, x, y, key), 3)
            if stackable:
                found[f"stacked{how}"] = seconds(lambda: stacked_step(plan, job, lanes, x, y), 3) / lanes
    if hands > 1 and Pool.refusal(plan, data) is None:
        found["pool"] = found.get(f"sequential{ALONE}", found["sequential"])
    return found
