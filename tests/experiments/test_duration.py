"""The predicted time of a run, and the shorter runs that are named instead of a long one."""

import shlex

import pytest

from fedshift.config.settings_file import COMMAND
from fedshift.experiments import duration
from fedshift.experiments.callbacks import Callback


@pytest.fixture
def predict(make, monkeypatch):
    """Describe the time of a run whose rounds take ``seconds``, with this command and these settings."""
    monkeypatch.setattr(duration, "OVERHEAD", 0.0)

    def say(seconds, command="", *, runs=1, at_once=1, done=0, **settings):
        monkeypatch.setattr(duration, "estimate_seconds", lambda *_, rounds, **__: seconds * rounds)
        monkeypatch.setattr(duration, "time_rounds", lambda *_, rounds, **__: {"pool": seconds * rounds})
        experiment = make(**settings)
        trials = experiment._make_first_trials()
        left = [(name, experiment.settings.rounds - done) for _ in experiment.seeds for name in trials]
        token = COMMAND.set(command)
        try:
            return list(duration.describe_duration(trials, left, len(experiment.seeds), runs=runs, at_once=at_once))
        finally:
            COMMAND.reset(token)

    return say


def test_a_run_takes_its_rounds_and_evaluations_and_side_by_side_less(predict):
    told = {"methods": "fedavg,fedbn", "seeds": 2, "rounds": 10, "evaluate_every": 10}
    assert predict(1.0, **told) == []  # under a minute
    (text,) = predict(6.0, **told)
    assert text.startswith("the run takes about 4 min, ")
    (text,) = predict(6.0, **told, at_once=2)
    assert text.startswith("the run takes about 2 min, ")
    (text,) = predict(6.0, **told, done=5)
    assert text.startswith("the run takes about 2 min, ")
    text, *_ = predict(6.0, **told, runs=30)
    assert text.startswith("30 runs take about 2.0 h, ")


def test_evaluations_count_each_client_that_has_a_model_of_its_own(make, monkeypatch):
    monkeypatch.setattr(duration, "time_rounds", lambda *_, **__: {"pool": 3.0})
    trials = make(methods="fedavg,fedbn")._make_first_trials()
    costs = {name: duration.predict_cost(trial) for name, trial in trials.items()}
    (trial, *_) = trials.values()
    steps, batch = duration.count_steps(trial.plan, trial.train)
    of_a_pass = 3.0 / (len(trial.train) * steps * batch) / 3
    tested = sum(len(client.test) for client in trial.data.clients)
    assert costs["fedavg"].evaluation == pytest.approx(of_a_pass * tested)  # of the shared model
    assert costs["fedbn"].evaluation == pytest.approx(of_a_pass * tested)  # of each client's own
    assert costs["fedavg"].round == pytest.approx(3.0 + duration.OVERHEAD)


def test_shorter_runs_are_the_command_with_one_setting_changed(predict):
    command = "fedshift compare --data 'my data' --methods fedavg,fedbn --seeds=4 --rounds 40 --out runs/mine"
    text, *shorter = predict(60.0, command, methods="fedavg,fedbn", seeds=4, rounds=40)
    assert text.startswith("the run takes about 5.")
    assert len(shorter) == 3
    times, commands = zip(*(line.split(" instead: ") for line in shorter), strict=True)
    assert all(time.startswith("about ") for time in times)
    kept = shlex.split("fedshift compare --data 'my data' --methods fedavg,fedbn")
    assert shlex.split(commands[0])[: len(kept)] == kept
    assert any(each.endswith("--seeds=4 --rounds 10") for each in commands)
    assert any(each.endswith("--rounds 40 --seeds 1") for each in commands)
    assert not any("--out" in each for each in commands)  # the first run's directory exists
    _, *shorter = predict(60.0, methods="fedavg,fedbn", seeds=4, rounds=40)  # from Python
    assert any(line.endswith(": rounds=10") for line in shorter)


def test_a_run_tells_its_time_once_and_before_its_first_round(make, monkeypatch, tmp_path):
    monkeypatch.setattr(duration, "TOLD", 0.0)
    events = []

    class Hearing(Callback):
        def on_notice(self, text):
            events.extend(["told"] * text.startswith("the run takes about "))

        def on_round_end(self, done):
            events.append(done.round)

    make(rounds=2).run(tmp_path / "run", callback=Hearing())
    assert events == ["told", 1, 2]
    make(rounds=2).run(tmp_path / "other", callback=Hearing(), runs=0)
    assert events == ["told", 1, 2, 1, 2]
