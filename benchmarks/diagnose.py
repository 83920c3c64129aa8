"""How often ``fedshift diagnose`` names each shift on federations made with one known shift, or with none.

Vectors: clusters of 2 to 6 classes in 5 to 29 dimensions, 3 to 6 clients of 100 to 1000 samples. Images: scikit-learn's
1,797 digits of 8 x 8 pixels, 3 to 5 clients. The shift is of one client, or over all of them:

* label skew: class shares of each client from a Dirichlet of 0.3, sizes equal; quantity skew: sizes from a Dirichlet;
* feature shift: one client's vectors moved by one standard deviation, stretched, or noisy; its images inverted, of low
  contrast, or noisy;
* concept shift: one client has classes 0 and 1, 2 and 3, ... for each other.

The diagonal should be all seeds, the rest none: "any" counts federations in which something is named that was not made.

Run ``OMP_NUM_THREADS=1 python benchmarks/diagnose.py [SEEDS]``: about five minutes for 20 seeds on one core.
"""

from __future__ import annotations

import sys

import numpy as np
from sklearn.datasets import load_digits

from fedshift.data.federation import Federation, federation
from fedshift.diagnose import diagnose

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


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
