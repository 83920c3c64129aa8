"""Clients' states, in memory while there is room and otherwise in files; a round writes only the states that changed.

A log-structured store (Rosenblum and Ousterhout 1992). A segment is a file of consecutive states, each an ordinary
safetensors file; it is written once, atomically, and never changed. If less than half of a segment is
current, that part moves into the next one, so that files take at most about twice the space of the states.

For a client that never trained, or that keeps nothing, only the number of steps is stored. Each state has a checksum
that is verified when the state is read. Opening a store reads only names and sizes of segments, so it is cheap even
with many clients.
"""

from __future__ import annotations

import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load, save

from ..core.states import ClientState
from ..results.schema import RESTART
from ..utils.errors import FedshiftError
from ..utils.files import ScratchDirectory, write_atomically
from ..utils.state import State, add_prefix, entries_under, group_entries, join_states, nbytes, split_state

MEMORY = 512 * 2**20
"""Default limit on the bytes of clients' states in memory."""
ENTRY = 1024
"""Bytes that an entry takes besides its values: a tensor's objects, its name, and what the allocator adds."""
PARTS = ("personal", "optimizer", "memory")


class ClientStore(Mapping[str, ClientState]):
    """Clients by name: the result of ``fresh`` until a client has trained, then the last state given to :meth:`put`.

    ``limit``: maximum bytes of states in memory, with :data:`ENTRY` for each entry; only states that :meth:`save` has
    not written yet may exceed it. ``held``: bytes in memory now. ``rules``: names of the method's rules, which
    prefix their memories in files. Reading a client raises :class:`FedshiftError` if its state on disk is missing or
    damaged.
    """

    def __init__(
        self, names: Iterable[str], fresh: Callable[[], ClientState], device: torch.device, limit: int = MEMORY,
        rules: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.names, self._rules = tuple(names), tuple(rules)
        self._number = {name: number for number, name in enumerate(self.names)}
        self._fresh, self._device, self._limit = fresh, device, limit
        self._scratch: ScratchDirectory | None = None
        self._clear()

    def _clear(self) -> None:
        self._steps = np.zeros(len(self.names), np.int64)
        self._place = np.zeros((len(self.names), 4), np.int64)  # segment (0: none), first byte, bytes, checksum
        self._segments: dict[int, int] = {}  # size of each in bytes
        self._folder: Path | None = None
        self._unsaved: dict[int, ClientState] = {}
        self._cached: OrderedDict[int, ClientState] = OrderedDict()  # also in files; least recently used first
        self.held = 0

    def __getitem__(self, name: str) -> ClientState:
        number = self._number[name]
        if number in self._unsaved:
            return self._unsaved[number]
        if number in self._cached:
            self._cached.move_to_end(number)
            return self._cached[number]
        steps = int(self._steps[number])
        if not self._place[number, 0]:
            return to_client({}, steps, self._rules) if steps else self._fresh()
        state = {entry: tensor.to(self._device, copy=True) for entry, tensor in load(self._read(number)).items()}
        client = self._cached[number] = to_client(state, steps, self._rules)
        self.held += _state_bytes(client)
        self._shrink()
        return client

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def has_trained(self, name: str) -> bool:
        """Return whether a client of this name exists and has taken part."""
        return name in self._number and bool(self._steps[self._number[name]])

    @property
    def seen(self) -> tuple[str, ...]:
        """Clients that have taken part, in client order."""
        return tuple(self.names[number] for number in np.flatnonzero(self._steps))

    def count_steps(self) -> dict[str, int]:
        """Return the local steps of each client that has taken part."""
        return {name: int(self._steps[self._number[name]]) for name in self.seen}

    def put(self, clients: Mapping[str, ClientState]) -> None:
        """Store ``clients`` after a round."""
        whole = self._find_whole(clients)
        for name, client in clients.items():
            number = self._number[name]
            for place in (self._unsaved, self._cached):
                if before := place.pop(number, None):
                    self.held -= _state_bytes(before)
            self._steps[number], self._place[number] = client.steps, 0
            if any((client.personal, client.optimizer, *client.memory)):
                self._unsaved[number] = _compact_state(client, whole)
                self.held += _state_bytes(self._unsaved[number])
        self._shrink()

    def _find_whole(self, clients: Mapping[str, ClientState]) -> frozenset[int]:
        """Return the arrays, by address, whose parts are entries of ``clients`` and may stay what they are.

        All clients must be given, and fit into memory: their arrays are then released together.
        """
        if len(clients) < len(self.names) or sum(map(_state_bytes, clients.values())) > self._limit:
            return frozenset()
        used, sizes = Counter[int](), dict[int, int]()
        for client in clients.values():
            for state in (client.personal, client.optimizer, *client.memory):
                for tensor in state.values():
                    storage = tensor.untyped_storage()
                    used[storage.data_ptr()] += tensor.nbytes
                    sizes[storage.data_ptr()] = storage.nbytes()
        return frozenset(address for address, size in sizes.items() if used[address] == size)

    def save(self, folder: Path, round: int) -> tuple[State, dict[str, int]]:
        """Write the states that changed since the last call as a segment in ``folder``, if any did.

        Returns the input of :meth:`restore`: tensors, and the segments that now contain states, with their sizes. The
        result of an older call stays valid until :func:`remove_unused_segments` removes segments. If the folder differs
        from the last call's, all states are written. Raises :class:`FedshiftError` if writing fails; nothing is changed
        then.
        """
        segment = self._place[:, 0]
        current = np.bincount(segment, weights=self._place[:, 2], minlength=1 + max(self._segments, default=0))
        moved = [old for old, size in self._segments.items() if folder != self._folder or 2 * current[old] < size]
        numbers = sorted({*self._unsaved, *np.flatnonzero(np.isin(segment, moved)).tolist()})
        if numbers:
            content, entries = bytearray(), []
            for number in numbers:
                state = self._pack(number)
                entries.append((round, len(content), len(state), zlib.crc32(state)))
                content += state
            write_atomically(folder / _segment_name(round), bytes(content))
            self._place[numbers] = entries
            self._segments[round] = len(content)
            self._cached.update(self._unsaved)
            self._unsaved = {}
            self._shrink()
        self._folder = folder
        used = set(np.flatnonzero(np.bincount(segment)).tolist())
        self._segments = {number: size for number, size in self._segments.items() if number in used}
        index = {"clients/steps": torch.tensor(self._steps)}
        if self._segments:
            index["clients/place"] = torch.tensor(self._place)
        return index, {str(number): size for number, size in self._segments.items()}

    @property
    def is_full(self) -> bool:
        """Return whether more than ``limit`` is in memory, because states are not in files yet."""
        return self.held > self._limit and bool(self._unsaved)

    def spill(self, round: int) -> None:
        """Write unsaved states to the store's temporary folder if more than ``limit`` is in memory."""
        if self.is_full:
            if self._scratch is None:
                self._scratch = ScratchDirectory("clients-")
            self.save(self._scratch.path, round)
            remove_unused_segments(self._scratch.path, self._segments)

    def tensors(self) -> State:
        """Return all states as flat tensors, by the numbers of their clients."""
        numbers = np.flatnonzero(self._steps).tolist()
        states = join_states(map(str, numbers), (to_tensors(self[self.names[n]], self._rules) for n in numbers))
        return {"clients/steps": torch.tensor(self._steps)} | add_prefix("client", states)

    def restore(self, tensors: State, segments: Mapping[str, int], folder: Path | None) -> None:
        """Restore the result of :meth:`save`, in ``folder``, or of :meth:`tensors`.

        Raises :class:`FedshiftError` if a segment is missing or has another size.
        """
        self._clear()
        steps = tensors["clients/steps"].numpy()
        self._steps[: len(steps)] = steps  # clients admitted since then have not trained yet
        if segments:
            if folder is None:
                raise ValueError("states of clients are in the checkpoint's folder: give it")
            self._place, self._folder = tensors["clients/place"].numpy().copy(), folder
            self._segments = {int(number): size for number, size in segments.items()}
            check_segments(folder, segments)
        moved = {name: tensor.to(self._device) for name, tensor in entries_under("client", tensors).items()}
        states = {int(number): state for number, state in group_entries(moved).items()}
        self.put({self.names[n]: to_client(state, int(self._steps[n]), self._rules) for n, state in states.items()})

    def _pack(self, number: int) -> bytes:
        """Return a client's state as the content of a file; safetensors does not allow tensors that share memory."""
        if number not in self._unsaved:
            return self._read(number)
        flat = to_tensors(self._unsaved[number], self._rules)
        return save({entry: x.detach().cpu().clone(memory_format=torch.contiguous_format) for entry, x in flat.items()})

    def _read(self, number: int) -> bytes:
        assert self._folder
        segment, start, size, checksum = self._place[number].tolist()
        path = self._folder / _segment_name(segment)
        try:
            with path.open("rb") as file:
                file.seek(start)
                content = file.read(size)
        except OSError as error:
            raise _damaged_error(path, f"cannot be read ({error.strerror})") from error
        if zlib.crc32(content) != checksum:
            raise _damaged_error(
                path, f"is corrupt: what it holds of client {self.names[number]!r} has another checksum"
            )
        return content

    def _shrink(self) -> None:
        while self._cached and self.held > self._limit:
            _, client = self._cached.popitem(last=False)
            self.held -= _state_bytes(client)


def check_segments(folder: Path, segments: Mapping[str, int]) -> None:
    """Raise :class:`FedshiftError` if one of ``segments`` is missing or does not have its size given there."""
    for number, size in segments.items():
        path = folder / _segment_name(int(number))
        if not path.exists():
            raise _damaged_error(path, "is missing")
        if path.stat().st_size != size:
            raise _damaged_error(path, f"holds {path.stat().st_size} bytes in place of {size}")


def remove_unused_segments(folder: Path, used: Iterable[int]) -> None:
    """Remove all segments in ``folder`` except ``used``, and incomplete files left by a crash."""
    names = {_segment_name(number) for number in used}
    for path in folder.glob("clients-*"):
        if path.name not in names:
            path.unlink()


def _segment_name(segment: int) -> str:
    return f"clients-{segment}.states"


def to_tensors(client: ClientState, rules: Sequence[str]) -> State:
    """Return the state of ``client`` as flat tensors; ``rules``: names of the method's rules."""
    parts = client.personal, client.optimizer, join_states(rules, client.memory)
    return join_states(PARTS, parts)


def to_client(tensors: State, steps: int, rules: Sequence[str]) -> ClientState:
    """Return the inverse of :func:`to_tensors`: the client after ``steps`` steps."""
    if not tensors:
        return ClientState(personal={}, memory=tuple({} for _ in rules), steps=steps)
    personal, optimizer, memory = (entries_under(part, tensors) for part in PARTS)
    return ClientState(personal=personal, optimizer=optimizer, memory=split_state(rules, memory), steps=steps)


def _state_bytes(client: ClientState) -> int:
    return sum(nbytes(state) + ENTRY * len(state) for state in (client.personal, client.optimizer, *client.memory))


def _compact_state(client: ClientState, whole: frozenset[int]) -> ClientState:
    """Return ``client`` with a copy of each entry that is part of a larger array, except of the arrays ``whole``.

    Such are entries from the stacked engine, which would keep those of other clients in memory.
    """

    def own(state: State) -> State:
        return {name: x.clone() if _is_part(x, whole) else x for name, x in state.items()}

    return ClientState(
        personal=own(client.personal), optimizer=own(client.optimizer), memory=tuple(map(own, client.memory)),
        steps=client.steps,
    )  # fmt: skip


def _is_part(tensor: torch.Tensor, whole: frozenset[int]) -> bool:
    storage = tensor.untyped_storage()
    return storage.nbytes() > tensor.nbytes and storage.data_ptr() not in whole


def _damaged_error(path: Path, what: str) -> FedshiftError:
    return FedshiftError(f"{path}, which holds states of clients, {what}: {RESTART}")
