"""Exported models give the run's own figures, by torch alone, by ONNX's runtime and by ``fedshift.load``."""

import json
import subprocess
import sys
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from scipy.stats import binomtest
from torch import nn

import fedshift
from fedshift.data.decoding.resizing import resize
from fedshift.data.preparation import Preparation
from fedshift.export.loading import ExportedModel
from fedshift.export.programs import save_onnx
from fedshift.export.source import export_run, find_licenses
from fedshift.results.schema import read_rows
from fedshift.results.trial_records import read_lag
from fedshift.utils.errors import FedshiftError, UsageError
from tests.conftest import ARRAYS

METHODS = "fedavg,fedbn,fedwon,ditto"


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("kept") / "run"


@pytest.fixture
def experiment(make, kept):
    """Four methods on the tiny clients, trained once; the run is in ``kept``."""
    made = make(methods=METHODS, seeds=2, rounds=1, lr=0.05, normalize="imagenet", engine="sequential")
    if not kept.exists():
        made.run(kept)
    return made


@pytest.fixture
def bobs(experiment, kept):
    """What was exported of client bob under FedBN, once."""
    folder = kept.with_name("bob's model")
    if not folder.exists():
        export_run(experiment, kept, folder, method="fedbn", client="bob", onnx=False)
    return folder


def recorded(run, method, client, model="personal", seed=0):
    """The counts of right answers by class that the run recorded after its last round."""
    folder = run / "trials" / f"{method}-seed{seed}"
    rows = read_lag(folder)["rows"] or read_rows(folder / "metrics.jsonl")
    key = (rows[-1]["round"], client, "test", model)
    return next(row["hits"] for row in rows if (row["round"], row["client"], row["split"], row["model"]) == key)


def right(scores, client):
    """The same counts from scores on the client's test images."""
    y = ARRAYS[client][3]
    return np.bincount(y[np.asarray(scores).argmax(1) == y], minlength=3).tolist()


def pixels(client):
    return ARRAYS[client][2]


ALONE = """
import sys, json, numpy, torch
sys.modules["fedshift"] = None  # an import of it fails
directory, images = sys.argv[1:]
x = torch.from_numpy(numpy.load(images))
program = torch.export.load(directory + "/program.pt2").module()
found = program(x.permute(0, 3, 1, 2)).tolist()
assert not [name for name in sys.modules if name.startswith("fedshift.")]
del sys.modules["fedshift"]
import fedshift
print(json.dumps([found, fedshift.load(directory)(x.numpy()).tolist()]))
"""


@pytest.mark.slow
def test_a_fresh_process_gives_the_logged_accuracy_by_torch_alone_and_by_load(bobs, kept, tmp_path):
    np.save(tmp_path / "x.npy", pixels("bob"))
    words = [sys.executable, "-c", ALONE, bobs, tmp_path / "x.npy"]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    plain, loaded = json.loads(done.stdout)
    assert right(plain, "bob") == recorded(kept, "fedbn", "bob")
    assert plain == loaded


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("method", "client"), [("fedwon", "cid"), ("ditto", "ann"), ("ditto", None)])
def test_every_kind_of_model_gives_the_recorded_counts(method, client, experiment, kept, tmp_path):
    report = export_run(experiment, kept, tmp_path / "model", method=method, client=client, seed=1, onnx=False)
    model = fedshift.load(tmp_path / "model")
    kind = "personal" if client else "global"
    for name in [client] if client else ARRAYS:
        assert right(model(pixels(name)), name) == recorded(kept, method, name, kind, seed=1)
    assert report.checks[0].endswith("as the run recorded.")
    # the weights are the network's own, which plain torch loads
    state = load_file(tmp_path / "model" / "weights.safetensors")
    assert ("conv1.gain" in state) == (method == "fedwon")
    assert ("bn1.weight" in state) == (method != "fedwon")


@pytest.mark.slow
def test_the_usual_values_of_the_owners_training_images_are_kept_but_not_those_that_noise_hides(
    bobs, experiment, kept, make, tmp_path
):
    usual = fedshift.load(bobs).inputs.usual
    channels = ARRAYS["bob"][0].reshape(-1, 3)
    assert usual.mean == pytest.approx(channels.mean(axis=0), rel=1e-3)
    assert usual.std == pytest.approx(channels.std(axis=0), rel=1e-3)
    noisy = make(methods="dp_sgd+nonorm", rounds=1, engine="sequential")
    noisy.run(tmp_path / "run")
    export_run(noisy, tmp_path / "run", tmp_path / "out", onnx=False)
    assert fedshift.load(tmp_path / "out").inputs.usual is None


@pytest.mark.slow
def test_onnx_gives_the_same_answers_in_its_own_runtime(experiment, kept, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    export_run(experiment, kept, tmp_path / "model", method="fedwon", client="cid")
    session = runtime.InferenceSession(tmp_path / "model" / "model.onnx")
    x = np.ascontiguousarray(pixels("cid").transpose(0, 3, 1, 2))
    (scores,) = session.run(["scores"], {"x": x})
    assert right(scores, "cid") == recorded(kept, "fedwon", "cid")
    assert np.allclose(scores, fedshift.load(tmp_path / "model")(x), atol=1e-5)
    assert "model.onnx was tested on all 12 test samples" in (tmp_path / "model" / "README.md").read_text()


def test_the_reason_is_given_where_there_is_no_onnx(tmp_path, monkeypatch):
    assert "computes in bfloat16" in save_onnx(None, tmp_path / "model.onnx", computed=torch.bfloat16)
    monkeypatch.setattr("fedshift.export.programs.find_spec", lambda name: None)
    assert "(pip install 'fedshift[export]')" in save_onnx(None, tmp_path / "model.onnx", computed=torch.float32)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "settings",
    [{"normalize": "client", "precision": "bfloat16"}, {"model": "tests.export.test_export:double"}],
    ids=["own scale, bfloat16", "float64"],
)
def test_scales_and_types_are_part_of_the_program(settings, make, tmp_path):
    made = make(rounds=1, lr=0.05, engine="sequential", **settings)
    made.run(tmp_path / "run")
    export_run(made, tmp_path / "run", tmp_path / "model", client="bob", onnx=False)
    assert right(fedshift.load(tmp_path / "model")(pixels("bob")), "bob") == recorded(tmp_path / "run", "fedbn", "bob")


def double(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.BatchNorm1d(8), nn.Linear(8, classes)).double()


def test_images_arrive_as_files_pillow_images_and_arrays_of_any_size(bobs, tmp_path):
    model = fedshift.load(bobs)
    x = pixels("ann")
    first = Image.fromarray(x[0])
    first.save(tmp_path / "first.png")
    wanted = model(x)
    assert torch.allclose(model(x[0]), wanted[0], atol=1e-6)
    assert model(x[0]).equal(model(first))
    assert model(x[0]).equal(model(str(tmp_path / "first.png")))
    assert model(torch.from_numpy(x).permute(0, 3, 1, 2)).equal(wanted)
    assert model.predict([first, x[1]]) == [str(int(k)) for k in wanted[:2].argmax(1)]
    gray = x[..., :1]
    assert model(gray).equal(model(np.repeat(gray, 3, axis=3)))
    assert model(gray[..., 0]).equal(model(gray))
    large = np.repeat(np.repeat(x, 2, axis=1), 2, axis=2)
    small = resize(torch.from_numpy(large).permute(0, 3, 1, 2), (8, 8))
    assert model(large).equal(model(small))
    assert repr(model) == f"<model {bobs}: fedbn, client bob, 3 classes>"
    for given, said in (
        (x / 255.0, "samples are of torch.float64: the model takes uint8"),
        (x[..., :2], r"samples have shape \(12, 8, 8, 2\): the model takes uint8 \[N, 3, 8, 8\]"),
        (tmp_path / "none.png", "none.png No such file"),
    ):
        with pytest.raises(UsageError, match=said):
            model(given)


def test_what_cannot_be_exported_is_refused_with_the_fix(experiment, kept, cli, make, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for given, said in (
        ({"method": "fedbn"}, r"fedbn has no global model: name a client \(client\), one of ann, bob, cid"),
        (
            {"client": "ann"},
            r"the run has 4 methods \(fedavg, fedbn, fedwon, ditto\): choose one \(method\)",
        ),
        ({"method": "fedbn", "client": "dan"}, "unknown client 'dan'"),
        ({"method": "fedavg", "seed": 7}, "no seed 7 here: there are 0, 1"),
        ({"method": "fedprox"}, "unknown method 'fedprox'"),
    ):
        with pytest.raises(UsageError, match=said):
            export_run(experiment, kept, tmp_path / "model", **given)
    with pytest.raises(UsageError, match=r"full contains other files: choose a directory that is new or empty"):
        export_run(experiment, kept, tmp_path / "full", method="fedavg")
    assert not (tmp_path / "model").exists()
    assert "none holds no run" in cli("export", "none", "--out", "x").err
    made = make(method="fedavg", model="tests.export.test_export:by_batch", rounds=1, engine="sequential")
    made.run(tmp_path / "by batch")
    with pytest.raises(UsageError, match="layer '0' normalizes by the batch"):
        export_run(made, tmp_path / "by batch", tmp_path / "model")


def test_a_network_that_torch_cannot_trace_leaves_weights_and_card(make, tmp_path):
    made = make(method="fedavg", model="tests.export.test_export:Unsteady", rounds=1, engine="sequential")
    made.run(tmp_path / "run")
    report = export_run(made, tmp_path / "run", tmp_path / "model")
    assert "no program.pt2: torch cannot trace the network (" in report.notices[0]
    assert report.files == ("model.json", "weights.safetensors", "README.md")
    with pytest.raises(UsageError, match=r"has no program.pt2, since torch could not trace its network"):
        fedshift.load(tmp_path / "model")


def by_batch(shape, classes):
    norm = nn.BatchNorm2d(3, track_running_stats=False)
    return nn.Sequential(norm, nn.Flatten(), nn.Linear(192, classes))


class Unsteady(nn.Module):
    """Goes another way for some inputs, which no trace can follow."""

    def __init__(self, shape, classes):
        super().__init__()
        self.layer = nn.Linear(192, classes)

    def forward(self, x):
        made = self.layer(x.flatten(1))
        return made if float(made.detach().sum()) > 0 else -made


def test_a_damaged_or_missing_model_is_refused(bobs, tmp_path):
    folder = copytree(bobs, tmp_path / "model")
    program, description = folder / "program.pt2", folder / "model.json"
    text = description.read_text()
    for change, said in (
        (
            lambda: program.write_bytes(program.read_bytes()[:-1] + b"x"),
            "program.pt2 is not the file that was exported",
        ),
        (program.unlink, r"program.pt2 cannot be read \(No such file"),
        (lambda: description.write_text(text.replace('"format": 1', '"format": 0')), "was written by another version"),
        (lambda: description.write_text("{"), "model.json is damaged"),
        (description.unlink, "contains no model: give a directory that `fedshift export` wrote"),
    ):
        change()
        with pytest.raises(FedshiftError, match=said):
            fedshift.load(folder)


def test_the_card_says_how_it_was_made_and_how_sure_the_figures_are(bobs, kept):
    card = (bobs / "README.md").read_text()
    hits = sum(recorded(kept, "fedbn", "bob"))
    low, high = binomtest(hits, 12).proportion_ci(method="wilson")
    accuracies = [sum(recorded(kept, "fedbn", "bob", seed=seed)) / 12 for seed in (0, 1)]
    for said in (
        "# fedbn, client bob",
        "Network small-cnn, ",
        "uses after round 1 (the last of 1, with re-estimated BatchNorm statistics), seed 0",
        f"| bob | test | 12 | {100 * hits / 12:.2f} % ({100 * low:.1f} to {100 * high:.1f} %) |",
        f"Over the run's 2 seeds, bob: {100 * np.mean(accuracies):.2f} % on average, standard deviation "
        f"{100 * np.std(accuracies, ddof=1):.2f} points.",
        "both its affine parameters and its statistics. (arXiv:2102.07623)",
        "| cid | 33 | 12 |",
        "- local work per round: 1 epoch, batches of 8 samples\n- weight of a client: its training samples\n"
        "- optimizer: SGD, learning rate 0.05\n",
        "- scaling: pixels in [0, 1] minus 0.485, 0.456, 0.406 over 0.229, 0.224, 0.225 (torchvision's",
        "The licenses of `tiny` are not known to fedshift",
        f"torch {torch.__version__}",
    ):
        assert said in card, said
    described = json.loads((bobs / "model.json").read_text())
    assert described["input"]["pixels"]["mean"] == [0.485, 0.456, 0.406]
    assert described["classes"] == ["0", "1", "2"]
    assert "CC BY 2.0" in find_licenses("digits", "digits")
    assert "SynthDigits CC BY 4.0" in find_licenses("digits_five(samples=10)", "digits-five")
    assert "CC0 1.0" in find_licenses("nuclei", "nuclei")


def test_a_model_of_numbers_gives_them_in_the_unit_of_the_data(tmp_path):
    random, parts = np.random.default_rng(0), {}
    for name in ("north", "south"):
        x, z = random.normal(size=(24, 5)).astype(np.float32), random.normal(size=(10, 5)).astype(np.float32)
        parts[name] = x, 1000 + 50 * x[:, :2].astype(float), z, 1000 + 50 * z[:, :2].astype(float)
    data = fedshift.federation(parts, task="regression")
    result = fedshift.compare([fedshift.fedbn()], data=data, model="abide-mlp", rounds=3, lr=0.05, engine="sequential")
    model, (*_, x, y) = fedshift.load(result.export(tmp_path / "model", client="south", onnx=False)), parts["south"]
    assert np.allclose(model.predict(x[0]), y[0], atol=300)
    assert np.allclose([model.predict(each) for each in x], model.predict(x))
    assert repr(model).endswith("client south, 2 targets>")
    card = (model.directory / "README.md").read_text()
    rmse = np.sqrt(((model(x).numpy() - y) ** 2).mean(axis=0)).mean()
    assert f"| south | test | 10 | {rmse:.3f} (" in card
    for said in (
        "Its task is regression: it predicts 2 targets (0, 1)", "Output: numbers [N, targets] in the unit of the data",
        "as the run recorded.", "- targets: learned as (0 - ",
    ):  # fmt: skip
        assert said in card
    assert "%" not in card.partition("## How")[0]


def made_of(outputs, task, classes, shape):
    """An exported model whose program answers sample number i with ``outputs[i]``."""
    form = Preparation(shape=tuple(shape), dtype="float32").to_json()
    description = {"classes": classes, "input": form, "task": task, "model": {}}
    return ExportedModel(Path("model"), description, lambda x: outputs[x.flatten(1)[:, 0].long()])


@pytest.mark.parametrize(
    ("task", "place"),
    [("classification", ()), ("segmentation", (5, 4)), ("segmentation", (6, 5, 4)), ("multilabel", ()),
     ("regression", ())],
)  # fmt: skip
def test_predictions_have_the_form_of_their_task_for_one_sample_and_for_several(task, place):
    scores = np.random.default_rng(0).normal(size=(7, 3, *place)).astype(np.float32)
    model = made_of(torch.from_numpy(scores), task, ["a", "b", "c"], [1, *place] if place else [2])
    x = np.arange(7, dtype=np.float32).reshape(7, *[1] * len(model.inputs.shape)) * np.ones(model.inputs.shape, "f")
    chosen = scores.argmax(1)
    wanted = {
        "classification": lambda: ["abc"[label] for label in chosen],
        "segmentation": chosen.tolist,
        "multilabel": lambda: [[name for name, score in zip("abc", row, strict=True) if score > 0] for row in scores],
        "regression": scores.tolist,
    }[task]()
    for made in (model.predict(x), [model.predict(one) for one in x]):
        assert [np.asarray(one).tolist() for one in made] == wanted
    scores[2].flat[1] = np.nan
    if task in ("classification", "multilabel"):  # an output that is not a number
        assert [each is None for each in model.predict(x)] == [number == 2 for number in range(7)]


def test_a_model_that_predicts_wrongly_or_without_results_of_single_samples_says_so(
    experiment, kept, tmp_path, monkeypatch
):
    """The check reads what users call, and not the scores below it."""
    copytree(kept, tmp_path / "run")
    (tmp_path / "run" / "trials" / "fedbn-seed0" / "cases.npz").unlink()
    monkeypatch.setattr(ExportedModel, "predict", lambda model, x: ["no class"] * len(x))
    report = export_run(experiment, tmp_path / "run", tmp_path / "model", method="fedbn", client="bob", onnx=False)
    assert "0 right, unlike the run's records (bob 0, but " in report.checks[0]
    card = (tmp_path / "model" / "README.md").read_text()
    assert "Without intervals: the results of single samples are not stored here." in card
    assert " to " not in card[card.index("| bob | test") :].partition("\n")[0]


class Several(nn.Module):
    """A network of a gray image, a row of numbers, a category and a mask."""

    def __init__(self, shapes, classes):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(shapes["image"][0], 4, 3), nn.BatchNorm2d(4)
        self.row, self.site, self.head = nn.Linear(3, 4), nn.Embedding(5, 4), nn.Linear(4, classes)

    def forward(self, image, row, site, mask):
        seen = torch.relu(self.norm(self.conv(image))).mean(dim=(2, 3))
        return self.head(seen + self.row(row * mask) + self.site(site))


@pytest.mark.slow
def test_a_model_of_several_inputs_predicts_as_the_network_called_by_hand(tmp_path):
    rng, y = np.random.default_rng(0), np.arange(12) % 2
    x = {
        "image": rng.integers(0, 256, (12, 6, 5), dtype=np.uint8), "row": rng.normal(size=(12, 3)).astype(np.float32),
        "site": rng.integers(0, 5, 12), "mask": rng.random((12, 3)) < 0.7,
    }  # fmt: skip
    found = fedshift.compare(
        data={"a": (x, y, x, y)}, model=Several, methods="fedavg", rounds=2, seeds=1, batch_size=4,
        out=tmp_path / "run", progress=False,
    )  # fmt: skip
    network = found.model("fedavg")
    image, row, site, mask = (torch.from_numpy(each) for each in x.values())
    by_hand = network((image[:, None] / 127.5 - 1), row, site, mask).detach()
    model = fedshift.load(found.export(tmp_path / "model", onnx=False))
    assert torch.allclose(model(x), by_hand, atol=1e-6)
    one = {name: each[3] for name, each in x.items()}
    assert torch.allclose(model(one), by_hand[3], atol=1e-6)
    names = [str(each) for each in by_hand.argmax(1).tolist()]
    assert model.predict(x) == found.predict("fedavg", None, x) == names
    program = torch.export.load(tmp_path / "model" / "program.pt2").module()
    assert torch.allclose(program(image[:, None] / 127.5 - 1, row, site, mask), by_hand, atol=1e-6)
    card = (tmp_path / "model" / "README.md").read_text()
    assert (
        "image [N, 1, 6, 5] (pixels, divided by 127.5, minus 1), row [N, 3] (float32), site [N] (int64), mask" in card
    )
    assert "scores = program(image, row, site, mask)" in card
