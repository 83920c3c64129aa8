"""Processors granted to the process by the scheduler and by its container."""

import io
import os

from joblib.externals.loky.backend import context

from fedshift.utils.processors import available_processors


def test_a_container_grants_a_part_of_the_processors_rounded_up(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/sys/fs/cgroup/cpu.max")
    for text, expected in (("150000 100000\n", 2), ("10000 100000\n", 1), ("max 100000\n", 8), ("6400000 100000\n", 8)):
        monkeypatch.setattr(context, "open", lambda _, text=text: io.StringIO(text), raising=False)
        assert available_processors() == expected


def test_a_process_bound_to_fewer_processors_uses_those(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    assert available_processors() == 1


def test_this_machine_has_some():
    assert 1 <= available_processors() <= os.cpu_count()
