"""Next to Flower's own parts: what wraps or extends the strategy, and other mods."""

import fedshift.flower  # isort: skip  (before anything of flwr)

import re
from functools import partial

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, arrays_size_mod, fixedclipping_mod
from flwr.serverapp import strategy as flower

import fedshift as fs
from fedshift import FedshiftError, UsageError
from fedshift.flower import MethodStrategy, keep_local, load_client_model
from fedshift.flower.messages import from_record, to_record

from .test_local import counting, counts
from .test_strategy import BN, SHARED, WHOLE, adding, asked, network, said  # noqa: F401  (a fixture)


def patterned(amount, mods=()):
    """A client that adds ``amount`` of a pattern to the entries that came, among which are no local ones."""

    def change(state):
        added = {name: (amount * torch.linspace(-1, 2, x.numel())).reshape(x.shape) for name, x in state.items()}
        return {name: x + added[name].to(x.dtype) for name, x in state.items()}

    return adding(0, change=change, mods=mods)


@pytest.mark.parametrize(
    ("kind", "numbers", "mods"),
    [
        ("ServerSideFixedClipping", (0.7, 0.5, 2), ()),
        ("ServerSideAdaptiveClipping", (0.05, 2), ()),
        ("ClientSideFixedClipping", (0.7, 0.5, 2), [fixedclipping_mod]),
        ("ClientSideAdaptiveClipping", (0.05, 2), [adaptiveclipping_mod]),
    ],
)
def test_flowers_differential_privacy_is_as_around_fedavg(local_grid, tmp_path, kind, numbers, mods):
    """Two rounds, at once or with a restart: the noise is that of FedAvg with the entries that FedBN shares."""
    grid = local_grid({3: patterned(0.5, mods), 4: patterned(2.0, mods)})

    def run(inner, initial, rounds=2, seed=3):
        np.random.seed(seed)  # noqa: NPY002  (the stream that Flower draws from)
        wrap = getattr(flower, f"DifferentialPrivacy{kind}")
        return wrap(inner(fraction_evaluate=0.0), *numbers).start(grid, to_record(initial), num_rounds=rounds).arrays

    ours = partial(MethodStrategy, fs.fedbn(), network())
    torch.testing.assert_close(from_record(run(ours, WHOLE)), from_record(run(flower.FedAvg, SHARED)))
    assert asked(grid)[0].content["arrays"].keys() == SHARED.keys()
    ours = partial(ours, checkpoint=tmp_path / "server")
    theirs = run(flower.FedAvg, from_record(run(flower.FedAvg, SHARED, 1)), 1, seed=4)
    assert run(ours, WHOLE, 1)
    torch.testing.assert_close(from_record(run(ours, WHOLE, 1, seed=4)), from_record(theirs))


@pytest.mark.parametrize("method", [fs.fedbn(), fs.fedbn(fs.fedadam())], ids=["fedbn", "fedadam"])
@pytest.mark.parametrize("calls", [True, False])
def test_what_a_subclass_returns_is_the_model(local_grid, tmp_path, method, calls):
    """Also without a call of our aggregation: then too, clients go on from what they kept."""

    class Zeros(MethodStrategy):
        def aggregate_train(self, server_round, replies):
            made = super().aggregate_train(server_round, replies)[1] if calls else None
            return ArrayRecord({name: Array(np.zeros(x.shape)) for name, x in SHARED.items()}), made

    apps = {node: counting(tmp_path) for node in (3, 4)}
    saved = tmp_path / "server.safetensors"
    strategy = Zeros(method, network(), checkpoint=saved)
    strategy.start(grid := local_grid(apps), ArrayRecord(WHOLE), num_rounds=2)
    first, *later = (from_record(message.content["arrays"]) for message in asked(grid)[::2])
    assert torch.equal(first["0.weight"], WHOLE["0.weight"])
    assert all(not x.any() for state in later for x in state.values())
    assert counts(apps[3]) == [0, 1, 1, 2]
    model = load_client_model(network(), saved, 3, folder=tmp_path)
    assert not model[0].weight.any()
    assert int(model[1].num_batches_tracked) == 2


def test_counters_of_a_subclass_are_rounded_and_nan_is_refused(local_grid):
    class Counts(MethodStrategy):
        def aggregate_train(self, server_round, replies):
            arrays, metrics = super().aggregate_train(server_round, replies)
            return ArrayRecord({**arrays, "1.num_batches_tracked": Array(np.array(self.value))}), metrics

    strategy = Counts(fs.fedavg(), network())
    strategy.value = 1.6
    strategy.start(grid := local_grid({3: adding(1), 4: adding(1)}), ArrayRecord(WHOLE), num_rounds=1)
    assert int(strategy.server.shared["1.num_batches_tracked"]) == 2
    strategy.value = np.nan
    with pytest.raises(FedshiftError, match=r"1\.num_batches_tracked' of arrays of round 1 .* holds NaN"):
        strategy.start(grid, ArrayRecord(), num_rounds=1)


def test_flowers_fedprox_and_ours_send_the_same(local_grid, tmp_path):
    app = ClientApp(mods=[keep_local(network(), folder=tmp_path)])

    @app.train()
    def train(message, context):
        mu, near = message.content["config"]["proximal-mu"], from_record(message.content["arrays"])
        pulled = {name: near[name] + x / (1 + mu) for name, x in WHOLE.items()}  # a proximal step
        state = {name: x.to(near[name].dtype) for name, x in pulled.items()}
        content = {"arrays": to_record(state), "metrics": MetricRecord({"num-examples": context.node_id})}
        return Message(RecordDict(content), reply_to=message)

    theirs = flower.FedProx(proximal_mu=0.5, fraction_evaluate=0.0)
    ours = MethodStrategy(fs.fedbn(fs.fedprox(mu=0.5)), network(), fraction_evaluate=0.0)
    run = [each.start(local_grid({3: app, 4: app}), ArrayRecord(WHOLE), num_rounds=3) for each in (theirs, ours)]
    torch.testing.assert_close(*(from_record(result.arrays) for result in run))


@pytest.mark.parametrize("place", ["app", "function", "both", "after", "function after"])
def test_other_mods_see_what_is_sent_or_are_refused(local_grid, tmp_path, place, said):  # noqa: F811
    """Local DP clips and noises what leaves the client, and neither BatchNorm nor counters."""
    keep, others = keep_local(network(), folder=tmp_path), [LocalDpMod(0.5, 0.0, 1.0, 0.1), arrays_size_mod]
    outer, inner = {
        "app": ([*others, keep], []), "function": ([], [*others, keep]), "both": (others, [keep]),
        "after": ([keep, *others], []), "function after": ([keep], others),
    }[place]  # fmt: skip
    app = ClientApp(mods=outer)

    @app.train(mods=inner)
    def train(message, context):
        state = {name: x + 1 for name, x in from_record(message.content["arrays"]).items()}
        assert state.keys() == WHOLE.keys()
        metrics = MetricRecord({"num-examples": 4})
        return Message(RecordDict({"arrays": to_record(state), "metrics": metrics}), reply_to=message)

    strategy = MethodStrategy(fs.fedbn(), network(), fraction_evaluate=0.0)
    run = partial(strategy.start, local_grid({3: app, 4: app}), ArrayRecord(WHOLE), num_rounds=1)
    if "after" in place:
        with pytest.raises(FedshiftError, match=r"would see what the client keeps.*list keep_local last"):
            run()
        return
    result = run()
    moved = torch.cat([(x - WHOLE[name]).flatten() for name, x in from_record(result.arrays).items()])
    torch.testing.assert_close(moved, torch.full_like(moved, 0.5 / len(moved) ** 0.5), rtol=1e-4, atol=1e-6)
    model = load_client_model(network(), result.arrays, 3, folder=tmp_path).state_dict()
    assert all(torch.equal(model[name], WHOLE[name] + 1) for name in BN)
    assert f"'elements': {len(moved)}, " in said()


def test_a_mod_after_keep_local_is_refused_however_flower_nests_mods():
    """Today in functions, tomorrow perhaps in partial objects or instances of a class."""

    class Call:
        def __call__(self, message, context):
            raise AssertionError

    Call.__module__ = Call.__call__.__module__ = "flwr.clientapp.client_app"
    for function in (Call(), Call().__call__, partial(Call.__call__, None)):
        with pytest.raises(UsageError, match="list keep_local last"):
            keep_local(network())(None, None, function)


class OwnStart(MethodStrategy):
    """A strategy with a loop and a schedule of its own, as in Flower's advanced-pytorch."""

    def configure_train(self, server_round, arrays, config, grid):
        config["lr"] = 1.0 / server_round
        return super().configure_train(server_round, arrays, config, grid)

    def start(self, grid, initial_arrays, num_rounds=3, evaluate_fn=None):
        arrays = initial_arrays
        for number in range(1, num_rounds + 1):
            replies = grid.send_and_receive(self.configure_train(number, arrays, ConfigRecord(), grid))
            arrays = self.aggregate_train(number, replies)[0] or arrays
            grid.send_and_receive(self.configure_evaluate(number, arrays, ConfigRecord(), grid))
        return arrays


def test_a_strategy_with_its_own_start_is_as_one_without(local_grid, tmp_path):
    initial, apps = ArrayRecord(WHOLE), {node: counting(tmp_path) for node in (3, 4)}
    found = OwnStart(fs.fedbn(), network()).start(grid := local_grid(apps), ArrayRecord(WHOLE), num_rounds=2)
    apps = {node: counting(tmp_path) for node in (3, 4)}
    usual = MethodStrategy(fs.fedbn(), network()).start(local_grid(apps), initial, num_rounds=2)
    assert found == usual.arrays
    assert initial == ArrayRecord(WHOLE)
    assert [message.content["config"]["lr"] for message in asked(grid)] == [1.0, 1.0, 0.5, 0.5]


def test_a_central_evaluation_is_refused_before_training(local_grid):
    def measure(server_round, arrays):
        network().load_state_dict(arrays.to_torch_state_dict())

    ours, own = MethodStrategy(fs.silobn(), network()), OwnStart(fs.silobn(), network())
    for strategy in (ours, flower.DifferentialPrivacyClientSideFixedClipping(ours, 1.0, 1.0, 2), own):
        grid = local_grid({3: adding(1), 4: adding(2)})
        with pytest.raises(UsageError, match="evaluate_fn needs a complete model on the server, and with 'silobn'"):
            strategy.start(grid, ArrayRecord(WHOLE), num_rounds=1, evaluate_fn=measure)
        assert not grid.seen
    strategy = MethodStrategy(fs.fedavg(), network(), fraction_evaluate=0.0)
    strategy.start(local_grid({3: adding(0), 4: adding(0)}), ArrayRecord(WHOLE), num_rounds=1, evaluate_fn=measure)


def test_predictable_noise_is_warned_of_once_with_epsilon(local_grid, said):  # noqa: F811
    strategy = MethodStrategy(fs.fedbn(fs.dp(noise_multiplier=2.0)), network(), fraction_evaluate=0.0)
    strategy.start(local_grid({3: adding(1), 4: adding(1)}), ArrayRecord(WHOLE), num_rounds=2)
    assert said("WARNING").count("who knows seed and method can subtract the noise") == 1
    assert re.search(r"\(epsilon = \d+\.\d+, delta = 1e-05\)-differentially .* of clients after 2 rounds", said())
    MethodStrategy(fs.fedbn(fs.dp(secret=True)), network()).summary()
    assert said("WARNING").count("subtract the noise") == 1
