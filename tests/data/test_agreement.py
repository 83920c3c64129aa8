"""One scale for all splits and clients: what reaches a network equals numpy's sums, or is refused with both places."""

from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest

from fedshift.config.spec import DataSpec, RunSpec
from fedshift.data.agreement import KINDS
from fedshift.data.assembly import federation
from fedshift.data.sources import load_federation, load_source
from fedshift.flower.coordinator.descriptions import ClientRegistry, SiteDescription, merge_columns
from fedshift.new_clients.site_data import load_site
from fedshift.utils.errors import FedshiftError, UsageError

GRAY = np.random.default_rng(0).integers(0, 256, (8, 5, 6))
GRAY[0, 0, :2] = 0, 255
Y = np.arange(8) % 2
ARRAYS = {
    "bytes": GRAY.astype(np.uint8),
    "uint16": GRAY.astype(np.uint16),
    "int64": GRAY,
    "color": np.repeat(GRAY.astype(np.uint8)[..., None], 3, axis=3),
    "signed": GRAY / 127.5 - 1,
    "unit": GRAY / 255,
    "half": (GRAY / 255).astype(np.float16),
    "levels": GRAY.astype(np.float32),
    "Booleans": GRAY > 127,
    "bits": (GRAY > 127).astype(np.uint8),
    "standardized": (GRAY - GRAY.mean()) / GRAY.std(),
}
"""The same pictures as they come: in what type, and at what scale."""
AT_ONE = [
    {"bytes", "uint16", "int64", "color", "signed", "Booleans"}, {"unit", "half", "signed", "standardized"},
    {"levels", "standardized"}, {"bits"},
]  # fmt: skip
"""Which of them may stand side by side: all of one scale, or with nothing that says otherwise."""


@pytest.mark.parametrize(("one", "other"), list(product(ARRAYS, ARRAYS)))
def test_arrays_of_two_types_reach_a_network_at_one_scale_or_are_refused(one, other):
    x, z = ARRAYS[one], ARRAYS[other]
    for made in (federation({"a": (x, Y, z, Y)}), federation({"a": (x, Y, x, Y), "b": (z, Y, z, Y)})):
        if not any({one, other} <= kinds for kinds in AT_ONE):
            with pytest.raises(UsageError, match=r"client 'a', train data: .*, but client '[ab]', t.* data: "):
                made.fit_images().check()
            continue
        parts = [split for client in made.fit_images().check().clients for split in client.splits.values()]
        found = [part.inputs(slice(None)).double().numpy()[:, 0] for part in (parts[0], parts[-1])]
        for name, inputs in zip((one, other), found, strict=True):
            given = ARRAYS[name][..., 0] if name == "color" else ARRAYS[name].astype(float)
            given = given * 255.0 if name == "Booleans" else given
            stored = name in ("bytes", "uint16", "int64", "color", "Booleans", "bits")
            assert np.abs(inputs - (given / 127.5 - 1 if stored else given)).max() < 1e-6


def test_floats_from_minus_one_do_not_stand_beside_pixels_of_another_scaling(tmp_path):
    for name, test in (("ann", "bytes"), ("bob", "signed")):
        np.savez(tmp_path / f"{name}.npz", x_train=ARRAYS["bytes"], y_train=Y, x_test=ARRAYS[test], y_test=Y)
    assert load_federation(str(tmp_path), DataSpec()).names == ("ann", "bob")
    with pytest.raises(UsageError, match=r"normalize='unit' is for images .*, but client 'bob' has other samples"):
        load_federation(str(tmp_path), DataSpec(normalize="unit"))


def test_two_scales_are_refused_before_any_work(tmp_path, cli):
    for name in ("ann", "bob"):
        np.savez(tmp_path / f"{name}.npz", x_train=ARRAYS["unit"], y_train=Y, x_test=ARRAYS["bytes"], y_test=Y)
    said = "client 'ann', train data: floats from 0 to 1, but client 'ann', test data: 8-bit pixels"
    for command in ("data check", "run --data"):
        made = cli(*command.split(), str(tmp_path))
        assert made.code
        assert said in " ".join((made.out + made.err).split())


def test_a_new_client_of_another_scale_is_refused_and_its_integers_become_floats():
    run = federation({"a": (ARRAYS["unit"], Y, ARRAYS["unit"], Y)}, name="run")
    new = {"b": (ARRAYS["unit"], Y, ARRAYS["levels"], Y)}
    with pytest.raises(UsageError, match=r"the run's data: floats from 0 to 1, but own data, client"):
        load_site({"b": new["b"][2:] * 2}, RunSpec(), run.schema)
    with pytest.raises(UsageError, match="whole numbers up to 255 as floats; their scales differ"):
        load_site(new, RunSpec(), run.schema)
    rows = np.random.default_rng(1).normal(size=(8, 5))
    whole = np.rint(10 * rows).astype(np.int64)
    made = load_site({"b": (whole, Y, whole, Y)}, RunSpec(), federation({"a": (rows, Y, rows, Y)}).schema)
    assert np.array_equal(made.client("b").train.inputs(slice(None)).numpy(), whole)


# Across machines


def site(name, **changes):
    facts = {
        "name": name, "version": "1", "shape": [1, 5, 6], "dtype": "float32", "classes": 2, "class_names": [],
        "samples": {"train": 8, "test": 8}, "labels": None, "scale": "half",
    }  # fmt: skip
    return SiteDescription.of(facts | changes)


def test_sites_of_two_scales_are_named():
    ours, theirs = "floats from 0 to 1", "whole numbers up to 255 as floats"
    one, other = site("north", values={"train": ours, "test": ours}), site("south", values={"test": theirs})
    with pytest.raises(FedshiftError, match=f"'north', train data: {ours}, but 'south', test data: {theirs}"):
        ClientRegistry(clients=(one, other)).to_federation(None)
    assert ClientRegistry(clients=(one, site("south", values={"train": ours}))).to_federation(None).classes == 2
    with pytest.raises(FedshiftError, match=r"site 'north' .*'values': each of 8-bit pixels"):
        site("north", values={"train": "everything"})
    pixels = site("north", dtype="uint8", values={"train": KINDS[0]})
    with pytest.raises(FedshiftError, match="'north' has pixels scaled by half, but 'south' has pixels scaled by unit"):
        ClientRegistry(clients=(pixels, replace(pixels, name="south", scale="unit"))).to_federation(None)


# True and False in a column of numbers


def write_tables(folder, values, suffix=".csv"):
    folder.mkdir(exist_ok=True)
    for name, column in values.items():
        table, file = pd.DataFrame({"age": np.arange(8) * 2.5, "flag": column, "y": Y}), folder / f"{name}{suffix}"
        table.to_csv(file, index=False) if suffix == ".csv" else table.to_parquet(file)
    return str(folder)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_true_and_false_are_one_and_zero_and_no_other_numbers(suffix, tmp_path):
    truths = Y > 0
    told = {"a": truths, "b": 1 - Y}
    spec = DataSpec(target="y", scaling="none", test_fraction=0.25)
    made = load_source(write_tables(tmp_path, told, suffix), spec)
    assert [column.holds for column in made.columns] == ["numbers", "True and False"]
    for client in made.clients:
        rows = np.concatenate([split.x.numpy() for split in client.splits.values()])
        expected = {(age, float(flag)) for age, flag in zip(np.arange(8) * 2.5, told[client.name], strict=True)}
        assert {tuple(row) for row in rows.tolist()} == expected
    with pytest.raises(UsageError, match=r"column 'flag' holds True or False \(.*a.*, which are 1 and 0, but 37.5"):
        load_source(write_tables(tmp_path, {"b": Y * 37.5}, suffix), spec)


def test_a_client_that_joins_is_held_to_the_meaning_of_its_column(tmp_path):
    spec = RunSpec(target="y")
    truths = write_tables(tmp_path / "truths", {"a": Y > 0, "b": Y > 0})
    numbers = write_tables(tmp_path / "numbers", {"c": Y * 2, "d": Y * 3})
    with pytest.raises(UsageError, match=r"column 'flag' holds True or False .*but [23] elsewhere"):
        load_site(numbers, spec, load_source(truths, spec).schema)
    with pytest.raises(UsageError, match="holds True or False, but numbers other than 0 and 1 in 'numbers'"):
        load_site(truths, spec, load_source(numbers, spec).schema)
    sites = {name: load_source(str(tmp_path / name), spec).columns for name in ("truths", "numbers")}
    with pytest.raises(FedshiftError, match=r"'flag' contains True and False at 'truths', but numbers .* at 'numbers'"):
        merge_columns(sites)


# Labels of one kind


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        ({"a": [0, 1], "b": ["neg", "pos"]}, r"'a' has numbers \(0, 1\); client 'b' has words \(neg, pos\)"),
        ({"a": ["True", "False"], "b": ["neg", "pos"]}, "client 'a' has True and False"),
        ({"a": ["TRUE", "FALSE"], "b": [1, 2]}, r"client 'b' has numbers \(1, 2\)"),
        ({"a": ["true", "false"], "b": ["0.0", "1.0"]}, ((1, 0), (0, 1))),
        ({"a": ["0", " 1"], "b": [0.0, 1.0]}, ((0, 1), (0, 1))),
        ({"a": [0, 1], "b": [2, 3]}, ((0, 1), (2, 3))),  # label skew
        ({"a": ["0", "1"], "b": ["2", "3+"]}, ((0, 1), (2, 3))),  # grades
        ({"a": ["cat", "dog"], "b": ["emu", "fox"]}, ((0, 1), (2, 3))),
    ],
)
def test_labels_are_of_one_kind_at_all_clients(labels, classes, tmp_path):
    for name, two in labels.items():
        pd.DataFrame({"age": range(8), "y": two * 4}).to_csv(tmp_path / f"{name}.csv", index=False)
    spec = DataSpec(target="y", scaling="none")
    if isinstance(classes, str):
        with pytest.raises(UsageError, match=rf"labels are of different kinds: .*{classes}"):
            load_source(str(tmp_path), spec)
        return
    made = load_source(str(tmp_path), spec)
    for client, expected in zip(made.clients, classes, strict=True):
        for split in client.splits.values():
            assert split.y.tolist() == [expected[int(age) % 2] for age in split.x[:, 0]]


def test_class_folders_and_sites_are_of_one_kind_too(tmp_path):
    names, sites = {"ann": ["0", "1"], "bob": ["neg", "pos"]}, []
    for client, classes in names.items():
        sites.append(site(client, class_names=classes))
        for name in classes:
            (tmp_path / client / name).mkdir(parents=True)
            (tmp_path / client / name / "1.png").touch()
    for read in (
        lambda: load_source(str(tmp_path), DataSpec()),
        lambda: ClientRegistry(clients=tuple(sites)).to_federation(None),
    ):
        with pytest.raises(FedshiftError, match=r"'ann' has numbers \(0, 1\); client 'bob' has words \(neg, pos\)"):
            read()
