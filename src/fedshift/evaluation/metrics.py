"""Evaluation of models on splits, as counts from which every metric derives.

``personal`` is the model that a client would use, ``global`` the one that the server holds. A method without a global
model (FedBN) has none, nor has a personal method's client that never trained a personal one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ..core.kernel import ServerState, global_state
from ..core.plan import Plan, forward
from ..data.federation import ClientData, Federation
from ..data.samples import Samples
from ..results.schema import Row
from ..utils.state import State

BATCH = 250
"""Samples in one forward pass of evaluation."""
RANKED = 1_000_000
"""Largest number of scores ranked at once."""


def measured_splits(data: Federation) -> tuple[str, ...]:
    """Return the splits that are measured: test data, and validation data where all clients have some."""
    return ("test", "validation") if all(client.validation for client in data.clients) else ("test",)


def evaluate(plan: Plan, state: State, split: Samples, classes: int) -> Row:
    """Return counts of the model under ``state`` on ``split``: samples, loss_sum, hits, support, auc."""
    return evaluate_together(plan, state, [split], classes)[0]


@torch.inference_mode()
def evaluate_together(plan: Plan, state: State, splits: Iterable[Samples], classes: int) -> list[Row]:
    """Return :func:`evaluate` of each of ``splits``; small ones share a forward pass."""
    rows: list[Row] = []
    for group in _group_splits(splits, BATCH if _is_samplewise(plan) else 0):
        outputs = [
            forward(plan, state, torch.cat([split.inputs(part, plan.dtype) for split in group]))
            for part in (slice(start, start + BATCH) for start in range(0, len(max(group, key=len)), BATCH))
        ]
        sizes = [len(split) for split in group]
        logits, labels = torch.cat(outputs).cpu(), torch.cat([split.y for split in group]).cpu()
        rows += [
            _counts(*part, classes) for part in zip(torch.split(logits, sizes), torch.split(labels, sizes), strict=True)
        ]
    return rows


def _group_splits(splits: Iterable[Samples], most: int) -> Iterator[list[Samples]]:
    """Yield ``splits`` in order, grouped up to ``most`` samples; a larger one is a group by itself."""
    group: list[Samples] = []
    size = 0
    for split in splits:
        if group and size + len(split) > most:
            yield group
            group, size = [], 0
        group.append(split)
        size += len(split)
    if group:
        yield group


def _is_samplewise(plan: Plan) -> bool:
    """Return whether the model's output for a sample is independent of the rest of the batch."""
    return not any(isinstance(layer, _BatchNorm) and layer.running_mean is None for layer in plan.module.modules())


def _counts(logits: Tensor, y: Tensor, classes: int) -> Row:
    loss = 0.0
    for part in zip(torch.split(logits, BATCH), torch.split(y, BATCH), strict=True):
        loss += float(F.cross_entropy(*part)) * len(part[1])  # not the training loss
    correct = logits.argmax(dim=1) == y
    return {
        "samples": len(y),
        "loss_sum": loss,
        "hits": torch.bincount(y[correct], minlength=classes).tolist(),
        "support": torch.bincount(y, minlength=classes).tolist(),
        "auc": _auc(logits.double(), y),
    }


def _auc(logits: Tensor, y: Tensor) -> float | None:
    """Return the area under the ROC curve; None unless every class occurs and every score is finite."""
    classes = logits.shape[1]
    if classes < 2 or len(torch.unique(y)) < classes or not bool(logits.isfinite().all()):
        return None
    score_KN, positive_KN = logits.softmax(dim=1).T.contiguous(), y == torch.arange(classes)[:, None]
    most = max(1, RANKED // len(y))
    parts = zip(torch.split(score_KN, most), torch.split(positive_KN, most), strict=True)
    return float(sum(area for part in parts for area in _areas(*part))) / classes


def _areas(score_KN: Tensor, positive_KN: Tensor) -> list[float]:
    """Return the share of (positive, negative) pairs that each class's score orders correctly; ties count one half.

    The statistic of Mann and Whitney (1947), from ranks; scikit-learn's takes longer to import than a small run.
    """
    ordered_KN = score_KN.sort(dim=1).values
    below_KN, upto_KN = (torch.searchsorted(ordered_KN, score_KN, right=right) for right in (False, True))
    rank_KN = (below_KN + upto_KN + 1).double() / 2
    p_K = positive_KN.sum(dim=1)
    n_K = score_KN.shape[1] - p_K
    areas: list[float] = (((rank_KN * positive_KN).sum(dim=1) - p_K * (p_K + 1) / 2) / (p_K * n_K)).tolist()
    return areas


def evaluate_trained(
    plan: Plan, state: State, clients: Iterable[ClientData], splits: tuple[str, ...], classes: int
) -> list[Row]:
    """Return one row per client and split of the model under ``state`` after local work (moment ``trained``)."""
    key = {"model": "personal", "moment": "trained"}
    return [
        {"client": client.name, "split": split, **key, **evaluate(plan, state, client.splits[split], classes)}
        for client in clients
        for split in splits
    ]


def evaluate_clients(
    plan: Plan,
    server: ServerState,
    data: Federation,
    splits: tuple[str, ...],
    personal: Callable[[ClientData], State | None],
) -> list[Row]:
    """Return one row per client, split and existing model, just after aggregation (moment ``loaded``).

    ``personal`` returns the model that a client would use, None where it has none.
    """
    shared = global_state(plan, server)
    common = shared is not None and not plan.personalizes
    known: dict[int, Row] = {}  # the shared model on each split, which clients may share
    if shared is not None:
        distinct = {id(part): part for client in data.clients for part in map(client.splits.__getitem__, splits)}
        known = dict(zip(distinct, evaluate_together(plan, shared, distinct.values(), data.classes), strict=True))
    rows: list[Row] = []
    for client in data.clients:
        own = shared if common else personal(client)
        for split in splits:
            part = client.splits[split]
            found = {"global": known[id(part)]} if shared is not None else {}
            if own is not None:
                found["personal"] = known[id(part)] if own is shared else evaluate(plan, own, part, data.classes)
            rows += [
                {"client": client.name, "split": split, "model": model, "moment": "loaded", **counted}
                for model, counted in found.items()
            ]
    return rows
