"""The command ``fedshift cross-site``: each client's model of a run on the data of every client."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ..console.printing import Console
from ..console.terminal import make_console, print_line, print_parts, show_loading
from .run import RunCode, RunData, RunDevice, RunMethods, RunSeeds, load_run


def cross_site(
    run: Path,
    *,
    moment: Literal["loaded", "trained"] = "loaded",
    methods: RunMethods = None,
    seeds: RunSeeds = None,
    device: RunDevice = None,
    run_data: RunData = None,
    code: RunCode = None,
) -> int:
    """Evaluate each client's model on every client's test data, after training (cross-site validation).

    This adds a table for each method to the run's records and report: rows are models, columns are data. Nothing else
    in the run is changed.

    Args:
        run: Directory that `fedshift run` or `compare` wrote.
        moment: Models to measure: the models that clients would use, and the server's (loaded); or the clients' models
            after one more round of local work, before aggregation (trained).

    """
    from ..experiments.cross_site import cross_validate
    from ..report.formatting import to_terminal
    from ..report.page import collect_crossed
    from ..report.publication import publish_run
    from ..results.summary import read_summary

    console = make_console()
    _, experiment, notices = load_run(run, Console(), methods, seeds, device, run_data, code)
    with show_loading(Console()) as progress:
        cross_validate(experiment, run, moment, progress)
    for table in collect_crossed(read_summary(run)):
        print_line(console, table.caption)
        make_console(30 + 17 * len(table.text.header)).print(to_terminal(table.text))
    print_parts(console, [f"note: {notice}" for notice in notices])
    publish_run(run, Console(quiet=True))
    print_line(console, f"Page: {run / 'report.html'}; tables: {run / 'tables'}/cross-site-*")
    return 0
