"""The command ``fedshift features``: feature maps and BatchNorm statistics of a run's models."""

from __future__ import annotations

from pathlib import Path

from ..console.printing import Console
from ..console.terminal import make_console, print_line, print_parts, show_loading
from ..utils.files import require_writable
from .run import RunCode, RunData, RunDevice, RunMethods, RunSeeds


def features(
    directory: Path,
    *,
    methods: RunMethods = None,
    seeds: RunSeeds = None,
    clients: str | None = None,
    samples: int = 64,
    layer: str | None = None,
    device: RunDevice = None,
    run_data: RunData = None,
    code: RunCode = None,
    out: Path | None = None,
) -> int:
    """Compare the feature maps and BatchNorm statistics of clients' and the server's models in a run.

    Each client trains for one more round, and its model before aggregation is used; the run is not changed.
    Pictures show the first seed.

    Args:
        directory: Directory of a finished run.
        clients: Clients to compare, comma-separated names or patterns such as usps-*; by default the first 24 that
            train.
        samples: Number of test images of each client.
        layer: Name of the convolution whose maps are compared and drawn; by default the last is compared, and all are
            drawn.
        out: Directory for tables and pictures; by default features in the run's directory.

    """
    from ..experiments.restoration import load_spec, resolve_device
    from ..representations import compare_representations
    from ..representations.figures import save_panels
    from ..representations.rendering import render_comparison, write_tables

    console, place = make_console(), out or directory / "features"
    require_writable(place)
    device, notices = resolve_device(load_spec(directory, run_data, code=code or ()), device)
    with show_loading(Console()) as progress:
        found = compare_representations(
            directory, samples=samples, clients=clients, layer=layer, methods=methods, seeds=seeds, device=device,
            run_data=run_data, code=code or (), progress=progress,
        )  # fmt: skip
    print_parts(console, [*render_comparison(found), *(f"note: {notice}" for notice in notices)])
    for file in (*write_tables(found, place), *save_panels(found, place)):
        print_line(console, f"Written: {file}")
    return 0
