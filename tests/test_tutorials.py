"""The tutorials: their files are written, their commands run in order, and they print what the pages show.

A page is followed as a reader would. A block ``python title="FILE"`` is written to FILE. In a ``console`` block, a line
that begins with ``$`` is called in this process, and the lines below it are what it prints: ``…`` stands for any lines,
or for any words of a line, and spaces do not count. Numbers with a decimal point may differ a little, other numbers may
not. Runs of the pages were made on AMD with AVX-512; on other processors, training rounds otherwise, and after many
rounds neither numbers nor the lines that depend on them are the same, so that only words are compared.

Whole runs take minutes, so the test that follows pages word for word is slow. The fast one heeds an HTML comment above
a block. ``<!-- test: "--rounds 30" is "--rounds 1" -->`` shortens its commands; from there on, neither numbers nor the
lines that depend on them are compared. Commands below ``<!-- test: slow -->`` it only parses, and those below
``<!-- test: parsed -->`` both tests do.
"""

import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fedshift.cli.app import app, main

ROOT = Path(__file__).parents[1]
PROCESSOR = Path("/proc/cpuinfo")
AS_PRINTED = (
    torch.backends.cpu.get_cpu_capability() == "AVX512"
    and PROCESSOR.exists()
    and "AuthenticAMD" in PROCESSOR.read_text(encoding="utf-8")
)
"""Whether this processor rounds as the one on which the pages were printed; over many rounds, others drift apart."""
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(
    r"^(?:<!-- test: (?P<note>[^\n]*) -->\n)?"
    r'```(?:python title="(?P<file>[^"]+)"|console)\n(?P<text>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)
MINUS = "\N{MINUS SIGN}"
NUMBER = rf"[+{MINUS}-]?\d+(?:\.\d+)?"
TOKEN = re.compile(rf"(?P<number>{NUMBER})|(?P<gap>…)|(?P<rule>─+)|(?P<space>\s+)|(?P<count>\brounds?\b)|.")
PATTERNS = {"number": f"({NUMBER})", "gap": ".*?", "rule": "─+", "space": r"\s+", "count": "rounds?"}
AFTER_MEAN = re.compile(r"\d \($")
"""Where a deviation over a few seeds begins, which one seed decides: it has to be a number, but may be any."""
OUTCOME = re.compile(r"^Verdict ")
"""Lines that depend on how the numbers come out."""
POINTS = 10.0
"""By how many points results may differ between processors."""


@dataclass(frozen=True)
class Block:
    """A file to write, or commands with the lines that the page shows below each."""

    file: str | None
    text: str
    note: str

    @property
    def replacements(self) -> list[tuple[str, str]]:
        found = re.findall(r'"([^"]+)" is "([^"]*)"', self.note)
        assert all(whole in self.text for whole, _ in found), self.note
        return found

    def commands(self) -> Iterator[tuple[str, list[str]]]:
        for part in re.split(r"^\$ ", self.text.replace(" \\\n", " "), flags=re.MULTILINE)[1:]:
            command, *shown = part.rstrip("\n").split("\n")
            yield command, shown


def read_page(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = [Block(match["file"], match["text"], match["note"] or "") for match in BLOCK.finditer(text)]
    assert len(found) == len(re.findall(r"^```(?:python|console)", text, re.MULTILINE))
    assert text.count("<!-- test:") == sum(bool(block.note) for block in found)
    return found


def is_close(shown: str, printed: str) -> bool:
    """Return whether a number is about the one that is shown; with two decimals, it is in percent or points."""
    if "." not in shown + printed:
        return shown == printed
    expected, found = to_number(shown), to_number(printed)
    points = abs(expected) > 1 or len(shown.partition(".")[2]) == 2
    return abs(expected - found) <= max(0.02, 0.25 * abs(expected), POINTS if points else 0.0)


def to_number(text: str) -> float:
    return float(text.replace(MINUS, "-"))


def is_printed(shown: str, printed: str, with_numbers: bool) -> bool:
    """Return whether a line is what the page shows."""
    tokens = list(TOKEN.finditer(shown.strip()))
    pattern = "".join(PATTERNS.get(str(token.lastgroup), re.escape(token[0])) for token in tokens)
    match = re.fullmatch(pattern, printed.strip())
    numbers = [token for token in tokens if token.lastgroup == "number"]
    return bool(match) and (
        not with_numbers
        or all(
            AFTER_MEAN.search(shown.strip(), 0, token.start()) or is_close(token[0], found)
            for token, found in zip(numbers, match.groups(), strict=True)
        )
    )


def find_difference(shown: list[str], printed: list[str], with_numbers: bool) -> str | None:
    """Return the first line of the page that is not printed where the page shows it, or the first that is not shown."""
    rest, skipping = [line for line in printed if line.strip()], False
    for line in filter(str.strip, shown):
        if line.strip() == "…" or (not with_numbers and OUTCOME.search(line)):
            skipping = True
            continue
        found = next((place for place, one in enumerate(rest) if is_printed(line.strip(), one, with_numbers)), None)
        if found is None or (found and not skipping):
            return line
        rest, skipping = rest[found + 1 :], False
    return rest[0] if rest and not skipping else None


class Reader:
    """Someone who follows a page in the current directory."""

    def __init__(self, *, hurried: bool) -> None:
        self.hurried, self.with_numbers, self.code = hurried, hurried or AS_PRINTED, 0

    def follow(self, block: Block) -> None:
        if block.file:
            Path(block.file).write_text(block.text, encoding="utf-8")
            return
        commands = list(block.commands())
        assert commands, block.text
        if block.note == "parsed" or (self.hurried and block.note == "slow"):
            for command, _ in commands:
                if command.startswith("fedshift "):
                    app.parse_args(shlex.split(command)[1:], exit_on_error=False, print_error=False)
            return
        for number, (command, shown) in enumerate(commands):
            said = command
            for whole, short in block.replacements if self.hurried else ():
                said = said.replace(whole, short)
            self.with_numbers &= said == command
            printed = self.call(shlex.split(said))
            refused = any(line.startswith("fedshift: ") for line in shown)
            asked = number + 1 < len(commands) and commands[number + 1][0] == "echo $?"
            assert self.code == 0 or refused or asked, printed
            different = find_difference(shown, printed.splitlines(), self.with_numbers)
            assert different is None, f"{said}\ndiffers in: {different}\n\n{printed}"

    def call(self, words: list[str]) -> str:
        """Return what a command prints, and keep its exit code."""
        with redirect_stdout(io.StringIO()) as printed, redirect_stderr(printed):
            match words:
                case ["fedshift", *rest]:
                    with pytest.raises(SystemExit) as stopped:
                        main(rest)
                    self.code = stopped.value.code
                case [setting, "python", "-m", "pytest", *rest]:
                    places = {"PYTHONPATH": f"{ROOT / 'src'}:{Path.cwd()}", **dict([setting.split("=")])}
                    apart = ["-p", "no:cacheprovider", f"--basetemp={Path.cwd() / 'pytest'}"]
                    done = subprocess.run(
                        [sys.executable, "-m", "pytest", *apart, *rest],
                        cwd=ROOT, env=os.environ | places, capture_output=True, text=True, check=False,
                    )  # fmt: skip
                    print(done.stdout, done.stderr)
                    self.code = done.returncode
                case ["python", file]:
                    runpy.run_path(file, run_name="__main__")
                case ["echo", "$?"]:
                    print(self.code)
                    self.code = 0
                case ["cat", file]:
                    print(Path(file).read_text(encoding="utf-8"))
                case ["ls", folder]:
                    print(*sorted(path.name for path in Path(folder).iterdir()), sep="\n")
                case ["rm", *files]:
                    for file in files:
                        Path(file).unlink()
                case _:
                    raise AssertionError(f"a tutorial calls {words}")
        return printed.getvalue()


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """An empty directory of a user without data, and no module of it left behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDSHIFT_DATA", raising=False)
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*(entry for entry in sys.path if entry), ""])
    monkeypatch.delitem(sys.modules, "my_methods", raising=False)  # of another page
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("shown", "different"),
    [
        (["…", "depot 84.17 (3.8)", "…"], None),
        (["…", "depot … (3.8)", "Page: a"], None),
        (["…", "depot 84.17 (23.80)", "…"], None),  # another deviation
        (["2 clients", "…"], None),
        (["depot 84.17 (3.8)", "…"], "depot 84.17 (3.8)"),  # not the first line
        (["…", "depot 64.17 (3.8)", "…"], "depot 64.17 (3.8)"),  # another number
        (["3 clients", "…"], "3 clients"),
        (["…", "harbor 84.17 (3.8)", "…"], "harbor 84.17 (3.8)"),
        (["…", "Page: a", "…", "depot 84.17 (3.8)", "…"], "depot 84.17 (3.8)"),  # another order
        (["2 clients", "…", "depot 84.17 (3.8)"], "Page: a"),  # more is printed
    ],
)
def test_a_page_that_shows_something_else_is_noticed(shown, different):
    printed = ["2 clients", "", "  depot   85.00 (4.0)  ", "Page: a"]
    assert find_difference(shown, printed, with_numbers=True) == different


@pytest.mark.parametrize(
    ("shown", "printed", "close"),
    [
        ("83.10", "85.57", True), ("83.10", "62.10", False), ("0.82", "1.89", True), ("0.82", "14.02", False),
        ("0.008", "0.021", True), ("0.008", "0.500", False), ("3", "4", False),
    ],
)  # fmt: skip
def test_numbers_are_compared_by_their_units(shown, printed, close):
    assert is_close(shown, printed) == close


LONG = {"segmentation", "volumes", "paper-table", "new-hospital", "fine-tuning", "own-data"}
"""Pages that take long even when hurried."""


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.slow if page.stem in LONG else ()) for page in PAGES],
    ids=lambda page: page.stem,
)  # fmt: skip
def test_a_tutorial_shows_what_its_commands_print(page, desk, undrawn, monkeypatch):
    monkeypatch.setattr("fedshift.report.page.make_panels", lambda *_: [])
    reader = Reader(hurried=True)
    for block in read_page(page):
        reader.follow(block)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_shows_what_its_commands_print_to_the_end(page, desk):
    reader = Reader(hurried=False)
    for block in read_page(page):
        reader.follow(block)
