"""Office-Caltech10 from tiny files in the forms in which it goes around: folders alone, and with FedBN's lists."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from fedshift.data.datasets.image_domains import office_caltech10
from fedshift.utils.errors import UsageError

CLIENTS = ("amazon", "caltech", "dslr", "webcam")
CLASSES = (
    "back_pack", "bike", "calculator", "headphones", "keyboard",
    "laptop_computer", "monitor", "mouse", "mug", "projector",
)  # fmt: skip


def shade(place: int, label: int, number: int) -> tuple[int, int, int]:
    """A color that tells an image apart even after JPEG."""
    return 60 * place, 25 * label, 40 * number


@pytest.fixture
def published(tmp_path):
    """``office_caltech_10/<domain>/<class>/frame_000<number>.jpg``: four images of every class, of different sizes."""
    folder = tmp_path / "office_caltech_10"
    for place, client in enumerate(CLIENTS):
        for label, name in enumerate(CLASSES):
            (folder / client / name).mkdir(parents=True)
            for number in range(4):
                image = Image.new("RGB", (10 + number, 12), shade(place, label, number))
                image.save(folder / client / name / f"frame_000{number}.jpg", quality=95)
    return folder


def colors(split) -> list[tuple[int, ...]]:
    return [tuple(round(v) for v in image.float().mean((1, 2)).tolist()) for image in split.x]


def close(found, wanted) -> bool:
    return len(found) == len(wanted) and np.abs(np.array(found) - np.array(wanted)).max() <= 3


def test_folders_alone_give_a_fifth_of_every_class_for_testing(published):
    data = office_caltech10(published.parent, size=8).check()
    assert (data.name, data.names, data.classes, data.class_names) == ("office-caltech10", CLIENTS, 10, CLASSES)
    for place, client in enumerate(data.clients):
        assert (client.train.x.dtype, client.train.shape) == (torch.uint8, (3, 8, 8))
        assert torch.bincount(client.train.y).tolist() == [3] * 10
        assert torch.bincount(client.test.y).tolist() == [1] * 10
        seen = {
            (label, round(color[2] / 40))
            for split in (client.train, client.test)
            for label, color in zip(split.y.tolist(), colors(split), strict=True)
            if close([color], [shade(place, label, round(color[2] / 40))])
        }
        assert seen == {(label, number) for label in range(10) for number in range(4)}


def write_lists(folder):
    """FedBN's lists: images 1 and 0 of every class for training (in this order), 3 for testing."""
    for client in CLIENTS:
        for part, numbers in {"train": (1, 0), "test": (3,)}.items():
            names = [(name, number) for number in numbers for name in reversed(CLASSES)]
            paths = np.array([f"office_caltech_10/{client}/{name}/frame_000{number}.jpg" for name, number in names])
            labels = np.array([name for name, _ in names])
            (folder / f"{client}_{part}.pkl").write_bytes(pickle.dumps((paths, labels)))


def test_the_lists_of_fedbn_say_which_image_is_for_what(published):
    write_lists(published)
    data = office_caltech10(published.parent, size=6)
    for place, client in enumerate(data.clients):
        assert client.train.y.tolist() == [*range(9, -1, -1)] * 2
        wanted = [shade(place, label, number) for number in (1, 0) for label in range(9, -1, -1)]
        assert close(colors(client.train), wanted)
        assert close(colors(client.test), [shade(place, label, 3) for label in range(9, -1, -1)])
    assert "FedBN's split" in data.note


def test_fedbns_authors_train_on_the_first_of_their_lists_and_select_on_the_last(published):
    write_lists(published)
    whole, data = (office_caltech10(published.parent, size=6, **k) for k in ({}, {"samples": 7, "validation": 4}))
    for all_of, some in zip(whole.clients, data.clients, strict=True):
        assert torch.equal(some.train.x, all_of.train.x[:7])
        assert torch.equal(some.validation.x, all_of.train.x[-4:])
        assert torch.equal(some.test.x, all_of.test.x)
        assert (some.train.y.tolist(), some.validation.y.tolist()) == ([9, 8, 7, 6, 5, 4, 3], [3, 2, 1, 0])
    assert float(data.clients[0].train.inputs(slice(None)).min()) >= 0  # their ToTensor: pixels in [0, 1]
    with pytest.raises(UsageError, match="client 'amazon' has 20 training images, too few for samples=17 and validat"):
        office_caltech10(published.parent, size=6, samples=17, validation=4)
    with pytest.raises(UsageError, match="validation=0: must be at least 1"):
        office_caltech10(published.parent, size=6, validation=0)


def test_without_lists_the_first_are_drawn_from_all_classes(published):
    data = office_caltech10(published.parent, size=6, samples=15, validation=10)
    for client in data.clients:
        assert (len(client.train), len(client.validation), len(client.test)) == (15, 10, 10)
        assert len(set(client.train.y.tolist())) > 5
        seen = [tuple(image.flatten().tolist()) for split in client.splits.values() for image in split.x]
        assert len(set(seen)) == 35


def test_caltech_may_be_called_caltech10(published):
    (published / "caltech").rename(published / "caltech10")
    write_lists(published)
    assert close(colors(office_caltech10(published, size=6).client("caltech").test)[:1], [shade(1, 9, 3)])


def test_a_list_that_would_run_code_is_refused_and_not_run(published, tmp_path):
    class Trap:
        def __reduce__(self):
            return (type(tmp_path).touch, (tmp_path / "ran",))

    write_lists(published)
    (published / "dslr_train.pkl").write_bytes(pickle.dumps((Trap(), np.array(["mug"]))))
    with pytest.raises(UsageError, match=r"dslr_train.pkl"):
        office_caltech10(published.parent, size=6)
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
def test_a_list_of_another_kind_is_refused_by_name(published, content, said):
    write_lists(published)
    (published / "dslr_train.pkl").write_bytes(pickle.dumps(content))
    with pytest.raises(UsageError, match=rf"dslr_train.pkl cannot be read as paths with names of classes .*{said}"):
        office_caltech10(published.parent, size=6)


def test_missing_and_damaged_images_are_refused_by_name(published):
    write_lists(published)
    (published / "webcam" / "mug" / "frame_0001.jpg").write_bytes(b"no image")
    said = r"office_caltech_10: client 'webcam': 1 of 30 files cannot be read, .*mug/frame_0001.jpg: .*needs all of"
    with pytest.raises(UsageError, match=said):
        office_caltech10(published.parent, size=6)
    (published / "webcam" / "mug" / "frame_0001.jpg").unlink()
    with pytest.raises(UsageError, match=said):
        office_caltech10(published.parent, size=6)


def test_office_31_is_refused_because_it_has_other_classes(published):
    (published / "amazon" / "bookcase").mkdir()
    with pytest.raises(
        UsageError, match=r"has 11 class folders \(back_pack, bike, bookcase, .*; Office-Caltech10 has 10"
    ):
        office_caltech10(published.parent, size=6)
