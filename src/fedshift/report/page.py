"""The report of a run, and its page: one self-contained HTML file without scripts or network."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from ..config.expressions import read_catalog
from ..results.disclosure import group_disclosures
from ..results.run_directory import to_file_name
from ..results.schema import (
    DISTANCES,
    MOMENTS,
    PICTURED,
    MethodSummary,
    RunSummary,
    is_lower_better,
    metric_unit,
    name_file,
    name_metric,
)  # fmt: skip
from ..utils.files import write_atomically
from ..utils.words import join_some
from .clinical import list_clinical_tables, list_kept
from .concordance import concordance_table, describe_concordance, format_concordance_table
from .differences import list_frames, tabulate_clients, tabulate_means
from .figures import make_panels
from .formatting import (
    MISSING,
    TextTable,
    difference_unit,
    flatten_settings,
    format_bytes,
    format_cross_table,
    format_metric_table,
    make_table,
)
from .html import describe_pictures, encode_strip, render_template
from .lag import OTHER_STATISTICS, describe_lag, describe_moment, find_other_moment
from .origin import describe_run, find_changed
from .progress import describe_falling, describe_partial, find_reached_rounds, is_even
from .report import FILES, PAGE, Report, ReportTable
from .style import make_styles
from .tables import (
    AFTER_WORK,
    ONE_BY_ONE,
    QUANTILES,
    accuracy_table,
    add_majority,
    cross_table,
    describe_majority,
    describe_missing,
    describe_round,
    describe_seeds,
    find_reported_rounds,
    list_shortfalls,
    measures_trained,
    patient_table,
    select_crossed,
    select_reported_rows,
    tabulate_history,
    traffic_table,
)
from .target_metric import describe_target, format_target_table, target_table
from .worst_cases import list_worst_cases

CLASSES = 8
"""Maximum number of mask classes with separate tables."""
_UNITS = {"auc": "area under the ROC curve in percent"}
NAMED = 4
"""Number of names of what leaves a client that a table gives."""
_EXCHANGE = ("kept local", "sent only", "loaded only", "shared")


def make_metric_table(
    summary: RunSummary,
    *,
    metric: str | None = None,
    model: str = "personal",
    split: str = "test",
    moment: str | None = None,
    number: int | None = None,
    digits: int | None = None,
) -> ReportTable:
    """Return the table of :func:`accuracy_table`; ``digits``: number of decimals; None: the metric's."""
    metric = metric or summary.metric
    shown = metric, model, split, moment, number
    frame = accuracy_table(summary, *shown)
    unit, when = metric_unit(metric, numbers=summary.of_numbers)[2], describe_moment(summary, moment)
    caption = f"{split.capitalize()} {name_metric(metric)} of the {model} model in {unit}{when}"
    caption += f", {describe_seeds(summary)}, {describe_round(summary)}"
    one_by_one, even = len(summary.clients) <= ONE_BY_ONE, is_even(find_reached_rounds(summary))
    text = format_metric_table(frame, metric, one_by_one=one_by_one, even=even, digits=digits)
    notes = [text.note, describe_missing(select_reported_rows(summary, model, split, moment), metric, number)]
    if shown == ("accuracy", "personal", "test", None, None):
        notes.append(describe_majority(summary))
        frame = add_majority(summary, frame)
    remark = describe_falling(summary) if shown == (summary.metric, "personal", "test", None, None) else ""
    note = " ".join(filter(None, [*notes, remark]))
    text = replace(text, partial=describe_partial(summary), note=note, advice=remark)
    file = "-".join([name_file(metric), *([model] if model == "global" else []), *([split] if split != "test" else [])])
    file += "-trained" if moment == "trained" else f"-{OTHER_STATISTICS[moment]}" if moment else ""
    return ReportTable(caption=caption, frame=frame, text=text, file=file)


def list_tables(summary: RunSummary) -> Iterator[ReportTable]:
    """Yield the tables of results that ``summary`` has data for, which every form of the report shows."""
    yield replace(make_metric_table(summary), section="headline")
    if other := find_other_moment(summary):
        yield replace(make_metric_table(summary, moment=other), places=(PAGE, FILES))
    if measures_trained(summary):
        yield replace(make_metric_table(summary, moment="trained"), section="after work")
    for reference, frame in list_frames(summary).items():
        caption = f"{_capitalize(summary.metric_name)} minus {reference}'s, paired"
        file, several = to_file_name(reference), len(summary.clients) > 1
        text = tabulate_means(summary, frame, reference)
        counted = f"{caption}, and at how many clients it is better, worse and unclear" if several else caption
        yield ReportTable(file=f"minus-{file}", caption=counted, text=text, section="differences")
        if 1 < len(summary.clients) <= ONE_BY_ONE:
            text, places = tabulate_clients(summary, frame, reference), (PAGE, FILES)
            file, caption = f"minus-{file}-clients", f"{caption}, at each client"
            yield ReportTable(file=file, caption=caption, text=text, section="differences", places=places)
    if (target := summary.target_metric) is not None:
        frame = target_table(summary, target)
        text = format_target_table(frame, ended=not describe_partial(summary))
        yield ReportTable(file="target", caption=describe_target(summary, target), frame=frame, text=text)
    if len(frame := concordance_table(summary)):
        text, caption = format_concordance_table(frame), describe_concordance(summary, frame)
        yield ReportTable(file="concordance", caption=caption, frame=frame, text=text, section="concordance")


def list_details(summary: RunSummary) -> Iterator[ReportTable]:
    """Yield the tables that the terminal does not show."""
    yield from collect_crossed(summary)
    yield from _other_metrics(summary)
    yield from _tabulate_patients(summary)
    yield from list_clinical_tables(summary)
    caption = "Samples of clients" if len(summary.clients) > ONE_BY_ONE else "Samples of each client"
    yield _detail("clients", "sizes", caption, _client_table(summary))
    caption = "Bytes down and up: one client in one round; all clients: both ways in one round; whole run: both ways, "
    yield _detail("methods", "exchange", f"{caption}mean over seeds", _method_table(summary), kind="facts-table")
    for number, (name, method) in enumerate(summary.methods.items(), start=1):
        caption, leaving = f"What leaves each client in a round under {name}", _leaving_table(method)
        if leaving.rows:
            yield _detail(f"leaves {name}", f"leaves-{number}", caption, leaving, kind="pairs")
        line, entries = _scope_table(method.entries)
        caption = f"Named entries of the network under {name}"
        yield _detail(f"scope {name}", f"scope-{number}", caption, entries, title=line, kind="scope")
    yield from list_settings("trained", "What was trained, where and when", describe_run(summary))
    yield from list_settings("changed", "Settings other than the defaults", find_changed(summary.config))
    yield from list_settings("config", "Settings of the run", summary.config)
    yield from list_settings("environment", "Versions, machine, and the commands that trained", summary.environment)


def _detail(
    section: str, file: str, caption: str, text: TextTable, *, title: str = "", kind: str = "numbers"
) -> ReportTable:
    """Return a table that only the page shows."""
    return ReportTable(file=file, caption=caption, text=text, section=section, places=(PAGE,), title=title, kind=kind)


def list_settings(name: str, caption: str, settings: Mapping[str, Any]) -> Iterator[ReportTable]:
    """Yield the table of ``settings`` or facts for the section ``name`` of the page, unless it is empty."""
    if settings:
        yield _detail(name, name, caption, make_table((), flatten_settings(settings)), kind="pairs")


def make_report(summary: RunSummary, *, values: object = "table()", whole: bool = True) -> Report:
    """Return the report of ``summary``.

    ``values``: place of each client's values, which tables of many clients omit; ``whole``: also what the terminal does
    not show, which takes most of the time.
    """
    return Report(
        tables=(*list_tables(summary), *(list_details(summary) if whole else ())),
        panels=tuple(make_panels(summary)) if whole else (),
        partial=describe_partial(summary),
        lead=(lead := describe_lag(summary)),
        notices=(*filter(None, (lead,)), *summary.notices, *list_shortfalls(summary), *list_kept(summary)),
        sentences=tuple(_list_sentences(summary, values)),
        frames=_list_frames(summary),
    )


def _list_sentences(summary: RunSummary, values: object) -> Iterator[str]:
    """Yield the sentences below the terminal's tables."""
    if len(summary.clients) > ONE_BY_ONE:
        yield f"Each client is in {values}."
    if (summary.rows["split"] == "validation").any() and is_even(find_reached_rounds(summary)):
        means = accuracy_table(summary, split="validation").iloc[len(summary.clients)].unstack()["mean"]
        unit = difference_unit(summary.metric)
        parts = ", ".join(f"{method} {unit.format(means[method])}" for method in summary.methods)
        yield f"Validation, macro: {parts}. Choose by these."
    yield from list_shortfalls(summary)
    yield from list_kept(summary)


def _list_frames(summary: RunSummary) -> dict[str, pd.DataFrame]:
    """Return the data that have a CSV file and no table."""
    frames = {f"history-{name_file(summary.metric)}": tabulate_history(summary).set_index("method")}
    if (summary.rows["split"] == "validation").any():
        frames["validation"] = accuracy_table(summary, split="validation")
    differences = list_frames(summary)
    return frames | ({"differences": pd.concat(differences, names=["reference"])} if differences else {})


def collect_crossed(summary: RunSummary) -> list[ReportTable]:
    """Return a table of cross-site validation for each method and moment for which it was requested."""
    tables: list[ReportTable] = []
    places = (FILES,) if len(summary.clients) > ONE_BY_ONE else (PAGE, FILES)
    for method, moment in product(summary.methods, MOMENTS):
        rows = select_crossed(summary, method, moment)
        if not len(rows):
            continue
        frame, rounds = cross_table(summary, method, moment), sorted(set(rows["round"]))
        seeds = int(frame.xs("seeds", axis=1, level="statistic").to_numpy().max())
        spread = f"mean (std) over {seeds} seeds" if seeds > 1 else "one seed"
        when, ending = ("one round of local work after", "-trained") if moment == "trained" else ("after", "")
        caption = (
            f"{method}: test {summary.metric_name} of each client's model (rows) on each client's data (columns) in "
            f"{summary.metric_unit}, {when} round {', '.join(map(str, rounds))}, {spread}"
        )
        text = format_cross_table(frame, summary.metric)
        text = replace(text, note=f"{text.note} {describe_missing(rows, summary.metric)}".strip())
        file = f"cross-site-{to_file_name(method)}{ending}"
        table = ReportTable(file=file, caption=caption, frame=frame, text=text, section="crossed", places=places)
        tables.append(table)
    return tables


def write_page(summary: RunSummary, path: Path, report: Report | None = None) -> Path:
    """Write the page of ``summary`` to ``path`` atomically, with equal bytes for equal summaries; return ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, render_page(summary, report).encode())
    return path


def render_page(summary: RunSummary, report: Report | None = None) -> str:
    """Return the page's HTML; ``report``: the report of ``summary``, if there is one already."""
    report = report or make_report(summary)
    headline = report.list_tables(PAGE, "headline")[0].text
    leaders = _find_leaders(headline, summary.methods) if is_even(find_reached_rounds(summary)) else {}
    worst = list_worst_cases(summary)
    strips = {name: encode_strip(several) for name, several in [*summary.samples.items()][:PICTURED] if len(several)}
    return render_template(
        "page.html.j2",
        summary=summary,
        report=report,
        leaders=[f"{method} with {text}" for method, text in leaders.items()],
        lower=is_lower_better(summary.metric),
        styles=make_styles(summary.methods),
        one_by_one=ONE_BY_ONE,
        pictured=PICTURED,
        worst=worst,
        strips=strips,
        shown=describe_pictures("test", [*strips, *(each.client for cases in worst.values() for each in cases)]),
        evaluated=any(text != MISSING for text in headline.values),
    )


def _find_leaders(table: TextTable, methods: Iterable[str]) -> dict[str, str]:
    """Return the method with the best macro metric and its value; several if they tie as printed."""
    macro = table.rows[table.rule][1:]
    measured = [cell for cell in macro if cell.text != MISSING]
    return {
        method: cell.text
        for method, cell in zip(methods, macro, strict=True)
        if cell.best or (len(measured) == 1 and cell in measured)
    }


def _other_metrics(summary: RunSummary) -> Iterator[ReportTable]:
    """Yield a table of every other metric, model, moment and mask class that has values."""
    shown: list[tuple[str, str, str | None, int | None]] = [
        (metric, model, moment, None)
        for model, moment in (("personal", None), ("personal", "trained"), ("global", None))
        for metric in summary.metrics
        if (model, metric) != ("personal", summary.metric)
    ]
    if "dice" in summary.metrics and 2 < summary.classes <= CLASSES:  # these are means over classes
        means = summary.metric if summary.metric in ("dice", "iou") else "dice", *DISTANCES
        classes = product((metric for metric in means if metric in summary.metrics), range(1, summary.classes))
        shown += [(metric, "personal", None, number) for metric, number in classes]
    for place, (metric, model, moment, number) in enumerate(shown):
        table = make_metric_table(summary, metric=metric, model=model, moment=moment, number=number)
        if all(text == MISSING for text in table.text.values):
            continue
        title = f"{_capitalize(name_metric(metric))}{f' of class {number}' if number else ''}, {model} model"
        title += f" {AFTER_WORK}" if moment == "trained" else ""
        unit = f"in {metric_unit(metric)[2]}"
        if number is None:
            unit = f"mean loss, {summary.loss_unit}" if metric == "loss" else _UNITS.get(metric, unit)
            unit += ", lower is better" if is_lower_better(metric) else ""
        caption = f"{title}: {unit}, {describe_seeds(summary)}"
        yield _detail("metrics", f"metric-{place}", caption, table.text, title=title)


def _tabulate_patients(summary: RunSummary) -> Iterator[ReportTable]:
    """Yield the metric of masks by patient, where patients are known."""
    frame, unit = patient_table(summary), difference_unit(summary.metric)
    if frame.empty:
        return
    methods = list(frame.columns.unique(0))
    rows = [
        (
            client,
            *(unit.format(own[method, "mean"], own[method, "std"]) for method in methods),
            f"{own.xs('patients', level=1).max():,.0f}",
        )
        for client, own in frame.iterrows()
    ]
    title = f"{_capitalize(summary.metric_name)} by patient"
    caption = f"{title}: mean (std) over patients of the mean of a patient's cases, averaged over seeds"
    yield _detail("metrics", "patients", caption, make_table(("client", *methods, "patients"), rows), title=title)


def _capitalize(text: str) -> str:
    """Capitalize the first letter of ``text``."""
    return text[:1].upper() + text[1:]


def _method_table(summary: RunSummary) -> TextTable:
    """Return a table of each method's expression, reported round and exchanged bytes."""
    reported, traffic = find_reported_rounds(summary), traffic_table(summary)
    per_round, total = (traffic[f"both {span}"].to_dict() for span in ("per round", "in total"))
    rows = []
    for name, method in summary.methods.items():
        rounds = reported.get(name, pd.Series(dtype=int)).tolist()
        round_text = ", ".join(map(str, rounds[:1] if len(set(rounds)) == 1 else rounds)) or MISSING
        sizes = (format_bytes(count) for count in (method.down, method.up, per_round[name], total[name]))
        rows.append((name, _put_in_words(name), "yes" if method.has_global else "none", round_text, *sizes))
    header = ("method", "in words", "global model", "reported round", "down", "up", "all clients", "whole run")
    return make_table(header, rows)


def _put_in_words(name: str) -> str:
    """Return the catalog's descriptions of the methods in the composition ``name``; custom methods have none."""
    catalog = read_catalog("methods")
    parts = (catalog.get(re.split(r"\W", part)[0]) for part in re.split(r"\+(?![^(]*\))", name))
    return "; ".join(part.summary.partition(": ")[2].rstrip(".") for part in parts if part) or MISSING


def _scope_table(entries: Iterable[Mapping[str, Any]]) -> tuple[str, TextTable]:
    """Return a method's scope in one line, and the table of its entries."""
    rows, counts, totals = [], Counter[str](), Counter[str]()
    for entry in entries:
        exchange = _EXCHANGE[2 * bool(entry["load"]) + bool(entry["send"])]
        counts[exchange] += 1
        totals[exchange] += int(entry["bytes"])
        shape = " x ".join(map(str, entry["shape"])) or "scalar"
        trained = "trained" if entry["trained"] else "buffer" if entry["buffer"] else "frozen"
        rows.append((entry["name"], entry["type"], shape, f"{entry['bytes']:,}", exchange, trained))
    line = ", ".join(f"{count} {kind} ({format_bytes(totals[kind])})" for kind, count in counts.items())
    return line, make_table(("entry", "layer", "shape", "bytes", "exchange", "values"), rows)


def _leaving_table(method: MethodSummary) -> TextTable:
    """Return a table of what leaves a client in a round: what it reveals, and who receives it."""
    header = ("sent", "of", "bytes", "reveals", "received by")
    rows = [
        (
            join_some(group.names, shown=NAMED),
            group.source,
            f"{group.bytes:,}",
            group.reveals,
            group.receivers,
        )
        for group in group_disclosures(method.leaves)
    ]
    return make_table(header, rows)


def _client_table(summary: RunSummary) -> TextTable:
    """Return the sizes of each client's splits, or for many clients their distribution."""
    splits = list(dict.fromkeys(split for sizes in summary.clients.values() for split in sizes))
    if len(summary.clients) > ONE_BY_ONE:
        sizes = pd.DataFrame([dict(sizes) for sizes in summary.clients.values()], columns=splits)
        statistics = {"all together": sizes.sum(), "smallest": sizes.min()}
        statistics |= {name: sizes.quantile(share) for name, share in QUANTILES.items()} | {"largest": sizes.max()}
        rows = [(name, *(f"{size:,.0f}" for size in statistic)) for name, statistic in statistics.items()]
        return make_table((f"{len(summary.clients):,} clients", *splits), rows)
    rows = [
        (name, *(f"{sizes[split]:,}" if split in sizes else MISSING for split in splits))
        for name, sizes in summary.clients.items()
    ]
    return make_table(("client", *splits), rows)
