"""A network that fedshift never trained, for clients of the user's: against plain torch."""

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

import fedshift
from fedshift.data.assembly import federation
from fedshift.models.digits import small_cnn
from fedshift.utils.errors import UsageError
from tests.conftest import ARRAYS

CLASSES = ("cat", "dog", "owl", "yak")


@pytest.fixture(autouse=True)
def cached(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def no_onnx(monkeypatch):
    monkeypatch.setattr("fedshift.export.package.save_onnx", lambda *_, **__: "not here")


@pytest.fixture
def network():
    torch.manual_seed(0)
    made = small_cnn((3, 8, 8), 4)
    made(torch.randn(40, 3, 8, 8))
    return made.eval()


@pytest.fixture
def folder(tmp_path):
    """One client's images below its classes, of which it lacks one; in parts."""
    x_train, y_train, x_test, y_test = ARRAYS["ann"]
    for part, x, y in (("train", x_train, y_train), ("test", x_test, y_test)):
        for number, (image, label) in enumerate(zip(x, y, strict=True)):
            place = tmp_path / "clinic" / part / ("cat", "owl", "yak")[label]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(place / f"{number:02}.png")
    return tmp_path / "clinic"


def count_right(network, client="ann"):
    """The share of the client's test images that the network gets right, its classes as in the folder."""
    x, y = ARRAYS[client][2:]
    inputs = torch.from_numpy(x).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        return float((network(inputs).argmax(1) == torch.tensor([0, 2, 3])[torch.from_numpy(y)]).float().mean())


def test_the_command_measures_the_network_as_torch_does_and_saves_every_model(cli, network, folder, tmp_path):
    save_file(network.state_dict(), tmp_path / "own.safetensors")
    own = ("--model", "small-cnn", "--weights", "own.safetensors", "--class-names", ",".join(CLASSES))
    outcome = cli("adapt", *own, "--data", folder, "--lr", 0.05)
    assert (outcome.code, outcome.err) == (0, "")
    shown = {}
    for line in outcome.out.splitlines():
        words = line.split()
        if words[:2] == ["own", "network:"]:
            shown[words[2]] = float(words[-1])
    assert list(shown) == ["global", "mixed", "reestimate", "tent", "finetune", "finetune_bn"]
    assert shown["global"] == round(100 * count_right(network), 2)
    for policy in ("reestimate", "mixed", "tent", "finetune", "finetune_bn"):
        saved = cli("adapt", *own, "--data", folder, "--lr", 0.05, "--policy", policy, "--save", policy)
        assert (saved.code, f"{policy}/clinic: own network: {policy}, seed 0" in saved.out) == (0, True), saved.err
        network.load_state_dict(load_file(tmp_path / policy / "clinic" / "weights.safetensors"))
        assert shown[policy] == round(100 * count_right(network), 2)
    assert "average and nearest: the one global model, shown unchanged, under own network" in outcome.out


def test_python_takes_the_network_itself_and_changes_nothing_of_it(network):
    before = {name: x.clone() for name, x in network.state_dict().items()}
    named = federation({name: arrays for name, arrays in ARRAYS.items() if name != "cid"}, classes=4)
    table = fedshift.adapt_network(network, named, "reestimate", lr=0.05)
    assert list(table.index) == ["ann", "bob", "macro"]
    x, y = (torch.from_numpy(part) for part in ARRAYS["bob"][2:])
    right = (network(x.permute(0, 3, 1, 2).float() / 127.5 - 1).argmax(1) == y).float().mean()
    assert table.loc["bob", ("own network: global model", "mean")] == pytest.approx(float(right))
    assert all(torch.equal(x, network.state_dict()[name]) for name, x in before.items())


def test_classes_that_do_not_fit_are_refused_with_the_fix(cli, network, folder, tmp_path):
    save_file(network.state_dict(), tmp_path / "own.safetensors")
    own = ("adapt", "--model", "small-cnn", "--weights", "own.safetensors", "--data", folder)
    for more, said in (
        ((), "its last layer is for 4 classes, and the data have 3"),
        (
            ("--class-names", "cat,dog,owl"),
            "clinic has a class 'yak', which is not among the classes of the network, cat, dog",
        ),
        (("--seeds", 2), "--unlabeled, --methods, --seeds, --run-data and --code belong to a run"),
        (("--rounds", 0), "rounds=0: must be at least 1"),
    ):
        outcome = cli(*own, *more)
        assert outcome.code == 2
        assert said in outcome.err, outcome.err
    assert "give the directory of a run, or for a network of your own its --model" in cli("adapt", "--data", "x").err
    with pytest.raises(UsageError, match="name all of its in the order of its scores"):
        fedshift.adapt_network(nn.Sequential(nn.Flatten(), nn.Linear(192, 9)), federation(ARRAYS))
    assert "describes the network of a file of weights, but run is a run" in cli(*own[:3], "run", "--data", folder).err


def test_a_folder_of_one_client_is_adapted_to_with_or_without_parts(cli, make, folder, tmp_path):
    """Both give what the folder gives inside a directory of clients."""
    inside = tmp_path / "clients" / "clinic"
    inside.parent.mkdir()
    for part in ("train", "test"):
        (folder / part / "yak").rename(folder / part / "dog")
    make(rounds=1, method="fedavg", engine="sequential").run(tmp_path / "run")
    words = ("adapt", tmp_path / "run", "--policies", "finetune", "--data")
    alone = cli(*words, folder)
    assert alone.code == 0, alone.err
    folder.rename(inside)
    assert cli(*words, tmp_path / "clients").out.splitlines()[1:] == alone.out.splitlines()[1:]
    # class folders alone: its own share of images is for testing
    bare = inside / "train"
    found = cli(*words, bare.rename(tmp_path / "bare"))
    assert found.code == 0, found.err
    assert "bare" in found.out
