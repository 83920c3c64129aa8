"""Cached measurements, and files that would do harm: pipes, archives that fill memory, leftovers of killed programs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedshift.utils import files
from fedshift.utils.errors import UsageError
from fedshift.utils.files import (
    NotRegular,
    ScratchDirectory,
    cached_measurement,
    check_archive,
    open_regular,
)


def test_of_two_processes_that_measure_the_same_the_first_to_end_decides(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path))

    def measure_slowly():
        assert cached_measurement("times.json", "layer", lambda: {"seconds": 1}) == {"seconds": 1}
        assert cached_measurement("times.json", "other", lambda: {"seconds": 3}) == {"seconds": 3}
        return {"seconds": 2}

    for _ in range(2):
        assert cached_measurement("times.json", "layer", measure_slowly) == {"seconds": 1}
    assert sorted(found["seconds"] for found in json.loads((tmp_path / "times.json").read_text()).values()) == [1, 3]


@pytest.mark.parametrize("content", ["", "[]", '{"x": 1', "\x00"])
def test_damaged_measurements_are_taken_again_and_unwritable_ones_each_time(tmp_path, monkeypatch, content):
    taken = []
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path))
    (tmp_path / "times.json").write_text(content)
    for times in (1, 1):
        assert cached_measurement("times.json", "layer", lambda: taken.append(1) or {"seconds": 1}) == {"seconds": 1}
        assert len(taken) == times
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "times.json" / "below"))
    assert cached_measurement("times.json", "layer", lambda: {"seconds": 2}) == {"seconds": 2}


def test_nothing_waits_for_a_pipe_and_a_file_behind_a_link_is_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotRegular, match="it is a pipe, not a regular file"):
        open_regular(tmp_path / "pipe")
    with pytest.raises(NotRegular, match="device"):
        open_regular(Path("/dev/zero"))
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"content"


def test_the_directory_of_a_program_that_was_killed_is_removed_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "fedshift-results").mkdir()  # a user's own: no program's mark is beside it
    code = """
import os, signal
from fedshift.utils.files import ScratchDirectory
made = ScratchDirectory()
(made.path / "secret").write_text("x")
print(made.path, flush=True)
os.read(0, 1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as other:  # fmt: skip
        theirs = Path(other.stdout.readline().strip())
        with ScratchDirectory() as ours:
            assert theirs.is_dir()  # as long as the program lives
            assert ours.path.is_dir()
        other.stdin.write("x")
        other.stdin.close()
        other.wait()
    assert (theirs / "secret").exists()
    with ScratchDirectory() as ours:
        assert not theirs.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["fedshift-results"]


def test_a_scratch_directory_may_be_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = ScratchDirectory()
    made.keep()
    made.close()
    ScratchDirectory().close()
    assert list(tmp_path.iterdir()) == [made.path]


def test_an_archive_that_would_fill_memory_is_not_unpacked(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "zeros.npz", x=np.zeros(10**6))
    check_archive(tmp_path / "zeros.npz")
    monkeypatch.setattr(files, "available_memory", lambda: 7e6)
    with pytest.raises(UsageError, match=r"zeros.npz holds 0.0 GB, and 0.0 GB of memory are free"):
        check_archive(tmp_path / "zeros.npz")
    monkeypatch.setattr(files, "UNSUSPECTED", 10**6)
    with pytest.raises(UsageError, match=r"zeros.npz would unpack to 0.0 GB, \d+ times its size: no data do"):
        check_archive(tmp_path / "zeros.npz")
