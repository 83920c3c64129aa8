"""Compare each method with a reference at each client, and say which clients gain and which lose.

References are ``single``, by which each client trains alone, and FedAvg. A difference, its interval and its p-value are
those of the macro claims (:class:`~fedshift.report.claims.Measured`) on new samples, for one client: they cover seeds
and test samples, or groups of these. All clients and methods with one reference are a family, corrected for its size
(Holm). A client **gains** or **loses** where the corrected p-value is below 5 %, and is **undecided** otherwise: the
interval contains 0, or there is none, with fewer than three seeds, ten samples, or five of a class or with an event.
With a margin, chosen before the run, a loss above it is excluded at a client whose interval lies above minus the margin
(a test for noninferiority: Piaggio et al. 2012, doi:10.1001/jama.2012.87802). The interval is corrected by Bonferroni,
since it is read against another value than 0.
``benchmarks/coverage_of_sites.py`` measures by simulation how often intervals and verdicts are wrong.

Other training samples are not covered: all seeds share them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import pandas as pd

from ..analysis.statistics import FEWEST, FEWEST_DIFFERING, PairedDifference, correct_family
from ..results.schema import RunSummary, find_plain, is_lower_better, is_plain
from ..utils.words import join_some
from .claims import Measured, measure_methods
from .formatting import MISSING, TextCell, TextTable, Unit, difference_unit, make_table
from .progress import remembered
from .report import ReportTable
from .tables import ONE_BY_ONE

REFERENCES = ("single", "fedavg")
"""Methods that others are compared with at each client."""
FEWEST_UNITS = 10
"""Fewest test samples, or groups of these, of a client with an interval."""
FEWEST_OF_CLASS = 5
"""Fewest samples of the rarest class, or events, of a client with an interval."""
COLUMNS = (
    "reference", "method", "client", "seeds", "units", "reference_value", "value", "difference", "low", "high", "p",
    "level", "comparisons", "verdict", "reason", "margin", "least", "excluded",
)  # fmt: skip


class Effect(Enum):
    """The verdict on a client."""

    GAINS = "gains"
    LOSES = "loses"
    UNDECIDED = "undecided"


@dataclass(frozen=True, kw_only=True)
class ClientDifference:
    """A metric of ``method`` minus that of ``reference`` at ``client``: ``gap``, on new samples, corrected (Holm).

    ``units``: number of test groups, such as patients, if ``grouped``, else of samples. ``value``, ``reference_value``:
    means over the seeds of both. ``reason``: why there is no interval; empty if there is one. ``lower``: whether a
    lower value is better. ``margin``: loss that may be excluded; NaN: none was chosen.
    """

    client: str
    method: str
    reference: str
    units: int
    grouped: bool
    value: float
    reference_value: float
    gap: PairedDifference
    reason: str
    lower: bool
    margin: float = math.nan

    @property
    def least(self) -> float:
        """The smallest benefit that the interval of all differences together (Bonferroni) contains; NaN without one."""
        if self.reason:
            return math.nan
        low, high = self.gap.widen()
        return -high if self.lower else low

    @property
    def excluded(self) -> bool:
        """Return whether a loss above the margin is excluded; False without a margin or an interval."""
        benefit = -self.gap if self.lower else self.gap
        return not self.reason and benefit.excludes_below(-self.margin)

    @property
    def effect(self) -> Effect:
        """The verdict, from the corrected p-value."""
        if not self.gap.is_significant:
            return Effect.UNDECIDED
        return Effect.GAINS if self.benefit > 0 else Effect.LOSES

    @property
    def benefit(self) -> float:
        """The difference, positive where the method is better."""
        return -self.gap.mean if self.lower else self.gap.mean


def compare_clients(
    summary: RunSummary, metric: str | None = None, model: str = "personal", level: float = 0.95
) -> tuple[ClientDifference, ...]:
    """Return the difference of each method to each of :data:`REFERENCES` that was run, client by client.

    Methods that train on pooled data are left out, and so are ``single`` minus FedAvg, whose sign alone would differ,
    and clients without a value of both. A run that was begun to compare with one method has no other reference.
    ``metric``: None for the run's.
    """
    return _compare_clients(summary, metric or summary.metric, model, level)


@remembered
def _compare_clients(summary: RunSummary, metric: str, model: str, level: float) -> tuple[ClientDifference, ...]:
    measured = measure_methods(summary, metric, model)
    found: list[ClientDifference] = []
    others = [method for method in measured.values if not summary.methods[method].pooled]
    for kind in REFERENCES:
        reference = find_plain(others, kind)
        if reference is None or summary.compare_with not in ("", reference):
            continue
        others.remove(reference)
        made = [
            _compare_client(measured, client, method, reference, metric, level)
            for method in others
            for client in range(len(measured.clients))
        ]
        made = [each for each in made if each.gap.pairs]
        corrected = correct_family([each.gap for each in made])
        margin = summary.margin or math.nan
        found += [replace(each, gap=gap, margin=margin) for each, gap in zip(made, corrected, strict=True)]
    return tuple(found)


def _compare_client(
    measured: Measured, client: int, method: str, reference: str, metric: str, level: float
) -> ClientDifference:
    both_CS = measured.count_both(method, reference)
    both_CS[[place for place in range(len(both_CS)) if place != client]] = False
    gap = measured.compare(method, reference, both_CS, level)[1]
    used_S = both_CS[client]
    seeds = [seed for seed, used in zip(measured.seeds, used_S, strict=True) if used]
    known = (measured.recorded.values.get((method, seed), {}).get(client) for seed in seeds)
    sampled = next((each for each in known if each is not None), None)
    units = sampled.units if sampled else measured.sizes[client]
    fewest = sampled.fewest if sampled else units
    grouped = sampled is not None and sampled.group is not None
    reason = ""
    if gap.pairs < FEWEST:
        reason = f"{gap.pairs} seed{'s' * (gap.pairs > 1)}, of {FEWEST}"
    elif units < FEWEST_UNITS:
        reason = f"{units} test {'groups' if grouped else 'samples'}, of {FEWEST_UNITS}"
    elif fewest < FEWEST_OF_CLASS:
        reason = f"{fewest} of a class or with an event, of {FEWEST_OF_CLASS}"
    elif math.isnan(gap.p):
        kept = any((method, seed) in measured.recorded.values for seed in seeds)
        reason = "no variance over samples is known of this metric" if kept else "no results of single samples"
    if reason:
        gap = replace(gap, low=math.nan, high=math.nan, p=math.nan)
    value, reference_value = (
        float(measured.values[name][client][used_S].mean()) if seeds else math.nan for name in (method, reference)
    )
    return ClientDifference(
        client=measured.clients[client], method=method, reference=reference, units=units, grouped=grouped,
        value=value, reference_value=reference_value, gap=gap, reason=reason, lower=is_lower_better(metric),
    )  # fmt: skip


def tabulate_clients(differences: Sequence[ClientDifference]) -> pd.DataFrame:
    """Return one row for each of ``differences``, as fractions (columns: :data:`COLUMNS`)."""
    rows = [
        (
            each.reference, each.method, each.client, each.gap.pairs, each.units, each.reference_value, each.value,
            each.gap.mean, each.gap.low, each.gap.high, each.gap.p, each.gap.level, each.gap.comparisons,
            each.effect.value, each.reason, each.margin, each.least, each.excluded,
        )
        for each in differences
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=COLUMNS)


def list_client_tables(summary: RunSummary) -> list[ReportTable]:
    """Return a table for each reference; none below three seeds.

    Runs of more than :data:`~fedshift.report.tables.ONE_BY_ONE` clients have none either.
    """
    if len(summary.clients) > ONE_BY_ONE:
        return []
    found = compare_clients(summary)
    if max((each.gap.pairs for each in found), default=0) < FEWEST:
        return []
    unit, tables = difference_unit(summary.metric, numbers=summary.of_numbers), []
    for kind in REFERENCES:
        if own := [each for each in found if is_plain(each.reference, kind)]:
            caption = f"Who profits: {summary.metric_name} of each client minus {own[0].reference}'s, in {unit.name}"
            text = _write_table(own, unit, late=summary.config.get("margin") is None)
            file, frame = f"clients-{kind}", tabulate_clients(own)
            tables.append(ReportTable(file=file, caption=caption, text=text, frame=frame, section="profits"))
    return tables


def _write_table(own: Sequence[ClientDifference], unit: Unit, *, late: bool) -> TextTable:
    """Return a row for each client, with a cell for each method: difference, interval and verdict.

    ``late``: the margin, if any, was chosen after the run.
    """
    methods, reference = list(dict.fromkeys(each.method for each in own)), own[0].reference
    by_place = {(each.client, each.method): each for each in own}
    rows = []
    for client in dict.fromkeys(each.client for each in own):
        cells, first = [], next(each for each in own if each.client == client)
        for method in methods:
            each = by_place.get((client, method))
            text = MISSING
            if each is not None:
                between = f" ({unit.format_interval(each.gap.low, each.gap.high)})" if not each.reason else ""
                text = f"{unit.format_signed(each.gap.mean)}{between} {each.effect.value}"
                if each.excluded and each.effect is not Effect.GAINS:
                    text += f", loss above {_format_margin(each, unit)} excluded"
            decided = each is not None and each.effect is not Effect.UNDECIDED
            cells.append(TextCell(text=text, best=decided, significant=decided))
        rows.append((client, f"{first.units:,}", unit.format(first.reference_value), *cells))
    count, units = max(each.gap.comparisons for each in own), "groups" if own[0].grouped else "samples"
    note = (
        f"Intervals and verdicts hold at {100 * own[0].gap.level:g}% for all {count} differences together (Holm). They "
        f"cover seeds and test {units}, not other training data. Undecided: the interval contains 0, or there is none."
    )
    if not math.isnan(own[0].margin):
        note += (
            f" A loss above {_format_margin(own[0], unit)} {unit.name} (--margin) is excluded where the interval at "
            f"{100 * own[0].gap.level:g}% for all {count} differences by Bonferroni, which may be wider than the one "
            f"shown, does not reach it, and results differ on at least {FEWEST_DIFFERING} {units}."
        )
        note += " The margin was chosen when results were known." if late else ""
    if any(not each.reason and each.gap.sampled and not each.gap.sampled.paired for each in own):
        note += " Without results of single samples, which sites keep, the methods' errors count as independent."
    if reasons := {f"{each.client}: {each.reason}" for each in own if each.reason}:
        note += f" No interval: {join_some(sorted(reasons), '; ')}."
    return replace(make_table(("client", units, reference, *methods), rows, note=note), corner="method")


def _format_margin(difference: ClientDifference, unit: Unit) -> str:
    return f"{unit.scale * difference.margin:g}"


def describe_clients(summary: RunSummary) -> list[str]:
    """Return a sentence on each method and reference: how many clients gain and lose, and the worst.

    Without ``single``, a last sentence says how to have it, unless another method alone is compared with.
    """
    found, unit = compare_clients(summary), difference_unit(summary.metric, numbers=summary.of_numbers)
    sentences = []
    seeds = max((each.gap.pairs for each in found), default=0)
    if summary.margin and (seeds < FEWEST or len(summary.clients) < 2):
        sentences.append(
            f"No loss above {unit.scale * summary.margin:g} {unit.name} (--margin) is excluded: that needs {FEWEST} "
            "seeds, two clients, and single or fedavg with another method."
        )
    if len(summary.clients) < 2 or len(summary.methods) < 2:
        return sentences
    if seeds >= FEWEST:
        for reference, method in dict.fromkeys((each.reference, each.method) for each in found):
            own = [each for each in found if (each.reference, each.method) == (reference, method)]
            sentences.append(_count_clients(own, unit))
    if not summary.compare_with and find_plain(summary.methods, "single") is None:
        sentences.append("To see which clients gain over training alone, add method single.")
    return sentences


def _count_clients(own: Sequence[ClientDifference], unit: Unit) -> str:
    effects = [each.effect for each in own]
    gains, loses = (effects.count(effect) for effect in (Effect.GAINS, Effect.LOSES))
    negative = sum(each.benefit < 0 for each in own) - loses
    worst = min(own, key=lambda each: each.benefit)
    interval = f" ({unit.format_interval(worst.gap.low, worst.gap.high)})" if not worst.reason else ""
    undecided = len(own) - gains - loses
    text = f"{own[0].method} against {own[0].reference}: of {len(own)} clients, {gains} gain{'s' * (gains == 1)}, "
    text += f"{loses} lose{'s' * (loses == 1)} and {undecided} {'is' if undecided == 1 else 'are'} undecided"
    text += f", {negative} of them worse on average" if negative else ""
    if not math.isnan(own[0].margin):
        safe = sum(each.excluded for each in own)
        text += f". A loss above {_format_margin(own[0], unit)} {unit.name} is excluded at {safe} of {len(own)}"
    return f"{text}. Worst: {worst.client}, {unit.format_signed(worst.gap.mean)} {unit.name}{interval}."
