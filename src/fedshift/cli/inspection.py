"""Tables for the terminal: a method's scope over a model's entries, and what methods need and do."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import torch
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..config.expressions import list_catalog
from ..core.buffers import describe_buffers
from ..core.network import forward
from ..core.optimizer import SGD
from ..core.preparation import prepare
from ..core.probe import make_batch
from ..data.federation import Federation, count_labels
from ..data.samples import Samples
from ..diagnosis.overview import describe
from ..engines.stacked import Stacked
from ..evaluation.communication import find_capabilities, summarize_method
from ..experiments.description import describe_weighting
from ..experiments.factory import resolve_model
from ..methods import METHODS
from ..models import make_network
from ..nn.adapters import ADAPTERS, list_constants
from ..nn.several_inputs import Inputs
from ..results.disclosure import MODEL, group_disclosures
from ..results.schema import name_metric
from ..tasks import METRICS, TASKS, Segmentation
from ..tasks.segmentation import SURFACE_METRICS
from ..utils.errors import UsageError
from ..utils.words import join_some


def describe_source(data: Federation) -> Iterator[RenderableType]:
    """Yield the content of a federation: clients and their splits, samples of each class, and a table's columns."""
    yield describe(data)
    counts = count_labels(data).tolist()
    names = data.meanings or tuple(map(str, range(data.classes)))
    listed = ", ".join(f"{name} {count:,}" for name, count in zip(names, counts, strict=False))
    unit = "pixels" if isinstance(data.task, Segmentation) else "samples"
    yield Text(f"Training {unit} of each {data.task.output}: {listed}")
    if data.inputs:
        yield Text(f"Inputs: {', '.join(map(str, data.inputs))}")
    if data.columns:
        kinds = (
            f"{column.name} ({'number' if column.categories is None else ', '.join(column.categories)})"
            for column in data.columns
        )
        yield Text(f"Columns: {'; '.join(kinds)}")
    if data.note:
        yield Text(data.note)


def describe_method(
    model: str, method: str, shape: tuple[int, ...], classes: int, inputs: Inputs = (), adapter: str | None = None
) -> Iterator[Table | Text]:
    """Yield a table of every named entry of ``model`` with ``method``, and the bytes of one client in one round.

    ``inputs``: layout of samples with several inputs. ``adapter``: adapters, as text.
    """
    if classes < 1 or min(shape) < 1:
        raise UsageError(f"shape {shape} and classes {classes}: numbers of 1 or more")
    chosen, *others = METHODS.parse_all(method)
    if others:
        raise UsageError(f"inspect takes one method, not {method!r}: join them with + to compose, or inspect each")
    adapted = ADAPTERS.parse(adapter)
    chosen = chosen if adapted is None else chosen.with_surgery(adapted)
    factory = resolve_model(model, shape, inputs=inputs)
    model = getattr(factory, "__name__", model).replace("_", "-") if model == "auto" else model
    network = make_network(factory, shape, classes)
    sample = torch.zeros(1, *shape)
    plan = prepare(
        chosen, network, optimizer=SGD(lr=0.01), sample=sample, again=lambda: make_network(factory, shape, classes)
    )
    facts = summarize_method(plan)
    taken = ", ".join(map(str, inputs)) or str(shape)
    also = "" if adapted is None else f" with {adapted}"
    table = Table(title=Text(f"{chosen.name} on {model}{also}, {taken} -> {classes}"), box=None, title_justify="left")
    for title in ("entry", "layer", "shape", "bytes"):
        table.add_column(title, justify="right" if title == "bytes" else "left", overflow="fold")
    for title in ("loaded", "sent", "local", "trained"):
        table.add_column(title, justify="center")
    for row in facts.entries:
        shape_text = "x".join(map(str, row["shape"])) or "scalar"
        marks = (row["load"], row["send"], not row["load"], row["trained"])
        table.add_row(
            row["name"], row["type"], shape_text, f"{row['bytes']:,}", *("yes" if mark else "-" for mark in marks)
        )
    yield table
    constants = [tensor.numel() * tensor.element_size() for _, tensor in list_constants(plan.module)]
    if constants:
        size = f"{len(constants)} weights of {sum(constants):,} bytes"
        yield Text(f"Fixed at every client, and neither sent nor stored: {size}")
    if buffers := [entry.name for entry in plan.entries if entry.kind == "constant"]:
        yield Text(f"Constants, passed on as they are: {join_some(buffers)}")
    yield from (Text(f"Note: {text}") for text in describe_buffers(plan))
    x = make_batch(plan, sample)
    data = {"": Samples(x=x, y=torch.arange(len(x)) % classes)}
    if forward(plan, plan.initial, x).ndim == 2 and (refused := Stacked.refusal(plan, data)):
        yield Text(f"Note: the stacked engine {refused}; auto takes another one")
    local = [row for row in facts.entries if not row["load"]]
    layers = len({row["name"].rpartition(".")[0] for row in local})
    parameters = sum(plan.initial[name].numel() for name in plan.trained)
    if facts.leaves:
        yield Text("\n".join(("Leaves a client each round:", *map(str, group_disclosures(facts.leaves)))))
    beside = [each for each in facts.leaves if each.source != MODEL]
    if beside:
        yield Text("In addition to entries: " + ", ".join(f"{each.name} ({each.bytes:,} bytes)" for each in beside))
    yield Text(f"Kept by the server: {facts.kept}")
    yield Text(
        f"{parameters:,} trained parameters; {len(local)} of {len(facts.entries)} entries ({layers} layers) are local; "
        f"one client and round: {facts.down:,} bytes down, {facts.up:,} bytes up; "
        f"{'the server holds a whole model' if facts.has_global else 'no global model'}; "
        f"weight of a client: {describe_weighting(plan.method)}"
    )


def tabulate_metrics() -> Table:
    """Return a table of the metrics that --metric and --metrics take, with the tasks that they are for."""
    title = "metrics: --metric and --metrics take these; without them, a task's first one leads"
    table = Table(title=title, box=None, title_justify="left", title_style="bold", padding=(0, 2, 0, 0))
    for column in ("name", "tasks", "description"):
        table.add_column(column, no_wrap=column == "name")
    for task in TASKS.names():
        table.add_row("always counted", task, ", ".join(map(_explain_metric, TASKS.parse(task).metrics)))
    surfaces = ", ".join(map(_explain_metric, SURFACE_METRICS))
    table.add_row("with --task", "segmentation(surface=True)", surfaces)
    for metric in map(METRICS.parse, METRICS.names()):
        summary = (inspect.getdoc(metric) or "").partition("\n\n")[0].replace("\n", " ").replace("``", "")
        table.add_row(metric.name, ", ".join(metric.tasks) or "all", Text(summary))
    table.add_row("package.module:function", "all", "Your own function of outputs and targets.")
    return table


def _explain_metric(name: str) -> str:
    words = name_metric(name)
    return name if words.lower() == name.replace("_", " ") else f"{name} ({words})"


def tabulate_capabilities() -> Table:
    """Return a table of what each method needs and does, derived from the method (FedWon's table 7, extended)."""
    title = "what methods need and do, on a network with BatchNorm"
    table = Table(title=title, box=None, title_justify="left", title_style="bold", padding=(0, 2, 0, 0))
    for column in ("name", "client keeps", "cross-device", "BatchNorm", "client sends", "up", "global model"):
        table.add_column(column, no_wrap=column == "name", justify="right" if column == "up" else "left")
    for name, function in list_catalog("methods").items():
        facts = find_capabilities(function())
        suits = facts.sent != "the data" and not facts.state
        table.add_row(
            name, facts.state or "-", "yes" if suits else "no", facts.normalization, facts.sent,
            f"{facts.up:.2f} x", "yes" if facts.has_global else "no",
        )  # fmt: skip
    return table
