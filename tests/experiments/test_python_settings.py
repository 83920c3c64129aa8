"""Settings as Python values: each makes the experiment that its text makes, and is written as that text."""

import tomllib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedshift
from fedshift.cli.app import app
from fedshift.config.settings_file import to_toml
from fedshift.config.spec import CompareSpec
from fedshift.core.loss import cross_entropy, focal, make_loss
from fedshift.core.method import Method
from fedshift.core.optimizer import SGD, AdamW
from fedshift.core.schedule import Cosine, Exponential, Schedule, StepDecay
from fedshift.data.augmentation import AUGMENTATIONS, flip, rotate, sequence, sometimes
from fedshift.experiments.factory import make_experiment, make_settings
from fedshift.experiments.python_settings import make_python_experiment
from fedshift.models.digits import small_cnn
from fedshift.tasks import Classification
from fedshift.utils.errors import UsageError


@pytest.fixture
def make_both(tiny_folder):
    """Make an experiment from Python values, and another from what it writes down."""

    def make(**given):
        ours = make_python_experiment({"methods": ["fedavg"], "data": tiny_folder, **given})
        written = tomllib.loads(to_toml(ours.config))
        assert "python" not in written
        return ours, make_experiment(CompareSpec(**written))

    return make


def network(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(192, classes))


def lone(logits, y):
    return nn.functional.cross_entropy(logits, y) * 2


def brighten(x, rng):
    return (x * 1.1).clamp(max=1)


@dataclass(frozen=True, kw_only=True)
class Weighed(Classification):
    name = "weighed"
    factor: float = 2.0

    def count(self, predictions, y, outputs):
        counts = super().count(predictions, y, outputs)
        return counts | {"loss_sum": self.factor * counts["loss_sum"]}


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ({"methods": "fedavg, fedbn"}, {"methods": "fedavg, fedbn"}),
        ({"methods": fedshift.fedbn()}, {"methods": "fedbn"}),
        (
            {"methods": [fedshift.fedbn, "silobn", fedshift.fedprox(mu=0.3)]},
            {"methods": "fedbn,silobn,fedprox(mu=0.3)"},
        ),
        ({"methods": [fedshift.fedbn(fedshift.fedprox(mu=1 / 3))]}, {"methods": f"fedbn+fedprox(mu={1 / 3!r})"}),
        ({"methods": fedshift.gn(fedshift.fedavg())}, {"methods": "fedavg+gn"}),
        ({"model": small_cnn}, {"model": "small-cnn"}),
        ({"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, {"loss": "cross_entropy(smoothing=0.1)"}),
        ({"loss": make_loss(focal, gamma=1.0, weights="balanced")}, {"loss": "focal(weights='balanced', gamma=1.0)"}),
        (
            {"loss": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))},
            {"loss": "cross_entropy(weights=(1.0, 2.0, 3.0))"},
        ),
        ({"loss": nn.functional.multi_margin_loss}, {"loss": "torch.nn.functional:multi_margin_loss"}),
        ({"optimizer": torch.optim.SGD, "lr": 0.3}, {"optimizer": "sgd", "lr": 0.3}),
        (
            {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)},
            {"optimizer": "sgd(weight_decay=0.0001, momentum=0.9, nesterov=True)", "lr": 0.1},
        ),
        ({"optimizer": torch.optim.AdamW}, {"optimizer": "adamw", "lr": 0.01}),
        (
            {"optimizer": torch.optim.Adam([torch.zeros(1)], betas=(0.8, 0.99))},
            {"optimizer": "adamw(weight_decay=0.0, beta1=0.8, beta2=0.99)", "lr": 0.001},
        ),
        (
            {"optimizer": AdamW(lr=0.1, eps=1e-6, schedule=Cosine(rounds=7, floor=0.2), keep=True), "rounds": 7},
            {"optimizer": "adamw(keep=True, eps=1e-06)", "schedule": "cosine(floor=0.2)"},
        ),
        ({"schedule": Cosine(rounds=9)}, {"schedule": "cosine(rounds=9)"}),
        (
            {"schedule": StepDecay(every=3), "optimizer": "sgd(momentum=0.5)"},
            {"schedule": "step(every=3)", "optimizer": "sgd(momentum=0.5)"},
        ),
        ({"schedule": Exponential(gamma=0.9), "optimizer": torch.optim.SGD}, {"schedule": "exponential(gamma=0.9)"}),
        ({"augment": rotate(degrees=10.0)}, {"augment": "rotate(degrees=10.0, fill='zeros')"}),
        (
            {"augment": sequence(flip(), sometimes(rotate(), p=0.2))},
            {"augment": "sequence(flip(p=0.5, vertical=False), sometimes(rotate(degrees=30.0, fill='zeros'), p=0.2))"},
        ),
        ({"task": Classification()}, {"task": "classification"}),
        ({"task": Classification}, {"task": "classification"}),
        ({"task": Weighed(factor=3.0)}, {"task": f"{__name__}:Weighed(factor=3.0)"}),
        ({"newcomers": ["cid"]}, {"newcomers": "cid"}),
        ({"domains": ["cid", "ann"]}, {"domains": "cid,ann"}),
        ({"moments": ["loaded", "trained"]}, {"moments": "loaded,trained"}),
        ({"seeds": [3, 4, 5]}, {"seeds": "3..5"}),
        ({"seeds": range(2)}, {"seeds": 2}),
        ({"seeds": np.arange(2)}, {"seeds": 2}),
        ({"seeds": [5, 1]}, {"seeds": "5,1"}),
        ({"seeds": [7]}, {"seeds": "7,"}),
        ({"seeds": iter([3, 4]), "methods": iter(["fedbn", fedshift.gn()])}, {"seeds": "3,4"}),
        ({"batch_size": None}, {"batch_size": 0}),
        ({"participation": 2}, {"participation": 2}),
        ({"participation": 0.5}, {"participation": 0.5}),
        ({"participation": "shuffled"}, {"participation": "shuffled"}),
        ({"device": torch.device("cpu")}, {"device": "cpu"}),
        ({"rounds": np.int64(3), "lr": np.float32(0.5)}, {"rounds": 3, "lr": 0.5}),
        ({"methods": fedshift.agc(fedshift.fedbn())}, {"methods": "fedbn+agc"}),
        ({"samples": 9, "validation": 0.3, "split": "iid(clients=2)"}, {"samples": 9, "split": "iid(clients=2)"}),
    ],
    ids=lambda value: ",".join(value) if "methods" in value else None,
)
def test_a_value_is_the_text_that_is_written(make_both, given, written):
    ours, theirs = make_both(**given)
    assert {name: ours.config[name] for name in written} == written
    assert ours.settings == theirs.settings
    assert [method.text for method in ours.methods] == [method.text for method in theirs.methods]
    assert (ours.seeds, ours.model) == (theirs.seeds, theirs.model)
    assert (ours.data.fingerprint, ours.data.task) == (theirs.data.fingerprint, theirs.data.task)
    assert ours.config == theirs.config


@pytest.mark.parametrize(
    ("given", "written", "count"), [(1, "1", 1), (1.0, "1.0", 3), (2.0, "2.0", 2), (0.5, "0.5", 2)]
)
def test_a_whole_number_counts_participants_and_a_decimal_point_makes_a_fraction(make_both, given, written, count):
    """Of three clients; the same in Python, in TOML and in flags."""
    ours, theirs = make_both(participation=given)
    for settings in (ours.settings, theirs.settings):
        assert len(settings.draw_participants(0, 1, ours.data.names)) == count
    assert f"participation = {written}\n" in to_toml(ours.config)
    _, bound, _ = app.parse_args(["run", "--participation", written])
    spec = bound.arguments["spec"]
    assert (repr(spec.participation), type(spec.participation)) == (written, type(given))
    assert make_settings(spec, ours.data.names).participation == ours.settings.participation


def test_functions_that_can_be_imported_are_written_by_name(make_both, tmp_path, monkeypatch):
    (tmp_path / "my_parts.py").write_text(
        "import fedshift\nfrom torch import nn\n"
        "def network(shape, classes): return nn.Sequential(nn.Flatten(), nn.Linear(192, classes))\n"
        "def loss(logits, y): return nn.functional.cross_entropy(logits, y) * 2\n"
        "def method(): return fedshift.fedavg().choose(work={'epochs': 2})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import my_parts

    ours, theirs = make_both(methods=my_parts.method, model=my_parts.network, loss=my_parts.loss)
    assert [ours.config[name] for name in ("methods", "model", "loss")] == [
        "my_parts:method", "my_parts:network", "my_parts:loss",
    ]  # fmt: skip
    assert (ours.model, ours.settings.loss) == (theirs.model, theirs.settings.loss)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("methods", [Method(name="mine", weighting="uniform")], "mine"),
        ("methods", ["fedavg", lambda: Method(name="mine", weighting="uniform")], "fedavg, mine"),
        ("model", lambda shape, classes: network(shape, classes), "function <lambda> ("),
        ("loss", lambda logits, y: lone(logits, y), "function <lambda> ("),
        ("loss", nn.MultiMarginLoss(margin=2.0), "function MultiMarginLoss ("),
        ("optimizer", SGD(lr=0.1, schedule=type("Halved", (Schedule,), {})()), "SGD(lr=0.1"),
        ("augment", brighten, "function brighten ("),
        ("augment", sequence(flip(), brighten), "function Transform ("),
        ("task", type("Lone", (Weighed,), {})(factor=5.0), "Lone(factor=5.0)"),
        ("newcomers", ["a,b"], "the clients 'a,b'"),
    ],
)
def test_what_no_file_can_hold_is_described_in_its_place(tiny, name, value, said):
    given = {"methods": ["fedavg"], "data": tiny, name: value}
    if name == "newcomers":
        given["data"] = fedshift.federation({"a,b": tiny_arrays(tiny), "c": tiny_arrays(tiny)})
    config = make_python_experiment(given).config
    written = tomllib.loads(to_toml(config))
    assert written["python"][name].startswith(said)
    assert name not in written
    assert ("lr" in written) == (name != "optimizer")
    assert list(written["python"]) == sorted({name, "data"}, key=list(CompareSpec.__dataclass_fields__).index)


def tiny_arrays(tiny):
    client = tiny.clients[0]
    return client.train.x, client.train.y, client.test.x, client.test.y


def test_data_are_written_where_they_have_a_name(tiny, tiny_folder, monkeypatch):
    def write(data):
        return tomllib.loads(to_toml(make_python_experiment({"methods": "fedavg", "data": data, "rounds": 1}).config))

    assert write(fedshift.digits())["data"] == "digits"
    assert write(fedshift.digits().limit_samples(20))["python"] == {"data": "a Federation 'digits' of 5 clients"}
    assert write({"a": tiny_arrays(tiny)})["python"] == {"data": "a dict in memory"}
    assert write(tiny_folder)["data"] == str(tiny_folder)
    monkeypatch.chdir(tiny_folder.parent)
    assert write(Path("tiny"))["data"] == write("tiny")["data"] == str(tiny_folder)
    called_digits = tiny_folder.rename(tiny_folder.parent / "digits")
    assert write(Path("digits"))["data"] == str(called_digits)
    assert write("digits")["data"] == "digits"


def test_settings_of_files_are_refused_for_what_is_no_file(tiny):
    with pytest.raises(UsageError, match=r"client_column is for .*tables.*, not for a Federation"):
        make_python_experiment({"methods": "fedavg", "data": tiny, "client_column": "site"})
    assert make_python_experiment({"methods": "fedavg", "data": tiny, "domains": "ann"}).data.names == ("ann",)


@pytest.mark.slow
def test_a_task_is_given_as_an_object(tiny, tmp_path):
    """On its own data as on others, in a worker process, and again to resume, but not another one."""
    given = {"methods": "fedavg", "data": tiny, "lr": 0.01, "seeds": 2}
    plain = fedshift.compare(**given, rounds=1).records
    alike = fedshift.compare(**given, rounds=1, task=Weighed(factor=3.0), jobs=2, out=tmp_path / "run").records
    factors = alike["loss_sum"] / plain["loss_sum"]
    assert np.allclose(factors, np.where(alike["split"] == "test", 3.0, 1.0))
    with pytest.raises(UsageError, match=r"another task: then .*factor': 3.0.*now .*factor': 2.0"):
        fedshift.compare(**given, rounds=2, task=Weighed(), resume=tmp_path / "run")
    fedshift.compare(**given, rounds=2, task=Weighed(factor=3.0), resume=tmp_path / "run")
    assert set(fedshift.read_run(tmp_path / "run").records["round"]) == {1, 2}
    assert fedshift.load_data(tiny, task=Weighed).task == Weighed()


def make_task(**changed):
    return type("Mine", (Weighed,), changed)()


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (make_task(metrics=("acuracy",)), r"unknown metric of task weighed 'acuracy': did you mean 'accuracy'\?"),
        (make_task(metrics=()), "task weighed has no metric"),
        (
            make_task(metrics=("accuracy", "exact_match")),
            r"metric 'exact_match' of task weighed takes exact, which its counts \(samples, .*\) lack",
        ),
        (make_task(count=lambda *_: {}["y"]), "cannot count one sample: KeyError: 'y'; in .*python_settings"),
        (type("Mine", (Weighed,), {"__init__": lambda self, a: None}), r"task Mine\(\) makes none: .* missing 1"),
        (3, "task=3 is not a task: give classification, .* or a subclass of fedshift.tasks.Task"),
    ],
)
def test_a_task_that_cannot_be_measured_is_refused_before_anything_starts(task, said, tiny, tmp_path):
    with pytest.raises(UsageError, match=said):
        fedshift.compare(methods="fedavg", data=tiny, rounds=1, task=task, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_augmentation_of_ones_own_has_the_same_name_in_every_process():
    assert AUGMENTATIONS.parse("flip(), rotate(degrees=10)") == sequence(flip(), rotate(degrees=10))
    experiment = make_python_experiment({"methods": "fedavg", "data": fedshift.digits(), "augment": brighten})
    assert str(experiment.settings.augment) == f"{__name__}:brighten"
    x = torch.rand(2, 3, 4, 4)
    assert torch.equal(experiment.settings.augment(x, np.random.default_rng(0)), brighten(x, None))


def test_a_loss_by_value_is_kept(tiny):
    given = {"methods": "fedavg", "data": tiny, "loss": make_loss(cross_entropy, weights="balanced")}
    assert make_python_experiment(given).settings.loss == make_loss(cross_entropy, weights="balanced")


def test_a_model_that_is_no_function_is_refused_before_data_are_read():
    with pytest.raises(UsageError, match="model is a Linear: give a name, or a function"):
        make_experiment(CompareSpec(data="no-such-data", model=torch.nn.Linear(2, 2)))
