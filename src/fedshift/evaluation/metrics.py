"""Evaluation of models on splits, as counts that determine every metric.

``personal`` is the model that a client would use, ``global`` the one that the server holds. A method such as FedBN has
no global model, and with a personal method a client that never trained has no personal model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ..core.kernel import global_state
from ..core.network import forward
from ..core.plan import Plan
from ..core.states import ServerState
from ..data.federation import ClientData, Federation
from ..data.patches import slide
from ..data.pictures import to_pictures
from ..data.samples import Samples
from ..results.cases import Picture, Records, rank_results
from ..results.schema import Row, add_rows
from ..tasks.task import BATCH as BATCH
from ..tasks.task import Task
from ..utils.random_streams import torch_stream
from ..utils.state import State

LARGE = 2**28
"""Maximum bytes of float32 inputs in an evaluation batch; with small samples, :data:`BATCH` limits the batch."""


PICTURED, PICTURED_EACH = 8, 2
"""Largest number of pictures of a method's worst results, and of those of one client."""


def measured_splits(data: Federation) -> tuple[str, ...]:
    """Return the measured splits: test data, and validation data if all clients that train have some."""
    train = [client for client in data.clients if len(client.train)]
    return ("test", "validation") if all(client.validation for client in train) else ("test",)


def evaluate(plan: Plan, state: State, split: Samples, task: Task, classes: int) -> Row:
    """Return the counts of ``task`` for the model with ``state`` on ``split``."""
    return evaluate_together(plan, state, [split], task, classes)[0]


@torch.inference_mode()
def evaluate_together(plan: Plan, state: State, splits: Iterable[Samples], task: Task, classes: int) -> list[Row]:
    """Return :func:`evaluate` of each of ``splits``; small ones share a forward pass, and cases are counted singly."""
    return [_add_up([task.measure(*part, classes) for part in parts]) for parts in _predict(plan, state, list(splits))]


def _add_up(counts: Sequence[Row]) -> Row:
    """Return the counts of a split from those of its parts."""
    return counts[0] if len(counts) == 1 else add_rows(counts)


def _predict(plan: Plan, state: State, splits: Sequence[Samples]) -> Iterator[Iterable[tuple[Tensor, Tensor]]]:
    """Yield the model's outputs and the targets of each of ``splits``, as one part, or a part for each of its cases."""
    whole = _predict_whole(plan, state, [split for split in splits if split.patches is None])
    yield from (_predict_cases(plan, state, split) if split.patches else [next(whole)] for split in splits)


@torch.inference_mode(False)  # inference tensors would stay in what a network keeps
@torch.no_grad()
def _predict_cases(plan: Plan, state: State, split: Samples) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the model's outputs ``[1, K, ...]`` and the targets of each case, by windows, on the processor."""
    assert split.patches is not None
    for number in range(len(split)):
        x, y = split.read_case(number)
        yield slide(lambda x: forward(plan, state, split.scale(x, plan.dtype)), x, split.patches.size).cpu(), y.cpu()


@torch.inference_mode(False)
@torch.no_grad()
def _predict_whole(plan: Plan, state: State, splits: Iterable[Samples]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the model's outputs and the targets of each of ``splits``, on the processor."""
    splits = list(splits)
    most = max(1, min(BATCH, LARGE // max(4 * prod(split.shape) for split in splits))) if splits else BATCH
    for group in _group_splits(splits, most if _is_samplewise(plan) else 0):
        sizes = [len(split) for split in group]
        outputs: Tensor | None = None
        for start in range(0, max(sizes), most):
            x = torch.cat([s.inputs(slice(start, start + most), plan.dtype) for s in group])
            with torch_stream(plan.seed, "evaluation", start) if plan.traits.draws else nullcontext():
                made = forward(plan, state, x)
            # into one array: small tensors kept between large freed ones would make the heap grow by the large ones
            outputs = made.new_empty(sum(sizes), *made.shape[1:]) if outputs is None else outputs
            outputs[start : start + len(made)] = made
        assert outputs is not None
        made, targets = outputs.cpu(), torch.cat([split.targets() for split in group]).cpu()
        yield from zip(torch.split(made, sizes), torch.split(targets, sizes), strict=True)


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


def evaluate_trained(
    plan: Plan, state: State, clients: Iterable[ClientData], splits: tuple[str, ...], task: Task, classes: int
) -> list[Row]:
    """Return one row per client and split of the model with ``state`` after local work (moment ``trained``)."""
    key = {"model": "personal", "moment": "trained"}
    return [
        {"client": client.name, "split": split, **key, **evaluate(plan, state, client.splits[split], task, classes)}
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

    ``personal`` returns the model that a client would use, None if it has none.
    """
    shared = global_state(plan, server)
    common = shared is not None and not plan.personalizes
    known: dict[int, Row] = {}  # of the shared model, by split: clients may share splits
    if shared is not None:
        distinct = {id(part): part for client in data.clients for part in map(client.splits.__getitem__, splits)}
        known = dict(
            zip(distinct, evaluate_together(plan, shared, distinct.values(), data.task, data.classes), strict=True)
        )
    rows: list[Row] = []
    for client in data.clients:
        own = shared if common else personal(client)
        for split in splits:
            part = client.splits[split]
            found = {"global": known[id(part)]} if shared is not None else {}
            if own is not None:
                found["personal"] = (
                    known[id(part)] if own is shared else evaluate(plan, own, part, data.task, data.classes)
                )
            rows += [
                {"client": client.name, "split": split, "model": model, "moment": "loaded", **counted}
                for model, counted in found.items()
            ]
    return rows


def record_clients(
    plan: Plan,
    server: ServerState,
    data: Federation,
    personal: Callable[[ClientData], State | None],
    split: str = "test",
) -> dict[tuple[str, str], Records]:
    """Return the records of single samples of ``split`` by client and model (:mod:`fedshift.results.cases`).

    Models are as in :func:`evaluate_clients`; clients with the same samples and model share records.
    """
    shared, found = global_state(plan, server), dict[tuple[str, str], Records]()
    held = {client.name: client.splits[split] for client in data.clients if split in client.splits}
    distinct = {id(samples): samples for samples in held.values()}
    outputs = _predict(plan, shared, list(distinct.values())) if shared is not None else ()
    grouped = any(samples.group is not None for samples in distinct.values())

    def record(samples: Samples, parts: Iterable[tuple[Tensor, Tensor]]) -> Records:
        return _record(samples, parts, data.task, data.classes, grouped=grouped)

    known = {id(samples): record(samples, parts) for samples, parts in zip(distinct.values(), outputs, strict=False)}
    for client in (client for client in data.clients if client.name in held):
        own_samples = held[client.name]
        own = personal(client) if plan.personalizes or shared is None else shared
        if shared is not None:
            found[client.name, "global"] = known[id(own_samples)]
        if own is shared and own is not None:
            found[client.name, "personal"] = known[id(own_samples)]
        elif own is not None:
            (parts,) = _predict(plan, own, [own_samples])
            found[client.name, "personal"] = record(own_samples, parts)
    return found


def measure_singly(plan: Plan, state: State, split: Samples, task: Task, classes: int) -> tuple[Row, Records]:
    """Return the counts of :func:`evaluate` for the model with ``state``, and the records of single samples."""
    (predicted,) = _predict(plan, state, [split])
    parts = list(predicted)
    counts = _add_up([task.measure(*part, classes) for part in parts])
    return counts, _record(split, parts, task, classes, grouped=split.group is not None)


def _record(
    samples: Samples, parts: Iterable[tuple[Tensor, Tensor]], task: Task, classes: int, *, grouped: bool
) -> Records:
    """Return the records of ``samples``, whose outputs and targets are ``parts``."""
    each = [task.record_all(*part, classes) for part in parts]
    made = {name: np.concatenate([one[name] for one in each]) for name in each[0]}
    return {**made, "group": samples.units.cpu().int().numpy()} if made and grouped else made


@torch.no_grad()
def picture_worst(
    plan: Plan,
    server: ServerState,
    data: Federation,
    personal: Callable[[ClientData], State | None],
    records: Mapping[tuple[str, str], Records],
) -> list[Picture]:
    """Return pictures of the test images with the worst results, at most :data:`PICTURED`, the worst first.

    ``records``: of :func:`record_clients`, on test data. Each client has at most :data:`PICTURED_EACH`.
    """
    shared, worst = global_state(plan, server), list[tuple[float, int, int]]()
    for place, client in enumerate(data.clients):
        found = records.get((client.name, "personal"))
        if found and "loss" in found and len(client.test.shape) in (3, 4):
            badness = rank_results(found)
            ahead = np.argsort(-badness, kind="stable")[:PICTURED_EACH].tolist()  # NaN comes last
            worst += [(-badness[row], place, row) for row in ahead if not np.isnan(badness[row])]
    pictures: dict[tuple[int, int], NDArray[np.uint8]] = {}
    shown = sorted(worst)[:PICTURED]
    for place in dict.fromkeys(place for _, place, _ in shown):
        client = data.clients[place]
        rows = torch.tensor([row for _, owner, row in shown if owner == place])
        with torch.enable_grad():  # a policy for clients that never trained may compute gradients
            own = personal(client) if plan.personalizes or shared is None else shared
        outlined = own is not None and "predicted" in records[client.name, "personal"]
        if client.test.patches:
            for row in rows.tolist():
                case, masks = client.test.take_case(row), None
                if own is not None and outlined:
                    ((outputs, _),) = _predict_cases(plan, own, client.test.take(torch.tensor([row])))
                    masks = outputs.argmax(dim=1).to(torch.uint8)
                pictures[place, row] = to_pictures(case, slice(None), data.classes, masks)[0]
            continue
        masks = None
        if own is not None and outlined:
            single = _is_samplewise(plan)
            outputs, _ = next(_predict_whole(plan, own, [client.test.take(rows) if single else client.test]))
            masks = (outputs if single else outputs[rows]).argmax(dim=1).to(torch.uint8)
        images = to_pictures(client.test, rows, data.classes, masks)
        pictures |= {(place, row): image for row, image in zip(rows.tolist(), images, strict=True)}
    return [Picture(client=data.clients[place].name, row=row, image=pictures[place, row]) for _, place, row in shown]
