"""Report of a search for a method: a table of methods, the advised method, its expected gain, and the reasons."""

from __future__ import annotations

import math
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from shlex import quote

import pandas as pd
from rich.console import Console

from ..analysis.statistics import PairedDifference, count_needed_seeds
from ..report.formatting import MISSING, TextCell, TextTable, Unit, difference_unit, make_table
from ..report.formatting import write_table as write_report_table
from ..report.html import render_template
from ..report.publication import print_parts
from ..results.schema import metric_unit, name_metric
from .search import CONFIRMING, LOCAL, Candidate, Search

NOTE = (
    "Gain: over {baseline} at its best learning rate after the same number of rounds. Intervals: 95 %, Student's t, of "
    "the mean over clients, each with its mean over seeds; they cover the sampling of clients, not the choice among "
    "candidates."
)


def tabulate_search(search: Search) -> pd.DataFrame:
    """Return one row per method, best first, with its best learning rate in the last rung that it reached.

    Columns: learning rate, rounds, the macro validation metric, and the gain over the baseline with its interval, as
    fractions.
    """
    rows: dict[str, dict[str, float]] = {}
    for rung in reversed(range(len(search.results))):
        macro = search.table(rung).mean()
        for each in search.rank(rung):
            if each.method not in rows:
                gain = search.gain(each, rung)
                rows[each.method] = {
                    "lr": math.nan if each.rate is None else each.rate,
                    "rounds": search.rungs[rung].rounds,
                    "validation": float(macro[each.name]),
                    "gain": gain.mean,
                    "low": gain.low,
                    "high": gain.high,
                }
    for each in search.candidates:
        rows.setdefault(
            each.method, dict.fromkeys(("lr", "validation", "gain", "low", "high"), math.nan) | {"rounds": 0}
        )
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("method")


def format_search(search: Search) -> TextTable:
    """Format :func:`tabulate_search` as text, with the advised method in bold."""
    unit, rows = difference_unit(search.metric), []
    for method, row in tabulate_search(search).iterrows():
        cells = [
            MISSING if math.isnan(row["lr"]) else f"{row['lr']:g}",
            f"{row['rounds']:.0f}" if row["rounds"] else "diverged",
            unit.format(row["validation"]),
            unit.format_signed(row["gain"]),
            unit.format_interval(row["low"], row["high"]),
        ]
        best = method == search.best.method
        rows.append((TextCell(text=str(method), best=best), *cells))
    header = ("method", "lr", "rounds", name_metric(search.metric), f"gain, {unit.name}", "interval")
    return make_table(header, rows, note=NOTE.format(baseline=search.baseline))


def describe_search(search: Search, flags: str | None = None) -> Iterator[str]:
    """Yield the advice with its reasons, what was omitted, the plan, and a command that confirms the advice.

    ``flags``: command-line flags with the settings of all methods; None: omit the command.
    """
    if not search.ended:
        yield _describe_rest(search)
    if search.results:
        yield from _describe_best(search)
    for method, why in search.refused.items():
        yield f"Not tried: {method}, because {why}."
    if search.dropped:
        yield f"Not tried, because the budget does not allow them: {', '.join(search.dropped)}."
    yield describe_plan(search)
    if search.results and flags is not None:
        compared = [each for each in (search.find_baseline(-1), search.find(LOCAL), search.best) if each is not None]
        names = list(dict.fromkeys(each.name for each in compared))
        methods = {each.method for each in compared}
        known = [search.costs[method] for method in methods if method in search.costs]
        minutes = sum(known) * search.asked * CONFIRMING / 60
        took = f" This takes about {minutes:.2g} minutes beyond the budget." if len(known) == len(methods) else ""
        yield f"Confirm the advice on test data, with seeds that the search has not used.{took}"
        yield f"fedshift compare {flags} --methods {quote(','.join(names))} --rounds {search.asked}"


def _describe_rest(search: Search) -> str:
    """Describe the remaining work of a search that has not ended."""
    done, rung = len(search.results), search.rungs[len(search.results)]
    why = f"the budget of {search.budget:g} minutes is used up" if search.overtime else "the search was stopped"
    undone = f"{rung.candidates} candidates for {rung.rounds} rounds"
    basis = "" if done else ", and there is no advice yet"
    return (
        f"PARTIAL: {why}: {done} of {len(search.rungs)} rungs have ended; the next one trains {undone}{basis}. "
        "--resume continues."
    )


def _describe_best(search: Search) -> Iterator[str]:
    best, base, unit = search.best, search.find_baseline(-1), difference_unit(search.metric)
    macro = search.table(-1).mean()
    value, other = (unit.format(macro[each.name]) for each in (best, base))
    advice = f"Advised: {_name(best)}, the best on validation data after {search.last.rounds} rounds"
    local = search.find(LOCAL)
    if local and best == local and best.name != search.rank(-1)[0].name:
        first = search.rank(-1)[0]
        yield (
            f"Advised: {_name(best)}, which trains each client by itself. {_name(first)} is better on validation data "
            f"({name_metric(search.metric)} {unit.format(macro[first.name])}; {value}), but no better than local "
            "training at clients whose data did not choose it, and local training is simpler."
        )
    elif best.name != search.rank(-1)[0].name:
        first = search.rank(-1)[0]
        yield (
            f"Advised: {_name(best)}. {_name(first)} is better on validation data ({name_metric(search.metric)} "
            f"{unit.format(macro[first.name])}; {other}), but the best candidate at some clients loses at the others."
        )
    elif best.method == search.baseline:
        yield f"{advice} ({name_metric(search.metric)} {value}); no other method of the last rung does better."
    else:
        yield f"{advice} ({name_metric(search.metric)} {value}; {_name(base)} {other})."
    yield from _describe_gains(search, unit)
    yield f"Why {best.method}: {search.reasons[best.method]}."
    if best.method in search.costs and base.method in search.costs and best.method != base.method:
        ratio = search.costs[best.method] / search.costs[base.method]
        yield f"A round of {best.method} with its evaluation takes {ratio:.1f} times as long as one of {base.method}."
    rates = sorted({each.rate for each in search.candidates if each.rate is not None})
    if len(rates) > 1 and best.rate in (rates[0], rates[-1]):
        end, beyond = ("smallest", "smaller") if best.rate == rates[0] else ("largest", "larger")
        yield f"{best.rate:g} is the {end} learning rate that was tried: a {beyond} one may be better (--rates)."


def _describe_gains(search: Search, unit: Unit) -> Iterator[str]:
    """Yield the expected gain over the baseline, and the advised method's over local training, with intervals."""
    clients, local = len(search.table(-1)), search.find(LOCAL)
    if clients < 2:
        yield f"Only one client has values for every candidate: it cannot show a gain over {search.baseline}."
    else:
        how = "measured at each client for the candidate that is best at the others"
        simple = f"{search.baseline}, which is simpler," if search.best.method != search.baseline else ""
        yield _describe_gain(f"Expected gain over {search.baseline}", how, search.expected, clients, unit, simple)
    if local and search.best != local:
        name, gain = f"Gain over local training ({_name(local)})", search.gain(search.best, -1, local)
        simple = "local training, which needs no federation,"
        yield _describe_gain(name, "paired", gain, clients, unit, simple)


def _describe_gain(name: str, how: str, gain: PairedDifference, clients: int, unit: Unit, simple: str) -> str:
    """Describe a gain with its interval; ``simple``: what may do as well if that contains 0; empty: nothing."""
    text = f"{name}: {unit.format_signed(gain.mean)} {unit.name}"
    if math.isnan(gain.low):
        few = "are too few for an interval" if clients < count_needed_seeds(1) else "agree too closely for one"
        return f"{text} ({how}); {clients} clients {few}."
    text += f", 95 % interval {unit.format_interval(gain.low, gain.high)} over {clients} clients ({how})."
    return text + f" The interval contains 0: {simple} may do as well." * bool(gain.low <= 0 and simple)


def describe_plan(search: Search) -> str:
    """Describe the plan, and the parts of it that depend on timing."""
    rungs = ", ".join(f"{rung.candidates} for {rung.rounds}" for rung in search.rungs)
    fewer = "" if search.rungs[-1].rounds == search.asked else f" (of {search.asked} requested)"
    return (
        f"Searched: {len(search.candidates)} candidates in rungs, {rungs} rounds{fewer}, predicted to take "
        f"{search.seconds / 60:.1f} of {search.budget:g} minutes, diagnosis and timing included; "
        f"{search.spent / 60:.1f} are used. Only validation data are measured; after fewer rounds than requested, with "
        "re-estimated BatchNorm statistics. How many candidates and rounds fit depends on the speed of this machine; "
        "with the same number of both, results are the same."
    )


def _name(candidate: Candidate) -> str:
    return candidate.method if candidate.rate is None else f"{candidate.method} at learning rate {candidate.rate:g}"


def write_search(search: Search, directory: Path) -> None:
    """Write the table of ``search`` to ``directory``/tables in every format, if a rung has ended."""
    if search.results:
        caption = f"Validation {name_metric(search.metric)} of the methods that were tried"
        write_report_table(directory / "tables", "advice", format_search(search), tabulate_search(search), caption)


def list_parts(search: Search, flags: str | None = None) -> Iterator[str | TextTable]:
    """Yield the findings, the table and the sentences to show for ``search``."""
    yield from search.findings
    if search.results:
        yield f"Validation {name_metric(search.metric)} in {metric_unit(search.metric)[2]}, mean over clients"
        yield format_search(search)
    yield from describe_search(search, flags)


class MethodAdvice:
    """The method that a search in ``directory`` advises, for notebooks; ``print`` shows what the command line shows.

    Attributes:
        search: Plan and results of all rungs.
        directory: Directory of the search; ``fedshift.read_run(directory / "search")`` is the last rung's comparison.

    """

    def __init__(self, search: Search, directory: Path) -> None:
        self.search, self.directory = search, directory

    @property
    def method(self) -> str:
        """The advised method with its learning rate, as ``methods`` of :func:`fedshift.compare` takes it."""
        return self.search.best.name

    @property
    def gain(self) -> PairedDifference:
        """The expected gain over the baseline in the validation metric, a fraction, and its interval over clients."""
        return self.search.expected

    def table(self) -> pd.DataFrame:
        """Return one row per tried method: :func:`tabulate_search`."""
        return tabulate_search(self.search)

    def __repr__(self) -> str:
        return f"<Advice on {self.search.federation}: {self.method}, of {len(self.search.candidates)} candidates>"

    def __str__(self) -> str:
        written = StringIO()
        print_parts(Console(file=written, width=1000), list_parts(self.search))
        return "\n".join(line.rstrip() for line in written.getvalue().splitlines()).strip("\n")

    def _repr_html_(self) -> str:
        return render_template("notebook.html.j2", parts=list(list_parts(self.search)))
