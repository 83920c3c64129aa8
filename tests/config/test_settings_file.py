"""The settings file of a run: read as written, refused where it was edited, and data found where they are now."""

import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedshift.config.settings_file import format_settings, read_run_settings, to_toml
from fedshift.utils.errors import FedshiftError, UsageError

VALUES = st.one_of(
    st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\x7f")), st.lists(st.integers(0, 9)),
)  # fmt: skip
FLAGS = {"data": "data", "root": "root"}


@given(st.dictionaries(st.from_regex("[a-z_]{1,9}", fullmatch=True), VALUES))
def test_settings_written_are_settings_read(values):
    assert tomllib.loads(to_toml(values)) == values


def test_settings_without_a_value_are_left_out():
    assert to_toml({"a": None, "b": "x"}) == 'b = "x"\n'


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run directory whose command was given in ``project``, beside its data."""
    folder = tmp_path / "project" / "runs" / "one"
    folder.mkdir(parents=True)
    (tmp_path / "project" / "sites").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    values = {"lr": 0.1, "data": str(tmp_path / "project" / "sites"), "schedule": 'crc32 = "1"'}
    (folder / "config.toml").write_text(format_settings(values, Path("runs/one")))
    return folder


def test_any_toml_reader_reads_the_settings_and_where_they_were_written(run, tmp_path):
    values = tomllib.loads((run / "config.toml").read_text())
    place = {"directory": str(tmp_path / "project"), "from_here": "../.."}
    assert values.pop("written").items() >= place.items()
    assert values == dict(read_run_settings(run).values)


def test_an_edited_or_damaged_file_is_refused(run):
    path = run / "config.toml"
    content = path.read_bytes()
    for place in range(len(content) - 1):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(FedshiftError, match=r"config.toml was edited or is damaged .*change settings, add flags"):
            read_run_settings(run)
    path.write_bytes(content[:-20])
    with pytest.raises(FedshiftError, match=r"it has no checksum|does not match"):
        read_run_settings(run)
    path.unlink()
    with pytest.raises(FedshiftError, match=r"config.toml is missing, which records what was run: restore it"):
        read_run_settings(run)


def test_data_are_found_where_they_were_and_where_they_were_moved_with_the_run(run, tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    assert read_run_settings(run).find_paths(FLAGS)["data"] == str(tmp_path / "project" / "sites")
    (tmp_path / "project").rename(tmp_path / "moved")
    moved = read_run_settings(tmp_path / "moved" / "runs" / "one")
    assert moved.find_paths(FLAGS)["data"] == str(tmp_path / "moved" / "sites")
    (tmp_path / "moved" / "sites").rename(tmp_path / "elsewhere")
    with pytest.raises(UsageError) as refused:
        moved.find_paths(FLAGS)
    assert str(refused.value) == (
        f"the data of {moved.run} were at {tmp_path}/project/sites, where there is nothing now, nor at "
        f"{tmp_path}/moved/sites: say where they are (data='PATH')"
    )
    assert moved.find_paths({})["lr"] == 0.1


def test_a_root_that_is_gone_gives_way_to_the_environment(run, tmp_path, monkeypatch):
    monkeypatch.delenv("FEDSHIFT_DATA", raising=False)
    (run / "config.toml").write_text(format_settings({"data": "domainnet", "root": str(tmp_path / "gone")}, run))
    with pytest.raises(UsageError, match=r"were at .*gone") as refused:
        read_run_settings(run).find_paths(FLAGS)
    assert refused.value.settings == ("root",)
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path))
    assert read_run_settings(run).find_paths(FLAGS)["root"] is None


def test_a_run_that_goes_on_elsewhere_keeps_the_directory_in_which_it_was_begun(run, tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    (run / "config.toml").write_text(format_settings({"lr": 0.2}, run))
    kept = read_run_settings(run)
    assert kept.directories == (tmp_path / "project", tmp_path / "project")
    monkeypatch.setattr(sys, "path", [])
    kept.add_code()
    kept.add_code()
    assert sys.path == [str(tmp_path / "project")]
