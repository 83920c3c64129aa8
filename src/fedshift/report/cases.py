"""Results of each test sample as one frame: from it, any statistics program recomputes what reports print."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from ..results.cases import Records, compare_masks
from ..results.schema import RunSummary
from .clinical import name_classes
from .tables import find_reported_rounds

TITLES = {"given": "truth", "target": "truth", "chosen": "prediction", "support": "truth", "predicted": "prediction"}
"""Names of columns, where they differ from those of :mod:`fedshift.results.cases`."""
OMITTED = frozenset({"area", "right", "group", "error"})
"""Arrays that follow from others, or have a column of another kind."""


def tabulate_cases(summary: RunSummary, model: str = "personal") -> pd.DataFrame:
    """Return a row for each method, seed, client and test sample at the reported round, under the client's ``model``.

    Columns: ``method``, ``seed``, ``client``, ``case`` (number of the test sample, from 0), ``patient`` (number of its
    group within the client, or ``case``), ``truth`` and ``prediction`` (names of classes; for several labels and
    numbers, a column for each; for masks, pixels by class, and ``dice``), scores by class, and what else was recorded.
    Empty where sites keep the results of single samples, or no trial has ended.
    """
    return pd.concat([pd.DataFrame({"method": []}), *_list_frames(summary, model)], ignore_index=True)


def _list_frames(summary: RunSummary, model: str) -> Iterator[pd.DataFrame]:
    reported, classes = find_reported_rounds(summary), name_classes(summary)
    for (method, seed), number in zip(reported.index.tolist(), reported.tolist(), strict=True):
        cases = summary.read_cases(method, seed)
        for (client, of), records in cases.records.items() if cases and cases.round == number else ():
            if of == model:
                columns = dict(_list_columns(records, classes))
                place = np.arange(len(next(iter(columns.values()))))
                names = {"method": method, "seed": seed, "client": client, "case": place}
                yield pd.DataFrame({**names, "patient": records.get("group", place), **columns})


def _list_columns(records: Records, classes: list[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the columns of ``records``, with one for each class of arrays ``[N, K]``."""
    arrays = dict(records)
    if "error" in arrays:
        arrays["chosen"] = arrays["target"] + arrays["error"]
    if "support" in arrays:
        compared = compare_masks(records)
        arrays["dice"] = np.where(compared["cases"], compared["case_dice"], np.nan)
    for name, array in arrays.items():
        title = TITLES.get(name, name)
        if name in OMITTED:
            continue
        if array.ndim > 1:
            kinds = classes if array.shape[1] == len(classes) else [str(place) for place in range(array.shape[1])]
            yield from ((f"{title} {kind}", array[:, place]) for place, kind in enumerate(kinds))
        else:
            yield title, np.array([*classes, ""])[array] if name in ("truth", "chosen") else array  # -1: none
