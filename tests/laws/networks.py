"""Tiny networks for law 11, one idea each, by kind: what must happen to each is stated here, not measured.

Every network is a :class:`Net`, in which an idea replaces or surrounds the first layer. The sequential engine must
train it as plain PyTorch does, or refuse it in the words of ``refused``; other engines may refuse any network.
"""

import copy
import math
import random
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from fedshift.models import ModelFactory

CLASSES = 3


@dataclass(frozen=True)
class Case:
    """An idea: ``hidden`` calls the first layer, which ``setup`` has changed.

    ``refused``: words of the refusal; None: it must be right; empty: right or refused. ``averaged``: whether the server
    averages the buffers that change (moving averages); otherwise each client keeps its own. ``kind``: another network.
    """

    hidden: Callable[["Net", Tensor], Tensor] = lambda net, x: net.a(x)
    setup: Callable[["Net"], object] = lambda net: None
    refused: str | None = None
    averaged: bool = False
    shape: tuple[int, ...] = (6,)
    dtype: torch.dtype = torch.float64
    kind: "type[Net] | None" = None


class Net(nn.Module):
    """Two layers, 6 or 1 x 6 x 6 inputs to three classes; a subclass for each case has its ``hidden``."""

    hidden: Callable[..., Tensor]

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.a = nn.Linear(6, 5) if case.shape == (6,) else nn.Conv2d(1, 2, 3)
        self.b = nn.Linear(5 if case.shape == (6,) else 32, CLASSES)
        case.setup(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(type(self).hidden(self, x).flatten(1).tanh())


def make(case: Case) -> ModelFactory:
    """Return the function that makes the network of ``case``, always with the same weights."""
    kind = case.kind or Net
    kind = type(kind.__name__, (kind,), {"hidden": case.hidden})

    def make_network(shape: tuple[int, ...], classes: int) -> nn.Module:
        torch.manual_seed(3)
        return kind(case).double() if case.dtype == torch.float64 else kind(case)

    return make_network


def keep(**makers: Callable[[], object]) -> Callable[[nn.Module], object]:
    """Set attributes, of which layers become layers of the network."""
    return lambda net: [setattr(net, name, maker()) for name, maker in makers.items()]


def buffer(persistent: bool = True, **values: Tensor) -> Callable[[nn.Module], object]:
    return lambda net: [net.register_buffer(name, value.clone(), persistent) for name, value in values.items()]


def last(*values: object) -> object:
    """Return the last of several values, after all of them are made."""
    return values[-1]


def center(net: nn.Module, h: Tensor, name: str = "mean") -> Tensor:
    """Move an attribute toward the mean of ``h [B, ...]`` in training, and subtract it."""
    if net.training:
        setattr(net, name, 0.5 * getattr(net, name) + 0.5 * h.detach().mean(0))
    return h - getattr(net, name)


def center_in_place(net: nn.Module, x: Tensor) -> Tensor:
    h = net.a(x)
    if net.training:
        net.mean.mul_(0.5).add_(0.5 * h.detach().mean(0))
    return h - net.mean


def write(act: Callable[[nn.Parameter], object]) -> Callable[[nn.Module, Tensor], Tensor]:
    def hidden(net: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            act(net.a.weight)
        return net.a(x)

    return hidden


def limit(weight: Tensor) -> Tensor:
    return torch.renorm(weight.detach(), p=2, dim=0, maxnorm=0.4)


def look_up(net: nn.Module, x: Tensor) -> Tensor:
    return net.words(x.gt(0).long()).mean(1)


def add(
    make_layer: Callable[[], nn.Module], call: Callable[..., Tensor] = lambda c, h: c(h), **options: object
) -> Case:
    """Return the case of a layer ``c`` after the first one."""
    return Case(lambda net, x: call(net.c, net.a(x)), keep(c=make_layer), **options)


class Weights:
    """A plain object that holds the weights of a layer in ``container``."""

    def __init__(self, container: object) -> None:
        self.container = container

    def __call__(self, x: Tensor) -> Tensor:
        held = self.container
        return F.linear(x, *(held.values() if isinstance(held, dict) else held))


def flatten_weights(net: nn.Module) -> None:
    net.flat = [torch.cat([p.data.flatten() for p in net.a.parameters()]).double()]
    net.a.double()
    net.a.weight.data, net.a.bias.data = net.flat[0][:30].view(5, 6), net.flat[0][30:]


def tie(net: nn.Module) -> None:
    net.c = nn.Linear(6, 5)
    net.c.weight = net.a.weight


HOLD = {
    "partial": lambda a: partial(F.linear, weight=a.weight, bias=a.bias),
    "default": lambda a: lambda x, w=a.weight, b=a.bias: F.linear(x, w, b),
    "closure": lambda a: (lambda w, b: lambda x: F.linear(x, w, b))(a.weight, a.bias),
    "list": lambda a: Weights([a.weight, a.bias]),
    "tuple": lambda a: Weights(tuple(a.parameters())),
    "dictionary": lambda a: Weights(dict(a.named_parameters())),
    "namespace": lambda a: partial(lambda held, x: F.linear(x, held.w, held.b), SimpleNamespace(w=a.weight, b=a.bias)),
    "bound method": lambda a: a.forward,
    "bound method of the weight": lambda a: lambda x, transpose=a.weight.t: x @ transpose() + a.bias,
    "weak reference": lambda a: (lambda w: lambda x: F.linear(x, w(), a.bias))(weakref.ref(a.weight)),
    "functional call": lambda a: partial(torch.func.functional_call, a, dict(a.named_parameters())),
}
HELD = {
    name: Case(lambda net, x: net.first(x), lambda net, hold=hold: setattr(net, "first", hold(net.a)))
    for name, hold in HOLD.items()
} | {
    "tied weight": Case(lambda net, x: net.a(x) + net.c(x), tie),
    "one layer by two names": Case(lambda net, x: net.a(x) + 2 * net.c(x), lambda net: setattr(net, "c", net.a)),
    "one weight twice in a list": Case(
        lambda net, x: F.linear(x, net.all[0]) + F.linear(x, net.all[1]),
        lambda net: setattr(net, "all", nn.ParameterList([net.a.weight, net.a.weight])),
    ),
    "alias of the values": Case(
        lambda net, x: net.a(x) * net.alias.norm(), lambda net: setattr(net, "alias", net.a.weight.data), ""
    ),
    "two weights with one memory": Case(
        lambda net, x: net.a(x) + 2 * net.c(x),
        lambda net: [
            setattr(net, "c", nn.Linear(6, 5)),
            net.double(),
            setattr(net.c.weight, "data", net.a.weight.data),
        ],
        "'a.weight' and 'c.weight' of the model share memory",
    ),
    "views of one flat vector": Case(lambda net, x: net.a(x) * net.flat[0].norm(), flatten_weights, ""),
    "unregistered list": Case(
        lambda net, x: F.linear(x, net.all[0]),
        keep(all=lambda: [nn.Parameter(torch.ones(5, 6).double())]),
        "holds a Parameter in its attribute 'all'",
    ),
    "unregistered layer": Case(
        lambda net, x: net.layers["first"](x),
        keep(layers=lambda: {"first": nn.Linear(6, 5).double()}),
        "holds a Linear in its attribute 'layers'",
    ),
}


def halve(weight: Tensor) -> None:
    weight.grad.mul_(0.5)


def step_at_once(weight: Tensor) -> None:
    weight.data.sub_(0.1 * weight.grad)
    weight.grad = None


def pack(pack_tensor: Callable[..., object], unpack: Callable[..., Tensor]) -> Case:
    hooks = torch.autograd.graph.saved_tensors_hooks

    def hidden(net: nn.Module, x: Tensor) -> Tensor:
        with hooks(pack_tensor, unpack):
            return net.a(x).sigmoid() ** 2

    return Case(hidden)


def hook(act: Callable[[nn.Module, Tensor], Callable[[Tensor], Tensor]]) -> Case:
    return Case(lambda net, x: last(h := net.a(x), h.requires_grad and h.register_hook(act(net, h)), h))


HOOKS = {
    name: Case(setup=setup)
    for name, setup in {
        "gradient scaled": lambda net: net.a.weight.register_hook(lambda grad: 3 * grad),
        "gradient clipped": lambda net: net.a.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01)),
        "gradient masked": lambda net: net.b.bias.register_hook(lambda grad: grad * torch.tensor([0.0, 1.0, 1.0])),
        "two hooks": lambda net: [net.a.bias.register_hook(lambda grad, k=k: grad * k + k) for k in (2, 3)],
        "all weights": lambda net: [weight.register_hook(torch.sign) for weight in net.a.parameters()],
        "after accumulation": lambda net: net.a.weight.register_post_accumulate_grad_hook(halve),
        "gradient removed": lambda net: net.a.weight.register_post_accumulate_grad_hook(
            lambda weight: setattr(weight, "grad", None)
        ),
        "step in backward": lambda net: net.a.weight.register_post_accumulate_grad_hook(step_at_once),
        "outputs": lambda net: net.a.register_forward_hook(lambda layer, inputs, outputs: 2 * outputs),
        "outputs in place": lambda net: net.a.register_forward_hook(lambda layer, inputs, outputs: outputs.mul_(2)),
        "inputs": lambda net: net.a.register_forward_pre_hook(lambda layer, inputs: (inputs[0] + 1,)),
        "backward": lambda net: net.b.register_full_backward_hook(lambda layer, grads, _: tuple(5 * g for g in grads)),
        "before backward": lambda net: net.b.register_full_backward_pre_hook(lambda layer, grads: (grads[0] * 2,)),
    }.items()
} | {
    "activations": hook(lambda net, h: torch.neg),
    "activations with a weight": hook(lambda net, h: lambda grad: grad * net.a.weight.sum()),
    "saved tensors rounded": pack(lambda t: t.detach().float() * 2, lambda t: t.double()),
    "saved tensors in a list": pack(lambda t: [t.detach()], lambda held: held[0]),
}
again = partial(checkpoint, use_reentrant=False)
CHECKPOINTS = {
    "reentrant": add(lambda: nn.Linear(5, 5), lambda c, h: checkpoint(c, h, use_reentrant=True)),
    "not reentrant": add(lambda: nn.Linear(5, 5), again),
    "reentrant, BatchNorm": add(lambda: nn.BatchNorm1d(5), lambda c, h: checkpoint(c, h, use_reentrant=True)),
    "not reentrant, BatchNorm": add(lambda: nn.BatchNorm1d(5), again),
    "nested": add(lambda: nn.Linear(5, 5), lambda c, h: again(lambda h: again(c, h).sin(), h)),
    "a sequence": add(
        lambda: nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)),
        lambda c, h: checkpoint_sequential(c, 2, h, use_reentrant=False),
    ),
    "first layer": Case(lambda net, x: again(net.a, x)),
    "a closure": Case(lambda net, x: again(lambda x: net.a(x).sin() * net.a(x), x)),
    "draws": Case(lambda net, x: again(lambda x: F.dropout(net.a(x), 0.3, net.training), x)),
}


def grow(net: nn.Module, x: Tensor) -> Tensor:
    h = net.a(x)
    if net.training:
        net.seen = torch.cat([net.seen, h.detach().mean(0, keepdim=True)])
    return h - net.seen.mean(0)


def replace_rows(net: nn.Module, x: Tensor) -> Tensor:
    h = net.a(x)
    if net.training:
        net.queue[int(net.pointer)] = h.detach().mean(0)
        net.pointer[...] = (net.pointer + 1) % len(net.queue)
    return h - net.queue.mean(0)


def follow_weight(net: nn.Module, x: Tensor) -> Tensor:
    if net.training:
        net.smooth = 0.5 * net.smooth + 0.5 * net.a.weight.detach()
    return net.a(x) - F.linear(x, net.smooth)


def warm_up(net: nn.Module, x: Tensor) -> Tensor:
    net.count += int(net.training)
    return net.a(x) * (1 - 0.5 ** (net.count + 1))


def observe(net: nn.Module, x: Tensor) -> Tensor:
    """Record the range of activations, in evaluation too, as observers of quantization do, and clip to its half."""
    h = net.a(x)
    net.low.copy_(torch.minimum(net.low, h.detach().min()))
    net.high.copy_(torch.maximum(net.high, h.detach().max()))
    return h.clamp(net.low / 2, net.high / 2)


def fix(*values: float) -> Callable[[nn.Module], object]:
    return keep(mask=lambda: nn.Parameter(torch.tensor(values), requires_grad=False))


def use_buffer(call: Callable[[nn.Module, Tensor], Tensor], persistent: bool = True, **values: Tensor) -> Case:
    return Case(lambda net, x: call(net, net.a(x)), buffer(persistent, **values))


BUFFERS = {
    "own BatchNorm": use_buffer(
        lambda net, h: F.batch_norm(h, net.running_mean, net.running_var, None, None, net.training),
        running_mean=torch.zeros(5),
        running_var=torch.ones(5),
    ),
    "assigned": Case(lambda net, x: center(net, net.a(x)), buffer(mean=torch.zeros(5)), averaged=True),
    "in place": Case(center_in_place, buffer(mean=torch.zeros(5)), averaged=True),
    "moving mean of a weight": Case(follow_weight, buffer(smooth=torch.zeros(5, 6)), averaged=True),
    "assigned in evaluation too": use_buffer(
        lambda net, h: last(setattr(net, "calls", net.calls + 1), h), calls=torch.zeros(())
    ),
    "observer": Case(observe, buffer(low=torch.zeros(()), high=torch.zeros(()))),
    "grows": Case(grow, buffer(seen=torch.zeros(1, 5)), ""),
    "queue": Case(replace_rows, buffer(queue=torch.zeros(4, 5), pointer=torch.tensor(0))),
    "counter": Case(warm_up, buffer(count=torch.tensor(0))),
    "counter of floats": Case(warm_up, buffer(count=torch.tensor(0.0))),
    "last batch": use_buffer(
        lambda net, h: last(before := h - net.last.sum(), net.last.copy_(h.detach().mean(0)), before),
        last=torch.zeros(5),
    ),
    "not persistent": use_buffer(lambda net, h: h * net.mask, False, mask=torch.arange(5.0)),
    "not persistent, moved": Case(center_in_place, buffer(False, mean=torch.zeros(5))),
    "not persistent, assigned": Case(lambda net, x: center(net, net.a(x)), buffer(False, mean=torch.zeros(5))),
    "not persistent, made anew": use_buffer(
        lambda net, h: last(setattr(net, "mask", torch.arange(5.0).double()), h * net.mask), False, mask=torch.zeros(5)
    ),
    "minus infinity": use_buffer(lambda net, h: (h + net.mask).softmax(1), mask=torch.tensor([0, -math.inf, 0, 0, 0])),
    "Boolean": use_buffer(lambda net, h: h * net.mask, mask=torch.tensor([True, False, True, False, True])),
    "large integer": use_buffer(lambda net, h: h * (net.large % 7), large=torch.tensor(2**60 + 3)),
    "bytes": use_buffer(lambda net, h: h * net.codes, codes=torch.tensor([0, 255, 7, 3, 1]).byte()),
    "permutation": use_buffer(lambda net, h: h[:, net.order], order=torch.tensor([3, 1, 0, 2, 4])),
    "empty": Case(setup=buffer(empty=torch.zeros(0, 3))),
    "float16": Case(setup=buffer(scale=torch.full((5,), 0.3).half())),
    "fixed parameter, minus infinity": Case(
        lambda net, x: (net.a(x) + net.mask).softmax(1), fix(0, -math.inf, 0, 0, 0)
    ),
    "fixed parameter, large integers": Case(lambda net, x: net.a(x) * (net.mask % 7), fix(*[2**60 + 3] * 5)),
    "expanded": use_buffer(lambda net, h: h * net.row, row=torch.ones(1).expand(5)),
    "one by two names": Case(
        lambda net, x: net.a(x) * net.scale + net.same,
        lambda net: [net.register_buffer(name, net.a.bias.detach()) for name in ("scale", "same")],
        "",
    ),
    "sparse": Case(
        setup=buffer(edges=torch.eye(5).double().to_sparse()), refused="'edges' of the model is torch.sparse"
    ),
    "complex": Case(setup=buffer(waves=torch.ones(5) + 1j), refused="'waves' of the model is complex"),
    "complex, not persistent": use_buffer(lambda net, h: (h * net.waves).real, False, waves=torch.ones(5) + 1j),
}


def scale_at_first_call(net: nn.Module, x: Tensor) -> Tensor:
    """Initialize as ActNorm does, with its flag in a buffer."""
    h = net.a(x)
    if net.training and not net.ready:
        net.scale.data = 1 / (h.detach().std(0) + 1e-3)
        net.ready.fill_(True)
    return h * net.scale


def teach(net: nn.Module, x: Tensor) -> Tensor:
    if net.training:
        with torch.no_grad():
            net.teacher.mul_(0.5).add_(net.a.weight, alpha=0.5)
    return net.a(x) - F.linear(x, net.teacher)


def shrink_vector(net: nn.Module, x: Tensor) -> Tensor:
    weights = list(net.a.parameters())
    nn.utils.vector_to_parameters(0.9 * nn.utils.parameters_to_vector(weights), weights)
    return net.a(x)


WRITES = {
    ".data assigned": Case(write(lambda weight: setattr(weight, "data", limit(weight)))),
    ".data assigned in training": Case(
        lambda net, x: last(net.training and setattr(net.a.weight, "data", limit(net.a.weight)), net.a(x))
    ),
    ".data clamped": Case(write(lambda weight: weight.data.clamp_(-0.2, 0.2))),
    ".data indexed": Case(write(lambda weight: weight.data.__setitem__(slice(0, 2), 0.1))),
    "copied without gradient": Case(write(lambda weight: weight.copy_(limit(weight)))),
    "set to another storage": Case(write(lambda weight: weight.set_(limit(weight)))),
    "all weights as one vector": Case(shrink_vector),
    "new parameter": Case(
        lambda net, x: last(setattr(net.a, "weight", nn.Parameter(limit(net.a.weight))), net.a(x)), refused=""
    ),
    "Embedding's max_norm": Case(look_up, keep(words=lambda: nn.Embedding(2, 5, max_norm=0.4))),
    "teacher without gradient": Case(teach, keep(teacher=lambda: nn.Parameter(torch.zeros(5, 6), requires_grad=False))),
    "copy loaded": Case(
        lambda net, x: last(net.c.load_state_dict(net.a.state_dict()), net.a(x) - 0.5 * net.c(x)),
        lambda net: setattr(net, "c", copy.deepcopy(net.a).requires_grad_(False)),
    ),
    "first call": Case(
        scale_at_first_call,
        lambda net: [keep(scale=lambda: nn.Parameter(torch.ones(5)))(net), buffer(ready=torch.tensor(False))(net)],
    ),
}


class Moded(Net):
    """A network that acts when its mode changes."""

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.act(mode)
        return self


class Merged(Moded):
    """LoRA whose product is added to the weight in evaluation, as in Hu et al. 2021, arXiv:2106.09685."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.down, self.up, self.merged = nn.Linear(6, 2, bias=False), nn.Linear(2, 5, bias=False), False

    def act(self, mode: bool) -> None:
        if self.merged == mode:
            self.a.weight.data += (1 - 2 * mode) * self.up.weight.data @ self.down.weight.data
            self.merged = not mode

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) if self.merged else self.a(x) + self.up(self.down(x))
        return self.b(h.tanh())


class Fused(Moded):
    """Evaluation uses the weight that ``eval()`` cached."""

    def act(self, mode: bool) -> None:
        self.cached = None if mode else self.a.weight.detach() * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.linear(x, 2 * self.a.weight if self.training else self.cached).tanh())


class Limited(Moded):
    """``train()`` limits the weight."""

    def act(self, mode: bool) -> None:
        self.a.weight.data = limit(self.a.weight)


class Frozen(Moded):
    """``train()`` leaves BatchNorm in evaluation mode."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.norm = nn.BatchNorm1d(5)
        self.norm.running_mean.fill_(0.5)

    def act(self, mode: bool) -> None:
        self.norm.training = False

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)).tanh())


class Thawed(Moded):
    """The first layer is trained in training mode alone."""

    def act(self, mode: bool) -> None:
        self.a.requires_grad_(mode)


class Switched(Net):
    """``eval()`` alone is overridden."""

    def eval(self) -> nn.Module:
        self.a.weight.data.mul_(1.0)
        return super().eval()


MODES = {kind.__name__: Case(kind=kind) for kind in (Merged, Fused, Limited, Frozen, Thawed, Switched)}


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Tagged(torch.Tensor):
    """A tensor subclass."""


class OwnParameter(nn.Parameter):
    """A parameter's subclass."""


def run_cached(net: nn.Module, x: Tensor) -> Tensor:
    with parametrize.cached():
        return net.a(x) + net.a(2 * x)


def replace_weight(kind: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    return lambda net: setattr(net.a, "weight", kind(net.a.weight.detach()))


PARAMETRIZED = {
    "pruned by size": Case(setup=lambda net: prune.l1_unstructured(net.a, "weight", 0.5)),
    "pruned by a mask": Case(setup=lambda net: prune.custom_from_mask(net.a, "bias", torch.eye(5)[0])),
    "pruned twice": Case(setup=lambda net: [prune.random_unstructured(net.a, "weight", 2) for _ in range(2)]),
    "weight_norm": Case(setup=lambda net: parametrizations.weight_norm(net.a)),
    "spectral_norm": Case(setup=lambda net: parametrizations.spectral_norm(net.a)),
    "orthogonal": Case(setup=lambda net: parametrizations.orthogonal(net.a)),
    "own": Case(setup=lambda net: parametrize.register_parametrization(net.a, "weight", Doubled())),
    "cached": Case(run_cached, lambda net: parametrize.register_parametrization(net.a, "weight", Doubled())),
    "tensor subclass": Case(setup=replace_weight(lambda w: nn.Parameter(w.as_subclass(Tagged))), refused=""),
    "parameter subclass": Case(setup=replace_weight(OwnParameter)),
    "transposed": Case(setup=replace_weight(lambda w: nn.Parameter(w.t().contiguous().t()))),
    "old weight_norm": Case(setup=lambda net: nn.utils.weight_norm(net.a)),
    "old spectral_norm": Case(setup=lambda net: nn.utils.spectral_norm(net.a), refused="layer 'a' .*old spectral_norm"),
}


def yield_twos() -> Iterator[float]:
    while True:
        yield 2.0


def lock(net: nn.Module, x: Tensor) -> Tensor:
    with net.lock:
        return net.a(x)


UNCOPIED = {
    "lock": Case(lock, keep(lock=threading.Lock)),
    "file": Case(setup=keep(log=lambda: sys.__stderr__)),
    "generator of one value": Case(lambda net, x: net.a(x) * next(net.values), keep(values=yield_twos)),
    "weak reference": Case(lambda net, x: net.ref()(x), lambda net: setattr(net, "ref", weakref.ref(net.a))),
    "module of Python": Case(lambda net, x: net.a(x) * net.math.pi, keep(math=lambda: math)),
    "thread's own": Case(setup=keep(local=threading.local)),
    "key of a layer": Case(lambda net, x: net.a(x) * net.of[net.a], lambda net: setattr(net, "of", {net.a: 2.0})),
}
GLOBAL = {"calls": 0}


class Shared(Net):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Shared.calls += self.training
        return super().forward(x) * Shared.calls


def count_calls(net: nn.Module, x: Tensor) -> Tensor:
    net.calls += net.training
    return net.a(x) * (1 + net.calls)


def extend(net: nn.Module, x: Tensor) -> Tensor:
    h = net.a(x)
    h = h - sum(net.past) if net.past else h
    if net.training:
        net.past.append(h.detach().mean(0))
    return h


def mix_last(net: nn.Module, x: Tensor) -> Tensor:
    h = net.a(x)
    before, net.last = net.last, h.detach().mean(0)
    return h if before is None else h + before


def recur(net: nn.Module, x: Tensor) -> Tensor:
    _, state = net.cell(x[:1, None], net.state)
    net.state = tuple(t.detach() for t in state)
    return net.a(x) + net.state[0].sum()


def initialize(net: nn.Module, x: Tensor) -> Tensor:
    h = net.a(x)
    if not net.initialized:
        net.shift, net.initialized = h.detach().mean(0), True
    return h - net.shift


def anneal(net: nn.Module, x: Tensor) -> Tensor:
    net.norm.momentum *= 0.5 if net.training else 1
    return net.norm(net.a(x))


def count_globally(net: nn.Module, x: Tensor) -> Tensor:
    GLOBAL["calls"] += net.training
    return net.a(x) * GLOBAL["calls"]


def count_in_closure(net: nn.Module) -> None:
    calls = 0

    def call(x: Tensor) -> Tensor:
        nonlocal calls
        calls += net.training
        return net.a(x) * calls

    net.first = call


def count_in_hook(net: nn.Module) -> None:
    calls = count()
    net.a.weight.register_hook(lambda grad: grad * next(calls))


def unfreeze(net: nn.Module, x: Tensor) -> Tensor:
    h = net.a(x)
    net.a.weight.requires_grad_(net.calls > 0)
    net.calls += net.training
    return h


def keep_slope(net: nn.Module) -> None:
    net.slope = 0.0
    net.b.bias.register_hook(lambda grad: setattr(net, "slope", float(grad[0])))


def draw_from(maker: Callable[[], object], call: Callable[..., object] = lambda dice: dice.random()) -> Case:
    return Case(lambda net, x: net.a(x) * call(net.dice), keep(dice=maker), "dice")


STATE = {
    "counter": Case(count_calls, keep(calls=int), "calls"),
    "counter with a late effect": Case(
        lambda net, x: last(setattr(net, "calls", net.calls + 1), net.a(x) * (1 + (net.calls > 100))),
        keep(calls=int),
        "calls",
    ),
    "every tenth call": Case(
        lambda net, x: last(setattr(net, "calls", net.calls + 1), net.a(x) * (1 + (net.calls % 10 == 0))),
        keep(calls=int),
        "calls",
    ),
    "moving mean": Case(lambda net, x: center(net, net.a(x)), keep(mean=lambda: torch.zeros(5).double()), "mean"),
    "moving mean in place": Case(center_in_place, keep(mean=lambda: torch.zeros(5).double()), "mean"),
    "moving mean of numbers": Case(lambda net, x: net.a(x) + center(net, x.sum(1))[:, None], keep(mean=float), "mean"),
    "last batch": Case(mix_last, keep(last=lambda: None), "last"),
    "last gradient": Case(lambda net, x: net.a(x) * (1 + net.slope), keep_slope, "slope"),
    "list": Case(extend, keep(past=list), "past"),
    "deque": Case(extend, keep(past=lambda: deque(maxlen=2)), "past"),
    "list with a late effect": Case(
        lambda net, x: last(net.past.append(0), net.a(x) * (1 + (len(net.past) > 100))), keep(past=list), "past"
    ),
    "LSTM's state": Case(recur, keep(cell=lambda: nn.LSTM(6, 4), state=lambda: None), "state"),
    "initialized": Case(initialize, keep(initialized=bool, shift=float), "initialized|shift"),
    "annealed momentum": Case(anneal, keep(norm=lambda: nn.BatchNorm1d(5)), "norm.*momentum"),
    "class attribute": Case(kind=Shared, refused="calls"),
    "global": Case(count_globally, refused="GLOBAL"),
    "closure": Case(lambda net, x: net.first(x), count_in_closure, "first|calls"),
    "hook of a weight": Case(setup=count_in_hook, refused="hook|something else"),
    "unfrozen later": Case(unfreeze, keep(calls=int), "calls|weight"),
    "hooks that add up": Case(
        lambda net, x: last(net.a.register_forward_hook(lambda layer, inputs, h: 1.1 * h), net.a(x)),
        refused="'a'.*hook",
    ),
    "attribute of a layer": Case(
        lambda net, x: last(setattr(net.a, "scale", net.a.scale * 0.9), net.a(x) * net.a.scale),
        lambda net: setattr(net.a, "scale", 1.0),
        "'a'.*scale",
    ),
    "array of numpy": Case(
        lambda net, x: last(np.add(net.sums, 1, out=net.sums), net.a(x) * net.sums[0]),
        keep(sums=lambda: np.zeros(3)),
        "sums",
    ),
    "dictionary": Case(
        lambda net, x: last(net.seen.update({len(net.seen): 1}), net.a(x) * len(net.seen)), keep(seen=dict), "seen"
    ),
    "plain object": Case(
        lambda net, x: last(setattr(net.box, "calls", net.box.calls + 1), net.a(x) * net.box.calls),
        keep(box=lambda: SimpleNamespace(calls=0)),
        "box",
    ),
    "endless count": Case(lambda net, x: net.a(x) * (1 + next(net.numbers)), keep(numbers=count), "numbers"),
    "cycle": Case(
        lambda net, x: net.a(x) * next(net.signs), keep(signs=lambda: cycle([1, -1])), "signs|something else"
    ),
    "random.Random": draw_from(lambda: random.Random(1)),
    "generator of numpy": draw_from(lambda: np.random.default_rng(1)),
    "generator of torch": draw_from(
        lambda: torch.Generator().manual_seed(1), lambda dice: torch.rand((), generator=dice)
    ),
    "draws of the system": Case(lambda net, x: net.a(x) * np.random.default_rng().random(), refused="something else"),
}
RECORDS = {
    "attention map": Case(lambda net, x: last(setattr(net, "map", net.a(x).softmax(1)), net.a(x) * net.map)),
    "activations": Case(lambda net, x: last(setattr(net, "seen", net.a(x).detach()), net.a(x))),
    "activations with their graph": Case(lambda net, x: last(setattr(net, "seen", net.a(x)), net.seen)),
    "list": Case(lambda net, x: last(net.past.append(float(x.sum())), net.a(x)), keep(past=list)),
    "counter": Case(lambda net, x: last(setattr(net, "calls", net.calls + 1), net.a(x)), keep(calls=int)),
    "shape": Case(lambda net, x: last(setattr(net, "batch", len(x)), net.a(x) / net.batch)),
    "of a hook": Case(setup=lambda net: net.a.register_forward_hook(lambda layer, _, h: setattr(layer, "seen", h))),
    "gradients": Case(
        setup=lambda net: [keep(past=list)(net), net.a.weight.register_hook(lambda grad: net.past.append(grad))]
    ),
    "cache by size": Case(
        lambda net, x: net.a(x) * net.masks.setdefault(x.shape[1], torch.arange(5.0).double()), keep(masks=dict)
    ),
    "constant tensor": Case(lambda net, x: net.a(x) * net.scale, keep(scale=lambda: torch.arange(5.0).double())),
}
DRAWS = {
    name: Case(lambda net, x, draw=draw: net.a(x) * draw() if net.training else net.a(x))
    for name, draw in {
        "torch.rand": lambda: torch.rand(5),
        "torch.randperm": lambda: torch.randperm(5),
        "random.random": random.random,
        "random.sample": lambda: random.sample([0.1, 0.2, 0.3], 1)[0],
        "random.gauss": lambda: random.gauss(0, 1),
        "np.random.rand": lambda: np.random.rand(),  # noqa: NPY002
        "np.random.permutation": lambda: torch.from_numpy(np.random.permutation(5)),  # noqa: NPY002
        "np.random.normal": lambda: np.random.normal(),  # noqa: NPY002
        "stochastic depth": lambda: random.random() < 0.5,
        "seeded in forward": lambda: last(torch.manual_seed(1), random.seed(1), torch.rand(5) + random.random()),
    }.items()
} | {
    "F.dropout": Case(lambda net, x: F.dropout(net.a(x), 0.4, net.training)),
    "AlphaDropout": add(lambda: nn.AlphaDropout(0.3)),
    "RReLU": add(nn.RReLU),
    "in evaluation too": Case(lambda net, x: net.a(x) + torch.rand(5) * random.random()),
}


class Reversed(torch.autograd.Function):
    """Reverses the gradient; ``torch.vmap`` cannot run it."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


def embed(**options: object) -> Case:
    return Case(look_up, keep(words=lambda: nn.Embedding(2, 5, **options)))


LAYOUTS = {
    f"float32 images: {name}": Case(hidden, shape=(1, 6, 6), dtype=torch.float32)
    for name, hidden in {
        "view": lambda net, x: net.a(x).view(len(x), -1),
        "as_strided": lambda net, x: net.a(x).as_strided((len(x), 32), (32, 1)),
        "strides": lambda net, x: net.a(x) * (1 + (net.a(x).stride(1) == 1)),
        "is_contiguous": lambda net, x: net.a(x) * (1 + net.a(x).is_contiguous()),
        "values in memory": lambda net, x: net.a(x) * float(net.a(x).detach().numpy().ravel("K")[1]),
    }.items()
} | {
    "padding_idx": embed(padding_idx=1),
    "scale_grad_by_freq": embed(scale_grad_by_freq=True),
    "sparse gradients": embed(sparse=True),
    "bag": Case(lambda net, x: net.words(x.gt(0).long()), keep(words=lambda: nn.EmbeddingBag(2, 5, mode="sum"))),
    "inputs in place": Case(lambda net, x: net.a(x.mul_(2))),
    "inputs indexed in place": Case(lambda net, x: last(x.__setitem__((slice(None), 0), 1.0), net.a(x))),
    "images in place": Case(lambda net, x: net.a(x.add_(1)), shape=(1, 6, 6)),
    "relu in place": Case(lambda net, x: net.a(x).relu_()),
    "as_strided": Case(lambda net, x: net.a(x.as_strided((len(x), 6), (6, 1), x.storage_offset()).flip(1))),
    "strides": Case(lambda net, x: net.a(x) * (1 + x.stride()[0] % 5)),
    "view of images": Case(lambda net, x: net.a(x.view(len(x), 1, 6, 6)), shape=(1, 6, 6)),
    "mean over the batch": Case(lambda net, x: net.a(x) - net.a(x).mean(0)),
    "size of the batch": Case(lambda net, x: net.a(x) * len(x)),
    "branch by values": Case(lambda net, x: net.a(x) if x.sum() > 0 else -net.a(x)),
    "number by item": Case(lambda net, x: net.a(x) * x.mean().item()),
    "through numpy": Case(lambda net, x: net.a(torch.from_numpy(np.sort(x.detach().numpy(), axis=1)))),
    "rows by a mask": Case(
        lambda net, x: torch.zeros(len(x), 5).double().index_put((x[:, 0] > 0,), net.a(x[x[:, 0] > 0]))
    ),
    "sorted": Case(lambda net, x: net.a(x).sort(1).values),
    "own function": Case(lambda net, x: Reversed.apply(net.a(x))),
}


def penalize(net: nn.Module, x: Tensor) -> Tensor:
    """Add the norm of the gradient at the inputs."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        h = net.a(x).sigmoid()
        return h + torch.autograd.grad(h.sum(), x, create_graph=True)[0].norm()


def adapt(net: nn.Module, x: Tensor) -> Tensor:
    """Take a differentiable step on the batch, as MAML does."""
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(net.a(x).square().mean(), net.a.weight, create_graph=True)
    return F.linear(x, net.a.weight - 0.5 * slope, net.a.bias)


SPARE = keep(spare=lambda: nn.Linear(5, 5))
GRADIENTS = {
    "unused layer": Case(setup=SPARE),
    "unused parameter": Case(setup=keep(scale=lambda: nn.Parameter(torch.ones(3)))),
    "detached layer": Case(lambda net, x: net.a(x) + net.spare(net.a(x)).detach(), SPARE),
    "used for some batches": Case(lambda net, x: net.spare(net.a(x)) if x.sum() > 0 else net.a(x), SPARE),
    "used in evaluation alone": Case(lambda net, x: net.a(x) if net.training else net.spare(net.a(x)), SPARE),
    "frozen layer": Case(setup=lambda net: net.a.requires_grad_(False)),
    "frozen in forward": Case(lambda net, x: net.a.requires_grad_(False)(x), refused=""),
    "frozen by the mode": Case(lambda net, x: net.a.requires_grad_(net.training)(x)),
    "without gradient": Case(lambda net, x: torch.no_grad()(net.a)(x)),
    "gradient penalty": Case(penalize),
    "inner step": Case(adapt),
    "Jacobian": Case(lambda net, x: net.a(x) + torch.func.vmap(torch.func.jacrev(net.a))(x).sum(2)),
    "of the inputs": Case(lambda net, x: net.a(x.detach().requires_grad_())),
    "copy of the layer": Case(lambda net, x: copy.deepcopy(net.a)(x) + net.a(x)),
    "autocast": Case(lambda net, x: torch.autocast("cpu", torch.bfloat16)(net.a)(x).double(), refused=""),
}


class WithExtra(Net):
    """Extra state that does not change."""

    def get_extra_state(self) -> object:
        return {"version": 3}

    def set_extra_state(self, state: object) -> None:
        assert state == {"version": 3}


class Counting(WithExtra):
    """Extra state that changes the outputs."""

    calls = 0

    def get_extra_state(self) -> object:
        return self.calls

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(x) * self.calls


class FewParameters(Net):
    """``parameters()`` leaves out the first layer, so that an optimizer of them does not train it."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.b.parameters()


class Prefixed(Net):
    """``state_dict`` has other names than the parameters."""

    def state_dict(self, *arguments: object, **options: object) -> dict[str, object]:
        return {f"net.{name}": tensor for name, tensor in super().state_dict(*arguments, **options).items()}


def build_layer(net: nn.Module, x: Tensor) -> Tensor:
    if not hasattr(net, "late"):
        net.late = nn.Linear(6, 5).double()
    return net.late(x)


def build_buffer(net: nn.Module, x: Tensor) -> Tensor:
    if getattr(net, "mean", None) is None:
        net.register_buffer("mean", torch.zeros(5).double())
    return center(net, net.a(x))


def add_to_images(make_layer: Callable[[], nn.Module]) -> Case:
    return Case(lambda net, x: net.c(net.a(x)), keep(c=make_layer), shape=(1, 6, 6))


STRUCTURE = {
    "extra state": Case(kind=WithExtra),
    "extra state that changes": Case(kind=Counting, refused="calls"),
    "overridden parameters()": Case(kind=FewParameters, refused=r"overrides parameters\(\)"),
    "overridden state_dict()": Case(kind=Prefixed, refused=""),
    "layer made at the first call": Case(build_layer, refused="late"),
    "buffer made at the first call": Case(build_buffer, refused="mean"),
    "buffer filled at the first call": Case(build_buffer, lambda net: net.register_buffer("mean", None), "mean"),
    "fake quantization": add(torch.ao.quantization.FakeQuantize, lambda c, h: c(h.float()).double()),
    "wrapped": Case(lambda net, x: net.c(x), lambda net: setattr(net, "c", nn.DataParallel(net.a))),
    "dictionary of layers": Case(
        lambda net, x: net.c["one"](x) + net.c["two"](x),
        lambda net: setattr(net, "c", nn.ModuleDict({"one": net.a, "two": nn.Linear(6, 5)})),
    ),
    "LSTM": add(lambda: nn.LSTM(5, 5, batch_first=True), lambda c, h: c(h[:, None])[0][:, 0]),
    "GRU": add(lambda: nn.GRU(5, 5), lambda c, h: c(h[None])[0][0]),
    "attention": add(lambda: nn.MultiheadAttention(5, 1, batch_first=True), lambda c, h: c(*[h[:, None]] * 3)[0][:, 0]),
    "transformer": add(lambda: nn.TransformerEncoderLayer(5, 1, 8, dropout=0), lambda c, h: c(h[None])[0]),
    "Bilinear": add(lambda: nn.Bilinear(5, 5, 5), lambda c, h: c(h, h)),
    "BatchNorm": add(lambda: nn.BatchNorm1d(5)),
    "BatchNorm, cumulative": add(lambda: nn.BatchNorm1d(5, momentum=None)),
    "BatchNorm twice": add(lambda: nn.BatchNorm1d(5), lambda c, h: c(c(h))),
    "BatchNorm of batches": add(lambda: nn.BatchNorm1d(5, track_running_stats=False), refused="running statistics"),
    "BatchNorm of images": add_to_images(lambda: nn.BatchNorm2d(2)),
    "InstanceNorm": add_to_images(lambda: nn.InstanceNorm2d(2, track_running_stats=True)),
}
KINDS = {
    "held": HELD, "hooks": HOOKS, "checkpoint": CHECKPOINTS, "buffers": BUFFERS, "writes": WRITES, "modes": MODES,
    "parametrized": PARAMETRIZED, "uncopied": UNCOPIED, "state": STATE, "records": RECORDS, "draws": DRAWS,
    "layouts": LAYOUTS, "gradients": GRADIENTS, "structure": STRUCTURE,
}  # fmt: skip
CATALOG = {f"{kind}: {name}": case for kind, cases in KINDS.items() for name, case in cases.items()}
