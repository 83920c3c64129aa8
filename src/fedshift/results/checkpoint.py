"""Checkpoints: one safetensors file with a JSON header, written atomically.

A checkpoint is written to a temporary file, flushed to disk and moved over the old one, so that a crash at any moment
leaves either the old or the new one intact. Checksums over all tensors and over the header detect later damage. It
contains the server's state and the location of the clients' states (``client_store``). Equal contents yield equal
bytes: all values other than tensors are one header entry with sorted keys, since safetensors writes several entries in
random order.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..utils.errors import UsageError
from ..utils.files import write_atomically
from ..utils.state import State
from .trial_records import ENTRY, FORMAT, checksum_facts, damaged_checkpoint, read_header


def _checksum(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> str:
    value = zlib.crc32(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(tensors):
        value = zlib.crc32(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode(), value)
        raw = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        value = zlib.crc32(raw.numpy().data, value)
    return f"{value:08x}"


def save_checkpoint(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors and facts (JSON values) atomically, with the same bytes for the same contents.

    Raises :class:`FedshiftError` if writing fails.
    """
    owned = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    checksums = {"checksum": _checksum(owned, facts), "facts_checksum": checksum_facts(facts)}
    header = {"format": FORMAT, **checksums, "facts": facts}
    write_atomically(path, save(owned, metadata={ENTRY: json.dumps(header, sort_keys=True)}))


def load_checkpoint(path: Path) -> tuple[State, dict[str, Any]]:
    """Return tensors and facts of a checkpoint.

    Raises :class:`FedshiftError` if it is missing, truncated, damaged or of another format.
    """
    header = read_header(path)
    facts: dict[str, Any] = header["facts"]
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  (else: the file's memory)
        if header["checksum"] != _checksum(tensors, facts):
            raise ValueError("its checksum does not match")
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise damaged_checkpoint(path, error) from error
    return tensors, facts


def refuse_other(then: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise :class:`UsageError` naming the first setting that differs between ``then`` and ``now``."""
    for key in {**now, **then}:
        before, value = str(then.get(key)), str(now.get(key))
        if before != value:
            same = next((i for i, (a, b) in enumerate(zip(before, value, strict=False)) if a != b), 0)
            shown = slice(max(0, same - 40), max(0, same - 40) + 120)
            raise UsageError(
                f"this run was begun with another {key}: then {before[shown]!r}, now {value[shown]!r}. Resume it with "
                "its original settings, or start a new run in another directory"
            )
