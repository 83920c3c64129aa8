"""Tiny networks for law 11, one idea each, by kind: what each one must do is stated here, not measured.

Every network is a :class:`Net`, whose first layer an idea replaces or surrounds. ``RIGHT`` must equal plain PyTorch on
the sequential engine, where a network of ``REFUSED`` must be refused by an error that matches its words, and one of
``EITHER`` must be right or refused. Other engines may refuse any network, and equal plain PyTorch otherwise.
"""

import copy
import math
import random
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
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
    """An idea: ``hidden`` is the first layer's call, after ``setup`` and, for :class:`Moded`, ``mode``.

    ``refused``: words of the refusal; None: right; "": right or refused. ``draws``: whether training is random.
    """

    hidden: Callable[..., Tensor] = lambda net, x: net.a(x)
    setup: Callable[..., object] = lambda net: None
    refused: str | None = None
    shape: tuple[int, ...] = (6,)
    draws: bool = False
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


def average(net: nn.Module, h: Tensor, name: str = "mean") -> Tensor:
    """Move ``net``'s attribute ``name`` toward the mean of ``h`` in training, and return ``h`` without it."""
    if net.training:
        setattr(net, name, 0.5 * getattr(net, name) + 0.5 * h.detach().mean(0))
    return h - getattr(net, name)


def keep(**attributes: object) -> Callable[[nn.Module], None]:
    return lambda net: net.__dict__.update(attributes)


def buffer(name: str, value: Tensor, **options: bool) -> Callable[[nn.Module], None]:
    return lambda net: net.register_buffer(name, value.clone(), **options)


# Weights held elsewhere -------------------------------------------------------------------------------------------


class Weights:
    """A plain object that holds the weights of a layer in ``container``."""

    def __init__(self, container: object) -> None:
        self.container = container

    def __call__(self, x: Tensor) -> Tensor:
        held = self.container
        return F.linear(x, *(held.values() if isinstance(held, dict) else held))


HOLD: dict[str, Callable[[nn.Linear], Callable[[Tensor], Tensor]]] = {
    "partial": lambda a: partial(F.linear, weight=a.weight, bias=a.bias),
    "default": lambda a: lambda x, w=a.weight, b=a.bias: F.linear(x, w, b),
    "closure": lambda a: (lambda w, b: lambda x: F.linear(x, w, b))(a.weight, a.bias),
    "list": lambda a: Weights([a.weight, a.bias]),
    "tuple": lambda a: Weights((a.weight, a.bias)),
    "dictionary": lambda a: Weights(dict(a.named_parameters())),
    "namespace": lambda a: partial(lambda held, x: F.linear(x, held.w, held.b), SimpleNamespace(w=a.weight, b=a.bias)),
    "bound method": lambda a: a.forward,
    "bound method of the weight": lambda a: lambda x, transpose=a.weight.t: x @ transpose() + a.bias,
    "weak reference": lambda a: lambda x, w=weakref.ref(a.weight): F.linear(x, w(), a.bias),
    "functional call": lambda a: partial(torch.func.functional_call, a, dict(a.named_parameters())),
    "iterator's items": lambda a: Weights(tuple(a.parameters())),
}


def tie(net: nn.Module) -> None:
    net.c = nn.Linear(6, 5)
    net.c.weight = net.a.weight


def own_alias(net: nn.Module) -> None:
    net.alias = net.a.weight.data


def flatten_weights(net: nn.Module) -> None:
    net.flat = [torch.cat([p.data.flatten() for p in net.a.parameters()]).double()]
    net.a.double()
    net.a.weight.data, net.a.bias.data = net.flat[0][:30].view(5, 6), net.flat[0][30:]


HELD = {
    name: Case(lambda net, x: net.first(x), lambda net, hold=hold: keep(first=hold(net.a))(net))
    for name, hold in HOLD.items()
} | {
    "tied weight": Case(lambda net, x: net.a(x) + net.c(x), tie),
    "one layer by two names": Case(lambda net, x: net.a(x) + 2 * net.c(x), lambda net: setattr(net, "c", net.a)),
    "one weight twice in a list": Case(
        lambda net, x: F.linear(x, net.all[0]) + F.linear(x, net.all[1]),
        lambda net: setattr(net, "all", nn.ParameterList([net.a.weight, net.a.weight])),
    ),
    "alias of the values": Case(lambda net, x: net.a(x) * net.alias.norm(), own_alias, refused=""),
    "views of one flat vector": Case(lambda net, x: net.a(x) * net.flat[0].norm(), flatten_weights, refused=""),
    "unregistered list": Case(
        lambda net, x: F.linear(x, net.all[0]),
        lambda net: keep(all=[nn.Parameter(torch.ones(5, 6).double())])(net),
        refused="holds a Parameter in its attribute 'all'",
    ),
    "unregistered layer": Case(
        lambda net, x: net.layers["first"](x),
        lambda net: keep(layers={"first": nn.Linear(6, 5).double()})(net),
        refused="holds a Linear in its attribute 'layers'",
    ),
}


# Hooks and checkpointing ------------------------------------------------------------------------------------------


def halve(weight: Tensor) -> None:
    weight.grad.mul_(0.5)


def step_at_once(weight: Tensor) -> None:
    weight.data.sub_(0.1 * weight.grad)
    weight.grad = None


PARAMETER_HOOKS: dict[str, Callable[[nn.Module], object]] = {
    "gradient scaled": lambda net: net.a.weight.register_hook(lambda grad: 3 * grad),
    "gradient clipped": lambda net: net.a.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01)),
    "gradient masked": lambda net: net.b.bias.register_hook(lambda grad: grad * torch.tensor([0.0, 1.0, 1.0])),
    "two hooks": lambda net: [net.a.bias.register_hook(lambda grad, k=k: grad * k + k) for k in (2, 3)],
    "after accumulation": lambda net: net.a.weight.register_post_accumulate_grad_hook(halve),
    "gradient removed": lambda net: net.a.weight.register_post_accumulate_grad_hook(lambda w: setattr(w, "grad", None)),
    "step in backward": lambda net: net.a.weight.register_post_accumulate_grad_hook(step_at_once),
    "hook on a layer's every weight": lambda net: [p.register_hook(torch.sign) for p in net.a.parameters()],
}
LAYER_HOOKS: dict[str, Callable[[nn.Module], object]] = {
    "outputs": lambda net: net.a.register_forward_hook(lambda layer, inputs, outputs: 2 * outputs),
    "inputs": lambda net: net.a.register_forward_pre_hook(lambda layer, inputs: (inputs[0] + 1,)),
    "outputs in place": lambda net: net.a.register_forward_hook(lambda layer, inputs, outputs: outputs.mul_(2)),
    "backward": lambda net: net.b.register_full_backward_hook(lambda layer, grads, _: tuple(5 * g for g in grads)),
    "before backward": lambda net: net.b.register_full_backward_pre_hook(lambda layer, grads: (grads[0] * 2,)),
}


def reverse(h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(torch.neg)
    return h


def compress(net: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone().float() * 2, lambda t: t.double()):
        return net.a(x).sigmoid() ** 2


def offload(net: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return net.a(x).sigmoid() ** 2


def deepen(*layers: nn.Module) -> Callable[[nn.Module], None]:
    return lambda net: setattr(net, "c", nn.Sequential(nn.Linear(5, 5), *(type(layer)(5) for layer in layers)))


def run_again(net: nn.Module, x: Tensor, *, reentrant: bool) -> Tensor:
    return checkpoint(net.c, net.a(x), use_reentrant=reentrant)


HOOKS = (
    {f"parameter: {name}": Case(setup=hook) for name, hook in PARAMETER_HOOKS.items()}
    | {f"layer: {name}": Case(setup=hook) for name, hook in LAYER_HOOKS.items()}
    | {
        "activation: reversed gradient": Case(lambda net, x: reverse(net.a(x))),
        "activation: closure over the weight": Case(
            lambda net, x: (h := net.a(x), h.requires_grad and h.register_hook(lambda g: g * net.a.weight.sum()))[0]
        ),
        "saved tensors compressed": Case(compress),
        "saved tensors offloaded": Case(offload),
    }
)
CHECKPOINTS = {
    f"{'reentrant' if reentrant else 'not reentrant'}{name}": Case(partial(run_again, reentrant=reentrant), setup)
    for reentrant in (True, False)
    for name, setup in {"": deepen(), " with BatchNorm": deepen(nn.BatchNorm1d(1))}.items()
} | {
    "of the first layer": Case(lambda net, x: checkpoint(net.a, x, use_reentrant=False)),
    "of a closure": Case(lambda net, x: checkpoint(lambda x: net.a(x).sin() * net.a(x), x, use_reentrant=False)),
    "nested": Case(
        lambda net, x: checkpoint(lambda x: checkpoint(net.c, net.a(x), use_reentrant=False), x, use_reentrant=False),
        deepen(),
    ),
    "of a sequence": Case(
        lambda net, x: checkpoint_sequential(net.c, 2, net.a(x), use_reentrant=False), deepen(nn.LayerNorm(1))
    ),
    "with draws": Case(
        lambda net, x: checkpoint(lambda x: F.dropout(net.a(x), 0.3, net.training), x, use_reentrant=False), draws=True
    ),
}


# Buffers ----------------------------------------------------------------------------------------------------------


def grow(net: nn.Module, x: Tensor) -> Tensor:
    h = net.a(x)
    if net.training:
        net.seen = torch.cat([net.seen, h.detach().mean(0, keepdim=True)])
    return h - net.seen.mean(0)


def move_in_place(net: nn.Module, x: Tensor) -> Tensor:
    h = net.a(x)
    if net.training:
        net.mean.mul_(0.5).add_(0.5 * h.detach().mean(0))
    return h - net.mean


def replace_rows(net: nn.Module, x: Tensor) -> Tensor:
    h = net.a(x)
    if net.training:
        net.queue[int(net.pointer)] = h.detach().mean(0)
        net.pointer[...] = (net.pointer + 1) % len(net.queue)
    return h - net.queue.mean(0)


def add_queue(net: nn.Module) -> None:
    net.register_buffer("queue", torch.zeros(4, 5))
    net.register_buffer("pointer", torch.tensor(0))


def follow_weights(net: nn.Module, x: Tensor) -> Tensor:
    if net.training:
        net.smooth = 0.5 * net.smooth + 0.5 * net.a.weight.detach()
    return net.a(x) - F.linear(x, net.smooth)


def warm_up(net: nn.Module, x: Tensor) -> Tensor:
    net.count += int(net.training)
    return net.a(x) * (1 - 0.5 ** (net.count + 1))


MASK = torch.tensor([0.0, -math.inf, 0.0, 0.0, 0.0])
BUFFERS = {
    "own BatchNorm": Case(
        lambda net, x: F.batch_norm(net.a(x), net.running_mean, net.running_var, None, None, net.training),
        lambda net: [
            net.register_buffer(f"running_{name}", torch.full((5,), v)) for name, v in (("mean", 0.0), ("var", 1.0))
        ],
    ),
    "assigned": Case(lambda net, x: average(net, net.a(x)), buffer("mean", torch.zeros(5))),
    "assigned in evaluation too": Case(
        lambda net, x: (setattr(net, "last", net.last + 1), net.a(x))[1], buffer("last", torch.zeros(()))
    ),
    "in place": Case(move_in_place, buffer("mean", torch.zeros(5))),
    "grows": Case(grow, buffer("seen", torch.zeros(1, 5)), refused=""),
    "queue": Case(replace_rows, add_queue),
    "moving mean of a weight": Case(follow_weights, buffer("smooth", torch.zeros(5, 6))),
    "counter": Case(warm_up, buffer("count", torch.tensor(0))),
    "counter of floats": Case(warm_up, buffer("count", torch.tensor(0.0))),
    "last batch": Case(
        lambda net, x: (h := net.a(x), h - net.last.sum(), net.last.copy_(h.detach().mean(0)))[1],
        buffer("last", torch.zeros(5)),
    ),
    "not persistent": Case(lambda net, x: net.a(x) * net.mask, buffer("mask", torch.arange(5.0), persistent=False)),
    "not persistent, moved": Case(move_in_place, buffer("mean", torch.zeros(5), persistent=False)),
    "not persistent, assigned": Case(
        lambda net, x: average(net, net.a(x)), buffer("mean", torch.zeros(5), persistent=False)
    ),
    "not persistent, made anew": Case(
        lambda net, x: (setattr(net, "mask", torch.arange(5.0).double()), net.a(x) * net.mask)[1],
        buffer("mask", torch.zeros(5), persistent=False),
    ),
    "minus infinity": Case(lambda net, x: (net.a(x) + net.mask).softmax(1), buffer("mask", MASK)),
    "Boolean": Case(lambda net, x: net.a(x) * net.mask, buffer("mask", torch.tensor([True, False] * 2 + [True]))),
    "large integer": Case(lambda net, x: net.a(x) * (net.large % 7), buffer("large", torch.tensor(2**60 + 3))),
    "bytes": Case(lambda net, x: net.a(x) * net.codes, buffer("codes", torch.tensor([0, 255, 7, 3, 1]).byte())),
    "permutation": Case(lambda net, x: net.a(x[:, net.order]), buffer("order", torch.tensor([3, 1, 5, 0, 2, 4]))),
    "empty": Case(setup=buffer("empty", torch.zeros(0, 3))),
    "expanded": Case(lambda net, x: net.a(x) * net.row, lambda net: buffer("row", torch.ones(1))(net)),
    "one by two names": Case(
        lambda net, x: net.a(x) * net.scale + net.same,
        lambda net: [net.register_buffer(name, net.a.bias.detach()) for name in ("scale", "same")],
        refused="",
    ),
    "float16": Case(
        lambda net, x: net.a(x) * net.scale[0].double(),
        lambda net: net.register_buffer("scale", [torch.full((5,), 0.3).half()][0]),
    ),
    "sparse": Case(
        lambda net, x: torch.sparse.mm(net.edges, net.a(x).t()).t(),
        buffer("edges", torch.eye(5).double().to_sparse()),
        refused="",
    ),
    "complex": Case(
        lambda net, x: (net.a(x) * net.waves).real,
        buffer("waves", torch.ones(5, dtype=torch.complex128)),
        refused="'waves' of the model is complex",
    ),
    "complex, not persistent": Case(
        lambda net, x: (net.a(x) * net.waves).real, buffer("waves", torch.ones(5) + 1j, persistent=False)
    ),
}


# Weights written by the network -----------------------------------------------------------------------------------


def limit(weight: Tensor) -> Tensor:
    return torch.renorm(weight.detach(), p=2, dim=0, maxnorm=0.4)


def write(net: nn.Module, x: Tensor, act: Callable[[nn.Parameter], object]) -> Tensor:
    with torch.no_grad():
        act(net.a.weight)
    return net.a(x)


def assign(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[nn.Parameter], object]:
    return lambda weight: setattr(weight, name, value(weight))


def look_up(net: nn.Module, x: Tensor) -> Tensor:
    return net.words(x.gt(0).long()).mean(1)


def scale_at_first_call(net: nn.Module, x: Tensor) -> Tensor:
    """Initialize as ActNorm does, with its flag in a buffer."""
    h = net.a(x)
    if net.training and not net.ready:
        net.scale.data = 1 / (h.detach().std(0) + 1e-3)
        net.ready.fill_(True)
    return h * net.scale


def add_scale(net: nn.Module) -> None:
    net.scale = nn.Parameter(torch.ones(5))
    net.register_buffer("ready", torch.tensor(False))


def teach(net: nn.Module, x: Tensor) -> Tensor:
    if net.training:
        with torch.no_grad():
            net.teacher.mul_(0.5).add_(net.a.weight, alpha=0.5)
    return net.a(x) - F.linear(x, net.teacher)


def add_teacher(net: nn.Module) -> None:
    net.teacher = nn.Parameter(torch.zeros(5, 6), requires_grad=False)


WRITES = {
    name: Case(partial(write, act=act))
    for name, act in {
        ".data assigned": assign("data", limit),
        "copied without gradient": lambda weight: weight.copy_(limit(weight)),
        ".data clamped": lambda weight: weight.data.clamp_(-0.2, 0.2),
        ".data indexed": lambda weight: weight.data.__setitem__(slice(0, 2), 0.1),
        ".data assigned twice": lambda weight: [assign("data", limit)(weight) for _ in range(2)],
        "set to another storage": lambda weight: weight.set_(limit(weight)),
    }.items()
} | {
    "in training alone": Case(lambda net, x: write(net, x, assign("data", limit)) if net.training else net.a(x)),
    "all weights as one vector": Case(
        lambda net, x: (
            nn.utils.vector_to_parameters(0.9 * nn.utils.parameters_to_vector(net.a.parameters()), net.a.parameters()),
            net.a(x),
        )[1]
    ),
    "new parameter": Case(
        lambda net, x: (setattr(net.a, "weight", nn.Parameter(limit(net.a.weight))), net.a(x))[1], refused=""
    ),
    "Embedding's max_norm": Case(look_up, lambda net: setattr(net, "words", nn.Embedding(2, 5, max_norm=0.4))),
    "teacher without gradient": Case(teach, add_teacher),
    "data-dependent at the first call": Case(scale_at_first_call, add_scale),
}


class Moded(Net):
    """A network that acts when its mode changes."""

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        getattr(self, "act", lambda mode: None)(mode)
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


class Normed(Moded):
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
    """``eval()`` alone is overridden, and replaces the layer."""

    def eval(self) -> nn.Module:
        self.a.weight.data.mul_(1.0)
        return super().eval()


MODES = {kind.__name__: Case(kind=kind) for kind in (Merged, Fused, Normed, Frozen, Thawed, Switched)}


# Pruning, parametrizations, subclasses; what cannot be copied -----------------------------------------------------


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Tagged(torch.Tensor):
    """A tensor subclass."""


class OwnParameter(nn.Parameter):
    """A parameter's subclass."""


def own_weight(kind: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    return lambda net: setattr(net.a, "weight", kind(net.a.weight.detach()))


def run_cached(net: nn.Module, x: Tensor) -> Tensor:
    with parametrize.cached():
        return net.a(x) + net.a(2 * x)


PARAMETRIZED = {
    name: Case(hidden, setup, refused=refused)
    for name, hidden, setup, refused in (
        ("pruned by size", Case.hidden, lambda net: prune.l1_unstructured(net.a, "weight", 0.5), None),
        ("pruned by a mask", Case.hidden, lambda net: prune.custom_from_mask(net.a, "bias", torch.eye(5)[0]), None),
        ("pruned twice", Case.hidden, lambda net: [prune.random_unstructured(net.a, "weight", 2) for _ in "ab"], None),
        ("weight_norm", Case.hidden, lambda net: parametrizations.weight_norm(net.a), None),
        ("spectral_norm", Case.hidden, lambda net: parametrizations.spectral_norm(net.a), None),
        ("orthogonal", Case.hidden, lambda net: parametrizations.orthogonal(net.a), None),
        ("own", Case.hidden, lambda net: parametrize.register_parametrization(net.a, "weight", Doubled()), None),
        ("cached", run_cached, lambda net: parametrize.register_parametrization(net.a, "weight", Doubled()), None),
        ("tensor subclass", Case.hidden, own_weight(lambda w: nn.Parameter(w.as_subclass(Tagged))), ""),
        ("parameter subclass", Case.hidden, own_weight(OwnParameter), None),
        ("transposed", Case.hidden, own_weight(lambda w: nn.Parameter(w.t().contiguous().t())), None),
        ("old weight_norm", Case.hidden, lambda net: nn.utils.weight_norm(net.a), ""),
        ("old spectral_norm", Case.hidden, lambda net: nn.utils.spectral_norm(net.a), ""),
    )
}


def endless():
    while True:
        yield 2.0


def lock(net: nn.Module, x: Tensor) -> Tensor:
    with net.lock:
        return net.a(x)


UNCOPIED = {
    "lock": Case(lock, lambda net: keep(lock=threading.Lock())(net)),
    "file": Case(setup=lambda net: keep(log=sys.__stderr__)(net)),
    "generator of one value": Case(lambda net, x: net.a(x) * next(net.values), lambda net: keep(values=endless())(net)),
    "weak reference": Case(lambda net, x: net.first()(x), lambda net: keep(first=weakref.ref(net.a))(net)),
    "module of Python": Case(lambda net, x: net.a(x) * net.math.pi, keep(math=math)),
    "thread's own": Case(setup=lambda net: keep(local=threading.local())(net)),
    "key of a layer": Case(lambda net, x: net.a(x) * net.of[net.a], lambda net: keep(of={net.a: 2.0})(net)),
}


# State outside of the entries -------------------------------------------------------------------------------------


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
    if net.training:
        net.norm.momentum *= 0.5
    return net.norm(net.a(x))


class Shared(Net):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Shared.calls += self.training
        return super().forward(x) * Shared.calls


GLOBAL = {"calls": 0}


def count_globally(net: nn.Module, x: Tensor) -> Tensor:
    GLOBAL["calls"] += net.training
    return net.a(x) * GLOBAL["calls"]


def count_in_hook(net: nn.Module) -> None:
    calls = 0

    def scale(grad: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return grad * calls

    net.a.weight.register_hook(scale)


def count_in_closure(net: nn.Module) -> None:
    calls = 0

    def first(x: Tensor) -> Tensor:
        nonlocal calls
        calls += net.training
        return net.a(x) * calls

    net.first = first


def unfreeze(net: nn.Module, x: Tensor) -> Tensor:
    h = net.a(x)
    net.a.weight.requires_grad_(net.calls > 0)
    net.calls += net.training
    return h


def hook_again(net: nn.Module, x: Tensor) -> Tensor:
    net.a.register_forward_hook(lambda layer, inputs, outputs: 1.1 * outputs)
    return net.a(x)


def of_layer(net: nn.Module, x: Tensor) -> Tensor:
    net.a.scale = net.a.scale * 0.9
    return net.a(x) * net.a.scale


STATE = {
    "counter with a late effect": Case(
        lambda net, x: (setattr(net, "calls", net.calls + net.training), net.a(x) * (1 + (net.calls > 100)))[1],
        keep(calls=0),
        refused="calls",
    ),
    "moving mean in place": Case(move_in_place, lambda net: keep(mean=torch.zeros(5).double())(net), refused="mean"),
    "counter in a parameter's hook": Case(setup=count_in_hook, refused="calls|hook|something else"),
    "last gradient": Case(
        lambda net, x: net.a(x) * (1 + net.slope),
        lambda net: [keep(slope=0.0)(net), net.b.bias.register_hook(lambda g: net.__dict__.update(slope=float(g[0])))],
        refused="slope",
    ),
    "counter": Case(count_calls, keep(calls=0), refused="calls"),
    "moving mean": Case(lambda net, x: average(net, net.a(x)), keep(mean=torch.zeros(5)), refused="mean"),
    "moving mean of numbers": Case(
        lambda net, x: net.a(x) + average(net, net.a(x).sum(1, keepdim=True), "level"), keep(level=0.0), refused="level"
    ),
    "last batch": Case(mix_last, keep(last=None), refused="last"),
    "list": Case(extend, lambda net: keep(past=[])(net), refused="past"),
    "deque": Case(extend, lambda net: keep(past=deque(maxlen=2))(net), refused="past"),
    "LSTM's state": Case(
        recur, lambda net: (setattr(net, "cell", nn.LSTM(6, 4)), keep(state=None)(net)), refused="state"
    ),
    "initialized": Case(initialize, keep(initialized=False, shift=0.0), refused="initialized|shift"),
    "annealed momentum": Case(anneal, lambda net: setattr(net, "norm", nn.BatchNorm1d(5)), refused="norm.*momentum"),
    "class attribute": Case(kind=Shared, refused="calls"),
    "global": Case(count_globally, refused="GLOBAL|calls|outside|global"),
    "closure": Case(lambda net, x: net.first(x), count_in_closure, refused="first|calls"),
    "unfrozen later": Case(unfreeze, keep(calls=0), refused="calls|weight"),
    "hooks that add up": Case(hook_again, refused="'a'.*hook"),
    "attribute of a layer": Case(of_layer, lambda net: setattr(net.a, "scale", 1.0), refused="'a'.*scale"),
    "array of numpy": Case(
        lambda net, x: (net.sums.__iadd__(1.0), net.a(x) * float(net.sums[0]))[1],
        lambda net: keep(sums=np.zeros(3))(net),
        refused="sums",
    ),
    "dictionary": Case(
        lambda net, x: (net.seen.update(calls=net.seen["calls"] + 1), net.a(x) * net.seen["calls"])[1],
        lambda net: keep(seen={"calls": 0})(net),
        refused="seen",
    ),
    "plain object": Case(
        lambda net, x: (setattr(net.box, "calls", net.box.calls + 1), net.a(x) * net.box.calls)[1],
        lambda net: keep(box=SimpleNamespace(calls=0))(net),
        refused="box",
    ),
    "endless count": Case(
        lambda net, x: net.a(x) * (1 + next(net.numbers)), lambda net: keep(numbers=count())(net), refused="numbers"
    ),
    "cycle": Case(
        lambda net, x: net.a(x) * next(net.signs), lambda net: keep(signs=cycle([1, -1]))(net), refused="signs"
    ),
    "random.Random": Case(
        lambda net, x: net.a(x) * net.dice.random(), lambda net: keep(dice=random.Random(1))(net), refused="dice"
    ),
    "generator of numpy": Case(
        lambda net, x: net.a(x) * net.dice.random(),
        lambda net: keep(dice=np.random.default_rng(1))(net),
        refused="dice",
    ),
    "generator of torch": Case(
        lambda net, x: net.a(x) * torch.rand((), generator=net.dice),
        lambda net: keep(dice=torch.Generator().manual_seed(1))(net),
        refused="dice",
    ),
    "draws of the system": Case(lambda net, x: net.a(x) * np.random.default_rng().random(), refused="something else"),
}
RECORDS = {
    "activations with their graph": Case(lambda net, x: (setattr(net, "seen", net.a(x)), net.seen)[1]),
    "constant tensor": Case(
        lambda net, x: net.a(x) * net.scale, lambda net: keep(scale=torch.arange(5.0).double())(net)
    ),
    "gradients": Case(setup=lambda net: [keep(past=[])(net), net.a.weight.register_hook(lambda g: net.past.append(g))]),
    "attention map": Case(
        lambda net, x: (setattr(net, "map", net.a(x).softmax(1)), net.a(x) * net.map)[1], keep(map=None)
    ),
    "detached activations": Case(lambda net, x: (setattr(net, "seen", net.a(x).detach()), net.a(x))[1]),
    "list": Case(lambda net, x: (net.past.append(float(x.sum())), net.a(x))[1], lambda net: keep(past=[])(net)),
    "counter": Case(lambda net, x: (setattr(net, "calls", net.calls + 1), net.a(x))[1], keep(calls=0)),
    "shape": Case(lambda net, x: (setattr(net, "batch", len(x)), net.a(x) / net.batch)[1]),
    "by a hook": Case(setup=lambda net: net.a.register_forward_hook(lambda layer, _, h: keep(seen=h)(layer))),
    "cache by size": Case(
        lambda net, x: net.a(x) * net.masks.setdefault(x.shape[1], torch.arange(5.0).double()),
        lambda net: keep(masks={})(net),
    ),
}


# Randomness, layouts, gradients, structure ------------------------------------------------------------------------


def only_training(draw: Callable[..., object]) -> Case:
    return Case(lambda net, x: net.a(x) * draw() if net.training else net.a(x), draws=True)


DRAWS = {
    name: only_training(draw)
    for name, draw in {
        "torch.rand": lambda: torch.rand(5),
        "torch.randperm": lambda: torch.randperm(5),
        "random.random": random.random,
        "random.shuffle": lambda: random.sample([0.1, 0.2, 0.3], 1)[0],
        "random.gauss": lambda: random.gauss(0, 1),
        "np.random.rand": lambda: np.random.rand(),
        "np.random.permutation": lambda: torch.from_numpy(np.random.permutation(5)),
        "np.random.normal": lambda: np.random.normal(),
        "stochastic depth": lambda: random.random() < 0.5,
    }.items()
} | {
    "F.dropout": Case(lambda net, x: F.dropout(net.a(x), 0.4, net.training), draws=True),
    "AlphaDropout": Case(
        lambda net, x: net.drop(net.a(x)), lambda net: setattr(net, "drop", nn.AlphaDropout(0.3)), draws=True
    ),
    "seeded in forward": Case(
        lambda net, x: (torch.manual_seed(1), random.seed(1), net.a(x) + torch.rand(5) + random.random())[2]
    ),
    "RReLU": Case(lambda net, x: net.leak(net.a(x)), lambda net: setattr(net, "leak", nn.RReLU()), draws=True),
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
    return Case(look_up, lambda net: setattr(net, "words", nn.Embedding(2, 5, **options)))


LAYOUTS = {
    **{
        f"float32 images: {name}": Case(hidden, shape=(1, 6, 6), dtype=torch.float32)
        for name, hidden in {
            "view": lambda net, x: net.a(x).view(len(x), -1),
            "as_strided": lambda net, x: net.a(x).as_strided((len(x), 32), (32, 1)),
            "strides": lambda net, x: net.a(x) * (1 + (net.a(x).stride(1) == 1)),
            "is_contiguous": lambda net, x: net.a(x) * (1 + net.a(x).is_contiguous()),
            "values in memory": lambda net, x: (
                net.a(x) * (1 + torch.from_numpy(net.a(x).detach().numpy().ravel("K"))[:2].sum())
            ),
        }.items()
    },
    "padding_idx": embed(padding_idx=1),
    "scale_grad_by_freq": embed(scale_grad_by_freq=True),
    "sparse gradients": embed(sparse=True),
    "bag": Case(
        lambda net, x: net.words(x.gt(0).long()), lambda net: setattr(net, "words", nn.EmbeddingBag(2, 5, mode="sum"))
    ),
    "inputs in place": Case(lambda net, x: net.a(x.mul_(2))),
    "inputs indexed in place": Case(lambda net, x: (x.__setitem__((slice(None), 0), 1.0), net.a(x))[1]),
    "inputs in place, images": Case(lambda net, x: net.a(x.add_(1)), shape=(1, 6, 6)),
    "relu in place": Case(lambda net, x: net.a(x).relu_()),
    "as_strided": Case(lambda net, x: net.a(x.as_strided((len(x), 6), (6, 1), x.storage_offset()).flip(1))),
    "strides": Case(lambda net, x: net.a(x) * (1 + x.stride()[0] % 5)),
    "view of images": Case(lambda net, x: net.a(x.view(len(x), 1, 6, 6)), shape=(1, 6, 6)),
    "view across samples": Case(lambda net, x: net.a(x.view(3, -1).view(-1, 6)) if len(x) % 3 == 0 else net.a(x)),
    "mean over the batch": Case(lambda net, x: net.a(x) - net.a(x).mean(0)),
    "size of the batch": Case(lambda net, x: net.a(x) * len(x)),
    "branch by values": Case(lambda net, x: net.a(x) if x.sum() > 0 else -net.a(x)),
    "number by item": Case(lambda net, x: net.a(x) * float(x.mean().item())),
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
        (slope,) = torch.autograd.grad(h.sum(), x, create_graph=True)
    return h + slope.norm()


def freeze_first(net: nn.Module, x: Tensor) -> Tensor:
    net.a.requires_grad_(False)
    return net.a(x)


def add_spare(net: nn.Module) -> None:
    net.spare = nn.Linear(5, 5)


def adapt(net: nn.Module, x: Tensor) -> Tensor:
    """Take a differentiable step on the batch, as MAML does."""
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(net.a(x).square().mean(), net.a.weight, create_graph=True)
    return F.linear(x, net.a.weight - 0.5 * slope, net.a.bias)


GRADIENTS = {
    "inner step": Case(adapt),
    "copy of the layer": Case(lambda net, x: copy.deepcopy(net.a)(x) + net.a(x), refused=None),
    "requires_grad by the mode": Case(lambda net, x: net.a.requires_grad_(net.training)(x)),
    "gradient of the inputs kept": Case(lambda net, x: net.a(x.detach().requires_grad_())),
    "unused layer": Case(setup=add_spare),
    "unused parameter": Case(setup=lambda net: setattr(net, "scale", nn.Parameter(torch.ones(3)))),
    "detached layer": Case(lambda net, x: net.a(x) + net.spare(net.a(x)).detach(), add_spare),
    "used for some batches": Case(lambda net, x: net.spare(net.a(x)) if x.sum() > 0 else net.a(x), add_spare),
    "used in evaluation alone": Case(lambda net, x: net.a(x) if net.training else net.spare(net.a(x)), add_spare),
    "frozen layer": Case(setup=lambda net: net.a.requires_grad_(False)),
    "without gradient": Case(lambda net, x: torch.no_grad()(net.a)(x)),
    "gradient penalty": Case(penalize),
    "Jacobian": Case(lambda net, x: net.a(x) + torch.func.vmap(torch.func.jacrev(net.a))(x).sum(2)),
    "frozen in forward": Case(freeze_first, refused=""),
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

    def set_extra_state(self, state: int) -> None:
        self.calls = state

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(x) * self.calls


class FewParameters(Net):
    """``parameters()`` leaves out the first layer, so that an optimizer of them does not train it."""

    def parameters(self, recurse: bool = True):
        return self.b.parameters()


class Prefixed(Net):
    """``state_dict`` has other names than the parameters."""

    def state_dict(self, *arguments, **options):
        return {f"net.{name}": tensor for name, tensor in super().state_dict(*arguments, **options).items()}


def build_layer(net: nn.Module, x: Tensor) -> Tensor:
    if not hasattr(net, "late"):
        net.late = nn.Linear(6, 5).double()
    return net.late(x)


def build_buffer(net: nn.Module, x: Tensor) -> Tensor:
    if not hasattr(net, "mean"):
        net.register_buffer("mean", torch.zeros(5).double())
    return average(net, net.a(x))


def fill_buffer(net: nn.Module, x: Tensor) -> Tensor:
    net.mean = torch.zeros(5).double() if net.mean is None else net.mean
    return average(net, net.a(x))


def observe(net: nn.Module, x: Tensor) -> Tensor:
    """Record the range of activations, in evaluation too, and round to it, as observers of quantization do."""
    h = net.a(x)
    net.low.copy_(torch.minimum(net.low, h.detach().min()))
    net.high.copy_(torch.maximum(net.high, h.detach().max()))
    return h.clamp(net.low / 2, net.high / 2)


def add_range(net: nn.Module) -> None:
    net.register_buffer("low", torch.zeros(()))
    net.register_buffer("high", torch.zeros(()))


def layer(
    module: Callable[[], nn.Module], call: Callable[[nn.Module, Tensor], Tensor], refused: str | None = None
) -> Case:
    return Case(lambda net, x: call(net.c, net.a(x)), lambda net: setattr(net, "c", module()), refused)


STRUCTURE = {
    "fake quantization": layer(lambda: torch.ao.quantization.FakeQuantize(), lambda c, h: c(h.float()).double()),
    "wrapped": Case(lambda net, x: net.c(x), lambda net: setattr(net, "c", nn.DataParallel(net.a))),
    "dictionary of layers": Case(
        lambda net, x: sum(layer(x) for layer in net.c.values()),
        lambda net: setattr(net, "c", nn.ModuleDict({"one": net.a, "two": nn.Linear(6, 5)})),
    ),
    "extra state": Case(kind=WithExtra),
    "extra state that changes": Case(kind=Counting, refused="calls|extra"),
    "overridden parameters()": Case(kind=FewParameters, refused="parameters"),
    "overridden state_dict()": Case(kind=Prefixed, refused=""),
    "layer made at the first call": Case(build_layer, refused="late"),
    "buffer made at the first call": Case(build_buffer, refused="mean"),
    "buffer filled at the first call": Case(fill_buffer, lambda net: net.register_buffer("mean", None), refused="mean"),
    "observer": Case(observe, add_range),
    "LSTM": layer(lambda: nn.LSTM(5, 5, batch_first=True), lambda c, h: c(h[:, None])[0][:, 0]),
    "GRU": layer(lambda: nn.GRU(5, 5), lambda c, h: c(h[None])[0][0]),
    "attention": layer(
        lambda: nn.MultiheadAttention(5, 1, batch_first=True), lambda c, h: c(*[h[:, None]] * 3)[0][:, 0]
    ),
    "transformer": layer(
        lambda: nn.TransformerEncoderLayer(5, 1, 8, dropout=0, batch_first=True), lambda c, h: c(h[:, None])[:, 0]
    ),
    "BatchNorm": layer(lambda: nn.BatchNorm1d(5), lambda c, h: c(h)),
    "BatchNorm, cumulative": layer(lambda: nn.BatchNorm1d(5, momentum=None), lambda c, h: c(h)),
    "BatchNorm of batches": layer(
        lambda: nn.BatchNorm1d(5, track_running_stats=False),
        lambda c, h: c(h),
        refused="no variance|running statistics",
    ),
    "BatchNorm twice": layer(lambda: nn.BatchNorm1d(5), lambda c, h: c(c(h))),
    "BatchNorm of images": Case(
        lambda net, x: net.c(net.a(x)), lambda net: setattr(net, "c", nn.BatchNorm2d(2)), shape=(1, 6, 6)
    ),
    "InstanceNorm": Case(
        lambda net, x: net.c(net.a(x)),
        lambda net: setattr(net, "c", nn.InstanceNorm2d(2, track_running_stats=True)),
        shape=(1, 6, 6),
    ),
    "Bilinear": layer(lambda: nn.Bilinear(5, 5, 5), lambda c, h: c(h, h)),
}
KINDS = {
    "held": HELD, "hooks": HOOKS, "checkpoint": CHECKPOINTS, "buffers": BUFFERS, "writes": WRITES, "modes": MODES,
    "parametrized": PARAMETRIZED, "uncopied": UNCOPIED, "state": STATE, "records": RECORDS, "draws": DRAWS,
    "layouts": LAYOUTS, "gradients": GRADIENTS, "structure": STRUCTURE,
}  # fmt: skip
CATALOG = {f"{kind}: {name}": case for kind, cases in KINDS.items() for name, case in cases.items()}
