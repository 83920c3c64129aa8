"""The command ``fedshift features``: feature maps and BatchNorm statistics of a run's models."""

from __future__ import annotations

from pathlib import Path

from ..config.spec import CompareSpec
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
    from ..experiments.restoration import load_experiment, load_spec, resolve_device, select_trials
    from ..report.figures import save_each
    from ..representations import compare_representations
    from ..representations.figures import draw_panels
    from ..representations.rendering import render_comparison, write_tables
    from ..utils.threads import limit_threads

    console, place = make_console(), out or directory / "features"
    require_writable(place)
    device, notices = resolve_device(load_spec(directory, run_data, code=code or ()), device)
    with show_loading(Console()) as progress:
        spec, experiment = load_experiment(directory, progress, device, run_data, code or ())
        go_on = f"fedshift {'compare' if isinstance(spec, CompareSpec) else 'run'} --resume {directory}"
        with limit_threads(spec.threads):
            found = compare_representations(
                select_trials(experiment, methods, seeds), directory, go_on,
                samples=samples, clients=clients, layer=layer, progress=progress,
            )  # fmt: skip
    print_parts(console, [*render_comparison(found), *(f"note: {notice}" for notice in notices)])
    figures = {panel.name: panel.figure for panel in draw_panels(found)}
    for file in (*write_tables(found, place), *save_each(figures, place)):
        print_line(console, f"Written: {file}")
    return 0
