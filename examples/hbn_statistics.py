"""Prints what it costs HBN that its statistics for evaluation are measured on the model before the round's, not after.

python examples/hbn_statistics.py

Settings are those of guide.toml: five embedded clients, twelve rounds, one seed; the learning rate is constant, as
there, or ends near zero. After each round the server's model is measured with the statistics that it has, and with
those that all clients would measure on that very model, as the authors' code has them do. A cell is the share of all
clients' test samples that the model classifies correctly.
"""

import tomllib
from pathlib import Path

import torch

import fedshift
from fedshift.core.kernel import load_state
from fedshift.core.method import Method
from fedshift.core.optimizer import SGD
from fedshift.core.rule import Received
from fedshift.core.schedule import Cosine, Schedule
from fedshift.core.server_round import fold
from fedshift.core.states import Update
from fedshift.core.work import Work
from fedshift.evaluation.metrics import evaluate
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods import METHODS as CATALOG
from fedshift.models.digits import small_cnn
from fedshift.utils.state import State

GUIDE = tomllib.loads(Path(__file__).with_name("guide.toml").read_text(encoding="utf-8"))
METHODS = "hbn, hbn(momentum=1.0)"
SCHEDULES = {"constant": Schedule(), "cosine": Cosine(rounds=GUIDE["rounds"])}


def classify(trial: Trial, state: State) -> float:
    """Return the share of correct test samples of all clients together, in percent."""
    parts = [client.test for client in trial.data.clients]
    found = [evaluate(trial.plan, state, part, trial.data.task, trial.data.classes) for part in parts]
    return 100 * sum(sum(counts["hits"]) for counts in found) / sum(counts["samples"] for counts in found)


def measure_again(trial: Trial) -> State:
    """Return the server's model with the statistics that all clients measure on it."""
    plan, received = trial.plan, []
    for name in trial.data.names:
        client = trial.clients[name]
        seen = trial.engine.see(name, trial.engine.draw_batches(name, client))
        measured = load_state(plan, client, trial.server, seen=seen).memory
        update = Update(shared={}, memory=measured, weight=1.0, steps=0)
        received.append(Received(client=name, update=update, weight=1.0, size=1.0, share=1.0))
    return trial.server.shared | fold(plan, trial.server, received, {}).shared


def compare(method: Method, schedule: Schedule, data: fedshift.Federation) -> list[tuple[float, float]]:
    """Return what each round's model classifies correctly with its own statistics, and with new ones."""
    optimizer, work = SGD(lr=GUIDE["lr"], schedule=schedule), Work(batch_size=GUIDE["batch_size"], epochs=1)
    settings = Settings(rounds=GUIDE["rounds"], work=work, optimizer=optimizer, engine="sequential")
    trial, pairs = Trial(method, small_cnn, data, settings, 0), []
    for _ in range(settings.rounds):
        trial.advance()
        pairs.append((classify(trial, trial.server.shared), classify(trial, measure_again(trial))))
    return pairs


def main() -> None:
    """Print the table, with the differences' mean, the largest and the last."""
    torch.set_num_threads(GUIDE["threads"])
    data = fedshift.digits().limit_samples(GUIDE["samples"])
    for method in CATALOG.parse_all(METHODS):
        for name, schedule in SCHEDULES.items():
            pairs = compare(method, schedule, data)
            print(f"{method.name}, {name}".ljust(26) + "".join(f"{number:6}" for number in range(1, len(pairs) + 1)))
            for title, cells in zip(("model before", "model after"), zip(*pairs, strict=True), strict=True):
                print(title.ljust(26) + "".join(f"{cell:6.1f}" for cell in cells))
            gains = [after - before for before, after in pairs]
            mean = sum(gains) / len(gains)
            print(f"mean difference {mean:+.1f}, largest {max(gains):+.1f}, last {gains[-1]:+.1f} points\n")


if __name__ == "__main__":
    main()
