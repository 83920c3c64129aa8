"""A model card's steps, followed word by word with public libraries alone, give the predictions of ``fedshift.load``.

The reader below knows Pillow, nibabel, wfdb, SciPy and torch, but nothing of fedshift: a step that it does not
understand, or one that is missing, fails.
"""

import json
import re
from itertools import product

import nibabel
import numpy as np
import pandas as pd
import pytest
import torch
import wfdb
from nibabel import orientations
from PIL import Image, ImageOps
from scipy.ndimage import zoom
from torch import nn
from torch.nn.functional import interpolate

import fedshift
from fedshift.utils.errors import UsageError


def numbers(text):
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", text)]


def find(pattern, text):
    return re.search(pattern, text)


class Reader:
    """Follows the steps of the card in ``folder`` from ``source`` to ``answer``: classes of pixels, or outputs."""

    def __init__(self, folder, source):
        steps = re.findall(r"^\d+\. \*\*(\w+)\*\*: (.+)$", (folder / "README.md").read_text(), re.M)
        assert dict(steps) == json.loads((folder / "model.json").read_text())["steps"]
        kept = {"steps.json": ""}
        self.network = torch.export.load(folder / "program.pt2", extra_files=kept).module()
        assert json.loads(kept["steps.json"]) == dict(steps)
        self.x, self.source = source, source
        for word, text in steps:
            with torch.no_grad():
                getattr(self, word)(text)

    def read(self, text):
        if "Pillow" in text:
            with Image.open(self.source) as image:
                self.x = ImageOps.exif_transpose(image)
            self.own = self.x.size[::-1]
        elif "nibabel" in text:
            self.file = nibabel.load(self.source)
            turned = nibabel.as_closest_canonical(self.file)
            self.spacing = turned.header.get_zooms()[:3][::-1]
            x = np.asarray(turned.dataobj).T
            self.x, self.own = x if x.ndim == 4 else x[None], x.shape[-3:]
        elif "wfdb" in text:
            leads = re.findall(r"(\w+) \(mv\)", text)
            record = wfdb.rdrecord(self.source.with_suffix("")).to_dataframe()
            self.x = record.rename(columns=str.lower)[leads].to_numpy().T
        elif "Of each row" in text:
            self.x = []
            for column in find("take (.+); NaN", text)[1].split("; "):
                name, categories = find("'(.+)'", column)[1], find(r"category of '.+' \((.+)\)", column)
                value = self.source[name]
                missing = value is None or value != value
                for category in categories[1].split(", ") if categories else [None]:
                    self.x.append(np.nan if missing else value if category is None else value == category)
            self.x = np.array(self.x, float)
        else:
            assert "as the run read them" in text

    def convert(self, text):
        if "mode F" in text:
            self.x = Image.fromarray(np.asarray(self.x).astype(np.float32))
        else:
            over = self.x.convert("RGBA")
            self.x = Image.alpha_composite(Image.new("RGBA", over.size, "white"), over).convert(
                find(r"(\w+)\.$", text)[1]
            )

    def resample(self, text):
        spacing, coarse = numbers(text.partition(" mm")[0]), float(find("over (.+) times", text)[1])
        for axis, (old, new) in enumerate(zip(self.spacing, spacing, strict=True), start=1):
            order = 0 if max(s[axis - 1] / min(s) for s in (self.spacing, spacing)) > coarse else 3
            size = round(self.x.shape[axis] * old / new)
            factors = [size / n if at == axis else 1 for at, n in enumerate(self.x.shape)]
            self.x = zoom(self.x.astype(np.float32), factors, order=order, mode="nearest", grid_mode=True)

    def resize(self, text):
        size = tuple(map(int, numbers(text.partition("(")[0])))
        if isinstance(self.x, Image.Image):
            self.x = np.asarray(self.x.resize(size[::-1], Image.Resampling.BILINEAR) if size else self.x)
            self.x = self.x.transpose(2, 0, 1) if self.x.ndim == 3 else self.x[None]
        elif size and "interpolate" in text:
            self.x = interpolate(torch.tensor(self.x)[None], size, mode=find(r"\((\w+linear)", text)[1])[0].numpy()
        else:
            assert not size or self.x.shape[1:] == size

    def scale(self, text):
        low, high = numbers(text)[:2]
        if "percentile" in text:
            low, high = np.percentile(self.x, (low, high), axis=(1, 2, 3), keepdims=True)
        self.x = np.clip((self.x - low) / np.where(high > low, high - low, 1), 0, 1) * 2 - 1

    def channels(self, text):
        self.x = np.repeat(self.x, int(numbers(text)[0]), axis=0) if len(self.x) == 1 else self.x

    def arrange(self, text):
        kind, sizes = find(r"as (\w+) \[N, (.+)\]", text).groups()
        self.x = torch.from_numpy(np.asarray(self.x).astype(kind))[None]
        wanted = [int(n) if n.isdigit() else at for n, at in zip(sizes.split(", "), self.x.shape[1:], strict=True)]
        assert list(self.x.shape[1:]) == wanted

    def windows(self, text):
        self.size = [int(n) for n in numbers(find("smaller than (.+?),", text)[1])]
        steps = [int(n) for n in numbers(find("every (.+) along", text)[1])]
        self.whole, axes = self.x.shape[2:], len(self.size)
        larger = [max(n, size) for n, size in zip(self.whole, self.size, strict=True)]
        lowest = self.x.flatten(2).amin(2).reshape(1, -1, *[1] * axes)
        extended = lowest.expand(1, -1, *larger).clone()
        extended[(..., *map(slice, self.whole))] = self.x
        starts = []
        for n, size, step in zip(larger, self.size, steps, strict=True):
            starts.append([*range(0, n - size, step), n - size])
        self.places = [tuple(slice(at, at + n) for at, n in zip(s, self.size, strict=True)) for s in product(*starts)]
        self.larger, self.x = larger, torch.cat([extended[(..., *place)] for place in self.places])

    def program(self, text):
        self.answer = self.network(self.x)

    def join(self, text):
        middles, deviations = (numbers(find(f"{name} ((?:[\\d.]+(?: x )?)+)", text)[1]) for name in ("with m", "and s"))
        weight = torch.ones(())
        for n, middle, deviation in zip(self.size, middles, deviations, strict=True):
            weight = weight[..., None] * torch.exp(-(((torch.arange(n) - middle) / deviation) ** 2) / 2)
        weight = weight.clamp(min=numbers(find("at least (.+?)\\. ", text)[1])[0])
        total, share = torch.zeros(self.answer.shape[1], *self.larger), torch.zeros(*self.larger)
        for place, scores in zip(self.places, self.answer, strict=True):
            total[(..., *place)] += scores * weight
            share[place] += weight
        self.answer = (total / share)[(..., *map(slice, self.whole))][None]

    def grid(self, text):
        if mode := find(r"interpolate \((\w+)\)", text):
            self.answer = interpolate(self.answer, tuple(self.own), mode=mode[1])
        self.answer = self.answer[0].argmax(0).numpy()
        if "axes" in text:
            turned = orientations.io_orientation(self.file.affine)
            back = orientations.ornt_transform(orientations.axcodes2ornt("RAS"), turned)
            self.answer = orientations.apply_orientation(self.answer.T, back)


def network(shape, outputs):
    """A layer of two classes for pixels and voxels."""
    torch.manual_seed(0)
    return [nn.Conv2d, nn.Conv3d][len(shape) - 3](shape[0], outputs, 3, padding=1)


def linear(shape, outputs):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), outputs))


def draw(rng, shape, kind):
    """A noisy image with a light box, and its mask."""
    mask = np.zeros(shape, np.uint8)
    mask[tuple(slice(n // 4, n // 2 + 1) for n in shape)] = 1
    values = (rng.normal(60, 20, shape) + 120 * mask).clip(0, 255)
    if kind == "I;16":
        return Image.fromarray((values * 200).astype(np.uint16)), Image.fromarray(mask)
    color = Image.fromarray((values[..., None] * (1, 0.8, 0.6)).astype(np.uint8)).convert("RGBA")
    color.putalpha(Image.fromarray(255 - 100 * mask))
    return color.convert(kind), Image.fromarray(mask)


def write_masks(folder, kind):
    rng = np.random.default_rng(0)
    for client, number in product("ab", range(5)):
        for part, image in zip(("images", "masks"), draw(rng, (28 + 2 * number, 40 - number), kind), strict=True):
            (folder / client / part).mkdir(parents=True, exist_ok=True)
            image.save(folder / client / part / f"{number}.png")
    return sorted((folder / "a" / "images").iterdir()), {"data": str(folder), "model": network}


def write_volumes(folder, _):
    """Volumes of several sizes and spacings, whose axes point in several directions."""
    rng, straight = np.random.default_rng(0), orientations.axcodes2ornt("RAS")
    for client, (number, code) in product("ab", enumerate(("RAS", "LPI", "SRA", "PIL", "ARS"))):
        mask = np.zeros((10 + number, 12, 9 + number), np.int16)
        mask[3:6, 3:7, 2:5] = 1
        for part, values in (
            ("images", (rng.normal(60, 20, mask.shape) + 120 * mask).astype(np.int16)),
            ("masks", mask),
        ):
            (folder / client / part).mkdir(parents=True, exist_ok=True)
            image = nibabel.Nifti1Image(values, np.diag([1.0, 1.2, 3.9 if number % 2 else 2.0, 1]))
            image = image.as_reoriented(orientations.ornt_transform(straight, orientations.axcodes2ornt(code)))
            image.to_filename(folder / client / part / f"{number}.nii.gz")
    return sorted((folder / "a" / "images").iterdir()), {"data": str(folder), "model": network}


def write_pictures(folder, kind):
    rng = np.random.default_rng(0)
    for client, number in product("ab", range(16)):
        picture, _ = draw(rng, (20 + number % 3, 24), kind)
        (folder / client / "xy"[number % 2]).mkdir(parents=True, exist_ok=True)
        picture = picture if number % 2 else picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        picture.save(folder / client / "xy"[number % 2] / f"p{number // 2}_{number}.png")
    return sorted((folder / "a").rglob("*.png")), {"data": str(folder), "groups": "{group}_*.png"}


def write_table(_, target):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"age": rng.normal(50, 9, 40).round(1), "drug": rng.choice(["no", "low", "high"], 40)})
    frame["smokes"], frame["days"] = rng.choice([True, False], 40), 3 * frame["age"] + rng.normal(size=40)
    frame["died"] = (np.arange(40) % 3 > 0).astype(int)
    frame.loc[3:5, "age"] = None
    kept = frame.drop(columns=[name for name in ("days", "died") if name not in target])
    return frame.to_dict("records"), {"data": {"a": kept, "b": kept.sample(frac=1, random_state=0)}, "target": target}


def write_signals(folder, _):
    rng = np.random.default_rng(0)
    for client, number in product("ab", range(8)):
        place = folder / client / "xy"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        wfdb.wrsamp(
            f"{number}", fs=50, units=["mV", "mV"], sig_name=["II", "V1"], fmt=["32", "32"], write_dir=str(place),
            p_signal=rng.normal(size=(30, 2)).round(3),
        )  # fmt: skip
    return sorted((folder / "a").rglob("*.hea")), {"data": str(folder)}


def write_arrays(_, shape):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, *shape)).astype(np.float32), rng.integers(0, 2, (16, 3))
    return list(x), {"data": dict.fromkeys("ab", (x, y, x, y)), "task": "multilabel"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "given", "options"),
    [
        (write_masks, "L", {"image_size": 24}),
        (write_masks, "RGB", {"patch": "16"}),
        (write_masks, "RGBA", {"image_size": 24, "patch": "16,8", "normalize": "imagenet"}),
        (write_masks, "I;16", {"image_size": 24, "patch": "16"}),
        (write_masks, "L", {"patch": "40", "normalize": "client"}),
        (write_volumes, None, {"image_size": 12}),
        (write_volumes, None, {"image_size": 10, "patch": "6"}),
        (write_volumes, None, {"patch": "6,8,4"}),
        (write_volumes, None, {"patch": "8", "spacing": "1,1.5,2", "window": "0,200"}),
        (write_pictures, "RGBA", {"image_size": 16, "normalize": "client"}),
        (write_pictures, "L", {"image_size": 30}),
        (write_pictures, "I;16", {"image_size": 16}),
        (write_table, "days", {"task": "regression"}),
        (write_table, "days, died", {"task": "survival", "batch_size": 16}),
        (write_table, "died", {}),
        (write_signals, None, {}),
        (write_arrays, (3, 8, 8), {}),
        (write_arrays, (5,), {}),
    ],
    ids=lambda each: each.__name__ if callable(each) else str(each),
)
def test_cards_followed_by_the_word_give_the_predictions(write, given, options, tmp_path, cli):
    samples, source = write(tmp_path / "data", given)
    settings = {"methods": "fedavg", "model": linear, "rounds": 1, "lr": 0.05, "batch_size": 4, "engine": "sequential"}
    result = fedshift.compare(**settings | source | options, out=tmp_path / "run", progress=False)
    client = "a" if "target" in source or options.get("normalize") == "client" else None
    if client:
        with pytest.raises(UsageError, match=r"the global model needs a client's scale: name a client \(client\)"):
            result.export(tmp_path / "none", onnx=False)
    model = fedshift.load(result.export(tmp_path / "model", client=client, onnx=False))
    card = (model.directory / "README.md").read_text()
    assert write is write_table or "as the run recorded" in card
    assert ("| patients |" in card) == ("groups" in source)
    if model.task != "segmentation":
        for sample in samples:
            assert torch.allclose(Reader(model.directory, sample).answer[0], model(sample), atol=1e-5)
        return
    assert cli("predict", model.directory, *samples, "--out", tmp_path / "out").code == 0
    for file, mask in zip(samples, model.predict(samples), strict=True):
        assert 0 < mask.sum() < mask.numel()
        assert (Reader(model.directory, file).answer == mask.numpy()).mean() > 0.999  # splines in another order
        assert np.array_equal(result.predict("fedavg", client, file), mask)
        if write is write_volumes:
            written, image = nibabel.load(tmp_path / "out" / file.name), nibabel.load(file)
            assert (written.shape, written.affine.tolist()) == (image.shape, image.affine.tolist())
            assert np.array_equal(written.dataobj, mask)
            continue
        with Image.open(tmp_path / "out" / file.name) as written, Image.open(file) as image:
            assert np.array_equal(written, mask)
            assert np.array_equal(model.predict(image), mask)
            assert given != "RGB" or np.array_equal(model.predict(np.array(image)), mask)
