"""What a client keeps: it comes back after a restart, a lost round and a repeated one, and is never made up."""

import fedshift.flower  # noqa: F401  isort: skip

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

from fedshift import FedshiftError, UsageError
from fedshift.flower import MethodStrategy, keep_local, list_local_entries
from fedshift.flower.transport.arrays import from_record, to_record
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.methods.fedper import fedper
from fedshift.methods.partialfed_fix import partialfed_fix
from fedshift.methods.scaffold import scaffold
from fedshift.methods.silobn import silobn
from fedshift.results.checkpoint import load_checkpoint

BN = {"1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"}


def network(features=3):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, features), nn.BatchNorm1d(features), nn.Linear(features, 2))


def counting(folder, method=None, model=None, **options):
    """A client that adds 1 to every entry of the model that it gets; ``came`` collects those models."""
    app = ClientApp(mods=[keep_local(model or network(), method, folder=folder, **{"experiment": "e", **options})])
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
        return Message(RecordDict({"spilled": ArrayRecord(network().state_dict())}), reply_to=message)

    return app


def start(grid, rounds, strategy=None, **options):
    strategy = strategy or MethodStrategy(fedbn(), network(), wait=0, **options)
    strategy.start(grid, ArrayRecord(network().state_dict()), num_rounds=rounds)
    return strategy


def asked(app, round, last=None, kind="train"):
    """The reply of ``app`` to a message of Flower's own shape, or with what MethodStrategy adds."""
    extra = {} if last is None else {"fedshift-rounds-done": round - (kind == "train"), "fedshift-last-round": last}
    content = RecordDict(
        {
            "arrays": ArrayRecord(network().state_dict()),
            "config": ConfigRecord({"server-round": round, **extra}),
        }
    )
    return app(Message(content, 7, kind), Context(1, 7, {"name": "ward/../7"}, RecordDict(), {}))


def test_names_are_found_by_type():
    assert list_local_entries(network()) == BN
    assert list_local_entries(network(), silobn()) == BN - {"1.weight", "1.bias"}
    assert list_local_entries(network(), fedper()) == {"2.weight", "2.bias"}
    assert list_local_entries(network(), fedavg()) == frozenset()
    with pytest.raises(UsageError, match="batch_norm matches no entry"):
        list_local_entries(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="scaffold"):
        keep_local(network(), fedbn(scaffold()))


def test_own_entries_go_on_from_round_to_round_and_never_travel(local_grid, tmp_path):
    apps = {node: counting(tmp_path) for node in (3, 4)}
    grid = local_grid(apps)
    start(grid, rounds=3)
    assert not BN & set(grid.arrays())
    assert not any(b"1.running_mean" in wire for wire in grid.wire)
    first = network().state_dict()
    for app in apps.values():
        trained, measured = app.came[::2], app.came[1::2]
        assert [torch.equal(state["1.bias"], first["1.bias"] + done) for done, state in enumerate(trained)] == [
            True
        ] * 3
        assert [int(state["1.num_batches_tracked"]) for state in trained] == [0, 1, 2]
        assert [int(state["1.num_batches_tracked"]) for state in measured] == [1, 2, 3]


def test_a_restarted_node_finds_its_entries_again_whatever_its_number(local_grid, tmp_path):
    grid = local_grid({3: counting(tmp_path)})
    grid.names[3] = "ward"
    strategy = start(grid, rounds=2)
    again = local_grid({99: counting(tmp_path)})
    again.names[99] = "ward"
    strategy.start(again, ArrayRecord(), num_rounds=1)
    assert [int(state["1.num_batches_tracked"]) for state in again.apps[99].came] == [2, 3]


def test_two_nodes_of_one_name_do_not_take_each_others_entries(local_grid, tmp_path):
    grid = local_grid({3: counting(tmp_path), 4: counting(tmp_path)})
    grid.names |= {3: "ward", 4: "ward"}
    strategy = start(grid, rounds=2)
    reasons = [m.error.reason for m in grid.seen if m.has_error()]
    assert len(reasons) == 2  # of training; neither is asked to evaluate what it did not train
    assert all("client 'ward' of experiment 'e' is two nodes, 3 and 4, which" in reason for reason in reasons)
    assert [int(state["1.num_batches_tracked"]) for state in grid.apps[3].came] == [0, 1, 1, 2]
    assert strategy.server.round == 2


def test_a_round_that_is_asked_for_again_starts_from_what_was_before_it(local_grid, tmp_path):
    apps = {3: counting(tmp_path), 4: counting(tmp_path)}
    grid = local_grid(apps)
    strategy = start(grid, rounds=1, min_clients=2)
    grid.silent = {4}
    strategy.start(grid, ArrayRecord(), num_rounds=1)  # too few: round 2 does not count
    grid.silent = set()
    strategy.start(grid, ArrayRecord(), num_rounds=1)
    trained = [int(state["1.num_batches_tracked"]) for state in apps[3].came]
    assert trained == [0, 1, 1, 1, 1, 2]  # train, test; train, test of the failed round; train, test


def test_lost_entries_are_named_and_not_made_up(local_grid, tmp_path):
    apps = {3: counting(tmp_path), 4: counting(tmp_path)}
    grid = local_grid(apps)
    strategy = start(grid, rounds=2)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    (tmp_path / "e" / "3.safetensors").unlink()
    strategy.start(grid, ArrayRecord(), num_rounds=1)
    reasons = [m.error.reason for m in grid.seen if m.has_error()]
    assert all("client '3' of experiment 'e' finished round 2, but its own entries are missing" in r for r in reasons)
    assert len(reasons) == 2  # training and evaluation
    assert strategy.server.round == 3  # with the other
    assert not (tmp_path / "e" / "3.safetensors").exists()
    (tmp_path / "e" / "4.safetensors").write_bytes(before[tmp_path / "e" / "4.safetensors"])  # an old copy
    strategy.start(grid, ArrayRecord(), num_rounds=1)
    assert "client '4' of experiment 'e' finished round 3, but its own entries are of round 2" in str(grid.seen[-1])


def test_what_flowers_own_strategy_asks_for_is_answered_too(local_grid, tmp_path):
    grid = local_grid({3: counting(tmp_path), 4: counting(tmp_path)})
    start(grid, 3, FedAvg(min_train_nodes=2))
    sent_by_clients = {
        name
        for message in grid.seen
        if message.metadata.reply_to_message_id and message.has_content()
        for record in message.content.array_records.values()
        for name in record
    }
    assert sent_by_clients == set(network().state_dict()) - BN
    assert [int(state["1.num_batches_tracked"]) for state in grid.apps[3].came] == [0, 1, 1, 2, 2, 3]


def test_another_run_of_the_same_name_is_refused_with_what_to_do(local_grid, tmp_path):
    start(local_grid({3: counting(tmp_path)}), rounds=3)
    grid = local_grid({3: counting(tmp_path)})
    start(grid, rounds=1)
    said = grid.seen[-1].error.reason
    assert "holds entries of round 2" in said
    assert "server has done 0 rounds: to start over, remove that file or rename the experiment" in said
    start(other := local_grid({3: counting(tmp_path, experiment="f")}), rounds=1)
    assert not any(message.has_error() for message in other.seen)


@pytest.mark.usefixtures("local_grid")
def test_entries_of_another_model_and_damaged_files_are_refused(tmp_path):
    asked(counting(tmp_path), 1)
    with pytest.raises(FedshiftError, match=r"entries of another model.*shape \(3,\) in place of \(4,\).*begun with"):
        asked(counting(tmp_path, model=network(4)), 2)
    with pytest.raises(FedshiftError, match="entries of another model"):
        asked(counting(tmp_path, silobn()), 2)
    path = next(tmp_path.rglob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(FedshiftError, match="corrupt or truncated"):
        asked(counting(tmp_path), 2)


@pytest.mark.usefixtures("local_grid")
def test_clients_never_leave_the_folder_and_keep_two_generations(tmp_path):
    folder = tmp_path / "own"
    for number in (1, 4, 6):
        asked(counting(folder, experiment=".."), number, last=0)
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert found == [folder / "%2E%2E" / "ward%2F%2E%2E%2F7.safetensors"]
    tensors, facts = load_checkpoint(found[0])
    assert facts["rounds"] == [4, 6]
    assert {name.partition("/")[0] for name in tensors} == {"4", "6"}


@pytest.mark.usefixtures("local_grid")
def test_a_client_that_never_trained_has_no_model_to_evaluate(tmp_path):
    with pytest.raises(FedshiftError, match=r"client 'ward/../7'.* has not trained yet"):
        asked(counting(tmp_path), 1, kind="evaluate")


@pytest.mark.usefixtures("local_grid")
def test_only_what_is_sent_leaves_by_any_message(tmp_path):
    app = counting(tmp_path)
    asked(app, 1)
    for reply in (asked(app, 1, kind="evaluate"), asked(app, 1, kind="query")):
        assert set(reply.content["spilled"]) == set(network().state_dict()) - BN
    reply = asked(counting(tmp_path, fedavg()), 1)
    assert set(reply.content["arrays"]) == set(network().state_dict())


@pytest.mark.usefixtures("local_grid")
def test_sent_entries_that_are_not_loaded_are_kept_and_sent(tmp_path):
    app = counting(tmp_path, partialfed_fix(layers="batch_norm"))
    replies = [asked(app, number) for number in (1, 2)]
    assert set(replies[1].content["arrays"]) == set(network().state_dict())
    assert int(from_record(replies[1].content["arrays"])["1.num_batches_tracked"]) == 2


@pytest.mark.usefixtures("local_grid")
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda s: {n: x for n, x in s.items() if n != "1.bias"}, "the reply lacks entry '1.bias'"),
        (lambda s: s | {"1.bias": s["1.bias"] * torch.nan}, "'1.bias' of the reply holds NaN"),
        (lambda s: s | {"0.bias": s["0.bias"] * torch.nan}, "'0.bias' of the reply holds NaN"),
        (lambda s: s | {"1.bias": s["1.bias"].double()}, "type torch.float64 in place of torch.float32"),
    ],
)
def test_a_reply_that_cannot_be_kept_changes_nothing(tmp_path, change, why):
    app = ClientApp(mods=[keep_local(network(), folder=tmp_path, experiment="e")])

    @app.train()
    def train(message, context):
        return Message(RecordDict({"arrays": to_record(change(network().state_dict()))}), reply_to=message)

    asked(counting(tmp_path), 1)
    path = next(tmp_path.rglob("*.safetensors"))
    before = path.read_bytes()
    with pytest.raises(FedshiftError, match=f"client 'ward/../7' of experiment 'e': .*{why}"):
        asked(app, 2)
    assert path.read_bytes() == before


@pytest.mark.slow
def test_without_a_name_entries_last_as_long_as_the_node_in_this_run(local_grid, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    named = {node: counting(tmp_path / "disk") for node in (3, 4)}
    unnamed = {node: counting(None, experiment=None) for node in (3, 4)}
    for run in range(2):  # one run after another
        start(grid := local_grid(unnamed), rounds=3)
        assert not BN & set(grid.arrays())
        if run == 0:
            start(local_grid(named), rounds=3)
            for node in (3, 4):
                states = zip(unnamed[node].came, named[node].came, strict=True)
                assert all(torch.equal(a[name], b[name]) for a, b in states for name in a)
    assert torch.equal(unnamed[3].came[0]["1.bias"], unnamed[3].came[6]["1.bias"])
    assert len(grid.states[3].array_records) == 2
    grid.states[3] = RecordDict()
    with pytest.raises(FedshiftError, match=r"of run 1 finished round 3, but its own entries are missing \(Flower's"):
        asked(counting(None, experiment=None), 4, last=3)


@pytest.mark.usefixtures("local_grid")
def test_names_and_places_that_are_missing_are_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))

    def message():
        arrays, config = ArrayRecord(network().state_dict()), ConfigRecord({"server-round": 1})
        return Message(RecordDict({"arrays": arrays, "config": config}), 7, "train")

    with pytest.raises(UsageError, match="the experiment has no name"):
        counting(tmp_path, experiment=None)(message(), Context(1, 7, {"name": "a"}, RecordDict(), {}))
    app = counting(None, experiment=None)
    with pytest.raises(UsageError, match=r"node 7 has no name.*--node-config"):
        app(message(), Context(1, 7, {}, RecordDict(), {"experiment": "x"}))
    app(message(), Context(1, 7, {"partition-id": 4}, RecordDict(), {"experiment": "x"}))
    assert (tmp_path / ".fedshift" / "flower" / "x" / "4.safetensors").exists()
    bare = message()
    bare.content["config"] = ConfigRecord()
    with pytest.raises(FedshiftError, match="holds neither 'fedshift-rounds-done' nor 'server-round'"):
        app(bare, Context(1, 7, {"name": "a"}, RecordDict(), {"experiment": "x"}))
    lacking = message()
    del lacking.content["arrays"]["0.bias"]
    with pytest.raises(FedshiftError, match=r"lacks entry '0\.bias'"):
        app(lacking, Context(1, 7, {"name": "a"}, RecordDict(), {"experiment": "x"}))
    twice = message()
    twice.content["more"] = ArrayRecord()
    with pytest.raises(FedshiftError, match="holds 2 array records"):
        app(twice, Context(1, 7, {"name": "a"}, RecordDict(), {"experiment": "x"}))
