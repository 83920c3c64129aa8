"""A diagnosis as a person reads it: tables, sentences that say what the numbers mean, methods, a command to try."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from shlex import quote
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..report.formatting import MISSING, format_p_value
from .concept_shift import SEPARABLE
from .shift_tests import LEVEL, ShiftFinding

if TYPE_CHECKING:
    from . import Diagnosis

MEASURES = {
    "label skew": "Jensen-Shannon divergence, bits",
    "feature shift": "AUC of a client against the others",
    "quantity skew": "Gini of training samples",
    "concept shift": "labels of neighbors, own - others - looks",
}
RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
"""Learning rates that the command tries for each method."""
SHOWN = 10
"""Clients up to which pairs are printed as a matrix."""


def render_diagnosis(diagnosis: Diagnosis, data: str | None = None) -> Iterator[RenderableType]:
    """Tables, reading, recommended methods and a command; ``data``: what ``--data`` shall be, as a shell reads it."""
    yield _findings_table(diagnosis)
    yield _client_table(diagnosis)
    if 2 < len(diagnosis.tested) <= SHOWN and diagnosis.pairs:
        yield _pairs_table(diagnosis)
    yield _layers_table(diagnosis)
    yield Text("Reading", style="bold")
    for sentence in interpret(diagnosis):
        yield Text(f"- {sentence}")
    yield Text("Methods to try", style="bold")
    for each in diagnosis.advice.methods:
        yield Text.assemble("- ", (each.method, "bold"), f": {each.reason}.")
    for caution in diagnosis.advice.cautions:
        yield Text(f"- {caution}")
    yield Text("To compare them, each at the learning rate that is best for it on validation data:")
    yield comparison_command(diagnosis, data)  # text that is not to be broken into lines


def comparison_command(diagnosis: Diagnosis, data: str | None = None) -> str:
    """The command line that compares the recommended methods, each at the learning rate best on validation data."""
    methods = ",".join(each.method for each in diagnosis.advice.methods)
    single = " --allow-single-class" if diagnosis.single_class else ""
    held = "" if diagnosis.validation else " --validation 0.2"
    place = data or quote(diagnosis.federation)
    rates = ",".join(f"{rate:g}" for rate in RATES)
    return f"fedshift sweep --data {place}{single} --methods {quote(methods)} --over lr={rates}{held} --seeds 3"


def interpret(diagnosis: Diagnosis) -> Iterator[str]:
    """What was found, in sentences."""
    if not diagnosis.named:
        whole = all(finding.evidence.p is not None for finding in diagnosis.findings)
        parts = ": the clients' data are not told apart from random parts of one whole" if whole else ""
        yield f"No shift is named{parts}."
    for finding in diagnosis.findings:
        yield _describe_finding(finding, diagnosis)
    if diagnosis["feature shift"].named:
        yield from _name_closest(diagnosis)
        yield from _describe_layers(diagnosis)
    yield from diagnosis.notes


def _describe_finding(finding: ShiftFinding, diagnosis: Diagnosis) -> str:
    found = finding.evidence
    kind = finding.kind.capitalize()
    if found.statistic is None or finding.corrected is None:
        hint = "" if finding.kind != "concept shift" else (
            f": where a classifier tells clients apart (AUC of {SEPARABLE} or more), other labels and other looks "
            "cannot be told apart, so this is no sign that concepts agree"
        )  # fmt: skip
        return f"{kind} cannot be tested: {found.untestable_because}{hint}."
    chance = f"p {_format_p_bound(finding.corrected)}"
    if not finding.named:
        small = finding.corrected <= LEVEL
        beyond = " beyond what looks may explain" if finding.kind == "concept shift" else ""
        return (
            f"{kind} is too small to matter ({found.statistic:.3f}, {chance})." if small
            else f"{kind} is not found ({found.statistic:.3f}{beyond}, by chance {found.chance:.3f}, {chance})."
        )  # fmt: skip
    strongest = _name_strongest(finding, diagnosis)
    what = {
        "label skew": f"a label tells {found.statistic:.2f} bits about the client (by chance {found.chance:.3f}), "
        f"{strongest} differs most",
        "feature shift": f"within a class, a sample of {strongest} is told from one of another client in "
        f"{100 * found.statistic:.0f} of 100 cases (by chance 50)",
        "quantity skew": f"Gini {found.statistic:.2f}, from {min(diagnosis.sizes):,} to {max(diagnosis.sizes):,} "
        "training samples",
        "concept shift": f"among like inputs, a label of {strongest} is {100 * found.statistic:.0f} points less "
        "frequent at other clients than at home, beyond what looks may explain",
    }[finding.kind]
    return f"{kind}, {finding.strength}: {what}, {chance}."


def _name_strongest(finding: ShiftFinding, diagnosis: Diagnosis) -> str:
    names = diagnosis.tested if finding.kind in ("feature shift", "concept shift") else diagnosis.clients
    values = zip(names, finding.evidence.clients, strict=True)
    return max(((value, name) for name, value in values if value is not None), key=lambda pair: pair[0])[1]


def _name_closest(diagnosis: Diagnosis) -> Iterator[str]:
    known = [
        (auc, diagnosis.tested[i], diagnosis.tested[j])
        for i, j in combinations(range(len(diagnosis.tested)), 2)
        if (auc := diagnosis.pairs[i][j]) is not None
    ]
    if len(known) > 1:
        (low, *alike), (high, *apart) = min(known), max(known)
        nearest, farthest = " and ".join(alike), " and ".join(apart)
        yield f"Nearest to each other are {nearest} (AUC {low:.2f}), farthest apart {farthest} (AUC {high:.2f})."


def _describe_layers(diagnosis: Diagnosis) -> Iterator[str]:
    excess = [max((layer.evidence.statistic or 0) - (layer.evidence.chance or 0), 0.0) for layer in diagnosis.layers]
    first, last = excess[0], excess[-1]
    if all((layer.evidence.p or 1) > LEVEL for layer in diagnosis.layers):
        return
    if first >= 2 * last:
        yield "BatchNorm's statistics differ most in the first layer: it is how data look that differs."
    elif last >= 2 * first:
        yield "BatchNorm's statistics differ most in the last layer: it is what data show, more than how they look."
    else:
        yield "BatchNorm's statistics differ in early and late layers alike."


def _findings_table(diagnosis: Diagnosis) -> Table:
    table = _make_table(
        f"{diagnosis.federation}: shifts among {len(diagnosis.clients)} clients", "shift", "measured as"
    )
    for title in ("value", "by chance", "p", "p corrected"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("verdict")
    for finding in diagnosis.findings:
        found = finding.evidence
        verdict = Text(finding.strength, style="bold") if finding.named else Text(
            "not testable" if found.p is None else "not named"
        )  # fmt: skip
        table.add_row(
            finding.kind, MEASURES[finding.kind], _format_number(found.statistic), _format_number(found.chance), _format_p(found.p),
            _format_p(finding.corrected), verdict,
        )  # fmt: skip
    return table


def _client_table(diagnosis: Diagnosis) -> Table:
    table = _make_table("by client", "client")
    for title in ("samples", "labels, bits", "features, AUC", "concept, gap"):
        table.add_column(title, justify="right", no_wrap=True)
    bits = diagnosis["label skew"].evidence.clients or (None,) * len(diagnosis.clients)
    labels, sizes = (dict(zip(diagnosis.clients, values, strict=True)) for values in (bits, diagnosis.sizes))
    features, concepts = (
        diagnosis[kind].evidence.clients or (None,) * len(diagnosis.tested)
        for kind in ("feature shift", "concept shift")
    )
    for name, auc, gap in zip(diagnosis.tested, features, concepts, strict=True):
        table.add_row(
            Text(name), f"{sizes[name]:,}", _format_number(labels[name]), _format_number(auc), _format_number(gap)
        )
    return table


def _pairs_table(diagnosis: Diagnosis) -> Table:
    table = _make_table("pairs, AUC within a class", "client")
    for name in diagnosis.tested:
        table.add_column(Text(name), justify="right")
    for name, row in zip(diagnosis.tested, diagnosis.pairs, strict=True):
        table.add_row(Text(name), *(_format_number(auc, 2) for auc in row))
    return table


def _layers_table(diagnosis: Diagnosis) -> Table:
    table = _make_table("divergence of BatchNorm's inputs, nats", "layer")
    for title in ("value", "by chance", "p"):
        table.add_column(title, justify="right")
    for layer in diagnosis.layers:
        found = layer.evidence
        table.add_row(layer.name, _format_number(found.statistic), _format_number(found.chance), _format_p(found.p))
    return table


def _make_table(title: str, *columns: str) -> Table:
    table = Table(title=Text(title), box=None, title_justify="left", title_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column)
    return table


def _format_number(value: float | None, digits: int = 3) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def _format_p(value: float | None) -> str:
    return MISSING if value is None else format_p_value(value)


def _format_p_bound(p: float) -> str:
    text = format_p_value(p)
    return text.replace("<", "< ") if text.startswith("<") else f"= {text}"
