"""Who takes part in an experiment across machines, from its beginning to its end, and what it leaves."""

import json
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedshift.config.expressions import trust_only
from fedshift.data.columns import Column
from fedshift.data.federation import count_labels
from fedshift.flower.server.registry import ClientRegistry, SiteDescription
from fedshift.results.schema import compute_metric
from fedshift.results.summary import read_facts, read_summary
from fedshift.utils.checked_json import write_checked
from fedshift.utils.errors import FedshiftError, UsageError
from tests.flower.sites import Heard, SiteGrid, coordinator, in_process, same_as_in_process, sites_of, spec_for

FIVE = "pen,photo,print,faded,worn"
COLUMNS = (Column(name="age"), Column(name="ward", categories=("A", "B")))


def described(name, **changes):
    facts = {"version": "1", "shape": (3, 8, 8), "dtype": "uint8", "classes": 2, "class_names": ("cat", "dog")}
    return SiteDescription(**({"name": name, "samples": {"train": 6, "test": 4}, "labels": None} | facts | changes))


def said(folder):
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_a_fraction_of_the_clients_takes_part_as_in_one_process(tmp_path, machine):
    spec = spec_for(domains=FIVE, samples=16, rounds=4, participation=0.5)
    assert coordinator(spec, SiteGrid(sites_of(spec, tmp_path)), tmp_path / "served", Heard()).run()
    same_as_in_process(spec, tmp_path / "served", tmp_path, tmp_path / "reference")
    place = "trials/fedbn-seed0"
    for ours, theirs in zip(said(tmp_path / "served" / place), said(tmp_path / "reference" / place), strict=True):
        assert [ours[key] for key in ("participants", "down", "up")] == [
            theirs[key] for key in ("participants", "down", "up")
        ]


def test_the_records_are_those_of_one_process_and_hold_no_sample(tmp_path, machine):
    spec = spec_for(validation=0.25, evaluate_every=1, metric="brier", metrics="f1, ece, average_precision")
    assert coordinator(spec, SiteGrid(sites_of(spec, tmp_path)), tmp_path / "served", Heard()).run()
    in_process(spec, tmp_path / "reference")
    study, reference = read_summary(tmp_path / "served"), read_summary(tmp_path / "reference")
    rounded = ["loss_sum", "gaps", "sums"]
    assert study.rows.drop(columns=rounded).equals(reference.rows.drop(columns=rounded))
    assert study.metrics == reference.metrics
    for metric in study.metrics:
        ours, theirs = (compute_metric(each.rows, metric).to_numpy() for each in (study, reference))
        assert ours == pytest.approx(theirs, nan_ok=True), metric
    assert study.clients == reference.clients
    assert reference.samples
    assert not study.samples


@pytest.mark.slow
def test_several_methods_and_seeds_are_compared(tmp_path, machine):
    spec = spec_for(rounds=1)
    from fedshift.config.spec import CompareSpec

    given = {name: value for name, value in vars(spec).items() if name not in ("method", "seeds")}
    many = CompareSpec(**given, methods="fedavg,fedbn", seeds=2)
    assert coordinator(many, SiteGrid(sites_of(spec, tmp_path)), tmp_path / "served", Heard()).run()
    assert set(read_summary(tmp_path / "served").rows.groupby(["method", "seed"]).groups) == {
        (method, seed) for method in ("fedavg", "fedbn") for seed in (0, 1)
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "changes"),
    [("fedbn", {}), ("scaffold", {"steps": 5, "batch_size": 5}), ("fedadam+fedbn+fedmmb(batches=1)", {})],
)
def test_it_goes_on_where_it_was_stopped(method, changes, tmp_path, machine):
    spec, grid = spec_for(method, rounds=4, log="tensorboard", **changes), SiteGrid(sites_of(spec_for(), tmp_path))
    heard = Heard()
    heard.after = lambda done: (heard.stop.set(), heard.changed.set()) if done.round == 2 else None
    assert not coordinator(spec, grid, tmp_path / "served", heard).run()
    assert coordinator(spec, grid, tmp_path / "served", Heard()).run()
    same_as_in_process(replace(spec, log=None), tmp_path / "served", tmp_path, tmp_path / "reference")
    (folder,) = (tmp_path / "served" / "logs" / "tensorboard").iterdir()
    points = EventAccumulator(str(folder)).Reload().Scalars("bytes/up")
    assert sorted(point.step for point in points) == [1, 2, 3, 4]


def test_a_round_that_was_done_but_not_saved_is_done_again_from_where_it_began(tmp_path, machine, monkeypatch):
    spec, grid = spec_for(rounds=3), SiteGrid(sites_of(spec_for(), tmp_path))

    def killed(self, folder, *names):
        if self.server.round == 2:
            raise KeyboardInterrupt
        return save(self, folder, *names)

    from fedshift.experiments.trial import Trial

    save = Trial.save
    with monkeypatch.context() as patch:
        patch.setattr(Trial, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            coordinator(spec, grid, tmp_path / "served", Heard()).run()
    assert coordinator(spec, grid, tmp_path / "served", Heard()).run()
    same_as_in_process(spec, tmp_path / "served", tmp_path, tmp_path / "reference")


def test_a_client_that_comes_later_is_admitted_after_the_round(tmp_path, machine):
    spec = spec_for(domains=FIVE, rounds=3, evaluate_every=1)
    grid, heard = SiteGrid(sites_of(spec, tmp_path)), Heard()
    grid.away = {5}
    heard.after = lambda done: grid.away.clear()
    assert coordinator(spec, grid, tmp_path / "served", heard, clients=4).run()
    assert [len(done.participants) for done in heard.rounds] == [4, 4, 5]  # it is greeted while a round goes on
    assert json.loads((tmp_path / "served/machines/population.json").read_text())["clients"][-1]["name"] == "worn"
    study = read_summary(tmp_path / "served")
    assert set(study.rows.query("client == 'worn'")["round"]) == {3}
    assert "worn" in study.clients


def test_only_those_whom_the_settings_name_take_part(tmp_path, machine):
    spec = spec_for()
    grid = SiteGrid(sites_of(spec_for(domains=FIVE), tmp_path))
    heard = Heard()
    assert coordinator(spec, grid, tmp_path / "served", heard, clients=3).run()
    same_as_in_process(spec, tmp_path / "served", tmp_path, tmp_path / "reference")
    left_out = [
        f"{name} does not take part: the settings name pen, photo, print (domains)" for name in ("faded", "worn")
    ]
    assert sorted(said for said in heard.notices if "does not take part" in said) == left_out
    assert {node for node, question in grid.asked if question.kind == "train"} == {1, 2, 3}


def test_who_does_not_come_is_waited_for_no_longer_than_told(tmp_path, machine):
    spec = spec_for()
    grid = SiteGrid(sites_of(spec, tmp_path))
    grid.away = {2}
    with pytest.raises(FedshiftError, match=r"3 sites .* after 0 seconds there are 2: pen, print"):
        coordinator(spec, grid, tmp_path / "served", Heard(), wait=0.0).run()


def test_a_finished_experiment_waits_for_no_site(tmp_path, machine, monkeypatch):
    """As if it had been killed after its last round: what is left to write is written, without any site."""
    monkeypatch.setattr("fedshift.flower.server.coordinator.PARTING", 0.0)
    spec, grid = spec_for(rounds=1), SiteGrid(sites_of(spec_for(), tmp_path))
    assert coordinator(spec, grid, tmp_path / "served", Heard()).run()
    facts = read_facts(tmp_path / "served")
    outcome = facts.pop("trained")
    write_checked(tmp_path / "served" / "study.json", facts)
    asked, heard = len(grid.asked), Heard()
    grid.away = {1, 2, 3}
    assert coordinator(spec, grid, tmp_path / "served", heard, wait=1e9).run()
    assert "all rounds are done: not waiting for sites" in heard.notices
    assert (len(grid.asked), heard.rounds) == (asked, [])
    assert {**read_facts(tmp_path / "served")["trained"], "commands": 0} == {**outcome, "commands": 0}
    with pytest.raises(FedshiftError, match="3 sites must be connected"):
        coordinator(replace(spec, rounds=2), grid, tmp_path / "served", Heard(), wait=0.0).run()


def test_waiting_can_be_stopped(tmp_path, machine):
    spec, heard = spec_for(), Heard()
    grid = SiteGrid(sites_of(spec, tmp_path))
    grid.away = {2}
    heard.stop.set()
    assert not coordinator(spec, grid, tmp_path / "served", heard, wait=1e9).run()


def test_pooling_is_refused_across_machines(tmp_path, machine):
    spec = spec_for("centralized")
    with pytest.raises(UsageError, match="needs all data in one place"):
        coordinator(spec, SiteGrid(sites_of(spec, tmp_path)), tmp_path / "served", Heard()).run()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"domains": "north,!south"}, "domains='north,!south': .* sites are not yet known: write each name"),
        ({"spacing": "median"}, "spacing='median': sites do not tell how far their voxels are apart"),
        ({"adapter": "lora()"}, "adapter lora.*every machine needs the same: give a file with their weights"),
        ({"model": "timm:resnet18(pretrained=True)"}, "sites scale images by name, not as its pretrained weights need"),
    ],
)
def test_what_machines_could_not_have_alike_is_refused(settings, words, tmp_path, monkeypatch):
    for name in ("peft", "timm"):
        package = ModuleType(name)
        package.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, package)
    with pytest.raises(UsageError, match=words):
        coordinator(spec_for(**settings), SiteGrid({}), tmp_path / "served", Heard())


@pytest.mark.slow
def test_label_counts_are_asked_for_only_where_the_loss_goes_by_them(tmp_path, machine):
    for loss, known in (("cross_entropy", False), ("focal(weights='inverse_frequency')", True)):
        spec, folder = spec_for(loss=loss, rounds=1), tmp_path / str(known)
        assert coordinator(spec, SiteGrid(sites_of(spec, folder)), folder / "served", Heard()).run()
        (client, *_) = json.loads((folder / "served/machines/population.json").read_text())["clients"]
        assert (client["labels"] is not None) is known
        same_as_in_process(spec, folder / "served", folder, folder / "reference")


@pytest.mark.parametrize("weights", ["balanced", "inverse_frequency"])
def test_class_weights_leave_out_newcomers_that_the_settings_name(weights, tmp_path, machine):
    spec = spec_for("fedavg", loss=f"focal(weights='{weights}')", newcomers="print")
    assert coordinator(spec, SiteGrid(sites_of(spec, tmp_path)), tmp_path / "served", Heard()).run()
    (trial,) = same_as_in_process(spec, tmp_path / "served", tmp_path, tmp_path / "reference")
    assert set(trial.clients.seen) == {"pen", "photo"}


def test_clients_are_in_the_order_of_the_settings_and_those_admitted_later_last():
    first = ClientRegistry().add_clients([described("c"), described("a"), described("b")], order=("b",))
    grown = first.add_clients([described("a"), described("A")], order=("b",))
    assert [client.name for client in grown.clients] == ["b", "a", "c", "A"]
    assert grown.experiment == first.experiment != ClientRegistry().experiment


def test_labels_count_among_the_classes_of_all_sites():
    some = described("a", labels=(5, 1), samples={"train": 6, "test": 4})
    other = described("b", labels=(2, 7), samples={"train": 9, "test": 4}, class_names=("ant", "cat"))
    data = ClientRegistry().add_clients([some, other]).to_federation(4)
    assert data.class_names == ("ant", "cat", "dog")
    assert count_labels(data).tolist() == [2, 12, 1, 0]
    unnamed = [described(name, labels=(2, 4), class_names=()) for name in "ab"]
    assert count_labels(ClientRegistry().add_clients(unnamed).to_federation(None)).tolist() == [4, 8]


def test_a_population_is_read_as_it_was_written(tmp_path):
    population = ClientRegistry().add_clients(
        [described("a", labels=(2, 4)), described("b", columns=COLUMNS, shape=(3,))]
    )
    population.write(tmp_path / "machines" / "population.json")
    assert ClientRegistry.read(tmp_path / "machines" / "population.json") == population


def test_classes_of_all_sites_are_counted_together():
    sites = [described("a", class_names=("10", "9")), described("b", class_names=("2", "9"))]
    data = ClientRegistry().add_clients(sites).to_federation(None)
    assert (data.class_names, data.classes) == (("2", "9", "10"), 3)
    same = [described("a", class_names=("dog", "cat")), described("b", class_names=("dog", "cat"))]
    assert ClientRegistry().add_clients(same).to_federation(None).class_names == (
        "dog",
        "cat",
    )  # as both have them


def test_labels_of_a_site_mean_what_they_mean_at_all():
    import torch

    from fedshift.data.federation import ClientData, Federation
    from fedshift.data.joining import match_labels
    from fedshift.data.samples import Samples
    from fedshift.data.schema import Layout

    split = Samples(x=torch.zeros(3, 2), y=torch.tensor([0, 1, 0]))
    own = Federation(
        name="own", clients=(ClientData(name="a", train=split, test=split),), classes=2, class_names=("10", "9")
    )
    found = match_labels(own, Layout(name="run", task=own.task, classes=3, class_names=("2", "9", "10")), "the run")
    assert found.clients[0].train.y.tolist() == [2, 1, 2]
    assert (found.classes, found.class_names) == (3, ("2", "9", "10"))


@pytest.mark.parametrize(
    ("changes", "classes", "why"),
    [
        ({"shape": (1, 8, 8)}, None, r"'a' are uint8 of shape \(3, 8, 8\), samples of 'b' uint8 of shape \(1, 8, 8\)"),
        ({"dtype": "float32"}, None, "'a' are uint8 .* 'b' float32"),
        ({"class_names": ()}, None, "only one of 'a' and 'b' has classes with names"),
        (
            {"class_names": ("cat", "eel")},
            2,
            r"classes=2, but the sites have 3 \('dog' only at a, 'eel' only at b\): rename",
        ),
    ],
)
def test_sites_whose_data_do_not_go_together_are_named(changes, classes, why):
    with pytest.raises(FedshiftError, match=why):
        ClientRegistry().add_clients([described("a"), described("b", **changes)]).to_federation(classes)


@pytest.mark.parametrize(
    "wrong",
    [{"samples": {"train": 0, "test": 1}}, {"samples": {"test": 1}}, {"samples": 3}, {"name": "a\nb"}, {"shape": "x"}],
)
def test_a_site_that_describes_itself_wrongly_is_not_understood(wrong):
    facts = {"name": "a", "version": "1", "shape": [1], "dtype": "uint8", "classes": 2, "class_names": []}
    with pytest.raises(FedshiftError):
        SiteDescription.of(facts | {"samples": {"train": 1, "test": 1}, "labels": None} | wrong)


@pytest.mark.parametrize("name", ["method", "model", "loss"])
def test_a_coordinator_calls_no_function_that_its_file_names_and_nobody_allowed(tmp_path, machine, name):
    spec, grid = spec_for(**{name: "tests.flower.gated:network"}), SiteGrid({})
    with trust_only((), "experiment.toml"), pytest.raises(UsageError, match=r"experiment.toml: .* nobody allowed"):
        coordinator(spec, grid, tmp_path / "served", Heard())
    assert not grid.asked
