"""DomainNet from tiny files: the publisher's archives with its lists, FedBN's lists, and folders alone."""

import pickle

import numpy as np
import pytest
from PIL import Image

from fedshift.data.datasets.image_domains import domainnet
from fedshift.data.preparation import UNIT
from fedshift.utils.errors import UsageError

CLIENTS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
TEN = ("bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra")
NUMBERS = {name: number for number, name in enumerate(sorted([*TEN, "aircraft_carrier", "The_Eiffel_Tower"]))}


@pytest.fixture
def archives(tmp_path):
    """``<domain>/<class>/<domain>_<class number>_00000<n>.jpg``, quick drawings ``.png``; three images of each class.

    The first two are for training. Brightness tells what an image is: 10 times the class, and the number.
    """
    folder = tmp_path / "DomainNet"
    for client in CLIENTS:
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
    assert (data.name, data.names, data.classes, data.class_names) == ("domainnet", CLIENTS, 10, TEN)
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
    for client in CLIENTS:
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
