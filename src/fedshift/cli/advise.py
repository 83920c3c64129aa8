"""The command ``fedshift advise``: a diagnosis, a short search on validation data, and the recommended method."""

from __future__ import annotations

import shlex
from contextlib import closing
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from ..config.seeds import parse_seeds
from ..config.settings_file import read_run_settings
from ..config.spec import AUTO, AdviseSpec, CompareSpec, RunOptions
from ..console.printing import Console
from ..console.terminal import (
    catch_interrupts,
    choose_directory,
    make_console,
    print_line,
    report_stop,
    show_loading,
    show_progress,
)
from ..utils.errors import Ref, UsageError
from .run import find_kind, use_threads

if TYPE_CHECKING:
    from ..data.source import Progress

COMPUTING = frozenset(("engine", "workers", "checkpoint_every", "device", "threads", "data", "root", "log"))
"""Settings that may be changed when a search continues."""
CHANGED = frozenset(("data", "methods", "lr", "rounds", "seeds", "validation", "log"))
"""Settings that the suggested command expresses differently or does not need."""


def advise(
    spec: Annotated[AdviseSpec, Parameter(name="*")] = AdviseSpec(),
    output: Annotated[RunOptions, Parameter(name="*")] = RunOptions(),
) -> int:
    """Recommend a method for a federation: diagnose it, and search methods and learning rates on validation data."""
    if output.callbacks:
        raise UsageError(
            "advise takes no callbacks, since it ends trials by its own rule: leave {} out", Ref("callbacks")
        )
    directory = choose_directory(output, "advise")
    if output.resume:
        _check_same(spec, output.resume)
    console, shown = Console(), Console(quiet=output.quiet)
    with show_loading(shown) as bar:
        progress = _say_steps(shown, bar)
        from ..diagnosis.checked_experiment import make_checked
        from ..diagnosis.search import BASELINE, begin_search, continue_search, hold_out, parse_rates, read_search
        from ..diagnosis.search_report import describe_plan
        from ..experiments.factory import anchor_paths, make_methods
        from ..experiments.loggers import parse_loggers, require_packages
        from ..results.run_directory import RunDirectory

        require_packages(parse_loggers(spec.log))
        use_threads(spec.threads)
        spec = anchor_paths(spec)
        methods = None if spec.methods == AUTO else make_methods(spec)
        shared = {each.name: getattr(spec, each.name) for each in fields(CompareSpec)} | {"methods": BASELINE}
        experiment = hold_out(lambda fraction: make_checked(CompareSpec(**shared | fraction), progress))
        if output.resume:
            search = read_search(directory)
        else:
            rates = parse_rates(spec.rates, experiment.settings.optimizer)
            search = begin_search(experiment, methods, rates, spec.budget, progress)
    with closing(RunDirectory(directory, resume=output.resume is not None)) as kept:
        kept.write_settings(asdict(spec))
        print_line(console, f"{directory}: {len(search.candidates)} candidates on {experiment.data.name}")
        print_line(shown, describe_plan(search))
        try:
            with catch_interrupts(console) as stop, show_progress(shown) as callback:
                search = continue_search(
                    experiment, search, directory, methods, callback=callback, stop=stop, jobs=output.jobs
                )
        except KeyboardInterrupt:
            return report_stop(console, "advise", directory)
    _publish(spec, directory)
    return 0 if search.ended or (search.overtime and search.results) else report_stop(console, "advise", directory)


def _say_steps(console: Console, bar: Progress) -> Progress:
    """Return a callback that prints a line as a step of the diagnosis or the timing begins, and moves ``bar``."""
    said = set[str]()

    def progress(what: str, done: int, total: int) -> None:
        if what not in said and what.startswith(("testing", "timing")):
            said.add(what)
            print_line(console, f"{what[0].upper()}{what[1:]} ...")
        bar(what, done, total)

    return progress


def _check_same(spec: AdviseSpec, directory: Path) -> None:
    """Raise :class:`UsageError` unless ``directory`` contains a search with the same settings."""
    if find_kind(directory) != "advise":
        raise UsageError(
            f"{directory} holds no search of `fedshift advise`: give the directory of a search, or start a new one"
        )
    kept = AdviseSpec(**read_run_settings(directory).values)
    for each in fields(AdviseSpec):
        if each.name not in COMPUTING and getattr(kept, each.name) != getattr(spec, each.name):
            raise UsageError(
                f"{directory} was begun with {each.name}={getattr(kept, each.name)!r}, and the settings of a search "
                f"cannot change: leave --{each.name.replace('_', '-')} out, or start a new search (--out)"
            )


def rebuild_advice(directory: Path, _: Console) -> None:
    """Publish the results so far of the search in ``directory`` again; nothing is trained."""
    _publish(AdviseSpec(**read_run_settings(directory).values), directory)


def _publish(spec: AdviseSpec, directory: Path) -> None:
    """Print and write the results so far of the search in ``directory``."""
    from ..diagnosis.search import read_search
    from ..diagnosis.search_report import list_parts, write_search
    from ..report.publication import print_parts

    search = read_search(directory)
    write_search(search, directory)
    print_parts(make_console(), list_parts(search, _format_flags(spec)))


def _format_flags(spec: AdviseSpec) -> str:
    """Return the settings of ``spec`` other than defaults, with seeds that chose nothing, as flags of `compare`."""
    from ..diagnosis.search import CONFIRMING

    unused = max(parse_seeds(spec.seeds)) + 1
    words = ["--data", spec.data]
    for each in fields(CompareSpec):
        value = getattr(spec, each.name)
        if each.name not in CHANGED and value != each.default:
            flag = f"--{each.name.replace('_', '-')}"
            words += [flag] if value is True else [flag, str(value)]
    return shlex.join([*words, "--seeds", f"{unused}..{unused + CONFIRMING - 1}"])
