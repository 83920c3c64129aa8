"""The command ``fedshift leak``: images reconstructed from clients' uploads."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from ..config.spec import CompareSpec, DataSpec, Names
from ..console.printing import Console
from ..console.terminal import make_console, new_directory, print_line, print_parts, show_loading
from ..utils.errors import UsageError
from ..utils.files import require_writable
from .data import Reading

SIZE = 16
"""Height and width in pixels of the images that are attacked by default."""


def leak(
    spec: Reading = DataSpec(),
    *,
    methods: Names = "fedavg,silobn,fedbn,fixbn,gn,fedwon",
    data: str = "digits",
    model: str = "small-cnn(dense_norm=False)",
    rounds: Names = "0,10",
    batch_sizes: Names = "1,4,8",
    images: int = 2,
    seeds: int = 5,
    steps: int = 1,
    iterations: int = 150,
    lr: float = 0.03,
    out: Path | None = None,
) -> int:
    """Attack clients' uploads as a curious server could, and measure how well their images can be reconstructed.

    It uses exactly what each method sends: gradients by matching, and BatchNorm's statistics if they are shared.
    Images are resized to 16 x 16 pixels unless --image-size says otherwise; small ones are attacked faster. With --out,
    the same command resumes where it was interrupted.

    Args:
        methods: Methods, comma-separated, as for fedshift compare.
        data: Data to use: 8-bit images with one class each, as for fedshift compare.
        model: Network, as for fedshift compare.
        rounds: Rounds of training after which uploads are attacked, comma-separated; 0 is the fresh network.
        batch_sizes: Samples of the batch behind an upload, comma-separated.
        images: Images attacked in each case with each seed, rounded up to whole batches.
        seeds: Number of seeds of networks, batches and starting points; 3 or more give intervals.
        steps: Local steps on the batch before the upload.
        iterations: Iterations of each attack.
        lr: Learning rate of local training.
        out: Directory for tables, records and pictures; by default a new one under runs/.

    """
    from ..diagnosis.checked_experiment import make_checked
    from ..experiments.python_settings import make_spec
    from ..representations.leakage import LeakageSettings, measure_leakage
    from ..representations.leakage.rendering import render_leakage, write_files

    setting = LeakageSettings(
        rounds=_parse_numbers("rounds", rounds), batch_sizes=_parse_numbers("batch-sizes", batch_sizes), images=images,
        steps=steps, iterations=iterations,
    )  # fmt: skip
    console, place = make_console(), out or new_directory("leak")
    require_writable(place)
    with show_loading(Console()) as progress:
        given = {"methods": methods, "data": data, "model": model, "seeds": seeds, "lr": lr}
        given |= asdict(replace(spec, image_size=spec.image_size or SIZE))
        experiment = make_checked(make_spec(setting.complete(given), CompareSpec), progress)
        found = measure_leakage(experiment, setting, place, progress)
    print_parts(console, [*render_leakage(found), *(f"note: {notice}" for notice in experiment.data.notices)])
    for file in write_files(found, place):
        print_line(console, f"Written: {file}")
    return 0


def _parse_numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError as error:
        raise UsageError(f"{name}={text!r}: write whole numbers with commas, for example 1,4,8") from error
