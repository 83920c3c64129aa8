"""From settings to clients: names, arguments, splits, scaling, and errors that say what is allowed."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from fedshift.config.spec import DataSpec
from fedshift.data.assembly import federation
from fedshift.data.preparation import IMAGENET
from fedshift.data.sources import load_federation, normalize, parse_changes
from fedshift.utils.errors import UsageError


def spec(**settings):
    return DataSpec(**settings)


def column(values):
    return torch.tensor(values)[:, None, None]


def test_benchmarks_take_arguments_like_methods():
    few, many = (load_federation(name, spec()) for name in ("gaussians(samples=40)", "gaussians"))
    assert {len(client.train) for client in few.clients} == {40}
    assert {len(client.train) for client in many.clients} == {200}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("gausians", "unknown data 'gausians': did you mean 'gaussians'"),
        ("no/such/directory", "there is no .*no/such/directory"),
        ("gaussians(size=3)", "takes"),
        ("gaussians,digits", "there is no|give one"),
        ("mnist", "benchmark 'mnist' is not in data/mnist nor in data: `fedshift data fetch mnist`"),
    ],
)
def test_data_that_are_not_there_are_named_with_what_there_is(data, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDSHIFT_DATA", raising=False)
    with pytest.raises(UsageError, match=said):
        load_federation(data, spec())


def test_benchmarks_are_found_where_root_or_the_environment_says(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    arrays = {f"x_{part}": rng.integers(0, 256, (20, 28, 28), dtype=np.uint8) for part in ("train", "test")}
    np.savez(tmp_path / "mnist.npz", **arrays, y_train=np.arange(20) % 10, y_test=np.arange(20) % 10)
    named = load_federation("mnist", spec(root=str(tmp_path)))
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path))
    assert load_federation("mnist", spec()).fingerprint == named.fingerprint
    assert named.classes == 10


def test_clients_are_chosen_by_name_and_pattern(tiny_folder):
    assert load_federation("digits", spec(domains="worn, p*")).names == ("worn", "pen", "photo", "print")
    assert load_federation(str(tiny_folder), spec(domains="cid,ann")).names == ("cid", "ann")


def test_splits_are_changes_in_the_order_written():
    made = load_federation("digits", spec(split="only(clients='p*'), truncate(), iid(clients=2, within='domain')"))
    assert made.names == ("pen-0", "pen-1", "photo-0", "photo-1", "print-0", "print-1")
    smallest = min(len(client.train) for client in load_federation("digits", spec(domains="p*")).clients)
    assert {len(client.train) for client in made.clients} == {smallest // 2, smallest - smallest // 2}
    assert len(parse_changes(spec(split="iid(clients=3), repeat(), validation(fraction=0.1)"))) == 3
    with pytest.raises(UsageError, match="unknown split 'idd': did you mean 'iid'"):
        load_federation("digits", spec(split="idd(clients=3)"))
    with pytest.raises(UsageError, match="iid takes"):
        load_federation("digits", spec(split="iid(client=3)"))


def test_a_split_into_single_classes_is_refused_unless_allowed():
    split = "labels(clients=10, per_client=1)"
    with pytest.raises(UsageError, match="has only class"):
        load_federation("digits", spec(split=split))
    made = load_federation("digits", spec(split=split, allow_single_class=True))
    assert all(len(client.train.y.unique()) == 1 for client in made.clients)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("half", lambda x: x / 127.5 - 1),
        ("unit", lambda x: x / 255),
        ("imagenet", lambda x: (x / 255 - column(IMAGENET.mean)) / column(IMAGENET.std)),
        ("client", lambda x: (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), correction=0, keepdim=True)),
    ],
)
def test_images_are_scaled_as_asked(choice, expected):
    made = load_federation("digits", spec(normalize=choice))
    for client in made.clients:
        pixels = client.train.x.double()
        assert client.train.inputs(slice(None), torch.float64).sub(expected(pixels)).abs().max() < 1e-6
    plain = load_federation("digits", spec())
    assert (made.fingerprint == plain.fingerprint) == (choice == "half")


def test_the_model_goes_by_the_samples_unless_named(make):
    assert make("fedavg").model.__name__ == "small_cnn"
    assert make("fedavg", data="gaussians").model.__name__ == "abide_mlp"
    assert make("fedavg", model="digit-cnn-bn").model.__name__ == "digit_cnn_bn"


def test_newcomers_may_be_named_by_patterns(make):
    experiment = make("fedbn", data="digits", split="iid(clients=2, within='domain')", newcomers="p*-0,worn-1")
    assert experiment.settings.newcomers == ("pen-0", "photo-0", "print-0", "worn-1")
    with pytest.raises(UsageError, match="unknown client 'x\\*'"):
        make("fedbn", newcomers="x*")


def test_what_reading_found_is_said_in_the_run(make, tmp_path, Listener):
    experiment = make("fedavg", rounds=1)
    noted = replace(experiment, data=replace(experiment.data, notices=("3 files were skipped",)))
    heard = Listener()
    noted.run(tmp_path / "run", callback=heard)
    assert heard.notices[0] == "3 files were skipped"


def test_settings_that_do_not_fit_the_data_are_refused_first(make):
    with pytest.raises(UsageError, match=r"unknown metric 'rmse'.*the data's task is classification"):
        make("fedavg", metric="rmse")
    with pytest.raises(UsageError, match=r"loss mse is not for classification.*use cross_entropy or focal"):
        make("fedavg", loss="mse")
    assert make("fedavg").settings.metric == "accuracy"


def test_names_with_blanks_and_classes_beyond_those_found(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for site in ("site A", "site B"):
        for label in ("cat", "dog"):
            (tmp_path / "own" / site / label).mkdir(parents=True)
            for number in range(6):
                pixels = rng.integers(0, 256, (8, 8), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "own" / site / label / f"{number}.png")
    made = load_federation(str(tmp_path / "own"), spec(domains="site B, site A", classes=4))
    assert made.names == ("site B", "site A")
    assert (made.classes, made.class_names) == (4, ("cat", "dog", "unseen 2", "unseen 3"))


def test_every_client_must_hold_pixels_to_be_scaled_as_pixels():
    x, y = np.zeros((6, 8, 8)), np.arange(6) % 2
    mixed = federation({"bytes": (x.astype(np.uint8), y, x.astype(np.uint8), y), "floats": (x, y, x, y)})
    with pytest.raises(UsageError, match="client 'floats' has other samples"):
        normalize(mixed, "imagenet")
    with pytest.raises(UsageError, match="normalize='unit' is for images"):
        load_federation("gaussians", spec(normalize="unit"))


def test_best_by_auc_is_refused_where_it_would_never_be_defined(make):
    split = "labels(clients=10, per_client=1), validation(fraction=0.2)"
    with pytest.raises(UsageError, match="select='best' by auc needs a client whose validation data hold two classes"):
        make(data="digits", split=split, select="best", metric="auc", allow_single_class=True)
    two = split.replace("per_client=1", "per_client=2")
    assert make(data="digits", split=two, select="best", metric="auc").settings.metric == "auc"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "command", ["data check .", "data show .", "diagnose .", "run --data .", "compare --data .", "advise --data ."]
)
def test_every_command_refuses_columns_of_files_that_have_none(command, cli, tmp_path):
    (tmp_path / "ann" / "cat").mkdir(parents=True)
    (tmp_path / "ann" / "cat" / "1.png").touch()
    made = cli(*command.split(), "--groups", "patient")
    assert made.code == 2
    assert "--groups patient: files have no columns: give a pattern" in " ".join((made.out + made.err).split())


def test_sizes_roots_and_groups_are_refused_where_they_do_nothing(tmp_path):
    x, y = np.zeros((6, 5)), np.arange(6) % 2
    np.savez(tmp_path / "ann.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    with pytest.raises(UsageError, match=r"image_size=9 resizes images, and .* has none"):
        load_federation(str(tmp_path), spec(image_size=9))
    for data in (str(tmp_path), "digits", {"a": (x, y, x, y)}):
        with pytest.raises(UsageError, match="root='elsewhere' is for benchmarks"):
            load_federation(data, spec(root="elsewhere"))
