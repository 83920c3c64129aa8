"""`fedshift reproduce` for a user: refusals before work, the list, and the files written for a table."""

from pathlib import Path

import pytest
from rich.console import Console

from fedshift.cli.reproduce import _publish_table
from fedshift.reproduce import recipes
from fedshift.reproduce.published_tables import find_table, load_tables
from fedshift.reproduce.recipes import ReproductionOptions
from fedshift.reproduce.results import Result
from fedshift.reproduce.runner import lock_directory
from fedshift.utils.errors import FedshiftError


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """What was found of data is found again, before and after; no directory of data is set."""
    monkeypatch.delenv("FEDSHIFT_DATA", raising=False)
    for cached in (searches := (recipes.is_present, recipes.find_stand_in)):
        cached.cache_clear()
    yield
    for cached in searches:
        cached.cache_clear()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["fedbn/tabel11"], "fedbn/table11"),
        (["fedmmb/table2", "--root", "."], "fedmmb/table2 needs mnist and fashion-mnist"),
        (["--present"], "--present belongs to --all"),
        (["fedbn/table11", "--all"], "leave fedbn/table11 out"),
        (["--all", "--root", "."], "fedmmb/table2 needs mnist"),
        (["fedbn/table12", "--root", "gone"], "--root gone: there is no such directory"),
        (["fedbn/table12", "--scale", "0"], "scale=0: give a share of the rounds"),
        (["fedbn/table12", "--out", "file"], "--out file holds something else"),
        (["fedbn/table12", "--out", "file/below"], "--out file/below: Not a directory; give a directory"),
        (["fedbn/table12", "--out", "others"], "--out others holds something else"),
        (["fedbn/table12", "--out", "a-run"], "--out a-run holds something else"),
        (["--out", "others"], "--out others holds something else"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_made(arguments, why, cli, tmp_path):
    (tmp_path / "file").write_text("")
    for path in ("others/thesis.tex", "a-run/study.json"):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text("{}")
    before = {path for path in tmp_path.rglob("*") if path.name != "reproduced"}
    outcome = cli("reproduce", *arguments)
    assert outcome.code == 2
    assert why in outcome.err
    assert {path for path in tmp_path.rglob("*") if "reproduced" not in path.parts} == before


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


def test_the_list_says_what_each_takes_and_whether_it_is_here(cli, tmp_path):
    listed = cli("reproduce")
    assert listed.code == 0, listed.err
    lines = [line.rstrip() for line in listed.out.splitlines()]
    start = next(number for number, line in enumerate(lines) if line.startswith("fedbn/table11 "))
    assert lines[start].split(maxsplit=3) == ["fedbn/table11", "4", "4", find_table("fedbn/table11").title]
    assert lines[start + 1].split()[0] == "stand-in"
    assert lines[start + 2].strip() == "small-cnn: single" or lines[start + 2].strip().endswith(
        "single, fedavg, fedprox, fedbn"
    )
    number = lines[start + 1].split()[1]
    assert f"stand-in {number}: the embedded digits, about 300 a client, in place of Digits-Five" in lines
    assert any(line.strip().startswith("mnist: missing") for line in lines)
    assert [key for key in load_tables() if not any(line.split(" ")[0] == key for line in lines)] == []
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("scale", [0.5, 0.1])
def test_a_table_is_written_with_its_verdict_and_what_stands_in(scale, tmp_path, capsys):
    table = find_table("fedbn/table12")
    block = table.blocks[-1]
    result = Result(
        table=table, block=block, options=ReproductionOptions(root=tmp_path, scale=scale), own=False,
        values={(0, 0): (50.0,), (1, 0): (60.0,)}, notes=("100 % other digits; svhn is left out",), missing=("abide",),
        shown={block.columns[0]: "pen"},
    )  # fmt: skip
    (tmp_path / "results" / "fedbn").mkdir(parents=True)
    _publish_table(table, [result], tmp_path, Console())
    text, tex = ((tmp_path / "results" / "fedbn" / f"table12.{kind}").read_text() for kind in ("md", "tex"))
    said = " ".join(capsys.readouterr().out.split())
    for shown in (said, text, tex):
        assert "ours (stand-in)" in shown
        assert f"{block.columns[0]} (here pen)" in shown
        assert f"Verdict (version final, 1 seed, {scale} of the rounds)" in shown
        assert "Left out: abide, which is missing and has no substitute." in shown
        assert "svhn is left out." in shown
        assert "difference" not in shown
        assert ("paper's order" in shown) == (scale == 0.5)
    assert "Stand-in: 100 % other digits; " in said
    assert r"\footnotesize Stand-in: 100 \% other digits; " in tex


@pytest.mark.parametrize(
    ("stopped", "code", "said"),
    [
        (False, 1, "Failed: fedbn/table12: the disk is full"),
        (True, 130, "Stopped. Completed work is saved; continue with the same command."),
    ],
)
def test_of_all_tables_one_may_fail_and_ctrl_c_ends_all(stopped, code, said, cli, monkeypatch):
    begun = []

    def finish(table, way, place, *, callback, stop):
        begun.append(table.key)
        if table.key == "fedbn/table12":
            raise FedshiftError("the disk is full")
        (place / "results" / "fedbn").mkdir(parents=True)
        if stopped:
            stop.set()
        return []

    wanted = [find_table(f"fedbn/{name}") for name in ("table12", "table11")]
    monkeypatch.setattr("fedshift.cli.reproduce._select_tables", lambda way, present: wanted)
    monkeypatch.setattr("fedshift.reproduce.runner.run_table", finish)
    outcome = cli("reproduce", "--all")
    assert outcome.code == code, outcome.err
    assert begun == ["fedbn/table12", "fedbn/table11"]
    assert outcome.out.splitlines()[-1] == said


def test_a_program_without_the_right_to_write_says_so(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with (
        pytest.raises(FedshiftError, match="Permission denied; give a directory that can be written"),
        lock_directory(tmp_path),
    ):
        pass
