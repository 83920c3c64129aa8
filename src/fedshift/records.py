"""Records: what was measured, as counts, one row for each ``(round, client, split, model, moment)``.

Rows live in a data frame and, on disk, in ``metrics.jsonl`` (one JSON object a line). Columns:

| column     | type        | meaning |
|------------|-------------|---------|
| `method`   | str         | method's name |
| `seed`     | int         | seed of the run |
| `round`    | int         | communication round, from 1 |
| `client`   | str         | client's name |
| `split`    | str         | `train`, `validation` or `test` |
| `model`    | str         | `global` (what the server holds) or `personal` (what the client would use) |
| `moment`   | str         | `loaded` (just after aggregation) or `trained` (during local work: the training loss) |
| `samples`  | int         | samples measured |
| `loss_sum` | float       | sum of the cross-entropy over them, in nats; training loss: of what is trained on |
| `hits`     | list of int | correctly classified samples of each true class; null in rows of training loss |
| `support`  | list of int | samples of each true class; null likewise |
| `auc`      | float       | area under the ROC curve, binary or one-vs-rest macro; null where it is not defined |

Everything in tables and figures (accuracy, balanced accuracy; macro, pooled, worst client) derives from these counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

COLUMNS = (
    "method", "seed", "round", "client", "split", "model", "moment", "samples", "loss_sum", "hits", "support", "auc",
)  # fmt: skip
METRICS = {"accuracy": "accuracy", "balanced_accuracy": "balanced accuracy", "auc": "AUC", "loss": "loss"}
"""Metrics, and what they are called in a sentence."""

Row = dict[str, Any]


def frame(rows: Iterable[Row]) -> pd.DataFrame:
    """Rows as a data frame with the columns above."""
    return pd.DataFrame(list(rows), columns=list(COLUMNS))


def measured(rows: pd.DataFrame, metric: str) -> pd.Series:
    """``metric`` of every row of evaluation or training loss; NaN where the row does not define it.

    ``accuracy``, ``balanced_accuracy`` (mean recall of the classes that occur) and ``auc`` lie in 0..1; ``loss`` is the
    mean cross-entropy in nats.
    """
    if metric == "loss":
        return rows["loss_sum"] / rows["samples"]
    if metric == "auc":
        return rows["auc"].astype(float)
    if metric not in METRICS:
        raise KeyError(f"metric {metric!r}; known are {tuple(METRICS)}")
    balanced = metric == "balanced_accuracy"
    values = [_share_correct(h, s, balanced) for h, s in zip(rows["hits"], rows["support"], strict=True)]
    return pd.Series(values, index=rows.index, dtype=float)


def _share_correct(hits: list[int] | None, support: list[int] | None, balanced: bool) -> float:
    if not isinstance(hits, list) or not isinstance(support, list):
        return float("nan")
    correct, occurring = np.array(hits, float), np.array(support, float)
    if not balanced:
        return float(correct.sum() / occurring.sum())
    present = occurring > 0
    return float((correct[present] / occurring[present]).mean())


def read_rows(path: Path, up_to: int | None = None) -> list[Row]:
    """Rows of a ``metrics.jsonl`` up to and including round ``up_to``; a last line cut short by a crash is left out."""
    rows: list[Row] = []
    if not path.exists():
        return rows
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            break
        if up_to is None or row["round"] <= up_to:
            rows.append(row)
    return rows


@dataclass(frozen=True, kw_only=True, eq=False)
class MethodFacts:
    """What a report says of one method: how it is written, its scope table, and the traffic of one client and round.

    ``entries``: one mapping for each named entry with ``name``, ``type`` (of the owning module), ``shape``, ``bytes``,
    ``buffer``, ``load``, ``send``, ``trained`` (bools). ``down``/``up``: bytes for one client in one round.
    ``has_global``: whether the server holds a whole model.
    """

    text: str
    entries: tuple[Mapping[str, Any], ...]
    down: int
    up: int
    has_global: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Study:
    """All that a finished or interrupted comparison left behind; tables, figures and the page are made from it alone.

    ``methods`` in the order asked for; ``rounds`` planned; ``metric`` is what tables report; ``select`` is ``last`` or
    ``best`` (round of the best macro metric on validation data, never on test data); ``clients`` maps each name to the
    sizes of its splits; ``samples`` maps it to a few images, uint8 ``[n, H, W, C]`` with C 1 or 3; ``traffic`` has the
    columns ``method``, ``seed``, ``round``, ``down``, ``up`` (bytes that all clients together moved in that round).
    """

    name: str
    methods: Mapping[str, MethodFacts]
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

    @property
    def metric_name(self) -> str:
        """What tables report, as a sentence calls it."""
        return METRICS[self.metric]
