"""Tables of one or many files: features, labels and splits against pandas, scikit-learn and NumPy."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sklearn.preprocessing import StandardScaler

from fedshift.data.assembly import read_source
from fedshift.data.columns import Column
from fedshift.data.federation import Federation
from fedshift.data.files.read_options import ReadOptions
from fedshift.data.readers.tables import can_read
from fedshift.data.scan import draw_groups
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
    assert list(features.columns) == [
        "age", "chol", "smokes", "pain_atypical", "pain_none at all", "pain_typical",
    ]  # fmt: skip
    for client in data.clients:
        assert list(client.splits) == ["train", "validation", "test"]
        for name, split in client.splits.items():
            rows = part_of(frame, client.name, name).index
            assert split.x.dtype == torch.float32
            np.testing.assert_array_equal(split.x, features.loc[rows].astype(np.float32))
            np.testing.assert_array_equal(split.y, frame.loc[rows, "ill"])


def test_numbers_are_scaled_by_the_training_rows_of_their_client_as_in_scikit_learn(read):
    frame = patients()
    for client in read(frame, scaling="client").clients:
        numeric = frame.columns[[0, 2, 3]]
        fitted = StandardScaler().fit(part_of(frame, client.name, "train")[numeric])
        for name, split in client.splits.items():
            rows = part_of(frame, client.name, name)
            np.testing.assert_allclose(split.x[:, :3], fitted.transform(rows[numeric]), rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(split.x[:, 3:], pd.get_dummies(frame["pain"]).loc[rows.index])


def test_a_number_that_is_constant_in_training_is_only_centered(read):
    frame = patients().assign(chol=lambda f: np.where(f["part"].str.lower() == "train", 0.1, 7.1))
    for client in read(frame, scaling="client").clients:
        assert torch.equal(client.train.x[:, 1], torch.zeros(len(client.train)))
        np.testing.assert_allclose(client.test.x[:, 1], 7, rtol=1e-6)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=6)
@given(
    changed=st.lists(st.just(np.nan) | st.floats(-1e6, 1e6), min_size=18, max_size=18),
    pain=st.lists(st.sampled_from([None, "typical", "atypical", "none at all"]), min_size=18, max_size=18),
    labels=st.lists(st.integers(0, 2), min_size=18, max_size=18),
)
def test_test_rows_never_change_training_or_validation_arrays(read, changed, pain, labels):
    before = patients().assign(chol=lambda f: f["chol"].where(f.index % 7 != 0))
    test = before["part"] == "TEST"
    after = before.copy()
    after.loc[test, "chol"], after.loc[test, "pain"], after.loc[test, "ill"] = changed, pain, labels
    pairs = zip(read(before, scaling="client").clients, read(after, scaling="client").clients, strict=True)
    for one, other in pairs:
        for name in ("train", "validation"):
            assert torch.equal(one.splits[name].x, other.splits[name].x)
            assert torch.equal(one.splits[name].y, other.splits[name].y)
        assert torch.isfinite(other.test.x).all()


# Missing values


def test_missing_numbers_are_the_median_and_text_the_most_frequent_of_the_training_rows(read):
    whole = patients()
    lost = np.random.default_rng(1).random((len(whole), 2)) < 0.3
    frame = whole.assign(chol=whole["chol"].mask(lost[:, 0]), pain=whole["pain"].mask(lost[:, 1]))
    data = read(frame)
    for client in data.clients:
        train = part_of(frame, client.name, "train")
        median = np.nanmedian(train["chol"])
        often = train["pain"].mode()[0]
        for name, split in client.splits.items():
            rows = part_of(frame, client.name, name).index
            np.testing.assert_array_equal(split.x[:, 1], frame.loc[rows, "chol"].fillna(median).astype(np.float32))
            filled = frame["pain"].fillna(often)
            np.testing.assert_array_equal(split.x[:, 3:], pd.get_dummies(filled).loc[rows])
    counts = frame.isna().groupby(frame["site"]).sum()[["chol", "pain"]].sum(axis=1)
    assert data.notices == (
        "missing values imputed from each client's own training rows (median, or most frequent category): "
        + ", ".join(f"{site} {counts[site]}" for site in ("bonn", "kyiv", "oslo")),
    )


@pytest.mark.parametrize("word", ["", "?", "NA", "NaN", "nan", "null", " ", " ? "])
def test_several_words_mean_that_a_value_is_missing(read, word):
    frame = patients()
    frame["chol"] = frame["chol"].astype(str).mask(frame.index == 4, word)
    frame["pain"] = frame["pain"].mask(frame.index == 4, word)
    assert read(frame).notices[0].endswith("category): bonn 2")


def test_a_column_that_a_client_never_measured_in_training_is_zero_there_and_said(read):
    frame = patients()
    bonn = frame["site"] == "bonn"
    frame["chol"] = frame["chol"].mask(bonn & (frame["part"] != "TEST"))
    frame["pain"] = frame["pain"].mask(bonn)
    data = read(frame, scaling="client")
    for split in data.client("bonn").splits.values():
        assert torch.equal(split.x[:, [1, 3, 4, 5]], torch.zeros(len(split), 4))
        assert (split.x[:, 0] != 0).any()
    assert data.client("oslo").train.x[:, 1].std() > 0.5
    assert data.notices == (
        "column 'chol' has no value in the training rows of 'bonn': it is 0 in all their rows",
        "column 'pain' has no value in the training rows of 'bonn': it is 0 in all their rows",
    )


def test_columns_that_are_constant_or_empty_everywhere_are_said(read):
    data = read(patients().assign(unit="mg", year=2020, void=None), scaling="client").check()
    assert data.sample_shape == (9,)
    assert data.notices == (
        "the same in all rows, so nothing can be learned from it: 'unit', 'year'",
        "column 'void' has no value in the training rows of 'bonn', 'kyiv', 'oslo': it is 0 in all their rows",
    )


def test_missing_values_can_be_refused(read):
    frame = patients()
    assert read(frame, missing="refuse").notices == ()
    frame.loc[[1, 7], "pain"] = None
    with pytest.raises(UsageError, match=r"client 'bonn' has no value of 'pain' in 2 of 30 rows: .*missing='impute'"):
        read(frame, missing="refuse")


# Files


def test_all_formats_and_layouts_give_bitwise_the_same_federation(tmp_path):
    frame = patients().assign(
        dose=lambda f: f["chol"].round(3).mask(f.index % 5 == 0),
        visits=lambda f: f["age"].astype("Int64").mask(f.index % 4 == 0),
        grade=lambda f: f["age"].mod(3).astype(str),
        smokes=lambda f: f["smokes"].astype(object).mask(f.index % 6 == 0).astype("boolean"),
    )
    read = {}
    for ending in ("csv", "tsv", "parquet"):
        read[ending] = read_source(write(frame, tmp_path / f"table.{ending}"), READING)
        folder = tmp_path / ending
        folder.mkdir()
        for place, (site, rows) in enumerate(frame.groupby("site")):
            order = (
                random.Random(place).sample(list(frame.columns), len(frame.columns)) if place else list(frame.columns)
            )
            write(rows[[name for name in order if name != "site"]], folder / f"{site}.{ending}")
        (folder / ".hidden.csv").write_text("nothing")
        (folder / "notes.txt").write_text("nothing")
        read[f"folder {ending}"] = read_source(folder, replace(READING, client_column=None))
        parts = tmp_path / f"parts {ending}"
        parts.mkdir()
        write(frame[:40], parts / f"1.{ending}")
        write(frame[40:], parts / f"2.{ending}")
        read[f"parts {ending}"] = read_source(parts, READING)
    assert {data.names for data in read.values()} == {("bonn", "kyiv", "oslo")}
    assert len({data.notices for data in read.values()}) == 1
    assert {data.sample_shape for data in read.values()} == {(9,)}
    assert {name: data.fingerprint for name, data in read.items()} == dict.fromkeys(read, read["csv"].fingerprint)
    assert read["parts csv"].name == "parts csv"


def test_a_byte_order_mark_quotes_and_line_breaks_inside_them_are_read(tmp_path):
    lines = [
        'site,"a, b",mood,y',
        *(f'x,{n},"so\nso",{n % 2}' for n in range(8)),
        *(f'x,{n},"well",1' for n in range(4)),
    ]
    (tmp_path / "t.csv").write_text("\n".join(lines), encoding="utf-8-sig")
    data = read_source(tmp_path / "t.csv", ReadOptions(client_column="site", target="y", scaling="none"))
    assert data.sample_shape == (3,)
    pooled = torch.cat([split.x for split in data.clients[0].splits.values()])
    assert pooled.sum(0).tolist() == [28 + 6, 8, 4]


def test_numbers_with_some_text_among_them_are_categories_and_said(read, tmp_path):
    frame = patients().assign(grade=lambda f: (f.index % 3).astype(str))
    frame.loc[4, "grade"] = "3b"
    data = read(frame)
    assert data.sample_shape == (10,)
    place = f"{tmp_path / 'table.csv'}, data row 5"
    (notice,) = data.notices
    assert notice.startswith(
        f"column 'grade' has numbers and text such as '3b' ({place}): it is read as 4 categories; "
    )


@pytest.mark.parametrize("code", ["-", ".", "--", "Unknown", " none "])
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


def test_text_typed_as_categories_stays_text_even_if_it_looks_like_numbers(read):
    frame = patients()
    digits = (frame["age"] % 3).astype(str)
    data = read(frame.assign(age=digits.astype("category")), "table.parquet")
    for name, split in data.client("bonn").splits.items():
        rows = part_of(frame, "bonn", name).index
        np.testing.assert_array_equal(split.x[:, :3], pd.get_dummies(digits).loc[rows])


def test_progress_counts_values(read):
    heard = []
    read(patients(), progress=lambda *said: heard.append(said))
    assert heard[-1] == ("columns", 4, 4)


def test_whether_a_path_holds_tables_is_seen_from_names(tmp_path):
    assert not can_read(tmp_path)
    assert not can_read(tmp_path / "absent.csv")
    (tmp_path / "images.csv").mkdir()
    (tmp_path / "notes.txt").touch()
    (tmp_path / ".a.csv").touch()
    assert not can_read(tmp_path)
    (tmp_path / "A.CSV").touch()
    assert can_read(tmp_path)
    assert can_read(tmp_path / "A.CSV")
    assert not can_read(tmp_path / "notes.txt")


# Clients and labels


def test_domains_choose_and_order_clients_whose_rows_alone_count(read, tmp_path):
    frame = patients()
    frame.loc[frame["site"] == "bonn", "pain"] = "only here"
    frame.loc[frame["site"] == "bonn", "ill"] = None
    data = read(frame, domains=("oslo", "kyiv"))
    assert data.names == ("oslo", "kyiv")
    assert data.sample_shape == (6,)
    alone = read(frame[frame["site"] != "bonn"], "alone.csv", domains=("oslo", "kyiv"))
    assert data.fingerprint == alone.fingerprint
    with pytest.raises(UsageError, match="unknown client 'olso': did you mean 'oslo'\\? allowed are bonn, kyiv, oslo"):
        read(frame, domains=("olso",))


def test_columns_come_in_the_order_of_the_first_client_that_is_chosen(tmp_path):
    frame = patients().drop(columns="site")
    write(frame, tmp_path / "bonn.csv")
    write(frame[["ill", "pain", "part", "chol", "smokes", "age"]], tmp_path / "oslo.csv")
    for domains in (None, ("bonn", "oslo"), ("oslo", "bonn")):
        data = read_source(tmp_path, replace(RAW, client_column=None, domains=domains))
        names = ["age", "chol", "smokes", "pain"] if data.names[0] == "bonn" else ["pain", "chol", "smokes", "age"]
        assert [column.name for column in data.columns] == names  # as across machines


def test_files_that_are_not_chosen_need_not_be_readable(tmp_path):
    for site, rows in patients().groupby("site"):
        write(rows.drop(columns="site"), tmp_path / f"{site}.csv")
    (tmp_path / "bonn.csv").write_text("")
    reading = replace(RAW, client_column=None, domains=("oslo", "kyiv"))
    assert read_source(tmp_path, reading).names == ("oslo", "kyiv")
    with pytest.raises(UsageError, match="unknown client 'rome'"):
        read_source(tmp_path, replace(reading, domains=("rome",)))


@pytest.mark.parametrize("name", ["table.csv", "table.parquet"])
@pytest.mark.parametrize(
    ("values", "classes", "labels", "names"),
    [
        ([0, 1, 2], None, [0, 1, 2], ()),
        ([0, 1, 2], 5, [0, 1, 2], ()),
        ([0, 2, 2], 3, [0, 2, 2], ()),
        ([0.0, 1.0, 2.0], None, [0, 1, 2], ()),
        ([0, 2, 2], None, [0, 1, 1], ("0", "2")),
        ([1, 3, 2], None, [0, 2, 1], ("1", "2", "3")),
        ([-1, 10, 9], None, [0, 2, 1], ("-1", "9", "10")),
        (["b", "a", "c d"], None, [1, 0, 2], ("a", "b", "c d")),
        (["b", "a", "b"], 3, [1, 0, 1], ("a", "b", "unseen 2")),
        ([True, False, True], None, [1, 0, 1], ("False", "True")),
    ],
)
def test_labels_are_numbered_from_zero(read, name, values, classes, labels, names):
    frame = patients()
    frame["ill"] = np.array(values)[np.arange(90) // 3 % 3]
    data = read(frame, name, classes=classes)
    assert data.classes == (classes or len(set(values)))
    assert data.class_names == names
    for client in data.clients:
        for part, split in client.splits.items():
            rows = part_of(frame, client.name, part).index
            assert split.y.tolist() == [labels[row // 3 % 3] for row in rows]


def test_ignored_columns_are_no_features_and_need_not_be_in_every_file(read, tmp_path):
    frame = patients()
    without = read(frame)
    frame["visit"] = "2020-01-01"
    assert read(frame, "visits.csv", ignore_columns="visit").fingerprint == without.fingerprint
    for place, (site, rows) in enumerate(frame.groupby("site")):
        (tmp_path / "sites").mkdir(exist_ok=True)
        write(rows.drop(columns=["site", *["visit"] * (place == 1)]), tmp_path / "sites" / f"{site}.csv")
    told = replace(RAW, client_column=None, ignore_columns=" visit ")
    assert read_source(tmp_path / "sites", told).fingerprint == without.fingerprint


# Splits


def test_rows_are_drawn_for_testing_as_many_of_each_class_and_the_same_in_every_run(read):
    frame = patients(300).drop(columns="part").assign(ill=lambda f: np.where(f.index // 3 % 5 == 0, "yes", "no"))
    data = read(frame, split_column=None, test_fraction=0.25)
    for client in data.clients:
        assert torch.bincount(client.test.y).tolist() == [20, 5]
        assert torch.bincount(client.train.y).tolist() == [60, 15]
        assert client.validation is None
        both = torch.cat([client.train.x, client.test.x])[:, 1].sort().values
        expected = np.sort(frame.loc[frame["site"] == client.name, "chol"].to_numpy(np.float32))
        np.testing.assert_array_equal(both, expected)
    assert read(frame, "table.parquet", split_column=None, test_fraction=0.25).fingerprint == data.fingerprint
    alone = read(frame, "other.csv", split_column=None, test_fraction=0.25, domains=("kyiv",))
    assert torch.equal(alone.clients[0].test.x, data.client("kyiv").test.x)


def test_groups_are_drawn_whole(read):
    frame = patients(600).drop(columns="part")
    frame["age"] = np.random.default_rng(2).integers(0, 40, 600)
    frame["patient"] = "p" + frame["age"].astype(str)
    data = read(frame, split_column=None, groups="patient")
    assert data.sample_shape == (6,)
    for client in data.clients:
        assert not set(client.train.x[:, 0].tolist()) & set(client.test.x[:, 0].tolist())
        assert len(client.test) == pytest.approx(40, abs=5)  # less than a group
    assert data.client("oslo").test.x[:, 0].unique().tolist() != data.client("bonn").test.x[:, 0].unique().tolist()


@given(
    group=st.lists(st.integers(0, 8), min_size=2, max_size=60),
    fraction=st.floats(0.05, 0.95),
    seed=st.integers(0, 2**32),
)
def test_whole_groups_leave_some_on_both_sides(group, fraction, seed):
    array = np.array(group, dtype=np.int32)
    drawn = draw_groups(array, fraction, np.random.default_rng(seed))
    assert not set(array[drawn].tolist()) & set(array[~drawn].tolist())
    if len(set(group)) == 1:
        assert not drawn.any()
        return
    assert drawn.any()
    assert not drawn.all()
    assert abs(drawn.sum() - fraction * len(group)) <= np.bincount(array).max()


def test_a_group_may_be_of_any_type_and_is_refused_on_two_sides(read):
    frame = patients().assign(patient=lambda f: f.index + 1000.5)
    assert read(frame, groups="patient").fingerprint == read(frame.drop(columns="patient"), "b.csv").fingerprint
    bonn = frame.index[frame["site"] == "bonn"]
    frame.loc[[bonn[0], bonn[-1]], "patient"] = 7
    with pytest.raises(UsageError, match=r"group '7.0' of client 'bonn' is on two sides, train and test: a group must"):
        read(frame, groups="patient")
    oslo = frame.index[frame["site"] == "oslo"]
    frame.loc[[bonn[-1], oslo[0]], "patient"] = 5, 7
    read(frame, groups="patient")  # clients name their groups independently


def test_labels_mean_the_same_whichever_clients_are_chosen(tmp_path):
    grades = {"a": ["G1", "G2", "G3"], "b": ["G2", "G3"], "c": ["G2", "G3"]}
    rows = [f"{site},{k},{grade}" for site, own in grades.items() for k in range(10) for grade in own]
    file = tmp_path / "all.csv"
    file.write_text("\n".join(["site,age,grade", *rows]))
    made = read_source(file, ReadOptions(client_column="site", target="grade", domains=("b", "c")))
    assert (made.classes, made.class_names) == (3, ("G1", "G2", "G3"))
    assert {int(label) for client in made.clients for label in client.train.y} == {1, 2}
