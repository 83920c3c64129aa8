"""Tables of one or many files: features, labels and splits against pandas, scikit-learn and NumPy."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.preprocessing import StandardScaler

from fedshift.data.assembly import read_source
from fedshift.data.columns import Column
from fedshift.data.federation import Federation
from fedshift.data.readers.tables import can_read, number_classes
from fedshift.data.source import ReadOptions, draw_groups
from fedshift.utils.errors import UsageError

READING = ReadOptions(client_column="site", target="ill", split_column="part")
RAW = replace(READING, scaling="none")


def patients(count: int = 90, key: int = 0) -> pd.DataFrame:
    """``count`` rows of three sites, with numbers, truth values, text, and every side of a split at every site."""
    draw = np.random.default_rng(key)
    return pd.DataFrame(
        {
            "age": draw.integers(20, 90, count),
            "site": np.resize(["oslo", "bonn", "kyiv"], count),
            "chol": draw.normal(200, 40, count),
            "smokes": draw.random(count) < 0.4,
            "pain": draw.choice(["typical", "none at all", "atypical"], count),
            "ill": draw.integers(0, 3, count),
            "part": np.repeat(np.resize(["train", "train", "Train", "valid", "TEST"], (count + 2) // 3), 3)[:count],
        }
    )


def write(frame: pd.DataFrame, path: Path) -> Path:
    """The frame as a file in the format that the name says."""
    if path.suffix == ".parquet":
        frame.to_parquet(path, index=False)
    else:
        frame.to_csv(path, index=False, sep="\t" if path.suffix == ".tsv" else ",")
    return path


@pytest.fixture
def read(tmp_path):
    """Read a frame written as a file; keyword arguments change ``RAW`` reading."""

    def through(frame: pd.DataFrame, name: str = "table.csv", **changed) -> Federation:
        return read_source(write(frame, tmp_path / name), replace(RAW, **changed))

    return through


def part_of(frame: pd.DataFrame, site: str, part: str) -> pd.DataFrame:
    names = {"train": ["train"], "validation": ["val", "valid", "validation"], "test": ["test"]}[part]
    return frame[(frame["site"] == site) & frame["part"].str.lower().isin(names)]


def test_numbers_are_features_and_text_is_one_hot_as_in_pandas(read):
    frame = patients()
    data = read(frame).check()
    assert (data.name, data.names, data.classes, data.class_names) == ("table", ("bonn", "kyiv", "oslo"), 3, ())
    assert data.note == "90 rows of 3 clients, 4 columns"
    assert data.notices == ()
    features = pd.get_dummies(frame.drop(columns=["site", "ill", "part"]), columns=["pain"])
    for client in data.clients:
        assert list(client.splits) == ["train", "validation", "test"]
        for name, split in client.splits.items():
            rows = part_of(frame, client.name, name).index
            assert split.x.dtype == torch.float32
            np.testing.assert_array_equal(split.x, features.loc[rows].astype(np.float32))
            np.testing.assert_array_equal(split.y, frame.loc[rows, "ill"])


def test_numbers_are_scaled_by_the_training_rows_of_their_client_as_in_scikit_learn(read):
    frame = patients().assign(even=lambda f: np.where(f["part"].str.lower() == "train", 0.1, 7.1))
    numeric = ["age", "chol", "smokes", "even"]  # one is constant in training, and only centered
    for client in read(frame[[*numeric, "site", "ill", "part"]], scaling="client").clients:
        fitted = StandardScaler().fit(part_of(frame, client.name, "train")[numeric])
        for name, split in client.splits.items():
            rows = part_of(frame, client.name, name)
            np.testing.assert_allclose(split.x, fitted.transform(rows[numeric]), rtol=1e-5, atol=1e-5)


def test_test_rows_never_change_training_or_validation_arrays(read):
    draw = np.random.default_rng(3)
    before = patients().assign(chol=lambda f: f["chol"].where(f.index % 7 != 0))
    test, after = before["part"] == "TEST", before.copy()
    after.loc[test, "chol"] = draw.choice([np.nan, -1e6, 3], 18)
    after.loc[test, "pain"] = draw.choice(np.array([None, "typical", "atypical"], object), 18)
    after.loc[test, "ill"] = draw.integers(0, 3, 18)
    pairs = zip(read(before, scaling="client").clients, read(after, scaling="client").clients, strict=True)
    for one, other in pairs:
        for name in ("train", "validation"):
            assert torch.equal(one.splits[name].x, other.splits[name].x)
            assert torch.equal(one.splits[name].y, other.splits[name].y)
        assert torch.isfinite(other.test.x).all()


# Missing values


def test_missing_numbers_are_the_median_and_text_the_most_frequent_of_the_training_rows(read):
    whole = patients()
    assert read(whole, missing="refuse").notices == ()
    lost = np.random.default_rng(1).random((len(whole), 2)) < 0.3
    frame = whole.assign(chol=whole["chol"].mask(lost[:, 0]), pain=whole["pain"].mask(lost[:, 1]))
    data = read(frame)
    for client in data.clients:
        train = part_of(frame, client.name, "train")
        filled = frame.fillna({"chol": np.nanmedian(train["chol"]), "pain": train["pain"].mode()[0]})
        for name, split in client.splits.items():
            rows = part_of(frame, client.name, name).index
            np.testing.assert_array_equal(split.x[:, 1], filled.loc[rows, "chol"].astype(np.float32))
            np.testing.assert_array_equal(split.x[:, 3:], pd.get_dummies(filled["pain"]).loc[rows])
    counts = frame.isna().groupby(frame["site"]).sum()[["chol", "pain"]].sum(axis=1)
    assert data.notices == (
        "missing values imputed from each client's own training rows (median, or most frequent category): "
        + ", ".join(f"{site} {counts[site]}" for site in ("bonn", "kyiv", "oslo")),
    )
    with pytest.raises(UsageError, match=r"client 'bonn' has no value of 'chol' in \d+ of 30 rows: .*missing='impute'"):
        read(frame, missing="refuse")


def test_several_words_mean_that_a_value_is_missing(read):
    frame, words = patients(), ["", "?", "NA", "NaN", "nan", "null", " ", " ? "]
    frame["chol"], frame["pain"] = frame["chol"].astype(str), frame["pain"].astype(object)
    frame.loc[: len(words) - 1, ["chol", "pain"]] = np.array([words, words]).T
    assert read(frame).notices[0].endswith("category): bonn 6, kyiv 4, oslo 6")


def test_a_column_without_values_in_training_or_without_differences_is_said(read):
    frame = patients().assign(unit="mg", void=None)
    bonn = frame["site"] == "bonn"
    frame["chol"] = frame["chol"].mask(bonn & (frame["part"] != "TEST"))
    frame["pain"] = frame["pain"].mask(bonn)
    data = read(frame, scaling="client")
    for split in data.client("bonn").splits.values():
        assert torch.equal(split.x[:, [1, 3, 4, 5]], torch.zeros(len(split), 4))
        assert (split.x[:, 0] != 0).any()
    assert data.client("oslo").train.x[:, 1].std() > 0.5
    assert data.notices == (
        "the same in all rows, so nothing can be learned from it: 'unit'",
        "column 'chol' has no value in the training rows of 'bonn': it is 0 in all their rows",
        "column 'pain' has no value in the training rows of 'bonn': it is 0 in all their rows",
        "column 'void' has no value in the training rows of 'bonn', 'kyiv', 'oslo': it is 0 in all their rows",
    )


# Files


def test_all_formats_and_layouts_give_bitwise_the_same_federation(tmp_path):
    frame = patients().assign(
        dose=lambda f: f["chol"].round(3).mask(f.index % 5 == 0),
        visits=lambda f: f["age"].astype("Int64").mask(f.index % 4 == 0),
        grade=lambda f: f["age"].mod(3).astype(str),
        smokes=lambda f: f["smokes"].astype(object).mask(f.index % 6 == 0).astype("boolean"),
    )
    read = [read_source(write(frame, tmp_path / f"table.{ending}"), READING) for ending in ("csv", "tsv", "parquet")]
    sites, parts = tmp_path / "sites", tmp_path / "parts"
    for folder in (sites, parts):
        folder.mkdir()
        (folder / ".hidden.csv").write_text("nothing")
        (folder / "notes.txt").write_text("nothing")
    for ending, (site, rows) in zip(("csv", "tsv", "parquet"), frame.groupby("site"), strict=True):
        names = [name for name in frame.columns if name != "site"]
        write(rows[names if ending == "csv" else names[::-1]], sites / f"{site}.{ending}")
    read.append(read_source(sites, replace(READING, client_column=None)))
    write(frame[:40], parts / "1.csv")
    write(frame[40:], parts / "2.parquet")
    read.append(read_source(parts, READING))
    assert {(data.names, data.notices, data.sample_shape) for data in read} == {
        (("bonn", "kyiv", "oslo"), read[0].notices, (9,))
    }
    assert {data.fingerprint for data in read} == {read[0].fingerprint}
    assert [data.name for data in read[-2:]] == ["sites", "parts"]


def test_a_byte_order_mark_quotes_and_line_breaks_inside_them_are_read(tmp_path):
    rows = [*(f'x,{n},"so\nso",{n % 2}' for n in range(8)), *(f'x,{n},"well",1' for n in range(4))]
    (tmp_path / "t.csv").write_text("\n".join(['site,"a, b",mood,y', *rows]), encoding="utf-8-sig")
    data = read_source(tmp_path / "t.csv", ReadOptions(client_column="site", target="y", scaling="none"))
    assert torch.cat([split.x for split in data.clients[0].splits.values()]).sum(0).tolist() == [28 + 6, 8, 4]


def test_numbers_with_some_text_among_them_are_categories_and_said(read, tmp_path):
    frame = patients().assign(grade=lambda f: (f.index % 3).astype(str))
    frame.loc[4, "grade"] = "3b"
    (notice,) = read(frame).notices
    place = f"{tmp_path / 'table.csv'}, data row 5"
    assert notice.startswith(f"column 'grade' has numbers and text such as '3b' ({place}): it is read as 4 categories")


@pytest.mark.parametrize("code", ["-", "#DIV/0!", " none "])
def test_codes_for_missing_values_among_numbers_are_missing_and_said(read, tmp_path, code):
    frame = patients().assign(dose=lambda f: (f.index % 7 + 0.5).astype(str))
    frame.loc[4, "dose"] = ""
    empty = read(frame)
    frame.loc[4, "dose"] = code
    coded = read(frame)
    assert coded.columns == empty.columns
    assert torch.equal(coded.client("bonn").train.x, empty.client("bonn").train.x)
    place = f"{tmp_path / 'table.csv'}, data row 5"
    (told,) = set(coded.notices) - set(empty.notices)
    assert told.startswith(f"column 'dose' holds {code.strip()!r} ({place}) among numbers, which counts as a missing")
    assert np.isnan(Column(name="dose").encode(code)).all()


def test_codes_among_words_are_categories_and_among_labels_are_refused(read):
    frame = patients().assign(smoker=lambda f: np.where(f.index % 3, "never", "unknown"))
    column = next(column for column in read(frame).columns if column.name == "smoker")
    assert column.categories == ("never", "unknown")
    frame["ill"] = frame["ill"].astype(str)
    frame.loc[4, "ill"] = "."
    with pytest.raises(UsageError, match=r"data row 5: '\.' in column .* seems to mark a missing label"):
        read(frame)


def test_whether_a_path_holds_tables_is_seen_from_names(tmp_path):
    (tmp_path / "images.csv").mkdir()
    for name in ("notes.txt", ".a.csv", "_b.csv"):
        (tmp_path / name).touch()
    assert not any(map(can_read, (tmp_path, tmp_path / "absent.csv", tmp_path / "notes.txt", tmp_path / ".a.csv")))
    (tmp_path / "A.CSV").touch()
    assert can_read(tmp_path)
    assert can_read(tmp_path / "A.CSV")


# Clients and labels


def test_only_rows_of_chosen_clients_count_but_labels_of_all(read):
    frame = patients()
    bonn = frame["site"] == "bonn"
    frame.loc[bonn, "pain"] = "only here"
    frame["ill"] = np.where(bonn, "a", "b")
    data = read(frame, domains=("oslo", "kyiv"))
    assert (data.sample_shape, data.class_names) == ((6,), ("a", "b"))
    assert {int(label) for client in data.clients for label in client.train.y} == {1}
    frame.loc[bonn, "chol"] = None
    assert read(frame, domains=("oslo", "kyiv")).fingerprint == data.fingerprint


def test_columns_come_in_the_order_of_the_first_client_that_is_chosen_and_others_need_not_be_readable(tmp_path):
    frame = patients().drop(columns="site")
    write(frame, tmp_path / "bonn.csv")
    write(frame[frame.columns[::-1]], tmp_path / "oslo.csv")
    (tmp_path / "kyiv.csv").write_text("")
    for domains, first in ((("bonn", "oslo"), "age"), (("oslo", "bonn"), "pain")):
        data = read_source(tmp_path, replace(RAW, client_column=None, domains=domains))
        assert (data.names, data.columns[0].name) == (domains, first)  # as across machines


@pytest.mark.parametrize(
    ("values", "least", "labels", "names"),
    [
        ("0 1 2", None, [0, 1, 2], ()), ("0 1 2", 5, [0, 1, 2], ()), ("0 2", 3, [0, 2], ()),
        ("0.0 1.0 2.0", None, [0, 1, 2], ()), ("0 2", None, [0, 1], ("0", "2")),
        ("1 3 2", None, [0, 2, 1], ("1", "2", "3")), ("-1 10 9", None, [0, 2, 1], ("-1", "9", "10")),
        ("b a c", None, [1, 0, 2], ("a", "b", "c")), ("b a", 3, [1, 0], ("a", "b", "unseen 2")),
        ("True False", None, [1, 0], ("False", "True")), ("True False 0 1", None, [1, 0, 0, 1], ()),
        ("1_1 11", None, [1, 0], ("11", "1_1")),
    ],
)  # fmt: skip
def test_labels_are_numbered_from_zero(values, least, labels, names):
    classes = max(len(set(labels)), least or 0)
    assert number_classes(values.split(), "ill", least) == (classes, labels, names)


@pytest.mark.parametrize("name", ["table.csv", "table.parquet"])
@pytest.mark.parametrize("values", [[1, 3, 2], [1.0, 3.0, 2.0], ["a", "c d", "b"]])
def test_labels_are_those_of_their_rows(read, name, values):
    frame = patients()
    frame["ill"] = np.array(values)[np.arange(90) // 3 % 3]
    for client in read(frame, name).clients:
        for part, split in client.splits.items():
            rows = part_of(frame, client.name, part).index
            assert split.y.tolist() == [[0, 2, 1][row // 3 % 3] for row in rows]


def test_ignored_columns_are_no_features_and_need_not_be_in_every_file(read, tmp_path):
    frame = patients()
    (tmp_path / "sites").mkdir()
    for site, rows in frame.assign(visit="2020-01-01").groupby("site"):
        write(rows.drop(columns=["site", *["visit"] * (site == "oslo")]), tmp_path / "sites" / f"{site}.csv")
    told = replace(RAW, client_column=None, ignore_columns=" visit ")
    assert read_source(tmp_path / "sites", told).fingerprint == read(frame).fingerprint


# Splits


@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.95])
@pytest.mark.parametrize("groups", [2, 3, 9])
def test_whole_groups_leave_some_on_both_sides(groups, fraction):
    rng = np.random.default_rng(groups)
    group = np.concatenate([np.arange(groups), rng.integers(0, groups, 40)])
    drawn = draw_groups(group, fraction, rng)
    assert not set(group[drawn].tolist()) & set(group[~drawn].tolist())
    assert 0 < drawn.sum() < len(drawn)
    assert abs(drawn.sum() - fraction * len(group)) <= np.bincount(group).max()


def test_a_group_may_be_of_any_type_and_is_refused_on_two_sides_of_a_client(read):
    frame = patients().assign(patient=lambda f: f.index + 1000.5)
    bonn, oslo = (frame.index[frame["site"] == site] for site in ("bonn", "oslo"))
    frame.loc[[bonn[0], oslo[-1]], "patient"] = 7  # clients name their groups independently
    assert read(frame, groups="patient").fingerprint == read(frame.drop(columns="patient"), "b.csv").fingerprint
    frame.loc[[bonn[0], bonn[-1]], "patient"] = 7
    with pytest.raises(UsageError, match=r"group '7.0' of client 'bonn' is on two sides, train and test: a group must"):
        read(frame, groups="patient")
