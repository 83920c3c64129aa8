"""Prints how large the signal is in FedWon's digit network before any training, by method, and how much is clipped.

python examples/initial_signal.py

Each network gets 32 images of each of the five embedded clients, a client at a time, in training mode without dropout.
A cell is the standard deviation over images and positions of what enters an activation, or leaves the last layer: root
of the mean square over units and clients. Clipped are the units whose gradient is above 0.64 times their weights.
"""

import torch
from torch import nn

import fedshift
from fedshift.core.preparation import apply_surgery
from fedshift.methods import METHODS as CATALOG
from fedshift.models.digits import digit_cnn_dropout

METHODS = "fedavg, gn, nonorm, fedwon, fedwon(gain=1.71)"
IMAGES, CLIP, EPS = 32, 0.64, 1e-3


def measure(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[list[float], int, int]:
    """Return the variance that enters each activation and leaves the last layer, and the units clipped and in all."""
    seen: list[float] = []
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.eval()
        elif isinstance(layer, nn.ReLU):
            layer.register_forward_pre_hook(lambda _, inputs: seen.append(spread(inputs[0])))
    outputs = model(x)
    nn.functional.cross_entropy(outputs, y).backward()
    clipped = units = 0
    for parameter in model.parameters():
        if parameter.squeeze().ndim > 1:
            gradient, weight = (t.detach().flatten(1).norm(dim=1) for t in (parameter.grad, parameter))
            clipped += int((gradient > CLIP * weight.clamp(min=EPS)).sum())
            units += len(weight)
    return [*seen, spread(outputs)], clipped, units


def spread(x: torch.Tensor) -> float:
    """Return the variance of ``x`` ``[N, units, ...]`` over images and positions, averaged over units."""
    return float(x.detach().transpose(0, 1).flatten(1).var(1).mean())


def main() -> None:
    """Print the table."""
    print(f"{'':20}" + "".join(f"{name:>9}" for name in ("conv1", "conv2", "conv3", "fc1", "fc2", "fc3", "clipped")))
    for method in CATALOG.parse_all(METHODS):
        rows, clipped, units = [], 0, 0
        for client in fedshift.digits().clients:
            torch.manual_seed(0)
            model = apply_surgery(method, digit_cnn_dropout()).train()
            chosen = torch.arange(IMAGES)
            variances, some, count = measure(model, client.train.inputs(chosen), client.train.y[chosen])
            rows.append(variances)
            clipped, units = clipped + some, units + count
        cells = torch.tensor(rows).mean(0).sqrt().tolist()
        print(f"{method.name:20}" + "".join(f"{cell:9.3f}" for cell in cells) + f"{100 * clipped / units:8.1f}%")


if __name__ == "__main__":
    main()
