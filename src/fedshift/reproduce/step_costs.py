"""What the parts of a run cost on this machine: a step, a look at a sample, a visit of a client, a checkpoint, timed.

A step takes a time that it has whatever the batch and one for each sample, so a small and a larger batch are timed.
One thread's work is counted in seconds of the processor, so that it is the same while other programs run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from ..core.kernel import client_final, client_init, client_step_, init_client, init_server
from ..core.plan import Plan, forward
from ..core.server_round import StreamingAggregator
from ..core.work import Work
from ..data.image_transforms import Augmentation
from ..data.samples import Samples
from ..engines.cost_model import limit_threads
from ..engines.engine import training_inputs
from ..engines.identity import Identity
from ..results.checkpoint import save_checkpoint
from ..utils.allocator import keep_freed_memory
from ..utils.random_streams import torch_stream
from ..utils.state import add_prefix

FEW, MANY = 2, 16
"""Samples of the two batches that are timed."""
LEAST, NUMBERS = 8, 800_000
"""The larger batch has fewer where its inputs would hold more than so many numbers, but never less than these."""
ENOUGH = 0.03
"""Seconds after which a part is timed no more; each is timed twice at least."""


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Seconds of a local step: ``step`` whatever the batch, and ``sample`` for each of its samples; a ``look`` at one.

    ``apart``: whether the network treats each sample by itself, so that single steps of clients can be one.
    """

    step: float
    sample: float
    look: float
    apart: bool


@dataclass(frozen=True, kw_only=True)
class VisitCosts:
    """Seconds of a ``visit`` of a client (loading, uploading, folding) and of a checkpoint's ``save``."""

    visit: float
    save: float


def time_steps(
    plan: Plan, shape: tuple[int, ...], *, pixels: bool, classes: int, augment: Augmentation | None = None
) -> StepCosts:
    """Time steps of ``plan`` and looks on made up samples of this shape, uint8 where they are ``pixels``."""
    many = min(MANY, max(LEAST, NUMBERS // max(1, torch.Size(shape).numel())))
    with torch_stream(0, "timing"), keep_freed_memory():
        x = torch.randint(256, (many, *shape), dtype=torch.uint8) if pixels else torch.rand(many, *shape)
        split = Samples(x=x, y=torch.arange(many) % classes)
        key = torch.zeros((), dtype=torch.int64)
        job = client_init(plan, init_client(plan), init_server(plan), planned_steps=1)

        def step(batch: int) -> Callable[[], object]:
            index = torch.arange(batch)
            return lambda: client_step_(
                plan, job, training_inputs(split, index, plan.dtype, augment, 0, "client", 0), split.y[index], key
            )

        small, large = _time_on_one_thread(step(FEW)), _time_on_any_threads(step(many))
        look = _time_on_any_threads(lambda: forward(plan, plan.initial, split.inputs(slice(None), plan.dtype))) / many
        sample = max(look, (large - small) / (many - FEW))
        plain = replace(plan, work=Work(batch_size=FEW, batches=1))
        apart = Identity.refusal(plain, {"client": split}) is None
    return StepCosts(step=max(0.0, small - FEW * sample), sample=sample, look=look, apart=apart)


def time_visits(plan: Plan) -> VisitCosts:
    """Time a visit under ``plan``, and a checkpoint of its network."""
    client, server = init_client(plan), init_server(plan)

    def visit() -> None:
        _, update = client_final(plan, client_init(plan, client, server, planned_steps=1))
        folding = StreamingAggregator(plan, server, ("client",), {"client": 1})
        folding.add("client", replace(update, weight=1.0))
        folding.finalize()

    with TemporaryDirectory() as folder, keep_freed_memory():
        state = add_prefix("server", plan.initial)
        save = _time_quickest(lambda: save_checkpoint(Path(folder) / "one", state, {}), time.perf_counter)
        return VisitCosts(visit=_time_on_one_thread(visit), save=save)


def _time_on_any_threads(work: Callable[[], object]) -> float:
    """Seconds of ``work`` on one thread, or on all of torch's where that is quicker, as engines choose."""
    alone = _time_on_one_thread(work)
    return alone if torch.get_num_threads() == 1 else min(alone, _time_quickest(work, time.perf_counter))


def _time_on_one_thread(work: Callable[[], object]) -> float:
    with limit_threads(1):
        return _time_quickest(work, time.process_time)


def _time_quickest(work: Callable[[], object], clock: Callable[[], float]) -> float:
    """The least seconds of ``work``, by ``clock``, over some times."""
    found: list[float] = []
    while len(found) < 2 or (sum(found) < ENOUGH and len(found) < 5):
        began = clock()
        work()
        found.append(clock() - began)
    return min(found)
