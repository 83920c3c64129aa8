"""``fedshift features``: similarities and distances of a run, its output, pictures, files and refusals."""

import itertools
import math
from dataclasses import replace
from threading import Event

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from fedshift import read_run
from fedshift.config.spec import CompareSpec, RunSpec
from fedshift.experiments.callbacks import Callback
from fedshift.experiments.factory import make_experiment
from fedshift.experiments.restoration import load_experiment, restore_trial
from fedshift.representations.comparison import select_inputs, train_models
from fedshift.representations.figures import draw_panels, tile_maps
from fedshift.representations.rendering import distance_table, list_notes, render_comparison, similarity_table
from fedshift.utils.errors import FedshiftError, UsageError

THREE = {
    "data": "digits", "domains": "pen,photo,faded", "image_size": 12, "model": "small-cnn", "samples": 16,
    "batch_size": 8, "rounds": 2, "lr": 0.1,
}  # fmt: skip


def trained(path, kind=CompareSpec, **settings):
    make_experiment(kind(**(THREE | settings))).run(path)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs") / "run", methods="fedavg,fedbn,fedwon,centralized", seeds=2)


@pytest.fixture(scope="module")
def found(run):
    return read_run(run).features(samples=6)


def trials_of(directory):
    _, experiment = load_experiment(directory)
    return (restore_trial(experiment, directory, method.name, seed) for method in experiment.methods for seed in (0, 1))


def bytes_of(directory):
    return {file: file.read_bytes() for file in sorted(directory.rglob("*")) if file.is_file()}


# Similarities


@pytest.mark.slow
def test_similarities_are_those_of_networks_run_one_by_one(run, found):
    for trial in trials_of(run):
        if (method := trial.plan.method.name) == "centralized":
            continue
        server, local = train_models(trial, found.clients)

        def maps(state, client, trial=trial):
            network = trial.make_network().eval()
            network.load_state_dict(state)
            with torch.no_grad():
                upto = [name for name, _ in network.named_children()].index("conv2") + 1
                return network[:upto](select_inputs(trial.plan, trial.data.client(client), 6)).double().flatten(2)

        def alike(one, other, client, maps=maps):
            return F.cosine_similarity(maps(one, client), maps(other, client), dim=2).mean().item()

        pairs = [
            (alike(local[a], local[b], a) + alike(local[a], local[b], b)) / 2
            for a, b in itertools.combinations(local, 2)
        ]
        ours = found.similarity.set_index(["method", "seed"]).loc[method, trial.seed]
        assert ours["client_client"] == pytest.approx(np.mean(pairs), abs=1e-6)
        assert ours["server_client"] == pytest.approx(
            np.mean([alike(server, local[name], name) for name in local]), abs=1e-6
        )
        assert 0 < ours["client_client"] < 0.9999


@pytest.mark.slow
def test_models_that_did_not_move_are_alike(tmp_path):
    run = trained(tmp_path / "run", methods="nonorm,fedwon", lr=0.0, rounds=1)
    similarity = read_run(run).features(samples=5).similarity[["client_client", "server_client"]]
    assert similarity.to_numpy() == pytest.approx(np.ones((2, 2)))


@pytest.mark.slow
def test_some_methods_and_seeds_are_those_of_the_whole(run, found):
    some = read_run(run).features(samples=6, methods=["fedwon", "fedbn"], seeds=[1])
    for ours, whole in ((some.similarity, found.similarity), (some.distances, found.distances)):
        both = whole.query("method in ('fedbn', 'fedwon') and seed == 1").reset_index(drop=True)
        pd.testing.assert_frame_equal(ours, both)
    assert (some.seeds, found.similarity["method"].tolist()[::2]) == (
        (1,), ["fedavg", "fedbn", "fedwon", "centralized"]
    )  # fmt: skip


@pytest.mark.slow
def test_one_client_has_no_pair_and_pooled_data_no_clients(run, found):
    alone = read_run(run).features(samples=4, clients=["photo"])
    assert alone.similarity["client_client"].isna().all()
    assert alone.similarity["server_client"][0] < 1
    assert len([*draw_panels(alone)]) == 1 + 3
    assert alone.distances["mean_client_client"].isna().all()
    said = [*list_notes(found)]
    assert said[0] == "All data are pooled, so there are no clients' models: centralized."
    assert said[1] == "No BatchNorm layer with running statistics: fedwon."
    assert [cell.text for cell in similarity_table(found).rows[3]] == ["centralized", "-", "-"]


def test_a_seed_whose_maps_are_not_finite_is_left_out_and_named(found):
    rows = found.similarity[found.similarity["method"] == "fedavg"].reset_index(drop=True)
    lost = replace(found, similarity=rows.assign(**{name: [rows[name][0], math.nan] for name in rows.columns[3:]}))
    assert similarity_table(lost).rows[0][1].text == f"{rows['client_client'][0]:.3f}"
    assert "Feature maps are not finite, so similarities are left out: fedavg with seed 1." in [*list_notes(lost)]


# Statistics


def test_distances_of_statistics_are_by_formula(run, found):
    trial = next(trial for trial in trials_of(run) if trial.plan.method.name == "fedbn" and trial.seed == 1)
    server, local = train_models(trial, found.clients)
    row = found.distances.set_index(["method", "seed", "layer"]).loc[("fedbn", 1, "bn2")]

    def apart(one, other):
        (m, v), (n, w) = ([s[f"bn2.running_{k}"].double().numpy() for k in ("mean", "var")] for s in (one, other))
        return np.abs(m - n) @ ((v + w) / 2 + 1e-5) ** -0.5 / len(m), np.abs(np.log((v + 1e-5) / (w + 1e-5))).mean()

    pairs = np.mean([apart(a, b) for a, b in itertools.combinations(local.values(), 2)], axis=0)
    with_server = np.mean([apart(server, own) for own in local.values()], axis=0)
    np.testing.assert_allclose(row.to_numpy(float), [*pairs, *with_server], rtol=1e-6)
    assert (found.distances.iloc[:, 3:] > 0).all(axis=None)
    assert set(found.distances["method"]) == {"fedavg", "fedbn"}
    assert len(found.distances) == 2 * 2 * 3


def test_tables_have_mean_and_spread_over_seeds(found):
    values = found.similarity.query("method == 'fedavg'")["server_client"]
    cell = similarity_table(found).rows[0][2].text
    assert cell == f"{np.mean(values):.3f} ({np.std(values, ddof=1):.3f})"
    rows = found.distances[(found.distances["method"] == "fedbn") & (found.distances["layer"] == "bn1")]
    of = rows["variance_server_client"]
    table = {row[0].text: [cell.text for cell in row[1:]] for row in distance_table(found).rows}
    assert list(table) == [f"{method} bn{number}" for method in ("fedavg", "fedbn") for number in (1, 2, 3)]
    assert table["fedbn bn1"][3] == f"{of.mean():.3f} ({of.std():.3f})"


@pytest.mark.slow
def test_a_network_without_batchnorm_has_a_table_less(tmp_path):
    run = trained(tmp_path / "run", RunSpec, method="nonorm", rounds=1)
    found = read_run(run).features(samples=4, layer="conv1")
    assert found.similarity["layer"].tolist() == ["conv1"]
    assert len([*render_comparison(found)]) == 3
    assert [panel.name for panel in draw_panels(found)] == ["maps-01-pen", "maps-02-photo", "maps-03-faded"]
    assert [*found.drawn["nonorm"].maps["pen"]] == ["conv1"]


# What is drawn and written


def test_a_mosaic_has_each_map_in_its_place_scaled_from_0_to_1():
    maps = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
    drawn = tile_maps(maps)
    assert drawn.shape == (3 * 3 + 4, 3 * 4 + 4)
    np.testing.assert_allclose(drawn[:3, :4], np.arange(12).reshape(3, 4) / 11)
    np.testing.assert_allclose(drawn[:3, 6:10], drawn[:3, :4])
    assert np.isnan(drawn).sum() == drawn.size - 24
    assert (tile_maps(np.ones((1, 2, 2)))[:2, :2] == 0).all()
    assert tile_maps(np.array([[[1.0, 3.0, np.inf]], [[np.nan] * 3]]))[0, :3].tolist() == [0, 1, np.inf]


@pytest.mark.slow
def test_pictures_show_rows_of_methods_and_one_dot_a_channel(found):
    made = {panel.name: panel for panel in draw_panels(found)}
    assert list(made) == [
        "maps-01-pen", "maps-02-photo", "maps-03-faded", "batchnorm-bn1", "batchnorm-bn2", "batchnorm-bn3",
    ]  # fmt: skip
    maps = made["maps-01-pen"].figure
    assert len(maps.axes) == 3 * 3
    assert [axes.get_title(loc="center") for axes in maps.axes[:3]] == ["test image", "conv1", "conv2"]
    assert [axes.texts[0].get_text() for axes in maps.axes[::3]] == ["fedavg", "fedbn", "fedwon"]
    np.testing.assert_array_equal(
        maps.axes[5].images[0].get_array().filled(np.nan), tile_maps(found.drawn["fedbn"].maps["pen"]["conv2"])
    )
    faded = found.images["faded"]
    shown = made["maps-03-faded"].figure.axes[0].images[0]
    np.testing.assert_allclose(shown.get_array(), faded.transpose(1, 2, 0) / 255)  # as pale as it is
    assert faded.max() - faded.min() < 255
    dots = made["batchnorm-bn2"].figure.axes[1].collections[0].get_offsets()
    drawn = found.drawn["fedavg"]
    server, clients = drawn.statistics["bn2"]
    np.testing.assert_allclose(dots[:, 0], clients["pen"].mean)
    np.testing.assert_allclose(dots[:, 1], server.mean)


@pytest.mark.slow
def test_the_command_writes_tables_and_pictures_and_leaves_the_run_as_it_is(run, cli, tmp_path):
    before = bytes_of(run)
    done = cli(
        "features", run, "--samples", 6, "--clients", "pen,fad*", "--methods", "fedbn,fedw*", "--out", tmp_path / "seen"
    )
    assert done.code == 0, done.err
    assert bytes_of(run) == before
    assert "maps of conv2" in done.out
    assert "fedbn bn3" in done.out
    assert "fedavg" not in done.out
    written = {file.name for file in (tmp_path / "seen").iterdir()}
    assert written == {
        *(f"{name}.{kind}" for name in ("similarity", "batchnorm") for kind in ("md", "tex", "csv")),
        *(f"maps-{name}.{kind}" for name in ("01-pen", "02-faded") for kind in ("png", "svg", "pdf")),
        *(f"batchnorm-bn{number}.{kind}" for number in (1, 2, 3) for kind in ("png", "svg", "pdf")),
    }  # fmt: skip
    for file in (tmp_path / "seen").glob("*.png"):
        with Image.open(file) as image:
            assert min(image.size) > 300
    kept = pd.read_csv(tmp_path / "seen" / "similarity.csv")
    ours = read_run(run).features(samples=6, clients="pen,faded", methods="fedbn,fedwon").similarity
    assert kept["client_client"].tolist() == pytest.approx(ours["client_client"].tolist(), rel=1e-5)
    assert set(kept["layer"]) == {"conv2"}


# Refusals


class Stopping(Callback):
    def __init__(self, stop):
        self.stop = stop

    def on_round_end(self, done):
        self.stop.set()


@pytest.mark.slow
def test_what_cannot_be_looked_at_is_said(run, tmp_path, cli):
    for asked, said in (
        ({"layer": "conv9"}, r"unknown convolution 'conv9': did you mean .*allowed are conv1, conv2"),
        ({"layer": "bn1"}, r"unknown convolution 'bn1'.*allowed are conv1, conv2"),
        ({"clients": "pne"}, r"unknown client 'pne': did you mean 'pen'"),
        ({"clients": ["pne"]}, r"unknown client 'pne'"),
        ({"clients": []}, r"name at least one"),
        ({"samples": 0}, r"samples=0: must be at least 1"),
        (
            {"methods": "fedbm"},
            r"unknown method 'fedbm': did you mean 'fedbn'\? allowed are centralized, fedavg, f",
        ),
        ({"methods": []}, r"unknown method '': allowed are centralized"),
        ({"seeds": [2]}, r"no seed 2 here: there are 0, 1"),
        ({"seeds": []}, r"seeds=\[\]: the run has 2; give a number from 1 to that"),
    ):
        with pytest.raises(UsageError, match=said):
            read_run(run).features(**asked)
    assert "holds no run: give a directory that `fedshift run`" in cli("features", tmp_path).err


def test_a_network_without_convolutions_is_refused(tmp_path):
    run = trained(tmp_path / "run", RunSpec, method="fedavg", rounds=1, model="fnn2")
    with pytest.raises(UsageError, match=r"network of fedavg has no convolution, and so no feature maps: choose"):
        read_run(run).features()


@pytest.mark.slow
def test_newcomers_are_left_out_and_refused_by_name(tmp_path):
    run = trained(tmp_path / "run", RunSpec, method="fedbn", rounds=1, newcomers="photo")
    found = read_run(run).features(samples=3)
    assert (found.clients, found.of) == (("pen", "faded"), 2)
    with pytest.raises(UsageError, match=r"client 'photo' is a newcomer, which never trains: choose from pen, faded"):
        read_run(run).features(clients="p*")


def test_an_unfinished_run_is_refused_with_the_command_that_goes_on(tmp_path, cli):
    run, stop = tmp_path / "run", Event()
    make_experiment(RunSpec(**THREE, method="fedbn")).run(run, callback=Stopping(stop), stop=stop)
    said = "fedbn with seed 0 has done 1 of 2 rounds; leave it out (methods, seeds), or continue it: "
    assert f"{said}fedshift run --resume {run}" in cli("features", run).err
    (run / "trials" / "fedbn-seed0" / "checkpoint.safetensors").unlink()
    with pytest.raises(FedshiftError, match=r"no checkpoint at .*: the run ended earlier"):
        read_run(run).features()


@pytest.mark.slow
def test_of_many_clients_the_first_are_looked_at_and_that_is_said(run, monkeypatch):
    monkeypatch.setattr("fedshift.representations.comparison.PICTURED", 2)
    found = read_run(run).features(samples=2)
    assert (found.clients, found.of) == (("pen", "photo"), 3)
    assert "2 of 3 clients" in str(next(iter(render_comparison(found))))
