"""How long runs will take on this machine, from a timed step of each network on each kind of sample.

A run is local steps, visits of clients (loading, uploading, folding), checkpoints and forward passes of evaluation; how
many there will be follows from its settings and the sizes of its clients, and one of each is timed. Engines that run
clients side by side are faster, and so is a machine that does nothing else: the estimate is good to a factor of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from math import ceil, prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ..base.remembered import remembered
from ..base.state import prefixed
from ..build import methods_of, model_of, settings_of
from ..checkpoint import save_checkpoint
from ..config import DataSpec, RunSpec
from ..core.aggregate import average
from ..core.folding import Folding
from ..core.kernel import begin, finish, init_client, init_server, step_
from ..core.method import Method
from ..core.plan import Plan, forward
from ..core.select import Scope
from ..core.work import Work
from ..data.federation import Federation, label_counts
from ..data.split import Split
from ..engines.cost import at_most, seconds
from ..engines.identity import Identity
from ..planning import plan_of
from ..settings import Settings
from ..sources import source_of, split_of

DEALING = frozenset(("split", "samples", "validation", "allow_single_class", "normalize"))
"""Settings that say who has which samples, of which none need be read again."""
MOST = 64
"""Samples of a batch that is timed, at most; a larger one takes as many times longer as it is larger."""
NUMBERS = 800_000
"""Numbers in the inputs of a batch that is timed, at most, so that timing large images takes seconds."""
SLOW = 0.1
"""Seconds from which a part is timed once."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds on this machine: a local ``step``, a ``sample`` in evaluation, a ``visit`` of a client, a checkpoint.

    ``apart``: 1 where the network treats each sample by itself, so that single steps of clients can be one.
    """

    step: float
    sample: float
    visit: float
    save: float
    apart: float


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """What of a federation the length of a run depends on: samples of each client, and a few of them."""

    train: dict[str, int]
    tests: tuple[int, ...]
    distinct: int
    few: Split
    classes: int
    labels: torch.Tensor


def measured(plan: Plan, split: Split, batch: int) -> Costs:
    """Time each part on ``batch`` of the samples in ``split``."""
    index = torch.arange(batch) % len(split)
    y, key = split.y[index], torch.zeros((), dtype=torch.int64)
    client, server = init_client(plan), init_server(plan)
    job = begin(plan, client, server, planned=1)

    def visit() -> None:
        _, update = finish(plan, begin(plan, client, server, planned=1))
        folding = Folding(plan, server, ("client",))
        folding.add("client", replace(update, weight=1.0))
        folding.close(1)

    plain = replace(plan, work=Work(batch_size=batch, batches=1))
    with TemporaryDirectory() as folder:
        return Costs(
            step=_quickest(lambda: step_(plan, job, plan.training_inputs(split, index, 0, "client", 0), y, key)),
            sample=_quickest(lambda: forward(plan, plan.initial, split.inputs(index, plan.dtype))) / batch,
            visit=_quickest(visit),
            save=_quickest(lambda: save_checkpoint(Path(folder) / "one", prefixed("server", plan.initial), {})),
            apart=float(Identity.refusal(plain, {"client": split}) is None),
        )


def _quickest(work: Callable[[], object]) -> float:
    """Seconds of ``work`` on all of torch's threads, or on one where that is quicker, as engines choose."""
    with at_most(1):
        alone = seconds(work, 3)
    return min(alone, seconds(work, 3)) if torch.get_num_threads() > 1 else alone


def _timed(work: Callable[[], object]) -> float:
    """The seconds of ``work``, which is done again where it takes little."""
    found = seconds(work, 1)
    return found if found > SLOW else seconds(work, 5)


class Estimates:
    """Estimates of runs; what was found for one serves the others. ``measure`` gives a plan's :class:`Costs`."""

    def __init__(self, measure: Callable[[Plan, Split, int], Costs] = measured) -> None:
        self._measure = measure
        self._source = lru_cache(maxsize=1)(_source)
        self._sizes: dict[str, _Sizes] = {}
        self._costs: dict[str, Costs] = {}

    def of(self, specs: Iterable[RunSpec]) -> float:
        """Seconds that runs of ``specs``, one after another, will take. Raises as making their experiments does."""
        return sum(self._one(spec) for spec in sorted(specs, key=lambda spec: repr(_reading(spec))))

    def _one(self, spec: RunSpec) -> float:
        (method,) = methods_of(spec)
        sizes = self._sizes_of(spec)
        settings = settings_of(spec, tuple(sizes.train))
        members = {name: size for name, size in sizes.train.items() if name not in settings.newcomers}
        if method.pooled:
            members = {"pooled": sum(members.values())}
        work = _work(method, settings.work, len(sizes.train) - len(settings.newcomers))
        mean = ceil(sum(members.values()) / len(members))
        batch = min(work.batch_size or mean, mean)
        steps = sum(_steps(work, size) for size in members.values()) / len(members)
        taking_part = len(settings.participants(spec.first_seed, 1, tuple(members)))
        plain = not method.rules and method.aggregate is average and method.scope == Scope()
        costs, timed = self._costs_of(spec, method, settings, sizes, batch)
        if plain and costs.apart and steps == 1:  # the engine identity does all clients' steps as one
            batch *= taking_part
            costs, timed = self._costs_of(spec, method, settings, sizes, batch)
            training = costs.step * batch / timed
        else:
            training = taking_part * steps * costs.step * batch / timed
        whole = settings.rounds * (training + taking_part * costs.visit + costs.save)
        looks = sum(map(settings.evaluates, range(1, settings.rounds + 1)))
        personal = method.scope.load != Scope().load or any(rule.personalizes for rule in method.rules)
        looked_at = personal * sum(sizes.tests) + (method.scope.send == Scope().send) * sizes.distinct
        return spec.seeds * (whole + looks * looked_at * costs.sample)

    def _sizes_of(self, spec: RunSpec) -> _Sizes:
        key = repr({name: getattr(spec, name) for name in ("data", *(field.name for field in fields(DataSpec)))})
        if key not in self._sizes:
            self._sizes[key] = _seen(split_of(self._source(_reading(spec)), spec))
        return self._sizes[key]

    def _costs_of(
        self, spec: RunSpec, method: Method, settings: Settings, sizes: _Sizes, batch: int
    ) -> tuple[Costs, int]:
        """What the parts cost, and the batch that was timed. Methods that change the network alike share it."""
        shape = sizes.few.shape
        batch = min(batch, MOST, max(2, NUMBERS // prod(shape)))
        form = spec.model, shape, sizes.classes, str(method.surgery), batch, str(sizes.few.store.dtype)
        facts = *form, spec.loss, spec.augment, spec.optimizer, spec.precision, torch.get_num_threads()
        key = repr(facts)

        def measure() -> dict[str, float]:
            plan = plan_of(
                Method(name="plain", surgery=method.surgery), model_of(spec.model, shape), settings, spec.first_seed,
                sample=sizes.few.inputs(slice(0, 1)), classes=sizes.classes, labels=sizes.labels, clients=1,
            )  # fmt: skip
            return asdict(self._measure(plan, sizes.few, batch))

        if key not in self._costs:
            self._costs[key] = Costs(**remembered("steps.json", (torch.__version__, facts), measure))
        return self._costs[key], batch


def _reading(spec: RunSpec) -> tuple[tuple[str, Any], ...]:
    """The settings that say what is read."""
    names = sorted({"data", *(field.name for field in fields(DataSpec))} - DEALING)
    return tuple((name, getattr(spec, name)) for name in names)


def _source(reading: tuple[tuple[str, Any], ...]) -> Federation:
    spec = RunSpec(**dict(reading))
    return source_of(spec.data, spec).fitted(spec.image_size)


def _seen(data: Federation) -> _Sizes:
    """What is kept of ``data``, so that its samples need not be."""
    first = data.clients[0].train
    index = torch.arange(min(len(first), MOST))
    few = Split(x=first.at(index), y=first.y[index], normalization=first.normalization)
    tests = [part for client in data.clients for name, part in client.splits.items() if name != "train"]
    return _Sizes(
        train={client.name: len(client.train) for client in data.clients},
        tests=tuple(map(len, tests)),
        distinct=sum(len(part) for part in {id(part): part for part in tests}.values()),
        few=few,
        classes=data.classes,
        labels=label_counts(data),
    )


def _work(method: Method, work: Work, clients: int) -> Work:
    """The local work of ``method``, of which it may change fields."""
    work = replace(work, **method.work)
    scaled = method.pooled == "scaled" and work.batch_size is not None
    return replace(work, batch_size=(work.batch_size or 0) * clients) if scaled else work


def _steps(work: Work, samples: int) -> float:
    """Local steps of a round, on average over a pass, of a client with so many ``samples``."""
    per_pass = len(work.bounds(samples))
    if work.epochs is not None:
        return work.epochs * per_pass
    return per_pass / ceil(per_pass / (work.batches or 1))
