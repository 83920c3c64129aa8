"""A site's own work: states that are its own, code that was allowed, and no text or entry beyond what may leave."""

import re
import shutil
from dataclasses import dataclass, replace
from typing import get_args, get_type_hints

import pytest
import torch
from pydantic import TypeAdapter

import fedshift
from fedshift import __version__
from fedshift.config.spec import Expression, RunSpec
from fedshift.data.digits import digits
from fedshift.engines.engine import Diverged
from fedshift.engines.sequential import Sequential
from fedshift.export.package import require_models
from fedshift.flower.messages import Exchange, from_record, to_record
from fedshift.flower.site.record import Record
from fedshift.results.checkpoint import load_checkpoint, save_checkpoint
from fedshift.results.schema import read_rows
from fedshift.utils.errors import FedshiftError, UsageError
from tests.conftest import ARRAYS
from tests.flower.gated import NETWORK, network
from tests.flower.sites import PHOTO, change, make_site, same_as_in_process, serve, sites_of, spec_for
from tests.flower.test_gate import UNUSABLE, why

pytestmark = pytest.mark.usefixtures("machine")
CALLED = []
OWN = f"{__name__}:called"


def called(*given):
    CALLED.append(given)


@dataclass
class Asked:
    """A site that took part in two rounds of an experiment, in ``folder``, and what it was asked there."""

    folder: object
    questions: dict

    def site(self, name="photo", **named):
        return make_site("digits", name, self.folder, **named)

    def again(self, kind="train", **changes):
        """The last question of this kind, changed."""
        return change(self.questions[kind], **changes)

    def states(self, name="photo", round="*"):
        return sorted((self.folder / name).glob(f"*/*/state-{round}.safetensors"))


@pytest.fixture(scope="module")
def begun(tmp_path_factory, machine):
    folder, spec = tmp_path_factory.mktemp("begun"), spec_for(model=NETWORK, evaluate_every=2)
    asked = serve(spec, folder).grid.asked
    return Asked(folder, {question.kind: question for node, question in asked if node == PHOTO})


@pytest.fixture
def asked(begun, tmp_path):
    return replace(begun, folder=shutil.copytree(begun.folder, tmp_path / "copy"))


EXPRESSIONS = [
    name for name, hint in get_type_hints(RunSpec, include_extras=True).items()
    if any(isinstance(mark, Expression) and mark.catalog for mark in get_args(hint)[1:])
]  # fmt: skip
"""Settings that may name a function, such as ``model``."""


@pytest.mark.parametrize("setting", EXPRESSIONS)
def test_a_site_calls_no_function_of_its_machine_that_nobody_allowed(setting, asked):
    CALLED.clear()
    for name in (OWN, "os.path:join"):
        question = asked.again(spec={setting: name})
        assert f"nobody allowed: allow it (--code {name})" in why(asked.site().answer(question))
        asked.site().answer(asked.again("describe", spec={setting: name}))
    assert CALLED == []
    if setting in ("method", "model", "augment"):
        asked.site(code=frozenset({NETWORK, OWN})).answer(asked.again(spec={setting: OWN}))
        assert CALLED != []


def test_a_state_that_is_damaged_or_of_other_data_or_another_model_or_lost_is_refused_and_not_made_anew(asked):
    file, other, shown = asked.states(round=1)[0], asked.states("print", 1)[0], []
    tensors, facts = load_checkpoint(file)
    for changed, said in (
        ({"personal/2.weight": torch.ones(8)}, "has shape (8,) in place of (16,)"),
        ({"personal/9.weight": torch.ones(8)}, "has an entry '9.weight', which does not belong there"),
        ({"memory/2.weight": torch.ones(8)}, "has an entry '2.weight', which does not belong there"),
    ):
        save_checkpoint(file, tensors | changed, facts)
        found = why(asked.site().answer(asked.again()))
        assert said in found
        assert "state of client 'photo' after round 1" in found
    save_checkpoint(file, tensors, facts)
    assert asked.site().answer(asked.again()).kind == "trained"
    shutil.copy(file, other)
    said = why(asked.site("print").answer(asked.again()))
    assert said.startswith("the data of client 'print' differ from round 1: give it the data that it began with")
    for state in asked.states():
        state.write_bytes(state.read_bytes()[:-1])
    for kind in ("train", "evaluate"):
        said = why(asked.site(say=shown.append).answer(asked.again(kind)))
        assert said.startswith("the state of client 'photo' after round ")
        assert "cannot be read: bring the file back from a copy" in said
        assert str(asked.folder) not in said
        assert str(asked.folder) in shown[-2]
    file.unlink()
    said = why(asked.site().answer(asked.again()))
    assert said.startswith("client 'photo' has lost its state after round 1 (it has those after rounds: 2): bring the")
    shutil.rmtree(asked.folder / "photo")
    assert "(it has those after rounds: none)" in why(asked.site().answer(asked.again()))
    assert asked.states() == []


def test_a_broadcast_that_does_not_fit_is_refused(asked):
    question = asked.again()
    shared = from_record(question.arrays["shared"])
    weight = shared["1.weight"]
    for wrong, said in (
        (weight[:-1], "entry '1.weight' of the broadcast has shape"),
        (weight * torch.nan, "entry '1.weight' of the broadcast holds NaN or infinity"),
        (weight.double(), "entry '1.weight' of the broadcast has type torch.float64"),
    ):
        arrays = {**question.arrays, "shared": to_record(shared | {"1.weight": wrong})}
        assert why(asked.site().answer(replace(question, arrays=arrays))).startswith(said)
    more = {**question.arrays, "memory": to_record({"fedbn/means": torch.ones(2)})}
    said = "the broadcast's rule memory has an entry 'fedbn/means', which does not belong there"
    assert why(asked.site().answer(replace(question, arrays=more))).startswith(said)


def test_settings_that_are_not_known_here_are_refused_with_the_version(asked):
    said = why(asked.site().answer(asked.again("describe", spec={"telepathy": True})))
    assert said.startswith(f"the coordinator's settings are not understood by fedshift {__version__} here (")
    assert why(asked.site().answer(asked.again(version="0.9.1"))).startswith("the coordinator runs fedshift 0.9.1, ")


SECRET = "anna_maier/ct_7.png"


ERRORS = {
    "data of several files": (UsageError(f"3 of 6 files cannot be read: {SECRET}"), "(3 of 6 files)"),
    "data": (UsageError(f"no label in {SECRET}"), "its data cannot be used (1 error)"),
    "a file": (FileNotFoundError(2, "No such file", SECRET), "its data cannot be used (1 error)"),
    "the package": (FedshiftError(f"{SECRET}: corrupt"), "question failed (FedshiftError)"),
    "a key": (KeyError(SECRET), "question failed (KeyError)"),
    "memory": (MemoryError(SECRET), "this site has too little memory for the"),
    "the allocator": (RuntimeError(f"can't allocate memory for {SECRET}"), "this site has too little memory for the"),
    "the device": (torch.OutOfMemoryError(SECRET), "this site has too little memory for the"),
    "a schema": (None, "question failed (ValidationError)"),
    "a timeout": (TimeoutError(SECRET), "its data cannot be used (1 error)"),
    "a value": (ValueError(f"{SECRET}: 4711"), "question failed (ValueError)"),
}


PLACES = {
    "describe": "site.load_local", "review": "site.load_local", "train": "trial.check_upload",
    "evaluate": "trial.reestimate_models", "tell": "site.Site.export_latest",
}  # fmt: skip
"""By the kind of a question, a step of its work in which something goes wrong."""


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "train") for name in ERRORS), *(("data", kind) for kind in PLACES if kind != "train")]
)
def test_no_error_quotes_the_data_to_the_coordinator_and_its_text_is_shown_here(name, kind, asked, monkeypatch):
    """Of whatever goes wrong at a site, the kind and a count leave, and are shown and recorded before."""
    error, said = ERRORS[name]

    def fail(*_, **__):
        if error is None:
            TypeAdapter(int).validate_python(SECRET)
        raise error

    monkeypatch.setattr(f"fedshift.flower.site.{PLACES[kind]}", fail)
    shown = []
    answer = asked.site(say=shown.append).answer(asked.again(kind))
    assert said in why(answer)
    assert not re.search(r"anna|ct_7|4711", str(answer.facts))
    assert any(SECRET in text for text in shown[:-1])
    assert shown[-1] == f"refused; disclosed to the coordinator: {why(answer)}"
    *_, last = Record(asked.folder / "record.db").read()
    assert (last.event, last.content) == ("refused", {"why": why(answer)})


def test_a_model_that_diverged_is_said_to_have_and_an_entry_beyond_the_scope_does_not_leave(asked, monkeypatch):
    """Whatever goes wrong in the work of a round, what is sent is looked at once more before it leaves."""
    train, shown = Sequential.train_client, []

    def leak(*given):
        done = train(*given)
        return replace(done, update=replace(done.update, shared={**done.update.shared, "extra": torch.ones(2)}))

    def diverge(*_):
        raise Diverged("fedbn, round 2: client 'photo' has NaN")

    monkeypatch.setattr(Sequential, "train_client", leak)
    assert why(asked.site(say=shown.append).answer(asked.again()))
    assert any("'extra'" in text for text in shown)
    monkeypatch.setattr(Sequential, "train_client", diverge)
    answer = asked.site().answer(asked.again())
    assert (why(answer), answer.facts["diverged"]) == ("fedbn, round 2: client 'photo' has NaN", True)


def test_an_experiment_from_weights_needs_them_at_every_site(tmp_path):
    first, other = (tmp_path / name for name in ("first.pt", "other.pt"))
    for seed, file in enumerate((first, other)):
        torch.manual_seed(seed)
        torch.save(network((3, 8, 8), 10).state_dict(), file)
    spec = spec_for(model=NETWORK, rounds=1, weights=str(first))
    grid = serve(spec, tmp_path, sites_of(spec, tmp_path, weights=str(first))).grid
    same_as_in_process(spec, tmp_path / "served")
    (hello,) = [question for node, question in grid.asked if (node, question.kind) == (PHOTO, "describe")]
    assert str(first) not in str(hello.facts)
    for weights, said in ((None, "not here"), (str(other), "not here (another file is)")):
        found = why(make_site("digits", "photo", tmp_path, weights=weights).answer(hello))
        assert found.startswith(f"the experiment starts from weights that are {said}: bring the coordinator's file to ")


@pytest.mark.slow
def test_a_site_exports_its_model_with_its_own_figures_and_no_one_elses(tmp_path, monkeypatch):
    monkeypatch.setattr("fedshift.export.package.save_onnx", lambda *_, **__: "left out")
    spec, said = spec_for(model=NETWORK, rounds=1), []
    sites = sites_of(spec, tmp_path)
    sites[2].export, sites[2].say = tmp_path / "models", said.append
    grid = serve(spec, tmp_path, sites).grid
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
    with pytest.raises(UsageError, match=r"which is not an exported model: choose another directory \(export\)"):
        require_models(tmp_path)  # what may be replaced is a model
    # an answer does not wait for a model that cannot be written
    (tmp_path / "models" / "fedbn-seed0" / "model.json").unlink()
    question = next(question for node, question in grid.asked if (node, question.kind) == (2, "evaluate"))
    assert sites[2].answer(question).kind == "evaluated"
    assert any(text.startswith("the model of fedbn is not exported: ") for text in said)


def describe(file, folder, **settings):
    """The answer of a site to the first question, and what it says."""
    said, spec = [], vars(RunSpec(data="", **settings))
    site = make_site(file, "bob", folder, say=said.append)
    return site.answer(Exchange(kind="describe", facts={"spec": spec, "labels": False})), said


def test_what_is_noticed_in_a_sites_data_is_in_its_log_and_no_word_of_it_leaves(tmp_path, rewrite):
    two = {name: x[:, :2, :, 0] - 99.5 for name, x in zip(("x_train", "x_test"), ARRAYS["bob"][::2], strict=True)}
    answer, said = describe(rewrite("bob", **two), tmp_path)
    assert answer.kind == "described"
    assert said[0].startswith("samples of shape 2 x 8 are signals with 2 channels")
    x, y = ARRAYS["bob"][0].copy(), ARRAYS["bob"][1]
    x[1] = x[0]  # of another class
    file = rewrite("bob", x_train=x, y_train=y, x_test=ARRAYS["bob"][2])
    for choice, kind in ((None, "described"), ("refuse", "refused")):
        answer, said = describe(file, tmp_path, on_data_error=choice)
        assert answer.kind == kind
        line = next(line for line in said if "in the data" in line)
        assert "1 error in the data: Equal samples have different labels: bob" in line
    assert why(answer) == UNUSABLE
