"""Settings that all methods of a comparison share, and the plan made from a method, a model and these settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..analysis.clinical import parse_operating_point
from ..config.catalog import list_several
from ..config.expressions import split_expressions
from ..config.given_settings import check_settings
from ..config.spec import AUTO, Spec, TrialSpec
from ..core.checks import check_task
from ..core.loss import LOSS_TASKS, LOSSES, Loss
from ..core.method import Method
from ..core.optimizer import SGD, Optimizer
from ..core.plan import Plan
from ..core.preparation import prepare
from ..core.work import Work
from ..data.augmentation import Augmentation
from ..data.federation import Federation
from ..engines import find_engine
from ..evaluation.policy import POLICIES, SKIP
from ..models import ModelFactory, make_network
from ..nn.adapters import Lora
from ..results.schema import METRIC_COUNTS, MOMENTS, is_share
from ..tasks import CLASSIFICATION, METRICS, TASKS, Classification, Metric, Segmentation, Task, find_kind
from ..tasks.segmentation import SURFACE_METRICS
from ..utils.errors import Ref, UsageError, unknown_name
from ..utils.random_streams import stream, torch_stream
from ..utils.user_code import describe_error
from .initial_weights import InitialWeights

F = TypeVar("F", bound=Federation)
TRIED = 2**20
"""Largest number of random outputs for which users' metrics are tried out."""


@dataclass(frozen=True, kw_only=True)
class Settings(TrialSpec):
    """Settings that all methods of a comparison share: fields of :class:`TrialSpec`, and objects made from others.

    ``participation`` is a number of clients (int), a fraction of them (float in (0, 1]), ``ordered`` or ``shuffled``.
    Raises :class:`UsageError` for an out-of-range value.
    """

    work: Work = field(default_factory=lambda: Work(epochs=1))
    """Local work of a client in a round."""

    optimizer: Optimizer = field(default_factory=lambda: SGD(lr=Spec.lr))
    """Local optimizer."""

    loss: Loss | None = None
    """Training loss; None: the task's."""

    weights: InitialWeights | None = None
    """Initial weights of networks; None: random ones."""

    adapter: Lora | None = None
    """Adapters of the network; None: the network is trained."""

    augment: Augmentation | None = None
    """Augmentation of training images."""

    newcomers: tuple[str, ...] = ()
    """Clients that never take part in training."""

    moments: tuple[str, ...] = ("loaded",)
    """Moments of a round when models are measured: always ``loaded``, optionally ``trained``."""

    splits: tuple[str, ...] = ("test", "validation")
    """Splits to measure, of those that clients have."""

    def __post_init__(self) -> None:
        if self.loss is not None:
            object.__setattr__(self, "loss", LOSSES.parse(self.loss))
        share = self.participation
        if isinstance(share, float) and share > 1:
            raise UsageError("{}: give a whole number of clients, or a fraction up to 1.0", Ref(participation=share))
        check_settings(self, TrialSpec)
        if self.unseen != SKIP:
            try:
                object.__setattr__(self, "unseen", POLICIES.parse(self.unseen).text)
            except UsageError as error:
                raise UsageError("{}, or skip ({})", error, Ref("unseen")) from error
        if self.min_delta and self.patience is None:
            raise UsageError(
                "{} is the improvement that patience counts: give both, or neither", Ref(min_delta=self.min_delta)
            )
        try:
            parse_operating_point(self.operating_point)
        except UsageError as error:
            raise error.about("operating_point") from None
        for moment in self.moments:
            if moment not in MOMENTS:
                raise unknown_name("moment", moment, MOMENTS).about("moments")
        if "loaded" not in self.moments:
            raise UsageError(
                "{}: tables report models just after aggregation: give loaded as well",
                Ref(moments=",".join(self.moments)),
            )
        if self.engine != "auto":
            find_engine(self.engine)
        try:
            torch.zeros(1, device=self.device).item()
        except (RuntimeError, AssertionError) as error:
            reason = str(error).partition("\n")[0].partition(". ")[0]  # drop torch's list of kernels
            raise UsageError(f"device {self.device!r} cannot be used here ({reason}): try cpu").about(
                "device"
            ) from error

    def for_task(self, task: Task) -> Settings:
        """Return the settings with the loss and the metric of ``task`` where none is set, and metrics by name.

        Raises :class:`UsageError` for a loss or a metric that is not for the task.
        """
        if not task.metrics:
            raise UsageError(f"task {task} has no metric: name some in Task.metrics, of {', '.join(METRIC_COUNTS)}")
        for name in task.metrics:
            if name not in METRIC_COUNTS:
                raise unknown_name(f"metric of task {task}", name, METRIC_COUNTS)
        metric = task.metrics[0] if self.metric == AUTO else self.metric
        requested = _find_requested(metric, task, "metric")
        metric = requested.name if requested else metric
        if self.target_metric is not None and self.target_metric > 1 and is_share(metric):
            raise UsageError(
                f"{{}}: {metric} is a share: give at most 1, 0.9 for 90 %", Ref(target_metric=self.target_metric)
            )
        loss = LOSSES.parse(task.loss) if self.loss is None else self.loss
        kinds = {getattr(kind, "name", "") for kind in type(task).__mro__}  # a user's task may subclass another
        if loss.tasks and not kinds.intersection(loss.tasks):
            fitting = [known.__name__ for known, tasks in LOSS_TASKS.items() if kinds.intersection(tasks)]
            raise UsageError(f"loss {loss} is not for {task}, the data's task: use {' or '.join(fitting)}")
        return replace(self, metric=metric, loss=loss)

    def request_metrics(self, data: F) -> F:
        """Return ``data`` whose task counts the metrics on request; raise UsageError for one that is not for it."""
        task = data.task
        given = [] if self.metric == AUTO else [("metric", self.metric)]
        for several in list_several(self.metrics or ()):
            parts = split_expressions("metric", several) if isinstance(several, str) else [several]
            given += [("metrics", part) for part in parts if part != ""]
        for setting, one in given:
            metric = _find_requested(one, task, setting)
            if metric is None:
                continue
            if (other := next((each for each in task.requested if each.name == metric.name), None)) is None:
                metric.check(data.classes)
                task = replace(task, requested=(*task.requested, metric))
            elif not isinstance(one, str) and getattr(other, "function", None) is not getattr(metric, "function", None):
                raise UsageError(f"two metrics are called {metric.name}: give the functions other names").about(setting)
        return data if task is data.task else replace(data, task=task)

    def draw_participants(self, seed: int, round: int, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the clients that take part in ``round`` (from 1), in the order of ``names``."""
        share = self.participation
        if share is None:
            return names
        if isinstance(share, str):
            cycle, turn = divmod(round - 1, len(names))
            if share == "shuffled":
                turn = int(stream(seed, "turns", cycle).permutation(len(names))[turn])
            return (names[turn],)
        count = min(max(1, int(share * len(names) + 0.5)) if isinstance(share, float) else share, len(names))
        chosen = stream(seed, "participants", round).choice(len(names), size=count, replace=False)
        return tuple(names[i] for i in sorted(chosen))

    @property
    def watches_validation(self) -> bool:
        """Whether the metric on validation data selects a round, or ends trials."""
        return self.select == "best" or self.patience is not None

    def skips_clients(self, names: tuple[str, ...]) -> bool:
        """Return whether some client of ``names`` does not take part in every round."""
        return bool(self.newcomers) or len(self.draw_participants(0, 1, names)) < len(names)

    def is_evaluated(self, round: int) -> bool:
        """Return whether ``round`` (from 1) ends with an evaluation."""
        every = self.evaluate_every or max(1, self.rounds // 10)
        return round % every == 0 or round == self.rounds


def _find_requested(given: object, task: Task, setting: str) -> Metric | None:
    """Return the metric ``given``, a text or an object; None if it is one that ``task`` counts.

    Raises :class:`UsageError` if it is none, or not for ``task``.
    """
    if isinstance(given, str) and given in task.measured:
        return None
    kind = find_kind(task)
    fitting = [name for name, made in METRICS.entries.items() if kind in getattr(made, "tasks", ())]
    if isinstance(given, str) and given.isidentifier() and given not in METRICS.names():
        unknown = unknown_name("metric", given, (*task.measured, *fitting)).about(setting)
        if isinstance(task, Segmentation) and given in SURFACE_METRICS:
            counted = Ref(task="segmentation(surface=True)")
            raise UsageError(f"{{}} (the data's task is {task}; it is counted with {{}})", unknown, counted)
        raise UsageError(f"{{}} (the data's task is {task})", unknown)
    try:
        metric = METRICS.parse(given)
    except UsageError as error:
        raise error.about(setting) from None
    if metric.tasks and kind not in metric.tasks:
        known = ", ".join((*task.measured, *fitting))
        raise UsageError(
            f"metric {metric.name} is for {' and '.join(metric.tasks)}, and the data's task is {task}: use {known}"
        ).about(setting)
    return metric


def check_counts(data: Federation) -> None:
    """Raise :class:`UsageError` unless the task of ``data`` and metrics on request count what a user wrote.

    A user's metrics are computed for random outputs and each client's test targets, a user's task for one sample.
    """
    task, train = data.task, next((client.train for client in data.clients if len(client.train)), None)
    for metric in task.requested:
        if train is not None and train.patches is not None:
            raise UsageError(
                f"metric {metric.name} is computed for samples of one size, and cases of which patches are cut have "
                f"several: use {', '.join(type(task).metrics)}"
            ).about("metrics")
        for split in {id(client.test): client.test for client in data.clients if len(client.test)}.values():
            shape = task.output_shape(split.shape, data.classes)
            y = split.targets(slice(0, max(1, TRIED // prod(shape)))).cpu()
            drawn = torch.randn(len(y), *shape, generator=torch.Generator().manual_seed(0))
            metric.try_out(task, drawn, y)
    if type(task) in TASKS.entries.values() or train is None:
        return
    try:
        outputs = torch.zeros(1, *task.output_shape(train.shape, data.classes))
        counts = task.count(outputs, train.targets(slice(0, 1)).cpu(), data.classes)
        lacking = {name: [each for each in METRIC_COUNTS[name] if counts.get(each) is None] for name in task.metrics}
    except Exception as error:
        raise UsageError(f"task {task} cannot count one sample: {describe_error(error)}") from error
    for name, missing in lacking.items():
        if missing and not (name == "auc" and "auc" in counts):  # one sample has none
            raise UsageError(
                f"metric {name!r} of task {task} takes {', '.join(missing)}, which its counts ({', '.join(counts)}) "
                "lack: count these in Task.count, or leave the metric out of Task.metrics"
            )


def start_network(
    model: ModelFactory, settings: Settings, seed: int, shape: tuple[int, ...], classes: int
) -> tuple[nn.Module, list[str]]:
    """Return the network before surgery with its initial weights, and how the settings' weights differ from it."""
    with torch_stream(seed, "init"):
        network = make_network(model, shape, classes, settings.precision)
    given = settings.weights
    differences = given.find_differences(network) if given else []
    if given and not differences:
        given.load_into(network)
    return network, differences


def make_plan(
    method: Method,
    model: ModelFactory,
    settings: Settings,
    seed: int,
    *,
    sample: Tensor,
    classes: int,
    labels: Tensor,
    clients: int,
    task: Task = CLASSIFICATION,
) -> Plan:
    """Make the plan of ``method`` with ``seed``, the same on every machine.

    Args:
        method: method of the trial.
        model: function that makes the network.
        settings: settings of the comparison.
        seed: seed of the initial weights and of random draws in surgery.
        sample: inputs ``[1, ...]`` of one sample, on the training device; its shape, type and range count.
        classes: number of classes, of labels or of targets.
        labels: total number of training samples of each class, int64 ``[classes]``.
        clients: number of clients that train.
        task: the federation's task.

    Raises:
        UsageError: method, model, settings and samples do not fit.

    """
    check_task(method, task)
    method = method if settings.adapter is None else method.with_surgery(settings.adapter)

    def make() -> nn.Module:
        return start_network(model, settings, seed, tuple(sample.shape[1:]), classes)[0].to(sample.device)

    network, differences = start_network(model, settings, seed, tuple(sample.shape[1:]), classes)
    network, given = network.to(sample.device), settings.weights
    loss = LOSSES.parse(settings.loss or task.loss).resolve(labels).to(sample.device)
    if not loss.tasks and isinstance(task, Classification):
        loss.try_out(len(labels), sample.device)
    with torch_stream(seed, "surgery"):
        plan = prepare(
            method,
            network,
            work=settings.work,
            optimizer=settings.optimizer,
            loss=loss.to(sample.device, torch.float64) if settings.precision == "float64" else loss,
            precision=settings.precision,
            sample=sample,
            task=task,
            classes=classes,
            rounds=settings.rounds,
            clients=clients,
            seed=seed,
            again=make,
        )
    if given and differences:
        plan = given.load_into_plan(plan, differences)
    elif given:
        given.check_kept(plan)
    return plan


def check_sizes(plan: Plan, sizes: Mapping[str, int]) -> None:
    """Raise :class:`UsageError` if a client needs two training samples and has one; ``sizes``: samples by name."""
    for name, size in sizes.items():
        if size < plan.smallest_batch:
            raise UsageError(
                f"client {name!r} has one training sample, over which batch normalization has no variance: leave the "
                "client out, or use a model without BatchNorm"
            )
