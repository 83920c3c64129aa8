"""Checkpoints that survive: one safetensors file with a JSON header, written atomically.

A checkpoint is written beside its place, flushed to disk and moved over the old one, so a crash at any moment leaves
either the old or the new one whole. A checksum over all tensors refuses one that was damaged afterwards. It holds the
server's state and where clients' states are (``client_store``). Equal contents give equal bytes: what is not a tensor
is one entry of the header with sorted keys, since safetensors writes several in random order.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..utils.errors import FedshiftError, UsageError
from ..utils.files import write_atomically
from ..utils.state import State

FORMAT = 3
ENTRY = "fedshift"
"""Name of the header's one entry, JSON with the format, the checksum and the facts."""


def _checksum(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> str:
    value = zlib.crc32(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(tensors):
        value = zlib.crc32(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode(), value)
        raw = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        value = zlib.crc32(raw.numpy().data, value)
    return f"{value:08x}"


def save_checkpoint(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors and facts (JSON values) atomically: the same bytes for the same contents.

    Raises :class:`FedshiftError` where the disk refuses.
    """
    owned = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    header = {"format": FORMAT, "checksum": _checksum(owned, facts), "facts": facts}
    write_atomically(path, save(owned, metadata={ENTRY: json.dumps(header, sort_keys=True)}))


def load_checkpoint(path: Path) -> tuple[State, dict[str, Any]]:
    """Tensors and facts of a checkpoint.

    Raises :class:`FedshiftError` where it is missing, truncated, damaged or of another format.
    """
    with _opened(path) as (file, header):
        facts: dict[str, Any] = header["facts"]
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  (else: the file's memory)
        if header["checksum"] != _checksum(tensors, facts):
            raise ValueError("its checksum does not match")
    return tensors, facts


def load_facts(path: Path) -> dict[str, Any]:
    """The facts alone, without reading the tensors; errors as :func:`load_checkpoint`, but for damaged tensors."""
    with _opened(path) as (_, header):
        facts: dict[str, Any] = header["facts"]
    return facts


def refuse_other(then: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise :class:`UsageError` naming the first setting of ``now`` that was another ``then``."""
    for key, value in now.items():
        before = str(then.get(key))
        if before != value:
            same = next((i for i, (a, b) in enumerate(zip(before, value, strict=False)) if a != b), 0)
            shown = slice(max(0, same - 40), max(0, same - 40) + 120)
            raise UsageError(
                f"this run was begun with another {key}: then {before[shown]!r}, now {value[shown]!r}. Resume it with "
                "the settings it was begun with, or start a new run in another directory"
            )


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """The open file and its header; what goes wrong inside is told as a damaged checkpoint."""
    try:
        with safe_open(path, framework="pt") as file:
            entries = file.metadata() or {}
            header: dict[str, Any] = entries if "format" in entries else json.loads(entries[ENTRY])
            if header["format"] != FORMAT:
                raise FedshiftError(f"checkpoint {path} was written by another version of fedshift: {_RESTART}")
            yield file, header
    except FileNotFoundError as error:
        raise FedshiftError(
            f"no checkpoint at {path}: the run has not got that far; start it, or go on with it"
        ) from error
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise FedshiftError(f"checkpoint {path} is corrupt or truncated ({error}): {_RESTART}") from error


_RESTART = "restore the file from a copy, or remove it to begin this run again from round 1"
