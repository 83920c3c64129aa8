"""Seeds as users write them: their number, or themselves, ``3,4,5`` or ``3..5``; ``7,`` is only seed 7."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

ALLOWED = "a number of seeds, 1 or more, or the seeds themselves, each once: 3,4,5 or 3..5, or 7, for a single seed"
PART = re.compile(r"\s*(\d+)\s*(?:\.\.\s*(\d+)\s*)?")


def parse_seeds(given: object) -> tuple[int, ...]:
    """Return the seeds in ``given``, a number of them, a text or a list; raise :class:`ValueError` if it is none."""
    if isinstance(given, str) and given.strip().isdecimal():
        given = int(given)
    if type(given) is int:
        seeds = list(range(given))
    elif isinstance(given, str):
        seeds = [seed for part in given.strip().removesuffix(",").split(",") for seed in _parse_part(part)]
    else:
        several: Iterable[Any] = given if isinstance(given, Iterable) else ()
        seeds = [seed.item() if hasattr(seed, "item") else seed for seed in several]  # of NumPy and torch
    if not seeds or len(set(seeds)) < len(seeds) or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise ValueError(ALLOWED)
    return tuple(seeds)


def write_seeds(seeds: Sequence[int]) -> int | str:
    """Return the shortest form that :func:`parse_seeds` reads as ``seeds``."""
    first, number = seeds[0], len(seeds)
    if list(seeds) == list(range(number)):
        return number
    if number > 2 and list(seeds) == list(range(first, first + number)):
        return f"{first}..{first + number - 1}"
    return ",".join(map(str, seeds)) + "," * (number == 1)


def _parse_part(text: str) -> Iterable[int]:
    found = PART.fullmatch(text)
    if not found:
        raise ValueError(ALLOWED)
    return range(int(found[1]), int(found[2] or found[1]) + 1)
