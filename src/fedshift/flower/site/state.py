"""A site's states of its client: a file after each round, keeping the needed ones and the last ones."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save

from ...core.kernel import init_client
from ...core.plan import Plan
from ...core.states import ClientState
from ...experiments.client_store import to_client, to_tensors
from ...results.checkpoint import load_checkpoint, save_checkpoint
from ...utils.errors import FedshiftError
from ...utils.files import write_atomically
from ...utils.state import State, entries_under
from ..messages import RefusedMessage, check_state

STATES = "state-*.safetensors"
"""Pattern of the files of a trial's states."""
KEEP_ROUNDS = 50
"""Default number of states that are kept of a trial."""


class SiteState:
    """The states of client ``name`` for one trial, in ``folder``.

    Each state is a checksummed safetensors file, ``state-<round>.safetensors``, written before the answer is sent. The
    coordinator names the round whose state is current (the *base*: the last round in which it used the client's
    upload). The base, its successor and its predecessor are always kept, so that a round can be repeated whose upload
    was late, and the last ``keep`` states, so that a coordinator restored from an older copy can repeat the rounds
    since then. A state also records its upload: the same round of two such pasts need not have the same state.

    ``data``: fingerprint of the client's samples.
    """

    def __init__(self, folder: Path, name: str, plan: Plan, data: str, keep: int = KEEP_ROUNDS) -> None:
        self.folder, self.name, self.plan, self.data, self.keep = folder, name, plan, data, keep

    def load_after(self, base: int, upload: str = "") -> ClientState:
        """Return the client after round ``base`` (0: before its first).

        ``upload``: digest of the upload that the coordinator used in that round; empty if it does not say.

        Raises :class:`RefusedMessage` if the state is missing, damaged, of another upload, or from another model or
        other data; a lost state is never silently recreated.
        """
        like = init_client(self.plan)
        if base == 0:
            return like
        path, again = self._path(base), "without its state the client can only take part in a new experiment"
        if not path.exists():
            there = ", ".join(map(str, self.list_rounds())) or "none"
            raise RefusedMessage(
                f"client {self.name!r} has lost its state after round {base} (it has those after rounds: {there}): "
                "bring the folder back from a copy, or let the coordinator go on from one of these rounds (a newer "
                f"copy of its run, or serve --resume RUN --from-round ROUND); {again}",
                here=f"{path} is missing",
            )
        try:
            tensors, facts = load_checkpoint(path)
        except FedshiftError as error:
            raise RefusedMessage(
                f"the state of client {self.name!r} after round {base} cannot be read: bring the file back from a "
                f"copy, or let the coordinator go back (serve --resume RUN --from-round {base - 1}); {again}",
                here=str(error),
            ) from error
        if facts["data"] != self.data:
            raise RefusedMessage(
                f"the data of client {self.name!r} differ from round {base}: give it the data that it began with, "
                "or begin a new experiment"
            )
        if upload and facts.get("upload", upload) != upload:
            raise RefusedMessage(
                f"the state of client {self.name!r} is of another round {base} than the coordinator's, which went "
                "back and repeated it with other sites: let it go on from the run that it went back from, or from an "
                "earlier round (serve --resume RUN --from-round ROUND)"
            )
        expected = to_tensors(like, self.plan.rule_names)
        for part in ("personal", "memory"):
            where = f"the {part} state of client {self.name!r} after round {base}"
            check_state(entries_under(part, tensors), entries_under(part, expected), where)
        device = next(iter(self.plan.initial.values())).device
        moved = {name: tensor.to(device) for name, tensor in tensors.items()}
        return to_client(moved, facts["steps"], self.plan.rule_names)

    def save(self, client: ClientState, base: int, round: int, upload: str = "") -> None:
        """Write the client's state after ``round``, which started from the state after ``base``.

        ``upload``: digest of the round's upload.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = to_tensors(client, self.plan.rule_names)
        facts = {"steps": client.steps, "data": self.data, "round": round, "upload": upload}
        save_checkpoint(self._path(round), tensors, facts)
        rounds = self.list_rounds()
        needed = {base, round, *[old for old in rounds if old < base][-1:]}
        for old in rounds:  # later rounds are of a coordinator that went back, and may return
            if base < old < round or (old not in needed and old in rounds[: -self.keep or None]):
                self._path(old).unlink()

    def export_model(self, state: State, round: int) -> None:
        """Write the client's current model to ``model.safetensors``, for use at the site."""
        self.folder.mkdir(parents=True, exist_ok=True)
        owned = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
        write_atomically(self.folder / "model.safetensors", save(owned, metadata={"round": str(round)}))

    def list_rounds(self) -> list[int]:
        """Return the rounds after which there is a state."""
        return sorted(int(path.stem.removeprefix("state-")) for path in self.folder.glob(STATES))

    def _path(self, round: int) -> Path:
        return self.folder / f"state-{round}.safetensors"
