"""Shifts between sites in words, in one table and on one page, and methods that are made for them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from ..report.figures import FigurePanel
from ..report.formatting import MISSING, TextTable, format_p_value, make_table
from ..report.html import describe_pictures, render_template
from ..report.report import Report, ReportTable
from ..tasks import find_kind
from ..utils.files import write_atomically
from .overview import SHOWN, make_overview
from .shifts import MOST_IN_PAIRS, MOST_SITES, SHIFTS, Diagnosis

PAGE = "diagnosis.html"
CROSS_DEVICE = 20
"""Largest number of clients that are expected in every round; more are taken for devices that come and go."""
REMEMBERS = frozenset({
    "apfl", "ditto", "fedala", "fedbn", "feddyn", "fedper", "fedrep", "fedrod", "moon", "partialfed_adaptive",
    "scaffold", "silobn",
})  # fmt: skip
"""Methods whose clients keep state, and so need to take part again and again."""
SKEWED = 0.64
"""Area of label skew (Cohen's d of 0.5) beyond which a client's BatchNorm statistics reflect its labels."""
AGAINST = {
    "feature shift": ("fedbn", "fedwon", "fedbabu", "apfl", "ditto", "silobn", "partialfed_adaptive", "gn"),
    "label skew": (
        "fedrod", "fedbabu", "gn", "apfl", "scaffold", "fedper", "ditto", "feddyn", "fedala", "fedrep", "moon",
        "fedprox", "fedavgm", "fedmmb", "fedadam",
    ),
    "quantity skew": ("fednova", "fedmmb", 'fedavg(weighting="uniform")'),
}  # fmt: skip
"""Methods against each shift, in the order in which to try them; ``docs/methods`` has a page on each."""
RATES = "0.003,0.01,0.03,0.1,0.3"
"""Learning rates in the suggested command."""


def choose_methods(found: Diagnosis) -> dict[str, str]:
    """Return FedAvg and up to eight methods against the shifts that were named, with the shift that each is for."""
    if not found.named:
        return {"fedavg": "no shift is named, so the simplest method is enough", "fedavgm": "may save rounds"}
    unfit = REMEMBERS if len(found.data.clients) > CROSS_DEVICE else frozenset[str]()
    unfit |= {"fedrod"} if find_kind(found.data.task) != "classification" else set()  # it counts classes
    unfit |= {"fedwon"} if len(found.data.sample_shape) < 2 else set()  # it needs convolutions
    chosen = dict[str, str]()
    for shift in sorted(found.named, key=lambda shift: (shift == SHIFTS[2], -found.find(shift)["value"])):
        methods = [method for method in AGAINST[shift] if method not in unfit]
        if shift == "feature shift" and "label skew" in found.named and found.find("label skew")["value"] >= SKEWED:
            methods.sort(key=lambda method: method not in ("fedwon", "gn"))
        for method in methods[: max(2, -(-8 // len(found.named)))]:
            chosen.setdefault(method, f"against {shift}")
    return {"fedavg": "the baseline for all others", **dict(list(chosen.items())[:8])}


def comparison_command(found: Diagnosis, data: str | None = None) -> str:
    """Return the command that compares the methods; ``data``: argument of ``--data``, quoted; None: the name."""
    classes = [set(client.train.y.tolist()) for client in found.data.clients if client.train.y.ndim == 1]
    single = " --allow-single-class" if any(len(each) == 1 for each in classes) else ""
    validation = "" if any(client.validation is not None for client in found.data.clients) else " --validation 0.2"
    methods = quote(",".join(choose_methods(found)))
    source = f"{data or quote(found.data.name)}{single}"
    return f"fedshift sweep --data {source} --methods {methods} --over lr={RATES}{validation} --seeds 5"


def interpret(found: Diagnosis) -> Iterator[str]:
    """Yield the frame in sentences, and cautions about methods."""
    for shift in SHIFTS:
        yield f"{shift.capitalize()}{_describe(found, shift)}."
    if len(found.data.clients) > MOST_SITES:
        yield f"{MOST_SITES} of {len(found.data.clients)} clients were drawn for the tests."
    if len(found.data.clients) > MOST_IN_PAIRS:
        yield f"Pairs are compared for up to {MOST_IN_PAIRS} sites."
    if not found.patients:
        yield "Samples count as independent: if several are of one patient or series, name these (--groups)."
    if "feature shift" in found.named:
        yield "Other labels for the same look are a feature shift within each class, too: look at the labels first."
    if "label skew" in found.named and found.find("label skew")["value"] >= SKEWED:
        yield (
            "Beware of FedBN where labels or targets are skewed: a client's BatchNorm statistics then reflect its "
            "labels as much as its images, and its model suits no other client."
        )


def _describe(found: Diagnosis, shift: str) -> str:
    row, unit = found.find(shift), "patients" if found.patients else "samples"
    counts = [len(client.train) for client in found.data.clients]
    numbers = (
        f"AUC {row['value']:.2f}, 95 % interval {row['low']:.2f} to {row['high']:.2f}, p {format_p_value(row['p'])}"
    )
    known = "only the targets" if shift == "label skew" else "features other than the targets"
    told = f"from {known}, a classifier distinguishes held-out {unit} of {row['strongest']} from others ({numbers})"
    return {
        "shift": f": {told}" if shift != SHIFTS[2] else f": from {min(counts):,} to {max(counts):,} training samples",
        "too small": f" is too small to matter ({numbers})",
        "none": " is small" if shift == SHIFTS[2] else f" is not found, and a strong one is excluded ({numbers})",
        "cannot tell": f": {found.units:,} {unit}: cannot tell ({numbers})",
        "not testable": f" cannot be tested: no two sites have {unit} with similar targets that differ otherwise"
        if shift == "feature shift"
        else " cannot be tested: all targets are equal",
    }[row["verdict"]]


def tabulate_shifts(found: Diagnosis) -> TextTable:
    """Return a row for all sites and for each pair, with the value, interval and p-value of each shift."""
    header = ("sites", "label skew, AUC", "p", "feature shift, AUC", "p", "sizes")
    rows = []
    for sites in found.frame["sites"].unique():
        *areas, ratio = (found.find(shift, sites) for shift in SHIFTS)
        cells = (cell for row in areas for cell in (_format_area(row), format_p_value(row["p"])))
        rows.append((sites, *cells, f"1 : {ratio['value']:.3g}"))
    note = (
        "Area under the ROC curve (95 % interval) of a site against the others: 0.5 if the classifier guesses, less "
        "if targets are spread more evenly than by chance. For all sites, it is the largest one; interval and p are "
        "corrected for that (p for two shifts, too). Pairs are judged one by one."
    )
    return make_table(header, rows, note=note)


def _format_area(row: Mapping[str, Any]) -> str:
    return MISSING if math.isnan(row["value"]) else f"{row['value']:.2f} ({row['low']:.2f} to {row['high']:.2f})"


def write_page(
    found: Diagnosis, path: Path, command: str | None = None, remarks: Sequence[str] = (), *, pictures: bool = True
) -> Path:
    """Write the page of ``found`` with figures of the data atomically and return its path.

    ``command``: argument of ``--data`` in the suggested command, quoted; ``remarks``: sentences to show first;
    ``pictures``: whether to show images of samples.
    """
    table = ReportTable(file="shifts", caption="Shifts between sites", text=tabulate_shifts(found), section="findings")
    figures = make_overview(found.data, pictures=pictures)
    panels = (FigurePanel(name=n, figure=figure, description=f"Training data: {n}") for n, figure in figures.items())
    html = render_template(
        "diagnosis.html.j2",
        name=found.data.name, clients=len(found.data.clients), named=found.named, readings=list(interpret(found)),
        report=Report(tables=(table,), panels=tuple(panels), notices=tuple(remarks)),
        command=comparison_command(found, command),
        shown=describe_pictures("training", found.data.names[:SHOWN] if "samples" in figures else ()),
    )  # fmt: skip
    write_atomically(path, html.encode())
    return path
