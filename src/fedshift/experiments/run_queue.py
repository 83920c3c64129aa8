"""Several runs in one directory, one after another: ended runs are never repeated, interrupted ones continue.

``done.json`` in a run's directory records that the run ended, with which settings and trials, and what diverged in it.
A run from which a trial's folder was removed has not ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import torch

from ..engines.engine import Diverged
from ..results.run_directory import TRIALS
from ..utils.checked_json import read_checked, write_checked
from ..utils.errors import Ref, Sentence
from ..utils.execution.workers import Workers
from ..utils.processors import available_processors
from .callbacks import Callback
from .experiment import Experiment
from .jobs import Jobs

DONE = "done.json"
DIVERGED = "diverged"


@dataclass(frozen=True, kw_only=True)
class QueuedRun:
    """One of several runs: its directory ``folder``, and its ``experiment``, made just before it runs.

    ``settings``: settings with which it counts as ended; empty if the directory name contains them.
    """

    folder: Path
    experiment: Callable[[], Experiment]
    settings: Mapping[str, Any] = field(default_factory=dict)


def read_outcome(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return what diverged in the run in ``folder``, ``""`` for nothing; None: not ended with ``settings``.

    Raises :class:`FedshiftError` if ``done.json`` is damaged.
    """
    if not (folder / DONE).exists():
        return None
    kept = read_checked(
        folder / DONE, Sentence("remove it and go on ({}): what was done is not done again", Ref(resume=True))
    )
    diverged, trials = str(kept.pop(DIVERGED, "")), kept.pop(TRIALS, ())
    whole = all((folder / TRIALS / name).is_dir() for name in trials)
    return diverged if whole and kept == settings else None


def run_pending(
    parts: Iterable[QueuedRun],
    *,
    callback: Callback,
    stop: Event,
    jobs: Jobs = "auto",
    begin: Callable[[int, QueuedRun], None] = lambda *_: None,
    end: Callable[[QueuedRun, bool], None] = lambda *_: None,
) -> bool:
    """Run the ``parts`` that have not ended; return whether all were run before ``stop`` was set.

    ``jobs``: maximum number of a part's trials that run side by side.
    ``begin`` and ``end`` are called for each part that is run; ``end`` also receives whether the part completed without
    being stopped. A part that diverges has ended and does not stop the others; other errors are raised as by
    :meth:`~fedshift.experiments.experiment.Experiment.run`.
    """
    threads = min(torch.get_num_threads(), available_processors())
    parts = list(parts)
    left = [part for part in parts if read_outcome(part.folder, part.settings) is None]
    with closing(Workers()) as workers:
        for number, part in enumerate(parts, 1):
            if part not in left:
                continue
            begin(number, part)
            experiment, diverged, finished = part.experiment(), {}, True
            torch.set_num_threads(experiment.config.get("threads") or threads)
            try:
                resume = (part.folder / "config.toml").exists()
                finished = experiment.run(
                    part.folder, resume=resume, callback=callback, stop=stop, jobs=jobs, workers=workers,
                    runs=len(left) if part is left[0] else 0,
                )  # fmt: skip
            except Diverged as error:
                diverged = {DIVERGED: str(error)}
            end(part, finished)
            if not finished:
                return False
            trials = sorted(path.name for path in (part.folder / TRIALS).glob("*"))
            write_checked(part.folder / DONE, {**part.settings, **diverged, TRIALS: trials})
    return True
