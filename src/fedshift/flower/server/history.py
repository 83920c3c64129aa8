"""The last checkpoints of a trial, and the return to one of them after a round that spoiled the model.

An update within the bound of :mod:`.outliers` can still spoil a model. If sites then diverge or send updates beyond the
bound, and too few usable updates remain, the coordinator goes back to the model before that round and repeats the round
without the client that had the longest update.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from ...engines.engine import Diverged
from ...experiments.callbacks import Callback
from ...experiments.settings import Settings
from ...experiments.trial import RoundResult
from ...experiments.trial_run import find_best
from ...results.checkpoint import load_checkpoint
from ...results.run_directory import trial_folder
from ...results.summary import read_facts
from ...results.trial_records import BEST, CHECKPOINT, require_checkpoint
from ...utils.checked_json import read_checked, write_checked
from ...utils.errors import FedshiftError, UsageError
from ...utils.files import write_atomically

KEPT = 3
"""Number of checkpoints to keep for each trial."""
SUSPICIOUS = 2.0
"""Minimum ratio of an update's length to the others' for its client to be suspected."""
HISTORY, LEFT_OUT = "history", "left-out.json"


class SpoiledModel(Diverged):
    """Too few sites can continue from the model of a round in which one update was much longer than the others."""

    def __init__(self, text: str, folder: Path, round: int, suspect: str, ratio: float) -> None:
        super().__init__(text)
        self.folder, self.round, self.suspect, self.ratio = folder, round, suspect, ratio


@dataclass(frozen=True)
class TrialHistory:
    """The last checkpoints of the trial in ``folder``, and the clients excluded from repeated rounds."""

    folder: Path

    def read_left_out(self) -> Mapping[int, str]:
        """Return the client excluded from each repeated round; raise :class:`FedshiftError` if the file is damaged."""
        path = self.folder / LEFT_OUT
        if not path.exists():
            return {}
        kept = read_checked(path, "remove it to ask every site again")
        return {int(round): str(name) for round, name in kept.items()}

    def keep(self, round: int) -> None:
        """Keep the checkpoints of ``round``, and delete all but the last few."""
        history = self.folder / HISTORY
        history.mkdir(exist_ok=True)
        for name in (CHECKPOINT, BEST):
            if (self.folder / name).exists():
                _link(self.folder / name, history / f"{round}-{name}")
        for path in history.iterdir():
            if int(path.name.split("-")[0]) <= round - KEPT:
                path.unlink()

    def take_back(self, round: int, suspect: str) -> bool:
        """Go back to the model before ``round``, which will be repeated without ``suspect``.

        Returns False if the round was already repeated, or the checkpoint before it is missing.
        """
        left_out, before = dict(self.read_left_out()), self.folder / HISTORY / f"{round - 1}-{CHECKPOINT}"
        if round in left_out or not before.exists():
            return False
        write_checked(self.folder / LEFT_OUT, {str(key): name for key, name in {**left_out, round: suspect}.items()})
        self._put_back(round - 1)
        return True

    def go_back(self, round: int) -> None:
        """Go back to the model after ``round``; raise :class:`UsageError` if its checkpoint is missing."""
        kept = [number for number in self.list_rounds() if self._reads(number)]
        if round not in kept:
            raise UsageError(
                f"{self.folder} has no model of round {round}, only of rounds {', '.join(map(str, kept)) or 'none'}: "
                "name one of these (--from-round), or restore an older copy of the run"
            )
        self._put_back(round)

    def repair(self, settings: Settings) -> str:
        """Replace a checkpoint that is damaged, or newer than the other records, by the last intact one.

        A run that was copied at the end of a round may contain files from before and after it. The damaged file is kept
        under another name. Returns a description of the repair; empty if the checkpoint is intact or none is.
        """
        path = self.folder / CHECKPOINT
        try:
            if path.exists():
                find_best(self.folder, load_checkpoint(path)[1]["round"], settings)
            else:
                require_checkpoint(self.folder)
            return ""
        except FedshiftError as error:
            damaged = error
        aside = path.with_name(f"damaged-{CHECKPOINT}")
        if path.exists():
            path.replace(aside)
        for round in filter(self._reads, reversed(self.list_rounds())):
            self._put_back(round)
            with suppress(FedshiftError):
                find_best(self.folder, round, settings)
                return f"{damaged}. The run continues from the previous checkpoint, after round {round}"
        if aside.exists():
            aside.replace(path)
        return ""

    def list_rounds(self) -> list[int]:
        """Return the rounds whose checkpoints are kept."""
        return sorted(int(path.name.partition("-")[0]) for path in (self.folder / HISTORY).glob(f"*-{CHECKPOINT}"))

    def _reads(self, round: int) -> bool:
        try:
            return bool(load_checkpoint(self.folder / HISTORY / f"{round}-{CHECKPOINT}")[1]["round"] == round)
        except FedshiftError:
            return False

    def _put_back(self, round: int) -> None:
        kept = self.folder / HISTORY / f"{round}-{CHECKPOINT}"
        best = kept.with_name(f"{round}-{BEST}")
        if best.exists():
            write_atomically(self.folder / BEST, best.read_bytes())
        write_atomically(self.folder / CHECKPOINT, kept.read_bytes())


def list_histories(directory: Path) -> list[TrialHistory]:
    """Return the histories of the trials that have begun in the run ``directory``, in the order of the run."""
    facts = read_facts(directory)
    folders = [trial_folder(directory, method, seed) for seed in facts["seeds"] for method in facts["methods"]]
    return [TrialHistory(folder) for folder in folders if folder.exists()]


def go_back(directory: Path, round: int) -> None:
    """Go back to the model after ``round`` in the latest trial of the run ``directory``.

    Raises :class:`UsageError` if its checkpoint is missing.
    """
    begun = list_histories(directory)
    if not begun:
        raise UsageError(f"{directory} has no round yet to go back to: omit --from-round {round}")
    begun[-1].go_back(round)


class HistoryKeeper(Callback):
    """Callback that keeps the last checkpoints of the trials in a run ``directory``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @override
    def on_trial_begin(self, method: str, seed: int, done: int) -> None:
        self.kept = TrialHistory(trial_folder(self.directory, method, seed))
        self.kept.keep(done)

    @override
    def on_round_end(self, done: RoundResult) -> None:
        self.kept.keep(done.round)


def _link(source: Path, target: Path) -> None:
    """Make ``target`` a hard link to ``source``, or a copy if the file system does not support hard links."""
    target.unlink(missing_ok=True)
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)
