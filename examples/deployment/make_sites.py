"""Write data of three hospitals, to try docs/deployment.md: images, cells with masks, and a table of patients.

Images are the embedded digits, cells the embedded pictures of nuclei, and patients are drawn at random.
"""

from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image

import fedshift

SITES = {"north": ("pen", "fluor_696"), "south": ("photo", "fluor_256"), "west": ("faded", "bright_1024")}


def write_image(pixels: np.ndarray, path: Path) -> None:
    """Write ``pixels``, uint8 of shape (height, width) or (height, width, 3), to a new file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


digits, nuclei, draw = fedshift.digits(), fedshift.nuclei(), np.random.default_rng(0)
for site, (writer, source) in SITES.items():
    for part, samples in digits.client(writer).splits.items():
        for number, (image, label) in enumerate(zip(samples.x, samples.y, strict=True)):
            write_image(image.permute(1, 2, 0).numpy(), Path(site, "images", part, str(int(label)), f"{number:03}.png"))
    for part, samples in nuclei.client(source).splits.items():
        for number, (image, mask) in enumerate(zip(samples.x, samples.y, strict=True)):
            write_image(image.permute(1, 2, 0).numpy(), Path(site, "cells", part, "images", f"{number:03}.png"))
            write_image(mask.numpy(), Path(site, "cells", part, "masks", f"{number:03}.png"))
    age, dose = draw.integers(20, 90, 300), draw.normal(size=300).round(2)
    ill = age / 30 + dose + draw.normal(size=300) > 2
    table = {"patient": range(300), "age": age, "dose": dose, "outcome": np.where(ill, "ill", "well")}
    pd.DataFrame(table).to_csv(Path(site, "patients.csv"), index=False)
