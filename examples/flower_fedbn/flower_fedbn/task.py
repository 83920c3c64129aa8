"""Network, data and training loop: ordinary PyTorch, in which nothing knows of federated methods."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fedshift


class Net(nn.Module):
    """A small convolutional network with batch normalization for images ``[N, 3, 16, 16]``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.head = nn.Linear(16 * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores ``[N, 10]``."""
        x = torch.max_pool2d(self.bn1(self.conv1(x)).relu(), 2)
        x = torch.max_pool2d(self.bn2(self.conv2(x)).relu(), 2)
        return self.head(x.flatten(1))


def load_data(partition: int, split: str) -> tuple[Tensor, Tensor]:
    """Images ``[N, 3, 16, 16]`` and labels ``[N]`` of one of five clients, whose digits look different."""
    data = getattr(fedshift.digits(size=16).clients[partition], split)
    return data.inputs(slice(None), torch.float32), data.y


def train(model: nn.Module, x: Tensor, y: Tensor, lr: float, seed: int) -> float:
    """One epoch of SGD on batches of 32; returns the mean loss."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=lr), []
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    model.train()
    for batch in order.split(32):
        optimizer.zero_grad()
        loss = cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def test(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Accuracy."""
    return (model.eval()(x).argmax(1) == y).double().mean().item()
