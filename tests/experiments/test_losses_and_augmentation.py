"""Losses and augmentation inside a trial: what they change, and what they must leave alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.core.loss import LOSSES
from fedshift.core.network import forward
from fedshift.core.optimizer import SGD
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.data.augmentation import AUGMENTATIONS
from fedshift.data.partition import iid
from fedshift.experiments import settings
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods.fedavg import fedavg
from fedshift.models.digits import small_cnn
from fedshift.utils.errors import UsageError


def test_augmentation_changes_training_and_never_what_is_measured(tiny):
    settings = Settings(rounds=1, work=Work(batch_size=8, epochs=1), optimizer=SGD(lr=0.0))
    plain, augmented = (
        Trial(fedavg(), small_cnn, tiny, replace(settings, augment=augment), 0)
        for augment in (None, AUGMENTATIONS.parse("erase(patches=3, size=4)"))
    )
    before, after = (
        {
            (row["client"], row["split"]): row["loss_sum"]
            for rows in (trial.evaluate(), [row for row in trial.advance().rows if row["split"] == "train"])
            for row in rows
        }
        for trial in (plain, augmented)
    )
    assert {key for key in before if before[key] != after[key]} == {(name, "train") for name in tiny.names}


def test_weights_of_a_balanced_loss_are_of_all_clients_that_train(tiny):
    settings = Settings(rounds=1, loss=LOSSES.parse("cross_entropy(weights='balanced')"), newcomers=("cid",))
    trial = Trial(fedavg(), small_cnn, tiny, settings, 0)
    counts = torch.bincount(torch.cat([tiny.client(name).train.y for name in ("ann", "bob")])).double()
    weights = counts.sum() / (3 * counts)
    logits, y = torch.randn(9, 3, dtype=torch.float64), torch.arange(9) % 3
    assert torch.allclose(trial.plan.loss(logits, y), torch.nn.functional.cross_entropy(logits, y, weight=weights))


class WeightedMargin(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight_K", torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, logits, y):
        return nn.functional.multi_margin_loss(logits, y, weight=self.weight_K)


def test_a_loss_with_buffers_is_brought_to_the_device_that_trains(monkeypatch):
    """Meta tensors have a device and no content, so that the plan's preparation, which computes, is left out."""
    module, prepared = WeightedMargin(), []

    def keep(*_, loss, sample, **__):
        prepared.append((loss, sample.device))
        raise InterruptedError

    monkeypatch.setattr(settings, "prepare", keep)
    for device in ("meta", "cpu"):
        with pytest.raises(InterruptedError):
            settings.make_plan(
                fedavg(), small_cnn, Settings(loss=module), 0, sample=torch.zeros(1, 3, 8, 8, device=device),
                classes=3, labels=torch.tensor([4, 5, 6]), clients=1,
            )  # fmt: skip
    (moved, place), (same, _) = prepared
    assert (place.type, moved.function.weight_K.device.type) == ("meta", "meta")
    assert (module.weight_K.device.type, same.function is module, str(moved) == str(same)) == ("cpu", True, True)
    logits = torch.zeros(2, 3, device="meta", requires_grad=True)
    assert moved(logits, torch.zeros(2, dtype=torch.int64, device="meta")).device.type == "meta"


def test_recorded_losses_are_cross_entropy_whatever_is_trained_on(tiny):
    settings = Settings(rounds=1, work=Work(batch_size=8, epochs=1), optimizer=SGD(lr=0.0))
    rows = [
        [
            row["loss_sum"]
            for row in Trial(fedavg(), small_cnn, tiny, replace(settings, loss=LOSSES.parse(loss)), 0).evaluate()
        ]
        for loss in ("cross_entropy", "focal(gamma=3.0)")
    ]
    assert rows[0] == rows[1]


def test_clients_that_share_test_data_are_measured_on_them_once(tiny, monkeypatch):
    shared = iid(clients=6)(tiny)
    trial = Trial(fedavg(), small_cnn, shared, Settings(rounds=1, work=Work(batch_size=4, epochs=1)), 0)
    calls = []
    monkeypatch.setattr("fedshift.evaluation.metrics.forward", lambda *given: calls.append(1) or forward(*given))
    rows = trial.evaluate()
    assert len(calls) == 1
    assert len(rows) == 12
    assert len({row["loss_sum"] for row in rows}) == 1


def test_images_of_floating_point_are_augmented_between_minus_one_and_one():
    x = torch.linspace(-1, 1, 4 * 64).reshape(4, 1, 8, 8)
    settings = Settings(augment=AUGMENTATIONS.parse("flip(p=1.0)"))
    y = [0, 1, 2, 0]
    trial = Trial(fedavg(), small_cnn, federation({"one": (x, y, x, y)}), settings, 0)
    taken = trial.engine.load_batch("one", 0, torch.arange(4))[0]
    assert torch.allclose(taken, x.flip(3), atol=1e-6)
    with pytest.raises(UsageError, match=r"values around 0 from -1 to 1, .* from -2 to 2"):
        Trial(fedavg(), small_cnn, federation({"one": (2 * x, y, x, y)}), settings, 0)
    with pytest.raises(UsageError, match=r"from 0 to 1: scale them \(2 x - 1 for values from 0 to 1\)"):
        Trial(fedavg(), small_cnn, federation({"one": ((x + 1) / 2, y, x, y)}), settings, 0)


@pytest.mark.parametrize("layer", [nn.Conv2d, nn.Conv3d])
def test_masks_move_with_their_images(layer):
    rng = np.random.default_rng(0)
    masks = rng.integers(0, 2, (6, 8, 8) if layer is nn.Conv2d else (6, 3, 8, 8))
    images = masks[:, None] * 2.0 - 1 if layer is nn.Conv3d else 200 * masks
    data = federation({"one": (images, masks, images, masks)})

    def make(augment):
        settings = Settings(augment=augment, work=Work(batch_size=6, epochs=1))
        return Trial(fedavg(), lambda *_, **__: layer(1, 2, 1), data, settings, 0)

    trial = make(AUGMENTATIONS.parse("flip(vertical=True), crop(padding=3), brightness_contrast(contrast=0)"))
    for step in range(3):
        x, y = trial.engine.load_batch("one", step, torch.arange(6))
        assert (y == -100).any()
        assert not torch.equal(y, torch.from_numpy(masks))
        for image, mask in zip(x[:, 0], y, strict=True):
            assert image[mask == 1].min() > image[mask != 1].max()
    with pytest.raises(UsageError, match=r"is a function of images, and masks would not move with them: write it with"):
        make(AUGMENTATIONS.parse(lambda x, rng: x.flip(3)))
