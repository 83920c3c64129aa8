"""The command that looks at what models see: ``fedshift features``."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from ..console.terminal import make_console, print_line, print_parts, show_loading


def features(
    directory: Path,
    *,
    methods: str | None = None,
    seeds: int | None = None,
    clients: str | None = None,
    samples: int = 64,
    layer: str | None = None,
    device: str | None = None,
    out: Path | None = None,
) -> int:
    """Compare what clients' and the server's models see: feature maps and BatchNorm's statistics of a run.

    Each client is trained one round further, and its model is taken before aggregation; the run is left as it is.

    Args:
        directory: The directory of a run that is finished.
        methods: Which of its methods, comma-separated, by name, as patterns such as fedbn*, or as it was given them;
            without it all.
        seeds: Number of its seeds, the first ones; without it all. Pictures show the first.
        clients: Clients to look at, comma-separated, also as patterns such as usps-*; without it the first 24 that
            train.
        samples: Test images of each client.
        layer: Name of the convolution whose maps are compared and drawn; without it the last is compared, and all are
            drawn.
        device: Torch device to compute on; without it the run's, or cpu where this machine has none such.
        out: Directory for tables and pictures; without it features in the run's directory.

    """
    from ..experiments.restoration import load_spec, resolve_device
    from ..representations import compare_representations
    from ..representations.figures import save_panels
    from ..representations.rendering import render_comparison, write_tables

    console = make_console()
    device, notices = resolve_device(load_spec(directory), device)
    with show_loading(Console()) as progress:
        found = compare_representations(
            directory, samples=samples, clients=clients, layer=layer, methods=methods, seeds=seeds, device=device,
            progress=progress,
        )  # fmt: skip
    print_parts(console, [*render_comparison(found), *(f"note: {notice}" for notice in notices)])
    place = out or directory / "features"
    for file in (*write_tables(found, place), *save_panels(found, place)):
        print_line(console, f"Written: {file}")
    return 0
