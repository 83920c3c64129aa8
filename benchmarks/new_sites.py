"""New sites without labels, batch by batch: each policy adapts to test inputs as they come, and is measured on them.

``python benchmarks/new_sites.py RUN [SEEDS]``, where RUN is what ``fedshift compare --leave-out`` wrote, whose tables
have the policies that adapt to all training inputs at once. The models of the first SEEDS seeds (by default one) are
restored. The columns are test inputs in batches of 1, 8 and 64 in random order, of 8 of one class each, and one stream
in random order and one sorted by class, in batches of 8. Each batch begins at the model of the run; in a stream Tent
goes on from batch to batch, as its authors run it, and the others, which keep nothing, are left out. Means over clients
and seeds of the accuracy in percent are printed; ``unchanged`` adapts nothing. What was measured is kept in RUN, and a
second call goes on.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from fedshift.cli.leave_out import MEASURED
from fedshift.data.federation import ClientData
from fedshift.data.samples import Samples
from fedshift.evaluation.batch_norm import reestimate_statistics
from fedshift.evaluation.metrics import evaluate
from fedshift.evaluation.policies.tent import EntropyMinimizer
from fedshift.evaluation.policy import POLICIES as CATALOG
from fedshift.evaluation.policy import list_policies
from fedshift.experiments.restoration import iterate_trials, load_experiment, restore_trial
from fedshift.experiments.trial import Trial
from fedshift.utils.random_streams import stream
from fedshift.utils.state import State

Rows = list[tuple[str, str, float]]

POLICIES = {name: CATALOG.parse(name) for name in list_policies()}
WITHOUT_LABELS = [name for name, policy in POLICIES.items() if policy.data == "inputs"]
STREAMS = {"stream": False, "stream by class": True}
COLUMNS = ("1", "8", "64", "8 of a class", *STREAMS)


def cut(test: Samples, client: str) -> dict[str, list[Tensor]]:
    """Return indices of the batches of each column."""
    order = torch.from_numpy(stream(0, "arrival", client).permutation(len(test)))
    by_class = [order[test.y[order] == label] for label in test.y.unique()]
    pure = [batch for part in by_class for batch in part.split(8)]
    batches = {str(size): list(order.split(size)) for size in (1, 8, 64)}
    return {**batches, "8 of a class": pure, "stream": list(order.split(8)), "stream by class": pure}


def count_right(trial: Trial, state: State, batch: Samples) -> int:
    return sum(evaluate(trial.plan, state, batch, trial.data.task, trial.data.classes)["hits"])


def run_stream(trial: Trial, start: State, batches: list[Samples]) -> int:
    """Return the number of samples that Tent gets right, by the model after its step on their batch."""
    minimizer, right = EntropyMinimizer(trial.plan, start, trial.data.task.entropy, lr=1e-3), 0
    for batch in batches:
        if len(batch) >= trial.plan.smallest_batch:
            minimizer.step(batch.inputs(slice(None), trial.plan.dtype))
        right += count_right(trial, reestimate_statistics(trial.plan, minimizer.state, batch), batch)
    return right


def measure(trial: Trial, client: ClientData) -> Iterator[tuple[str, str, float]]:
    """Yield policy, column and accuracy on the test data of ``client``, which never trained."""
    plan, task = trial.plan, trial.data.task
    policies = ["average", *(name for name in WITHOUT_LABELS if not POLICIES[name].excuse(plan, task))]
    for column, indices in cut(client.test, client.name).items():
        batches = [client.test.take(index) for index in indices]
        for policy in policies:
            if column not in STREAMS or policy == "average":
                states = (trial.make_unseen_state(policy, client.name, batch) for batch in batches)
                right = sum(
                    count_right(trial, state, batch) for state, batch in zip(states, batches, strict=True) if state
                )
            elif policy == "tent":
                start = trial.make_unseen_state("average", client.name, client.train) or {}
                right = run_stream(trial, start, batches)
            else:
                continue
            yield "unchanged" if policy == "average" else policy, column, right / len(client.test)


def measure_all(folder: Path, seeds: int) -> Rows:
    """Return what :func:`measure` gives for each method and seed of the run in ``folder``, measured or read again."""
    kept = folder / f"batches-{seeds}.json"
    if not kept.exists():
        _, experiment = load_experiment(folder)
        (name,), rows = experiment.settings.newcomers, []
        for method, seed in iterate_trials(experiment):
            if seed in experiment.seeds[:seeds]:
                trial = restore_trial(experiment, folder, method, seed)
                rows += [
                    (f"{method}: {policy}", *rest) for policy, *rest in measure(trial, trial.measured.client(name))
                ]
        kept.write_text(json.dumps(rows))
    return json.loads(kept.read_text())


def main(run: Path, seeds: int = 1) -> None:
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for folder in sorted(run.glob("without-*")):
        if not (folder / MEASURED).exists():
            print(f"{folder.name} has not ended: it is left out", file=sys.stderr)
            continue
        for title, column, accuracy in measure_all(folder, seeds):
            found[title][column].append(accuracy)
    print(f"| method: policy | {' | '.join(COLUMNS)} |\n|---|{'---:|' * len(COLUMNS)}")
    for title, values in found.items():
        means = {column: 100 * sum(each) / len(each) for column, each in values.items()}
        cells = (f"{means[column]:.1f}" if column in means else "" for column in COLUMNS)
        print(f"| {title} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
