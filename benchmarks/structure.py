"""The structure of the package, measured from its imports: ``python benchmarks/structure.py`` or ``make structure``.

A room is a file or folder directly under ``src/fedshift``. Imports are read from the source, those under
``TYPE_CHECKING`` and inside functions included; the package's own ``__init__``, which names the public API, is no room.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "fedshift"

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


def main() -> None:
    """Print the figures and the floors."""
    modules, arrows = find_modules(), find_imports()
    rooms = merge_rooms(arrows)
    circles = find_circles(rooms)
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in modules.values())
    print(f"modules: {len(modules)}, lines: {lines:,}")
    entries = {name.split(".")[0] for name in modules} - {"", "__main__"}
    print(f"files and folders directly under the package: {len(entries)}")
    print(f"pairs of rooms that import each other: {sum(map(len, rooms.values()))}")
    print(f"circles between rooms: {circles or 'none'}; between modules: {find_circles(arrows) or 'none'}")
    if not circles:
        floors = rank_rooms(rooms)
        print(f"longest chain of imports: {max(floors.values())} rooms")
        for number in range(max(floors.values()), 0, -1):
            print(f"{number:3} {', '.join(sorted(name for name, own in floors.items() if own == number))}")


if __name__ == "__main__":
    main()
