"""What a table shows of clients that never trained: the same as a run that leaves them out measures on them."""

from dataclasses import replace

import pytest

from fedshift.build import experiment_of
from fedshift.config import RunSpec
from fedshift.papers.measures import Runs, run_folder
from fedshift.papers.plan import Cell
from fedshift.papers.tables import Printed, Table
from fedshift.report.tables import seed_table
from fedshift.study import read_study

TABLE = Table(
    paper="fedbn", name="table99", title="", where="", metric="loss", unit="nats", seeds=0, note="", drawn="",
    claims=(), blocks=(),
)  # fmt: skip


@pytest.mark.parametrize(("method", "unseen"), [("fedavg", "skip"), ("fedbn", "reestimate")])
def test_a_newcomer_gets_the_servers_model_and_statistics_of_its_own_where_clients_keep_theirs(
    method, unseen, tiny_folder, tmp_path
):
    spec = RunSpec(data=str(tiny_folder), model="small-cnn", method=method, rounds=1, batch_size=8, lr=0.05, seeds=2)
    trained = replace(spec, domains="ann,bob")
    whole = replace(spec, newcomers="cid", unseen=unseen)
    for each in (trained, whole):
        experiment_of(each).run(run_folder(each, tmp_path))
    cell = Cell(
        row=0, column=0, printed=Printed(50.0), spec=trained, client="cid", measure="adapted", newcomer=str(tiny_folder)
    )
    found = Runs(tmp_path).numbers(TABLE, [cell])[0, 0]
    measured = seed_table(read_study(run_folder(whole, tmp_path)), "loss").loc["cid"]
    assert found == pytest.approx(measured.tolist())
    assert len(set(found)) == 2  # of two seeds
