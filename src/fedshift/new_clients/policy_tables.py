"""Tables of the policies' results."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from pathlib import Path

import pandas as pd
from rich.console import Console

from ..analysis.statistics import PairedDifference, correct_family, paired_difference
from ..report.formatting import (
    VARIED_BY_SEED,
    TextTable,
    difference_unit,
    format_metric_table,
    make_table,
    to_terminal,
)
from ..report.formatting import write_table as write_report_table
from ..report.tables import ONE_BY_ONE, describe_missing, mask_incomparable, summarize_seeds
from ..results.schema import Row, compute_metric, is_plain
from ..utils.files import write_atomically
from .policies import NEEDS, UNCHANGED


def seed_table(rows: Iterable[Row], metric: str) -> pd.DataFrame:
    """Tabulate ``metric`` of each client, in the order of ``rows``, x (method and policy, seed); NaN where missing."""
    frame = pd.DataFrame(list(rows))
    values = frame.assign(value=compute_metric(frame, metric).astype(float))
    wide = values.pivot(index="client", columns=["title", "seed"], values="value")
    columns = pd.MultiIndex.from_product([frame["title"].unique(), sorted(frame["seed"].unique())])
    return wide.reindex(index=frame["client"].unique()).reindex(columns=columns)


def mean_over_seeds(seeds: pd.DataFrame) -> pd.DataFrame:
    """Summarize :func:`seed_table` and its mean over clients, ``macro``, x (method and policy, mean | std | seeds).

    ``macro`` is over the clients that every policy has with a seed.
    """
    macro = mask_incomparable(seeds).mean().to_frame("macro").T
    return summarize_seeds(pd.concat([seeds, macro])).rename_axis("client")


def policy_table(
    table: pd.DataFrame, metric: str, needs: dict[str, str], *, missing: str = "", partial: str = "", even: bool = True
) -> TextTable:
    """Make a row per method and policy with its ``needs``, the clients, and the mean of several; best in bold.

    ``missing``: :func:`explain_missing` of the rows; ``partial``: line with which the table begins; ``even``: whether
    all methods have reached the same round.
    """
    cells = format_metric_table(table, metric, one_by_one=len(table) - 1 <= ONE_BY_ONE, even=even)
    columns = list(zip(*cells.rows[: 1 if len(table) == 2 else None], strict=True))
    names = [cell.text for cell in columns[0]]
    rows = (
        (title, needs[title] or "nothing", *column) for title, column in zip(cells.header[1:], columns[1:], strict=True)
    )
    note = f"{cells.note} {missing}".strip()
    return make_table(("method: policy", "needs", *names), rows, note=note, partial=partial)


def explain_missing(rows: Iterable[Row], metric: str) -> str:
    """Return sentences on the classes, labels or targets that the clients of ``rows`` leave undefined, if any."""
    return describe_missing(pd.DataFrame(list(rows)), metric)


def collect_needs(rows: Iterable[Row]) -> dict[str, str]:
    """Map each method and policy of ``rows`` to its needs."""
    return {row["title"]: row["needs"] for row in rows}


def explain_needs(needs: Iterable[str]) -> str:
    """Explain the words for needs that occur."""
    said = {word for text in needs for word in text.split(", ")}
    parts = "; ".join(f"{word}: {meaning}" for word, meaning in NEEDS.items() if word in said)
    return f"Needed besides the server's entries: {parts}." if parts else "Only the server's entries are needed."


def policy_differences(seeds: pd.DataFrame, level: float = 0.95) -> pd.DataFrame:
    """Subtract FedAvg, or else the first of the table, from each method and policy, paired over clients or seeds.

    If there are several clients, each counts once, with its mean over seeds, because seeds add no new clients; with one
    client the pairs are seeds. Intervals and p-values are corrected for the number of rows, and NaN below three pairs.
    Columns as in ``report.claims.difference_table``, where ``seeds`` is the number of pairs.
    """
    titles = list(seeds.columns.get_level_values(0).unique())
    baseline = next((each for each in titles if is_plain(each.removesuffix(f": {UNCHANGED}"), "fedavg")), titles[0])
    found = {}
    for title in titles:
        if title != baseline:
            gaps = seeds[title] - seeds[baseline]
            values = gaps.mean(axis=1) if len(gaps) > 1 else gaps.iloc[0]
            gap = paired_difference((values := values.dropna()).tolist(), [0.0] * len(values), level)
            found[title] = gap
    return tabulate_differences(baseline, dict(zip(found, correct_family(list(found.values())), strict=True)))


def tabulate_differences(baseline: str, differences: Mapping[str, PairedDifference]) -> pd.DataFrame:
    """Return a table with one row for each of ``differences``."""
    columns = "baseline", "seeds", "difference", "std", "low", "high", "p", "level", "comparisons"
    rows = {
        name: (baseline, gap.pairs, gap.mean, gap.std, gap.low, gap.high, gap.p, gap.level, gap.comparisons)
        for name, gap in differences.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis("method")


def format_differences(table: pd.DataFrame, metric: str, clients: int) -> TextTable:
    """Format :func:`policy_differences` of ``clients`` clients as text."""
    over = "which clients there are, each once with its mean over seeds, and nothing else"
    unit = difference_unit(metric)
    rows = [
        (method, unit.format_signed(row["difference"]), unit.format_interval(row["low"], row["high"]), row["seeds"])
        for method, row in table.iterrows()
    ]
    note = f"Intervals hold together (Holm), and cover {over if clients > 1 else VARIED_BY_SEED}."
    return make_table(("method", "difference", "interval", "pairs"), rows, note=note)


def write_table(folder: Path, name: str, cells: TextTable, table: pd.DataFrame) -> None:
    """Write a table as text, Markdown, LaTeX and CSV into ``folder``."""
    plain = Console(file=io.StringIO(), width=max(80, 24 * len(cells.header)))
    plain.print(to_terminal(cells))
    assert isinstance(plain.file, io.StringIO)
    partial = f"{cells.partial}\n" if cells.partial else ""
    text = partial + "\n".join(line.rstrip() for line in plain.file.getvalue().strip("\n").splitlines()) + "\n"
    write_report_table(folder, name, cells, table)
    write_atomically(folder / f"{name}.txt", text.encode())
