"""The exchange before round 1: who takes part, what is sent and kept, what it costs, and what it survives."""

from dataclasses import dataclass

import pytest
import torch

from fedshift import Declared, Folded, Rule, Send
from fedshift.core.method import Method
from fedshift.evaluation.communication import list_disclosures, summarize_method
from fedshift.experiments.experiment import Experiment
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.dp import dp
from fedshift.methods.dp_sgd import dp_sgd
from fedshift.methods.fedbn import fedbn
from fedshift.methods.gn import gn
from fedshift.methods.hbn import hbn
from fedshift.methods.median import median
from fedshift.results.checkpoint import load_checkpoint
from fedshift.results.trial_records import CHECKPOINT, read_rounds
from fedshift.utils.errors import UsageError
from fedshift.utils.state import is_equal
from tests.laws.course import make_trial
from tests.methods import plain
from tests.methods.others import styles


@dataclass(frozen=True)
class Counts(Rule):
    """Sends the number of samples before round 1; ``fault``: what else it does, wrongly."""

    fault: str = ""

    def bind(self, plan):
        zero = torch.zeros((), dtype=torch.int64)
        sends = Send.like({"n": zero}, "client")
        return Declared(self, memory={"own": zero}, server={"sum": zero}, targets=True, prelude=sends)

    def start(self, client):
        return client.memory | {"n": torch.tensor(len(client.targets))}

    def end(self, client):
        own = client.memory["own"]
        kept = {"own": own + 1 if self.fault == "keeps" else own}
        sent = {} if not client.prelude or self.fault == "silent" else {"n": client.memory["n"]}
        return kept, sent | ({"n": client.memory["n"]} if self.fault == "again" else {})

    def fold(self, server):
        if not server.prelude:
            return Folded(server.memory)
        made = {"head": torch.zeros(())} if self.fault == "sets" else {}
        return Folded({"sum": sum(sent["n"] for sent in server.uploads)}, made)


class Tells(Rule):
    """Sends a number that is no measurement."""

    def bind(self, plan):
        return Declared(self, prelude=Send.like({"n": torch.zeros(())}, "client"))

    def end(self, client):
        return {}, {"n": torch.zeros(())} if client.prelude else {}


class Watches(Rule):
    """A rule without such an exchange, whose hooks run in rounds alone."""

    def start(self, client):
        assert not client.prelude
        return client.memory

    def end(self, client):
        assert not client.prelude
        return client.memory, {}

    def fold(self, server):
        assert not server.prelude
        return Folded(server.memory)


def experiment(method=None):
    return Experiment(
        methods=[method or styles(fedbn())], data=plain.data(), model=plain.network, seeds=(1,),
        settings=Settings(rounds=2, optimizer=plain.trial(Method()).settings.optimizer, engine="sequential"),
    )  # fmt: skip


def test_the_server_holds_what_every_client_measured_and_no_round_is_done():
    running = plain.trial(styles(fedbn()), participation=1)
    start = running.server
    assert running.introduce()
    stored = {client.name: client.train.x for client in running.data.clients}
    expected = torch.stack([torch.stack([stored[name].mean(), stored[name].std()]) for name in ("a", "b")])
    (memory,) = running.server.memory
    torch.testing.assert_close(memory["bank"], expected, rtol=0, atol=1e-12)
    assert running.server.round == 0
    assert is_equal(running.server.shared, start.shared)
    assert running.clients.seen == ()
    assert not running.introduce()
    running.advance()
    assert is_equal(running.server.memory[0], memory)


def test_samples_are_those_of_a_first_pass_even_where_a_round_has_one_batch():
    running = plain.trial(styles(Method(work={"batches": 1})))
    running.introduce()
    x = plain.data().client("a").train.x
    assert running.server.memory[0]["bank"][0, 0] == pytest.approx(float(x.mean()), abs=1e-12)


def test_other_rules_have_no_part_in_it():
    running = plain.trial(Method().with_rule(Watches()).with_rule(Counts()))
    running.advance()
    assert int(running.server.memory[1]["sum"]) == sum(plain.SIZES.values())


def test_methods_without_it_hold_none():
    running = plain.trial(hbn())
    assert not running.introduce()
    assert running.to_tensors()[1]["prelude"] == {}


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("keeps", r"end\(\): returns memory before round 1 that differs from Declared.memory"),
        ("silent", "declares 'n' but does not upload it: the prelude of its bind"),
        ("again", "uploads 'n' .* without declaring it: the sends of its bind"),
        ("sets", "computes 'head' .* without declaring it: before round 1 nothing, and Declared.sets must"),
    ],
)
def test_a_rule_that_does_other_than_it_declares_is_refused(fault, why):
    with pytest.raises(UsageError, match=why):
        plain.trial(Method().with_rule(Counts(fault)))


@pytest.mark.parametrize("guard", [dp, median, lambda base: dp_sgd(gn(base))], ids=["dp", "median", "dp_sgd"])
def test_privacy_and_robust_aggregation_refuse_it_as_other_uploads(guard):
    with pytest.raises(UsageError, match=r"Tells sends (more than|information that) .*(client: 'n'|\(n\))"):
        make_trial(guard(Method().with_rule(Tells())))


def test_it_is_declared_once_and_counts_in_round_1():
    running, base = plain.trial(styles(fedbn())), plain.trial(fedbn())
    before = [each for each in list_disclosures(running.plan) if each.once]
    assert [(each.name, each.bytes, each.receivers) for each in before] == [("styles/style", 16, "each")]
    assert summarize_method(running.plan).up == summarize_method(base.plan).up
    first, second = running.advance(), running.advance()
    plainly = base.advance()
    assert first.up == plainly.up + 2 * 16
    assert second.up == plainly.up


def test_it_is_not_held_again_after_a_kill_before_round_1(tmp_path, monkeypatch):
    experiment().run(tmp_path / "whole")

    def kill(trial, progress=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Trial, "advance", kill)
        with pytest.raises(KeyboardInterrupt):
            experiment().run(tmp_path / "killed")
    (folder,) = (tmp_path / "killed" / "trials").iterdir()
    tensors, facts = load_checkpoint(folder / CHECKPOINT)
    assert facts["round"] == 0
    assert facts["prelude"]["clients"] == 2
    assert len(tensors["server/memory/styles/bank"]) == 2
    with monkeypatch.context() as patch:
        patch.setattr("fedshift.engines.engine.client_prelude", kill)
        experiment().run(tmp_path / "killed", resume=True)
    (whole,) = (tmp_path / "whole" / "trials").iterdir()
    assert is_equal(load_checkpoint(folder / CHECKPOINT)[0], load_checkpoint(whole / CHECKPOINT)[0])
    costs = [[(each["down"], each["up"]) for each in read_rounds(where)] for where in (folder, whole)]
    assert costs[0] == costs[1]
