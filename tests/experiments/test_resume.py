"""Stopping and going on: after any round, killed at any moment, and what resuming refuses."""

import os
import signal
import sys
from contextlib import contextmanager
from shutil import copy, rmtree
from threading import Event

import pytest
from torch import nn

from fedshift.engines.engine import Diverged
from fedshift.engines.sequential import Sequential
from fedshift.experiments.loggers import RecordLog
from fedshift.experiments.trial import Trial
from fedshift.results.checkpoint import load_checkpoint, save_checkpoint
from fedshift.results.run_directory import append_rows
from fedshift.results.schema import read_rows
from fedshift.results.summary import read_summary
from fedshift.results.trial_records import load_facts
from fedshift.utils.errors import FedshiftError, UsageError


class Killed(BaseException):
    """The program ends here, and nothing handles it."""


MANY = {
    "fedbn, momentum kept": {"method": "fedbn", "optimizer": "sgd(momentum=0.9, keep=True)"},
    "scaffold, two of three": {"method": "scaffold", "participation": 2, "evaluate_every": 1},
    "fedbn, one of three, best": {"participation": 1, "validation": 0.2, "select": "best", "batches": 2},
    "dropout": {"method": "fedavg", "model": "digit-cnn-dropout", "batches": 1, "batch_size": 4},
}
"""What a run keeps in files; of all methods and settings, trials are stopped in tests/laws/test_resume.py."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("settings", MANY.values(), ids=MANY.keys())
def test_stopped_after_every_round_and_resumed_equals_uninterrupted(make, tmp_path, assert_same, settings, Listener):
    experiment = make(**({"rounds": 3} | settings))
    assert experiment.run(tmp_path / "whole")
    stopped = tmp_path / "stopped"
    for time in range(3):
        stop = Event()
        finished = experiment.run(
            stopped, resume=time > 0, callback=Listener(lambda _, stop=stop: stop.set()), stop=stop
        )
        assert finished == (time == 2)
    assert_same(tmp_path / "whole", stopped)


@pytest.mark.slow
def test_a_comparison_stopped_between_and_within_trials_equals_uninterrupted(make, tmp_path, assert_same, Listener):
    experiment = make(methods="fedavg,fedbn", seeds=2, rounds=2)
    experiment.run(tmp_path / "whole")
    for time in range(8):
        stop = Event()
        experiment.run(
            tmp_path / "stopped", resume=time > 0, stop=stop, callback=Listener(lambda _, stop=stop: stop.set())
        )
    assert_same(tmp_path / "whole", tmp_path / "stopped")
    assert read_summary(tmp_path / "whole").rows.equals(read_summary(tmp_path / "stopped").rows)


@pytest.mark.slow
def test_a_finished_run_resumed_does_nothing_and_may_be_given_more_rounds(make, tmp_path, assert_same, Listener):
    make(rounds=4, evaluate_every=1).run(tmp_path / "four")
    make(rounds=2, evaluate_every=1).run(tmp_path / "two")
    watch = Listener()
    assert make(rounds=2, evaluate_every=1).run(tmp_path / "two", resume=True, callback=watch)
    assert watch.rounds == []
    make(rounds=4, evaluate_every=1).run(tmp_path / "two", resume=True, callback=watch)
    assert [done.round for done in watch.rounds] == [3, 4]
    assert_same(tmp_path / "two", tmp_path / "four")


def cut(path, rows):
    """Append ``rows``, of which the last is not written whole."""
    append_rows(path, rows)
    path.write_bytes(path.read_bytes()[:-30])


def half(path, content):
    path.with_name(path.name + ".tmp").write_bytes(content[: len(content) // 2])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("moment", "at", "instead"),
    [
        ("engines.sequential.client_step_", 20, lambda *given: None),
        ("experiments.trial.save_checkpoint", 2, lambda *given: None),
        ("experiments.client_store.write_atomically", 2, half),
        ("results.checkpoint.write_atomically", 2, half),
        ("experiments.trial_run.append_rows", 3, cut),
    ],
)
def test_ended_in_the_middle_and_resumed_equals_uninterrupted(
    make, tmp_path, monkeypatch, assert_same, moment, at, instead
):
    """As a process that is killed at this moment; the next test kills one."""
    experiment = make("fedbn", optimizer="sgd(momentum=0.9, keep=True)", rounds=3)
    experiment.run(tmp_path / "whole")
    module, _, name = f"fedshift.{moment}".rpartition(".")
    real, calls = getattr(sys.modules[module], name), []

    def ending(*given):
        calls.append(given)
        if len(calls) == at:
            instead(*given)
            raise Killed
        return real(*given)

    with monkeypatch.context() as patched:
        patched.setattr(f"fedshift.{moment}", ending)
        with pytest.raises(Killed):
            experiment.run(tmp_path / "killed")
    experiment.run(tmp_path / "killed", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.slow
def test_a_process_killed_from_outside_and_resumed_equals_uninterrupted(
    program, cli, unpublished, tiny_folder, tmp_path, assert_same
):
    settings = ["run", "--data", tiny_folder, "--method", "fedavg", "--batch-size", 8, "--rounds", 20]
    process = program(*settings, "--out", tmp_path / "killed", env=os.environ | {"PYTHONUNBUFFERED": "1"})
    for line in process.stdout:
        if "round 2/20" in line:  # rounds 4, 6, ... are evaluated too
            process.kill()
            break
    assert process.wait() == -signal.SIGKILL
    assert len(read_rows(tmp_path / "killed" / "trials" / "fedavg-seed0" / "rounds.jsonl")) >= 2
    assert cli("run", "--resume", tmp_path / "killed").code == 0
    assert cli(*settings, "--out", tmp_path / "whole").code == 0
    assert_same(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("step", "at"),
    [
        ("experiments.client_store.write_atomically", 2),  # of the last round's clients
        ("results.checkpoint.write_atomically", 0),  # of the first checkpoint
        ("results.checkpoint.write_atomically", "best.safetensors"),  # of the last best, after its checkpoint
        ("experiments.trial.remove_unused_segments", 2),
        ("experiments.trial.remove_unused_segments", -1),  # after the last round
    ],
)
def test_ended_between_any_two_files_and_resumed_equals_uninterrupted(
    make, tmp_path, monkeypatch, assert_same, step, at
):
    experiment = make(rounds=4, participation=2, validation=0.2, select="best", lr=0.0)
    module, _, name = f"fedshift.{step}".rpartition(".")
    real, calls, last = getattr(sys.modules[module], name), [], None

    def stepped(path, content):
        calls.append(path.name)
        if len(calls) == last:
            raise Killed
        real(path, content)

    monkeypatch.setattr(f"fedshift.{step}", stepped)
    experiment.run(tmp_path / "whole")
    number = max(i for i, each in enumerate(calls) if each == at) if isinstance(at, str) else range(len(calls))[at]
    last, calls = number + 1, []
    with pytest.raises(Killed):
        experiment.run(tmp_path / "killed")
    last = None
    experiment.run(tmp_path / "killed", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "killed")


# Rounds between checkpoints


def fail_after(number, error):
    def when(done):
        if done.round == number:
            raise error

    return when


def count_saved(path):
    """Return the round of a run's checkpoint, and the number of recorded rounds."""
    folder = path / "trials" / "fedbn-seed0"
    return load_facts(folder / "checkpoint.safetensors")["round"], len(read_rows(folder / "rounds.jsonl"))


def test_killed_between_checkpoints_and_resumed_equals_uninterrupted(make, tmp_path, assert_same, Listener):
    experiment = make("fedbn", rounds=7, participation=2, evaluate_every=7, checkpoint_every=3)
    experiment.run(tmp_path / "whole")
    with pytest.raises(Killed):
        experiment.run(tmp_path / "killed", callback=Listener(fail_after(5, Killed())))
    assert count_saved(tmp_path / "killed") == (3, 3)
    watch = Listener()
    experiment.run(tmp_path / "killed", resume=True, callback=watch)
    assert [done.round for done in watch.rounds] == [4, 5, 6, 7]
    assert_same(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.parametrize("end", ["callback", "stop", "divergence"])
def test_a_run_that_ends_by_itself_between_checkpoints_loses_no_round(make, tmp_path, Listener, monkeypatch, end):
    experiment, stop = make("fedbn", rounds=7, evaluate_every=7, checkpoint_every=5, engine="sequential"), Event()
    if end == "stop":
        assert not experiment.run(tmp_path / "run", stop=stop, callback=Listener(lambda done: stop.set()))
    elif end == "callback":
        with pytest.raises(ValueError, match="mine"):
            experiment.run(tmp_path / "run", callback=Listener(fail_after(2, ValueError("mine"))))
    else:
        real = Sequential.train

        def diverge(self, server, clients):
            if server.round == 3:
                raise Diverged("training diverged")
            return real(self, server, clients)

        monkeypatch.setattr(Sequential, "train", diverge)
        with pytest.raises(Diverged):
            experiment.run(tmp_path / "run")
    done = {"stop": 1, "callback": 2, "divergence": 3}[end]
    assert count_saved(tmp_path / "run") == (done, done)


def test_by_itself_saving_takes_a_share_of_the_time_beside_evaluated_rounds(make, tmp_path, monkeypatch):
    saved, real = [], Trial.save

    def save(self, *given):
        saved.append(self.server.round)
        real(self, *given)

    monkeypatch.setattr(Trial, "save", save)
    for share, expected in ((1.0, [0, 1, 2, 3, 4, 5, 6, 7]), (1e-9, [0, 1, 3, 4, 6, 7])):
        monkeypatch.setattr("fedshift.experiments.trial_run.SAVING", share)
        saved.clear()
        make("fedavg", rounds=7, evaluate_every=4).run(tmp_path / str(share))
        assert saved == expected  # before an evaluation, whose error may come from the user, and after it


def test_rounds_are_logged_once_they_are_saved(make, tmp_path, monkeypatch):
    logged, saved = [], []
    real_save, real_add = Trial.save, RecordLog.trial

    @contextmanager
    def trial(self, *given):
        with real_add(self, *given):
            yield lambda line, rows: logged.append((line["round"], saved[-1], len(rows)))

    def save(self, *given):
        real_save(self, *given)
        saved.append(self.server.round)

    monkeypatch.setattr(Trial, "save", save)
    monkeypatch.setattr(RecordLog, "trial", trial)
    make("fedavg", rounds=5, evaluate_every=5, checkpoint_every=2).run(tmp_path / "run")
    assert [round for round, _, _ in logged] == [1, 2, 3, 4, 5]
    assert all(round <= saved for round, saved, _ in logged)
    assert [rows for *_, rows in logged] == [3, 3, 3, 3, 9]


# What resuming refuses


OTHERWISE = [
    ({"lr": 0.02}, "begun with another optimizer: then 'SGD(lr=0.01"),
    ({"schedule": "cosine"}, "begun with another optimizer"),
    ({"optimizer": "sgd(keep=True)"}, "begun with another optimizer"),
    ({"batch_size": 9}, "begun with another work: then 'Work(batch_size=8"),
    ({"model": "digit-cnn-bn"}, "begun with another model"),
    ({"domains": "ann,bob"}, "begun with another version of the data of client 'cid'"),
    ({"validation": 0.1}, "begun with another version of the data of client 'ann'"),
    ({"participation": 2}, "begun with another participation: then 'None', now '2'"),
    ({"rounds": 1}, "has done 2 rounds, more than rounds=1: ask for at least as many"),
]


@pytest.mark.slow
def test_a_run_goes_on_only_as_it_was_begun_and_a_refusal_changes_nothing(make, tmp_path):
    make(rounds=2).run(tmp_path / "run")

    def content():
        return {
            p: p.read_bytes()
            for p in sorted((tmp_path / "run").rglob("*"))
            if p.is_file() and p.name not in (".lock", ".owner")
        }

    before = content()
    for changed, said in OTHERWISE:
        with pytest.raises(UsageError) as refused:
            make(**({"rounds": 2} | changed)).run(tmp_path / "run", resume=True)
        assert said in str(refused.value), changed
        assert len(str(refused.value)) < 500
        assert content() == before, changed
    make(rounds=2).run(tmp_path / "run", resume=True)


def test_a_method_of_the_same_name_but_other_choices_is_another(make, tmp_path, monkeypatch):
    (tmp_path / "own_method.py").write_text(
        "from dataclasses import replace\nfrom fedshift import fedavg, fedprox\nmu = 0.1\n"
        "def mine():\n    return replace(fedprox(mu=mu), name='mine')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_method", raising=False)
    make("own_method:mine", rounds=1).run(tmp_path / "run")
    monkeypatch.setattr("own_method.mu", 0.2)
    with pytest.raises(UsageError, match=r"begun with another method: then .*mu=0\.1.*, now .*mu=0\.2"):
        make("own_method:mine", rounds=2).run(tmp_path / "run", resume=True)


def test_networks_with_the_same_tensors_but_other_layers_are_told_apart(make, tmp_path):
    def of(activation):
        made = make("fedavg", rounds=1)
        object.__setattr__(
            made, "model", lambda shape, classes: nn.Sequential(nn.Flatten(), activation, nn.Linear(192, classes))
        )
        return made

    of(nn.ReLU()).run(tmp_path / "run")
    with pytest.raises(UsageError, match=r"begun with another model: then .*ReLU\(\).*now .*Tanh\(\)"):
        of(nn.Tanh()).run(tmp_path / "run", resume=True)


def test_a_checkpoint_of_another_seed_is_refused(make, tmp_path):
    make(rounds=1, seeds=2).run(tmp_path / "run")
    trials = tmp_path / "run" / "trials"
    copy(trials / "fedbn-seed0" / "checkpoint.safetensors", trials / "fedbn-seed1" / "checkpoint.safetensors")
    with pytest.raises(UsageError, match="begun with another seed: then '0', now '1'"):
        make(rounds=1, seeds=2).run(tmp_path / "run", resume=True)


def test_a_damaged_or_removed_checkpoint_is_refused_until_the_trial_is_removed(make, tmp_path, assert_same):
    make().run(tmp_path / "run")
    make().run(tmp_path / "other")
    checkpoint = tmp_path / "run" / "trials" / "fedbn-seed0" / "checkpoint.safetensors"
    content = bytearray(checkpoint.read_bytes())
    content[-5] ^= 1
    checkpoint.write_bytes(content)
    with pytest.raises(FedshiftError, match="corrupt or truncated \\(its checksum does not match\\): restore the file"):
        make().run(tmp_path / "run", resume=True)
    checkpoint.unlink()
    with pytest.raises(FedshiftError, match=r"checkpoint.safetensors is missing, but rounds are recorded next to it: "):
        make().run(tmp_path / "run", resume=True)
    rmtree(checkpoint.parent)
    make().run(tmp_path / "run", resume=True)
    assert_same(tmp_path / "run", tmp_path / "other")


class Refusing(Exception):
    """Local work cannot begin."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("error", [Refusing(), Diverged("client 'ann', round 3, step 0: the loss is nan")])
def test_more_rounds_that_fail_before_the_first_leave_the_run_what_it_was(make, tmp_path, monkeypatch, error):
    make(rounds=2).run(tmp_path / "run")
    names = ("config.toml", "study.json", "environment.json")
    before = {name: (tmp_path / "run" / name).read_bytes() for name in names}

    def advance(*_):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr("fedshift.experiments.trial.Trial.advance", advance)
        with pytest.raises(type(error)):
            make(rounds=6).run(tmp_path / "run", resume=True)
    assert {name: (tmp_path / "run" / name).read_bytes() for name in names} == before
    assert read_summary(tmp_path / "run").rounds == 2
    stop = Event()
    stop.set()
    make(rounds=6).run(tmp_path / "run", resume=True, stop=stop)
    assert read_summary(tmp_path / "run").rounds == 2


def test_more_rounds_are_written_down_with_the_first_that_is_done(make, tmp_path, Listener):
    make(rounds=2).run(tmp_path / "run")
    stop = Event()
    make(rounds=6).run(tmp_path / "run", resume=True, stop=stop, callback=Listener(lambda _: stop.set()))
    study = read_summary(tmp_path / "run")
    assert (study.rounds, study.traffic["round"].max()) == (6, 3)
    assert "rounds = 6\n" in (tmp_path / "run" / "config.toml").read_text()


@pytest.mark.slow
def test_a_damaged_best_checkpoint_is_written_anew(make, tmp_path, assert_same, Listener):
    settings = {"rounds": 4, "validation": 0.2, "select": "best"}
    make(**settings).run(tmp_path / "whole")
    stop = Event()
    make(**settings).run(tmp_path / "run", stop=stop, callback=Listener(lambda done: done.round == 1 and stop.set()))
    best = tmp_path / "run" / "trials" / "fedbn-seed0" / "best.safetensors"
    later = load_checkpoint(tmp_path / "whole" / "trials" / "fedbn-seed0" / "best.safetensors")
    save_checkpoint(best, *later)  # as if killed between writing the best of a later round and the checkpoint
    make(**settings).run(tmp_path / "run", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "run")
