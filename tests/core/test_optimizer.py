"""Local optimizers and schedules against ``torch.optim``, in float64."""

import math
from functools import partial

import pytest
import torch
from safetensors.torch import load, save

from fedshift.config.expressions import trust_only
from fedshift.core.optimizer import OPTIMIZERS, SGD, AdamW, Optimizer, as_optimizer
from fedshift.core.schedule import SCHEDULES, Cosine, Exponential, Schedule, StepDecay
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.ditto import ditto
from fedshift.models.digits import small_cnn
from fedshift.utils.errors import UsageError


class Leaky(torch.optim.Optimizer):
    """A user's optimizer: an average that leaks, with a count, a first step and a value that may be missing."""

    def __init__(self, params, lr=0.01, leak=0.1):
        super().__init__(params, {"lr": lr})
        self.leak = leak

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state.update(step=0, mean=torch.zeros_like(param), before=None, scale=1.0)
            state["step"] += 1
            state["mean"].lerp_(param.grad, self.leak)
            state["scale"] *= 0.9
            change = state["mean"] if state["before"] is None else state["mean"] + 0.5 * state["before"]
            state["before"] = param.grad.clone()
            param.sub_(change, alpha=self.param_groups[0]["lr"] * state["scale"] / state["step"])


class Counting(torch.optim.SGD):
    count = 0

    def step(self, closure=None):
        self.count += 1
        return super().step(closure)


class Listing(torch.optim.SGD):
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            self.state[param].setdefault("seen", []).append(1)
        return super().step(closure)


class Wrapping(torch.optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.inner = torch.optim.SGD(self.param_groups, lr)


SCHEDULED = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)]), step_size=1).optimizer
OF_TORCH = [
    partial(torch.optim.RMSprop, alpha=0.9, momentum=0.5, centered=True),
    partial(torch.optim.Adagrad, lr_decay=0.1, weight_decay=0.05),
    torch.optim.NAdam,
    torch.optim.Rprop,
    partial(torch.optim.Adam, amsgrad=True, weight_decay=0.1),
    partial(torch.optim.SGD, momentum=0.9, dampening=0.5, maximize=True),
    partial(Leaky, leak=0.3),
]
SETTINGS = [{}, {"weight_decay": 0.05}, {"momentum": 0.9}, {"momentum": 0.8, "nesterov": True, "weight_decay": 0.05}]
DECAYED = {"lr": 0.02, "eps": 1e-4, "weight_decay": 0.3}
PAIRS = [
    *((SGD(lr=0.1, **given), partial(torch.optim.SGD, lr=0.1, **given)) for given in SETTINGS),
    (AdamW(lr=0.1), partial(torch.optim.AdamW, lr=0.1)),
    (AdamW(beta1=0.7, beta2=0.95, **DECAYED), partial(torch.optim.AdamW, betas=(0.7, 0.95), **DECAYED)),
    (AdamW(lr=0.05, beta1=0.8, weight_decay=0.0), partial(torch.optim.Adam, lr=0.05, betas=(0.8, 0.999))),
]


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(
    ("ours", "theirs"), PAIRS, ids=lambda value: repr(value) if isinstance(value, Optimizer) else ""
)
def test_equals_torch_optim(ours, theirs, joined, monkeypatch):
    """Also by operations on all parameters at once, as on a GPU; one has no gradient in the second step."""
    monkeypatch.setattr("fedshift.core.optimizer.may_join", lambda params: joined)
    generator = torch.Generator().manual_seed(0)
    params = {name: torch.randn(3, 2, dtype=torch.float64, generator=generator) for name in ("w", "b")}
    modules = {name: params[name].clone().requires_grad_() for name in params}
    optimizer, state = theirs([*modules.values()]), ours.init(params)
    assert as_optimizer(optimizer, lr=7.0) == ours
    for step in range(20):
        names = ("w",) if step == 1 else ("w", "b")
        grads = {name: torch.randn(3, 2, dtype=torch.float64, generator=generator) for name in names}
        for name, parameter in modules.items():
            parameter.grad = grads.get(name)
        optimizer.step()
        ours.update_({name: params[name] for name in names}, grads, state, ours.lr_in_round(0))
        for name, parameter in modules.items():
            assert (parameter - params[name]).abs().max() <= 1e-14


@pytest.mark.parametrize("kind", OF_TORCH, ids=lambda kind: getattr(kind, "func", kind).__name__)
def test_any_optimizer_of_torch_takes_its_own_steps_also_from_a_state_that_was_stored(kind):
    ours = as_optimizer(kind, lr=0.1)
    params = {name: torch.randn(3, 2, dtype=torch.float64) for name in ("w", "b")}
    modules = [params[name].clone().requires_grad_() for name in params]
    theirs, state = kind(modules, lr=0.1), ours.init(params)
    ours.check(params, rounds=1)
    for step in range(12):
        grads = {name: torch.randn(3, 2, dtype=torch.float64) for name in params}
        for parameter, grad in zip(modules, grads.values(), strict=True):
            parameter.grad = grad.clone()
        for group in theirs.param_groups:
            group["lr"] = 0.1 / (1 + step // 4)
        theirs.step()
        state = load(save(state))
        for name in params:  # as in phases, which update parameters one after another
            ours.update_({name: params[name]}, grads, state, 0.1 / (1 + step // 4))
        assert all(torch.equal(a, b) for a, b in zip(modules, params.values(), strict=True))
    assert all(param.grad is None for param in params.values())


def test_a_class_takes_the_learning_rate_given_and_torchs_other_defaults():
    adam, decayed = torch.optim.Adam, torch.optim.AdamW
    assert as_optimizer(torch.optim.SGD, lr=0.3) == SGD(lr=0.3)
    assert as_optimizer(partial(torch.optim.SGD, momentum=0.9), lr=0.3) == SGD(lr=0.3, momentum=0.9)
    assert as_optimizer(partial(adam, lr=0.1), lr=0.3) == AdamW(lr=0.1, weight_decay=0.0)
    assert as_optimizer(partial(adam, keep=True), lr=0.3).keep
    assert as_optimizer(partial(Leaky, keep=True), lr=0.3).keep
    decaying = as_optimizer(decayed, 0.3, Exponential(gamma=0.5))
    assert decaying == AdamW(lr=0.3, weight_decay=0.01, schedule=Exponential(gamma=0.5))
    assert as_optimizer(decaying, lr=7.0) is decaying


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (3, "optimizer=3 is unknown: allowed are sgd and adamw, fedshift.SGD(...)"),
        (torch.optim.LBFGS, "optimizer=LBFGS evaluates the loss several times in a step (its closure)"),
        (partial(torch.optim.SGD, momentun=0.9), "optimizer=SGD: SGD.__init__() got an unexpected keyword argument"),
        (partial(torch.optim.SGD, 0.1), "a functools.partial of it with arguments by name"),
        (torch.optim.SGD([{"params": torch.zeros(1)}, {"params": torch.ones(1)}]), "differs in 'param_groups' from a"),
        (SCHEDULED, "differs in 'initial_lr' from a new one with its arguments: give the class"),
    ],
)
def test_optimizers_and_arguments_without_a_counterpart_are_refused_by_name(given, said):
    with pytest.raises(UsageError) as refused:
        as_optimizer(given, lr=0.1)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Counting, "optimizer=tests.core.test_optimizer:Counting(lr=0.1) changes 'count' as it steps, which clients"),
        (Wrapping, "changes 'inner' as it steps, which clients would share: keep tensors and numbers in self.state"),
        (Listing, "keeps a list in its state 'seen': keep tensors and numbers"),
        (torch.optim.Muon, "cannot update this model's parameters: Muon only supports 2D parameters"),
        (torch.optim.SparseAdam, "SparseAdam does not support dense gradients"),
    ],
)
def test_what_a_checkpoint_would_not_store_is_refused_before_the_first_round(given, said):
    with pytest.raises(UsageError) as refused:
        as_optimizer(given, lr=0.1).check({"w": torch.ones(2, 2), "b": torch.ones(2)}, rounds=1)
    assert said in str(refused.value)


def warm_up(round, *, length=3):
    return min(1.0, (round + 1) / length)


RATES = torch.optim.lr_scheduler
CYCLE = partial(RATES.OneCycleLR, max_lr=0.3, total_steps=9, cycle_momentum=False)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Schedule(), partial(RATES.ConstantLR, factor=1.0)),
        (StepDecay(every=3, gamma=0.5), partial(RATES.StepLR, step_size=3, gamma=0.5)),
        (Exponential(gamma=0.9), partial(RATES.ExponentialLR, gamma=0.9)),
        (Cosine(rounds=8, floor=0.1), partial(RATES.CosineAnnealingLR, T_max=8, eta_min=0.02)),
        (warm_up, partial(RATES.LambdaLR, lr_lambda=warm_up)),
        (CYCLE, CYCLE),
    ],
    ids=lambda value: "" if isinstance(value, partial) else getattr(value, "__name__", repr(value)),
)
def test_schedules_equal_torchs(ours, theirs):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.2)
    scheduler, schedules = theirs(optimizer), [SCHEDULES.parse(ours), SCHEDULES.parse(theirs)]
    for schedule in schedules:
        schedule.check(0.2, 9)
    for round in range(9):
        for schedule in schedules:
            rate = SGD(lr=0.2, schedule=schedule).lr_in_round(round)
            assert rate == pytest.approx(scheduler.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        if round < 8:
            scheduler.step()


def test_a_function_of_the_round_is_a_schedule():
    text = "tests.core.test_optimizer:warm_up(length=4)"
    assert SCHEDULES.parse(text).rate(0.2, 0) == 0.05
    assert SCHEDULES.write(SCHEDULES.parse(partial(warm_up, length=4))) == text
    assert SCHEDULES.write(SCHEDULES.parse(warm_up)) == "tests.core.test_optimizer:warm_up"


def test_a_rate_for_each_round_is_enough(tiny):
    """Neither the dry run nor the evaluation after the last round asks for another."""
    schedule = SCHEDULES.parse(lambda round: [0.5][round])
    trial = Trial(ditto(), small_cnn, tiny, Settings(rounds=1, optimizer=SGD(lr=0.1, schedule=schedule)), 0)
    trial.advance()
    assert trial.evaluate()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (RATES.ReduceLROnPlateau, "follows a measured value"),
        (RATES.StepLR, "torch.optim.lr_scheduler:StepLR failed in round 1: .*missing 1 required .*'step_size'"),
        (partial(CYCLE, cycle_momentum=True), "cycle_momentum"),
        (partial(CYCLE, total_steps=4), "ends after 5 rounds: give it as many as rounds"),
        (lambda round: -1.0, "gives the learning rate -0.2 in round 1"),
        (lambda round: math.nan, "gives the learning rate nan in round 1"),
        (lambda: 1.0, "failed in round 1: .*positional argument"),
        (lambda round: [0.1][round], "failed in round 2: .*test_optimizer.py, line"),
        (0.5, "schedule=0.5 is not a schedule"),
    ],
)  # fmt: skip
def test_schedules_without_a_rate_for_each_round_are_refused(given, said):
    with pytest.raises(UsageError, match=said):
        SCHEDULES.parse(given).check(0.2, 9)


@pytest.mark.parametrize(
    "text", ["torch.optim:RMSprop(alpha=0.9)", "tests.core.test_optimizer:Leaky(leak=0.3, keep=True)"]
)
def test_an_optimizer_of_torch_is_written_as_it_is_read(text):
    made = OPTIMIZERS.parse(text, lr=0.1, schedule=Cosine(rounds=3))
    assert (made.lr, made.lr_in_round(3), made.keep) == (0.1, 0.0, "keep" in text)
    assert OPTIMIZERS.write(made, lr=0.1, schedule=made.schedule) == text
    with trust_only(()):
        if text.startswith("torch"):
            assert OPTIMIZERS.parse(text, lr=0.1, schedule=Cosine(rounds=3)) == made
        else:
            with pytest.raises(UsageError, match="nobody allowed"):
                OPTIMIZERS.parse(text, lr=0.1, schedule=Cosine(rounds=3))


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
