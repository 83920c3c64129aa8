"""The command that looks at what models see: ``fedshift features``."""

from __future__ import annotations

from pathlib import Path

from .launch import wide


def features(
    directory: Path,
    *,
    clients: str | None = None,
    samples: int = 64,
    layer: str | None = None,
    out: Path | None = None,
) -> int:
    """Compare what clients' and the server's models see: feature maps and BatchNorm's statistics of a run.

    Each client is trained one round further, and its model is taken before aggregation; the run is left as it is.

    Parameters
    ----------
    directory
        The directory of a run that is finished.
    clients
        Clients to look at, comma-separated, also as patterns such as usps-*; without it the first 24 that train.
    samples
        Test images of each client.
    layer
        Name of the convolution whose maps are compared and drawn; without it the last is compared, and all are drawn.
    out
        Directory for tables and pictures; without it features in the run's directory.

    """
    from .features import study
    from .features.pictures import save
    from .features.text import render, write

    console = wide()
    with console.status("computing"):
        found = study(directory, samples=samples, clients=clients, layer=layer)
    for part in render(found):
        console.print(part, markup=False, highlight=False, soft_wrap=isinstance(part, str))
    place = out or directory / "features"
    for file in (*write(found, place), *save(found, place)):
        console.print(f"Written: {file}", markup=False, highlight=False, soft_wrap=True)
    return 0
