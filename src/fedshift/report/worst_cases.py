"""Pictures of the test images with the worst results of each method, with the results in words.

Results are those of each client's personal model at the reported round, first seed. Pictures of segmentation have the
true outlines on the left and the predicted ones on the right; pictures of classification show errors by their loss.
"""

from __future__ import annotations

from dataclasses import dataclass

from scipy.special import expit

from ..results.cases import Picture, Records, rank_results
from ..results.schema import RunSummary
from .clinical import name_classes
from .html import encode_strip
from .tables import find_reported_rounds

SIDE = 160
"""Maximum height and width of an image in pixels; a pair of masks is twice as wide."""
LEAST = 64
"""Minimum height in pixels; smaller pictures are enlarged by a whole factor."""


@dataclass(frozen=True, kw_only=True)
class WorstCase:
    """A picture of a ``client``'s sample as a PNG data URL ``url``, its size in pixels, and ``text`` on the result."""

    client: str
    url: str
    width: int
    height: int
    text: str


def list_worst_cases(summary: RunSummary) -> dict[str, list[WorstCase]]:
    """Return pictures of each method's worst results, the worst first, without methods that have none."""
    reported, found = find_reported_rounds(summary), {}
    for method in summary.methods:
        seed = summary.seeds[0]
        if (method, seed) not in reported.index:
            continue
        number = int(reported[method, seed])
        cases, pictures = summary.read_cases(method, seed), summary.read_pictures(method, number)
        if cases is None or cases.round != number or not pictures:
            continue
        found[method] = [_show(summary, picture, cases.records[picture.client, "personal"]) for picture in pictures]
    return found


def _show(summary: RunSummary, picture: Picture, records: Records) -> WorstCase:
    masks, row = "predicted" in records, picture.row
    url, width, height = encode_strip(picture.image[None], 2 * SIDE if masks else SIDE)
    if masks:
        result = f"Dice {100 * (1 - rank_results(records)[row]):.1f} %"
    elif "right" in records:
        names, chosen = [*name_classes(summary), "no class"], int(records["chosen"][row])
        sure = f" ({100 * expit(records['odds'][row, chosen]):.0f} %)" if "odds" in records and chosen >= 0 else ""
        result = f"predicted {names[chosen]}{sure}, true {names[int(records['truth'][row])]}"
    else:
        result = f"loss {float(records['loss'][row]):.3g}"
    scale = -(-LEAST // height)
    text = f"{picture.client} {row}: {result}"
    return WorstCase(client=picture.client, url=url, width=scale * width, height=scale * height, text=text)
