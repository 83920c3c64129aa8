"""Sites that take part in an experiment or validate only, from its beginning to its end, and what it leaves."""

import json
import re
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
from PIL import Image

import fedshift
from fedshift.config.expressions import trust_only
from fedshift.config.spec import CompareSpec
from fedshift.data.columns import Column
from fedshift.flower.coordinator.descriptions import ClientRegistry
from fedshift.flower.coordinator.served import load_served
from fedshift.flower.site.policy import SitePolicy
from fedshift.flower.site.record import Record
from fedshift.results.checkpoint import load_checkpoint
from fedshift.results.schema import compute_metric
from fedshift.results.summary import read_facts, read_summary
from fedshift.utils.checked_json import write_checked
from fedshift.utils.errors import FedshiftError, UsageError
from tests.flower import sites
from tests.flower.gated import NETWORK
from tests.flower.sites import ALL, Heard, allow, grid_of, make_site, same_as_in_process, serve, sites_of, spec_for
from tests.flower.test_descriptions import AGE, OTHER_DATA, described, table

pytestmark = pytest.mark.usefixtures("machine")


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


def test_only_sites_that_the_settings_name_take_part_and_the_others_hear_it(tmp_path):
    five = sites_of(spec_for(domains="pen,photo,print,faded,worn"), tmp_path)
    heard = serve(spec_for(rounds=1), tmp_path, five, clients=3)
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
    run = sites.coordinator(spec_for(domains=None), sites.SiteGrid({}), tmp_path, Heard(), clients=1)
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
    def tamper(node, asked, answer):
        gray = {"shape": [1, 8, 8]} if (node, asked.kind) == (3, "describe") else {}
        return replace(answer, facts={**answer.facts, **gray})

    heard = Heard()
    with pytest.raises(FedshiftError, match=r"'pen' has uint8 samples .*, but 'print' has uint8") as raised:
        serve(spec_for(), tmp_path, heard=heard, tamper=tamper)
    assert {asked.kind for _, asked in heard.grid.asked} == {"describe", "tell"}
    assert list(map(heard.told, (1, 2, 3))) == [[f"the experiment cannot continue: {raised.value}"]] * 3


def test_sites_agree_to_each_method_before_anything_is_trained(tmp_path):
    """Two of three are enough for FedBN, whose third is left out by name, but not for FedAvg."""
    spec = spec_for(rounds=1)
    common = {name: value for name, value in vars(spec).items() if name not in ("method", "seeds")}
    both = CompareSpec(**common, methods="fedbn,fedavg", seeds=2)
    grid, heard = grid_of(spec, tmp_path), Heard()
    grid.sites[2].policy, grid.sites[3].policy = allow(methods=["fedbn"]), allow(methods=["scaffold"])
    reasons = [
        f"this site's policy has methods = [\"{name}\"], and method 'fedavg' is not among them"
        for name in ("fedbn", "scaffold")
    ]
    few = f"fedavg: too few sites agree, since 2 must (--min-clients): photo: {reasons[0]}; print: {reasons[1]}"
    with pytest.raises(FedshiftError, match=re.escape(few)):
        serve(both, tmp_path / "few", grid, heard=heard, clients=2)
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


def test_a_site_is_asked_to_measure_only_on_splits_that_it_discloses(tmp_path):
    spec, own = spec_for(rounds=1, validation=0.25, evaluate_every=1, moments="loaded,trained"), {}
    grid = grid_of(spec, tmp_path)
    grid.sites[2].policy = allow(least_samples=10)  # of six validation samples nothing is told

    def tamper(node, asked, answer):
        if "splits" in asked.facts:
            own.setdefault(node, set()).add(tuple(asked.facts["splits"]))
        nothing = (node, asked.kind) == (3, "describe")
        return replace(answer, facts={**answer.facts, "measures": []}) if nothing else answer

    heard = serve(spec, tmp_path, grid, tamper=tamper)
    assert heard.took_part == [ALL]
    assert own == {1: {("test", "validation")}, 2: {("test",)}, 3: {()}}
    rows = [(row["client"], row["split"]) for done in heard.rounds for row in done.rows if row["split"] != "train"]
    assert set(rows) == {("pen", "validation"), ("pen", "test"), ("photo", "test")}
    assert not heard.complaints
    for name in ALL:  # which keep what they trained, measured or not
        assert len(list((tmp_path / name).glob("*/fedbn-seed0/model.safetensors"))) == 1


def test_waiting_for_the_first_sites_can_be_stopped(tmp_path):
    heard = Heard()
    heard.stop.set()
    serve(spec_for(), tmp_path, heard=heard, late={2}, wait=1e9, ends=False)


def test_a_finished_experiment_waits_for_no_site(tmp_path, monkeypatch):
    """As if it had been killed after its last round: what is left to write is written, without any site."""
    monkeypatch.setattr("fedshift.flower.coordinator.coordinator.PARTING", 0.0)
    spec, grid = spec_for(rounds=1), grid_of(spec_for(), tmp_path)
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
        serve(spec_for(**settings), tmp_path)


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


# Sites that validate only: they train nothing, change nothing, and are measured as clients that are held out.

HELD = "worn"
FOUR = ",".join((*ALL, HELD))
PLACE = ["method", "seed", "round", "client", "split", "model", "moment"]


def validating(spec, folder, **named):
    """Sites of the clients that ``spec`` names, and of ``worn``, which validates only."""
    return sites_of(spec, folder) | {9: make_site("digits", HELD, folder, validates=True, **named)}


def serve_all(spec, folder, at=None, clients=3, **options):
    """Run without ``domains``, by which the coordinator would admit no other; return what was told."""
    return serve(replace(spec, domains=None), folder, at or validating(spec, folder), clients=clients, **options)


def read_sorted(directory):
    return read_summary(directory).rows.sort_values(PLACE, ignore_index=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("method", "unseen"),
    [
        ("fedavg", "skip"), ("scaffold+fedadam", "average"), ("ditto", "reestimate"), ("silobn", "tent"),
        ("fedbn", "skip"), ("ditto", "skip"), ("ditto", "average"), ("silobn", "reestimate"),
    ],
)  # fmt: skip
def test_a_site_that_validates_only_is_measured_as_a_client_that_is_held_out(method, unseen, tmp_path):
    spec, said = spec_for(method, unseen=unseen, evaluate_every=1, validation=0.25), []
    heard = serve_all(
        spec, tmp_path, tamper=lambda node, asked, answer: said.append((node, asked.kind, answer)) or answer
    )
    assert heard.took_part == [ALL] * 2
    assert {kind for node, kind, _ in said if node == 9} <= {"describe", "review", "evaluate", "tell"}
    assert not any(answer.arrays for node, _, answer in said if node == 9)
    sites.in_process(replace(spec, domains=FOUR, newcomers=HELD), tmp_path / "reference")
    rows, reference = read_sorted(tmp_path / "served"), read_sorted(tmp_path / "reference")
    assert rows.drop(columns="loss_sum").equals(reference.drop(columns="loss_sum"))
    assert rows["loss_sum"].to_numpy() == pytest.approx(reference["loss_sum"].to_numpy())
    assert (HELD in set(rows["client"])) == ((method, unseen) != ("fedbn", "skip"))
    train = next(question for _, question in heard.grid.asked if question.kind == "train")
    answer = heard.grid.sites[9].answer(train)  # it refuses to train whoever asks
    assert (answer.kind, dict(answer.arrays)) == ("refused", {})
    assert "this site validates only (join --validate-only): it trains nothing" in answer.facts["why"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("method", "unseen"), [("ditto", "average"), ("ditto", "finetune"), ("fedbn", "finetune_bn")])
def test_a_site_that_was_never_drawn_is_measured_as_in_one_process(method, unseen, tmp_path):
    spec = spec_for(method, unseen=unseen, participation=1, evaluate_every=1)
    serve_all(spec, tmp_path, grid_of(spec, tmp_path), clients=1)
    sites.in_process(spec, tmp_path / "reference")
    rows, reference = read_sorted(tmp_path / "served"), read_sorted(tmp_path / "reference")
    assert len(rows.query("round == 1 and model == 'personal' and split == 'test'")) == 3
    assert rows.drop(columns="loss_sum").equals(reference.drop(columns="loss_sum"))


@pytest.mark.parametrize("method", [pytest.param("fedavg", marks=pytest.mark.slow), "fedbn"])
def test_training_is_the_same_bits_with_and_without_it(method, tmp_path):
    spec = spec_for(method, participation=0.67, loss="focal(weights='inverse_frequency')")
    serve_all(spec, tmp_path / "without", sites_of(spec, tmp_path / "without"), clients=2)
    heard = serve_all(spec, tmp_path / "with", clients=2)
    assert not [text for text in heard.notices if "left out" in text or "not admitted" in text]
    places = [tmp_path / name / "served" for name in ("without", "with")]
    without, beside = (load_checkpoint(next(place.glob("trials/*/checkpoint.*")))[0] for place in places)
    assert without.keys() == beside.keys()
    assert all(without[name].equal(beside[name]) for name in without)
    alone, both = map(read_summary, places)
    assert set(sites.list_rows(alone)) <= set(sites.list_rows(both))
    assert both.clients[HELD].keys() >= {"test"}


@pytest.mark.slow
def test_it_may_come_late_is_known_again_and_keeps_its_role(tmp_path):
    spec, served = spec_for("fedavg", rounds=4, evaluate_every=1), tmp_path / "served"
    grid, heard = sites.SiteGrid(validating(spec, tmp_path)), Heard()
    grid.away = {9}
    after = lambda done: grid.away.clear() if done.round == 1 else (heard.stop.set(), heard.changed.set())  # noqa: E731
    serve_all(spec, tmp_path, grid, heard=heard, after=after, ends=False)
    serve_all(spec, tmp_path, grid)
    people = ClientRegistry.read(served / "machines" / "population.json").clients
    assert [client.name for client in people if client.validates] == [HELD]
    rows = read_summary(served).rows.query("client == 'worn'")
    assert max(rows["round"]) == 4
    assert 1 not in set(rows["round"])
    assert load_served(served).settings.newcomers == (HELD,)  # so that its models can be restored
    grid.sites[9] = make_site("digits", HELD, tmp_path)
    heard = serve_all(spec, tmp_path, grid)
    assert any("'worn' has reconnected with other data or in another role than before" in t for t in heard.notices)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("method", "unseen", "why"),
    [
        ("fedbn", "average", "takes entries that fedbn keeps at its clients, which never leave them: use a method wi"),
        ("fedbn", "reestimate", "takes entries that fedbn keeps at its clients, which never leave them: use a metho"),
        ("silobn", "average", "takes entries that silobn keeps at its clients, which never leave them: use 'reestim"),
        ("ditto", "finetune", "this site validates only, and unseen='finetune' trains: use unseen='average' or"),
        ("fedbn", "finetune_bn", "this site validates only, and unseen='finetune_bn' trains: use unseen='average' or"),
        ("ditto", "nearest", "leave them: use 'average', 'mixed', 'reestimate' or 'tent'"),
    ],
)
def test_a_policy_that_it_cannot_follow_is_refused_by_name_and_the_others_train(method, unseen, why, tmp_path):
    heard = serve_all(spec_for(method, unseen=unseen, evaluate_every=2), tmp_path)
    (refusal,) = (text for text in heard.notices if "worn is not measured" in text)
    assert why in refusal
    assert any(f"by the policy unseen={unseen} where their sites can follow it: worn" in text for text in heard.notices)
    assert heard.took_part == [ALL] * 2


def test_record_and_confirmation_say_that_it_validates_only(tmp_path):
    limits = '[limits]\nkeep = ["*"]\nsites = 9\nepsilon = 1.0\nsample_epsilon = 1.0\nrounds = 2'
    (tmp_path / "policy.toml").write_text(limits)
    shown, spec, account = [], spec_for("fedavg", evaluate_every=2), tmp_path / "worn.db"
    asks = lambda text, _: shown.append(text) or True  # noqa: E731
    policy = SitePolicy.read(tmp_path / "policy.toml")
    grid = validating(spec, tmp_path, policy=policy, confirm=asks, account=account)
    assert not [text for text in serve_all(spec, tmp_path, grid).notices if "not measured" in text]
    described, trial = shown
    assert "samples: 140 test" in described
    assert "this site validates only: nothing is trained here" in trial
    assert "leaves each round: nothing" in trial
    assert "privacy: nothing is trained on these data; counts are disclosed without noise" in trial
    entries = list(Record(account).read())
    assert [entry.event for entry in entries] == ["agreed", "describe", "agreed", "evaluate"]
    assert not any("left" in entry.content for entry in entries)
    (total,) = Record(account).list_totals()
    assert total.endswith(": 0 uploads, 1 evaluations, 1 descriptions in all")


@pytest.fixture
def image_sites(tmp_path):
    """A site for each of four directories of class folders; ``worn`` validates only, and has test images alone."""
    for client in fedshift.digits().select_clients(FOUR.split(",")).limit_samples(16).clients:
        for part, split in client.splits.items():
            for number in range(0 if (part, client.name) == ("train", HELD) else min(40, len(split))):
                folder = tmp_path / "images" / client.name / part / str(int(split.y[number]))
                folder.mkdir(parents=True, exist_ok=True)
                Image.fromarray(split.x[number].permute(1, 2, 0).numpy()).save(folder / f"{number}.png")
    return {
        number: make_site(tmp_path / "images" / name, name, tmp_path / "sites", validates=name == HELD)
        for number, name in enumerate(FOUR.split(","))
    }


def spec_of_images(**changes):
    return spec_for("fedavg", samples=None, classes=10, image_size=None, on_data_error="ignore", **changes)


@pytest.mark.slow
def test_it_needs_no_training_samples_and_has_its_column_and_its_model(image_sites, tmp_path, cli):
    image_sites[3].export, served = tmp_path / "models", tmp_path / "served"
    heard = serve_all(spec_of_images(validation=0.25), tmp_path, image_sites)
    assert any(text.startswith("worn is connected, validates only, on 40 test samples") for text in heard.notices)
    rows = read_summary(served).rows.query("client == 'worn' and model == 'personal'")
    assert set(rows["samples"]) == {40}
    assert not [text for text in heard.notices if "not measured" in text]
    assert HELD in (tmp_path / "models" / "fedavg-seed0" / "README.md").read_text()
    assert cli("report", served).code == 0
    assert all(HELD in (served / name).read_text() for name in ("report.html", "tables/accuracy.csv"))


@pytest.mark.slow
def test_what_follows_from_training_images_is_refused_where_there_are_none(image_sites, tmp_path):
    heard = serve_all(spec_of_images(normalize="client"), tmp_path, image_sites)
    assert [text for text in heard.notices if "scales by training images, which this site lacks" in text]
    assert heard.took_part == [ALL] * 2
