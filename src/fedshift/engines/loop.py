"""The loop engine: clients one after another, batch after batch; the reference that other engines must equal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..base.errors import FedshiftError
from ..base.state import State
from ..base.streams import key_bits, torch_stream
from ..core.kernel import Client, Server, Update, begin, finish, step_
from ..core.plan import Plan
from ..core.work import batches
from ..data.split import Split


class Diverged(FedshiftError):
    """A client's loss or parameters became NaN or infinite."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """What a client's work of one round left: its new state, its upload, and the data loss of each step."""

    client: Client
    update: Update
    loss_sum: float


class Engine(Protocol):
    """Carries out the local work of the clients that take part in a round."""

    def __call__(
        self, plan: Plan, server: Server, clients: Mapping[str, Client], data: Mapping[str, Split], seed: int
    ) -> Iterator[tuple[str, Trained]]:
        """Yield each client of ``clients`` with its outcome as it is done, in any order.

        ``data``: the clients' training samples. Raises :class:`Diverged` naming client, round and step.
        """


def train(
    plan: Plan, server: Server, clients: Mapping[str, Client], data: Mapping[str, Split], seed: int
) -> Iterator[tuple[str, Trained]]:
    """The :class:`Engine` that runs one client after another in this process."""
    for name, client in clients.items():
        with torch_stream(seed, "torch", name, client.steps):
            trained = _work(plan, server, name, client, data[name], seed)
        yield name, trained


def _work(plan: Plan, server: Server, name: str, client: Client, data: Split, seed: int) -> Trained:
    bounds = plan.work.bounds(len(data), plan.smallest_batch)
    coming = plan.work.steps(client.steps, len(bounds))
    job = begin(plan, client, server, planned=len(coming))
    losses: list[Tensor] = []
    sizes: list[int] = []
    for step, index in batches(seed, name, len(data), bounds, coming):
        index = index.to(data.y.device)
        key = torch.tensor(key_bits(seed, "dropout", name, step) >> 65, device=data.y.device)
        x = plan.training_inputs(data, index, seed, name, step)
        job, loss = step_(plan, job, x, data.y[index], key)
        losses.append(loss)
        sizes.append(len(index))
    done, update = finish(plan, job)
    per_step = torch.stack(losses).double().cpu()
    _refuse_divergence(per_step, {**done.personal, **update.shared}, name, server.round + 1)
    return Trained(client=done, update=update, loss_sum=float(per_step @ torch.tensor(sizes, dtype=torch.float64)))


def _refuse_divergence(losses: Tensor, state: State, name: str, round: int) -> None:
    bad = (~losses.isfinite()).nonzero()
    if len(bad):
        at, what = f"step {int(bad[0, 0]) + 1} of {len(losses)}", f"loss {float(losses[bad[0, 0]])}"
    else:
        broken = [entry for entry, tensor in state.items() if not tensor.isfinite().all()]
        if not broken:
            return
        at, what = f"step {len(losses)} of {len(losses)}", f"{broken[0]} not finite"
    raise Diverged(
        f"training diverged: client {name!r}, round {round}, {at}: {what}. Lower the learning rate, or check the data"
    )
