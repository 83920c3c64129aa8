"""The command ``fedshift export``: a run's model for use elsewhere."""

from __future__ import annotations

from pathlib import Path

from ..console.printing import Console
from ..console.terminal import print_line, show_loading
from .run import RunCode, RunData, load_run, use_threads


def export(
    run: Path,
    *,
    out: Path,
    method: str | None = None,
    client: str | None = None,
    seed: int | None = None,
    onnx: bool = True,
    run_data: RunData = None,
    code: RunCode = None,
) -> int:
    """Write a trained model for use elsewhere, with a model card.

    The output is a directory with the weights, a program that runs without fedshift, the same program in ONNX, and a
    description of inputs and classes. In Python, fedshift.load(DIRECTORY) returns a function from samples to answers.

    Args:
        run: Directory that `fedshift run`, `compare` or `serve` wrote; with `serve`, only models that the server has.
        out: Directory to write, new or empty.
        method: Method, by name or as given to the run; by default the only one.
        client: Client whose model to export; by default the server's model, if the method has one.
        seed: Seed; by default the first.
        onnx: Also write the program in ONNX, if it can be converted (needs `pip install 'fedshift[export]'`).

    """
    from ..experiments.restoration import load_spec
    from ..export.package import require_new
    from ..export.source import export_run
    from ..results.run_directory import was_served

    console = Console()
    require_new(out)
    if was_served(run):
        from ..flower.coordinator.served import load_served  # needs Flower

        use_threads(load_spec(run, run_data, needs_data=False, code=code or ()).threads)
        experiment = load_served(run, code or ())
    else:
        _, experiment, _ = load_run(run, console, device="cpu", run_data=run_data, code=code)
    with show_loading(console):
        made = export_run(experiment, run, out, method=method, client=client, seed=seed, onnx=onnx)
    print_line(console, f"{made.directory}: {', '.join(made.files)}")
    for check in made.checks:
        print_line(console, check)
    for notice in made.notices:
        print_line(console, f"note: {notice}")
    return 0
