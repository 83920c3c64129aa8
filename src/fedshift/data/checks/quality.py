"""Quality check of a federation's data before training: all faults that training would hide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from torch import Tensor

from ...tasks import Classification
from ...utils.errors import Ref, UsageError
from ...utils.files import cached_measurement
from ...utils.version import find_newest_source
from ..federation import Federation
from . import faults, number_faults
from .duplicates import judge_duplicates
from .findings import FIXES, Finding, Severity
from .label_leaks import judge_leaks
from .survey import SplitSurvey, survey_splits


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Findings of :func:`examine`, errors first, and the ``splits`` of each client.

    A split has keys ``client``, ``split``, ``samples``, ``shape``, ``dtype`` and ``per_class``, which counts the
    samples (in masks: pixels) of classes 0, 1, ...
    """

    name: str
    classes: int
    splits: tuple[Mapping[str, Any], ...]
    findings: tuple[Finding, ...]

    def of(self, severity: Severity) -> tuple[Finding, ...]:
        """Return the findings of one severity."""
        return tuple(finding for finding in self.findings if finding.severity == severity)

    def as_dict(self) -> dict[str, Any]:
        """Return the findings as JSON-compatible values."""
        return asdict(self)


def examine(data: Federation) -> Quality:
    """Read every sample of ``data`` once and report all faults that loading and :meth:`Federation.check` do not.

    Values of several inputs are not compared, column by column.
    """
    surveys, names = survey_splits(data), number_faults.list_features(data)
    targets = [split.y for client in data.clients for split in client.splits.values()]
    findings = [
        *faults.judge_reading(data),
        *faults.judge_masks(data),
        *faults.judge_values(surveys, names),
        *faults.judge_ranges(data),
        *judge_duplicates(data, surveys),
        *([] if data.inputs else number_faults.judge_features(data, surveys, names)),
        *faults.judge_names(data),
        *faults.judge_groups(data),
        *number_faults.judge_numbers(data),
        *number_faults.judge_row_numbers(data),
        *judge_leaks(data),
        *faults.judge_numbering(data, surveys),
        *faults.judge_classes(data, surveys),
        *faults.judge_empty_masks(data, surveys),
        *faults.judge_test_sizes(data),
    ]
    splits = (_summarize(data, part, y) for part, y in zip(surveys, targets, strict=True))
    worst_first = sorted(findings, key=lambda finding: list(FIXES).index(finding.severity))
    return Quality(name=data.name, classes=data.classes, splits=tuple(splits), findings=tuple(worst_first))


def _summarize(data: Federation, part: SplitSurvey, y: Tensor) -> dict[str, Any]:
    classified = isinstance(data.task, Classification)
    counts = part.counts(data.classes) if classified else data.task.count_classes(y, data.classes)
    return {
        "client": part.client, "split": part.split, "samples": len(part.labels), "per_class": tuple(counts.tolist()),
        "shape": part.shape, "dtype": part.dtype,
    }  # fmt: skip


def find_faults(data: Federation) -> tuple[list[str], list[str]]:
    """Return the errors of :func:`examine` that do not keep a run from starting, and warnings that its start says.

    Samples are read once, without statistics, and the result is cached on this machine for the same data; lazy samples
    are not read.
    """
    judged = (*faults.judge_reading(data), *faults.judge_names(data), *faults.judge_groups(data))
    numbers = (*number_faults.judge_numbers(data), *judge_leaks(data))
    warned = [f"{each.text} {each.fix}" for each in numbers if each.kind in ("far", "target-units", "leak")]

    def find_copies() -> dict[str, list[str]]:
        found = list(judge_duplicates(data, survey_splits(data, statistics=False)))
        told = [f"{each.text} {each.fix}" for each in found if (each.kind, each.severity) == ("leakage", "warning")]
        return {"error": [each.text for each in found if each.severity == "error"], "warning": told}

    copies: dict[str, list[str]] = {"error": [], "warning": []}
    if not data.lazy:
        copies = cached_measurement("checks.json", (data.fingerprint, find_newest_source()), find_copies)
    return [*(each.text for each in judged if each.severity == "error"), *copies["error"]], warned + copies["warning"]


def check_data(data: Federation, choice: Literal["refuse", "warn", "ignore"] | None) -> Federation:
    """Check ``data`` for errors before they are used, and return them with a notice about these.

    ``choice``: ``refuse`` raises :class:`UsageError` if there are errors, ``warn`` or None adds a line about them, and
    ``ignore`` skips the check and adds only the faults that were noticed when the data were read.
    """
    if choice == "ignore":
        return _add_notices(data, data.faults)
    errors, told = find_faults(data)
    if not errors:
        return _add_notices(data, told)
    data = replace(data, notices=drop_said(data.notices, errors))
    message = f"{len(errors)} error{'s' * (len(errors) > 1)} in the data: {' '.join(errors)}"
    if choice == "refuse":
        raise UsageError(
            f"{message} Correct them (`fedshift data check` shows how), or continue anyway ({{}})",
            Ref(on_data_error="warn"),
        )
    advice = "`fedshift data check` shows how to correct them; --on-data-error refuse stops a run that has any"
    return _add_notices(data, (f"{message} {advice}", *told))


def drop_said(notices: Iterable[str], texts: Iterable[str]) -> tuple[str, ...]:
    """Return ``notices`` without those that ``texts`` of findings say."""
    said = {text.removesuffix(".").lower() for text in texts}
    return tuple(each for each in notices if said.isdisjoint((each.lower(), each.partition(";")[0].lower())))


def _add_notices(data: Federation, more: Iterable[str]) -> Federation:
    """Return ``data`` with ``more`` notices, each once."""
    return replace(data, notices=tuple(dict.fromkeys((*data.notices, *more))))
