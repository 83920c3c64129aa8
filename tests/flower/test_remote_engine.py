"""An experiment across machines is the one in one process, bit for bit, for every method (law 1)."""

import pytest
import torch
from torch import nn

from fedshift.config.expressions import list_catalog
from fedshift.config.spec import CompareSpec
from fedshift.core.kernel import client_final, client_init, init_client
from fedshift.engines import frozen
from fedshift.evaluation.statistics_lag import holds_shared_statistics
from fedshift.methods import METHODS
from fedshift.results.run_directory import to_file_name
from fedshift.results.schema import read_rows
from fedshift.results.trial_records import METRICS, read_lag
from fedshift.utils.state import join_states
from tests.flower.processes import machines
from tests.flower.sites import SiteGrid, same_as_in_process, serve, sites_of, spec_for

pytestmark = pytest.mark.usefixtures("machine")
POOLED = ("centralized",)
COMPOSED = ("fedbn+fedprox(mu=0.1)", "silobn+scaffold", "fedbn+fedmmb(batches=1)+fedadam", "ditto(epochs=2)")
WITHOUT_BATCH_NORM = {"dp_sgd": "dp_sgd+gn"}
"""Forms in which methods that refuse BatchNorm run."""
NAMED = (WITHOUT_BATCH_NORM.get(name, name) for name in list_catalog("methods") if name not in POOLED)
FEDERATED = (*NAMED, *COMPOSED)
FAST = ("fedavg", "partialfed_adaptive", "silobn+scaffold", "fedbn+fedmmb(batches=1)+fedadam", "feddg_elcfs")
"""Methods that differ in what the kernel does for them; the others are slow."""


class Watched(SiteGrid):
    """``most``: the most answers with arrays that were fetched at a time."""

    most = 0

    def pull_messages(self, message_ids):
        replies = super().pull_messages(message_ids)
        self.most = max(self.most, sum(bool(reply.content.array_records) for reply in replies))
        return replies


@pytest.mark.parametrize(
    "method", [pytest.param(each, marks=() if each in FAST else pytest.mark.slow) for each in FEDERATED]
)
def test_every_method_is_what_it_is_in_one_process_and_sends_only_its_scope(method, tmp_path):
    spec = spec_for(method, samples=16, evaluate_every=2, moments="loaded,trained")
    grid, came, left = Watched(sites_of(spec, tmp_path)), [], []

    def watched(node, question, answer):
        if question.kind == "train":
            came.append({kind: set(record) for kind, record in question.arrays.items()})
            left.append({kind: set(record) for kind, record in answer.arrays.items()})
        return answer

    serve(spec, tmp_path, grid, tamper=watched)
    assert grid.most == 1
    messages = len(grid.sites) * spec.rounds
    (trial,) = same_as_in_process(spec, tmp_path / "served")
    places = [
        tmp_path / name / "trials" / f"{to_file_name(trial.plan.method.label)}-seed0"
        for name in ("served", "reference")
    ]
    (rows, same), (again, there) = ([read_rows(place / METRICS) for place in places], map(read_lag, places))
    assert rows == same
    shared = holds_shared_statistics(trial.plan, trial.server, trial.model_state(trial.data.names[0]))
    assert again == ([] if shared else [row for row in there if row["model"] == "personal"])
    assert [*tmp_path.rglob("cases.npz")] == [*(tmp_path / "reference").rglob("cases.npz")]  # not of sites' samples
    assert sum((row["split"], row["moment"]) == ("test", "trained") for row in rows) == len(grid.sites)
    _, update = client_final(trial.plan, client_init(trial.plan, init_client(trial.plan), trial.server))
    up, down = (join_states(trial.plan.rule_names, each.memory).keys() for each in (update, trial.server))
    assert left == [{"shared": trial.plan.sent, "memory": up}] * messages
    assert came == [{"shared": trial.plan.received, "memory": down}] * messages


@pytest.mark.slow
def test_every_method_is_what_it_is_in_one_process_between_processes_that_share_nothing(tmp_path):
    different = {METHODS.parse_all(text)[0].name: text for text in FEDERATED}  # `tuned` alone is FedAvg
    own = {"samples": 16, "rounds": 2, "evaluate_every": 2, "lr": 0.05}
    spec = CompareSpec(methods=",".join(different.values()), domains="pen,photo,print,faded,worn", **own)
    with machines(tmp_path, spec, tls=False) as five:
        coordinator = five.serve("--min-clients", 5)
        sites = [five.join(name) for name in five.names]
        assert coordinator.ends() == 0, coordinator.said
        assert [site.ends() for site in sites] == [0] * 5
    assert len(same_as_in_process(spec, five.served)) == len(different)


FEATURES, TESTED = 32, 140
"""Values of a sample's features, and test samples of a client."""


def frozen_network(shape, classes):
    """A network of which only the last layer is trained, and whose BatchNorm has other statistics than a new one."""
    backbone = nn.Sequential(nn.Conv2d(shape[0], 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
    for parameter in backbone.parameters():
        parameter.requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        backbone[1].running_mean.normal_()
    return nn.Sequential(backbone, nn.Flatten(), nn.Dropout(0.2), nn.Linear(FEATURES, classes))


@pytest.mark.parametrize("fits", [True, False])
def test_sites_that_keep_features_of_a_frozen_backbone_give_the_bits_of_one_process(fits, tmp_path, monkeypatch):
    """``fits``: whether features fit the limit, which is less than the features of all clients."""
    extract, extracted, network = frozen.Backbone.extract, [], f"{__name__}:frozen_network"
    monkeypatch.setattr(frozen.Backbone, "extract", lambda own, x: extracted.append(len(x)) or extract(own, x))
    monkeypatch.setattr(frozen, "SPLIT_LIMIT", TESTED * FEATURES * 4 - (not fits))
    spec = spec_for("fixbn(switch=0)", model=network)
    serve(spec, tmp_path, sites_of(spec, tmp_path, code=frozenset({network})))
    at_sites = sorted(extracted)
    assert set(at_sites) == ({spec.samples, TESTED} if fits else set())
    extracted.clear()
    frozen._KEPT.clear()
    same_as_in_process(spec, tmp_path / "served")
    assert sorted(extracted) == at_sites
