"""What a site may say of itself: the coordinator makes room for it, so it is bounded."""

import pytest

from fedshift.flower.server.registry import ClientRegistry, SiteDescription
from fedshift.utils.errors import FedshiftError

SOUND = {
    "name": "photo", "version": "1", "shape": [3, 28, 28], "dtype": "uint8", "classes": 10, "class_names": [],
    "samples": {"train": 24, "test": 9}, "labels": [24, *[0] * 9],
}  # fmt: skip
AGE, WARD = {"name": "age", "categories": None}, {"name": "ward", "categories": ["A"]}
COLUMNS = "site 'photo' reports {} columns: they do not match its samples of shape"
SELF = {
    "nothing": ({"samples": {}}, "site 'photo' reports {} samples"),
    "no samples": ({"samples": {"train": 0}}, "site 'photo' reports {'train': 0} samples"),
    "no test": ({"samples": {"train": 24}}, "site 'photo' reports {'train': 24} samples"),
    "training samples of one that validates": (
        {"validates": True, "labels": None},
        "site 'photo' reports {'train': 24, 'test': 9} samples: it needs training samples",
    ),
    "labels of one that validates": (
        {"validates": True, "samples": {"test": 9}},
        "site 'photo' reports {'test': 9} samples: it needs training samples",
    ),
    "another part": ({"samples": {"train": 24, "test": 9, "x": 1}}, "site 'photo' reports {'train': 24, 'te"),
    "more than memory": ({"samples": {"train": 10**12, "test": 1}}, "site 'photo' reports"),
    "another type": ({"dtype": "uint9"}, "site 'photo' reports samples of type uint9"),
    "no type": ({"dtype": "load"}, "site 'photo' reports samples of type load"),
    "a huge shape": (
        {"shape": [2**20, 2**20]},
        r"site 'photo' .* of type uint8 and shape \(1048576, 1048576\)",
    ),
    "a negative shape": ({"shape": [3, -28, 28]}, "site 'photo' reports samples of type"),
    "many classes": ({"classes": 10**12}, "site 'photo' reports 1000000000000 classes"),
    "too few labels": ({"labels": [1] * 10}, "site 'photo' reports 10 classes, which do not match its labels"),
    "labels below zero": ({"labels": [-1, *[0] * 8, 25]}, "site 'photo' reports 10 classes, which do not"),
    "columns of another width": ({"columns": [AGE, {**WARD, "categories": ["A", "B"]}]}, COLUMNS.format(2)),
    "a column twice": ({"columns": [AGE] * 3, "shape": [3]}, COLUMNS.format(3)),
    "categories twice": ({"columns": [{**WARD, "categories": ["A", "A"]}], "shape": [2]}, COLUMNS.format(1)),
    "a list of patients": (
        {"columns": [{**WARD, "categories": sorted(map(str, range(51)))}], "shape": [51]},
        COLUMNS.format(1),
    ),
    "columns in words": ({"columns": ["age"]}, "a site's description is malformed"),
    "more names than classes": ({"class_names": ["a"] * 11}, "site 'photo' reports 10 classes, which do not"),
    "words": ({"shape": "wide"}, "a site's description is malformed"),
    "no name": ({"name": ""}, "the name of a site, '', is empty"),
}


def test_what_a_site_says_of_itself_is_taken_as_it_says():
    described = SiteDescription.of(SOUND)
    assert (described.name, described.shape, described.classes) == ("photo", (3, 28, 28), 10)
    assert (
        SiteDescription.of({**SOUND, "labels": None, "samples": {"train": 1, "validation": 1, "test": 1}}).labels
        is None
    )


@pytest.mark.parametrize("fault", SELF)
def test_what_cannot_be_is_refused(fault):
    wrong, why = SELF[fault]
    with pytest.raises(FedshiftError, match=f"^{why}"):
        SiteDescription.of({**SOUND, **wrong})


def test_a_site_with_far_more_classes_than_samples_is_named():
    few = SiteDescription.of(SOUND | {"labels": None})
    many = SiteDescription.of(SOUND | {"name": "absurd", "classes": 10**6, "labels": None})
    with pytest.raises(FedshiftError, match=r"'absurd' has 1000000 classes, but all sites together have 66 samples"):
        ClientRegistry(clients=(few, many)).to_federation(None)
    allowed = SiteDescription.of(SOUND | {"name": "many", "classes": 1000, "labels": None})
    assert ClientRegistry(clients=(few, allowed)).to_federation(None).classes == 1000


def test_what_is_missing_is_named():
    with pytest.raises(FedshiftError, match=r"a site's description is malformed .*'classes'"):
        SiteDescription.of({name: value for name, value in SOUND.items() if name != "classes"})


def test_labels_of_sites_that_name_other_classes_are_numbered_by_what_they_mean():
    counts = {"north": {"cat": 5, "dog": 7}, "south": {"bee": 3, "dog": 4}, "west": {"bee": 1, "cat": 2, "dog": 6}}
    sites = [
        SiteDescription.of(
            {**SOUND, "name": name, "classes": len(own), "class_names": [*own], "labels": [*own.values()],
             "samples": {"train": sum(own.values()), "test": 9}}
        )
        for name, own in counts.items()
    ]  # fmt: skip
    whole = ClientRegistry().add_clients(sites).to_federation(None)
    for client in whole.clients:
        held = client.train.y.bincount(minlength=whole.classes).tolist()
        told = dict(zip(whole.class_names, held, strict=True))
        assert {name: count for name, count in told.items() if count} == counts[client.name]
