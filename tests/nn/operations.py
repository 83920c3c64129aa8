"""The reference for surgery: an unchanged network whose operations are exchanged as it runs, whoever calls them.

Surgery exchanges layers by their types. Here torch's functions are exchanged, by formulas written out, so that the
type, parts and name of a layer play no role: both must give the same outputs.
"""

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert (one - other).detach().abs().max() <= 1e-12 * max(1, float(other.detach().abs().max()))


def group_normalized(x, channels_in_groups, weight, bias, eps):
    """Wu and He 2018 (arXiv:1803.08494), equations 1 to 3 and 6."""
    made = torch.empty_like(x)
    for start in range(0, x.shape[1], channels_in_groups):
        part = x[:, start : start + channels_in_groups].flatten(1)
        mean = part.sum(1, keepdim=True) / part.shape[1]
        deviation = (((part - mean) ** 2).sum(1, keepdim=True) / part.shape[1] + eps).sqrt()
        place = made[:, start : start + channels_in_groups]
        place.copy_(((part - mean) / deviation).view_as(place))
    shape = (1, -1, *[1] * (x.ndim - 2))
    made = made if weight is None else made * weight.view(shape)
    return made if bias is None else made + bias.view(shape)


def channels_in_a_group(channels, flat, wanted):
    """FedWon (arXiv:2306.05879), appendix A.2; at least eight flat features for each group."""
    groups = min(wanted or (32 if channels >= 32 else 8), channels, max(1, channels // 8) if flat else channels)
    while channels % groups:
        groups -= 1
    return channels // groups


def standardized(weight):
    """FedWon's equation 3 with gains of one, and the least variance of its listing 1."""
    flat = weight.flatten(1)
    if flat.shape[1] == 1:
        return weight
    return (
        (flat - flat.mean(1, keepdim=True)) / (flat.var(1, keepdim=True) * flat.shape[1]).clamp(min=1e-4).sqrt()
    ).view_as(weight)


def transposed(change, weight, groups):
    """``change``, of kernels [O, I, ...], applied to those of a transposed convolution, [I, O / groups, ...]."""
    return torch.cat([change(part.transpose(0, 1)).transpose(0, 1) for part in weight.chunk(groups)])


class Exchanged(TorchFunctionMode):
    """Inside the block networks compute as under ``method``: ``gn``, ``ln``, ``nonorm``, ``fedwon``, or unchanged.

    ``training``: for each batch normalization, whether it used the batch's statistics.
    """

    def __init__(self, method):
        super().__init__()
        self.method, self.training, self.kernels = method, [], []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return self.normalize(*args, **kwargs)
        if self.method in ("nonorm", "fedwon") and func in (F.group_norm, F.layer_norm, F.instance_norm, F.rms_norm):
            return args[0]
        if self.method == "fedwon" and func in TRANSPOSED and not self.is_scaled(args[1]):
            groups = kwargs.get("groups", args[6] if len(args) > 6 else 1)
            return func(args[0], transposed(standardized, args[1], groups), *args[2:], **kwargs)
        if self.method == "fedwon" and func in (F.conv1d, F.conv2d, F.conv3d) and not self.is_scaled(args[1]):
            return func(args[0], standardized(args[1]), *args[2:], **kwargs)
        return func(*args, **kwargs)

    def is_scaled(self, kernel):
        """Return whether a layer normalized the kernel before it was called."""
        return any(kernel.untyped_storage().data_ptr() == each.untyped_storage().data_ptr() for each in self.kernels)

    def normalize(self, x, mean, var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
        if mean is None:  # not a layer's: timm standardizes kernels by this function
            self.kernels.append(F.batch_norm(x, mean, var, weight, bias, training, momentum, eps))
            return self.kernels[-1]
        self.training.append(training)
        if self.method in ("gn", "ln"):
            wanted = 1 if self.method == "ln" else None
            return group_normalized(x, channels_in_a_group(x.shape[1], x.ndim < 4, wanted), weight, bias, eps)
        if self.method in ("nonorm", "fedwon"):
            return x
        return F.batch_norm(x, mean, var, weight, bias, training, momentum, eps)
