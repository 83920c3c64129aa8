"""Heart Disease from tiny files in UCI's form, and from the real numbers where FEDSHIFT_DATA names their directory."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from fedshift.data.datasets.heart_disease import fed_heart_disease, heart_disease
from fedshift.utils.errors import UsageError

CLIENTS = ("cleveland", "hungarian", "switzerland", "va")
DATA = Path(os.environ.get("FEDSHIFT_DATA", ""))


def row(number: int, **cells: object) -> str:
    """A line as UCI writes it (Cleveland's first: 63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0)."""
    plain = {
        "age": 40.0 + number, "sex": float(number % 2), "cp": 1.0 + number % 4, "trestbps": 120.0 + number,
        "chol": 200.0 + number, "fbs": float(number % 3 == 0), "restecg": float(number % 3), "thalach": 150.0 - number,
        "exang": float(number % 2), "oldpeak": number / 10, "slope": 1.0 + number % 3, "ca": float(number % 4),
        "thal": (3.0, 6.0, 7.0)[number % 3], "num": number % 5,
    } | cells  # fmt: skip
    return ",".join(map(str, plain.values()))


@pytest.fixture
def published(tmp_path):
    """Twenty patients at every hospital; Switzerland has no cholesterol, and a patient's of VA has gaps."""
    folder = tmp_path / "heart-disease"
    folder.mkdir()
    for client in CLIENTS:
        gaps = {"switzerland": {"chol": 0}}.get(client, {})
        lines = [row(number, **gaps) for number in range(20)]
        if client == "va":
            lines[4] = row(4, trestbps=0, chol="?", slope="?", thal="?", ca="?")
        (folder / f"processed.{client}.data").write_text("\n".join(lines) + "\n")
    return folder


def test_codes_are_one_feature_a_value_and_labels_say_whether_there_is_disease(published):
    data = heart_disease(published.parent).check()
    assert (data.name, data.names, data.classes) == ("heart-disease", CLIENTS, 2)
    assert data.class_names == ("no disease", "disease")
    assert data.sample_shape == (22,)
    assert {tuple(torch.bincount(client.test.y).tolist()) for client in data.clients} == {(1, 5)}  # a third of a class
    client = data.client("cleveland")
    assert client.train.x.dtype == torch.float32
    x, y = torch.cat([client.train.x, client.test.x]), torch.cat([client.train.y, client.test.y])
    age = x[:, 0].argsort()  # patients by age are patients by number
    x, y = x[age], y[age]
    assert y.tolist() == [int(number % 5 > 0) for number in range(20)]
    for first, width, code in (
        (2, 4, lambda n: n % 4),
        (9, 3, lambda n: n % 3),
        (15, 3, lambda n: n % 3),
        (19, 3, lambda n: n % 3),
    ):
        assert x[:, first : first + width].argmax(1).tolist() == [code(number) for number in range(20)]
        assert x[:, first : first + width].sum(1).tolist() == [1] * 20


def test_cholesterol_and_pressure_of_zero_are_missing_and_a_missing_column_is_zero(published):
    data = heart_disease(published.parent)
    swiss = data.client("switzerland")
    assert not torch.cat([swiss.train.x, swiss.test.x])[:, 7].any()
    assert "column 'chol' has no value in the training rows of 'switzerland': it is 0 in all their rows" in data.notices
    assert data.notices[-1].endswith("(median, or most frequent category): va 5")


def test_a_compact_file_gives_the_same(published, tmp_path):
    arrays = {}
    for client in CLIENTS:
        table = np.genfromtxt(published / f"processed.{client}.data", delimiter=",", missing_values="?")
        arrays |= {f"x_{client}": table[:, :13].astype(np.float32), f"y_{client}": table[:, 13].astype(np.uint8)}
    (tmp_path / "other").mkdir()
    np.savez(tmp_path / "other" / "heart_disease.npz", **arrays)
    assert heart_disease(tmp_path / "other").fingerprint == heart_disease(published.parent).fingerprint
    np.savez(tmp_path / "other" / "heart_disease.npz", x_cleveland=np.zeros((2, 13)))
    with pytest.raises(UsageError, match=r"heart_disease.npz has no array 'y_cleveland' \(it has x_cleveland\)"):
        heart_disease(tmp_path / "other")
    with pytest.raises(UsageError, match="test_fraction=2: must lie between 0 and 1"):
        heart_disease(published.parent, test_fraction=2)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("63.0,1.0,1.0", "has rows of 3 cells, expected were 14"),
        (row(1, age="old"), "holds a value that is not"),
    ],
)
def test_damaged_files_are_refused_by_name(published, line, said):
    with (published / "processed.va.data").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UsageError, match=f"processed.va.data {said}"):
        heart_disease(published.parent)


if (DATA / "heart_disease.npz").is_file():

    def test_the_real_hospitals_have_the_published_sizes():
        data = heart_disease(DATA).check()
        assert [len(client.train) + len(client.test) for client in data.clients] == [303, 294, 123, 200]
        flamby = fed_heart_disease(DATA).check()
        assert [len(client.train) + len(client.test) for client in flamby.clients] == [303, 261, 46, 130]
        assert all(float(client.train.x.mean(dim=0).abs().max()) < 1e-5 for client in flamby.clients)
        sick = [int(torch.cat([client.train.y, client.test.y]).sum()) for client in data.clients]
        with np.load(DATA / "heart_disease.npz") as arrays:
            assert sick == [int((arrays[f"y_{client}"] > 0).sum()) for client in CLIENTS]
