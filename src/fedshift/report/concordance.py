"""How near each federated method stays to training on pooled data: FedMMB's discordance, from records alone.

The loss is the macro test loss of the model that a client would use, just after aggregation. Where all clients share a
test set, and the method has one model for all, that is the server's model on that set, as in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product

import pandas as pd

from ..analysis.concordance import CONCORDANT, discordance, is_concordant
from ..analysis.statistics import FEWEST, PairedDifference, mean_and_std
from ..results.schema import RunSummary
from .formatting import MISSING, TextCell, TextTable, format_p_value, spread_note
from .tables import metric_history

COLUMNS = ("delta mean", "delta std", "rounds", "seeds")


def concordance_table(study: RunSummary) -> pd.DataFrame:
    """The discordance of every federated method to every pooled one: index (method, centralized).

    Columns: delta mean and delta std (over seeds, in squared nats), rounds (that both evaluated, under the seed that
    has fewest), seeds (that both have). Each loss is the mean over the clients that both measured in that round. Empty
    where the study lacks either kind; delta is NaN where no round was evaluated by both.
    """
    rows = {
        pair: [*mean_and_std(discordance(*each) for each in seeds), min(map(_rounds, seeds), default=0), len(seeds)]
        for pair, seeds in _losses(study).items()
    }
    index = pd.MultiIndex.from_tuples(list(rows), names=["method", "centralized"])
    return pd.DataFrame(list(rows.values()), index=index, columns=list(COLUMNS))


def discordances(study: RunSummary) -> dict[tuple[str, str], list[float]]:
    """The discordance of every federated method to every pooled one under each seed that both have."""
    return {pair: [discordance(*each) for each in seeds] for pair, seeds in _losses(study).items()}


def pair_losses(federated: pd.Series, centralized: pd.Series) -> list[tuple[list[float], list[float]]]:
    """The macro losses of both under each seed that both have, round by round.

    Given are losses over the same index, of which seed and round are levels; what both have counts, and of that the
    mean in each round.
    """
    common = pd.concat([federated, centralized], axis=1, join="inner", keys=["federated", "centralized"])
    seeds = common.groupby(["seed", "round"]).mean().groupby("seed")
    return [(rounds["federated"].tolist(), rounds["centralized"].tolist()) for _, rounds in seeds]


def concordance_cells(table: pd.DataFrame, tested: Mapping[tuple[str, str], PairedDifference]) -> TextTable:
    """A concordance table as text: ``1.4e-05 (2.0e-06)``, and whether seeds tell that from the paper's threshold.

    ``tested``: each discordance minus the threshold, as of :class:`~fedshift.report.claims.Claims`.
    """
    rows = []
    for pair, row in zip(table.index, table.to_dict("records"), strict=True):
        mean, std = row["delta mean"], row["delta std"]
        delta = MISSING if math.isnan(mean) else f"{mean:.1e}" if math.isnan(std) else f"{mean:.1e} ({std:.1e})"
        texts = (*pair, delta, str(row["rounds"]), str(row["seeds"]), _verdict(mean, tested[pair]))
        rows.append(tuple(TextCell(text=text) for text in texts))
    header = ("method", "pooled", "discordance", "rounds", "seeds", "verdict")
    return TextTable(header=header, rows=tuple(rows), note=spread_note(max(table["seeds"], default=0)))


def concordance_title(study: RunSummary, table: pd.DataFrame) -> str:
    """What the table holds, as a sentence says it, and how to compare every round where only some were evaluated."""
    every = table["rounds"].min() >= study.rounds
    return (
        "Concordance with centralized training: mean squared difference of macro test losses (nats) over the rounds "
        f"that both evaluated{'' if every else ' (--evaluate-every 1 evaluates all)'}; concordant below {CONCORDANT:g}"
    )


def _verdict(mean: float, tested: PairedDifference) -> str:
    if math.isnan(mean):
        return MISSING
    if tested.pairs < FEWEST:
        return "too few seeds"
    side = "concordant" if is_concordant(mean) else "not concordant"
    return (
        f"{side} (p {format_p_value(tested.p)})"
        if tested.told_apart
        else f"not told apart (p {format_p_value(tested.p)})"
    )


def _losses(study: RunSummary) -> dict[tuple[str, str], list[tuple[list[float], list[float]]]]:
    """Macro test losses of every federated and every pooled method, see :func:`pair_losses`."""
    pooled = [name for name, facts in study.methods.items() if facts.pooled]
    federated = [name for name in study.methods if name not in pooled]
    losses = metric_history(study, "loss").dropna(subset="value").set_index(["seed", "round", "client"])
    return {
        pair: pair_losses(*(losses.loc[losses["method"] == name, "value"] for name in pair))
        for pair in product(federated, pooled)
    }


def _rounds(losses: tuple[list[float], list[float]]) -> int:
    return len(losses[0])
