"""Limits of a site's policy on what it reviewed, and what it shows before it agrees, before and in each round."""

import importlib.util
import re
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from rich.text import Text
from torch import nn

from fedshift.analysis.privacy import ORDERS, compute_epsilon, describe_delta
from fedshift.cli.inspection import describe_method
from fedshift.config.spec import CompareSpec
from fedshift.core.kernel import client_final, init_client, init_server, load_state
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.core.work import Work, iterate_batches
from fedshift.evaluation.communication import summarize_method
from fedshift.experiments.factory import resolve_model
from fedshift.flower.messages import Exchange, RefusedMessage, to_record
from fedshift.flower.site.gate import _describe_upload
from fedshift.flower.site.policy import SitePolicy
from fedshift.flower.site.record import Record
from fedshift.flower.site.review import TrialReview, compute_spent, count_uses, passes_of_round
from fedshift.methods import METHODS
from fedshift.methods.dp_sgd import dp_sgd
from fedshift.models import make_network
from fedshift.report.page import _leaving_table
from fedshift.results.disclosure import group_disclosures
from fedshift.utils.errors import FedshiftError
from fedshift.utils.state import join_states
from tests.flower.sites import ALL, OTHERS, PHOTO, serve, sites_of, spec_for

pytestmark = pytest.mark.usefixtures("machine")
NEEDS_OPACUS = pytest.mark.skipif(importlib.util.find_spec("opacus") is None, reason="epsilon needs Opacus")
STYLES = "tests.methods.others:styles"
"""A method whose clients send their images' mean and deviation."""
STYLED = f"{STYLES}+fedbn"


def serve_photo(method, folder, **named):
    """Run two rounds of ``method`` in which the site photo has ``named``; return what was told, and its refusals."""
    spec = spec_for(method, evaluate_every=2)
    sites = sites_of(spec, folder)
    for name, value in named.items():
        setattr(sites[PHOTO], name, value)
    heard = serve(spec, folder, sites, clients=2)
    left = r"(.*: photo does not take part|round .*photo is left)"
    return heard, [text for text in heard.notices if re.match(left, text)]


def read(tmp_path, text):
    """The policy with these limits, of a site whose uploads may be of one step on few samples."""
    (tmp_path / "policy.toml").write_text(f"[limits]\nleast_samples = 1\nleast_steps = 1\n{text}")
    return SitePolicy.read(tmp_path / "policy.toml")


@pytest.fixture
def record(tmp_path):
    return Record(tmp_path / "record.db", "data", "fingerprint")


def review_of(method, **changes):
    shape = (1, 8, 8)
    (method,), network = METHODS.parse_all(method), make_network(resolve_model("small-cnn", shape), shape, 3)
    plan = prepare(method, network, optimizer=SGD(lr=0.1))
    given = {"plan": plan, "model": "small-cnn", "rounds": 2, "sites": 3, "samples": 24, "trial": "e/t"}
    return TrialReview(**given | changes)


LIMITS = {
    'methods = ["silobn"]': ("fedbn", """methods = ["silobn"], and method 'fedbn' is not among them"""),
    'models = ["unet*"]': ("fedbn", """models = ["unet*"], and model 'small-cnn' is not among them"""),
    'keep = ["*head*", "fc*", "*.weight"]': ("fedbn", "would leave: use a method that keeps it"),
    'keep = ["*prototypes"]': ("fedproto", "entry 'prototypes/prototypes' would leave"),
    'reveals = "update"': ("fedavg", "running_mean' of the model reveals statistics of the client's data: use another"),
    'reveals = "client"': ("fpl", "'clusterprototypes/prototypes' of fpl reveals statistics of single classes of"),
    'reveals = "class"': ("feddg_elcfs", "'sentamplitudes/amplitudes' of feddg_elcfs reveals single samples of the"),
    "passed_on = false": ("feddg_elcfs", "is received by the server; other clients also as one client sent it"),
    "rounds = 1": ("fedbn", "rounds = 1, and 2 rounds are asked for"),
    "sites = 4": ("fedbn", "sites = 4, and 3 sites take part"),
    "epsilon = 8.0": ("fedbn", "epsilon = 8.0, and the method has no secret noise: add dp(secret=True"),
    "sample_epsilon = 8.0": ("fedbn", "sample_epsilon = 8.0, and the method has no secret noise: add dp_sgd(secret=Tr"),
    'reveals = "update"\nkeep = ["*running*"]': (STYLED, "'styles/style' of styles reveals statistics of the client's"),
    'passed_on = false\nkeep = ["*running*"]': (STYLED, "'styles/style' of styles is received by the server; other cl"),
    'keep = ["styles/*"]': (STYLED, "entry 'styles/style' would leave"),
}
WITHIN = (
    'methods = ["fedbn", "fed*"]\nmodels = ["small-*"]\nkeep = ["*running*", "bn*"]\nrounds = 2\nsites = 3\n'
    'reveals = "client"\npassed_on = false'
)


@pytest.mark.parametrize("text", LIMITS)
def test_what_goes_beyond_a_policy_is_refused_by_name_and_value(text, tmp_path, record):
    name, why = LIMITS[text]
    with pytest.raises(RefusedMessage, match=re.escape(why)):
        read(tmp_path, text).limits.check(review_of(name), record)
    read(tmp_path, WITHIN).limits.check(review_of("fedbn+fedprox(mu=1e+2)"), record)


def test_a_method_that_is_impossible_ends_a_comparison_before_its_first_upload(tmp_path):
    """A pass of FedMMB over 24 samples ends with a group of 4, which by itself only the second round would tell."""
    settings = {key: value for key, value in vars(spec_for(batch_size=5)).items() if key != "method"}
    spec = CompareSpec(**settings | {"methods": "fedavg,fedmmb(batches=4)"})
    with pytest.raises(FedshiftError, match=re.escape("fedmmb(batches=4): too few sites agree")) as caught:
        serve(spec, tmp_path, sites_of(spec, tmp_path, policy=SitePolicy()))
    few = "this site's policy has least_samples = 16, and an upload would use 4 different samples"
    assert all(f"{name}: {few}" in str(caught.value) for name in ALL)
    assert Counter(entry.event for entry in Record(tmp_path / "record.db").read()) == {"describe": 3, "refused": 3}


@NEEDS_OPACUS
@pytest.mark.parametrize(
    ("text", "method", "fits"),
    [
        ("epsilon = 1000000.0", "dp(noise_multiplier=1.0, secret=True)", True),
        ("epsilon = 0.5", "dp(noise_multiplier=1.0, secret=True)", False),
        ("sample_epsilon = 4.8", "dp_sgd(noise_multiplier=1.4, secret=True)+gn", True),  # two rounds spend 4.79
        ("sample_epsilon = 4.7", "dp_sgd(noise_multiplier=1.4, secret=True)+gn", False),
    ],
)
def test_epsilon_is_that_of_all_rounds_and_of_every_pass_over_the_samples(text, method, fits, tmp_path, record):
    review, limits = review_of(method), read(tmp_path, text).limits
    refused = pytest.raises(RefusedMessage, match=f"has {text}, and 2 rounds spend ")
    with nullcontext() if fits else refused:
        limits.check(review, record)


@NEEDS_OPACUS
def test_a_round_that_is_asked_for_again_spends_epsilon_again(tmp_path, record):
    method, limits = dp_sgd(noise_multiplier=1.4, secret=True), read(tmp_path, "sample_epsilon = 5.0").limits
    plan = prepare(method, nn.Linear(2, 2), optimizer=SGD(lr=0.1))
    with pytest.raises(RefusedMessage, match=r"sample_epsilon = 5\.0, and one more round spend"):
        limits.check_upload(plan, 3, record)
    for number in range(2):
        limits.check_upload(plan, 1, record)
        spent = compute_spent(plan, passes_of_round(plan, 8, 0, 0))
        record.append("train", {}, trial="another/one", question=str(number), uploads=1, spent=spent)
    with pytest.raises(RefusedMessage, match=r"and one more round and .*spend"):
        limits.check_upload(plan, 1, record)


@pytest.mark.parametrize("work", [{"epochs": 2}, {"batches": 3}, {"steps": 3}, {"steps": 7}, {"steps": 11}])
def test_no_sample_is_used_more_often_than_is_counted_whatever_the_local_work(work):
    """Uses of each sample, counted over rounds of which some are taken again with new noise."""
    samples, work = 18, Work(batch_size=4, **work)
    plan = prepare(dp_sgd(secret=True), nn.Linear(2, 2), optimizer=SGD(lr=0.1), work=work)
    bounds, uses = work.batch_bounds(samples), Counter()
    done = reached = counted = repeated = 0
    for number in range(12):
        counted += passes_of_round(plan, samples, done, reached)
        steps = work.steps_of_round(done, len(bounds))
        for _, index in iterate_batches(0, "c", samples, bounds, steps):
            uses.update(index.tolist())
        reached = max(reached, steps.stop)
        repeated += number % 4 == 2
        done = done if number % 4 == 2 else steps.stop
        assert max(uses.values()) <= counted
    again = repeated * (len(steps) // len(bounds) + 2)
    assert counted <= work.passes(12 - repeated, len(bounds)) + again
    review = TrialReview(plan=plan, model="", rounds=12, sites=2, samples=samples)
    assert f"after {work.passes(12, len(bounds))} passes over its data" in review.privacy


@NEEDS_OPACUS
def test_what_different_noise_and_copies_of_a_sample_spend_adds_up_as_the_accountant_has_it():
    from opacus.accountants import RDPAccountant

    accountant, whole = RDPAccountant(), 0.0
    for noise, epochs, together in ((1.4, 2, (1,)), (0.8, 1, (1,)), (4.0, 3, (2, 2, 1))):  # five copies in batches of 2
        method, work = dp_sgd(noise_multiplier=noise, secret=True), Work(batch_size=2, epochs=epochs)
        plan = prepare(method, nn.Linear(2, 2), optimizer=SGD(lr=0.1), work=work)
        whole += compute_spent(plan, count_uses(plan, passes_of_round(plan, 10, 0, 0), sum(together)))
        for copies in together * epochs:
            accountant.step(noise_multiplier=noise / copies, sample_rate=1.0)
    found = compute_epsilon(whole**-0.5, 1.0, 1, 1e-5)
    assert found == pytest.approx(accountant.get_epsilon(1e-5, alphas=ORDERS), rel=1e-12)


@pytest.mark.slow
@NEEDS_OPACUS
def test_a_site_that_is_started_again_goes_on_counting_what_it_sent(tmp_path):
    method = "dp_sgd(noise_multiplier=1.4, secret=True)+gn"
    policy = read(tmp_path, "sample_epsilon = 4.8")  # two rounds of one epoch spend 4.79
    assert serve_photo(method, tmp_path, policy=policy)[0].took_part == [ALL] * 2
    (tmp_path / "served").rename(tmp_path / "before")
    heard, refusals = serve_photo(method, tmp_path, policy=policy)  # another experiment, with sites that begin anew
    assert heard.took_part == [OTHERS] * 2
    assert all(re.search("2 rounds and .* spend", text) for text in refusals)


def test_a_delta_that_is_too_large_for_the_samples_is_said():
    rule = dp_sgd(delta=1e-2, secret=True).rules[0]
    assert describe_delta(rule, {"ann": 99}) == []
    (said,) = describe_delta(rule, {"ann": 99, "bob": 100, "cid": 250})
    assert said.startswith("delta = 0.01 is not below one in the number of samples of bob, cid (250 at most)")
    assert said.endswith("give delta below 0.004")


def test_whoever_runs_the_site_is_asked_once_and_shown_what_leaves(tmp_path):
    shown = []
    ask = lambda text, question: shown.append(text) or "Tell" in question  # noqa: E731
    heard, refusals = serve_photo("fedbn", tmp_path, confirm=ask)
    assert heard.took_part == [OTHERS] * 2
    starts = ["fedbn: photo does not take part: ", "round 1: photo is left out: ", "round 2: photo is left out: "]
    assert refusals == [f"{start}whoever runs this site does not agree to the experiment" for start in starts]
    described, trial = shown
    assert "samples: 24 train, 140 test" in described
    for text in ("method: fedbn, seed 0; model: small-cnn", "weight of this site: its", "no differential privacy"):
        assert text in trial
    leaves, stays = (next(line for line in trial.splitlines() if line.startswith(key)) for key in ("leaves", "stays"))
    assert "running_mean" not in leaves
    assert "running_mean" in stays


SENDING = ["fedavg", "fedbn", "scaffold", "fedheal", "fedproto", "fpl", "hbn", "harmofl", "feddg_elcfs"]


@pytest.mark.parametrize("name", SENDING)
def test_consent_inspect_record_and_page_name_the_same_with_its_true_bytes(name):
    review = review_of(name)
    plan, groups = review.plan, list(map(str, group_disclosures(review.leaving)))
    update = client_final(plan, load_state(plan, init_client(plan), init_server(plan)))[1]
    upload = {**update.shared, **join_states(plan.rule_names, update.memory)}
    assert {each.name: each.bytes for each in review.leaving} == {n: x.nbytes for n, x in upload.items()}
    lines = review.describe().splitlines()
    leaves = [line.removeprefix("leaves each round: ") for line in lines if line.startswith("leaves each round: ")]
    assert [line.rsplit(": ", 1)[0] for line in leaves] == groups
    assert sorted(", ".join(line.rsplit(": ", 1)[1] for line in leaves).split(", ")) == sorted(upload)
    facts = summarize_method(plan)
    assert facts.up == sum(x.nbytes for x in upload.values())
    shown = show_method(name)
    assert all(group in shown for group in groups)
    assert f"{facts.up:,} bytes up" in shown
    answer = Exchange(kind="trained", facts={}, arrays={"all": to_record(upload)})
    written = _describe_upload(answer, SimpleNamespace(plan=plan))
    assert written["discloses"] == groups
    assert (written["left"]["all"]["bytes"], written["left"]["all"]["names"]) == (facts.up, sorted(upload))
    cells = [tuple(cell.text for cell in row) for row in _leaving_table(facts).rows]
    found = group_disclosures(review.leaving)
    assert [row[1:] for row in cells] == [(g.source, f"{g.bytes:,}", g.reveals, g.receivers) for g in found]


def show_method(name):
    texts = describe_method("small-cnn", name, (1, 8, 8), 3)
    return "\n".join(text.plain for text in texts if isinstance(text, Text))
