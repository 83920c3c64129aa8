"""Local optimizers and schedules against ``torch.optim``, in float64."""

from functools import partial

import pytest
import torch

from fedshift.core.optimizer import SGD, AdamW, Cosine, Exponential, Schedule, StepDecay, as_optimizer
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


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=lambda value: repr(value) if isinstance(value, SGD) else "")
def test_an_instance_of_torchs_is_the_optimizer_that_equals_it(ours, theirs):
    assert as_optimizer(theirs([torch.zeros(1)]), lr=7.0) == ours


def test_a_class_takes_the_learning_rate_given_and_torchs_other_defaults():
    adam, decayed = torch.optim.Adam, torch.optim.AdamW
    assert as_optimizer(torch.optim.SGD, lr=0.3) == SGD(lr=0.3)
    assert as_optimizer(partial(torch.optim.SGD, momentum=0.9), lr=0.3) == SGD(lr=0.3, momentum=0.9)
    assert as_optimizer(partial(adam, lr=0.1), lr=0.3) == AdamW(lr=0.1, weight_decay=0.0)
    decaying = as_optimizer(decayed, 0.3, Exponential(gamma=0.5))
    assert decaying == AdamW(lr=0.3, weight_decay=0.01, schedule=Exponential(gamma=0.5))
    assert as_optimizer(decaying, lr=7.0) is decaying


def test_adam_without_weight_decay_equals_its_counterpart():
    start = torch.randn(4, dtype=torch.float64)
    ours, theirs = {"w": start.clone()}, start.clone().requires_grad_()
    torchs = torch.optim.Adam([theirs], lr=0.05, betas=(0.8, 0.9))
    counterpart = as_optimizer(torchs, lr=7.0)
    state = counterpart.init(ours)
    for step in range(1, 9):
        theirs.grad = (start * step).sin()
        torchs.step()
        counterpart.update_(ours, {"w": theirs.grad}, state, counterpart.lr)
    assert (theirs - ours["w"]).abs().max() <= 1e-14


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (torch.optim.RMSprop, "optimizer=RMSprop is unknown: allowed are sgd and adamw, fedshift.SGD(...)"),
        (torch.optim.RMSprop([torch.zeros(1)]), "optimizer=RMSprop is unknown"),
        (3, "optimizer=3 is unknown"),
        (partial(torch.optim.Adam, weight_decay=0.1), "weight_decay has no counterpart here: use torch.optim.AdamW"),
        (partial(torch.optim.SGD, momentum=0.9, dampening=0.5), "torch.optim.SGD(dampening=0.5): dampening has no"),
        (torch.optim.SGD([torch.zeros(1)], maximize=True), "maximize has no counterpart here: leave it out"),
        (partial(torch.optim.AdamW, amsgrad=True), "amsgrad has no counterpart here"),
        (partial(torch.optim.SGD, fused=True), "fused has no counterpart here"),
        (partial(torch.optim.SGD, momentun=0.9), "torch.optim.SGD: SGD.__init__() got an unexpected keyword argument"),
        (partial(torch.optim.SGD, 0.1), "give arguments by name: functools.partial(torch.optim.SGD, lr=0.01)"),
        (torch.optim.SGD([{"params": torch.zeros(1)}, {"params": torch.ones(1)}]), "has 2 parameter groups"),
    ],
)
def test_optimizers_and_arguments_without_a_counterpart_are_refused_by_name(given, said):
    with pytest.raises(UsageError) as refused:
        as_optimizer(given, lr=0.1)
    assert said in str(refused.value)


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
