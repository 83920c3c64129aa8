"""Tables and figures of ``docs/benchmark.md``, from the records of ``benchmarks/methods.py``.

``python benchmarks/ranking.py`` reads ``docs/benchmark.parquet``, and writes the part of the page between its two
marks and the figures in ``docs/images/benchmark``. Nothing is trained. For each budget, methods are compared on the
federations that have records of all of :data:`BASELINES`.

Federations of one source, such as the divisions of the embedded digits, share samples. They count as one, their mean:
intervals and tests are over sources. Intervals are Student's at 95 %, over sources, over sites, or over seeds in the
table by federation; a star marks a difference whose interval, for all methods of its column together (Bonferroni),
excludes 0. Mean ranks are compared as by Demšar 2006, "Statistical Comparisons of Classifiers over Multiple Data Sets"
(JMLR 7): by Friedman's test, and by the critical difference of Nemenyi's.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from federations import HELD_APART, MAKERS, SOURCES
from matplotlib.figure import Figure
from methods import (
    ANEW,
    EXCUSED,
    MOMENTA,
    PLAIN,
    RATES,
    SEARCHED,
    SETTINGS,
    SPACES,
    UNADAPTED,
    list_starts,
    read_records,
)
from scipy.stats import friedmanchisquare, studentized_range

from fedshift.analysis.statistics import count_needed_seeds, paired_difference
from fedshift.report.figures import to_svg
from fedshift.report.style import BLUE, INK, figure_settings, label_rows

DOCS = Path(__file__).parents[1] / "docs"
PAGE, RECORDS, IMAGES = DOCS / "benchmark.md", DOCS / "benchmark.parquet", DOCS / "images" / "benchmark"
BEGIN, END = "<!-- written by benchmarks/ranking.py -->\n", "<!-- end -->\n"
BASE, ALONE = "fedavg", "single"
BASELINES = {BASE, ALONE}
"""Methods with which others are compared."""
POLICIES = (UNADAPTED, "reestimate", "tent", "mixed")


def count_local_steps(rounds: int) -> int:
    """Return the steps of a client in ``rounds`` rounds."""
    return int(SETTINGS["steps"]) * rounds


@dataclass(frozen=True, kw_only=True)
class Gain:
    """A method's difference to FedAvg in points, with its interval, and whether it is significant in its family."""

    mean: float
    low: float
    high: float
    significant: bool

    def __str__(self) -> str:
        if math.isnan(self.mean):
            return ""
        interval = "" if math.isnan(self.low) else f" ({self.low:+.1f} to {self.high:+.1f})"
        return f"{self.mean:+.1f}{interval}{' *' * self.significant}"


def find_gains(values: pd.DataFrame, base: pd.Series) -> dict[str, Gain]:
    """Return the gain of each column of ``values`` over ``base``, paired over their rows."""
    gains, comparisons = {}, len({*values} - {BASE})
    for name in values:
        alone, together = (
            paired_difference(values[name].tolist(), base.tolist(), comparisons=number) for number in (1, comparisons)
        )
        gains[str(name)] = Gain(
            mean=alone.mean, low=alone.low, high=alone.high, significant=together.excludes_zero and name != BASE
        )
    return gains


def average_sources(table: pd.DataFrame) -> pd.DataFrame:
    """Return the mean over the federations of each source; ``table`` has a row for each federation."""
    return table.groupby(table.index.map(SOURCES), sort=False).mean()


def compare_federations(table: pd.DataFrame) -> dict[str, Gain]:
    """Return each method's gain, over sources, of the mean difference on their federations."""
    gains = average_sources(table.sub(table[BASE], axis=0))
    return find_gains(gains, gains[BASE])


def critical_difference(methods: int, blocks: int, level: float = 0.95) -> float:
    """Return the difference of mean ranks that Nemenyi's test calls significant (Demšar 2006, section 3.2.2)."""
    return float(studentized_range.ppf(level, methods, math.inf)) * math.sqrt(methods * (methods + 1) / 12 / blocks)


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Results of clients that trained, at one budget.

    ``clients``: percent, mean over seeds, of each federation and client x method. ``anew``: the same with statistics
    estimated anew, as they are where these cannot lag. ``seeds``: percent, mean over clients, of each federation and
    seed x method. NaN where a method does not apply or diverged.
    """

    rounds: int
    clients: pd.DataFrame
    anew: pd.DataFrame
    seeds: pd.DataFrame

    @property
    def federations(self) -> pd.DataFrame:
        """Percent, mean over clients, of each federation x method."""
        return average(self.clients)

    @property
    def complete(self) -> pd.DataFrame:
        """The largest part of :attr:`federations` without gaps: those with the most methods x their common methods."""
        table = self.federations
        order = table.notna().sum(axis=1).sort_values(ascending=False, kind="stable").index
        parts = (table[table.index.isin(order[:count])].dropna(axis=1) for count in range(1, len(table) + 1))
        return max(parts, key=lambda part: (part.size, len(part)))

    @property
    def ranks(self) -> pd.DataFrame:
        """The rank of each method of :attr:`complete` on each source, by its mean over the source's federations."""
        return average_sources(self.complete).rank(axis=1, ascending=False)


def average(clients: pd.DataFrame) -> pd.DataFrame:
    """Return the mean over the clients of each federation."""
    return clients.groupby("federation").mean()


def make_ranking(records: pd.DataFrame, rounds: int) -> Ranking:
    """Return the ranking of clients that trained after ``rounds`` rounds."""
    own = records[(records["left_out"] == "") & (records["rounds"] == rounds)]
    has = own[own["measured"] == PLAIN].groupby("federation")["method"].agg(set)
    kept = [name for name in MAKERS if name in has.index and has[name] >= BASELINES]
    own = own[own["federation"].isin(kept)]

    def spread(measured: str, *index: str) -> pd.DataFrame:
        rows = own[own["measured"] == measured]
        table = rows.pivot_table("value", list(index), "method", aggfunc=lambda values: values.mean(skipna=False))
        return table.reindex(kept, level="federation")

    clients = spread(PLAIN, "federation", "client")
    anew = spread(ANEW, "federation", "client").reindex(index=clients.index, columns=clients.columns)
    return Ranking(rounds=rounds, clients=clients, anew=anew.fillna(clients), seeds=spread(PLAIN, "federation", "seed"))


def find_winners(records: pd.DataFrame) -> pd.DataFrame:
    """Return the chosen setting of each cell."""
    cell = ["federation", "left_out", "rounds", "method"]
    rows = records[~records["measured"].isin([SEARCHED, EXCUSED])]
    return rows.drop_duplicates(cell)[[*cell, "rate", "momentum", "own"]]


def describe_edges(winners: pd.DataFrame) -> str:
    """Return how many winners have the lowest and the highest learning rate."""
    return f"{(winners['rate'] == RATES[0]).sum()} / {(winners['rate'] == RATES[-1]).sum()}"


def format_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table whose first column is text."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (heads, *rows)]
    return "\n".join([lines[0], f"|---|{'---:|' * (len(heads) - 1)}", *lines[1:]]) + "\n"


def describe_rule(winners: pd.DataFrame) -> str:
    """Return where the chosen settings lie within the search, as a sentence."""
    chosen = zip(winners["method"], winners["own"], strict=True)
    changed = sum(own != list_starts(method)[0].own for method, own in chosen)
    searched = winners["method"].isin([*SPACES])
    return (
        f"Of {len(winners)} chosen settings, {(winners['rate'] == RATES[0]).sum()} have the lowest rate, {RATES[0]:g}, "
        f"{(winners['rate'] == RATES[-1]).sum()} the highest, {RATES[-1]:g}, and "
        f"{(winners['momentum'] == MOMENTA[-1]).sum()} have momentum {MOMENTA[-1]:g}. Of {searched.sum()} with "
        f"arguments to search, {changed} have others than the defaults."
    )


def rank_trained(ranking: Ranking, winners: pd.DataFrame) -> str:
    """Return the table of methods for clients that trained."""
    table, clients = ranking.federations, ranking.clients
    gains, again = compare_federations(table), compare_federations(average(ranking.anew))
    worst = compare_federations(clients.groupby("federation").min())
    ranks = ranking.ranks.mean()
    rows = []
    for method in sorted(table, key=lambda name: (ranks.get(name, math.inf), -gains[name].mean)):
        own = clients[method].dropna()
        harmed = (own < clients.loc[own.index, ALONE]).sum()
        edges = describe_edges(winners[(winners["method"] == method) & (winners["rounds"] == ranking.rounds)])
        rank = f"{ranks[method]:.1f}" if method in ranks else ""
        least = f"{worst[method].mean:+.1f}"
        here = table.index[table[method].notna()]
        number = f"{len(here)} of {here.map(SOURCES).nunique()}"
        rows.append([method, number, gains[method], again[method], least, f"{harmed} of {len(own)}", rank, edges])
    heads = (
        "method", "federations of sources", "gain over FedAvg", "statistics estimated anew", "worst client",
        "harmed clients", "mean rank", "lowest / highest rate",
    )  # fmt: skip
    return format_table(heads, rows)


def list_federations(ranking: Ranking) -> str:
    """Return the table of gains by federation, paired over seeds."""
    gains, table = dict[str, dict[str, Gain]](), ranking.federations
    for name in table.index:
        own = ranking.seeds.loc[name].loc[:, table.loc[name].notna()]
        gains[name] = find_gains(own, own[BASE])
    order = table.sub(table[BASE], axis=0).mean().sort_values(ascending=False, kind="stable").index
    names = [f"{name} (held apart)" if name in HELD_APART else name for name in gains]
    first = ["FedAvg, percent", *(f"{value:.1f}" for value in table[BASE])]
    rows = [[method, *(each.get(method, "") for each in gains.values())] for method in order if method != BASE]
    return format_table(["method", *names], [first, *rows])


def keep_testable(rankings: Iterable[Ranking]) -> list[Ranking]:
    """Return the rankings with sources enough for a test of ranks."""
    return [each for each in rankings if len(each.ranks) >= count_needed_seeds(1)]


def describe_ranks(ranking: Ranking) -> str:
    """Return Friedman's test, and the methods that are behind the first by the critical difference, as sentences."""
    table = ranking.ranks
    ranks = table.mean().sort_values()
    least = critical_difference(table.shape[1], len(table))
    p = friedmanchisquare(*(table[name] for name in table)).pvalue
    far = [name for name, rank in ranks.items() if rank - ranks.iloc[0] >= least]
    return (
        f"{table.shape[1]} methods have all of {len(ranking.complete)} federations of {len(table)} sources. Friedman's "
        f"test of equal ranks: p = {p:.2g}. The critical difference of mean ranks is {least:.1f}. {ranks.index[0]} has "
        f"the best mean rank; behind it by more than this: {', '.join(far) or 'none'}."
    )


def tabulate_unseen(records: pd.DataFrame, rounds: int, winners: pd.DataFrame) -> tuple[str, dict[str, Gain]]:
    """Return the table of methods for sites that never trained, and their gains without adaptation.

    A pair of the comparison is a site that was left out; its values are means over seeds.
    """
    own = records[(records["left_out"] != "") & (records["rounds"] == rounds)]
    own = own[own["measured"].isin(POLICIES)]
    place = ["federation", "left_out"]
    values = own.pivot_table("value", place, ["measured", "method"], aggfunc=lambda each: each.mean(skipna=False))
    values = values[values[UNADAPTED, BASE].notna()]
    plain = values[UNADAPTED]
    gains, again = find_gains(plain, plain[BASE]), find_gains(values["reestimate"], plain[BASE])
    means = values.mean()
    rows = []
    for method in sorted(plain, key=lambda name: (-plain[name].count(), -gains[name].mean)):
        cells = [means.get((policy, method), math.nan) for policy in POLICIES]
        edges = describe_edges(winners[(winners["method"] == method) & (winners["rounds"] == rounds)])
        rows.append(
            [
                method, plain[method].count(), gains[method], again.get(method, ""), f"{plain[method].min():.1f}",
                *("" if math.isnan(value) else f"{value:.1f}" for value in cells), edges,
            ]
        )  # fmt: skip
    heads = ("method", "sites", "gain as it is", "gain with `reestimate`", "worst site")
    heads += (*POLICIES, "lowest / highest rate")
    return format_table(heads, rows), gains


def draw_gains(panels: Mapping[str, Mapping[str, Gain]]) -> Figure:
    """Draw gains over FedAvg with their intervals, a panel for each title."""
    longest = max(map(len, panels.values()))
    with figure_settings():
        figure = Figure(figsize=(4 * len(panels), 0.9 + 0.19 * longest), layout="constrained")
        for axes, (title, gains) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
            order = sorted((name for name in gains if name != BASE), key=lambda name: -gains[name].mean)
            for row, name in enumerate(order):
                gain = gains[name]
                axes.hlines(row, gain.low, gain.high, color=BLUE, linewidth=1.4)
                axes.plot(gain.mean, row, "o", color=BLUE, markerfacecolor=BLUE if gain.significant else "white")
            axes.axvline(0, color=INK, linewidth=0.8)
            axes.set(title=title, xlabel="points above FedAvg")
            label_rows(axes, order, 20, 0.4)
    return figure


def draw_ranks(rankings: Sequence[Ranking]) -> Figure:
    """Draw mean ranks and the critical difference (Demšar 2006, figure 1), a panel for each budget."""
    heights = [0.75 + 0.085 * ranking.ranks.shape[1] for ranking in rankings]
    with figure_settings():
        figure = Figure(figsize=(8, sum(heights)), layout="constrained")
        panels = figure.subplots(len(rankings), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
        for axes, ranking in zip(panels, rankings, strict=True):
            table = ranking.ranks
            ranks = table.mean().sort_values()
            number, half = len(ranks), -(-len(ranks) // 2)
            least = critical_difference(number, len(table))
            axes.set(xlim=(-0.25 * number, 1.25 * number), ylim=(half + 1, -2))
            axes.axis("off")
            axes.hlines(0, 1, number, color=INK, linewidth=0.8)
            for tick in range(1, number + 1):
                axes.vlines(tick, -0.15, 0.15, color=INK, linewidth=0.8)
                if tick % 2:
                    axes.text(tick, -0.4, str(tick), ha="center")
            for place, (name, rank) in enumerate(ranks.items()):
                left = place < half
                row = 1 + (place if left else number - 1 - place)
                side = 0.2 if left else number + 0.8
                axes.plot([rank, rank, side], [0, row, row], color=INK, linewidth=0.6)
                axes.text(side, row, f" {name} ", ha="right" if left else "left", va="center")
            axes.plot([1, min(1 + least, number)], [-1.2, -1.2], color=BLUE, linewidth=2)
            axes.text(1, -1.45, f"critical difference {least:.1f}", color=BLUE, va="bottom")
            steps = count_local_steps(ranking.rounds)
            axes.set_title(f"Mean rank over {len(table)} sources, {steps} local steps")
    return figure


def write_parts(records: pd.DataFrame) -> Iterator[str]:
    """Yield the parts of the page that follow from ``records``."""
    winners = find_winners(records)
    trained, unseen = winners[winners["left_out"] == ""], winners[winners["left_out"] != ""]
    ranked = [make_ranking(records, int(rounds)) for rounds in sorted(trained["rounds"].unique())]
    yield "### What was run\n"
    for ranking in ranked:
        names = [f"`{name}`{' (held apart)' * (name in HELD_APART)}" for name in ranking.federations.index]
        methods, steps = ", ".join(ranking.federations), count_local_steps(ranking.rounds)
        yield f"- {steps} local steps of clients that trained: {', '.join(names)}; {methods}."
    for rounds in sorted(unseen["rounds"].unique()):
        own = unseen[unseen["rounds"] == rounds]
        sites = own.groupby("federation", sort=False)["left_out"].nunique()
        text = ", ".join(f"`{name}` ({number} sites)" for name, number in sites.items())
        methods = ", ".join(sorted(own["method"].unique()))
        yield f"- {count_local_steps(rounds)} local steps, each site left out: {text}; {methods}."
    yield "\nAll other federations, sites, methods and budgets of the program were not run.\n"
    yield f"{describe_rule(winners)}\n"
    yield "### Clients that trained\n"
    yield "![Gains over FedAvg of clients that trained](images/benchmark/trained.svg)\n"
    for ranking in ranked:
        yield f"After **{count_local_steps(ranking.rounds)} local steps**:\n"
        yield rank_trained(ranking, trained)
    yield "![Mean ranks of methods](images/benchmark/ranks.svg)\n"
    for ranking in keep_testable(ranked):
        yield f"After {count_local_steps(ranking.rounds)} local steps: {describe_ranks(ranking)}\n"
    for ranking in ranked:
        yield f"Gains over FedAvg by federation after {count_local_steps(ranking.rounds)} local steps:\n"
        yield list_federations(ranking)
    yield "### Sites that never trained\n"
    yield "![Gains over FedAvg at sites that never trained](images/benchmark/unseen.svg)\n"
    for rounds in sorted(unseen["rounds"].unique()):
        yield f"After **{count_local_steps(rounds)} local steps** without the site:\n"
        yield tabulate_unseen(records, rounds, unseen)[0]


def make_figures(records: pd.DataFrame) -> dict[str, Figure]:
    """Return the figures by name."""
    winners = find_winners(records)
    trained, unseen = winners[winners["left_out"] == ""], winners[winners["left_out"] != ""]
    ranked = [make_ranking(records, int(rounds)) for rounds in sorted(trained["rounds"].unique())]
    seen = {
        f"Clients that trained, {count_local_steps(each.rounds)} local steps": compare_federations(each.complete)
        for each in ranked
    }
    new = {
        f"Sites left out, {count_local_steps(rounds)} local steps": tabulate_unseen(records, rounds, unseen)[1]
        for rounds in sorted(unseen["rounds"].unique())
    }
    return {"trained": draw_gains(seen), "unseen": draw_gains(new), "ranks": draw_ranks(keep_testable(ranked))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="?", default=RECORDS)
    records = read_records(parser.parse_args().records)
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(before + BEGIN + "\n" + "\n".join(write_parts(records)) + "\n" + END + after, encoding="utf-8")
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, figure in make_figures(records).items():
        (IMAGES / f"{name}.svg").write_text(to_svg(figure, background="white"), encoding="utf-8")


if __name__ == "__main__":
    main()
