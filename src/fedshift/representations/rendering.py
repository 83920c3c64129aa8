"""Output of ``fedshift features``: tables of similarities and distances, mean (std) over seeds, and notes on gaps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import pandas as pd
from rich.console import RenderableType

from ..analysis.statistics import mean_and_std
from ..report.formatting import TextTable, explain_spread, format_mean, make_table, to_terminal, write_table
from .comparison import DISTANCES, RepresentationComparison

PAIRS = ("client-client", "server-client")


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
    plain = [method for method, drawn in found.drawn.items() if drawn.maps and not drawn.server]
    if pooled:
        yield f"All data are pooled, so there are no clients' models: {', '.join(pooled)}."
    broken = [
        f"{method} with seed {seed}"
        for method, several in found.similarity.items()
        for seed, own in zip(found.seeds, several, strict=True)
        if method not in pooled and math.isnan(own.server_client)
    ]
    if broken:
        yield f"Feature maps are not finite, so similarities are left out: {', '.join(broken)}."
    if plain:
        yield f"No BatchNorm layer with running statistics: {', '.join(plain)}."


def write_tables(found: RepresentationComparison, directory: Path) -> list[Path]:
    """Write both tables as Markdown, LaTeX and CSV (a line per seed) to ``directory``; return the paths."""
    paths = write_table(directory, "similarity", similarity_table(found), similarity_frame(found))
    if len(found.distances):
        frame = found.distances.set_index(["method", "seed", "layer"])
        paths += write_table(directory, "batchnorm", distance_table(found), frame)
    return paths


def similarity_frame(found: RepresentationComparison) -> pd.DataFrame:
    """Return a row for each method and seed: ``layer``, ``client_client`` and ``server_client``."""
    rows = [
        (method, seed, found.layers[method], own.client_client, own.server_client)
        for method, several in found.similarity.items()
        for seed, own in zip(found.seeds, several, strict=True)
    ]
    columns = ["method", "seed", "layer", "client_client", "server_client"]
    return pd.DataFrame(rows, columns=columns).set_index(["method", "seed"])


def similarity_table(found: RepresentationComparison) -> TextTable:
    """Return a row for each method."""
    rows = [
        (method, *(_format_cell(getattr(own, pair.replace("-", "_")) for own in several) for pair in PAIRS))
        for method, several in found.similarity.items()
    ]
    return _make_table((f"maps of {_list_layers(found)}", *PAIRS), rows, found)


def distance_table(found: RepresentationComparison) -> TextTable:
    """Return a row for each method and BatchNorm layer."""
    groups = found.distances.groupby(["method", "layer"], sort=False)
    rows = [
        (" ".join(map(str, names)), *(_format_cell(rows[column]) for column in DISTANCES)) for names, rows in groups
    ]
    columns = (f"{whose}: {what}" for whose in ("clients", "server") for what in ("means", "variances"))
    return _make_table(("running statistics of", *columns), rows, found)


def _list_layers(found: RepresentationComparison) -> str:
    return ", ".join(dict.fromkeys(found.layers.values()))


def _format_cell(values: Iterable[float]) -> str:
    return format_mean(*mean_and_std(values), ".3f")


def _make_table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]], found: RepresentationComparison) -> TextTable:
    return make_table(header, rows, note=explain_spread(len(found.seeds)))
