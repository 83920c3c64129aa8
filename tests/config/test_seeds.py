"""Seeds as a number of them, a list or a text."""

import pytest

from fedshift.config.seeds import parse_seeds, write_seeds


@pytest.mark.parametrize(
    ("given", "seeds", "written"),
    [
        (1, (0,), 1), ("3", (0, 1, 2), 3), ([0, 1], (0, 1), 2), ([1], (1,), "1,"), ("7,", (7,), "7,"),
        ("3..5", (3, 4, 5), "3..5"), ("5, 3", (5, 3), "5,3"), ("3,4", (3, 4), "3,4"), ("1..2,9", (1, 2, 9), "1,2,9"),
        (range(2, 5), (2, 3, 4), "2..4"), ("0..3", (0, 1, 2, 3), 4), ("8..8", (8,), "8,"),
    ],
)  # fmt: skip
def test_seeds_are_written_as_what_reads_as_the_same_seeds(given, seeds, written):
    assert parse_seeds(given) == seeds
    assert write_seeds(seeds) == written
    assert parse_seeds(written) == seeds


@pytest.mark.parametrize(
    "given", [0, -1, "", ",", "a", "3..", "5..3", "1,1", "1;2", "-3", 1.0, True, None, [], [1.5], [True]]
)
def test_what_names_no_seeds_is_refused(given):
    with pytest.raises(ValueError, match="a number of seeds, 1 or more, or the seeds themselves"):
        parse_seeds(given)
