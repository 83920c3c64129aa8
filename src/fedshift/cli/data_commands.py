"""What ``fedshift data`` and ``fedshift diagnose`` do: a person's data looked at before anything trains on them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..config.expressions import list_catalog, resolve
from ..config.spec import DataSpec
from ..data.datasets._card import Card, get_card
from ..data.federation import Federation
from ..data.files.read_options import Progress
from ..data.sources import EMBEDDED, apply_splits, load_federation, load_source, prepare_clients, write_assignment
from ..diagnosis import Diagnosis, diagnose
from ..diagnosis import render_diagnosis as render_diagnosis
from ..diagnosis.overview import describe, draw_overview, render_quality
from ..diagnosis.quality import examine
from ..results.run_directory import to_file_name
from ..utils.errors import UsageError, unknown_name
from ..utils.files import write_atomically

LOOKED_AT = 64
"""Pixels each way to which images are brought for looking at them, where files differ in size."""


def all_cards() -> dict[str, Card]:
    """The card of every benchmark, by name."""
    return {name: get_card(loader) for name, loader in sorted(list_catalog("data.datasets").items())}


def find_card(name: str) -> Card:
    """The card of one benchmark; :class:`UsageError` naming the nearest where there is none."""
    known = all_cards()
    if name not in known:
        raise unknown_name("benchmark", name, known)
    return known[name]


def benchmark_table(root: Path) -> Iterator[RenderableType]:
    """What is embedded and what is known of each benchmark, and whether its files are under ``root``."""
    for name, function in EMBEDDED.items():
        made: Federation = resolve("data", function)()
        said = f" embedded: {len(made.clients)} clients, {made.classes} classes. {made.note}\n"
        yield Text.assemble((name, "bold"), said)
    table = Table(title=f"benchmarks, with files under {root}", box=None, title_justify="left", padding=(0, 2, 1, 0))
    for column in ("name", "here"):
        table.add_column(column, no_wrap=True)
    table.add_column("what it is, license, where to get it", overflow="fold")
    for name, card in all_cards().items():
        here = "made" if card.generated else "yes" if card.present(name, root) else "no"
        who = f"Clients: {', '.join(card.clients)}" if len(card.clients) > 1 else "One client"
        lines = (
            f"{card.title}. {who}; {card.classes} classes. {card.samples}.",
            f"Source: {card.source}. License: {card.license}.",
            f"{card.homepage}{' (or fedshift data fetch ' + name + ')' if card.remotes or card.hub else ''}",
        )
        table.add_row(name, here, Text("\n".join(lines)))
    yield table


def check_data(
    where: str, spec: DataSpec, progress: Progress | None
) -> tuple[dict[str, Any], Iterator[RenderableType], bool]:
    """What is wrong with the data, how to say it, and whether it must be mended before training.

    Broken images are skipped and named; what training would refuse is said last.
    """
    own = Path(where).exists()
    data = load_source(where, replace(spec, on_unreadable="skip") if own else spec, progress, differing=LOOKED_AT)
    if spec.split or spec.samples or spec.validation:
        data = apply_splits(data.fit_images(spec.image_size), spec)
    found, refusal = examine(data), ""
    try:
        load_federation(where, spec, progress)
    except UsageError as error:
        refusal = f"Training would refuse these data: {error}."
    facts = {**found.as_dict(), "notices": data.notices, "refusal": refusal}
    last = [Text(refusal, style="bold red")] if refusal else []
    return (
        facts,
        iter([describe(data), *_format_notices(data), *render_quality(found), *last]),
        bool(refusal or found.of("error")),
    )


def show_data(
    where: str, spec: DataSpec, out: Path | None, progress: Progress | None
) -> tuple[Iterator[RenderableType], list[Path]]:
    """A table of what clients have, and pictures of it (with the split as CSV, where there is one) in ``out``."""
    source = load_source(where, spec, progress, differing=LOOKED_AT).fit_images(spec.image_size)
    data = prepare_clients(source, replace(spec, allow_single_class=True))
    directory = out or Path("shown") / to_file_name(data.name)
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory} is a file: choose another directory (--out)")
    files = draw_overview(data, directory)
    if spec.split:
        files.append(directory / "split.csv")
        write_atomically(files[-1], write_assignment(source, spec).encode())
    return iter([describe(data), *_format_notices(data)]), files


def diagnose_data(
    where: str,
    spec: DataSpec,
    progress: Progress | None,
    *,
    permutations: int,
    features: Literal["pixels", "network"],
    limit: int,
    seed: int,
) -> tuple[Diagnosis, Iterator[RenderableType]]:
    """How the clients differ, and how to say it."""
    data = load_federation(where, replace(spec, allow_single_class=True), progress, differing=LOOKED_AT)
    found = diagnose(data, seed=seed, permutations=permutations, features=features, limit=limit, progress=progress)
    if data.sample_shape[1:] == (LOOKED_AT, LOOKED_AT):
        spec = replace(spec, image_size=LOOKED_AT)
    parts = [*_format_notices(data), *render_diagnosis(found, _format_flags(where, spec))]
    if spec.target and spec.scaling == "client":
        said = "Numbers were scaled by each client's own training rows, which takes shifts of mean and spread away; "
        parts.insert(0, Text(f"Note: {said}--scaling none shows them.", style="dim"))
    return found, iter(parts)


def _format_flags(where: str, spec: DataSpec) -> str:
    """``where`` and the settings that are not as by default, as they follow ``--data`` on a command line."""
    words = [where]
    for field in fields(spec):
        value = getattr(spec, field.name)
        if value != field.default and field.name not in ("allow_single_class", "validation"):
            words += [f"--{field.name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def _format_notices(data: Federation) -> Iterator[RenderableType]:
    for notice in data.notices:
        yield Text(f"Note: {notice}", style="dim")
    scales = {client.train.normalization for client in data.clients if str(client.train.store.dtype) == "torch.uint8"}
    if len(scales) == 1:
        yield Text(f"Note: a network is given {scales.pop()}", style="dim")
