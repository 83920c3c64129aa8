"""The command line, a thin edge: flags and TOML become an experiment, results become text.

Exit codes: 0 done, 1 something failed while running, 2 the request cannot be carried out, 130 stopped by Ctrl-C. Heavy
modules are imported inside the commands, so that help appears at once.
"""

from __future__ import annotations

import errno
import math
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import cyclopts
from cyclopts import App, Parameter
from cyclopts.help import DefaultFormatter, HelpPanel
from pydantic import ValidationError
from rich import console as rich_console
from rich.table import Table
from rich.text import Text

from ..config.expressions import EMBEDDED, distrust, find_functions, read_catalog, read_functions
from ..config.given_settings import explain, find_refusal, find_settings, read_settings, select_settings
from ..config.settings_file import COMMAND, read_run_settings
from ..config.spec import EXPRESSIONS, SHOWN, TRAINING, CompareSpec, DataSpec, RunOptions, RunSpec
from ..console.printing import Console
from ..console.terminal import make_console, print_line, print_parts
from ..utils.errors import FedshiftError, UsageError, as_flag
from ..utils.user_code import locate_error
from ..utils.version import __version__
from .adapt import adapt
from .advise import advise, rebuild_advice
from .cross_site import cross_site
from .data import Reading, data, diagnose, format_notices, load_for_display
from .deployment import join, ledger, pki, serve
from .export import export
from .features import features
from .leave_out import rebuild_without, run_without
from .plan import plan
from .predict import predict
from .reproduce import rebuild_papers, reproduce
from .run import Profile, RunCode, find_kind, run_experiment
from .sweep import rebuild_sweep, sweep
from .watch import watch

WITH_ARGUMENTS = ("methods", "policies")
"""Kinds of names that are listed with their arguments."""


def _settings_from_file(app: App, commands: tuple[str, ...], arguments: cyclopts.ArgumentCollection) -> None:
    """Fill in missing flags from the TOML file of --config, or of the run that --resume names."""
    if commands == ("serve",):  # has few of the flags, and reads the file itself
        return
    for argument in arguments:
        if argument.name in ("--config", "--resume") and argument.tokens:
            given = Path(argument.tokens[0].value)
            flags = [other.name for other in arguments if other.name not in ("*", "--config", "--resume", "--code")]
            allowed = [flag.removeprefix("--").replace("-", "_") for flag in flags]
            words = [(other.name, token.value) for other in arguments for token in other.tokens]
            own = {f"--{name}" for name in EXPRESSIONS}
            code = [name for flag, word in words if flag in own for name in find_functions(word)]
            code += [word for flag, word in words if flag == "--code"]
            if argument.name == "--config":
                path = find_settings(given, None)
                settings = read_settings(path, allowed)
            else:
                path = find_settings(None, given)
                said = {name for other in arguments for name in other.names if other.tokens}
                moved = not said.isdisjoint({"--data", "--root"})
                settings = _read_own_settings(given, path, allowed, code, moved=moved)
            distrust(code, path)
            for command in reversed(commands):
                settings = {command: settings}
            cyclopts.config.Dict(settings, source=str(path))(app, commands, arguments)


def _read_own_settings(
    run: Path, path: Path, allowed: Sequence[str], code: Sequence[str], *, moved: bool
) -> dict[str, Any]:
    """Return the settings with which ``run`` continues.

    ``code``: the user's functions that may be called. ``moved``: whether a flag gives the place of the data.
    """
    from ..results.run_directory import was_served

    if was_served(run):
        raise UsageError(f"{run} is a run across machines: continue it with `fedshift serve --resume {run}`")
    kept = read_run_settings(run)
    if code:
        kept.add_code()
    values = kept.find_paths({} if moved else DATA_SETTINGS)
    return select_settings({name: value for name, value in values.items() if value is not None}, path, allowed)


app = App(
    name="fedshift",
    version=__version__,
    help="Federated learning for clients whose data differ, above all in how they look (feature shift).",
    help_epilogue="run, compare, sweep and advise show all settings with --help-all. Every command takes --debug, "
    "which shows the traceback of an error.",
    config=(_settings_from_file,),
)
for command in (
    data, diagnose, plan, advise, pki, serve, join, ledger, adapt, export, predict, reproduce, sweep,
    features, cross_site, watch,
):  # fmt: skip
    app.command(command)

DATA_SETTINGS = {"data": "data", "root": "root"}
"""Settings that give the place of a resumed run's data, by setting."""
LEAVE_OUT = (
    "Clients, comma-separated, or all: for each in turn a comparison in which it never trains, then one table of the "
    "results of every policy for a client that the run never saw."
)


RATES = "Learning rates, comma-separated: --leave-out trains each method with each, and --selection chooses one."
SELECTION = (
    "Rules that choose a learning rate for each client that is left out, comma-separated, as DomainBed names them: "
    "training, on validation data of the clients that train; leave-one-out, on a second client that is left out, in "
    "further runs; oracle, on data of the client itself, an upper bound."
)


@app.command
def run(
    spec: Annotated[RunSpec, Parameter(name="*")] = RunSpec(),
    output: Annotated[RunOptions, Parameter(name="*")] = RunOptions(),
    *,
    profile: Profile = False,
) -> int:
    """Train one method on the clients of a federation, and evaluate each client."""
    return run_experiment(spec, "run", output, profile=profile)


@app.command
def compare(
    spec: Annotated[CompareSpec, Parameter(name="*")] = CompareSpec(),
    output: Annotated[RunOptions, Parameter(name="*")] = RunOptions(),
    *,
    profile: Profile = False,
    leave_out: Annotated[str | None, Parameter(group=TRAINING, help=LEAVE_OUT)] = None,
    rates: Annotated[str | None, Parameter(group=TRAINING, help=RATES)] = None,
    selection: Annotated[str | None, Parameter(group=TRAINING, help=SELECTION)] = None,
) -> int:
    """Train several methods with several seeds, and compare them."""
    if leave_out is None:
        if rates or selection:
            raise UsageError("--rates and --selection belong to --leave-out: give it, or see `fedshift sweep`")
        return run_experiment(spec, "compare", output, profile=profile)
    if profile:
        raise UsageError("--profile times one comparison, and --leave-out makes several: give one of the two")
    return run_without(spec, leave_out, output, rates, selection)


@app.command
def report(
    directory: Path,
    *,
    margin: float | None = None,
    figures: Annotated[bool, Parameter(negative=())] = False,
    pictures: bool = True,
    cases: Annotated[bool, Parameter(negative=())] = False,
    code: RunCode = None,
) -> int:
    """Rebuild tables and pages from a run directory, without training.

    Args:
        directory: Directory that run, compare, sweep, advise or reproduce wrote, finished or not.
        margin: Loss of a client that the table of who profits may exclude, as --margin of compare, for a run that was
            begun without one. The report says that it was chosen afterwards.
        figures: Write each figure of a run or comparison as SVG, PNG and PDF into figures.
        pictures: Show the images of test samples that the run kept; --no-pictures leaves them out.
        cases: Also write tables/cases.csv, with each test sample's client, patient, truth, prediction and scores.

    """
    from ..report.publication import publish_run

    distrust(code or (), directory)
    rebuild = {
        "sweep": rebuild_sweep, "advise": rebuild_advice, "leave-out": rebuild_without, "reproduce": rebuild_papers,
    }  # fmt: skip
    kind = find_kind(directory)
    if kind is None:
        raise UsageError(
            f"{directory} holds no run: give a directory that `fedshift run`, `compare`, `sweep`, `advise` or "
            "`reproduce` wrote"
        )
    if margin is not None and not 0 < margin < math.inf:
        raise UsageError(f"--margin {margin:g}: give a number above 0, such as 0.02 for 2 points")
    if kind == "run":
        publish_run(directory, Console(), margin, cases=cases, figures=figures, pictures=pictures)
        return 0
    if margin is not None or cases or figures or not pictures:
        raise UsageError(
            f"--margin, --cases, --figures and --no-pictures are for a run or comparison, and {directory} holds a "
            f"{kind}: leave them out"
        )
    rebuild[kind](directory, Console())
    return 0


@app.command
def inspect(
    spec: Reading = DataSpec(),
    *,
    data: str | None = None,
    model: str | None = None,
    method: str | None = None,
    shape: str | None = None,
    adapter: str | None = None,
) -> int:
    """Show how a method treats every entry of a model and how many bytes it sends, or summarize data.

    Args:
        data: Your own directory, benchmark or embedded data, whose clients, classes and columns are shown. The
            method's entries follow if --model or --method is given too.
        model: Network by name, or package.module:function; by default small-cnn, or as the data need.
        method: Method, with arguments and composed where needed; by default fedbn.
        shape: Shape of one sample: channels, height, width; by default 3,28,28, or the data's.
        adapter: Adapters of the network, as for a run: lora(rank=8, targets='qkv|proj').

    """
    from .inspection import describe_method, describe_source

    console, classes = make_console(), spec.classes or 10
    sizes: tuple[int, ...] = (3, 28, 28)
    inputs: Any = ()
    if data is None and replace(spec, classes=None) != DataSpec():
        raise UsageError("settings of reading data belong to --data: give it, or leave them out")
    if data is not None:
        if shape:
            raise UsageError(f"--shape {shape} and --data {data}: data have a shape already; leave one of them out")
        made = load_for_display(data, spec)
        print_parts(console, [*describe_source(made), *format_notices(made)])
        if model is None and method is None and adapter is None:
            return 0
        sizes, classes, inputs, model = made.sample_shape, made.classes, made.inputs, model or "auto"
    if shape:
        try:
            sizes = tuple(int(size) for size in shape.split(","))
        except ValueError as error:
            raise UsageError(f"shape {shape!r}: write whole numbers with commas, for example 3,28,28") from error
    for part in describe_method(model or "small-cnn", method or "fedbn", sizes, classes, inputs, adapter):
        console.print(part)
    return 0


@app.command(name="list")
def list_(what: Literal["methods", "models", "data", "policies", "metrics", "capabilities", "all"] = "all") -> int:
    """List methods, models, data and policies for new clients, metrics, or what each method needs and does.

    Args:
        what: Kind of names to list, by default all but metrics, and capabilities, a table of what each method needs,
            sends and keeps on clients.

    """
    console = make_console()
    if what in ("capabilities", "metrics"):
        from .inspection import tabulate_capabilities, tabulate_metrics

        console.print(tabulate_capabilities() if what == "capabilities" else tabulate_metrics())
        return 0
    for kind in ("methods", "models", "data", "policies") if what == "all" else (what,):
        console.print(_tabulate_catalog(kind), "")
    return 0


def _tabulate_catalog(kind: str) -> Table:
    """Return names, arguments and descriptions of what :func:`list_` lists, read without importing torch."""
    table = Table(title=kind, box=None, title_justify="left", title_style="bold", padding=(0, 2, 0, 0))
    for title in ("name", "arguments", "description") if kind in WITH_ARGUMENTS else ("name", "description"):
        table.add_column(title, no_wrap=title == "name")
    if kind == "data":
        made = (function.removeprefix("fedshift.").partition(":")[0] for function in EMBEDDED.values())
        files = (Path(__file__).parents[1] / f"{module.replace('.', '/')}.py" for module in made)
        embedded = [
            (name, read_functions(file, by_module=True)[name]) for name, file in zip(EMBEDDED, files, strict=True)
        ]
        entries = [*embedded, *sorted(read_catalog("data.datasets").items())]
    else:
        entries = list(read_catalog("evaluation.policies" if kind == "policies" else kind).items())
    for name, entry in entries:
        summary = Text(entry.summary.removeprefix("Load "))
        table.add_row(name, *[entry.arguments or "-"] * (kind in WITH_ARGUMENTS), summary)
    return table


class _EssentialFormatter(DefaultFormatter):
    """Help formatter that shows the essential settings only."""

    def __call__(self, console: rich_console.Console, options: rich_console.ConsoleOptions, panel: HelpPanel) -> None:
        entries = [entry for entry in panel.entries if _flag(entry.positive_names) in SHOWN]
        if entries:
            super().__call__(console, options, panel.copy(entries=entries))


def _flag(names: Sequence[str]) -> str:
    return names[0].removeprefix("--").replace("-", "_") if names else ""


def _run_guarded(call: Callable[[], Any], debug: bool) -> int:
    """Run ``call`` and return the exit code; print an error as one message on standard error."""
    errors = Console(stderr=True)
    try:
        return int(call() or 0)
    except (FedshiftError, cyclopts.CycloptsError, ValidationError, OSError) as error:
        if debug:
            errors.print_exception()
        code = error.exit_code if isinstance(error, FedshiftError) else 1 if isinstance(error, OSError) else 2
        print_line(errors, f"fedshift: {_format_error(error)}")
        return code
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if debug:
            errors.print_exception()
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if where := locate_error(error):
            said = f"a user-defined function failed with {said} ({where}): correct it; --debug shows how it was called"
        else:
            said = f"unexpected {said}. This is a defect of fedshift: --debug shows where"
        print_line(errors, f"fedshift: {said}")
        return 1


def _format_error(error: BaseException) -> str:
    cause = error.__cause__ if isinstance(error.__cause__, ValidationError) else error
    if isinstance(cause, ValidationError):
        if refusal := find_refusal(cause):
            return refusal.render(as_flag)
        problems = ((str(problem["loc"][0]).replace("_", "-"), problem) for problem in cause.errors())
        return "; ".join(f"--{flag} {problem['input']}: {explain(problem)}" for flag, problem in problems)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        where = f"{error.filename}: {error.strerror}"
        denied = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        return f"{where}; make it accessible to this user, or choose another place" if denied else where
    if isinstance(error, cyclopts.UnusedCliTokensError):
        return f"{' '.join(error.unused_tokens or ())!r} belongs to no flag: write --flag value, and lists with commas"
    return error.render(as_flag) if isinstance(error, FedshiftError) else str(error)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program ``fedshift``."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # waiting threads that spin stall torch on a busy machine
    rest = ["--help" if argument == "--help-all" else argument for argument in given if argument != "--debug"]
    brief = "--help-all" not in given and rest[:1] in (["run"], ["compare"], ["sweep"], ["advise"])
    app.help_formatter = _EssentialFormatter() if brief else None
    COMMAND.set(shlex.join(["fedshift", *rest]))
    if "" not in sys.path:
        sys.path.append("")  # for methods and models in the current directory
    sys.exit(
        copy_context().run(  # the functions that a settings file may name hold for this call only
            _run_guarded,
            lambda: app(rest, exit_on_error=False, print_error=False, result_action="return_value"),
            debug,
        )
    )


if __name__ == "__main__":
    main()
