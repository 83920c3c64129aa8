"""States: dictionaries from torch's entry names to tensors, and basic operations on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

State = dict[str, Tensor]


def pick(state: Mapping[str, Tensor], names: Iterable[str]) -> State:
    """Return the entries of ``state`` that ``names`` lists, in the order of ``state``."""
    wanted = frozenset(names)
    return {name: tensor for name, tensor in state.items() if name in wanted}


def clone(state: Mapping[str, Tensor]) -> State:
    """Return a copy that shares no memory with ``state``."""
    return {name: tensor.clone() for name, tensor in state.items()}


def _escape(prefix: str) -> str:
    """Return ``prefix`` without slashes, so that the first slash of a joined name ends it."""
    return prefix.replace("%", "%25").replace("/", "%2F")


def add_prefix(prefix: str, state: Mapping[str, Tensor]) -> State:
    """Prepend ``prefix/`` to every name of ``state``; slashes in ``prefix`` itself are escaped."""
    start = _escape(prefix)
    return {f"{start}/{name}": tensor for name, tensor in state.items()}


def entries_under(prefix: str, state: Mapping[str, Tensor]) -> State:
    """Return the entries below ``prefix/``, without it: the inverse of :func:`add_prefix`."""
    start = f"{_escape(prefix)}/"
    return {name.removeprefix(start): tensor for name, tensor in state.items() if name.startswith(start)}


def group_entries(state: Mapping[str, Tensor]) -> dict[str, State]:
    """Return the entries below each prefix, without it: the inverse of :func:`join_states` for unknown names."""
    groups: dict[str, State] = {}
    for name, tensor in state.items():
        prefix, _, entry = name.partition("/")
        groups.setdefault(prefix.replace("%2F", "/").replace("%25", "%"), {})[entry] = tensor
    return groups


def join_states(names: Iterable[str], states: Iterable[Mapping[str, Tensor]]) -> State:
    """Return ``states`` as one, the entries of each below its name; no states at all give an empty one."""
    parts = (add_prefix(name, state) for name, state in zip(names, states, strict=False))
    return {name: tensor for part in parts for name, tensor in part.items()}


def split_state(names: Iterable[str], state: Mapping[str, Tensor]) -> tuple[State, ...]:
    """Return the inverse of :func:`join_states`: one state for each name, empty where it has no entries."""
    return tuple(entries_under(name, state) for name in names)


def load_entries(network: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give ``network`` copies of the entries ``state``, of buffers that are not persistent or have grown as well."""
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        if name in state:
            tensor.data = state[name].to(tensor.device, copy=True)


def nbytes(state: Mapping[str, Tensor]) -> int:
    """Return the bytes of all entries, uncompressed."""
    return sum(tensor.nbytes for tensor in state.values())


def is_equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Return whether both contain the same names with bitwise equal values."""
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def drop_equal(stacked: Tensor) -> Tensor:
    """Return ``stacked [K, ...]`` as ``[1, ...]`` if all K share memory and are therefore equal."""
    return stacked[:1] if stacked.stride(0) == 0 else stacked


def move_together(tensors: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """Return the vectors ``tensors`` on ``device``; on another device than the CPU, they are copied all at once."""
    if device.type == "cpu" or not tensors:
        return tensors
    return torch.split(torch.cat([*tensors]).to(device), [len(each) for each in tensors])
