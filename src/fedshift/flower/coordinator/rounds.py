"""Rounds that can be used, and rounds to go back to: lengths of updates, kept checkpoints, bounded weights.

One upload far from the others', even if finite, makes the mean useless and every later round diverge. The bound on its
length excludes faulty uploads and crude attacks under any aggregation; robust ones (``krum``, ``median``) address
subtle attacks. After a round that spoiled the model nevertheless, ``serve --from-round`` goes back to a checkpoint.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_high

import torch
from torch import Tensor
from typing_extensions import override

from ...core.kernel import broadcast
from ...core.means import bound_shares
from ...core.states import ServerState, Update
from ...experiments.callbacks import Callback
from ...experiments.settings import Settings
from ...experiments.trial import RoundResult
from ...experiments.trial_run import find_best
from ...results.checkpoint import load_checkpoint
from ...results.run_directory import trial_folder
from ...results.summary import read_facts
from ...results.trial_records import BEST, CHECKPOINT, require_checkpoint
from ...utils.errors import FedshiftError, UsageError
from ...utils.words import join_some

BOUND = 10.0
"""Largest ratio of an update's length to the others'."""
FILES, HISTORY, KEPT = (BEST, CHECKPOINT), "history", 3
"""Checkpoints of a trial, the folder of its earlier ones, and for how many rounds it has them."""


def measure_update(server: ServerState, update: Update) -> list[float]:
    """Return four Euclidean lengths: of the change of shared entries and of the rules' uploads, in all and per step."""
    shared = ((x, server.shared[name]) for name, x in update.shared.items() if x.is_floating_point())
    change = _length(torch.where(new == old, 0.0, new.double() - old.double()) for new, old in shared)
    memory = _length(x.double() for part in update.memory for x in part.values())
    return [change, memory, change / update.steps, memory / update.steps]


def _length(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors))


@dataclass
class UpdateLengths:
    """The greatest lengths (:func:`measure_update`) so far of each client's updates; ``bound``: 0 means no limit."""

    bound: float
    longest: dict[str, list[float]] = field(default_factory=dict)

    def find_outliers(self, server: ServerState, updates: Mapping[str, Update]) -> dict[str, float]:
        """Return the clients whose ``updates`` are too long, with the ratio to the others'; remember all other lengths.

        An update is compared with the median of the other clients' longest updates, including this round's, so that
        neither one tiny update nor a short round excludes honest clients. Without other clients, it is compared with
        the client's longest. Ratios are per step if that is less: more steps go farther, but not in proportion.
        """
        lengths = {name: measure_update(broadcast(server, name), update) for name, update in updates.items()}
        joined = {name: list(map(max, self.longest.get(name, own), own)) for name, own in lengths.items()}
        known, outliers = self.longest | joined, dict[str, float]()
        for name, own in lengths.items():
            others = [longest for other, longest in known.items() if other != name] or [self.longest.get(name, own)]
            usual = map(median_high, zip(*others, strict=True))
            change, memory, *by_step = (x / y if y > 0 else 0.0 for x, y in zip(own, usual, strict=True))
            ratio = max(min(change, by_step[0]), min(memory, by_step[1]))
            if self.bound and not ratio <= self.bound:  # also if it is NaN
                outliers[name] = ratio
        self.longest |= {name: longest for name, longest in joined.items() if name not in outliers}
        return outliers


def describe_bound(samples: Mapping[str, int], max_share: float) -> str:
    """Return which clients' weights ``max_share`` bounds, from their ``samples`` to what; "": none."""
    bounded = bound_shares(list(map(float, samples.values())), max_share)
    lowered = [f"{name} weighs {after:.6g} in place of {samples[name]}"
               for name, after in zip(samples, bounded, strict=True) if round(after) < samples[name]]  # fmt: skip
    return f"in averages weighted by samples, {join_some(lowered)} (--max-share {max_share:g})" if lowered else ""


class HistoryKeeper(Callback):
    """Callback that keeps the last checkpoints of each trial in a run ``directory``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @override
    def on_trial_begin(self, method: str, seed: int, done: int) -> None:
        self._folder = trial_folder(self.directory, method, seed)
        self._keep(done)

    @override
    def on_round_end(self, done: RoundResult) -> None:
        self._keep(done.round)

    def _keep(self, round: int) -> None:
        (self._folder / HISTORY).mkdir(exist_ok=True)
        for name in FILES:
            _link(self._folder / name, self._folder / HISTORY / f"{round}-{name}")
            (self._folder / HISTORY / f"{round - KEPT}-{name}").unlink(missing_ok=True)


def go_back(directory: Path, round: int) -> None:
    """Go back to the model after ``round`` in the latest trial of the run ``directory``.

    Raises :class:`UsageError` if no trial has begun, or its intact checkpoints are of other rounds.
    """
    if not (begun := _list_begun(directory)):
        raise UsageError(f"{directory} has no round yet to go back to: omit --from-round {round}")
    kept = _list_intact(begun[-1])
    if round not in kept:
        raise UsageError(
            f"{begun[-1]} has no model of round {round}, only of rounds {', '.join(map(str, kept)) or 'none'}: "
            "name one of these (--from-round), or restore an older copy of the run"
        )
    _put_back(begun[-1], round)


def repair(directory: Path, settings: Settings) -> Iterator[str]:
    """Replace checkpoints that are damaged, or newer than other records, by the last intact ones; yield what was done.

    A run that was copied at the end of a round may contain files from before and after it.
    """
    for folder in _list_begun(directory):
        try:
            _check(folder, settings)
        except FedshiftError as damaged:
            for round in reversed(_list_intact(folder)):
                _put_back(folder, round)
                with suppress(FedshiftError):
                    _check(folder, settings)
                    yield f"{damaged}. The run continues from the previous checkpoint, after round {round}"
                    break


def _check(folder: Path, settings: Settings) -> None:
    """Raise :class:`FedshiftError` if the checkpoint of a trial is missing, damaged, or newer than its records."""
    require_checkpoint(folder)
    if (folder / CHECKPOINT).exists():
        find_best(folder, load_checkpoint(folder / CHECKPOINT)[1]["round"], settings)


def _list_begun(directory: Path) -> list[Path]:
    """Return the folders of the trials that have begun, in the order of the run."""
    facts = read_facts(directory)
    folders = (trial_folder(directory, method, seed) for seed in facts["seeds"] for method in facts["methods"])
    return [folder for folder in folders if folder.exists()]


def _list_intact(folder: Path) -> list[int]:
    """Return the rounds whose checkpoints are kept and can be read, in order."""
    rounds = []
    for path in (folder / HISTORY).glob(f"*-{CHECKPOINT}"):
        with suppress(FedshiftError):
            rounds.append(int(load_checkpoint(path)[1]["round"]))
    return sorted(rounds)


def _put_back(folder: Path, round: int) -> None:
    for name in FILES:
        _link(folder / HISTORY / f"{round}-{name}", folder / name)


def _link(source: Path, target: Path) -> None:
    """Make ``target``, atomically, a hard link to ``source`` if that exists; a copy where files cannot be linked."""
    if source.exists():
        new = target.with_name(f"new-{target.name}")
        new.unlink(missing_ok=True)
        try:
            new.hardlink_to(source)
        except OSError:
            shutil.copyfile(source, new)
        new.replace(target)
        new.unlink(missing_ok=True)  # renaming one link to another of the same file does nothing
