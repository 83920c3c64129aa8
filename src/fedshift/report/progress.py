"""Rounds that the runs of a comparison have reached, and comparisons that are valid before all have ended.

Two methods are compared for a seed if both were last evaluated after the same round. If some run has not reached the
last round, a comparison begins with a line, PARTIAL, that lists the rounds reached.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

import pandas as pd

from ..results.schema import RunSummary

Reached = Mapping[tuple[str, int], int]
"""The last evaluated round of each method and seed, 0 if none was."""

STILL = 0.1
"""Part of a training loss's whole fall that the last fifth of the rounds may have at the end of training."""
T = TypeVar("T")
Key = ParamSpec("Key")
_KNOWN: WeakKeyDictionary[RunSummary, dict[Hashable, Any]] = WeakKeyDictionary()


def remembered(make: Callable[Concatenate[RunSummary, Key], T]) -> Callable[Concatenate[RunSummary, Key], T]:
    """Compute each result of ``make`` once for a summary, which must not change; a data frame is returned as a copy.

    A page needs most tables more than once.
    """
    signature = inspect.signature(make)

    @wraps(make)
    def recall(summary: RunSummary, *args: Key.args, **named: Key.kwargs) -> T:
        bound = signature.bind(summary, *args, **named)
        bound.apply_defaults()
        known, key = _KNOWN.setdefault(summary, {}), (make, *list(bound.arguments.values())[1:])
        if key not in known:
            known[key] = make(summary, *args, **named)
        result: Any = known[key]
        return cast("T", result.copy() if isinstance(result, pd.DataFrame | pd.Series) else result)

    return cast("Callable[Concatenate[RunSummary, Key], T]", recall)


@remembered
def find_reached_rounds(summary: RunSummary) -> Reached:
    """Return the last evaluated round of every method and seed of ``summary``, 0 if none was.

    A trial that was stopped has ended: it counts as one that reached the last round.
    """
    rows = summary.rows[(summary.rows["split"] == "test") & (summary.rows["moment"] == "loaded")]
    last = rows.groupby(["method", "seed"])["round"].max()
    ended = dict.fromkeys(summary.stopped, summary.rounds)
    runs = ((method, seed) for method in summary.methods for seed in summary.seeds)
    return {run: ended.get(run, int(last.get(run, 0))) for run in runs}


def describe_partial(summary: RunSummary) -> str:
    """Return the first line of tables of ``summary``; empty if every run has reached the last round."""
    return describe_reached(find_reached_rounds(summary), summary.rounds)


def describe_reached(reached: Reached, rounds: int) -> str:
    """Return a line about runs that have ``reached`` fewer than ``rounds``; empty if none has, or none has begun."""
    if not any(reached.values()) or (min(reached.values()) >= rounds and is_even(reached)):
        return ""
    methods = dict.fromkeys(method for method, _ in reached)
    places = ", ".join(f"{method} {_describe_place(method, reached)}" for method in methods)
    rule = "" if is_even(reached) else " Methods are compared only where both have reached the same round."
    return f"PARTIAL: {rounds} round{'s' * (rounds > 1)} were asked for, and so far {places}.{rule}"


def describe_falling(summary: RunSummary) -> str:
    """Return a notice about methods whose training loss still falls at the end; empty if there is none.

    The loss falls if the last fifth of the rounds lowers it, for every seed, by more than :data:`STILL` of its whole
    fall; a steady fall lowers it by a fifth.
    """
    trained = summary.rows[summary.rows["split"] == "train"]
    sums = trained.groupby(["method", "seed", "round"])[["loss_sum", "samples"]].sum()
    loss = (sums["loss_sum"] / sums["samples"]).unstack("round").dropna(axis=1)
    part = loss.shape[1] // 5
    if part < 2:
        return ""
    last, before = loss.iloc[:, -part:].mean(axis=1), loss.iloc[:, -2 * part : -part].mean(axis=1)
    fall = loss.iloc[:, 0] - last
    share = ((before - last) / fall.where(fall > 0)).fillna(0.0).groupby("method").min()
    falling = [f"{method} {100 * share[method]:.0f}" for method in summary.methods if share.get(method, 0.0) > STILL]
    if not falling:
        return ""
    return (
        "The training loss still falls: in the last fifth of the rounds, by this percentage of its whole fall: "
        f"{', '.join(falling)}. Train for more rounds or at a larger learning rate before ranking methods."
    )


def _describe_place(method: str, reached: Reached) -> str:
    seeds: dict[int, list[int]] = {}
    for (name, seed), number in reached.items():
        if name == method:
            seeds.setdefault(number, []).append(seed)
    texts = []
    for number, some in seeds.items():
        named = f" (seed{'s' * (len(some) > 1)} {', '.join(map(str, some))})" if len(seeds) > 1 else ""
        texts.append(f"{f'has reached round {number}' if number else 'has not been evaluated'}{named}")
    return " and ".join(texts)


def is_even(reached: Reached) -> bool:
    """Return whether, for each seed, all methods have reached the same round."""
    return all(number == next(n for (_, s), n in reached.items() if s == seed) for (_, seed), number in reached.items())


def is_comparable(reached: Reached, one: str, other: str, seed: int) -> bool:
    """Return whether two methods have reached the same round for ``seed``."""
    return reached[one, seed] == reached[other, seed]
