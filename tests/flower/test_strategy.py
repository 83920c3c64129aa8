"""A method as Flower's strategy: what travels, how it is folded, and what is left out, by the node's number."""

import fedshift.flower  # noqa: F401  isort: skip

import logging
import math
import re
from dataclasses import replace

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fedshift import FedshiftError, UsageError, digits
from fedshift.core.method import Freeze
from fedshift.flower import MethodStrategy, prepare_model, transform_gradients_
from fedshift.flower.transport.arrays import from_record, to_record
from fedshift.methods.agc import _adaptive_clip_grad, agc
from fedshift.methods.ditto import ditto
from fedshift.methods.fedadam import fedadam
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.methods.fedmmb import fedmmb
from fedshift.methods.fednova import fednova
from fedshift.methods.fedprox import fedprox
from fedshift.methods.fedwon import fedwon
from fedshift.methods.gn import gn
from fedshift.methods.krum import krum
from fedshift.methods.median import median
from fedshift.methods.partialfed_fix import partialfed_fix
from fedshift.methods.scaffold import scaffold
from fedshift.methods.silobn import silobn
from fedshift.methods.single import single
from fedshift.methods.tuned import tuned


def network(dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2)).to(dtype)


def adding(amount, weight, change=lambda arrays: arrays):
    """A client that adds ``amount`` to all entries that came; ``change`` makes its arrays wrong."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        came = from_record(message.content["arrays"])
        state = {name: x + torch.tensor(amount).to(x.dtype) for name, x in came.items()}
        metrics = MetricRecord({"num-examples": weight, "loss": float(amount)})
        return Message(RecordDict({"arrays": to_record(change(state)), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        metrics = MetricRecord({"num-examples": weight, "accuracy": float(amount)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def started(grid, method, rounds=1, dtype=torch.float32, **options):
    """The strategy after ``rounds`` rounds, and Flower's result."""
    model = network(dtype)
    strategy = MethodStrategy(method, model, **{"wait": 0, **options})
    return strategy, strategy.start(grid, to_record(dict(model.state_dict())), num_rounds=rounds)


@pytest.fixture
def said(caplog):
    """Lines that Flower's logger gets; it does not hand them on by itself."""
    logger = logging.getLogger("flwr")
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, "flwr")
    yield lambda: "\n".join(record.getMessage() for record in caplog.records)
    logger.removeHandler(caplog.handler)


def test_fedavg_keeps_counters_integers_and_every_type(local_grid):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        grid = local_grid({7: adding(1, 3), 9: adding(4, 1)})
        _, result = started(grid, fedavg(), dtype=dtype)
        after, before = from_record(result.arrays), network(dtype).state_dict()
        assert after["1.num_batches_tracked"].dtype == torch.int64
        assert after["1.num_batches_tracked"] == round((3 * 1 + 1 * 4) / 4)
        for name, x in before.items():
            assert after[name].dtype == x.dtype
            if dtype == x.dtype:
                each = [(x + torch.tensor(amount).to(dtype)).double() for amount in (1, 4)]
                assert torch.allclose(after[name].double(), (3 * each[0] + each[1]) / 4, rtol=torch.finfo(dtype).eps)
        assert result.train_metrics_clientapp[1]["loss"] == pytest.approx(7 / 4)
        assert result.evaluate_metrics_clientapp[1]["accuracy"] == pytest.approx(7 / 4)


def test_only_the_scope_travels_whatever_initial_arrays_hold(local_grid, said):
    grid = local_grid({7: adding(1, 3), 9: adding(4, 1)})
    strategy, result = started(grid, fedbn(), rounds=2)
    assert set(grid.arrays()) == set(result.arrays) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert not any(b"running_mean" in wire for wire in grid.wire)
    assert "5 entries of initial_arrays are not sent" in said()
    assert strategy.server.round == 2
    _, result = started(grid := local_grid({7: adding(1, 3)}), silobn())
    assert set(result.arrays) == set(grid.arrays()) == set(network().state_dict()) - {
        "1.running_mean", "1.running_var", "1.num_batches_tracked",
    }  # fmt: skip


def test_the_order_of_arrival_changes_nothing(local_grid):
    clients = {node: adding(0.1 * node, node) for node in (3, 14, 15, 92)}
    backwards = dict(reversed(clients.items()))
    first, second = (started(local_grid(apps), fedadam(fedbn()), rounds=2)[1].arrays for apps in (clients, backwards))
    assert all(first[name].data == second[name].data for name in first)


def test_a_server_optimizer_and_robust_aggregation_are_the_kernels(local_grid):
    grid = local_grid({7: adding(1, 3), 8: adding(2, 3), 9: adding(99, 1)})
    model = network()
    _, result = started(grid, median(fedbn()), min_clients=3)
    assert torch.equal(from_record(result.arrays)["3.bias"], model.state_dict()["3.bias"] + 2)
    strategy, result = started(local_grid({7: adding(1, 3)}), fedadam(fedbn(), lr=0.1))
    adam = strategy.plan.method.server
    moved = (1 - adam.beta1) / (math.sqrt(adam.beta2 * adam.tau**2 + 1 - adam.beta2) + adam.tau)
    assert torch.allclose(from_record(result.arrays)["3.bias"], model.state_dict()["3.bias"] + 0.1 * moved)


def wrong(name, value):
    return lambda state: state | {name: value}


@pytest.mark.parametrize(
    ("weight", "change", "why"),
    [
        (1, wrong("0.bias", torch.tensor([1, torch.nan])), "entry '0.bias' of the upload holds NaN"),
        (1, wrong("0.bias", torch.ones(3)), r"has shape \(3,\) in place of \(2,\)"),
        (1, wrong("0.bias", torch.ones(2).double()), "has type torch.float64"),
        (1, wrong("other", torch.ones(2)), "an entry 'other', which does not belong"),
        (1, lambda state: {"0.bias": state["0.bias"]}, "the upload lacks entry"),
        (1, wrong("1.running_mean", torch.ones(2)), "that fedbn keeps on clients.*keep_local"),
        (0, dict, "number of samples"),
        (-4, dict, "number of samples"),
        (1e30, dict, "number of samples"),
        (101, dict, "from 1 to 100"),
        (math.nan, dict, "number of samples"),
        ([1, 2], dict, "one with the number 'num-examples'"),
    ],
)
def test_what_does_not_fit_is_left_out_and_the_round_goes_on(local_grid, said, weight, change, why):
    grid = local_grid({7: adding(1, 3), 9: adding(5, weight, change)})
    _, result = started(grid, fedbn(), most_examples=100)
    alone = started(local_grid({7: adding(1, 3)}), fedbn())[1]
    assert all(result.arrays[name].data == alone.arrays[name].data for name in alone.arrays)
    line = next(line for line in said().splitlines() if "node 9 is left out" in line)
    assert re.search(why, line), line


def test_errors_silence_repetition_and_old_rounds_are_told_by_node(local_grid, said):
    failing = ClientApp()

    @failing.train()
    def train(message, context):
        raise RuntimeError("the scanner is off")

    old = []

    def tamper(reply):
        if reply.has_content() and reply.metadata.src_node_id == 5:
            old.append(reply)
            return old[0]  # the first round's answer, again and again
        return reply

    grid = local_grid({5: adding(1, 2), 7: adding(1, 3), 8: failing, 9: adding(1, 1)})
    grid.tamper, grid.silent = tamper, {9}
    strategy, _ = started(grid, fedavg(), rounds=2, evaluate=False)
    assert "the reply of node 8 is left out: it failed: <class 'RuntimeError'>:<'the scanner is off'>" in said()
    assert "round 1: node 9 did not answer" in said()
    assert "round 2: the reply of node 5 is left out: it answers nothing that was asked in this round" in said()
    assert strategy.server.round == 2


def test_an_answer_that_names_another_round_is_left_out(local_grid, said):
    grid = local_grid({5: adding(1, 2), 7: adding(1, 3)})

    def tamper(reply):
        if reply.metadata.src_node_id == 5:
            reply.metadata.__dict__["_group_id"] = "12"
        return reply

    grid.tamper = tamper
    started(grid, fedavg(), evaluate=False)
    assert "the reply of node 5 is left out: it answers round 12" in said()


def test_a_round_with_too_few_changes_nothing_and_is_asked_for_again(local_grid, said):
    grid = local_grid({7: adding(1, 3), 9: adding(1, 3)})
    grid.silent = {9}
    strategy, result = started(grid, fedbn(), rounds=2, min_clients=2)
    assert strategy.server.round == 0
    assert "1 replies can be used, of 2 needed (min_clients): it changes nothing" in said()
    before = network().state_dict()
    assert all(torch.equal(x, before[name]) for name, x in from_record(result.arrays).items())
    done = [m.content["config"]["fedshift-rounds-done"] for m in grid.seen if "config" in m.content]
    assert done == [0] * len(done)


def test_clients_that_all_leak_stop_the_run(local_grid):
    app = adding(1, 3, lambda state: state | network().state_dict())
    with pytest.raises(FedshiftError, match="that fedbn keeps on clients: give the ClientApp the mod"):
        started(local_grid({7: app, 9: app}), fedbn())


def test_too_few_nodes_are_not_waited_for_for_ever(local_grid):
    with pytest.raises(FedshiftError, match=r"after 0 seconds 1 nodes are connected, of 3 needed.*min_clients"):
        started(local_grid({7: adding(1, 1)}), fedavg(), min_clients=3)


def test_participation_is_drawn_from_keyed_streams_and_at_least_what_a_round_needs(local_grid):
    def asked(**options):
        grid = local_grid({node: adding(1, 1) for node in range(10, 30)})
        started(grid, fedavg(), rounds=4, evaluate=False, **options)
        found = {}
        for message in grid.seen:
            if "config" in message.content:
                found.setdefault(message.content["config"]["server-round"], set()).add(message.metadata.dst_node_id)
        return found

    first = asked(participation=0.3)
    assert first == asked(participation=0.3) != asked(participation=0.3, seed=1)
    assert [len(nodes) for nodes in first.values()] == [6] * 4
    assert len(set(map(frozenset, first.values()))) > 1
    assert [len(nodes) for nodes in asked(participation=2, min_clients=5).values()] == [5] * 4


def test_evaluation_is_asked_of_clients_that_have_a_model(local_grid):
    grid = local_grid({7: adding(1, 1), 8: adding(1, 1), 9: adding(1, 1)})
    started(grid, fedbn(), participation=1)
    kinds = [(m.metadata.message_type, m.metadata.dst_node_id) for m in grid.seen if "config" in m.content]
    trained = next(node for kind, node in kinds if kind == "train")
    assert [node for kind, node in kinds if kind == "evaluate"] == [trained]
    started(grid := local_grid({7: adding(1, 1), 9: adding(1, 1)}), fedavg(), participation=1, evaluate=False)
    assert {m.metadata.message_type for m in grid.seen} == {"train"}


def test_metrics_that_differ_are_not_averaged_and_stop_nothing(local_grid, said):
    app = ClientApp()

    @app.train()
    def train(message, context):
        metrics = MetricRecord({"num-examples": 1, "loss": [1.0, 2.0]})
        return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)

    strategy, result = started(local_grid({7: adding(1, 1), 9: app}), fedavg(), evaluate=False)
    assert (strategy.server.round, result.train_metrics_clientapp) == (1, {})
    assert "metrics are not averaged" in said()


def test_going_on_from_an_earlier_server_is_as_if_it_never_stopped(local_grid):
    clients = {node: adding(0.1 * node, node) for node in (3, 14, 15)}
    whole, _ = started(local_grid(clients), fedadam(fedbn()), rounds=3, participation=2)
    half, _ = started(local_grid(clients), fedadam(fedbn()), rounds=1, participation=2)
    rest, _ = started(local_grid(clients), fedadam(fedbn()), rounds=2, participation=2, server=half.server)
    assert rest.server.round == whole.server.round == 3
    assert all(torch.equal(x, rest.server.shared[name]) for name, x in whole.server.shared.items())
    assert all(torch.equal(x, rest.server.optimizer[name]) for name, x in whole.server.optimizer.items())
    with pytest.raises(FedshiftError, match="the server to go on from lacks entry"):
        MethodStrategy(fedavg(), network(), server=half.server)


def test_initial_arrays_of_another_model_are_refused(local_grid):
    strategy = MethodStrategy(fedbn(), network(), wait=0)
    with pytest.raises(FedshiftError, match=r"initial_arrays lacks entry.*ArrayRecord\(model.state_dict"):
        strategy.start(local_grid({7: adding(1, 1)}), ArrayRecord({"w": to_record({"w": torch.ones(1)})["w"]}))


@pytest.mark.parametrize(
    ("method", "why"),
    [
        (ditto(), r"changes the training loop by a rule \(ditto\).*fedshift serve"),
        (fedbn(scaffold()), r"changes the training loop by a rule \(scaffold\)"),
        (fedmmb(batches=5), "sets the local work"),
        (tuned(lr=0.1), "sets the local optimizer"),
        (fednova(), "counts local steps"),
        (replace(fedavg(), freeze=Freeze(after=2)), "freezes statistics"),
        (replace(fedavg(), pooled="same"), "all data in one place"),
        (single(), "sends nothing"),
        (fedwon(), "differ in surgery"),
        (krum(num_malicious=1), "needs at least 5 clients"),
    ],
)
def test_methods_that_an_apps_own_loop_cannot_carry_out_are_refused(method, why):
    with pytest.raises(UsageError, match=why):
        MethodStrategy(method, network(), min_clients=2)


def test_tied_entries_and_absurd_numbers_are_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    with pytest.raises(UsageError, match=r"'1\.weight' of the model is a second name"):
        MethodStrategy(fedavg(), model)
    with pytest.raises(UsageError, match="min_clients=0"):
        MethodStrategy(fedavg(), network(), min_clients=0)
    with pytest.raises(UsageError, match=r"participation=2\.5"):
        MethodStrategy(fedavg(), network(), participation=2.5)


def test_surgery_is_done_on_both_sides_by_one_function(local_grid, said):
    model = prepare_model(gn(), network())
    assert [type(layer) for layer in model][1] is nn.GroupNorm
    with pytest.raises(UsageError, match="differ in surgery"):
        MethodStrategy(fedavg(), model)
    strategy = MethodStrategy(gn(), model, wait=0)
    grid = local_grid({7: adding(1, 1), 9: adding(1, 1, lambda state: state | network().state_dict())})
    result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=1)
    assert set(result.arrays) == set(model.state_dict())
    assert "node 9 is left out: the upload has an entry '1." in said()


def test_fedwon_in_a_loop_of_ones_own_clips_as_the_kernel_does(said):
    method = fedwon(agc=0.01)
    model = prepare_model(method, network())
    x = digits(size=8).clients[0].train.inputs(slice(0, 4), torch.float32)[:, :1, :4, :4]
    nn.functional.cross_entropy(model(x), torch.tensor([0, 1, 0, 1])).backward()
    before = {name: param.grad.clone() for name, param in model.named_parameters()}
    transform_gradients_(method, model)
    clipped = {name: param.grad for name, param in model.named_parameters()}
    expected = {
        name: _adaptive_clip_grad(grad, dict(model.named_parameters())[name], 0.01) for name, grad in before.items()
    }
    assert all(torch.equal(clipped[name], expected[name].detach()) for name in before)
    assert any(not torch.equal(clipped[name], before[name]) for name in before)
    MethodStrategy(method, model).summary()
    assert "Each client's loop calls fedshift.flower.transform_gradients_" in said()
    assert MethodStrategy(agc(), network()).plan.personal == frozenset()
    transform_gradients_(fedbn(), network())  # says nothing of gradients, and there are none


def test_fedprox_in_a_loop_of_ones_own_is_autograds_and_leaves_kept_entries_alone():
    model, method = network(torch.float64), fedbn(fedprox(mu=0.5))
    received = {name: param.detach().clone() for name, param in model.named_parameters()}
    x = torch.randn(4, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for param in model.parameters():
            param += 0.1
    nn.functional.cross_entropy(model(x), torch.tensor([0, 1, 0, 1])).backward()
    transform_gradients_(method, model, received)
    found = {name: param.grad.clone() for name, param in model.named_parameters()}
    model.zero_grad()
    near = sum((param - received[name]).square().sum() for name, param in model.named_parameters() if name[0] != "1")
    (nn.functional.cross_entropy(model(x), torch.tensor([0, 1, 0, 1])) + 0.25 * near).backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(found[name], param.grad, rtol=1e-12, atol=1e-12)
    assert MethodStrategy(method, model).plan.personal


@pytest.mark.parametrize(
    ("received", "why"),
    [
        (lambda model: None, "fedprox needs the parameters that the client received: give received="),
        (lambda model: dict(model.named_parameters()), "received holds the model's own '0.weight'"),
        (lambda model: {}, "received lacks the parameter '0.weight'"),
    ],
)
def test_what_fedprox_is_to_hold_near_is_asked_for(received, why):
    model = network()
    model(torch.ones(2, 1, 4, 4)).sum().backward()
    with pytest.raises(UsageError, match=why):
        transform_gradients_(fedprox(), model, received(model))


def test_entries_that_are_sent_but_not_loaded_do_not_go_down(local_grid):
    grid = local_grid({7: adding(1, 1, lambda state: network().state_dict() | state)})
    _, result = started(grid, partialfed_fix(layers="batch_norm"), evaluate=False)
    down, up = grid.seen
    assert set(down.content["arrays"]) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert set(up.content["arrays"]) == set(result.arrays) == set(network().state_dict())
    assert isinstance(down.content["config"], ConfigRecord)
