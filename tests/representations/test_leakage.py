"""``fedshift leak``: what the server sees, the attack on it, the study with its files, and refusals."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fedshift import leak
from fedshift.core.kernel import client_final, client_init, init_client, init_server, load_state
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.core.step import client_step_
from fedshift.methods import METHODS as CATALOG
from fedshift.models.digits import small_cnn
from fedshift.representations.leakage import attack
from fedshift.representations.leakage.attack import AttackSettings, Observation, invert, upload
from fedshift.representations.leakage.rendering import difference_table, draw_panels, likeness_table
from fedshift.utils.errors import UsageError
from fedshift.utils.random_streams import stream, torch_stream

METHODS = ("fedavg", "silobn", "fedbn", "fixbn(switch=0)", "gn", "fedwon", "fedprox", "fedbn(keep='affine')")
SHAPE, KEY = (3, 8, 8), torch.zeros((), dtype=torch.int64)
BOUNDS = torch.full((3, 1, 1), -1.0, dtype=torch.float64), torch.full((3, 1, 1), 1.0, dtype=torch.float64)


def plan_of(method, network=None, lr=0.05):
    with torch_stream(0, "init"):
        network = (network or small_cnn(SHAPE, 4, dense_norm=False)).double()
        return prepare(CATALOG.parse_all(method)[0], network, optimizer=SGD(lr=lr))


def batch_of(count):
    rng = stream(0, "batch")
    return torch.from_numpy(rng.uniform(-1, 1, (count, *SHAPE))), torch.from_numpy(rng.integers(0, 4, count)).sort()[0]


def see(plan, x, y, **given):
    server = init_server(plan)
    return Observation(plan=plan, server=server, update=upload(plan, init_client(plan), server, x, y, **given)[1])


# What the server sees


def test_a_linear_layers_gradients_give_its_input_exactly():
    """Phong et al. 2017 (IACR ePrint 2017/715), section 3: dL/dW = dL/db x."""
    x, y = batch_of(1)
    seen = see(plan_of("fedavg", nn.Sequential(nn.Flatten(), nn.Linear(192, 4))), x, y).gradients
    for unit in range(4):
        assert (seen["1.weight"][unit] / seen["1.bias"][unit]).numpy() == pytest.approx(x.flatten().numpy(), abs=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_gradients_and_labels_are_the_clients(method):
    """Gradients are those that a plain torch loop finds, AGC's clipping aside, and of sent entries alone."""
    plan, (x, y) = plan_of(method), batch_of(1)
    seen = see(plan, x, y)
    assert seen.infer_labels().equal(y)
    assert seen.gradients.keys() == plan.sent & plan.trained
    job = client_init(plan, init_client(plan), seen.server, planned_steps=1)
    state = {name: tensor.clone().requires_grad_(name in job.params) for name, tensor in plan.initial.items()}
    plan.set_mode(training=True, frozen=job.frozen)
    loss = nn.functional.cross_entropy(torch.func.functional_call(plan.module, state, x), y)
    loss.backward()
    for name, grad in seen.gradients.items():
        if method == "fedwon":  # a clipped gradient keeps its direction in each unit
            ours, theirs = (each.flatten(1) if each.ndim > 1 else each[None] for each in (grad, state[name].grad))
            assert torch.linalg.vector_norm(ours, dim=1).le(torch.linalg.vector_norm(theirs, dim=1) + 1e-9).all()
            if grad.squeeze().ndim > 1:
                alike = nn.functional.cosine_similarity(ours, theirs, dim=1)
                assert alike[theirs.norm(dim=1) > 1e-9].numpy() == pytest.approx(1)
        else:
            assert grad.numpy() == pytest.approx(state[name].grad.numpy(), abs=1e-9)


def test_shared_statistics_give_mean_and_variance_of_an_image():
    x, y = batch_of(1)
    network = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(192, 4))
    mean, variance = see(plan_of("fedavg", network), x, y).statistics["0"]
    assert mean.numpy() == pytest.approx(x[0].mean(dim=(1, 2)).numpy(), abs=1e-12)
    assert variance.numpy() == pytest.approx(x[0].flatten(1).var(dim=1).numpy(), abs=1e-12)
    plan = plan_of("fedavg")
    mean, variance = see(plan, x, y).statistics["bn1"]
    outputs = nn.functional.conv2d(x, plan.initial["conv1.weight"], plan.initial["conv1.bias"], padding=1)
    assert mean.numpy() == pytest.approx(outputs.mean(dim=(0, 2, 3)).numpy(), abs=1e-12)
    assert variance.numpy() == pytest.approx(outputs[0].flatten(1).var(dim=1).numpy(), abs=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_statistics_are_seen_where_they_are_sent_and_move(method):
    seen = see(plan_of(method), *batch_of(2))
    shared = method in ("fedavg", "fedprox", "fedbn(keep='affine')")
    assert list(seen.statistics) == (["bn1", "bn2"] if shared else [])
    assert len(seen.sources) == (2 if shared else 1)


def test_labels_are_not_inferred_where_the_last_layer_stays():
    assert see(plan_of("fedper"), *batch_of(2)).infer_labels() is None


# The attack


@pytest.mark.parametrize("method", METHODS)
def test_the_clients_own_images_explain_the_upload_completely(method):
    """The attacker's simulation is the client's step: surgery, clipping and frozen statistics included."""
    plan, (x, y) = plan_of(method), batch_of(4)
    seen = see(plan, x, y)
    job = load_state(plan, init_client(plan), seen.server, planned_steps=1)
    with attack._record_inputs(plan) as inputs:
        found = attack._simulate(plan, job, job.params, x.clone().requires_grad_(), y, differentiate=True)
    for name, grad in seen.gradients.items():
        assert found[name].detach().numpy() == pytest.approx(grad.numpy(), abs=1e-9)
    for name, (mean, variance) in seen.statistics.items():
        assert attack.statistics_distance(inputs[name], mean, variance).item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("method", ["fedbn", "silobn", "fedper", "fedbn(keep='affine')"])
def test_what_stays_on_a_client_changes_nothing_that_the_attacker_computes(method):
    plan, (x, y) = plan_of(method), batch_of(2)
    server = replace(init_server(plan), round=1)
    job, _ = client_step_(plan, client_init(plan, init_client(plan), server, planned_steps=1), x, y, KEY)
    spoiled = {
        part: {
            name: tensor if name in plan.sent else torch.full_like(tensor, 7)
            for name, tensor in getattr(job, part).items()
        }
        for part in ("params", "rest")
    }
    start = torch.from_numpy(stream(0, "start").standard_normal(x.shape))
    found = []
    for work in (job, replace(job, **spoiled)):
        kept, update = client_final(plan, work)
        seen = Observation(plan=plan, server=server, update=update)
        found.append((kept, invert(seen, seen.sources[-1], y, start, BOUNDS, AttackSettings(iterations=3))))
    assert any(not tensor.equal(found[1][0].personal[name]) for name, tensor in found[0][0].personal.items())
    assert found[0][1].equal(found[1][1])
    assert not found[0][1].equal(start.clamp(-1, 1))


def test_the_attack_reconstructs_an_image():
    plan, (x, y) = (
        plan_of("fedavg", nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Sigmoid(), nn.Linear(8, 4))),
        batch_of(1),
    )
    start = torch.from_numpy(stream(0, "start").standard_normal(x.shape))
    settings = AttackSettings(iterations=200, variation=0)
    seen = see(plan, x, y)
    found = invert(seen, "everything", seen.infer_labels(), start, BOUNDS, settings)
    assert (found - x).abs().mean() < 0.02 < 0.5 < (start.clamp(-1, 1) - x).abs().mean()
    assert found.equal(invert(seen, "everything", y, start, BOUNDS, settings))


# The study


SMALL = {
    "methods": "fedavg, fedbn", "rounds": (0, 1), "batch_sizes": (1, 2), "images": 2, "iterations": 2, "seeds": 2,
    "samples": 12, "image_size": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("leak")


@pytest.fixture(scope="module")
def found(kept):
    return leak(**SMALL, out=kept)


def test_every_image_has_a_record_of_every_attack(found):
    records = found.records
    guesses = records[records["attack"] == ""]
    assert len(guesses) == 2 * 2 * 2 * (2 + 2)  # guesses, seeds, rounds, images of each batch size
    counts = records[records["attack"] != ""].groupby(["method", "attack", "labels"]).size().to_dict()
    each = 2 * 2 * (2 + 2)
    assert counts == {
        ("fedavg", "everything", "known"): each,
        ("fedavg", "everything", "inferred"): each,
        ("fedavg", "statistics", "known"): each,
        ("fedbn", "everything", "known"): each,
        ("fedbn", "everything", "inferred"): each,
    }
    assert records["ssim"].between(-1, 1).all()
    assert (records[(records["batch_size"] == 1) & (records["attack"] != "")]["labels_found"] == 1).all()
    pictures = found.pictures[0, 2]
    assert list(pictures) == ["original", "fedavg", "fedavg, statistics alone", "fedbn"]
    assert {tuple(images.shape) for images in pictures.values()} == {(2, 3, 8, 8)}


def test_methods_that_send_the_same_gradients_are_attacked_alike(found):
    """Before the first round FedBN's gradients are FedAvg's without those of BatchNorm, so that its labels are."""
    inferred = found.records[(found.records["labels"] == "inferred") & (found.records["rounds"] == 0)]
    one, other = (inferred[inferred["method"] == name]["labels_found"].tolist() for name in ("fedavg", "fedbn"))
    assert one == other


@pytest.mark.slow
def test_a_study_goes_on_from_what_is_kept_and_only_under_its_settings(kept, found, monkeypatch):
    with pytest.raises(UsageError, match="begun with another study"):
        leak(**SMALL | {"iterations": 3}, out=kept)
    with pytest.raises(UsageError, match="begun with another optimizer"):
        leak(**SMALL | {"lr": 0.1}, out=kept)
    again = leak(**SMALL | {"seeds": 1})
    monkeypatch.setattr("fedshift.representations.leakage.study.invert", None)
    resumed = leak(**SMALL, out=kept)
    assert resumed.records.equals(found.records)
    first = found.records[found.records["seed"] == 0].reset_index(drop=True)
    assert again.records.reset_index(drop=True).equals(first)
    for place, rows in found.pictures.items():
        assert all(images.equal(again.pictures[place][row]) for row, images in rows.items())


@pytest.mark.slow
def test_tables_compare_rows_and_pictures_show_them(found):
    table = likeness_table(found, 0)
    names = [row[0].text for row in table.rows]
    assert names == ["mean image", "another image", "fedavg", "fedavg, statistics alone", "fedbn"]
    values = found.records[(found.records["method"] == "fedbn") & (found.records["labels"] == "known")]
    values = values[(values["rounds"] == 0) & (values["batch_size"] == 1)].groupby("seed")["psnr"].mean()
    cells = dict(zip(table.header, [cell.text for cell in table.rows[names.index("fedbn")]], strict=True))
    assert cells["PSNR B=1"] == f"{values.mean():.2f} ({values.std():.2f})"
    differences = difference_table(found, "psnr")
    assert [row[1].text for row in differences.rows] == ["fedavg", "fedavg, statistics alone", "fedbn"] * 2
    assert differences.rows[0][2].text == "-"
    guesses = found.records[(found.records["method"] == "mean image") & (found.records["rounds"] == 0)]
    guess, ours = (
        rows.groupby(["seed", "batch_size"])["psnr"].mean().mean()
        for rows in (
            guesses,
            found.records[
                (found.records["method"] == "fedbn")
                & (found.records["labels"] == "known")
                & (found.records["rounds"] == 0)
            ],
        )
    )
    assert differences.rows[2][3].text == f"{ours - guess:+.2f}".replace("-", "\N{MINUS SIGN}")
    assert [panel.name for panel in draw_panels(found)] == [
        f"images-{rounds}-rounds-batch-{size}" for size in (1, 2) for rounds in (0, 1)
    ]


def test_the_command_writes_tables_records_and_pictures(cli, tmp_path, vector_only):
    words = "--methods fedbn,gn --rounds 0 --batch-sizes 2 --images 2 --seeds 1 --iterations 1 --out seen"
    done = cli("leak", *words.split())
    assert done.code == 0, done.err
    assert "mean image" in done.out
    names = {path.relative_to(tmp_path / "seen").as_posix() for path in (tmp_path / "seen").rglob("*.*")}
    assert {"records.csv", "likeness-0-rounds.md", "labels.tex", "images-0-rounds-batch-2.svg"} <= names
    assert {"cells/fedbn-seed0.safetensors", "cells/gn-seed0.safetensors"} <= names


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rounds": (-1,)}, "rounds=-1: must be a whole number of at least 0"),
        ({"iterations": 0}, "iterations=0: must be a whole number of at least 1"),
        ({"batch_sizes": ()}, r"batch-sizes=\(\): give at least one number"),
        ({"batch_sizes": (13,)}, "batch-sizes=13: client 'pen' has 12 training samples"),
        ({"model": "small-cnn"}, r"batch-sizes=1: the network of fedavg cannot train on one sample"),
        ({"methods": "centralized"}, "'centralized' sends no trained entry"),
        ({"methods": "single"}, "'single' sends no trained entry"),
        ({"methods": "hbn"}, "'hbn' sends statistics of samples beside its entries"),
        ({"data": "nuclei"}, "leak attacks networks that classify images"),
        ({"optimizer": "adamw"}, "optimizer"),
        ({"nonsense": 1}, "unknown argument 'nonsense'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_attacked_is_refused_before_work_starts(given, said):
    with pytest.raises(UsageError, match=said):
        leak(**SMALL | given)
