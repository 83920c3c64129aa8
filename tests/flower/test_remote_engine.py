"""An experiment across machines is the one in one process, bit for bit, for every method (law 1)."""

import pytest

from fedshift.config.expressions import list_catalog
from fedshift.core.kernel import client_final, client_init, init_client
from fedshift.evaluation.statistics_lag import holds_shared_statistics
from fedshift.results.run_directory import to_file_name
from fedshift.results.schema import read_rows
from fedshift.results.trial_records import METRICS, read_lag
from fedshift.utils.state import join_states
from tests.flower.sites import Heard, SiteGrid, coordinator, same_as_in_process, sites_of, spec_for

POOLED = ("centralized",)
COMPOSED = ("fedbn+fedprox(mu=0.1)", "silobn+scaffold", "fedbn+fedmmb(batches=1)+fedadam", "ditto(epochs=2)")
WITHOUT_BATCH_NORM = {"dp_sgd": "dp_sgd+gn"}
"""Forms in which methods that refuse BatchNorm run."""
NAMED = (WITHOUT_BATCH_NORM.get(name, name) for name in list_catalog("methods") if name not in POOLED)
FEDERATED = (*NAMED, *COMPOSED)
FAST = (
    "fedavg",
    "partialfed_adaptive",
    "silobn+scaffold",
    "fedbn+fedmmb(batches=1)+fedadam",
    "feddg_elcfs",
)
"""Methods that differ in what the kernel does for them; the others are slow."""


@pytest.mark.parametrize(
    "method", [pytest.param(each, marks=() if each in FAST else pytest.mark.slow) for each in FEDERATED]
)
def test_every_method_is_what_it_is_in_one_process_and_sends_only_its_scope(method, tmp_path, machine):
    rounds = 2
    spec = spec_for(method, samples=16, rounds=rounds, evaluate_every=rounds, moments="loaded,trained")
    grid, came, left = SiteGrid(sites_of(spec, tmp_path)), [], []

    def watched(node, question, answer):
        if question.kind == "train":
            came.append({kind: set(record) for kind, record in question.arrays.items()})
            left.append({kind: set(record) for kind, record in answer.arrays.items()})
        return answer

    grid.tamper = watched
    assert coordinator(spec, grid, tmp_path / "served", Heard()).run()
    messages = len(grid.sites) * rounds
    (trial,) = same_as_in_process(spec, tmp_path / "served", tmp_path, tmp_path / "reference")
    rows, same = (
        read_rows(folder / "trials" / f"{to_file_name(trial.plan.method.label)}-seed0" / METRICS)
        for folder in (tmp_path / "served", tmp_path / "reference")
    )
    assert rows == same
    again, there = (
        read_lag(folder / "trials" / f"{to_file_name(trial.plan.method.label)}-seed0")
        for folder in (tmp_path / "served", tmp_path / "reference")
    )
    shared = holds_shared_statistics(trial.plan, trial.server, trial.model_state(trial.data.names[0]))
    assert again == ([] if shared else [row for row in there if row["model"] == "personal"])
    assert [*tmp_path.rglob("cases.npz")] == [*(tmp_path / "reference").rglob("cases.npz")]  # not of sites' samples
    assert sum((row["split"], row["moment"]) == ("test", "trained") for row in rows) == len(grid.sites)
    _, update = client_final(trial.plan, client_init(trial.plan, init_client(trial.plan), trial.server))
    up, down = (join_states(trial.plan.rule_names, each.memory).keys() for each in (update, trial.server))
    assert left == [{"shared": trial.plan.sent, "memory": up}] * messages
    assert came == [{"shared": trial.plan.received, "memory": down}] * messages
