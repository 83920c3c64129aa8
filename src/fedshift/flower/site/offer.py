"""Offers: a site names its data, the columns that may be predicted and read, and what a description contains.

A coordinator's settings can ask for less, or for the same by name, but never for another column: whoever names the
target of a table decides which values leave as names of classes.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ...config.spec import DataSpec
from ...data.federation import Federation
from ...data.files.table_schema import feature_slices
from ...tasks import CLASSIFICATION
from ...utils.errors import UsageError
from ..transport.arrays import RefusedMessage

Spec = TypeVar("Spec", bound=DataSpec)
STRICT = ConfigDict(extra="forbid", strict=True, frozen=True)
NAMES = frozenset(
    {"patient", "patients", "subject", "person", "name", "names", "surname", "forename", "firstname", "lastname",
     "fullname", "patientname", "email", "phone", "telephone", "address", "birthday", "birthdate", "dateofbirth", "dob",
     "pseudonym", "passport", "insurance"}
)  # fmt: skip
"""Names of columns that identify people, without spaces, signs and capitals."""
ENDINGS = frozenset({"id", "ids", "identifier", "uuid", "guid", "mrn", "ssn"})
"""Last words of such names, unless the word before is one of :data:`KINDS`."""
KINDS = frozenset({"class", "label", "category", "target", "outcome", "diagnosis"})


class Offer(BaseModel):
    """The data that a site offers, and the columns of a table that have a role; names must equal the settings'.

    Attributes:
        path: the data, as ``join --data``.
        target: column to predict; for several labels or numbers, columns separated by commas.
        columns: columns of a table that a model may see; by default all without a role.
        groups: what never leaves and keeps samples of one patient together: a column, or a pattern of files' names.
        split_column: column with train, validation or test.
        client_column: column with the site's name.
        task: prediction task, without arguments; by default the task of the data, for a table classification.

    """

    model_config = STRICT
    path: str | None = None
    target: str | None = None
    columns: Annotated[list[str] | None, Field(min_length=1)] = None
    groups: str | None = None
    split_column: str | None = None
    client_column: str | None = None
    task: str | None = None

    @model_validator(mode="after")
    def _refuse_identifiers(self) -> Offer:
        for name in (part.strip() for part in (self.target or "").split(",") if part.strip()):
            if is_identifier(name) or name in (self.groups, self.client_column, self.split_column):
                raise ValueError(
                    f"target {name!r} identifies patients or parts of the data, and a target's values leave the site "
                    "as names of classes: offer another column, or give this one a name that describes its content"
                )
            if self.columns and name in self.columns:
                raise ValueError(f"column {name!r} is the target: leave it out of columns")
        return self

    def apply(self, spec: Spec, *, table: bool) -> Spec:
        """Return settings with the site's own columns; raise :class:`RefusedMessage` naming what is not offered.

        ``table``: whether the data are a table, whose task must be offered too.
        """
        for key in ("target", "groups", "split_column", "client_column"):
            asked, offered = getattr(spec, key), getattr(self, key)
            if asked is not None and asked != offered:
                what = f"offers {key} {offered!r}" if offered else f"offers no {key}"
                raise RefusedMessage(
                    f"this site {what}, and {asked!r} was asked for: agree on it, and have the site offer it "
                    f"([data] {key} in its policy)"
                )
            spec = replace(spec, **{key: offered})
        asked = spec.task and spec.task.partition("(")[0].strip()
        if asked and asked != (self.task or (str(CLASSIFICATION) if table else asked)):
            raise RefusedMessage(
                f"this site offers task {self.task or str(CLASSIFICATION)!r}, and {asked!r} was asked for: have the "
                "site offer it ([data] task in its policy)"
            )
        return spec if asked else replace(spec, task=self.task)


class Told(BaseModel):
    """Contents of a description of the offered data.

    Attributes:
        class_counts: numbers of training samples by class, for losses with weights from them.
        round_to: these numbers are rounded down to multiples of this one; the rest counts to the most frequent class.
        fewest: a class, or a category of text, with fewer samples at this site is not disclosed: its data are refused.

    """

    model_config = STRICT
    class_counts: bool = True
    round_to: Annotated[int, Field(ge=1)] = 1
    fewest: Annotated[int, Field(ge=1)] = 1

    def round_counts(self, counts: list[int]) -> list[int]:
        """Round the numbers of training samples by class before they are disclosed; their sum stays the same."""
        rounded = [number - number % self.round_to for number in counts]
        most = counts.index(max(counts))
        rounded[most] += sum(counts) - sum(rounded)
        return rounded

    def describe_counts(self) -> str:
        """Describe the precision of disclosed numbers by class."""
        return "exact" if self.round_to == 1 else f"rounded down to multiples of {self.round_to}"

    def check(self, data: Federation) -> None:
        """Raise :class:`UsageError` naming a class or category that describes too few samples of ``data``."""
        if self.fewest == 1:
            return
        (client,) = data.clients
        found: dict[str, int] = {}
        if data.task == CLASSIFICATION:
            for part, split in client.splits.items():
                counts = data.task.count_classes(split.y, data.classes).tolist()
                names = data.meanings or tuple(map(str, range(data.classes)))
                found |= {f"class {names[k]!r} of the {part} data": number for k, number in enumerate(counts)}
        for column, span in feature_slices(data.columns) if data.columns else ():
            for place, category in enumerate(column.categories or ()):
                at = span.start + place
                number = sum(int((split.read(slice(None))[:, at] > 0.5).sum()) for split in client.splits.values())
                found[f"{category!r} in column {column.name!r}"] = number
        rare = {what: number for what, number in found.items() if 0 < number < self.fewest}
        for what, number in rare.items():
            raise UsageError(
                f"{what} has {number} samples, and this site discloses at least {self.fewest} ([told] fewest): group "
                "rare values, or leave them out"
            )


def is_identifier(column: str) -> bool:
    """Return whether ``column`` is named like what identifies patients, such as ``patient_id`` or ``Surname``."""
    words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", column).lower())
    named = words[-1:] and words[-1] in ENDINGS and not (len(words) > 1 and words[-2] in KINDS)
    return bool(named) or "".join(words) in NAMES


def refuse_identifying_classes(data: Federation) -> None:
    """Raise :class:`UsageError` if the names of classes would name single samples rather than kinds of them."""
    (client,) = data.clients
    if data.task != CLASSIFICATION or not data.meanings:
        return
    whole = {label for split in client.splits.values() for label in split.y.tolist()}
    kinds, samples = len(whole), sum(map(len, client.splits.values()))
    if kinds > 2 and 2 * kinds > samples:
        raise UsageError(
            f"the target has {kinds} different values in {samples} samples, so it is an identifier, and the list of "
            "them would leave this site: offer another target, or group its values"
        )
