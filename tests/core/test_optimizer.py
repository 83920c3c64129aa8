"""Local optimizers and schedules against ``torch.optim``, in float64."""

import pytest
import torch

from fedshift.core.optimizer import SGD, AdamW, Cosine, Exponential, Schedule, StepDecay
from fedshift.utils.errors import UsageError

PAIRS = [
    (SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    (SGD(lr=0.1, weight_decay=0.05), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.05)),
    (SGD(lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    (
        SGD(lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.05),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.05),
    ),
    (AdamW(lr=0.1), lambda p: torch.optim.AdamW(p, lr=0.1)),
    (
        AdamW(lr=0.02, beta1=0.7, beta2=0.95, eps=1e-4, weight_decay=0.3),
        lambda p: torch.optim.AdamW(p, lr=0.02, betas=(0.7, 0.95), eps=1e-4, weight_decay=0.3),
    ),
]


@pytest.mark.parametrize(
    ("ours", "theirs"), PAIRS, ids=lambda value: repr(value) if isinstance(value, SGD | AdamW) else ""
)
def test_equals_torch_optim(ours, theirs):
    generator = torch.Generator().manual_seed(0)
    params = {name: torch.randn(3, 2, dtype=torch.float64, generator=generator) for name in ("w", "b")}
    modules = [params[name].clone().requires_grad_() for name in params]
    optimizer, state = theirs(modules), ours.init(params)
    for _ in range(20):
        grads = {name: torch.randn(3, 2, dtype=torch.float64, generator=generator) for name in params}
        for parameter, grad in zip(modules, grads.values(), strict=True):
            parameter.grad = grad.clone()
        optimizer.step()
        ours.update_(params, grads, state, ours.lr_in_round(0))
        for parameter, mine in zip(modules, params.values(), strict=True):
            assert (parameter - mine).abs().max() <= 1e-14


SCHEDULES = [
    (Schedule(), lambda o: torch.optim.lr_scheduler.ConstantLR(o, factor=1.0)),
    (StepDecay(every=3, gamma=0.5), lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=3, gamma=0.5)),
    (Exponential(gamma=0.9), lambda o: torch.optim.lr_scheduler.ExponentialLR(o, gamma=0.9)),
    (Cosine(rounds=8, floor=0.1), lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=8, eta_min=0.02)),
]


@pytest.mark.parametrize(
    ("ours", "theirs"), SCHEDULES, ids=lambda value: repr(value) if isinstance(value, Schedule) else ""
)
def test_schedules_equal_torchs(ours, theirs):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.2)
    scheduler = theirs(optimizer)
    for round_ in range(9):
        assert SGD(lr=0.2, schedule=ours).lr_in_round(round_) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(lr=-0.1), "lr=-0.1"),
        (lambda: SGD(lr=float("nan")), "lr=nan"),
        (lambda: SGD(lr=0.1, momentum=1.0), "momentum=1"),
        (lambda: SGD(lr=0.1, nesterov=True), "nesterov needs a momentum"),
        (lambda: AdamW(lr=0.1, weight_decay=-1), "weight_decay=-1"),
        (lambda: AdamW(lr=0.1, beta2=1.0), "beta2=1"),
        (lambda: AdamW(lr=0.1, eps=0.0), "eps=0"),
        (lambda: Cosine(rounds=0), "rounds=0"),
        (lambda: StepDecay(every=0), "every=0"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(make, message):
    with pytest.raises(UsageError, match=message):
        make()
