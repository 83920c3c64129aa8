"""The command ``fedshift sweep``: a comparison for each combination of settings' values, and one table of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from ..config.settings_file import read_run_settings
from ..config.spec import RunOptions, SweepSpec
from ..console.printing import Console
from ..console.terminal import choose_directory, print_line, show_loading
from ..utils.errors import UsageError
from .run import find_kind, run_several

if TYPE_CHECKING:
    from ..experiments.sweep import Combination


def sweep(
    spec: Annotated[SweepSpec, Parameter(name="*")] = SweepSpec(),
    output: Annotated[RunOptions, Parameter(name="*")] = RunOptions(),
) -> int:
    """Compare methods under every combination of the given settings, in one table."""
    from ..diagnosis.checked_experiment import make_checked
    from ..experiments.factory import anchor_paths
    from ..experiments.loggers import parse_loggers, require_packages
    from ..experiments.sweep import check_combination, make_combinations, split_settings

    require_packages(parse_loggers(spec.log))
    directory = choose_directory(output, "sweep")
    if output.resume and find_kind(output.resume) != "sweep":
        raise UsageError(f"{output.resume} holds no sweep: give the directory of a sweep, or start a new one (--out)")
    console, shown = Console(), Console(quiet=output.quiet)
    spec = anchor_paths(replace(spec, over=split_settings(spec.over)))
    wanted = make_combinations(spec, read_run_settings(output.resume).began if output.resume else None)
    left = [combination for combination in wanted if combination.read_outcome(directory) is None]
    with show_loading(shown) as progress:
        for number, combination in enumerate(left):
            progress("checking combinations", number, len(left))
            check_combination(combination, directory, make_checked)
    return run_several(
        {combination.folder: combination.to_queued_run(directory, make_checked) for combination in wanted},
        "sweep",
        directory,
        asdict(spec),
        console,
        shown,
        resume=output.resume is not None,
        jobs=output.jobs,
        callbacks=output.callbacks,
        title=f"{len(wanted)} combinations of {', '.join(wanted[0].values)}, {len(left)} to run",
        begin=lambda number, part: print_line(shown, f"[{number}/{len(wanted)}] {part.folder.name}"),
        publish=lambda: _publish(spec, wanted, directory, console),
    )


def read_sweep(directory: Path) -> tuple[SweepSpec, list[Combination]]:
    """Return the settings of the sweep in ``directory``, and its combinations."""
    from ..experiments.sweep import make_combinations

    settings = read_run_settings(directory)
    spec = SweepSpec(**settings.values)
    return spec, make_combinations(spec, settings.began)


def rebuild_sweep(directory: Path, console: Console) -> None:
    """Publish the results so far of the sweep in ``directory``, and of each of its comparisons, again."""
    from ..report.publication import publish_run

    spec, wanted = read_sweep(directory)
    for combination in wanted:
        publish_run(directory / combination.folder, Console(quiet=True))
    _publish(spec, wanted, directory, console)


def _publish(spec: SweepSpec, wanted: Sequence[Combination], directory: Path, console: Console) -> None:
    """Print and write the combinations' results so far, if any."""
    from ..experiments.sweep import collect_points
    from ..report.lag import share_statistics
    from ..report.sweep_report import SweepResults, publish_sweep

    measured = [
        (combination.folder, point)
        for combination, point in collect_points(wanted, directory)
        if (point.summary.rows["moment"] == "loaded").any()
    ]
    if not measured:
        print_line(console, "No round was evaluated yet, so there is nothing to report.")
        return
    folders, points = zip(*measured, strict=True)
    summaries = share_statistics([point.summary for point in points])
    points = tuple(replace(point, summary=each) for point, each in zip(points, summaries, strict=True))
    missing = tuple(combination.folder for combination in wanted if combination.folder not in folders)
    publish_sweep(SweepResults(points=points, folders=folders, missing=missing), directory, console, asdict(spec))
