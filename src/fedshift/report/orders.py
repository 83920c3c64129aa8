"""Which orders of methods a reader may claim: neighbors by macro metric, paired over seeds, corrected for their number.

A table invites the reader to rank its methods. Each rank is a claim that a method is better than the next one, so the
differences between neighbors are tested together, by Holm's correction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from ..analysis.statistics import PairedDifference, holm, paired_difference
from ..records import Study
from .tables import accuracy_table, seed_table
from .text import p_value, signed

FEWEST = 3
"""Seeds below which no order is claimed, whatever their differences: the t-test then has one degree of freedom."""
FEW = 4
"""Orders up to which each has its sentence; of more, those that may be claimed are counted."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """``better`` has the higher macro metric than ``worse``, by ``found``; ``p`` is corrected for all orders."""

    better: str
    worse: str
    found: PairedDifference
    p: float

    @property
    def significant(self) -> bool:
        """Whether the order may be claimed at the level of the interval."""
        return self.found.pairs >= FEWEST and self.found.mean > 0 and self.p < 1 - self.found.level


def orders(study: Study, level: float = 0.95) -> list[Order]:
    """The orders that the macro row of the study's table invites to claim, best method first.

    Left out are methods that were not measured.
    """
    table = accuracy_table(study)
    means = table.iloc[len(study.clients)].unstack()["mean"]
    ranked = list(means.dropna().sort_values(ascending=False).index)
    macro = seed_table(study).iloc[len(study.clients)].unstack()
    pairs = list(pairwise(ranked))
    found = []
    for better, worse in pairs:
        common = macro.loc[[better, worse]].dropna(axis=1)
        found.append(paired_difference(common.loc[better].tolist(), common.loc[worse].tolist(), level))
    corrected = holm([each.p if each.pairs >= FEWEST else math.nan for each in found])
    return [
        Order(better=better, worse=worse, found=each, p=p)
        for (better, worse), each, p in zip(pairs, found, corrected, strict=True)
    ]


def order_sentences(study: Study) -> list[str]:
    """What may be claimed of the order of methods and what may not, in plain sentences."""
    claimed = orders(study)
    most = max((each.found.pairs for each in claimed), default=FEWEST)
    if most < FEWEST:
        seeds = "one seed says" if most == 1 else f"{most or 'no'} seeds say"
        return [f"Claim no order of these methods: {seeds} too little. --seeds 5 gives intervals that can tell."]
    sure = [each for each in claimed if each.significant]
    named = claimed if len(claimed) <= FEW else [each for each in claimed if not each.significant]
    said = [_sentence(each, len(claimed)) for each in named]
    if len(named) < len(claimed):
        rest = "the one other order" if len(sure) == 1 else f"{'the other' if named else 'all'} {len(sure)} orders"
        said.append(f"Significant: {rest} of neighbors by macro {study.metric_name}.")
    return said


def _sentence(order: Order, count: int) -> str:
    found = order.found
    who = f"{order.better} is {signed(100 * found.mean).lstrip('+')} points above {order.worse}"
    if found.pairs < FEWEST:
        shared = "one seed" if found.pairs == 1 else f"{found.pairs or 'no'} seeds"
        return f"{who} over {shared}: too few, do not claim this order."
    interval = f"[{signed(100 * found.low)}, {signed(100 * found.high)}] over {found.pairs} seeds"
    corrected = f", corrected for {count} orders" if count > 1 else ""
    verdict = "significant" if order.significant else "not significant, do not claim this order"
    return f"{who}, {interval}: {verdict} (p {p_value(order.p)}{corrected})."
