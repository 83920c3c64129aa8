"""Strict schemas for the sites' answers, since even a site with a valid key may send anything.

The JSON of an answer must match a schema exactly, and its counts must be possible for the site's number of samples.
Otherwise only that answer is refused, with a message that names the site.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from ...data.samples import Samples
from ...results.schema import Row
from ...tasks import Task
from ...utils.errors import FedshiftError
from ..transport.arrays import RefusedMessage
from .registry import ONE_PIXEL

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
MOST_COUNT = 2**62
"""Largest integer that an answer may contain."""
PLACE = ("client", "split", "model", "moment")
"""Columns that identify what a row measures; the others are counts."""
MOST_SHOWN = 3
"""Maximum number of an answer's faults to list in a message."""
Count = Annotated[int, Field(ge=0, le=MOST_COUNT)]
Share = Annotated[float, Field(ge=0, le=1)]


class TrainedAnswer(BaseModel):
    """Facts sent with an upload: the round's samples and steps, summed training loss, and measurements if requested.

    ``upload``: digest that later identifies the client's state at this upload.
    """

    model_config = STRICT
    name: str
    round: Count
    weight: float
    steps: Count
    loss_sum: float
    upload: Annotated[str, Field(max_length=64)] = ""
    rows: list[dict[str, Any]] = []


class EvaluatedAnswer(BaseModel):
    """Measurements of a site."""

    model_config = STRICT
    name: str
    round: Count
    rows: list[dict[str, Any]]


def read_trained(facts: Mapping[str, Any]) -> TrainedAnswer:
    """Parse a site's report of its training; raise :class:`RefusedMessage` if it does not match the schema."""
    with refusing("its report of training is malformed"):
        return TrainedAnswer.model_validate(dict(facts))


def read_evaluated(facts: Mapping[str, Any]) -> EvaluatedAnswer:
    """Parse a site's report of its measurements; raise :class:`RefusedMessage` if it does not match the schema."""
    with refusing("its report of measurements is malformed"):
        return EvaluatedAnswer.model_validate(dict(facts))


class RowReader:
    """Parses measurements of ``task`` with ``outputs`` classes, labels or targets."""

    def __init__(self, task: Task, outputs: int) -> None:
        self.task = task
        blank = Samples(x=torch.zeros(1), y=task.make_blank_targets(1, ONE_PIXEL, outputs)).targets()
        counts = task.measure(torch.zeros(1, *task.output_shape(ONE_PIXEL, outputs)), blank, outputs)
        fields: dict[str, Any] = {name: _type_like(value) for name, value in counts.items()}
        fields |= dict(
            zip(
                PLACE,
                (str, str, Literal["personal", "global"], Literal["loaded", "trained", "reestimated"]),
                strict=True,
            )
        )
        measurement = TypedDict("measurement", fields)  # type: ignore[misc]
        measurement.__pydantic_config__ = STRICT  # type: ignore[attr-defined]
        self._adapter: TypeAdapter[list[Row]] = TypeAdapter(list[measurement])  # type: ignore[arg-type]

    def read(self, rows: list[dict[str, Any]], name: str, sizes: Mapping[str, int], moment: str) -> list[Row]:
        """Return the measurements of site ``name`` at ``moment``.

        Args:
            rows: rows of the answer.
            name: the client's name.
            sizes: number of samples in each split that the site had to measure.
            moment: ``loaded``, ``trained`` or ``reestimated``.

        Raises:
            RefusedMessage: A row does not match the schema, is a duplicate, is for another client, split or moment, or
                has counts that are impossible for that number of samples; or a split has no row.

        """
        with refusing("its report of measurements is malformed"):
            read = self._adapter.validate_python(rows)
            places = [(row["split"], row["model"]) for row in read]
            if len(set(places)) < len(places):
                raise RefusedMessage("it measured one model twice on the same samples")
            for row in read:
                place = {key: row[key] for key in PLACE}
                if (row["client"], row["moment"]) != (name, moment) or row["split"] not in sizes:
                    raise RefusedMessage(f"it measured {place}, which was not requested")
                if moment != "loaded" and row["model"] != "personal":
                    raise RefusedMessage(f"it measured the {row['model']} model, but {moment} models are personal")
                size = sizes[row["split"]]
                counts = {key: value for key, value in row.items() if key not in PLACE}
                if row["samples"] != size or not self.task.may_have(counts):
                    raise RefusedMessage(f"its counts are impossible for its {size} samples: {counts}")
            if missing := sizes.keys() - {split for split, _ in places}:
                raise RefusedMessage(f"it measured nothing on its {min(missing)} samples")
        return read


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn any exception while an answer is parsed into a :class:`RefusedMessage` that begins with ``what``."""
    try:
        yield
    except FedshiftError:
        raise
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        why = "; ".join(f"{'.'.join(map(str, each['loc']))!r}: {each['msg']}" for each in faults[:MOST_SHOWN])
        raise RefusedMessage(f"{what} ({why}{'; ...' if len(faults) > MOST_SHOWN else ''})") from error
    except Exception as error:
        raise RefusedMessage(f"{what} ({type(error).__name__}: {error})") from error


def _type_like(value: Any) -> Any:
    """Return the type for counts such as ``value``; None is an area under a curve, which may be undefined."""
    if isinstance(value, list):
        return Annotated[list[_type_like(value[0])], Field(min_length=len(value), max_length=len(value))]  # type: ignore[misc]
    if value is None:
        return Share | None
    if isinstance(value, dict):
        made = TypedDict("on_request", dict.fromkeys(value, float | None))  # type: ignore[misc]
        made.__pydantic_config__ = STRICT  # type: ignore[attr-defined]
        return made
    return Count if isinstance(value, int) else float
