"""Which orders of methods a reader may claim: neighbors by macro metric, as :mod:`fedshift.report.claims` tests them.

A table invites the reader to rank its methods, and each rank is a claim that a method is better than the next one.
"""

from __future__ import annotations

from itertools import pairwise

from ..analysis.statistics import FEWEST
from ..results.schema import RunSummary
from .claims import Claims, baseline_of, claims, sentence
from .tables import accuracy_table

FEW = 4
"""Orders up to which each has its sentence; of more, those that may be claimed are counted."""


def ranked(study: RunSummary) -> list[str]:
    """Methods by the macro row of the study's table, best first.

    Left out are methods that were not measured.
    """
    table = accuracy_table(study)
    means = table.iloc[len(study.clients)].unstack()["mean"]
    return list(means.dropna().sort_values(ascending=study.metric == "loss", kind="stable").index)


def ranking_sentences(study: RunSummary, made: Claims | None = None) -> list[str]:
    """What may be claimed of the order of methods and what may not, in plain sentences."""
    made = made or claims(study)
    pairs = list(pairwise(ranked(study)))
    if not pairs:
        return []
    most = max(made.between(*pair).pairs for pair in pairs)
    if most < FEWEST:
        seeds = "one seed says" if most == 1 else f"{most or 'no'} seeds say"
        return [f"Claim no order of these methods: {seeds} too little. --seeds 5 gives intervals that can tell."]
    named = pairs if len(pairs) <= FEW else [pair for pair in pairs if not made.between(*pair).told_apart]
    baseline = baseline_of(made.methods)
    said = []
    for one, other in named:  # a pair with the baseline reads as it does among the readings
        left, right = (other, one) if one == baseline else (one, other)
        said.append(sentence(left, right, made.between(left, right), study.metric))
    if rest := len(pairs) - len(named):
        which = "the one other pair" if rest == 1 else f"{'the other' if named else 'all'} {rest} pairs"
        said.append(f"Told apart: {which} of neighbors by macro {study.metric_name}.")
    return said
