"""Whole groups move: into test and validation data, samples of a size, partitions and saved splits."""

from io import StringIO

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console
from torch.utils.data import Dataset, Subset

from fedshift.config.spec import DataSpec
from fedshift.data.checks.faults import judge_groups, judge_test_sizes
from fedshift.data.groups import find_groups
from fedshift.data.partition import _cut_groups
from fedshift.data.sources import apply_splits, load_source, write_assignment
from fedshift.diagnosis.overview import describe, summarize_sizes
from fedshift.utils.errors import UsageError

READING = {"client_column": "site", "target": "ill", "groups": "patient", "scaling": "none"}


def stays():
    """Stays of patients at two hospitals, one to six each, numbered, mostly with one label a patient."""
    rng = np.random.default_rng(0)
    patient = np.repeat(np.arange(120), rng.integers(1, 7, 120))
    ill = np.where(rng.random(len(patient)) < 0.1, rng.integers(0, 3, len(patient)), patient % 3)
    stay = np.arange(len(patient))
    frame = pd.DataFrame({"stay": stay, "site": np.where(patient < 70, "north", "south"), "ill": ill})
    return frame.assign(patient=[f"p{number}" for number in patient]).sample(frac=1, random_state=1)


FRAME = stays()
OWNER = FRAME.sort_values("stay")["patient"].to_numpy()


def prepare(**given):
    spec = DataSpec(**READING, **given)
    return apply_splits(load_source(FRAME, spec), spec)


def list_stays(split):
    return split.x[:, 0].int().numpy()


def list_places(data, *splits):
    """Return the clients and splits that hold a stay of each patient."""
    found = {}
    for client in data.clients:
        for name in splits:
            for patient in set(OWNER[list_stays(client.splits[name])]):
                found.setdefault(patient, set()).add((client.name, name))
    return found


def holds_whole(data, splits=("train", "test"), complete=True):
    places = list_places(data, *splits)
    stays = [stay for client in data.clients for name in splits for stay in list_stays(client.splits[name])]
    assert len(stays) == len(set(stays))
    for patient in places:  # all or none of a patient's stays, in one place
        assert len(places[patient]) == 1
        assert {*np.flatnonzero(patient == OWNER)} <= {*stays}
    return not complete or len(stays) == len(FRAME)


def test_test_and_validation_data_are_whole_groups():
    made = prepare(validation=0.25)
    assert holds_whole(made, ("train", "validation", "test"))
    for client in made.clients:
        groups = [len(set(OWNER[list_stays(client.splits[name])])) for name in ("train", "validation")]
        assert groups[1] == round(0.25 * sum(groups))
    assert holds_whole(prepare(split="validation(size=3)"), ("train", "validation", "test"))


@pytest.mark.parametrize("count", [1, 10, 60])
def test_samples_of_a_size_are_whole_groups_that_fit(count):
    made = prepare(samples=count)
    assert holds_whole(made, complete=False)
    for client in made.clients:
        sizes = np.unique(OWNER[list_stays(client.train)], return_counts=True)[1]
        assert count - 6 < sizes.sum() <= max(count, sizes.min())


@pytest.mark.parametrize(
    "split",
    [
        "dirichlet(clients=5, alpha=0.3, test='same')", "quantity(clients=4, alpha=5.0, test='same')",
        "labels(clients=3, per_client=2, test='same')", "domain_mix(clients=4, mixing=0.3, test='same')",
        "iid(clients=3, within='domain', test='same')",
    ],
)  # fmt: skip
def test_partitions_move_whole_groups(split):
    made = prepare(split=split)
    assert holds_whole(made)
    assert holds_whole(prepare(split=f"{split}, validation(fraction=0.2)"), ("train", "validation", "test"))
    assert made.fingerprint == prepare(split=split).fingerprint


def test_a_saved_split_is_the_same_groups(tmp_path):
    spec = DataSpec(**READING, split="dirichlet(clients=4, alpha=0.5, test='same')", validation=0.2)
    source = load_source(FRAME, spec)
    (tmp_path / "split.csv").write_text(write_assignment(source, spec))
    again = prepare(split=f"saved(path={str(tmp_path / 'split.csv')!r})")
    for ours, theirs in zip(again.clients, apply_splits(source, spec).clients, strict=True):
        assert ours.name == theirs.name
        for name, split in theirs.splits.items():
            assert torch.equal(ours.splits[name].x, split.x)


@settings(deadline=None, max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=20, max_size=80),
    shares=st.lists(st.floats(0.05, 1), min_size=2, max_size=4),
    seed=st.integers(0, 2**32),
)
def test_parts_have_their_shares_up_to_the_size_of_a_group(sizes, shares, seed):
    units, share = np.repeat(np.arange(len(sizes)), sizes), np.array(shares) / sum(shares)
    labels = units % 2
    whole = _cut_groups(units, labels, share, 0, np.random.default_rng(seed))
    by_class = _cut_groups(units, labels, np.stack([share, share[::-1]]), 0, np.random.default_rng(seed))
    for parts in (whole, by_class):
        assert sorted(np.concatenate(parts)) == list(range(len(units)))
    for part, wanted in zip(whole, share, strict=True):
        assert abs(len(part) - wanted * len(units)) <= max(sizes)
    for part, ones in zip(by_class, share[::-1], strict=True):
        assert abs(labels[part].sum() - ones * labels.sum()) <= max(sizes)


def test_a_group_with_few_samples_is_moved_to_a_poor_client():
    made = prepare(split="dirichlet(clients=12, alpha=0.05, minimum=3)")
    assert min(len(client.train) for client in made.clients) >= 3
    assert holds_whole(made, ("train",), complete=False)


def test_files_name_their_subjects_as_bids_does():
    files = ["a/sub-01/anat/sub-01_T1w.nii.gz", "a/sub-01/anat/sub-01_T2w.nii.gz", "a/train/x_sub-2.png"]
    assert find_groups(None, files).tolist() == ["sub-01", "sub-01", "sub-2"]
    assert not len(find_groups(None, [*files, "a/train/other.png"]))
    assert not len(find_groups(None, ["a/subtle-01.png"]))


def test_subjects_on_two_sides_are_an_error_of_the_data_and_not_of_reading(tmp_path):
    for part, subjects in (("train", "aabbcc"), ("test", "cddee")):
        for number, subject in enumerate(subjects):
            folder = tmp_path / "site" / part / str(number % 2)
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("L", (6, 6), ord(subject) + number).save(folder / f"sub-{subject}_{number}.png")
    data = load_source(str(tmp_path), DataSpec())
    assert any("5 groups; --groups names others" in notice for notice in data.notices)
    (fault,) = judge_groups(data)
    assert fault.text.endswith("1 of 3 of site.")
    with pytest.raises(UsageError, match="group 'c' of client 'site' is on two sides, train and test"):
        load_source(str(tmp_path), DataSpec(groups="sub-{group}_*.png"))


@pytest.mark.parametrize(("pattern", "files", "told"), [
    ("{group}_*.png", ["a/p1_1.png", "a/p2-1.png"], "1 of 2 files no group, such as 'p2-1.png': names without folders "
     "are compared; 'p1_1.png' has group 'p1'; give each file one"),
    ("train/{group}/*.png", ["site/train/p1/1.png"], "'site/train/p1/1.png': paths are compared, as it has a /"),
    ("own.csv", ["x/a.png"], "no group, such as 'x/a.png': of its 1 rows, none has it as file, with a group (the first "
     "has '/data/a.png')"),
])  # fmt: skip
def test_files_without_a_group_say_what_was_compared(pattern, files, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.csv").write_text("file,group\n/data/a.png,p1\n")
    with pytest.raises(UsageError) as refused:
        find_groups(pattern, files)
    assert told in str(refused.value)


class OfStays(Dataset):
    """Stays of one hospital as pairs, with the patient of each."""

    def __init__(self, rows, **more):
        self.rows, self.patient = rows, rows["patient"].tolist()
        vars(self).update(more)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows.iloc[index]
        return np.array([row["stay"]], np.float32), row["ill"]


def test_one_torch_dataset_a_client_is_divided_by_its_attribute_or_its_files():
    def count_patients(datasets, **given):
        data = load_source(datasets, DataSpec(**given))
        assert all(len(places) == 1 for places in list_places(data, "train", "test").values())
        return [len(set(OWNER[list_stays(client.test)])) for client in data.clients]

    north, south = (rows for _, rows in FRAME.groupby("site"))
    own = {"north": OfStays(north), "south": OfStays(south)}
    counts = zip(count_patients(own, groups="patient", test_fraction=0.4), (70, 50), strict=True)
    assert all(0.35 < drawn / patients < 0.5 for drawn, patients in counts)
    half = Subset(OfStays(north), range(0, len(north), 2))
    assert count_patients({"north": half}, groups="patient")[0] >= 10
    for form, groups in (("{0}_{1}.png", "{group}_*.png"), ("sub-{0}_{1}.png", None)):
        files = [(f"/data/{row.ill}/" + form.format(row.patient, row.stay), row.ill) for row in north.itertuples()]
        assert count_patients({"north": OfStays(north, samples=files, root="/data")}, groups=groups)[0] >= 10


def test_groups_that_a_torch_dataset_lacks_are_refused():
    north = FRAME[FRAME["site"] == "north"]
    with pytest.raises(UsageError, match="OfStays has no attribute or column 'person'"):
        load_source({"north": OfStays(north)}, DataSpec(groups="person"))
    with pytest.raises(UsageError, match=r"patient of shape \(3,\) for \d+ items"):
        load_source({"north": OfStays(north, patient=["a", "b", "c"])}, DataSpec(groups="patient"))


def test_samples_and_patients_are_counted_before_training_and_too_few_for_a_verdict_are_said():
    data = prepare(test_fraction=0.1)
    console = Console(width=160, file=StringIO())
    console.print(describe(data))
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert lines[1][:5] == ["client", "train", "(patients)", "test", "(patients)"]
    for line, client in zip(lines[2:4], data.clients, strict=True):
        for place, split in enumerate((client.train, client.test)):
            stays = list_stays(split)
            assert line[1 + 2 * place : 3 + 2 * place] == [str(len(stays)), f"({len(set(OWNER[stays]))})"]
    south = len(set(OWNER[list_stays(data.clients[1].test)]))
    assert f"south {len(data.clients[1].train)} (" in summarize_sizes(data)
    tested = sum(len(set(OWNER[list_stays(client.test)])) for client in data.clients)
    assert lines[-1][1:3] == [str(sum(len(client.train) for client in data.clients)), f"({120 - tested})"]
    (few,) = (finding.text for finding in judge_test_sizes(data) if finding.kind == "no-verdict")
    assert "No verdict is possible at sites with fewer than 10" in few
    assert f"south {south} patients" in few
