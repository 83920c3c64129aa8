"""JSON with a checksum: an object whose last entry, ``crc32``, is the CRC-32 of everything before it.

Any JSON reader can read it. A changed byte or a truncated file is detected.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import FedshiftError, Sentence
from .files import write_atomically

ENTRY = "crc32"
_DIGITS = 8


def dump_checked(value: Mapping[str, Any], indent: int | None = None) -> str:
    """Return ``value`` as JSON with its checksum."""
    text = json.dumps({**value, ENTRY: ""}, indent=indent)
    end = text.rindex('"')
    return f"{text[:end]}{checksum(text[:end].encode())}{text[end:]}"


def parse_checked(content: bytes) -> dict[str, Any]:
    """Return the object in ``content``, without its checksum; raise ``ValueError`` with the reason if damaged."""
    start = content.rfind(f'"{ENTRY}": "'.encode()) + len(ENTRY) + 5
    end = start + _DIGITS
    if start < len(ENTRY) + 5:
        raise ValueError("it has no checksum")
    if content[end:].strip(b"\n") not in (b'"}', b'"\n}') or content[start:end] != checksum(content[:start]).encode():
        raise ValueError("its checksum does not match")
    value: dict[str, Any] = json.loads(content)
    del value[ENTRY]
    return value


def checksum(content: bytes) -> str:
    """Return the CRC-32 of ``content`` as eight hexadecimal digits."""
    return f"{zlib.crc32(content):0{_DIGITS}x}"


def write_checked(path: Path, value: Mapping[str, Any]) -> None:
    """Write ``value`` to ``path`` atomically, with its checksum."""
    write_atomically(path, (dump_checked(value, indent=2) + "\n").encode())


def read_checked(path: Path, fix: str | Sentence) -> dict[str, Any]:
    """Return the object that :func:`write_checked` wrote.

    Raises :class:`FedshiftError` if the file is missing or damaged; ``fix``: what to do, besides restoring it.
    """
    try:
        return parse_checked(path.read_bytes())
    except FileNotFoundError as error:
        raise FedshiftError(f"{path} is missing: restore it from a copy, or {{}}", fix) from error
    except (OSError, ValueError) as error:
        raise FedshiftError(f"{path} is damaged ({error}): restore it from a copy, or {{}}", fix) from error
