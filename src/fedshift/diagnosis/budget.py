"""Plan of a search within a budget: the seconds that each method takes on this machine, and the rungs that fit.

The seconds of a method are those of one round, one evaluation and the preparation of a trial.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace

from ..core.method import Method
from ..engines.engine import Diverged
from ..experiments.duration import Cost, predict_cost
from ..experiments.experiment import Experiment
from ..experiments.trial import Trial
from ..utils.errors import Ref, UsageError

SHARE = 3
"""Factor between rungs: one candidate in three advances, and trains for three times as many rounds."""
FINALISTS = 8
"""Largest number of candidates without a drop before the last round."""
PER_METHOD = 2
"""Maximum number of learning rates of a method that advance to another rung."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """A number of candidates, each trained for ``rounds`` rounds in total."""

    candidates: int
    rounds: int


def plan_rungs(candidates: int, rounds: int, methods: int) -> tuple[Rung, ...]:
    """Return the rungs for these numbers of candidates and methods; the last rung trains for ``rounds`` rounds."""
    sizes = [candidates]
    while sizes[-1] > FINALISTS:
        kept = -(-sizes[-1] // SHARE)
        if len(sizes) == 1 and methods < candidates:
            kept = max(kept, methods)
        sizes.append(kept)
    size_of: dict[int, int] = {}
    for place, size in enumerate(sizes):
        size_of.setdefault(-(-rounds // SHARE ** (len(sizes) - 1 - place)), size)
    return tuple(Rung(candidates=size, rounds=number) for number, size in size_of.items())


def predict_seconds(rungs: Sequence[Rung], costs: Sequence[Cost], rates: int, held: int = 1) -> float:
    """Return an upper bound on the seconds of ``rungs``, for methods with ``costs`` at ``rates`` learning rates each.

    ``held``: methods that advance in addition to the best candidates.
    """
    total, done = 0.0, 0
    for rung in rungs:
        ordered = sorted(costs, key=lambda cost: cost.round, reverse=True)
        first = rung is rungs[0]
        most = rung.candidates + (0 if first else held)
        slots = [cost for cost in ordered for _ in range(rates if first else min(rates, PER_METHOD))][:most]
        total += sum((rung.rounds - done) * cost.round + cost.evaluation for cost in slots)
        done = rung.rounds
    return total


def fit_budget(
    costs: Mapping[str, Cost],
    rates: Sequence[float],
    rounds: int,
    seconds: float,
    *,
    keep: int = 2,
    spent: float = 0.0,
    held: int = 1,
) -> tuple[list[str], list[float], int]:
    """Return methods, learning rates and rounds that take at most ``seconds``, of which ``spent`` are already used.

    The number of rounds is reduced first, but not below that of three rungs; then the outermost learning rates are
    dropped, then the last methods except the first ``keep``, and then further rounds. Raises :class:`UsageError` if
    even one round of these methods at one rate takes longer.
    """
    methods, left = list(costs), sorted(rates)
    options = [(methods, left)]
    while len(left) > 1:
        left = left[1:-1] or left[:1]
        options.append((methods, left))
    while len(methods) > keep:
        methods = methods[:-1]
        options.append((methods, left))
    needed = math.inf
    for least, tried in ((min(rounds, SHARE**2), options), (1, options[-1:])):
        for methods, left in tried:
            chosen = [costs[method] for method in methods]
            for number in range(rounds, least - 1, -1):
                rungs = plan_rungs(len(methods) * len(left), number, len(methods))
                needed = spent + predict_seconds(rungs, chosen, len(left), held)
                if needed <= seconds:
                    return methods, left, number
    raise UsageError(
        f"budget={seconds / 60:g} minutes: one round of {' and '.join(methods)} at one learning rate takes about "
        f"{needed / 60:.2g} minutes here, including the diagnosis: give at least that, fewer {{}}, or a smaller {{}}",
        Ref("samples"),
        Ref("model"),
    )


def measure_cost(experiment: Experiment, method: Method, most: float = math.inf) -> Cost:
    """Return the seconds of a round and an evaluation under one seed.

    One round and one evaluation are timed. If the round is predicted to take more than ``most`` seconds, it is not run,
    and both are extrapolated from a single step. Raises :class:`UsageError` if the method does not suit the data or the
    model, or cannot be continued for more rounds.
    """
    if isinstance(method.freeze, float):
        raise UsageError(
            f"{method.label} freezes after a share of all rounds, and a search extends the number of rounds: give a "
            "number of rounds, such as fixbn(switch=10)"
        )
    began = time.monotonic()
    with closing(Trial(method, experiment.model, experiment.data, experiment.settings, experiment.seeds[0])) as trial:
        prepared, cost = time.monotonic() - began, predict_cost(trial)
        if cost.round > most:
            return replace(cost, evaluation=prepared + cost.evaluation)
        begun, seconds = time.monotonic(), cost.round
        with suppress(Diverged):
            done = trial.advance()
            trial.measure_lag((), trial.reestimate())
            seconds = done.seconds
        return Cost(round=seconds, evaluation=prepared + time.monotonic() - begun - seconds)
