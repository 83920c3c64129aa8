"""ATP: a rate of adaptation for each entry, learned by the clients that trained and used at a client that did not.

Bao et al. 2023, arXiv:2310.18816. The formulas are from the authors' public code (baowenxuan/ATP): functions
``adapt_one_step`` and ``local_train`` of ``ATP.py``, ``learn_to_adapt`` of ``TTPBase.py``, and ``MyBatchNorm2d.py``;
the paper itself was not available. An entry's direction is the gradient of the mean entropy of predictions with the
stored statistics, or for a BatchNorm statistic its stored value minus the inputs' (variances unbiased). Adapting
subtracts rate * direction; negative variances become 0. A rate starts at 0 and descends the loss of the labeled batch
after adaptation: it grows by lr * <gradient, direction> / sqrt(size of the entry). In a round each client makes one
pass over its data, starting at the common rates, and the server takes the mean of the clients' rates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ...core.plan import Plan, compute_outputs
from ...core.work import Work
from ...data.samples import Samples
from ...data.stores import Keys
from ...engines.engine import Diverged
from ...utils.random_streams import stream
from ...utils.state import State
from ..batch_norm import Moments, iterate_inputs, list_batch_norms, name_statistics
from ..metrics import BATCH
from ..policy import Count, Rate, policy
from ..policy_requirements import require_entropy, require_torch_statistics
from ..unseen_clients import PolicyContext

Entropy = Callable[[Tensor], Tensor]
Rates = Mapping[str, float]


def _list_adapted(plan: Plan) -> tuple[str, ...]:
    """Return the entries that have a rate: trained parameters, and BatchNorm's means and variances."""
    statistics = [name for layer in list_batch_norms(plan) for name in name_statistics(layer)]
    return tuple(sorted({*plan.trained, *statistics}))


def _normalize(layer: _BatchNorm, found: Moments, x: Tensor) -> Tensor:
    """Normalize by the stored statistics so that gradients reach them, which torch's function does not allow."""
    found(layer, (x,))
    shape = (1, -1, *(1 for _ in x.shape[2:]))
    mean, variance = (layer._buffers[f"running_{kind}"] for kind in ("mean", "var"))
    assert mean is not None
    assert variance is not None
    out = (x - mean.reshape(shape)) / (variance.reshape(shape) + layer.eps).sqrt()
    out = out * layer.weight.reshape(shape) + layer.bias.reshape(shape) if layer.affine else out
    for part in layer.children():  # an activation that the layer holds (:mod:`fedshift.nn.recognition`)
        out = part(out)
    return out


@contextmanager
def _differentiate_statistics(plan: Plan, found: dict[str, Moments]) -> Iterator[None]:
    """Make BatchNorm layers differentiable in their statistics; put the moments of their inputs into ``found``."""
    plan.module.eval()
    layers = list_batch_norms(plan)
    for name, layer in layers.items():
        layer.__dict__["forward"] = partial(_normalize, layer, found.setdefault(name, Moments()))
    try:
        yield
    finally:
        for layer in layers.values():
            del layer.__dict__["forward"]


def _compute_gradients(plan: Plan, state: State, x: Tensor, loss: Entropy, found: dict[str, Moments]) -> State:
    """Return the gradients of ``loss`` of the outputs with respect to the entries that have a rate."""
    leaves = {name: state[name].detach().requires_grad_() for name in _list_adapted(plan)}
    with _differentiate_statistics(plan, found), torch.enable_grad():
        total = loss(compute_outputs(plan, {**state, **leaves}, x))
    grads = torch.autograd.grad(total, tuple(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, grads, strict=True))


def _find_directions(plan: Plan, state: State, batches: Iterable[Tensor], entropy: Entropy) -> State:
    """Return the direction of each entry that has a rate, over all inputs ``[B, ...]`` of ``batches`` together."""
    found: dict[str, Moments] = {}
    count, directions = 0, dict[str, Tensor]()
    for x in batches:  # normalized by the stored statistics, so that gradients add up
        grads = _compute_gradients(plan, state, x, lambda outputs: entropy(outputs).mean(), found)
        count, share = count + len(x), len(x) / (count + len(x))
        directions = {name: grad.lerp(directions.get(name, grad), 1 - share) for name, grad in grads.items()}
    for layer, moments in found.items():
        for name, measured in zip(name_statistics(layer), (moments.mean, moments.variance), strict=True):
            directions[name] = state[name] - measured.to(state[name])
    return directions


def _adapt_by(plan: Plan, state: State, directions: State, rates: Rates) -> State:
    """Return ``state`` after a step of each entry's rate along ``directions``."""
    moved = {name: state[name] - rates[name] * direction for name, direction in directions.items()}
    variances = [variance for _, variance in map(name_statistics, list_batch_norms(plan))]
    return {**state, **moved, **{name: moved[name].clamp(min=0) for name in variances}}


def _learn_rates(context: PolicyContext, rounds: int, lr: float, batch_size: int) -> Rates:
    """Return the rates that the clients learn together from the average on their labeled data."""
    plan, state, entropy, clients = context.plan, context.average, context.task.entropy, context.learning()
    names = _list_adapted(plan)
    rates = dict.fromkeys(names, 0.0)
    for number in range(rounds):
        learned = []
        for client in sorted(clients):
            data, own = clients[client], dict(rates)
            key = (plan.seed, "atp", client, number) if data.patches else ()  # other patches in each round
            order = torch.from_numpy(stream(plan.seed, "atp", client, number).permutation(len(data))).to(data.y.device)

            def compute_loss(outputs: Tensor, at: Tensor, data: Samples = data, key: Keys = key) -> Tensor:
                return plan.loss(outputs, data.targets(at, key))

            for start, stop in Work(batch_size=batch_size, epochs=1).batch_bounds(len(data), plan.smallest_batch):
                at = order[start:stop]
                x = data.inputs(at, plan.dtype, key=key)
                directions = _find_directions(plan, state, [x], entropy)
                adapted = _adapt_by(plan, state, directions, own)
                grads = _compute_gradients(plan, adapted, x, partial(compute_loss, at=at), {})
                for name in names:
                    size = grads[name].numel() ** 0.5
                    own[name] += lr * float((grads[name].double() * directions[name].double()).sum()) / size
            learned.append(own)
        rates = {name: sum(own[name] for own in learned) / len(learned) for name in names}
    if not all(torch.tensor(list(rates.values())).isfinite()):
        raise Diverged("the rates of atp diverged: try a smaller lr")
    return rates


@policy(data="inputs", learns=True, requires=(require_entropy, require_torch_statistics))
def atp(context: PolicyContext, train: Samples, *, rounds: Count = 10, lr: Rate = 0.1, batch_size: Count = 20) -> State:
    """Adapt each entry of the average at a rate that the clients that trained have learned.

    ``lr`` and ``batch_size`` are from the authors' code. ``rounds``: rounds in which the clients learn, on validation
    data if they have some, as in that code, else on training data; the default is ours, for few clients (the code has
    400 rounds of a quarter of 240 clients).
    """
    rates = context.once(_learn_rates, rounds, lr, batch_size)
    batches = iterate_inputs(context.plan, train, BATCH, "atp")
    directions = _find_directions(context.plan, context.average, batches, context.task.entropy)
    return _adapt_by(context.plan, context.average, directions, rates)
