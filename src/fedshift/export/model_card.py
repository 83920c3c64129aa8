"""The model card: a model's description, training, results and intended use, as facts and Markdown.

Based on Mitchell et al. 2019, "Model Cards for Model Reporting" (arXiv:1810.03993).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..data.preparation import Preparation
from ..report.formatting import difference_unit, format_bytes, make_table, to_markdown
from ..results.schema import Row, compute_metric, is_share, name_metric, rows_to_frame
from ..utils.words import join_some
from .intervals import LEVEL
from .steps import LISTED, OUTPUTS, list_steps, make_environment

DOES: Mapping[str, tuple[str, str]] = {
    "classification": ("distinguishes {}", "the class"),
    "segmentation": ("assigns one of {} to each pixel", "the classes of the pixels, on the grid of the file"),
    "multilabel": ("predicts which of {} a sample has", "the names of the labels"),
    "regression": ("predicts {}", "the numbers"),
    "survival": ("ranks patients by {}", "the log-risks"),
}
"""Purpose and predictions of models by task."""
USER_TASK = ("returns {}", "the same")
"""The same for a user task that derives from none of these."""
EXPLAINED = {
    "segmentation": "; Dice and IoU are means over images and over the classes except the background, class 0; shares "
    "of pixels, and pooled Dice and IoU, are over the pixels of all images together",
    "multilabel": "; F1 and AUC are means over the labels",
    "regression": "; errors are means over the targets, in the unit of the data",
    "survival": "; the concordance index counts pairs of one client's patients",
}


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts about a model.

    ``task``: its name; ``kind``: fedshift's task that it is or derives from, otherwise its name; ``outputs``: number of
    classes, labels or targets, in words; ``metrics``: the task's, main metric first; ``method``: its name, which is its
    expression; ``meaning``: the method's parts, in words, and ``sources``: their summary lines with their papers;
    ``client``: the model's client, None for the server; ``seed`` of the trial; ``round`` after which the model was
    saved, and ``choice``: how it was chosen; ``origin``: how the client got the model, "" if it trained in the run;
    ``network``, ``data`` and ``licenses`` of the data, in words; ``clients``: split sizes of the clients, if
    known; ``measured``: rows of this model's measurements in this round (``results.schema``) with intervals
    (:func:`~fedshift.export.intervals.add_intervals`); ``spread``: a sentence on the main metric over the run's seeds;
    ``settings``: resolved training settings by name; ``versions`` of packages in the run and at export; ``notices`` of
    the run.
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
    spread: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()

    @property
    def answer(self) -> str:
        """Name of the program's output: ``scores``, ``numbers``, or ``outputs`` for a user task."""
        return "outputs" if self.kind not in OUTPUTS else "numbers" if self.kind == "regression" else "scores"

    @property
    def title(self) -> str:
        """Method and owner in a few words."""
        return f"{self.method}, {f'client {self.client}' if self.client else 'global model'}"


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
    does, answer = DOES.get(facts.kind, USER_TASK)
    return make_environment().get_template("model_card.md.j2").render(
        facts=facts, does=does.format(facts.outputs), answer=answer, classes=join_some(classes, shown=LISTED),
        steps=list_steps(preparation, facts.kind), argument=_write_argument(preparation),
        inputs=", ".join(preparation.names), noun=_name_samples(facts), explained=EXPLAINED.get(facts.kind, ""),
        level=LEVEL, tested=any(row.get("intervals") for row in facts.measured),
        known={key for row in facts.measured for key in row},
        results=_tabulate_results(facts), clients=_tabulate_clients(facts.clients), checks=checks,
        files={name: format_bytes(size) for name, size in files.items()},
    )  # fmt: skip


def _write_argument(preparation: Preparation) -> str:
    """Return an example of a sample in Python."""
    if preparation.inputs:
        return "{" + ", ".join(f'"{each.name}": {each.name}' for each in preparation.inputs) + "}"
    if preparation.columns or not preparation.takes_files:
        return "row" if preparation.columns else "x"
    return {"volume": '"image.nii.gz"', "signal": '"record.hea"'}.get(preparation.decoding.kind, '"image.png"')


def _name_samples(facts: ModelFacts) -> str:
    return "images" if facts.kind == "segmentation" else "samples"


def _tabulate_results(facts: ModelFacts) -> str:
    """Return a Markdown table of the metrics of each client and split with their intervals; "" without measurements."""
    rows = [row for row in facts.measured if row["split"] != "train"]
    if not rows:
        return ""
    metrics, frame = [metric for metric in facts.metrics if metric != "loss"], rows_to_frame(rows)
    columns = {metric: compute_metric(frame, metric).tolist() for metric in metrics}
    grouped, classes = any("patients" in row for row in rows), facts.kind == "classification"
    lines = []
    for number, row in enumerate(rows[: 2 * LISTED]):
        known = row.get("intervals", {})
        cells = [format_value(columns[metric][number], metric, known.get(metric)) for metric in metrics]
        sizes = [f"{row.get('patients', 0):,}"] * grouped + [f"{row['samples']:,}"]
        guess = [f"{100 * max(row['support']) / row['samples']:.2f} %"] if classes else []
        lines.append([row["client"], row["split"], *sizes, *cells, *guess])
    tested = [columns[metrics[0]][number] for number, row in enumerate(rows) if row["split"] == "test"]
    if len(tested) > 1:
        mean = format_value(sum(tested) / len(tested), metrics[0])
        line = [f"mean of {len(tested)} clients", "test", *[""] * grouped, "", mean]
        lines.append(line + [""] * (len(lines[0]) - len(line)))
    header = ("client", "split", *["patients"] * grouped, _name_samples(facts), *map(name_metric, metrics))
    return to_markdown(make_table((*header, *["most frequent class"] * classes), lines))


def format_value(value: float, metric: str, interval: Sequence[float] | None = None) -> str:
    """Return a value as printed in tables with its interval: shares in percent, "" if undefined."""
    unit, percent = difference_unit(metric), " %" * is_share(metric)
    if value != value:
        return ""
    ends = unit._replace(digits=1) if is_share(metric) else unit
    between = " to ".join(ends.format(end) for end in interval or ())
    return f"{unit.format(value)}{percent}" + f" ({between}{percent})" * bool(interval)


def _tabulate_clients(clients: Mapping[str, Mapping[str, int]]) -> str:
    """Return a Markdown table of the sizes of each client's splits; "" if they are not known."""
    splits = list(dict.fromkeys(split for sizes in clients.values() for split in sizes))
    lines = [
        (name, *(f"{sizes[split]:,}" if split in sizes else "" for split in splits))
        for name, sizes in list(clients.items())[:LISTED]
    ]
    left = f"and {len(clients) - LISTED} more clients." if len(clients) > LISTED else ""
    return to_markdown(make_table(("client", *splits), lines, note=left)) if clients else ""
