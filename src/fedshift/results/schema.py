"""Records of measurements as counts, one row for each ``(round, client, split, model, moment)``.

Rows are kept in a data frame and, on disk, in ``metrics.jsonl`` (one JSON object per line, with a checksum). Columns:

| column     | type        | meaning |
|------------|-------------|---------|
| `method`   | str         | method's label: the text typed for it, else its name |
| `seed`     | int         | seed of the run |
| `round`    | int         | communication round, from 1 |
| `client`   | str         | client's name |
| `split`    | str         | `train`, `validation` or `test` |
| `model`    | str         | `global` (held by the server) or `personal` (the one that the client would use) |
| `moment`   | str         | `loaded` (just after aggregation) or `trained` (after local work; training loss: in it) |
| `samples`  | int         | samples measured |
| `loss_sum` | float       | sum of the cross-entropy over them, in nats; training loss: of the loss trained on |
| `hits`     | list of int | correctly classified samples of each true class; null in rows of training loss |
| `support`  | list of int | samples of each true class; null likewise |
| `auc`      | float       | area under the ROC curve, mean over defined classes or labels; null if none |
| `predicted` | list of int | for masks, several labels and `f1`: pixels or samples for which each class was predicted |
| `invalid`  | int         | samples whose output is not a number (of masks: at any pixel); it is right of none |
| `exact`    | int         | for several labels: samples with all labels predicted correctly |
| `squared`, `absolute` | list of float | for numbers: the sum of squared and of absolute errors of each target |
| `reference` | list of float | for numbers: the mean of each target |
| `total`, `square` | list of float | for numbers: the sum over samples of target minus reference, and of its square |
| `case_dice`, `case_iou` | list of float | of masks: the sum of images' Dice and IoU by class |
| `cases`, `present` | list of int | images with the class in the true or predicted mask, and in the true mask |
| `distances`, `hausdorff` | list of float | of masks' surfaces: sums of images' mean and 95 % Hausdorff distances |
| `concordant`, `comparable` | float | for survival: pairs ranked correctly (half for equal risks), and all pairs |
| `gaps` | list of float | for `ece`: correct samples minus the sum of confidences, in each bin of confidence |
| `sums` | dict of float | of metrics on request that are means over samples: the sum over them, by metric |
| `values` | dict of float | of other metrics on request: the value, which does not add up; null where undefined |

For masks, ``hits`` and ``support`` count pixels; for several labels, samples that have each label. Dice and IoU of
masks are means over images with a class in either mask, as in nnU-Net (Isensee et al. 2021,
doi:10.1038/s41592-020-01008-z). ``pooled_dice`` and ``pooled_iou`` count the pixels of all images together.

The same counts tell which classes, labels or targets have no part in a metric (:func:`find_missing`): an absent class
has ``support`` 0, a label that all samples have a ``support`` of ``samples``, and a constant target no spread.

Everything in tables and figures (accuracy, balanced accuracy; macro, pooled, worst client) derives from these counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..utils.checked_json import parse_checked
from ..utils.errors import FedshiftError
from .cases import REESTIMATED as REESTIMATED
from .cases import RUNNING as RUNNING
from .cases import Cases, Picture
from .disclosure import Disclosure

COLUMNS = (
    "method", "seed", "round", "client", "split", "model", "moment", "samples", "loss_sum", "hits", "support", "auc",
    "predicted", "invalid", "exact", "squared", "absolute", "reference", "total", "square", "case_dice", "case_iou",
    "cases", "present", "distances", "hausdorff", "concordant", "comparable", "gaps", "sums", "values",
)  # fmt: skip
COUNTS = (
    "samples", "loss_sum", "hits", "support", "predicted", "invalid", "exact", "squared", "absolute", "total", "square",
    "case_dice", "case_iou", "cases", "present", "distances", "hausdorff", "concordant", "comparable", "gaps", "sums",
)  # fmt: skip
"""Columns whose sums over clients are the counts of all their samples together (:func:`add_rows`)."""
METRICS = {
    "accuracy": "accuracy", "balanced_accuracy": "balanced accuracy", "auc": "AUC", "dice": "Dice", "iou": "IoU",
    "pooled_dice": "pooled Dice", "pooled_iou": "pooled IoU", "f1": "F1", "exact_match": "exact match", "rmse": "RMSE",
    "mae": "MAE", "r2": "R2", "surface_distance": "surface distance", "hausdorff95": "95 % Hausdorff distance",
    "c_index": "concordance index", "average_precision": "average precision", "brier": "Brier score",
    "ece": "expected calibration error", "loss": "loss",
}  # fmt: skip
"""Metrics, and their names in a sentence; :func:`name_metric` also names others."""
UNITS = {
    "loss": "nats", "rmse": "units of the target", "mae": "units of the target", "r2": "R2",
    "surface_distance": "units of the pixel spacing", "hausdorff95": "units of the pixel spacing",
    "brier": "squared probability",
}  # fmt: skip
"""Units of the metrics that are not fractions, which are printed unscaled and not in percent."""
OWN_UNIT = "units"
"""Unit of users' metrics, which are printed unscaled too."""
SQUARED = "squared units of the targets' spread"
"""Unit of the loss of numbers, on test data."""
BY_CLASS = (
    "hits", "support", "predicted", "case_dice", "case_iou", "cases", "present", "distances", "hausdorff",
)  # fmt: skip
"""Counts of masks with an entry for each class."""
LOWER_IS_BETTER = frozenset({"loss", "rmse", "mae", "surface_distance", "hausdorff95", "brier", "ece"})
"""Metrics for which a lower value is better; :func:`is_lower_better` also knows users'."""
LOWER = "lower_is_better=True"
"""Mark of a user's metric, in its name, for which a lower value is better."""
DISTANCES = {"surface_distance": ("distances", "cases"), "hausdorff95": ("hausdorff", "cases")}
"""Distances of masks' surfaces: the sum over cases and the number of cases by class."""
BY_CASE = {"dice": ("case_dice", "cases"), "iou": ("case_iou", "cases"), **DISTANCES}
"""Metrics of masks that are means over cases, and likewise their columns."""
CONSTANT = 1e-12
"""Largest spread of a target, relative to its squares from the reference, that rounding causes if it is constant.

A target that varies exceeds it, since squares from a mean of some of its values are near its spread.
"""

TOP_K = "top_k("
"""Beginning of the names of top-k accuracies, ``top_k(k=5)``."""
RANKINGS = ("auc", "average_precision")
"""Metrics of scores, for which a class or label must be some samples' and not all."""

METRIC_COUNTS = {
    "loss": ("loss_sum",), "auc": ("auc",), "exact_match": ("exact",), "c_index": ("concordant", "comparable"),
    **dict.fromkeys(("accuracy", "balanced_accuracy"), ("hits", "support")),
    **dict.fromkeys(("pooled_dice", "pooled_iou", "f1"), ("hits", "support", "predicted")), **BY_CASE,
    **dict.fromkeys(("rmse", "mae", "r2"), ("squared", "absolute", "total", "square")), "ece": ("gaps",),
}  # fmt: skip
"""Counts that each metric takes, in addition to the number of samples; others are in ``sums`` and ``values``."""

MOMENTS = ("loaded", "trained")
"""Moments of a round when models are measured on test and validation data.

Rows of :attr:`RunSummary.lag`, with re-estimated BatchNorm statistics, have the moment ``reestimated``.
"""

MOVES = ("method", "seed", "client", "split", RUNNING, REESTIMATED)
"""Columns of :attr:`RunSummary.moves`."""
LEAST_MOVE = 0.01
"""Change of a client's metric that is too large for running statistics: absolute for shares, else relative."""

RESTART = "restore the file from a copy, or remove its folder to begin this trial again from round 1"
"""Advice about a damaged file of a trial."""

PICTURED = 24
"""Largest number of clients whose images a run keeps and a report shows."""

Row = dict[str, Any]


def is_plain(label: str, name: str) -> bool:
    """Return whether a method's ``label`` is ``name`` of fedshift's methods, in any spelling and at any learning rate.

    ``single+tuned(lr=0.3)`` is ``single``, and ``tuned(lr=0.3)`` alone is ``fedavg``.
    """
    parts = [part.strip().lower().removesuffix("()") for part in re.split(r"\+(?![^(]*\))", label)]
    return ([part for part in parts if not part.startswith("tuned(")] or ["fedavg"]) == [name]


def find_plain(labels: Iterable[str], name: str) -> str | None:
    """Return the one of ``labels`` that is the method ``name``, rather without a learning rate; None: none is."""
    found = [label for label in labels if is_plain(label, name)]
    return min(found, key=lambda label: "tuned(" in label.lower(), default=None)


def find_baseline(labels: Iterable[str]) -> str:
    """Return the method that others are compared with: FedAvg, else the first; empty if there is none."""
    labels = list(labels)
    return find_plain(labels, "fedavg") or next(iter(labels), "")


def name_metric(metric: str) -> str:
    """Return the name of ``metric`` in a sentence; of a user's metric, ``package.module:function``, the function's."""
    if top := re.fullmatch(r"top_k\(k=(\d+)\)", metric):
        return f"top-{top[1]} accuracy"
    return METRICS.get(metric) or metric.partition("(")[0].rpartition(":")[2].replace("_", " ")


def name_file(metric: str) -> str:
    """Return the name of ``metric`` as a part of file names."""
    return re.sub(r"[^\w.=]+", "-", metric).strip("-")


def is_lower_better(metric: str) -> bool:
    """Return whether a lower value of ``metric`` is better."""
    return metric in LOWER_IS_BETTER or LOWER in metric


def is_share(metric: str) -> bool:
    """Return whether values of ``metric`` are fractions, which are printed in percent."""
    return metric not in UNITS and ":" not in metric


def metric_unit(metric: str, *, numbers: bool = False) -> tuple[float, int | None, str]:
    """Return the factor for printing values of ``metric``, the decimals (None: as the values have it), and the unit.

    ``numbers``: whether targets are numbers, whose loss is a squared error.
    """
    if is_share(metric):
        return 100.0, 2, "percent"
    return 1.0, None, SQUARED if numbers and metric == "loss" else UNITS.get(metric, OWN_UNIT)


def is_of_numbers(row: Mapping[str, Any]) -> bool:
    """Return whether a row counts errors of numeric targets."""
    return row.get("squared") is not None


def select_class(rows: pd.DataFrame, number: int) -> pd.DataFrame:
    """Return rows with the counts by class of the background and class ``number`` only.

    Mask metrics derived from them are then of this class.
    """
    names = [name for name in BY_CLASS if name in rows]
    picked = {
        name: [[counts[0], counts[number]] if isinstance(counts, list) else None for counts in rows[name]]
        for name in names
    }
    return rows.assign(**{name: pd.Series(values, index=rows.index, dtype=object) for name, values in picked.items()})


def rows_to_frame(rows: Iterable[Row]) -> pd.DataFrame:
    """Return rows as a data frame with the columns above, consuming a generator one row at a time."""
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for row in rows:
        for name, values in columns.items():
            value = row.get(name)
            values.append(values[-1] if values and values[-1] == value else value)  # most repeat: share one object
    return pd.DataFrame(columns)


def compute_metric(rows: pd.DataFrame, metric: str) -> pd.Series:
    """Return ``metric`` of every row of evaluation or training loss; NaN where the row does not define it, or infinite.

    ``accuracy``, ``balanced_accuracy`` (mean recall of the classes that occur), ``auc`` (mean over the classes or
    labels that some samples have and others lack), ``average_precision`` (likewise; with two classes of the second),
    ``exact_match``, ``ece``, ``f1``, Dice and IoU (means over classes that occur or are predicted; of masks without the
    background, and first over cases unless pooled) lie in 0..1; ``rmse`` and ``mae`` are means over targets, ``r2`` (at
    most 1) over those that vary, distances of surfaces over cases and classes as Dice; ``c_index`` is the fraction of
    comparable pairs of a client's patients that are ranked correctly; ``loss`` is the mean loss of a sample. Others are
    read from ``sums`` and ``values``, by name. :func:`find_missing` returns what is left out.
    """
    if metric == "auc":
        values = rows["auc"].astype(float)
    else:
        values = (_measure_rows if metric in METRIC_COUNTS else _read_on_request)(rows, metric)
    return values.where(np.isfinite(values))


def _measure_rows(rows: pd.DataFrame, metric: str) -> pd.Series:
    """Return a metric of every row that has its counts."""
    names = METRIC_COUNTS[metric]
    values = np.full(len(rows), np.nan)
    counted = rows[list(names)].notna().all(axis=1).to_numpy(dtype=bool)
    if counted.any():
        known = rows[counted]
        counts = {name: np.array(known[name].tolist(), float).reshape(len(known), -1) for name in names}
        values[counted] = measure_counts(metric, counts, known["samples"].to_numpy(float)[:, None])
    return pd.Series(values, index=rows.index)


def _read_on_request(rows: pd.DataFrame, metric: str) -> pd.Series:
    """Return a metric on request of every row, from its sum or its value."""
    sums, values = (
        [found.get(metric) if isinstance(found, dict) else None for found in rows[name]]
        if name in rows
        else [None] * len(rows)
        for name in ("sums", "values")
    )
    found = pd.Series(values, index=rows.index, dtype=float)
    return found.fillna(pd.Series(sums, index=rows.index, dtype=float) / rows["samples"])


def sum_counts(counts: Sequence[Any]) -> Any:
    """Return the sum of a column's entries: numbers, lists or mappings."""
    if isinstance(counts[0], dict):
        totals = {name: [each[name] for each in counts] for name in counts[0]}
        return {name: None if None in values else sum(values) for name, values in totals.items()}
    return np.sum(counts, axis=0).tolist()


def add_rows(rows: Sequence[Mapping[str, Any]]) -> Row:
    """Return the counts of all samples of ``rows`` together, of the columns that each of them has."""
    names = [name for name in rows[0] if name in COUNTS and all(row[name] is not None for row in rows)]
    first = rows[0].get("reference")
    if first is None:
        return {name: sum_counts([row[name] for row in rows]) for name in names}
    moved = [_refer(row, first) for row in rows]
    return {name: sum_counts([row[name] for row in moved]) for name in names} | {"reference": first}


def _refer(row: Mapping[str, Any], reference: Sequence[float]) -> Row:
    """Return ``row`` with its sums of targets and of their squares counted from another ``reference``."""
    step_T = np.subtract(row["reference"], reference)
    total_T, square_T = np.asarray(row["total"], float), np.asarray(row["square"], float)
    square_T = square_T + 2 * step_T * total_T + row["samples"] * step_T**2
    return {**row, "total": total_T + row["samples"] * step_T, "square": square_T}


def select_large_moves(moves: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return the rows of :attr:`RunSummary.moves` of at least :data:`LEAST_MOVE`, the largest first."""
    change = (moves["reestimated"] - moves["running"]).abs()
    change = change if is_share(metric) else change / moves["running"].abs()
    large = change[change >= LEAST_MOVE * (1 - 1e-9)].sort_values(ascending=False, kind="stable")
    return moves.loc[large.index]


def choose_statistics(setting: str, moves: pd.DataFrame, unmeasured: Iterable[str], metric: str) -> str:
    """Return which statistics a report shows, of all methods alike: :data:`RUNNING` or :data:`REESTIMATED`.

    ``setting``: one of them, or ``auto``: re-estimated if they change any client with any method and seed by at least
    :data:`LEAST_MOVE` on validation or, without them, training data. ``unmeasured``: methods without re-estimates,
    which leave only running statistics.
    """
    wanted = REESTIMATED if setting == "auto" and len(select_large_moves(moves, metric)) else setting
    return REESTIMATED if wanted == REESTIMATED and not [*unmeasured] else RUNNING


def adds_up(rows: pd.DataFrame, metric: str) -> bool:
    """Return whether ``metric`` of all clients' samples together follows from their ``rows``."""
    alone = any(isinstance(found, dict) and metric in found for found in rows["values"]) if "values" in rows else False
    return metric != "auc" and not alone


def measure_counts(metric: str, counts: Mapping[str, np.ndarray], samples_N1: np.ndarray) -> np.ndarray:
    """Return ``metric`` of N rows from their ``counts`` by class, label or target, each ``[N, K]``."""
    if metric == "accuracy":
        return np.asarray(counts["hits"].sum(axis=1) / counts["support"].sum(axis=1))
    if metric == "c_index":
        return _mean_ratios(counts["concordant"], counts["comparable"])
    if metric in ("loss", "exact_match"):
        return np.asarray((counts[METRIC_COUNTS[metric][0]] / samples_N1)[:, 0])
    if metric == "balanced_accuracy":
        return _mean_ratios(counts["hits"], counts["support"])
    if metric == "ece":
        return np.asarray(np.abs(counts["gaps"]).sum(axis=1) / samples_N1[:, 0])
    if metric == "mae":
        return np.asarray((counts["absolute"] / samples_N1).mean(axis=1))
    if metric == "rmse":
        return np.asarray(np.sqrt(counts["squared"] / samples_N1).mean(axis=1))
    if metric == "r2":
        spread_NT = counts["square"] - counts["total"] ** 2 / samples_N1
        varies_NT = spread_NT > CONSTANT * counts["square"]
        return _mean_where(1 - _divide_where(counts["squared"], spread_NT, varies_NT, other=1), varies_NT)
    if metric in BY_CASE:
        return _mean_ratios(*(counts[name] for name in BY_CASE[metric]))
    hits_NK, both_NK = counts["hits"], counts["support"] + counts["predicted"]
    if metric != "f1" and hits_NK.shape[1] > 1:  # the background
        hits_NK, both_NK = hits_NK[:, 1:], both_NK[:, 1:]
    if metric == "pooled_iou":
        return _mean_where(_divide_where(hits_NK, both_NK - hits_NK, both_NK > 0), both_NK > 0)
    return _mean_ratios(2 * hits_NK, both_NK)  # the Dice coefficient, which equals F1


def _mean_ratios(above_NK: np.ndarray, below_NK: np.ndarray) -> np.ndarray:
    """Return the mean of ``above / below`` over the columns where ``below`` is positive."""
    return _mean_where(_divide_where(above_NK, below_NK, below_NK > 0), below_NK > 0)


def _divide_where(above_NK: np.ndarray, below_NK: np.ndarray, defined_NK: np.ndarray, other: float = 0) -> np.ndarray:
    ratio_NK: np.ndarray = np.divide(above_NK, below_NK, out=np.full_like(above_NK, other), where=defined_NK)
    return ratio_NK


def _mean_where(values_NK: np.ndarray, defined_NK: np.ndarray) -> np.ndarray:
    """Return the mean of each row's defined values; the others must be 0. NaN where none is defined."""
    count_N = defined_NK.sum(axis=1)
    mean_N: np.ndarray = np.divide(values_NK.sum(axis=1), count_N, out=np.full(len(count_N), np.nan), where=count_N > 0)
    return mean_N


def find_missing(row: Mapping[str, Any], metric: str) -> tuple[int, ...]:
    """Return the classes, labels or targets that the samples of ``row`` do not define ``metric`` for, by number.

    ``auc``, ``average_precision``: classes or labels that no sample has, or all; ``balanced_accuracy``: classes that no
    sample has; ``f1``, Dice, IoU and distances of surfaces: likewise, without the background of masks; they
    count nevertheless where they are predicted. ``r2``: targets without spread. It depends only on the samples, not on
    predictions.
    """
    if metric == "r2" and isinstance(row.get("square"), list):
        sums = zip(row["total"], row["square"], strict=True)
        return tuple(
            n for n, (total, square) in enumerate(sums) if square - total**2 / row["samples"] <= CONSTANT * square
        )
    of_masks = (*BY_CASE, "pooled_dice", "pooled_iou")
    if metric not in (*RANKINGS, "balanced_accuracy", "f1", *of_masks) or not isinstance(row["support"], list):
        return ()
    first = 1 if metric in of_masks and len(row["support"]) > 1 else 0
    useless = (0, row["samples"]) if metric in RANKINGS else (0,)
    return tuple(n for n, count in enumerate(row["support"]) if n >= first and count in useless)


def read_rows(path: Path, up_to: int | None = None) -> list[Row]:
    """Return all of :func:`stream_rows`."""
    return list(stream_rows(path, up_to))


def stream_rows(path: Path, up_to: int | None = None) -> Iterator[Row]:
    """Yield the rows of a file of JSON lines up to round ``up_to``, inclusive, without a last line cut by a crash.

    Raises :class:`FedshiftError` with the number of the damaged line.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = parse_checked(line)
            except ValueError as error:
                if not line.endswith(b"\n"):  # the last
                    return
                raise FedshiftError(f"{path}, line {number} is damaged ({error}): {RESTART}") from error
            if up_to is None or row["round"] <= up_to:
                yield row


@dataclass(frozen=True, kw_only=True, eq=False)
class MethodSummary:
    """Summary of one method: its scope table, and the traffic of one client and round.

    ``name``: its canonical expression. ``text``: all its choices.
    ``entries``: one mapping for each named entry with ``name``, ``type`` (of the owning module), ``shape``, ``bytes``,
    ``buffer``, ``load``, ``send``, ``trained`` (bools). ``down``/``up``: bytes for one client in one round.
    ``leaves``: all that leaves a client, in a round or before the first; ``kept``: what the server keeps of single
    clients, in words. ``has_global``: whether the server holds a whole model. ``pooled``: whether all data train
    together in one place.
    """

    name: str
    text: str
    entries: tuple[Mapping[str, Any], ...]
    down: int
    up: int
    leaves: tuple[Disclosure, ...]
    kept: str
    has_global: bool
    pooled: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class RunSummary:
    """Results of a finished or interrupted comparison, sufficient to make tables, figures and the page.

    ``methods`` by label, as requested; ``rounds`` planned; ``metric`` is the one that tables report, ``target_metric``
    the target: rounds and bytes are counted until it is reached (None: no target); ``select`` is ``last`` or ``best``
    (round of the best macro metric on validation data, never on test data); ``clients`` maps each name to the sizes of
    its splits, ``samples`` to a few images, uint8 ``[n, H, W, C]`` with C 1 or 3; ``traffic`` has the columns
    ``method``, ``seed``, ``round``, ``down``, ``up`` (bytes that all clients together exchanged in that round), and
    from run directories also ``seconds`` (of training), ``elapsed``, ``ended`` and ``engine``; ``same_test`` maps a
    client to an earlier client with the same test samples; ``majority`` maps a client to the class of most of its
    training samples (empty where sites hold the data, or have no classes); ``digests``: of all samples;
    ``task`` and ``metrics``: the federation's task, and the metrics that its counts define; ``resolved`` describes what
    is trained, ``config`` has the requested settings; ``crossed`` has the rows of cross-site validation, if requested,
    with ``owner``, the client whose model was measured (None: the server); ``lag`` has the rows of models whose
    BatchNorm statistics were re-estimated at the reported round, of methods without such statistics their usual rows;
    ``moves`` has the metric with ``running`` and ``reestimated`` statistics on the ``split`` that decides which
    ``statistics`` are reported (:func:`choose_statistics`); ``unmeasured``: methods that were not
    re-estimated; ``stopped`` has the reasons why trials ended before the last round, by method and seed;
    ``read_cases`` reads the records of single test samples of a method and seed under the models that are reported,
    ``read_validation`` the records of validation samples, None where there are none; ``read_pictures`` reads
    pictures of the worst test images of a method's first seed after a round; ``class_names``: meaning of the
    classes, empty if unknown; ``operating_point``: how thresholds of scores are chosen
    (:func:`fedshift.analysis.clinical.choose_threshold`); ``compare_with``: the method with which alone others
    are compared, as chosen before the run, by label; empty: all pairs of methods are; ``margin``: loss of a client
    that tables may exclude, in the unit of the metric; None: none was chosen; ``served``: whether the samples are
    at sites, which keep the results of single ones.
    """

    name: str
    methods: Mapping[str, MethodSummary]
    seeds: tuple[int, ...]
    rounds: int
    select: str
    clients: Mapping[str, Mapping[str, int]]
    classes: int
    rows: pd.DataFrame
    traffic: pd.DataFrame
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    samples: Mapping[str, np.ndarray] = field(default_factory=dict)
    note: str = ""
    notices: tuple[str, ...] = ()
    metric: str = "accuracy"
    target_metric: float | None = None
    digests: Mapping[str, str] = field(default_factory=dict)
    resolved: Mapping[str, str] = field(default_factory=dict)
    same_test: Mapping[str, str] = field(default_factory=dict)
    majority: Mapping[str, int] = field(default_factory=dict)
    task: str = "classification"
    metrics: tuple[str, ...] = ("accuracy", "balanced_accuracy", "auc", "loss")
    crossed: pd.DataFrame = field(default_factory=lambda: rows_to_frame(()).assign(owner=[]))
    lag: pd.DataFrame = field(default_factory=lambda: rows_to_frame(()))
    moves: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=MOVES))
    statistics: str = RUNNING
    unmeasured: tuple[str, ...] = ()
    stopped: Mapping[tuple[str, int], str] = field(default_factory=dict)
    read_cases: Callable[[str, int], Cases | None] = lambda *_: None
    read_validation: Callable[[str, int], Cases | None] = lambda *_: None
    read_pictures: Callable[[str, int], tuple[Picture, ...] | None] = lambda *_: None
    class_names: tuple[str, ...] = ()
    operating_point: str = "youden"
    compare_with: str = ""
    margin: float | None = None
    served: bool = False

    @property
    def moment(self) -> str:
        """Moment of the reported rows."""
        return REESTIMATED if self.statistics == REESTIMATED else "loaded"

    @property
    def metric_name(self) -> str:
        """Name of the metric in a sentence."""
        return name_metric(self.metric)

    @property
    def scale(self) -> float:
        """Factor with which values of the metric are printed."""
        return metric_unit(self.metric)[0]

    @property
    def outputs(self) -> str:
        """Number of classes, labels or targets in words."""
        of_labels = "f1" in self.metrics and "accuracy" not in self.metrics
        noun = (
            "label" if of_labels else "target" if self.of_numbers else "risk" if "c_index" in self.metrics
            else "class"
        )  # fmt: skip
        return f"{self.classes} {noun}{'' if self.classes == 1 else 'es' if noun == 'class' else 's'}"

    @property
    def metric_label(self) -> str:
        """Name and unit of the metric, for an axis."""
        return f"{self.metric_name} ({'%' if is_share(self.metric) else self.metric_unit})"

    @property
    def of_numbers(self) -> bool:
        """Return whether targets are numbers."""
        return "rmse" in self.metrics

    @property
    def loss_unit(self) -> str:
        """Unit of losses on test data."""
        return metric_unit("loss", numbers=self.of_numbers)[2]

    @property
    def training_loss_label(self) -> str:
        """Name of the training loss, for an axis; unnamed where methods differ."""
        losses = self.resolved.get("training loss", "")
        if losses == "cross_entropy":
            losses = "cross-entropy (nats)"
        return "training loss" if not losses or "; " in losses else f"training loss: {losses}"

    @property
    def metric_unit(self) -> str:
        """Unit in which values of the metric are printed, in a sentence."""
        return metric_unit(self.metric, numbers=self.of_numbers)[2]
