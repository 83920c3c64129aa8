"""The commands that look at data: ``fedshift data list|fetch|check|show|cache`` and ``fedshift diagnose``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter
from rich.console import Console

from ..config.spec import DataSpec
from ..console.session import cache_use, make_console, show_loading
from ..utils.files import write_atomically

data = App(name="data", help="List, fetch, check and show data, and the cache of decoded images.")


@data.command(name="list")
def data_list(*, root: str | None = None) -> int:
    """List the embedded data and the papers' benchmarks: clients, classes, sizes, license, where to get them.

    Parameters
    ----------
    root
        Directory that holds the files of benchmarks; without it the one that FEDSHIFT_DATA names, else data.

    """
    from ..data.sources import data_root
    from .data_commands import benchmark_table

    return _print_parts(make_console(), benchmark_table(data_root(DataSpec(root=root))))


@data.command
def fetch(name: str, *, root: str | None = None, hub: bool = False) -> int:
    """Download a benchmark from its publisher, checked and resumable: the one command that uses the network.

    Parameters
    ----------
    name
        A benchmark, see `fedshift data list`.
    root
        Directory to keep it in; without it the one that FEDSHIFT_DATA names, else data.
    hub
        From Hugging Face in place of the publisher (needs `pip install 'fedshift[hub]'`).

    """
    from ..data.downloads import fetch as download
    from ..data.sources import data_root
    from .data_commands import find_card

    console, place = Console(), data_root(DataSpec(root=root))
    with show_loading(console) as progress:
        files = download(name, find_card(name), place, progress=progress, hub=hub)
    for file in files:
        console.print(str(file), markup=False, highlight=False, soft_wrap=True)
    return 0


@data.command
def check(where: str, spec: Annotated[DataSpec, Parameter(name="*")] = DataSpec(), *, json: Path | None = None) -> int:
    """Look for what would spoil an experiment: duplicates, leakage, missing classes, constant features.

    The exit code is 1 where something must be mended before training.

    Parameters
    ----------
    where
        A directory of your own, a benchmark or the embedded data, as for --data.
    spec
        How data are read and prepared.
    json
        File to write the findings to.

    """
    from .data_commands import check_data

    console = make_console()
    with show_loading(console) as progress:
        facts, parts, faulty = check_data(where, spec, progress)
    return _print_parts(console, parts, facts, json) or int(faulty)


@data.command
def show(where: str, spec: Annotated[DataSpec, Parameter(name="*")] = DataSpec(), *, out: Path | None = None) -> int:
    """Draw what each client has: a sheet of samples, and how classes are shared out.

    Parameters
    ----------
    where
        A directory of your own, a benchmark or the embedded data, as for --data.
    spec
        How data are read and prepared.
    out
        Directory for the pictures, and for split.csv where a split is asked for; without it, shown/<name>.

    """
    from .data_commands import show_data

    console = make_console()
    with show_loading(console) as progress:
        parts, files = show_data(where, spec, out, progress)
    _print_parts(console, parts)
    for file in files:
        console.print(str(file), markup=False, highlight=False, soft_wrap=True)
    return 0


@data.command
def cache(*, clear: Annotated[bool, Parameter(negative=())] = False) -> int:
    """Say how many bytes of decoded images are kept, where, and how many may be (FEDSHIFT_CACHE_LIMIT, in gigabytes).

    Parameters
    ----------
    clear
        Remove them all. Programs that use some go on; later ones decode the files again.

    """
    from ..data.files import image_store
    from ..report.formatting import format_bytes
    from ..utils.files import cache_directory

    images = image_store.images_in(cache_directory())
    before = cache_use(images)
    if clear:
        image_store.clear(images)
        before = f"{before}, now {format_bytes(image_store.taken(images))}"
    return _print_parts(Console(), [f"{images}: {before}"])


def diagnose(
    where: str,
    spec: Annotated[DataSpec, Parameter(name="*")] = DataSpec(),
    *,
    permutations: int = 999,
    features: Literal["pixels", "network"] = "pixels",
    limit: int = 1000,
    seed: int = 0,
    json: Path | None = None,
) -> int:
    """Say how clients differ (label skew, feature shift, quantity skew, concept shift), how much, and what helps.

    Parameters
    ----------
    where
        A directory of your own, a benchmark or the embedded data, as for --data.
    spec
        How data are read and prepared.
    permutations
        Permutations behind each p-value.
    features
        What looks are compared by: pixels (or columns), or a small network's features.
    limit
        Samples of each client that are looked at.
    seed
        Seed of subsamples, folds and permutations.
    json
        File to write the findings to.

    """
    from .data_commands import diagnose_data

    console = make_console()
    with show_loading(console) as progress:
        found, parts = diagnose_data(
            where, spec, progress, permutations=permutations, features=features, limit=limit, seed=seed
        )
    return _print_parts(console, parts, found.as_dict(), json)


def _print_parts(
    console: Console, parts: Iterable[Any], facts: Mapping[str, Any] | None = None, file: Path | None = None
) -> int:
    """Print ``parts`` (text as one line each, to be copied), and write ``facts`` to ``file``."""
    for part in parts:
        console.print(part, markup=False, highlight=False, soft_wrap=isinstance(part, str))
    if file:
        write_atomically(file, (dumps(facts, indent=2) + "\n").encode())
        console.print(f"Written: {file}", markup=False, highlight=False, soft_wrap=True)
    return 0
