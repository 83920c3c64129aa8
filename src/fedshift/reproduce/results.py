"""Results of reproduced tables, stored with the runs as ``results/<paper>/<table>-<block>.json``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from ..config.spec import RunSpec
from ..experiments.run_queue import read_outcome
from ..results.run_directory import LOCK, OWNER
from ..utils.checked_json import read_checked, write_checked
from ..utils.errors import UsageError
from .published_tables import PICTURES, Block, Table
from .recipes import ReproductionOptions, run_name

KNOWN = frozenset(("index.html", "results", "runs", LOCK, OWNER))
"""Names of the entries in the directory of runs and results."""
REMOVE = "remove it and give the same command again, which keeps the runs"
"""Remedy for a stored result that cannot be used."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Results of finished runs for a ``block`` of a ``table``, or (:data:`.PICTURES`) for its pictures.

    ``values``: by row and column, one for each seed, NaN if missing; ``pictures``: descriptions by name of the file in
    the paper's folder. ``notes`` describe substitutes for the paper's data and network (which are then not its ``own``)
    and omitted clients; ``missing`` lists data without a substitute. ``shown`` maps replaced clients to their
    substitutes. ``unfinished``: how many runs have finished, if not all have.
    """

    table: Table
    block: Block
    options: ReproductionOptions
    values: Mapping[tuple[int, int], tuple[float, ...]] = field(default_factory=dict)
    pictures: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    shown: Mapping[str, str] = field(default_factory=dict)
    own: bool = True
    unfinished: str = ""

    @property
    def is_faithful(self) -> bool:
        """Return whether network, data and rounds are the paper's, so that numbers and not only methods compare."""
        return self.own and not self.notes and self.options.scale == 1

    @property
    def remarks(self) -> list[str]:
        """Sentences about substitutes, or about smaller data of the paper's, and about missing data."""
        sentences = [f"{'Data' if self.own else 'Stand-in'}: {note}." for note in self.notes]
        return [*sentences, *(f"Left out: {data}, which is missing and has no substitute." for data in self.missing)]


def run_folder(spec: RunSpec, directory: Path) -> Path:
    """Return the folder in ``directory`` for the run of ``spec``."""
    return directory / "runs" / run_name(spec)


def pending_runs(specs: Iterable[RunSpec], directory: Path) -> list[RunSpec]:
    """Return the runs in ``specs`` that have not finished in ``directory``."""
    return [spec for spec in specs if read_outcome(run_folder(spec, directory), {}) is None]


def write_result(result: Result, directory: Path) -> None:
    """Store ``result`` in ``directory``."""
    path = _result_path(result.table, result.block, directory)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {each.name: getattr(result, each.name) for each in fields(result) if each.name not in ("table", "block")}
    record["options"] = {**asdict(result.options), "root": str(result.options.root)}
    record["values"] = [
        [*cell, [None if math.isnan(value) else value for value in seeds]] for cell, seeds in result.values.items()
    ]
    write_checked(path, record)


def read_result(table: Table, block: Block, directory: Path) -> Result | None:
    """Return the stored result of ``block``, or None.

    Raises :class:`FedshiftError` if it is damaged or has other rows or columns than the table.
    """
    path = _result_path(table, block, directory)
    if not path.exists():
        return None
    record = read_checked(path, REMOVE)
    values = {
        (row, column): tuple(math.nan if value is None else value for value in seeds)
        for row, column, seeds in record["values"]
    }
    rows, columns = len(block.rows), len(block.columns)
    for row, column in values:
        if row >= rows or column >= columns:
            raise UsageError(
                f"{path} has a number in row {row + 1}, column {column + 1} of a table of {rows} x {columns}: "
                f"another version of fedshift wrote it; {REMOVE}"
            )
    options = ReproductionOptions(**{**record["options"], "root": Path(record["options"]["root"])})
    lists = {name: tuple(record[name]) for name in ("notes", "missing")}
    return Result(table=table, block=block, **{**record, **lists, "options": options, "values": values})


def read_results(table: Table, directory: Path) -> list[Result]:
    """Return the results of ``table`` in ``directory`` that have numbers or pictures, or lack nothing."""
    stored = (read_result(table, block, directory) for block in (*table.blocks, PICTURES))
    return [result for result in stored if result and (result.values or result.pictures or not result.unfinished)]


def _result_path(table: Table, block: Block, directory: Path) -> Path:
    name = "pictures" if block is PICTURES else table.blocks.index(block)
    return directory / "results" / table.paper / f"{table.name}-{name}.json"
