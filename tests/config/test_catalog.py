"""One law of every list of names: what it writes, it reads as an equal value; and one for values given by a program."""

from functools import partial

import pytest
import torch

from fedshift.core.loss import LOSSES
from fedshift.core.optimizer import OPTIMIZERS
from fedshift.core.schedule import SCHEDULES, Cosine, Schedule
from fedshift.data.augmentation import AUGMENTATIONS, flip
from fedshift.data.sources import DATASETS, SPLIT_CHANGES
from fedshift.evaluation.policy import POLICIES
from fedshift.methods import METHODS
from fedshift.models import MODELS, take_output
from fedshift.models.digits import small_cnn
from fedshift.tasks import TASKS
from fedshift.utils.errors import UsageError

CATALOGS = {
    catalog.kind: catalog
    for catalog in (
        METHODS,
        MODELS,
        LOSSES,
        OPTIMIZERS,
        SCHEDULES,
        AUGMENTATIONS,
        TASKS,
        POLICIES,
        SPLIT_CHANGES,
        DATASETS,
    )
}
NEEDED = {
    "step": "step(every=3)", "exponential": "exponential(gamma=0.9)", "sequence": "sequence()",
    "sometimes": "sometimes(flip())", "tuned": "tuned(lr=0.5)",
}  # fmt: skip
"""Entries with arguments that have no default."""
FURTHER = {
    "method": ("fedbn+fedprox(mu=0.1)", "krum(num_malicious=2)", "single+fedwon"),
    "model": ("unet(width=8)", "take_output(small-cnn, output='logits')"),
    "loss": (
        "focal(gamma=1.5, weights='balanced')",
        "cross_entropy(weights=(1.0, 2.5), smoothing=0.1)",
        "operator:sub",
    ),
    "optimizer": ("adamw(beta1=0.8, eps=1e-06)",),
    "schedule": ("cosine(floor=0.25)", "cosine(rounds=7)", "step(every=2, gamma=0.5)"),
    "augmentation": ("flip(p=0.25), rotate(degrees=10)", "sometimes(flip(vertical=True), p=0.1)"),
    "policy for new clients": ("tent(steps=3, lr=0.01)",),
    "task": ("regression(standardize=False)", "segmentation(surface=True)"),
}
SUPPLIED = {"optimizer": {"lr": 0.1, "schedule": Schedule()}, "schedule": {"rounds": 5}}
UNWRITTEN = {"split", "data"}
"""Lists whose values are never given as objects, and are not written."""


class Warmup(Schedule):
    """A schedule of the user's, defined where no other process finds it."""


Warmup.__qualname__ = "local.<locals>.Warmup"


def every_text():
    for kind, catalog in CATALOGS.items():
        if kind not in UNWRITTEN:
            texts = [NEEDED.get(name, name) for name in catalog.names()]
            yield from (pytest.param(kind, text, id=f"{kind} {text}") for text in (*texts, *FURTHER[kind]))


@pytest.mark.parametrize(("kind", "text"), list(every_text()))
def test_every_catalog_parses_what_it_writes(kind, text):
    catalog, supplied = CATALOGS[kind], SUPPLIED.get(kind, {})
    value = catalog.parse(text, **supplied)
    written = catalog.write(value, **supplied)
    if text == "none":
        assert (value, written) == (None, None)
        return
    again = catalog.parse(written, **supplied)
    assert catalog.write(again, **supplied) == written
    if kind == "model":  # functions with arguments have no equality
        assert str(again) == str(value) or (again.func, again.keywords) == (value.func, value.keywords)
    elif kind.startswith("policy"):
        assert (again.text, again.data) == (value.text, value.data)
    elif kind == "method":
        assert again.text == value.text
    else:
        assert again == value


@pytest.mark.parametrize(("kind", "value"), [
    ("model", lambda shape, classes: None), ("loss", lambda logits, y: None), ("schedule", Warmup()),
    ("augmentation", lambda x, rng: x), ("method", METHODS.parse("fedbn").with_surgery(lambda module: module)),
], ids=["model", "loss", "schedule", "augmentation", "method"])  # fmt: skip
def test_what_no_text_can_name_is_not_written(kind, value):
    found = CATALOGS[kind].write(CATALOGS[kind].parse(value))
    assert found is None


def test_objects_are_written_as_the_texts_that_make_them():
    assert MODELS.write(partial(small_cnn, dense_norm=False)) == "small-cnn(dense_norm=False)"
    assert MODELS.write(take_output(small_cnn, "logits")) == "take_output(small-cnn, output='logits')"
    assert LOSSES.write(LOSSES.parse(torch.nn.CrossEntropyLoss(label_smoothing=0.5))) == "cross_entropy(smoothing=0.5)"
    assert AUGMENTATIONS.write(flip(p=0.1)) == "flip(p=0.1, vertical=False)"
    assert SCHEDULES.write(Cosine(rounds=9, floor=0.5), rounds=9) == "cosine(floor=0.5)"
    assert SCHEDULES.write(Cosine(rounds=9, floor=0.5), rounds=8) == "cosine(rounds=9, floor=0.5)"


@pytest.mark.parametrize("kind", CATALOGS)
def test_a_name_that_does_not_exist_is_refused_with_the_nearest(kind):
    catalog = CATALOGS[kind]
    name = max(catalog.names(), key=len)
    with pytest.raises(UsageError, match=f"unknown {kind} .*did you mean '{name}'"):
        catalog.parse(f"{name}s")
    with pytest.raises(UsageError, match="No module named 'nowhere'"):
        catalog.parse("nowhere:function")


@pytest.mark.parametrize("kind", [kind for kind in CATALOGS if kind not in UNWRITTEN])
def test_a_value_of_another_kind_is_refused(kind):
    with pytest.raises(UsageError):
        CATALOGS[kind].parse(3)


def test_an_expression_gives_no_argument_that_is_a_setting_by_itself():
    with pytest.raises(
        UsageError,
        match=r"unknown argument 'lr'; adamw takes weight_decay=0.01, keep=False, beta1=0.9, ",
    ):
        OPTIMIZERS.parse("adamw(lr=3)", **SUPPLIED["optimizer"])
