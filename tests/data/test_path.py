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


def write(folder, kind):
    for number in range(12):
        client, random = ("north", "south")[number % 2], np.random.default_rng(number)
        if kind == "pictures":
            save(
                folder / client / "ab"[number // 2 % 2] / f"{number}.png", random.integers(0, 256, (6, 5, 3), np.uint8)
            )
        elif kind == "volumes":
            save(folder / client / "images" / f"{number}.nii", random.normal(size=(6, 7, 5)).astype(np.float32))
            save(folder / client / "masks" / f"{number}.nii", random.integers(0, 2, (6, 7, 5)).astype(np.float32))
        else:
            (folder / f"{client}.csv").write_text("x,y\n" + "".join(f"{x},{x % 2}\n" for x in range(20)))


def save(file, values):
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".png":
        Image.fromarray(values).save(file)
    else:
        nibabel = pytest.importorskip("nibabel")
        nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), file)


@pytest.mark.parametrize(
    ("kind", "options", "functions", "files"),
    [("pictures", {}, 113, 23), ("volumes", {"patch": "4"}, 141, 27), ("csv", {"target": "y"}, 112, 20)],
)
def test_files_pass_few_functions_to_a_federation(tmp_path, monkeypatch, kind, options, functions, files):
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "own").mkdir()
    write(tmp_path / "own", kind)
    load_source(str(tmp_path / "own"), DataSpec(**options))  # imports modules
    called = trace(lambda: load_source(str(tmp_path / "own"), DataSpec(**options)))
    assert {"load_source", "assemble"} <= {name for _, name in called}
    assert len(called) <= functions, sorted(called)
    assert len({file for file, _ in called}) <= files


def test_a_batch_of_patches_of_volumes_passes_few_functions(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "own", "volumes")
    train = load_federation(str(tmp_path / "own"), DataSpec(patch="4")).clients[0].train
    index = torch.arange(2)
    called = trace(lambda: (train.inputs(index, key=(1,)), train.targets(index, key=(1,))))
    assert "Patches.cut" in {name for _, name in called}
    assert len(called) <= 20, sorted(called)
    assert len({file for file, _ in called}) <= 4
