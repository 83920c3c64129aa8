"""The values of FedFA's README (tfzhou/FedFA, 57e9582) agree with one another, and with the split that it names."""

from statistics import mean

import pytest

from fedshift.reproduce.published_tables import find_table

TEST_IMAGES = (192, 225, 32, 59)  # of FedBN's test lists


def test_cells_are_counts_of_test_images_and_averages_are_theirs():
    (block,) = find_table("fedfa/office").blocks
    for _, cells in block.rows:
        *clients, average = (cell.mean for cell in cells)
        counts = [round(value * images / 100) for value, images in zip(clients, TEST_IMAGES, strict=True)]
        assert clients == pytest.approx([100 * n / m for n, m in zip(counts, TEST_IMAGES, strict=True)], abs=0.0051)
        assert average == pytest.approx(mean(clients), abs=0.0101)
