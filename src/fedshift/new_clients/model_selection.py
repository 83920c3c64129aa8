"""Model selection for clients that were left out, by DomainBed's three rules.

Gulrajani and Lopez-Paz 2021, arXiv:2007.01434, section 3 (formulas from ``domainbed/model_selection.py`` in
https://github.com/facebookresearch/DomainBed). Candidates are learning rates of a method. For the left-out client t a
rule takes the rate with the best

* ``training``: macro validation metric of the clients that trained (training-domain validation set);
* ``leave-one-out``: mean over the other clients v of the metric at v of a run without both t and v
  (leave-one-domain-out cross-validation);
* ``oracle``: metric of t's own validation data (test-domain validation set), which nobody has before the choice: an
  upper bound, marked as such.

Unlike in DomainBed, a rule chooses once for all seeds, by their mean, at one reported round. Every rule uses only
validation data; the test data of t measure the choice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

import pandas as pd

from ..report.formatting import MISSING, TextTable, difference_unit, make_table
from ..results.schema import Row, compute_metric, is_lower_better, name_metric
from ..utils.errors import unknown_name

RULES = {
    "training": "training-domain validation",
    "leave-one-out": "leave-one-domain-out cross-validation",
    "oracle": "test-domain validation (ORACLE)",
}
"""Rules of selection, and their names in tables."""
_RATE = re.compile(r"\+?tuned\(lr=([^,()]+)\)")
COLUMNS = ["client", "method", "policy", "value"]


def parse_rules(text: str) -> tuple[str, ...]:
    """Return the comma-separated rules in ``text``; raise :class:`UsageError` for an unknown one."""
    rules = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in rules:
        if name not in RULES:
            raise unknown_name("model selection", name, RULES)
    return rules


def split_rate(name: str) -> tuple[str, float]:
    """Return a method's name without its learning rate, and the rate; NaN if the name has none."""
    found = _RATE.search(name)
    return (_RATE.sub("", name, count=1), float(found[1])) if found else (name, math.nan)


def tabulate_values(rows: Iterable[Row], metric: str) -> pd.DataFrame:
    """Return ``metric`` of each client, method and policy, mean over seeds: columns client, method, policy, value."""
    frame = pd.DataFrame(list(rows))
    if not len(frame):
        return pd.DataFrame(columns=COLUMNS)
    frame["value"] = compute_metric(frame, metric).astype(float)
    return frame.groupby(COLUMNS[:3], sort=False)["value"].mean().reset_index()


def select_models(
    rule: str, tested: pd.DataFrame, validated: pd.DataFrame, trained: Mapping[str, Mapping[str, float]],
    pairs: Mapping[frozenset[str], pd.DataFrame], metric: str, clients: int,
) -> pd.DataFrame:  # fmt: skip
    """Return the choices of ``rule``: a row for each left-out client, method and policy, with rate and test value.

    Args:
        rule: One of :data:`RULES`.
        tested: Test metric of each left-out client, by :func:`tabulate_values`.
        validated: The same on the left-out clients' validation data.
        trained: Macro validation metric of the clients that trained, by left-out client and method.
        pairs: Validation metric of two clients in the run without both, for each pair that was run.
        metric: The metric; a lower value may be better.
        clients: Number of clients of the federation; leave-one-out leaves out each together with another.

    Returns:
        Columns client, method (without its rate), policy, rate, score (which chose it) and value. Clients with
        a missing run are excluded.

    """
    if rule == "training":
        known = [(client, method, value) for client, own in trained.items() for method, value in own.items()]
        scores = pd.DataFrame(known, columns=["client", "method", "score"])
    elif rule == "oracle":
        scores = validated.rename(columns={"value": "score"})
    else:
        scores = _score_pairs(pairs, clients)
    scored = tested.merge(scores, how="left")
    scored[["method", "rate"]] = [split_rate(name) for name in scored["method"]]
    groups = scored.groupby(COLUMNS[:3], sort=False)["score"]
    whole = scored[groups.transform("count") == groups.transform("size")]
    ranked = (-1 if is_lower_better(metric) else 1) * whole["score"]
    best = ranked.groupby([whole[name] for name in COLUMNS[:3]], sort=False).idxmax()
    return whole.loc[best, ["client", "method", "policy", "rate", "score", "value"]].reset_index(drop=True)


def _score_pairs(pairs: Mapping[frozenset[str], pd.DataFrame], clients: int) -> pd.DataFrame:
    """Return each client's mean over the others, measured without both; NaN where a run is missing."""
    each = [
        frame.assign(client=[next(iter(pair - {measured})) for measured in frame["client"]])
        for pair, frame in pairs.items()
    ]
    values = pd.concat([pd.DataFrame(columns=COLUMNS), *each]).groupby(COLUMNS[:3], sort=False)["value"]
    found = values.agg(["mean", "count"])
    return found["mean"].where(found["count"] == clients - 1).astype(float).rename("score").reset_index()


def format_selection(chosen: Mapping[str, pd.DataFrame], clients: Iterable[str], metric: str) -> TextTable:
    """Return the results of :func:`select_models` by rule as text: a row for each method, policy and rule."""
    unit, names = difference_unit(metric), list(clients)
    groups = dict.fromkeys((row["method"], row["policy"]) for frame in chosen.values() for _, row in frame.iterrows())
    rows = []
    for method, policy in groups:
        for rule, frame in chosen.items():
            own = frame[(frame["method"] == method) & (frame["policy"] == policy)].set_index("client")
            cells = [
                f"{unit.format(own.loc[name, 'value'])} ({own.loc[name, 'rate']:g})" if name in own.index else MISSING
                for name in names
            ]
            macro = unit.format(own["value"].mean()) if len(own) == len(names) else MISSING
            rows.append((f"{method}: {policy}", RULES[rule], *cells, macro))
    note = (
        f"Test {name_metric(metric)} at the learning rate in parentheses, which the rule chose on validation data, "
        "mean over seeds. The oracle chooses by the left-out client's own labels: an upper bound, not a result."
    )
    return make_table(("method: policy", "selected by", *names, "macro"), rows, note=note)
