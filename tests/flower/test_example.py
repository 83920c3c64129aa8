"""The example is FedBN: five lines make it so, and it equals a plain loop in torch that knows neither Flower nor us."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from flwr.app import Context, RecordDict

from fedshift.flower import QUIET, load_client_model

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "flower_fedbn"
ROUNDS, LR = 2, 0.03
SETTINGS = {"rounds": ROUNDS, "lr": LR, "fraction-evaluate": 1.0}


@pytest.fixture
def app(monkeypatch, tmp_path):
    """The example's modules, in a home of their own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
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


def run(server, client, local_grid):
    """The grid after a run of an app by five clients."""
    grid = local_grid(dict.fromkeys(range(5), client), SETTINGS)
    server(grid, Context(1, 1, {}, RecordDict(), SETTINGS))
    return grid


def test_the_example_equals_fedbn_by_hand_and_normalization_never_travels(app, local_grid):
    client_app, server_app, task = app
    grid = run(server_app.app, client_app.app, local_grid)
    shared, models = by_hand(task)
    after = torch.load("final_model.pt")
    assert after.keys() == shared.keys()
    for place, model in enumerate(models):
        found = load_client_model(task.Net(), after, place).state_dict()
        own = {name: value for name, value in model.items() if name.startswith("bn")}
        assert len(own) == 10
        assert all(torch.equal(found[name], value) for name, value in (shared | own).items())
    assert (len(grid.seen), any(message.has_error() for message in grid.seen)) == (2 * 2 * 5 * ROUNDS, False)
    assert not any(re.search(rb"\bbn\d\.|running_|num_batches", wire) for wire in uploads(grid))


def uploads(grid):
    return [wire for message, wire in zip(grid.seen, grid.wire, strict=True) if "config" not in message.content]


def test_the_pages_five_lines_are_the_difference_from_an_app_of_flower(app, local_grid):
    """Without them, the example is FedAvg in the shape of Flower's quickstart-pytorch, central evaluation included."""
    texts = {name: (EXAMPLE / "flower_fedbn" / name).read_text() for name in ("client_app.py", "server_app.py")}
    name, before, changed = "", None, 0
    for line in re.search(r"```diff\n(.*?)```", (ROOT / "docs" / "flower.md").read_text(), re.DOTALL)[1].splitlines():
        name = line.removeprefix(" # ") if line.startswith(" # ") else name
        if line.startswith("+"):
            assert texts[name].count(f"\n{line[1:]}  # FedBN: ") == 1
            texts[name] = texts[name].replace(line[1:], before or "")
            before, changed = None, changed + 1
        elif line.startswith("-"):
            before = line[1:]
    assert changed + 1 == 5
    texts["server_app.py"] = texts["server_app.py"].replace("        num_rounds", f"{before}\n        num_rounds") + (
        "\ndef global_evaluate(server_round, arrays):\n    Net().load_state_dict(arrays.to_torch_state_dict())\n"
        "from flwr.serverapp.strategy import FedAvg\n"
    )
    sides = {name: {} for name in texts}
    for name, text in texts.items():
        exec(compile(text, name, "exec"), sides[name])
        assert "fedshift" not in sides[name]
    grid = run(sides["server_app.py"]["app"], sides["client_app.py"]["app"], local_grid)
    assert grid.arrays()["bn1.running_var"] == 3 * 5 * ROUNDS
    assert torch.load("final_model.pt").keys() == app[2].Net().state_dict().keys()


@pytest.mark.slow
def test_flower_simulates_the_example_again_and_again_with_equal_results(tmp_path):
    page = (EXAMPLE / "README.md").read_text().partition("## In five")[0]
    exported = dict(each.split("=") for line in re.findall("^export ([^#\n]+)", page, re.M) for each in line.split())
    assert QUIET.items() <= exported.items()
    environment = {name: value for name, value in os.environ.items() if name not in QUIET} | exported
    environment |= {"HOME": str(tmp_path), "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run = ["flwr", "run", str(EXAMPLE), "--stream", "--federation-config", "num-supernodes=5"]
    try:
        said = [
            subprocess.run(run, env=environment, cwd=tmp_path, capture_output=True, text=True).stdout for _ in range(2)
        ]
    finally:
        subprocess.run(["pkill", "-f", str(tmp_path)], check=False)  # Flower leaves its SuperLink running
    first, second = ([float(found) for found in re.findall(r"'(?:loss|accuracy)': ([\d.]+\d)", text)] for text in said)
    assert len(first) == 2 * 3, said[0]
    assert second == pytest.approx(first, rel=1e-9)  # nodes have other numbers, and means another order
    assert len(list(tmp_path.glob(".fedshift/flower/*/*.safetensors"))) == 2 * 5
