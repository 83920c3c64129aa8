"""Draw the figures of docs/methods: each method beside FedAvg in a tiny run on the embedded digits.

``python examples/guide.py`` draws all, ``python examples/guide.py fedbn gn`` some. Settings and methods are those of
guide.toml, so ``fedshift compare --config examples/guide.toml --methods "fedavg, fedbn"`` shows the same curves.
FedNova alone has other clients: it differs from FedAvg only where clients take unequal numbers of steps.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

import fedshift
from fedshift.methods import METHODS
from fedshift.report.figures import make_figures, to_svg

IMAGES = Path(__file__).parents[1] / "docs" / "methods" / "images"
SETTINGS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SPOKEN = {re.split(r"\W", text)[0]: text for text in SETTINGS["methods"]}
BESIDE = {"fedavg": ("centralized", "single")}
UNEQUAL = {"pen": 256, "photo": 128, "print": 64, "faded": 32, "worn": 32}


def draw(pages: Iterable[str], data: fedshift.Federation) -> None:
    """Run the methods of these pages and FedAvg on ``data``, each once, and write the figure of each page."""
    shown = {page: [name for name in SPOKEN if name in ("fedavg", page, *BESIDE.get(page, ()))] for page in pages}
    run = {name: METHODS.parse(SPOKEN[name]) for name in SPOKEN if any(name in names for names in shown.values())}
    settings = {key: SETTINGS[key] for key in ("model", "batch_size", "rounds", "lr", "evaluate_every")}
    study = fedshift.compare([*run.values()], data=data, **settings).summary
    IMAGES.mkdir(parents=True, exist_ok=True)
    for page, names in shown.items():
        part = replace(study, methods={run[name].label: study.methods[run[name].label] for name in names})
        drawn = to_svg(make_figures(part)["accuracy-macro"], background="white")
        (IMAGES / f"{page}.svg").write_text(drawn, encoding="utf-8")


def main(wanted: list[str]) -> None:
    """Draw the figures of these pages, or of all."""
    for name in wanted:
        if name not in SPOKEN:
            sys.exit(f"no page {name!r}: there are {', '.join(SPOKEN)}")
    torch.set_num_threads(SETTINGS["threads"])
    pages, digits = dict.fromkeys(wanted or SPOKEN), fedshift.digits()
    if equal := [page for page in pages if page != "fednova"]:
        draw(equal, digits.limit_samples(SETTINGS["samples"]))
    if "fednova" in pages:
        clients = (digits.select_clients([name]).limit_samples(samples).clients[0] for name, samples in UNEQUAL.items())
        draw(["fednova"], replace(digits, clients=tuple(clients)))


if __name__ == "__main__":
    main(sys.argv[1:])
