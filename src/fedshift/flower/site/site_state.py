"""A site's states of its client: one file after each round, of which the needed ones and some earlier ones are kept."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save

from ...core.kernel import init_client
from ...core.plan import Plan
from ...core.states import ClientState
from ...experiments.client_store import to_client, to_tensors
from ...nn.linear import list_products, set_products
from ...results.checkpoint import load_checkpoint, save_checkpoint
from ...utils.errors import FedshiftError
from ...utils.files import write_atomically
from ...utils.state import State, entries_under
from ..transport.arrays import RefusedMessage, check_state

STATES = "state-*.safetensors"
"""Pattern of the files of a trial's states."""


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Earlier states that a site keeps of an experiment: at most ``rounds`` of a trial, and ``bytes`` of all trials."""

    rounds: int = 50
    bytes: int = 10**9


class SiteState:
    """The states of client ``name`` for one trial, in ``folder``; ``data``: fingerprint of the client's samples.

    Flower keeps a node's state in memory and silently loses it when the node restarts. Here, each state is a
    checksummed safetensors file, ``state-<round>.safetensors``, written atomically before the answer is sent. The
    coordinator names the round whose state is current (the *base*: the last round in which it used the client's
    upload). The base, its successor and its predecessor are always kept, so that a round can be repeated whose upload
    was late or spoiled the model, and others within ``retention``, so that a coordinator restored from an older copy
    can repeat the rounds since then. A state also records its upload: the same round of two such pasts
    need not have the same state.
    """

    def __init__(self, folder: Path, name: str, plan: Plan, data: str, retention: Retention | None = None) -> None:
        self.folder, self.name, self.plan, self.data = folder, name, plan, data
        self.retention = retention or Retention()

    def load_after(self, base: int, upload: str = "") -> ClientState:
        """Return the client after round ``base`` (0: before its first), and restore how the network computed products.

        ``upload``: digest of the upload that the coordinator used in that round; empty if it does not say.

        Raises :class:`RefusedMessage` if the state is missing, damaged, of another upload, or from another model or
        other data; a lost state is never silently recreated.
        """
        like = init_client(self.plan)
        if base == 0:
            return like
        path = self._path(base)
        if not path.exists():
            there = ", ".join(map(str, self.list_rounds())) or "none"
            raise RefusedMessage(
                f"client {self.name!r} has lost its state after round {base} (in {self.folder} there are those after "
                f"rounds: {there}): bring the folder back from a copy, or let the coordinator go on from one of these "
                "rounds (a newer copy of its run, or serve --resume RUN --from-round ROUND); without its state the "
                "client can only take part in a new experiment"
            )
        try:
            tensors, facts = load_checkpoint(path)
        except FedshiftError as error:
            raise RefusedMessage(
                f"the state of client {self.name!r} in {path} cannot be read: bring the file back from a copy, or let "
                f"the coordinator go back (serve --resume RUN --from-round {base - 1}); without it the client can only "
                "take part in a new experiment"
            ) from error
        if facts["data"] != self.data:
            raise RefusedMessage(
                f"the data of client {self.name!r} differ from round {base}: give it the data that it began with, "
                "or begin a new experiment"
            )
        if upload and facts.get("upload", upload) != upload:
            raise RefusedMessage(
                f"the state of client {self.name!r} in {path} is of another round {base} than the coordinator's, which "
                "went back and repeated it with other sites: let it go on from the run that it went back from, or from "
                "an earlier round (serve --resume RUN --from-round ROUND)"
            )
        expected = to_tensors(like, self.plan.rule_names)
        for part in ("personal", "memory"):
            where = f"the {part} state of client {self.name!r} in {path}"
            check_state(entries_under(part, tensors), entries_under(part, expected), where)
        device = next(iter(self.plan.initial.values())).device
        moved = {name: tensor.to(device) for name, tensor in tensors.items()}
        set_products(self.plan.module, facts.get("products", {}))
        return to_client(moved, facts["steps"], self.plan.rule_names)

    def save(self, client: ClientState, base: int, round: int, upload: str = "") -> None:
        """Write the client's state after ``round``, which started from the state after ``base``.

        ``upload``: digest of the round's upload.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = to_tensors(client, self.plan.rule_names)
        products = list_products(self.plan.module)
        facts = {"steps": client.steps, "data": self.data, "round": round, "products": products, "upload": upload}
        save_checkpoint(self._path(round), tensors, facts)
        rounds = self.list_rounds()
        for unused in (old for old in rounds if base < old < round):
            self._path(unused).unlink()
        self._remove_old({self._path(old) for old in (base, round, *[old for old in rounds if old < base][-1:])})

    def _remove_old(self, needed: AbstractSet[Path]) -> None:
        """Remove states beyond the retention, oldest first, except ``needed`` ones and the last three of other trials.

        A coordinator that went back to an earlier round by mistake can return: the rounds after it are the newest.
        """
        states: list[Path] = []
        for trial in self.folder.parent.iterdir():
            found = sorted(trial.glob(STATES), key=_round_of)
            needed = needed if trial == self.folder else needed | set(found[-3:])
            states += found
        written = {path: path.stat() for path in states}
        count, total = 0, sum(written[path].st_size for path in needed & written.keys())
        for path in sorted(written.keys() - needed, key=lambda path: written[path].st_mtime_ns, reverse=True):
            own, size = path.parent == self.folder, written[path].st_size
            if (own and count == self.retention.rounds) or total + size > self.retention.bytes:
                path.unlink()
            else:
                count, total = count + own, total + size

    def export_model(self, state: State, round: int) -> None:
        """Write the client's current model to ``model.safetensors``, for use at the site."""
        self.folder.mkdir(parents=True, exist_ok=True)
        owned = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
        write_atomically(self.folder / "model.safetensors", save(owned, metadata={"round": str(round)}))

    def list_rounds(self) -> list[int]:
        """Return the rounds after which there is a state."""
        return sorted(map(_round_of, self.folder.glob(STATES)))

    def _path(self, round: int) -> Path:
        return self.folder / f"state-{round}.safetensors"


def _round_of(path: Path) -> int:
    return int(path.stem.removeprefix("state-"))
