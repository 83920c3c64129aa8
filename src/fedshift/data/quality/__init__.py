"""Whether a federation's data can be trusted: faults that training would hide, each with its numbers and what to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..federation import Federation
from .classes import judge_classes, judge_labels, judge_names, judge_test_sizes
from .copies import judge_copies
from .finding import SEVERITIES, Finding, Place, Severity
from .survey import Survey, measure
from .values import judge_constant, judge_form, judge_scale, judge_values

__all__ = ["Finding", "Held", "Place", "Quality", "Severity", "Survey", "examine", "measure"]


@dataclass(frozen=True, kw_only=True)
class Held:
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
    held: tuple[Held, ...]
    findings: tuple[Finding, ...]

    def of(self, severity: Severity) -> tuple[Finding, ...]:
        """The findings of one severity."""
        return tuple(finding for finding in self.findings if finding.severity == severity)

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON can hold it."""
        return asdict(self)


def examine(data: Federation) -> Quality:
    """Read every sample of ``data`` once and say what is wrong.

    What :meth:`Federation.check` refuses one by one is found too, so that a person sees all faults together.
    """
    surveys = measure(data)
    findings = [
        *judge_labels(data, surveys),
        *judge_values(surveys),
        *judge_form(surveys),
        *judge_copies(surveys),
        *judge_constant(surveys),
        *judge_scale(surveys),
        *judge_names(data),
        *judge_classes(data, surveys),
        *judge_test_sizes(surveys),
    ]
    return Quality(
        name=data.name,
        classes=data.classes,
        held=tuple(
            Held(
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
