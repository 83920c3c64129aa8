"""What a round costs where only the classifier of a network trains: on samples, and on features kept of them.

Four clients with 62 random images each train the classifier of MobileNetV2 with frozen statistics (FixBN, switch=0),
and are measured on 506 images, as many as Office-Caltech10 has, of 96 x 96 pixels. Rounds on samples and on features
take turns. Printed are the processor seconds of one thread for the first round, which extracts the features, and for
later rounds with and without a measurement; the ratio is that of each pair, its median and range.

Run ``OMP_NUM_THREADS=1 python benchmarks/frozen.py``, with the number of later rounds of each kind as an argument.
"""

from __future__ import annotations

import sys
import time
from statistics import median
from unittest import mock

import numpy as np
from torch import nn

from fedshift.core.optimizer import SGD
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.engines import frozen
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.fixbn import fixbn
from fedshift.models.vision import mobilenet_v2

TRAIN, TESTS, SIZE = 62, (192, 225, 31, 58), 96


def frozen_network(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return MobileNetV2 in which the classifier alone trains."""
    network = mobilenet_v2(shape, classes)
    network.requires_grad_(False)
    network.get_submodule("classifier").requires_grad_(True)
    return network


def make_trial(rounds: int) -> Trial:
    """Return the trial; two of them differ in nothing."""
    random, clients = np.random.default_rng(0), {}
    for client, tests in enumerate(TESTS):
        x = random.integers(0, 256, (TRAIN + tests, SIZE, SIZE, 3), np.uint8)
        y = np.arange(TRAIN + tests) % 10
        clients[f"client {client}"] = (x[:TRAIN], y[:TRAIN], x[TRAIN:], y[TRAIN:])
    settings = Settings(
        rounds=2 * rounds + 2,
        work=Work(batch_size=32, epochs=1),
        optimizer=SGD(lr=0.01),
        engine="sequential",
        evaluate_every=2,
    )
    return Trial(fixbn(switch=0), frozen_network, federation(clients), settings, seed=0)


def time_round(trial: Trial) -> float:
    """Return the processor seconds of the next round."""
    began = time.process_time()
    trial.advance()
    return time.process_time() - began


def main(rounds: int) -> None:
    """Print the table."""
    plain, kept = make_trial(rounds), make_trial(rounds)
    seconds: list[tuple[float, float]] = []
    for _ in range(2 * rounds + 2):
        with mock.patch.object(frozen, "find_backbone", return_value=None):
            slow = time_round(plain)
        seconds.append((slow, time_round(kept)))
    print("| rounds | on samples | on features | ratio |\n|---|---:|---:|---:|")
    parts = {"first": seconds[:1], "later, measured": seconds[1::2], "later": seconds[2::2]}
    for name, pairs in parts.items():
        ratios = [slow / fast for slow, fast in pairs]
        slow, fast = (median(each) for each in zip(*pairs, strict=True))
        spread = f"{median(ratios):.3g} ({min(ratios):.3g} to {max(ratios):.3g})"
        print(f"| {name} | {slow:.2f} s | {fast:.3f} s | {spread} |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
