"""Checkpoints: exact, whole or not at all, and refused when a single byte is wrong."""

import errno
import io
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fedshift.results.checkpoint import load_checkpoint, save_checkpoint
from fedshift.results.trial_records import load_facts
from fedshift.utils.errors import FedshiftError
from fedshift.utils.files import write_atomically

TENSORS = {
    "float": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
    "double": torch.tensor([1 / 3, float("inf"), float("nan"), -0.0], dtype=torch.float64),
    "half": torch.tensor([0.1], dtype=torch.bfloat16),
    "count": torch.tensor(7),
    "none": torch.zeros(0, 3),
    "turned": torch.arange(6.0).reshape(2, 3).T,
    "names/with.dots and spaces": torch.tensor([True, False]),
}
FACTS = {"round": 3, "steps": {"ann": 12, "病院": 0}, "identity": {"seed": "0"}}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint.safetensors"
    save_checkpoint(path, TENSORS, FACTS)
    return path


def test_what_is_loaded_is_bitwise_what_was_saved(checkpoint):
    tensors, facts = load_checkpoint(checkpoint)
    assert facts == FACTS == load_facts(checkpoint)
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert tensors[name].shape == tensor.shape
        assert (
            tensors[name].view(torch.uint8).tolist() == tensor.contiguous().view(torch.uint8).tolist()
            if (tensor.ndim)
            else torch.equal(tensors[name], tensor)
        )


def test_equal_contents_are_equal_bytes_in_whatever_order_they_come(checkpoint, tmp_path):
    other = tmp_path / "other.safetensors"
    for _ in range(8):  # each time safetensors would draw another order of several entries
        save_checkpoint(other, dict(reversed(TENSORS.items())), dict(reversed(FACTS.items())))
        assert other.read_bytes() == checkpoint.read_bytes()


def test_two_equal_runs_write_the_same_checkpoints(make, tmp_path, unpublished):
    for place in ("one", "two"):
        assert make("fedbn", rounds=1).run(tmp_path / place)
    first, second = (sorted((tmp_path / place / "trials").rglob("*.s*t*s")) for place in ("one", "two"))
    assert [path.suffix for path in first] == [".safetensors", ".states"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_loaded_tensors_do_not_depend_on_the_file(checkpoint):
    tensors, _ = load_checkpoint(checkpoint)
    checkpoint.write_bytes(b"")
    assert torch.equal(tensors["float"], TENSORS["float"])


def test_it_is_an_ordinary_safetensors_file(checkpoint):
    from safetensors.torch import load_file

    assert load_file(checkpoint)["count"].item() == 7


def test_a_missing_checkpoint_is_named(tmp_path):
    for load in (load_checkpoint, load_facts):
        with pytest.raises(FedshiftError, match=r"no checkpoint at .*gone"):
            load(tmp_path / "gone")


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(data=st.data())
def test_one_wrong_byte_anywhere_is_noticed(checkpoint, data):
    content = checkpoint.read_bytes()
    place = data.draw(st.integers(0, len(content) - 1))
    wrong = data.draw(st.integers(0, 255).filter(lambda byte: byte != content[place]))
    spoilt = checkpoint.with_name("spoilt")
    spoilt.write_bytes(content[:place] + bytes([wrong]) + content[place + 1 :])
    said = ""
    try:
        tensors, facts = load_checkpoint(spoilt)
    except FedshiftError as error:
        said = str(error)
    if said:
        assert str(spoilt) in said
        assert "restore the file from a copy, or remove its folder to begin this trial again from round 1" in said
    else:  # white space of the header, or an escape written in another way: the content is the same
        assert facts == FACTS
        assert tensors.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert tensors[name].dtype == tensor.dtype
            assert torch.equal(tensors[name].nan_to_num(), tensor.nan_to_num())


@pytest.mark.parametrize("kept", [0, 7, 8, 100, -1, -100])
def test_a_truncated_checkpoint_is_refused(checkpoint, kept):
    checkpoint.write_bytes(checkpoint.read_bytes()[:kept])
    with pytest.raises(FedshiftError, match="is corrupt or truncated"):
        load_checkpoint(checkpoint)


def test_files_of_others_are_refused(tmp_path):
    path = tmp_path / "other.safetensors"
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(FedshiftError, match="is corrupt or truncated"):
        load_checkpoint(path)
    save_file({"weight": torch.zeros(2)}, path, metadata={"format": "999"})
    with pytest.raises(FedshiftError, match="was written by another version of fedshift"):
        load_facts(path)
    with pytest.raises(FedshiftError, match="is corrupt or truncated"):
        load_checkpoint(tmp_path)  # a directory


class Full(io.BytesIO):
    """A file on a disk that fills up."""

    def write(self, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fileno(self):
        return os.open(os.devnull, os.O_RDONLY)


def test_a_full_disk_keeps_the_old_file_and_leaves_no_other(checkpoint, monkeypatch):
    before = checkpoint.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda *_: Full())
        with pytest.raises(FedshiftError) as refused:
            save_checkpoint(checkpoint, TENSORS, {**FACTS, "round": 4})
    assert str(refused.value) == (
        f"cannot write {checkpoint}: No space left on device. What was saved before is intact: free some space, then "
        "repeat the command (a run continues with resume=True)"
    )
    assert checkpoint.read_bytes() == before
    assert list(checkpoint.parent.iterdir()) == [checkpoint]


@pytest.mark.parametrize("call", ["fsync", "open"])
def test_a_disk_that_fails_later_is_told_too(checkpoint, monkeypatch, call):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(f"fedshift.utils.files.os.{call}", fail)
    with pytest.raises(
        FedshiftError, match=r"Input/output error. What was saved before is intact: make the directory wri"
    ):
        write_atomically(checkpoint, b"new")


def test_a_disk_that_only_reads_is_told(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for call in ("open", "unlink"):
        monkeypatch.setattr(Path, call, refuse)
    with pytest.raises(
        FedshiftError, match=r"Read-only file system. What was saved before is intact: make the directory"
    ):
        write_atomically(tmp_path / "file", b"new")


def test_content_is_on_disk_before_it_takes_the_old_files_place(tmp_path, monkeypatch):
    happened = []
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor):
        happened.append(("fsync", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def replaced(self, target):
        happened.append(("replace", self.name))
        return replace(self, target)

    monkeypatch.setattr("fedshift.utils.files.os.fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    write_atomically(tmp_path / "file", b"content")
    file = tmp_path / "file"
    assert happened == [("fsync", file.stat().st_ino), ("replace", "file.tmp"), ("fsync", tmp_path.stat().st_ino)]
    assert file.read_bytes() == b"content"
