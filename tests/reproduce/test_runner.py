"""Tables of the papers run here: what is run, drawn, kept and left when it is stopped."""

import json
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest

from fedshift.analysis.similarity import compute_discordance
from fedshift.report.tables import metric_history
from fedshift.reproduce import page, planning, published_tables, recipes, runner
from fedshift.reproduce.comparison import compare_cells, describe_verdict
from fedshift.reproduce.planning import make_plans
from fedshift.reproduce.published_tables import PICTURES
from fedshift.reproduce.recipes import ReproductionOptions, run_name
from fedshift.reproduce.results import pending_runs, read_results
from fedshift.reproduce.runner import run_table
from fedshift.results.summary import read_summary
from fedshift.utils.checked_json import read_checked
from fedshift.utils.errors import FedshiftError, UsageError
from tests.conftest import ARRAYS
from tests.reproduce.conftest import make_small_table


def specs_of(table, options):
    return make_plans(table, options)[0][1].specs


def test_a_table_is_run_and_kept_and_not_run_again(tiny, tmp_path, monkeypatch):
    table, way = make_small_table(), ReproductionOptions(root=tmp_path, seeds=2)
    (result,) = run_table(table, way, tmp_path)
    ours = {(cell.row, cell.column): cell for cell in compare_cells(result)}
    for row in (0, 1):
        pen, photo, average = (ours[row, column] for column in range(3))
        assert average.ours == pytest.approx((pen.ours + photo.ours) / 2)
        assert 0 <= pen.ours <= 100
        assert pen.std >= 0
    assert read_results(table, tmp_path) == [result]
    monkeypatch.setattr(runner, "make_checked", None)
    assert run_table(table, way, tmp_path) == [result]
    fewer = replace(table, blocks=(replace(table.blocks[0], rows=table.blocks[0].rows[:1]),))
    with pytest.raises(
        UsageError, match=r"table99-0.json has a number in row 2, column 1 of a table of 1 x 3: .* remove"
    ):
        read_results(fewer, tmp_path)


def test_a_run_that_is_stopped_goes_on(tiny, tmp_path, Listener):
    table, way, stop = make_small_table(), ReproductionOptions(root=tmp_path), Event()
    specs = specs_of(table, way)
    stop.set()
    assert run_table(table, way, tmp_path, stop=stop)[0].unfinished == "0 of 2 runs"
    assert not read_results(table, tmp_path)
    assert pending_runs(specs, tmp_path) == list(specs)
    heard = []
    second = Listener(lambda done: heard.append(done.round) or (len(heard) == 3 and stop.set()))
    stop.clear()
    run_table(table, way, tmp_path / "b", callback=second, stop=stop)
    assert pending_runs(specs, tmp_path / "b") == [specs[1]]
    (some,) = read_results(table, tmp_path / "b")
    assert {row for row, _ in some.values} == {0}
    assert "Verdict (1 seed, 1 of 2 runs): " in describe_verdict(some)[1]
    (whole,) = run_table(table, way, tmp_path / "b")
    assert not pending_runs(specs, tmp_path / "b")
    assert {row for row, _ in whole.values} == {0, 1}
    stop.set()
    assert not run_table(table, replace(way, seeds=2), tmp_path / "b", stop=stop)[0].values
    assert read_results(table, tmp_path / "b") == [whole]  # less does not replace more


@pytest.mark.slow
def test_errors_in_data_are_one_line_before_the_first_run_or_a_refusal(tiny, rewrite, tmp_path, Listener, monkeypatch):
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(planning, "is_present", lambda data, root: True)
    x, y, *_ = ARRAYS["ann"]
    folder = rewrite("ann", x_test=x[:6], y_test=y[:6]).parent  # tested on samples that it trains on
    tiny |= {"domains": "", "samples": ""}
    table = make_small_table(columns=("ann", "bob", "average"))
    leaking = replace(table, blocks=(replace(table.blocks[0], keys={"data": str(folder)}),))
    callback = Listener()
    heard = callback.notices
    way = ReproductionOptions(root=tmp_path, on_data_error="refuse")
    with pytest.raises(UsageError, match=r"^1 error in the data: Test samples are also in .*ann \(test\) 6 of 6"):
        run_table(leaking, way, tmp_path / "out", callback=callback)
    assert (heard, (tmp_path / "out").exists()) == ([], False)
    run_table(leaking, replace(way, on_data_error=None), tmp_path / "out", callback=callback)
    assert heard[0].startswith("1 error in the data: ")
    assert [line for line in heard if "in the data" in line] == heard[:1]
    assert sum(line.startswith("run ") for line in heard) == 2
    kept = [read_checked(path, "")["notices"][0] for path in (tmp_path / "out" / "runs").glob("*/notices.json")]
    assert kept == heard[:1] * 2
    heard.clear()
    run_table(leaking, replace(way, on_data_error="ignore", seeds=2), tmp_path / "out", callback=callback)
    assert not any("in the data" in line for line in heard)
    run_table(leaking, way, tmp_path / "out")  # nothing is left to run


def test_a_changed_bit_of_a_stored_result_is_refused_by_the_name_of_the_file(tiny, tmp_path):
    table, place = make_small_table(methods=("fedavg",)), tmp_path / "here"
    run_table(table, ReproductionOptions(root=tmp_path), place)
    path = place / "results" / "fedbn" / "table99-0.json"
    whole = path.read_bytes()
    assert json.loads(whole)["options"]["scale"] == 1  # any reader of JSON can read it
    for at in range(0, len(whole), 5):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(
            FedshiftError, match=r"table99-0.json is damaged \(.*\): restore it from a copy, or remove it"
        ):
            read_results(table, place)
    with pytest.raises(FedshiftError, match=r"table99-0.json is damaged"):
        page.write_results_page(place)


def test_a_run_that_diverges_leaves_the_others(tiny, tmp_path):
    tiny["of"] = {"fedavg": {"lr": 1e20}}
    way = ReproductionOptions(root=tmp_path)
    (result,) = run_table(make_small_table(), way, tmp_path)
    assert {row for row, _ in result.values} == {1}
    specs = specs_of(make_small_table(), way)
    facts = [read_checked(tmp_path / "runs" / run_name(spec) / "done.json", "") for spec in specs]
    assert ["diverged" in fact for fact in facts] == [True, False]


def test_best_and_rounds_and_discordance_come_from_the_records(tiny, tmp_path):
    tiny |= {
        "rounds": 4, "evaluations": 4, "batches": 1, "domains": "pen",
        "measures": {"accuracy": "best", "rounds": "rounds", "discordance": "discordance"},
    }  # fmt: skip
    columns = ("accuracy", "discordance", "rounds")
    table = make_small_table(("0.9", "0.1", "3"), columns, ("centralized", "fedsmb"), by="metric")
    block = replace(table.blocks[0], keys={"data": "digits", "model": "small-cnn"})
    table, way = replace(table, blocks=(block,), unit="fraction"), ReproductionOptions(root=tmp_path)
    (result,) = run_table(table, way, tmp_path)
    central, federated = (read_summary(tmp_path / "runs" / run_name(spec)) for spec in specs_of(table, way))
    accuracy = metric_history(federated).groupby("round")["value"].mean()
    assert result.values[1, 0] == pytest.approx([accuracy.max()])
    assert result.values[1, 2] == (accuracy.idxmax(),)
    losses = [metric_history(study, "loss").groupby("round")["value"].mean().tolist() for study in (federated, central)]
    assert result.values[1, 1] == pytest.approx([compute_discordance(*losses)])
    assert result.values[0, 1] == (0,)
    assert "2 of 2 discordances below 0.01" in describe_verdict(result)[1]


@pytest.mark.slow
def test_panels_are_drawn_and_come_to_the_page(tiny, tmp_path):
    tiny |= {
        "panels": [
            {"name": "a", "x": "round", "y": "train_loss", "over": {"method": ["fedavg", "fedbn"]}},
            {"name": "b", "x": "samples", "y": "accuracy", "over": {"method": ["fedbn"], "samples": [16, 32]}},
            {"name": "c", "x": "client", "y": "accuracy", "over": {"method": ["fedavg", "fedbn"]}},
            {"name": "d", "x": "toy", "y": "toy-raw"},
            {"name": "e", "x": "features", "y": "maps-01", "over": {"method": ["fedavg", "fedbn"]}},
        ]
    }
    table, way = replace(make_small_table(), blocks=()), ReproductionOptions(root=tmp_path)
    (result,) = run_table(table, way, tmp_path)
    assert result.block is PICTURES
    names = ["table99-a", "table99-b", "table99-c", "table99-d-toy-raw", "table99-e-maps-01-pen"]
    assert list(result.pictures) == names
    ((_, plan),) = make_plans(table, way)
    studies = [read_summary(tmp_path / "runs" / run_name(spec)) for _, spec in plan.panels[1].points]
    few, many = (f"{100 * metric_history(study)['value'].mean():.2f}" for study in studies)
    ends = f"fedbn, samples=16: {few}; fedbn, samples=32: {many}."
    assert result.pictures["table99-b"].endswith(ends)
    assert "pen" in (tmp_path / "results" / "fedbn" / "table99-c.svg").read_text()  # a place for each client
    for name in names:
        assert (tmp_path / "results" / "fedbn" / f"{name}.png").stat().st_size > 1000
    text = page.write_results_page(tmp_path).read_text()
    assert text.count("<svg") == len(names)
    assert "It is &lt;small&gt;" in text
    assert "Verdict (" not in text


def test_a_table_that_was_cut_short_or_lacks_data_is_said_to_be_on_the_page(tiny, tmp_path, monkeypatch):
    tiny |= {"rounds": 8, "keys": {"data": {"away": {"data": "usps"}}}}
    first = make_small_table()
    rows = tuple(({**keys, "data": data}, cells) for keys, cells in first.blocks[0].rows for data in ("digits", "away"))
    table = replace(first, blocks=(replace(first.blocks[0], rows=rows),))
    (result,) = run_table(table, ReproductionOptions(root=tmp_path, scale=0.125), tmp_path)
    assert result.missing == ("usps",)
    assert read_results(table, tmp_path) == [result]
    assert result.remarks == ["Left out: usps, which is missing and has no substitute."]
    monkeypatch.setattr(page, "load_tables", lambda: {table.key: table})
    text = page.write_results_page(tmp_path).read_text()
    assert '<p class="partial">Verdict (1 seed, 0.12 of the rounds): too short to judge; ' in text
    assert '<a href="#fedbn-table99">fedbn/table99</a>: too short to judge</li>' in text
    assert "Left out: usps" in text
    assert "fedbn, data digits: photo" in text
    assert "://" not in text


@pytest.mark.slow
def test_the_command_runs_one_table_or_all(cli, tiny):
    ran = cli("reproduce", "fedbn/table99", "--out", "here")
    assert ran.code == 0, ran.err
    assert "fedbn: photo" in ran.out
    assert "Verdict (1 seed): " in ran.out
    assert "| fedbn: photo |" in Path("here/results/fedbn/table99.md").read_text()
    assert "fedbn: photo &" in Path("here/results/fedbn/table99.tex").read_text()
    every = cli("reproduce", "--all", "--out", "here", "--seeds", "2")
    assert every.code == 0, every.err
    assert "Verdict (2 seeds): " in every.out
    made_by = {path: path.read_bytes() for path in (Path("here/index.html"), *Path("here/results").rglob("*.*"))}
    for path in made_by:
        if path.suffix != ".json":
            path.unlink()
    again = cli("report", "here")
    assert again.code == 0, again.err
    assert "Verdict (2 seeds): " in again.out
    assert {path: path.read_bytes() for path in made_by} == made_by
    listed = cli("reproduce", "--out", "here")
    assert listed.code == 0, listed.err
    assert "Tiny small-cnn: fedavg, fedbn last: " in " ".join(listed.out.split())


def test_missing_data_are_named(tmp_path):
    recipes.is_present.cache_clear()
    with pytest.raises(UsageError, match="fedwon/table11 needs fed-isic2019, not to be found under"):
        run_table(published_tables.find_table("fedwon/table11"), ReproductionOptions(root=tmp_path), tmp_path)
