"""Automatic choice of an engine for a trial, from the work's cost and a timed step of each engine on this machine.

Timings are cached under everything they depend on, so that the same work on the same machine gets the same engine
again, and with it the same rounding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil

import torch

from ..core.kernel import client_init, init_client, init_server
from ..core.plan import Plan
from ..core.step import client_step
from ..data.augmentation import Augmentation
from ..utils.files import cached_measurement
from ..utils.processors import available_processors
from ..utils.state import nbytes, pick
from ..utils.threads import limit_threads
from ..utils.version import find_newest_source
from .cost_model import count_operations, time_in_turns
from .deferral import choose_held
from .engine import Data, Diverged, Engine
from .identity import Identity
from .spread import Pool
from .stacked import (
    Stacked,
    count_lanes,
    count_threads,
    even_width,
    find_holdable,
    find_shared,
    prepare_steps,
    sizes_of_round,
)

LITTLE = 1e11
"""Total operations below which a run takes about a second on any engine."""
ALONE = " on one thread"
"""Suffix of an engine's name where torch is to use one thread."""
TURNS, SHORT = 5, 0.05
"""Turns in which each engine's steps are timed, and seconds that one lasts at least."""
SEVERAL = 4
"""Stacked steps that a thread takes at a time when they are timed; in a round it takes them all."""
MANY = 256
"""Clients of a whole round that is timed, at most."""
START = 3.0
"""Seconds until worker processes are ready."""
COPY = 4e9
"""Bytes per second that a process copies, at least."""
HANDED = 2e-3
"""Seconds to pass a client to a worker and back, in addition to copying."""


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """The engine for a trial and the reason, a sentence without its period; ``threads``: torch's, None: all."""

    engine: str
    reason: str
    threads: int | None = None


def choose_engine(
    plan: Plan,
    data: Data,
    *,
    clients: int,
    rounds: int,
    workers: int | None = None,
    augment: Augmentation | None = None,
    apart: bool = False,
) -> EngineChoice:
    """Return the engine for ``rounds`` rounds in which ``clients`` of those in ``data`` take part.

    ``apart``: each client's model after its local work is needed, not only their average.
    """
    steps, batch = _count_steps(plan, data)
    one, held = count_operations(plan, data), nbytes(pick(plan.initial, plan.trained))
    total = one * batch * steps * clients * rounds
    needs = f"{one / 1e6:.3g} MFLOP a sample, {held / 1e6:.3g} MB of parameters"
    if total < LITTLE and _fits_identity(plan, data, apart=apart):
        return EngineChoice(
            engine="identity", reason="each client does one plain step, so a round is one step on all batches"
        )
    if total < LITTLE:
        few = f"{needs}: {total / 1e9:.3g} GFLOP in all are too few to gain from more"
        return EngineChoice(engine="sequential", threads=1, reason=few)
    took = _predict(plan, data, clients, rounds, workers, augment, apart=apart)
    best = min(took, key=lambda name: took[name])
    each = ", ".join(f"{name} {_format_time(value)}" for name, value in sorted(took.items(), key=lambda item: item[1]))
    threads = 1 if best.endswith(ALONE) else None
    why = f"{needs}; by a step timed on each, training would take: {each}"
    return EngineChoice(engine=best.removesuffix(ALONE), threads=threads, reason=why)


def measure_seconds(
    plan: Plan,
    data: Data,
    *,
    clients: int,
    rounds: int,
    workers: int | None = None,
    augment: Augmentation | None = None,
) -> float:
    """Return how long such rounds take on the fastest engine, by a step timed on each on this machine, cached."""
    return min(_predict(plan, data, clients, rounds, workers, augment, apart=False).values())


def estimate_seconds(plan: Plan, data: Data, *, clients: int, rounds: int) -> float:
    """Return roughly how long such rounds take, without timing: by operations, and a millisecond a step."""
    steps, batch = _count_steps(plan, data)
    return steps * clients * rounds * (1e-3 + count_operations(plan, data) * batch / LITTLE)


def _predict(
    plan: Plan,
    data: Data,
    clients: int,
    rounds: int,
    workers: int | None,
    augment: Augmentation | None,
    *,
    apart: bool,
) -> dict[str, float]:
    """Return the seconds that ``rounds`` rounds take on each engine, by a step timed on each."""
    steps, _ = _count_steps(plan, data)
    processes = min(workers or available_processors(), clients)
    found = _calibrate(plan, data, clients, processes, augment, apart=apart)
    took = {name: steps * clients * rounds * value for name, value in found.items() if name != "pool"}
    if "pool" in found:
        moved = 3 * nbytes(plan.initial) / COPY
        took["pool"] = START + rounds * ceil(clients / processes) * (steps * found["pool"] + moved + HANDED)
    return took


def _fits_identity(plan: Plan, data: Data, *, apart: bool) -> bool:
    """Return whether the rounds can be steps on the batches of all clients together."""
    return not apart and Identity.refusal(plan, data) is None


def _count_steps(plan: Plan, data: Data) -> tuple[int, int]:
    """Return the steps of a round, and the samples in a batch, of a client of mean size."""
    samples = ceil(sum(map(len, data.values())) / len(data))
    bounds = plan.work.batch_bounds(samples, plan.smallest_batch)
    return len(plan.work.steps_of_round(0, len(bounds))), min(plan.work.batch_size or samples, samples)


def _are_equal(data: Data) -> bool:
    """Return whether all clients have as many samples, so that lanes may hold back updates."""
    return len(set(map(len, data.values()))) == 1


def _format_time(value: float) -> str:
    return f"{value:.1f} s" if value < 100 else f"{value / 60:.1f} min"


def _calibrate(
    plan: Plan, data: Data, clients: int, processes: int, augment: Augmentation | None, *, apart: bool
) -> dict[str, float]:
    """Return the seconds of a client's step on each engine that can run the plan, measured now or cached."""
    split = next(iter(data.values()))
    machine = torch.__version__, find_newest_source(), torch.get_num_threads(), processes, str(split.y.device)
    shapes = [tuple(tensor.shape) for tensor in plan.initial.values()]
    steps, batch = _count_steps(plan, data)
    once = plan.work.is_one_step(map(len, data.values()), plan.smallest_batch)
    lanes = min(clients, MANY), count_lanes(plan, data, clients)
    work = steps, once, _are_equal(data), batch, apart, *lanes, split.shape, plan.optimizer, plan.loss, augment
    facts = machine, plan.method.text, str(plan.module), shapes, str(plan.dtype), plan.precision, str(work)
    return cached_measurement(
        "engines.json", facts, lambda: _time_engines(plan, data, clients, processes, augment, apart)
    )


def _time_engines(
    plan: Plan, data: Data, clients: int, processes: int, augment: Augmentation | None, apart: bool
) -> dict[str, float]:
    split = max(data.values(), key=len)
    steps, batch = _count_steps(plan, data)
    index = torch.arange(batch, device=split.y.device) % len(split)
    x, y = split.inputs(index, plan.dtype), split.targets(index)
    key = torch.zeros((), dtype=torch.int64, device=split.y.device)
    job = client_init(plan, init_client(plan), init_server(plan), planned_steps=1)
    shared = frozenset() if apart else find_shared(plan, data)
    holdable = frozenset[str]() if apart or shared else find_holdable(plan, data)
    sizes = sizes_of_round(plan, len(split)) if _are_equal(data) else []
    held = choose_held(plan, holdable, sizes)
    width = count_lanes(plan, data, clients, shared or frozenset(held), sum(sizes) if held else 0)
    stackable = width > 1 and Stacked.refusal(plan, data) is None
    whole = _fits_identity(plan, data, apart=apart)  # then whole rounds are timed, since drawing batches costs as much
    names = tuple(data)[: min(clients, MANY)]
    works: dict[str, Callable[[], object]] = {"identity": _prepare_round(Identity, plan, data, names)} if whole else {}
    each = {"identity": len(names)}
    for threads, how in ((None, ""), (1, ALONE)) if torch.get_num_threads() > 1 else ((1, ""),):
        with limit_threads(threads):
            works[f"sequential{how}"] = _limit(threads, lambda: client_step(plan, job, x, y, key))
            if stackable and whole:
                works[f"stacked{how}"] = _limit(threads, _prepare_round(Stacked, plan, data, names))
                each[f"stacked{how}"] = len(names)
            elif stackable:
                chunks = count_threads(steps)
                lanes = even_width(clients, width, chunks)
                kind = {"shared": shared, "held": held, "rows": sum(sizes)}
                several = prepare_steps(plan, data, lanes, chunks, batch, steps=SEVERAL, **kind)  # type: ignore[arg-type]
                works[f"stacked{how}"], each[f"stacked{how}"] = _limit(threads, several), SEVERAL * lanes * chunks
    found = {name: took / each.get(name, 1) for name, took in time_in_turns(works, TURNS, SHORT).items()}
    if processes > 1 and Pool.refusal(plan, data, augment) is None:
        found["pool"] = found.get(f"sequential{ALONE}", found["sequential"])
    return found


def _prepare_round(engine: type[Engine], plan: Plan, data: Data, names: Sequence[str]) -> Callable[[], object]:
    """Return a round of the clients ``names``, whose uploads are only summed."""
    running, server = engine(plan, data, 0, apart=False), init_server(plan)
    clients = {name: init_client(plan) for name in names}

    def train() -> None:
        with suppress(Diverged):
            deque(running.train(server, clients), maxlen=0)

    return train


def _limit(threads: int | None, work: Callable[[], object]) -> Callable[[], object]:
    """Return ``work`` on ``threads`` threads (None: all)."""

    def limited() -> None:
        with limit_threads(threads):
            work()

    return limited
