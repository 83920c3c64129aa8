"""Processors granted to the process by the scheduler and by its container."""

import os

import pytest

from fedshift.utils.processors import available_processors


@pytest.fixture
def eight(monkeypatch):
    """Let the scheduler grant this process eight processors."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max 100000\n", 8),
        ("150000 100000\n", 2),
        ("200000 100000\n", 2),
        ("10000 100000\n", 1),
        ("6400000 100000\n", 8),
    ],
)
def test_version_2_of_control_groups(eight, tmp_path, text, expected):
    (tmp_path / "cpu.max").write_text(text)
    assert available_processors(tmp_path) == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1\n", 8), ("150000\n", 2), ("300000\n", 3), ("1000\n", 1)])
def test_version_1_of_control_groups(eight, tmp_path, quota, expected):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota)
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert available_processors(tmp_path) == expected


def test_version_2_goes_before_version_1(eight, tmp_path):
    test_version_1_of_control_groups(eight, tmp_path, "300000\n", 3)
    (tmp_path / "cpu.max").write_text("500000 100000\n")
    assert available_processors(tmp_path) == 5


def test_half_of_version_1_grants_nothing_less(eight, tmp_path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("100000\n")
    assert available_processors(tmp_path) == 8


def test_without_control_groups_the_scheduler_decides(eight, tmp_path):
    assert available_processors(tmp_path) == available_processors(tmp_path / "none") == 8


def test_a_process_bound_to_fewer_processors_uses_those(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    (tmp_path / "cpu.max").write_text("400000 100000\n")
    assert available_processors(tmp_path) == 1


@pytest.mark.parametrize(("counted", "expected"), [(6, 6), (None, 1)])
def test_where_the_scheduler_cannot_be_asked_all_are_counted(monkeypatch, tmp_path, counted, expected):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: counted)
    assert available_processors(tmp_path) == expected


def test_this_machine_has_some():
    assert 1 <= available_processors() <= os.cpu_count()
