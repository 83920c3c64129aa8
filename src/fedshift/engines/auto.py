"""Automatic choice of an engine for a trial, from the cost of the work and timed rounds of each engine on this machine.

Timings are cached with everything they depend on, so that the same work on the same machine always uses the same
engine, and hence the same rounding.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, inf
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils import flop_counter

from ..core.kernel import init_client, init_server
from ..core.network import forward
from ..core.plan import Plan
from ..data.augmentation import Augmentation
from ..utils.files import cached_measurement
from ..utils.processors import available_processors
from ..utils.profiling import wait_for_device
from ..utils.state import clone, nbytes, pick
from ..utils.threads import limit_threads
from ..utils.version import find_newest_source
from .engine import Data, Diverged, Engine
from .identity import Identity
from .sequential import Sequential
from .spread import Pool
from .stacked import Stacked

LITTLE = 1e11
"""Total operations below which a run takes about a second on any engine."""
LARGE = 1e10
"""Operations of a step from which stacking does not pay on a CPU."""
FAST = 1e13
"""Operations per second of a GPU, roughly."""
TIMED = 0.1
"""Seconds of a timed round, about, if a CPU does ``LITTLE`` operations per second; lanes take at least two steps."""
MANY = 256
"""Maximum number of clients in a timed round."""
TURNS, SHORT = 5, 0.05
"""Number of timed turns of each engine, and the minimum duration of a turn in seconds."""
ALONE = " on one thread"
"""Suffix of an engine's name if torch uses one thread."""
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
    plan: Plan, data: Data, *, clients: int, rounds: int, workers: int | None = None,
    augment: Augmentation | None = None, separate_uploads: bool = False,
) -> EngineChoice:  # fmt: skip
    """Return the fastest engine for ``rounds`` rounds with ``clients`` participants out of ``data``.

    ``separate_uploads``: whether each client's model after local work is needed, not only the average.
    """
    steps, batch = count_steps(plan, data)
    one = count_operations(plan, data)
    total = one * batch * steps * clients * rounds if _is_on_cpu(data) else inf  # small work gains most elsewhere
    needs = f"{one / 1e6:.3g} MFLOP per sample, {nbytes(pick(plan.initial, plan.trained)) / 1e6:.3g} MB of parameters"
    if total < LITTLE and not separate_uploads and Identity.refusal(plan, data) is None:
        only = "each client does one plain step, so a round is one step on all batches"
        return EngineChoice(engine="identity", reason=only)
    if total < LITTLE:
        few = f"{needs}: {total / 1e9:.3g} GFLOP in total are too few to gain from more"
        return EngineChoice(engine="sequential", threads=1, reason=few)
    seconds = time_rounds(
        plan, data, clients=clients, rounds=rounds, workers=workers, augment=augment, separate_uploads=separate_uploads
    )
    if refused := Stacked.refusal(plan, data) if _may_stack(plan, data) else None:  # the cached network may differ
        seconds = {name: value for name, value in seconds.items() if not name.startswith("stacked")}
    ranking = sorted(seconds, key=seconds.__getitem__)
    times = ", ".join(f"{name} {seconds[name]:.1f} s" for name in ranking)
    why = f"{needs}; predicted training time from timed steps: {times}"
    return EngineChoice(
        engine=ranking[0].removesuffix(ALONE),
        threads=1 if ranking[0].endswith(ALONE) else None,
        reason=f"{why}; the stacked engine {refused}" if refused else why,
    )


def time_rounds(
    plan: Plan, data: Data, *, clients: int, rounds: int, workers: int | None = None,
    augment: Augmentation | None = None, separate_uploads: bool = False,
) -> dict[str, float]:  # fmt: skip
    """Return the seconds that ``rounds`` rounds take on each engine, from timed steps on this machine (cached)."""
    steps, batch = count_steps(plan, data)
    split = next(iter(data.values()))
    processes = min(workers or available_processors(), clients) if _is_on_cpu(data) else 1  # others share one device
    machine = torch.__version__, find_newest_source(), torch.get_num_threads(), processes, str(split.y.device)
    shapes = [tuple(tensor.shape) for tensor in plan.initial.values()]
    sizes = sorted(set(map(len, data.values()))), batch, separate_uploads, min(clients, MANY), split.shape
    work = str((*sizes, plan.work, plan.optimizer, plan.loss, augment))
    facts = machine, plan.method.text, str(plan.module), shapes, str(plan.dtype), plan.precision, work

    def measure() -> dict[str, float]:
        return _time_engines(plan, data, clients, processes, augment, separate_uploads)

    of_step = cached_measurement("engines.json", facts, measure)
    seconds = {name: steps * clients * rounds * value for name, value in of_step.items()}
    if "pool" in seconds:
        moving = TRANSFER + 3 * nbytes(plan.initial) / COPY
        seconds["pool"] = START + rounds * ceil(clients / processes) * (steps * of_step["pool"] + moving)
    return seconds


def count_operations(plan: Plan, data: Data) -> int:
    """Return the floating-point operations of training on one sample: three times the forward pass.

    Matrix products and convolutions count two operations per multiply-add; the backward pass costs two forward passes,
    one for the gradients of inputs and one for the gradients of weights.
    """
    split = next(iter(data.values()))
    x = split.inputs(slice(0, 1), plan.dtype)
    dispatch: Any = flop_counter._FlopCounterMode.__torch_dispatch__
    with suppress(AttributeError):  # keeps the compiler out, whose import takes a second; not in all versions of torch
        vars(dispatch.__wrapped__).setdefault("__dynamo_disable", dispatch.__wrapped__)
    counter = flop_counter.FlopCounterMode(display=False)  # its tracker of layers fails where these differentiate
    with flop_counter._FlopCounterMode(counter):
        forward(plan, clone(plan.initial), x)
    return 3 * int(counter.get_total_flops())


def estimate_seconds(plan: Plan, data: Data, *, clients: int, rounds: int) -> float:
    """Estimate the seconds that the rounds take without timing, from operations and a millisecond per step."""
    steps, batch = count_steps(plan, data)
    return steps * clients * rounds * (1e-3 + count_operations(plan, data) * batch / _find_speed(data))


def count_steps(plan: Plan, data: Data) -> tuple[int, int]:
    """Return the number of steps in a round and of samples in a batch, for a client of mean size."""
    samples = ceil(sum(map(len, data.values())) / len(data))
    bounds = plan.work.batch_bounds(samples, plan.smallest_batch)
    return len(plan.work.steps_of_round(0, len(bounds))), min(plan.work.batch_size or samples, samples)


def count_passes(plan: Plan) -> int:
    """Count the epochs of a round that train parameters kept by rules instead of the model."""
    return sum(phase.epochs for _, phase in (*plan.phases["before"], *plan.phases["after"]))


def _is_on_cpu(data: Data) -> bool:
    return next(iter(data.values())).y.device.type == "cpu"


def _find_speed(data: Data) -> float:
    return LITTLE if _is_on_cpu(data) else FAST


def _count_step(plan: Plan, data: Data) -> int:
    """Return the operations of a step."""
    return count_operations(plan, data) * count_steps(plan, data)[1]


def _may_stack(plan: Plan, data: Data) -> bool:
    return not _is_on_cpu(data) or _count_step(plan, data) < LARGE


def _format_time(value: float) -> str:
    return f"{value:.1f} s" if value < 100 else f"{value / 60:.1f} min"


def _time_engines(
    plan: Plan, data: Data, clients: int, processes: int, augment: Augmentation | None, separate_uploads: bool
) -> dict[str, float]:
    """Return the seconds of a client's step on each engine, from rounds of about ``TIMED`` seconds."""
    timed: dict[str, type[Engine]] = {"sequential": Sequential}
    if _may_stack(plan, data) and Stacked.refusal(plan, data) is None:
        timed["stacked"] = Stacked
    if not separate_uploads and Identity.refusal(plan, data) is None:
        timed["identity"] = Identity
    most = int(TIMED * _find_speed(data) / max(1, _count_step(plan, data)))
    names = list(data)[: max(1, min(clients, MANY, most // 2) if len(timed) > 1 else 1)]
    short = _shorten(plan, data, max(min(2, len(timed)), most // len(names)))
    works, steps = dict[str, Callable[[], object]](), dict[str, int]()
    for threads, how in ((None, ""), (1, ALONE)) if torch.get_num_threads() > 1 else ((1, ""),):
        for name, kind in timed.items():
            engine = kind(*short, 0, augment=augment, separate_uploads=separate_uploads)
            members = [max(data, key=lambda client: len(data[client]))] if kind is Sequential else names
            works[name + how], steps[name + how] = _prepare_round(engine, members, threads)
    seconds = {name: value / steps[name] for name, value in time_in_turns(works, TURNS, SHORT).items()}
    if processes > 1 and Pool.refusal(plan, data, augment) is None:
        seconds["pool"] = seconds.get(f"sequential{ALONE}", seconds["sequential"])
    return seconds


def _shorten(plan: Plan, data: Data, steps: int) -> tuple[Plan, Data]:
    """Return the plan and the samples of rounds of at most ``steps`` steps, on batches of the same size."""
    if count_steps(plan, data)[0] <= steps:
        return plan, data
    most = steps * plan.work.batch_size if plan.work.batch_size else None
    rows = {name: torch.arange(len(split), device=split.y.device)[:most] for name, split in data.items()}
    few = {name: split.take(rows[name]) for name, split in data.items()}
    return replace(plan, work=plan.work.change({"steps": steps})), few


def _prepare_round(engine: Engine, names: Sequence[str], threads: int | None) -> tuple[Callable[[], object], int]:
    """Return a function that trains the clients ``names`` on ``threads`` threads (None: all), and counts its steps."""
    server, clients = init_server(engine.plan), {name: init_client(engine.plan) for name in names}
    rounds = [engine.steps_of_round(name, client) for name, client in clients.items()]
    passes = count_passes(engine.plan)

    def train() -> None:
        with limit_threads(threads), suppress(Diverged):
            deque(engine.train(server, clients), maxlen=0)

    return train, sum(len(steps) + passes * len(bounds) for bounds, steps in rounds)


def time_in_turns(works: Mapping[str, Callable[[], object]], turns: int, seconds: float) -> dict[str, float]:
    """Return the median seconds of a run of each work, over ``turns`` turns of at least ``seconds``.

    Turns of different works alternate and have similar durations, so that other load on the machine slows all works
    equally; the median of short runs would exclude interrupted ones.
    """
    runs: dict[str, int] = {}
    timings: dict[str, list[float]] = {name: [] for name in works}
    for name, work in works.items():
        work()
        runs[name] = max(1, ceil(seconds / _time(work)))  # from the second run
    for _ in range(turns):
        for name, work in works.items():
            timings[name].append(_time(work, runs[name]))
    return {name: median(each) for name, each in timings.items()}


def _time(work: Callable[[], object], runs: int = 1) -> float:
    """Return the mean seconds of ``runs`` runs of ``work``."""
    began = time.perf_counter()
    for _ in range(runs):
        work()
    wait_for_device()
    return (time.perf_counter() - began) / runs


@cache
def measure_peak(threads: int) -> dict[str, float]:
    """Measure float32 operations per second of a large matrix product and of a 3 x 3 convolution.

    On the CPU, with ``threads`` threads: the rates that the libraries reach, not the processor's nominal peak.
    """
    left, right = torch.randn(2, 1024, 1024)
    images, kernels = (
        torch.randn(shape).contiguous(memory_format=torch.channels_last) for shape in ((32, 64, 28, 28), (64, 64, 3, 3))
    )
    works = {"product": lambda: left @ right, "convolution": lambda: F.conv2d(images, kernels, padding=1)}
    with limit_threads(threads), torch.no_grad():
        seconds = time_in_turns(works, 5, 0.0)
    operations = {"product": 2 * 1024**3, "convolution": 2 * 32 * 28**2 * 64**2 * 9}
    return {kind: operations[kind] / value for kind, value in seconds.items()}
