"""The command ``fedshift reproduce``: the papers' tables, run here and put beside what is printed there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table as Grid

from .base.errors import UsageError
from .config import DataSpec
from .launch import display, interruptible, wide

if TYPE_CHECKING:
    from .papers.recipe import Way
    from .papers.tables import Block, Table


def reproduce(
    table: str | None = None,
    *,
    seeds: int = 1,
    scale: float = 1.0,
    version: str | None = None,
    root: Path | None = None,
    out: Path = Path("reproduced"),
) -> int:
    """Run a table of the papers and put what comes out beside what they print; without a name, list all of them.

    Parameters
    ----------
    table
        Which, for example fedbn/table11.
    seeds
        Seeds of each run; 3 or more give standard deviations.
    scale
        Share of the rounds to run, for a quick look.
    version
        Version of the paper where it has several, v1 or final; without it the last.
    root
        Directory of the data; without it the one that FEDSHIFT_DATA names, else data.
    out
        Directory of the runs, which tables share, and of the results.

    """
    from .papers.recipe import Way
    from .papers.tables import table as found
    from .sources import root_of

    way = Way(root=root_of(DataSpec(root=str(root) if root else None)).resolve(), scale=scale, seeds=seeds)
    return _run(found(table), way, version, out) if table else _list(way, out)


def _list(way: Way, out: Path) -> int:
    from .papers.recipe import planned, recipe_of
    from .papers.reproduce import last_verdicts
    from .papers.tables import tables

    grid = Grid(box=None)
    for title in ("table or figure", "what", "runs", "data", "last result"):
        grid.add_column(title, overflow="fold")
    for key, table in tables().items():
        runs, data = "", "no recipe" if table.blocks else "drawn, no numbers"
        if recipe_of(table) is not None:
            plans = [planned(table, block, way) for block in _blocks(table, None)]
            runs = str(len({cell.run for plan in plans for cell in plan.cells}))
            missing = sorted({name for plan in plans for name in plan.missing})
            notes = sorted({note for plan in plans for note in plan.notes})
            said = [*(f"lacks {name}" for name in missing), *(f"stand-in: {note}" for note in notes)]
            data = "; ".join(said) or "here"
        grid.add_row(key, table.title, runs, data, "; ".join(last_verdicts(table, out)))
    wide().print(grid)
    return 0


def _run(table: Table, way: Way, version: str | None, out: Path) -> int:
    from .papers.recipe import planned
    from .papers.reproduce import reproduce as run
    from .papers.reproduce import side_by_side
    from .papers.tables import PAPERS
    from .report.text import latex, markdown, terminal

    console, text = Console(), wide()
    plans = [(block, planned(table, block, way)) for block in _blocks(table, version)]
    if not any(plan.cells for _, plan in plans):
        missing = ", ".join(sorted({name for _, plan in plans for name in plan.missing}))
        raise UsageError(f"{table.key} needs {missing}, which is not under {way.root}: see `fedshift data show`")
    with interruptible(console) as stop, display(console) as observer:
        made = []
        for block, plan in plans:
            if not plan.cells:
                continue
            done = run(table, block, way, plan, out, observer=lambda *_: observer, stop=stop)
            if done is None:
                _say(console, "Stopped. What was done is kept; go on with the same command.")
                return 130
            made.append(done)
    _say(console, f"{PAPERS[table.paper]}, {table.name}: {table.title}")
    content: dict[str, list[str]] = {"md": [], "tex": []}
    for done in made:
        shown = side_by_side(done)
        text.print(terminal(shown))
        close, judged = done.within
        for note in done.notes:
            _say(console, f"Stand-in: {note}.")
        _say(console, _summary(done.block, way, done.verdict, close, judged))
        content["md"].append(markdown(shown))
        content["tex"].append(latex(shown))
    for kind, parts in content.items():
        (out / "results" / table.paper / f"{table.name}.{kind}").write_text("\n".join(parts), encoding="utf-8")
    return 0


def _summary(block: Block, way: Way, verdict: str, close: int, judged: int) -> str:
    share = f", {way.scale:g} of the rounds" if way.scale < 1 else ""
    spread = f"; {close} of {judged} cells within the paper's spread" if judged else ""
    version = f"version {block.version}, " if block.version else ""
    return f"Verdict ({version}{way.seeds} seed{'s' * (way.seeds > 1)}{share}): {verdict}{spread}."


def _blocks(table: Table, version: str | None) -> list[Block]:
    """The blocks of one version of the table, by default the last."""
    versions = list(dict.fromkeys(block.version for block in table.blocks))
    if version is not None and version not in versions:
        known = ", ".join(filter(None, versions)) or "one version only"
        raise UsageError(f"version={version!r}: {table.key} has {known}")
    wanted = version if version is not None else next(reversed(versions), "")
    return [block for block in table.blocks if block.version == wanted]


def _say(console: Console, said: Any) -> None:
    console.print(said, markup=False, highlight=False, soft_wrap=True)
