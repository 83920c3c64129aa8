"""Records of measurements as counts, one row for each ``(round, client, split, model, moment)``.

Rows live in a data frame and, on disk, in ``metrics.jsonl`` (one JSON object a line, with a checksum). Columns:

| column     | type        | meaning |
|------------|-------------|---------|
| `method`   | str         | method's name |
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
| `auc`      | float       | area under the ROC curve, binary or one-vs-rest macro; null where it is not defined |

Everything in tables and figures (accuracy, balanced accuracy; macro, pooled, worst client) derives from these counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..utils.checked_json import parse_checked
from ..utils.errors import FedshiftError

COLUMNS = (
    "method", "seed", "round", "client", "split", "model", "moment", "samples", "loss_sum", "hits", "support", "auc",
)  # fmt: skip
METRICS = {"accuracy": "accuracy", "balanced_accuracy": "balanced accuracy", "auc": "AUC", "loss": "loss"}
"""Metrics, and their names in a sentence."""

MOMENTS = ("loaded", "trained")
"""Moments of a round at which models are measured on test and validation data."""

RESTART = "restore the file from a copy, or remove its folder to begin this trial again from round 1"
"""What to do about a damaged file of a trial."""

PICTURED = 24
"""Largest number of clients whose images a run keeps and a report shows."""

Row = dict[str, Any]


def rows_to_frame(rows: Iterable[Row]) -> pd.DataFrame:
    """Return rows as a data frame with the columns above, consuming a generator one row at a time."""
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for row in rows:
        for name, values in columns.items():
            value = row.get(name)
            values.append(values[-1] if values and values[-1] == value else value)  # most repeat: share one object
    return pd.DataFrame(columns)


def compute_metric(rows: pd.DataFrame, metric: str) -> pd.Series:
    """Return ``metric`` of every row of evaluation or training loss; NaN where the row does not define it.

    ``accuracy``, ``balanced_accuracy`` (mean recall of the classes that occur) and ``auc`` lie in 0..1; ``loss`` is the
    mean cross-entropy in nats.
    """
    if metric == "loss":
        return rows["loss_sum"] / rows["samples"]
    if metric == "auc":
        return rows["auc"].astype(float)
    if metric not in METRICS:
        raise KeyError(f"metric {metric!r}; known are {tuple(METRICS)}")
    shares = np.full(len(rows), np.nan)
    counted = (rows["hits"].notna() & rows["support"].notna()).to_numpy(dtype=bool)
    if counted.any():
        hits_NK, support_NK = (np.array(rows.loc[counted, name].tolist(), float) for name in ("hits", "support"))
        if metric == "balanced_accuracy":
            present_NK = support_NK > 0
            recall_NK = np.divide(hits_NK, support_NK, out=np.zeros_like(hits_NK), where=present_NK)
            shares[counted] = recall_NK.sum(axis=1) / present_NK.sum(axis=1)
        else:
            shares[counted] = hits_NK.sum(axis=1) / support_NK.sum(axis=1)
    return pd.Series(shares, index=rows.index)


def read_rows(path: Path, up_to: int | None = None) -> list[Row]:
    """Return all of :func:`stream_rows`."""
    return list(stream_rows(path, up_to))


def stream_rows(path: Path, up_to: int | None = None) -> Iterator[Row]:
    """Yield the rows of a file of JSON lines up to round ``up_to``, inclusive, without a last line cut by a crash.

    Raises :class:`FedshiftError` with the number of a line that is damaged.
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
    """Summary of one method: its expression, its scope table, and the traffic of one client and round.

    ``entries``: one mapping for each named entry with ``name``, ``type`` (of the owning module), ``shape``, ``bytes``,
    ``buffer``, ``load``, ``send``, ``trained`` (bools). ``down``/``up``: bytes for one client in one round.
    ``has_global``: whether the server holds a whole model. ``pooled``: whether all data train together in one place.
    """

    text: str
    entries: tuple[Mapping[str, Any], ...]
    down: int
    up: int
    has_global: bool
    pooled: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class RunSummary:
    """Results of a finished or interrupted comparison, from which alone tables, figures and the page are made.

    ``methods`` in the requested order; ``rounds`` planned; ``metric`` is the one that tables report, ``target_metric``
    the value up to which rounds and bytes are counted (None: no target); ``select`` is ``last`` or ``best`` (round of
    the best macro metric on validation data, never on test data); ``clients`` maps each name to the sizes of its
    splits, ``samples`` to a few images, uint8 ``[n, H, W, C]`` with C 1 or 3; ``traffic`` has the columns ``method``,
    ``seed``, ``round``, ``down``, ``up`` (bytes that all clients together exchanged in that round), and from run
    directories also ``seconds`` (of training), ``elapsed``, ``ended`` and ``engine``; ``same_test`` maps
    a client to an earlier client with the same test samples; ``majority`` maps a client to the class of most of its
    training samples (empty where sites hold the data); ``fingerprint`` is a digest of all samples;
    ``resolved`` says in words what is trained, ``config`` what was asked for.
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
    fingerprint: str = ""
    resolved: Mapping[str, str] = field(default_factory=dict)
    same_test: Mapping[str, str] = field(default_factory=dict)
    majority: Mapping[str, int] = field(default_factory=dict)

    @property
    def metric_name(self) -> str:
        """Name of the metric in a sentence."""
        return METRICS[self.metric]
