"""Trials that end early: by patience on validation data, each alone, recorded and resumed."""

import io
from threading import Event

import pytest

from fedshift.console.printing import Console
from fedshift.console.progress import LiveDisplay, PlainLines
from fedshift.experiments.callbacks import Callbacks
from fedshift.experiments.trial_run import count_stale
from fedshift.report.progress import describe_partial
from fedshift.report.tables import find_reported_rounds, list_shortfalls
from fedshift.results.run_directory import trial_folder
from fedshift.results.summary import read_summary
from fedshift.results.trial_records import STOPPED
from fedshift.utils.errors import UsageError

WATCHED = {"rounds": 6, "evaluate_every": 1, "validation": 0.3, "metric": "loss", "lr": 0.05}
STILL = "fedavg+tuned(lr=0.0)"
"""A method that never improves after its first evaluation."""


@pytest.mark.parametrize(
    ("values", "min_delta", "stale"),
    [
        ([0.1, 0.2, 0.3], 0.0, 0),
        ([0.3, 0.2, 0.1], 0.0, 2),
        ([0.1, 0.1, 0.1], 0.0, 2),
        ([0.1, 0.14, 0.18], 0.05, 0),
        ([0.1, 0.14, 0.15], 0.05, 2),
        ([], 0.0, 0),
    ],
)
def test_evaluations_are_counted_from_the_last_improvement(values, min_delta, stale):
    assert count_stale([(2, value) for value in values], min_delta) == stale


def test_one_trial_ends_alone_and_every_record_says_so(make, tmp_path, Listener):
    watch = Listener()
    assert make(methods=f"{STILL},fedavg", patience=2, **WATCHED).run(tmp_path / "run", callback=watch)
    summary = read_summary(tmp_path / "run")
    assert summary.traffic.groupby("method", sort=False)["round"].max().to_dict() == {STILL: 3, "fedavg": 6}
    reason = "no better loss on validation data in 2 evaluations (patience)"
    assert summary.stopped == {(STILL, 0): reason}
    said = f"{STILL}, seed 0: stopped after round 3 of 6: {reason}"
    assert said in summary.notices
    assert said in watch.notices
    assert list_shortfalls(summary) == [f"{said}."]
    assert find_reported_rounds(summary).to_dict() == {(STILL, 0): 3, ("fedavg", 0): 6}
    assert describe_partial(summary) == ""
    assert [done.stopped for done in watch.rounds[:4]] == ["", "", reason, ""]


def test_a_display_counts_the_rounds_of_a_stopped_trial_as_done(make, tmp_path):
    console = Console(file=io.StringIO(), width=200)
    display, lines = LiveDisplay(console), PlainLines(console)
    make(methods=f"{STILL},fedavg", patience=2, **WATCHED).run(tmp_path / "run", callback=Callbacks(display, lines))
    assert display.bar.tasks[0].completed == display.bar.tasks[0].total == 12
    assert lines.left == 0
    assert {number for runs in display.macros.values() for number, _ in runs.values()} == {6}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("select", ["last", "best"])
def test_a_stopped_trial_resumes_as_if_it_had_never_been_interrupted(make, tmp_path, assert_same, select, Listener):
    experiment = make(methods=STILL, patience=2, select=select, **WATCHED)
    experiment.run(tmp_path / "whole")
    for time in range(3):
        stop = Event()
        experiment.run(tmp_path / "cut", resume=time > 0, stop=stop, callback=Listener(lambda _, stop=stop: stop.set()))
    assert_same(tmp_path / "whole", tmp_path / "cut")
    watch = Listener()
    assert experiment.run(tmp_path / "cut", resume=True, callback=watch)
    assert watch.rounds == []
    assert experiment.is_trained(tmp_path / "cut")
    reported = find_reported_rounds(read_summary(tmp_path / "cut"))
    assert reported[STILL, 0] == {"last": 3, "best": 1}[select]


def test_a_stop_that_a_crash_undid_does_not_hold(make, tmp_path, assert_same, Listener):
    experiment, stop = make(methods=STILL, patience=2, **WATCHED), Event()
    experiment.run(tmp_path / "whole")
    experiment.run(tmp_path / "cut", stop=stop, callback=Listener(lambda done: stop.set()))
    stopped = trial_folder(tmp_path / "whole", STILL, 0) / STOPPED
    (trial_folder(tmp_path / "cut", STILL, 0) / STOPPED).write_bytes(stopped.read_bytes())  # of round 3, done is 1
    assert experiment.run(tmp_path / "cut", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"patience": 2}, "patience=2 needs validation data, which the clients lack: hold some out (validation=0.1)"),
        ({"min_delta": 0.1}, "min_delta=0.1 is the improvement that patience counts: give both, or neither"),
    ],
)
def test_settings_that_could_end_no_trial_are_refused(make, settings, said):
    with pytest.raises(UsageError) as refused:
        make(**settings)
    assert said in str(refused.value)


def test_patience_is_part_of_what_a_run_is_resumed_with(make, tmp_path):
    make(methods="fedavg", patience=2, **{**WATCHED, "rounds": 1}).run(tmp_path / "run")
    with pytest.raises(UsageError, match=r"begun with another patience: then '\(2, 0.0\)', now '\(3, 0.0\)'"):
        make(methods="fedavg", patience=3, **WATCHED).run(tmp_path / "run", resume=True)
