"""What a site keeps of an experiment on its own disk: its client's state after the rounds that count.

Flower keeps the state of a node in memory: it is gone without an error when the node restarts. Here each state is a
checksummed safetensors file, ``state-<round>.safetensors``, written atomically before the answer leaves. The
coordinator says after which round a client's state is the one to go on from (its *base*: the last round in which it
used the client's upload). Two are kept, the base and what came of it, so that a round that is asked for again, or whose
upload came too late, starts where it started before.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save

from ...core.kernel import ClientState, init_client
from ...core.plan import Plan
from ...experiments.client_store import to_client, to_tensors
from ...results.checkpoint import load_checkpoint, save_checkpoint
from ...utils.errors import FedshiftError
from ...utils.files import write_atomically
from ...utils.state import State, entries_under
from ..transport.arrays import RefusedMessage, check_state


class SiteState:
    """The states of client ``name`` for one trial, in ``folder``; ``data``: fingerprint of the client's samples."""

    def __init__(self, folder: Path, name: str, plan: Plan, data: str) -> None:
        self.folder, self.name, self.plan, self.data = folder, name, plan, data

    def load_after(self, base: int) -> ClientState:
        """The client after round ``base`` (0: before its first).

        Raises :class:`RefusedMessage` where there is no such state, or it is damaged, another model's or of other data; a lost
        state is never silently made anew.
        """
        like = init_client(self.plan)
        if base == 0:
            return like
        path = self._path(base)
        if not path.exists():
            there = ", ".join(map(str, self.list_rounds())) or "none"
            raise RefusedMessage(
                f"client {self.name!r} has lost its state after round {base} (in {self.folder} there are those after "
                f"rounds: {there}): bring the folder back from a copy; without it the client can only take part in a "
                "new experiment"
            )
        try:
            tensors, facts = load_checkpoint(path)
        except FedshiftError as error:
            raise RefusedMessage(
                f"the state of client {self.name!r} in {path} cannot be read: bring the file back from a copy; without "
                "it the client can only take part in a new experiment"
            ) from error
        if facts["data"] != self.data:
            raise RefusedMessage(
                f"the data of client {self.name!r} are not those of round {base}: give it the data that it began with, "
                "or begin a new experiment"
            )
        expected = to_tensors(like, self.plan.rule_names)
        for part in ("personal", "memory"):
            where = f"the {part} state of client {self.name!r} in {path}"
            check_state(entries_under(part, tensors), entries_under(part, expected), where)
        device = next(iter(self.plan.initial.values())).device
        moved = {name: tensor.to(device) for name, tensor in tensors.items()}
        return to_client(moved, facts["steps"], self.plan.rule_names)

    def save(self, client: ClientState, base: int, round: int) -> None:
        """Write the client as it is after ``round``, which it began from ``base``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = to_tensors(client, self.plan.rule_names)
        save_checkpoint(self._path(round), tensors, {"steps": client.steps, "data": self.data, "round": round})
        for old in self.list_rounds():
            if old not in (base, round):
                self._path(old).unlink()

    def export_model(self, state: State, round: int) -> None:
        """Write the model that the client uses now, for whoever works at the site: ``model.safetensors``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        owned = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
        write_atomically(self.folder / "model.safetensors", save(owned, metadata={"round": str(round)}))

    def list_rounds(self) -> list[int]:
        """The rounds of which there is a state."""
        return sorted(int(path.stem.removeprefix("state-")) for path in self.folder.glob("state-*.safetensors"))

    def _path(self, round: int) -> Path:
        return self.folder / f"state-{round}.safetensors"
