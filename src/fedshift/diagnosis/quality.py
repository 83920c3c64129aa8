"""Quality check of a federation's data before training: all faults that training would hide."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from ..data.federation import Federation
from ..tasks import Classification
from ..utils.errors import Ref, UsageError
from ..utils.files import cached_measurement
from ..utils.version import find_newest_source
from .faults import (
    judge_classes,
    judge_duplicates,
    judge_form,
    judge_grids,
    judge_groups,
    judge_labels,
    judge_masks,
    judge_names,
    judge_numbering,
    judge_reading,
    judge_scales,
    judge_targets,
    judge_test_sizes,
    judge_values,
)
from .findings import SEVERITIES, QualityFinding, Severity
from .label_leaks import judge_leaks
from .number_faults import (
    judge_constant,
    judge_numbers,
    judge_row_numbers,
    judge_scale,
    judge_units,
    name_features,
)
from .survey import survey_splits


@dataclass(frozen=True, kw_only=True)
class SplitSummary:
    """Contents of one split of one client; ``per_class`` counts the samples (in masks: pixels) of classes 0, 1, ..."""

    client: str
    split: str
    samples: int
    per_class: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Findings of :func:`examine`, errors first."""

    name: str
    classes: int
    splits: tuple[SplitSummary, ...]
    findings: tuple[QualityFinding, ...]

    def of(self, severity: Severity) -> tuple[QualityFinding, ...]:
        """Return the findings of one severity."""
        return tuple(finding for finding in self.findings if finding.severity == severity)

    def as_dict(self) -> dict[str, Any]:
        """Return the findings as JSON-compatible values."""
        return asdict(self)


def examine(data: Federation) -> Quality:
    """Read every sample of ``data`` once and report all faults.

    This includes the faults that :meth:`Federation.check` raises one at a time, so that they are reported together.
    Values of several inputs are not compared, column by column.
    """
    surveys, names = survey_splits(data), name_features(data)
    classified = isinstance(data.task, Classification)
    targets = (split.y for client in data.clients for split in client.splits.values())
    scales = [] if data.inputs else list(judge_scale(surveys, names))
    findings = [
        *judge_reading(data),
        *judge_grids(data),
        *judge_masks(data),
        *judge_labels(data, surveys),
        *judge_values(surveys, names),
        *judge_form(surveys),
        *judge_scales(data),
        *judge_duplicates(data, surveys),
        *(() if data.inputs else judge_constant(surveys, names)),
        *scales,
        *judge_names(data),
        *judge_groups(data),
        *(() if data.inputs or any(each.kind == "units" for each in scales) else judge_units(data, surveys)),
        *judge_numbers(data),
        *judge_row_numbers(data),
        *judge_leaks(data),
        *(judge_numbering(data, surveys) if classified else ()),
        *(judge_classes(data, surveys) if classified else judge_targets(data, surveys)),
        *judge_test_sizes(data),
    ]
    return Quality(
        name=data.name,
        classes=data.classes,
        splits=tuple(
            SplitSummary(
                client=part.client,
                split=part.split,
                samples=len(part.labels),
                per_class=tuple(
                    (part.counts(data.classes) if classified else data.task.count_classes(y, data.classes)).tolist()
                ),
                shape=part.shape,
                dtype=part.dtype,
            )
            for part, y in zip(surveys, targets, strict=True)
        ),
        findings=tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))),
    )


def find_errors(data: Federation) -> tuple[str, ...]:
    """Return the errors of :func:`examine` that do not keep a run from starting, one sentence each.

    :meth:`Federation.check` raises the other errors. Samples are read once, without statistics, and the result is
    cached on this machine for the same data; lazy samples are not read.
    """

    def find_copies() -> dict[str, list[str]]:
        found = judge_duplicates(data, survey_splits(data, statistics=False))
        return {"errors": [finding.text for finding in found if finding.severity == "error"]}

    copies = []
    if not data.lazy:
        copies = cached_measurement("checks.json", (data.fingerprint, find_newest_source()), find_copies)["errors"]
    found = (*judge_reading(data), *judge_names(data), *judge_groups(data))
    return (*(finding.text for finding in found if finding.severity == "error"), *copies)


def check_data(data: Federation, choice: Literal["refuse", "warn", "ignore"] | None) -> Federation:
    """Check ``data`` for errors before they are used, and return them with a notice about these.

    ``choice``: ``refuse`` raises :class:`UsageError` if there are errors, ``warn`` or None adds a line about them, and
    ``ignore`` skips the check and adds only the faults that were noticed when the data were read.
    """
    if choice == "ignore":
        return _add_notices(data, data.faults)
    errors = find_errors(data)
    judged = (*judge_numbers(data), *judge_leaks(data))
    told = tuple(f"{each.text} {each.fix}" for each in judged if each.kind in ("far", "target-units", "leak"))
    if not errors:
        return _add_notices(data, told)
    message = f"{len(errors)} error{'s' * (len(errors) > 1)} in the data: {' '.join(errors)}"
    if choice == "refuse":
        raise UsageError(
            f"{message} Correct them (`fedshift data check` shows how), or continue anyway ({{}})",
            Ref(on_data_error="warn"),
        )
    advice = "`fedshift data check` shows how to correct them; --on-data-error refuse stops a run that has any"
    return _add_notices(data, (f"{message} {advice}", *told))


def _add_notices(data: Federation, more: Iterable[str]) -> Federation:
    """Return ``data`` with ``more`` notices, each once."""
    return replace(data, notices=tuple(dict.fromkeys((*data.notices, *more))))
