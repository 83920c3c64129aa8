"""Camelyon17 from tiny files in the layout of WILDS: metadata.csv and patches by patient and node."""

import csv

import pytest
import torch
from PIL import Image

from fedshift.data.datasets.camelyon17 import camelyon17
from fedshift.utils.errors import UsageError


@pytest.fixture
def published(tmp_path):
    """Five hospitals of three slides of four patches; red is the slide, green the label."""
    root = tmp_path / "camelyon17" / "camelyon17_v1.0"
    root.mkdir(parents=True)
    columns = ["", "patient", "node", "x_coord", "y_coord", "tumor", "slide", "center", "split"]
    rows = []
    for slide in range(15):
        node = f"patient_{slide:03d}_node_{slide % 3}"
        (root / "patches" / node).mkdir(parents=True)
        for number in range(4):
            file = root / "patches" / node / f"patch_{node}_x_{96 * number}_y_7.png"
            Image.new("RGBA", (8, 8), (10 * slide, 100 * (number % 2), 0, 255)).save(file)
            rows.append([len(rows), f"{slide:03d}", slide % 3, 96 * number, 7, number % 2, slide, slide // 3, 0])
    with (root / "metadata.csv").open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    return tmp_path


def test_whole_slides_of_each_hospital_are_for_testing(published):
    data = camelyon17(published, size=8).check()
    assert data.names == tuple(f"hospital_{number}" for number in range(5))
    assert data.class_names == ("normal", "tumor")
    for place, client in enumerate(data.clients):
        slides = {}
        for name, split in client.splits.items():
            red, green, _ = split.x.float().mean((2, 3)).T
            assert torch.equal((green / 100).long(), split.y)
            slides[name] = set((red / 10).long().tolist())
        assert (len(slides["train"]), len(slides["test"])) == (2, 1)
        assert slides["train"] | slides["test"] == {3 * place, 3 * place + 1, 3 * place + 2}
    again = camelyon17(published, size=8, seed=1, domains=("hospital_2",), samples=3)
    assert (again.names, len(again.clients[0].train), len(again.clients[0].test)) == (("hospital_2",), 3, 4)


def test_unknown_hospitals_and_damaged_tables_are_refused(published):
    with pytest.raises(UsageError, match="unknown value of domains 'hospital_9': did you mean 'hospital_4'"):
        camelyon17(published, domains=("hospital_9",))
    table = published / "camelyon17" / "camelyon17_v1.0" / "metadata.csv"
    table.write_text(table.read_text().replace("tumor", "lesion"))
    with pytest.raises(UsageError, match="cannot be read as WILDS' table of patches"):
        camelyon17(published)
    with pytest.raises(UsageError, match=r"metadata\.csv and the folder patches"):
        camelyon17(published / "elsewhere")
