"""The structure of the package, measured from its imports: ``python benchmarks/structure.py`` or ``make structure``.

``--picture FILE`` draws the rooms by floor, with the imports that do not follow from others.

The goals beside the figures guide the layout, and nothing checks them, since a number that must be met shapes code to
fit it. What must hold, that imports point down, is checked by ``make lint``.

A room is a file or folder directly under ``src/fedshift``. Imports are read from the source, those under
``TYPE_CHECKING`` and inside functions included; the package's own ``__init__``, which names the public API, is no room.
"""

from __future__ import annotations

import argparse
import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "fedshift"
LONG = 500
"""Lines from which on a file probably holds more than one idea."""

Arrows = dict[str, set[str]]


def find_modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Return every module's path by its dotted name, without the package's own name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def find_imports(package: Path = PACKAGE) -> Arrows:
    """Return the modules of the package that each of its modules imports."""
    modules = find_modules(package)
    arrows: Arrows = defaultdict(set)
    for name, path in modules.items():
        here = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            base = [*here[: len(here) - node.level + 1], *([node.module] if node.module else [])]
            for alias in node.names:
                target = ".".join([*base, alias.name])
                arrows[name].add(target if target in modules else ".".join(base))
    return arrows


def merge_rooms(arrows: Arrows) -> Arrows:
    """Return the imports between rooms."""
    rooms: Arrows = defaultdict(set)
    for name, targets in arrows.items():
        one, others = name.split(".")[0], {target.split(".")[0] for target in targets}
        if one:
            rooms[one] |= others - {one, ""}
    return rooms


def find_circles(arrows: Arrows) -> list[list[str]]:
    """Return the circles of imports, one for each import that closes one."""
    circles: list[list[str]] = []
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        for target in sorted(arrows.get(name, ())):
            if target in path:
                circles.append([*path[path.index(target) :], target])
            elif target not in done:
                visit(target, [*path, target])
        done.add(name)

    for name in sorted(arrows):
        if name not in done:
            visit(name, [name])
    return circles


def rank_rooms(rooms: Arrows) -> dict[str, int]:
    """Return each room's floor: 1 where it imports no other, else one more than the highest that it imports."""
    floors: dict[str, int] = {}

    def floor(name: str) -> int:
        if name not in floors:
            floors[name] = 1 + max((floor(target) for target in rooms.get(name, ())), default=0)
        return floors[name]

    for name in {*rooms, *(target for targets in rooms.values() for target in targets)}:
        floor(name)
    return floors


def reduce_arrows(rooms: Arrows) -> Arrows:
    """Return the imports that do not follow from others (the transitive reduction of a graph without circles)."""
    reach: Arrows = {}

    def collect(name: str) -> set[str]:
        if name not in reach:
            reach[name] = set().union(*({target} | collect(target) for target in rooms.get(name, ())))
        return reach[name]

    return {
        name: {target for target in targets if not any(target in collect(other) for other in targets - {target})}
        for name, targets in rooms.items()
    }


def draw_rooms(rooms: Arrows, path: Path) -> None:
    """Write the picture of the rooms to ``path`` as SVG."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "fedshift"
    from matplotlib import pyplot as plt

    floors = {name: floor for name, floor in rank_rooms(rooms).items() if name != "__main__"}
    spots = {}
    for floor in set(floors.values()):
        row = sorted(name for name, own in floors.items() if own == floor)
        spots |= {name: (1.3 * (number - (len(row) - 1) / 2), floor) for number, name in enumerate(row)}
    figure, axes = plt.subplots(figsize=(9, 7))
    for name, targets in sorted(reduce_arrows(rooms).items()):
        for target in sorted(targets) if name in spots else ():
            axes.annotate(
                "", xy=spots[target], xytext=spots[name], zorder=1,
                arrowprops={"arrowstyle": "-|>", "color": "#9aa5b1", "linewidth": 0.8, "shrinkA": 10, "shrinkB": 10},
            )  # fmt: skip
    box = {"boxstyle": "round,pad=0.45", "facecolor": "#eef3f8", "edgecolor": "#40566e"}
    for name, spot in spots.items():
        axes.text(*spot, name, ha="center", va="center", fontsize=9, family="monospace", bbox=box, zorder=2)
    axes.set_xlim(min(x for x, _ in spots.values()) - 0.7, max(x for x, _ in spots.values()) + 0.7)
    axes.set_ylim(0.4, max(floors.values()) + 0.6)
    axes.axis("off")
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def main() -> None:
    """Print the figures and the floors, or draw them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the rooms as SVG")
    picture = parser.parse_args().picture
    modules, arrows = find_modules(), find_imports()
    rooms = merge_rooms(arrows)
    circles = find_circles(rooms)
    if picture:
        draw_rooms(rooms, picture)
        return
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in modules.items()}
    long = sorted((name for name in lengths if lengths[name] > LONG), key=lengths.__getitem__, reverse=True)
    print(f"modules: {len(modules)}, lines: {sum(lengths.values()):,}")
    told = ", ".join(f"{name} {lengths[name]}" for name in long)
    print(f"files of more than {LONG} lines (goal: none): {told or 'none'}")
    entries = {name.split(".")[0] for name in modules} - {"", "__main__"}
    print(f"files and folders directly under the package (goal: at most 28): {len(entries)}")
    print(f"pairs of rooms that import each other (goal: at most 168): {sum(map(len, rooms.values()))}")
    print(f"circles between rooms: {circles or 'none'}; between modules: {find_circles(arrows) or 'none'}")
    if not circles:
        floors = rank_rooms(rooms)
        print(f"longest chain of imports (goal: at most 11 rooms): {max(floors.values())}")
        for number in range(max(floors.values()), 0, -1):
            print(f"{number:3} {', '.join(sorted(name for name, own in floors.items() if own == number))}")


if __name__ == "__main__":
    main()
