"""Text of a diagnosis: tables, sentences that interpret the numbers, recommended methods, and a command to try."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from shlex import quote

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..report.formatting import MISSING, TextCell, TextTable, format_p_value, make_table
from . import Diagnosis
from .concept_shift import SEPARABLE
from .shift_tests import LEVEL, Evidence, ShiftFinding

MEASURES = {
    "label skew": "Jensen-Shannon divergence, bits",
    "target skew": "Kolmogorov-Smirnov distance of a client",
    "feature shift": "AUC of a client against the others",
    "quantity skew": "Gini of training samples",
    "concept shift": "labels of neighbors, own - others - appearance",
}
LABELS = {
    "multilabel": ("divergence of one label, bits", "labels, bits", "one of a sample's labels carries"),
    "segmentation": ("divergence of shares of pixels, bits", "classes, bits", "the classes of an image's pixels carry"),
    "regression": (MEASURES["target skew"], "targets, KS", ""),
}
"""Measure of label skew, its column in the table of clients, and the start of its sentence, by task."""
RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
"""Learning rates in the suggested command."""
PAIRS = "Pairs, AUC"
SHOWN = 10
"""Maximum number of clients for which pairs are printed as a matrix."""


def render_diagnosis(diagnosis: Diagnosis, data: str | None = None) -> Iterator[RenderableType]:
    """Yield tables, interpretation, recommended methods and a command; ``data``: argument of ``--data``, quoted."""
    yield from (_render_table(title, table) for title, table in tabulate_diagnosis(diagnosis).items())
    yield Text("Interpretation", style="bold")
    for sentence in interpret(diagnosis):
        yield Text(f"- {sentence}")
    yield Text("Methods to try", style="bold")
    for each in diagnosis.advice.methods:
        yield Text.assemble("- ", (each.method, "bold"), f": {each.reason}.")
    for caution in diagnosis.advice.cautions:
        yield Text(f"- {caution}")
    yield Text("To compare them, each at its best learning rate on validation data:")
    yield comparison_command(diagnosis, data)  # a string: printed without line breaks


def comparison_command(diagnosis: Diagnosis, data: str | None = None) -> str:
    """Return the command that compares the recommended methods, each at its best learning rate on validation data."""
    methods = ",".join(each.method for each in diagnosis.advice.methods)
    single = " --allow-single-class" if diagnosis.single_class else ""
    validation = "" if diagnosis.validation else " --validation 0.2"
    source = data or quote(diagnosis.federation)
    rates = ",".join(f"{rate:g}" for rate in RATES)
    return f"fedshift sweep --data {source}{single} --methods {quote(methods)} --over lr={rates}{validation} --seeds 3"


def interpret(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield the findings as sentences."""
    if not diagnosis.named:
        tested = all(finding.evidence.p is not None for finding in diagnosis.findings)
        why = ": the clients' data cannot be distinguished from random parts of one data set" if tested else ""
        yield f"No shift is named{why}."
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
            f": where a classifier distinguishes clients (AUC of {SEPARABLE} or more), a difference in labels could "
            "also be one in appearance, so this does not show that concepts agree"
        )  # fmt: skip
        if diagnosis.task != "classification" and finding.kind == "concept shift":
            return f"Concept shift does not apply: {found.untestable_because}."
        return f"{kind} cannot be tested: {found.untestable_because}{hint}."
    p = format_p_value(finding.corrected)
    chance = f"p {p.replace('<', '< ') if p.startswith('<') else f'= {p}'}"
    if not finding.named:
        small = finding.corrected <= LEVEL
        beyond = " beyond what appearance may explain" if finding.kind == "concept shift" else ""
        return (
            f"{kind} is too small to matter ({found.statistic:.3f}, {chance})." if small
            else f"{kind} is not found ({found.statistic:.3f}{beyond}, by chance {found.chance:.3f}, {chance})."
        )  # fmt: skip
    strongest = _name_strongest(finding, diagnosis)
    what = {
        "label skew": f"{LABELS.get(diagnosis.task, ('', '', 'a label carries'))[2]} {found.statistic:.2f} bits about "
        f"the client (by chance {found.chance:.3f}), {strongest} differs most",
        "target skew": f"the targets of {strongest} differ most: the share of targets below some value differs by "
        f"{100 * found.statistic:.0f} points from the others' (by chance {100 * (found.chance or 0):.0f})",
        "feature shift": f"{_name_group(diagnosis)}, a classifier distinguishes a sample of {strongest} from one of "
        f"another client in {100 * found.statistic:.0f} of 100 cases (by chance 50)",
        "quantity skew": f"Gini {found.statistic:.2f}, from {min(diagnosis.sizes):,} to {max(diagnosis.sizes):,} "
        "training samples",
        "concept shift": f"among similar inputs, a label given by {strongest} is {100 * found.statistic:.0f} points "
        "less frequent at other clients, beyond what appearance may explain",
    }[finding.kind]
    return f"{kind}, {finding.strength}: {what}, {chance}."


def _name_strongest(finding: ShiftFinding, diagnosis: Diagnosis) -> str:
    names = diagnosis.tested if finding.kind in ("feature shift", "concept shift") else diagnosis.clients
    values = zip(names, finding.evidence.clients, strict=True)
    return max(((value, name) for name, value in values if value is not None), key=lambda pair: pair[0])[1]


def _name_group(diagnosis: Diagnosis) -> str:
    return "within a class" if diagnosis.task == "classification" else "among samples with similar targets"


def _name_closest(diagnosis: Diagnosis) -> Iterator[str]:
    known = [
        (auc, diagnosis.tested[i], diagnosis.tested[j])
        for i, j in combinations(range(len(diagnosis.tested)), 2)
        if (auc := diagnosis.pairs[i][j]) is not None
    ]
    if len(known) > 1:
        (low, *closest), (high, *farthest) = min(known), max(known)
        similar, different = " and ".join(closest), " and ".join(farthest)
        yield f"Most similar are {similar} (AUC {low:.2f}), most different {different} (AUC {high:.2f})."


def _describe_layers(diagnosis: Diagnosis) -> Iterator[str]:
    excess = [max((layer.evidence.statistic or 0) - (layer.evidence.chance or 0), 0.0) for layer in diagnosis.layers]
    first, last = excess[0], excess[-1]
    if all((layer.evidence.p or 1) > LEVEL for layer in diagnosis.layers):
        return
    if first >= 2 * last:
        yield "BatchNorm's statistics differ most in the first layer: the appearance of the data differs."
    elif last >= 2 * first:
        yield "BatchNorm's statistics differ most in the last layer: content differs more than appearance."
    else:
        yield "BatchNorm's statistics differ about equally in early and late layers."


def tabulate_diagnosis(diagnosis: Diagnosis) -> dict[str, TextTable]:
    """Return the tables of findings, clients, pairs of clients (if few) and layers, in this order, by title."""
    header = ("shift", "measured as", "value", "by chance", "p", "p corrected", "verdict")
    tests = [
        (
            finding.kind,
            LABELS.get(diagnosis.task, (MEASURES[finding.kind],))[0] if number == 0 else MEASURES[finding.kind],
            *_format_evidence(finding.evidence),
            _format_p(finding.corrected),
            _format_verdict(finding),
        )
        for number, finding in enumerate(diagnosis.findings)
    ]
    tables = {f"{diagnosis.federation}: shifts among {len(diagnosis.clients)} clients": make_table(header, tests)}
    bits = diagnosis.findings[0].evidence.clients or (None,) * len(diagnosis.clients)
    labels, sizes = (dict(zip(diagnosis.clients, values, strict=True)) for values in (bits, diagnosis.sizes))
    unknown = (None,) * len(diagnosis.tested)
    features, concepts = (diagnosis[kind].evidence.clients or unknown for kind in ("feature shift", "concept shift"))
    tables["By client"] = make_table(
        ("client", "samples", LABELS.get(diagnosis.task, ("", "labels, bits"))[1], "features, AUC", "concept, gap"),
        [
            (name, f"{sizes[name]:,}", *map(_format_number, (labels[name], auc, gap)))
            for name, auc, gap in zip(diagnosis.tested, features, concepts, strict=True)
        ],
    )
    if 2 < len(diagnosis.tested) <= SHOWN and diagnosis.pairs:
        pairs = zip(diagnosis.tested, diagnosis.pairs, strict=True)
        rows = [(name, *(_format_number(auc, 2) for auc in row)) for name, row in pairs]
        tables[f"{PAIRS} {_name_group(diagnosis)}"] = make_table(("client", *diagnosis.tested), rows)
    layers = [(layer.name, *_format_evidence(layer.evidence)) for layer in diagnosis.layers]
    tables["Divergence of BatchNorm's inputs, nats"] = make_table(("layer", "value", "by chance", "p"), layers)
    return tables


def _render_table(title: str, data: TextTable) -> Table:
    table = Table(title=Text(title), box=None, title_justify="left", title_style="bold", padding=(0, 2, 0, 0))
    for name in data.header:
        words = name in ("shift", "measured as", "verdict", "client", "layer")
        no_wrap = not (words or title.startswith(PAIRS))
        table.add_column(Text(name), justify="left" if words else "right", no_wrap=no_wrap)
    for row in data.rows:
        table.add_row(*(Text(cell.text, style="bold" if cell.best else "") for cell in row))
    return table


def _format_verdict(finding: ShiftFinding) -> TextCell:
    if finding.named:
        return TextCell(text=finding.strength, best=True)
    return TextCell(text="not testable" if finding.evidence.p is None else "not named")


def _format_evidence(found: Evidence) -> tuple[str, str, str]:
    return _format_number(found.statistic), _format_number(found.chance), _format_p(found.p)


def _format_number(value: float | None, digits: int = 3) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def _format_p(value: float | None) -> str:
    return MISSING if value is None else format_p_value(value)
