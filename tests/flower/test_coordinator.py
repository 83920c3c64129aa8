"""Sites that take part in an experiment, from its beginning to its end, and what it leaves."""

import json
import re
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedshift.config.expressions import trust_only
from fedshift.config.spec import CompareSpec
from fedshift.data.columns import Column
from fedshift.results.schema import compute_metric
from fedshift.results.summary import read_facts, read_summary
from fedshift.utils.checked_json import write_checked
from fedshift.utils.errors import FedshiftError, UsageError
from tests.flower.gated import NETWORK
from tests.flower.sites import ALL, Heard, SiteGrid, allow, coordinator, same_as_in_process, serve, sites_of, spec_for
from tests.flower.test_descriptions import AGE, OTHER_DATA, described, table

pytestmark = pytest.mark.usefixtures("machine")
FIVE = "pen,photo,print,faded,worn"


def read_rounds(folder):
    lines = (folder / "trials" / "fedbn-seed0" / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
    return [[json.loads(line)[key] for key in ("participants", "down", "up")] for line in lines]


def test_states_and_records_are_those_of_one_process_and_hold_no_sample(tmp_path):
    own = {"validation": 0.25, "evaluate_every": 1, "metric": "brier", "metrics": "f1, ece, average_precision"}
    spec = spec_for(rounds=3, participation=0.67, **own)  # two of three clients in a round
    serve(spec, tmp_path)
    same_as_in_process(spec, tmp_path / "served")
    assert read_rounds(tmp_path / "served") == read_rounds(tmp_path / "reference")
    study, reference = read_summary(tmp_path / "served"), read_summary(tmp_path / "reference")
    rounded = ["loss_sum", "gaps", "sums"]
    assert study.rows.drop(columns=rounded).equals(reference.rows.drop(columns=rounded))
    for metric in study.metrics:
        ours, theirs = (compute_metric(each.rows, metric).to_numpy() for each in (study, reference))
        assert ours == pytest.approx(theirs, nan_ok=True), metric
    assert (study.metrics, study.clients) == (reference.metrics, reference.clients)
    assert reference.samples
    assert not study.samples


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "changes"),
    [("fedbn", {}), ("scaffold", {"steps": 5, "batch_size": 5}), ("fedadam+fedbn+fedmmb(batches=1)", {})],
)
def test_it_goes_on_where_it_was_stopped(method, changes, tmp_path):
    spec, grid = spec_for(method, rounds=4, log="tensorboard", **changes), SiteGrid(sites_of(spec_for(), tmp_path))
    serve(spec, tmp_path, grid, heard=Heard().stop_after(2), ends=False)
    serve(spec, tmp_path, grid)
    same_as_in_process(replace(spec, log=None), tmp_path / "served")
    (folder,) = (tmp_path / "served" / "logs" / "tensorboard").iterdir()
    points = EventAccumulator(str(folder)).Reload().Scalars("bytes/up")
    assert sorted(point.step for point in points) == [1, 2, 3, 4]


def test_a_client_that_comes_later_is_admitted_after_the_round(tmp_path):
    spec = spec_for(domains=FIVE, rounds=3, evaluate_every=1)
    grid = SiteGrid(sites_of(spec, tmp_path))
    grid.away = {5}
    heard = serve(spec, tmp_path, grid, after=lambda done: grid.away.clear(), clients=4)
    assert list(map(len, heard.took_part)) == [4, 4, 5]  # it is greeted while a round goes on
    assert json.loads((tmp_path / "served/machines/population.json").read_text())["clients"][-1]["name"] == "worn"
    study = read_summary(tmp_path / "served")
    assert set(study.rows.query("client == 'worn'")["round"]) == {3}
    assert "worn" in study.clients


def test_only_sites_that_the_settings_name_take_part_and_the_others_hear_it(tmp_path):
    heard = serve(spec_for(rounds=1), tmp_path, sites_of(spec_for(domains=FIVE), tmp_path), clients=3)
    assert heard.took_part == [ALL]
    for node, name in ((4, "faded"), (5, "worn")):
        refused = f"{name} does not take part: the settings name pen, photo, print (domains)"
        assert heard.notices.count(refused) == 1
        assert heard.told(node) == [refused, "the experiment is finished"]
    assert {node for node, question in heard.grid.asked if question.kind == "train"} == {1, 2, 3}


LATER = {
    "another class": (described, {"class_names": ("cat", "eel")}, "'b' has classes that the others lack"),
    "a category": (
        table, {"columns": (AGE, Column(name="ward", categories=("A", "C")))}, "'b' has 'C' in column 'ward', which",
    ),
    **{other: OTHER_DATA[other] for other in ("shape", "type", "no names of classes", "a table", "no column")},
}  # fmt: skip


@pytest.mark.parametrize("other", LATER)
def test_a_later_site_whose_data_do_not_fit_hears_why_once_and_the_others_go_on(other, tmp_path):
    (describe, changes, why), said = LATER[other], []
    run = coordinator(spec_for(domains=None), SiteGrid({}), tmp_path, Heard(), clients=1)
    known = {"a": describe("a"), "b": describe("b", **changes), "c": describe("c")}
    run.nodes = SimpleNamespace(online={"a"}, known=known, say=lambda *texts: said.append(texts))
    assert run._admit_waiting().names == ("a",)
    run.nodes.online = {"a", "b", "c"}
    for _ in range(2):
        assert run._admit_waiting().names == ("a", "c")
    ((text, to),) = said
    assert to == "b"
    assert re.match(f"b is not admitted: {why}", text)


def test_sites_hear_the_error_with_which_the_coordinator_ends(tmp_path):
    grid, heard = SiteGrid(sites_of(spec_for(), tmp_path)), Heard()
    grid.tamper = lambda node, asked, answer: (
        replace(answer, facts={**answer.facts, "shape": [1, 8, 8]}) if (node, asked.kind) == (3, "describe") else answer
    )
    heard.grid = grid
    with pytest.raises(FedshiftError, match=r"'pen' has uint8 samples .*, but 'print' has uint8") as raised:
        coordinator(spec_for(), grid, tmp_path / "served", heard).run()
    assert {asked.kind for _, asked in grid.asked} == {"describe", "tell"}
    assert list(map(heard.told, (1, 2, 3))) == [[f"the experiment cannot continue: {raised.value}"]] * 3


def test_sites_agree_to_each_method_before_anything_is_trained(tmp_path):
    """Two of three are enough for FedBN, whose third is left out by name, but not for FedAvg."""
    spec = spec_for(rounds=1)
    common = {name: value for name, value in vars(spec).items() if name not in ("method", "seeds")}
    both = CompareSpec(**common, methods="fedbn,fedavg", seeds=2)
    grid, heard = SiteGrid(sites_of(spec, tmp_path)), Heard()
    grid.sites[2].policy, grid.sites[3].policy, heard.grid = allow(methods=["fedbn"]), allow(methods=["scaffold"]), grid
    reasons = [
        f"this site's policy has methods = [\"{name}\"], and method 'fedavg' is not among them"
        for name in ("fedbn", "scaffold")
    ]
    few = f"fedavg: too few sites agree, since 2 must (--min-clients): photo: {reasons[0]}; print: {reasons[1]}"
    with pytest.raises(FedshiftError, match=re.escape(few)):
        coordinator(both, grid, tmp_path / "few", heard, clients=2).run()
    assert not {asked.kind for _, asked in grid.asked} & {"train", "evaluate"}
    assert heard.told(2)[0] == f"fedavg: photo does not take part: {reasons[0]}"
    grid.sites[2].policy = allow()
    del grid.sites[2].gate
    heard = serve(both, tmp_path, grid, clients=2)
    rows = read_summary(tmp_path / "served").rows
    assert {*rows.groupby(["method", "seed"]).groups} == {(each, n) for each in ("fedavg", "fedbn") for n in (0, 1)}
    assert heard.took_part == [("pen", "photo")] * 4
    refused = f"fedbn: print does not take part: {reasons[1].replace('fedavg', 'fedbn')}"
    assert heard.notices.count(refused) == 1
    assert refused in heard.told(3)


def test_a_review_waits_for_no_site_that_left_if_enough_agree(tmp_path, clock):
    grid = SiteGrid(sites_of(spec_for(rounds=1), tmp_path))

    def leave(node, asked, answer):
        grid.away |= {2} if (node, asked.kind) == (2, "review") else set()
        return None if node in grid.away else answer

    heard = serve(spec_for(rounds=1), tmp_path, grid, tamper=leave, clients=2)
    assert "fedbn: photo does not take part: it has left" in heard.notices
    assert clock.seconds < 2.0


def test_a_site_is_asked_to_measure_only_on_splits_that_it_discloses(tmp_path):
    spec, own = spec_for(rounds=1, validation=0.25, evaluate_every=1, moments="loaded,trained"), {}
    sites = sites_of(spec, tmp_path)
    sites[2].policy = allow(least_samples=10)  # of six validation samples nothing is told

    def tamper(node, asked, answer):
        if "splits" in asked.facts:
            own.setdefault(node, set()).add(tuple(asked.facts["splits"]))
        nothing = (node, asked.kind) == (3, "describe")
        return replace(answer, facts={**answer.facts, "measures": []}) if nothing else answer

    heard = serve(spec, tmp_path, sites, tamper=tamper)
    assert heard.took_part == [ALL]
    assert own == {1: {("test", "validation")}, 2: {("test",)}, 3: {()}}
    rows = [(row["client"], row["split"]) for done in heard.rounds for row in done.rows if row["split"] != "train"]
    assert set(rows) == {("pen", "validation"), ("pen", "test"), ("photo", "test")}
    assert not heard.complaints
    for name in ALL:  # which keep what they trained, measured or not
        assert len(list((tmp_path / name).glob("*/fedbn-seed0/model.safetensors"))) == 1


def test_waiting_for_the_first_sites_can_be_stopped(tmp_path):
    grid, heard = SiteGrid(sites_of(spec_for(), tmp_path)), Heard()
    grid.away = {2}
    heard.stop.set()
    assert not coordinator(spec_for(), grid, tmp_path / "served", heard, wait=1e9).run()


def test_a_finished_experiment_waits_for_no_site(tmp_path, monkeypatch):
    """As if it had been killed after its last round: what is left to write is written, without any site."""
    monkeypatch.setattr("fedshift.flower.coordinator.coordinator.PARTING", 0.0)
    spec, grid = spec_for(rounds=1), SiteGrid(sites_of(spec_for(), tmp_path))
    serve(spec, tmp_path, grid)
    facts = read_facts(tmp_path / "served")
    outcome = facts.pop("trained")
    write_checked(tmp_path / "served" / "study.json", facts)
    asked, grid.away = len(grid.asked), {1, 2, 3}
    heard = serve(spec, tmp_path, grid, wait=1e9)
    assert "all rounds are done: not waiting for sites" in heard.notices
    assert (len(grid.asked), heard.rounds) == (asked, [])
    assert {**read_facts(tmp_path / "served")["trained"], "commands": 0} == {**outcome, "commands": 0}
    with pytest.raises(FedshiftError, match="3 sites must be connected"):
        serve(replace(spec, rounds=2), tmp_path, grid, wait=0.0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "centralized"}, "needs all data in one place"),
        ({"domains": "north,!south"}, "domains='north,!south': .* sites are not yet known: write each name"),
        ({"spacing": "median"}, "spacing='median': sites do not "),
        ({"adapter": "lora()"}, "adapter lora.*every machine needs the same: give a file with their weights"),
        ({"model": "timm:resnet18(pretrained=True)"}, "sites scale images by name, not as its pretrained weights need"),
        *(({name: NETWORK}, "exp.toml: .* nobody allowed") for name in ("method", "model", "loss")),
    ],
)
def test_settings_that_machines_could_not_have_alike_or_that_call_code_are_refused(
    settings, words, tmp_path, monkeypatch
):
    for name in ("peft", "timm"):
        package = ModuleType(name)
        package.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, package)
    with trust_only(("timm:resnet18",), "exp.toml"), pytest.raises(UsageError, match=words):
        coordinator(spec_for(**settings), SiteGrid({}), tmp_path / "served", Heard())


@pytest.mark.parametrize(
    ("loss", "newcomers"),
    [
        ("focal(weights='balanced')", "print"), ("focal(weights='inverse_frequency')", "print"),
        pytest.param("cross_entropy", None, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_labels_are_counted_only_for_a_loss_that_goes_by_them_and_not_of_newcomers(loss, newcomers, tmp_path):
    spec = spec_for("fedavg", loss=loss, newcomers=newcomers)
    serve(spec, tmp_path)
    (client, *_) = json.loads((tmp_path / "served/machines/population.json").read_text())["clients"]
    assert (client["labels"] is not None) == ("weights" in loss)
    (trial,) = same_as_in_process(spec, tmp_path / "served")
    assert ("print" in trial.clients.seen) == (newcomers is None)
