"""Whether a federation's data can be trusted: faults that training would hide, each with its numbers and what to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ...data.federation import Federation
from .classes import judge_classes, judge_labels, judge_names, judge_test_sizes
from .duplicates import judge_duplicates
from .findings import SEVERITIES, QualityFinding, SampleLocation, Severity
from .survey import SplitSurvey, survey_splits
from .values import judge_constant, judge_form, judge_scale, judge_values

__all__ = [
    "Quality",
    "QualityFinding",
    "SampleLocation",
    "Severity",
    "SplitSummary",
    "SplitSurvey",
    "examine",
    "survey_splits",
]


@dataclass(frozen=True, kw_only=True)
class SplitSummary:
    """What one split of one client holds; ``per_class`` counts the samples of labels 0, 1, ..."""

    client: str
    split: str
    samples: int
    per_class: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Quality:
    """What :func:`examine` found, errors first."""

    name: str
    classes: int
    splits: tuple[SplitSummary, ...]
    findings: tuple[QualityFinding, ...]

    def of(self, severity: Severity) -> tuple[QualityFinding, ...]:
        """The findings of one severity."""
        return tuple(finding for finding in self.findings if finding.severity == severity)

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON can hold it."""
        return asdict(self)


def examine(data: Federation) -> Quality:
    """Read every sample of ``data`` once and say what is wrong.

    What :meth:`Federation.check` refuses one by one is found too, so that a person sees all faults together.
    """
    surveys = survey_splits(data)
    findings = [
        *judge_labels(data, surveys),
        *judge_values(surveys),
        *judge_form(surveys),
        *judge_duplicates(surveys),
        *judge_constant(surveys),
        *judge_scale(surveys),
        *judge_names(data),
        *judge_classes(data, surveys),
        *judge_test_sizes(surveys),
    ]
    return Quality(
        name=data.name,
        classes=data.classes,
        splits=tuple(
            SplitSummary(
                client=part.client,
                split=part.split,
                samples=len(part.labels),
                per_class=tuple(part.counts(data.classes).tolist()),
                shape=part.shape,
                dtype=part.dtype,
            )
            for part in surveys
        ),
        findings=tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))),
    )
