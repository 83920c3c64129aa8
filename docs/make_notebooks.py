"""Write the examples of ``docs/notebooks.md`` as Jupyter notebooks, one for each section with code.

``python docs/make_notebooks.py`` writes ``examples/notebooks/*.ipynb``. The text of a section becomes the first cell,
and each ``# %%`` of its code another one. A test checks that the notebooks are those of the page, whose code it runs.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE, OUT = ROOT / "docs" / "notebooks.md", ROOT / "examples" / "notebooks"
BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def make_cells(text: str) -> Iterator[dict[str, Any]]:
    """Yield the cells of a section: its text without links, and its code."""
    kinds = [("markdown", BLOCK.split(text)[0])]
    for code in BLOCK.findall(text):
        kinds += [("code", cell) for cell in re.split(r"^# %%", code, flags=re.MULTILINE) if cell.strip()]
    for number, (kind, source) in enumerate(kinds):
        source = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", source) if kind == "markdown" else re.sub(r"^ ", "# ", source)
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": source.strip().splitlines(True)}
        yield cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def make_notebooks() -> dict[Path, str]:
    """Return the text of each notebook by its path."""
    found = {}
    for section in re.split(r"^(?=## )", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        if BLOCK.search(section):
            title = section.partition("\n")[0].removeprefix("## ")
            name = re.sub(r"\W+", "-", title.lower())
            notebook = {"cells": list(make_cells(section)), "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
            found[OUT / f"{name}.ipynb"] = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    return found


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    for path, text in make_notebooks().items():
        path.write_text(text, encoding="utf-8")
