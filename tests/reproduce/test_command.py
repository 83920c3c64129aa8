"""`fedshift reproduce` for a user: refusals before work, the list, and the files written for a table."""

import io
from pathlib import Path
from threading import Event

import pytest
from rich.console import Console

from fedshift.cli.reproduce import _print_list, _publish_table
from fedshift.reproduce import recipes, time_estimates
from fedshift.reproduce.published_tables import find_table, load_tables
from fedshift.reproduce.recipes import ReproductionOptions
from fedshift.reproduce.results import lock_directory
from fedshift.reproduce.runner import FinishedTable
from fedshift.reproduce.time_estimates import TimeBudget
from fedshift.reproduce.verdict import ReproducedBlock
from fedshift.utils.errors import FedshiftError, UsageError


@pytest.fixture
def fresh():
    """What was found of data is found again, before and after."""
    for cached in (found := (recipes.is_present, recipes.find_stand_in)):
        cached.cache_clear()
    yield
    for cached in found:
        cached.cache_clear()


@pytest.fixture
def hour(monkeypatch):
    """Every run is estimated to take an hour; those that were, are returned."""
    seen = []

    class Hour:
        def gather_sizes(self, specs, progress=None):
            for done, spec in enumerate(specs := list(specs)):
                seen.append(spec)
                progress(time_estimates.LOOKING, done, len(specs))

        def estimate(self, specs):
            return 3600.0 * len(list(specs))

    monkeypatch.setattr(time_estimates, "TimeEstimates", Hour)
    return seen


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["fedbn/table12", "--root", "gone"], "--root gone: there is no such directory"),
        (["--all", "--version", "v1"], "--version v1 is one of a single table"),
        (["--version", "v1"], "--version v1 is one of a single table"),
        (["--all", "--hours", "nan"], "--hours nan"),
        (["--all", "--hours", "inf"], "--hours inf"),
        (["fedbn/table12", "--out", "file"], "--out file holds something else"),
        (["fedbn/table12", "--out", "file/below"], "--out file/below: Not a directory; give a directory"),
        (["fedbn/table12", "--out", "others"], "--out others holds something else"),
        (["fedbn/table12", "--out", "a-run"], "--out a-run holds something else"),
        (["--out", "others"], "--out others holds something else"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_made(arguments, why, cli, tmp_path, monkeypatch):
    monkeypatch.delenv("FEDSHIFT_DATA", raising=False)
    (tmp_path / "file").write_text("")
    for path in ("others/thesis.tex", "a-run/study.json"):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    outcome = cli("reproduce", *arguments)
    assert outcome.code == 2
    assert why in outcome.err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_data_directory_that_is_gone_is_said_by_the_name_that_gave_it(cli, monkeypatch):
    monkeypatch.setenv("FEDSHIFT_DATA", "gone")
    outcome = cli("reproduce", "fedbn/table12")
    assert outcome.code == 2
    assert "FEDSHIFT_DATA=gone: there is no such directory" in outcome.err


def test_a_directory_is_held_by_one_program(cli, tmp_path):
    place = tmp_path / "here"
    with lock_directory(place):
        outcome = cli("reproduce", "fedbn/figure1", "--out", "here")
        assert outcome.code == 1
        assert "here is in use by process" in outcome.err
        assert not (place / "results").exists()
        (place / "results" / "fedbn").mkdir(parents=True)
        (place / "results" / "fedbn" / "figure1-pictures.json").write_text("{}")
        assert "here is in use by process" in cli("report", "here").err
    with pytest.raises(ZeroDivisionError), lock_directory(place):
        1 / 0  # noqa: B018
    with lock_directory(place):
        pass


def test_the_list_says_what_each_takes_and_whether_it_is_here(cli, fresh, hour, tmp_path, monkeypatch):
    monkeypatch.delenv("FEDSHIFT_DATA", raising=False)
    listed = cli("reproduce")
    assert listed.code == 0, listed.err
    assert len(hour) > 200
    lines = [line.rstrip() for line in listed.out.splitlines()]
    start = next(number for number, line in enumerate(lines) if line.startswith("fedbn/table11 "))
    assert lines[start].split(maxsplit=4) == ["fedbn/table11", "4", "4.0", "h", find_table("fedbn/table11").title]
    assert lines[start + 1].split(maxsplit=1)[0] == "digits-five:"
    assert lines[start + 2].strip() == "digit-cnn-bn: single, fedavg, fedprox, fedbn"
    number = lines[start + 1].rsplit(maxsplit=1)[1]
    assert f"stand-in {number}: the embedded digits, about 300 a client, in place of Digits-Five" in lines
    assert any(line.strip().startswith("mnist: missing") for line in lines)
    assert [key for key in load_tables() if not any(line.split(" ")[0] == key for line in lines)] == []
    assert not list(tmp_path.iterdir())
    told = listed.err.splitlines()
    assert told[0] == f"looking at the data of runs: 0 of {len(hour)}"
    assert told[10] == f"timing a step of the networks of tables: 0 of {len(load_tables())}"
    assert len(told) == 20  # a line for each tenth


def test_on_a_terminal_a_bar_counts(fresh, hour, tmp_path, monkeypatch):
    drawn, one = io.StringIO(), {"fedbn/table12": find_table("fedbn/table12")}
    monkeypatch.setattr("fedshift.reproduce.published_tables.load_tables", lambda: one)
    monkeypatch.setattr(
        "fedshift.cli.reproduce.Console", lambda stderr=False: Console(file=drawn, force_terminal=True, width=100)
    )
    monkeypatch.setattr(time_estimates.TimeEstimates, "estimate", lambda self, specs: 1.0)
    assert _print_list(ReproductionOptions(root=tmp_path), tmp_path) == 0
    assert "timing a step of the networks of tables" in drawn.getvalue()
    assert "0/1" in drawn.getvalue()


def test_a_table_is_written_with_its_verdict_and_what_stands_in(tmp_path, capsys):
    made = find_table("fedbn/table12")
    block = made.blocks[-1]
    found = ReproducedBlock(
        table=made, block=block, scale=0.5, seeds=1, values={(0, 0): (50.0,), (1, 0): (60.0,)}, own=False,
        notes=("100 % other digits; svhn is left out",), missing=("abide",), shown={block.columns[0]: "pen"},
    )  # fmt: skip
    (tmp_path / "results" / "fedbn").mkdir(parents=True)
    _publish_table(made, FinishedTable(blocks=[found], remarks=("Stand-in: a small network.",)), tmp_path, Console())
    text, tex = ((tmp_path / "results" / "fedbn" / f"table12.{kind}").read_text() for kind in ("md", "tex"))
    said = " ".join(capsys.readouterr().out.split())
    for shown in (said, text, tex):
        assert "ours (stand-in)" in shown
        assert f"{block.columns[0]} (here pen)" in shown
        assert "Verdict (version final, 1 seed, 0.5 of the rounds)" in shown
        assert "Stand-in: a small network." in shown
        assert "Left out: abide, which is missing and has no substitute." in shown
        assert "svhn is left out." in shown
        assert "difference" not in shown
    assert "Stand-in: 100 % other digits; " in said
    assert r"\footnotesize Stand-in: 100 \% other digits; " in tex


def test_a_table_that_was_cut_short_has_no_verdict_where_it_is_shown(tmp_path, capsys):
    made = find_table("fedbn/table12")
    found = ReproducedBlock(
        table=made, block=made.blocks[-1], scale=0.1, seeds=5, values={(0, 0): (50.0,) * 5, (1, 0): (60.0,) * 5},
        shown={},
    )  # fmt: skip
    (tmp_path / "results" / "fedbn").mkdir(parents=True)
    _publish_table(made, FinishedTable(blocks=[found]), tmp_path, Console())
    text, tex = ((tmp_path / "results" / "fedbn" / f"table12.{kind}").read_text() for kind in ("md", "tex"))
    for shown in (" ".join(capsys.readouterr().out.split()), text, tex):
        assert "5 seeds, 0.1 of the rounds): too short to judge; " in shown
        assert "order of methods is not meaningful below 0.25 of the rounds." in shown
        assert not any(word in shown for word in ("paper's order", "Significant", "neither", "difference"))


@pytest.mark.parametrize(
    ("second", "code", "said"),
    [
        (FinishedTable(), 1, "Failed: fedbn/table12: the disk is full"),
        (None, 130, "Stopped. Completed work is saved; continue with the same command."),
    ],
)
def test_of_all_tables_one_may_fail_and_ctrl_c_ends_all(second, code, said, cli, hour, monkeypatch):
    begun = []

    def finish(made, way, place, *, version, callback, stop):
        begun.append(made.key)
        if made.key == "fedbn/table12":
            raise FedshiftError("the disk is full")
        (place / "results" / "fedbn").mkdir(parents=True)
        return second

    wanted = [find_table(f"fedbn/{name}") for name in ("table11", "table12")]
    monkeypatch.setattr("fedshift.cli.reproduce._select_tables", lambda way, present: wanted)
    monkeypatch.setattr("fedshift.reproduce.runner.run_table", finish)
    outcome = cli("reproduce", "--all")
    assert outcome.code == code, outcome.err
    assert begun == ["fedbn/table12", "fedbn/table11"]  # that with fewer runs first
    assert outcome.out.splitlines()[-1] == said


def test_when_the_time_is_up_all_is_kept(cli, hour, monkeypatch):
    monkeypatch.setattr("fedshift.reproduce.runner.run_table", lambda *_, stop, **__: stop.wait(60) and None)
    monkeypatch.setattr("fedshift.cli.reproduce._select_tables", lambda way, present: [find_table("fedbn/table11")])
    outcome = cli("reproduce", "--all", "--hours", "1e-6")
    assert outcome.code == 0, outcome.err
    assert outcome.out == "Time is up. Completed work is saved; continue with the same command.\n"


def test_a_table_that_failed_makes_the_exit_code_1_when_the_time_is_up_too(cli, hour, monkeypatch):
    def finish(made, *_, stop, **__):
        if made.key == "fedbn/table12":
            raise FedshiftError("the disk is full")
        stop.set()

    monkeypatch.setattr(TimeBudget, "over", property(lambda self: self._stop.is_set(), lambda *_: None), raising=False)
    monkeypatch.setattr("fedshift.reproduce.runner.run_table", finish)
    wanted = [find_table(f"fedbn/{name}") for name in ("table11", "table12")]
    monkeypatch.setattr("fedshift.cli.reproduce._select_tables", lambda way, present: wanted)
    outcome = cli("reproduce", "--all", "--hours", "8760")
    assert outcome.code == 1, outcome.err
    assert outcome.out.splitlines()[-1].startswith("Time is up.")


def test_what_cannot_be_estimated_is_said_in_its_row(cli, fresh, hour, monkeypatch):
    def refuse(self, specs):
        raise UsageError("no such network")

    monkeypatch.setattr(time_estimates.TimeEstimates, "estimate", refuse)
    one = {"fedbn/table12": find_table("fedbn/table12")}
    monkeypatch.setattr("fedshift.reproduce.published_tables.load_tables", lambda: one)
    listed = cli("reproduce")
    assert listed.code == 0, listed.err
    assert "cannot run: no such network" in listed.out


def test_a_budget_that_was_stopped_estimates_nothing(hour):
    stop = Event()
    stop.set()
    wanted = [find_table("fedbn/table11"), find_table("fedbn/table12")]  # of which the second has fewer runs
    way = ReproductionOptions(root=Path("data"))
    with TimeBudget(1.0, stop) as spent:
        assert spent.order_by_time(wanted, way, Path("nowhere")) == wanted
        assert spent.fit_scale(wanted[0], way, Path("nowhere"), 1) == way


def test_a_program_without_the_right_to_write_says_so(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with (
        pytest.raises(FedshiftError, match="Permission denied; give a directory that can be written"),
        lock_directory(tmp_path),
    ):
        pass
