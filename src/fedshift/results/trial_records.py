"""Records of a trial, checked against each other: measurements, the cost of each round, and the checkpoint's round.

A line of ``rounds.jsonl`` states how many lines its round has in ``metrics.jsonl``, and rounds are recorded before the
checkpoint that they lead to. Truncated or removed files, including a removed checkpoint, are therefore detected. Only
the round after the checkpoint's may be incomplete, after a crash; a resumed trial measures it again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..utils.checked_json import checksum, read_checked
from ..utils.errors import FedshiftError, Ref, Sentence
from .schema import RESTART, Row, stream_rows

METRICS, ROUNDS, CHECKPOINT, BEST = "metrics.jsonl", "rounds.jsonl", "checkpoint.safetensors", "best.safetensors"
"""Files of a trial: measurements, the cost of each round, the state after the last round and after the best round."""
CROSSED = {"loaded": "cross_site.json", "trained": "cross_site-trained.json"}
"""Files of a trial with measurements of each client's model on every client's test data, by moment, if requested."""
LAG = "statistics.json"
"""File of a trial with measurements at the reported round with re-estimated BatchNorm statistics."""
STOPPED = "stopped.json"
"""File of a trial that ended before the last planned round: its round, and why."""
FORMAT = 7
"""Format of checkpoints."""
ENTRY = "fedshift"
"""Name of the only entry of a checkpoint's header, JSON with format, checksums and facts."""


def read_rounds(folder: Path) -> list[Row]:
    """Return a row for each recorded round of the trial in ``folder``.

    Raises :class:`FedshiftError` naming the file where a line is damaged or missing.
    """
    rounds = list(stream_rows(folder / ROUNDS))
    for number, row in enumerate(rounds, start=1):
        if row["round"] != number:
            raise FedshiftError(f"{folder / ROUNDS}, line {number} is not of round {number}: {RESTART}")
    return rounds


def stream_measurements(folder: Path, rounds: Sequence[Row]) -> Iterator[Row]:
    """Yield the measurements of ``rounds``; raise :class:`FedshiftError` after the last where some are missing."""
    found = Counter[int]()
    for row in stream_rows(folder / METRICS, len(rounds)):
        found[row["round"]] += 1
        yield row
    for row in rounds:
        if found[row["round"]] != row["rows"]:
            raise FedshiftError(
                f"{folder / METRICS} holds {found[row['round']]} of {row['rows']} lines of round {row['round']}: "
                f"{RESTART}"
            )


def read_crossed(folder: Path) -> list[Row]:
    """Return the rows of cross-site validation of the trial in ``folder``, with ``round`` and ``moment``.

    Raises :class:`FedshiftError` if the file is damaged.
    """
    rows: list[Row] = []
    for moment, name in CROSSED.items():
        if (folder / name).exists():
            found = read_checked(folder / name, "remove it, and measure again (fedshift cross-site)")
            rows += [{**row, "round": found["round"], "moment": moment} for row in found["rows"]]
    return rows


def read_lag(folder: Path, *, required: bool = False) -> dict[str, Any] | None:
    """Return what :meth:`fedshift.experiments.trial.Trial.measure_lag` measured of the trial in ``folder``, or None.

    Rows have its ``round``. Raises :class:`FedshiftError` if the file is damaged, or missing and ``required``.
    """
    if not (required or (folder / LAG).exists()):
        return None
    again = Sentence("have it measured again without it (fedshift run or compare, {})", Ref(resume=True))
    found = read_checked(folder / LAG, again)
    return {**found, "rows": [{**row, "round": found["round"]} for row in found["rows"]]}


def is_lag_measured(folder: Path, round: int) -> bool:
    """Return whether ``folder`` has an undamaged :data:`LAG` after ``round``."""
    try:
        found = read_lag(folder)
    except FedshiftError:
        return False
    return found is not None and bool(found["round"] == round)


def read_stop(folder: Path, done: int) -> str:
    """Return why the trial in ``folder`` ended after ``done`` rounds, before the last planned one; empty if it did not.

    Raises :class:`FedshiftError` if the file is damaged.
    """
    if not (folder / STOPPED).exists():
        return ""
    found = read_checked(folder / STOPPED, "remove it: the trial then goes on")
    return str(found["reason"]) if found["round"] == done else ""  # of a round that a crash undid, it does not hold


def require_recorded(folder: Path, rounds: Sequence[Row], saved: int) -> None:
    """Raise :class:`FedshiftError` if ``rounds`` end before round ``saved``, the round of the trial's checkpoint."""
    if len(rounds) < saved:
        what = f"ends with round {len(rounds)}" if rounds else "holds no round"
        raise FedshiftError(f"{folder / ROUNDS} {what}, but round {saved} was done: {RESTART}")


def require_checkpoint(folder: Path) -> None:
    """Raise :class:`FedshiftError` if the trial in ``folder`` has records but no checkpoint."""
    if not (folder / CHECKPOINT).exists() and any((folder / name).exists() for name in (METRICS, ROUNDS)):
        raise FedshiftError(f"{folder / CHECKPOINT} is missing, but rounds are recorded next to it: {RESTART}")


def load_facts(path: Path) -> dict[str, Any]:
    """Return the facts of a checkpoint without reading its tensors; errors as in :func:`read_header`."""
    facts: dict[str, Any] = read_header(path)["facts"]
    return facts


def read_header(path: Path) -> Mapping[str, Any]:
    """Return the header of a checkpoint: format, checksum of the tensors, and facts.

    Raises :class:`FedshiftError` if the file is missing, has another format, or has a damaged header.
    """
    try:
        with path.open("rb") as file:
            size = min(int.from_bytes(file.read(8), "little"), path.stat().st_size)
            entries = json.loads(file.read(size))["__metadata__"]
        header: dict[str, Any] = entries if "format" in entries else json.loads(entries[ENTRY])
        if header["format"] != FORMAT:
            raise FedshiftError(f"checkpoint {path} was written by another version of fedshift: {RESTART}")
        if header["facts_checksum"] != checksum_facts(header["facts"]):
            raise ValueError("the checksum of its header does not match")
    except FileNotFoundError as error:
        raise FedshiftError(
            f"no checkpoint at {path}: the run ended earlier (continue it with {{}}), or the file was removed: "
            f"{RESTART}",
            Ref(resume=True),
        ) from error
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise damaged_checkpoint(path, error) from error
    return header


def checksum_facts(facts: Mapping[str, Any]) -> str:
    """Return the checksum of a checkpoint's facts."""
    return checksum(json.dumps(facts, sort_keys=True).encode())


def damaged_checkpoint(path: Path, error: Exception) -> FedshiftError:
    """Return the error for a checkpoint that cannot be read."""
    return FedshiftError(f"checkpoint {path} is corrupt or truncated ({error}): {RESTART}")
