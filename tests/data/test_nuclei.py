"""The embedded nuclei: what is there, where it comes from, and that pictures and masks fit each other."""

import os
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch

from fedshift.data.nuclei import PICTURES, SIZES, nuclei
from fedshift.tasks import Segmentation

ORIGIN = Path(os.environ.get("FEDSHIFT_DATA", ""), "segmentation_nuclei")


def test_six_clients_have_pictures_and_masks():
    data = nuclei()
    assert (data.task, data.classes, data.class_names) == (Segmentation(), 2, ("background", "nucleus"))
    assert {c.name: (len(c.train), len(c.test)) for c in data.clients} == SIZES
    for client in data.clients:
        for split in client.splits.values():
            assert (split.x.dtype, split.x.shape) == (torch.uint8, (len(split), 3, 64, 64))
            assert split.y.unique().tolist() == [0, 1]
    assert sum(file.stat().st_size for file in PICTURES.iterdir()) < 1_500_000
    assert "CC0" in (PICTURES / "LICENSE.md").read_text(encoding="utf-8")


def test_the_bytes_are_the_same_everywhere():
    digest = blake2b(digest_size=8)
    for client in nuclei().clients:
        for split in client.splits.values():
            digest.update(split.x.numpy().tobytes() + split.y.numpy().tobytes())
    assert digest.hexdigest() == "78356da2da6380db"


def test_nuclei_are_brighter_under_fluorescence_and_darker_elsewhere():
    for client in nuclei().clients:
        for split in client.splits.values():
            gray, mask = split.x.float().mean(dim=1), split.y.bool()
            inside, outside = gray[mask].mean(), gray[~mask].mean()
            assert (inside > 1.3 * outside) if client.name.startswith("fluor") else (inside < 0.9 * outside)


if ORIGIN.is_dir():

    def test_the_subset_is_what_the_originals_hold():
        for client in nuclei().clients:
            with np.load(ORIGIN / f"{client.name}.npz") as arrays:
                for name, split in client.splits.items():
                    x = torch.from_numpy(arrays[f"x_{name}"]).permute(0, 3, 1, 2).float()
                    halves = torch.nn.functional.avg_pool2d(x, 2)
                    place = torch.cdist(split.x.flatten(1).float(), halves.flatten(1)).argmin(dim=1)
                    assert (halves[place] - split.x).abs().max() <= 0.5
                    masks = torch.from_numpy(arrays[f"m_{name}"])[place].float()
                    assert torch.equal(torch.nn.functional.avg_pool2d(masks[:, None], 2)[:, 0] >= 0.5, split.y > 0)
