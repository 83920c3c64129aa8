"""Plans of voxels and patches: against nnU-Net's rule on cases, and from counts of sites that were written apart."""

import json
import math

import numpy as np
import pytest
from PIL import Image

from fedshift.config.grid_plan import Fingerprint, add_fingerprints, format_plan, make_plan, read_plan
from fedshift.config.spec import DataSpec
from fedshift.utils.errors import UsageError

RNG = np.random.default_rng(3)


def draw_cases(kind, count=9):
    """Spacings and sizes of cases, columns first, of whole millimeters from end to end."""
    steps, sizes = RNG.choice([0.5, 1.0, 1.5, 2.0], (count, 3)), RNG.integers(20, 90, (count, 3)) * 2
    if kind == "coarse slices":  # 0.5 x 0.5 x 3 to 5 mm
        steps, sizes = np.tile([0.5, 0.5, 0], (count, 1)), sizes + np.array([400, 400, -20])
        steps[:, 2], sizes[:, 2] = RNG.choice([3.0, 4.0, 5.0], count), sizes[:, 2] // 4 + 1
    return steps, sizes


def plan_cases(steps, sizes, most):
    """nnU-Net's rule on the cases themselves, in numpy."""
    target, voxels = np.median(steps, axis=0), np.median(sizes, axis=0)
    worst = int(np.argmax(target))
    others = np.delete(np.arange(3), worst)
    if target[worst] > 3 * target[others].max() and 3 * voxels[worst] < voxels[others].min():
        target[worst] = max(np.percentile(steps[:, worst], 10), target[others].max())
    shape = np.round(np.median(steps * sizes / target, axis=0))
    aspect = 1 / target
    patch = np.minimum(np.round(aspect * (256**3 / np.prod(aspect)) ** (1 / 3)), shape)
    patch = np.ceil(patch / 8) * 8
    while patch.prod() > most:
        relative = np.where(patch > 8, patch / shape, -1)
        patch[np.flatnonzero(relative == relative.max())[-1]] -= 8
    return tuple(target), tuple(patch.astype(int))


@pytest.mark.parametrize("kind", ["alike", "coarse slices"])
@pytest.mark.parametrize("most", [30**3, 96**3])
def test_the_plan_of_summed_counts_is_nnunets_rule_on_all_cases(kind, most):
    steps, sizes = draw_cases(kind)
    sites = {
        name: Fingerprint.count(sizes[part].tolist(), steps[part].tolist(), voxels)
        for name, part, voxels in (("a", slice(0, 2), (9, 1)), ("b", slice(2, 9), (5, 2, 3)))
    }
    assert (made := make_plan(sites, most)) == make_plan(
        {"all": Fingerprint.count(sizes.tolist(), steps.tolist(), (14, 3, 3))}, most
    )
    assert add_fingerprints(sites).voxels == (14, 3, 3)
    spacing, patch = plan_cases(steps, sizes, most)
    assert made.spacing == pytest.approx(spacing, rel=1e-3)
    assert made.patch == patch
    assert math.prod(made.patch) <= most


def test_sites_write_counts_apart_that_give_the_plan_of_all_of_them(cli, tmp_path):
    for client, size in (("a", 40), ("b", 70)):
        for number in range(5):
            for folder in ("images", "masks"):
                place = tmp_path / "eyes" / client / folder
                place.mkdir(parents=True, exist_ok=True)
                pixels = RNG.integers(0, 2 if folder == "masks" else 256, (size + 2 * number, size), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"case-{number}.png")
    files = [tmp_path / f"{client}.json" for client in "ab"]
    for client, file in zip("ab", files, strict=True):
        assert cli("plan", tmp_path / "eyes" / client, "--out", file).code == 0
        assert "case" not in file.read_text().replace('"cases"', "")
    assert "--patch 64,64" in cli("plan", tmp_path / "eyes", "-o", tmp_path / "all.json").out
    cli("plan", *files, "-o", tmp_path / "merged.json")
    assert (tmp_path / "merged.json").read_text() == (tmp_path / "all.json").read_text()
    assert read_plan(files[0])[1]["a"].cases == 4  # without the test image
    assert DataSpec(plan=str(tmp_path / "all.json")) == DataSpec(patch="64,64")
    for arguments, message in (
        (("plan", *files, files[0]), "site 'a' is in"),
        (("plan", "digits"), "digits has no images with masks"),
        (("data", "check", "digits", "--plan", files[0], "--patch", "8"), "leave --patch 8 out"),
    ):
        assert message in cli(*arguments).err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda kept: kept.pop("patch"), "lacks 'patch'"),
        (lambda kept: kept["sites"]["a"].update(cases=4), "do not add up to 4"),
        (lambda kept: kept["sites"]["a"]["spacings"][0].update(nan=1), "do not add up"),
        (lambda kept: kept["sites"]["a"].update(extents=[]), "lengths that are not|other axes"),
        (lambda kept: kept.update({"fedshift plan": 2}), "has format 2"),
        (lambda kept: kept["sites"].update({"\x1b[2J": kept["sites"]["a"]}), "names of sites that cannot be shown"),
    ],
)
def test_other_files_are_no_plans(tmp_path, change, message):
    site = Fingerprint.count([[8, 8, 8]], [[1.0, 1.0, 1.0]], [1])
    file = tmp_path / "plan.json"
    file.write_text(format_plan({"a": site}, make_plan({"a": site})))
    assert read_plan(file) == ({"spacing": "1,1,1", "patch": "8,8,8"}, {"a": site})
    kept = json.loads(file.read_text())
    change(kept)
    file.write_text(json.dumps(kept))
    with pytest.raises(UsageError, match=message):
        read_plan(file)
