"""Laws of compositions: one name, one order, every component has an effect, or a refusal that names who is in the way.

They hold for every pair of methods; a few telling pairs are fast.
"""

import re
from dataclasses import replace
from functools import cache
from itertools import combinations, permutations

import pytest
import torch
from torch import nn

from fedshift.config.expressions import list_catalog
from fedshift.core.kernel import client_init, init_client, init_server
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.core.step import compute_gradients
from fedshift.core.work import Work
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods import METHODS as CATALOG
from fedshift.methods.agc import agc
from fedshift.methods.ditto import ditto
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbabu import fedbabu
from fedshift.methods.fedbn import fedbn
from fedshift.methods.feddyn import feddyn
from fedshift.methods.fedlc import fedlc
from fedshift.methods.fedper import fedper
from fedshift.methods.fedprox import fedprox
from fedshift.methods.fixbn import fixbn
from fedshift.methods.scaffold import scaffold
from fedshift.methods.silobn import silobn
from fedshift.utils.errors import UsageError
from fedshift.utils.state import is_equal
from tests.methods import plain
from tests.methods.others import clipped, small_features

METHODS = list_catalog("methods")
NAMES = sorted(METHODS)
OPTIONS = {
    "agc": {"clip": 0.05}, "dp": {"noise_multiplier": 0.0, "clipping_norm": 0.05},
    "dp_sgd": {"noise_multiplier": 0.0, "clipping_norm": 0.1}, "fedavg": {"weighting": "uniform"},
    "feddyn": {"alpha": 0.5}, "fedmmb": {"batches": 2}, "fedprox": {"mu": 2.0}, "fedrep": {"head": 1, "body": 2},
    "fixbn": {"switch": 1}, "tuned": {"lr": 0.02},
}  # fmt: skip
"""Options with which each method changes the first two rounds."""
STRENGTHLESS = {
    "agc": {"clip": 1e9}, "fedprox": {"mu": 0.0}, "fedproto": {"lam": 0.0}, "fpl": {"lam": 0.0}, "moon": {"mu": 0.0}
}  # fmt: skip
LATER = {("krum", "moon"), ("moon", "multi_krum"), ("fedprox", "fedsmb"), ("fednova", "fedsmb")}
"""Pairs with an effect from round 3 on (Krum selects a client whose model before was the loaded one), or on more steps
a round, as a notice says."""


def network(shape, classes):
    return nn.Sequential(
        nn.Conv2d(shape[0], 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, classes)
    ).double()


DATA = plain.data({"a": 8, "b": 5, "c": 7})


def compose(*names, options=OPTIONS):
    method = None
    for name in reversed(names):
        method = METHODS[name](method, **options.get(name, {}))
    return method


def trial(method):
    settings = Settings(rounds=2, work=Work(batch_size=3, epochs=1), optimizer=SGD(lr=0.05), evaluate_every=2)
    return Trial(method, network, DATA, settings, seed=0)


def run(method):
    """The clients' models and the server's trained entries after two rounds."""
    running = trial(method)
    for _ in range(2):
        running.advance()
    shared = {name: tensor for name, tensor in running.server.shared.items() if name in running.plan.trained}
    return [*(running.model_state(client) for client in "abc"), shared]


@cache
def outcome(*names):
    """What :func:`run` returns, or why it is refused."""
    try:
        return run(compose(*names))
    except UsageError as error:
        return str(error)


def gap(ours, theirs):
    pairs = zip(ours, theirs, strict=True)
    return max(float((a[name] - b[name]).abs().max()) for a, b in pairs for name in a.keys() & b.keys())


def names_in(message, names):
    """Those of ``names`` that a refusal names after the method's label, whatever the spelling."""
    said = re.sub(r"[^a-z0-9]", "", re.sub(r"^method ('[^']*'|\"[^\"]*\"):? ", "", message).lower())
    return {name for name in names if name.replace("_", "") in said}


def find_wrong(one, other):
    """Yield what is wrong with a pair of methods."""
    both, reverse = outcome(one, other), outcome(other, one)
    if isinstance(both, str) or isinstance(reverse, str):
        refusals = [each for each in (both, reverse) if isinstance(each, str)]
        if (
            len(refusals) == 1
            and f"write {one}+{other}" not in refusals[0]
            and f"write {other}+{one}" not in refusals[0]
        ):
            yield f"only one order is refused: {refusals[0]}"
        for message in refusals:
            alone = {name for name in (one, other) if isinstance(outcome(name), str)}  # needs another network
            if not (names_in(message, {one, other}) >= {one, other} or names_in(message, alone)):
                yield f"the refusal names not both: {message}"
        return
    if gap(both, reverse) > 1e-9:
        yield f"the order decides, by {gap(both, reverse):.1e}"
    if not all(tensor.isfinite().all() for state in both for tensor in state.values()):
        yield "values are not finite"
    for name, partner in ((one, other), (other, one)):
        alone = outcome(partner)
        if not isinstance(alone, str) and gap(both, alone) < 1e-9 and tuple(sorted((one, other))) not in LATER:
            yield f"{name} has no effect on {partner}"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("agc", "fedprox"), ("agc", "scaffold"), ("apfl", "silobn"), ("centralized", "fedbn"), ("dp", "single"),
        ("ditto", "moon"), ("fedadam", "fedbn"), ("fedavg", "krum"), ("fedbabu", "fedper"), ("fedbn", "gn"),
        ("fedpac", "fedrep"), ("fedsr", "fedwon"), ("fn", "fedsr"), ("fedala", "fedper"), ("greg", "nonorm"),
    ],
)  # fmt: skip
def test_a_pair_has_one_order_and_two_effects_or_is_refused_by_both_names(one, other):
    assert not list(find_wrong(one, other))


@pytest.mark.slow
@pytest.mark.parametrize("one", NAMES)
def test_every_pair_has_one_order_and_two_effects_or_is_refused_by_both_names(one):
    others = NAMES[NAMES.index(one) + 1 :]
    assert not [f"{one}, {other}: {wrong}" for other in others for wrong in find_wrong(one, other)]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("outer", NAMES)
def test_the_name_of_every_pair_composes_it(outer):
    for inner in NAMES:
        try:
            method = compose(outer, inner)
        except UsageError:
            continue
        again = CATALOG.parse(method.name)
        assert (again.name, again.text) == (method.name, method.text)


def test_names_of_longer_compositions_compose_them():
    for names in permutations(["agc", "fn", "fedavg", "fedbn", "tuned"]):
        method = compose(*names)
        assert CATALOG.parse(method.name).text == method.text
    assert compose("gn", "fedavg").name == compose("fedavg", "gn").name == "fedavg(weighting='uniform')+gn"
    assert CATALOG.parse("dp(clipping_norm=inf, noise_multiplier=0)").aggregator.clipping_norm == float("inf")


@pytest.mark.parametrize("partner", ["fedbn", "fedadam", *(pytest.param(n, marks=pytest.mark.slow) for n in NAMES)])
def test_a_component_of_strength_0_is_left_out(partner):
    for name, options in STRENGTHLESS.items():
        try:
            both = run(METHODS[name](compose(partner), **options))
        except UsageError:
            continue
        if name != partner and (name, partner) != ("agc", "fedwon"):  # whose clipping it replaces
            assert all(map(is_equal, both, outcome(partner))), name


def plain_clip(grad, weights, clip):
    """Equation 4 of FedWon, unit by unit."""
    rows = grad if grad.ndim > 1 else grad[None]
    of = weights if weights.ndim > 1 else weights[None]
    kept = [g * min(1.0, float(clip * max(w.norm(), 1e-3) / g.norm())) for g, w in zip(rows, of, strict=True)]
    return torch.stack(kept).reshape(grad.shape)


@pytest.mark.parametrize("parts", [("agc", "fedprox", "scaffold"), ("agc", "feddyn"), ("agc", "scaffold")])
def test_gradients_are_the_objectives_clipped_then_corrected_in_whatever_order(parts):
    torch.manual_seed(0)
    make = {"agc": lambda m: agc(m, clip=0.1), "fedprox": lambda m: fedprox(m, mu=3.0), "scaffold": scaffold}
    make["feddyn"] = lambda m: feddyn(m, alpha=2.0)
    model = nn.Linear(4, 3).double()
    x, y = torch.randn(6, 4).double(), torch.arange(6) % 3
    for order in permutations(parts):
        method = None
        for name in order:
            method = make[name](method)
        plan = prepare(method, model, optimizer=SGD(lr=0.1))
        job = client_init(plan, init_client(plan), init_server(plan), planned_steps=3)
        params = {name: tensor + torch.randn_like(tensor) for name, tensor in plan.params.items()}
        memory = tuple({name: torch.randn_like(tensor) for name, tensor in held.items()} for held in job.memory)
        server = tuple({name: torch.randn_like(tensor) for name, tensor in held.items()} for held in job.server_memory)
        job = replace(job, params=params, memory=memory, server_memory=server)
        found = compute_gradients(plan, job, x, y, torch.tensor(0))[0]
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in params.items()}
        loss = nn.functional.cross_entropy(torch.func.functional_call(model, leaves, x), y)
        for name, grad in zip(leaves, torch.autograd.grad(loss, [*leaves.values()]), strict=True):
            kept = {bound.rule.source_method: held.get(name) for bound, held in zip(plan.rules, memory, strict=True)}
            pull = params[name] - plan.initial[name]
            expected = grad + 3.0 * pull * ("fedprox" in parts)
            expected = expected + (2.0 * pull - kept["feddyn"] if "feddyn" in parts else 0)
            expected = plain_clip(expected, params[name], 0.1)
            if "scaffold" in parts:
                sent = dict(zip((bound.rule.source_method for bound in plan.rules), server, strict=True))["scaffold"]
                expected = expected - kept["scaffold"] + sent[name]
            assert (found[name] - expected).abs().max() <= 1e-12


def start(method):
    plan = prepare(method, nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).double(), optimizer=SGD(lr=0.1))
    return plan, client_init(plan, init_client(plan), init_server(plan), planned_steps=1)


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("other", [small_features, ditto])
def test_outputs_are_changed_before_every_loss_and_other_terms_stay(other, outside):
    torch.manual_seed(0)
    x, y = torch.randn(6, 4).double(), torch.arange(6) % 3
    plan, job = start(other(fedlc()) if outside else fedlc(other()))
    lower = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    memory = ({"margins": lower} if "margins" in held else held for held in job.memory)
    job = replace(job, memory=tuple(memory))
    found = compute_gradients(plan, job, x, y, torch.tensor(0))[0]
    leaves = [tensor.clone().requires_grad_() for tensor in plan.params.values()]
    hidden = nn.functional.linear(x, *leaves[:2])
    loss = nn.functional.cross_entropy(nn.functional.linear(hidden, *leaves[2:]) - lower, y)
    loss = loss + 0.1 * hidden.square().mean() if other is small_features else loss
    for name, grad in zip(plan.params, torch.autograd.grad(loss, leaves), strict=True):
        for each in (name, f"personalmodel/{name}") if other is ditto else (name,):
            assert (found[each] - grad).abs().max() <= 1e-14


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (lambda: fedbn(compose("gn")), "fedbn needs BatchNorm, which gn replaces: remove one of the two"),
        (lambda: fixbn(compose("hbn")), "fixbn needs BatchNorm, which hbn replaces"),
        (lambda: compose("greg", "fedbn"), "but fedbn keeps '1.num_batches_tracked' on clients: use one of the two"),
        (lambda: compose("greg", "gn"), "GReg compares statistics of BatchNorm, which gn replaces"),
        (lambda: compose("fedpac", "fedrep"), "fedrep and fedpac both add the rule HeadThenBody: remove one"),
        (lambda: fedprox(fedprox()), "has fedprox twice: remove one of the two"),
        (lambda: compose("dp", "fedavg"), r"fedavg already weighs clients; choose one of the two"),
        (lambda: fedavg(compose("median"), weighting="used"), r"'used'\) has no effect, because median weighs clients"),
        (
            lambda: silobn(ditto(fedprox())),
            "silobn keeps '1.running_mean' on clients, which only evaluation reads, but",
        ),
        (lambda: fedper(fedbn(fedbabu())), "fedper keeps '4.weight' on clients, but fedbabu leaves it untrained"),
        (lambda: ditto(clipped(clipped())), "has clipped twice"),
    ],
)
def test_refusals_name_components(method, words):
    with pytest.raises(UsageError, match=words):
        trial(method())


@pytest.mark.parametrize("names", [*combinations(["fedbn", "fedmmb", "fedadam", "agc", "fedprox"], 4)], ids="+".join)
def test_four_at_once_run(names):
    assert all(tensor.isfinite().all() for state in run(compose(*names)) for tensor in state.values())
