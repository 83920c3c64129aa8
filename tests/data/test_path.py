"""How many functions of data and tasks files pass on their way to a federation, and patches on their way to a batch."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fedshift
from fedshift.config.spec import DataSpec
from fedshift.data.sources import load_federation, load_source

PACKAGES = tuple(str(Path(fedshift.__file__).parent / name) for name in ("data", "tasks"))


def trace(work):
    """Return the functions of data and tasks that ``work`` calls, with their files, but for comprehensions."""
    called = set()

    def watch(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGES) and not code.co_name.startswith("<"):
            called.add((code.co_filename, code.co_qualname))

    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(None)
    return called


def write_pictures(folder):
    for number in range(24):
        file = folder / ("north", "south")[number % 2] / "ab"[number // 2 % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(number).integers(0, 256, (6, 5, 3)).astype(np.uint8)).save(file)


def write_volumes(folder):
    nibabel = pytest.importorskip("nibabel")
    for number in range(10):
        random = np.random.default_rng(number)
        for kind, values in (("images", random.normal(size=(6, 7, 5))), ("masks", random.integers(0, 2, (6, 7, 5)))):
            file = folder / ("north", "south")[number % 2] / kind / f"{number}.nii"
            file.parent.mkdir(parents=True, exist_ok=True)
            nibabel.save(nibabel.Nifti1Image(values.astype(np.float32), np.eye(4)), file)


@pytest.mark.parametrize(
    ("write", "options", "functions", "files"),
    [(write_pictures, {}, 120, 24), (write_volumes, {"patch": "4"}, 145, 28)],
)
def test_files_pass_few_functions_to_a_federation(tmp_path, monkeypatch, write, options, functions, files):
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "own")
    load_source(str(tmp_path / "own"), DataSpec(**options))  # imports modules
    called = trace(lambda: load_source(str(tmp_path / "own"), DataSpec(**options)))
    assert {"load_source", "decode_images"} <= {name for _, name in called}
    assert len(called) <= functions, sorted(called)
    assert len({file for file, _ in called}) <= files


def test_a_batch_of_patches_of_volumes_passes_few_functions(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))
    write_volumes(tmp_path / "own")
    train = load_federation(str(tmp_path / "own"), DataSpec(patch="4")).clients[0].train
    index = torch.arange(2)
    called = trace(lambda: (train.inputs(index, key=(1,)), train.targets(index, key=(1,))))
    assert "Patches.cut" in {name for _, name in called}
    assert len(called) <= 20, sorted(called)
    assert len({file for file, _ in called}) <= 4
