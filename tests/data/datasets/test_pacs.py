"""PACS from tiny files as published: kfold/<domain>/<class>/<file>, and lists with labels from 1."""

import pytest
import torch
from PIL import Image

from fedshift.data.datasets.image_domains import PACS, pacs
from fedshift.utils.errors import UsageError

CLIENTS = ("art_painting", "cartoon", "photo", "sketch")
CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")


@pytest.fixture
def published(tmp_path):
    """Four images of every class; the last one is for crossvalidation, and all are in the list for testing."""
    root = tmp_path / "PACS"
    for client in CLIENTS:
        lists = {"train": [], "crossval": [], "test": []}
        for label, name in enumerate(CLASSES):
            (root / "kfold" / client / name).mkdir(parents=True)
            for number in range(4):
                suffix = "png" if client == "sketch" else "jpg"
                file = f"{client}/{name}/pic_00{number}.{suffix}"
                Image.new("RGB", (12, 12), (30 * label, 60 * number, 9)).save(root / "kfold" / file, quality=95)
                for part in ("test", "crossval" if number == 3 else "train"):
                    lists[part].append(f"{file} {label + 1}\n")
        for part, lines in lists.items():
            (root / f"{client}_{part}_kfold.txt").write_text("".join(lines))
    return tmp_path


def test_the_lists_give_training_and_crossvalidation_images_and_none_stands_on_both_sides(published):
    data = pacs(published, size=4).check()
    assert (data.name, data.names, data.classes, data.class_names) == ("pacs", CLIENTS, 7, CLASSES)
    for client in data.clients:
        assert (len(client.train), len(client.test)) == (21, 7)
        for split, numbers in ((client.train, {0, 1, 2}), (client.test, {3})):
            red, green, _ = split.x.float().mean((2, 3)).T
            assert torch.equal((red / 30).round().long(), split.y)
            assert set((green / 60).round().tolist()) == numbers


def test_without_lists_a_tenth_of_every_class_but_at_least_one_is_for_testing(published):
    for file in (published / "PACS").glob("*.txt"):
        file.unlink()
    for client in pacs(published, size=4).clients:
        assert torch.bincount(client.train.y).tolist() == [3] * 7
        assert torch.bincount(client.test.y).tolist() == [1] * 7


def test_the_size_is_the_published_one(published):
    assert pacs(published).sample_shape == (3, 227, 227)


def test_the_faulty_sketch_is_left_out(published):
    name = "sketch/dog/n02103406_4068-1.png"
    (published / "PACS" / "kfold" / name).write_bytes(b"damaged")
    with (published / "PACS" / "sketch_train_kfold.txt").open("a") as file:
        file.write(f"{name} 1\n")
    assert len(pacs(published, size=4).client("sketch").train) == 21


def test_images_fetched_from_huggingface_are_found(published):
    tree = published / "pacs" / "hub"
    tree.parent.mkdir()
    (published / "PACS" / "kfold").rename(tree)
    assert [len(client.train) for client in pacs(published, size=4).clients] == [21, 21, 21, 21]


def test_other_class_folders_are_refused(published):
    (published / "PACS" / "kfold" / "photo" / "cat").mkdir()
    with pytest.raises(UsageError, match=r"class folders .cat, dog, .*; PACS has dog, elephant"):
        pacs(published, size=4)


def test_without_files_a_person_is_told_how_to_fetch_them(tmp_path):
    assert PACS.hub == "flwrlabs/pacs"
    with pytest.raises(UsageError, match="`fedshift data fetch pacs` fetches it"):
        pacs(tmp_path)
