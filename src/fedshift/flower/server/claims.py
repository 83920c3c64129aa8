"""Numbers of training samples that sites claim: they are weights in every average, and nobody else can check them.

The coordinator bounds the weights (``serve --max-share``, :mod:`fedshift.core.shares`) and reports claims that are
bounded or out of all proportion to the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median_high

from ...core.shares import bound_shares

MAX_SHARE = 0.5
"""Maximum weight of one site among three or more, so that no site has a majority."""
IMPLAUSIBLE = 100.0
"""Ratio of a number of samples to the others' median above which it is reported."""


def judge_claims(samples: Mapping[str, int], max_share: float) -> Iterator[str]:
    """Yield a line of text for each site whose number of training samples is bounded or implausible.

    ``samples``: claimed number of training samples of each site that trains.
    """
    total, counted = sum(samples.values()), bound_shares(list(map(float, samples.values())), max_share)
    for (name, claimed), counts in zip(samples.items(), counted, strict=True):
        others = [number for other, number in samples.items() if other != name]
        if not others:
            continue
        usual = median_high(others)
        implausible, bounded = claimed > IMPLAUSIBLE * usual, round(counts) < claimed
        if implausible or bounded:
            text = f"{name} claims {claimed} training samples, {claimed / total:.4%} of all; the others' median is "
            text += str(usual)
            text += f". In averages weighted by samples, it counts as {counts:.6g} (--max-share)" if bounded else ""
            yield f"{text}. Ask the site whether that is correct" if implausible else text
