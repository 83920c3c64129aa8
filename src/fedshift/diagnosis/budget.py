"""Plan of a search within a budget: the time of each method, rungs, and what fits.

The time of a method is that of one round, its evaluation and the preparation of a trial on this machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

from ..core.method import Method
from ..core.plan import Plan
from ..engines.auto import measure_seconds
from ..engines.engine import Diverged
from ..experiments.experiment import Experiment
from ..experiments.trial import Trial
from ..utils.errors import Ref, UsageError

SHARE = 3
"""One of so many candidates goes on to the next rung, for so many times the rounds."""
FINALISTS = 8
"""Most candidates of which none is dropped before the last round."""
PER_METHOD = 2
"""Most learning rates of a method that go on to another rung."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """So many candidates, each trained for ``rounds`` rounds in all."""

    candidates: int
    rounds: int


def plan_rungs(candidates: int, rounds: int, methods: int) -> tuple[Rung, ...]:
    """Return the rungs for so many candidates of so many methods, the last of which trains for ``rounds`` rounds."""
    sizes = [candidates]
    while sizes[-1] > FINALISTS:
        kept = -(-sizes[-1] // SHARE)
        if len(sizes) == 1 and methods < candidates:
            kept = max(kept, methods)
        sizes.append(kept)
    found: dict[int, int] = {}
    for place, size in enumerate(sizes):
        found.setdefault(-(-rounds // SHARE ** (len(sizes) - 1 - place)), size)
    return tuple(Rung(candidates=size, rounds=number) for number, size in found.items())


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of a method for a round, and for an evaluation."""

    round: float
    evaluation: float


def predict_seconds(rungs: Sequence[Rung], costs: Sequence[Cost], rates: int, held: int = 1) -> float:
    """Return the seconds of ``rungs`` at most, for methods with ``costs`` at so many learning rates each.

    ``held``: methods that go on beside the others.
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
    """Return methods, learning rates and rounds that take at most ``seconds``, of which ``spent`` are used already.

    Rounds are reduced first, but not below those of three rungs; then the outermost learning rates are left out, then
    the last methods except the first ``keep``, and then rounds further. Raises :class:`UsageError` where these methods
    take longer at one rate.
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
        f"{needed / 60:.2g} minutes here, with the diagnosis: give at least that, fewer {{}}, or a smaller {{}}",
        Ref("samples"),
        Ref("model"),
    )


def measure_cost(experiment: Experiment, method: Method, most: float = math.inf) -> tuple[Cost, str]:
    """Return the seconds of a round and of an evaluation under one seed, and the work beyond FedAvg's in words.

    A round and an evaluation are timed. Where a round is predicted to take more than ``most`` seconds, it is predicted
    from a step. Raises :class:`UsageError` where the method does not fit, also where it cannot be continued for more
    rounds.
    """
    if method.freeze and isinstance(method.freeze.after, float):
        raise UsageError(
            f"{method.label} freezes after a share of all rounds, and a search trains for more and more: give a number "
            "of rounds, fixbn(switch=10)"
        )
    began, settings = time.monotonic(), experiment.settings
    with closing(Trial(method, experiment.model, experiment.data, settings, experiment.seeds[0])) as trial:
        prepared, plan = time.monotonic() - began, trial.plan
        work, sizes = plan.work, [len(split) for split in trial.train.values()]
        steps = sum(len(work.steps_of_round(0, len(work.batch_bounds(size, plan.smallest_batch)))) for size in sizes)
        passes = sum(count_passes(plan) * len(work.batch_bounds(size, plan.smallest_batch)) for size in sizes) / steps
        clients = len(settings.draw_participants(trial.seed, 1, trial.clients.names))
        seconds = (1 + passes) * measure_seconds(
            plan, trial.train, clients=clients, rounds=1, workers=settings.workers, augment=settings.augment
        )
        if seconds <= most:
            begun = time.monotonic()
            with suppress(Diverged):
                done = trial.advance()
                trial.measure_lag()
                seconds = done.seconds
            return Cost(round=seconds, evaluation=prepared + time.monotonic() - begun - seconds), _describe_work(plan)
        samples = sum(map(len, trial.train.values()))
    measured = sum(
        len(part) for c in experiment.data.clients for name, part in c.splits.items() if name == "validation"
    )
    forward = seconds * len(sizes) / clients / samples / 3  # a step costs three forward passes
    tuning = plan.method.finetune * seconds * len(sizes) / clients
    return Cost(round=seconds, evaluation=prepared + forward * measured + tuning), _describe_work(plan)


def count_passes(plan: Plan) -> int:
    """Return how many passes of a round over a client's data train parameters that rules keep, apart from the model."""
    return sum(phase.epochs for _, phase in (*plan.before, *plan.after))


def _describe_work(plan: Plan) -> str:
    """Return the work of a method beyond the local work of FedAvg's rounds, in words; empty if there is none."""
    parts = []
    if plan.method.finetune:
        rounds = f"{plan.method.finetune} further round{'s' * (plan.method.finetune > 1)}"
        parts.append(f"each client fine-tunes its model by {rounds} of local work whenever the model is used")
    if passes := count_passes(plan):
        count = f"{passes} further pass{'es' * (passes > 1)}"
        parts.append(f"each client makes {count} over its data in each round for parameters that it keeps")
    return ", and ".join(parts)
