"""Tables of a report with their captions, and the page: one self-contained HTML file without scripts or network."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
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
from .claims import (
    Claims,
    collect_claims,
    describe_leaders,
    find_leader,
    rank_methods,
    tabulate_claims,
    tabulate_pairs,
)
from .clinical import list_clinical_tables
from .concordance import concordance_table, describe_concordance, format_concordance_table
from .figures import make_panels
from .formatting import (
    MISSING,
    TextTable,
    difference_unit,
    flatten_settings,
    format_bytes,
    format_cross_table,
    format_difference_table,
    format_metric_table,
    make_table,
)
from .html import draw_legend_entry, embed_panel, encode_strip, render_template
from .lag import describe_lag
from .origin import describe_run, find_changed
from .progress import describe_falling, describe_partial, find_reached_rounds, is_even
from .sites import describe_clients, list_client_tables
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
    select_crossed,
    select_reported_rows,
    traffic_table,
)
from .target_metric import describe_target, format_target_table, target_table
from .worst_cases import list_worst_cases

CLASSES = 8
"""Maximum number of mask classes with separate tables."""
_UNITS = {"auc": "area under the ROC curve in percent"}
NAMED = 4
"""Number of names of what leaves a client that a table gives."""
_EXCHANGE = {
    (True, True): "shared",
    (True, False): "loaded only",
    (False, True): "sent only",
    (False, False): "kept local",
}


@dataclass(frozen=True, kw_only=True)
class ReportTable:
    """A table of a report: its data ``frame``, the same as ``text``, its ``caption`` and its ``file`` name.

    The accuracy of the most frequent classes, in the note of ``text``, is a column of ``frame``.
    """

    file: str
    caption: str
    frame: pd.DataFrame
    text: TextTable


def make_metric_table(
    summary: RunSummary,
    claims: Claims | None = None,
    *,
    metric: str | None = None,
    model: str = "personal",
    split: str = "test",
    moment: str = "loaded",
    number: int | None = None,
    digits: int | None = None,
) -> ReportTable:
    """Return the table of :func:`accuracy_table`.

    ``claims``: claims about the same metric and model, which make the best method's cell significant. ``digits``:
    number of decimals; None: the metric's.
    """
    metric = metric or summary.metric
    shown = metric, model, split, moment, number
    frame = accuracy_table(summary, *shown)
    unit, when = metric_unit(metric, numbers=summary.of_numbers)[2], (f" {AFTER_WORK}" if moment == "trained" else "")
    caption = f"{split.capitalize()} {name_metric(metric)} of the {model} model in {unit}{when}"
    caption += f", {describe_seeds(summary)}, {describe_round(summary)}"
    leader = find_leader(claims, metric) if claims and (split, moment) == ("test", "loaded") else ""
    one_by_one, even = len(summary.clients) <= ONE_BY_ONE, is_even(find_reached_rounds(summary))
    text = format_metric_table(frame, metric, one_by_one=one_by_one, leader=leader, even=even, digits=digits)
    notes = [text.note, describe_missing(select_reported_rows(summary, model, split, moment), metric, number)]
    if shown == ("accuracy", "personal", "test", "loaded", None):
        notes.append(describe_majority(summary))
        frame = add_majority(summary, frame)
    if shown == (summary.metric, "personal", "test", "loaded", None):
        notes += [describe_lag(summary), describe_falling(summary)]
    text = replace(text, partial=describe_partial(summary), note=" ".join(filter(None, notes)))
    file = "-".join([name_file(metric), *([model] if model == "global" else []), *([split] if split != "test" else [])])
    file += "-trained" if moment == "trained" else ""
    return ReportTable(caption=caption, frame=frame, text=text, file=file)


def collect_tables(summary: RunSummary, claims: Claims) -> dict[str, ReportTable]:
    """Return the tables that ``summary`` has data for: metric, trained, differences, by client, target, concordance."""
    tables: dict[str, ReportTable] = {}

    def add(name: str, caption: str, frame: pd.DataFrame, text: TextTable, file: str = "") -> None:
        text = replace(text, partial=partial)
        tables[name] = ReportTable(caption=caption, frame=frame, text=text, file=file or name)

    metric, partial = summary.metric, describe_partial(summary)
    tables["metric"] = make_metric_table(summary, claims)
    if measures_trained(summary):
        tables["trained"] = make_metric_table(summary, claims, moment="trained")
    if len(frame := tabulate_claims(claims)):
        unit = difference_unit(metric, numbers=summary.of_numbers).name
        caption = f"Macro {summary.metric_name} minus {claims.baseline}'s in {unit}, paired over seeds"
        add("differences", caption, frame, format_difference_table(frame, metric))
    if (target := summary.target_metric) is not None:
        frame = target_table(summary, target)
        add("target", describe_target(summary, target), frame, format_target_table(frame, ended=not partial))
    for name, (caption, frame, text) in list_client_tables(summary).items():
        add(name, caption, frame, text)
    if len(frame := concordance_table(summary)):
        text = format_concordance_table(frame, claims.concordance)
        add("concordance", describe_concordance(summary, frame), frame, text)
    return tables


def collect_crossed(summary: RunSummary) -> list[ReportTable]:
    """Return a table of cross-site validation for each method and moment for which it was requested."""
    tables = []
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
        tables.append(ReportTable(file=file, caption=caption, frame=frame, text=text))
    return tables


def write_page(summary: RunSummary, path: Path) -> Path:
    """Write the page of ``summary`` to ``path`` atomically, with equal bytes for equal summaries; return ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, render_page(summary).encode())
    return path


def render_page(summary: RunSummary) -> str:
    """Return the page's HTML."""
    many = len(summary.clients) > ONE_BY_ONE
    claims = collect_claims(summary)
    tables = collect_tables(summary, claims)
    reached = find_reached_rounds(summary)
    leaders = _find_leaders(tables["metric"].text, summary.methods) if is_even(reached) else {}
    images, panels = list(summary.samples.items())[:PICTURED], make_panels(summary)
    notes = dict.fromkeys(panel.note for panel in panels if panel.note)
    return render_template(
        "page.html.j2",
        summary=summary,
        partial=describe_partial(summary),
        tables=tables,
        leaders=[f"{method} with {text}" for method, text in leaders.items()],
        comparison=describe_leaders(claims, leaders, [m for m in rank_methods(summary) if m not in leaders]),
        lower=is_lower_better(summary.metric),
        unit=difference_unit(summary.metric, numbers=summary.of_numbers).name,
        spread=describe_seeds(summary),
        other_metrics=list(_other_metrics(summary)),
        clinical_title="Survival" if summary.task == "survival" else "Classes and decisions",
        clinical=[(name, *table) for name, table in list_clinical_tables(summary).items()],
        figures={panel.name: embed_panel(panel) for panel in panels},
        legend={name: draw_legend_entry(style) for name, style in make_styles(summary.methods).items() if notes},
        notes=notes,
        claimed=tabulate_pairs(summary, claims),
        compare_with=claims.compare_with,
        profits=describe_clients(summary),
        by_client=[tables[name] for name in list_client_tables(summary)],
        most=ONE_BY_ONE if many else 0,
        without_panel=0 if many else max(0, len(summary.clients) - PICTURED),
        methods=_method_table(summary),
        scopes=[
            (*_scope_table(name, method.entries), _leaving_table(method)) for name, method in summary.methods.items()
        ],
        clients=_client_table(summary),
        worst=list_worst_cases(summary),
        strips={name: encode_strip(several) for name, several in images if len(several)},
        trained=make_table((), describe_run(summary).items()),
        changed=make_table((), flatten_settings(find_changed(summary.config))),
        config=make_table((), flatten_settings(summary.config)),
        environment=make_table((), flatten_settings(summary.environment)),
        crossed=[] if many else collect_crossed(summary),
        notices=[*summary.notices, *list_shortfalls(summary)],
        evaluated=any(text != MISSING for text in tables["metric"].text.values),
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


def _other_metrics(summary: RunSummary) -> Iterator[tuple[str, str, TextTable]]:
    """Yield title, unit and table of every other metric, model and moment that has values."""
    for model, moment in (("personal", "loaded"), ("personal", "trained"), ("global", "loaded")):
        for metric in summary.metrics:
            if (model, metric) == ("personal", summary.metric):
                continue
            table = make_metric_table(summary, metric=metric, model=model, moment=moment).text
            if any(text != MISSING for text in table.values):
                title = f"{_capitalize(name_metric(metric))}, {model} model"
                title += f" {AFTER_WORK}" if moment == "trained" else ""
                unit = _UNITS.get(metric, f"in {metric_unit(metric)[2]}")
                if metric == "loss":
                    unit = f"mean loss, {summary.loss_unit}"
                unit += ", lower is better" if is_lower_better(metric) else ""
                yield title, unit, table
    yield from _class_metrics(summary)


def _class_metrics(summary: RunSummary) -> Iterator[tuple[str, str, TextTable]]:
    """Yield title, unit and table per mask class, if there are several, for metrics that are means over classes."""
    if "dice" not in summary.metrics or not 2 < summary.classes <= CLASSES:
        return
    for metric in (summary.metric if summary.metric in ("dice", "iou") else "dice", *DISTANCES):
        for number in range(1, summary.classes) if metric in summary.metrics else ():
            table = make_metric_table(summary, metric=metric, number=number).text
            if any(text != MISSING for text in table.values):
                title = f"{_capitalize(name_metric(metric))} of class {number}, personal model"
                yield title, f"in {metric_unit(metric)[2]}", table


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


def _scope_table(name: str, entries: Iterable[Mapping[str, Any]]) -> tuple[str, str, TextTable]:
    """Return a method's name, its scope in one line, and the table of its entries."""
    rows, counts, totals = [], Counter[str](), Counter[str]()
    for entry in entries:
        exchange = _EXCHANGE[bool(entry["load"]), bool(entry["send"])]
        counts[exchange] += 1
        totals[exchange] += int(entry["bytes"])
        shape = " x ".join(map(str, entry["shape"])) or "scalar"
        trained = "trained" if entry["trained"] else "buffer" if entry["buffer"] else "frozen"
        rows.append((entry["name"], entry["type"], shape, f"{entry['bytes']:,}", exchange, trained))
    line = ", ".join(f"{count} {kind} ({format_bytes(totals[kind])})" for kind, count in counts.items())
    return name, line, make_table(("entry", "layer", "shape", "bytes", "exchange", "values"), rows)


def _leaving_table(method: MethodSummary) -> TextTable:
    """Return a table of what leaves a client in a round: what it reveals, and who receives it."""
    header = ("sent", "of", "bytes", "reveals", "received by")
    rows = [
        (
            join_some(group.names, shown=NAMED) + (f" ({group.when})" if group.members[0].once else ""),
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
