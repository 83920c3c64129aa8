"""The page: one HTML file that shows a whole study and needs nothing else, neither network nor scripts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

from ..results.schema import METRICS, PICTURED, RunSummary
from ..utils.files import write_atomically
from ..utils.version import __version__
from .claims import claims, differences, readings, standing
from .concordance import concordance_cells, concordance_table, concordance_title
from .figures import make_panels, to_svg
from .formatting import (
    MISSING,
    TextCell,
    TextTable,
    difference_cells,
    flatten,
    format_bytes,
    metric_cells,
    to_latex,
    to_markdown,
)
from .inline_images import embed_svg, encode_strip
from .rankings import ranked, ranking_sentences
from .tables import (
    AFTER_WORK,
    ONE_BY_ONE,
    QUANTILES,
    accuracy_table,
    find_reported_rounds,
    list_shortfalls,
    measures_trained,
    traffic_table,
)
from .target_metric import target_cells, target_table, target_title

_UNITS = {"loss": "mean cross-entropy in nats, lower is better", "auc": "area under the ROC curve in percent"}
_EXCHANGE = {
    (True, True): "shared",
    (True, False): "loaded only",
    (False, True): "sent only",
    (False, False): "kept local",
}


def write_page(study: RunSummary, path: Path) -> Path:
    """Write the page for ``study`` to ``path``: whole or not at all, the same bytes for the same study."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, render_page(study).encode())
    return path


def render_page(study: RunSummary) -> str:
    """The page's HTML."""
    environment = Environment(
        loader=PackageLoader("fedshift", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    many = len(study.clients) > ONE_BY_ONE
    headline = metric_cells(accuracy_table(study), one_by_one=not many)
    trained = None
    if measures_trained(study):
        trained = metric_cells(accuracy_table(study, moment="trained"), one_by_one=not many)
    made, concordance = claims(study), concordance_table(study)
    leaders = _find_leaders(headline.rows[headline.rule][1:], study.methods)
    pictured = list(study.samples.items())[:PICTURED]
    drawn = {p.name: embed_svg(to_svg(p.figure), p.name, p.description) for p in make_panels(study)}
    return environment.get_template("page.html.j2").render(
        study=study,
        version=__version__,
        leaders=[f"{method} with {text}" for method, text in leaders.items()],
        standing=standing(made, leaders, [method for method in ranked(study) if method not in leaders]),
        headline=headline,
        trained=trained,
        after_work=AFTER_WORK,
        spread="mean (standard deviation) over seeds" if len(study.seeds) > 1 else "one seed",
        differences=difference_cells(differences(made), study.metric),
        target=None if study.target_metric is None else target_cells(target_table(study, study.target_metric)),
        target_title="" if study.target_metric is None else target_title(study, study.target_metric),
        concordance=concordance_cells(concordance, made.concordance),
        concordance_title=concordance_title(study, concordance),
        orders=ranking_sentences(study, made),
        readings=readings(study, made),
        others=list(_other_metrics(study)),
        figures=drawn,
        most=ONE_BY_ONE if many else 0,
        undrawn=0 if many else max(0, len(study.clients) - PICTURED),
        methods=_method_rows(study),
        scopes=[_scope_row(name, facts.entries) for name, facts in study.methods.items()],
        clients=_client_rows(study),
        strips={name: encode_strip(images) for name, images in pictured if len(images)},
        config=flatten(study.config),
        environment=flatten(study.environment),
        notices=[*study.notices, *list_shortfalls(study)],
        evaluated=any(text != MISSING for text in headline.values),
        latex=to_latex,
        markdown=to_markdown,
    )


def _find_leaders(macro: tuple[TextCell, ...], methods: Iterable[str]) -> dict[str, str]:
    """The method of the highest macro metric and its value; several where they tie as printed."""
    measured = [cell for cell in macro if cell.text != MISSING]
    return {
        method: cell.text
        for method, cell in zip(methods, macro, strict=True)
        if cell.best or (len(measured) == 1 and cell in measured)
    }


def _other_metrics(study: RunSummary) -> Iterator[tuple[str, str, TextTable]]:
    """Title, unit and table of every other metric, model and moment that has values."""
    for model, moment in (("personal", "loaded"), ("personal", "trained"), ("global", "loaded")):
        for metric, name in METRICS.items():
            if (model, metric) == ("personal", study.metric):
                continue
            one_by_one = len(study.clients) <= ONE_BY_ONE
            table = metric_cells(accuracy_table(study, metric, model, moment=moment), metric, one_by_one=one_by_one)
            if any(text != MISSING for text in table.values):
                title = f"{name[0].upper()}{name[1:]}, {model} model"
                title += f" {AFTER_WORK}" if moment == "trained" else ""
                yield title, _UNITS.get(metric, "in percent"), table


def _method_rows(study: RunSummary) -> TextTable:
    """How each method is written, which round is reported, and the bytes it exchanged."""
    rounds, traffic = find_reported_rounds(study), traffic_table(study)
    per_round, total = traffic["both per round"].to_dict(), traffic["both in total"].to_dict()
    rows = []
    for name, facts in study.methods.items():
        chosen = rounds.get(name, pd.Series(dtype=int)).tolist()
        texts = [
            name,
            facts.text,
            "yes" if facts.has_global else "none",
            ", ".join(map(str, chosen[:1] if len(set(chosen)) == 1 else chosen)) or MISSING,
            format_bytes(facts.down),
            format_bytes(facts.up),
            format_bytes(per_round[name]),
            format_bytes(total[name]),
        ]
        rows.append(_join_cells(texts))
    header = ("method", "written as", "global model", "reported round", "down", "up", "all clients", "whole run")
    return TextTable(header=header, rows=tuple(rows))


def _scope_row(name: str, entries: Iterable[Mapping[str, Any]]) -> tuple[str, str, TextTable]:
    """A method's name, its scope in one line, and the table of its entries."""
    rows, counts, totals = [], Counter[str](), Counter[str]()
    for entry in entries:
        exchange = _EXCHANGE[bool(entry["load"]), bool(entry["send"])]
        counts[exchange] += 1
        totals[exchange] += int(entry["bytes"])
        shape = " x ".join(map(str, entry["shape"])) or "scalar"
        trained = "trained" if entry["trained"] else "buffer" if entry["buffer"] else "frozen"
        rows.append(_join_cells([entry["name"], entry["type"], shape, f"{entry['bytes']:,}", exchange, trained]))
    line = ", ".join(f"{count} {kind} ({format_bytes(totals[kind])})" for kind, count in counts.items())
    return name, line, TextTable(header=("entry", "layer", "shape", "bytes", "exchange", "values"), rows=tuple(rows))


def _client_rows(study: RunSummary) -> TextTable:
    """The sizes of each client's splits; of many clients, how they are distributed."""
    splits = list(dict.fromkeys(split for sizes in study.clients.values() for split in sizes))
    if len(study.clients) > ONE_BY_ONE:
        sizes = pd.DataFrame([dict(sizes) for sizes in study.clients.values()], columns=splits)
        figures = {"all together": sizes.sum(), "smallest": sizes.min()}
        figures |= {name: sizes.quantile(share) for name, share in QUANTILES.items()} | {"largest": sizes.max()}
        told = [_join_cells([name, *(f"{size:,.0f}" for size in found)]) for name, found in figures.items()]
        return TextTable(header=(f"{len(study.clients):,} clients", *splits), rows=tuple(told))
    rows = [
        _join_cells([name, *(f"{sizes[split]:,}" if split in sizes else MISSING for split in splits)])
        for name, sizes in study.clients.items()
    ]
    return TextTable(header=("client", *splits), rows=tuple(rows))


def _join_cells(texts: Iterable[object]) -> tuple[TextCell, ...]:
    return tuple(TextCell(text=str(text)) for text in texts)
