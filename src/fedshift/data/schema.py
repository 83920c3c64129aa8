"""What a federation's samples and targets mean, without any sample: enough to read others' data in the same way.

A trained model identifies an input by its position and a class by its number. Clients that join a run, sites of a
deployment and users of an exported model therefore need columns, categories and classes in the run's order, and samples
prepared as the run's were.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from ..tasks import CLASSIFICATION, Task
from ..utils.errors import UsageError
from .columns import Column
from .preparation import Preparation

if TYPE_CHECKING:
    from .federation import Federation


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Targets and columns of the data called ``name`` in messages.

    Attributes:
        task: The prediction task.
        classes: Number of classes, labels or targets; 0: not known.
        class_names: Meaning of the labels 0, 1, ...; empty if unknown.
        columns: Encodings of a table's columns, in the order of the inputs; empty if unknown.
        only: Names of the columns of a table that may be inputs; None: all without another role.

    """

    name: str
    task: Task = CLASSIFICATION
    classes: int = 0
    class_names: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ()
    only: tuple[str, ...] | None = None

    @property
    def meanings(self) -> tuple[str, ...]:
        """Meaning of the labels 0, 1, ...; for a table without class names, the numbers themselves."""
        return self.class_names or (tuple(map(str, range(self.classes))) if self.columns else ())

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the classes, labels or targets, or their numbers if they have no names."""
        return self.meanings or tuple(map(str, range(self.classes)))

    def require_columns(self, data: Federation, whose: str) -> None:
        """Refuse ``data`` without these columns and categories in this order; ``whose``: their owner, for errors."""
        if self.columns and data.columns != self.columns:
            pairs = zip_longest(data.columns, self.columns)
            found, wanted = next((found, wanted) for found, wanted in pairs if found != wanted)
            raise UsageError(
                f"{data.name} lacks the columns and categories of {whose} in their order: first {found or 'nothing'} "
                f"where {wanted or 'nothing'} belongs. Read it by those: read_folder(..., schema=data.schema)"
            )


@dataclass(frozen=True, kw_only=True)
class Schema(Layout):
    """A layout with the ``preparation`` that turns samples into inputs."""

    preparation: Preparation
