"""Buffers: the kind of each, from its module and from passes in training, and the server's values.

In: a network and a batch. Out: the entries with their kinds, and what replaces a mean in the server's model. Running
statistics and counters of normalization and other moving averages are averaged like parameters: a new value is the old
one times a constant plus a function of the batch, so that the mean of averages is the average of means. Other buffers
have no mean. Constants stay unchanged. State that training changes (a queue and its pointer, a codebook, an observer's
range) stays on the client, which takes the server's before its first round; the server has the values of one client,
with the largest weight, the first by name among equals. Vectors of torch's ``spectral_norm`` (Miyato et al. 2018,
arXiv:1802.05957) belong to a weight: for a mean of weights, they are its first singular vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrizations import _SpectralNorm

from ..nn.recognition import Call, recorded_calls
from ..nn.surgery import BATCH_NORM
from ..utils.random_streams import torch_stream
from ..utils.state import State, clone, pick
from ..utils.words import Information, join_some
from .network import Network, forward
from .selection import KINDS, Entry, Kind

CLOSE = 1e-4
"""Tolerance of the constant that multiplies the old value of a moving average."""


@torch.no_grad()
def observe_entries(network: Network, x: Tensor) -> tuple[Entry, ...]:
    """Return the entries of ``network`` with what training shows of its buffers and of BatchNorm in functions.

    ``x [B, ...]``: inputs of a batch. ``network.traits`` says which buffers training changes.
    """
    after, kinds = _train_once(network, network.initial, x)
    owners = {entry.owner for entry in network.entries if entry.name in kinds}
    entries = [_observe(entry, network, kinds, computes=entry.owner in owners) for entry in network.entries]
    changing = [entry.name for entry in entries if entry.kind == "constant" and entry.moves]
    averages = _find_averages(network, changing, after, x)
    found: dict[str, Kind] = {name: "average" if name in averages else "state" for name in changing}
    return tuple(replace(entry, kind=found.get(entry.name, entry.kind)) for entry in entries)


def _train_once(network: Network, state: State, x: Tensor) -> tuple[State, dict[str, Kind | None]]:
    """Return ``state`` after a pass in training, and BatchNorm's entries; statistics with their kind."""
    state = clone(state)
    tensors = (*network.module.named_parameters(), *network.module.named_buffers(), *state.items())
    names = {id(tensor): name for name, tensor in tensors}
    with torch_stream(0, "buffers"), recorded_calls(network.module, BATCH_NORM) as calls:
        forward(network, state, x, training=True)
    taken = [pair for call in calls for pair in _name_arguments(call).items()]
    return state, {names[id(tensor)]: KINDS.get(name) for name, tensor in taken if id(tensor) in names}


def _name_arguments(call: Call) -> dict[str, Any]:
    names = ("running_mean", "running_var", "weight", "bias")
    order = names if call.function is F.batch_norm else names[2:] + names[:2]
    return dict(zip(order, call.args[1:], strict=False)) | call.kwargs


def _observe(entry: Entry, network: Network, kinds: dict[str, Kind | None], *, computes: bool) -> Entry:
    """Return the entry with its kind, if BatchNorm takes it, and whether training changes it.

    ``kinds``: of the entries that BatchNorm takes. ``computes``: whether the entry's owner computes BatchNorm.
    """
    kind, normal = kinds.get(entry.name) or entry.kind, entry.in_batch_norm
    moves = not entry.is_buffer or entry.name in (network.traits.changing or ())
    if isinstance(entry.owner, _BatchNorm):
        moves |= entry.name not in kinds  # the pass did not call it
    elif computes:
        tensor = network.initial[entry.name]
        counts = entry.kind == "constant" and moves and not tensor.ndim and tensor.dtype == torch.int64
        kind, normal = "counter" if counts else kind, counts or entry.name in kinds
    return replace(entry, kind="hidden" if entry.kind == "hidden" else kind, in_batch_norm=normal, moves=moves)


def _find_averages(network: Network, changing: Sequence[str], after: State, x: Tensor) -> frozenset[str]:
    """Return which of the buffers ``changing`` are moving averages: linear in their old values, by one constant.

    ``after``: the entries after a pass with the batch ``x``. Buffers of one module are moving averages together.
    """
    shifts = {
        name: torch.linspace(0.5, 1.5, start.numel()).to(start).view_as(start)
        for name, start in pick(network.initial, changing).items()
        if start.is_floating_point() and start.numel() and start.isfinite().all()
    }
    if not shifts:
        return frozenset()
    start = network.initial | {name: network.initial[name] + by for name, by in shifts.items()}
    shifted, _ = _train_once(network, start, x)

    def is_average(name: str) -> bool:
        if name not in shifts or after[name].shape != shifts[name].shape:
            return False
        slope = ((shifted[name] - after[name]) / shifts[name]).double()
        return bool((slope - slope.mean()).abs().max() < CLOSE and CLOSE < slope.mean() < 1 - CLOSE / 10)

    others = {name.rpartition(".")[0] for name in changing if not is_average(name)}
    return frozenset(name for name in shifts if name.rpartition(".")[0] not in others)


def list_kept(entries: Sequence[Entry], loaded: frozenset[str]) -> frozenset[str]:
    """Return the entries among ``loaded`` that clients keep nevertheless: state, and vectors of weights they keep."""
    loads = [entry for entry in entries if entry.name in loaded]
    weights = {entry.name.rpartition(".")[0] for entry in loads if not entry.is_buffer}
    lone = (entry.name for entry in loads if entry.kind == "spectral" and entry.name.rsplit(".", 2)[0] not in weights)
    return frozenset(entry.name for entry in loads if entry.kind == "state").union(lone)


def fit_spectral_norms(network: Network, state: State) -> State:
    """Return ``state`` with the vectors of ``spectral_norm`` that belong to its weights: their singular vectors.

    Layers whose entries ``state`` lacks, or whose weight is not finite, keep theirs.
    """
    fitted = dict(state)
    for prefix in {entry.name.rsplit(".", 2)[0]: None for entry in network.entries if entry.kind == "spectral"}:
        steps: Any = network.module.get_submodule(prefix)
        entries: dict[str, Any] = {name: fitted.get(f"{prefix}.{name}") for name in steps.state_dict()}
        if any(tensor is None or not tensor.isfinite().all() for tensor in entries.values()):
            continue
        weight: Any = [tensor for name, tensor in entries.items() if "." not in name]
        for number, step in enumerate(steps):
            own = {name: entries[f"{number}.{name}"] for name in step.state_dict()}
            if isinstance(step, _SpectralNorm) and own:
                own = dict(zip(("_u", "_v"), _find_vectors(step, weight[0]), strict=True))
                fitted |= {f"{prefix}.{number}.{name}": tensor.clone() for name, tensor in own.items()}
            weight = [functional_call(step, own, tuple(weight))]
    return fitted


def _find_vectors(step: _SpectralNorm, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first left and right singular vector of ``weight`` as a matrix."""
    matrix_MN = step._reshape_weight_to_matrix(weight).double()
    flat = matrix_MN if matrix_MN.shape[0] <= matrix_MN.shape[1] else matrix_MN.T
    left = torch.linalg.eigh(flat @ flat.T)[1][:, -1]
    right = F.normalize(flat.T @ left, dim=0, eps=step.eps)
    u, v = (left, right) if flat is matrix_MN else (right, left)
    return u.to(weight.dtype), v.to(weight.dtype)


def describe_buffers(network: Network) -> Iterator[str]:
    """Yield what the user should know of buffers: those that are not averaged, and statistics that are frozen."""
    kinds: tuple[Kind, ...] = ("state", "hidden", "spectral", "average")
    state, hidden, spectral, averages = ([e.name for e in network.entries if e.kind == kind] for kind in kinds)
    if state:
        yield (
            f"training changes {join_some(state)}, and a mean of clients would make no sense: each client keeps its "
            "state, and the server's model has that of the client with the largest weight"
        )
    if hidden:
        yield f"{join_some(hidden)}, not persistent, stay on each client, and the server's model has the initial values"
    if layers := {name.rsplit(".parametrizations.", 1)[0]: None for name in spectral}:
        yield Information(
            f"vectors of spectral_norm in {join_some(layers)} are computed from the averaged weights, not averaged"
        )
    if averages:
        yield Information(f"{join_some(averages)}: moving averages, which are averaged like parameters")
    frozen = [entry for entry in network.entries if entry.kind == "variance" and not entry.moves]
    if kept := [entry.name.rpartition(".")[0] for entry in frozen if entry.name in network.personal]:
        yield (
            f"{network.label} keeps statistics of BatchNorm that training does not change ({join_some(kept)} is "
            "frozen): there it differs from a method that shares them at most by affine parameters"
        )
