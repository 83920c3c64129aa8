"""An experiment that has begun goes on under patch releases, which both sides record; others are refused."""

import json

import pytest

from fedshift.flower.coordinator.descriptions import ClientRegistry
from fedshift.flower.messages import VERSION, Exchange
from fedshift.flower.site.record import Record
from fedshift.report.origin import describe_run
from fedshift.results.run_directory import MACHINES
from fedshift.results.summary import read_summary, require_series
from fedshift.utils.checked_json import write_checked
from fedshift.utils.errors import FedshiftError, UsageError
from fedshift.utils.version import find_series
from tests.flower.gated import NETWORK
from tests.flower.sites import Heard, same_as_in_process, serve, sites_of, spec_for

pytestmark = pytest.mark.usefixtures("machine")


@pytest.fixture
def runs(monkeypatch):
    """Makes the coordinator, or the sites, those of another version."""
    places = {
        "coordinator": ("flower.coordinator.nodes", "experiments.session", "results.run_directory"),
        "sites": ("flower.site.site",),
    }

    def run(side, version):
        for module in places[side]:
            monkeypatch.setattr(f"fedshift.{module}.__version__", version)

    monkeypatch.setattr("fedshift.utils.version.__version__", "0.1.0")
    for side in places:
        run(side, "0.1.0")
    return run


def test_an_experiment_goes_on_under_patch_releases_of_both_sides(tmp_path, runs):
    spec, served = spec_for(model=NETWORK), tmp_path / "served"
    serve(spec, tmp_path, heard=Heard().stop_after(1), ends=False)
    runs("coordinator", "0.1.2")
    runs("sites", "0.1.1")
    assert "pen now runs fedshift 0.1.1 instead of 0.1.0" in serve(spec, tmp_path).notices
    found = describe_run(read_summary(served))
    assert found["versions"].startswith("fedshift 0.1.0 and 0.1.2, torch ")
    assert found["fedshift at the sites"] == "0.1.1 (pen, photo, print)"
    people = ClientRegistry.read(served / MACHINES / "population.json").clients
    assert {client.version for client in people} == {"0.1.1"}
    described = [entry for entry in Record(tmp_path / "record.db").read() if entry.event == "describe"]
    versions = [entry.content["version"] for entry in described if entry.content["name"] == "pen"]
    assert versions == ["0.1.0", "0.1.1"]
    same_as_in_process(spec, served)


def test_a_site_refuses_a_coordinator_of_another_minor_version_but_hears_its_end(tmp_path, runs):
    said, heard = [], Heard()
    sites = sites_of(spec_for(), tmp_path, say=said.append)
    runs("coordinator", "0.2.0")
    with pytest.raises(FedshiftError, match="after 0 seconds there are 0"):
        serve(spec_for(), tmp_path, sites, heard=heard, wait=0.0)
    why = (
        "the coordinator runs fedshift 0.2.0, and this site 0.1.0, which may compute other numbers: install fedshift "
        "0.2 here, or 0.1 there"
    )
    assert said.count(f"refused; disclosed to the coordinator: {why}") == 3
    assert f"a node (number 1) does not take part: {why}" in heard.notices
    assert {asked.facts[VERSION] for _, asked in heard.grid.asked} == {"0.2.0"}
    end = Exchange(kind="tell", facts={VERSION: "0.2.0", "say": "over", "over": True})
    assert sites[1].answer(end).kind == "told"


def test_a_run_is_resumed_by_its_own_minor_version(cli, unpublished, tiny_folder, tmp_path, runs, monkeypatch):
    words = ["run", "--data", tiny_folder, "--batches", 1, "--out", "a run", "--rounds", 1]
    assert cli(*words).code == 0
    before = {path: path.read_bytes() for path in (tmp_path / "a run").rglob("*") if path.is_file()}
    monkeypatch.setattr("fedshift.utils.version.__version__", "0.2.0")
    monkeypatch.setattr("fedshift.results.summary.__version__", "0.2.0")
    for command in (["run"], ["serve", "--insecure"]):
        if command != ["run"]:
            (tmp_path / "a run" / MACHINES).mkdir()
        done = cli(*command, "--resume", "a run", *(["--rounds", 2] if command == ["run"] else []))
        assert done.code == 2
        assert "a run was begun with fedshift 0.1.0, and this is 0.2.0" in done.err
        assert "go on with that one (pip install 'fedshift==0.1.*')" in done.err
    (tmp_path / "a run" / MACHINES).rmdir()
    assert {path: path.read_bytes() for path in before} == before
    monkeypatch.setattr("fedshift.utils.version.__version__", "0.1.5")
    runs("coordinator", "0.1.5")
    assert cli("run", "--resume", "a run", "--rounds", 2).code == 0
    assert describe_run(read_summary(tmp_path / "a run"))["versions"].startswith("fedshift 0.1.0 and 0.1.5, ")


def test_a_run_whose_version_is_lost_goes_on(tmp_path):
    require_series(tmp_path)
    write_checked(tmp_path / "environment.json", {"packages": {"fedshift": "7.1.0"}})
    with pytest.raises(UsageError, match=r"was begun with fedshift 7\.1\.0, .*fedshift==7\.1\.\*"):
        require_series(tmp_path)
    assert json.loads((tmp_path / "environment.json").read_text())["packages"]


def test_a_series_is_major_and_minor():
    found = {version: find_series(version) for version in ("0.1.0", "0.1", "1.12.3.dev1", "1.2rc1", "0", "x.1", "")}
    assert list(found.values()) == ["0.1", "0.1", "1.12", "1.2", "", "", ""]
