"""Law 11: a network trains as it would in plain PyTorch, or is refused by the layer that prevents it.

The plain loop makes a network for each client, takes steps of ``torch.optim.SGD`` on the same batches, and averages by
hand; only the order of samples and the seeds of random draws are taken from fedshift.
"""

import copy
from contextlib import closing

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from fedshift.core.network import forward
from fedshift.core.optimizer import SGD
from fedshift.core.preparation import prepare
from fedshift.core.work import Work, iterate_batches
from fedshift.data.assembly import federation
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.methods.gn import gn
from fedshift.methods.single import single
from fedshift.models import make_network
from fedshift.utils.errors import UsageError
from fedshift.utils.random_streams import torch_stream
from fedshift.utils.state import clone, is_equal, load_entries
from tests.laws.course import make_trial
from tests.laws.networks import CATALOG, CLASSES, make
from tests.methods.plain import advance

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's about old hooks, checkpointing and unused random draws
SEED, ROUNDS, BATCH = 3, 2, 4
SGD_SETTINGS = {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.05}
SIZES = {"s0": 15, "s1": 7}
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
RIGHT = [name for name, case in CATALOG.items() if case.refused is None]


def draw_samples(shape, scale=1.0):
    """Return training and test samples of two unequal clients; ``scale``: of the second one's inputs."""
    rng, clients = np.random.default_rng(5), {}
    for place, (name, size) in enumerate(SIZES.items()):
        x = rng.normal(0.5 * place, 1 + place, (2 * size, *shape)) * (scale if place else 1)
        y = (x.reshape(len(x), -1)[:, 0] > 0) + np.arange(2 * size) % 2
        clients[name] = (x[:size], y[:size], x[size:], y[size:])
    return clients


def begin(name, engine="sequential", method=None, scale=1.0):
    """Return the trial of a network on these samples; the identity engine takes one step of all samples."""
    case, size = CATALOG[name], None if engine == "identity" else BATCH
    return make_trial(
        method or fedavg(), engine, model=make(case), data=federation(draw_samples(case.shape, scale)), seed=SEED,
        rounds=ROUNDS, optimizer=SGD(**SGD_SETTINGS), work=Work(batch_size=size, epochs=1), evaluate_every=1,
        moments=("loaded",), workers=1,
    )  # fmt: skip


def list_tensors(net):
    """Return the parameters and buffers of a network, and the names of the buffers that are not persistent."""
    hidden = {id(layer._buffers[key]) for layer in net.modules() for key in layer._non_persistent_buffers_set}
    tensors = dict(nn.Module.named_parameters(net)) | dict(net.named_buffers())
    return tensors, {name for name, tensor in tensors.items() if id(tensor) in hidden}


def average_by_hand(nets, case):
    """Average parameters, and statistics, counters and moving averages; other buffers stay on the client."""
    tensors = {name: list_tensors(net)[0] for name, net in nets.items()}
    averaged = {name for name, weight in nets["s0"].named_parameters() if weight.is_floating_point()} | {
        name for name in tensors["s0"] if case.averaged or name.rpartition(".")[2] in STATISTICS
    }
    for key in averaged - list_tensors(nets["s0"])[1]:
        mean = sum(tensors[name][key].detach().double() * size for name, size in SIZES.items()) / sum(SIZES.values())
        for held in tensors.values():
            held[key].data = (mean if held[key].is_floating_point() else mean.round()).to(held[key].dtype, copy=True)


def fit_spectral_norm(net):
    """Set the vectors of ``spectral_norm`` to the first singular vectors of the averaged weight."""
    for layer in net.modules():
        if isinstance(layer, parametrizations._SpectralNorm):
            left, _, right = torch.linalg.svd(net.a.parametrizations.weight.original.detach())
            layer._u.data, layer._v.data = left[:, 0].clone(), right[0].clone()


def train_plainly(case, batch_size):
    """Return each client's network, and the tensors of its model after the rounds.

    Buffers that are not averaged are those of the largest client; those that are not persistent are a new network's.
    """
    clients, steps = draw_samples(case.shape), dict.fromkeys(SIZES, 0)
    nets = {name: make(case)(case.shape, CLASSES) for name in SIZES}
    for _ in range(ROUNDS):
        for name, net in nets.items():
            x, y = (torch.from_numpy(values) for values in clients[name][:2])
            x = x.to(case.dtype)
            starts = range(0, len(y), batch_size or len(y))
            bounds = tuple((start, min(start + starts.step, len(y))) for start in starts)
            sgd = torch.optim.SGD(net.train().parameters(), **SGD_SETTINGS)
            with torch_stream(SEED, "torch", name, steps[name]):
                for _, index in iterate_batches(
                    SEED, name, len(y), bounds, range(steps[name], steps[name] + len(bounds))
                ):
                    sgd.zero_grad()
                    nn.functional.cross_entropy(net(x[index]), y[index]).backward()
                    for weight in net.parameters():  # torch.optim.SGD decays no weights with sparse gradients
                        weight.grad = weight.grad.to_dense() if weight.grad is not None else None
                    sgd.step()
            steps[name] += len(bounds)
        average_by_hand(nets, case)
        for net in nets.values():
            fit_spectral_norm(net)
    (largest, hidden), new = list_tensors(nets["s0"]), list_tensors(make(case)(case.shape, CLASSES))[0]
    whole = largest | {key: new[key] for key in hidden}
    return {name: (net, clone(whole)) for name, net in nets.items()}


@pytest.fixture(scope="module")
def plain():
    """The plain networks, trained once."""
    known = {}

    def train(name, engine):
        key = name, None if engine == "identity" else BATCH
        if key not in known:
            known[key] = train_plainly(CATALOG[name], key[1])
        return known[key]

    return train


def assert_plain(trial, nets):
    """Assert that entries, and outputs in evaluation and in training, are those of plain networks."""
    x = torch.from_numpy(draw_samples(trial.data.sample_shape)["s0"][2]).to(trial.plan.dtype)
    for name, (net, expected) in nets.items():
        state, (tensors, hidden) = trial.model_state(name), list_tensors(net)
        assert tensors.keys() - hidden <= state.keys() <= tensors.keys()
        for key, tensor in state.items():
            assert tensor.dtype == expected[key].dtype, key
            assert is_close(*((t.abs() if key.endswith(("._u", "._v")) else t) for t in (tensor, expected[key]))), key
        exported = trial.make_network()
        for training in (False, True):
            outputs = run(net, expected, x, training)
            assert is_close(run(exported, state, x, training), outputs), f"exported, training={training}"
            with torch_stream(0, "outputs"):
                assert is_close(forward(trial.plan, clone(state), x.clone(), training=training), outputs), training


def run(net, entries, x, training):
    """Return the outputs of a network that has ``entries`` before its mode changes."""
    load_entries(net.train(), entries)
    with torch_stream(0, "outputs"), torch.no_grad():
        return net.train(training)(x.clone())


def is_close(one, other):
    return torch.allclose(one.double(), other.double(), rtol=0, atol=1e-9 if one.dtype == torch.float64 else 1e-5)


def assert_right_or_refused(name, engine, plain):
    case = CATALOG[name]

    def train():
        with closing(begin(name, engine)) as trial:
            advance(trial, rounds=ROUNDS)
        return trial

    if case.refused and engine == "sequential":
        with pytest.raises(UsageError, match=case.refused):
            train()
        return
    try:
        trial = train()
    except UsageError:
        if case.refused is None and engine == "sequential":
            raise
        return
    assert not case.refused, f"not refused by {case.refused}"
    assert_plain(trial, plain(name, engine))


@pytest.mark.sampled(60)
@pytest.mark.parametrize("name", CATALOG)
def test_the_sequential_engine_trains_as_plain_pytorch_or_refuses(name, plain):
    assert_right_or_refused(name, "sequential", plain)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("engine", ["stacked", "identity"])
@pytest.mark.parametrize("name", CATALOG)
def test_other_engines_train_as_plain_pytorch_or_refuse(name, engine, plain):
    assert_right_or_refused(name, engine, plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", CATALOG)
def test_processes_train_as_plain_pytorch_or_refuse(name, plain):
    assert_right_or_refused(name, "pool", plain)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", RIGHT)
def test_a_resumed_run_and_any_number_of_evaluations_give_the_same_bits(name, tmp_path):
    whole, resumed = begin(name), begin(name)
    rows = whole.advance().rows
    resumed.restore(*copy.deepcopy(whole.to_tensors()))
    before = clone(resumed.server.shared)
    for _ in range(3):
        assert [row["loss_sum"] for row in resumed.evaluate()] == [
            row["loss_sum"] for row in rows if row["moment"] == "loaded" and row["split"] != "train"
        ]
    assert is_equal(resumed.server.shared, before)
    advance(whole, resumed)
    assert is_equal(resumed.to_tensors()[0], whole.to_tensors()[0])


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", RIGHT)
def test_training_alone_does_not_depend_on_other_clients_data(name):
    states = []
    for scale in (1.0, 50.0):
        trial = begin(name, method=single(), scale=scale)
        advance(trial, rounds=ROUNDS)
        states.append(trial.model_state("s0"))
    assert is_equal(*states)


@pytest.mark.parametrize("shared", ["network", "layer"])
def test_a_function_that_returns_what_it_returned_before_serves_several_trials(shared):
    """Trials train the networks that functions make, and surgery changes them."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)).double()
    whole = nn.Sequential(layer, nn.Linear(5, CLASSES)).double()
    before, states = clone(whole.state_dict()), []
    for method in (fedavg(), gn(), fedavg()):
        trial = make_trial(
            method, data=federation(draw_samples((6,))), optimizer=SGD(lr=0.1), moments=("loaded",),
            model=lambda *_: whole if shared == "network" else nn.Sequential(layer, copy.deepcopy(whole[1])),
        )  # fmt: skip
        trial.advance()
        states.append(trial.server.shared)
    assert is_equal(whole.state_dict(), before)
    assert is_equal(states[0], states[2])
    assert states[1].keys() == {"0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias", "1.weight", "1.bias"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lazy_layers_get_their_shapes_and_their_statistics_stay_untouched(dtype):
    def make_lazy(shape, classes):
        return nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(classes)).to(dtype)

    network = make_network(make_lazy, (3, 6, 6), 5)
    assert network[3].weight.shape == (5, 64)
    assert int(network[1].num_batches_tracked) == 0
    assert torch.equal(network[1].running_mean, torch.zeros(4, dtype=dtype))
    assert prepare(fedbn(), network, optimizer=SGD(lr=0.1)).personal
    with pytest.raises(UsageError, match=r"'0\.weight' of the model has no shape yet"):
        prepare(fedavg(), make_lazy((3, 6, 6), 5), optimizer=SGD(lr=0.1))
