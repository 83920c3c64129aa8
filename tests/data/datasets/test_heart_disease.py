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
NUMERIC = [0, 1, 6, 7, 8, 12, 13, 14, 18]
"""Features that are numbers: age sex trestbps chol fbs thalach exang oldpeak ca; cp, restecg, slope, thal are codes."""


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


def test_numbers_are_standardized_by_the_client_s_own_training_rows(published):
    for client in heart_disease(published.parent).clients:
        kept = [feature for feature in NUMERIC if client.name != "switzerland" or feature != 7]
        train = client.train.x[:, kept].double()
        assert torch.allclose(train.mean(0), torch.zeros(len(kept), dtype=torch.float64), atol=1e-6)
        assert torch.allclose(train.std(0, correction=0), torch.ones(len(kept), dtype=torch.float64), atol=1e-6)


def test_a_third_of_each_class_of_a_client_is_for_testing(published):
    for client in heart_disease(published.parent).clients:
        assert torch.bincount(client.test.y).tolist() == [round(0.34 * 4), round(0.34 * 16)]
        assert len(client.train) + len(client.test) == 20


def test_cholesterol_and_pressure_of_zero_are_missing_and_a_missing_column_is_zero(published):
    data = heart_disease(published.parent)
    swiss = data.client("switzerland")
    assert not torch.cat([swiss.train.x, swiss.test.x])[:, 7].any()
    assert "client 'switzerland': no value of chol, 0 instead" in data.notices
    assert "client 'va': 5 missing values filled from its own training rows" in data.notices


def test_gaps_are_filled_with_the_median_of_the_training_rows_and_one_code(published):
    va = heart_disease(published.parent).client("va")
    x = torch.cat([va.train.x, va.test.x])
    number = x[:, 0].argsort().argsort()  # patients by age are patients by number
    trained = number[: len(va.train)]
    known = trained[trained != 4].double()
    median = float(np.median(known.numpy()))
    column = torch.where(trained == 4, median, trained.double())
    patient = x[number == 4][0]
    for feature in (6, 7):  # trestbps = 120 + number, chol = 200 + number
        assert abs(float(patient[feature]) - float((median - column.mean()) / column.std(correction=0))) < 1e-5
    for first in (15, 19):
        assert sorted(patient[first : first + 3].tolist()) == [0, 0, 1]


def test_a_compact_file_gives_the_same(published, tmp_path):
    arrays = {}
    for client in CLIENTS:
        table = np.genfromtxt(published / f"processed.{client}.data", delimiter=",", missing_values="?")
        arrays |= {f"x_{client}": table[:, :13].astype(np.float32), f"y_{client}": table[:, 13].astype(np.uint8)}
    (tmp_path / "other").mkdir()
    np.savez(tmp_path / "other" / "heart_disease.npz", **arrays)
    assert heart_disease(tmp_path / "other").fingerprint == heart_disease(published.parent).fingerprint


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


def test_other_fractions_are_refused(published):
    with pytest.raises(UsageError, match="test_fraction=2: must lie between 0 and 1"):
        heart_disease(published.parent, test_fraction=2)


def test_a_compact_file_that_lacks_an_array_is_refused(tmp_path):
    np.savez(tmp_path / "heart_disease.npz", x_cleveland=np.zeros((2, 13)))
    with pytest.raises(UsageError, match=r"heart_disease.npz has no array 'y_cleveland' \(it has x_cleveland\)"):
        heart_disease(tmp_path)


if (DATA / "heart_disease.npz").is_file():

    def test_the_real_hospitals_have_the_published_sizes():
        data = heart_disease(DATA).check()
        assert [len(client.train) + len(client.test) for client in data.clients] == [303, 294, 123, 200]
        flamby = fed_heart_disease(DATA).check()
        assert [len(client.train) + len(client.test) for client in flamby.clients] == [303, 261, 46, 130]
        sick = [int(torch.cat([client.train.y, client.test.y]).sum()) for client in data.clients]
        with np.load(DATA / "heart_disease.npz") as arrays:
            assert sick == [int((arrays[f"y_{client}"] > 0).sum()) for client in CLIENTS]
