"""FedMMB's discordance: distance of each federated method from training on pooled data, computed only from records.

The loss is the macro test loss of the model that a client would use, just after aggregation. If all clients share a
test set and the method has one model for all, it is the loss of the server's model on that set, as in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product

import pandas as pd

from ..analysis.similarity import CONCORDANT, compute_discordance
from ..analysis.statistics import FEWEST, PairedDifference, mean_and_std
from ..results.schema import RunSummary
from .formatting import MISSING, TextTable, explain_spread, format_mean, format_p_value, make_table
from .progress import find_reached_rounds, is_comparable
from .tables import metric_history

Losses = tuple[list[float], list[float]]
"""Macro losses of a federated and a pooled method, round by round."""


def concordance_table(summary: RunSummary) -> pd.DataFrame:
    """Return the discordance of every federated method to every pooled one: index (method, centralized).

    Columns: delta mean and delta std (over seeds, in squared nats), rounds (evaluated by both, for the seed with the
    fewest), seeds (that both have). Each loss is the mean over the clients that both measured in that round. The table
    is empty if either kind of method is absent; delta is NaN if no round was evaluated by both.
    """
    rows = {}
    for pair, seeds in _collect_losses(summary).items():
        delta = mean_and_std(compute_discordance(*losses) for losses in seeds)
        rows[pair] = [*delta, min((len(federated) for federated, _ in seeds), default=0), len(seeds)]
    index = pd.MultiIndex.from_tuples(list(rows), names=["method", "centralized"])
    return pd.DataFrame(list(rows.values()), index=index, columns=["delta mean", "delta std", "rounds", "seeds"])


def compute_discordances(summary: RunSummary) -> dict[tuple[str, str], list[float]]:
    """Return the discordance of every federated method to every pooled one for each seed that both have."""
    return {pair: [compute_discordance(*both) for both in seeds] for pair, seeds in _collect_losses(summary).items()}


def pair_losses(federated: pd.Series, centralized: pd.Series) -> list[Losses]:
    """Return the macro losses of both methods for each seed that both have, round by round.

    Both series have the same index levels, among them seed and round. Only entries that both have count, and each
    round's loss is their mean.
    """
    common = pd.concat([federated, centralized], axis=1, join="inner", keys=["federated", "centralized"])
    seeds = common.groupby(["seed", "round"]).mean().groupby("seed")
    return [(rounds["federated"].tolist(), rounds["centralized"].tolist()) for _, rounds in seeds]


def format_concordance_table(table: pd.DataFrame, tests: Mapping[tuple[str, str], PairedDifference]) -> TextTable:
    """Return a concordance table as text: ``1.4e-05 (2.0e-06)``, and how it compares with the paper's threshold.

    ``tests``: each discordance minus the threshold, from :class:`~fedshift.report.claims.Claims`.
    """
    rows = [
        (*pair, format_mean(mean, std, ".1e"), rounds, seeds, _verdict(mean, tests[pair]))
        for pair, mean, std, rounds, seeds in table.itertuples(name=None)
    ]
    header = ("method", "pooled", "discordance", "rounds", "seeds", "verdict")
    return make_table(header, rows, note=explain_spread(max(table["seeds"], default=0)))


def describe_concordance(summary: RunSummary, table: pd.DataFrame) -> str:
    """Return the table's caption, with advice on comparing every round if only some were evaluated."""
    every = table["rounds"].min() >= summary.rounds or bool(summary.stopped)
    return (
        "Concordance with centralized training: mean squared difference of macro test losses (nats) over the rounds "
        f"that both evaluated{'' if every else ' (--evaluate-every 1 evaluates all)'}; concordant below {CONCORDANT:g}"
    )


def _verdict(mean: float, test: PairedDifference) -> str:
    if math.isnan(mean):
        return MISSING
    if test.pairs < FEWEST:
        return "too few seeds"
    verdict = "concordant" if mean < CONCORDANT else "not concordant"
    return f"{verdict if test.is_significant else 'not significantly different'} (p {format_p_value(test.p)})"


def _collect_losses(summary: RunSummary) -> dict[tuple[str, str], list[Losses]]:
    """Return :func:`pair_losses` of every federated and every pooled method."""
    pooled = [name for name, method in summary.methods.items() if method.pooled]
    federated = [name for name in summary.methods if name not in pooled]
    losses, reached = metric_history(summary, "loss").dropna(subset="value"), find_reached_rounds(summary)

    def of(name: str, pair: tuple[str, str]) -> pd.Series:
        seeds = [seed for seed in summary.seeds if is_comparable(reached, *pair, seed)]
        rows = losses[(losses["method"] == name) & losses["seed"].isin(seeds)]
        return rows.set_index(["seed", "round", "client"])["value"]

    return {pair: pair_losses(*(of(name, pair) for name in pair)) for pair in product(federated, pooled)}
