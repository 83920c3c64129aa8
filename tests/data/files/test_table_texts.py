"""Texts of tables: numbers in all forms, dates, codes, separators and splits, each read by a rule, refused, or said."""

import gzip
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from fedshift.data.assembly import read_folder, read_source
from fedshift.data.columns import Column, are_dates, read_numerals
from fedshift.data.readers.tables import read_rows
from fedshift.data.source import ReadOptions
from fedshift.utils.errors import UsageError


def make_frame(columns, rows=24):
    """Rows of an age, the cells of each column over and over, and a label."""
    cells = {name: np.resize(np.array(values, object), rows) for name, values in columns.items()}
    return pd.DataFrame({"age": range(20, 20 + rows), **cells, "ill": np.arange(rows) % 2})


def write(folder: Path, columns, *, sep=",", suffix="csv", before="") -> Path:
    """Write the rows as two clients, and return the folder."""
    for name in ("a", "b"):
        (folder / f"{name}.{suffix}").write_text(before + make_frame(columns).to_csv(index=False, sep=sep))
    return folder


def read(folder: Path, **options):
    return read_folder(folder, **{"target": "ill", "scaling": "none", **options})


def values(data):
    """All features of the first client, in the order of its first column."""
    rows = np.concatenate([split.x.numpy() for split in data.clients[0].splits.values()])
    return rows[np.argsort(rows[:, 0])]


NUMBERS = {
    "decimal comma": (["2,75", "3", "0,5"], [2.75, 3, 0.5]),
    "comma and power": (["1,5E3", "2,1e-2"], [1500, 0.021]),
    "Fortran": (["1.5D+03", "2d1"], [1500, 20]),
    "space": (["1 200", "712", "12 345 678"], [1200, 712, 12345678]),
    "narrow space": (["1\u202f200,5", "7\u00a0712"], [1200.5, 7712]),
    "apostrophe": (["1'500", "1\u2019200.5"], [1500, 1200.5]),
    "commas between thousands": (["1,234,567", "1,234", "12"], [1234567, 1234, 12]),
    "points between thousands": (["1.234,5", "7.000", "12"], [1234.5, 7000, 12]),
    "currency": (["$1,200.50", "$ 3"], [1200.5, 3]),
    "letters": (["CHF 1'200.50", "CHF 3"], [1200.5, 3]),
    "currency after": (["1.200,50 \u20ac", "-3 \u20ac"], [1200.5, -3]),
    "percent": (["12 %", "7.5%"], [12, 7.5]),
    "unit": (["5 mg", "7.5 mg", "10mg"], [5, 7.5, 10]),
    "unit of a power": (["21.5 kg/m\u00b2", "30 kg/m\u00b2"], [21.5, 30]),
    "parentheses": (["(5.2)", "7"], [-5.2, 7]),
    "minus": (["\u22125", "+3"], [-5, 3]),
    "Arabic": (["\u0661\u0662", "\u0663\u066b\u0665"], [12, 3.5]),
    "full width": (["\uff11\uff12", "\uff13\uff0e\uff15"], [12, 3.5]),
    "formula": (['="12"', '="007"'], [12, 7]),
    "kept as text": (["'5", "7"], [5, 7]),
    "minus after": (["5-", "7"], [-5, 7]),
}


def test_numbers_in_other_forms_are_read_by_one_rule_and_said(tmp_path):
    texts, numbers = ({form: case[place] for form, case in NUMBERS.items()} for place in (0, 1))
    data, expected = read(write(tmp_path, texts)), make_frame(numbers).drop(columns="ill").to_numpy(float)
    np.testing.assert_array_equal(values(data), expected.astype(np.float32))
    rows = read_rows(tmp_path / "a.csv", data.columns, "m")
    np.testing.assert_array_equal(rows, expected)
    said = [notice.partition(", read by one rule: ")[0] for notice in data.notices]
    assert said == [f"column {form!r} holds numbers in other forms" for form in NUMBERS]
    for column, (cells, meant) in zip(data.columns[1:], NUMBERS.values(), strict=True):
        single = {text: number for text, number in zip(cells, meant, strict=True) if text not in ("7.000", "1,234")}
        assert [column.encode(text) for text in single] == [[number] for number in single.values()]  # as models do


CATEGORIES = [
    ["C50.1", "C61"], ["A12", "B3"], ["T1", "T2"], ["stage 1", "stage 2"], ["1.2.3", "1.2.4"], ["18-30", "31-50"],
    ["3f2504e0-4f89", "9a2504e0-4f89"], ["0x1F", "0x2A"], ["+49 30 1234", "030 99881"], ["pT1a", "pT2"], ["A+", "0-"],
    ["1a", "2a"], ["I", "II"], ["yes", "no"], ["March", "April"], ["Marker 12", "Decile 10"],
]  # fmt: skip
MEASURES = [
    [">5", "<3"], ["130/80", "120/70"], ["1:40", "1:80"], ["1:10", "1:20"], ["5 mg", "1 g"], ["2 years", "1 year"],
    ["~5", "\u22653"], ["1st", "2nd"],
]  # fmt: skip


def test_codes_are_categories_and_what_may_be_measured_is_said(tmp_path):
    data = read(write(tmp_path, {str(texts): texts for texts in CATEGORIES + MEASURES}))
    assert [column.categories for column in data.columns[1:]] == [tuple(sorted(t)) for t in CATEGORIES + MEASURES]
    told = [notice for notice in data.notices if " holds text such as " in notice]
    assert [notice.partition(" holds ")[0] for notice in told] == [f"column {str(texts)!r}" for texts in MEASURES]
    assert len(data.notices) == len(MEASURES)


@pytest.mark.parametrize(
    "texts",
    [
        ["2024-03", "2024-04"], ["1 Mar 2024", "2 Mar 2024"], ["15. M\u00e4rz 2024", "3. Mai 2024"], ["Mar 1, 2024"],
        ["01-Jan-20", "02-Feb-21"], ["March 2024", "April 2024"], ["2024-W05", "2024-W06"], ["2024Q1", "2024 Q2"],
        ["2024-03-01", "2024-03-02", "unknown"], ["2024-03-01T10:00", "2024-03-02T10:00"], ["12/2020", "01/2021"],
        ["Mar 5", "3-Apr"], ["10:35", "11:20"], ["1:30:00", "1:20:00"], ["8:30 AM", "9:15 PM"],
        ["2024-03-01", "1.4.2024", "not seen"],
    ],
    ids=str,
)  # fmt: skip
def test_dates_and_times_are_refused_with_three_cells(tmp_path, texts):
    assert are_dates(dict.fromkeys(texts, 1))
    if len(texts) == 3:
        cells = ", ".join(map(repr, sorted(texts)))
        with pytest.raises(UsageError, match=rf"column 'v' holds dates or times \(such as {cells}\), which have no"):
            read(write(tmp_path, {"v": texts}))


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (["20240131", "19991231"], "numbers such as 20240131; if they are dates, whose differences are not days"),
        (["20240131", "20241331"], ""), (["01234", "10115"], "'01234', which is read as a number; if its zeros count"),
        (["0.5", "0"], ""), (["007.5", "10"], ""),
    ],
)  # fmt: skip
def test_numbers_that_may_be_dates_or_codes_are_said(tmp_path, cells, said):
    data = read(write(tmp_path, {"v": cells}), scaling="client")
    assert [notice.startswith(f"column 'v' holds {said}") for notice in data.notices] == [True] * bool(said)
    assert data.columns[1].categories is None


DOUBTFUL = [(["1,234", "2,345"], ","), (["1,5", "1.25"], ","), (["19.471", "712"], ";"), (["1.5 mg", "2,5 mg"], ";")]


@pytest.mark.parametrize(("texts", "sep"), DOUBTFUL, ids=str)
def test_points_and_commas_that_may_mean_two_things_are_refused(tmp_path, texts, sep):
    with pytest.raises(UsageError, match=r"a\.csv, data row \d: column 'v' has numbers whose commas and points may"):
        read(write(tmp_path, {"v": texts}, sep=sep))


COMMAS = ", and a comma in a number is its decimal point"


@pytest.mark.parametrize(
    ("suffix", "sep", "texts", "said"),
    [
        ("csv", ";", ["4,7", "5"], f"semicolons separate its columns{COMMAS}"),
        ("csv", ";", ["4.7", "5"], "semicolons separate its columns"),
        ("csv", ";", ["4,712", "5"], f"semicolons separate its columns{COMMAS}"),
        ("tsv", "\t", ["4,7", "5"], f"tabs separate its columns{COMMAS}"),
        ("csv", "\t", ["4.7", "5"], "tabs separate its columns"),
        ("csv", "|", ["4.7", "5"], "bars separate its columns"),
        ("tsv", ",", ["4.7", "5"], "commas separate its columns"),
    ],
)
@pytest.mark.parametrize("before", ["", "sep={}\n", "\ufeffsep={}\n", "# exported\n# by X, Y\n", "\n"])
def test_separators_decimal_points_and_first_lines_are_found_in_the_file(tmp_path, suffix, sep, texts, said, before):
    data = read(write(tmp_path, {"v": texts}, sep=sep, suffix=suffix, before=before.format(sep)))
    numbers = [float(text.replace(",", ".")) for text in texts]
    np.testing.assert_array_equal(values(data)[:, 1], np.resize(np.array(numbers, np.float32), 24))
    count = before.count("\n")
    left = f"what precedes its line of names is left out ({count} line{'s' * (count > 1)})"
    kinds = [left] * bool(before) + [said]
    assert data.notices == tuple(f"{tmp_path / name}.{suffix}: {kind}" for name in "ab" for kind in kinds)


def test_points_between_thousands_are_known_from_another_column_of_the_file(tmp_path):
    data = read(write(tmp_path, {"v": ["19.471", "712"], "crp": ["4,7", "5,2"]}, sep=";"))
    assert set(values(data)[:, 1]) == {19471, 712}
    assert any("'19.471' as 19471" in notice for notice in data.notices)


def test_files_may_write_numbers_differently_but_have_one_unit(tmp_path):
    write(tmp_path, {"v": [4.5, 3.25]})
    make_frame({"v": ["4,5", "3,25"]}).to_csv(tmp_path / "a.csv", index=False, sep=";")
    assert set(values(read(tmp_path))[:, 1]) == {4.5, 3.25}
    make_frame({"v": ["5 %", "7 %"]}).to_csv(tmp_path / "a.csv", index=False)
    with pytest.raises(UsageError, match=r"column 'v' holds '5 %' and '4\.5' in two files: give one unit"):
        read(tmp_path)


def test_a_model_keeps_the_unit_of_a_column():
    column = Column(name="dose", unit="mg")
    assert column.encode("5 mg") == column.encode(5) == column.encode("5") == [5]
    for other in ("5 g", "many", "1,234"):
        with pytest.raises(UsageError, match="holds numbers in mg, not"):
            column.encode(other)


def test_plain_numbers_are_as_python_reads_them():
    texts = ["1", "-2.5", "+3", "1e-3", ".5", "7.", "0012"]
    assert read_numerals(texts).numbers == {text: float(text) for text in texts}


# Digits


NEAR = [
    1_700_000_000 + np.arange(24) % 7, 20240100 + np.arange(24) % 7, 101325 + np.arange(24) / 16,
    2**24 + np.arange(24) % 5, 1e-60 * np.arange(1, 25), 1e9 + np.arange(24), np.arange(24) / 3,
]  # fmt: skip


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_numbers_keep_their_digits_until_they_are_standardized(tmp_path, suffix):
    frame = make_frame({}).assign(**{f"v{place}": numbers for place, numbers in enumerate(NEAR)})
    for name in ("a", "b"):
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
        if suffix == "parquet":
            frame.to_parquet((tmp_path / f"{name}.csv").rename(tmp_path / f"{name}.parquet"))
    data = read(tmp_path, scaling="client")
    rows = np.concatenate([split.x.numpy() for split in data.clients[0].splits.values()])
    place = np.argsort(rows[:, 0])
    train = np.argsort(place)[: len(data.clients[0].train)]
    for own, read_as in zip(NEAR, rows[place, 1:].T, strict=True):
        assert len(np.unique(read_as)) == len(np.unique(own))
        moved = np.array(own, np.float64) - own[0]
        np.testing.assert_allclose(read_as, (moved - moved[train].mean()) / moved[train].std(), rtol=1e-4, atol=1e-4)
    assert data.schema.preparation.dtype == "float64"
    assert not any("differences are lost" in notice for notice in data.notices)
    (told,) = [notice for notice in read(tmp_path).notices if "differences are lost" in notice]
    assert told.endswith("in 'v0', 'v4', 'v5'")


# Roles


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("split", ["training", "validation", "testing"]), ("Split", ["train", "dev", "test"]),
        (" SPLIT ", ["Train", "holdout", "train", "test"]),
    ],
)  # fmt: skip
def test_a_column_called_split_assigns_rows(tmp_path, name, words):
    data = read(write(tmp_path, {"v": [1.5, 2], name: words}))
    train = np.sort(data.clients[0].train.x.numpy()[:, 0])
    np.testing.assert_array_equal(train, 20 + np.flatnonzero(np.resize([w.lower()[:5] == "train" for w in words], 24)))
    assert data.sample_shape == (2,)


def test_other_words_of_a_split_are_refused_and_other_columns_said(tmp_path):
    with pytest.raises(UsageError, match="column 'split' holds 'external', 'test', 'train': the split of rows is one"):
        read(write(tmp_path, {"split": ["train", "external", "test"]}))
    for name, words in (("set", ["train", "test"]), ("split", ["0", "1"])):
        assert read(write(tmp_path, {name: words})).notices == (
            f"column {name!r} is an input, and assigns no rows to training and testing: split_column does",
        )


def test_files_beside_tables_that_may_hold_rows_are_named(tmp_path):
    write(tmp_path, {})
    text = (tmp_path / "a.csv").read_bytes()
    (tmp_path / "c.csv.gz").write_bytes(gzip.compress(text))
    (tmp_path / "d.xlsx").write_bytes(b"PK")
    (tmp_path / "e.txt").write_bytes(text)
    (tmp_path / "README.txt").write_text("Ages, and what v is\n")
    (fault,) = read(tmp_path).faults
    assert fault.startswith("c.csv.gz, d.xlsx, e.txt in ")


# Frames


def test_frames_of_all_types_are_read():
    n = np.arange(24)
    frame = make_frame({}).assign(
        sparse=pd.arrays.SparseArray((n % 3 == 0).astype(float)),
        binned=pd.cut(n % 9, [0, 3, 6, 9], include_lowest=True),
        interval=pd.arrays.IntervalArray.from_breaks([0, 1, 2, 3]).take(n % 3),
        typed=pd.Categorical(n % 2 / 2),
        whole=pd.array(n, dtype="Int64"),
        comma=[f"{k % 4},5" for k in n],
    )
    data = read_source({"a": frame, "b": frame}, ReadOptions(target="ill"))
    assert [column.width for column in data.columns] == [1, 1, 3, 3, 2, 1, 1]
    arrow = pa.Table.from_pandas(frame[["age", "whole", "comma", "ill"]])
    assert read_source({"a": arrow, "b": arrow}, ReadOptions(target="ill")).sample_shape == (3,)
