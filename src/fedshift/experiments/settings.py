"""Settings: what all methods of a comparison share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from ..core.loss import CrossEntropy, Loss
from ..core.optimizer import SGD, Optimizer
from ..core.plan import Precision
from ..core.work import Work
from ..data.image_transforms import Augmentation
from ..engines.catalog import ENGINES
from ..results.schema import METRICS, MOMENTS
from ..utils.errors import UsageError, unknown_name
from ..utils.random_streams import stream

POLICIES = ("skip", "average", "nearest", "reestimate", "finetune", "finetune_bn")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all methods of a comparison share.

    ``participation``: clients that take part in a round, a number, or a fraction of them (float in (0, 1]).
    ``evaluate_every``: rounds between evaluations (the last is always evaluated); None: about ten in all. ``moments``:
    when clients' models are measured, ``loaded`` (just after aggregation, always) and ``trained`` (just after their
    local work, before aggregation). ``select``: the round that tables report, ``last``, or ``best`` on validation data.
    ``metric``: what they report, and what best is chosen by. ``target_metric``: the share of it to which rounds and bytes are
    reported. ``loss``: what is trained on. ``augment``: what is done to training images. ``newcomers``: clients that
    never take part in training. ``unseen``: how a client that never trained is measured by a method that keeps state on
    clients (see ``fedshift.evaluation.unseen_clients``). ``engine``: how clients are run (``auto`` chooses); ``workers``: processes at
    most where it uses some; ``precision``: what layers compute in.
    """

    rounds: int = 20
    work: Work = field(default_factory=lambda: Work(epochs=1))
    optimizer: Optimizer = field(default_factory=lambda: SGD(lr=0.01))
    participation: int | float | None = None
    evaluate_every: int | None = None
    moments: tuple[str, ...] = ("loaded",)
    select: Literal["last", "best"] = "last"
    newcomers: tuple[str, ...] = ()
    unseen: Literal["skip", "average", "nearest", "reestimate", "finetune", "finetune_bn"] = "skip"
    loss: Loss = field(default_factory=CrossEntropy)
    augment: Augmentation | None = None
    metric: str = "accuracy"
    target_metric: float | None = None
    engine: str = "auto"
    workers: int | None = None
    precision: Precision = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise UsageError(f"rounds={self.rounds}: must be at least 1")
        if self.evaluate_every is not None and self.evaluate_every < 1:
            raise UsageError(f"evaluate_every={self.evaluate_every}: must be at least 1")
        for moment in self.moments:
            if moment not in MOMENTS:
                raise unknown_name("moment", moment, MOMENTS)
        if "loaded" not in self.moments:
            raise UsageError(
                f"moments={','.join(self.moments)}: tables report models just after aggregation: give loaded as well"
            )
        if self.select not in ("last", "best"):
            raise unknown_name("selection", self.select, ("last", "best"))
        if self.metric not in METRICS or self.metric == "loss":
            raise unknown_name("metric", self.metric, (name for name in METRICS if name != "loss"))
        if self.target_metric is not None and not 0 < self.target_metric <= 1:
            raise UsageError(f"target_metric={self.target_metric}: give a share above 0 and at most 1, such as 0.9")
        if self.unseen not in POLICIES:
            raise unknown_name("policy for unseen clients", self.unseen, POLICIES)
        if self.engine not in (*ENGINES, "auto"):
            raise unknown_name("engine", self.engine, (*ENGINES, "auto"))
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"workers={self.workers}: must be at least 1")
        if self.precision not in get_args(Precision):
            raise unknown_name("precision", self.precision, get_args(Precision))
        share = self.participation
        if share is not None and (share <= 0 or (isinstance(share, float) and share > 1)):
            raise UsageError(
                f"participation={share}: give a number of clients (an integer of at least 1) or a fraction in (0, 1]"
            )
        try:
            torch.zeros(1, device=self.device).item()
        except (RuntimeError, AssertionError) as error:
            raise UsageError(f"device {self.device!r} cannot be used here ({error}): try cpu") from error

    def draw_participants(self, seed: int, round: int, names: tuple[str, ...]) -> tuple[str, ...]:
        """The clients that take part in ``round`` (from 1), in the order of ``names``."""
        share = self.participation
        if share is None:
            return names
        count = min(max(1, int(share * len(names) + 0.5)) if isinstance(share, float) else share, len(names))
        chosen = stream(seed, "participants", round).choice(len(names), size=count, replace=False)
        return tuple(names[i] for i in sorted(chosen))

    def skips_clients(self, names: tuple[str, ...]) -> bool:
        """Whether some client of ``names`` does not take part in every round."""
        return bool(self.newcomers) or len(self.draw_participants(0, 1, names)) < len(names)

    def is_evaluated(self, round: int) -> bool:
        """Whether ``round`` (from 1) ends with an evaluation."""
        every = self.evaluate_every or max(1, self.rounds // 10)
        return round % every == 0 or round == self.rounds
