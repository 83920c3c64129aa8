"""A method as Flower's strategy: what travels, how it is folded, and what is left out, by the node's number."""

import fedshift.flower  # isort: skip  (before anything of flwr)

import logging
import math
import random
import re
from dataclasses import replace
from functools import partial
from itertools import count

import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

import fedshift as fs
from fedshift import FedshiftError, UsageError
from fedshift.flower import MethodStrategy, keep_local, prepare_model, transform_gradients_
from fedshift.flower.messages import from_record, to_record
from fedshift.methods.agc import _adaptive_clip_grad, agc
from fedshift.utils.state import is_equal

FEW = {"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1}


def network(features=2, dtype=torch.float32):
    torch.manual_seed(1)
    layers = nn.Conv2d(1, features, 3), nn.BatchNorm2d(features), nn.Flatten(), nn.Linear(4 * features, 2)
    return nn.Sequential(*layers).to(dtype)


WHOLE = network().state_dict()
BN = {"1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"}
SHARED = {name: x for name, x in WHOLE.items() if name not in BN}


def adding(amount, weight=4, change=lambda arrays: arrays, mods=()):
    """A client that adds ``amount`` to all entries that came; ``change`` makes its arrays wrong."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message, context):
        came = from_record(message.content["arrays"])
        state = {name: x + torch.tensor(amount).to(x.dtype) for name, x in came.items()}
        metrics = MetricRecord({"num-examples": weight, "loss": float(amount), "norm": amount})
        return Message(RecordDict({"arrays": to_record(change(state)), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        metrics = MetricRecord({"num-examples": weight, "accuracy": float(amount), "norm": amount})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def started(grid, method, rounds=1, dtype=torch.float32, **options):
    """The strategy after ``rounds`` rounds, and Flower's result."""
    strategy = MethodStrategy(method, model := network(dtype=dtype), **(FEW | options))
    return strategy, strategy.start(grid, to_record(model.state_dict()), num_rounds=rounds)


def asked(grid, kind="train"):
    """The server's messages of one kind, in their order."""
    return [m for m in grid.seen if m.metadata.message_type == kind and {"config", "settings"} & m.content.keys()]


@pytest.fixture
def said(caplog):
    """Lines that Flower's logger gets; it does not hand them on by itself."""
    logger = logging.getLogger("flwr")
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, "flwr")
    yield lambda level="": "\n".join(r.getMessage() for r in dict.fromkeys(caplog.records) if level in r.levelname)
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_fedavg_keeps_counters_integers_and_every_type(local_grid, dtype):
    _, result = started(local_grid({7: adding(1, 3), 9: adding(4, 1)}), fs.fedavg(), dtype=dtype)
    after = from_record(result.arrays)
    assert (after["1.num_batches_tracked"].dtype, int(after["1.num_batches_tracked"])) == (torch.int64, round(7 / 4))
    for name, x in network(dtype=dtype).state_dict().items():
        assert after[name].dtype == x.dtype
        one, four = ((x + torch.tensor(amount).to(x.dtype)).double() for amount in (1, 4))
        if dtype == x.dtype:
            assert torch.allclose(after[name].double(), (3 * one + four) / 4, rtol=torch.finfo(dtype).eps)
    assert result.train_metrics_clientapp[1]["loss"] == pytest.approx(7 / 4)
    assert result.evaluate_metrics_clientapp[1]["accuracy"] == pytest.approx(7 / 4)


def test_only_the_scope_travels_whatever_initial_arrays_hold(local_grid, said):
    strategy, result = started(grid := local_grid({7: adding(1, 3), 9: adding(4, 1)}), fs.fedbn(), rounds=2)
    assert set(grid.arrays()) == set(result.arrays) == set(SHARED)
    assert "5 entries of initial_arrays become the clients' own" in said()
    assert strategy.server.round == 2
    _, result = started(grid := local_grid({7: adding(1, 3)}), fs.silobn())
    assert set(result.arrays) == set(grid.arrays()) == set(SHARED) | {"1.weight", "1.bias"}


def test_the_order_of_arrival_changes_nothing(local_grid):
    apps, order = {node: adding(0.1 * node, node) for node in (3, 14, 15, 92)}, random.Random(0)
    grids = local_grid(apps), local_grid(apps)
    grids[1].send_and_receive = lambda *args, **options: order.sample(replies := arrive(*args, **options), len(replies))
    arrive = partial(local_grid.send_and_receive, grids[1])
    listed = {
        "train_metrics_aggr_fn": lambda contents, _: MetricRecord({"all": [c["metrics"]["norm"] for c in contents]})
    }
    first, second = (started(grid, fs.fedadam(fs.fedbn()), rounds=2, **listed)[1] for grid in grids)
    assert all(first.arrays[name].data == second.arrays[name].data for name in SHARED)
    assert first.train_metrics_clientapp == second.train_metrics_clientapp


def test_a_server_optimizer_and_robust_aggregation_are_the_kernels(local_grid):
    grid = local_grid({7: adding(1, 3), 8: adding(2, 3), 9: adding(99, 1)})
    _, result = started(grid, fs.median(fs.fedbn()), min_train_nodes=3)
    assert torch.equal(from_record(result.arrays)["3.bias"], WHOLE["3.bias"] + 2)
    strategy, result = started(local_grid({7: adding(1, 3)}), fs.fedadam(fs.fedbn(), lr=0.1))
    adam = strategy.plan.method.stepper
    moved = (1 - adam.beta1) / (math.sqrt(adam.beta2 * adam.tau**2 + 1 - adam.beta2) + adam.tau)
    assert torch.allclose(from_record(result.arrays)["3.bias"], WHOLE["3.bias"] + 0.1 * moved)


@pytest.mark.parametrize(
    ("weight", "change", "why"),
    [
        (1, {"0.bias": torch.tensor([1, torch.nan])}, "entry '0.bias' of the upload holds NaN"),
        (1, {"0.bias": torch.ones(3)}, r"has shape \(3,\) in place of \(2,\)"),
        (1, {"0.bias": torch.ones(2).double()}, "has type torch.float64"),
        (1, {"other": torch.ones(2)}, "an entry 'other', which does not belong"),
        (1, None, "the upload lacks entry"),
        (1, {"1.running_mean": torch.ones(2)}, "that fedbn keeps on clients.*keep_local"),
        *((weight, {}, "number of samples, whole and from 1 to 100") for weight in (0, -4, 1e30, 101, 1.5, math.nan)),
        ([1, 2], {}, r"its metrics \['loss', 'norm', 'num-examples'\] lack the number 'num-examples'"),
    ],
)
def test_what_does_not_fit_is_left_out_and_the_round_goes_on(local_grid, said, weight, change, why):
    wrong = adding(5, weight, lambda state: {} if change is None else state | change)
    grid = local_grid({7: adding(1, 3), 9: wrong})
    _, result = started(grid, fs.fedbn(), most_examples=100)
    alone = started(local_grid({7: adding(1, 3)}), fs.fedbn())[1]
    assert all(result.arrays[name].data == alone.arrays[name].data for name in alone.arrays)
    line = next(line for line in said().splitlines() if "node 9 is left out" in line)
    assert re.search(why, line), line


def test_errors_silence_and_repetition_are_told_by_node_once(local_grid, said):
    failing, old = ClientApp(), []

    @failing.train()
    def train(message, context):
        raise RuntimeError("the scanner is off")

    def tamper(reply):
        if reply.has_content() and reply.metadata.src_node_id == 5:
            old.append(reply)
            return old[0]  # the first round's answer, again and again
        return reply

    numpy = ClientApp(client_fn=lambda context: NumPyClient().to_client())
    grid = local_grid({5: adding(1, 2), 7: adding(1, 3), 8: failing, 9: adding(1, 1), 10: numpy})
    grid.tamper, grid.silent = tamper, {9}
    strategy, _ = started(grid, fs.fedavg(), rounds=2, fraction_evaluate=0.0)
    assert "the reply of node 8 is left out: it failed: <class 'RuntimeError'>:<'the scanner is off'>" in said()
    assert re.search(r"node 10 is left out: it failed: .*; NumPyClient is not supported: use @app\.train\(\)", said())
    assert "the reply of node 5 is left out: it answers nothing that was asked in this round" in said()
    assert "node 9 is left out: it did not answer" in said("WARNING")
    assert said("INFO").count("is left out: it did not answer") == 2  # nodes 5 and 9 in round 2
    assert strategy.server.round == 2


def test_a_later_round_with_too_few_changes_nothing_and_is_asked_for_again(local_grid, said):
    grid = local_grid({7: adding(1, 3), 9: adding(1, 3)})
    replies = count()
    grid.tamper = lambda reply: None if next(replies) == 2 else reply  # the first of round 2
    strategy, _ = started(grid, fs.fedbn(), rounds=3, min_train_nodes=2, fraction_evaluate=0.0)
    assert "round 2 changes nothing: 1 replies can be used, of 2 needed (min_train_nodes); the reply of node" in said()
    done = [message.content["config"]["fedshift-rounds"][0] for message in asked(grid)]
    assert (done, strategy.server.round) == ([0, 0, 1, 1, 1, 1], 2)


def test_a_first_round_without_effect_ends_the_run(local_grid):
    app = adding(1, 3, lambda state: state | WHOLE)
    with pytest.raises(FedshiftError, match=r"first round changed nothing: 0 .* that fedbn keeps on .*: give the Clie"):
        started(local_grid({7: app, 9: app}), fs.fedbn())
    grid = local_grid({7: adding(1, 3), 9: adding(1, 3)})
    grid.silent = {9}
    with pytest.raises(FedshiftError, match=r"first round changed nothing: 1 .* of 2 needed .* 9 .* did not answer"):
        started(grid, fs.fedbn(), min_train_nodes=2, fraction_evaluate=0.0)


@pytest.mark.parametrize(("method", "measured"), [(fs.fedbn(), 2), (fs.fedavg(), 5)], ids=["fedbn", "fedavg"])
def test_evaluation_is_asked_of_clients_that_have_a_model(local_grid, method, measured):
    grid = local_grid({node: adding(1, 1) for node in range(7, 17)})
    started(grid, method, fraction_train=0.4, fraction_evaluate=0.5)
    trained, tested = ({m.metadata.dst_node_id for m in asked(grid, kind)} for kind in ("train", "evaluate"))
    assert (len(trained), len(tested)) == (4, measured)
    assert tested <= trained or measured == 5


def test_metrics_that_differ_are_named_and_the_others_averaged(local_grid, said):
    app = ClientApp()

    @app.train()
    def train(message, context):
        metrics = MetricRecord({"num-examples": 3, "loss": [1.0, 2.0], "norm": 4.0, "other": 1})
        return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)

    grid = local_grid({7: adding(1, 1), 9: app, 8: app})
    strategy, result = started(grid, fs.fedavg(), rounds=2, fraction_evaluate=0.0)
    assert (strategy.server.round, dict(result.train_metrics_clientapp[1])) == (2, {"norm": pytest.approx(25 / 7)})
    assert said("WARNING").count("metric 'other' is left out: not all nodes report 'other', or in several lengths") == 1
    assert "metric 'loss' is left out" in said()


def test_arguments_of_fedavg_mean_the_same(local_grid, said):
    """Next to FedAvg itself, with other keys of records and weights and functions for metrics."""

    def total(contents, key):
        return MetricRecord({"sum": sum(content["metrics"][key] for content in contents)})

    keys = {"weighted_by_key": "norm", "configrecord_key": "settings"}
    options = {**keys, "train_metrics_aggr_fn": total, "evaluate_metrics_aggr_fn": total, "fraction_evaluate": 0.5}
    apps = {node: adding(node, 1) for node in (7, 8, 9, 10)}
    ours = started(grid := local_grid(apps), fs.fedavg(), **options, min_evaluate_nodes=1)[1]
    theirs = FedAvg(**options, min_evaluate_nodes=1).start(local_grid(apps), to_record(WHOLE), num_rounds=1)
    after, expected = from_record(ours.arrays), from_record(theirs.arrays)
    assert after.pop("1.num_batches_tracked") == expected.pop("1.num_batches_tracked").round()
    torch.testing.assert_close(after, expected)
    assert ours.train_metrics_clientapp == theirs.train_metrics_clientapp == {1: {"sum": 34}}
    assert set(grid.seen[0].content) == {"arrays", "settings"}
    assert len(asked(grid, "evaluate")) == 2
    started(grid := local_grid(apps), fs.fedavg(), fraction_train=0.0, rounds=2)
    assert (len(asked(grid)), len(asked(grid, "evaluate")), "left out" in said()) == (0, 8, False)


def test_a_saved_server_goes_on_as_if_it_never_stopped(local_grid, tmp_path):
    clients = {node: adding(0.1 * node, node) for node in (3, 14, 15)}
    method, options = fs.fedadam(fs.fedbn()), {"checkpoint": tmp_path / "new" / "server.safetensors"}
    whole, _ = started(local_grid(clients), method, rounds=3)
    first, _ = started(local_grid(clients), method, rounds=1, **options)
    rest, _ = started(local_grid(clients), method, rounds=2, **options)
    assert rest.server.round == whole.server.round == 3
    assert (rest._finished, rest.experiment) == (whole._finished, first.experiment)
    assert all(torch.equal(x, rest.server.shared[name]) for name, x in whole.server.shared.items())
    assert all(map(is_equal, rest.server.kept, whole.server.kept))
    started(grid := local_grid(clients | {16: adding(0, 1)}), method, **options)
    new = [m.metadata.dst_node_id for m in asked(grid) if "fedshift-first-entries" in m.content["config"]]
    assert new == [16]
    with pytest.raises(UsageError, match="begun with another method"):
        MethodStrategy(fs.fedavg(), network(), **options)
    with pytest.raises(FedshiftError, match=r"server\.safetensors .*name another file.* has shape"):
        MethodStrategy(method, network(3), **options)


@pytest.mark.parametrize(
    ("method", "why"),
    [
        (fs.fedbn(fs.scaffold()), "method 'fedbn.scaffold' sets rules = scaffold, .*fedshift serve"),
        (fs.fedmmb(batches=5), "sets work = {'batches': 5"),
        (fs.tuned(lr=0.1), "sets optimizer = {'lr': 0.1"),
        (fs.fednova(), "sets rules = fednova, which is not possible"),
        (replace(fs.fedavg(), freeze=2), "freeze = 2"),
        (replace(fs.fedavg(), pooled="same"), "pooled = same"),
        (fs.single(), "sends nothing"),
        (fs.fedcac(), "its own mix of uploads, and a Flower node that restarts has another number"),
        (fs.fedwon(), "differ in surgery"),
        (fs.krum(num_malicious=1), "needs at least 5 clients"),
    ],
)
def test_methods_that_an_apps_own_loop_cannot_carry_out_are_refused(method, why):
    with pytest.raises(UsageError, match=why):
        MethodStrategy(method, network(), min_train_nodes=2)


def test_models_and_numbers_that_do_not_fit_are_refused(local_grid):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    with pytest.raises(UsageError, match=r"'1\.weight'.* a second name"):
        MethodStrategy(fs.fedavg(), model)
    with pytest.raises(UsageError, match=r"fraction_evaluate=2\.5"):
        MethodStrategy(fs.fedavg(), network(), fraction_evaluate=2.5)
    for call in (MethodStrategy, prepare_model, transform_gradients_, lambda method, model: keep_local(model, method)):
        with pytest.raises(UsageError, match=r"the method is 'fedbn': give an expression, such as fedshift\.fedbn\("):
            call("fedbn", network())
    with pytest.raises(UsageError, match=r"the model is <class .*give the app's torch\.nn\.Module"):
        MethodStrategy(fs.fedbn(), nn.Linear)
    with pytest.raises(FedshiftError, match=r"arrays of round 1 .*ArrayRecord\(model.state_dict.* lacks entry"):
        MethodStrategy(fs.fedbn(), network(), **FEW).start(local_grid({7: adding(1)}), to_record({"w": torch.ones(1)}))


def test_surgery_is_done_on_both_sides_by_one_function(local_grid, said):
    model = prepare_model(fs.gn(), network())
    assert [type(layer) for layer in model][1] is nn.GroupNorm
    with pytest.raises(UsageError, match="differ in surgery"):
        MethodStrategy(fs.fedavg(), model)
    strategy = MethodStrategy(fs.gn(), model, **FEW)
    grid = local_grid({7: adding(1, 1), 9: adding(1, 1, lambda state: state | WHOLE)})
    result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=1)
    assert set(result.arrays) == set(model.state_dict())
    assert "node 9 is left out: the upload has an entry '1." in said()


def test_fedwon_in_a_loop_of_ones_own_clips_as_the_kernel_does(said):
    method = fs.fedwon(agc=0.01)
    model = prepare_model(method, network())
    x = fs.digits(size=8).clients[0].train.inputs(slice(0, 4), torch.float32)[:, :1, :4, :4]
    nn.functional.cross_entropy(model(x), torch.tensor([0, 1, 0, 1])).backward()
    before = {name: param.grad.clone() for name, param in model.named_parameters()}
    transform_gradients_(method, model)
    for name, param in model.named_parameters():
        assert torch.equal(param.grad, _adaptive_clip_grad(before[name], param, 0.01).detach())
    assert any(not torch.equal(param.grad, before[name]) for name, param in model.named_parameters())
    MethodStrategy(method, model).summary()
    assert "and its loop calls fedshift.flower.transform_gradients_" in said()
    assert MethodStrategy(agc(), network()).plan.personal == frozenset()
    transform_gradients_(fs.fedbn(), network())  # says nothing of gradients, and there are none


def test_fedprox_in_a_loop_of_ones_own_is_autograds_and_leaves_kept_entries_alone():
    model, method = network(dtype=torch.float64), fs.fedbn(fs.fedprox(mu=0.5))
    received = {name: param.detach().clone() for name, param in model.named_parameters()}
    x = torch.randn(4, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for param in model.parameters():
        param.data += 0.1
    nn.functional.cross_entropy(model(x), torch.tensor([0, 1, 0, 1])).backward()
    transform_gradients_(method, model, received)
    found = {name: param.grad.clone() for name, param in model.named_parameters()}
    model.zero_grad()
    near = sum((param - received[name]).square().sum() for name, param in model.named_parameters() if name[0] != "1")
    (nn.functional.cross_entropy(model(x), torch.tensor([0, 1, 0, 1])) + 0.25 * near).backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(found[name], param.grad, rtol=1e-12, atol=1e-12)
    transform_gradients_(fs.fedbn(), model)  # another method, which changes nothing
    assert MethodStrategy(method, model).plan.personal


def test_fedprox_asks_for_copies_of_the_parameters():
    model, why = network(), r"fedprox needs a copy of '0\.weight' as the client received it: before training"
    model(torch.ones(2, 1, 4, 4)).sum().backward()
    for received in (None, {}, dict(model.named_parameters())):
        with pytest.raises(UsageError, match=why):
            transform_gradients_(fs.fedprox(), model, received)
