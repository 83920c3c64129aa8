"""The page: one HTML file that shows a whole study and needs nothing else, neither network nor scripts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

from .. import __version__
from ..base.files import write_atomically
from ..records import METRICS, PICTURED, Study
from .claims import claims, differences, readings, standing
from .concordance import concordance_cells, concordance_table, concordance_title
from .figures import panels, svg
from .inline import contact_strip, inline_svg
from .orders import order_sentences, ranked
from .tables import (
    AFTER_WORK,
    ONE_BY_ONE,
    QUANTILES,
    accuracy_table,
    measures_trained,
    reported_rounds,
    shortfalls,
    traffic_table,
)
from .target import target_cells, target_table, target_title
from .text import (
    MISSING,
    Cell,
    TextTable,
    difference_cells,
    flatten,
    latex,
    markdown,
    metric_cells,
    size,
)

_UNITS = {"loss": "mean cross-entropy in nats, lower is better", "auc": "area under the ROC curve in percent"}
_EXCHANGE = {
    (True, True): "shared",
    (True, False): "loaded only",
    (False, True): "sent only",
    (False, False): "kept local",
}


def write_page(study: Study, path: Path) -> Path:
    """Write the page for ``study`` to ``path``: whole or not at all, the same bytes for the same study."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, render_page(study).encode())
    return path


def render_page(study: Study) -> str:
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
    leaders = _leaders(headline.rows[headline.rule][1:], study.methods)
    pictured = list(study.samples.items())[:PICTURED]
    drawn = {p.name: inline_svg(svg(p.figure), p.name, p.description) for p in panels(study)}
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
        target=None if study.reach is None else target_cells(target_table(study, study.reach)),
        target_title="" if study.reach is None else target_title(study, study.reach),
        concordance=concordance_cells(concordance, made.concordance),
        concordance_title=concordance_title(study, concordance),
        orders=order_sentences(study, made),
        readings=readings(study, made),
        others=list(_other_metrics(study)),
        figures=drawn,
        most=ONE_BY_ONE if many else 0,
        undrawn=0 if many else max(0, len(study.clients) - PICTURED),
        methods=_methods(study),
        scopes=[_scope(name, facts.entries) for name, facts in study.methods.items()],
        clients=_clients(study),
        strips={name: contact_strip(images) for name, images in pictured if len(images)},
        config=flatten(study.config),
        environment=flatten(study.environment),
        notices=[*study.notices, *shortfalls(study)],
        evaluated=any(text != MISSING for text in headline.values),
        latex=latex,
        markdown=markdown,
    )


def _leaders(macro: tuple[Cell, ...], methods: Iterable[str]) -> dict[str, str]:
    """The method of the highest macro metric and its value; several where they tie as printed."""
    measured = [cell for cell in macro if cell.text != MISSING]
    return {
        method: cell.text
        for method, cell in zip(methods, macro, strict=True)
        if cell.best or (len(measured) == 1 and cell in measured)
    }


def _other_metrics(study: Study) -> Iterator[tuple[str, str, TextTable]]:
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


def _methods(study: Study) -> TextTable:
    """How each method is written, which round is reported, and the bytes it exchanged."""
    rounds, traffic = reported_rounds(study), traffic_table(study)
    per_round, total = traffic["both per round"].to_dict(), traffic["both in total"].to_dict()
    rows = []
    for name, facts in study.methods.items():
        chosen = rounds.get(name, pd.Series(dtype=int)).tolist()
        texts = [
            name,
            facts.text,
            "yes" if facts.has_global else "none",
            ", ".join(map(str, chosen[:1] if len(set(chosen)) == 1 else chosen)) or MISSING,
            size(facts.down),
            size(facts.up),
            size(per_round[name]),
            size(total[name]),
        ]
        rows.append(_row(texts))
    header = ("method", "written as", "global model", "reported round", "down", "up", "all clients", "whole run")
    return TextTable(header=header, rows=tuple(rows))


def _scope(name: str, entries: Iterable[Mapping[str, Any]]) -> tuple[str, str, TextTable]:
    """A method's name, its scope in one line, and the table of its entries."""
    rows, counts, totals = [], Counter[str](), Counter[str]()
    for entry in entries:
        exchange = _EXCHANGE[bool(entry["load"]), bool(entry["send"])]
        counts[exchange] += 1
        totals[exchange] += int(entry["bytes"])
        shape = " x ".join(map(str, entry["shape"])) or "scalar"
        trained = "trained" if entry["trained"] else "buffer" if entry["buffer"] else "frozen"
        rows.append(_row([entry["name"], entry["type"], shape, f"{entry['bytes']:,}", exchange, trained]))
    line = ", ".join(f"{count} {kind} ({size(totals[kind])})" for kind, count in counts.items())
    return name, line, TextTable(header=("entry", "layer", "shape", "bytes", "exchange", "values"), rows=tuple(rows))


def _clients(study: Study) -> TextTable:
    """The sizes of each client's splits; of many clients, how they are distributed."""
    splits = list(dict.fromkeys(split for sizes in study.clients.values() for split in sizes))
    if len(study.clients) > ONE_BY_ONE:
        sizes = pd.DataFrame([dict(sizes) for sizes in study.clients.values()], columns=splits)
        figures = {"all together": sizes.sum(), "smallest": sizes.min()}
        figures |= {name: sizes.quantile(share) for name, share in QUANTILES.items()} | {"largest": sizes.max()}
        told = [_row([name, *(f"{size:,.0f}" for size in found)]) for name, found in figures.items()]
        return TextTable(header=(f"{len(study.clients):,} clients", *splits), rows=tuple(told))
    rows = [
        _row([name, *(f"{sizes[split]:,}" if split in sizes else MISSING for split in splits)])
        for name, sizes in study.clients.items()
    ]
    return TextTable(header=("client", *splits), rows=tuple(rows))


def _row(texts: Iterable[object]) -> tuple[Cell, ...]:
    return tuple(Cell(text=str(text)) for text in texts)
