"""Interface of engines, which run the local work of a round's clients.

An engine depends only on the kernel, and methods do not depend on engines. It belongs to one trial: a plan, the
clients' training data and a seed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..core.declarations import Phase
from ..core.kernel import broadcast, client_init
from ..core.means import StreamingMean
from ..core.network import forward
from ..core.plan import Plan
from ..core.states import ClientState, SamplesBeforeWork, ServerState, Update
from ..core.work import Bounds, iterate_batches
from ..data.augmentation import Augmentation, augment_masks
from ..data.samples import Samples
from ..nn.recognition import placed_hooks
from ..utils.errors import FedshiftError, UsageError
from ..utils.profiling import timed_section
from ..utils.random_streams import key_bits, stream
from ..utils.state import State, clone, move_together, pick
from .half_precision import Step, advise

if TYPE_CHECKING:  # workers start faster without pandas
    from ..results.schema import Row

Data = Mapping[str, Samples]
"""Training samples by client."""
Batches = Sequence[tuple[int, Tensor]]
"""Steps, as pairs of the step's number and the indices of its samples."""


class Diverged(FedshiftError):
    """A client's loss or parameters became NaN or infinite."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientResult:
    """Result of a client's local work in one round.

    Attributes:
        client: the client's state after the round; for a remote client, only its number of steps.
        update: the client's upload.
        loss_sum: the data loss, summed over samples.
        summed: the sum with the upload's averaged entries, if ``update.shared`` lacks them; None: not summed.
        rows: measurements of the model after local work, if the engine evaluates it; None: the caller does.

    """

    client: ClientState
    update: Update
    loss_sum: float
    summed: StreamingMean | None = None
    rows: list[Row] | None = None


@dataclass(eq=False, repr=False)
class Engine(ABC):
    """Runs the clients' local work of a trial; call :meth:`close` at the end.

    Args:
        plan: the trial's plan.
        data: training samples by client.
        seed: the key of all random draws.
        workers: maximum number of processes, for engines that start some; None: one per free processor.
        augment: augmentation of training images.
        separate_uploads: whether each client's upload is needed; otherwise an engine may return sums of uploads.

    Raises:
        UsageError: the engine cannot run the plan.

    """

    plan: Plan
    data: Data
    seed: int
    workers: int | None = None
    augment: Augmentation | None = None
    separate_uploads: bool = True

    def __post_init__(self) -> None:
        if why := self.refusal(self.plan, self.data, self.augment):
            name = type(self).__name__.lower()
            fix = "use the sequential engine, which runs anything, or auto"
            raise UsageError(f"the {name} engine {why}: {fix}").about("engine")

    @classmethod
    def refusal(cls, plan: Plan, data: Data, augment: Augmentation | None = None) -> str | None:  # noqa: ARG003
        """Return why the engine cannot run ``plan`` on ``data``, as a predicate of a sentence; None if it can."""
        return None

    @property
    def max_share(self) -> float:
        """Maximum weight of a client among three or more; 1 if reported sizes are trusted."""
        return 1.0

    @abstractmethod
    def train(self, server: ServerState, clients: Mapping[str, ClientState]) -> Iterator[tuple[str, ClientResult]]:
        """Train ``clients`` for one round; yield each with its result as it finishes, in any order.

        A remote engine may omit clients that fail. Raises :class:`Diverged` naming client, round and step.
        """

    def find_available(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the clients among ``names`` that can take part in the next round; an engine may wait for them."""
        return names

    def evaluate(self, server: ServerState) -> list[Row] | None:
        """Return measurements of remote clients after aggregation; None if the data are in this process."""
        return None

    def evaluate_reestimated(self, server: ServerState) -> list[Row] | None:
        """Return measurements of remote clients' models with re-estimated BatchNorm statistics; None: data are here."""
        return None

    def facts(self) -> dict[str, Any]:
        """Return the engine's state for a checkpoint, as JSON values."""
        return {}

    def restore(self, facts: Mapping[str, Any]) -> None:  # noqa: B027 - most engines keep nothing
        """Restore the state that :meth:`facts` returned."""

    def begin_step(self, name: str, client: ClientState, server: ServerState, number: int = 0) -> Step:
        """Return the job with which client ``name`` starts the round, and the batch and the key of a step in it."""
        batches, server = self.draw_batches(name, client), broadcast(server, name)
        job = client_init(self.plan, client, server, len(batches), self.see(name, batches))
        step, index = batches[number]
        return job, *self.load_batch(name, step, index), self.step_keys(name, [step])[0]

    def refuse_divergence(
        self, losses: Tensor, state: State, name: str, client: ClientState, server: ServerState
    ) -> None:
        """Raise :class:`Diverged` if ``losses [steps]`` or entries of ``state`` after the round are not finite.

        Constants and other buffers without a mean may hold any value.
        """
        broken = find_broken(losses, pick(state, state.keys() - self.plan.whole))
        if broken is None:
            return
        (number, what), advice = broken, "Lower the learning rate, or check the data"
        if self.plan.autocast is torch.float16:
            advice = advise(self.plan, self.begin_step(name, client, server, number))
        at = f"round {server.round + 1}, step {number + 1} of {len(losses)}"
        raise Diverged(f"training diverged: client {name!r}, {at}: {what}. {advice}")

    def close(self) -> None:  # noqa: B027 - most engines hold nothing
        """Release the engine's resources."""

    def steps_of_round(self, name: str, client: ClientState) -> tuple[Bounds, range]:
        """Return the bounds of each batch in an epoch over the client's data, and the client's steps in this round."""
        bounds = self.plan.work.batch_bounds(len(self.data[name]), self.plan.smallest_batch)
        return bounds, self.plan.work.steps_of_round(client.steps, len(bounds))

    def draw_batches(self, name: str, client: ClientState, phase: Phase | None = None) -> Batches:
        """Return the client's batches in this round, or in a separate ``phase``, which counts its steps separately."""
        bounds, steps = self.steps_of_round(name, client)
        if phase:
            count = phase.epochs * len(bounds)
            done = self.plan.work.rounds(client.steps, len(bounds)) * count
            steps = range(done, done + count)
        return list(iterate_batches(self.seed, name, len(self.data[name]), bounds, steps))

    def load_batch(self, name: str, step: int, index: Tensor, stored: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return inputs ``[B, ...]`` and targets ``[B, ...]`` of a client's step on the samples at ``index``.

        Patches, augmentation and random transforms of lazy samples depend only on ``(seed, name, step)``; masks are cut
        and transformed with their images. ``stored``: the samples, if they have been read.
        """
        data, augment, key = self.data[name], self.augment, (self.seed, "augment", name, step)
        index = index.to(data.y.device)
        y = data.targets(index, (self.seed, name, step))
        stored = data.read(index, (self.seed, name, step)) if stored is None else stored
        if augment is None:
            return data.scale(stored, self.plan.dtype), y
        x = data.scale(stored, self.plan.dtype, lambda x: augment(x, stream(*key)))
        return x, augment_masks(augment, y, stream(*key)) if y.dim() > 2 else y

    def iterate(self, name: str, batches: Batches) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the inputs ``[B, ...]``, targets ``[B, ...]`` and key of each step."""
        keys = self.step_keys(name, [step for step, _ in batches])
        batches = move_batches(batches, keys.device)
        ahead = self.data[name].threaded and len(batches) > 1
        stored = self._read_ahead(name, batches) if ahead else repeat(None)
        for key, batch in zip(keys.unbind(), batches, strict=True):
            with timed_section("data"):
                x, y = self.load_batch(name, *batch, next(stored))
            yield x, y, key

    def _read_ahead(self, name: str, batches: Batches) -> Iterator[Tensor]:
        """Yield the stored samples of each batch, which a thread reads while the batch before is used."""
        read, calls = self.data[name].read, [(index, (self.seed, name, step)) for step, index in batches]
        with ThreadPoolExecutor(1) as thread:
            pending = thread.submit(read, *calls[0])
            for call in calls[1:]:
                stored, pending = pending.result(), thread.submit(read, *call)
                yield stored
            yield pending.result()

    def see(self, name: str, batches: Batches) -> SamplesBeforeWork | None:
        """Return the samples for :meth:`Rule.start` before the client's local work; None if no rule defines it.

        The first distinct samples of the round, augmented like the samples of its first step.
        """
        if not self.plan.defines("start"):
            return None
        data, count, step = self.data[name], self.plan.samples_before_work, batches[0][0]
        order = torch.cat([index for _, index in batches])
        _, first = np.unique(order.cpu().numpy(), return_index=True)
        x, y = self.load_batch(name, step, order[torch.from_numpy(np.sort(first))[: max(1, count)]])
        targets = data.targets() if any(bound.targets for bound in self.plan.rules) else y[:0]
        return SamplesBeforeWork(targets, x[:count], y[:count], self.step_keys(name, [step])[0])

    def draw_keys(self, steps: Mapping[str, Sequence[int]], device: torch.device) -> Tensor:
        """Return the keys of the random draws of clients' ``steps``, int64 ``[K, S]`` on ``device``.

        They are zeros if steps draw nothing, and after the last step of a client with fewer than others.
        """
        most = max(map(len, steps.values()))
        if not self.plan.draws:
            return torch.zeros(len(steps), most, dtype=torch.int64, device=device)
        keys_KS = [
            [*(key_bits(self.seed, "dropout", name, step) >> 65 for step in own), *[0] * (most - len(own))]
            for name, own in steps.items()
        ]
        return torch.tensor(keys_KS, device=device)

    def step_keys(self, name: str, steps: Sequence[int]) -> Tensor:
        """Return :meth:`draw_keys` of one client, ``[S]``, on the device of its data."""
        return self.draw_keys({name: steps}, self.data[name].y.device)[0]


EngineFactory = Callable[[Plan, Data, int], Engine]
"""Creates the engine of a trial from its plan, its clients' training samples and its seed."""


def find_exchange(plan: Plan) -> str | None:
    """Return why an engine cannot run other tensors in place of the model's, as a predicate; None if it can."""
    if not plan.traits.exchange:
        return None
    return (
        "replaces the model's tensors, which something else holds too, such as a closure, a list, a hook or a "
        f"checkpoint ({plan.traits.exchange})"
    )


def measure_activations(plan: Plan, data: Data) -> int:
    """Return the bytes of the layers' outputs for one sample, which training keeps until the backward pass."""
    counted: list[int] = []

    def count(_layer: nn.Module, _inputs: object, output: object) -> None:
        counted.append(output.nbytes if isinstance(output, Tensor) else 0)

    hooks = [layer.register_forward_hook(count) for layer in plan.layers if not any(layer.children())]
    with placed_hooks(hooks):
        forward(plan, clone(plan.initial), next(iter(data.values())).inputs(slice(0, 1), plan.dtype))
    return sum(counted)


def move_batches(batches: Batches, device: torch.device) -> Batches:
    """Return the steps with their indices on ``device``, to which they are copied all at once."""
    moved = move_together([index for _, index in batches], device)
    return [(step, index) for (step, _), index in zip(batches, moved, strict=True)]


def find_broken(losses: Tensor, state: State) -> tuple[int, str] | None:
    """Return the first step after which values are not finite, from 0, and which; None: all are finite.

    ``losses [steps]``: the data losses of a client's round; ``state``: entries after it.
    """
    if len(bad := (~losses.isfinite()).nonzero()):
        return int(bad[0, 0]), f"loss {float(losses[bad[0, 0]])}"
    sums = [tensor.sum().double() for tensor in state.values() if tensor.is_floating_point()]
    if not sums or torch.stack(sums).isfinite().all():  # a sum is not finite if a term is not
        return None
    broken = [entry for entry, tensor in state.items() if not tensor.isfinite().all()]
    return (len(losses) - 1, f"{broken[0]} not finite") if broken else None
