"""Tables of the papers run here: which runs they need, what is put beside what, and what follows from it."""

import math
from pathlib import Path

import numpy as np
import pytest

from fedshift.base.errors import UsageError
from fedshift.papers import recipe, reproduce
from fedshift.papers.recipe import Plan, Way, planned, recipe_of, runnable
from fedshift.papers.reproduce import Reproduced, last_verdicts, side_by_side
from fedshift.papers.tables import Block, Printed, Table, table, tables


def small(cells=("50.0 (5.0)", "40.0", "45.0"), columns=("pen", "photo", "average"), **changes):
    rows = tuple(({"method": name, **changes}, tuple(map(Printed.of, cells))) for name in ("fedavg", "fedbn"))
    block = Block(version="", page=0, by="client", columns=columns, keys={"data": "digits"}, rows=rows)
    return Table(
        paper="fedbn", name="table99", title="Tiny", where="", metric="accuracy", unit="percent", seeds=0, note="",
        drawn="", claims=(), blocks=(block,),
    )  # fmt: skip


@pytest.fixture
def tiny_recipe(monkeypatch):
    settings = {"rounds": 2, "samples": 16, "lr": 0.05, "model": "small-cnn", "domains": "pen,photo"}
    known = {"fedbn": {"all": settings, "table99": {}}, "stand_in": {}}
    monkeypatch.setattr(recipe, "recipes", lambda: known)
    return known


@pytest.mark.parametrize("key", [key for key in tables() if recipe_of(tables()[key]) is not None])
def test_every_recipe_makes_runs_of_every_cell_whose_data_are_here(key, tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "present", lambda data, root: True)
    found = table(key)
    for block in found.blocks:
        plan = planned(found, block, Way(root=tmp_path))
        printed = sum(
            number is not None
            for _, numbers in block.rows
            for name, number in zip(block.columns, numbers, strict=True)
            if block.by != "metric" or name == found.metric
        )
        assert len(plan.cells) == printed > 0
        assert not plan.missing
        assert {cell.spec.seeds for cell in plan.cells} == {1}


def test_keys_of_rows_and_columns_are_settings(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "present", lambda data, root: True)
    grid, sizes = table("fedbn/table13"), table("fedbn/table14")
    specs = {
        (c.spec.method, c.spec.epochs, c.spec.batch_size)
        for c in planned(grid, grid.blocks[0], Way(root=tmp_path)).cells
    }
    assert specs == {(m, e, b) for m in ("fedavg", "fedbn") for e in (1, 4, 16) for b in (10, 50, 0)}
    cells = planned(sizes, sizes.blocks[0], Way(root=tmp_path)).cells
    assert {(cell.spec.samples, cell.client) for cell in cells} == {
        (n, c)
        for n in (7438, 4462, 2975, 1487, 743, 371, 74)
        for c in ("mnist", "svhn", "usps", "synthdigits", "mnistm")
    }


def test_tables_share_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "present", lambda data, root: True)

    def runs(key, **way):
        return {cell.run for cell in planned(table(key), table(key).blocks[-1], Way(root=tmp_path, **way)).cells}

    assert len(runs("fedbn/table11") & runs("fedbn/table12")) == 1  # FedBN's
    assert not runs("fedbn/table11") & runs("fedbn/table11", scale=0.5)


def test_what_is_not_here_is_said_and_what_stands_in_for_it_too(tmp_path):
    found = table("fedbn/table11")
    block = found.blocks[-1]
    recipe.present.cache_clear()
    recipe.stand_in.cache_clear()
    assert planned(found, block, Way(root=tmp_path)) == Plan(cells=(), missing=("digits-five",), notes=())
    recipe.stand_in.cache_clear()
    for name in ("mnist", "mnistm", "usps", "svhn_subset", "chars74k_fnt"):
        np.savez(tmp_path / f"{name}.npz", x=np.zeros(1))
    plan = planned(found, block, Way(root=tmp_path))
    recipe.stand_in.cache_clear()
    assert not plan.missing
    assert plan.notes == (recipe.recipes()["stand_in"]["digits-five"]["note"],)
    assert {cell.client for cell in plan.cells} == {"mnist", "mnistm", "usps", "chars74k_fnt"}  # SVHN's are too few
    assert {cell.spec.data for cell in plan.cells} == {str(tmp_path)}


def test_a_table_is_run_and_kept_and_not_run_again(tiny_recipe, tmp_path, monkeypatch):
    made, way = small(), Way(root=tmp_path, seeds=2)
    plan = planned(made, made.blocks[0], way)
    assert len({cell.run for cell in plan.cells}) == 2
    found = reproduce.reproduce(made, made.blocks[0], way, plan, tmp_path)
    for row in (0, 1):
        pen, photo, average = (found.ours[row, column] for column in range(3))
        assert average.mean == pytest.approx((pen.mean + photo.mean) / 2)
        assert 0 <= pen.mean <= 100
        assert pen.std >= 0
    assert last_verdicts(made, tmp_path) == [f"{found.verdict} (scale 1)"]
    monkeypatch.setattr(reproduce, "experiment_of", None)
    again = reproduce.reproduce(made, made.blocks[0], way, plan, tmp_path)
    assert again.ours == found.ours


def test_a_run_that_is_stopped_goes_on(tiny_recipe, tmp_path):
    from threading import Event

    made, way, stop = small(), Way(root=tmp_path), Event()
    plan = planned(made, made.blocks[0], way)
    stop.set()
    assert reproduce.reproduce(made, made.blocks[0], way, plan, tmp_path, stop=stop) is None
    assert not last_verdicts(made, tmp_path)
    assert reproduce.reproduce(made, made.blocks[0], way, plan, tmp_path)


def compared(theirs, ours, **changes):
    made = small(columns=("pen",), cells=("0",))
    rows = tuple(({"method": f"m{n}", **changes}, (Printed.of(text),)) for n, text in enumerate(theirs))
    block = Block(version="", page=0, by="client", columns=("pen",), keys={}, rows=rows)
    numbers = {(row, 0): Printed.of(text) for row, text in enumerate(ours)}
    return Reproduced(table=made, block=block, way=Way(root="."), ours=numbers, notes=())


@pytest.mark.parametrize(
    ("theirs", "ours", "verdict"),
    [
        (["50.0 (1.0)", "60.0 (1.0)"], ["51.9", "58.1"], "within the paper's spread"),
        (["50.0 (1.0)", "60.0 (1.0)"], ["52.1", "60.0"], "same order of methods"),
        (["50.0 (1.0)", "60.0 (1.0)"], ["60.0", "50.0"], "neither"),
        (["50.0", "60.0"], ["50.0", "60.0"], "same order of methods"),  # no spread, so nothing can be within it
        (["50.0 (1.0)"], ["60.0"], "one method, outside the paper's spread"),
        (["50.0 (3.0)"], ["60.0 (4.0)"], "within the paper's spread"),  # 2 sqrt(3^2 + 4^2) = 10
        (["50.0 (3.0)"], ["60.1 (4.0)"], "one method, outside the paper's spread"),
    ],
)
def test_verdicts(theirs, ours, verdict):
    assert compared(theirs, ours).verdict == verdict


def test_methods_are_ordered_where_all_else_is_equal():
    made = small(columns=("pen",), cells=("0",))
    keys = [{"method": "a", "epochs": 1}, {"method": "b", "epochs": 1}, {"method": "a", "epochs": 4}]
    theirs, ours = ("1", "2", "9"), ("1", "2", "0")
    rows = tuple((key, (Printed.of(text),)) for key, text in zip(keys, theirs, strict=True))
    block = Block(version="", page=0, by="client", columns=("pen",), keys={}, rows=rows)
    numbers = {(row, 0): Printed.of(text) for row, text in enumerate(ours)}
    assert Reproduced(table=made, block=block, way=Way(root="."), ours=numbers, notes=()).same_order


def test_ours_stand_beside_theirs():
    shown = side_by_side(compared(["50.0 (1.0)", "60.0"], ["51.5 (0.5)", "58.0"], epochs=4))
    assert [cell.text for cell in shown.rows[0]] == [
        "m0, epochs 4: pen",
        "51.50 (0.50)",
        "50.00 (1.00)",
        "+1.50",
        "within",
    ]
    assert [cell.text for cell in shown.rows[1]] == ["m1, epochs 4: pen", "58.00", "60.00", "\N{MINUS SIGN}2.00", ""]


def test_numbers_are_read_as_they_are_printed():
    assert Printed.of("62.87 (1.49)") == Printed(62.87, 1.49)
    assert math.isnan(Printed.of("62.87").std)
    assert Printed.of("") is None


@pytest.mark.parametrize("wrong", [{"scale": 0.0}, {"scale": 1.5}, {"seeds": 0}])
def test_a_way_that_cannot_be_is_refused(wrong, tmp_path):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Way(root=tmp_path, **wrong)


def test_the_command_lists_runs_and_refuses(cli, tiny_recipe, monkeypatch):
    listed = cli("reproduce")
    assert listed.code == 0
    assert "fedwon/table22" in listed.out
    made = small()
    monkeypatch.setattr("fedshift.papers.tables.table", lambda key: made)
    ran = cli("reproduce", "fedbn/table99", "--out", "here")
    assert ran.code == 0, ran.err
    assert "fedbn: photo" in ran.out
    assert "Verdict (1 seed): " in ran.out
    assert "| fedbn: photo |" in Path("here/results/fedbn/table99.md").read_text()
    assert "fedbn: photo &" in Path("here/results/fedbn/table99.tex").read_text()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["fedbn/tabel11"], "fedbn/table11"),
        (["fedbn/table15"], "has no recipe"),
        (["fedbn/table11", "--root", "."], "fedbn/table11 needs digits-five"),
        (["fedbn/table11", "--version", "v9"], "fedbn/table11 has v1, final"),
    ],
)
def test_what_cannot_be_reproduced_is_said(arguments, why, cli):
    outcome = cli("reproduce", *arguments)
    assert outcome.code == 2
    assert why in outcome.err
    assert set(runnable()) <= tables().keys()
