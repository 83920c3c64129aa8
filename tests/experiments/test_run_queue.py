"""Several runs in one directory: what has ended is known, and only what ended and was shown counts as such."""

from threading import Event
from types import SimpleNamespace

import pytest

from fedshift.engines.engine import Diverged
from fedshift.experiments.callbacks import Callback
from fedshift.experiments.run_queue import DONE, QueuedRun, read_outcome, run_pending
from fedshift.utils.checked_json import read_checked, write_checked
from fedshift.utils.errors import FedshiftError


@pytest.fixture
def parts(tmp_path):
    """Three parts, of which the second does what a test says, and the names of those that were run."""

    def make(second=lambda: True):
        ran = []

        def part(name):
            def run(folder, **_):
                folder.mkdir(exist_ok=True)
                ran.append(name)
                return second() if name == "b" else True

            made = SimpleNamespace(config={}, run=run)
            return QueuedRun(folder=tmp_path / name, experiment=lambda: made, settings={"name": name})

        return [part(name) for name in "abc"], ran

    return make


def through(parts, **options):
    return run_pending(parts, callback=Callback(), stop=Event(), **options)


@pytest.mark.parametrize(
    ("kept", "settings", "ended"),
    [
        (None, {}, None),
        ({}, {}, ""),  # a run of a table
        ({"diverged": "there"}, {}, "there"),
        ({"trials": ["kept-seed0"]}, {}, ""),
        ({"trials": ["kept-seed0", "removed-seed0"]}, {}, None),
        ({"lr": 0.1, "agc": None}, {"lr": 0.1, "agc": None}, ""),  # a combination of a sweep
        ({"lr": 0.1}, {"lr": 0.2}, None),
        ({"lr": 0.1, "diverged": "there"}, {"lr": 0.1}, "there"),
    ],
)
def test_what_a_directory_says_of_its_end(tmp_path, kept, settings, ended):
    (tmp_path / "trials" / "kept-seed0").mkdir(parents=True)
    if kept is not None:
        write_checked(tmp_path / DONE, kept)
    assert read_outcome(tmp_path, settings) == ended


def test_a_part_that_diverges_has_ended_and_nothing_is_run_twice(parts):
    def diverge():
        raise Diverged("client 'ann', round 1, step 0: the loss is nan")

    wanted, ran = parts(diverge)
    for _ in range(2):
        assert through(wanted)
    assert ran == ["a", "b", "c"]
    assert [bool(read_outcome(part.folder, part.settings)) for part in wanted] == [False, True, False]


def test_a_part_that_is_stopped_is_shown_and_the_last_of_that_call(parts):
    wanted, ran = parts(lambda: False)
    shown = []
    assert not through(wanted, end=lambda part, finished: shown.append((part.folder.name, finished)))
    assert ran == ["a", "b"]
    assert shown == [("a", True), ("b", False)]
    assert [(part.folder / DONE).exists() for part in wanted] == [True, False, False]


def test_what_could_not_be_shown_has_not_ended(parts):
    def refuse(part, _):
        if part.folder.name == "b":
            raise FedshiftError("the disk is full")

    wanted, ran = parts()
    with pytest.raises(FedshiftError):
        through(wanted, end=refuse)
    numbers = []
    assert through(wanted, begin=lambda number, _: numbers.append(number))
    assert (ran, numbers) == (["a", "b", "b", "c"], [2, 3])
    assert read_checked(wanted[1].folder / DONE, "") == {"name": "b", "trials": []}
