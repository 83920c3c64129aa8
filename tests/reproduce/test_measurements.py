"""What a table shows of an ended run beside its records: of clients that never trained, and of what networks see."""

from dataclasses import replace

import pandas as pd
import pytest

from fedshift import read_run
from fedshift.config.spec import RunSpec
from fedshift.experiments.factory import make_experiment
from fedshift.experiments.run_queue import DONE
from fedshift.report.tables import seed_table
from fedshift.reproduce import measurements
from fedshift.reproduce.measurements import load_features, measure_cells
from fedshift.reproduce.planning import CellPlan
from fedshift.reproduce.published_tables import Table
from fedshift.reproduce.results import run_folder
from fedshift.results.schema import MethodSummary, RunSummary, rows_to_frame
from fedshift.results.summary import read_summary
from fedshift.utils.checked_json import write_checked

TABLE = Table(paper="fedbn", name="table99", title="", metric="loss", unit="nats")


@pytest.mark.parametrize(("method", "unseen"), [("fedavg", "skip"), ("fedbn", "reestimate")])
def test_a_newcomer_gets_the_servers_model_and_statistics_of_its_own_where_clients_keep_theirs(
    method, unseen, tiny_folder, tmp_path
):
    settings = {"model": "small-cnn", "rounds": 1, "batch_size": 8, "lr": 0.05, "seeds": 2, "statistics": "running"}
    spec = RunSpec(data=str(tiny_folder), method=method, **settings)
    trained = replace(spec, domains="ann,bob")
    whole = replace(spec, newcomers="cid", unseen=unseen)
    for each in (trained, whole):
        make_experiment(each).run(run_folder(each, tmp_path))
    cell = CellPlan(row=0, column=0, spec=trained, client="cid", measure="adapted", newcomer=str(tiny_folder))
    found = measure_cells(TABLE, [cell], tmp_path)[0][0, 0]
    measured = seed_table(read_summary(run_folder(whole, tmp_path)), "loss").loc["cid"]
    assert found == pytest.approx(measured.tolist())
    assert len(set(found)) == 2  # of two seeds


def test_clients_that_train_may_be_measured_after_their_work_in_the_reported_round_and_newcomers_cannot(
    tmp_path, monkeypatch
):
    right = {  # of 100 by (seed, moment, split): rounds 1, 2, 3
        (0, "loaded", "validation"): (40, 60, 50), (1, "loaded", "validation"): (70, 60, 50),
        (0, "loaded", "test"): (10, 20, 30), (1, "loaded", "test"): (40, 50, 60),
        (0, "trained", "test"): (11, 22, 33), (1, "trained", "test"): (44, 55, 66),
    }  # fmt: skip
    rows = [
        {
            "method": "fedbn", "seed": seed, "round": number, "client": client, "split": split, "model": "personal",
            "moment": moment, "samples": 100, "loss_sum": 1.0, "hits": [count + 5 * (client == "b"), 0],
            "support": [50, 50], "auc": None,
        }
        for (seed, moment, split), counts in right.items()
        for number, count in enumerate(counts, 1)
        for client in ("a", "b", "new")
        if client != "new" or (moment, split) == ("loaded", "test")
    ]  # fmt: skip
    fedbn = MethodSummary(name="fedbn", text="fedbn", entries=(), down=0, up=0, leaves=(), kept="", has_global=False)
    study = RunSummary(
        name="", methods={"fedbn": fedbn}, seeds=(0, 1), rounds=3, select="best",
        clients={name: {"train": 1} for name in ("a", "b", "new")}, classes=2, rows=rows_to_frame(rows),
        traffic=pd.DataFrame(),
    )  # fmt: skip
    monkeypatch.setattr(measurements, "read_summary", lambda folder: study)
    cell = CellPlan(row=0, column=0, spec=RunSpec(), client="a")
    cells = [
        replace(cell, moment="trained"), replace(cell, column=1, client="b", moment="trained"),
        replace(cell, column=2, client="new"), replace(cell, column=3, client=None, moment="trained"),
        replace(cell, column=4, client="new", moment="trained"), replace(cell, column=5, client="b"),
    ]  # fmt: skip
    values, _ = measure_cells(replace(TABLE, metric="accuracy", unit="percent"), cells, tmp_path)
    assert values == {
        (0, 0): (22, 44), (0, 1): (27, 49), (0, 2): (20, 40), (0, 3): (24.5, 46.5), (0, 5): (25, 45),
    }  # fmt: skip


def test_feature_maps_are_compared_where_the_data_are_now_and_not_of_a_run_that_diverged(tiny_folder, tmp_path):
    there = str(tiny_folder)
    spec = RunSpec(data=there, root=there, model="small-cnn", method="fedbn", rounds=1, batch_size=8, seeds=2)
    folder = run_folder(spec, tmp_path)
    make_experiment(spec).run(folder)
    expected = read_run(folder).features().similarity["server_client"].tolist()
    here = str(tiny_folder.rename(tmp_path / "moved"))
    moved = replace(spec, data=here, root=here)
    cell = CellPlan(row=0, column=0, spec=moved, client=None, measure="server_client")
    assert measure_cells(TABLE, [cell], tmp_path)[0] == {(0, 0): tuple(expected)}
    write_checked(folder / DONE, {"diverged": "client ann, round 2, step 0: the loss is nan"})
    assert load_features(moved, tmp_path) is None
    assert not measure_cells(TABLE, [cell], tmp_path)[0]
