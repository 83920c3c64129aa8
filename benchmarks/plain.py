"""The plain loop: federated training as public research code writes it, the baseline that engines are measured against.

A module for each client, ``torch.optim.SGD`` made anew each round, batches that are tensors already, float32,
``.item()`` after every step, entries averaged one after another. It shares no code with fedshift. What would slow it
down for nothing (a ``DataLoader``, ``model.train()`` at every step) is left out.

``PlainLoop(network, batches, lr=0.01)`` is FedAvg. ``personal=batch_norm_entries(network)`` makes it FedBN (Li et al.
2021, arXiv:2102.07623). ``agc=0.64`` clips gradients adaptively as FedWon does (Zhuang & Lyu 2024, arXiv:2306.05879,
equation 4); pass it the network after surgery. The caller makes the data.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batches = Sequence[tuple[Tensor, Tensor]]


class PlainLoop:
    """Clients that train on ``batches[i]``, (inputs, labels) each, and are averaged by how many samples they have.

    ``network``: the first weights of all. ``personal``: names of entries that stay on each client. ``agc``: clipping
    threshold; None clips nothing.
    """

    def __init__(
        self,
        network: nn.Module,
        batches: Sequence[Batches],
        *,
        lr: float,
        personal: Collection[str] = (),
        agc: float | None = None,
    ) -> None:
        self.server = copy.deepcopy(network)
        self.clients = [copy.deepcopy(network) for _ in batches]
        self.batches, self.lr, self.agc = batches, lr, agc
        self.shared = [name for name in network.state_dict() if name not in personal]
        sizes = [sum(len(y) for _, y in own) for own in batches]
        self.weights = [size / sum(sizes) for size in sizes]

    def round(self) -> float:
        """Every client's local work, then the average; the mean loss of the clients' steps."""
        losses = [self._train(model, own) for model, own in zip(self.clients, self.batches, strict=True)]
        self._average()
        return sum(losses) / len(losses)

    def evaluate(self, x: Tensor, y: Tensor, batch: int, client: int | None = None) -> tuple[float, float]:
        """Mean loss and accuracy of the server's model, or of a client's, on ``x [N, ...]`` and ``y [N]``."""
        model = self.server if client is None else self.clients[client]
        model.eval()
        loss, hits = 0.0, 0
        with torch.no_grad():
            for start in range(0, len(y), batch):
                labels = y[start : start + batch]
                outputs = model(x[start : start + batch])
                loss += F.cross_entropy(outputs, labels, reduction="sum").item()
                hits += (outputs.argmax(dim=1) == labels).sum().item()
        return loss / len(y), hits / len(y)

    def _train(self, model: nn.Module, batches: Batches) -> float:
        optimizer = torch.optim.SGD(model.parameters(), lr=self.lr)
        model.train()
        total = 0.0
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if self.agc is not None:
                clip_adaptively(model, self.agc)
            optimizer.step()
            total += loss.item()
        return total / len(batches)

    @torch.no_grad()
    def _average(self) -> None:
        """The weighted mean of each shared entry, given to all; counters are the first client's, as in FedBN's code."""
        server = self.server.state_dict()
        states = [model.state_dict() for model in self.clients]
        for name in self.shared:
            if server[name].is_floating_point():
                mean = torch.zeros_like(server[name])
                for weight, state in zip(self.weights, states, strict=True):
                    mean += weight * state[name]
                server[name].copy_(mean)
            else:
                server[name].copy_(states[0][name])
            for state in states:
                state[name].copy_(server[name])


def batch_norm_entries(network: nn.Module) -> set[str]:
    """Names of everything that BatchNorm layers hold, which FedBN keeps on clients."""
    kinds = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
    return {
        f"{prefix}.{name}"
        for prefix, layer in network.named_modules()
        if isinstance(layer, kinds)
        for name in layer.state_dict()
    }


@torch.no_grad()
def clip_adaptively(model: nn.Module, clip: float, eps: float = 1e-3) -> None:
    """Scale each unit's gradient down to ``clip`` times the norm of its weights, which is taken as at least ``eps``."""
    for param in model.parameters():
        if param.grad is None:
            continue
        most = unit_norm(param).clamp(min=eps) * clip
        size = unit_norm(param.grad)
        clipped = param.grad * (most / size.clamp(min=1e-6))
        param.grad.copy_(torch.where(size > most, clipped, param.grad))


def unit_norm(x: Tensor) -> Tensor:
    """Norm of each output unit, ``[O, 1, ...]``; a bias or a gain is one unit."""
    if x.squeeze().ndim < 2:
        return torch.linalg.vector_norm(x)
    return torch.linalg.vector_norm(x, dim=tuple(range(1, x.ndim)), keepdim=True)
