"""Which runs a table or figure of the papers takes, on which data, and with which settings."""

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedshift.data.sources import load_federation
from fedshift.experiments.factory import make_methods
from fedshift.reproduce import planning, recipes
from fedshift.reproduce.planning import TablePlan, make_plans
from fedshift.reproduce.published_tables import PICTURES, find_table, load_tables
from fedshift.reproduce.recipes import ReproductionOptions, find_recipe, run_name
from fedshift.utils.errors import UsageError


@pytest.fixture
def everything(monkeypatch):
    """All data are here."""
    monkeypatch.setattr(planning, "is_present", lambda data, root: True)
    return ReproductionOptions(root=Path("data"))


@pytest.fixture
def nothing(tmp_path):
    """No data are here but those that come with fedshift."""
    for cached in (recipes.is_present, recipes.find_stand_in):
        cached.cache_clear()
    yield ReproductionOptions(root=tmp_path)
    for cached in (recipes.is_present, recipes.find_stand_in):
        cached.cache_clear()


def specs(key, way):
    return [spec for _, plan in make_plans(find_table(key), way) for spec in plan.specs]


def cells(key, way):
    return make_plans(find_table(key), way)[-1][1].cells


@pytest.mark.parametrize("key", load_tables())
def test_a_recipe_makes_runs_of_every_cell_and_panel(key, everything):
    table = find_table(key)
    plans = make_plans(table, everything)
    assert [block for block, _ in plans if block is not PICTURES] == list(table.blocks)
    for block, plan in plans:
        assert len(plan.cells) == sum(number is not None for _, numbers in block.rows for number in numbers)
        assert len(plan.panels) == (len(find_recipe(table)["panels"]) if block is PICTURES else 0)
        assert plan.specs or any(panel.x == "toy" for panel in plan.panels)
        assert not plan.missing
    assert plans
    for spec in specs(key, everything):
        make_methods(spec)
        assert (spec.seeds, spec.statistics) == (1, "running")


@pytest.mark.parametrize("key", [key for key in load_tables() if not key.startswith("fedmmb")])
def test_without_any_data_the_embedded_digits_stand_in(key, nothing):
    lacking = {"abide", "morpho-mnist", "fed-isic2019", "cifar10", "fed-heart-disease", "tcga-brca"}
    for _, made in make_plans(find_table(key), nothing):
        assert set(made.missing) <= lacking
        assert all(spec.data == "gaussians" or (spec.data, spec.root) == ("digits", None) for spec in made.specs)
        assert made.specs or made.missing or made.panels  # the toy needs no run
        assert bool(made.notes) == ("digits" in {spec.data for spec in made.specs})


def test_keys_of_rows_and_columns_are_settings(everything):
    grid = {(c.method, c.epochs, c.batch_size) for c in specs("fedbn/table13", everything)}
    assert grid == {(m, e, b) for m in ("fedavg", "fedbn") for e in (None, 4, 16) for b in (10, 50, 0)}
    assert {(cell.spec.data, cell.client) for cell in cells("fedbn/table14", everything)} == {
        (f"digits-five(samples={n})", c)
        for n in (7438, 4462, 2975, 1487, 743, 371, 74)
        for c in ("mnist", "svhn", "usps", "synthdigits", "mnistm")
    }


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("fedbn/table1", {"method": "fedbn+fedavg(weighting='uniform')", "data": "abide(window=32)", "rounds": 50}),
        ("fedbn/table1", {"method": "fedprox(mu=0.01)", "rounds": 300, "select": "best", "evaluate_every": 1}),
        ("fedbn/table1", {"data": "domainnet(samples=105, validation=105)", "normalize": "unit", "split": None}),
        ("fedbn/table11", {"data": "digits-five(samples=743)", "normalize": None, "select": "last", "samples": None}),
        ("fedbn/table15", {"split": "sample(fraction=0.1), repeat()", "samples": None}),
        ("fedbn/table16", {"split": "repeat()", "samples": None}),
        ("fedbn/table17", {"data": "digits-five(samples=743)", "method": "fedbn"}),
        ("fedbn/figure4", {"split": "iid(clients=10, within='domain', test='same'), only(clients='*-[0-3]')"}),
        ("fedbn/figure8", {"epochs": 16, "batch_size": 0, "evaluate_every": 10, "rounds": 300}),
        ("fedfa/office", {"method": "feddyn(alpha=0.1)+fedavg(weighting='uniform')", "validation": 0.4}),
        ("fedfa/office", {"rounds": 400, "model": "alexnet-bn(width=1024)", "augment": None, "select": "best"}),
        ("fedmmb/table2", {"method": "fedsmb", "batches": 1, "split": "iid(clients=100)", "batch_size": 5}),
        ("fedmmb/table4", {"method": "fedmmb(batches=20)", "batches": None, "data": "cifar10(doubled=True)"}),
        ("fedmmb/table5", {"method": "fedavg", "data": "ham10000(by_lesion=False)", "rounds": 250, "metric": "auc"}),
        ("fedmmb/figure3", {"method": "fedmmb(batches=50)", "lr": 0.02}),
        ("fedmmb/figure4", {"method": "fedavg", "batch_size": 500, "lr": 0.05}),
        ("fedwon/table1", {"method": "fedwon(agc=0.64)", "data": "digits-five(samples=743)", "rounds": 100}),
        ("fedwon/table1", {"method": "fedwon(agc=1.28)", "rounds": 300, "select": "best", "normalize": "unit"}),
        ("fedwon/table2", {"data": "office-caltech10(samples=62, validation=50)", "samples": None, "split": None}),
        ("fedwon/table2", {"method": "fedwon(agc=None)", "batch_size": 1}),
        ("fedwon/table3", {"participation": 0.1, "split": "iid(clients=20, within='domain')", "samples": None}),
        ("fedwon/table11", {"metric": "balanced_accuracy", "loss": "focal(gamma=2.0, weights='inverse_frequency')"}),
        ("fedwon/table12", {"newcomers": "webcam", "unseen": "average", "method": "fedbn"}),
        ("fedwon/table15", {"split": "dirichlet(clients=10, alpha=0.1, minimum=10)", "rounds": 200}),
        ("fedwon/table16", {"split": "iid(clients=200, within='domain')", "participation": 0.1, "batch_size": 2}),
        ("fedwon/table18", {"method": "agc(clip=1.28)+nonorm", "batch_size": 2}),
        ("fedwon/table18", {"method": "nonorm", "batch_size": 32}),
        ("fedwon/table18", {"method": "fedwon(agc=None)", "batch_size": 32}),
        ("fedwon/table19", {"method": "agc(clip=1.28)+silobn"}),
        ("fedwon/figure3", {"method": "nonorm+single"}),
        ("fedwon/figure4", {"method": "fedwon(agc=None)", "batch_size": 4, "lr": 0.04}),
        ("fedwon/figure6", {"split": "dirichlet(clients=100, alpha=0.5, minimum=10)", "evaluate_every": 10}),
        ("fedwon/figure11", {"method": "fedwon(agc=2.56)", "batch_size": 2, "lr": 0.01}),
    ],
)  # fmt: skip
def test_tables_are_run_as_the_papers_say(key, settings, everything):
    found = [{name: getattr(spec, name) for name in settings} for spec in specs(key, everything)]
    assert settings in found


def test_the_authors_first_part_is_trained_on_where_their_files_are(nothing):
    drawn = np.random.default_rng(0)
    for home in ("MNIST", "SVHN", "USPS", "SynthDigits", "MNIST_M"):
        (nothing.root / home / "partitions").mkdir(parents=True)
        for name in ("test.pkl", *(f"partitions/train_part{number}.pkl" for number in range(10))):
            part = drawn.integers(0, 256, (743, 4, 4), dtype=np.uint8), np.arange(743) % 10
            (nothing.root / home / name).write_bytes(pickle.dumps(part))
    (spec, *_) = specs("fedbn/table11", nothing)
    for home, client in zip(("MNIST", "SVHN"), load_federation(spec.data, spec).clients, strict=False):
        x, y = pickle.loads((nothing.root / home / "partitions" / "train_part0.pkl").read_bytes())
        assert np.array_equal(client.train.x[:, 0], x)
        assert np.array_equal(client.train.y, y)


def test_seen_clients_of_table_12_are_measured_after_their_work_and_the_unseen_one_with_the_servers_model(everything):
    found = find_table("fedwon/table12")
    moments = {(cell.client, cell.moment) for cell in cells("fedwon/table12", everything)}
    assert moments == {("amazon", "trained"), ("caltech", "trained"), ("dslr", "trained"), ("webcam", "loaded")}
    assert find_recipe(found)["moments"] == "loaded,trained"
    assert {cell.moment for cell in cells("fedwon/table2", everything)} == {"loaded"}


def test_tables_share_runs(everything):
    def runs(key, **way):
        return {run_name(spec) for spec in specs(key, ReproductionOptions(root=Path("data"), **way))}

    assert len(runs("fedbn/table11") & runs("fedbn/table12")) == 1  # FedBN's
    assert runs("fedbn/table17") < runs("fedbn/table11")
    assert runs("fedwon/table1") == runs("fedwon/table22")
    assert not runs("fedbn/table11") & runs("fedbn/table11", scale=0.5)
    assert run_name(specs("fedbn/table11", everything)[0]) == run_name(
        specs("fedbn/table11", ReproductionOptions(root=Path("b")))[0]
    )


def test_discordance_is_measured_against_the_centralized_row(everything):
    twins = [cell for cell in cells("fedmmb/table2", everything) if cell.measure == "discordance"]
    assert len(twins) == 16
    for cell in twins:
        assert (cell.twin.method, cell.twin.batch_size, cell.twin.split) == ("centralized", 500, None)
        assert (cell.twin.model, cell.twin.data) == (cell.spec.model, cell.spec.data)


def test_lighter_networks_are_said(everything):
    plain, light = (
        specs("fedwon/table13", ReproductionOptions(root=Path("data"), light=light)) for light in (False, True)
    )
    assert ({spec.model for spec in plain}, {spec.model for spec in light}) == ({"resnet20"}, {"small-cnn"})
    (made,) = [
        found
        for _, found in make_plans(find_table("fedwon/table13"), ReproductionOptions(root=Path("data"), light=True))
    ]
    assert made.notes == ("small-cnn in place of resnet20",)
    kept = {spec.model for spec in specs("fedmmb/figure1", ReproductionOptions(root=Path("data"), light=True))}
    assert kept == {"fnn2", "cfnn3"}


def test_what_stands_in_is_said(nothing):
    for name in ("mnist", "mnistm", "usps", "svhn_subset", "chars74k_fnt"):
        np.savez(nothing.root / f"{name}.npz", x=np.zeros(1))
    (_, (_, made)) = make_plans(find_table("fedbn/table11"), nothing)
    assert made.notes == (
        "mnist, usps, chars74k_fnt, mnistm in place of Digits-Five; svhn is left out: svhn_subset has 554 training "
        "samples of the 743 asked for",
    )
    assert made.shown == {"mnist": "mnist", "usps": "usps", "synthdigits": "chars74k_fnt", "mnistm": "mnistm"}
    assert {cell.client for cell in made.cells} == {"mnist", "mnistm", "usps", "chars74k_fnt"}  # SVHN's are too few
    assert {cell.spec.data for cell in made.cells} == {str(nothing.root)}
    sizes = make_plans(find_table("fedbn/table14"), nothing)[-1][1]
    small = {cell.client for cell in sizes.cells if cell.spec.samples == 371}
    assert small == {"mnist", "mnistm", "usps", "chars74k_fnt", "svhn_subset"}
    assert sizes.shown["svhn"] == "svhn_subset"
    (said,) = sizes.notes
    assert "svhn is left out of some runs: svhn_subset has 554 training samples of the 743 to 7,438 asked for" in said
    assert "usps is left out of some runs: usps has 7,291 training samples of the 7,438 asked for" in said


def test_clients_for_which_nothing_stands_in_and_sizes_that_are_not_here_are_said(nothing):
    plans = [plan for _, plan in make_plans(find_table("fedbn/table1"), nothing)]
    of_domains = [plan for plan in plans if any("DomainNet" in note for note in plan.notes)]
    assert of_domains
    for plan in of_domains:
        assert plan.notes[0].endswith("; sketch is left out: it has no substitute")
        assert "sketch" not in plan.shown
    for _, sizes in make_plans(find_table("fedbn/table14"), nothing):
        assert sizes.notes[0].endswith("; 371 to 7,438 samples a client are left out: there are 300 at most")


def test_a_run_is_called_the_same_wherever_its_data_lie(nothing, tmp_path):
    names = []
    for place in ("here", "there"):
        root = tmp_path / place
        root.mkdir()
        for name in ("mnist", "mnistm", "usps", "svhn_subset", "chars74k_fnt"):
            np.savez(root / f"{name}.npz", x=np.zeros(1))
        found = specs("fedbn/table11", replace(nothing, root=root))
        assert {spec.data for spec in found} == {str(root)}
        names.append([run_name(spec) for spec in found])
    assert names[0] == names[1]
    assert set(names[0]).isdisjoint(run_name(spec) for spec in specs("fedbn/table11", nothing))


@pytest.mark.parametrize(("scale", "every"), [(1.0, 30), (0.5, 15), (1 / 16, 1)])
def test_where_other_digits_stand_in_fewer_rounds_are_measured_to_choose_from(nothing, scale, every):
    for name in ("mnist", "mnistm", "usps", "chars74k_fnt"):
        np.savez(nothing.root / f"{name}.npz", x=np.zeros(1))
    found = {spec for spec in specs("fedwon/table2", replace(nothing, scale=scale)) if spec.batch_size == 2}
    assert {(spec.select, spec.split, spec.samples, spec.normalize) for spec in found} == {
        ("best", "validation(size=50)", 62, "unit")
    }
    assert {spec.evaluate_every for spec in found} == {every}


def test_fewer_samples_stand_in_for_more_but_not_where_their_number_is_the_matter(nothing):
    assert {spec.samples for spec in specs("fedbn/table11", nothing)} == {300}
    assert {spec.samples for spec in specs("fedbn/table14", nothing)} == {74}


def test_what_is_nowhere_is_missing(nothing):
    ((_, plan),) = make_plans(find_table("fedmmb/table2"), nothing)
    assert plan == TablePlan(missing=("mnist", "fashion-mnist"))


def test_all_versions_of_a_table_take_the_same_runs(everything):
    for table in load_tables().values():
        runs = {}
        for block, plan in make_plans(table, everything):
            runs.setdefault(block.version, set()).update(plan.specs if block is not PICTURES else ())
        assert all(specs == runs[table.blocks[0].version] for version, specs in runs.items() if version)


@pytest.mark.parametrize("wrong", [{"scale": 0.0}, {"scale": 1.5}, {"seeds": 0}])
def test_a_way_that_cannot_be_is_refused(wrong, tmp_path):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        ReproductionOptions(root=tmp_path, **wrong)
