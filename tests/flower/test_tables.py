"""Tables at several sites: read by what all agree on, as one process reads them, or refused by name before training."""

import json
import random
from dataclasses import replace

import pytest

from fedshift.data.columns import Column
from fedshift.flower.server.registry import ClientRegistry, SiteDescription
from fedshift.flower.site.local_data import ALL_SITES, load_local
from fedshift.flower.site.site import Site
from fedshift.flower.transport.exchange import Exchange
from fedshift.utils.errors import FedshiftError, UsageError
from tests.flower.sites import SMALLEST, Heard, SiteGrid, coordinator, same_as_in_process, spec_for

WARDS = {"north": ("A", "B"), "rome": ("C", "A"), "west": ("B",)}
ORDER = {"north": ("age", "ward", "dose"), "rome": ("dose", "age", "ward"), "west": ("ward", "dose", "age")}


def write(place, name, labels=("ill", "well"), order=None, wards=None, rows=30, **further):
    """A hospital's table; some ages and wards are missing."""
    draw = random.Random(name)
    order = order or ORDER[name]
    lines = [",".join([*order, *further, "outcome"])]
    for row in range(rows):
        cells = {
            "age": "" if row % 7 == 3 else str(draw.randint(20, 90)), "dose": f"{draw.gauss(3, 1):.3f}",
            "ward": "" if row % 9 == 4 else draw.choice(wards or WARDS[name]),
        }  # fmt: skip
        more = [str(values[row % len(values)]) for values in further.values()]
        lines.append(",".join([*(cells[column] for column in order), *more, labels[draw.random() < 0.4]]))
    place.mkdir(parents=True, exist_ok=True)
    (place / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return place / f"{name}.csv"


def tables(folder, **changes):
    """What one process is told of the tables in ``folder``."""
    own = {"domains": None, "samples": None, "image_size": None, "target": "outcome"}
    return spec_for(method="fedavg", data=str(folder), **own | changes)


def hospitals(place, folder, **named):
    """A site for each table in ``place``, which holds a directory with its table alone."""
    sites = {}
    for number, file in enumerate(sorted(place.iterdir()), 1):
        (folder / "own" / file.stem).mkdir(parents=True)
        (folder / "own" / file.stem / "table.csv").write_bytes(file.read_bytes())
        given = {"policy": SMALLEST.offering(target="outcome")} | named
        sites[number] = Site(str(folder / "own" / file.stem), file.stem, folder / file.stem, **given)
    return sites


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("labels", "classes", "meaning"),
    [
        ({"north": ("ill", "well"), "rome": ("dead", "well"), "west": ("ill", "well")}, None, ["dead", "ill", "well"]),
        ({"north": ("0", "1"), "rome": ("1", "2"), "west": ("0", "2")}, None, ["0", "1", "2"]),
        ({"north": ("0", "2"), "rome": ("0", "2"), "west": ("0", "2")}, 3, ["0", "1", "2"]),
        ({"north": ("-1", "10"), "rome": ("2", "10"), "west": ("-1", "2")}, 4, ["-1", "2", "10", "unseen 3"]),
    ],
)
def test_tables_are_what_they_are_in_one_process(labels, classes, meaning, tmp_path, machine):
    for name, own in labels.items():
        write(tmp_path / "all", name, own)
    spec = tables(tmp_path / "all", classes=classes)
    grid = SiteGrid(hospitals(tmp_path / "all", tmp_path))
    assert coordinator(spec, grid, tmp_path / "served", Heard()).run()
    same_as_in_process(spec, tmp_path / "served", tmp_path, tmp_path / "reference")
    (asked,) = {json.dumps(question.facts["trial"]) for _, question in grid.asked if question.kind == "train"}
    columns = {column["name"]: column["categories"] for column in json.loads(asked)["columns"]}
    assert columns == {"age": None, "ward": ["A", "B", "C"], "dose": None}
    assert list(columns) == list(ORDER["north"])
    assert json.loads(asked)["class_names"] == meaning


def test_the_values_of_a_client_column_choose_the_site_s_rows_alone(tmp_path, machine):
    write(tmp_path, "north", clinic=("rome", "oslo"), wards=("A",))
    spec = tables(tmp_path, client_column="clinic")
    found = load_local(str(tmp_path / "north.csv"), "rome", spec, tmp_path / "site")
    assert found.names == ("rome",)
    assert sum(map(len, found.clients[0].splits.values())) == 15
    with pytest.raises(UsageError, match="'paris'"):
        load_local(str(tmp_path / "north.csv"), "paris", spec, tmp_path / "site")


def test_a_table_alone_is_one_client_even_where_others_name_theirs_in_a_column(tmp_path):
    path, spec = write(tmp_path / "t", "rome"), tables(tmp_path, client_column="clinic")
    for given in (path, path.parent):
        found = load_local(str(given), "roma", spec, tmp_path / "site")
        assert found.names == ("roma",)
        assert found.columns[-1] == Column(name="ward", categories=("A", "C"))
    assert load_local(str(path), None, spec, tmp_path / "site").names == ("rome",)


def test_a_directory_with_two_tables_is_not_one_client(tmp_path):
    for name in ("north", "rome"):
        write(tmp_path / "all", name)
    with pytest.raises(UsageError, match=r"holds 2 tables \(north.csv, rome.csv\), but a site is one client"):
        load_local(str(tmp_path / "all"), "x", tables(tmp_path), tmp_path / "site")


def test_a_table_beside_class_folders_is_not_the_data(tmp_path, machine):
    from PIL import Image

    write(tmp_path / "images", "north")
    for k, part in enumerate(("train", "test") * 2):
        folder = tmp_path / "images" / part / "ab"[k // 2]
        folder.mkdir(parents=True)
        Image.new("L", (8, 8), k).save(folder / "1.png")
    found = load_local(str(tmp_path / "images"), "north", spec_for(data="", domains=None), tmp_path / "site")
    assert (found.sample_shape, found.columns, found.class_names) == ((1, 8, 8), (), ("a", "b"))


def test_text_that_names_single_rows_never_leaves_the_site(tmp_path, machine):
    write(tmp_path / "all", "north", patient=[f"P{row}x" for row in range(16)])
    said, heard = [], Heard()
    (site,) = hospitals(tmp_path / "all", tmp_path, say=said.append).values()
    grid = SiteGrid({1: site})
    with pytest.raises(FedshiftError, match="after 0 seconds there are 0"):
        coordinator(tables(tmp_path), grid, tmp_path / "served", heard, wait=0.0).run()
    assert heard.notices[1:] == [
        "a node (number 1) does not take part: its data cannot be used: its log has the reason"
    ]
    assert (
        "column 'patient' contains text with 16 different values in 30 rows, and the list of values would leave"
        in said[0]
    )


def test_a_cell_that_an_error_shows_is_shown_to_the_site_alone(tmp_path, machine):
    write(tmp_path / "all", "north", patient=[f"P{row}x" for row in range(60)], rows=60)
    said = []
    (site,) = hospitals(tmp_path / "all", tmp_path, say=said.append).values()
    hello = Exchange(kind="describe", facts={"spec": vars(tables("")), "labels": False})
    assert site.answer(hello).facts["why"] == "its data cannot be used: its log has the reason"
    assert "column 'patient' holds text such as 'P0x' and more than 50 different values" in said[0]


def test_a_site_says_which_categories_it_tells(tmp_path, machine):
    write(tmp_path / "all", "north")
    said = []
    (site,) = hospitals(tmp_path / "all", tmp_path, say=said.append).values()
    told = site.answer(Exchange(kind="describe", facts={"spec": vars(tables("")), "labels": False})).facts
    assert told["columns"][1] == {"name": "ward", "categories": ("A", "B"), "holds": "numbers"}
    assert "disclosed to the coordinator: columns and their categories: age; ward (A, B); dose" in said
    assert "disclosed to the coordinator: 2 classes: ill, well" in said


def test_sites_whose_columns_differ_are_refused_before_training(tmp_path, machine):
    write(tmp_path / "all", "north")
    write(tmp_path / "all", "rome", order=("age", "ward", "dose"), weight=(50, 60))
    grid = SiteGrid(hospitals(tmp_path / "all", tmp_path))
    with pytest.raises(FedshiftError, match="'north' has no column 'weight', but 'rome' does"):
        coordinator(tables(tmp_path), grid, tmp_path / "served", Heard()).run()
    assert {question.kind for _, question in grid.asked} == {"describe"}


def test_a_site_that_comes_later_fits_the_columns_or_is_not_admitted(tmp_path, machine):
    for name in WARDS:
        write(tmp_path / "all", name)
    write(tmp_path / "all", "west", wards=("D", "B"))
    write(tmp_path / "all", "east", order=ORDER["west"], wards=("C",))
    grid, heard = SiteGrid(hospitals(tmp_path / "all", tmp_path)), Heard()
    grid.away = {1, 4}
    heard.after = lambda done: grid.away.clear()
    assert coordinator(tables(tmp_path, rounds=3), grid, tmp_path / "served", heard, clients=2).run()
    assert "west is not admitted: 'west' has 'D' in column 'ward', which the others lack" in heard.notices
    people = json.loads((tmp_path / "served/machines/population.json").read_text())["clients"]
    assert [client["name"] for client in people] == ["north", "rome", "east"]
    assert heard.rounds[-1].participants == ("north", "rome", "east")


def test_a_table_that_has_changed_since_is_refused(tmp_path, machine):
    path = write(tmp_path / "all", "north")
    columns = (Column(name="age"), Column(name="ward", categories=("A",)), Column(name="dose"))
    with pytest.raises(UsageError, match="column 'ward' holds 'B', but its categories in 'all sites'"):
        load_local(str(path), "north", tables(tmp_path), tmp_path / "site", replace(ALL_SITES, columns=columns))
    with pytest.raises(UsageError, match="digits lacks the columns and categories of all sites in their order"):
        load_local("digits", "pen", spec_for(), tmp_path / "site", replace(ALL_SITES, columns=columns))


def described(name, *columns, **changes):
    columns = columns or (Column(name="age"), Column(name="ward", categories=("A", "B")))
    facts = {"version": "1", "dtype": "float32", "classes": 2, "class_names": ("0", "1"), "labels": None}
    shape = (sum(column.width for column in columns),)
    return SiteDescription(**facts, name=name, samples={"train": 6, "test": 4}, shape=shape, columns=columns, **changes)


def test_the_order_of_columns_is_the_first_site_s_and_categories_are_those_of_all():
    north, rome = described("north"), described("rome", Column(name="ward", categories=("0",)), Column(name="age"))
    data = ClientRegistry().add_clients([rome, north]).to_federation(None)
    assert data.columns == (Column(name="age"), Column(name="ward", categories=("0", "A", "B")))
    assert (data.sample_shape, data.classes, data.class_names) == ((4,), 2, ())


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ((Column(name="age"),), "'b' has no column 'ward', but 'a' does"),
        ((Column(name="age"), Column(name="Ward", categories=("A",))), "'b' has no column 'ward', but 'a' does"),
        ((Column(name="age"), Column(name="ward")), r"'ward' contains text at 'a', but numbers \(or nothing\) at 'b'"),
        (
            (Column(name="age", categories=("old",)), Column(name="ward", categories=("A",))),
            "'age' contains text at 'b', but numbers .* at 'a'",
        ),
        (
            (Column(name="age"), Column(name="ward", categories=tuple(sorted(map(str, range(49)))))),
            "'ward' contains text with 51 different values at all sites together, more than 50",
        ),
    ],
)
def test_columns_that_do_not_go_together_are_named_with_both_sites(columns, why):
    with pytest.raises(FedshiftError, match=why):
        ClientRegistry().add_clients([described("a"), described("b", *columns)]).to_federation(None)


def test_a_table_does_not_go_with_other_data():
    array = SiteDescription(**(vars(described("b")) | {"columns": (), "class_names": ()}))
    with pytest.raises(FedshiftError, match="only one of 'a' and 'b' has a table"):
        ClientRegistry().add_clients([described("a"), array]).to_federation(None)


def test_labels_that_no_table_has_are_refused():
    odd = SiteDescription(**(vars(described("b")) | {"class_names": ("01", "2")}))
    with pytest.raises(FedshiftError, match="site 'b' has a class '01', which is not a valid spelling of a label"):
        ClientRegistry().add_clients([described("a"), odd]).to_federation(None)


def test_what_all_sites_have_in_one_order_stays_in_it():
    columns = (Column(name="pain", categories=("none", "much")),)
    sites = [described(name, *columns) for name in "ab"]
    sites = [SiteDescription(**(vars(site) | {"class_names": ("well", "ill")})) for site in sites]
    data = ClientRegistry().add_clients(sites).to_federation(None)
    assert (data.columns, data.class_names) == (columns, ("well", "ill"))
