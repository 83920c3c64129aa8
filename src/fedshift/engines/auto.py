"""Automatic choice of an engine for a trial, from the cost of the work and a timed step of each engine on this machine.

Timings are cached with everything they depend on, so that the same work on the same machine always uses the same
engine, and hence the same rounding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil, inf

import torch

from ..core.kernel import client_init, init_client, init_server
from ..core.optimizer import TorchOptimizer
from ..core.plan import Plan
from ..core.step import client_step
from ..data.augmentation import Augmentation
from ..utils.files import cached_measurement
from ..utils.processors import available_processors
from ..utils.state import nbytes, pick
from ..utils.threads import limit_threads
from ..utils.version import find_newest_source
from .cost_model import count_operations, time_in_turns
from .engine import Data, Diverged, Engine, find_exchange
from .identity import Identity
from .spread import Pool
from .stacked import (
    Stacked,
    choose_held,
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
FAST = 1e13
"""Operations per second of a GPU, roughly."""
ALONE = " on one thread"
"""Suffix of an engine's name if torch uses one thread."""
TURNS, SHORT = 5, 0.05
"""Number of timed turns of each engine, and the minimum duration of a turn in seconds."""
SEVERAL = 4
"""Number of stacked steps that a thread takes in a timed run; in a round it takes all of them."""
MANY = 256
"""Maximum number of clients in a timed round."""
START = 3.0
"""Seconds until worker processes are ready."""
COPY = 4e9
"""Bytes per second that a process copies."""
TRANSFER = 2e-3
"""Seconds to send a client to a worker and back, in addition to copying."""


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """The engine for a trial and the reason, without a final period; ``threads``: torch's threads, None: all."""

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
    separate_uploads: bool = False,
) -> EngineChoice:
    """Return the fastest engine for ``rounds`` rounds with ``clients`` participants out of ``data``.

    ``separate_uploads``: whether each client's model after local work is needed, not only the average.
    """
    steps, batch = count_steps(plan, data)
    one, held = count_operations(plan, data), nbytes(pick(plan.initial, plan.trained))
    on_cpu = next(iter(data.values())).y.device.type == "cpu"
    total = one * batch * steps * clients * rounds if on_cpu else inf  # small work gains most on other devices
    needs = f"{one / 1e6:.3g} MFLOP per sample, {held / 1e6:.3g} MB of parameters"
    if total < LITTLE and not separate_uploads and Identity.refusal(plan, data) is None:
        return EngineChoice(
            engine="identity", reason="each client does one plain step, so a round is one step on all batches"
        )
    if total < LITTLE:
        few = f"{needs}: {total / 1e9:.3g} GFLOP in total are too few to gain from more"
        return EngineChoice(engine="sequential", threads=1, reason=few)
    took = _predict(plan, data, clients, rounds, workers, augment, separate_uploads=separate_uploads)
    refused = find_exchange(plan) or plan.verdict("stacked")
    if isinstance(plan.optimizer, TorchOptimizer) or any(name.startswith("stacked") for name in took):
        refused = Stacked.refusal(plan, data)  # times may be another network's that prints the same
    took = {name: value for name, value in took.items() if not (refused and name.startswith("stacked"))}
    best = min(took, key=lambda name: took[name])
    each = ", ".join(f"{name} {_format_time(value)}" for name, value in sorted(took.items(), key=lambda item: item[1]))
    threads = 1 if best.endswith(ALONE) else None
    why = f"{needs}; predicted training time from a timed step: {each}"
    if refused:
        why += f"; the stacked engine {refused}"
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
    """Return the seconds that the rounds take on the fastest engine, from a timed step on this machine (cached)."""
    return min(_predict(plan, data, clients, rounds, workers, augment, separate_uploads=False).values())


def estimate_seconds(plan: Plan, data: Data, *, clients: int, rounds: int) -> float:
    """Estimate the seconds that the rounds take without timing, from operations and a millisecond per step."""
    steps, batch = count_steps(plan, data)
    speed = LITTLE if next(iter(data.values())).y.device.type == "cpu" else FAST
    return steps * clients * rounds * (1e-3 + count_operations(plan, data) * batch / speed)


def _predict(
    plan: Plan, data: Data, clients: int, rounds: int, workers: int | None, augment: Augmentation | None, *,
    separate_uploads: bool,
) -> dict[str, float]:  # fmt: skip
    """Return the seconds that ``rounds`` rounds take on each engine, from a timed step (cached)."""
    steps, batch = count_steps(plan, data)
    split = next(iter(data.values()))
    on_cpu = split.y.device.type == "cpu"
    processes = min(workers or available_processors(), clients) if on_cpu else 1  # others share one device
    machine = torch.__version__, find_newest_source(), torch.get_num_threads(), processes, str(split.y.device)
    shapes = [tuple(tensor.shape) for tensor in plan.initial.values()]
    once = plan.work.is_one_step(map(len, data.values()), plan.smallest_batch)
    lanes = min(clients, MANY), count_lanes(plan, data, clients)
    sizes = steps, once, len(set(map(len, data.values()))) == 1, batch, separate_uploads, *lanes, split.shape
    work = *sizes, plan.optimizer, plan.loss, augment
    facts = machine, plan.method.text, str(plan.module), shapes, str(plan.dtype), plan.precision, str(work)
    step_times = cached_measurement(
        "engines.json", facts, lambda: _time_engines(plan, data, clients, processes, augment, separate_uploads)
    )
    took = {name: steps * clients * rounds * value for name, value in step_times.items() if name != "pool"}
    if "pool" in step_times:
        moved = 3 * nbytes(plan.initial) / COPY
        took["pool"] = START + rounds * ceil(clients / processes) * (steps * step_times["pool"] + moved + TRANSFER)
    return took


def count_steps(plan: Plan, data: Data) -> tuple[int, int]:
    """Return the number of steps in a round and of samples in a batch, for a client of mean size."""
    samples = ceil(sum(map(len, data.values())) / len(data))
    bounds = plan.work.batch_bounds(samples, plan.smallest_batch)
    return len(plan.work.steps_of_round(0, len(bounds))), min(plan.work.batch_size or samples, samples)


def _format_time(value: float) -> str:
    return f"{value:.1f} s" if value < 100 else f"{value / 60:.1f} min"


def _time_engines(
    plan: Plan, data: Data, clients: int, processes: int, augment: Augmentation | None, separate_uploads: bool
) -> dict[str, float]:
    split = max(data.values(), key=len)
    steps, batch = count_steps(plan, data)
    index = torch.arange(batch, device=split.y.device) % len(split)
    x, y = split.inputs(index, plan.dtype), split.targets(index)
    key = torch.zeros((), dtype=torch.int64, device=split.y.device)
    job = client_init(plan, init_client(plan), init_server(plan), planned_steps=1)
    shared = frozenset() if separate_uploads else find_shared(plan, data)
    holdable = frozenset[str]() if separate_uploads or shared else find_holdable(plan, data)
    equal = len(set(map(len, data.values()))) == 1  # lanes may defer updates
    sizes = sizes_of_round(plan, len(split)) if equal else []
    held = choose_held(plan, holdable, sizes)
    width = count_lanes(plan, data, clients, shared or frozenset(held), sum(sizes) if held else 0)
    stackable = width > 1 and Stacked.refusal(plan, data) is None
    # The identity engine is timed by whole rounds, since drawing batches is expensive.
    whole = not separate_uploads and Identity.refusal(plan, data) is None
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
    seconds = {name: took / each.get(name, 1) for name, took in time_in_turns(works, TURNS, SHORT).items()}
    if processes > 1 and Pool.refusal(plan, data, augment) is None:
        seconds["pool"] = seconds.get(f"sequential{ALONE}", seconds["sequential"])
    return seconds


def _prepare_round(engine: type[Engine], plan: Plan, data: Data, names: Sequence[str]) -> Callable[[], object]:
    """Return a function that trains the clients ``names`` for a round and sums their uploads."""
    running, server = engine(plan, data, 0, separate_uploads=False), init_server(plan)
    clients = {name: init_client(plan) for name in names}

    def train() -> None:
        with suppress(Diverged):
            deque(running.train(server, clients), maxlen=0)

    return train


def _limit(threads: int | None, work: Callable[[], object]) -> Callable[[], object]:
    """Return a function that runs ``work`` on ``threads`` threads (None: all)."""

    def limited() -> None:
        with limit_threads(threads):
            work()

    return limited
