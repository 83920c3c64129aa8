"""What a site refuses by its policy, and what it shows before it agrees."""

import importlib.util
import re
from collections import Counter

import pytest
from rich.text import Text
from torch import nn

from fedshift.analysis.privacy import ORDERS, compute_epsilon, describe_delta
from fedshift.cli.deployment import _ask
from fedshift.cli.inspection import describe_method
from fedshift.config.expressions import list_catalog
from fedshift.core.kernel import client_final, init_client, init_server, load_state
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.core.work import Work, iterate_batches
from fedshift.evaluation.communication import summarize_method
from fedshift.experiments.factory import resolve_model
from fedshift.flower.site.account import Book, TrialUse
from fedshift.flower.site.gate import Confirmation
from fedshift.flower.site.ledger import Ledger, count_bytes_left, read_ledger
from fedshift.flower.site.policy import SitePolicy
from fedshift.flower.site.review import TrialReview, compute_spent, count_uses, passes_of_round
from fedshift.flower.site.site import Site
from fedshift.flower.transport.arrays import RefusedMessage, to_record
from fedshift.flower.transport.exchange import Exchange
from fedshift.methods.dp_sgd import dp_sgd
from fedshift.models import make_network
from fedshift.report.page import _leaving_table
from fedshift.results.disclosure import group_disclosures
from fedshift.utils.errors import UsageError
from fedshift.utils.state import join_states
from tests.flower.sites import Heard, SiteGrid, coordinator, sites_of, spec_for

ALL, OTHERS = ("pen", "photo", "print"), ("pen", "print")


@pytest.fixture
def served(tmp_path, machine):
    """Run two rounds of ``method`` in which the site photo has ``named``; return who took part, and what was said."""

    def run(method="fedbn", **named):
        spec = spec_for(method, rounds=2, evaluate_every=2)
        sites, heard = sites_of(spec, tmp_path), Heard()
        for name, value in named.items():
            setattr(sites[2], name, value)
        assert coordinator(spec, SiteGrid(sites), tmp_path / "served", heard, clients=2).run()
        refusals = [text for text in heard.notices if "photo is left out" in text]
        return [done.participants for done in heard.rounds], refusals

    return run


def read(tmp_path, text):
    """The policy with these limits, of a site whose uploads may be of one step on few samples."""
    (tmp_path / "policy.toml").write_text(f"[limits]\nleast_samples = 1\nleast_steps = 1\n{text}")
    return SitePolicy.read(tmp_path / "policy.toml")


def spent_before(spent):
    """The book of data on whose samples another experiment spent ``spent``."""
    return Book(trials={"another/one": TrialUse(spent=spent)})


LIMITS = {
    "methods": ('methods = ["silobn", "fedprox"]', "does not allow method 'fedbn' (methods)"),
    "models": ('models = ["unet*"]', "does not allow model 'small-cnn' (models)"),
    "keep": ('keep = ["*head*", "fc*", "*.weight"]', "does not leave (keep): use a method that keeps it"),
    "rounds": ("rounds = 1", "allows 1 rounds, not 2 (rounds)"),
    "sites": ("sites = 4", "asks for 4 sites, and there are 3 (sites)"),
    "epsilon": ("epsilon = 8.0", "asks for differential privacy with epsilon 8 or less (epsilon): add dp(secret=True"),
    "sample_epsilon": ("sample_epsilon = 8.0", "epsilon 8 or less (sample_epsilon): add dp_sgd(secret=True"),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("limit", LIMITS)
def test_what_goes_beyond_a_policy_is_refused_by_name(limit, served, tmp_path):
    text, why = LIMITS[limit]
    took_part, refusals = served(policy=read(tmp_path, text))
    assert took_part == [OTHERS] * 2
    assert len(refusals) == 2
    assert all(why in told for told in refusals)


def test_within_its_policy_a_site_takes_part(served, tmp_path):
    policy = 'methods = ["fedbn", "fed*"]\nmodels = ["small-*"]\nkeep = ["*running*", "bn*"]\nrounds = 2\nsites = 3'
    assert served("fedbn+fedprox(mu=1e+2)", policy=read(tmp_path, policy)) == ([ALL] * 2, [])


@pytest.mark.sampled(1)
@pytest.mark.skipif(importlib.util.find_spec("opacus") is None, reason="epsilon needs Opacus")
@pytest.mark.parametrize(("most", "allowed"), [(1e6, True), (0.5, False)])
def test_epsilon_is_that_of_all_rounds(most, allowed, served, tmp_path):
    policy = read(tmp_path, f"epsilon = {most:.1f}")
    took_part, refusals = served("fedavg+dp(noise_multiplier=1.0, secret=True)", policy=policy)
    assert took_part == [ALL if allowed else OTHERS] * 2
    assert all("allows epsilon 0.5, and 2 rounds spend " in told for told in refusals)


@pytest.mark.sampled(1)
@pytest.mark.skipif(importlib.util.find_spec("opacus") is None, reason="epsilon needs Opacus")
@pytest.mark.parametrize(("most", "took_part"), [(4.7, [OTHERS] * 2), (4.8, [ALL] * 2)])
def test_epsilon_of_samples_is_that_of_every_pass_over_them(most, took_part, served, tmp_path):
    policy = read(tmp_path, f"sample_epsilon = {most:.1f}")  # two rounds of one epoch spend 4.79
    assert served("dp_sgd(noise_multiplier=1.4, secret=True)+gn", policy=policy)[0] == took_part


@pytest.mark.skipif(importlib.util.find_spec("opacus") is None, reason="epsilon needs Opacus")
def test_a_round_that_is_asked_for_again_spends_epsilon_again(tmp_path):
    method, policy = dp_sgd(noise_multiplier=1.4, secret=True), read(tmp_path, "sample_epsilon = 5.0")
    plan = prepare(method, nn.Linear(2, 2), optimizer=SGD(lr=0.1))
    spent = compute_spent(plan, passes_of_round(plan, 8, 0, 0))
    policy.limits.check_upload(plan, 1, spent_before(spent))
    with pytest.raises(RefusedMessage, match="allows epsilon 5, and one more round and what this site sent before"):
        policy.limits.check_upload(plan, 1, spent_before(2 * spent))
    with pytest.raises(RefusedMessage, match="allows epsilon 5, and one more round spend"):
        policy.limits.check_upload(plan, 3, Book())


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
    review = TrialReview(plan=plan, model="", seed=0, rounds=12, sites=2, samples=samples)
    assert f"after {work.passes(12, len(bounds))} passes over its data" in review.privacy


@pytest.mark.skipif(importlib.util.find_spec("opacus") is None, reason="epsilon needs Opacus")
def test_what_different_noise_spends_adds_up_as_the_accountant_has_it():
    from opacus.accountants import RDPAccountant

    accountant, whole = RDPAccountant(), 0.0
    for noise, epochs in ((1.4, 2), (0.8, 1), (3.0, 5)):
        method, work = dp_sgd(noise_multiplier=noise, secret=True), Work(epochs=epochs)
        plan = prepare(method, nn.Linear(2, 2), optimizer=SGD(lr=0.1), work=work)
        whole += compute_spent(plan, passes_of_round(plan, 40, 0, 0))
        for _ in range(epochs):
            accountant.step(noise_multiplier=noise, sample_rate=1.0)
    found = compute_epsilon(whole**-0.5, 1.0, 1, 1e-5)
    assert found == pytest.approx(accountant.get_epsilon(1e-5, alphas=ORDERS), rel=1e-12)


@pytest.mark.skipif(importlib.util.find_spec("opacus") is None, reason="epsilon needs Opacus")
def test_a_site_that_is_started_again_goes_on_counting_what_it_sent(served, tmp_path):
    method = "dp_sgd(noise_multiplier=1.4, secret=True)+gn"
    policy = read(tmp_path, "sample_epsilon = 4.8")  # two rounds of one epoch spend 4.79
    assert served(method, policy=policy)[0] == [ALL] * 2
    (tmp_path / "served").rename(tmp_path / "before")
    took_part, refusals = served(method, policy=policy)  # another experiment, with sites that begin anew
    assert took_part == [OTHERS] * 2
    assert all("2 rounds and what this site sent before spend" in told for told in refusals)
    (tmp_path / "account.json").write_text("{}")
    site = Site("digits", "photo", tmp_path / "photo", policy=policy)
    assert "account.json is damaged" in site.answer(Exchange(kind="describe")).facts["why"]


@pytest.mark.skipif(importlib.util.find_spec("opacus") is None, reason="epsilon needs Opacus")
def test_copies_of_a_sample_at_the_site_spend_as_if_they_were_in_one_batch(tmp_path):
    from opacus.accountants import RDPAccountant

    plan = prepare(dp_sgd(noise_multiplier=4.0, secret=True), nn.Linear(2, 2), optimizer=SGD(lr=0.1),
                   work=Work(batch_size=2, epochs=3))  # fmt: skip
    accountant = RDPAccountant()
    for together in (2, 2, 1) * 3:  # five copies
        accountant.step(noise_multiplier=4.0 / together, sample_rate=1.0)
    worst = accountant.get_epsilon(1e-5, alphas=ORDERS)
    uses = count_uses(plan, passes_of_round(plan, 10, 0, 0), 5)
    assert compute_epsilon(compute_spent(plan, uses) ** -0.5, 1.0, 1, 1e-5) == pytest.approx(worst, rel=1e-12)
    read(tmp_path, f"sample_epsilon = {worst * 1.001}").limits.check_upload(plan, uses, Book())
    with pytest.raises(RefusedMessage, match="allows epsilon"):
        read(tmp_path, f"sample_epsilon = {worst * 0.999}").limits.check_upload(plan, uses, Book())


def test_a_delta_that_is_too_large_for_the_samples_is_said():
    rule = dp_sgd(delta=1e-2, secret=True).gradient
    assert describe_delta(rule, {"ann": 99}) == []
    (said,) = describe_delta(rule, {"ann": 99, "bob": 100, "cid": 250})
    assert said.startswith("delta = 0.01 is not below one in the number of samples of bob, cid (250 at most)")
    assert said.endswith("give delta below 0.004")


@pytest.mark.parametrize(("agreed", "who"), [(True, ALL), (False, OTHERS)])
def test_whoever_runs_the_site_is_asked_once_and_shown_what_leaves(agreed, who, served):
    shown = []

    def ask(text, question):
        shown.append(text)
        return agreed or "Tell" in question

    took_part, refusals = served(confirmation=Confirmation(ask))
    assert took_part == [who] * 2
    assert len(shown) == 2
    assert "samples: 24 train, 140 test" in shown[0]
    assert "method: fedbn, seed 0; model: small-cnn" in shown[1]
    assert "weight of this site: its training samples" in shown[1]
    leaves, stays = (
        next(line for line in shown[1].splitlines() if line.startswith(key)) for key in ("leaves", "stays")
    )
    assert "running_mean" not in leaves
    assert "running_mean" in stays
    assert "no differential privacy" in shown[1]
    assert all("does not agree" in told for told in refusals)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("rounds = 0", "limits.rounds: Input should be greater than or equal to 1"),
        ("round = 3", "limits.round: Extra inputs are not permitted. It may set methods, models, keep"),
        ("rounds", "is not a TOML file"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_by_name(text, why, tmp_path):
    with pytest.raises(UsageError, match=why):
        read(tmp_path, text)


def test_without_a_terminal_nobody_can_be_asked(cli, tmp_path, monkeypatch):
    done = cli("join", "localhost:1", "--data", tmp_path, "--insecure", "--confirm")
    assert done.code == 2
    assert "--confirm asks at a terminal" in done.err


def test_the_question_says_what_may_be_answered(monkeypatch, capsys):
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    assert _ask("method: fedbn", "Take part in it?")
    assert "Take part in it? [y/N]" in capsys.readouterr().out


def review_of(name, **options):
    shape, method = (1, 8, 8), list_catalog("methods")[name](**options)
    plan = prepare(method, make_network(resolve_model("small-cnn", shape), shape, 3), optimizer=SGD(lr=0.1))
    return TrialReview(plan=plan, model="small-cnn", seed=0, rounds=2, sites=3)


BEYOND = {
    'keep = ["*prototypes"]': ("fedproto", "entry 'prototypes/prototypes' does not leave (keep)"),
    'reveals = "update"': ("fedavg", "running_mean' of the model reveals statistics of the client's data: use another"),
    'reveals = "client"': ("fpl", "'clusterprototypes/prototypes' of fpl reveals statistics of single classes of"),
    'reveals = "class"': ("feddg_elcfs", "'sentamplitudes/amplitudes' of feddg_elcfs reveals single samples of the"),
    "passed_on = false": ("feddg_elcfs", "is received by the server; other clients also as one client sent it"),
}


@pytest.mark.parametrize("text", BEYOND)
def test_policies_limit_what_rules_send_beside_entries(text, tmp_path):
    name, why = BEYOND[text]
    with pytest.raises(RefusedMessage, match=re.escape(why)):
        read(tmp_path, text).limits.check(review_of(name), Book())
    read(tmp_path, text).limits.check(review_of("fedbn"), Book())


def test_the_most_that_may_be_revealed_is_one_of_four(tmp_path):
    with pytest.raises(UsageError, match="reveals: Input should be 'update', 'client', 'class' or 'image'"):
        read(tmp_path, 'reveals = "all"')


SENDING = ["fedavg", "fedbn", "fedap", "scaffold", "fedheal", "feddg_ga", "fedproto", "fpl", "hbn", "harmofl"]


@pytest.mark.parametrize("name", [*SENDING, "feddg_elcfs"])
def test_consent_inspect_ledger_and_page_name_the_same_with_its_true_bytes(name, tmp_path):
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
    shown = "\n".join(text.plain for text in describe_method("small-cnn", name, (1, 8, 8), 3) if isinstance(text, Text))
    assert all(group in shown for group in groups)
    assert f"{facts.up:,} bytes up" in shown
    answer = Exchange(kind="trained", facts={}, arrays={"all": to_record(upload)})
    Ledger(tmp_path).write(Exchange(kind="train", facts={}), answer, review.leaving)
    (entry,) = read_ledger(tmp_path)
    assert entry.content["discloses"] == groups
    assert (count_bytes_left(entry), entry.content["left"]["all"]["names"]) == (facts.up, sorted(upload))
    cells = [tuple(cell.text for cell in row) for row in _leaving_table(facts).rows]
    found = group_disclosures(review.leaving)
    assert [row[1:] for row in cells] == [(g.source, f"{g.bytes:,}", g.reveals, g.receivers) for g in found]
