"""Run directories: who may write, what stands in them, and settings that can be read back."""

import json
import subprocess
import sys

import numpy as np
import pytest

from fedshift.results.cases import FILES, read_cases, write_cases
from fedshift.results.run_directory import (
    RunDirectory,
    append_rows,
    cut_rows,
    describe_environment,
    to_file_name,
)
from fedshift.results.schema import read_rows
from fedshift.utils.errors import FedshiftError, UsageError


def test_a_new_directory_is_made_with_its_parents_and_locked(tmp_path):
    directory = RunDirectory(tmp_path / "a" / "b", resume=False)
    directory.write("config.toml", "")
    with pytest.raises(FedshiftError, match=r"is in use by process \d+: wait for it, or name another directory"):
        RunDirectory(directory.path, resume=True)
    directory.close()
    RunDirectory(directory.path, resume=True).close()


@pytest.mark.slow
def test_the_lock_of_another_process_counts_and_ends_with_it(tmp_path):
    code = (
        "import sys; from pathlib import Path; from fedshift.results.run_directory import RunDirectory\n"
        "held = RunDirectory(Path(sys.argv[1]), resume=False)\n"
        "held.write('config.toml', ''); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "run"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(FedshiftError, match=f"is in use by process {process.pid}: "):
            RunDirectory(tmp_path / "run", resume=True)
        process.kill()
    RunDirectory(tmp_path / "run", resume=True).close()


def test_a_directory_that_holds_a_run_is_not_overwritten(tmp_path):
    (tmp_path / "config.toml").touch()
    with pytest.raises(UsageError, match=r"already holds a run: continue it \(resume='.*'\), or choose another"):
        RunDirectory(tmp_path, resume=False)


def test_a_directory_that_holds_something_else_is_not_written_into(tmp_path):
    (tmp_path / "config.toml.tmp").touch()  # of a run that was killed as it wrote its first file
    RunDirectory(tmp_path, resume=False).close()
    for entry in tmp_path.iterdir():
        entry.unlink()
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UsageError, match="holds other files: choose a directory that is new or empty"):
        RunDirectory(tmp_path, resume=False)
    with pytest.raises(UsageError, match="is a file: choose another directory"):
        RunDirectory(tmp_path / "thesis.tex", resume=False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_only_a_run_is_resumed(tmp_path):
    with pytest.raises(UsageError, match=r"holds no run to resume: give the directory that holds its config.toml"):
        RunDirectory(tmp_path, resume=True)
    with pytest.raises(UsageError, match="holds no run to resume"):
        RunDirectory(tmp_path / "gone", resume=True)
    assert not (tmp_path / "gone").exists()


def test_a_lock_left_over_does_not_make_a_directory_occupied(tmp_path):
    RunDirectory(tmp_path / "run", resume=False).close()
    RunDirectory(tmp_path / "run", resume=False).close()


def test_a_place_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        FedshiftError, match=r"cannot write .*file/run: a part of this path is a file; choose another directory"
    ):
        RunDirectory(tmp_path / "file" / "run", resume=False)


def test_slugs_are_safe_file_names_that_keep_what_tells_methods_apart():
    assert to_file_name("fedbn+fedprox(mu=0.1)") == "fedbn+fedprox-mu=0.1"
    assert to_file_name("../../etc/passwd\n") == "..-..-etc-passwd"
    assert "/" not in to_file_name("a/b")


def test_rows_are_appended_read_and_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"round": n, "loss_sum": n / 3, "client": "病院"} for n in (1, 2, 3)]
    append_rows(path, rows[:2])
    append_rows(path, rows[2:])
    assert read_rows(path) == rows
    before = path.read_bytes()
    cut_rows(path, 3)
    assert path.read_bytes() == before
    cut_rows(path, 2)
    assert read_rows(path) == rows[:2]
    assert path.read_bytes() == b"".join(before.splitlines(keepends=True)[:2])


@pytest.mark.parametrize("cut", range(1, 30, 4))
def test_a_last_line_cut_short_is_left_out(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    rows = [{"round": n, "loss_sum": n / 3} for n in (1, 2, 3)]
    append_rows(path, rows)
    path.write_bytes(path.read_bytes()[:-cut])
    assert read_rows(path) == rows[:2] if cut > 1 else read_rows(path) == rows


def test_nan_is_written_as_null(tmp_path):
    append_rows(tmp_path / "rows", [{"round": 1, "auc": float("nan")}])
    assert read_rows(tmp_path / "rows") == [{"round": 1, "auc": None}]


def test_rows_that_cannot_be_written_are_told(tmp_path):
    with pytest.raises(FedshiftError, match=r"cannot write .*: Is a directory"):
        append_rows(tmp_path, [{"round": 1}])


def test_the_environment_is_json_and_names_versions():
    found = json.loads(json.dumps(describe_environment()))
    assert found["packages"].keys() >= {"fedshift", "torch", "numpy"}
    assert found["cores"] >= 1


def test_records_of_single_samples_are_read_as_written_and_shared_ones_once(tmp_path):
    one = {"right": np.arange(9) % 2 == 0, "chosen": np.eye(9, 3, dtype=bool), "loss": np.arange(9, dtype=np.float32)}
    two = {name: each[:2] for name, each in one.items()}
    records = {("a", "personal"): one, ("a", "global"): one, ("b", "personal"): two}
    write_cases(tmp_path, 7, {"running": records, "reestimated": {("a", "personal"): two}})
    whole = (tmp_path / FILES["test"]).read_bytes()
    found = read_cases(tmp_path)
    assert found.round == 7
    assert found.records["a", "global"] is found.records["a", "personal"]
    for key, expected in records.items():
        for name, array in expected.items():
            assert found.records[key][name].dtype == array.dtype
            np.testing.assert_array_equal(found.records[key][name], array)
    (again,) = read_cases(tmp_path, statistics="reestimated").records.values()
    np.testing.assert_array_equal(again["loss"], two["loss"])
    write_cases(tmp_path, 7, {"running": records, "reestimated": {("a", "personal"): two}})
    assert (tmp_path / FILES["test"]).read_bytes() == whole
    (tmp_path / FILES["test"]).write_bytes(whole[:-40])
    with pytest.raises(FedshiftError, match=r"cases.npz is damaged .*: remove it, and have it measured again"):
        read_cases(tmp_path)
