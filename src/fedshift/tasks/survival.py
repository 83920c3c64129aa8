"""Survival: time and event of each patient, float64 ``[N, 2]``; the network outputs one log-risk.

Risks rank patients within a client only: clients share no baseline hazard, and Cox's partial likelihood is computed
within each client's batches. The concordance index therefore counts pairs of one client's patients, and pooled values
add up clients' pairs. A pair with a risk that is not a number is never ranked correctly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from ..utils.errors import Ref, UsageError
from .task import Counts, Task, drop_infinite, has_possible_loss

CHUNK = 1024
"""Number of patients who are compared with all others at a time."""


def _explain_codes(event: Tensor) -> str:
    """Return what events ``[N]`` that are not 0 and 1 usually mean, with the fix."""
    codes = set(event.tolist())
    if codes <= {1.0, 2.0}:
        return " (as R codes it, 1 is censored and 2 is the event: subtract 1)"
    if codes <= set(map(float, range(10))):
        return " (codes of several kinds of events: write 1 for those that you study, and 0 for all others)"
    return ""


@dataclass(frozen=True, kw_only=True)
class Survival(Task):
    """The time to an event or to the end of observation, and 1 for an event, 0 for the end (censoring)."""

    name = "survival"
    metrics = ("c_index", "loss")
    loss = "cox"
    output = "risk"

    @override
    def make_blank_targets(self, samples: int, shape: tuple[int, ...], outputs: int) -> Tensor:
        return torch.tensor([[1.0, 0.0]], dtype=torch.float64).expand(samples, 2)

    @override
    def count_outputs(self, targets: Any) -> int:
        return 1

    @override
    def check_outputs(self, targets: Mapping[str, Tensor], samples: int) -> tuple[str, ...]:
        without = [
            f"{where} ({len(y)} patients)" for where, y in targets.items() if len(y) and not bool((y[:, 1] > 0).any())
        ]
        if without:
            raise UsageError(
                f"no event among the training patients of {', '.join(without)}, so that no risk can be learned there: "
                "leave them out ({})",
                Ref("domains"),
            )
        return ()

    @override
    def encode(self, y: Tensor) -> Tensor:
        """Return targets as the loss compares them, float32."""
        return y.float()

    @override
    def check_targets(self, y: Tensor, shape: tuple[int, ...], outputs: int, where: str) -> None:
        if y.ndim != 2 or y.shape[1] != 2:
            raise UsageError(f"{where}: targets of shape {tuple(y.shape)}; they must be [samples, 2]: time and event")
        for wrong, what in (
            (~y.isfinite().all(dim=1), "time or event is missing or infinite"),
            (y[:, 0] < 0, "time is negative"),
            ((y[:, 1] != 0) & (y[:, 1] != 1), f"event is neither 0 nor 1{_explain_codes(y[:, 1])}"),
            ((y[:, 0] == 0) & (y[:, 1] == 1), "event is at time 0, before observation began"),
        ):
            if bool(wrong.any()):
                at = int(wrong.nonzero()[0, 0])
                raise UsageError(
                    f"{where}: of sample {at} (time {float(y[at, 0]):g}, event {float(y[at, 1]):g}) the {what}: "
                    "correct or remove it"
                )

    @override
    def count(self, predictions: Tensor, y: Tensor, outputs: int) -> Counts:
        pairs = self.record(predictions, y, outputs)
        risk, time, event = (torch.from_numpy(pairs[name]) for name in ("risk", "time", "event"))
        loss = 0.0
        for at in torch.split(event.nonzero()[:, 0], CHUNK):
            at_risk = torch.where(time >= time[at, None], risk, -torch.inf)
            loss += float((at_risk.logsumexp(dim=1) - risk[at]).sum())
        return {
            "samples": len(y), "loss_sum": max(loss, 0.0), "invalid": int(risk.isnan().sum()),
            **{name: float(pairs[name].sum()) / 2 for name in ("concordant", "comparable")},  # a pair is of two
        }  # fmt: skip

    @override
    def record(self, predictions: Tensor, y: Tensor, outputs: int) -> Mapping[str, NDArray[Any]]:
        """Return each patient's time, event and risk, its pairs with others, and those that are ranked correctly."""
        risk, time, event = drop_infinite(predictions[:, 0]), y[:, 0].double(), y[:, 1] > 0
        concordant, comparable = torch.zeros_like(risk), torch.zeros_like(risk)
        for at in torch.split(event.nonzero()[:, 0], CHUNK):
            own = time[at, None]
            later = (time > own) | ((time == own) & ~event)  # a patient censored at the time of an event outlives it
            right = later * ((risk[at, None] > risk) + 0.5 * (risk[at, None] == risk))
            for total, pairs in ((concordant, right), (comparable, later.double())):
                total += pairs.sum(dim=0)
                total[at] += pairs.sum(dim=1)
        return {
            "time": time.numpy(), "event": event.numpy(), "risk": risk.numpy(),
            "concordant": concordant.numpy(), "comparable": comparable.numpy(),
        }  # fmt: skip

    @override
    def is_possible(self, counts: Counts) -> bool:
        pairs = counts["samples"] * (counts["samples"] - 1) / 2
        return bool(0 <= counts["concordant"] <= counts["comparable"] <= pairs) and has_possible_loss(counts)

    @override
    def strata(self, y: Tensor) -> Tensor:
        """Return 1 for patients with an event, so that splits keep the share of events."""
        return (y[:, 1] > 0).long()

    @override
    def describe(self, y: Tensor) -> Mapping[str, str]:
        events = int((y[:, 1] > 0).sum())
        return {"events": f"{events} of {len(y)}", "median time": f"{float(y[:, 0].median()):g}" if len(y) else "-"}
