"""Output of ``fedshift features``: tables of similarities and distances, mean (std) over seeds, and notes on gaps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
from rich.console import RenderableType

from ..analysis.statistics import mean_and_std
from ..report.formatting import TextTable, explain_spread, format_mean, make_table, to_terminal, write_table
from .comparison import DISTANCES, RepresentationComparison


def render_comparison(found: RepresentationComparison) -> Iterator[RenderableType]:
    """Yield sentences and tables, in order."""
    over = f"mean (std) over {len(found.seeds)} seeds" if len(found.seeds) > 1 else "one seed"
    some = f", {len(found.clients)} of {found.of} clients" if len(found.clients) < found.of else ""
    images = f"up to {found.samples} test images of each client"
    yield f"Cosine similarity of the feature maps of {_list_layers(found)}, {images}{some}, {over}"
    yield to_terminal(similarity_table(found))
    if len(found.distances):
        yield (
            "BatchNorm's running statistics, between clients and between the server and a client. Means: distance in "
            "pooled standard deviations; variances: absolute log ratio; mean over channels"
        )
        yield to_terminal(distance_table(found))
    yield from list_notes(found)


def list_notes(found: RepresentationComparison) -> Iterator[str]:
    """Yield a sentence about each gap."""
    pooled = [method for method, drawn in found.drawn.items() if not drawn.maps]
    if pooled:
        yield f"All data are pooled, so there are no clients' models: {', '.join(pooled)}."
    rows = found.similarity
    broken = rows[rows["server_client"].isna() & ~rows["method"].isin(pooled)]
    if len(broken):
        trials = ", ".join(f"{row.method} with seed {row.seed}" for row in broken.itertuples())
        yield f"Feature maps are not finite, so similarities are left out: {trials}."
    plain = [method for method, drawn in found.drawn.items() if drawn.maps and not drawn.statistics]
    if plain:
        yield f"No BatchNorm layer with running statistics: {', '.join(plain)}."


def write_tables(found: RepresentationComparison, directory: Path) -> list[Path]:
    """Write both tables as Markdown, LaTeX and CSV (a line per seed) to ``directory``; return the paths."""
    frame = found.similarity.set_index(["method", "seed"])
    paths = write_table(directory, "similarity", similarity_table(found), frame)
    if len(found.distances):
        frame = found.distances.set_index(["method", "seed", "layer"])
        paths += write_table(directory, "batchnorm", distance_table(found), frame)
    return paths


def similarity_table(found: RepresentationComparison) -> TextTable:
    """Return a row for each method."""
    header = (f"maps of {_list_layers(found)}", "client-client", "server-client")
    return _summarize(found, found.similarity, ["method"], ["client_client", "server_client"], header)


def distance_table(found: RepresentationComparison) -> TextTable:
    """Return a row for each method and BatchNorm layer."""
    columns = (f"{whose}: {what}" for whose in ("clients", "server") for what in ("means", "variances"))
    return _summarize(found, found.distances, ["method", "layer"], DISTANCES, ("running statistics of", *columns))


def _summarize(
    found: RepresentationComparison, frame: pd.DataFrame, keys: list[str], columns: Sequence[str], header: Sequence[str]
) -> TextTable:
    """Return mean (std) over seeds of ``columns``, with a row for each group of ``keys``."""
    rows = [
        (" ".join(map(str, names)), *(format_mean(*mean_and_std(group[column]), ".3f") for column in columns))
        for names, group in frame.groupby(keys, sort=False)
    ]
    return make_table(header, rows, note=explain_spread(len(found.seeds)))


def _list_layers(found: RepresentationComparison) -> str:
    return ", ".join(dict.fromkeys(found.similarity["layer"]))
