"""Tables that cannot be used are refused by the name of the file, column, client or row, with what to do."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedshift.data.assembly import read_source
from fedshift.data.readers import tables
from fedshift.data.source import ReadOptions
from fedshift.utils import files
from fedshift.utils.errors import UsageError

READING = ReadOptions(client_column="site", target="ill", split_column="part")
ROWS = ("x,train,1,0", "x,train,2,1", "x,test,3,0", "x,test,4,1")


def lines(*rows: str) -> str:
    return "\n".join(["site,part,a,ill", *rows, ""])


def write_patients(file, **changed):
    """Write sixty rows of two sites, with further or other columns; return them."""
    row = np.arange(60)
    site, pain = np.resize(["oslo", "bonn"], 60), np.resize(["typical", "none at all", "atypical"], 60)
    columns = {"age": row, "site": site, "pain": pain, "ill": row // 2 % 3, "part": np.repeat(["train", "test"], 30)}
    frame = pd.DataFrame(columns | changed)
    frame.to_parquet(file) if file.suffix == ".parquet" else frame.to_csv(file, index=False)
    return frame


def refuse(path, reading=READING) -> str:
    with pytest.raises(UsageError) as refused:
        read_source(path, reading)
    return str(refused.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "{file} cannot be read as a table (Empty CSV file)"),
        (lines(), "{file} has names of columns but no row"),
        (lines(*ROWS, "x,train,3"), "CSV parse error: Row #6: Expected 4 columns, got 3: x,train,3): it must have"),
        (lines(*ROWS).replace(",a,", ",ill,"), "{file} has two columns 'ill': names must differ"),
        (lines(*ROWS).replace(",a,", ",Unnamed: 0,"), "column 3 has no name ('Unnamed: 0'), and is probably the num"),
        ("größe,y\n1,0\n2,1\n".encode("latin-1"), "{file} cannot be read as a table"),
        (lines(*ROWS).encode("utf-16"), "{file} cannot be read as a table"),
        ("site,part,ill\nx,train,0\n", "{file} has no column except ill, site, part: a table needs features"),
        (lines(*ROWS, ",train,1,0", "x,train,1,1", ",test,1,1"), "{file}, data rows 5, 7: no value in column 'site'"),
        (lines(*ROWS, "x,train,1,?"), "{file}, data row 5: no value in column 'ill': fill it in, or leave the rows"),
        (lines(*ROWS, "x,,1,1"), "{file}, data row 5: no value in column 'part'"),
        (lines(*ROWS, "x,trial,1,1"), "{file}, data row 5: 'trial' in column 'part', the split of rows"),
        (lines(*ROWS, "x,train,-inf,1"), "{file}, data row 5: an infinite value in column 'a' (or one beyond float32)"),
        (lines(*ROWS, *["y,val,1,1"] * 2), "client 'y' has no sample for train among its 2"),
        (
            lines(*ROWS, "y,train,1,1", "z,test,1,1"),
            "client 'y' has no sample for test among its 1: its parts must give it some; client 'z' has no sample for "
            "train among its 1: its parts must give it some, or leave them out (domains='!y,!z')",
        ),
        (lines(*ROWS, "x,test,1,0.5"), "target 'ill' is 0.5 in some rows, not a whole number, and no class"),
        (lines(*(f"x,test,1,{n}" for n in range(101))), "target 'ill' has more than 100 different values (such as 0,"),
        (
            lines(*ROWS, *(f"x,test,word {n:03},1" for n in range(51))),
            "column 'a' holds text such as 'word 000', 'word 001', 'word 002' and more than 50 different values",
        ),
        (
            lines(*ROWS, *(f"x,test,{n},1" for n in range(90)), "x,test,12o,1"),
            "{file}, data row 95: column 'a' holds text such as '12o' and more than 50 different values, so it is an",
        ),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_by_name(tmp_path, content, said):
    file = tmp_path / "t.csv"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert said.format(file=file) in refuse(file)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"target": None}, "say which column holds the label (target); columns are age, site, pain, ill, part"),
        ({"target": "illness"}, "unknown column 'illness': did you mean 'ill'? allowed are age, ill, pain, part, site"),
        ({"client_column": "sites"}, "unknown column 'sites': did you mean 'site'?"),
        ({"ignore_columns": "age, ill"}, "column 'ill' is named for 2 purposes"),
        ({"ignore_columns": "pains"}, "unknown column 'pains': did you mean 'pain'?"),
        ({"ignore_columns": "age,pain"}, "has no column except ill, site, part, age, pain: a table needs features"),
        ({"client_column": None}, "perhaps 'site'; columns are age, site, pain, ill, part"),
        ({"split_column": None, "test_fraction": 1.0}, "test_fraction=1: must lie between 0 and 1"),
        ({"split_column": None, "groups": "pain", "test_fraction": 0.0}, "test_fraction=0: must lie between"),
    ],
)
def test_a_choice_that_does_not_fit_the_table_is_refused(tmp_path, changed, said):
    write_patients(tmp_path / "t.csv")
    assert said in refuse(tmp_path / "t.csv", replace(READING, **changed))


def test_clients_of_one_group_or_of_single_rows_of_classes_cannot_be_split(tmp_path):
    drawn, file = replace(READING, split_column=None), tmp_path / "t.csv"
    frame = write_patients(file, person="p")
    said = "client 'bonn' has no sample for test among its "
    assert f"{said}30: its samples are all of one group" in refuse(file, replace(drawn, groups="person"))
    frame[:6].to_csv(file, index=False)
    assert f"{said}3: it has one sample of each class" in refuse(file, drawn)


@pytest.mark.parametrize(
    ("name", "column", "said"),
    [
        ("extra", pa.array([0] * 60, pa.timestamp("us")), "column 'extra' holds dates or times (timestamp[us] in "),
        ("extra", pa.array([[1, 2]] * 60), "column 'extra' holds list<"),
        ("extra", pa.array([b"x"] * 60), "column 'extra' holds binary, neither numbers nor text"),
        ("ill", pa.array([[0], [1]] * 30), "t.parquet: column 'ill' holds list<element: int64>: give it one value a"),
        ("__index_level_0__", pa.array(range(60)), "column 6 has no name ('__index_level_0__')"),
    ],
)
def test_types_of_parquet_that_have_no_role_and_damaged_files_are_refused(tmp_path, name, column, said):
    file = tmp_path / "t.parquet"
    table = pa.Table.from_pandas(write_patients(file), preserve_index=False)
    kept = table.drop_columns(name) if name in table.column_names else table
    pq.write_table(kept.append_column(name, column), file)
    assert said in refuse(file)
    file.write_bytes(file.read_bytes()[:-100])
    assert f"{file} cannot be read as a table" in refuse(file)


def test_rows_are_counted_within_their_file(tmp_path):
    (tmp_path / "1.csv").write_text(lines(*ROWS))
    (tmp_path / "2.csv").write_text(lines(ROWS[0], "x,train,1,", ROWS[1], "x,test,2,"))
    (tmp_path / "3.csv").write_text(lines("x,train,1,"))
    assert "2.csv, data rows 2, 4: no value in column 'ill'" in refuse(tmp_path)


def test_a_small_file_with_more_rows_than_data_have_is_refused_before_they_are_read(tmp_path, monkeypatch):
    file = tmp_path / "t.parquet"
    columns = {"site": ["x"], "part": ["train"], "a": [1], "ill": [0]}
    pq.write_table(pa.table({name: values * 10**5 for name, values in columns.items()}), file)
    monkeypatch.setattr(files, "UNSUSPECTED", 2**18)
    monkeypatch.setattr(tables.pq, "read_table", None)
    assert "t.parquet would unpack to 0.0 GB, " in refuse(file)  # a value that repeats is stored once
    monkeypatch.setattr(files, "UNSUSPECTED", 2**30)
    monkeypatch.setattr(files, "available_memory", lambda: 1e5)
    assert "t.parquet holds 0.0 GB, and 0.0 GB of memory are free" in refuse(file)


def test_directories_whose_files_do_not_fit_together_are_refused(tmp_path):
    reading = replace(READING, client_column=None)
    a, b, twin = tmp_path / "a.csv", tmp_path / "b.parquet", tmp_path / "b.csv"
    alike = "all files need the same columns; rename it, or leave it out (ignore_columns={!r})"
    assert f"{tmp_path} holds no data" in refuse(tmp_path, reading)
    frame = write_patients(a)
    assert f"{a} is a single table: say which column holds the client" in refuse(tmp_path, reading)
    frame.drop(columns="pain").to_parquet(b)
    assert refuse(tmp_path, reading) == f"{b} has no column 'pain', which {a} has: {alike.format('pain')}"
    frame.assign(extra=1).to_parquet(b)
    assert refuse(tmp_path, reading) == f"{a} has no column 'extra', which {b} has: {alike.format('extra')}"
    frame.assign(pain=7).to_parquet(b)
    assert refuse(tmp_path, replace(reading, ignore_columns="site")) == (
        f"{a}, data row 1: column 'pain' holds text such as 'typical', 'none at all', 'atypical' here and numbers in "
        "another file: give it one type"
    )
    frame.to_csv(twin, index=False)
    assert refuse(tmp_path, reading) == f"{twin} and {b} are both of client 'b': keep one"


@pytest.mark.parametrize(("domains", "row"), [(None, 41), (("bonn",), 54)])
def test_text_among_numbers_is_found_by_its_row_in_the_file(tmp_path, domains, row):
    """Rows are counted over rows of clients that are left out."""
    age = np.arange(60).astype(object)
    age[[40, 53, 57]] = "ttext"  # 40: of oslo; 53 and 57: of bonn
    frame = write_patients(tmp_path / "t.csv", age=age)
    pd.concat([frame, frame.assign(age=1000 + np.arange(60))]).to_csv(tmp_path / "t.csv", index=False)
    said = refuse(tmp_path / "t.csv", replace(READING, domains=domains))
    assert said.startswith(f"{tmp_path / 't.csv'}, data row {row}: column 'age' holds text")
