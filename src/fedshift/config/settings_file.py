"""The settings of a run as stored in its directory: ``config.toml`` with a final table, ``written``.

    [written]
    directory = "/home/ann/project"   # where the command ran: relative paths begin there
    from_here = "../.."               # the same, seen from the run directory, where all was moved together
    crc32 = "1a2b3c4d"                # checksum of everything above

An edited file is refused: use flags to change the settings of a resumed run.
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
import zlib
from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..utils.errors import FedshiftError, Ref, UsageError

FILE, WRITTEN = "config.toml", "written"
COMMAND: ContextVar[str] = ContextVar("command", default="")
"""The command line of the program, which runs record; empty in Python."""
_CHECKSUM = '\ncrc32 = "'
_FIX = "restore it from a copy (to change settings, add flags to --resume), or start a new run in another directory"


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of the run in ``run``.

    ``directories``: the directory in which the run was begun, absolute and relative to ``run``.
    """

    run: Path
    values: Mapping[str, Any]
    directories: tuple[Path, Path]

    @property
    def began(self) -> Path:
        """Directory in which the run was begun, or the current one if that no longer exists."""
        return next(filter(Path.is_dir, self.directories), Path.cwd())

    @property
    def data_setting(self) -> str:
        """The setting that locates the data: ``data``, or ``root`` for a benchmark."""
        return "data" if Path(str(self.values.get("data", ""))).is_absolute() else "root"

    def find_paths(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Return the settings with the current paths of data and weights: unchanged, or moved with the run.

        Raises :class:`UsageError` if nothing is found there; ``names``: the setting that gives the current path, by
        setting. A setting without one was given by the user.
        """
        values, name = dict(self.values), self.data_setting
        if values.get(name):
            places = self._list_places(values[name])
            found = next(filter(Path.exists, places), None)
            if found is None and names and not (name == "root" and os.environ.get("FEDSHIFT_DATA")):
                also = "".join(f", nor at {place}" for place in places[1:])
                raise UsageError(
                    f"the data of {self.run} were at {places[0]}, where there is nothing now{also}: say where they are "
                    "({})",
                    Ref(**{names[name]: "PATH"}),
                )
            values[name] = found and str(found)
        if values.get("weights"):
            places = self._list_places(values["weights"])
            values["weights"] = str(next(filter(Path.exists, places), places[0]))
        return values

    def _list_places(self, path: str) -> list[Path]:
        began, seen = self.directories
        moved = os.path.normpath(seen / os.path.relpath(began / path, began))
        return list(dict.fromkeys((began / path, Path(moved))))

    def add_code(self) -> None:
        """Make methods and models importable that are functions in the directory in which the run was begun."""
        if self.directories[0].is_dir() and (place := str(self.directories[0])) not in sys.path:
            sys.path.append(place)


def to_toml(values: Mapping[str, Any]) -> str:
    """Return settings as TOML, without None values and with mappings as tables at the end.

    Strings, numbers, booleans and lists of them are written as in JSON.
    """
    flat = "".join(
        f"{key} = {json.dumps(value, ensure_ascii=False)}\n"
        for key, value in values.items()
        if value is not None and not isinstance(value, Mapping)
    )
    tables = (f"\n[{key}]\n{to_toml(value)}" for key, value in values.items() if isinstance(value, Mapping))
    return flat + "".join(tables)


def format_settings(values: Mapping[str, Any], run: Path) -> str:
    """Return the content of the settings file of the run in directory ``run``.

    The recorded directory stays the one in which the run was begun, as long as that exists.
    """
    began = Path.cwd()
    with suppress(FedshiftError):  # a new run has no settings file
        began = read_run_settings(run).began
    place = {"directory": str(began), "from_here": os.path.relpath(began, run)}
    text = f"{to_toml(values)}\n[{WRITTEN}]\n{to_toml(place)}".rstrip("\n") + _CHECKSUM
    return f'{text}{zlib.crc32(text.encode()):08x}"\n'


def read_run_settings(run: Path) -> RunSettings:
    """Return the settings of the run in directory ``run``.

    Raises :class:`FedshiftError` if they are missing, damaged or edited.
    """
    path = run / FILE
    try:
        content = path.read_bytes()
        end = content.rfind(_CHECKSUM.encode()) + len(_CHECKSUM)
        if end < len(_CHECKSUM):
            raise ValueError("it has no checksum")
        if content[end:].rstrip(b"\n") != f'{zlib.crc32(content[:end]):08x}"'.encode():
            raise ValueError("its checksum does not match")
        values = tomllib.loads(content.decode())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FedshiftError(f"{path} is missing, which records what was run: {_FIX}") from error
    except (OSError, ValueError) as error:
        raise FedshiftError(f"{path} was edited or is damaged ({error}): {_FIX}") from error
    place = values.pop(WRITTEN)
    directories = Path(place["directory"]), Path(os.path.normpath(run.absolute() / place["from_here"]))
    return RunSettings(run=run, values=values, directories=directories)
