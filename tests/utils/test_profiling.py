"""Seconds by section, under a controlled clock."""

import threading
from types import SimpleNamespace

import pytest

from fedshift.utils import profiling
from fedshift.utils.profiling import add_seconds, is_recording, record_seconds, timed_section


@pytest.fixture
def clock(monkeypatch):
    """Clock that moves only when ``now`` is set."""
    hands = SimpleNamespace(now=0.0, read=0)

    def perf_counter():
        hands.read += 1
        return hands.now

    monkeypatch.setattr(profiling, "time", SimpleNamespace(perf_counter=perf_counter))
    return hands


def test_a_part_within_a_part_counts_for_both_and_a_part_done_again_adds_up(clock):
    with record_seconds() as seconds:
        with timed_section("outer"):
            clock.now += 1
            for taken in (2, 4):
                with timed_section("inner"):
                    clock.now += taken
        with timed_section("outer"):
            clock.now += 8
    assert seconds == {"inner": 6.0, "outer": 15.0}


def test_a_part_that_fails_counts_too(clock):
    def fail():
        clock.now += 3
        raise ZeroDivisionError

    with record_seconds() as seconds:
        with pytest.raises(ZeroDivisionError), timed_section("broken"):
            fail()
        with timed_section("whole"):
            clock.now += 1
    assert seconds == {"broken": 3.0, "whole": 1.0}


def test_what_was_spent_elsewhere_adds_to_what_was_spent_here(clock):
    with record_seconds() as seconds:
        with timed_section("update"):
            clock.now += 1
        add_seconds({"update": 2.0, "data": 0.5})
        add_seconds({})
    assert seconds == {"update": 3.0, "data": 0.5}


def test_each_record_is_kept_by_whoever_asked_for_it(clock):
    with record_seconds() as outer:
        with record_seconds() as inner, timed_section("update"):
            clock.now += 2
        with timed_section("data"):
            clock.now += 1
    assert (inner, outer) == ({"update": 2.0}, {"data": 1.0})


def test_nothing_is_measured_or_kept_unless_somebody_asked(clock):
    with record_seconds() as seconds:
        assert is_recording()
    with timed_section("update"):
        clock.now += 1
    add_seconds({"data": 1.0})
    assert not is_recording()
    assert (seconds, clock.read) == ({}, 0)


def test_a_record_ends_where_its_block_fails():
    with pytest.raises(ZeroDivisionError), record_seconds():
        raise ZeroDivisionError
    assert not is_recording()


def test_a_record_is_of_one_thread():
    def elsewhere():
        heard.append(is_recording())
        add_seconds({"update": 1.0})

    heard = []
    with record_seconds() as seconds:
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()
    assert (heard, seconds) == ([False], {})
