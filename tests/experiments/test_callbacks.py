"""Users' callbacks: what they hear, how they stop a trial, and what an error in one leaves."""

import pytest

import fedshift
from fedshift.experiments.callbacks import CALLBACKS, Callbacks
from fedshift.report.tables import find_reported_rounds
from fedshift.results.run_directory import trial_folder
from fedshift.results.summary import NOTICES, read_notices, read_summary
from fedshift.utils.checked_json import write_checked
from fedshift.utils.errors import FedshiftError, UsageError
from fedshift.utils.words import is_information

HEARD: list[str] = []


class Writer(fedshift.Callback):
    """Writes down every event of the field's names, with its trial."""

    def __init__(self, *, prefix=""):
        self.prefix, self.heard = prefix, []

    def note(self, text):
        self.heard.append(f"{self.prefix}{self.trial.method} {self.trial.seed}: {text}")

    def on_round_begin(self, round):
        self.note(f"round {round} of {self.trial.rounds}")

    def on_client_end(self, client, loss):
        assert loss > 0
        self.note(client)

    def on_evaluation(self, done):
        assert set(done.measure("accuracy")) == set(done.participants)
        self.note("evaluated")

    def on_round_end(self, done):
        self.note(f"end of {done.round}")


def halve(trial, done):
    """Stop the first method after round 1, save a file, and log."""
    (trial.folder / f"{done.round}.txt").write_text(trial.method)
    trial.log(f"round {done.round} is done")
    if trial.method == "fedavg":
        trial.stop("half is enough")


def fail(trial, done):
    if done.round == 2:
        raise KeyError("lost")


class FailInWork(fedshift.Callback):
    def on_client_end(self, client, loss):
        raise ValueError(f"no {client}")


def run(make, path, *given, **settings):
    callback = Callbacks(own=[each for one in given for each in CALLBACKS.parse_all(one)])
    return make(**{"methods": "fedavg,fedbn", "rounds": 4, "evaluate_every": 2, **settings}).run(
        path, callback=callback, resume=path.exists()
    )


def test_events_come_in_order_with_their_trial(make, tmp_path):
    writer = Writer()
    run(make, tmp_path / "run", writer, methods="fedbn", rounds=2)
    clients = [f"fedbn 0: {name}" for name in read_summary(tmp_path / "run").clients]
    first = ["fedbn 0: round 1 of 2", *clients, "fedbn 0: end of 1"]
    second = ["fedbn 0: round 2 of 2", *clients, "fedbn 0: evaluated", "fedbn 0: end of 2"]
    assert writer.heard == first + second


def test_a_callback_saves_logs_and_stops_a_trial_with_its_next_evaluation(make, tmp_path):
    assert run(make, tmp_path / "run", "tests.experiments.test_callbacks:halve")
    summary = read_summary(tmp_path / "run")
    assert summary.stopped == {("fedavg", 0): "half is enough"}
    assert find_reported_rounds(summary).to_dict() == {("fedavg", 0): 2, ("fedbn", 0): 4}
    kinds = {notice: is_information(notice) for notice in summary.notices}
    assert kinds["fedbn, seed 0: round 4 is done"]
    assert not kinds["fedavg, seed 0: stopped after round 2 of 4: half is enough"]
    write_checked(tmp_path / "run" / NOTICES, {"notices": list(summary.notices)})  # as before there were kinds
    assert not any(map(is_information, read_notices(tmp_path / "run")))
    saved = trial_folder(tmp_path / "run", "fedavg", 0) / "callbacks"
    assert sorted(path.name for path in saved.iterdir()) == ["1.txt", "2.txt"]
    writer = Writer()
    assert run(make, tmp_path / "run", writer)
    assert writer.heard == []


@pytest.mark.parametrize(
    ("callback", "said", "done"),
    [
        (fail, r"callback fail \(.*test_callbacks.py, line \d+\), on_round_end: KeyError: 'lost'; in .*line \d+", 2),
        (FailInWork, r"callback FailInWork \(.*\), on_client_end: no \w+; in .*test_callbacks.py, line \d+", 1),
    ],
)
def test_an_error_in_a_callback_names_its_place_and_loses_nothing(make, tmp_path, assert_same, callback, said, done):
    with pytest.raises(FedshiftError, match=f"{said}, in .*All rounds so far are saved: .*resume=True"):
        run(make, tmp_path / "cut", callback, methods="fedbn")
    assert read_summary(tmp_path / "cut").traffic["round"].max() == done
    run(make, tmp_path / "whole", methods="fedbn")
    assert run(make, tmp_path / "cut", methods="fedbn")
    assert_same(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.slow
def test_trials_side_by_side_tell_the_same_events_each(make, tmp_path):
    heard = []
    for jobs in (1, 2):
        writer = Writer()
        experiment = make(methods="fedavg,fedbn", rounds=2, evaluate_every=1, engine="sequential")
        experiment.run(tmp_path / str(jobs), callback=Callbacks(own=[writer]), jobs=jobs)
        heard.append([[line for line in writer.heard if line.startswith(name)] for name in ("fedavg", "fedbn")])
    assert heard[0] == heard[1]


def test_callbacks_are_named_by_expressions_and_wrong_ones_refused():
    (made,) = CALLBACKS.parse_all("tests.experiments.test_callbacks:Writer(prefix='x ')")
    assert made.prefix == "x "
    for given, said in (
        (3, "callbacks=3 is not a callback"),
        (dict, "is not a callback"),
        ("halve", "unknown callback 'halve'"),
    ):
        with pytest.raises(UsageError, match=said):
            CALLBACKS.parse_all(given)
