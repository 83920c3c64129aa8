"""Strict schemas for the sites' answers, since even a site with a valid key may send anything.

The JSON of an answer must match a schema exactly, and its counts must be possible for the site's number of samples.
Otherwise only that answer is refused, with a message that names the site.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from typing_extensions import TypedDict

from ...data.samples import Samples
from ...results.schema import Row
from ...tasks import Task
from ..messages import Exchange, RefusedMessage, refusing
from .descriptions import ONE_PIXEL

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
Count = Annotated[int, Field(ge=0, le=2**62)]
PLACE = {
    "client": str, "split": str, "model": Literal["personal", "global"],
    "moment": Literal["loaded", "trained", "reestimated"],
}  # fmt: skip
"""Columns that identify what a row measures; the others are counts."""


class Answer(BaseModel):
    """Facts of an answer of site ``name`` about ``round``, of a kind with records."""

    KIND: ClassVar[str]
    RECORDS: ClassVar[Set[str]]
    WORK: ClassVar[str]
    model_config = STRICT
    name: str
    round: Count

    @classmethod
    def of(cls, answer: Exchange, name: str, round: int) -> Self:
        """Return the facts of site ``name``'s answer about ``round``; raise :class:`RefusedMessage` for another."""
        identity = answer.kind, answer.facts.get("name"), answer.facts.get("round")
        if identity != (cls.KIND, name, round):
            raise RefusedMessage(
                f"it answered {identity[0]!r} as {identity[1]!r} for round {identity[2]} instead of {cls.KIND!r} as "
                f"{name!r} for round {round}"
            )
        if missing := cls.RECORDS - answer.arrays.keys():
            raise RefusedMessage(f"it sent no {' and no '.join(sorted(missing))} entries")
        if extra := answer.arrays.keys() - cls.RECORDS:
            raise RefusedMessage(f"it sent an unexpected record {min(extra)!r}")
        with refusing(f"its report of {cls.WORK} is malformed"):
            return cls.model_validate(dict(answer.facts))


class EvaluatedAnswer(Answer):
    """Measurements of a site after ``round``."""

    KIND, RECORDS, WORK = "evaluated", frozenset(), "measurements"
    rows: list[dict[str, Any]]


class TrainedAnswer(Answer):
    """Facts sent with an upload: the round's samples and steps, summed training loss, and measurements if requested.

    ``upload``: digest that later identifies the client's state at this upload.
    """

    KIND, RECORDS, WORK = "trained", frozenset({"shared", "memory"}), "training"
    weight: float
    steps: Count
    loss_sum: float
    upload: Annotated[str, Field(max_length=64)] = ""
    rows: list[dict[str, Any]] = []


class RowReader:
    """Parses measurements of ``task`` with ``outputs`` classes, labels or targets."""

    def __init__(self, task: Task, outputs: int) -> None:
        self.task = task
        blank = Samples(x=torch.zeros(1), y=task.make_blank_targets(1, ONE_PIXEL, outputs)).targets()
        counts = task.measure(torch.zeros(1, *task.output_shape(ONE_PIXEL, outputs)), blank, outputs)
        row = _make_schema({name: _type_like(value) for name, value in counts.items()} | PLACE)
        self._adapter: TypeAdapter[list[Row]] = TypeAdapter(list[row])  # type: ignore[valid-type]

    def read(self, rows: list[dict[str, Any]], name: str, sizes: Mapping[str, int], moment: str) -> list[Row]:
        """Return the measurements of site ``name`` at ``moment`` (``loaded``, ``trained`` or ``reestimated``).

        ``sizes``: number of samples in each split that the site had to measure. Raises :class:`RefusedMessage` if a row
        does not match the schema, is a duplicate, is for another client, split or moment, or has counts that are
        impossible for that number of samples, or if a split has no row.
        """
        with refusing("its report of measurements is malformed"):
            read = self._adapter.validate_python(rows)
            places = [(row["split"], row["model"]) for row in read]
            if len(set(places)) < len(places):
                raise RefusedMessage("it measured one model twice on the same samples")
            for row in read:
                self._check(row, name, sizes, moment)
            if missing := sizes.keys() - {split for split, _ in places}:
                raise RefusedMessage(f"it measured nothing on its {min(missing)} samples")
        return read

    def _check(self, row: Row, name: str, sizes: Mapping[str, int], moment: str) -> None:
        """Raise :class:`RefusedMessage` if ``row`` is not what :meth:`read` asked for."""
        place = {key: row[key] for key in PLACE}
        if (row["client"], row["moment"]) != (name, moment) or row["split"] not in sizes:
            raise RefusedMessage(f"it measured {place}, which was not requested")
        if moment != "loaded" and row["model"] != "personal":
            raise RefusedMessage(f"it measured the {row['model']} model, but {moment} models are personal")
        size, counts = sizes[row["split"]], {key: value for key, value in row.items() if key not in PLACE}
        if row["samples"] != size or not self.task.plausible(counts):
            raise RefusedMessage(f"its counts are impossible for its {size} samples: {counts}")


def _make_schema(fields: dict[str, Any]) -> Any:
    """Return the type of a dictionary that has exactly ``fields``, of these types."""
    schema = TypedDict("schema", fields)  # type: ignore[misc]
    schema.__pydantic_config__ = STRICT  # type: ignore[attr-defined]
    return schema


def _type_like(value: Any) -> Any:
    """Return the type for counts such as ``value``; None is an area under a curve, which may be undefined."""
    if isinstance(value, list):
        return Annotated[list[_type_like(value[0])], Field(min_length=len(value), max_length=len(value))]  # type: ignore[misc]
    if isinstance(value, dict):
        return _make_schema(dict.fromkeys(value, float | None))
    if value is None:
        return Annotated[float, Field(ge=0, le=1)] | None
    return Count if isinstance(value, int) else float
