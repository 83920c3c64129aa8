"""A small network whose training can be held up at a site, so that something happens in mid-round for certain.

Another one takes memory that a site may not have.
"""

import os
import time
from pathlib import Path

import torch
from torch import nn

NETWORK = "tests.flower.gated:network"
GATE = "FEDSHIFT_TEST_GATE"
"""Names a file of a process. While it is there, training stops at the batch whose number, counted from 1, it holds."""
trained = 0


class Gate(nn.Module):
    """Passes on what it gets, sooner or later."""

    def forward(self, x):
        global trained
        if self.training and len(x) > 2:  # a batch, and no trial of what the network takes
            trained += 1
            gate = Path(os.environ.get(GATE, os.devnull))
            while gate.is_file() and int(gate.read_text()) == trained:
                gate.with_suffix(".held").touch()
                time.sleep(0.02)
        return x


def network(shape, classes, *, width=16):
    pixels = shape[0] * shape[1] * shape[2]
    return nn.Sequential(
        nn.Flatten(), nn.Linear(pixels, width), nn.BatchNorm1d(width), nn.ReLU(), Gate(), nn.Linear(width, classes)
    )


class Hungry(nn.Module):
    """Passes on what it gets, and asks for 8 GiB that it never uses."""

    def forward(self, x):
        if self.training and len(x) > 2:
            torch.empty(2**31)
        return x


def hungry(shape, classes):
    return nn.Sequential(*network(shape, classes)[:-1], Hungry(), nn.Linear(16, classes))
