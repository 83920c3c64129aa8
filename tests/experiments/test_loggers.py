"""Loggers: what their own libraries read is what the records hold, each round once, however often a run was stopped."""

import json
import re
import socket
import struct
from collections import defaultdict
from threading import Event

import pytest

import fedshift
from fedshift.config.spec import CompareSpec
from fedshift.experiments import loggers
from fedshift.experiments.callbacks import Callback
from fedshift.experiments.factory import make_experiment
from fedshift.experiments.loggers import TensorBoardLogger, parse_loggers, summarize_round
from fedshift.utils.errors import FedshiftError, UsageError


class Recorder(Callback):
    """Stops after ``rounds`` rounds, and keeps notices."""

    def __init__(self, rounds=None):
        self.rounds, self.stop, self.notices = rounds, Event(), []

    def on_round_end(self, done):
        if self.rounds is not None:
            self.rounds -= 1
            if self.rounds == 0:
                self.stop.set()

    def on_notice(self, text):
        self.notices.append(text)


@pytest.fixture
def make(tiny_folder):
    def call(**settings):
        common = {"data": str(tiny_folder), "methods": "fedbn", "engine": "sequential", "batch_size": 8, "rounds": 4}
        return make_experiment(CompareSpec(**common | {"evaluate_every": 2} | settings))

    return call


def recorded(run, trial, metric="accuracy"):
    """The series that a trial's records make, in plain arithmetic: {name: {round: value}}."""
    series = defaultdict(dict)
    for line in (run / "trials" / trial / "rounds.jsonl").read_text().splitlines():
        row = json.loads(line)
        series["bytes/down"][row["round"]], series["bytes/up"][row["round"]] = row["down"], row["up"]
        series["seconds"][row["round"]], series["participants"][row["round"]] = row["seconds"], len(row["participants"])
    groups = defaultdict(list)
    for line in (run / "trials" / trial / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["model"] == "personal":
            groups[row["round"], row["split"]].append(row)
    for (number, split), rows in groups.items():
        losses = {row["client"]: row["loss_sum"] / row["samples"] for row in rows}
        named = {f"client/{client}": value for client, value in losses.items()}
        named |= {"macro": sum(losses.values()) / len(losses), "worst": max(losses.values())}
        if split != "train":
            named["pooled"] = sum(row["loss_sum"] for row in rows) / sum(row["samples"] for row in rows)
            shares = {row["client"]: sum(row["hits"]) / sum(row["support"]) for row in rows}
            hits, support = (sum(sum(row[key]) for row in rows) for key in ("hits", "support"))
            found = {f"client/{client}": value for client, value in shares.items()}
            found |= {"macro": sum(shares.values()) / len(shares), "worst": min(shares.values())}
            for name, value in (found | {"pooled": hits / support}).items():
                series[f"{split}/{metric}/{name}"][number] = value
        for name, value in named.items():
            series[f"{split}/loss/{name}"][number] = value
    return series


def assert_logged(found, run, trial):
    """``found``: pairs of round and value by name, as the library's reader gives them."""
    expected = recorded(run, trial)
    assert "test/accuracy/client/ann" in expected
    assert sorted(found) == sorted(expected)
    for name, points in found.items():
        assert [number for number, _ in points] == sorted(expected[name]), name
        assert dict(points) == pytest.approx(expected[name], rel=1e-6), name  # event files hold single precision


def read_tensorboard(run, trial):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(run / "logs" / "tensorboard" / trial)).Reload()
    found = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    return {tag: sorted(points) for tag, points in found.items()}  # files of one second are read in any order


@pytest.fixture
def offline(monkeypatch):
    """No server is named, and Python connects to none."""

    def connect(self, address):
        assert self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1"), address
        return original(self, address)

    original = socket.socket.connect
    monkeypatch.setattr(socket.socket, "connect", connect)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def pageless(monkeypatch, unpublished):
    monkeypatch.setattr("fedshift.report.sweep_report.publish_sweep", lambda *_: None)


@pytest.fixture
def tensorboard():
    pytest.importorskip("tensorboard")


def stop_and_resume(make, path, log, **settings):
    """Two rounds of the first of two methods, then the rest."""
    first = Recorder(rounds=2)
    assert not make(methods="fedbn,fedavg", log=log, **settings).run(path, callback=first, stop=first.stop)
    second = Recorder()
    assert make(methods="fedbn,fedavg", log=log, **settings).run(path, resume=True, callback=second)
    return first.notices + second.notices


def test_tensorboard_reads_each_round_once_after_a_resume(make, tmp_path, tensorboard):
    notices = stop_and_resume(make, tmp_path / "run", "tensorboard")
    for trial in ("fedbn-seed0", "fedavg-seed0"):
        assert_logged(read_tensorboard(tmp_path / "run", trial), tmp_path / "run", trial)
    assert f"logged for tensorboard: tensorboard --logdir {tmp_path}/run/logs/tensorboard" in notices


def test_python_and_sweeps_log_too_and_a_sweep_that_goes_on_logs_what_is_done(
    cli, tiny, tiny_folder, tmp_path, pageless
):
    fedshift.compare(
        [fedshift.fedbn()], data=tiny, rounds=1, log=" tensorboard", out=tmp_path / "python", engine="sequential"
    )
    assert_logged(read_tensorboard(tmp_path / "python", "fedbn-seed0"), tmp_path / "python", "fedbn-seed0")
    asked = (
        "sweep",
        "--data",
        tiny_folder,
        "--methods",
        "fedbn",
        "--rounds",
        1,
        "--over",
        "epochs=1,2",
        "--out",
        "sweep",
    )
    assert cli(*asked).code == 0
    assert cli("sweep", "--resume", "sweep", "--log", "tensorboard").code == 0
    for part in ("epochs=1", "epochs=2"):
        assert_logged(
            read_tensorboard(tmp_path / "sweep" / part, "fedbn-seed0"), tmp_path / "sweep" / part, "fedbn-seed0"
        )


def test_what_a_crash_cut_off_is_logged_again_and_once(make, tmp_path, tensorboard):
    first = Recorder(rounds=2)
    make(log="tensorboard").run(tmp_path / "run", callback=first, stop=first.stop)
    (file,) = (tmp_path / "run" / "logs" / "tensorboard" / "fedbn-seed0").iterdir()
    file.write_bytes(file.read_bytes()[:-7])
    assert [step for step, _ in read_tensorboard(tmp_path / "run", "fedbn-seed0")["bytes/up"]] == [1]
    make(log="tensorboard").run(tmp_path / "run", resume=True)
    assert_logged(read_tensorboard(tmp_path / "run", "fedbn-seed0"), tmp_path / "run", "fedbn-seed0")


def test_a_run_that_was_not_logged_is_logged_from_its_records(make, tmp_path, tensorboard):
    make().run(tmp_path / "run")
    assert not (tmp_path / "run" / "logs").exists()
    make(log="tensorboard").run(tmp_path / "run", resume=True)
    assert_logged(read_tensorboard(tmp_path / "run", "fedbn-seed0"), tmp_path / "run", "fedbn-seed0")


def test_a_run_goes_on_without_a_logger_that_fails_under_way(make, tmp_path, tensorboard, monkeypatch):
    original = TensorBoardLogger.write

    def write(self, number, values):
        if number == 2:
            raise ConnectionError("the server\nis gone")
        original(self, number, values)

    monkeypatch.setattr(TensorBoardLogger, "write", write)
    watch = Recorder()
    assert make(methods="fedbn,fedavg", log="tensorboard").run(tmp_path / "run", callback=watch)
    said = "log=tensorboard failed (ConnectionError: the server is gone); the run goes on, and rounds that are missing "
    assert [note for note in watch.notices if note.startswith(said)] == [f"{said}there are logged when it is resumed"]
    monkeypatch.undo()
    make(methods="fedbn,fedavg", log="tensorboard").run(tmp_path / "run", resume=True)
    for trial in ("fedbn-seed0", "fedavg-seed0"):
        assert_logged(read_tensorboard(tmp_path / "run", trial), tmp_path / "run", trial)


def test_a_logger_that_cannot_begin_is_refused_before_a_round_is_trained(make, tmp_path, tensorboard, monkeypatch):
    def refuse(self, method, seed):
        raise ConnectionError("nobody answers")

    with monkeypatch.context() as changed:
        changed.setattr(TensorBoardLogger, "open", refuse)
        with pytest.raises(FedshiftError, match=r"log=tensorboard cannot begin \(ConnectionError: nobody answers\)"):
            make(log="tensorboard").run(tmp_path / "run")
    assert not (tmp_path / "run" / "trials" / "fedbn-seed0" / "rounds.jsonl").exists()
    assert make(log="none").run(tmp_path / "run", resume=True)
    assert {path.name for path in (tmp_path / "run" / "logs").iterdir()} == {"id.json"}


def test_a_damaged_id_is_refused(make, tmp_path, tensorboard):
    make(log="tensorboard", rounds=1).run(tmp_path / "run")
    path = tmp_path / "run" / "logs" / "id.json"
    path.write_text(path.read_text().replace('"id": "', '"id": "0'))
    with pytest.raises(FedshiftError, match=r"logs/id.json is damaged .* restore it from a copy, or remove it: "):
        make(log="tensorboard", rounds=1).run(tmp_path / "run", resume=True)


def test_an_id_that_was_removed_is_drawn_anew_and_said_once(make, tmp_path, tensorboard):
    path, said = tmp_path / "run" / "logs" / "id.json", []
    for number in range(4):
        if number == 2:
            before = path.read_text()
            path.unlink()
        watch = Recorder()
        make(log="tensorboard", rounds=1).run(tmp_path / "run", resume=number > 0, callback=watch)
        said.append(
            [
                notice
                for notice in watch.notices
                if notice.startswith("logs/id.json is missing, which identifies this run for MLflow")
            ]
        )
    assert list(map(len, said)) == [0, 0, 1, 0]
    assert path.read_text() != before


def test_unknown_loggers_and_missing_packages_are_refused_before_data_are_loaded(make, monkeypatch, cli, tmp_path):
    with pytest.raises(UsageError, match=r"unknown logger 'tensorbord': did you mean 'tensorboard'\? allowed "):
        make(log="tensorbord", data="nowhere")
    monkeypatch.setattr(loggers, "find_spec", lambda name: None if name == "wandb" else True)
    why = "log=wandb needs the package wandb, which is not installed: pip install 'fedshift[wandb]'"
    for command in (["run"], ["compare", "--leave-out", "all"], ["sweep", "--over", "lr=1,2"]):
        refused = cli(*command, "--data", "nowhere", "--log", "tensorboard,wandb")
        assert (refused.code, refused.err) == (2, f"fedshift: {why}\n")
    experiment = make(log="wandb")  # reports and adaptation need no logger
    with pytest.raises(UsageError, match=re.escape(why)):
        experiment.run(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert parse_loggers("mlflow, tensorboard,mlflow") == parse_loggers(["mlflow", "tensorboard"])
    assert parse_loggers("none") == parse_loggers("") == parse_loggers(None) == ()


TESTED = {
    "method": "fedbn",
    "seed": 0,
    "split": "test",
    "model": "personal",
    "moment": "loaded",
    "loss_sum": 1.0,
    "auc": None,
}
COST = {"round": 1, "participants": ["a"], "down": 2, "up": 3, "seconds": 0.5}


def test_of_many_clients_quantiles_are_logged_in_place_of_each():
    rows = [{**TESTED, "client": f"c{k}", "samples": 50, "hits": [k, 0], "support": [50, 0]} for k in range(51)]
    values = summarize_round(COST, rows, "accuracy")
    assert values["test/accuracy/quantile_0.05"] == pytest.approx(0.05)
    assert values["test/accuracy/quantile_0.5"] == pytest.approx(0.5)
    assert not any("/client/" in name for name in values)
    assert "test/accuracy/client/c7" in summarize_round(COST, rows[:50], "accuracy")


def test_values_that_are_not_defined_are_left_out_and_moments_are_apart():
    row = {**TESTED, "client": "a", "samples": 4, "hits": [3, 0], "support": [3, 1]}
    rows = [
        row,
        {**row, "client": "b", "auc": 0.9},
        {**row, "moment": "trained", "auc": 0.7},
        {**row, "model": "global"},
    ]
    values = summarize_round(COST, rows, "auc")
    assert {name: value for name, value in values.items() if "auc" in name} == {
        "test/auc/client/b": 0.9, "test/auc/macro": 0.9, "test/auc/worst": 0.9,
        "test_trained/auc/client/a": 0.7, "test_trained/auc/macro": 0.7, "test_trained/auc/worst": 0.7,
    }  # fmt: skip


def test_names_that_mlflow_refuses_are_changed_and_stay_apart():
    names = ["test/loss/client/ann 1", "test/loss/client/[red]", "test/loss/client/(red)", "test/loss/client/../x" * 30]
    keys = [loggers._to_mlflow_key(name) for name in names]
    assert keys[0] == names[0]
    assert len(set(keys)) == 4
    assert all(re.fullmatch(r"test/loss/client/[\w\-. :]{1,120}", key) for key in keys)
    validate = pytest.importorskip("mlflow.utils.validation")._validate_metric_name
    for key in keys:
        validate(key)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # of MLflow's tables under SQLAlchemy 2.1
def test_mlflow_reads_each_round_once_after_a_resume(make, tmp_path, offline):
    client = pytest.importorskip("mlflow.tracking").MlflowClient
    notices = stop_and_resume(make, tmp_path / "run", "mlflow", lr=0.02)
    uri = f"sqlite:///{tmp_path}/run/logs/mlflow.db"
    assert f"logged for mlflow: mlflow ui --backend-store-uri {uri}" in notices
    store = client(tracking_uri=uri)
    (experiment,) = [each for each in store.search_experiments() if each.name == "fedshift"]
    runs = {run.info.run_name: run for run in store.search_runs([experiment.experiment_id])}
    assert sorted(runs) == ["fedavg seed 0", "fedbn seed 0"]
    for method in ("fedbn", "fedavg"):
        run = runs[f"{method} seed 0"]
        assert (run.info.status, run.data.params["method"], run.data.params["lr"]) == ("FINISHED", method, "0.02")
        history = {name: store.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
        found = {name: sorted((point.step, point.value) for point in points) for name, points in history.items()}
        assert_logged(found, tmp_path / "run", f"{method}-seed0")


def read_wandb(path):
    """Return the rounds and values of an offline run: records of protobuf in LevelDB's log format, after 7 bytes."""
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data, at, record, found = path.read_bytes(), 7, b"", defaultdict(list)
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the end of a block too short for a header
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            item, record = pb.Record.FromString(record), b""
            if item.WhichOneof("record_type") == "history":
                for each in item.history.item:
                    name = each.key or "/".join(each.nested_key)
                    if not name.startswith("_"):
                        found[name].append((item.history.step.num, json.loads(each.value_json)))
    return found


@pytest.mark.slow
def test_wandb_holds_each_round_once_after_a_resume(make, tmp_path, offline):
    wandb = pytest.importorskip("wandb")
    stop_and_resume(make, tmp_path / "run", "wandb")
    wandb.teardown()  # its process writes the rest
    files = list((tmp_path / "run" / "logs" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2
    fedbn, fedavg = sorted(map(read_wandb, files), key=lambda each: each["bytes/down"][0][1])
    assert_logged(fedbn, tmp_path / "run", "fedbn-seed0")  # sends fewer bytes
    assert_logged(fedavg, tmp_path / "run", "fedavg-seed0")
