"""Office-Caltech10 and DomainNet from tiny files: folders alone, the publisher's lists and FedBN's."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from fedshift.data.datasets.image_domains import domainnet, office_caltech10
from fedshift.data.preparation import UNIT
from fedshift.utils.errors import UsageError

OFFICE = ("amazon", "caltech", "dslr", "webcam")
CLASSES = (
    "back_pack", "bike", "calculator", "headphones", "keyboard",
    "laptop_computer", "monitor", "mouse", "mug", "projector",
)  # fmt: skip
DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
TEN = ("bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra")
NUMBERS = {name: number for number, name in enumerate(sorted([*TEN, "aircraft_carrier", "The_Eiffel_Tower"]))}


def shade(place: int, label: int, number: int) -> tuple[int, int, int]:
    """A color that tells an image apart even after JPEG."""
    return 60 * place, 25 * label, 40 * number


@pytest.fixture
def office(tmp_path):
    """``office_caltech_10/<domain>/<class>/frame_000<number>.jpg``: four images of every class, of different sizes."""
    folder = tmp_path / "office_caltech_10"
    for place, client in enumerate(OFFICE):
        for label, name in enumerate(CLASSES):
            (folder / client / name).mkdir(parents=True)
            for number in range(4):
                image = Image.new("RGB", (10 + number, 12), shade(place, label, number))
                image.save(folder / client / name / f"frame_000{number}.jpg", quality=95)
    return folder


def colors(split) -> np.ndarray:
    return split.x.float().mean((2, 3)).numpy()


def close(split, wanted) -> bool:
    return split.x.shape[0] == len(wanted) and np.abs(colors(split) - np.array(wanted)).max() <= 3


def test_folders_alone_give_a_fifth_of_every_class_for_testing(office):
    data = office_caltech10(office.parent, size=8).check()
    assert (data.name, data.names, data.classes, data.class_names) == ("office-caltech10", OFFICE, 10, CLASSES)
    for place, client in enumerate(data.clients):
        assert (client.train.x.dtype, client.train.shape) == (torch.uint8, (3, 8, 8))
        assert torch.bincount(client.train.y).tolist() == [3] * 10
        assert torch.bincount(client.test.y).tolist() == [1] * 10
        seen = []
        for split in client.splits.values():
            seen += list(zip(split.y.tolist(), numbers := (colors(split)[:, 2] / 40).round().astype(int), strict=True))
            assert close(split, [shade(place, *row) for row in zip(split.y.tolist(), numbers, strict=True)])
        assert sorted(seen) == [(label, number) for label in range(10) for number in range(4)]


def write_lists(folder):
    """FedBN's lists: images 1 and 0 of every class for training (in this order), 3 for testing."""
    for client in OFFICE:
        for part, numbers in {"train": (1, 0), "test": (3,)}.items():
            names = [(name, number) for number in numbers for name in reversed(CLASSES)]
            paths = np.array([f"office_caltech_10/{client}/{name}/frame_000{number}.jpg" for name, number in names])
            labels = np.array([name for name, _ in names])
            (folder / f"{client}_{part}.pkl").write_bytes(pickle.dumps((paths, labels)))


def test_the_lists_of_fedbn_say_which_image_is_for_what(office):
    write_lists(office)
    data = office_caltech10(office.parent, size=6)
    for place, client in enumerate(data.clients):
        assert client.train.y.tolist() == [*range(9, -1, -1)] * 2
        wanted = [shade(place, label, number) for number in (1, 0) for label in range(9, -1, -1)]
        assert close(client.train, wanted)
        assert close(client.test, [shade(place, label, 3) for label in range(9, -1, -1)])
    assert "FedBN's split" in data.note


def test_fedbns_authors_train_on_the_first_of_their_lists_and_select_on_the_last(office):
    write_lists(office)
    whole, data = (office_caltech10(office.parent, size=6, **k) for k in ({}, {"samples": 7, "validation": 4}))
    for all_of, some in zip(whole.clients, data.clients, strict=True):
        assert torch.equal(some.train.x, all_of.train.x[:7])
        assert torch.equal(some.validation.x, all_of.train.x[-4:])
        assert torch.equal(some.test.x, all_of.test.x)
        assert (some.train.y.tolist(), some.validation.y.tolist()) == ([9, 8, 7, 6, 5, 4, 3], [3, 2, 1, 0])
    assert float(data.clients[0].train.inputs(slice(None)).min()) >= 0  # their ToTensor: pixels in [0, 1]
    with pytest.raises(UsageError, match="client 'amazon' has 20 training images, too few for samples=17 and validat"):
        office_caltech10(office.parent, size=6, samples=17, validation=4)
    with pytest.raises(UsageError, match="validation=0: must be at least 1"):
        office_caltech10(office.parent, size=6, validation=0)


def test_without_lists_the_first_are_drawn_from_all_classes(office):
    data = office_caltech10(office.parent, size=6, samples=15, validation=10)
    for client in data.clients:
        assert (len(client.train), len(client.validation), len(client.test)) == (15, 10, 10)
        assert len(set(client.train.y.tolist())) > 5
        seen = [tuple(image.flatten().tolist()) for split in client.splits.values() for image in split.x]
        assert len(set(seen)) == 35


def test_caltech_may_be_called_caltech10(office):
    (office / "caltech").rename(office / "caltech10")
    write_lists(office)
    test = office_caltech10(office, size=6).client("caltech").test
    assert close(test, [shade(1, label, 3) for label in range(9, -1, -1)])


def test_a_list_that_would_run_code_is_refused_and_not_run(office, tmp_path):
    class Trap:
        def __reduce__(self):
            return (type(tmp_path).touch, (tmp_path / "ran",))

    write_lists(office)
    (office / "dslr_train.pkl").write_bytes(pickle.dumps((Trap(), np.array(["mug"]))))
    with pytest.raises(UsageError, match=r"dslr_train.pkl"):
        office_caltech10(office.parent, size=6)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (([], [], []), "too many values to unpack"),
        (7, "not iterable"),
        ((np.array(["a/mug/1.jpg"]), np.array(["mug", "bike"])), "argument 2 is longer than argument 1"),
        ((np.array(["dslr/mug/1.jpg"]), np.array(["bike"])), "'dslr/mug/1.jpg' has another class than its folder"),
    ],
)
def test_a_list_of_another_kind_is_refused_by_name(office, content, said):
    write_lists(office)
    (office / "dslr_train.pkl").write_bytes(pickle.dumps(content))
    with pytest.raises(UsageError, match=rf"dslr_train.pkl cannot be read as paths with names of classes .*{said}"):
        office_caltech10(office.parent, size=6)


def test_missing_and_damaged_images_and_other_classes_are_refused_by_name(office):
    write_lists(office)
    (office / "webcam" / "mug" / "frame_0001.jpg").write_bytes(b"no image")
    said = r"office_caltech_10: client 'webcam': 1 of 30 files cannot be read, .*mug/frame_0001.jpg: .*needs all of"
    with pytest.raises(UsageError, match=said):
        office_caltech10(office.parent, size=6)
    (office / "webcam" / "mug" / "frame_0001.jpg").unlink()
    with pytest.raises(UsageError, match=said):
        office_caltech10(office.parent, size=6)
    (office / "amazon" / "bookcase").mkdir()
    said = r"has 11 class folders \(back_pack, bike, bookcase, .*; Office-Caltech10 has 10"
    with pytest.raises(UsageError, match=said):
        office_caltech10(office.parent, size=6)


@pytest.fixture
def archives(tmp_path):
    """``<domain>/<class>/<domain>_<class number>_00000<n>.jpg``, quick drawings ``.png``; three images of each class.

    The first two are for training. Brightness tells what an image is: 10 times the class, and the number.
    """
    folder = tmp_path / "DomainNet"
    for client in DOMAINS:
        lists = {"train": [], "test": []}
        for name, number in NUMBERS.items():
            (folder / client / name).mkdir(parents=True)
            for one in range(3):
                suffix = "png" if client == "quickdraw" else "jpg"
                file = f"{client}/{name}/{client}_{number:03d}_00000{one}.{suffix}"
                Image.new("L", (9, 7 + one), 10 * number + 3 * one).save(folder / file, quality=95)
                lists["test" if one == 2 else "train"].append(f"{file} {number}\n")
        for part, lines in lists.items():
            (folder / f"{client}_{part}.txt").write_text("".join(lines))
    return folder


def brightness(split) -> list[int]:
    return [round(float(image.float().mean())) for image in split.x]


def test_the_lists_of_the_publisher_give_the_split_and_ten_classes_are_read(archives):
    data = domainnet(archives.parent, size=6).check()
    assert (data.name, data.names, data.classes, data.class_names) == ("domainnet", DOMAINS, 10, TEN)
    wanted = [10 * NUMBERS[name] for name in sorted(NUMBERS) if name in TEN]
    for client in data.clients:
        assert client.train.y.tolist() == [label for label in range(10) for _ in range(2)]
        assert client.test.y.tolist() == [*range(10)]
        assert np.abs(np.subtract(brightness(client.train)[::2], wanted)).max() <= 1
        assert np.abs(np.subtract(brightness(client.test), np.add(wanted, 6))).max() <= 1
    assert data.sample_shape == (3, 6, 6)
    assert "the publisher's split" in data.note


def test_any_classes_may_be_named_and_are_labeled_in_that_order(archives):
    data = domainnet(archives.parent, classes=("zebra", "The_Eiffel_Tower"), size=6)
    assert data.classes == 2
    client = data.client("real")
    assert client.test.y.tolist() == [1, 0]  # in the order of the list, which is that of the names
    assert np.abs(np.subtract(brightness(client.test), [6, 10 * NUMBERS["zebra"] + 6])).max() <= 1
    with pytest.raises(UsageError, match="unknown value of classes 'zebr': did you mean 'zebra'"):
        domainnet(archives.parent, classes=("zebr", "bird"))
    with pytest.raises(UsageError, match=r"give one or more of .*, each once"):
        domainnet(archives.parent, classes=("bird", "bird"))


def test_fedbn_s_lists_go_before_the_publisher_s(archives):
    for client in DOMAINS:
        suffix = "png" if client == "quickdraw" else "jpg"
        for part, one in {"train": 2, "test": 0}.items():
            paths = [f"DomainNet/{client}/{name}/{client}_{NUMBERS[name]:03d}_00000{one}.{suffix}" for name in TEN]
            (archives / f"{client}_{part}.pkl").write_bytes(pickle.dumps([np.array(paths), np.array(TEN)]))
    client = domainnet(archives.parent, size=6).client("sketch")
    wanted = [10 * NUMBERS[name] for name in TEN]
    assert np.abs(np.subtract(brightness(client.train), np.add(wanted, 6))).max() <= 1
    assert np.abs(np.subtract(brightness(client.test), wanted)).max() <= 1
    first = domainnet(archives.parent, size=6, samples=3, validation=2).client("sketch")
    assert (first.train.y.tolist(), first.validation.y.tolist()) == ([0, 1, 2], [8, 9])
    assert first.train.normalization == UNIT
    others = domainnet(archives.parent, classes=("The_Eiffel_Tower", "bird"), size=6)
    assert "the publisher's split" in others.note  # FedBN's lists know its ten classes alone


def test_a_damaged_list_is_refused_by_name(archives):
    with (archives / "real_test.txt").open("a") as file:
        file.write("real/zebra/real_344_000001.jpg\n")
    with pytest.raises(UsageError, match=r"real_test.txt cannot be read as a list of images with lines <path> <label>"):
        domainnet(archives.parent, size=6)
