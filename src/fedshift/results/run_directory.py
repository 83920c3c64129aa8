"""The run directory: the files of a comparison, and a lock against use by two programs.

config.toml          settings as resolved          environment.json    versions and machine
study.json           methods, clients, notices     samples.npz         a few images of each client
trials/<method>-seed<k>/
    metrics.jsonl    measurements (fedshift.results.schema)
    rounds.jsonl     participants, bytes and seconds of each round
    checkpoint.safetensors, best.safetensors
    clients-<round>.states    states of clients, which checkpoints refer to (fedshift.experiments.client_store)
report.html, figures/, tables/
logs/                local stores of loggers (fedshift.experiments.loggers)
machines/            participants and logs of a run across machines (fedshift.flower)
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..config.settings_file import FILE, format_settings
from ..utils.checked_json import dump_checked, write_checked
from ..utils.errors import FedshiftError, Ref, UsageError
from ..utils.files import disk_error, write_atomically
from ..utils.version import __version__
from .schema import Row, stream_rows

LOCK, OWNER = ".lock", ".owner"
"""The lock file, which the operating system releases when its process dies, and the file with its process id."""
TRIALS = "trials"
"""Folder of the trials."""
MACHINES, POPULATION = "machines", "population.json"
"""Folder of a run across machines: its participants, and the logs of the connecting programs."""
BEFORE = frozenset((LOCK, OWNER, MACHINES, f"{FILE}.tmp"))
"""Entries that may exist before a run's settings are written; the last one if writing them was interrupted."""


def was_served(run: Path) -> bool:
    """Return whether the run in directory ``run`` was across machines, by `fedshift serve`."""
    return (run / MACHINES / POPULATION).is_file()


class RunDirectory:
    """The directory ``path``, locked against other programs until :meth:`close`."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        holds_run = (path / FILE).exists()
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path} is a file: choose another directory ({{}})", Ref("out"))
        if resume and not holds_run:
            raise UsageError(f"{path} holds no run to resume: give the directory that holds its config.toml")
        if holds_run and not resume:
            raise UsageError(
                f"{path} already holds a run: continue it ({{}}), or choose another directory ({{}})",
                Ref(resume=path),
                Ref("out"),
            )
        if path.is_dir() and not resume and any(entry.name not in BEFORE for entry in path.iterdir()):
            raise UsageError(f"{path} holds other files: choose a directory that is new or empty ({{}})", Ref("out"))
        try:
            self._lock = acquire_lock(path)
        except OSError as error:
            raise disk_error(path, error) from error

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()

    def write(self, name: str, content: str | bytes) -> None:
        """Write a file of the directory atomically."""
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, content.encode() if isinstance(content, str) else content)

    def write_settings(self, values: Mapping[str, Any]) -> None:
        """Write the settings of the run."""
        self.write(FILE, format_settings(values, self.path))

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a JSON file of the directory atomically, with a checksum."""
        write_checked(self.path / name, value)


def acquire_lock(path: Path) -> FileLock:
    """Return the lock of directory ``path``, created if needed, held until it is released or the process ends.

    Raises :class:`FedshiftError` naming the process that holds it, and ``OSError`` if nothing can be written.
    """
    lock, owner = FileLock(path / LOCK), path / OWNER
    path.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        who = owner.read_text(encoding="utf-8") if owner.exists() else "unknown"
        raise FedshiftError(f"{path} is in use by process {who}: wait for it, or name another directory") from error
    owner.write_text(str(os.getpid()), encoding="utf-8")
    return lock


def is_in_use(path: Path) -> bool:
    """Return whether a program holds the lock of directory ``path``, without taking the lock or writing anything."""
    try:
        with (path / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def trial_folder(path: Path, method: str, seed: int) -> Path:
    """Return the folder of one trial in run directory ``path``."""
    return path / TRIALS / f"{to_file_name(method)}-seed{seed}"


def to_file_name(name: str) -> str:
    """Return ``name`` as a file name: letters, digits, dots, plus and equals signs are kept, others become dashes."""
    return re.sub(r"[^A-Za-z0-9.+=]+", "-", name).strip("-")


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Append JSON lines with checksums and flush them to disk."""
    try:
        with path.open("a", encoding="utf-8") as file:
            finite = ({key: None if value != value else value for key, value in row.items()} for row in rows)  # NaN
            file.writelines(dump_checked(row) + "\n" for row in finite)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise disk_error(path, error) from error


def cut_rows(path: Path, last_round: int) -> None:
    """Remove the rows of rounds after ``last_round``, which a resumed trial measures again, and an incomplete line."""
    content = "".join(dump_checked(row) + "\n" for row in stream_rows(path, last_round)).encode()
    if path.exists() and path.stat().st_size != len(content):
        write_atomically(path, content)


def describe_environment() -> dict[str, Any]:
    """Return the versions and the machine of a run."""
    import torch

    packages = ("torch", "numpy", "scikit-learn", "pandas", "safetensors")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "packages": {"fedshift": __version__, **{name: version(name) for name in packages}},
    }
