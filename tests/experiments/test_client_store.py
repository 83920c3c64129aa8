"""The store of clients: what it holds in memory and in files, and that neither changes what it gives back."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import fedshift
from fedshift.core.kernel import init_client
from fedshift.core.optimizer import SGD
from fedshift.core.states import ClientState
from fedshift.core.work import Work
from fedshift.experiments.client_store import ENTRY, ClientStore, remove_unused_segments
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.results.checkpoint import load_checkpoint
from fedshift.results.trial_records import load_facts
from fedshift.utils.errors import FedshiftError
from fedshift.utils.state import is_equal, nbytes

CPU = torch.device("cpu")
NAMES = [f"client {number}" for number in range(40)]
CHECKPOINT, BEST = "checkpoint.safetensors", "best.safetensors"


def client(key: int, steps: int = 1) -> ClientState:
    """A client of 400 bytes whose entries differ in type and shape, one of them turned and one empty."""
    random = torch.Generator().manual_seed(key)
    return ClientState(
        personal={
            "weight": torch.randn(7, 5, generator=random).T, "count": torch.tensor(key), "none": torch.zeros(0, 3),
            "statistics/mean": torch.randn(22, generator=random).double(),
        },
        optimizer={"momentum": torch.randn(27, generator=random).bfloat16(), "step": torch.tensor(key % 256).byte()},
        memory=({"c": torch.tensor([key % 2 > 0, True, False, float("nan")][:3])}, {}),
        steps=steps,
    )  # fmt: skip


def parts(one: ClientState) -> list[dict[str, torch.Tensor]]:
    return [one.personal, one.optimizer, *one.memory]


def same(one: ClientState, other: ClientState) -> bool:
    return one.steps == other.steps and all(
        is_equal(a, b) and all(a[name].dtype == b[name].dtype for name in a)
        for a, b in zip(parts(one), parts(other), strict=True)
    )


SIZE = sum(nbytes(part) + ENTRY * len(part) for part in parts(client(0)))


def store(limit: int = 2**20, names=NAMES) -> ClientStore:
    return ClientStore(names, lambda: ClientState(personal={"fresh": torch.zeros(1)}), CPU, limit, ("0", "1"))


def reopened(folder, saved, limit: int = 2**20) -> ClientStore:
    again = store(limit)
    again.restore(*saved, folder)
    return again


def segments(folder) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()}


# One store


def test_it_is_a_mapping_in_client_order_of_clients_that_never_trained():
    clients = store()
    assert list(clients) == NAMES
    assert len(clients) == 40
    assert clients["client 3"].steps == clients.held == 0
    assert list(clients["client 3"].personal) == ["fresh"]
    assert not clients.has_trained("client 3")
    assert not clients.has_trained("nobody")
    with pytest.raises(KeyError):
        clients["nobody"]


def test_what_is_saved_comes_back_bit_for_bit_type_for_type(tmp_path):
    clients = store()
    clients.put({"client 7": client(7, 70), "client 2": client(2, 20)})
    again = reopened(tmp_path, clients.save(tmp_path, 1))
    assert again.seen == ("client 2", "client 7")
    assert again.held == 0
    assert same(again["client 7"], client(7, 70))
    assert same(again["client 2"], client(2, 20))
    assert again["client 3"].steps == 0
    assert same(reopened(None, (again.tensors(), {}))["client 7"], client(7, 70))


def test_states_on_disk_are_not_taken_for_clients_that_keep_nothing(tmp_path):
    clients = store()
    clients.put({"client 7": client(7)})
    with pytest.raises(ValueError, match="in the checkpoint's folder: give it"):
        reopened(None, clients.save(tmp_path, 1))


def test_a_client_that_keeps_nothing_costs_a_number(tmp_path):
    clients = store()
    clients.put({name: ClientState(personal={}, steps=4) for name in NAMES[:9]})
    index, facts = clients.save(tmp_path, 1)
    assert (clients.held, facts, segments(tmp_path)) == (0, {}, {})
    assert index["clients/steps"].tolist() == [4] * 9 + [0] * 31
    again = reopened(tmp_path, (index, facts))
    assert (again["client 8"].steps, again["client 8"].personal) == (4, {})
    assert again.seen == tuple(NAMES[:9])


def test_a_client_of_a_stack_does_not_keep_the_stack_in_memory():
    stack = torch.randn(1000, 8)
    clients = store()
    clients.put({"client 1": ClientState(personal={"row": stack[5]}, steps=1)})
    kept = clients["client 1"].personal["row"]
    assert torch.equal(kept, stack[5])
    assert kept.untyped_storage().nbytes() == clients.held - ENTRY == 32


# Memory


@pytest.mark.slow
def test_rows_of_all_clients_stay_one_array_that_a_later_round_releases():
    names = NAMES[:4]

    def rows(of, value):
        stack_KN = torch.full((len(of), 30), value)
        pairs = zip(of, stack_KN, strict=True)
        return {name: ClientState(personal={"w": row}, memory=({}, {}), steps=1) for name, row in pairs}

    def place(state):
        return state.personal["w"].untyped_storage().data_ptr()

    for limit, whole in ((2**20, True), (300, False)):
        kept = store(limit, names)
        clients, some = rows(names, 1.0), rows(names[:2], 2.0)
        kept.put(clients)
        assert (place(kept[names[1]]) == place(clients[names[1]])) == whole
        kept.put(some)
        assert place(kept[names[0]]) != place(some[names[0]])
        assert [float(kept[name].personal["w"].sum()) for name in names] == [60.0, 60.0, 30.0, 30.0]


def test_memory_is_bounded_and_the_least_recently_used_go_first(tmp_path):
    clients, alive = store(limit=5 * SIZE), {}
    for number, name in enumerate(NAMES):
        made = client(number)
        alive[name] = weakref.ref(made.personal["count"])
        clients.put({name: made})
        del made
        clients.save(tmp_path, number + 1)
        assert clients["client 0"].personal["count"] == 0  # so that it stays
        assert clients.held <= 5 * SIZE
    gc.collect()
    assert {name for name, tensor in alive.items() if tensor() is not None} == {"client 0", *NAMES[-4:]}
    assert all(same(each, client(number)) for number, each in enumerate(clients.values()))
    assert clients.held == 5 * SIZE


@pytest.mark.slow
def test_what_is_in_no_folder_spills_to_a_temporary_one_past_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    clients = store(limit=3 * SIZE)
    for number in range(4):
        clients.put({NAMES[number]: client(number)})
        clients.spill(number + 1)
        assert len(list(tmp_path.glob("*/"))) == (number > 2)
    assert clients.held == 3 * SIZE
    for number in range(30):
        clients.put({NAMES[number % 4]: client(number)})
        clients.spill(number + 5)
    (folder,) = tmp_path.glob("*/")
    assert sum(segments(folder).values()) < 8 * 2000
    assert [int(clients[name].personal["count"]) for name in NAMES[:4]] == [28, 29, 26, 27]
    del clients
    gc.collect()
    assert not list(tmp_path.iterdir())


# Files


def test_a_save_writes_what_changed_and_nothing_where_nothing_did(tmp_path):
    clients = store()
    clients.put({name: client(1) for name in NAMES})
    clients.save(tmp_path, 1)
    clients.put({"client 5": client(5)})
    before = segments(tmp_path)
    saved = clients.save(tmp_path, 2)
    new = segments(tmp_path).items() - before.items()
    assert [name for name, _ in new] == ["clients-2.states"]
    assert dict(new)["clients-2.states"] * 40 == before["clients-1.states"]
    assert clients.save(tmp_path, 3)[1] == saved[1]
    assert len(segments(tmp_path)) == 2


@pytest.mark.slow
def test_files_hold_at_most_about_twice_what_is_current_and_always_all_of_it(tmp_path):
    random, clients, expected = np.random.default_rng(0), store(limit=3 * SIZE), {}
    for round in range(1, 61):
        chosen = [NAMES[number] for number in random.choice(40, size=random.integers(1, 7), replace=False)]
        changed = {name: client(int(random.integers(2**30)), round) for name in chosen}
        expected |= changed
        clients.put(changed)
        index, facts = clients.save(tmp_path, round)
        remove_unused_segments(tmp_path, map(int, facts))
        found = segments(tmp_path)
        assert sum(found.values()) <= 2 * int(index["clients/place"][:, 2].sum())
        assert sorted(found) == sorted(f"clients-{segment}.states" for segment in facts)
        if round % 20 == 0:
            clients = reopened(tmp_path, (index, facts), limit=3 * SIZE)
            assert all(same(clients[name], each) for name, each in expected.items())
    assert len(expected) == 40


def test_another_folder_gets_everything(tmp_path):
    clients = store()
    for round in (1, 2):
        clients.put({NAMES[round]: client(round)})
        clients.save(tmp_path, round)
    other = tmp_path / "other"
    other.mkdir()
    again = reopened(other, clients.save(other, 2))
    assert all(same(again[NAMES[round]], client(round)) for round in (1, 2))
    assert list(segments(other)) == ["clients-2.states"]


def test_a_full_disk_changes_nothing(tmp_path, monkeypatch):
    clients = store()
    clients.put({"client 1": client(1)})
    saved = clients.save(tmp_path, 1)
    clients.put({"client 1": client(2)})
    with monkeypatch.context() as patched:
        patched.setattr("fedshift.experiments.client_store.write_atomically", full)
        with pytest.raises(FedshiftError, match="No space"):
            clients.save(tmp_path, 2)
    assert same(reopened(tmp_path, saved)["client 1"], client(1))
    assert same(reopened(tmp_path, clients.save(tmp_path, 2))["client 1"], client(2))


def full(path, content):
    raise FedshiftError(f"cannot write {path}: No space left on device")


@pytest.mark.parametrize("spoil", ["missing", "cut", "grown"])
def test_a_segment_that_is_not_whole_is_named_when_the_store_is_opened(tmp_path, spoil):
    clients = store()
    clients.put({"client 1": client(1)})
    saved = clients.save(tmp_path, 4)
    segment = tmp_path / "clients-4.states"
    content = segment.read_bytes()
    segment.unlink()
    if spoil != "missing":
        segment.write_bytes(content[:-1] if spoil == "cut" else content + b" ")
    what = "is missing" if spoil == "missing" else rf"holds \d+ bytes in place of {len(content)}"
    with pytest.raises(
        FedshiftError, match=rf"clients-4.states, which holds states of clients, {what}: restore the fi"
    ):
        reopened(tmp_path, saved)


def test_a_wrong_byte_is_named_when_its_client_is_read_or_carried_over(tmp_path):
    clients = store(limit=0)
    clients.put({name: client(number) for number, name in enumerate(NAMES[:3])})
    saved = clients.save(tmp_path, 4)
    segment = tmp_path / "clients-4.states"
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.write_bytes(content)
    again = reopened(tmp_path, saved)
    assert same(again["client 0"], client(0))
    assert same(again["client 2"], client(2))
    said = r"clients-4.states.* is corrupt: what it holds of client 'client 1' has another checksum: restore the file"
    with pytest.raises(FedshiftError, match=said):
        again["client 1"]
    again.put({"client 0": client(5), "client 2": client(6)})
    with pytest.raises(FedshiftError, match=said):
        again.save(tmp_path, 5)
    segment.unlink()
    with pytest.raises(FedshiftError, match=r"clients-4.states.* cannot be read \(No such file or directory\)"):
        clients["client 0"]


# Trials


def trial(data, method=None, limit: int = 2**29, keep=True, every=1) -> Trial:
    settings = Settings(
        rounds=9, work=Work(batch_size=8, epochs=1), optimizer=SGD(lr=0.05, momentum=0.9, keep=keep), participation=2,
        evaluate_every=every, engine="sequential",
    )  # fmt: skip
    return Trial(method or fedshift.fedbn(), network, data, settings, 0, client_memory=limit)


def network(shape, classes):
    size = int(np.prod(shape))
    return nn.Sequential(nn.Flatten(), nn.Linear(size, 4), nn.BatchNorm1d(4), nn.Linear(4, classes))


def test_a_trial_that_spills_is_the_same_bit_for_bit(tiny, tmp_path):
    whole, spilled, saved = trial(tiny), trial(tiny, limit=100), trial(tiny, limit=100)
    for _ in range(6):
        rows = whole.advance().rows
        assert spilled.advance().rows == rows
        assert saved.advance().rows == rows
        saved.save(tmp_path, CHECKPOINT)
        assert saved.clients.held <= 100
    assert spilled.clients.held == whole.clients.held * 2 // 3  # those of the last round
    assert is_equal(whole.to_tensors()[0], spilled.to_tensors()[0])
    assert is_equal(whole.to_tensors()[0], saved.to_tensors()[0])


def test_a_trial_taken_up_from_a_folder_leaves_the_folder_alone_until_it_is_saved(tiny, tmp_path):
    made = trial(tiny)
    for _ in range(2):
        made.advance()
        made.save(tmp_path, CHECKPOINT)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    again = trial(tiny, limit=100)
    again.restore(*load_checkpoint(tmp_path / CHECKPOINT), tmp_path)
    for _ in range(3):
        made.advance()
        again.advance()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert is_equal(again.to_tensors()[0], made.to_tensors()[0])


def test_the_best_stays_whole_while_others_move_on(tiny, tmp_path):
    moving = trial(tiny)
    moving.advance()
    moving.save(tmp_path, CHECKPOINT, BEST)
    then = moving.to_tensors()[0]
    for _ in range(5):
        moving.advance()
        moving.save(tmp_path, CHECKPOINT)
    assert "clients-1.states" in segments(tmp_path)
    assert "1" not in load_facts(tmp_path / CHECKPOINT)["segments"]
    for name, state in ((BEST, then), (CHECKPOINT, moving.to_tensors()[0])):
        fresh = trial(tiny)
        fresh.restore(*load_checkpoint(tmp_path / name), tmp_path)
        assert is_equal(fresh.to_tensors()[0], state)
    moving.save(tmp_path, BEST)
    assert "clients-1.states" not in segments(tmp_path)


def test_a_checkpoint_of_a_method_without_state_is_one_file_and_says_which_engine_made_it(tiny, tmp_path):
    made = trial(tiny, fedshift.fedavg(), keep=False)
    made.advance()
    made.save(tmp_path, CHECKPOINT)
    assert list(segments(tmp_path)) == [CHECKPOINT]
    tensors, facts = load_checkpoint(tmp_path / CHECKPOINT)
    assert {name for name in tensors if not name.startswith("server/")} == {"clients/steps"}
    assert facts["segments"] == {}
    assert facts["engine"] == ["sequential", None]


def test_a_round_asks_for_the_clients_that_take_part_and_no_others(tmp_path, monkeypatch):
    random, y = np.random.default_rng(0), np.arange(8) % 2
    data = fedshift.federation({f"c{n}": (random.normal(size=(8, 3)), y) * 2 for n in range(300)})
    made, asked = trial(data, every=9), []
    monkeypatch.setattr("fedshift.experiments.trial.init_client", lambda plan: asked.append(plan) or init_client(plan))
    sizes = []
    for number in (1, 2):
        made.advance()
        made.save(tmp_path, CHECKPOINT)
        sizes.append(segments(tmp_path)[f"clients-{number}.states"])
    assert len(asked) == len(made.clients.seen) == 4
    assert sizes[0] == sizes[1]
