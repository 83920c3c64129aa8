"""What an experiment says of itself before it trains, and after."""

import json
from importlib.metadata import version
from threading import Event

import pytest
import torch
from torch import nn

from fedshift.core.optimizer import SGD, AdamW
from fedshift.core.schedule import Cosine
from fedshift.core.work import Work
from fedshift.experiments.description import describe_optimizer, describe_work
from fedshift.models import describe_factory
from fedshift.models.digits import digit_cnn_bn
from fedshift.results.summary import read_summary


def own_network(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(192, classes))


def test_nothing_that_was_left_to_fedshift_is_left_open(make, tmp_path):
    experiment = make(methods="fedavg,fedwon", model="auto", engine="auto", rounds=5, evaluate_every=2, participation=2)
    experiment.run(tmp_path / "run")
    study = json.loads((tmp_path / "run" / "study.json").read_text())
    resolved = study["resolved"]
    assert resolved.pop("computed on") == f"cpu, float32, {torch.get_num_threads()} thread of torch"
    networks = {method.name: experiment.make_trial(method.name, 0).plan for method in experiment.methods}
    counts = [sum(plan.initial[name].numel() for name in plan.trained) for plan in networks.values()]
    assert resolved == {
        "data": "tiny: 3 clients, 76 training samples, 3 classes, samples of shape 3 x 8 x 8",
        "network": "small-cnn",
        "trained parameters": f"fedavg: {counts[0]:,}; fedwon: {counts[1]:,}",
        "scaling of inputs": "pixels in [0, 1] minus 0.5 over 0.5 (FedBN, arXiv:2102.07623, section 5.1: pixels scaled "
        "to [-1, 1])",
        "training loss": "cross_entropy",
        "optimizer": "SGD, learning rate 0.01",
        "local work in a round": "1 epoch, batches of 8 samples",
        "weight of a client": "its training samples",
        "clients in a round": "2 of 3, drawn at random",
        "evaluated after rounds": "2, 4, 5 of 5",
    }
    assert study["trained"]["engines"].keys() == {"fedavg", "fedwon"}
    for engines in study["trained"]["engines"].values():
        assert len(engines) == 1
        assert engines[0] in ("sequential", "stacked", "pool")
    assert study["trained"]["seconds"] > 0
    assert study["trained"]["started"] <= study["trained"]["ended"]
    assert study["trained"]["versions"]["torch"] == version("torch")


def test_the_commands_of_a_run_are_those_that_trained(cli, unpublished, tiny_folder, tmp_path):
    words = ["run", "--data", tiny_folder, "--batches", 1, "--out", "a run", "--rounds", 1]
    assert cli(*words).code == 0
    assert cli("run", "--resume", "a run").code == 0  # does nothing
    assert cli("run", "--resume", "a run", "--rounds", 2).code == 0
    kept = json.loads((tmp_path / "a run" / "study.json").read_text())["trained"]
    first = f"fedshift run --data {tiny_folder} --batches 1 --out 'a run' --rounds 1"
    assert kept["commands"] == [first, "fedshift run --resume 'a run' --rounds 2"]
    assert [one["command"] for one in read_summary(tmp_path / "a run").environment["sessions"]] == kept["commands"]


def test_a_run_that_was_stopped_says_what_it_did_until_then(make, tmp_path, Listener):
    stop = Event()
    make(rounds=3).run(tmp_path / "run", stop=stop, callback=Listener(lambda _: stop.set()))
    study = json.loads((tmp_path / "run" / "study.json").read_text())
    assert study["trained"]["ended"] >= study["trained"]["started"]
    assert study["trained"]["seconds"] == pytest.approx(
        sum(read_summary(tmp_path / "run").traffic["elapsed"]), abs=0.001
    )


def test_optimizers_work_and_networks_are_said_in_words():
    assert describe_optimizer(SGD(lr=0.1, momentum=0.9)) == "SGD, learning rate 0.1, momentum 0.9"
    assert describe_optimizer(AdamW(lr=1e-3, weight_decay=0.1, schedule=Cosine(rounds=9))) == (
        "AdamW, learning rate 0.001, weight decay 0.1, schedule cosine (rounds 9, floor 0.0)"
    )
    assert describe_work(Work(batch_size=None, batches=2)) == "up to 2 batches of all samples, ending with the pass"
    assert describe_work(Work(batch_size=4, batches=1)) == "1 batch of 4 samples"
    assert describe_work(Work(batch_size=4, steps=100)) == "100 steps, batches of 4 samples"
    assert describe_work(Work(batch_size=8, epochs=2)) == "2 epochs, batches of 8 samples"
    assert describe_factory(digit_cnn_bn) == "digit-cnn-bn"
    assert describe_factory(own_network) == f"{__name__}:own_network"
