"""Cross-site validation: each client's model on every client's test data, against networks that are called by hand."""

import html

import numpy as np
import pandas as pd
import pytest
import torch

import fedshift
from fedshift.results.summary import read_summary
from fedshift.utils.errors import FedshiftError, UsageError

NAMES = ["ann", "bob", "cid"]


@pytest.fixture
def compared(tiny, tmp_path, unpublished):
    return fedshift.compare(
        ["fedavg", "fedbn", "ditto"], data=tiny, rounds=2, seeds=2, lr=0.05, newcomers=["cid"], out=tmp_path / "run",
        engine="sequential",
    )  # fmt: skip


def accuracy_by_hand(network, client):
    x, y = client.test.inputs(slice(0, None)), client.test.targets()
    with torch.no_grad():
        return float((network(x).argmax(dim=1) == y).double().mean())


def test_each_number_is_that_of_the_owners_network_on_the_clients_data(compared):
    table = compared.cross_site()
    clients = compared.experiment.data.clients
    assert {method: list(table.loc[method].index) for method in ("fedavg", "fedbn", "ditto")} == {
        "fedavg": ["the server"], "fedbn": NAMES[:2], "ditto": [*NAMES[:2], "the server"],
    }  # fmt: skip
    for (method, owner), row in table.iterrows():
        for client in clients:
            found = [
                accuracy_by_hand(compared.model(method, None if owner == "the server" else owner, seed), client)
                for seed in (0, 1)
            ]
            assert row[client.name, "mean"] == pytest.approx(np.mean(found))
            assert row[client.name, "std"] == pytest.approx(np.std(found, ddof=1))
    records = compared.table(model="personal")["fedbn", "mean"]
    diagonal = [table.loc[("fedbn", name), (name, "mean")] for name in NAMES[:2]]
    assert diagonal == pytest.approx(list(records[NAMES[:2]]))


@pytest.mark.slow
def test_models_after_local_work_are_those_of_a_run_of_one_round_more(tiny, compared, tmp_path):
    table = compared.cross_site("trained", methods=["fedavg", "fedbn"], seeds=1)
    further = fedshift.compare(
        ["fedavg", "fedbn"], data=tiny, rounds=3, lr=0.05, newcomers=["cid"], out=tmp_path / "further",
        moments="loaded,trained", evaluate_every=1, engine="sequential",
    ).table(moment="trained")  # fmt: skip
    for method in ("fedavg", "fedbn"):
        assert [name for name in table.loc[method].index if name != "the server"] == NAMES[:2]
        for name in NAMES[:2]:
            assert table.loc[(method, name), (name, "mean")] == pytest.approx(further.loc[name, (method, "mean")])
    assert compared.summary.crossed["seed"].unique().tolist() == [0]


def test_records_of_other_trials_and_of_training_stay(compared):
    before = compared.records
    compared.cross_site(methods="fedbn")
    compared.cross_site("trained", methods="fedavg", seeds=1)
    crossed = compared.summary.crossed.groupby(["method", "seed", "moment"])["client"].count()
    assert crossed.to_dict() == {("fedavg", 0, "trained"): 9, ("fedbn", 0, "loaded"): 6, ("fedbn", 1, "loaded"): 6}
    pd.testing.assert_frame_equal(compared.records, before)
    with pytest.raises(UsageError, match="unknown moment 'later'"):
        compared.cross_site("later")


def test_a_damaged_file_is_refused_by_name(compared):
    compared.cross_site(methods="fedbn", seeds=1)
    file = compared.directory / "trials" / "fedbn-seed0" / "cross_site.json"
    file.write_text(file.read_text().replace("1", "2", 1))
    with pytest.raises(FedshiftError, match=r"cross_site.json is damaged .* remove it, and measure again"):
        read_summary(compared.directory)


def test_the_command_prints_tables_and_the_page_has_them(cli, tiny_folder, undrawn, tmp_path):
    words = ("--methods", "fedavg,silobn", "--data", tiny_folder, "--rounds", 2, "--out", "run", "--quiet")
    assert cli("compare", *words).code == 0
    done = cli("cross-site", "run", "--methods", "silobn")
    assert done.code == 0
    caption = (
        "silobn: test accuracy of each client's model (rows) on each client's data (columns) in percent, after rou"
    )
    assert caption in done.out
    assert "model of" in done.out
    assert caption in html.unescape((tmp_path / "run" / "report.html").read_text())
    assert {file.suffix for file in (tmp_path / "run" / "tables").glob("cross-site-silobn.*")} == {
        ".csv",
        ".md",
        ".tex",
    }
    frame = pd.read_csv(tmp_path / "run" / "tables" / "cross-site-silobn.csv", index_col=0)
    assert list(frame.index) == NAMES
    assert list(frame.columns)[:3] == ["ann mean", "ann std", "ann seeds"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("cross-site", "run"), "is a run across machines, and what is needed here is at its sites"),
        (("features", "run"), "is a run across machines, and what is needed here is at its sites"),
        (("adapt", "run", "--data", "usps"), "is a run across machines, and what is needed here is at its sites"),
        (("run", "--resume", "run"), "is a run across machines: continue it with `fedshift serve --resume run`"),
    ],
)
def test_across_machines_it_is_refused(words, why, cli, tmp_path):
    (tmp_path / "run" / "machines").mkdir(parents=True)
    (tmp_path / "run" / "machines" / "population.json").write_text("{}")
    (tmp_path / "run" / "config.toml").touch()
    done = cli(*words)
    assert done.code == 2
    assert why in " ".join(done.err.split())
