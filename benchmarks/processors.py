"""What the README claims, held against the demo as three kinds of processor round it.

``python benchmarks/processors.py`` runs examples/demo.toml under each of torch's settings for processors (AVX2, AVX-512
and neither) that this one has, in runs/processors, unless it is there. It prints differences in points with 95 %
intervals under the last, in bold where the interval is on the same side of 0 under all, and fails if the README has
another cell in bold.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import torch

ROOT = Path(__file__).parents[1]
SETTINGS, MINUS = ("default", "avx2", "avx512"), "\N{MINUS SIGN}"


def read_differences(setting: str) -> pd.DataFrame:
    """Return the differences of the demo under ``setting``: columns difference, low and high, in points."""
    run = ROOT / "runs" / "processors" / setting
    if not (run / "report.html").exists():
        asked = ("compare", "--config", str(ROOT / "examples" / "demo.toml"), "--out", str(run), "--quiet")
        variables = {**os.environ, "ATEN_CPU_CAPABILITY": setting}
        subprocess.run([sys.executable, "-m", "fedshift", *asked], env=variables, stdout=subprocess.DEVNULL, check=True)
    table = pd.read_csv(run / "tables" / "differences.csv", index_col=["client", "method", "reference"])
    return 100 * table[["difference", "low", "high"]]


def tabulate(tables: list[pd.DataFrame]) -> list[str]:
    """Return the lines of README's table: a row for each client, a column for each pair of methods."""
    sides = [np.sign(table["low"]) * (np.sign(table["low"]) == np.sign(table["high"])) for table in tables]
    holds = pd.concat(sides, axis=1).sum(axis=1).abs() == len(tables)
    text = tables[-1].apply(lambda row: "{:+.1f} ({:+.1f} to {:+.1f})".format(*row).replace("-", MINUS), axis=1)
    cells = text.where(~holds, "**" + text + "**").unstack(["method", "reference"], sort=False)
    heads = " | ".join(f"{method} minus {reference}" for method, reference in cells)
    rows = [" | ".join((str(client), *row)) for client, row in zip(cells.index, cells.to_numpy(), strict=True)]
    return [f"| client | {heads} |", "| --- |" + " ---: |" * cells.shape[1], *(f"| {row} |" for row in rows)]


def main() -> None:
    """Run the demo under each setting, print the table, and check README's."""
    settings = SETTINGS[: 1 + SETTINGS.index(torch.backends.cpu.get_cpu_capability().lower())]
    lines = tabulate([*map(read_differences, settings)])
    print(f"Under {', '.join(settings)}:", *lines, sep="\n")
    shown = (ROOT / "README.md").read_text(encoding="utf-8").partition(lines[0])[2].partition("\n\n")[0].splitlines()
    bold = [np.array(["**" in cell for cell in row.split("|")]) for row in (*shown[2:], *lines[2:])]
    false = [
        row for row, *pair in zip(lines[2:], bold, bold[len(lines) - 2 :], strict=False) if (pair[0] & ~pair[1]).any()
    ]
    if false or len(bold) != 2 * len(lines[2:]):
        sys.exit("\n".join(["README.md lacks this table, or claims what does not hold:", *false]))


if __name__ == "__main__":
    main()
