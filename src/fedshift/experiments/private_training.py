"""Uses of training data that epsilon does not account for: they are refused, or listed with epsilon.

``dp_sgd`` hides what a sample adds to a gradient, and ``dp`` what a client adds to a mean. Neither covers other
quantities that depend on training data and reach a model (Dwork and Roth 2014, section 2.3: only computations on the
noisy results are postprocessing).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..analysis.privacy import find_mechanism
from ..core.plan import Plan
from ..data.augmentation import mixes_images
from ..data.federation import Federation
from ..data.preparation import FeatureScaling, Normalization
from ..utils.errors import Ref, UsageError
from .settings import Settings


def refuse_uncovered(plan: Plan, settings: Settings, data: Federation) -> None:
    """Raise :class:`UsageError` if a sample changes others under a method that hides single samples.

    ``data``: the clients that train.
    """
    mechanism, name = find_mechanism(plan.method.rules, clients=False), plan.method.label
    if not (mechanism and mechanism.noise_multiplier):
        return
    for client in data.clients:
        normalization = client.train.normalization
        if normalization.fitted and isinstance(normalization, Normalization):
            raise UsageError(
                f"method {name!r}: with {{}}, each image of client {client.name!r} changes the scale of "
                "all its others, which noise on single samples does not hide: use {}, unit or imagenet",
                Ref(normalize="client"),
                Ref(normalize="half"),
            )
    train = next((client.train for client in data.clients if len(client.train) > 1), None)
    if settings.augment and train is not None:
        x = torch.rand(4, *train.shape, generator=torch.Generator().manual_seed(0))
        if mixes_images(settings.augment, x):
            raise UsageError(
                f"method {name!r}: augment {settings.augment} mixes the images of a batch, so that each changes the "
                "gradients of others, which noise on single samples does not hide: augment each image by itself"
            )


def list_uncovered(plan: Plan, settings: Settings, data: Federation, trials: int = 1) -> tuple[str, ...]:
    """Return what depends on the training data and is not covered by epsilon, for a sentence.

    ``trials``: methods x seeds of the run, whose epsilons add up.
    """
    return tuple(_iterate_uncovered(plan, settings, data, trials))


def _iterate_uncovered(plan: Plan, settings: Settings, data: Federation, trials: int) -> Iterator[str]:
    yield "measured losses and metrics"
    of_clients = find_mechanism(plan.method.rules, clients=True) is not None
    if of_clients and (plan.personal or any(bound.names for bound in plan.rules) or plan.personalizes):
        yield "what clients keep and the models that they use"
    elif plan.method.finetune:
        yield "models that clients fine-tune for use"
    if not of_clients and any(isinstance(client.train.normalization, FeatureScaling) for client in data.clients):
        yield "the scaling of each table by its own training rows"
    if data.task != data.task.unfitted():
        yield "the scaling of targets by statistics of all clients"
    if settings.weights is not None:
        yield "the initial weights, which count as public"
    if settings.select == "best":
        yield "the choice of the round on validation data"
    if trials > 1:
        yield f"the run's {trials - 1} other trial{'s' * (trials > 2)}, whose epsilon adds up with this one"
