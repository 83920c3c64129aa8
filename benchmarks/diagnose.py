"""How often ``fedshift diagnose`` names a shift where patients are dealt at random, and where there is a real one.

Each study has 4 sites, each with 20 patients of 20 color images of 8 x 8 pixels, of two classes. A patient has a color
and a picture of their own, much stronger than what differs between the images of one patient. Made are:

* nothing: patients are dealt at random, so that each named shift is false;
* label skew: from 20 to 80 % of patients have class 1;
* feature shift: one site's images are darker, by one or two standard deviations of the patients' brightness;
* quantity skew: one site has a quarter of the patients.

A shift that was not made may be named in 5 % of the studies. Pairs are false where two sites do not differ, and named.

Run ``OMP_NUM_THREADS=1 python benchmarks/diagnose.py [STUDIES]``: about five minutes for 100 studies on one core.
"""

from __future__ import annotations

import sys

import numpy as np

from fedshift.config.spec import DataSpec
from fedshift.data.federation import Federation
from fedshift.data.sources import load_source
from fedshift.diagnosis.shifts import SHIFTS, diagnose

SITES, PATIENTS, IMAGES = 4, 20, 20
MADE = ("nothing", "label skew", "feature shift of 1", "feature shift of 2", "quantity skew")


def make_study(made: str, seed: int) -> Federation:
    """Return sites that differ as ``made`` says, a row of the module's list, with patients as groups."""
    rng, clients = np.random.default_rng([seed, 53]), {}
    for site in range(SITES):
        count = PATIENTS // 4 if site == 0 and made == "quantity skew" else PATIENTS
        share = 0.2 + 0.2 * site if made == "label skew" else 0.5
        y = (rng.random((count, 1)) < share).repeat(IMAGES, axis=1).astype(int)
        color, picture = rng.normal(size=(count, 1, 1, 1, 3)), rng.normal(size=(count, 1, 8, 8, 1))
        noise = rng.normal(size=(count, IMAGES, 8, 8, 3))
        x = 128 + 20 * color + 10 * picture + 5 * noise + 20 * y[..., None, None, None]
        if site == 0 and made.startswith("feature shift"):
            x -= 20 * float(made[-1]) / np.sqrt(3)  # the deviation of a patient's mean color
        x, patient = x.clip(0, 255).reshape(-1, 8, 8, 3).astype(np.uint8), np.repeat(np.arange(count), IMAGES)
        test = {"x_test": x[:1], "y_test": y.ravel()[:1], "patient_test": np.array([count])}
        clients[f"site{site}"] = {"x_train": x, "y_train": y.ravel(), "patient_train": patient, **test}
    return load_source(clients, DataSpec(groups="patient", classes=2))


def measure_named(made: str, studies: int, permutations: int = 199) -> dict[str, float]:
    """Return the share of ``studies`` in which each shift is named."""
    found = [diagnose(make_study(made, seed), seed=seed, permutations=permutations) for seed in range(studies)]
    return {shift: float(np.mean([shift in each.named for each in found])) for shift in SHIFTS}


def measure_false_shift(studies: int) -> float:
    """Return the share of ``studies`` with patients dealt at random in which a feature shift is named."""
    return measure_named("nothing", studies, permutations=99)["feature shift"]


def main(studies: int) -> None:
    print(f"{studies} studies of {SITES} sites x {PATIENTS} patients x {IMAGES} images: share in which is named\n")
    print("| made | " + " | ".join(SHIFTS) + " |")
    print("|---|" + "---:|" * len(SHIFTS))
    for made in MADE:
        named = measure_named(made, studies)
        print(f"| {made} | " + " | ".join(f"{share:.2f}" for share in named.values()) + " |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
