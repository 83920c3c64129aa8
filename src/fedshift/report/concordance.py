"""FedMMB's discordance: distance of each federated method from training on pooled data, computed only from records.

The loss is the macro test loss of the model that a client would use, just after aggregation. If all clients share a
test set and the method has one model for all, it is the loss of the server's model on that set, as in the paper.
"""

from __future__ import annotations

import math
from itertools import product

import pandas as pd

from ..analysis.similarity import CONCORDANT, compute_discordance
from ..analysis.statistics import decides, half_interval, mean_and_std
from ..results.schema import RunSummary
from .formatting import MISSING, TextTable, explain_spread, format_mean, make_table
from .progress import find_reached_rounds, is_comparable
from .tables import metric_history

Losses = tuple[list[float], list[float]]
"""Macro losses of a federated and a pooled method, round by round."""


def concordance_table(summary: RunSummary) -> pd.DataFrame:
    """Return the discordance of every federated method to every pooled one: index (method, centralized).

    Columns: delta mean and delta std (over seeds, in squared nats), rounds (evaluated by both, for the seed with the
    fewest), seeds (that both have), low and high (95 % intervals over seeds that hold together for all rows, NaN with
    too few seeds). Each loss is the mean over the clients that both measured in that round. The table is empty if
    either kind of method is absent; delta is NaN if no round was evaluated by both.
    """
    rows, losses = {}, _collect_losses(summary)
    for pair, seeds in losses.items():
        mean, std = mean_and_std(compute_discordance(*both) for both in seeds)
        half = math.nan
        if decides(len(seeds), len(losses)):
            half = half_interval(std / math.sqrt(len(seeds)), len(seeds), comparisons=len(losses))
        rounds = min((len(federated) for federated, _ in seeds), default=0)
        rows[pair] = [mean, std, rounds, len(seeds), max(0.0, mean - half) if half == half else half, mean + half]
    index = pd.MultiIndex.from_tuples(list(rows), names=["method", "centralized"])
    columns = ["delta mean", "delta std", "rounds", "seeds", "low", "high"]
    return pd.DataFrame(list(rows.values()), index=index, columns=columns)


def pair_losses(federated: pd.Series, centralized: pd.Series) -> list[Losses]:
    """Return the macro losses of both methods for each seed that both have, round by round.

    Both series have the same index levels, among them seed and round. Only entries that both have count, and each
    round's loss is their mean.
    """
    common = pd.concat([federated, centralized], axis=1, join="inner", keys=["federated", "centralized"])
    seeds = common.groupby(["seed", "round"]).mean().groupby("seed")
    return [(rounds["federated"].tolist(), rounds["centralized"].tolist()) for _, rounds in seeds]


def format_concordance_table(table: pd.DataFrame) -> TextTable:
    """Return a concordance table as text: ``1.4e-05 (2.0e-06)``, and on which side of the threshold its interval is."""
    rows = [
        (*pair, format_mean(mean, std, ".1e"), rounds, seeds, _judge(low, high))
        for pair, mean, std, rounds, seeds, low, high in table.itertuples(name=None)
    ]
    note = f"{explain_spread(max(table['seeds'], default=0))} Verdicts are of 95 % intervals that hold together."
    return make_table(("method", "pooled", "discordance", "rounds", "seeds", "verdict"), rows, note=note)


def describe_concordance(summary: RunSummary, table: pd.DataFrame) -> str:
    """Return the table's caption, with advice on comparing every round if only some were evaluated."""
    every = table["rounds"].min() >= summary.rounds or bool(summary.stopped)
    return (
        "Concordance with centralized training: mean squared difference of macro test losses (nats) over the rounds "
        f"that both evaluated{'' if every else ' (--evaluate-every 1 evaluates all)'}; concordant below {CONCORDANT:g}"
    )


def _judge(low: float, high: float) -> str:
    if math.isnan(low):
        return MISSING
    return "concordant" if high < CONCORDANT else "not concordant" if low >= CONCORDANT else "inconclusive"


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
