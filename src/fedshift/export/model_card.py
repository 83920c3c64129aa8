"""The model card: a model's description, training, results and intended use, as facts and Markdown.

Based on Mitchell et al. 2019, "Model Cards for Model Reporting" (arXiv:1810.03993). The interval of an accuracy is
Wilson's interval for a proportion of test samples: it gives the uncertainty for samples like these, not for other
clients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..analysis.statistics import wilson_interval
from ..data.preparation import Preparation
from ..report.formatting import difference_unit, format_bytes
from ..results.schema import Row, compute_metric, is_share, name_metric, rows_to_frame
from ..utils.words import join_some

LEVEL = 0.95
LISTED = 50
"""Maximum number of clients and of classes that the card lists one by one."""
DOES: Mapping[str, tuple[str, str, str]] = {
    "classification": (
        "distinguishes {}",
        "scores [N, classes] before softmax, in the order of the classes; the largest is the answer", "the class",
    ),
    "segmentation": (
        "assigns one of {} to each pixel",
        "scores [N, classes, H, W] before softmax, in the order of the classes; the largest is the answer",
        "the classes of the pixels",
    ),
    "multilabel": (
        "predicts which of {} a sample has",
        "scores [N, labels] before the logistic function, in the order of the labels; one above 0, a probability above "
        "one half, means yes", "the names of the labels",
    ),
    "regression": (
        "predicts {}", "numbers [N, targets] in the unit of the data, in the order of the targets", "the numbers",
    ),
    "survival": (
        "ranks patients by {}",
        "log-risks [N, 1]; of two patients of one client, the event is expected first for the one with the higher risk",
        "the log-risks",
    ),
}  # fmt: skip
"""Descriptions of the purpose, outputs and predictions of models by task."""
USER_TASK = ("returns {}", "the network's outputs for each sample, [N, ...]", "the same")
"""The same for a user task that derives from none of these."""


@dataclass(frozen=True, kw_only=True)
class SeedSpread:
    """The task's main metric for one client or for the mean over clients, over a run's seeds.

    With three seeds or more, it includes Student's interval.
    """

    client: str
    seeds: int
    mean: float
    std: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts about a model.

    Args:
        task: Name of the task.
        kind: The fedshift task that it is or derives from; otherwise its name.
        outputs: Number of classes, labels or targets, in words.
        metrics: The task's metrics, main metric first.
        method: The method's name, which is its expression.
        meaning: The method's parts, in words.
        sources: Summary lines of the method's parts, with their papers.
        client: The model's client; None: the server.
        seed: Seed of the trial.
        round: The round after which the model was saved.
        choice: How this round was chosen, in words.
        origin: How the client got the model, in words; "" if it trained in the run.
        network: The network in words.
        data: The data in words.
        licenses: The licenses of the data, in words.
        clients: Split sizes of each client that took part, if known.
        measured: Rows of this model's measurements in this round, see ``results.schema``.
        spread: The main metric over the run's seeds.
        settings: Resolved training settings by name.
        versions: Package versions of the run and of the export.
        notices: The run's notices.

    """

    task: str
    kind: str
    outputs: str
    metrics: tuple[str, ...]
    method: str
    meaning: str
    sources: tuple[str, ...]
    client: str | None
    seed: int
    round: int
    choice: str
    origin: str = ""
    network: str
    data: str
    licenses: str
    clients: Mapping[str, Mapping[str, int]]
    measured: tuple[Row, ...]
    spread: tuple[SeedSpread, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()

    @property
    def answer(self) -> str:
        """Name of the program's output: ``scores``, ``numbers``, or ``outputs`` for a user task."""
        return "outputs" if self.kind not in DOES else "numbers" if self.kind == "regression" else "scores"

    @property
    def title(self) -> str:
        """Method and owner in a few words."""
        return f"{self.method}, {f'client {self.client}' if self.client else 'global model'}"

    def to_json(self) -> dict[str, Any]:
        """Return all facts as JSON values."""
        return asdict(self)


def describe_output(facts: ModelFacts) -> str:
    """Return a description of the program's output."""
    return DOES.get(facts.kind, USER_TASK)[1]


def render_card(
    facts: ModelFacts, preparation: Preparation, classes: Sequence[str], files: Mapping[str, int], checks: Sequence[str]
) -> str:
    """Return the model card in Markdown.

    Args:
        facts: Facts about the model.
        preparation: How samples become its inputs.
        classes: Names of the classes, labels or targets, in the order of the outputs.
        files: Size in bytes of each file in the directory.
        checks: Results of testing the files, in sentences.

    """
    parts = (
        [f"# {facts.title}", _introduce(facts, classes)],
        ["## Use", *_describe_use(facts, preparation, files)],
        ["## Results", *_describe_results(facts), *(f"- {check}" for check in checks)],
        ["## How it was made", *_describe_making(facts)],
        ["## Intended use and limits", *(f"- {limit}" for limit in _list_limits(facts))],
        ["## Licenses", facts.licenses],
        ["## Files", *(f"- `{name}`, {format_bytes(size)}" for name, size in files.items())],
    )
    return "\n".join("\n".join(_space(lines)) for lines in parts)


def _space(lines: Sequence[str]) -> Iterator[str]:
    """Yield ``lines`` with an empty line after each, except between table rows and between list items."""
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        yield line
        if not (line[:1] in "|-" and line[:1] == following[:1] and line):
            yield ""


def _introduce(facts: ModelFacts, classes: Sequence[str]) -> str:
    named = join_some(classes, shown=LISTED)
    whose = f"the model that client `{facts.client}` uses" if facts.client else "the model that the server holds"
    origin = f" {facts.origin}" if facts.origin else ""
    does = DOES.get(facts.kind, USER_TASK)[0].format(facts.outputs)
    return (
        f"{facts.network}. Its task is {facts.task}: it {does} ({named}). It is {whose} after round {facts.round} "
        f"({facts.choice}), seed {facts.seed}.{origin}"
    )


def _describe_use(facts: ModelFacts, preparation: Preparation, files: Mapping[str, int]) -> Iterator[str]:
    file = '"image.png"' if preparation.is_image and preparation.decoding.kind != "volume" else '"image.nii.gz"'
    file = '"record.hea"' if preparation.decoding.kind == "signal" else file
    argument = file if preparation.takes_files else "row" if preparation.columns else "x"
    taken = ", ".join(preparation.names)
    if preparation.inputs:
        argument = "{" + ", ".join(f'"{each.name}": {each.name}' for each in preparation.inputs) + "}"
    scaled = " Scaling is part of the program; `model.json` describes it." if not preparation.inputs else ""
    yield f"Input: {preparation}.{scaled}"
    yield f"Output: {describe_output(facts)}."
    if "program.pt2" in files:
        yield (
            f'```python\nimport fedshift\n\nmodel = fedshift.load("path/of/this/directory")\n'
            f"model.predict({argument})  # {DOES.get(facts.kind, USER_TASK)[2]}\n"
            f"model({argument})  # the {facts.answer}\n```"
        )
        yield "Without fedshift, only with torch:"
        yield (
            '```python\nimport torch\n\nprogram = torch.export.load("program.pt2").module()\n'
            f"{facts.answer} = program({taken})\n```"
        )
    if "model.onnx" in files:
        yield f"`model.onnx` takes the same `{taken}` and returns `{facts.answer}`, in any ONNX runtime."
    if preparation.patched:
        size = " x ".join(map(str, preparation.shape[1:]))
        yield (
            f"Cover larger images with windows of {size} that overlap by half, and take the mean of their scores, "
            "weighted by a Gaussian with a deviation of 1/8 of the window, as `fedshift.load` does."
        )
    elif preparation.is_image:
        height, width = preparation.shape[1:]
        yield (
            f"Resize images of another size to {height} x {width} pixels first (bilinear, with antialiasing), as "
            "`fedshift.load` does."
        )


def _describe_results(facts: ModelFacts) -> Iterator[str]:
    if not facts.measured:
        yield "The run has not measured this model."
        return
    rows = [row for row in facts.measured if row["split"] != "train"]
    if facts.kind != "classification":
        yield from _describe_metrics(facts, rows)
        return
    yield (
        f"Measured after round {facts.round}, on samples that training did not see, with {100 * LEVEL:.0f} % intervals "
        "(Wilson's). `most frequent class`: the accuracy of always predicting that class."
    )
    yield "| client | split | samples | accuracy | balanced accuracy | AUC | most frequent class |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows[: 2 * LISTED]:
        yield "| " + " | ".join(_cells(row)) + " |"
    tested = [row for row in rows if row["split"] == "test"]
    if len(tested) > 1:
        shares = [sum(row["hits"]) / row["samples"] for row in tested]
        yield f"| mean of {len(tested)} clients | test | | {100 * sum(shares) / len(shares):.2f} % | | | |"
    yield from _describe_spread(facts)


def _describe_metrics(facts: ModelFacts, rows: list[Row]) -> Iterator[str]:
    """Yield the results of a model for another task, using its metrics."""
    metrics = [metric for metric in facts.metrics if metric != "loss"]
    masks = facts.kind == "segmentation"
    explained = {
        "segmentation": ", over all their pixels together; Dice and IoU are means over the classes except the "
        "background, class 0",
        "multilabel": "; F1 and AUC are means over the labels",
        "regression": "; errors are means over the targets, in the unit of the data",
        "survival": "; the concordance index counts pairs of one client's patients",
    }.get(facts.kind, "")
    yield (
        f"Measured after round {facts.round}, on {'images' if masks else 'samples'} that training did not "
        f"see{explained}."
    )
    yield f"| client | split | {'images' if masks else 'samples'} | {' | '.join(map(name_metric, metrics))} |"
    yield f"|---|---|---|{'---|' * len(metrics)}"
    frame = rows_to_frame(rows)
    values = {metric: compute_metric(frame, metric) for metric in metrics}
    for number, row in enumerate(rows[: 2 * LISTED]):
        cells = [_format_value(values[metric].iloc[number], metric) for metric in metrics]
        client = str(row["client"]).replace("|", "\\|")
        yield "| " + " | ".join((client, row["split"], f"{row['samples']:,}", *cells)) + " |"
    yield from _describe_spread(facts)


def _format_value(value: float, metric: str) -> str:
    """Return a value as printed in tables: proportions in percent, "" if undefined."""
    return "" if value != value else f"{difference_unit(metric).format(value)}{' %' if is_share(metric) else ''}"


def _describe_spread(facts: ModelFacts) -> Iterator[str]:
    metric = facts.metrics[0]
    unit = difference_unit(metric)
    for spread in facts.spread:
        low, high, std = (unit.format(value) for value in (spread.low, spread.high, spread.std))
        share = is_share(metric)
        interval = f", interval of the mean {low} to {high}{' %' * share}" if spread.low == spread.low else ""
        what = "" if metric == "accuracy" else f"{name_metric(metric)} "
        yield (
            f"Over the run's {spread.seeds} seeds, {spread.client}: {what}{_format_value(spread.mean, metric)} on "
            f"average, standard deviation {std}{' points' * share}{interval}."
        )


def _cells(row: Row) -> Iterator[str]:
    hits, samples = sum(row["hits"]), row["samples"]
    low, high = wilson_interval(hits, samples, LEVEL)
    recalls = [hit / count for hit, count in zip(row["hits"], row["support"], strict=True) if count]
    yield from (str(row["client"]).replace("|", "\\|"), row["split"], f"{samples:,}")
    yield f"{100 * hits / samples:.2f} % ({100 * low:.1f} to {100 * high:.1f} %)"
    yield f"{100 * sum(recalls) / len(recalls):.2f} %"
    yield "" if row["auc"] is None else f"{row['auc']:.4f}"
    yield f"{100 * max(row['support']) / samples:.2f} %"


def _describe_making(facts: ModelFacts) -> Iterator[str]:
    yield f"Method: {facts.meaning}."
    yield from (f"- {source}" for source in facts.sources)
    yield f"Data: {facts.data}."
    if facts.clients:
        splits = list(dict.fromkeys(split for sizes in facts.clients.values() for split in sizes))
        yield f"| client | {' | '.join(splits)} |"
        yield f"|---|{'---|' * len(splits)}"
        for name, sizes in list(facts.clients.items())[:LISTED]:
            counts = " | ".join(f"{sizes[split]:,}" if split in sizes else "" for split in splits)
            yield f"| {name.replace('|', '-')} | {counts} |"
        if len(facts.clients) > LISTED:
            yield f"and {len(facts.clients) - LISTED} more clients."
    yield from (f"- {name}: {value}" for name, value in facts.settings.items())
    yield from (f"- notice of the run: {notice}" for notice in facts.notices)
    yield f"Versions: {', '.join(f'{name} {value}' for name, value in facts.versions.items())}."


def _list_limits(facts: ModelFacts) -> Iterator[str]:
    if facts.client:
        yield (
            f"It is intended for samples from client `{facts.client}`. The data of clients differ in appearance, so "
            "its results on another client's samples are unknown and may be far worse."
        )
    else:
        yield (
            "It is one model for all clients of the run. Its results on clients whose data differ in appearance are "
            "unknown: `fedshift adapt` measures it on a new client's data."
        )
    if facts.kind in ("classification", "segmentation"):
        yield "It assigns one of its classes to every input, even to inputs that belong to none."
    else:
        yield "It returns a prediction for every input, even for inputs unlike all training samples."
    yield (
        "Figures hold for test samples from the same source as the training samples, with the same class frequencies."
        if facts.kind != "regression"
        else "Figures hold for test samples from the same source as the training samples."
    )
    yield "It has been measured, not validated for any purpose: its users decide whether these figures suffice."
    yield "Weights can reveal information about training samples; only the method `dp` bounds it."
