"""Trials: which clients take part, and batches of one sample under batch normalization."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from fedshift.core.method import Method
from fedshift.experiments.settings import Settings
from fedshift.methods import METHODS
from fedshift.report.differences import advise_seeds
from fedshift.results.checkpoint import load_checkpoint
from fedshift.results.schema import read_rows
from fedshift.results.summary import read_summary
from fedshift.utils.errors import UsageError
from tests.laws.course import make_trial, unequal


def rows_of(path: Path, trial: str):
    return read_rows(path / "trials" / trial / "metrics.jsonl")


def steps_of(path: Path) -> list[int]:
    """Local steps of ann, bob and cid after the last round."""
    tensors, _ = load_checkpoint(path / "trials" / "fedavg-seed0" / "checkpoint.safetensors")
    return tensors["clients/steps"].tolist()


# Sampling of clients


@pytest.mark.parametrize(
    ("share", "count"), [(None, 3), (1, 1), (2, 2), (9, 3), (0.5, 2), (0.1, 1), (1.0, 3), (0.4, 1)]
)
def test_as_many_clients_take_part_as_asked(share, count):
    settings, names = Settings(participation=share), ("ann", "bob", "cid")
    chosen = [settings.draw_participants(0, number, names) for number in range(1, 60)]
    assert {len(round) for round in chosen} == {count}
    assert all(list(round) == sorted(set(round)) for round in chosen)
    assert set(names) == {name for round in chosen for name in round}
    assert chosen == [settings.draw_participants(0, number, names) for number in range(1, 60)]
    assert count == 3 or chosen != [settings.draw_participants(1, number, names) for number in range(1, 60)]


def test_each_client_is_as_likely_to_take_part():
    names = tuple("abcdefghij")
    drawn = Counter(name for n in range(2000) for name in Settings(participation=0.3).draw_participants(0, n, names))
    assert set(drawn) == set(names)
    assert all(500 < count < 700 for count in drawn.values())  # 600 expected, standard deviation 20


@pytest.mark.parametrize("turns", ["ordered", "shuffled"])
def test_each_client_has_its_turn_before_any_has_another(turns):
    settings, names = Settings(participation=turns), tuple("abcd")
    taken = [settings.draw_participants(3, number, names) for number in range(1, 41)]
    assert {len(round) for round in taken} == {1}
    cycles = [tuple(name for (name,) in taken[start : start + 4]) for start in range(0, 40, 4)]
    assert all(set(cycle) == set(names) for cycle in cycles)
    assert len(set(cycles)) > 4 if turns == "shuffled" else set(cycles) == {names}
    assert (taken == [settings.draw_participants(4, number, names) for number in range(1, 41)]) == (turns == "ordered")


@pytest.mark.parametrize(
    ("share", "said"),
    [
        ("cycle", "should be a number, ordered or shuffled"),
        (0, "should be greater than 0"),
        (-1, "should be greater than 0"),
        (0.0, "should be greater than 0"),
        (1.5, "give a whole number of clients, or a fraction up to 1.0"),
    ],
)
def test_other_participation_is_refused(share, said):
    with pytest.raises(UsageError, match=f"participation={share!r}: {said}"):
        Settings(participation=share)


@pytest.mark.parametrize("method", ["fedbn", "fedavg"])
def test_a_client_that_never_took_part_is_measured_only_where_it_has_a_model(make, tmp_path, method, Listener):
    watch = Listener()
    make(method, rounds=2, participation=1, seeds="2,", evaluate_every=1).run(tmp_path / "run", callback=watch)
    took_part = [done.participants[0] for done in watch.rounds]
    absent = {"ann", "bob", "cid"} - set(took_part)
    assert absent
    for number in (1, 2):
        rows = [
            r for r in rows_of(tmp_path / "run", f"{method}-seed2") if r["round"] == number and r["split"] == "test"
        ]
        have_one = set(took_part[:number]) if method == "fedbn" else {"ann", "bob", "cid"}
        assert {row["client"] for row in rows} == have_one
    said = [text for text in watch.notices if "never took part" in text]
    if method == "fedavg":
        assert said == []
    else:
        assert said == [
            "fedbn, seed 2: clients that never took part are not counted (--unseen average, mixed, "
            f"reestimate, tent, finetune, finetune_bn or nearest gives them a model): {', '.join(sorted(absent))}"
        ]
        assert read_summary(tmp_path / "run").notices == tuple(watch.notices)


# Batch normalization and a batch of one


@pytest.mark.slow
def test_a_last_batch_of_one_sample_joins_the_one_before_and_is_said_once(make, tmp_path, Listener):
    watch = Listener()
    experiment = make(methods="fedavg,fedbn", seeds=2, rounds=2, batch_size=8)  # bob has 17, cid has 33 samples
    experiment.run(tmp_path / "run", callback=watch)
    kept = read_summary(tmp_path / "run").notices
    assert all("the last batch would hold one sample" in text for text in kept)
    assert [text.split("'")[1] for text in kept] == ["bob", "cid"]
    assert watch.notices == [advise_seeds(["fedavg", "fedbn"], 2), *kept]
    assert {row["samples"] for row in rows_of(tmp_path / "run", "fedbn-seed0") if row["split"] == "train"} == {
        26,
        17,
        33,
    }


def test_a_last_batch_of_one_sample_is_kept_where_nothing_forbids_it(make, tmp_path, Listener):
    experiment = make("fedavg", rounds=1)
    object.__setattr__(experiment, "model", lambda shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(192, classes)))
    watch = Listener()
    experiment.run(tmp_path / "run", callback=watch)
    assert watch.notices == []
    assert steps_of(tmp_path / "run") == [4, 3, 5]


def test_one_batch_joined_is_one_step_fewer(make, tmp_path):
    make("fedavg", rounds=1).run(tmp_path / "run")
    assert steps_of(tmp_path / "run") == [4, 2, 4]


@pytest.mark.slow
def test_fewer_steps_than_batches_asked_for_are_said_once_and_steps_are_exactly_taken(make, tmp_path, Listener):
    watch = Listener()
    make("fedavg", seeds=2, rounds=1, batch_size=8, batches=4).run(tmp_path / "run", callback=watch)
    said = [text for text in watch.notices if "batches=" in text]
    assert said == [
        "fedavg: a pass has fewer than batches=4 at 'bob' (2), where a round ends with the pass and takes fewer steps. "
        "--steps takes the same number at each client, over as many passes as that needs"
    ]
    assert steps_of(tmp_path / "run") == [4, 2, 4]
    make("fedavg", rounds=2, batch_size=8, steps=7).run(tmp_path / "steps", callback=watch)
    assert steps_of(tmp_path / "steps") == [14, 14, 14]
    assert [text for text in watch.notices if "batches=" in text] == said


@pytest.mark.slow
def test_a_method_without_effect_on_one_step_is_said_to_have_none(make, tmp_path, Listener):
    why = "FedProx has no effect on a single local step, which starts at the server's parameters; a round is one step"
    full = {"epochs": 1, "batch_size": 0}
    cases = [(name, {"epochs": 1}) for name in ("fedprox+fedsmb", "fedsmb+fedprox", "fedsmb+fedprox+fedala")]
    for number, (method, work) in enumerate((*(("fedprox", w) for w in ({"batches": 1}, {"steps": 1}, full)), *cases)):
        watch = Listener()
        make(method, rounds=1, **work).run(tmp_path / str(number), callback=watch)
        said = [] if "fedala" in method else [f"{method}: {why} here"]  # FedALA starts elsewhere
        assert [text for text in watch.notices if "one step" in text] == said


def test_a_client_of_one_sample_under_batch_normalization_is_refused(tiny_folder, rewrite, make, tmp_path):
    rewrite("bob", x_train=np.zeros((1, 8, 8, 3), np.uint8), y_train=np.zeros(1, np.int64))
    with pytest.raises(UsageError, match="client 'bob' has one training sample, over which batch normalization"):
        make(allow_single_class=True).run(tmp_path / "run")


def test_clients_that_sit_a_round_out_are_not_weighed_in_it(monkeypatch):
    sizes = {f"{number:03}": 4 for number in range(60)}
    trial = make_trial(METHODS.parse("fedbn"), data=unequal(sizes), participation=2, rounds=9, evaluate_every=9)
    trial.advance()
    weighed, weigh = [], Method.weigh

    def count(method, **given):
        weighed.append(given)
        return weigh(method, **given)

    monkeypatch.setattr(Method, "weigh", count)
    trial.advance()
    assert 0 < len(weighed) <= 6
