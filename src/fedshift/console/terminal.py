"""Terminal output that commands share: lines and tables, progress while loading and running, and Ctrl-C.

Heavy modules are imported inside the functions, so that the command line answers at once.
"""

from __future__ import annotations

import math
import shlex
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from ..config.expressions import find_functions
from ..config.settings_file import FILE, read_run_settings
from ..config.spec import EXPRESSIONS, RunOptions
from ..utils.errors import UsageError
from ..utils.files import require_writable
from .printing import Console

if TYPE_CHECKING:
    from ..experiments.callbacks import Callback

ANNOUNCED = 1_000_000
"""Minimum bytes of newly cached images that a command reports."""


def make_console(width: int = 120) -> Console:
    """Return a console for tables: as wide as the terminal, or ``width`` for a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=width)


def print_line(console: Console, text: str) -> None:
    """Print ``text`` literally on one line, however long."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_parts(console: Console, parts: Iterable[RenderableType]) -> None:
    """Print ``parts``; each string is on one line, so that it can be copied."""
    for part in parts:
        console.print(part, markup=False, highlight=False, soft_wrap=isinstance(part, str))


@contextmanager
def show_loading(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Show loading progress on a terminal, then on any console what was added to the cache of images."""
    with announce_cache(console), _show_bar(console) as progress:
        yield progress


@contextmanager
def _show_bar(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    if not console.is_terminal or console.quiet:
        yield lambda *_: None
        return
    text = TextColumn("{task.description}")
    columns = SpinnerColumn(), text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("loading", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


@contextmanager
def announce_cache(console: Console) -> Iterator[None]:
    """Report after the block how many bytes of decoded images it added to the cache, where, and how to remove them.

    Fewer than ``ANNOUNCED`` bytes are not reported.
    """
    from ..data.files.cache import count_bytes, find_limit
    from ..utils.files import cache_directory

    directory = cache_directory()
    before = count_bytes(directory)
    find_limit()  # raises before anything is read if it is not a number
    try:
        yield
    finally:
        if (added := count_bytes(directory) - before) >= ANNOUNCED:
            from ..report.formatting import format_bytes

            print_line(
                console,
                f"Decoded images are kept for the next time: {format_bytes(added)} in {directory}, in all "
                f"{describe_cache(directory)}; `fedshift data cache --clear` removes them.",
            )


def describe_cache(directory: Path) -> str:
    """Return a description of the size and the limit of the decoded images in a cache directory."""
    from ..data.files.cache import VARIABLE, count_bytes, find_limit
    from ..report.formatting import format_bytes

    most = f"of at most {format_bytes(find_limit())}" if math.isfinite(find_limit()) else "without a limit"
    return f"{format_bytes(count_bytes(directory))} {most} ({VARIABLE})"


@contextmanager
def show_progress(console: Console, own: Sequence[Callback] = ()) -> Iterator[Callback]:
    """Yield a callback that shows events: a live display on a terminal and in a notebook, plain lines elsewhere.

    A quiet console shows nothing. In a notebook, rich needs ipywidgets for its display. ``own``: callbacks of the user,
    which receive each event after the display.
    """
    from ..experiments.callbacks import Callback, Callbacks
    from .progress import LiveDisplay, PlainLines

    if console.quiet:
        yield Callbacks(own=own) if own else Callback()
        return
    if not (console.is_terminal or (console.is_jupyter and find_spec("ipywidgets"))):
        lines = PlainLines(console)
        yield Callbacks(lines, own=own) if own else lines
        return
    with LiveDisplay(console) as display:
        yield Callbacks(display, own=own) if own else display


@contextmanager
def catch_interrupts(console: Console, then: str = "Stopping after this round") -> Iterator[Event]:
    """Yield an event that the first Ctrl-C sets; the second stops at once. ``then``: what the first does, in words."""
    stop = Event()

    def on_interrupt(*_: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        console.print(f"{then}; press Ctrl-C again to stop at once.")

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def report_stop(console: Console, command: str, directory: Path) -> int:
    """Print how to continue a run that Ctrl-C stopped, and return the exit code."""
    go_on = "the same command"
    if (directory / FILE).exists():
        settings = read_run_settings(directory).values
        texts = [settings[name] for name in EXPRESSIONS if settings.get(name)]
        named = [name for text in texts for name in find_functions(text if isinstance(text, str) else ",".join(text))]
        code = "".join(f" --code {name}" for name in dict.fromkeys(named))
        go_on = f"fedshift {command} --resume {shlex.quote(str(directory))}{code}"
    print_line(console, f"Stopped. Completed work is saved; continue with: {go_on}")
    return 130


def choose_directory(place: RunOptions, command: str) -> Path:
    """Return the directory of a run, without creating it.

    Raises :class:`UsageError` if a directory to write and one to continue are both given, or it cannot be written.
    """
    if place.out and place.resume:
        raise UsageError(
            f"--out {place.out} and --resume {place.resume}: a resumed run stays in its directory; give one of them"
        )
    directory = place.resume or place.out or new_directory(command)
    require_writable(directory)
    return directory


def new_directory(command: str) -> Path:
    """Return a directory under ``runs`` that does not exist yet."""
    stamp = f"{datetime.now():%Y%m%d-%H%M%S}"
    names = (Path("runs") / f"{command}-{stamp}{'' if n == 0 else f'-{n}'}" for n in count())
    return next(name for name in names if not name.exists())
