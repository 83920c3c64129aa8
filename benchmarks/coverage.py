"""How often what reports print is wrong, in simulated studies whose truth is known.

``python benchmarks/coverage.py`` prints a line for each kind of study, and fails beyond the limits:

- **means**: 95 % intervals of the mean difference of two methods over five clients, by number of test samples, number
  of seeds and spread of trainings. Limits: 0.94 to 0.98.
- **clients**: the same of a single client, by metric and number of patients: shares, also of several samples for each
  patient, mean scores, Dice and areas under ROC curves. Limit: 0.93.
- **shares**: 95 % intervals of a sensitivity or a model card's share, from patients with 20 images each or 1 to 60, by
  number of patients, share and intraclass correlation. Limit: 0.93.
- **cards**: intervals of a model's accuracy and Dice on its card, by number of patients with 20 images each, whose
  results are correlated. Limit: 0.93.
- **false**: studies of two equal methods with a verdict on their mean over five clients. Limit: 0.05, and two errors.
- **shift**: studies of a tenth of the number in which ``fedshift data diagnose`` sees a feature shift between sites to
  which patients were dealt at random (``benchmarks/diagnose.py``). Limit: 0.05, and two errors.
- **found**: studies in which a true loss of 20 points at one of ten clients is found, five seeds. Limit: 0.60.

A patient has a difficulty that both methods share in part; a training has a quality, drawn anew for each method and
seed. The truth is the difference over all patients and trainings.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import pandas as pd
from diagnose import measure_false_shift
from numpy.typing import NDArray
from scipy import stats

from fedshift.analysis.clinical import share_interval
from fedshift.analysis.influence import Records, find_influence
from fedshift.export.intervals import find_interval as card_interval
from fedshift.report.differences import measure_difference

Floats = NDArray[np.float64]
LEVELS = 0.9, 0.6
"""Mean quality of the trainings of both methods."""
SHARED, CLIENTS = 0.6, 5
"""Part of a patient's difficulty that both methods share, and number of clients with a mean."""


def draw_margins(
    random: np.random.Generator, levels: tuple[float, float], patients: int, spread: float, seeds: int
) -> Floats:
    """Return how far each patient is on the right side under each method and seed, ``[M, R, P]``."""
    common, alone = random.normal(size=patients), random.normal(size=(2, patients))
    hard = math.sqrt(SHARED) * common + math.sqrt(1 - SHARED) * alone
    quality = np.array(levels)[:, None] + spread * random.normal(size=(2, seeds))
    return quality[:, :, None] - hard[:, None, :] + 0.3 * random.normal(size=(2, seeds, patients))


Simulated = tuple[Floats, list[list[Records]]]
"""A metric of two methods ``[M, R]``, and the records of its test samples ``[M][R]``."""


def simulate_shares(random: np.random.Generator, margins: Floats) -> Simulated:
    """Return accuracies, with one sample for each patient."""
    del random
    right = margins > 0
    return right.mean(axis=2), [[{"right": each} for each in runs] for runs in right]


def simulate_groups(random: np.random.Generator, margins: Floats) -> Simulated:
    """Return accuracies of 1 to 5 samples for each patient."""
    sizes = random.integers(1, 6, margins.shape[2])
    group = np.repeat(np.arange(len(sizes)), sizes)
    right = margins[:, :, group] + 0.5 * random.normal(size=len(group)) > 0
    return right.mean(axis=2), [[{"right": each, "group": group} for each in runs] for runs in right]


def simulate_scores(random: np.random.Generator, margins: Floats) -> Simulated:
    """Return means of a score between 0 and 1."""
    del random
    score = stats.norm.cdf(margins)
    return score.mean(axis=2), [[{"score": each} for each in runs] for runs in score]


def simulate_areas(random: np.random.Generator, margins: Floats) -> Simulated:
    """Return areas under ROC curves; half of the patients are positive."""
    del random
    truth = np.arange(margins.shape[2]) % 2
    score = np.where(truth == 1, margins, -margins)
    above = score[..., truth == 1][..., :, None] > score[..., truth == 0][..., None, :]
    area, part = above.mean(axis=(-1, -2)), np.zeros_like(score)
    for kind, axis in ((1, -1), (0, -2)):
        part[..., truth == kind] = (above.mean(axis=axis) - area[..., None]) / (truth == kind).sum()
    return area, [[{"area": each, "truth": truth} for each in runs] for runs in part]


METRICS: dict[str, tuple[str, Callable[[np.random.Generator, Floats], Simulated]]] = {
    "share": ("accuracy", simulate_shares), "share of groups": ("accuracy", simulate_groups),
    "mean score": ("score", simulate_scores), "AUC": ("auc", simulate_areas),
}  # fmt: skip


def simulate(
    random: np.random.Generator, name: str, clients: list[tuple[float, float]], patients: int, spread: float, seeds: int
) -> tuple[Floats, list[tuple[Floats, float]]]:
    """Return the mean difference over ``clients`` under each seed, and the influences of their patients."""
    metric, make = METRICS[name]
    gap_S, parts, weight = np.zeros(seeds), [], 1 / len(clients)
    for levels in clients:
        values, records = make(random, draw_margins(random, levels, patients, spread, seeds))
        ours, theirs = (np.mean([find_influence(each, metric) for each in runs], axis=0) for runs in records)
        gap_S += weight * (values[0] - values[1])
        parts.append((weight * (ours - theirs), weight))
    return gap_S, parts


def find_interval(gap_S: Floats, parts: list[tuple[Floats, float]], name: str) -> tuple[float, float]:
    """Return the interval that reports print."""
    row = measure_difference(pd.Series(gap_S), parts, METRICS[name][0], 1)
    return row["low"], row["high"]


def true_difference(name: str, levels: tuple[float, float], spread: float) -> float:
    """Return the difference over all patients and trainings: sums of normal variables are above 0."""
    quality, error = spread**2, 0.3**2
    scale, variance = {
        "share": (1, 1 + error + quality), "share of groups": (1, 1 + error + 0.5**2 + quality),
        "mean score": (1, 2 + error + quality), "AUC": (2, 2 * (1 + error) + 4 * quality),
    }[name]  # fmt: skip
    ours, theirs = (stats.norm.cdf(scale * level / math.sqrt(variance)) for level in levels)
    return float(ours - theirs)


def count(name: str, clients: int, patients: int, spread: float, seeds: int, studies: int, gap: bool = True) -> float:
    """Return the share of studies whose interval contains the truth, which is 0 without a ``gap``."""
    random = np.random.default_rng([patients, round(1000 * spread), seeds, clients, len(name)])
    levels = LEVELS if gap else (LEVELS[0], LEVELS[0])
    truth = true_difference(name, levels, spread) if gap else 0.0
    bounds = [
        find_interval(*simulate(random, name, [levels] * clients, patients, spread, seeds), name)
        for _ in range(studies)
    ]
    return float(np.mean([low <= truth <= high for low, high in bounds if not math.isnan(low)]))


def count_found(samples: int, spread: float, studies: int) -> float:
    """Return the share of studies in which the interval of a client that loses 20 points excludes 0."""
    random, wide = np.random.default_rng([samples, round(1000 * spread)]), math.sqrt(1 + 0.3**2 + spread**2)
    levels = wide * stats.norm.ppf(0.6), wide * stats.norm.ppf(0.8)
    found = [
        find_interval(*simulate(random, "share", [levels], samples, spread, 5), "share")[1] < 0 for _ in range(studies)
    ]
    return float(np.mean(found))


def count_shares(patients: int, share: float, correlation: float, studies: int, *, equal: bool) -> float:
    """Return the share of studies whose interval of a share contains it; patients' shares have a beta distribution."""
    random, scale = np.random.default_rng([patients, round(100 * share)]), 1 / correlation - 1
    inside = []
    for _ in range(studies):
        sizes = np.full(patients, 20) if equal else random.geometric(1 / 20, patients)
        share_N = np.repeat(random.beta(share * scale, (1 - share) * scale, patients), sizes)
        low, high = share_interval(random.random(len(share_N)) < share_N, np.repeat(np.arange(patients), sizes))
        inside.append(low <= share <= high)
    return float(np.mean(inside))


def count_cards(metric: str, patients: int, level: float, correlation: float, studies: int) -> float:
    """Return the share of studies in which a model card's interval contains the mean of its images, ``level``."""
    random = np.random.default_rng([patients, round(1000 * level), round(1000 * correlation)])
    group, found, zeros = np.repeat(np.arange(patients), 20), [], np.zeros(20 * patients, int)
    for _ in range(studies):
        share = random.beta(level * (1 / correlation - 1), (1 - level) * (1 / correlation - 1), patients)[group]
        right = random.random(len(group)) < share
        size, hit = (
            np.stack([zeros, zeros + 1000], axis=1),
            np.stack([zeros, np.round(1000 * share).astype(int)], axis=1),
        )
        records = {"hits": hit, "support": size, "predicted": size}
        records = {"truth": zeros, "right": right} if metric == "accuracy" else records
        value = right.mean() if metric == "accuracy" else hit[:, 1].mean() / 1000
        low, high = card_interval({**records, "group": group}, metric, float(value)) or (math.nan, math.nan)
        found.append(low <= level <= high)
    return float(np.mean(found))


def list_results(studies: int) -> Iterator[tuple[str, float, float, float]]:
    """Yield the name of each kind of studies, the share that was counted, and its limits."""
    for seeds, samples, spread in product((5, 7, 10), (20, 100, 500), (0.05, 0.2, 0.5)):
        share = count("share", CLIENTS, samples, spread, seeds, studies)
        yield f"means, {seeds} seeds, {samples} samples, spread {spread}", share, 0.94, 0.98
    for name, patients, spread in product(METRICS, (10, 20, 50), (0.05, 0.5)):
        share = count(name, 1, patients, spread, 5, studies)
        yield f"clients, {name}, {patients} patients, spread {spread}", share, 0.93, 1.0
    for patients, share, correlation, equal in product((10, 20, 50), (0.8, 0.95), (0.01, 0.4, 0.8), (True, False)):
        inside = count_shares(patients, share, correlation, studies, equal=equal)
        sizes = "equal" if equal else "unequal"
        yield f"shares, {patients} patients, {share}, correlation {correlation}, {sizes}", inside, 0.93, 1.0
    for metric, patients, level, correlation in product(("accuracy", "dice"), (10, 20), (0.7, 0.9), (0.05, 0.2, 0.5)):
        share = count_cards(metric, patients, level, correlation, studies)
        yield f"cards, {metric} {level}, {patients} patients, correlation {correlation}", share, 0.93, 1.0
    most = 0.05 + 2 * math.sqrt(0.05 * 0.95 / studies)
    for name in METRICS:
        yield f"false, {name}", 1 - count(name, CLIENTS, 50, 0.2, 5, studies, gap=False), 0.0, most
    dealt = max(10, studies // 10)
    most = 0.05 + 2 * math.sqrt(0.05 * 0.95 / dealt)
    yield "shift, patients dealt at random to four sites", measure_false_shift(dealt), 0.0, most
    for samples, spread in product((50, 100, 200), (0.05, 0.2)):
        yield f"found, {samples} samples, spread {spread}", count_found(samples, spread, studies), 0.6, 1.0


def main() -> None:
    """Print a line for each kind of study, and fail beyond the limits."""
    parser = argparse.ArgumentParser(description="How often printed intervals and verdicts are wrong.")
    parser.add_argument("--studies", type=int, default=1000, help="simulated studies of each kind")
    wrong = []
    for name, share, least, most in list_results(parser.parse_args().studies):
        print(f"{name:58} {share:.3f}  ({least:.2f} to {most:.2f})", flush=True)
        wrong += [name] if not least <= round(share, 2) <= round(most, 2) else []
    if wrong:
        sys.exit(f"beyond the limits: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
