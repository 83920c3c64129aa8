"""What a site refuses: code that nobody there allowed, states that are not its own, questions that nobody signed."""

import shutil
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import pytest
import torch
from torch import nn

import fedshift
from fedshift import __version__
from fedshift.config.spec import RunSpec
from fedshift.core.kernel import init_client
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.data.digits import digits
from fedshift.engines.sequential import Sequential
from fedshift.export.package import require_models
from fedshift.flower.site.site import Site
from fedshift.flower.site.site_state import SiteState
from fedshift.flower.transport.arrays import RefusedMessage, from_record, to_record
from fedshift.flower.transport.exchange import HEAD, Exchange
from fedshift.flower.transport.pki import make_authority
from fedshift.flower.transport.signatures import Signer, Verifier, fingerprint
from fedshift.methods.fedavg import fedavg
from fedshift.nn.linear import ALONE, LANES, list_products, set_products
from fedshift.results.checkpoint import load_checkpoint, save_checkpoint
from fedshift.results.schema import read_rows
from fedshift.utils.errors import UsageError
from tests.conftest import ARRAYS
from tests.flower.gated import network
from tests.flower.sites import RUN, SMALLEST, Heard, SiteGrid, coordinator, same_as_in_process, sites_of, spec_for

NETWORK = "tests.flower.gated:network"
ALLOWED = frozenset({NETWORK})


@dataclass
class Asked:
    """A site that took part in two rounds of an experiment, in ``folder``, and what it was asked there."""

    folder: object
    questions: dict

    def site(self, name="photo", **named):
        return Site("digits", name, self.folder / name, **{"code": ALLOWED, "policy": SMALLEST} | named)

    def again(self, kind="train", base=None, **facts):
        """The last question of this kind; ``base``, ``facts``: what is said otherwise."""
        asked = self.questions[kind]
        return replace(asked, facts={**asked.facts, **facts, **({} if base is None else {"base": base})})

    def states(self, name="photo"):
        return sorted(path.name for path in (self.folder / name).glob("*/*/state-*"))


@pytest.fixture
def asked(tmp_path, machine):
    spec = spec_for(model=NETWORK, rounds=2, evaluate_every=2)
    grid = SiteGrid(sites_of(spec, tmp_path, code=ALLOWED))
    assert coordinator(spec, grid, tmp_path / "served", Heard()).run()
    return Asked(tmp_path, {question.kind: replace(question, run=RUN) for node, question in grid.asked if node == 2})


def why(answer):
    assert answer.kind == "refused"
    assert not answer.arrays
    return answer.facts["why"]


def test_a_round_that_is_asked_again_is_answered_alike(asked):
    once, twice = asked.site().answer(asked.again()), asked.site().answer(asked.again())
    assert once.kind == "trained"
    assert [{**answer.facts, HEAD: None} for answer in (once, twice)] == [{**once.facts, HEAD: None}] * 2
    assert [answer.facts[HEAD]["number"] for answer in (once, twice)] == [7, 8]
    for kind in ("shared", "memory"):
        assert once.arrays[kind] == twice.arrays[kind]
    assert asked.states() == ["state-1.safetensors", "state-2.safetensors"]


def test_a_site_that_starts_again_keeps_the_libraries_of_its_products(tmp_path, monkeypatch):
    monkeypatch.setattr("fedshift.nn.linear.is_available", lambda: True)
    before, after = (prepare(fedavg(), nn.Linear(256, 128), optimizer=SGD(lr=0.1)) for _ in range(2))
    set_products(before.module, {"": ALONE})
    SiteState(tmp_path, "photo", before, "data").save(init_client(before), 0, 1)
    set_products(after.module, {"": LANES})  # faster by now
    kept = SiteState(tmp_path, "photo", after, "data")
    kept.load_after(0)
    assert list_products(after.module) == {"": [*LANES]}
    kept.load_after(1)
    assert list_products(after.module) == {"": [*ALONE]}


def test_code_that_the_site_did_not_allow_is_not_run(asked):
    assert why(asked.site(code=frozenset()).answer(asked.again())) == (
        f"model {NETWORK!r} is a function of this machine that nobody allowed: allow it (--code {NETWORK})"
    )
    trial = asked.questions["train"].facts["trial"]
    plugged = {**trial, "spec": {**trial["spec"], "method": "os.path:join"}}
    assert "nobody allowed" in why(asked.site().answer(asked.again(trial=plugged)))


def test_a_lost_state_is_not_made_anew(asked):
    for file in asked.folder.glob("photo/*/*/state-1.safetensors"):
        file.unlink()
    said = why(asked.site().answer(asked.again()))
    assert said.startswith("client 'photo' has lost its state after round 1 (in ")
    assert "there are those after rounds: 2): bring the folder back from a copy" in said
    shutil.rmtree(asked.folder / "photo")
    said = why(asked.site().answer(asked.again()))
    assert "there are those after rounds: none)" in said
    assert asked.states() == []


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_damaged_state_is_refused(kind, asked):
    for file in asked.folder.glob("photo/*/*/state-*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    said = why(asked.site().answer(asked.again(kind)))
    assert said.startswith("the state of client 'photo' in ")
    assert "cannot be read: bring the file back from a copy" in said


def test_the_state_of_other_data_is_refused(asked):
    (place,) = asked.folder.glob("print/*/*")
    for file in asked.folder.glob("photo/*/*/state-*.safetensors"):
        shutil.copy(file, place)
    said = why(asked.site("print").answer(asked.again()))
    assert said.startswith("the data of client 'print' differ from round 1: give it the data that it began with")


def test_the_state_of_another_model_is_refused(asked):
    (file,) = asked.folder.glob("photo/*/*/state-1.safetensors")
    tensors, facts = load_checkpoint(file)
    for changed, said in (
        ({"personal/2.weight": torch.ones(8)}, "has shape (8,) in place of (16,)"),
        ({"personal/9.weight": torch.ones(8)}, "has an entry '9.weight', which does not belong there"),
        ({"memory/2.weight": torch.ones(8)}, "has an entry '2.weight', which does not belong there"),
    ):
        save_checkpoint(file, tensors | changed, facts)
        found = why(asked.site().answer(asked.again()))
        assert said in found
        assert f"state of client 'photo' in {file}" in found
    save_checkpoint(file, tensors, facts)
    assert asked.site().answer(asked.again()).kind == "trained"


def test_a_broadcast_that_does_not_fit_is_refused(asked):
    question = asked.again()
    for change, said in (
        (lambda x: x[:-1], "entry '1.weight' of the broadcast has shape"),
        (lambda x: x * torch.nan, "entry '1.weight' of the broadcast holds NaN or infinity"),
        (lambda x: x.double(), "entry '1.weight' of the broadcast has type torch.float64"),
    ):
        shared = from_record(question.arrays["shared"])
        shared["1.weight"] = change(shared["1.weight"])
        wrong = replace(question, arrays={**question.arrays, "shared": to_record(shared)})
        assert why(asked.site().answer(wrong)).startswith(said)
    assert "shared" in why(asked.site().answer(replace(question, arrays={})))
    more = {**question.arrays, "memory": to_record({"fedbn/means": torch.ones(2)})}
    assert why(asked.site().answer(replace(question, arrays=more))).startswith(
        "the broadcast's rule memory has an entry 'fedbn/means', which does not belong there"
    )


def test_settings_that_are_not_known_here_are_refused_with_the_version(asked):
    spec = {**asked.questions["describe"].facts["spec"], "telepathy": True}
    said = why(asked.site().answer(asked.again("describe", spec=spec)))
    assert said.startswith(f"the coordinator's settings are not understood by fedshift {__version__} here: ")
    assert "telepathy" in said


def test_a_question_that_is_not_known_here_is_refused(asked):
    heard = []
    assert "dance" in why(asked.site(say=heard.append).answer(Exchange(kind="dance")))
    assert len(heard) == 1


@pytest.fixture
def keys(tmp_path):
    make_authority(tmp_path / "tls", [], ["photo"])
    make_authority(tmp_path / "others", [], ["photo"])
    return tmp_path


def test_questions_are_answered_where_the_coordinator_signed_them(asked, keys):
    site = asked.site(checked=Verifier(keys / "tls" / "ca.crt", "localhost"))
    question = replace(asked.again(), run=RUN)
    signed = Signer(keys / "tls", RUN)(question)
    assert site.answer(Exchange.of(signed.content())).kind == "refused"  # it came in run 0
    assert site.answer(replace(signed, run=RUN)).kind == "trained"
    assert asked.site().answer(replace(signed, run=RUN)).kind == "trained"


def forged(name, signed, keys):
    """The question ``signed`` as someone changed it who has not the coordinator's key."""
    facts, proof = signed.facts, signed.facts["proof"]
    if name == "unsigned":
        return replace(signed, facts={key: value for key, value in facts.items() if key != "proof"})
    if name == "other facts":
        return replace(signed, facts={**facts, "base": 0})
    if name == "other kind":
        return replace(signed, kind="evaluate")
    if name == "other run":
        return replace(signed, run=RUN + 1)
    if name == "other arrays":
        shared = from_record(signed.arrays["shared"])
        shared["1.weight"][0, 0] += 1
        return replace(signed, arrays={**signed.arrays, "shared": to_record(shared)})
    if name == "entries exchanged":
        return replace(signed, arrays={"shared": signed.arrays["memory"], "memory": signed.arrays["shared"]})
    if name == "other authority":
        plain = replace(signed, facts={key: value for key, value in facts.items() if key != "proof"})
        return Signer(keys / "others", RUN)(plain)
    if name == "authority's certificate":
        shown = (keys / "tls" / "ca.crt").read_text()
        return replace(signed, facts={**facts, "proof": {**proof, "certificate": shown}})
    return replace(signed, facts={**facts, "proof": {"certificate": "none", "signature": "no"}})


FORGED = (
    "unsigned", "other facts", "other kind", "other run", "other arrays", "entries exchanged", "other authority",
    "authority's certificate", "nonsense",
)  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FORGED)
def test_a_question_that_the_coordinator_did_not_sign_is_refused_before_anything_is_done(name, asked, keys):
    site = asked.site(checked=Verifier(keys / "tls" / "ca.crt", "localhost"))
    before = asked.states()
    signed = Signer(keys / "tls", RUN)(replace(asked.again(), run=RUN))
    assert why(site.answer(forged(name, signed, keys))).startswith(
        (
            "a question that the coordinator did not sign for this run (",
            "a question signed with a certificate for which ca.crt does not vouch (",
        )
    )
    assert asked.states() == before
    assert not site._trials


def test_a_certificate_that_has_ended_proves_nothing(keys, monkeypatch):
    question = Exchange(kind="end", facts={"say": "over"}, run=RUN)
    signed, verifier = Signer(keys / "tls", RUN)(question), Verifier(keys / "tls" / "ca.crt", "localhost")
    signer = fingerprint(Signer(keys / "tls", RUN).key.public_key())
    assert verifier(signed, RUN) == replace(question, signer=signer)

    class Later(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(UTC) + timedelta(days=4000)

    monkeypatch.setattr("fedshift.flower.transport.signatures.datetime", Later)
    with pytest.raises(RefusedMessage, match="the coordinator's certificate is not valid now"):
        verifier(signed, RUN)


def test_an_experiment_from_weights_needs_them_at_every_site(tmp_path, machine):
    first, other = (tmp_path / name for name in ("first.pt", "other.pt"))
    for seed, file in enumerate((first, other)):
        torch.manual_seed(seed)
        torch.save(network((3, 8, 8), 10).state_dict(), file)
    spec = spec_for(model=NETWORK, rounds=1, weights=str(first))
    grid = SiteGrid(sites_of(spec, tmp_path, code=ALLOWED, weights=str(first)))
    assert coordinator(spec, grid, tmp_path / "served", Heard()).run()
    same_as_in_process(spec, tmp_path / "served", tmp_path, tmp_path / "reference")
    (hello,) = [question for node, question in grid.asked if (node, question.kind) == (2, "describe")]
    assert str(first) not in str(hello.facts)
    for weights, said in ((None, "weights which are not here"), (str(other), f"weights others than {other}")):
        found = why(Site("digits", "photo", tmp_path / "photo", code=ALLOWED, weights=weights).answer(hello))
        assert found == f"the experiment starts from {said}: bring the coordinator's file here (--weights FILE)"


@pytest.mark.slow
def test_a_site_exports_its_model_with_its_own_figures_and_no_one_elses(tmp_path, machine, monkeypatch):
    monkeypatch.setattr("fedshift.export.package.save_onnx", lambda *_, **__: "left out")
    spec = spec_for(model=NETWORK, rounds=1)
    sites = sites_of(spec, tmp_path, code=ALLOWED)
    said = []
    sites[2].export, sites[2].say = tmp_path / "models", said.append
    grid = SiteGrid(sites)
    assert coordinator(spec, grid, tmp_path / "served", Heard()).run()
    model = fedshift.load(tmp_path / "models" / "fedbn-seed0")
    test = digits().client("photo").test
    hits = int((model(test.x).argmax(1) == test.y).sum())
    rows = read_rows(tmp_path / "served" / "trials" / "fedbn-seed0" / "metrics.jsonl")
    (row,) = [row for row in rows if (row["client"], row["split"]) == ("photo", "test")]
    assert hits == sum(row["hits"])
    assert f"program.pt2 was tested on all 140 test samples: {hits} right, as the run recorded." in said
    card = (model.directory / "README.md").read_text()
    assert "3 sites took part, whose samples stayed there." in card
    assert "| photo | 24 | 140 |" in card
    assert not any(name in card for name in ("pen", "print", str(tmp_path)))
    sites[2].export_latest()  # as when it leaves: done already
    assert said.count(said[-1]) == 1
    # what may be replaced is a model
    require_models(tmp_path / "models")
    with pytest.raises(UsageError, match=r"which is not an exported model: choose another directory \(export\)"):
        require_models(tmp_path)
    # an answer does not wait for a model that cannot be written
    (tmp_path / "models" / "fedbn-seed0" / "model.json").unlink()
    question = next(question for node, question in grid.asked if (node, question.kind) == (2, "evaluate"))
    assert sites[2].answer(replace(question, run=RUN)).kind == "evaluated"
    assert said[-2].startswith("the model of fedbn is not exported: ")


def test_errors_in_a_sites_data_are_one_line_there_and_refused_without_a_word_of_them(tmp_path, rewrite):
    x, y = ARRAYS["bob"][0].copy(), ARRAYS["bob"][1]
    x[1] = x[0]  # of another class
    said = []
    site = Site(str(rewrite("bob", x_train=x, y_train=y)), "bob", tmp_path / "bob", say=said.append)
    for choice, kind in ((None, "described"), ("refuse", "refused")):
        spec = vars(RunSpec(data="", on_data_error=choice))
        answer = site.answer(Exchange(kind="describe", facts={"spec": spec, "labels": False}))
        assert answer.kind == kind
        assert ("refused: " if choice else "") + "1 error in the data: Equal samples have different labels: bob" in (
            next(line for line in said if "in the data" in line)
        )
        said.clear()
    assert why(answer) == "its data cannot be used: its log has the reason"


def test_what_reading_a_sites_data_noticed_is_in_its_log(tmp_path, rewrite):
    two = {name: x[:, :2, :, 0] - 99.5 for name, x in zip(("x_train", "x_test"), ARRAYS["bob"][::2], strict=True)}
    said = []
    site = Site(str(rewrite("bob", **two)), "bob", tmp_path / "bob", say=said.append)
    spec = vars(RunSpec(data=""))
    assert site.answer(Exchange(kind="describe", facts={"spec": spec, "labels": False})).kind == "described"
    assert said[0].startswith("samples of shape 2 x 8 are signals with 2 channels")


def test_an_upload_with_an_entry_beyond_its_scope_does_not_leave(asked, monkeypatch):
    """Whatever goes wrong in the work of a round, what is sent is looked at once more before it leaves."""
    train = Sequential.train_client

    def leak(*given):
        done = train(*given)
        return replace(done, update=replace(done.update, shared={**done.update.shared, "extra": torch.ones(2)}))

    monkeypatch.setattr(Sequential, "train_client", leak)
    assert "'extra'" in why(asked.site().answer(asked.again()))
