"""Weights that users bring: what is loaded, against plain torch, and what is refused before anything starts."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import fedshift
from fedshift.experiments.initial_weights import as_initial_weights
from fedshift.experiments.restoration import load_experiment, restore_trial
from fedshift.models.digits import small_cnn
from fedshift.utils.errors import UsageError
from fedshift.utils.state import is_equal

SHAPE = (3, 8, 8)


@pytest.fixture
def network():
    """The tiny clients' network, with statistics that no fresh one has."""
    torch.manual_seed(3)
    made = small_cnn(SHAPE, 3)
    made(torch.randn(9, *SHAPE))
    return made.eval()


@pytest.fixture
def file(network, tmp_path):
    save_file(network.state_dict(), tmp_path / "own.safetensors")
    return tmp_path / "own.safetensors"


def start_of(experiment):
    """The state from which the first trial starts."""
    return experiment._make_first_trials()[experiment.methods[0].name].plan.initial


def test_every_kind_of_file_is_loaded_as_torch_does(make, network, file, tmp_path):
    given = network.state_dict()
    torch.save(given, tmp_path / "plain.pt")
    torch.save({"epoch": 3, "state_dict": {f"module.{k}": v for k, v in given.items()}, "lr": 0.1}, tmp_path / "it.pth")
    counters = {k: v for k, v in given.items() if not k.endswith("num_batches_tracked")}
    torch.save(counters, tmp_path / "old.bin")
    for path in (file, tmp_path / "plain.pt", tmp_path / "it.pth"):
        assert is_equal(start_of(make(weights=str(path))), given), path
    kept = start_of(make(weights=str(tmp_path / "old.bin")))
    assert is_equal({name: kept[name] for name in counters}, counters)


def test_every_seed_and_method_starts_from_them_and_fedwon_only_where_it_keeps_weights(make, network, file, tmp_path):
    weights = {"weights": str(file)}
    experiment = make(methods="fedavg,fedbn,gn,fedwon(init='keep')", seeds=2, **weights)
    for name, trial in experiment._make_first_trials().items():
        common = trial.plan.initial.keys() & network.state_dict().keys()
        assert len(common) >= 8, name
        assert all(torch.equal(trial.plan.initial[key], network.state_dict()[key]) for key in common), name
    with pytest.raises(UsageError, match=r"method 'fedwon' reinitializes 'conv1.weight', .*fedwon\(init='keep'\)"):
        make(method="fedwon", **weights)._make_first_trials()
    # as the method makes the network, which is what it leaves behind
    trained = start_of(make(method="fedwon", seeds="7,"))
    save_file(trained, tmp_path / "won.safetensors")
    assert is_equal(start_of(make(method="fedwon", weights=str(tmp_path / "won.safetensors"))), trained)


def test_python_takes_a_state_dictionary_and_no_network(tiny, network):
    result = fedshift.compare(
        [fedshift.single()], data=tiny, rounds=1, lr=0.0, weights=network.state_dict(), engine="sequential"
    )
    kept = dict(result.model("single", client="ann").named_parameters())
    assert all(torch.equal(kept[name], parameter) for name, parameter in network.named_parameters())
    with pytest.raises(UsageError, match=r"weights is a Sequential: give a file, or a network's state_dict\(\)"):
        fedshift.compare([fedshift.single()], data=tiny, weights=network)


def test_another_number_of_classes_is_refused_or_left_out_by_choice(make, tmp_path):
    other = small_cnn(SHAPE, 5).state_dict()
    save_file(other, tmp_path / "five.safetensors")
    with pytest.raises(UsageError) as said:
        start_of(make(weights=str(tmp_path / "five.safetensors")))
    assert "'fc2.weight' has shape (5, 64) where the network has (3, 64)" in str(said.value)
    assert "its last layer is for 5 classes, and the data have 3. Leave it out (weights_skip_clas" in str(said.value)
    start = start_of(make(weights=str(tmp_path / "five.safetensors"), weights_skip_classifier=True))
    fresh = start_of(make())
    assert {name for name in start if torch.equal(start[name], fresh[name])} >= {"fc2.weight", "fc2.bias"}
    assert torch.equal(start["conv1.weight"], other["conv1.weight"])


def renamed(state):
    return {name.replace("fc1", "dense"): x for name, x in state.items()}


REFUSED = (
    (renamed, "2 of its entries missing ('fc1.weight', 'fc1.bias'); 2 unexpected ('dense.weight', 'dense.bias')"),
    (lambda state: {**state, "head.weight": torch.ones(2)}, "1 unexpected ('head.weight')"),
    (lambda state: {**state, "conv1.weight": torch.ones(16, 1, 3, 3)}, "'conv1.weight' has shape (16, 1, 3, 3) where"),
    (lambda state: {**state, "bn1.weight": torch.ones(16, dtype=torch.int64)}, "'bn1.weight' is of torch.int64 where"),
    (lambda state: {**state, "fc2.bias": torch.full((3,), np.nan)}, "entry 'fc2.bias' has NaN or infinite values"),
)


@pytest.mark.parametrize(("change", "said"), REFUSED)
def test_entries_that_do_not_fit_are_named(change, said, make, network):
    changed = change(network.state_dict())
    with pytest.raises(UsageError) as found:
        start_of(_with(make(), changed))
    assert said in str(found.value)


def _with(experiment, state):
    return replace(experiment, settings=replace(experiment.settings, weights=as_initial_weights(state)))


class Evil:
    def __reduce__(self):
        return (print, ("code ran",))


def test_a_file_that_could_run_code_or_is_none_is_refused(cli, tmp_path, tiny_folder):
    torch.save({"a": Evil()}, tmp_path / "evil.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({"a": Evil()}))
    (tmp_path / "cut.safetensors").write_bytes(b"12345678 no tensors")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"epoch": 3}, tmp_path / "epoch.pt")
    (tmp_path / "list.zip").touch()
    for name, said in (
        ("evil.pt", "holds more than tensors, which could run code, and is not read: save the state dictionary alone"),
        ("plain.pt", "holds more than tensors, which could run code"),
        ("cut.safetensors", "cut.safetensors cannot be read as weights ("),
        ("list.pt", "holds no state dictionary, names with tensors, but list: save only network.state_dict()"),
        ("epoch.pt", "holds no state dictionary, names with tensors, but epoch"),
        ("none.pt", "none.pt: give the path of a file that exists (--weights)"),
        ("list.zip", "list.zip: a file of weights ends in .safetensors or .pt, .pth, .bin: write one with"),
    ):
        outcome = cli("run", "--data", tiny_folder, "--weights", name)
        assert outcome.code == 2, outcome
        assert said in outcome.err
        assert "code ran" not in outcome.out
    assert "none are given (--weights)" in cli("run", "--data", tiny_folder, "--weights-skip-classifier").err


def test_a_run_goes_on_from_the_same_weights_only(cli, file, network, tiny_folder, tmp_path, unpublished):
    words = ("run", "--data", tiny_folder, "--rounds", "1", "--weights", "own.safetensors", "--out", "run")
    assert cli(*words).code == 0
    assert f'weights = "{file}"' in (tmp_path / "run" / "config.toml").read_text()
    save_file({name: x + 1 for name, x in load_file(file).items()}, file)
    outcome = cli("run", "--resume", "run", "--rounds", "2")
    assert outcome.code == 2
    assert "this run was begun with another weights" in outcome.err


def test_weights_that_were_moved_with_the_run_are_found(make, file, tmp_path, monkeypatch):
    began = tmp_path / "began"
    began.mkdir()
    file.rename(began / file.name)
    monkeypatch.chdir(began)
    make(rounds=1, engine="sequential", weights=file.name).run(began / "run")
    monkeypatch.chdir(tmp_path)
    moved = began.rename(tmp_path / "moved")
    spec, experiment = load_experiment(moved / "run")
    assert spec.weights == str(moved / file.name)
    assert restore_trial(experiment, moved / "run", "fedbn", 0).server.round == 1
