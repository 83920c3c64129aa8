"""How often ``fedshift diagnose`` names each shift on federations made with one known shift, or with none.

Vectors: clusters of 2 to 6 classes in 5 to 29 dimensions, 3 to 6 clients of 100 to 1000 samples. Images: scikit-learn's
1,797 digits of 8 x 8 pixels, 3 to 5 clients. The shift is of one client, or over all of them:

* label skew: class shares of each client from a Dirichlet of 0.3, sizes equal; quantity skew: sizes from a Dirichlet;
* feature shift: one client's vectors moved by one standard deviation, stretched, or noisy; its images inverted, of low
  contrast, or noisy;
* concept shift: one client has classes 0 and 1, 2 and 3, ... for each other.

The diagonal should be all seeds, the rest none: "any" counts federations in which something is named that was not made.

A second table asks whether looks pass for labels. Three of four clients have a look each (negative, gray, gamma, tint,
shear, mirrored, upside down, blurred), or two of them are negatives, which is just below what counts as not
overlapping; each at none, a tenth, a third or all of its strength. What a class is called is the same everywhere, or
client 1 has classes 0 and 1, 2 and 3, ... for each other.

Rows are by the largest AUC, below that from which nothing is judged, of a client against the others within a class.
Concept shift may be named in at most 5 % of the federations of the first kind, and should be in most of the second
where looks differ little and neighbors tell classes: the more looks differ, the more they may explain. Photographs are
CIFAR-10, if it is where ``FEDSHIFT_DATA`` says.

Run ``OMP_NUM_THREADS=1 python benchmarks/diagnose.py [SEEDS]``: about five minutes for 10 seeds on one core.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable

import numpy as np
from scipy.ndimage import uniform_filter
from sklearn.datasets import load_digits

from fedshift.config.spec import DataSpec
from fedshift.data.assembly import federation
from fedshift.data.datasets.single_datasets import cifar10
from fedshift.data.federation import Federation
from fedshift.data.sources import data_root
from fedshift.diagnosis import diagnose
from fedshift.diagnosis.concept_shift import SEPARABLE
from fedshift.utils.errors import FedshiftError

KINDS = ("label skew", "feature shift", "quantity skew", "concept shift")
PERMUTATIONS = 199
Part = tuple[np.ndarray, np.ndarray]


def vectors(made: str, rng: np.random.Generator) -> list[Part]:
    clients, classes, width, size = (int(rng.integers(*span)) for span in ((3, 7), (2, 7), (5, 30), (100, 1001)))
    centers = rng.normal(size=(classes, width)) * rng.uniform(1.5, 4) / np.sqrt(2 * width)
    sizes = [size] * clients
    if made == "quantity skew":
        sizes = [max(40, int(share * size * clients)) for share in rng.dirichlet(np.full(clients, 0.5))]
    parts = []
    for own in sizes:
        shares = rng.dirichlet(np.full(classes, 0.3)) if made == "label skew" else np.full(classes, 1 / classes)
        y = rng.choice(classes, own, p=shares)
        parts.append((centers[y] + rng.normal(size=(own, width)), y))
    x, y = parts[0]
    if made == "feature shift":
        step = rng.normal(size=width)
        changes = (x + step / np.linalg.norm(step), 1.5 * x, x + 0.8 * rng.normal(size=x.shape))
        parts[0] = (changes[rng.integers(3)], y)
    if made == "concept shift":
        parts[0] = (x, _swapped(y, classes))
    return parts


def images(made: str, rng: np.random.Generator) -> list[Part]:
    source = load_digits()
    order, clients = rng.permutation(len(source.target)), int(rng.integers(3, 6))
    if made == "label skew":
        rows = _dirichlet(source.target[order], clients, rng)
        rows = [order[own] for own in rows]
    elif made == "quantity skew":
        shares = np.maximum(rng.dirichlet(np.full(clients, 0.7)), 0.03)
        rows = np.split(order, (np.cumsum(shares / shares.sum())[:-1] * len(order)).astype(int))
    else:
        rows = np.array_split(order[: len(order) // clients * clients], clients)
    parts = [(source.images[own] / 16, source.target[own]) for own in rows]
    x, y = parts[0]
    if made == "feature shift":
        changes = (1 - x, 0.3 + 0.4 * x, x + 0.25 * rng.normal(size=x.shape))
        parts[0] = (changes[rng.integers(3)], y)
    if made == "concept shift":
        parts[0] = (x, _swapped(y, 10))
    return [((255 * x.clip(0, 1)).round().astype(int), y) for x, y in parts]


def _swapped(y: np.ndarray, classes: int) -> np.ndarray:
    return np.where(y < classes // 2 * 2, y ^ 1, y)


def _dirichlet(y: np.ndarray, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Rows of equally many samples for each client, class shares from a Dirichlet of 0.3 as far as samples last."""
    left = {label: list(np.flatnonzero(y == label)) for label in np.unique(y)}
    rows = []
    for _ in range(clients):
        wanted = rng.multinomial(250, rng.dirichlet(np.full(len(left), 0.3)))
        rows.append(
            [left[label].pop() for label, count in enumerate(wanted) for _ in range(min(count, len(left[label])))]
        )
    return [rng.permutation(own)[: min(map(len, rows))] for own in rows]


def made(kind: str, make: object, seed: int) -> Federation:
    """A federation of that kind; test data play no part."""
    parts = make(kind, np.random.default_rng([seed, len(kind)]))  # type: ignore[operator]
    classes = 1 + max(int(y.max()) for _, y in parts)
    return federation({f"client{i}": (x, y, x[:1], y[:1]) for i, (x, y) in enumerate(parts)}, classes=classes)


LOOKS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "negative": lambda x: 1 - x,
    "gray": lambda x: np.broadcast_to(x.mean(axis=3, keepdims=True), x.shape),
    "gamma": lambda x: x**2.5,
    "tint": lambda x: x * np.linspace(1, 0.4, x.shape[3]),
    "shear": lambda x: np.stack([np.roll(x[:, row], row // 4, axis=1) for row in range(x.shape[1])], axis=1),
    "mirrored": lambda x: x[:, :, ::-1],
    "upside down": lambda x: x[:, ::-1, ::-1],
    "blurred": lambda x: uniform_filter(x, (0, 3, 3, 0)),
}
STRENGTHS, BANDS, SAMPLES = (0.0, 0.1, 0.3, 1.0), (0.0, 0.6, 0.7, 0.8, SEPARABLE), 250


def looking(pixels: np.ndarray, labels: np.ndarray, strength: float, swap: bool, seed: int) -> Federation:
    """Four clients whose looks differ, ``pixels`` ``[N, H, W, C]`` from 0 to 1; with ``swap`` the labels of one too."""
    rng = np.random.default_rng([seed, round(100 * strength)])
    alike = [None, "negative", None, "negative"]
    looks = alike if seed % 2 else [None, *rng.choice(list(LOOKS), 3, replace=False)]
    dealt = rng.permutation(len(labels))[: 4 * SAMPLES].reshape(4, -1)
    parts = {}
    for place, (look, rows) in enumerate(zip(looks, dealt, strict=True)):
        x, y = pixels[rows], labels[rows]
        x = x if look is None else (1 - strength) * x + strength * LOOKS[look](x)
        x = (255 * x.clip(0, 1)).round().astype(int)
        y = _swapped(y, int(labels.max()) + 1) if swap and place == 1 else y
        parts[f"client{place}"] = (x, y, x[:1], y[:1])
    return federation(parts, classes=int(labels.max()) + 1)


def photographs() -> tuple[np.ndarray, np.ndarray] | None:
    """Pixels and labels of CIFAR-10's training images, None where it is not at hand."""
    try:
        train = cifar10(data_root(DataSpec())).clients[0].train
    except FedshiftError:
        return None
    return train.x.permute(0, 2, 3, 1).numpy() / 255, train.y.numpy()


def judge_looks(name: str, pixels: np.ndarray, labels: np.ndarray, seeds: int) -> None:
    """Print how often concept shift is named where only looks differ, and where labels do too, by how far looks do."""
    counts: dict[int, list[tuple[bool, bool]]] = defaultdict(list)
    for seed in range(seeds):
        for strength in STRENGTHS:
            alike, other = (
                diagnose(looking(pixels, labels, strength, swap, seed), seed=seed, permutations=99)
                for swap in (False, True)
            )
            aucs = [auc for auc in alike["feature shift"].evidence.clients if auc is not None and auc < SEPARABLE]
            band = int(np.searchsorted(BANDS, max(aucs, default=SEPARABLE), side="right")) - 1
            counts[band].append(("concept shift" in alike.named, "concept shift" in other.named))
    for band, found in sorted(counts.items()):
        high = f"{BANDS[band]:.2f} to {BANDS[band + 1]:.2f}" if band + 1 < len(BANDS) else "not judged"
        false, true = (sum(each) for each in zip(*found, strict=True))
        print(f"| {name} | {high} | {len(found)} | {false} | {true} |", flush=True)


def main(seeds: int) -> None:
    print(f"{seeds} seeds, {PERMUTATIONS} permutations; named, of {seeds}\n")
    print("| data | made with | " + " | ".join(KINDS) + " | any false |")
    print("|---|---|" + "---:|" * (len(KINDS) + 1))
    for make in (vectors, images):
        for kind in ("none", *KINDS):
            named = [
                diagnose(made(kind, make, seed), seed=seed, permutations=PERMUTATIONS).named for seed in range(seeds)
            ]
            counts = [sum(each in found for found in named) for each in KINDS]
            false = sum(bool(set(found) - {kind}) for found in named)
            print(f"| {make.__name__} | {kind} | " + " | ".join(map(str, counts)) + f" | {false} |", flush=True)
    print("\n| data | AUC of appearance | federations | concept shift named: equal labels | of client 1 swapped |")
    print("|---|---|---:|---:|---:|")
    source = load_digits()
    judge_looks("digits", source.images[..., None] / 16, source.target, seeds)
    if (found := photographs()) is not None:
        judge_looks("photographs", *found, seeds)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
