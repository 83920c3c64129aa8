"""What a site may say of itself: the coordinator makes room for it, so it is bounded, and it must fit the others'."""

import json
import re
from dataclasses import asdict

import numpy as np
import pytest
from PIL import Image

from fedshift.data.columns import Column
from fedshift.data.federation import count_labels
from fedshift.flower.coordinator.descriptions import ClientRegistry, SiteDescription
from fedshift.flower.messages import Exchange
from fedshift.tasks import Regression, Segmentation, describe_task
from fedshift.utils.errors import FedshiftError
from tests.flower.sites import make_site, spec_for

SOUND = {
    "name": "photo", "version": "1", "shape": [3, 28, 28], "dtype": "uint8", "classes": 10, "class_names": [],
    "samples": {"train": 24, "test": 9}, "labels": [24, *[0] * 9],
}  # fmt: skip
AGE, WARD = Column(name="age"), Column(name="ward", categories=("A", "B"))
ONE = {"name": "ward", "categories": ["A"]}
WRONG = {
    "nothing": ({"samples": {}}, "'samples': a site that trains has 'train', 'test' .*, not {}"),
    "no samples": ({"samples": {"train": 0, "test": 1}}, "'samples.train': Input should be greater than 0, not 0"),
    "no test": ({"samples": {"train": 24}}, "'samples': a site that trains"),
    "training samples of one that validates": ({"validates": True, "labels": None}, "'samples': .* another only"),
    "labels of one that validates": ({"validates": True, "samples": {"test": 9}}, "'labels': numbers of each"),
    "another split": ({"samples": {"train": 24, "test": 9, "x": 1}}, "'samples.x.*': Input should be 'train', 'vali"),
    "more than memory": ({"samples": {"train": 10**12, "test": 1}}, "less than or equal to 100000000, not 10000"),
    "an unknown split to measure": ({"measures": ["test", "x"]}, "'measures.1': Input should be 'test' or .*'x'"),
    "samples to measure that it lacks": ({"measures": ["validation"]}, "'measures': these are splits of its samples"),
    "another type": ({"dtype": "uint9"}, "'dtype': one of float64, .*, not 'uint9'"),
    "a huge shape": ({"shape": [2**20, 2**20]}, r"'shape': a sample has at most 1073741824 values, not \(1048576, 104"),
    "a negative shape": ({"shape": [3, -28, 28]}, "'shape.1': Input should be greater than 0, not -28"),
    "many axes": ({"shape": [1] * 9}, "'shape': .* at most 8 items"),
    "another kind of values": ({"values": {"train": "x"}}, "'values': each of 8-bit pixels, .*, not {'train': 'x'}"),
    "many classes": ({"classes": 10**12}, "'classes': Input should be less than or equal to 1000000, not 100000"),
    "too few labels": ({"labels": [1] * 10}, "'labels': numbers of each of 10 classes that add up to 24"),
    "labels below zero": ({"labels": [-1, *[0] * 8, 25]}, "'labels.0': Input should be greater than or equal to 0"),
    "columns of another width": ({"columns": [asdict(AGE), asdict(WARD)]}, "'columns': different names"),
    "a column twice": ({"columns": [asdict(AGE)] * 3, "shape": [3]}, "'columns': different names"),
    "categories twice": ({"columns": [ONE | {"categories": ["A", "A"]}], "shape": [2]}, "'columns': different names"),
    "a list of patients": (
        {"columns": [ONE | {"categories": sorted(map(str, range(51)))}], "shape": [51]}, r"categories \(1 to 50\)",
    ),
    "more names than classes": ({"class_names": ["a"] * 11}, "'class_names': 10 names, or none"),
    "an unprintable class": ({"classes": 1, "labels": [24], "class_names": ["a\nb"]}, r"all printable, unlike 'a\\nb'"),
    "a long class": ({"classes": 1, "labels": [24], "class_names": ["a" * 2001]}, "text has at most 2000 characters"),
    "a field that nobody knows": ({"folders": ["/data/scan-7.png"]}, "'folders': Unexpected keyword argument"),
    "an empty name": ({"name": ""}, r"^site '' .*'name': String should have at least 1 character, not ''"),
    "an unprintable name": ({"name": "a\nb"}, r"^site 'a\\nb' .* all printable, unlike 'a\\nb'"),
    "a long name": ({"name": "a" * 201}, "^site 'a{200}' .*'name': String should have at most 200 characters"),
    "a number as a name": ({"name": 7}, "^a site without a name .*'name': Input should be a valid string, not 7"),
}  # fmt: skip


def test_what_a_site_says_of_itself_is_taken_as_it_says_and_must_be_whole():
    site = SiteDescription.of(SOUND)
    assert (site.name, site.shape, site.classes) == ("photo", (3, 28, 28), 10)
    splits = {"train": 1, "validation": 1, "test": 1}
    told = SiteDescription.of({**SOUND, "labels": None, "samples": splits, "measures": ["test", "validation"]})
    assert (told.labels, told.measures) == (None, ("test", "validation"))
    assert SiteDescription.of({**SOUND, "measures": []}).measures == ()
    with pytest.raises(FedshiftError, match=r"'classes': (Field|Missing) required"):
        SiteDescription.of({name: value for name, value in SOUND.items() if name != "classes"})


@pytest.mark.parametrize("fault", WRONG)
def test_what_cannot_be_is_refused_with_site_and_value_and_what_is_allowed(fault):
    wrong, why = WRONG[fault]
    match = why if why.startswith("^") else f"^site 'photo' describes itself wrongly: correct .*{why}"
    with pytest.raises(FedshiftError, match=match):
        SiteDescription.of({**SOUND, **wrong})


def test_a_description_holds_no_name_of_a_file(tmp_path):
    for number in range(32):
        folder = tmp_path / "hospital" / ("train", "test")[number % 2] / "ab"[number // 2 % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8), np.uint8)
        Image.fromarray(pixels).save(folder / f"patient-{number}.png")
    site, spec = make_site(tmp_path / "hospital", "north", tmp_path), spec_for(data="", domains=None, samples=None)
    asked = Exchange(kind="describe", facts={"spec": vars(spec), "labels": True})
    answer = site.answer(asked)
    assert SiteDescription.of(answer.facts).samples == {"train": 16, "test": 16}
    (folder / "patient-31.png").write_bytes(b"no image")
    refused = make_site(tmp_path / "hospital", "north", tmp_path).answer(asked)
    assert "(1 of 32 files)" in refused.facts["why"]
    for facts in (answer.facts, refused.facts):
        assert not re.search(rf"patient|\.png|hospital|{tmp_path}", json.dumps(facts))


def described(name, **changes):
    facts = {"version": "1", "shape": (3, 8, 8), "dtype": "uint8", "classes": 2, "class_names": ("cat", "dog")}
    return SiteDescription(**({"name": name, "samples": {"train": 6, "test": 4}, "labels": None} | facts | changes))


def table(name, *columns, **changes):
    columns = columns or (AGE, WARD)
    facts = {"dtype": "float32", "class_names": ("0", "1"), "shape": (sum(column.width for column in columns),)}
    return described(name, **facts | {"columns": columns} | changes)


INPUTS = [{"name": "ids", "shape": [5], "kind": "integers"}, {"name": "age", "shape": [], "kind": "floats"}]


def inputs(name, **changes):
    return SiteDescription.of({**SOUND, "name": name, "shape": [6], "dtype": "float32", "inputs": INPUTS} | changes)


def masks(name, **changes):
    facts = {"shape": (1, 4, 4), "dtype": "float32", "class_names": (), "task": describe_task(Segmentation())}
    return described(name, **facts | changes)


def to_federation(*sites, classes=None):
    return ClientRegistry().add_clients(sites).to_federation(classes)


OTHER_DATA = {
    "shape": (described, {"shape": (1, 8, 8)}, r"'a' has uint8 samples of shape \(3, 8, 8\), but 'b' has uint8 .*\(1"),
    "type": (described, {"dtype": "float32"}, "'a' has uint8 .* 'b' has float32"),
    "no names of classes": (described, {"class_names": ()}, "'a' has classes with names, but 'b' has classes without"),
    "a table": (
        described, {"columns": (AGE, WARD), "shape": (3,)}, "'a' has no table, but 'b' has a table: give the",
    ),
    "no table": (table, {"columns": (), "class_names": ()}, "'a' has a table, but 'b' has no table"),
    "no column": (table, {"columns": (AGE,), "shape": (1,)}, "'b' has no column 'ward', but 'a' does"),
    "capitals": (table, {"columns": (AGE, Column(name="Ward", categories=("A", "B")))}, "'b' has no column 'ward'"),
    "numbers": (
        table, {"columns": (AGE, Column(name="ward")), "shape": (2,)},
        r"'ward' contains text at 'a', but numbers \(or nothing\) at 'b'",
    ),
    "text": (
        table, {"columns": (Column(name="age", categories=("old",)), WARD)}, "'age' contains text at 'b', but numbers",
    ),
    "many categories": (
        table, {"columns": (AGE, Column(name="ward", categories=tuple(sorted(map(str, range(49)))))), "shape": (50,)},
        "'ward' contains text with 51 different values at all sites together, more than 50",
    ),
    "a label": (table, {"class_names": ("01", "2")}, "site 'b' has a class '01', which is not a valid spelling"),
    "a task": (
        masks, {"task": describe_task(Regression())}, "'a' has targets for segmentation, but 'b' has targets for regr",
    ),
    "code as a task": (masks, {"task": {"name": "os:system"}}, "task 'os:system' is not known here"),
    "another task": (masks, {"task": {"name": "segmentation", "depth": 3}}, "task 'segmentation' has other fields"),
    "order of inputs": (inputs, {"inputs": INPUTS[::-1]}, "'b': the inputs 'age', 'ids', and site 'a': 'ids', 'age'"),
    "kinds of inputs": (
        inputs, {"inputs": [INPUTS[0], INPUTS[1] | {"kind": "integers"}]}, r"\(integers\), and site 'a': age \[N\] \(",
    ),
    "inputs of another size": (inputs, {"inputs": INPUTS[:1]}, "'inputs': .*and their sizes add up to the shape .6,."),
    "an input twice": (inputs, {"inputs": INPUTS[:1] * 2}, "site 'b' .*'inputs': their names differ"),
    "a negative input": (inputs, {"inputs": [INPUTS[0] | {"shape": [-5]}, INPUTS[1]]}, "'inputs': their names differ"),
    "another kind of input": (inputs, {"inputs": [INPUTS[0] | {"kind": "x"}]}, "'inputs.0.kind': .* 'floats', .*'x'"),
    "masks of more classes": (masks, {"classes": 3}, "'a' has 2 classes , but 'b' has 3"),
}  # fmt: skip


@pytest.mark.parametrize("other", OTHER_DATA)
def test_sites_whose_data_do_not_go_together_are_named(other):
    describe, changes, why = OTHER_DATA[other]
    to_federation(describe("a"), describe("b"))
    with pytest.raises(FedshiftError, match=why):
        to_federation(describe("a"), describe("b", **changes))


def test_the_order_of_columns_is_the_first_site_s_and_categories_are_those_of_all():
    data = to_federation(table("rome", Column(name="ward", categories=("0",)), AGE), table("north"))
    assert data.columns == (AGE, Column(name="ward", categories=("0", "A", "B")))
    assert (data.sample_shape, data.classes, data.class_names) == ((4,), 2, ())
    alike = (Column(name="pain", categories=("none", "much")),)  # what all have in one order stays in it
    data = to_federation(*(table(name, *alike, class_names=("well", "ill")) for name in "ab"))
    assert (data.columns, data.class_names) == (alike, ("well", "ill"))


def test_clients_are_in_the_order_of_the_settings_and_those_admitted_later_last():
    first = ClientRegistry().add_clients([described("c"), described("a"), described("b")], order=("b",))
    grown = first.add_clients([described("a"), described("A")], order=("b",))
    assert [client.name for client in grown.clients] == ["b", "a", "c", "A"]
    assert grown.experiment == first.experiment != ClientRegistry().experiment


def test_classes_and_their_samples_are_those_of_all_sites():
    some = described("a", labels=(5, 1))
    other = described("b", labels=(2, 7), samples={"train": 9, "test": 4}, class_names=("ant", "cat"))
    data = to_federation(some, other, classes=4)
    assert data.class_names == ("ant", "cat", "dog")
    assert count_labels(data).tolist() == [2, 12, 1, 0]
    numbers = to_federation(described("a", class_names=("10", "9")), described("b", class_names=("2", "9")))
    assert (numbers.class_names, numbers.classes) == (("2", "9", "10"), 3)
    with pytest.raises(FedshiftError, match=r"classes=2, .* 3 \('dog' only at a, 'eel' only at b\): rename"):
        to_federation(described("a"), described("b", class_names=("cat", "eel")), classes=2)


def test_labels_of_sites_that_name_other_classes_are_numbered_by_what_they_mean():
    counts = {"north": {"cat": 5, "dog": 7}, "south": {"bee": 3, "dog": 4}, "west": {"bee": 1, "cat": 2, "dog": 6}}
    whole = to_federation(*(
        described(name, classes=len(own), class_names=(*own,), labels=(*own.values(),),
                  samples={"train": sum(own.values()), "test": 9})
        for name, own in counts.items()
    ))  # fmt: skip
    for client in whole.clients:
        held = client.train.y.bincount(minlength=whole.classes).tolist()
        told = dict(zip(whole.class_names, held, strict=True))
        assert {name: count for name, count in told.items() if count} == counts[client.name]


def test_a_claim_takes_no_memory_and_more_classes_than_samples_are_refused():
    many = described("c", samples={"train": 10**8, "test": 10**8})
    data = to_federation(described("a"), described("b"), many)
    splits = [split for client in data.clients for split in client.splits.values()]
    assert sum(map(len, splits)) > 10**8
    assert sum(part.untyped_storage().nbytes() for each in splits for part in (each.y, each.rows, each.store)) < 10**5
    few = described("few", class_names=())
    with pytest.raises(FedshiftError, match=r"'absurd' has 1000000 classes, but all sites together have 20 samples"):
        to_federation(few, described("absurd", classes=10**6, class_names=()))
    assert to_federation(few, described("many", classes=1000, class_names=())).classes == 1000
