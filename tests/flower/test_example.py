"""The example is FedBN: five lines make it so, and it equals a plain loop in torch that knows neither Flower nor us."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, Context, RecordDict

from fedshift.flower import QUIET
from fedshift.flower.transport.arrays import from_record
from fedshift.results.checkpoint import load_checkpoint

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower_fedbn"
ROUNDS, LR = 2, 0.03


@pytest.fixture
def app(monkeypatch, tmp_path):
    """The example's modules, in a home of their own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from flower_fedbn import client_app, server_app, task

    yield client_app, server_app, task
    for name in [name for name in sys.modules if name.partition(".")[0] == "flower_fedbn"]:
        del sys.modules[name]


def by_hand(task):
    """FedBN in plain torch: the shared entries after ``ROUNDS`` rounds, and each client's whole model."""
    torch.manual_seed(0)
    shared = task.Net().state_dict()
    models = [task.Net() for _ in range(5)]
    for number in range(1, ROUNDS + 1):
        sums, total = {}, 0
        for place, model in enumerate(models):
            model.load_state_dict({n: x for n, x in shared.items() if not n.startswith("bn")}, strict=False)
            x, y = task.load_data(place, "train")
            task.train(model, x, y, LR, seed=number)
            for name, value in model.state_dict().items():
                sums[name] = sums.get(name, 0) + len(y) * value.double()
            total += len(y)
        shared = {name: (value / total).float() for name, value in sums.items()}
    return {n: x for n, x in shared.items() if not n.startswith("bn")}, [model.state_dict() for model in models]


def test_the_example_equals_fedbn_by_hand_and_normalization_never_travels(app, local_grid, tmp_path):
    client_app, server_app, task = app
    run_config = {"rounds": ROUNDS, "lr": LR, "experiment": "digits"}
    grid = local_grid(dict.fromkeys(range(5), client_app.app), run_config)
    server_app.app(grid, Context(1, 1, {}, RecordDict(), run_config))
    shared, models = by_hand(task)
    broadcast = [m for m in grid.seen if m.metadata.message_type == "evaluate" and "arrays" in m.content][-1]
    after = from_record(broadcast.content["arrays"])
    assert after.keys() == shared.keys()
    for name, value in shared.items():
        assert torch.equal(after[name], value), name
    for place, model in enumerate(models):
        kept, _ = load_checkpoint(tmp_path / ".fedshift" / "flower" / "digits" / f"{place}.safetensors")
        own = {name: value for name, value in model.items() if name.startswith("bn")}
        assert len(own) == 10
        for name, value in own.items():
            assert torch.equal(kept[f"{ROUNDS}/{name}"], value), name
    assert len(grid.seen) == 2 * 2 * 5 * ROUNDS
    assert not any(message.has_error() for message in grid.seen)
    assert {name for name in grid.arrays() if name.startswith("bn")} == set()
    assert not any(re.search(rb"\bbn\d|running_|num_batches", wire) for wire in grid.wire)


def test_without_the_mod_the_server_stops_with_what_to_do(app, local_grid, monkeypatch):
    from flwr.clientapp import ClientApp

    from fedshift import FedshiftError

    client_app, server_app, task = app
    bare = ClientApp()
    bare.train()(lambda message, context: client_app.train_one_round(_whole(message, task), context))
    run_config = {"rounds": 1, "lr": LR}
    with pytest.raises(FedshiftError, match="keep_local"):
        server_app.app(
            local_grid(dict.fromkeys(range(5), bare), run_config), Context(1, 1, {}, RecordDict(), run_config)
        )


@pytest.mark.slow
def test_flower_simulates_the_example_again_and_again_with_equal_results(tmp_path):
    switches = {"HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **QUIET, **switches, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    run = ["flwr", "run", str(EXAMPLE), "--stream", "--federation-config", "num-supernodes=5"]
    try:
        said = [subprocess.run(run, env=environment, capture_output=True, text=True).stdout for _ in range(2)]
    finally:
        subprocess.run(["pkill", "-f", str(tmp_path)], check=False)  # Flower leaves its SuperLink running
    first, second = ([float(found) for found in re.findall(r"'(?:loss|accuracy)': ([\d.]+\d)", text)] for text in said)
    assert len(first) == 2 * 3, said[0]
    assert second == pytest.approx(first, rel=1e-9)  # nodes have other numbers, and means another order
    assert not (tmp_path / ".fedshift").exists()


def _whole(message, task):
    """A client that fills in normalization by itself, as one with ``strict=False`` does."""
    state = task.Net().state_dict() | from_record(message.content["arrays"])
    message.content["arrays"] = ArrayRecord(state)
    return message


def test_five_lines_are_marked():
    marked = [line for path in EXAMPLE.rglob("*.py") for line in path.read_text().splitlines() if "# FedBN:" in line]
    assert sorted(line.partition("# FedBN: ")[2][0] for line in marked) == list("12345")
