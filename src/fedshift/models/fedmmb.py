"""Networks of FedSMB and FedMMB (Nasirigerdeh et al., arXiv:2011.07006, section 4): 2FNN, 3CFNN and 4CFNN.

The first two come from FedAvg (McMahan et al. 2017, arXiv:1602.05629, section 3), whose parameter counts show that
convolutions keep the size; for 4CFNN, where the paper is silent, they do too. ReLU follows convolutions as well. The
paper trains them in Keras and does not describe initialization; here it is PyTorch's.
"""

from __future__ import annotations

from torch import nn

from ._common import Shape, _image_channels, _vector_length


def _convolutional(shape: Shape, channels: tuple[int, ...], kernel: int, hidden: int, classes: int) -> nn.Module:
    """Return convolutions, each with ReLU and 2 x 2 max-pooling, one hidden FC layer, and the output layer."""
    layers: list[nn.Module] = []
    before, height, width = shape
    for after in channels:
        layers += [nn.Conv2d(before, after, kernel, padding=kernel // 2), nn.ReLU(), nn.MaxPool2d(2)]
        before, height, width = after, height // 2, width // 2
    layers += [nn.Flatten(), nn.Linear(before * height * width, hidden), nn.ReLU(), nn.Linear(hidden, classes)]
    return nn.Sequential(*layers)


def fnn2(shape: Shape = (1, 28, 28), classes: int = 10) -> nn.Module:
    """2FNN of FedSMB and FedMMB (arXiv:2011.07006): two hidden FC layers (200, 200); 199,210 parameters."""
    first = nn.Linear(_vector_length("fnn2", shape), 200)
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, classes))


def cfnn3(shape: Shape = (1, 28, 28), classes: int = 10) -> nn.Module:
    """3CFNN of FedSMB and FedMMB (arXiv:2011.07006): 5 x 5 convolutions (32, 64), FC (512); 1,663,370 parameters."""
    _image_channels("cfnn3", shape, 4)
    return _convolutional(shape, (32, 64), kernel=5, hidden=512, classes=classes)


def cfnn4(shape: Shape = (3, 32, 32), classes: int = 10) -> nn.Module:
    """4CFNN of FedSMB and FedMMB (arXiv:2011.07006): 3 x 3 convolutions (128, 256, 512), FC (1024)."""
    _image_channels("cfnn4", shape, 8)
    return _convolutional(shape, (128, 256, 512), kernel=3, hidden=1024, classes=classes)
