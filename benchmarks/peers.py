"""Seconds a round of fedshift, of the plain loop, and of the simulations of other libraries on the same work.

The work: 10 clients x 60 steps, batches of 50 of each client's 3,000 random samples, the network 2FNN (784-200-200-10),
SGD with a learning rate of 0.1, FedAvg, nothing evaluated. All begin with the same weights and hold the same float32
arrays in memory. ``loss`` is the final model's on all samples and shows that they did the same work; those that shuffle
(fedshift, fedjax, and flwr with its data loader) differ a little in it from those that do not.

* fedshift: ``Trial.advance`` with the engine of ``--engine``; plain: ``benchmarks/plain.py``.
* pfl: ``SimulatedBackend`` and ``FederatedAveraging`` on tensors, of which pfl slices batches.
* fedlab: ``SGDSerialClientTrainer``, ``SyncServerHandler``, ``StandalonePipeline``; a ``DataLoader`` for each client.
* fedjax: ``federated_averaging`` with ``jax.jit`` for each client's step, on the processor.
* flwr: ``run_simulation`` on Ray, an actor for each core, one thread an actor; a ``DataLoader`` for each client.
* fedlab-ready, flwr-ready: the same on batches sliced beforehand, as the plain loop has them.

Each runs in a process of its own on the same ``--threads`` cores with as many threads, one after another, ``--passes``
times over, so that what else the machine does hits all. Startup and the first round of each process are left out;
``seconds`` is the median of the other rounds of all passes, ``times`` that over fedshift's.

Run ``python benchmarks/peers.py``: about five minutes, and at first two more to make a virtual environment
(``--venv``) with this project and the peers from PyPI, in which all of them run; delete it to make it anew. Nothing
else uses the network. Standard output has a line of JSON for the environment and one for each run: what was measured,
or the error of a peer that cannot be installed, imported or run. Blazefl 2 needs Python 3.12, and 3 needs 3.14.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import venv
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"pfl": "pfl[pytorch]", "fedlab": "fedlab", "fedjax": "fedjax", "flwr": "flwr[simulation]"}
RUNS = ("fedshift", "plain", "pfl", "fedlab", "fedlab-ready", "fedjax", "flwr", "flwr-ready")
SHOWN = ("torch", "numpy", "fedshift", *PACKAGES, "jax", "torchvision", "ray")
ALIKE = {
    "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0",
    "CUDA_VISIBLE_DEVICES": "",
}  # fmt: skip
OWN = {"OMP_WAIT_POLICY": "passive"}
"""What the program fedshift sets for itself."""


def install(folder: Path) -> dict[str, str]:
    """Make the virtual environment unless it is there; the error of each peer that pip could not install."""
    done = folder / "peers.json"
    if done.exists():
        return dict(json.loads(done.read_text()))
    print(f"making {folder}", file=sys.stderr)
    venv.create(folder, with_pip=True, clear=True)
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = folder / "torch.txt"
    constraints.write_text("\n".join(pin for pin in pins if pin.startswith("torch==")))

    def pip(*what: str) -> subprocess.CompletedProcess[str]:
        command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "-c", str(constraints), *what]
        return subprocess.run(command, stderr=subprocess.PIPE, text=True)

    own = pip("--editable", str(ROOT))
    if own.returncode:
        sys.exit(f"this project cannot be installed in {folder}:\n{own.stderr}")
    errors = {}
    for peer, package in PACKAGES.items():
        print(f"installing {package}", file=sys.stderr)
        installed = pip(package)
        if installed.returncode:
            errors[peer] = f"pip install {package}: {last_line(installed.stderr)}"
    done.write_text(json.dumps(errors))
    return errors


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]


def measure(options: argparse.Namespace) -> None:
    """In the virtual environment: do one run, and print what came of it as the last line."""
    import peer_runs
    import torch

    torch.set_num_threads(options.threads)
    name, _, ready = options.run.partition("-")
    chosen = peer_runs.Options(rounds=options.rounds, threads=options.threads, engine=options.engine, ready=bool(ready))
    seconds, state = getattr(peer_runs, name)(chosen)
    print(json.dumps({"rounds": seconds, "loss": peer_runs.final_loss(state)}), flush=True)


def versions() -> None:
    """In the virtual environment: print the versions of what is compared."""
    found = {}
    for package in SHOWN:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    print(json.dumps({"python": platform.python_version(), **found}))


def one(python: Path, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """What run ``name`` printed, in a process of its own; ``error`` where it failed, ``note`` where it has one."""
    command = [str(python), __file__, "--run", name]
    for each in ("rounds", "threads", "engine"):
        command += [f"--{each}", str(getattr(options, each))]
    environment = {**os.environ, **ALIKE, **(OWN if name == "fedshift" else {})}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        return {"error": last_line(done.stderr)}
    notes = [line.removeprefix("NOTE: ") for line in done.stderr.splitlines() if line.startswith("NOTE: ")]
    return {**json.loads(last_line(done.stdout)), **({"note": notes[0]} if notes else {})}


def compare(options: argparse.Namespace) -> None:
    errors = install(options.venv)
    python = options.venv / "bin" / "python"
    cores = sorted(os.sched_getaffinity(0))[: options.threads]
    os.sched_setaffinity(0, cores)  # inherited by every run and by Ray's actors
    shown = subprocess.run([str(python), __file__, "--run", "versions"], check=True, stdout=subprocess.PIPE, text=True)
    about = {"passes": options.passes, "threads": options.threads, "cores": cores, "engine": options.engine}
    print(json.dumps({**json.loads(shown.stdout), **about}), flush=True)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in options.only}
    for number in range(options.passes):
        for name, found in results.items():
            if error := errors.get(name.partition("-")[0]):
                found.append({"error": error})
            elif not any("error" in each for each in found):
                print(f"pass {number + 1} of {options.passes}: {name}", file=sys.stderr)
                found.append(one(python, name, options))
    own = None
    for name, found in results.items():
        failed = [each for each in found if "error" in each]
        if failed:
            print(json.dumps({"run": name, **failed[0]}), flush=True)
            continue
        seconds = [each for run in found for each in run["rounds"][1:]]
        median = statistics.median(seconds)
        own = median if name == "fedshift" else own
        line = {"run": name, "seconds": median, "times": own and median / own, "min": min(seconds), "max": max(seconds)}
        line |= {"n": len(seconds), "loss": found[0]["loss"]}
        print(json.dumps(line | {key: found[0][key] for key in ("note",) if key in found[0]}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-peers", help="where all runs are installed")
    parser.add_argument("--engine", default="sequential", help="fedshift's engine")
    parser.add_argument("--rounds", type=int, default=6, help="rounds of each process, the first left out")
    parser.add_argument("--passes", type=int, default=3, help="processes of each run")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="cores, and threads")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=RUNS, help="which runs")
    parser.add_argument("--run", choices=(*RUNS, "versions"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds < 2 or options.passes < 1:
        parser.error("--rounds must be at least 2, --passes at least 1")
    if options.run == "versions":
        versions()
    elif options.run:
        measure(options)
    else:
        compare(options)


if __name__ == "__main__":
    main()
