"""Summary of a run directory and its records, written as the run starts and read by reports.

Reading requires neither torch nor data, so that a report can be made without them.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..utils.errors import FedshiftError, UsageError
from .run_directory import METRICS, ROUNDS, RunDirectory, describe_environment, trial_folder
from .schema import MethodSummary, RunSummary, rows_to_frame, stream_rows


def write_summary(directory: RunDirectory, facts: Mapping[str, Any], images: Mapping[str, np.ndarray]) -> None:
    """Write ``facts``, the fields of :class:`RunSummary` that are known before training, and the environment.

    ``images``: some of each client's, uint8 ``[n, H, W, C]``.
    """
    packed = io.BytesIO()
    np.savez_compressed(packed, **{str(i): image for i, image in enumerate(images.values())})  # type: ignore[arg-type]
    directory.write("samples.npz", packed.getvalue())
    directory.write_json("environment.json", describe_environment())
    directory.write_json("study.json", {**facts, "samples": list(images)})


def read_summary(path: Path) -> RunSummary:
    """Return the results so far of the run in directory ``path``. Raises :class:`UsageError` where there is none."""
    try:
        facts = json.loads((path / "study.json").read_text(encoding="utf-8"))
        machine = json.loads((path / "environment.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(f"{path} holds no run: give a directory that `fedshift run` or `compare` wrote") from error
    except json.JSONDecodeError as error:
        raise FedshiftError(f"{path}: study.json or environment.json is damaged ({error})") from error
    runs = [(method, seed) for method in facts["methods"] for seed in facts["seeds"]]
    trials = [(*run, trial_folder(path, *run)) for run in runs]
    moved = ("round", "down", "up", "seconds")
    traffic = [
        {"method": method, "seed": seed, **{name: row[name] for name in moved}}
        for method, seed, folder in trials
        for row in stream_rows(folder / ROUNDS)
    ]
    with np.load(path / "samples.npz") as packed:
        samples = {name: packed[str(i)] for i, name in enumerate(facts.pop("samples"))}
    methods = {
        name: MethodSummary(**{**method, "entries": tuple(method["entries"])})
        for name, method in facts["methods"].items()
    }
    notices = path / "notices.json"
    return RunSummary(
        **{**facts, "seeds": tuple(facts["seeds"]), "methods": methods},
        rows=rows_to_frame(row for *_, folder in trials for row in stream_rows(folder / METRICS)),
        traffic=pd.DataFrame(traffic, columns=["method", "seed", *moved]),
        environment=machine,
        samples=samples,
        notices=tuple(json.loads(notices.read_text(encoding="utf-8"))) if notices.exists() else (),
    )
