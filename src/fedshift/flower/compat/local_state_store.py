"""A client's own entries on its own disk, as they were after the last two rounds that it trained.

Flower's node state is memory only and is lost without an error when a node restarts. Two generations are kept because
a server that failed asks for a round again, which must start from what was there before that round.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from ...results.checkpoint import load_checkpoint, save_checkpoint
from ...utils.errors import FedshiftError
from ...utils.files import disk_error
from ...utils.state import State, add_prefix, entries_under
from ..transport.arrays import RefusedMessage, check_state


class LocalStateStore:
    """The entries of ``client`` in ``experiment`` below ``folder``; ``initial``: what a client starts from."""

    def __init__(self, folder: Path, experiment: str, client: str, initial: State) -> None:
        self.path = folder / _to_file_name(experiment) / f"{_to_file_name(client)}.safetensors"
        self.initial = initial
        self.who = f"client {client!r} of experiment {experiment!r}"

    def load_after(self, done: int, last: int) -> tuple[int, State] | None:
        """The newest entries of the first ``done`` rounds, and of which round they are; None where it never trained.

        ``last``: the round that the server knows the client to have finished (0: none). Raises :class:`FedshiftError`
        where entries are missing, older than that, newer than all of those rounds, or of another model.
        """
        held = self._read()
        usable = [number for number in held if number <= done]
        if not held and last == 0:
            return None
        if held and not usable:
            raise FedshiftError(
                f"{self.who} holds entries of round {min(held)} ({self.path}), but the server has done {done} rounds: "
                "to begin anew, remove that file or name the experiment otherwise; to go on, give the server its state"
            )
        if max(usable, default=0) < last:
            found = f"are of round {max(usable)}" if usable else "are missing"
            raise FedshiftError(
                f"{self.who} finished round {last}, but its own entries {found} ({self.path}): put the file back, or "
                "begin an experiment of another name; they are not made up"
            )
        return max(usable), held[max(usable)]

    def write(self, before: tuple[int, State], round: int, state: State) -> None:
        """Keep ``state`` as that after ``round``, and what it started from. Raises :class:`FedshiftError`."""
        generations = {before[0]: before[1], round: state}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise disk_error(self.path, error) from error
        tensors = {name: x for number, held in generations.items() for name, x in add_prefix(str(number), held).items()}
        save_checkpoint(self.path, tensors, {"client": self.who, "rounds": sorted(generations)})

    def _read(self) -> dict[int, State]:
        if not self.path.exists():
            return {}
        tensors, facts = load_checkpoint(self.path)
        held = {int(number): entries_under(str(number), tensors) for number in facts["rounds"]}
        for state in held.values():
            try:
                check_state(state, self.initial, "what is kept")
            except RefusedMessage as error:
                raise FedshiftError(
                    f"{self.who} kept the entries of another model ({self.path}): {error}; use the model that it was "
                    "begun with, or name the experiment otherwise"
                ) from error
        return held


def _to_file_name(name: str) -> str:
    """``name`` as a file's name on any system, never one that leads elsewhere."""
    return quote(name, safe="").replace(".", "%2E")
