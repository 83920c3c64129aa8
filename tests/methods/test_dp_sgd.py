"""DP-SGD against plain loops over samples, noise by its statistics, and participation counted batch by batch."""

import random
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from torch import nn

from fedshift.config.expressions import list_catalog
from fedshift.core import kernel, step
from fedshift.core.kernel import init_client, init_server
from fedshift.core.loss import cross_entropy, focal, make_loss
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.data.augmentation import AUGMENTATIONS, mixes_images
from fedshift.data.federation import encode_targets
from fedshift.data.partition import repeat
from fedshift.data.preparation import FeatureScaling
from fedshift.data.samples import Samples
from fedshift.evaluation.policy import POLICIES, check_policy, list_policies, make_state
from fedshift.evaluation.unseen_clients import PolicyContext
from fedshift.experiments.experiment import Experiment
from fedshift.experiments.initial_weights import as_initial_weights
from fedshift.experiments.private_training import list_uncovered
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods import METHODS as CATALOG
from fedshift.methods.agc import agc
from fedshift.methods.dp_sgd import dp_sgd
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedfa import fedfa
from fedshift.methods.fedmmb import fedmmb
from fedshift.methods.fedwon import fedwon
from fedshift.methods.gn import gn
from fedshift.methods.ln import ln
from fedshift.methods.nonorm import nonorm
from fedshift.tasks import CLASSIFICATION
from fedshift.utils.errors import UsageError
from fedshift.utils.state import is_equal
from tests.methods import plain

KEY = torch.tensor(7)


def network(shape=(1, 5, 5), classes=3):
    """A convolution with BatchNorm, a depthwise one, and a linear layer without gradient."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(shape[0], 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Flatten(),
        nn.Linear(72, 5), nn.Linear(5, classes),
    )  # fmt: skip
    net[5].bias.requires_grad_(False)
    return net.double()


def batch(size=7):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 1, 5, 5, generator=generator, dtype=torch.float64)
    return x * torch.linspace(0.01, 3, size)[:, None, None, None], torch.arange(size) % 3


def plan_of(method, model=None, **settings):
    settings = {"optimizer": SGD(lr=0.1), "sample": torch.zeros(1, 1, 5, 5, dtype=torch.float64)} | settings
    return prepare(method, model or network(), **settings)


def job_of(plan):
    return kernel.client_init(plan, kernel.init_client(plan), kernel.init_server(plan))


def gradients_of(method, x, y, key=KEY, **given):
    plan = plan_of(method, **given)
    return step.compute_gradients(plan, job_of(plan), x, y, key)


def loop(model, x, y, clip):
    """The gradients of single samples by plain autograd, clipped and added, and the norms before."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total, norms = {name: torch.zeros_like(p) for name, p in named.items()}, []
    for one, label in zip(x, y, strict=True):
        model.zero_grad()
        nn.functional.cross_entropy(model(one[None]), label[None]).backward()
        norms.append(sum(float((p.grad**2).sum()) for p in named.values()) ** 0.5)
        for name, p in named.items():
            total[name] += p.grad * min(1.0, clip / norms[-1])
    return {name: gradient / len(y) for name, gradient in total.items()}, norms


@pytest.mark.parametrize("base", [gn(), ln(), nonorm(), fedwon(agc=None)], ids=lambda method: method.name)
@pytest.mark.parametrize("together", [10**9, 3 * 8 * 600, 1])
def test_a_step_is_that_of_a_loop_over_samples(base, together, monkeypatch):
    monkeypatch.setattr(step, "SAMPLE_GRADIENTS", together)
    (x, y), model = batch(), plan_of(base).module
    clip = sorted(loop(model, x, y, 1.0)[1])[3]  # half of the gradients are longer
    expected, norms = loop(model, x, y, clip)
    assert max(norms) > 1.01 * clip > 1.02 * min(norms)
    plan = plan_of(dp_sgd(base, clipping_norm=clip, noise_multiplier=0.0))
    plan = replace(plan, initial={name: tensor.detach() for name, tensor in model.state_dict().items()})
    grads, rest, loss = step.compute_gradients(plan, job_of(plan), x, y, KEY)
    assert grads.keys() == plan.trained
    assert plain.largest_difference(grads, expected) <= 1e-12
    assert abs(float((loss - nn.functional.cross_entropy(model(x), y)).detach())) <= 1e-12
    assert is_equal(rest, job_of(plan).rest)


@pytest.mark.parametrize("secret", [False, True])
def test_noise_is_normal_with_the_deviation_of_the_paper(secret, monkeypatch):
    monkeypatch.setattr("os.urandom", random.Random(0).randbytes)
    wide = nn.Sequential(nn.Flatten(), nn.Linear(25, 2000), nn.Linear(2000, 3)).double()
    x, y = batch()
    quiet, loud = (
        gradients_of(dp_sgd(clipping_norm=3.0, noise_multiplier=noise, secret=secret), x, y, model=wide)[0]
        for noise in (0.0, 0.5)
    )
    scaled = {name: ((loud[name] - quiet[name]) / (0.5 * 3.0 / 7)).flatten().numpy() for name in quiet}
    everything = np.concatenate(list(scaled.values()))
    assert abs(everything.std() - 1) < 0.01
    assert abs(everything.mean()) < 0.015
    assert kstest(everything, "norm").pvalue > 0.01
    assert abs(np.corrcoef(scaled["1.weight"][:6000], scaled["2.weight"])[0, 1]) < 0.05


def test_noise_comes_again_with_the_step_unless_it_is_secret():
    for secret in (False, True):
        method = dp_sgd(gn(), secret=secret)
        first, again, other = (gradients_of(method, *batch(), key)[0] for key in (KEY, KEY, KEY + 1))
        assert is_equal(first, again) == (not secret)
        assert not any((first[name] == other[name]).any() for name in first)


def test_every_sample_has_a_dropout_mask_of_its_own():
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(25, 3)).double()
    quiet = dp_sgd(clipping_norm=1e9, noise_multiplier=0.0)
    x, y = torch.ones(9, 1, 5, 5, dtype=torch.float64), torch.zeros(9, dtype=torch.int64)
    grads, *_ = gradients_of(quiet, x, y, model=model)
    kept = (grads["2.weight"][0] / grads["2.weight"][0].max()).numpy()
    assert len(np.unique(kept.round(6))) > 3  # with one mask for all it would be zero or one


DATA = plain.data({"a": 21, "b": 5, "c": 8}, (1, 5, 5))


def trial(method, **settings):
    return plain.trial(method, network, DATA, **{"rounds": 4, "evaluate_every": 1, **settings})


def test_whatever_else_changes_gradients_sees_them_clipped_and_noisy():
    """Whichever is named first: here a clip of units comes after the noise, so it is postprocessing."""
    x, y = batch()
    found = [gradients_of(method, x, y)[0] for method in (agc(dp_sgd(gn()), clip=0.01), dp_sgd(agc(gn(), clip=0.01)))]
    assert is_equal(*found)
    weight = plan_of(gn()).initial["0.weight"].flatten(1).norm(dim=1)
    assert (found[0]["0.weight"].flatten(1).norm(dim=1) <= 0.01 * weight * (1 + 1e-12)).all()


METHODS = list_catalog("methods")
NO_BATCH_NORM = {"fedap", "fedbn", "gperxan", "greg", "hbn", "silobn", "fixbn"}
"""Methods that act on BatchNorm, which is gone here."""
LOSSES = (
    "apfl", "ditto", "fedala", "feddecorr", "feddg_elcfs", "feddg_ga", "fedntd", "fedpac", "fedplvm", "fedproto",
    "fedrod", "fedsr", "fpl", "moon", "partialfed_adaptive",
)  # fmt: skip
REFUSED = dict.fromkeys(LOSSES, "changes the loss") | {
    "fedlc": "changes the outputs", "fedrdn": "changes the batch",
    "harmofl": "runs the model on samples before local work",
}  # fmt: skip
"""Methods whose local loss is no mean over samples, or that look at samples in another way, and why."""


OTHERS = {"dp_sgd", "fedfa", "fedwon", "gn", "ln", "nonorm"}
"""Methods that decide what becomes of BatchNorm, dp_sgd itself, and one whose layers keep statistics of batches."""


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", sorted(METHODS.keys() - NO_BATCH_NORM - OTHERS))
def test_every_method_trains_on_private_gradients_or_is_refused(name):
    method = dp_sgd(METHODS[name](gn()), noise_multiplier=0.1)
    if name in REFUSED:
        with pytest.raises(UsageError, match=f"of single samples, and {name} {REFUSED[name]}"):
            trial(method)
        return
    assert {send.reveals for bound in plan_of(method).rules for send in bound.sends.values()} <= {"update"}
    running = trial(method)
    running.advance()
    after = running.model_state("a")
    assert all(tensor.isfinite().all() for tensor in after.values())
    assert not is_equal(after, running.plan.initial)


class Counts(nn.Module):
    """Counts the batches that it saw."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.seen += x.square().sum()
        return x


class Choosy(nn.Linear):
    """Reads its inputs in Python."""

    def forward(self, x):
        return super().forward(x if x.sum() > 0 else -x)


WEIGHTED = make_loss(cross_entropy, weights=(1.0, 2.0, 3.0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: plan_of(dp_sgd()), r"'dp_sgd': .* through BatchNorm \(layer '1'\) .*: add gn, ln, nonorm or fedwon"),
        (lambda: plan_of(dp_sgd(fedfa(gn()))), r"'dp_sgd\+fedfa\+gn': the model writes into '.*running_mean' during"),
        (lambda: plan_of(dp_sgd(dp_sgd(gn()))), "has dp_sgd twice: remove one of the two"),
        (
            lambda: plan_of(dp_sgd(), nn.Sequential(Counts(), nn.Flatten(), nn.Linear(25, 3)).double()),
            r"'dp_sgd': the model writes into '0\.seen' during training, which dp_sgd cannot clip sample by sample",
        ),
        (
            lambda: plan_of(dp_sgd(), nn.Sequential(nn.Flatten(), Choosy(25, 3)).double()),
            r"combine_samples\(\) failed .*, whose gradients torch.func computes one by one \(in float32\)",
        ),
        (
            lambda: plan_of(dp_sgd(gn()), loss=WEIGHTED),
            r"divides by the sum of a batch's weights, .*: use focal\(gamma=0, weights=\(1\.0, 2\.0, 3\.0\)\)",
        ),
        (lambda: trial(dp_sgd(gn(), secret=True), engine="stacked"), "stacked engine cannot run .* draws of dp_sgd"),
        (
            lambda: trial(dp_sgd(gn()), engine="identity", work=Work(batch_size=4, batches=1), moments=("loaded",)),
            r"identity engine needs a method that only averages complete models, which dp_sgd\+gn does not",
        ),
    ],
)  # fmt: skip
def test_what_would_not_be_private_is_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_weights_that_a_plain_mean_has_are_those_of_samples():
    x, y = batch()
    quiet = dp_sgd(gn(), clipping_norm=1e9, noise_multiplier=0.0)
    weighted, unweighted = (
        gradients_of(method, x, y, loss=make_loss(focal, gamma=0.0, weights=(1.0, 2.0, 3.0)))[0]
        for method in (quiet, gn())
    )
    assert plain.largest_difference(weighted, unweighted) <= 1e-12


def test_weights_of_classes_that_come_from_label_counts_are_refused():
    settings = Settings(loss=make_loss(focal, weights="balanced"))
    with pytest.raises(UsageError, match=r"'dp_sgd\+gn': balanced weights come from all clients' label counts"):
        Experiment(
            methods=(fedavg(), dp_sgd(gn())), data=DATA, model=lambda *_: network(), settings=settings, seeds=(0,)
        )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (dp_sgd(gn()), {"work": Work(batch_size=4, epochs=2)}),
        (dp_sgd(gn()), {"participation": 2}),
        (dp_sgd(gn()), {"work": Work(batch_size=None, epochs=1)}),
        (dp_sgd(fedmmb(gn(), batches=2)), {}),
        (dp_sgd(fedmmb(gn(), batches=4)), {"participation": 1}),
        (METHODS["centralized"](dp_sgd(gn())), {}),
        (METHODS["fedrep"](dp_sgd(gn()), head_epochs=2, body_epochs=1), {}),
    ],
    ids=["epochs", "sampled clients", "full batches", "groups", "sampled groups", "pooled", "fedrep"],
)
def test_passes_are_the_most_batches_that_any_sample_was_in(method, settings):
    running, used = trial(method, **settings), Counter()
    draw = running.engine.draw_batches

    def watched(name, client):
        own = draw(name, client)
        used.update((name, int(sample)) for _, index in own for sample in index)
        return own

    running.engine.draw_batches = watched
    for number in range(1, 5):
        running.advance()
        most = {name: max(count for (own, _), count in used.items() if own == name) for name, _ in used}
        assert running.count_passes() == most, number


def test_a_run_says_what_privacy_it_spent(make, tmp_path, Listener):
    pytest.importorskip("opacus")
    heard = Listener()
    chosen = "dp_sgd(noise_multiplier=2.0, secret=True)+gn, dp_sgd+fedwon, dp_sgd(noise_multiplier=0.0)+nonorm"
    make(methods=chosen, rounds=2, epochs=1).run(tmp_path / "run", callback=heard)
    said = [notice for notice in heard.notices if "privacy" in notice or "private" in notice]
    assert said[0] == (
        "dp_sgd(noise_multiplier=2.0, secret=True)+gn: (epsilon = 3.19, delta = 1e-05)-differentially private at the "
        "level of each client's samples after 2 passes over its data (RDP accountant of Opacus); it does not cover "
        "measured losses and metrics or the run's 2 other trials, whose epsilon adds up with this one"
    )
    assert said[1].startswith("dp_sgd+fedwon: not differentially private, since its noise is a function of the seed")
    assert said[2] == "dp_sgd(noise_multiplier=0.0)+nonorm: noise_multiplier=0, so there is no differential privacy"


def copied(kind):
    """Two clients of 20 and 4 different samples, of which some occur more than once."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(24, 1, 6, 6)), np.arange(24) % 3
    parts = {"a": np.arange(20), "b": np.arange(20, 24)}
    if kind == "given twice":
        parts["a"] = np.r_[parts["a"], 3, 3, 7]
    if kind == "shared":
        parts["b"] = np.r_[parts["b"], 5, 5]
    made = federation({name: (x[rows], y[rows], x[:2], y[:2]) for name, rows in parts.items()})
    return repeat()(made) if kind == "repeated" else made


@pytest.mark.parametrize("kind", ["repeated", "given twice", "shared", "none"])
@pytest.mark.parametrize(
    ("method", "batch_size"), [(dp_sgd(), 4), (dp_sgd(), None), (METHODS["centralized"](dp_sgd()), 4)]
)
def test_copies_of_a_sample_are_accounted_together(kind, method, batch_size):
    accountants = pytest.importorskip("opacus.accountants")
    from fedshift.analysis.privacy import ORDERS, compute_epsilon

    data = copied(kind)
    work, small = Work(batch_size=batch_size, epochs=1), nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    running = Trial(method, lambda *_: small, data, Settings(work=work, optimizer=SGD(lr=0.1), rounds=3), 0)
    steps, draw = defaultdict(list), running.engine.draw_batches

    def watched(name, client):
        own = draw(name, client)
        for _, index in own:
            together = Counter(x.numpy().tobytes() for x in running.train[name].x[index])
            for sample, times in together.items():
                steps[sample].append(times)
        return own

    running.engine.draw_batches = watched
    for _ in range(3):
        running.advance()
    used = running.count_uses()
    spent = []
    for times in steps.values():
        accountant = accountants.RDPAccountant()
        for together in times:  # a step moves by as many clips as it holds copies
            accountant.step(noise_multiplier=2.0 / together, sample_rate=1.0)
        spent.append(accountant.get_epsilon(1e-5, alphas=ORDERS))
    rows = Counter(x.numpy().tobytes() for client in data.clients for x in client.train.x)
    assert used.copies == max(rows.values()) == {"repeated": 5, "given twice": 3, "shared": 3, "none": 1}[kind]
    assert compute_epsilon(2.0, 1.0, used.squares, 1e-5) == pytest.approx(max(spent), rel=1e-12)


def test_ten_copies_in_ten_batches_spend_ten_passes_and_fewer_passes_less():
    pytest.importorskip("opacus")
    from fedshift.analysis.privacy import SampleUses, bound_squares, compute_epsilon, describe_sample_guarantee

    rule = dp_sgd(secret=True).rules[0]
    assert compute_epsilon(1.0, 1.0, 1, 1e-5) < 4.73
    assert 19.05 < compute_epsilon(1.0, 1.0, 10, 1e-5) < 19.06
    assert describe_sample_guarantee(rule, SampleUses(passes={"a": 1, "b": 1}, copies=10, squares=10)) == (
        "(epsilon = 19.1, delta = 1e-05)-differentially private at the level of samples after 1 pass over each "
        "client's data, in which a sample occurs up to 10 times (RDP accountant of Opacus)"
    )
    rule = dp_sgd(noise_multiplier=2.0, secret=True).rules[0]
    said = describe_sample_guarantee(rule, SampleUses(passes={"a": 2, "b": 1, "c": 2}))
    assert said.startswith("(epsilon = 3.19, delta = 1e-05)-differentially private")
    assert said.endswith("; epsilon = 2.17 after 1 of b")
    assert [bound_squares(10, size) for size in (1, 3, 10, 50, None)] == [10, 3 * 9 + 1, 100, 100, 100]


def test_what_lets_one_sample_change_others_is_refused(make):
    for settings in ({"normalize": "client"}, {"augment": f"{__name__}:mixing"}):
        said = "changes the scale of all its others" if "normalize" in settings else "mixes the images of a batch"
        with pytest.raises(UsageError, match=f"dp_sgd.gn': .*{said}.* noise on single samples does not hide: "):
            make(methods="dp_sgd+gn", **settings).check_compatible(Path("nowhere"))
        make(methods="gn, dp_sgd(noise_multiplier=0.0)+gn", **settings).check_compatible(Path("nowhere"))


def mix(x, rng):
    return x + 0.1 * (x.flip(0) - x)


def mixing():
    return mix


@pytest.mark.parametrize("name", [n for n in AUGMENTATIONS.entries if n not in ("none", "sequence", "sometimes")])
def test_no_augmentation_of_the_catalog_mixes_images(name):
    x = torch.rand(4, 3, 32, 32)
    assert not mixes_images(AUGMENTATIONS.parse(f"{name}()"), x)
    assert mixes_images(mix, x)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("private", ["dp(secret=True)", "dp_sgd(secret=True)", "dp(noise_multiplier=0.0)"])
@pytest.mark.parametrize("base", ["fedbn", "silobn", "fedper", "ditto", "fedavg", "gn+fedper", "gn"])
def test_policies_for_unseen_clients_take_only_what_noise_covers(private, base):
    """Each policy with poisoned clients: what it gives under ``dp`` must not depend on what clients keep."""
    try:
        plan = plan_of(CATALOG.parse_all(f"{private}+{base}")[0])
    except UsageError:
        assert base not in ("gn", "fedavg") or private.startswith("dp_sgd")
        return
    server, x, y = init_server(plan), *batch(8)
    new, applied, refused = Samples(x=x, y=y), {}, []

    def poison(client, shift):
        memory = tuple({k: v + shift * v.is_floating_point() for k, v in each.items()} for each in client.memory)
        return replace(client, personal={k: v + shift for k, v in client.personal.items()}, memory=memory)

    for policy in list_policies():
        made = POLICIES.parse(policy)
        covered = made.excuse(plan, CLASSIFICATION)
        if covered:
            refused.append((policy, covered))
            continue
        states = []
        for shift in (0, 1):
            clients = {n: poison(init_client(plan), shift) for n in "ab"}
            context = PolicyContext(
                plan=plan, server=server, clients=clients, samples={"a": 3, "b": 4}, task=CLASSIFICATION, classes=3,
                client="new",
            )  # fmt: skip
            states.append(make_state(context, policy, new))
        applied[policy] = is_equal(*states)
    if private == "dp(secret=True)":
        assert all(applied.values()), applied
    if base == "fedbn" and private == "dp(secret=True)":
        assert set(applied) == {"finetune_bn"}
        assert all("have no noise of differential privacy" in why for policy, why in refused)
        with pytest.raises(UsageError, match=r"unseen='average': .* under dp.*: use 'finetune_bn'$"):
            check_policy(plan, "average", {}, CLASSIFICATION)
    if base == "fedbn" and private.startswith("dp(noise"):
        assert not applied["average"]


def test_what_epsilon_does_not_cover_is_said(make, tmp_path, Listener):
    pytest.importorskip("opacus")
    heard = Listener()
    made = make(methods="dp(secret=True)+fedbn", rounds=1, epochs=1, validation=0.2, select="best")
    made.run(tmp_path / "run", callback=heard)
    assert next(notice for notice in heard.notices if "private" in notice).endswith(
        "; it does not cover measured losses and metrics, what clients keep and the models that they use or the choice "
        "of the round on validation data"
    )
    x, y = np.random.default_rng(0).normal(size=(2, 12, 3))
    numbers = federation({"a": (x, y[:, 0], x, y[:, 0])}, task="regression")
    numbers = encode_targets(numbers)
    table = FeatureScaling(fill=np.zeros(2), mean=np.zeros(2), std=np.ones(2))
    numbers = numbers.map_splits(lambda split: split.replace(normalization=table))
    weights = as_initial_weights({"w": torch.zeros(1)})
    settings = Settings(weights=weights).for_task(numbers.task)
    plan = prepare(dp_sgd(METHODS["fedbabu"]()), nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), optimizer=SGD(lr=0.1))
    assert list_uncovered(plan, settings, numbers) == (
        "measured losses and metrics", "models that clients fine-tune for use",
        "the scaling of each table by its own training rows", "the scaling of targets by statistics of all clients",
        "the initial weights, which count as public",
    )  # fmt: skip
