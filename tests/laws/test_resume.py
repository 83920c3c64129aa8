"""Law 2: stop and resume equals uninterrupted, bit for bit, at any round, for every method."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from fedshift.core.loss import LOSSES
from fedshift.core.optimizer import SGD, AdamW, as_optimizer
from fedshift.core.schedule import Cosine
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.data.augmentation import AUGMENTATIONS
from fedshift.experiments.trial import Trial
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.results.checkpoint import load_checkpoint
from fedshift.utils.errors import UsageError
from fedshift.utils.state import is_equal
from tests.laws.course import ROUNDS, make_trial
from tests.methods.plain import advance


def pixels():
    """The laws' clients as color images of pixels 0..255."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (40, 3, 6, 6), dtype=np.uint8), np.arange(40) % 3
    return federation({name: (x[k:30], y[k:30], x[30:], y[30:]) for k, name in enumerate("abc")})


def through_disk(trial, fresh, folder):
    trial.save(folder, "checkpoint.safetensors")
    fresh.restore(*load_checkpoint(folder / "checkpoint.safetensors"), folder)
    return fresh


@pytest.mark.sampled(12)
@pytest.mark.parametrize("engine", ["sequential", "pool", "ray"])
def test_resumed_equals_uninterrupted(trial, course, method, engine):
    """Through a file, after the round before the last; stacked clients, and other rounds: tests.laws.test_pairs."""
    whole, resumed = course(method, engine), trial(method, engine)
    resumed.restore(*load_checkpoint(whole.folder / f"{ROUNDS - 1}.safetensors"), whole.folder)
    assert resumed.advance().rows == whole[ROUNDS].rows
    assert is_equal(resumed.to_tensors()[0], whole[ROUNDS].tensors)
    assert resumed.to_tensors()[1] == whole[ROUNDS].facts


@pytest.mark.slow
def test_resumed_equals_uninterrupted_with_an_optimizer_of_torch_whose_state_is_kept(method, tmp_path):
    """All methods but those whose claim holds for SGD alone, which refuse it."""
    kept = replace(as_optimizer(partial(torch.optim.RMSprop, momentum=0.5), lr=0.003), keep=True)
    if any(rule.needs_plain_steps for rule in method.rules):
        with pytest.raises(UsageError, match=r"holds for SGD .*, not for torch.optim:RMSprop"):
            make_trial(method, optimizer=kept)
        return
    whole, resumed = (make_trial(method, optimizer=kept) for _ in range(2))
    whole.advance()
    through_disk(whole, resumed, tmp_path)
    assert resumed.advance().rows == whole.advance().rows
    assert is_equal(resumed.to_tensors()[0], whole.to_tensors()[0])


def test_without_memory_for_clients_every_method_is_what_it_is_with(trial, course, method):
    whole, fresh = course(method), trial(method)
    poor = Trial(method, fresh.model, fresh.data, fresh.settings, fresh.seed, client_memory=0)
    for number in range(1, ROUNDS + 1):
        assert poor.advance().rows == whole[number].rows
    assert is_equal(poor.to_tensors()[0], whole[ROUNDS].tensors)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": SGD(lr=0.05, momentum=0.9, nesterov=True, keep=True)},
        {"optimizer": AdamW(lr=0.01, keep=True, schedule=Cosine(rounds=4))},
        {"work": Work(batch_size=4, batches=3)},
        {"work": Work(batch_size=4, steps=3)},
        {"work": Work(batch_size=None, epochs=2)},
        {"participation": 2},
        {
            "augment": AUGMENTATIONS.parse("flip(), rotate(degrees=40), crop(padding=1), erase(patches=1, size=2)"),
            "data": pixels(),
        },
        {"augment": AUGMENTATIONS.parse("color_jitter(), scale(), shear()"), "data": pixels(), "participation": 2},
        {"loss": LOSSES.parse("focal(weights='balanced')")},
    ],
    ids=[
        "momentum kept",
        "adamw kept",
        "batch groups",
        "steps",
        "full batch",
        "sampled clients",
        "moved",
        "colored",
        "focal",
    ],
)
def test_resumed_equals_uninterrupted_whatever_the_settings(trial, changes, tmp_path):
    whole, broken = trial(fedbn(), **changes), trial(fedbn(), **changes)
    advance(whole, rounds=ROUNDS)
    advance(broken, rounds=2)
    resumed = through_disk(broken, trial(fedbn(), **changes), tmp_path)
    for _ in range(ROUNDS - 2):
        resumed.advance()
    assert is_equal(resumed.to_tensors()[0], whole.to_tensors()[0])
    assert resumed.to_tensors()[1] == whole.to_tensors()[1]


def test_momentum_kept_differs_from_momentum_reset(trial):
    kept, reset = (trial(fedavg(), optimizer=SGD(lr=0.05, momentum=0.9, keep=keep)) for keep in (True, False))
    advance(kept, reset, rounds=2)
    assert any("/optimizer/" in name for name in kept.to_tensors()[0])
    assert not any("/optimizer/" in name for name in reset.to_tensors()[0])
    assert not is_equal(kept.server.shared, reset.server.shared)


def test_a_checkpoint_of_other_settings_is_refused_by_name(trial):
    begun = trial(fedavg())
    begun.advance()
    for changed, word in (
        (trial(fedbn()), "method"),
        (trial(fedavg(), seed=9), "seed"),
        (trial(fedavg(), optimizer=SGD(lr=0.1)), "optimizer"),
    ):
        with pytest.raises(UsageError, match=f"begun with another {word}"):
            changed.restore(*begun.to_tensors())
