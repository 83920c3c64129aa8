"""One comparison for names of classes, groups and clients: what is one, what stays apart, and what is said."""

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from fedshift.config.spec import DataSpec
from fedshift.data.assembly import read_folder
from fedshift.data.groups import find_groups
from fedshift.data.identity import clean_name, find_identity, match_name, merge_names, sort_names
from fedshift.data.joining import match_labels
from fedshift.data.sources import load_source
from fedshift.utils.errors import UsageError

SAME = [
    ("M\u00fcnchen", "Mu\u0308nchen"), ("cat ", "cat"), ("New  York", "New\u00a0York"), ("cat\u200b", "\ufeffcat"),
]  # fmt: skip
ALIKE = [
    ("7", "007"), ("7", "7.0"), ("7.00", "07"), ("P0", "p00"), ("sub-01", "Sub-1"), ("cat", "CAT"),
    ("New York", "newyork"), ("STRASSE", "stra\u00dfe"),
    ("\uff17", "7"), ("\u0667", "7"), ("P\u00b2", "P2"), ("-7.0", "-7"), ("0", "000"),
    ("no_finding", "No finding"), ("no-finding", "no - finding"),
]  # fmt: skip
OTHER = [
    ("7", "70"), ("7", "-7"), ("1.1", "1.10"), ("1 12", "11 2"), ("1_1", "11"), ("1e3", "1000"), ("P10", "P1"),
    ("a", "\u00e4"), ("a01b", "a1b"), ("sub-1", "sub1"), ("A-", "A"), ("a_1", "a1"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), SAME + ALIKE)
def test_spellings_of_one_name_have_one_identity(one, other):
    assert find_identity(one) == find_identity(other)
    assert (clean_name(one) == clean_name(other)) == ((one, other) in SAME)


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_other_names_have_other_identities(one, other):
    assert find_identity(one) != find_identity(other)


def test_names_are_one_unless_a_client_has_both():
    stands, (notice,) = merge_names({"a": ["cat", "Dog"], "b": ["Cat", "dog"]}, "classes")
    assert stands == {"Cat": "Cat", "cat": "Cat", "Dog": "Dog", "dog": "Dog"}
    assert "are one: 'Cat' and 'cat' (as 'Cat'), 'Dog' and 'dog' (as 'Dog')" in notice
    stands, notices = merge_names({"a": ["a", "A ", "A"], "b": ["b"], "c": ["B"]}, "classes")
    assert stands == {"a": "a", "A": "A", "A ": "A", "b": "b", "B": "B"}
    assert "are one: 'A' and 'A ' (as 'A')" in notices[0]
    assert "have names that differ only in case" in notices[1]
    assert merge_names({"a": ["7", "007", "x"]}, "groups", together=True)[0] == {"7": "7", "007": "7", "x": "x"}
    assert merge_names({"a": ["x", "y"]}, "classes") == ({"x": "x", "y": "y"}, [])


def test_a_name_matches_the_only_one_that_is_alike():
    assert [match_name(name, ["cat", "a", "A"]) for name in ("Cat", "A", "\u00c1", "dog")] == ["cat", "A", None, None]
    assert match_name("a ", ["a", "A"]) is None


def test_numbers_in_names_sort_by_value():
    names = ["9", "10", "B", "b", "site", "site2", "site10"]
    assert sort_names(names[::-1]) == names


def write_images(root, classes, count=4):
    """Write images of different pixels for each client's classes."""
    for client, names in classes.items():
        for place, category in enumerate(names):
            folder = root / client / category
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = np.random.default_rng([place, number, len(client)]).integers(0, 256, (6, 6), np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")


@pytest.mark.parametrize(("folders", "names"), [
    ({"a": ["cat", "dog"], "b": ["Cat", "Dog"]}, ("Cat", "Dog")),
    ({"a": ["caf\u00e9", "dog"], "b": ["cafe\u0301", "dog"]}, ("caf\u00e9", "dog")),
    ({"site 10": ["1", "2", "10"], "site2": ["01", "02", "10"]}, ("1", "2", "10")),
    ({"a": ["cat", "Cat"], "b": ["cat", "Cat"]}, ("Cat", "cat")),
])  # fmt: skip
def test_classes_in_folders_are_one_by_name(tmp_path, folders, names):
    write_images(tmp_path, folders)
    data = load_source(str(tmp_path), DataSpec())
    assert (data.class_names, data.classes) == (names, len(names))
    assert sum("classes" in notice and "differ only" in notice for notice in data.notices) == 1
    assert data.names == tuple(sort_names(folders))
    for client in data.clients:
        assert sorted(np.unique(client.train.y)) == list(range(len(names)))


def read_table(path, **columns):
    frame = pd.DataFrame(
        {"x": np.arange(24.0), "site": ["a", "b"] * 12, "ill": ["no", "no", "yes", "yes"] * 6} | columns
    )
    frame.to_csv(path / "t.csv", index=False)
    return load_source(
        str(path / "t.csv"), DataSpec(client_column="site", target="ill", groups="who" if "who" in columns else None)
    )


@pytest.mark.parametrize(
    "spellings", [("7", "7.0", "007"), ("P0", "p0", "P00"), ("caf\u00e9", "cafe\u0301", "Caf\u00e9 ")]
)
def test_a_patient_spelled_in_several_ways_is_one_group(tmp_path, spellings):
    who = [spellings[row // 2] if row < 6 else f"q{row // 4}" for row in range(24)]
    data = read_table(tmp_path, who=who)
    assert any("groups whose names differ" in notice for notice in data.notices)
    for client in data.clients:
        trained, tested = client.train.group.tolist(), client.test.group.tolist()
        assert not {*trained} & {*tested}
        assert np.unique(trained + tested, return_counts=True)[1].max() == 3


@pytest.mark.parametrize(("who", "told"), [
    (np.arange(24) // 2, 12), (np.arange(24) // 2.0, 12),
    ([f"p{n // 2}" if n % 2 else f"P{n // 2}.0" for n in range(24)], 12),
    (np.where(np.arange(24) == 5, np.nan, 1), "1 of 24 samples have no group, first row 5"),
    ([None, "", *"abcdefghijklmnopqrstuv"], "2 of 24 samples have no group, first row 0"),
])  # fmt: skip
def test_groups_in_arrays_are_one_by_name_and_none_is_missing(who, told):
    x, y = np.random.default_rng(0).normal(size=(24, 3)), np.arange(24) // 2 % 2
    arrays = {"a": {"x": x, "y": y, "who": who}}
    if isinstance(told, str):
        with pytest.raises(UsageError, match=told):
            load_source(arrays, DataSpec(groups="who"))
    else:
        (client,) = load_source(arrays, DataSpec(groups="who")).clients
        trained, tested = set(client.train.group.tolist()), set(client.test.group.tolist())
        assert len(trained) + len(tested) == len(trained | tested) == told


def test_alike_clients_are_named_and_those_that_look_the_same_refused(tmp_path):
    assert any("clients have names that differ only in case" in notice for notice in read_table(
        tmp_path, site=["Mayo", "mayo"] * 12).notices)  # fmt: skip
    write_images(tmp_path / "d", {"M\u00fcnchen": ["x", "y"], "Mu\u0308nchen": ["x", "y"]})
    with pytest.raises(UsageError, match="names that look the same: join them, or rename one"):
        load_source(str(tmp_path / "d"), DataSpec())


@pytest.mark.parametrize(("wards", "categories", "told"), [
    ((["Eye", "ent"], ["eye", "ENT"]), ("ENT", "Eye"), "categories of 'ward' whose names differ only in case"),
    ((["Eye", "eye"], ["EYE", "ent"]), ("EYE", "Eye", "ent", "eye"), "have names that differ only"),
    ((["1", "x"], ["01", "01"]), ("1", "x"), "are one: '1' and '01' (as '1')"),
    ((["h\u00e4m", "x"], ["ha\u0308m", "x"]), ("h\u00e4m", "x"), ""),
])  # fmt: skip
def test_categories_in_tables_are_one_unless_a_client_has_both(tmp_path, wards, categories, told):
    def write(path, ward):
        path.parent.mkdir(exist_ok=True)
        rows = pd.DataFrame({"x": range(20), "ward": np.resize(ward, 20), "y": np.arange(20) // 2 % 2})
        rows.to_csv(path, index=False)

    for site, ward in zip(("site10", "site2"), wards, strict=True):
        write(tmp_path / "all" / f"{site}.csv", ward)
    data = read_folder(tmp_path / "all", target="y")
    assert data.names == ("site2", "site10")
    assert data.columns[1].categories == categories
    assert sum("differ only" in notice for notice in data.notices) == (told != "")
    assert any(told in notice for notice in (*data.notices, ""))
    write(tmp_path / "new" / "new.csv", [f"{name} " for name in categories[:2]])
    joined = read_folder(tmp_path / "new", target="y", schema=data.schema)
    assert joined.columns[1].categories == categories
    assert joined.clients[0].train.x[:, 1:].sum(1).tolist() == [1] * len(joined.clients[0].train)


def test_a_client_that_joins_is_read_in_the_spelling_of_the_others(tmp_path):
    for site, ward in (("all/a", "eye"), ("all/b", "eye"), ("new/c", "Eye")):
        (tmp_path / site).parent.mkdir(exist_ok=True)
        rows = pd.DataFrame({"x": range(20), "ward": np.resize([ward, "ent"], 20), "y": np.resize([ward, "no"], 20)})
        rows.to_csv(tmp_path / f"{site}.csv", index=False)
    data = read_folder(tmp_path / "all", target="y")
    joined = read_folder(tmp_path / "new", target="y", schema=data.schema)
    assert joined.columns == data.columns
    assert any("'Eye' is read as 'eye'" in notice for notice in joined.notices)
    matched = match_labels(joined, data.schema, "the run's data,")
    assert matched.class_names == data.class_names == ("eye", "no")
    assert sum("'Eye' is read as 'eye'" in notice for notice in matched.notices) == 2


FILES = [f"north/no/no{number}.png" for number in range(4)]
OWNERS = ["P0", "P0", "P\u00e91", "P\u00e91"]


@pytest.mark.parametrize(("separator", "encoding"), [(",", "utf-8"), (";", "utf-8-sig"), ("\t", "utf-16")])
@pytest.mark.parametrize(
    ("header", "first", "row"),
    [
        ("file{0}group", "", "{1}{0}{2}"), ("File{0} Group ", "sep={0}\n", '"{1}"{0} {2} '),
        ("group{0}file{0}note", "\n", "{2}{0}.\\{3}{0}x"), ("file{0}group", "", "{4}{0}{2}"),
        ("file{0}group", "", '{5}{0}="{2}"'),
    ],
)  # fmt: skip
def test_tables_of_groups_as_spreadsheets_write_them(tmp_path, separator, encoding, header, first, row):
    lines = [
        row.format(separator, file, owner, file.replace("/", "\\"), file.rpartition("/")[2], file.upper())
        for file, owner in zip(FILES, OWNERS, strict=True)
    ]
    text = first.format(separator) + "\r\n".join([header.format(separator), *lines])
    (tmp_path / "own.csv").write_bytes(text.encode(encoding))
    assert find_groups(str(tmp_path / "own.csv"), FILES).tolist() == OWNERS


@pytest.mark.parametrize(("content", "told"), [
    (b"file,group\na.png,1\na.png,2\n", "gives 'a.png' the groups '1' and '2'"),
    ("file,group\na.png,P\u00e9\n".encode("latin-1"), "line 2, is not in UTF-8"),
    ("file,group\n".encode("utf-16-le"), "holds zero bytes"),
    (b"name,patient\na.png,1\n", "has columns name, patient: give it the columns file and group"),
    (b"", "give it the columns file and group"),
])  # fmt: skip
def test_tables_of_groups_that_are_refused(tmp_path, content, told):
    (tmp_path / "own.csv").write_bytes(content)
    with pytest.raises(UsageError) as refused:
        find_groups(str(tmp_path / "own.csv"), ["a.png"])
    assert told in str(refused.value)
