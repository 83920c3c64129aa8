"""An experiment across machines is the one in one process, bit for bit (law 1), also where it stopped or goes back."""

import shutil
import time

import pytest
import torch
from torch import nn

from fedshift.config.expressions import list_catalog
from fedshift.config.spec import CompareSpec
from fedshift.core.kernel import client_final, client_init, init_client
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.engines import frozen
from fedshift.engines.sequential import Sequential
from fedshift.evaluation.statistics_lag import list_loaded, may_lag
from fedshift.flower.coordinator.descriptions import ClientRegistry
from fedshift.flower.coordinator.rounds import go_back
from fedshift.flower.messages import VERSION, Exchange, RefusedMessage
from fedshift.flower.site.record import Record
from fedshift.flower.site.state import SiteState
from fedshift.methods import METHODS
from fedshift.methods.fedavg import fedavg
from fedshift.report.lag import describe_lag
from fedshift.report.origin import describe_run
from fedshift.results.run_directory import MACHINES, to_file_name
from fedshift.results.schema import read_rows
from fedshift.results.summary import read_summary, require_series
from fedshift.results.trial_records import METRICS, read_lag
from fedshift.utils.checked_json import write_checked
from fedshift.utils.errors import FedshiftError, UsageError
from fedshift.utils.state import join_states
from fedshift.utils.version import find_series
from tests.flower.gated import NETWORK
from tests.flower.processes import machines
from tests.flower.sites import ALL, OTHERS, Heard, grid_of, same_as_in_process, serve, sites_of, spec_for

pytestmark = pytest.mark.usefixtures("machine")
POOLED = ("centralized",)
COMPOSED = ("fedbn+fedprox(mu=0.1)", "silobn+scaffold", "fedbn+fedmmb(batches=1)+fedadam", "ditto(epochs=2)")
WITHOUT_BATCH_NORM = {"dp_sgd": "dp_sgd+gn"}
"""Forms in which methods that refuse BatchNorm run."""
NAMED = (WITHOUT_BATCH_NORM.get(name, name) for name in list_catalog("methods") if name not in POOLED)
FEDERATED = (*NAMED, *COMPOSED)
FAST = ("fedavg", "partialfed_adaptive", "silobn+scaffold", "fedbn+fedmmb(batches=1)+fedadam", "feddg_elcfs")
"""Methods that differ in what the kernel does for them; the others are slow."""


@pytest.mark.parametrize(
    "method", [pytest.param(each, marks=() if each in FAST else pytest.mark.slow) for each in FEDERATED]
)
def test_every_method_is_what_it_is_in_one_process_and_sends_only_its_scope(method, tmp_path):
    spec = spec_for(method, samples=16, evaluate_every=2, moments="loaded,trained")
    grid, came, left = grid_of(spec, tmp_path), [], []

    def watched(node, question, answer):
        if question.kind == "train":
            came.append({kind: set(record) for kind, record in question.arrays.items()})
            left.append({kind: set(record) for kind, record in answer.arrays.items()})
        return answer

    serve(spec, tmp_path, grid, tamper=watched)
    assert grid.most == 1  # answers are fetched one at a time
    messages = len(grid.sites) * spec.rounds
    (trial,) = same_as_in_process(spec, tmp_path / "served")
    places = [
        tmp_path / name / "trials" / f"{to_file_name(trial.plan.method.label)}-seed0"
        for name in ("served", "reference")
    ]
    (rows, same), (again, there) = ([read_rows(place / METRICS) for place in places], map(read_lag, places))
    assert rows == same
    names = [name for name in trial.plan.initial if "running" in name] if may_lag(trial.plan, trial.server) else []
    shared = bool(list_loaded(names, trial.server, trial.model_state(trial.data.names[0])))
    assert again["rows"] == [row for row in there["rows"] if not (names and (shared or row["model"] == "global"))]
    assert again["complete"] != shared
    said = "could not be measured with re-estimated statistics (estimates would have to leave the sites)"
    assert (said in describe_lag(read_summary(tmp_path / "served"))) == shared
    assert [*tmp_path.rglob("cases.npz")] == [*(tmp_path / "reference").rglob("cases.npz")]  # not of sites' samples
    assert sum((row["split"], row["moment"]) == ("test", "trained") for row in rows) == len(grid.sites)
    _, update = client_final(trial.plan, client_init(trial.plan, init_client(trial.plan), trial.server))
    up, down = (join_states(trial.plan.rule_names, each.memory).keys() for each in (update, trial.server))
    assert left == [{"shared": trial.plan.sent, "memory": up}] * messages
    assert came == [{"shared": trial.plan.downloaded, "memory": down}] * messages


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


# Runs that go on: after rounds without a site, from a copy or a checkpoint that was kept, under another version.

OWN = {"model": NETWORK, "evaluate_every": 2}


def test_a_site_keeps_the_rounds_that_a_coordinator_may_go_back_to(tmp_path):
    plan = prepare(fedavg(), nn.Linear(2, 2), optimizer=SGD(lr=0.1))
    kept = SiteState(tmp_path, "photo", plan, "data", keep=4)

    def save(base, round, upload=""):
        kept.save(init_client(plan), base, round, upload)
        return kept.list_rounds()

    for round in range(1, 7):
        rounds = save(round - 1, round)
    assert rounds == [3, 4, 5, 6]
    assert save(3, 4) == [3, 4, 5, 6]  # the coordinator went back; should that be a mistake, later rounds are there
    assert save(4, 7) == [3, 4, 7]  # the uploads of rounds 5 and 6 were not used
    kept.keep = 1
    assert save(7, 8, "a" * 64) == [4, 7, 8]  # the base, its successor and predecessor
    kept.load_after(8, "a" * 64)
    kept.load_after(8)
    with pytest.raises(RefusedMessage, match="is of another round 8 than the coordinator's, which went back"):
        kept.load_after(8, "b" * 64)


SLOW = ("scaffold", "fedadam+fedbn+fedmmb(batches=1)")


@pytest.mark.parametrize("method", ["fedbn", *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)])
def test_a_coordinator_restored_from_an_older_copy_repeats_the_rounds_since(method, tmp_path):
    more = {"steps": 5, "batch_size": 5} if method == "scaffold" else {}
    spec, served, copy = spec_for(method, rounds=4, **OWN, **more), tmp_path / "served", tmp_path / "copy"
    grid, said = grid_of(spec, tmp_path), []
    serve(spec, tmp_path, grid, after=lambda done: done.round == 1 and shutil.copytree(served, copy))
    shutil.rmtree(served)
    shutil.move(copy, served)
    grid.sites[2].say = said.append
    serve(spec, tmp_path, grid)
    same_as_in_process(spec, served)
    # what is repeated is said, and counted
    again = [line.partition(":")[0] for line in said if "(again" in line]
    assert again == [f"{method}, round {round} (again" for round in (2, 3, 4)]
    uploads = [entry.round for entry in Record(tmp_path / "record.db").read() if entry.event == "train"]
    assert sorted(uploads) == sorted([1, 2, 3, 4, 2, 3, 4] * 3)


def test_a_site_that_was_away_for_rounds_goes_on_where_it_was(tmp_path, monkeypatch):
    """The bits of one process in which that client takes no part in the same rounds; its program starts again."""
    spec = spec_for("ditto", model=NETWORK, rounds=6, evaluate_every=3)
    grid, away = grid_of(spec, tmp_path), range(2, 6)

    def after(done):
        grid.away = {2} if done.round + 1 in away else set()
        if done.round + 1 == away.stop:
            days_later = time.time() + 5 * 86400
            monkeypatch.setattr(time, "time", lambda: days_later)
            grid.sites[2] = sites_of(spec, tmp_path)[2]

    heard = serve(spec, tmp_path, grid, after=after, clients=2)
    assert heard.took_part == [ALL, *[OTHERS] * 4, ALL]
    for text in ("photo is away: rounds continue without it", "round 3: photo is not measured, because it is away"):
        assert heard.notices.count(text) == 1
    bases = [question.facts["base"] for node, question in grid.asked if (node, question.kind) == (2, "train")]
    assert bases == [0, 1]
    rounds = iter(range(1, 7))
    find = lambda self, names: OTHERS if next(rounds) in away else names  # noqa: E731
    monkeypatch.setattr(Sequential, "find_available", find)
    same_as_in_process(spec, tmp_path / "served")


def flip(path):
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("what", ["a bit of the checkpoint", "records of a copy made while a round ended", "a state"])
def test_what_is_damaged_is_named_and_the_run_goes_on_from_the_round_before(what, tmp_path):
    spec, served = spec_for(rounds=4, **OWN), tmp_path / "served"
    grid, heard = grid_of(spec, tmp_path), Heard()
    serve(spec, tmp_path, grid, heard=Heard().stop_after(3), ends=False)
    folder = served / "trials" / "fedbn-seed0"
    (state,) = tmp_path.glob("photo/*/fedbn-seed0/state-3.safetensors")
    damaged = {"a state": state, "a bit of the checkpoint": folder / "checkpoint.safetensors"}.get(what)
    if damaged:
        flip(damaged)
    else:
        damaged = folder / "rounds.jsonl"
        damaged.write_text("".join(damaged.read_text().splitlines(keepends=True)[:2]))
    if what == "a state":
        with pytest.raises(FedshiftError, match="round 4: only 2 of 3 clients sent a usable upload"):
            serve(spec, tmp_path, grid, heard=heard)
        lost = "the state of client 'photo' after round 3 cannot be read"
        assert any(lost in line and "--from-round 2)" in line for line in heard.notices)
        with pytest.raises(UsageError, match=r"has no model of round 0, only of rounds 1, 2, 3: name one"):
            go_back(served, 0)
        go_back(served, 2)
    heard = serve(spec, tmp_path, grid)
    assert [done.round for done in heard.rounds] == [3, 4]
    if what != "a state":
        assert any(str(damaged) in line for line in heard.notices)
        assert any("The run continues from the previous checkpoint, after round 2" in line for line in heard.notices)
    same_as_in_process(spec, served)


PLACES = {
    "both": ("utils.version",), "sites": ("flower.site.site",),
    "coordinator": ("flower.coordinator.nodes", "experiments.session", "results.run_directory"),
}  # fmt: skip


@pytest.fixture
def runs(monkeypatch):
    """Makes the coordinator, or the sites, those of another version."""

    def run(side, version):
        for module in PLACES[side]:
            monkeypatch.setattr(f"fedshift.{module}.__version__", version)

    for side in PLACES:
        run(side, "0.1.0")
    return run


def test_an_experiment_goes_on_under_patch_releases_of_both_sides(tmp_path, runs):
    spec, served = spec_for(model=NETWORK), tmp_path / "served"
    serve(spec, tmp_path, heard=Heard().stop_after(1), ends=False)
    runs("coordinator", "0.1.2")
    runs("sites", "0.1.1")
    assert "pen now runs fedshift 0.1.1 instead of 0.1.0" in serve(spec, tmp_path).notices
    found = describe_run(read_summary(served))
    assert found["versions"].startswith("fedshift 0.1.0 and 0.1.2, torch ")
    assert found["fedshift at the sites"] == "0.1.1 (pen, photo, print)"
    people = ClientRegistry.read(served / MACHINES / "population.json").clients
    assert {client.version for client in people} == {"0.1.1"}
    described = [entry for entry in Record(tmp_path / "record.db").read() if entry.event == "describe"]
    versions = [entry.content["version"] for entry in described if entry.content["name"] == "pen"]
    assert versions == ["0.1.0", "0.1.1"]
    same_as_in_process(spec, served)


def test_a_site_refuses_a_coordinator_of_another_minor_version_but_hears_its_end(tmp_path, runs):
    said, heard = [], Heard()
    sites = sites_of(spec_for(), tmp_path, say=said.append)
    runs("coordinator", "0.2.0")
    with pytest.raises(FedshiftError, match="after 0 seconds there are 0"):
        serve(spec_for(), tmp_path, sites, heard=heard, wait=0.0)
    why = (
        "the coordinator runs fedshift 0.2.0, and this site 0.1.0, which may compute other numbers: install fedshift "
        "0.2 here, or 0.1 there"
    )
    assert said.count(f"refused; disclosed to the coordinator: {why}") == 3
    assert f"a node (number 1) does not take part: {why}" in heard.notices
    assert {asked.facts[VERSION] for _, asked in heard.grid.asked} == {"0.2.0"}
    end = Exchange(kind="tell", facts={VERSION: "0.2.0", "say": "over", "over": True})
    assert sites[1].answer(end).kind == "told"


def test_a_run_is_resumed_by_its_own_minor_version(cli, unpublished, tiny_folder, tmp_path, runs, monkeypatch):
    words = ["run", "--data", tiny_folder, "--batches", 1, "--out", "a run", "--rounds", 1]
    assert cli(*words).code == 0
    before = {path: path.read_bytes() for path in (tmp_path / "a run").rglob("*") if path.is_file()}
    for module in ("utils.version", "results.summary"):
        monkeypatch.setattr(f"fedshift.{module}.__version__", "0.2.0")
    for command in (["run", "--rounds", 2], ["serve", "--insecure"]):
        done = cli(*command, "--resume", "a run")
        assert done.code == 2
        assert "a run was begun with fedshift 0.1.0, and this is 0.2.0" in done.err
        assert "go on with that one (pip install 'fedshift==0.1.*')" in done.err
        (tmp_path / "a run" / MACHINES).mkdir(exist_ok=True)
    (tmp_path / "a run" / MACHINES).rmdir()
    assert {path: path.read_bytes() for path in before} == before
    monkeypatch.setattr("fedshift.utils.version.__version__", "0.1.5")
    runs("coordinator", "0.1.5")
    assert cli("run", "--resume", "a run", "--rounds", 2).code == 0
    assert describe_run(read_summary(tmp_path / "a run"))["versions"].startswith("fedshift 0.1.0 and 0.1.5, ")


def test_a_series_is_major_and_minor_and_a_run_whose_version_is_lost_goes_on(tmp_path):
    found = {version: find_series(version) for version in ("0.1.0", "0.1", "1.12.3.dev1", "1.2rc1", "0", "x.1", "")}
    assert list(found.values()) == ["0.1", "0.1", "1.12", "1.2", "", "", ""]
    require_series(tmp_path)
    write_checked(tmp_path / "environment.json", {"packages": {"fedshift": "7.1.0"}})
    with pytest.raises(UsageError, match=r"was begun with fedshift 7\.1\.0, .*fedshift==7\.1\.\*"):
        require_series(tmp_path)
