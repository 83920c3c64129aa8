"""Entries of a client: they come back after a restart, a lost round and a repeated one, and are never made up."""

import fedshift.flower  # isort: skip  (before anything of flwr)

import re
import shutil
from functools import partial

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

import fedshift as fs
from fedshift import FedshiftError, UsageError
from fedshift.flower import MethodStrategy, keep_local, list_local_entries, load_client_model
from fedshift.flower.messages import from_record, to_record
from fedshift.results.checkpoint import load_checkpoint

from .test_strategy import BN, SHARED, WHOLE, network, started

pytestmark = pytest.mark.usefixtures("local_grid")
start = partial(started, method=fs.fedbn())
COUNT = "1.num_batches_tracked"


def counting(folder, method=None, model=None):
    """A client that adds 1 to every entry of the model that it gets; ``came`` collects those models."""
    app = ClientApp(mods=[keep_local(model or network(), method, folder=folder)])
    app.came = []

    def model_of(message):
        state = from_record(message.content["arrays"])
        (model or network()).load_state_dict(state)  # whole and in order
        app.came.append(state)
        return state

    @app.train()
    def train(message, context):
        state = {name: x + 1 for name, x in model_of(message).items()}
        metrics = MetricRecord({"num-examples": 2})
        return Message(RecordDict({"arrays": to_record(state), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        arrays = to_record(model_of(message))
        return Message(RecordDict({"spilled": arrays, "m": MetricRecord({"num-examples": 1})}), reply_to=message)

    @app.query()
    def query(message, context):
        return Message(RecordDict({"spilled": ArrayRecord(WHOLE)}), reply_to=message)

    return app


def counts(app):
    """The batches that the normalization of ``app`` had counted when it was trained or evaluated, in turn."""
    return [int(state[COUNT]) for state in app.came]


def errors(grid):
    return [message.error.reason for message in grid.seen if message.has_error()]


def asked(app, round, kind="train", node={"name": "ward/../7"}, number=7, **more):  # noqa: B006
    """The reply of ``app`` to a message of Flower's own shape, with ``more`` in its configuration."""
    config = ConfigRecord({"server-round": round} | more)
    content = RecordDict({"arrays": ArrayRecord(WHOLE), "config": config})
    return app(Message(content, 7, kind), Context(1, number, node, RecordDict(), {}))


def test_names_are_found_by_type():
    methods = None, fs.silobn(), fs.fedper(), fs.fedavg()
    kept = BN, BN - {"1.weight", "1.bias"}, {"3.weight", "3.bias"}, set()
    assert tuple(list_local_entries(network(), method) for method in methods) == kept
    with pytest.raises(UsageError, match="batch_norm matches no entry"):
        list_local_entries(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="scaffold"):
        keep_local(network(), fs.fedbn(fs.scaffold()))


def test_a_restarted_node_finds_its_entries_again_whatever_its_number(local_grid, tmp_path):
    """Also after a restart of the server, whose checkpoint names the folder."""
    for node, rounds in ((3, 2), (99, 1)):
        grid = local_grid({node: counting(tmp_path)})
        grid.names[node] = "ward"
        start(grid, rounds=rounds, checkpoint=tmp_path / "server")
    assert counts(grid.apps[99]) == [2, 3]


def test_two_nodes_of_one_name_do_not_take_each_others_entries(local_grid, tmp_path):
    grid = local_grid({3: counting(tmp_path), 4: counting(tmp_path)})
    grid.names |= {3: "ward", 4: "ward"}
    strategy, _ = start(grid, rounds=2)
    assert len(errors(grid)) == 2  # of training; neither is asked to evaluate what it did not train
    assert all(f"client 'ward' ({tmp_path}" in reason for reason in errors(grid))
    assert all(re.search("two nodes, (3 and 4|4 and 3), which", reason) for reason in errors(grid))
    assert strategy.server.round == 2
    slow = ClientApp(mods=[keep_local(network(), folder=tmp_path)])

    @slow.train()
    def train(message, context):
        asked(counting(tmp_path), 1, number=8)  # the other is done meanwhile
        return Message(RecordDict({"arrays": ArrayRecord(WHOLE)}), reply_to=message)

    with pytest.raises(FedshiftError, match="two nodes, 8 and 7"):
        asked(slow, 1)


def test_a_round_that_is_asked_for_again_starts_from_what_was_before_it(local_grid, tmp_path):
    apps = {3: counting(tmp_path), 4: counting(tmp_path)}
    strategy, _ = start(grid := local_grid(apps), rounds=1, min_train_nodes=2)
    for grid.silent in ({4}, set()):  # too few in round 2, which does not count
        strategy.start(grid, ArrayRecord(), num_rounds=1)
    assert counts(apps[3]) == [0, 1, 1, 1, 1, 2]  # train, test; train, test of the failed round; train, test


def test_lost_and_outdated_entries_are_named_and_not_made_up(local_grid, tmp_path):
    grid, saved = local_grid({3: counting(tmp_path), 4: counting(tmp_path)}), tmp_path / "server"
    strategy, _ = start(grid, rounds=2, checkpoint=saved)
    three, four = (next(tmp_path.rglob(f"{node}.safetensors")) for node in (3, 4))
    for path in (four, saved):
        shutil.copy(path, tmp_path / f"{path.stem} before")
    three.unlink()
    strategy.start(grid, ArrayRecord(), num_rounds=1)
    assert len(errors(grid)) == 2  # training and evaluation
    assert f"client '3' ({three}) keeps entries of rounds [], but the server needs those of round 2" in errors(grid)[0]
    assert (strategy.server.round, three.exists()) == (3, False)  # with the other
    shutil.copy(tmp_path / "4 before", four)
    strategy.start(grid, ArrayRecord(), num_rounds=1)
    why = "4.safetensors) keeps entries of rounds [1, 2], but the server needs those of round 3"
    assert sum(why in error for error in errors(grid)) == 2
    shutil.copy(tmp_path / "server before", saved)
    start(other := local_grid({4: counting(tmp_path)}), rounds=3, checkpoint=saved)
    shutil.copy(tmp_path / "server before", saved)
    with pytest.raises(FedshiftError, match=r"the first round changed nothing.*rounds \[4, 5\].*not made up"):
        start(other, rounds=1, checkpoint=saved)


def test_each_strategy_begins_anew_and_leaves_its_models(local_grid, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    apps, saved = {node: counting(None) for node in (3, 4)}, [tmp_path / "first", tmp_path / "second"]
    for path in saved:
        strategy, _ = start(local_grid(apps), rounds=2, checkpoint=path)
    assert len(list(tmp_path.glob(".fedshift/flower/*/3.safetensors"))) == 2
    assert counts(apps[3]) == [0, 1, 1, 2] * 2
    arrays = to_record(strategy.server.shared)
    for shared in (arrays, arrays.to_torch_state_dict(), str(saved[1])):
        model = load_client_model(network(), shared, 3)
        assert not model.training
        assert all(torch.equal(x, model.state_dict()[name]) for name, x in apps[3].came[-1].items())
    start(local_grid(apps), rounds=1, checkpoint=saved[1])
    assert [int(load_client_model(network(), path, 3)[1].num_batches_tracked) for path in saved] == [2, 3]
    with pytest.raises(FedshiftError, match=r"there is no .*flower/\*/5\.safetensors: give"):
        load_client_model(network(), arrays, 5)
    with pytest.raises(FedshiftError, match="the client's model lacks entry"):
        load_client_model(network(), {}, 3)


def test_entries_of_another_model_and_damaged_files_are_refused(tmp_path):
    asked(counting(tmp_path), 1)
    with pytest.raises(FedshiftError, match=r"'ward/../7' .*this model and method.*shape \(2,\) in place of \(4,\)"):
        asked(partial(keep_local(network(4), folder=tmp_path), call_next=print), 2)
    with pytest.raises(FedshiftError, match="this model and method"):
        asked(counting(tmp_path, fs.silobn()), 2)
    path = next(tmp_path.rglob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(FedshiftError, match="corrupt or truncated"):
        asked(counting(tmp_path), 2)


def test_clients_never_leave_the_folder_and_keep_two_generations(tmp_path):
    folder = tmp_path / "own"
    for number in (0, 3, 5):
        asked(counting(folder), 1, **{"fedshift-rounds": [number, 0], "fedshift-experiment": ".."})
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert found == [folder / "%2E%2E" / "ward%2F%2E%2E%2F7.safetensors"]
    tensors, facts = load_checkpoint(found[0])
    assert ([4, 6], {"4", "6"}) == (facts["rounds"], {name.partition("/")[0] for name in tensors})


def test_only_what_is_sent_leaves_by_any_message(tmp_path):
    app = counting(tmp_path)
    with pytest.raises(FedshiftError, match=r"client 'ward/../7' .* has not trained yet"):
        asked(app, 1, kind="evaluate")
    asked(app, 1)
    assert all(set(asked(app, 1, kind).content["spilled"]) == set(SHARED) for kind in ("evaluate", "query"))
    assert set(asked(counting(tmp_path, fs.fedavg()), 1).content["arrays"]) == set(WHOLE)


def test_sent_entries_that_are_not_loaded_are_kept_and_sent(local_grid, tmp_path):
    method = fs.partialfed_fix(layers="batch_norm")
    _, result = start(grid := local_grid({7: counting(tmp_path, method)}), method=method, rounds=2)
    down, up, *_ = grid.seen
    assert set(down.content["arrays"]) == set(SHARED)
    assert set(up.content["arrays"]) == set(result.arrays) == set(WHOLE)
    assert counts(grid.apps[7]) == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("1.bias", None, "the reply of {} lacks entry '1.bias'"),
        ("1.bias", torch.tensor([1, torch.nan]), "'1.bias' of the reply of {} holds NaN"),
        ("0.bias", torch.tensor([1, torch.nan]), "'0.bias' of the reply of {} holds NaN"),
        ("1.bias", torch.ones(2).double(), "the reply of {} has type torch.float64 in place of torch.float32"),
    ],
)
def test_a_reply_that_cannot_be_kept_changes_nothing(tmp_path, name, value, why):
    app = ClientApp(mods=[keep_local(network(), folder=tmp_path)])

    @app.train()
    def train(message, context):
        state = {each: x for each, x in (WHOLE | {name: value}).items() if x is not None}
        return Message(RecordDict({"arrays": to_record(state)}), reply_to=message)

    asked(counting(tmp_path), 1)
    path = next(tmp_path.rglob("*.safetensors"))
    before = path.read_bytes()
    with pytest.raises(FedshiftError, match=why.format(r"client 'ward/../7' \(.*\)")):
        asked(app, 2)
    assert path.read_bytes() == before


@pytest.mark.parametrize("ours", [True, False])
def test_first_values_are_those_of_initial_arrays_and_flowers_own_fedavg_is_answered(local_grid, tmp_path, ours):
    """A checkpoint's BatchNorm, or a head that a seed drew on the server alone; for late clients too."""
    initial = {name: x + 5 for name, x in WHOLE.items()}
    apps = {node: counting(tmp_path) for node in (3, 4)}
    strategy = MethodStrategy(fs.fedbn(), network()) if ours else FedAvg()
    strategy.start(grid := local_grid(apps), to_record(initial), num_rounds=2)
    assert all(torch.equal(x, initial[name]) for app in apps.values() for name, x in app.came[0].items())
    for app in apps.values():
        assert counts(app) == [5, 6, 6, 7]  # train, test; train, test
        assert all(torch.equal(state["1.bias"], WHOLE["1.bias"] + state[COUNT]) for state in app.came)
    assert not BN & (
        grid.arrays().keys() if ours else {n for m in grid.seen[1::2] for n in m.content.get("arrays", ())}
    )
    if ours:
        strategy.start(local_grid({3: apps[3], 9: counting(tmp_path)}), ArrayRecord(), num_rounds=1)
        late = load_client_model(network(), strategy.server.shared, 9, folder=tmp_path)
        assert torch.equal(late[1].bias, initial["1.bias"] + 1)


def test_names_and_records_that_are_missing_are_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    app = counting(None)
    with pytest.raises(UsageError, match=r"node 7 has no name.*--node-config"):
        asked(app, 1, node={})
    asked(app, 1, node={"partition-id": 4})
    assert (tmp_path / ".fedshift" / "flower" / "run-1" / "4.safetensors").exists()
    for content, why in (
        ({"arrays": ArrayRecord(WHOLE), "config": ConfigRecord()}, "holds no 'server-round'"),
        ({"arrays": ArrayRecord(), "config": ConfigRecord({"server-round": 1})}, r"lacks entry '0\.bias'.*state_dict"),
        ({"config": ConfigRecord({"server-round": 1})}, "holds 0 records in place of one"),
    ):
        with pytest.raises(FedshiftError, match=why):
            app(Message(RecordDict(content), 7, "train"), Context(1, 7, {"name": "a"}, RecordDict(), {}))
