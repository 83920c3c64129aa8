"""The commands that inspect data before training: ``fedshift data ...`` and ``fedshift diagnose``."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import fields, replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..config.spec import DataSpec
from ..console.printing import Console
from ..console.terminal import describe_cache, make_console, print_line, print_parts, show_loading
from ..utils.errors import UsageError, as_flag, unknown_name
from ..utils.files import require_writable, write_atomically
from ..utils.words import is_information

if TYPE_CHECKING:
    from ..data.datasets._card import Card
    from ..data.federation import Federation

LOOKED_AT = (64, 64)
"""Height and width, in pixels, of displayed images if the data have several sizes."""
Where = Annotated[str, Parameter(help="Directory of your own, benchmark or embedded data, as for --data.")]
Reading = Annotated[DataSpec, Parameter(name="*")]
Root = Annotated[
    str | None,
    Parameter(
        help="Directory that holds the files of benchmarks; by default the one that FEDSHIFT_DATA names, or data."
    ),
]
Json = Annotated[Path | None, Parameter(help="File to write the findings to.")]

data = App(name="data", help="List, fetch, check and show data, and the cache of decoded images.")


@data.command(name="list")
def data_list(*, root: Root = None) -> int:
    """List the embedded data and the papers' benchmarks: clients, classes, sizes, license, where to get them."""
    from ..config.expressions import EMBEDDED, find_user_function
    from ..data.sources import data_root

    console, place = make_console(), data_root(DataSpec(root=root))
    for name, function in EMBEDDED.items():
        made: Federation = find_user_function("data", function)()
        facts = f" embedded: {len(made.clients)} clients, {made.outputs}. {made.note}\n"
        print_parts(console, [Text.assemble((name, "bold"), facts)])
    table = Table(title=f"benchmarks, with files under {place}", box=None, title_justify="left", padding=(0, 2, 1, 0))
    for column in ("name", "here"):
        table.add_column(column, no_wrap=True)
    table.add_column("what it is, license, where to get it", overflow="fold")
    for name, card in list_cards().items():
        here = "made" if card.generated else "yes" if card.present(name, place) else "no"
        who = f"Clients: {', '.join(card.clients)}" if len(card.clients) > 1 else "One client"
        lines = (
            f"{card.title}. {who}; {card.classes or 'no'} classes. {card.samples}.",
            f"Source: {card.source}. License: {card.license}.",
            f"{card.homepage}{' (or fedshift data fetch ' + name + ')' if card.remotes else ''}",
        )
        table.add_row(name, here, Text("\n".join(lines)))
    print_parts(console, [table])
    return 0


@data.command
def fetch(name: str, *, root: Root = None) -> int:
    """Download a benchmark from its publisher, verified: the only command that uses the network.

    Args:
        name: Benchmark, see `fedshift data list`.

    """
    from ..data.downloads import fetch as download
    from ..data.sources import data_root

    console, place = Console(), data_root(DataSpec(root=root))
    with show_loading(console) as progress:
        files = download(name, find_card(name), place, progress=progress)
    print_parts(console, map(str, files))
    return 0


@data.command
def check(where: Where, spec: Reading = DataSpec(), *, json: Json = None) -> int:
    """Check for problems that would spoil an experiment: duplicates, leakage, missing classes, constant features.

    Unreadable images are skipped and listed. The exit code is 1 if something must be corrected before training, unless
    --on-data-error allows training to continue.
    """
    from ..data.checks.quality import drop_said, examine
    from ..data.federation import LAZY, encode_targets
    from ..data.sources import apply_splits, load_federation, load_source
    from ..diagnosis.overview import describe, describe_grids, render_quality

    console = make_console()
    _refuse_file(json and json.absolute().parent)
    with show_loading(console) as progress:
        lenient = replace(spec, on_data_error="warn") if Path(where).exists() else spec
        made = load_source(where, lenient, progress, size_if_mixed=LOOKED_AT)
        if spec.split or spec.samples or spec.validation:
            made = apply_splits(made, spec)
        found, refusal = examine(made), ""
        try:
            made = scale_alike(made, encode_targets(load_federation(where, spec, progress)))
        except UsageError as error:
            refusal = f"Training would refuse these data: {error.render(as_flag)}."
    notices = drop_said(
        made.notices, (*(finding.text for finding in found.findings), LAZY)
    )  # which is about this command
    grids = describe_grids(made)
    print_parts(console, [describe(made), *([grids] if grids else []), *_explain_inputs(made)])
    print_parts(console, [*format_notices(replace(made, notices=notices, faults=())), *render_quality(found)])
    if refusal:
        print_parts(console, [Text(refusal, style="bold red")])
    _write_json(console, {**found.as_dict(), "notices": (*made.notices, *made.faults), "refusal": refusal}, json)
    return int(bool(refusal or (found.of("error") and spec.on_data_error in (None, "refuse"))))


@data.command
def show(where: Where, spec: Reading = DataSpec(), *, out: Path | None = None, pictures: bool = True) -> int:
    """Draw each client's data: a sheet of samples, and the distribution of classes.

    Args:
        out: Directory for the pictures, and for split.csv with --split; by default shown/NAME.
        pictures: Draw the sheet of samples.

    """
    from ..data.sources import load_source, prepare_clients, write_assignment
    from ..diagnosis.overview import describe, draw_overview
    from ..results.run_directory import to_file_name

    console = make_console()
    _refuse_file(out)
    with show_loading(console) as progress:
        source = load_source(where, spec, progress, size_if_mixed=LOOKED_AT)
        made = prepare_clients(source, replace(spec, allow_single_class=True))
        directory = out or Path("shown") / to_file_name(made.name)
        _refuse_file(directory)
        files = draw_overview(made, directory, pictures=pictures)
        if spec.split:
            files.append(directory / "split.csv")
            write_atomically(files[-1], write_assignment(source, spec).encode())
    print_parts(console, [describe(made), *_explain_inputs(made), *format_notices(made), *map(str, files)])
    return 0


def _explain_inputs(made: Federation) -> Iterator[Text]:
    """Yield the layout of samples with several inputs, whose single values are not compared or drawn."""
    if made.inputs:
        named = ", ".join(map(str, made.inputs))
        yield Text(f"Inputs: {named}. Their values are not compared or drawn by column.")


@data.command
def cache(*, clear: Annotated[bool, Parameter(negative=())] = False) -> int:
    """Print the size, place and limit of the cache of decoded images (FEDSHIFT_CACHE_LIMIT, in gigabytes).

    Args:
        clear: Remove all of them. Programs that use some continue; later ones decode the files again.

    """
    from ..data.files import cache
    from ..report.formatting import format_bytes
    from ..utils.files import cache_directory

    directory = cache_directory()
    use = describe_cache(directory)
    if clear:
        cache.clear(directory)
        use = f"{use}, now {format_bytes(cache.count_bytes(directory))}"
    print_line(Console(), f"{directory}: {use}")
    return 0


def diagnose(
    where: Where,
    spec: Reading = DataSpec(),
    *,
    permutations: int = 999,
    limit: int = 1000,
    seed: int = 0,
    json: Json = None,
    out: Path | None = None,
    pictures: bool = True,
) -> int:
    """Report how clients differ (label skew, feature shift, quantity skew), how surely, and methods against it.

    Args:
        permutations: Number of permutations for each p-value.
        limit: Maximum number of samples of each client to examine.
        seed: Seed of subsamples, folds and permutations.
        out: Directory for a page with the table and pictures (diagnosis.html), and for the findings (found.json).
        pictures: Show training samples of each client on the page.

    """
    from ..data.federation import encode_targets
    from ..data.sources import load_federation
    from ..diagnosis.overview import describe
    from ..diagnosis.shift_report import PAGE, comparison_command, interpret, tabulate_shifts, write_page
    from ..diagnosis.shifts import diagnose as find_shifts
    from ..report.publication import print_parts as print_tables

    console = make_console()
    _refuse_file(out)
    _refuse_file(json and json.absolute().parent)
    with show_loading(console) as progress:
        alone = replace(spec, allow_single_class=True)
        made = encode_targets(load_federation(where, alone, progress, size_if_mixed=LOOKED_AT))
        found = find_shifts(made, seed=seed, permutations=permutations, limit=limit, progress=progress)
    remarks = [*made.notices, *made.faults]
    if spec.target and spec.scaling == "client":
        note = "Numbers were scaled by each client's own training rows, which takes shifts of mean and spread away; "
        remarks.append(f"{note}--scaling none shows them.")
        print_parts(console, [Text(f"Note: {remarks[-1]}", style="dim")])
    if made.sample_shape[1:] == LOOKED_AT:
        spec = replace(spec, image_size=LOOKED_AT[0])
    flags = _format_flags(where, spec)
    print_parts(console, [*format_notices(made), describe(made)])
    print_tables(console, [tabulate_shifts(found)])
    print_parts(console, [Text(f"- {sentence}") for sentence in interpret(found)])
    print_parts(console, ["To compare methods, each at its best learning rate:", comparison_command(found, flags)])
    _write_json(console, found.as_dict(), json)
    if out:
        out.mkdir(parents=True, exist_ok=True)
        _write_json(console, found.as_dict(), out / "found.json")
        print_line(console, f"Page: {write_page(found, out / PAGE, flags, remarks, pictures=pictures)}")
    return 0


def list_cards() -> dict[str, Card]:
    """Return the card of every benchmark, by name."""
    from ..config.expressions import list_catalog
    from ..data.datasets._card import get_card

    return {name: get_card(loader) for name, loader in sorted(list_catalog("data.datasets").items())}


def find_card(name: str) -> Card:
    """Return the card of a benchmark; raise :class:`UsageError` with the nearest name if there is none."""
    known = list_cards()
    if name not in known:
        raise unknown_name("benchmark", name, known)
    return known[name]


def _format_flags(where: str, spec: DataSpec) -> str:
    """Return ``where`` and the non-default settings, as text after ``--data`` on a command line."""
    words = [where]
    for field in fields(spec):
        value = getattr(spec, field.name)
        if value != field.default and field.name not in ("allow_single_class", "validation"):
            words += [f"--{field.name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def load_for_display(where: str, spec: DataSpec) -> Federation:
    """Return the clients of ``where`` as read and distributed by ``spec``, without checks that only training needs."""
    from ..data.sources import apply_splits, load_source, normalize

    with show_loading(Console()) as progress:
        made = load_source(where, spec, progress, size_if_mixed=LOOKED_AT)
    return normalize(apply_splits(made, spec), spec.normalize)


def format_notices(data: Federation) -> Iterator[RenderableType]:
    """Yield notes on the data: remarks from loading, and how images are scaled."""
    for notice in sorted((*data.notices, *data.faults), key=is_information):
        yield Text(f"Note: {notice}", style="dim" if is_information(notice) else "")
    scales = {client.train.normalization for client in data.clients if str(client.train.dtype) == "torch.uint8"}
    if len(scales) == 1:
        yield Text(f"Note: a network is given {scales.pop()}", style="dim")


def scale_alike(data: Federation, trained: Federation) -> Federation:
    """Return ``data`` with the scaling of ``trained``, the same clients as training would take them."""
    pairs = zip(data.clients, trained.clients, strict=True)
    return replace(
        data,
        clients=tuple(
            client.with_splits(
                {name: split.replace(normalization=other.train.normalization) for name, split in client.splits.items()}
            )
            for client, other in pairs
        ),
    )


def _refuse_file(directory: Path | None) -> None:
    if directory and directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory} is a file: choose another directory")
    if directory:
        require_writable(directory)


def _write_json(console: Console, facts: Any, file: Path | None) -> None:
    if file:
        write_atomically(file, (dumps(facts, indent=2) + "\n").encode())
        print_line(console, f"Written: {file}")
