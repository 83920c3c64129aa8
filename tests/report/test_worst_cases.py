"""The example that draws the test images of a run that were outlined worst."""

import runpy
from pathlib import Path

import pytest

import fedshift
from fedshift.results.cases import read_cases

SCRIPT = Path(__file__).parents[2] / "examples" / "worst_cases.py"


@pytest.mark.slow
def test_the_worst_cases_are_first_and_have_the_dice_that_the_run_counted(tmp_path, undrawn):
    run = tmp_path / "run"
    fedshift.compare(
        data="nuclei", domains=("fluor_696", "stain_violet"), methods="single,fedbn", model="unet-small(width=2)",
        rounds=2, batch_size=4, lr=0.3, out=run,
    )  # fmt: skip
    script = runpy.run_path(str(SCRIPT))
    cases = script["predict"](run, ["single"])
    records = read_cases(run / "trials" / "single-seed0").records
    counted = []
    for client in ("fluor_696", "stain_violet"):
        counts = {name: values[:, 1] for name, values in records[client, "personal"].items() if values.ndim == 2}
        both = counts["support"] + counts["predicted"]
        counted += [
            (2 * hits / total, f"{client} {number}")
            for number, (hits, total) in enumerate(zip(counts["hits"], both, strict=True))
            if total
        ]
    assert [(pytest.approx(dice), name) for dice, name in sorted(counted)] == [case[:2] for case in cases]
    assert script["draw"](run, []).read_bytes().startswith(b"\x89PNG")
