"""How often the intervals and verdicts of ``result.sites()`` are wrong, in simulated studies whose truth is known.

``python benchmarks/coverage.py`` prints a line for each metric, number of test patients and spread of trainings, five
seeds each. ``coverage``: 95 % intervals of one client that contain the true difference of two methods, over all
patients and trainings; beside it that of the sum of both variances with the degrees of freedom of Satterthwaite, as in
studies of several readers (Hillis 2007, "A comparison of denominator degrees of freedom methods for multiple observer
ROC analysis", Statistics in Medicine 26(3)). ``false``: studies of two methods against a reference at
six clients, all equal, with any verdict but undecided. ``excluded``: studies of two methods that lose exactly the
margin at six clients, with a loss above the margin excluded at any. It fails if a coverage is below 93 %, or more than
6.4 % of studies have a false verdict or exclude the loss that there is (5 %, and two standard errors of 1,000 studies).

A patient has a difficulty that both methods share in part, a training has a quality, drawn anew for each method and
seed, and an error of the pair. Metrics are the accuracy; that of 1 to 5 samples for each patient; the mean of a score;
the Dice coefficient of all pixels together; and the area under the ROC curve.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from fedshift.analysis.sampling import SampleValues, class_values, difference_variance, mean_values, ratio_values
from numpy.typing import NDArray
from scipy import stats

from fedshift.analysis.statistics import PairedDifference, correct_family, include_samples, paired_difference

Floats = NDArray[np.float64]
LEVELS = 0.9, 0.6
"""Mean quality of the trainings of both methods."""
SHARED = 0.6
"""Part of a patient's difficulty that both methods share."""
PATIENTS, SEEDS, CLIENTS = (10, 20, 50), 5, 6
LEAST, MOST = 0.93, 0.064
"""Limits of coverage and of false studies."""
SPREADS = 0.05, 0.2, 0.5
"""Standard deviations of the quality of a training, where that of a patient's difficulty is 1."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """A metric of M methods on one test set ``[M, R]``, the grid of a difference, and values of samples ``[M][R]``."""

    metric: Floats
    grid: float
    values: list[list[SampleValues]]


def draw_margins(random: np.random.Generator, levels: tuple[float, ...], patients: int, spread: float) -> Floats:
    """Return how far each patient is on the right side under each method and seed, ``[M, R, P]``."""
    methods = len(levels)
    common, own = random.normal(size=patients), random.normal(size=(methods, patients))
    hard = math.sqrt(SHARED) * common + math.sqrt(1 - SHARED) * own
    quality = np.array(levels)[:, None] + spread * random.normal(size=(methods, SEEDS))
    return quality[:, :, None] - hard[:, None, :] + 0.3 * random.normal(size=(methods, SEEDS, patients))


def make_hits(random: np.random.Generator, margins: Floats) -> Study:
    """Return a study of the accuracy, one sample for each patient."""
    del random
    right = margins > 0
    values = [[mean_values(each, bounded=True) for each in runs] for runs in right]
    return Study(metric=right.mean(axis=2), grid=math.sqrt(2 / 12) / right.shape[2], values=values)


def make_grouped(random: np.random.Generator, margins: Floats) -> Study:
    """Return a study of the accuracy of 1 to 5 samples for each patient."""
    sizes = random.integers(1, 6, margins.shape[2])
    group = np.repeat(np.arange(len(sizes)), sizes)
    right = margins[:, :, group] + 0.5 * random.normal(size=len(group)) > 0
    values = [[replace(mean_values(each, bounded=True), group=group) for each in runs] for runs in right]
    return Study(metric=right.mean(axis=2), grid=math.sqrt(2 / 12) / len(group), values=values)


def make_scores(random: np.random.Generator, margins: Floats) -> Study:
    """Return a study of the mean of a score between 0 and 1."""
    del random
    score = stats.norm.cdf(margins)
    values = [[mean_values(each) for each in runs] for runs in score]
    return Study(metric=score.mean(axis=2), grid=0.0, values=values)


def make_dice(random: np.random.Generator, margins: Floats) -> Study:
    """Return a study of the Dice coefficient of all pixels, of patients whose masks differ in size."""
    support = random.lognormal(5, 0.7, margins.shape[2]).round() + 10
    hits = np.floor(support * stats.norm.cdf(margins + 0.5))
    both = support + support * random.uniform(0.9, 1.1, margins.shape)
    values = [
        [ratio_values(2 * a[:, None], b[:, None]) for a, b in zip(*runs, strict=True)]
        for runs in zip(hits, both, strict=True)
    ]
    return Study(metric=2 * hits.sum(axis=2) / both.sum(axis=2), grid=0.0, values=values)


def make_areas(random: np.random.Generator, margins: Floats) -> Study:
    """Return a study of the area under the ROC curve; half of the patients are positive."""
    del random
    truth = np.arange(margins.shape[2]) % 2
    score = np.where(truth == 1, margins, -margins)
    positive, negative = score[..., truth == 1], score[..., truth == 0]
    above = positive[..., :, None] > negative[..., None, :]
    part = np.zeros_like(score)
    part[..., truth == 1], part[..., truth == 0] = above.mean(axis=-1), above.mean(axis=-2)
    area = above.mean(axis=(-1, -2))
    values = [
        [class_values(each - a, truth, mean=False) for each, a in zip(*runs, strict=True)]
        for runs in zip(part, area, strict=True)
    ]
    return Study(metric=area, grid=math.sqrt(2 / 12) / (positive.shape[-1] * negative.shape[-1]), values=values)


METRICS: dict[str, Callable[[np.random.Generator, Floats], Study]] = {
    "accuracy": make_hits, "accuracy of groups": make_grouped, "mean score": make_scores, "Dice": make_dice,
    "AUC": make_areas,
}  # fmt: skip


def compare(study: Study, one: int = 0, other: int = 1) -> PairedDifference:
    """Return the difference of two methods on new test patients, by the functions that reports use."""
    gap = paired_difference(study.metric[one].tolist(), study.metric[other].tolist(), grid=study.grid)
    first = study.values[one][0]
    d = np.mean([a.x - b.x for a, b in zip(study.values[one], study.values[other], strict=True)], axis=0)
    most = np.ones(len(first.weight)) if first.bounded else None
    return include_samples(gap, difference_variance(d, first.stratum, first.weight, most, first.group))


def satterthwaite(gap: PairedDifference, level: float = 0.95) -> tuple[float, float]:
    """Return the interval of the sum of both variances with Satterthwaite's degrees of freedom."""
    assert gap.sampled is not None
    seeds, patients = gap.error**2, gap.sampled.variance
    if not seeds + patients:
        return gap.mean, gap.mean
    freedom = (seeds + patients) ** 2 / (seeds**2 / (gap.pairs - 1) + patients**2 / gap.sampled.freedom)
    half = float(stats.t.ppf((1 + level) / 2, freedom)) * math.sqrt(seeds + patients)
    return gap.mean - half, gap.mean + half


def true_difference(name: str, spread: float) -> float:
    """Return the difference over very many patients and trainings."""
    random = np.random.default_rng(99)
    found = [METRICS[name](random, draw_margins(random, LEVELS, 1000, spread)).metric.mean(axis=1) for _ in range(200)]
    ours, theirs = np.mean(found, axis=0)
    return float(ours - theirs)


def measure_coverage(name: str, patients: int, spread: float, studies: int) -> tuple[float, float]:
    """Return the share of studies whose interval contains the truth, of ours and of Satterthwaite's."""
    random = np.random.default_rng([patients, round(1000 * spread), list(METRICS).index(name)])
    truth, found = true_difference(name, spread), np.zeros(2)
    for _ in range(studies):
        gap = compare(METRICS[name](random, draw_margins(random, LEVELS, patients, spread)))
        bounds = (gap.low, gap.high), satterthwaite(gap)
        found += [low <= truth <= high for low, high in bounds]
    return float(found[0] / studies), float(found[1] / studies)


def count_false_verdicts(name: str, patients: int, spread: float, studies: int) -> float:
    """Return the share of studies of equal methods with a verdict at any client."""
    random = np.random.default_rng([patients, round(1000 * spread), list(METRICS).index(name), 1])
    wrong = 0
    for _ in range(studies):
        gaps = []
        for _ in range(CLIENTS):
            study = METRICS[name](random, draw_margins(random, (LEVELS[0],) * 3, patients, spread))
            gaps += [compare(study, 0, 2), compare(study, 1, 2)]  # the third is the reference
        wrong += any(gap.is_significant for gap in correct_family(gaps))
    return wrong / studies


def count_false_exclusions(name: str, patients: int, spread: float, studies: int) -> float:
    """Return the share of studies that exclude, for any client, a loss above the true loss."""
    random = np.random.default_rng([patients, round(1000 * spread), list(METRICS).index(name), 2])
    margin, (high, low) = true_difference(name, spread), LEVELS
    wrong = 0
    for _ in range(studies):
        gaps = []
        for _ in range(CLIENTS):
            study = METRICS[name](random, draw_margins(random, (low, low, high), patients, spread))
            gaps += [compare(study, 0, 2), compare(study, 1, 2)]
        wrong += any(gap.excludes_below(-margin) for gap in correct_family(gaps))
    return wrong / studies


def main() -> None:
    """Print a line for each kind of study, and fail beyond the limits."""
    parser = argparse.ArgumentParser(description="How often intervals and verdicts are wrong.")
    parser.add_argument("--studies", type=int, default=1000, help="simulated studies of each kind")
    studies = parser.parse_args().studies
    print(f"{'metric':20} patients spread  coverage  Satterthwaite  false  excluded")
    least, most = 1.0, 0.0
    for name, patients, spread in product(METRICS, PATIENTS, SPREADS):
        ours, other = measure_coverage(name, patients, spread, studies)
        wrong, safe = (
            count(name, patients, spread, studies) for count in (count_false_verdicts, count_false_exclusions)
        )
        print(f"{name:20} {patients:8} {spread:6} {ours:9.1%} {other:14.1%} {wrong:6.1%} {safe:9.1%}", flush=True)
        least, most = min(least, ours), max(most, wrong, safe)
    print(f"lowest coverage {least:.1%}, most false studies {most:.1%}")
    if least < LEAST or most > MOST:
        sys.exit(f"limits are {LEAST:.1%} and {MOST:.1%}")


if __name__ == "__main__":
    main()
