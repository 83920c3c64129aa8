"""Errors in the data: one line at the start of every run, and one switch that refuses, warns or ignores."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch import nn

from fedshift.api import advise, compare, load_data
from fedshift.data.assembly import federation, read_folder
from fedshift.data.checks import quality
from fedshift.data.checks.quality import check_data, examine, find_faults
from fedshift.data.federation import Federation
from fedshift.new_clients.own_network import adapt_network
from fedshift.utils.errors import UsageError
from tests.conftest import ARRAYS

SPELLED = "Classes have names that differ only in case, spaces, hyphens, zeros or codes of characters: 'One' and 'one'."
LOST = "Client 'north': 1 image in a format that is not read, left out (.webp)."
LINE = f"2 errors in the data: {LOST} {SPELLED} `fedshift data check` shows how to correct them; "
WORDS = ("--rounds", 1, "--batches", 1, "--batch-size", 4)


@pytest.fixture(autouse=True)
def cached(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def photos(tmp_path) -> Path:
    """Two clients whose classes are spelled in two ways, with an image of another format, and nothing else wrong."""
    random = np.random.default_rng(0)
    for client in ("north", "south"):
        for name in ("One", "one", "two"):
            folder = tmp_path / "photos" / client / name
            folder.mkdir(parents=True)
            for number in range(4):
                image = Image.fromarray(random.integers(0, 255, (8, 8, 3), dtype=np.uint8))
                image.save(folder / f"{number}.png")
    image.save(tmp_path / "photos" / "north" / "two" / "9.webp")
    return tmp_path / "photos"


def test_every_command_that_trains_begins_with_one_line(cli, photos, tmp_path, unpublished, monkeypatch):
    monkeypatch.setattr("fedshift.report.sweep_report.publish_sweep", lambda *_: None)
    for command, more, run in (
        ("run", (), "run"),
        ("compare", ("--methods", "fedavg"), "compare"),
        ("sweep", ("--methods", "fedavg", "--over", "lr=0.1"), "sweep/lr=0.1"),
        ("compare", ("--methods", "fedavg", "--leave-out", "north"), "all/without-north"),
    ):
        out = run.split("/")[0]
        done = cli(command, "--data", photos, *WORDS, *more, "--out", out)
        assert done.code == 0, done.err
        assert [line for line in done.out.splitlines() if "in the data" in line] == [
            f"note: {LINE}--on-data-error refuse stops a run that has any"
        ]
        notices = json.loads((tmp_path / run / "notices.json").read_text())["notices"]
        assert notices[0].startswith(LINE)


@pytest.mark.parametrize("command", ["run", "compare", "sweep"])
def test_one_switch_refuses_them_before_anything_is_written_or_ignores_them(
    cli, photos, tmp_path, unpublished, command
):
    more = ("--over", "lr=0.1") if command == "sweep" else ()
    refused = cli(command, "--data", photos, *WORDS, *more, "--on-data-error", "refuse", "--out", "out")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert f"2 errors in the data: {LOST} {SPELLED} Correct them (`fedshift data check` shows how), or" in refused.err
    assert not (tmp_path / "out").exists()
    if command == "run":
        done = cli(command, "--data", photos, *WORDS, "--on-data-error", "ignore", "--out", "out")
        assert (done.code, "in the data" in done.out) == (0, False)


def test_files_that_cannot_be_read_go_by_the_same_switch(cli, photos, tmp_path, unpublished):
    (photos / "south" / "two" / "broken.png").write_bytes(b"no image")
    for choice in ((), ("--on-data-error", "refuse")):
        refused = cli("run", "--data", photos, *WORDS, *choice, "--out", "out")
        assert refused.code == 2
        assert "broken.png" in refused.err
        assert refused.err.endswith("repair or remove them, or leave them out (--on-data-error warn)\n")
    done = cli("run", "--data", photos, *WORDS, "--on-data-error", "warn", "--out", "out")
    assert done.code == 0, done.err
    assert "note: 3 errors in the data: Client 'north': " in done.out
    assert "Client 'south': 1 of 13 files cannot be read, left out (south/two/broken.png: " in done.out


def test_the_check_calls_them_errors(cli, photos, tmp_path):
    done = cli("data", "check", photos, "--json", "found.json")
    assert done.code == 1
    found = json.loads((tmp_path / "found.json").read_text())["findings"]
    assert [each["text"] for each in found if each["severity"] == "error"] == [LOST, SPELLED]
    assert "Note: client 'north'" not in done.out  # an error is said once


def leaking() -> Federation:
    """A client that is tested on samples it trains on, and one whose equal samples have two labels."""
    arrays = {name: [array.copy() for array in four] for name, four in ARRAYS.items()}
    arrays["ann"][2][:3] = arrays["ann"][0][:3]
    arrays["ann"][3][:3] = arrays["ann"][1][:3]
    arrays["bob"][0][1] = arrays["bob"][0][0]
    return federation({name: tuple(four) for name, four in arrays.items()}, name="leaking")


def test_the_errors_of_a_run_are_those_of_the_check(tiny):
    data = leaking()
    found = examine(data).of("error")
    assert {finding.kind for finding in found} == {"leakage", "conflict"}
    assert find_faults(data)[0] == [finding.text for finding in found]
    assert find_faults(tiny) == ([], [])
    with pytest.raises(UsageError, match=r"^2 errors in the data: Test samples are also in .*ann \(test\) 3 of"):
        check_data(data, "refuse")
    assert check_data(data, "ignore").notices == ()


def test_the_python_interface_goes_by_the_same_switch(tmp_path, capsys):
    """As the command line does, with errors in the words of Python."""
    data, small = leaking(), {"rounds": 1, "batches": 1, "batch_size": 8}
    said = f"2 errors in the data: {' '.join(find_faults(data)[0])} `fedshift data check`"
    result = compare("fedavg", data=data, **small, progress=True)
    assert f"note: {said} shows how to correct them" in capsys.readouterr().out
    assert f"note: {said} shows how to correct them" in str(result)
    assert said in result._repr_html_().replace("&#39;", "'")
    with pytest.raises(UsageError) as refused:
        compare("fedavg", data=data, **small, on_data_error="refuse", out=tmp_path / "refused")
    assert str(refused.value).startswith(said[: said.index("`")])
    assert str(refused.value).endswith("or continue anyway (on_data_error='warn')")
    assert not (tmp_path / "refused").exists()
    assert "in the data" not in str(compare("fedavg", data=data, **small, on_data_error="ignore"))
    with pytest.raises(UsageError, match="unknown value of on_data_error 'refused': did you mean 'refuse'"):
        compare("fedavg", data=data, on_data_error="refused")


def test_other_uses_of_data_go_by_the_same_switch(photos):
    with pytest.warns(UserWarning, match=f"^2 errors in the data: {re.escape(LOST)}"):
        load_data(photos)
    with pytest.raises(UsageError, match=r"^2 errors in the data"):
        load_data(photos, on_data_error="refuse")
    with pytest.raises(UsageError, match=r"^2 errors in the data"):
        advise(photos, on_data_error="refuse")
    with pytest.warns(UserWarning, match=r"^1 error in the data: Classes have names"):
        adapt_network(nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 3)), replace(read_folder(photos), faults=()))


def test_clients_that_join_go_by_the_same_switch(cli, photos, unpublished):
    assert (
        cli("run", "--data", photos, *WORDS, "--method", "fedavg", "--on-data-error", "ignore", "--out", "out").code
        == 0
    )
    join = ("adapt", "out", "--data", photos, "--policies", "average", "--on-data-error")
    done = cli(*join, "warn")
    assert (done.code, done.out.count(f"note: {LINE}")) == (0, 1)
    refused = cli(*join, "refuse")
    assert (refused.code, refused.err.startswith("fedshift: 2 errors in the data: ")) == (2, True)


def test_commands_that_show_data_tell_what_was_left_out(cli, photos):
    for command in (("data", "show"), ("inspect", "--data"), ("diagnose",)):
        done = cli(*command, photos, *(("--permutations", 99) if command == ("diagnose",) else ()))
        assert (done.code, f"Note: {LOST.removesuffix('.').replace('Client', 'client')}" in done.out) == (0, True)


def test_samples_are_looked_at_once_on_this_machine(monkeypatch):
    first = find_faults(leaking())
    monkeypatch.setattr(quality, "survey_splits", lambda *_, **__: pytest.fail("read again"))
    assert find_faults(leaking()) == first


def test_data_without_errors_give_no_line(cli, unpublished, tiny_folder):
    done = cli("run", "--data", tiny_folder, *WORDS, "--on-data-error", "refuse", "--out", "out")
    assert (done.code, "in the data" in done.out) == (0, False)
