"""What a terminal would obey is not printed, wherever it comes from: lines, tables, live displays, errors, prompts."""

import ast
import io
from pathlib import Path

import pytest
from rich.live import Live
from rich.table import Table
from rich.text import Text

import fedshift
from fedshift.console.printing import Console
from fedshift.console.terminal import print_line
from fedshift.utils.printable import strip_controls, to_printable

SOURCES = Path(fedshift.__file__).parent
HOSTILE = "a\x1b[2J\x1b[31mb\x1b]0;title\x07c\x9b1;1Hd\re\x08f\u202eg\u2028h"
SHOWN = "ab ]0;title cd e f g h"


def test_a_text_is_stripped_of_what_a_terminal_obeys():
    assert strip_controls(HOSTILE) == SHOWN
    assert strip_controls("Größe 5 µm, 日本\nnext") == "Größe 5 µm, 日本\nnext"
    assert to_printable("one\ntwo\t\x1b[1m") == "one two "


def test_nothing_that_begins_a_sequence_hides_what_follows():
    for start in ("\x1b]52;c;", "\x1bP", "\x1b_", "\x9d", "\x1b"):
        assert strip_controls(f"{start}the rest of our own line").endswith("the rest of our own line")


@pytest.mark.parametrize("kind", ["line", "table", "live", "prompt"])
def test_every_way_of_printing_is_clean(kind, monkeypatch):
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=200, color_system=None, legacy_windows=False)
    if kind == "line":
        print_line(console, HOSTILE)
    elif kind == "table":
        table = Table(HOSTILE)
        table.add_row(Text(HOSTILE))
        console.print(table)
    elif kind == "live":
        with Live(HOSTILE, console=console):
            pass
    else:
        monkeypatch.setattr("builtins.input", lambda: "y")
        console.input(HOSTILE, markup=False)
    found = written.getvalue()
    assert "title" in found
    own = ("\x1b[?25l", "\x1b[?25h", "\x1b[2K", "\r", "\x1b[1A")  # rich's live display hides the cursor and clears
    for sequence in own if kind == "live" else ():
        found = found.replace(sequence, "")
    assert not set(found) & set("\x1b\x9b\x07\x08\r\u202e\u2028"), found


def test_everything_is_printed_on_this_console():
    """No module with output of its own makes another console, or prints without one."""
    for path in SOURCES.rglob("*.py"):
        name = path.relative_to(SOURCES).as_posix()
        if not name.startswith(("api/", "cli/", "flower/", "console/")) or name == "console/printing.py":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        made = {
            each.func.id for each in ast.walk(tree) if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)
        }
        from_rich = {
            alias.name
            for each in ast.walk(tree)
            if isinstance(each, ast.ImportFrom) and each.module == "rich.console"
            for alias in each.names
        }
        assert not ("Console" in made and "Console" in from_rich), name
        assert "print" not in made, name
