"""Law 2: stop and resume equals uninterrupted, bit for bit, at any round, for every method."""

import pytest

from fedshift.base.errors import UsageError
from fedshift.base.state import equal
from fedshift.checkpoint import load_checkpoint, save_checkpoint
from fedshift.core.optimizer import SGD, AdamW, Cosine
from fedshift.core.work import Work
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn

ROUNDS = 4


def through_disk(trial, fresh, path):
    save_checkpoint(path, *trial.tensors())
    fresh.restore(*load_checkpoint(path))
    return fresh


@pytest.mark.parametrize("stop", range(1, ROUNDS))
def test_resumed_equals_uninterrupted(trial, method, engine, stop, tmp_path):
    whole, broken = trial(method, engine), trial(method, engine)
    rows = [whole.advance().rows for _ in range(ROUNDS)]
    for _ in range(stop):
        broken.advance()
    resumed = through_disk(broken, trial(method, engine), tmp_path / "checkpoint.safetensors")
    assert [resumed.advance().rows for _ in range(ROUNDS - stop)] == rows[stop:]
    assert equal(resumed.tensors()[0], whole.tensors()[0])
    assert resumed.tensors()[1] == whole.tensors()[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": SGD(lr=0.05, momentum=0.9, nesterov=True, keep=True)},
        {"optimizer": AdamW(lr=0.01, keep=True, schedule=Cosine(rounds=4))},
        {"work": Work(batch_size=4, batches=3)},
        {"work": Work(batch_size=None, epochs=2)},
        {"participation": 2},
    ],
    ids=["momentum kept", "adamw kept", "batch groups", "full batch", "sampled clients"],
)
def test_resumed_equals_uninterrupted_whatever_the_settings(trial, changes, tmp_path):
    whole, broken = trial(fedbn(), **changes), trial(fedbn(), **changes)
    for _ in range(ROUNDS):
        whole.advance()
    for _ in range(2):
        broken.advance()
    resumed = through_disk(broken, trial(fedbn(), **changes), tmp_path / "checkpoint.safetensors")
    for _ in range(ROUNDS - 2):
        resumed.advance()
    assert equal(resumed.tensors()[0], whole.tensors()[0])
    assert resumed.tensors()[1] == whole.tensors()[1]


def test_momentum_kept_differs_from_momentum_reset(trial):
    kept, reset = (trial(fedavg(), optimizer=SGD(lr=0.05, momentum=0.9, keep=keep)) for keep in (True, False))
    for _ in range(2):
        kept.advance()
        reset.advance()
    assert any("/optimizer/" in name for name in kept.tensors()[0])
    assert not any("/optimizer/" in name for name in reset.tensors()[0])
    assert not equal(kept.server.shared, reset.server.shared)


def test_a_checkpoint_of_other_settings_is_refused_by_name(trial):
    begun = trial(fedavg())
    begun.advance()
    for changed, word in (
        (trial(fedbn()), "method"),
        (trial(fedavg(), seed=9), "seed"),
        (trial(fedavg(), optimizer=SGD(lr=0.1)), "optimizer"),
    ):
        with pytest.raises(UsageError, match=f"begun with another {word}"):
            changed.restore(*begun.tensors())
