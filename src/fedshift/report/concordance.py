"""How near each federated method stays to training on pooled data: FedMMB's discordance, from records alone.

The loss is the macro test loss of the model that a client would use, just after aggregation. Where all clients share a
test set, and the method has one model for all, that is the server's model on that set, as in the paper.
"""

from __future__ import annotations

import math
from itertools import product

import pandas as pd

from ..analysis.concordance import CONCORDANT, discordance, is_concordant
from ..analysis.statistics import mean_and_std
from ..records import Study
from .tables import history
from .text import MISSING, Cell, TextTable

COLUMNS = ("delta mean", "delta std", "rounds", "seeds")


def concordance_table(study: Study) -> pd.DataFrame:
    """The discordance of every federated method to every pooled one: index (method, centralized).

    Columns: delta mean and delta std (over seeds, in squared nats), rounds (that both evaluated, under the seed that
    has fewest), seeds (that both have). Each loss is the mean over the clients that both measured in that round. Empty
    where the study lacks either kind; delta is NaN where no round was evaluated by both.
    """
    pooled = [name for name, facts in study.methods.items() if facts.pooled]
    federated = [name for name in study.methods if name not in pooled]
    losses = history(study, "loss").dropna(subset="value").set_index(["seed", "round", "client"])
    rows = []
    for method, twin in product(federated, pooled):
        seeds = paired(*(losses.loc[losses["method"] == name, "value"] for name in (method, twin)))
        found = mean_and_std(discordance(*pair) for pair in seeds)
        rows.append([*found, min((len(rounds) for rounds, _ in seeds), default=0), len(seeds)])
    index = pd.MultiIndex.from_product([federated, pooled], names=["method", "centralized"])
    return pd.DataFrame(rows, index=index, columns=list(COLUMNS))


def paired(federated: pd.Series, centralized: pd.Series) -> list[tuple[list[float], list[float]]]:
    """The macro losses of both under each seed that both have, round by round.

    Given are losses over the same index, of which seed and round are levels; what both have counts, and of that the
    mean in each round.
    """
    common = pd.concat([federated, centralized], axis=1, join="inner", keys=["federated", "centralized"])
    seeds = common.groupby(["seed", "round"]).mean().groupby("seed")
    return [(rounds["federated"].tolist(), rounds["centralized"].tolist()) for _, rounds in seeds]


def concordance_cells(table: pd.DataFrame) -> TextTable:
    """A concordance table as text: ``1.4e-05 (2.0e-06)``, and whether that is below the paper's threshold."""
    rows = []
    for row in table.reset_index().to_dict("records"):
        mean, std = row["delta mean"], row["delta std"]
        delta = MISSING if math.isnan(mean) else f"{mean:.1e}" if math.isnan(std) else f"{mean:.1e} ({std:.1e})"
        verdict = MISSING if math.isnan(mean) else "concordant" if is_concordant(mean) else "not concordant"
        texts = (row["method"], row["centralized"], delta, str(row["rounds"]), str(row["seeds"]), verdict)
        rows.append(tuple(Cell(text=text) for text in texts))
    return TextTable(header=("method", "pooled", "discordance", "rounds", "seeds", "verdict"), rows=tuple(rows))


def concordance_title(study: Study, table: pd.DataFrame) -> str:
    """What the table holds, as a sentence says it, and how to compare every round where only some were evaluated."""
    every = table["rounds"].min() >= study.rounds
    return (
        "Concordance with centralized training: mean squared difference of macro test losses (nats) over the rounds "
        f"that both evaluated{'' if every else ' (--evaluate-every 1 evaluates all)'}; concordant below {CONCORDANT:g}"
    )
