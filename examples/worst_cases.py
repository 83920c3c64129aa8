"""Draws the test images that a finished run of segmentation outlines worst, with true and predicted outlines.

python examples/worst_cases.py RUN [METHOD ...]

A row is a test image, the one with the lowest Dice first; a column is a method (default: all of the run). Images are
ordered by the mean over these methods. A method predicts with the model of the client (the global one where it has no
other), first seed, at the reported round. Dice is 2 |A and B| / (|A| + |B|), the mean over the classes except the
background that are in the true or the predicted mask; images without any are left out. Of a volume, the slice with the
most voxels of these classes in the true mask is drawn.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

import fedshift
from fedshift.data.patches import slide
from fedshift.data.samples import Samples

SHOWN = 12
TRUE, PREDICTED = "#009e73", "#d55e00"


def compute_dice(true: np.ndarray, predicted: np.ndarray) -> float:
    """Return the mean Dice of the classes in two masks, without places that are ignored (255); NaN: both are empty."""
    true, predicted = true[true != 255], predicted[true != 255]
    classes = np.setdiff1d(np.union1d(true, predicted), [0])
    pairs = [(true == number, predicted == number) for number in classes]
    scores = [2 * (one & other).sum() / (one.sum() + other.sum()) for one, other in pairs]
    return float(np.mean(scores)) if scores else float("nan")


def read_case(samples: Samples, number: int) -> tuple[torch.Tensor, np.ndarray]:
    """Return an image as the network's input ``[1, C, ...]``, and its mask; of a case, without padding."""
    if samples.patches is None:
        return samples.inputs(torch.tensor([number])), samples.y[number].numpy()
    image, true = samples.read_case(number)
    return samples.scale(image), np.where(true[0] < 0, 255, true[0])


def predict(run: str, methods: list[str]) -> list[tuple[float, str, np.ndarray, np.ndarray, dict[str, np.ndarray]]]:
    """Return Dice, name, image ``[C, ...]``, true mask and predicted masks of each test image, lowest Dice first."""
    result, found = fedshift.read_run(run), []
    if not result.experiment.settings.pictures:
        sys.exit(f"{run} is to hold no pictures (--no-pictures), and this would draw some into it")
    for client in result.experiment.data.clients:
        models = {method: result.model(method, client=client.name) for method in methods or result.summary.methods}
        for number in range(len(client.test)):
            file = Path(client.files[int(client.test.rows[number])]).name if client.files else number
            image, true = read_case(client.test, number)
            size = client.test.patches.size if client.test.patches else tuple(true.shape)
            with torch.no_grad():
                masks = {method: slide(model, image, size).argmax(1)[0].numpy() for method, model in models.items()}
            dice = float(np.mean([compute_dice(true, mask) for mask in masks.values()]))
            if not np.isnan(dice):
                found.append((dice, f"{client.name} {file}", image[0].numpy(), true, masks))
    return sorted(found, key=lambda case: case[:2])


def draw(run: str, methods: list[str]) -> Path:
    """Write ``RUN/worst-cases.png``."""
    cases = predict(run, methods)[:SHOWN]
    columns = len(cases[0][-1])
    figure, axes = plt.subplots(len(cases), columns, figsize=(1.9 * columns, 2.0 * len(cases)), squeeze=False)
    for row, (_, name, image, true, masks) in zip(axes, cases, strict=True):
        scores = {method: compute_dice(true, mask) for method, mask in masks.items()}
        shown = (image - image.min()) / (np.ptp(image) or 1)
        if true.ndim == 3:
            level = ((true > 0) & (true != 255)).sum(axis=(1, 2)).argmax()
            shown, true, masks = shown[:, level], true[level], {method: mask[level] for method, mask in masks.items()}
        for place, (method, mask) in zip(row, masks.items(), strict=True):
            colors = shown.transpose(1, 2, 0) if len(shown) == 3 else shown.mean(axis=0)
            place.imshow(colors, cmap="gray", vmin=0, vmax=1)
            for classes, color in ((true % 255, TRUE), (mask, PREDICTED)):
                if classes.any():
                    place.contour(classes, levels=np.unique(classes)[1:] - 0.5, colors=color, linewidths=0.9)
            place.set(xticks=[], yticks=[])
            place.set_title(f"{method}\n{100 * scores[method]:.1f}", fontsize=7)
        row[0].set_ylabel(name, fontsize=7)
    inch = 1 / figure.get_figheight()
    figure.suptitle("Dice (%); green: true, orange: predicted", fontsize=7, y=1 - 0.05 * inch)
    figure.tight_layout(pad=0.4, rect=(0, 0, 1, 1 - 0.2 * inch))
    path = Path(run) / "worst-cases.png"
    figure.savefig(path, dpi=90)
    return path


if __name__ == "__main__":
    print(f"Pictures: {draw(sys.argv[1], sys.argv[2:])}, the worst case first")
