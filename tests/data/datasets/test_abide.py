"""ABIDE I from tiny series in the form of the Preprocessed Connectomes Project, and from the real correlations."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from fedshift.data.datasets.abide import CARD, abide
from fedshift.utils.errors import UsageError

DATA = Path(os.environ.get("FEDSHIFT_DATA", ""))
NAMES = [f"#{number}" for number in range(10, 92)] + ["#3455"] + [f"#{number}" for number in range(3501, 3529)]
"""111 regions; as in the published files the 83rd is #3455."""

SUBJECTS = [
    ("NYU", "NYU_{:07d}", 50952, 10, 12),
    ("UCLA_1", "UCLA_1_{:07d}", 51201, 6, 9),
    ("PITT", "Pitt_{:07d}", 50003, 4, 8),
]
"""Site, name of file, first subject, how many subjects, frames. Every second one has autism (DX_GROUP 1)."""


def series(subject: int, frames: int) -> np.ndarray:
    random = np.random.default_rng(subject)
    return random.normal(size=(frames, 111)) + random.normal(size=(frames, 1))


def write_series(file: Path, x: np.ndarray) -> None:
    lines = ["\t".join(NAMES), *("\t".join(f"{value:.6f}" for value in frame) for frame in x)]
    file.write_text("\n".join(lines) + "\n")


@pytest.fixture
def published(tmp_path):
    """As nilearn fetches it. NYU's second subject lacks region #3501, its third is shorter; one of PITT has no file."""
    folder = tmp_path / "abide"
    place = folder / "cpac" / "nofilt_noglobal"
    place.mkdir(parents=True)
    rows = []
    for site, file, first, count, frames in SUBJECTS:
        for subject in range(first, first + count):
            name = file.format(subject)
            x = series(subject, frames)
            if site == "NYU" and subject == first + 1:
                x[:, 83] = 0
            if site == "NYU" and subject == first + 2:
                x = x[:-1]
            write_series(place / f"{name}_rois_ho.1D", x)
            rows.append((len(rows), subject, site, name, 1 + subject % 2, 12.5))
    rows.append((len(rows), 50007, "PITT", "no_filename", 1, 12.5))
    with (folder / "Phenotypic_V1_0b_preprocessed1.csv").open("w", newline="") as target:
        writer = csv.writer(target)
        writer.writerow(["", "SUB_ID", "SITE_ID", "FILE_ID", "DX_GROUP", "AGE_AT_SCAN"])
        writer.writerows(rows)
    return folder


def correlations(x: np.ndarray, without: int | None = 82) -> np.ndarray:
    kept = [region for region in range(111) if region != without]
    return np.corrcoef(x[:, kept].T)[np.triu_indices(len(kept), 1)]


def known(subject: int, frames: int, **choice) -> np.ndarray:
    return correlations(np.round(series(subject, frames), 6), **choice)


def find(client, wanted: np.ndarray) -> tuple[str, int]:
    """In which part a sample stands, and with which label."""
    for part, split in client.splits.items():
        near = (split.x.double() - torch.from_numpy(wanted)).abs().amax(1) < 1e-5
        if near.any():
            return part, int(split.y[near.nonzero()[0, 0]])
    raise AssertionError("no such sample")


def test_samples_are_correlations_of_110_regions_and_label_1_is_autism(published):
    data = abide(published.parent, sites=("NYU", "UCLA_1")).check()
    assert (data.name, data.names, data.class_names) == ("abide", ("NYU", "UCLA_1"), ("control", "autism"))
    assert (data.sample_shape, data.clients[0].train.x.dtype) == ((5995,), torch.float32)
    for subject in range(51201, 51207):
        assert find(data.client("UCLA_1"), known(subject, 9))[1] == int(1 + subject % 2 == 1)
    splits = [torch.bincount(split.y).tolist() for split in data.clients[0].splits.values()]
    assert splits == [[3, 3], [1, 1]]  # a fifth of the subjects of either label
    other = abide(published.parent, sites=("NYU",), test_fraction=0.5, seed=3).clients[0]
    assert torch.bincount(other.test.y).tolist() == [2, 2]


def test_incomplete_subjects_are_left_out_and_that_is_said(published):
    data = abide(published.parent, sites=("NYU", "PITT"))
    assert [len(client.train) + len(client.test) for client in data.clients] == [8, 4]
    assert data.notices == ("client 'NYU': 2 incomplete subjects of 10 left out",)
    whole = abide(published.parent, sites=("NYU", "PITT"), complete=False)
    assert [len(client.train) + len(client.test) for client in whole.clients] == [10, 4]
    assert whole.notices == ()
    x = torch.cat([split.x for split in whole.clients[0].splits.values()])
    of_region = np.isin(np.stack(np.triu_indices(110, 1)), [82]).any(axis=0)
    assert (x[:, of_region] == 0).all(1).sum() == 1  # a region without signal has correlation 0
    assert x.isfinite().all()


def test_windows_of_a_subject_stay_on_one_side(published):
    client = abide(published.parent, sites=("UCLA_1",), window=5).check().clients[0]
    assert (len(client.train), len(client.test)) == (4 * 5, 2 * 5)  # 9 - 5 + 1 = 5 windows each
    for subject in range(51201, 51207):
        x = np.round(series(subject, 9), 6)
        (where,) = {find(client, correlations(x[start : start + 5])) for start in range(5)}
        assert where[1] == int(1 + subject % 2 == 1)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"sites": ("NYC",)}, "unknown site 'NYC': did you mean 'NYU'"),
        ({"sites": ()}, r"sites=\(\) names no site"),
        ({"window": 2}, "window=2 frames: must be at least 3"),
        ({"window": 13}, "window=13: a subject of NYU has 12 frames"),
        ({"test_fraction": 0}, "test_fraction=0: must lie between 0 and 1"),
    ],
)
def test_other_choices_are_refused(published, choice, said):
    with pytest.raises(UsageError, match=said):
        abide(published.parent, **{"sites": ("NYU",)} | choice)


def test_missing_and_damaged_series_are_refused_by_name(published):
    file = published / "cpac" / "nofilt_noglobal" / "NYU_0050953_rois_ho.1D"
    (published / "ccs").mkdir()
    other = published / "ccs" / file.name
    other.write_bytes(file.read_bytes())
    said = "are of one subject: keep the files of one pipeline and strategy"
    with pytest.raises(UsageError, match=said):
        abide(published.parent, sites=("NYU",))
    other.unlink()
    file.write_text("\n".join(line.rpartition("\t")[0] for line in file.read_text().splitlines()))
    with pytest.raises(UsageError, match=r"NYU_0050953_rois_ho.1D has 110 regions, the Harvard-Oxford atlas there 111"):
        abide(published.parent, sites=("NYU",))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(UsageError, match=r"rois_ho.1D cannot be read as a time series of regions .it is a pipe"):
        abide(published.parent, sites=("NYU",))
    file.unlink()
    with pytest.raises(UsageError, match=r"names NYU_0050953, but NYU_0050953_rois_ho.1D is not below"):
        abide(published.parent, sites=("NYU",))
    assert abide(published.parent, sites=("UCLA_1",)).names == ("UCLA_1",)


def test_a_compact_file_gives_the_same_as_the_series(published, tmp_path):
    rows = [(site, file.format(s), s) for site, file, first, count, _ in SUBJECTS for s in range(first, first + count)]
    connectomes, frames = [], []
    for _, name, _ in rows:
        x = np.loadtxt(published / "cpac" / "nofilt_noglobal" / f"{name}_rois_ho.1D", comments="#")
        with np.errstate(invalid="ignore"):
            connectomes.append(np.nan_to_num(correlations(x, without=None)))
        frames.append(len(x))
    (tmp_path / "packed").mkdir()
    sites = ["NYU", "PITT", "UCLA_1"]
    np.savez(
        tmp_path / "packed" / "abide_ho.npz",
        connectome=np.array(connectomes, np.float32),
        y=np.array([int(1 + subject % 2 == 1) for _, _, subject in rows], np.uint8),
        site=np.array([sites.index(site) for site, *_ in rows], np.uint8),
        site_names=np.array(sites),
        dead_rois=np.array([int((c == 0).any()) for c in connectomes], np.uint8),
        n_frames=np.array(frames, np.int16),
        roi_ids=np.array(NAMES),
    )
    for choice in ({}, {"complete": False}):
        packed = abide(tmp_path / "packed", sites=("NYU", "UCLA_1"), **choice)
        read = abide(published.parent, sites=("NYU", "UCLA_1"), **choice)
        assert packed.notices == read.notices
        for one, other in zip(packed.clients, read.clients, strict=True):
            for part in ("train", "test"):
                assert torch.equal(one.splits[part].y, other.splits[part].y)
                assert torch.allclose(one.splits[part].x, other.splits[part].x, atol=1e-6)
    with pytest.raises(UsageError, match="windows need the time series"):
        abide(tmp_path / "packed", sites=("NYU",), window=32)
    assert CARD.present("abide", tmp_path / "packed")
    assert not CARD.present("abide", tmp_path / "packed", frozenset({"window"}))
    with pytest.raises(UsageError, match="unknown site 'YALE'"):
        abide(tmp_path / "packed", sites=("YALE",))


if CARD.present("abide", DATA):

    def test_the_real_sites_have_the_subjects_of_fedbn_s_table_10():
        data = abide(DATA).check()
        subjects = {client.name: torch.cat([client.train.y, client.test.y]) for client in data.clients}
        assert {site: (len(y), int(y.sum())) for site, y in subjects.items()} == {
            "NYU": (167, 73), "UM_1": (88, 43), "USM": (52, 33), "UCLA_1": (63, 37),
        }  # fmt: skip
        assert data.sample_shape == (5995,)
