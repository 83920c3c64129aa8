"""Time estimates for runs on this machine, and a time budget for all tables.

A run consists of local steps, client visits (loading, uploading, aggregation), checkpoints and evaluation forward
passes. Their numbers follow from the run's settings and client sizes, and one of each is timed. A step takes a constant
time plus a time per sample, so a small and a larger batch are timed. Single-threaded work is measured in CPU seconds,
so that other programs do not affect it. Sizes and timings are cached. Engines that run clients in parallel are faster:
the estimate is accurate to a factor of two.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Timer
from typing import Any, Self

import torch

from ..config.seeds import parse_seeds
from ..config.spec import DataSpec, RunSpec
from ..core.kernel import client_final, client_init, init_client, init_server
from ..core.method import Method
from ..core.plan import Plan, forward
from ..core.preparation import resolve_work
from ..core.selection import Scope
from ..core.server_round import ClientSizes, StreamingAggregator
from ..core.step import client_step_
from ..core.work import Work
from ..data.augmentation import Augmentation
from ..data.federation import Federation, count_labels
from ..data.files.read_options import Progress
from ..data.samples import Samples
from ..data.sources import data_root, load_source, prepare_clients
from ..engines.identity import Identity
from ..engines.sequential import Sequential
from ..experiments.factory import make_methods, make_settings, resolve_model
from ..experiments.settings import Settings, check_sizes, make_plan
from ..results.checkpoint import save_checkpoint
from ..tasks import describe_task, restore_task
from ..tasks.classification import CLASSIFICATION
from ..tasks.task import Task
from ..utils.allocator import keep_freed_memory
from ..utils.errors import UsageError
from ..utils.files import cached_measurement
from ..utils.random_streams import torch_stream
from ..utils.state import add_prefix
from ..utils.threads import limit_threads
from ..utils.version import __version__
from .planning import make_plans
from .published_tables import Table
from .recipes import ReproductionOptions
from .results import pending_runs

LOOKING, TIMING = "looking at the data of runs", "timing a step of the networks of tables"
"""The two stages of an estimate, for progress displays."""
SPLITTING = frozenset(("split", "samples", "validation", "allow_single_class", "normalize"))
"""Settings that distribute samples to clients; changing them does not require reading the data again."""
FEW, MANY = 2, 16
"""Sizes of the two timed batches."""
LEAST, NUMBERS = 8, 800_000
"""Minimum size of the larger batch, which is reduced if its inputs have more than ``NUMBERS`` values."""
ENOUGH = 0.03
"""Seconds after which timing of a part stops; each part is timed at least twice."""
SMALLEST_SCALE = 2**-12
"""Smallest fraction of rounds to try; a run always has at least one round."""


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Sizes of a federation that determine a run's time: numbers of samples of each client, and shape of a sample.

    ``tests``: sizes of evaluated splits; ``distinct``: number of distinct samples in these, since clients may share
    some; ``labels``: number of samples of each class; ``task``: the prediction task, described.
    """

    train: dict[str, int]
    tests: list[int]
    distinct: int
    shape: list[int]
    pixels: bool
    labels: list[int]
    task: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Seconds of local work: ``step`` per batch, ``sample`` per sample, and ``look`` per evaluated sample.

    ``apart``: whether the network treats samples independently, so that single steps of clients can be combined.
    """

    step: float
    sample: float
    look: float
    apart: bool


@dataclass(frozen=True, kw_only=True)
class VisitCosts:
    """Seconds of a client's ``visit`` (loading, uploading, aggregation) and of a checkpoint's ``save``."""

    visit: float
    save: float


def time_steps(
    plan: Plan,
    shape: tuple[int, ...],
    *,
    pixels: bool,
    classes: int,
    task: Task = CLASSIFICATION,
    augment: Augmentation | None = None,
) -> StepCosts:
    """Time steps and evaluations of ``plan`` on random samples with this shape, uint8 if ``pixels``."""
    many = min(MANY, max(LEAST, NUMBERS // max(1, torch.Size(shape).numel())))
    with torch_stream(0, "timing"), keep_freed_memory():
        x = torch.randint(256, (many, *shape), dtype=torch.uint8) if pixels else torch.rand(many, *shape)
        split = Samples(x=x, y=task.make_blank_targets(many, shape, classes))
        engine, key = Sequential(plan, {"client": split}, 0, augment=augment), torch.zeros((), dtype=torch.int64)
        job = client_init(plan, init_client(plan), init_server(plan), planned_steps=1)

        def step(batch: int) -> Callable[[], object]:
            index = torch.arange(batch)
            return lambda: client_step_(plan, job, *engine.load_batch("client", 0, index), key)

        small, large = _time_on_one_thread(step(FEW)), _time_on_any_threads(step(many))
        look = _time_on_any_threads(lambda: forward(plan, plan.initial, split.inputs(slice(None), plan.dtype))) / many
        sample = max(look, (large - small) / (many - FEW))
        plain = replace(plan, work=Work(batch_size=FEW, batches=1))
        apart = Identity.refusal(plain, {"client": split}) is None
    return StepCosts(step=max(0.0, small - FEW * sample), sample=sample, look=look, apart=apart)


def time_visits(plan: Plan) -> VisitCosts:
    """Time a client's visit with ``plan``, and a checkpoint of its network."""
    client, server = init_client(plan), init_server(plan)

    def visit() -> None:
        _, update = client_final(plan, client_init(plan, client, server, planned_steps=1))
        aggregator = StreamingAggregator(plan, server, ("client",), ClientSizes(plan, {"client": 1}))
        aggregator.add("client", replace(update, weight=1.0))
        aggregator.finalize()

    with TemporaryDirectory() as folder, keep_freed_memory():
        state = add_prefix("server", plan.initial)
        save = _time_quickest(lambda: save_checkpoint(Path(folder) / "one", state, {}), time.perf_counter)
        return VisitCosts(visit=_time_on_one_thread(visit), save=save)


def _time_on_any_threads(work: Callable[[], object]) -> float:
    """Return the seconds of ``work`` on one thread or on all torch threads, whichever is faster, as engines choose."""
    alone = _time_on_one_thread(work)
    return alone if torch.get_num_threads() == 1 else min(alone, _time_quickest(work, time.perf_counter))


def _time_on_one_thread(work: Callable[[], object]) -> float:
    with limit_threads(1):
        return _time_quickest(work, time.process_time)


def _time_quickest(work: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return the shortest of several timings of ``work`` with ``clock``, in seconds."""
    found: list[float] = []
    while len(found) < 2 or (sum(found) < ENOUGH and len(found) < 5):
        began = clock()
        work()
        found.append(clock() - began)
    return min(found)


class TimeEstimates:
    """Time estimates for runs, with shared measurements; ``steps`` and ``visits`` time a plan's parts."""

    def __init__(
        self, steps: Callable[..., StepCosts] = time_steps, visits: Callable[[Plan], VisitCosts] = time_visits
    ) -> None:
        self._time_steps, self._time_visits = steps, visits
        self._source = lru_cache(maxsize=1)(_load_source)
        self._known: dict[str, dict[str, Any]] = {}

    def gather_sizes(self, specs: Iterable[RunSpec], progress: Progress | None = None) -> None:
        """Measure the client sizes of ``specs``, in an order that reads no data twice.

        ``progress`` is called with the stage, the number of specs done, and their total number.
        """
        ordered = sorted(specs, key=lambda spec: repr(_read_settings(spec)))
        for done, spec in enumerate(ordered):
            if progress:
                progress(LOOKING, done, len(ordered))
            with suppress(UsageError):  # :meth:`estimate` raises it again
                self._sizes_of(spec)

    def estimate(self, specs: Iterable[RunSpec]) -> float:
        """Return the seconds for running ``specs`` one by one. Raises the errors of creating their experiments."""
        return sum(self._estimate_run(spec) for spec in sorted(specs, key=lambda spec: repr(_read_settings(spec))))

    def _estimate_run(self, spec: RunSpec) -> float:
        (method,) = make_methods(spec)
        sizes = self._sizes_of(spec)
        settings = make_settings(spec, tuple(sizes.train))
        members = {name: size for name, size in sizes.train.items() if name not in settings.newcomers}
        if method.pooled:
            members = {"pooled": sum(members.values())}
        if min(members.values()) < FEW:
            check_sizes(_make_plan(spec, method, settings, sizes), members)
        work = resolve_work(method, settings.work, len(sizes.train) - len(settings.newcomers))
        passed = [work.average_round(size) for size in members.values()]
        count, samples = (sum(found) / len(members) for found in zip(*passed, strict=True))
        taking_part = len(settings.draw_participants(parse_seeds(spec.seeds)[0], 1, tuple(members)))
        plain = not method.rules and method.gradient is None and method.aggregate.sums and method.scope == Scope()
        steps, visits = self._costs_of(spec, method, settings, sizes)
        together = plain and steps.apart and count == 1  # the engine identity combines all clients' steps
        training = (1 if together else taking_part * count) * steps.step + taking_part * samples * steps.sample
        whole = settings.rounds * (training + taking_part * visits.visit + visits.save)
        looks = sum(map(settings.is_evaluated, range(1, settings.rounds + 1)))
        personal = method.scope.load != Scope().load or method.finetune or any(r.personalizes for r in method.rules)
        looked_at = bool(personal) * sum(sizes.tests) + (method.scope.send == Scope().send) * sizes.distinct
        return float(len(parse_seeds(spec.seeds)) * (whole + looks * looked_at * steps.look))

    def _sizes_of(self, spec: RunSpec) -> _Sizes:
        asked = repr({name: getattr(spec, name) for name in ("data", *(field.name for field in fields(DataSpec)))})
        kept = tuple(field.name for field in fields(_Sizes))
        facts = __version__, kept, asked, _list_files(data_root(spec))

        def measure() -> dict[str, Any]:
            return _measure_sizes(prepare_clients(self._source(_read_settings(spec)), spec))

        return _Sizes(**self._measure("sizes.json", facts, measure))

    def _measure(self, file: str, facts: object, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of ``measure``, from this process's memory or the cache ``file`` if available."""
        key = repr((file, facts))
        if key not in self._known:
            self._known[key] = cached_measurement(file, facts, measure)
        return self._known[key]

    def _costs_of(
        self, spec: RunSpec, method: Method, settings: Settings, sizes: _Sizes
    ) -> tuple[StepCosts, VisitCosts]:
        """Return the costs of a run's parts; methods with the same changes to the network share them."""
        shape, classes = tuple(sizes.shape), len(sizes.labels)
        network = spec.model, shape, classes, __version__, torch.__version__, torch.get_num_threads()
        task = restore_task(sizes.task)
        form = str(method.surgery), sizes.pixels, str(task), spec.loss, spec.augment, spec.optimizer, spec.precision

        @cache
        def plan() -> Plan:
            return _make_plan(spec, method, settings, sizes)

        def time_plan() -> dict[str, Any]:
            return asdict(
                self._time_steps(
                    plan(), shape, pixels=sizes.pixels, classes=classes, task=task, augment=settings.augment
                )
            )

        steps = self._measure("steps.json", repr((network, form)), time_plan)
        visits = self._measure("moves.json", repr(network), lambda: asdict(self._time_visits(plan())))
        return StepCosts(**steps), VisitCosts(**visits)


def _make_plan(spec: RunSpec, method: Method, settings: Settings, sizes: _Sizes) -> Plan:
    """Return the plan of a run that uses only the surgery of ``method``."""
    shape, plain = tuple(sizes.shape), Method(name="plain", surgery=method.surgery)
    task = restore_task(sizes.task)
    return make_plan(
        plain, resolve_model(spec.model, shape), settings.for_task(task), parse_seeds(spec.seeds)[0],
        sample=torch.zeros(1, *shape), classes=len(sizes.labels), labels=torch.tensor(sizes.labels), clients=1,
        task=task,
    )  # fmt: skip


def _read_settings(spec: RunSpec) -> tuple[tuple[str, Any], ...]:
    """Return the settings that determine which data are read."""
    names = sorted({"data", *(field.name for field in fields(DataSpec))} - SPLITTING)
    return tuple((name, getattr(spec, name)) for name in names)


def _load_source(reading: tuple[tuple[str, Any], ...]) -> Federation:
    spec = RunSpec(**dict(reading))
    return load_source(spec.data, spec).fit_images(spec.image_size)


def _list_files(root: Path) -> list[tuple[str, int, int]]:
    """Return the files in the data directory with size and time, so that changed data are measured again."""
    try:
        found = [(entry.name, entry.stat()) for entry in os.scandir(root)]
    except OSError:
        return []
    return sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)


def _measure_sizes(data: Federation) -> dict[str, Any]:
    """Return the fields of :class:`_Sizes` of ``data``."""
    split = data.clients[0].train
    tests = [part for client in data.clients for name, part in client.splits.items() if name != "train"]
    return {
        "train": {client.name: len(client.train) for client in data.clients},
        "tests": [len(part) for part in tests],
        "distinct": sum(len(part) for part in {id(part): part for part in tests}.values()),
        "shape": list(split.shape),
        "pixels": split.dtype == torch.uint8,
        "labels": count_labels(data).tolist(),
        "task": describe_task(data.task),
    }


class TimeBudget:
    """Time budget for all tables: it is ``over``, and sets ``stop``, ``hours`` after it is entered; None: unlimited.

    Each table runs the fraction of its rounds that fits, and unused time passes to later tables. Fractions are powers
    of one half, so that tables are likely to share runs.
    """

    def __init__(self, hours: float | None, stop: Event) -> None:
        self._seconds, self._stop = None if hours is None else 3600 * hours, stop
        self._timer = Timer(self._seconds or 0.0, self._end)
        self._timer.daemon = True
        self._estimates = TimeEstimates()
        self.over = False

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        if self._seconds is not None:
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def order_by_time(
        self, tables: Sequence[Table], options: ReproductionOptions, directory: Path, progress: Progress | None = None
    ) -> list[Table]:
        """Return ``tables`` sorted by the estimated time of their pending runs; ``progress`` reports the estimation."""
        if not self._stop.is_set():
            self._estimates.gather_sizes(
                (spec for table in tables for spec in _pending_runs(table, options, directory)), progress
            )
        costs: dict[str, float] = {}
        for done, table in enumerate(tables):
            if progress:
                progress(TIMING, done, len(tables))
            costs[table.key] = self._cost(table, options, directory)
        return sorted(tables, key=lambda table: costs[table.key])

    def fit_scale(self, table: Table, options: ReproductionOptions, directory: Path, parts: int) -> ReproductionOptions:
        """Return ``options`` scaled so that ``table`` takes at most 1 / ``parts`` of the remaining time."""
        if self._seconds is None:
            return options
        share = max(0.0, self._began + self._seconds - time.monotonic()) / parts
        scale = 1.0
        while scale > SMALLEST_SCALE and self._cost(table, replace(options, scale=scale), directory) > share:
            scale /= 2
        return replace(options, scale=scale)

    def _end(self) -> None:
        self.over = True
        self._stop.set()

    def _cost(self, table: Table, options: ReproductionOptions, directory: Path) -> float:
        if self._stop.is_set():  # nothing will run
            return 0.0
        try:
            return self._estimates.estimate(_pending_runs(table, options, directory))
        except UsageError:  # running the table reports it
            return 0.0


def _pending_runs(table: Table, options: ReproductionOptions, directory: Path) -> list[RunSpec]:
    return pending_runs([spec for _, plan in make_plans(table, options) for spec in plan.specs], directory)
