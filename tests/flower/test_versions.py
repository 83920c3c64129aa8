"""An experiment that has begun goes on under patch releases, which both sides record; others are refused."""

import json
from dataclasses import replace
from functools import partial

import pytest

from fedshift.flower.server.registry import ClientRegistry
from fedshift.flower.transport.exchange import VERSION
from fedshift.report.origin import describe_run
from fedshift.results.run_directory import MACHINES
from fedshift.results.summary import read_summary, require_series
from fedshift.utils.checked_json import write_checked
from fedshift.utils.errors import UsageError
from fedshift.utils.version import find_series
from tests.flower.sites import RUN, Heard, SiteGrid, coordinator, same_as_in_process, sites_of, spec_for

NETWORK = "tests.flower.gated:network"


@pytest.fixture
def runs(monkeypatch):
    """Makes the coordinator, or the sites, those of another version."""
    places = {
        "coordinator": ("flower.server.nodes", "experiments.session", "results.run_directory"),
        "sites": ("flower.site.site", "flower.site.ledger"),
    }

    def run(side, version):
        for module in places[side]:
            monkeypatch.setattr(f"fedshift.{module}.__version__", version)

    monkeypatch.setattr("fedshift.utils.version.__version__", "0.1.0")
    for side in places:
        run(side, "0.1.0")
    return run


def test_an_experiment_goes_on_under_patch_releases_of_both_sides(tmp_path, machine, runs, cli):
    spec, served = spec_for(model=NETWORK, rounds=2), tmp_path / "served"
    sites = partial(sites_of, spec, tmp_path, code=frozenset({NETWORK}))
    grid, heard = SiteGrid(sites()), Heard()
    heard.after = lambda done: (heard.stop.set(), heard.changed.set())
    assert not coordinator(spec, grid, served, heard).run()
    runs("coordinator", "0.1.2")
    runs("sites", "0.1.1")
    heard = Heard()
    assert coordinator(spec, SiteGrid(sites()), served, heard).run()
    assert "pen now runs fedshift 0.1.1 instead of 0.1.0" in heard.notices
    found = describe_run(read_summary(served))
    assert found["versions"].startswith("fedshift 0.1.0 and 0.1.2, torch ")
    assert found["fedshift at the sites"] == "0.1.1 (pen, photo, print)"
    assert {client.version for client in ClientRegistry.read(served / "machines/population.json").clients} == {"0.1.1"}
    out = cli("ledger", tmp_path / "pen").out.splitlines()
    assert [line.partition(": ")[2] for line in out if line.startswith("from entry ")] == [
        "fedshift 0.1.0 here, 0.1.0 at the coordinator", "fedshift 0.1.1 here, 0.1.2 at the coordinator",
    ]  # fmt: skip
    same_as_in_process(spec, served, tmp_path, tmp_path / "reference")


def test_a_site_refuses_a_coordinator_of_another_minor_version(tmp_path, machine, runs):
    spec, said = spec_for(rounds=1), []
    grid = SiteGrid(sites_of(spec, tmp_path, say=said.append))
    runs("coordinator", "0.2.0")
    run = coordinator(spec, grid, tmp_path / "served", Heard())
    run.nodes.refresh()
    run.nodes.refresh()
    assert (
        said
        == [
            "refused: the coordinator runs fedshift 0.2.0, and this site 0.1.0, which may compute other numbers: "
            "install fedshift 0.2 here, or 0.1 there"
        ]
        * 3
    )
    assert not run.nodes.online
    (question,) = [question for node, question in grid.asked if node == 1]
    assert question.facts[VERSION] == "0.2.0"
    end = replace(question, kind="end", facts={VERSION: "0.2.0", "say": "over"}, run=RUN)
    assert grid.sites[1].answer(end).kind == "ended"  # a site that no longer fits is told the end all the same


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
