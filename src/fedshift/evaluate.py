"""Evaluation: what a model gets right on a split, as counts from which every metric derives.

``personal`` is the model that a client would use, ``global`` what the server holds; a method without a global model
(FedBN) is not given one, and a personal method's client that has never trained has no model of its own to measure.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .base.state import State
from .core.kernel import Server, global_state
from .core.plan import Plan, forward
from .data.federation import ClientData, Federation
from .data.split import Split
from .records import Row

BATCH = 500
"""Samples in one forward pass of evaluation."""


@torch.inference_mode()
def evaluate(plan: Plan, state: State, split: Split, classes: int) -> Row:
    """Counts of the model under ``state`` on ``split``: samples, loss_sum, hits, support, auc (see ``records``)."""
    outputs = []
    loss = torch.zeros((), dtype=torch.float64, device=split.y.device)
    for start in range(0, len(split), BATCH):
        part = slice(start, start + BATCH)
        logits = forward(plan, state, split.inputs(part, plan.dtype))
        loss += F.cross_entropy(logits, split.y[part]).double() * len(logits)  # whatever loss is trained on
        outputs.append(logits)
    logits = torch.cat(outputs).double()
    correct = logits.argmax(dim=1) == split.y
    return {
        "samples": len(split),
        "loss_sum": float(loss),
        "hits": torch.bincount(split.y[correct], minlength=classes).tolist(),
        "support": torch.bincount(split.y, minlength=classes).tolist(),
        "auc": _auc(logits, split.y),
    }


def _auc(logits: Tensor, y: Tensor) -> float | None:
    """Area under the ROC curve; None unless every class occurs and every score is finite."""
    classes = logits.shape[1]
    if classes < 2 or len(torch.unique(y)) < classes or not bool(logits.isfinite().all()):
        return None
    scores = logits.softmax(dim=1)
    return sum(_ranked(scores[:, k], y == k) for k in range(classes)) / classes


def _ranked(score: Tensor, positive: Tensor) -> float:
    """Share of pairs of a positive and a negative sample that ``score`` orders rightly, a tie counting one half.

    The statistic of Mann and Whitney (1947), from ranks; scikit-learn's takes longer to import than a small run.
    """
    _, place, count = torch.unique(score, return_inverse=True, return_counts=True)
    rank = (count.cumsum(0) - (count - 1) / 2).double()[place]
    p, n = int(positive.sum()), int((~positive).sum())
    return (float(rank[positive].sum()) - p * (p + 1) / 2) / (p * n)


def evaluate_clients(
    plan: Plan,
    server: Server,
    data: Federation,
    splits: tuple[str, ...],
    personal: Callable[[ClientData], State | None],
) -> list[Row]:
    """One row for each client, split and model that exists, just after aggregation (moment ``loaded``).

    ``personal`` gives the model that a client would use, None where it has none.
    """
    shared = global_state(plan, server)
    rows: list[Row] = []
    known: dict[int, Row] = {}  # the shared model on splits that several clients have
    for client in data.clients:
        models: dict[str, State] = {}
        if shared is not None:
            models["global"] = shared
        if shared is not None and not plan.personalizes:
            models["personal"] = shared
        elif (own := personal(client)) is not None:
            models["personal"] = own
        for split in splits:
            counted: dict[int, Row] = {}
            part = client.splits[split]
            for model, state in models.items():
                if state is shared and id(part) not in known:
                    known[id(part)] = evaluate(plan, state, part, data.classes)
                if id(state) not in counted:
                    counted[id(state)] = (
                        known[id(part)] if state is shared else evaluate(plan, state, part, data.classes)
                    )
                rows.append(
                    {"client": client.name, "split": split, "model": model, "moment": "loaded", **counted[id(state)]}
                )
    return rows
