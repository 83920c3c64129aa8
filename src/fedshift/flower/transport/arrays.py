"""States as Flower records, and the checks that an upload must pass before it reaches the server's model.

Entries are sent in NumPy's format without pickle (``np.lib.format``), which other Flower code can read too. NumPy has
no bfloat16, which is sent as raw bytes with fedshift's own serialization name. Flower does not compare the declared
shape and type with the bytes, so :func:`from_record` does this before it allocates anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from types import MappingProxyType

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from ...core.plan import Plan
from ...core.states import ServerState, Update
from ...utils.errors import FedshiftError
from ...utils.state import State, split_state

NUMPY = "numpy.ndarray"
"""Flower's name for NumPy's format."""
RAW = "fedshift.raw"
"""Raw bytes, little endian, in C order."""
NUMPY_TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
        torch.int8, torch.int16, torch.int32, torch.int64,
    )
}  # fmt: skip
RAW_TYPES = {"bfloat16": torch.bfloat16}
KNOWN_TYPES = ", ".join((*NUMPY_TYPES, *RAW_TYPES))
NONE: Mapping[str, Sequence[int]] = MappingProxyType({})
MOST_SAMPLES = 10**12
"""More samples than any client uses in a round; a larger weight is an error."""


class RefusedMessage(FedshiftError):
    """Received content is invalid; the message is one sentence with the reason."""


def to_record(state: Mapping[str, Tensor]) -> ArrayRecord:
    """Return ``state`` as a record, bit for bit; raise :class:`RefusedMessage` for a type that cannot be sent."""
    return ArrayRecord({name: _to_array(name, tensor) for name, tensor in state.items()})


def from_record(record: Mapping[str, Array]) -> State:
    """Return a copy of the state in a record (see :func:`to_record`), on the CPU.

    Raises :class:`RefusedMessage` if the bytes of an entry do not match its declared type and shape.
    """
    return {name: _to_tensor(name, array) for name, array in record.items()}


def check_state(
    found: Mapping[str, Tensor], like: Mapping[str, Tensor], what: str, free: Mapping[str, Sequence[int]] = NONE
) -> None:
    """Raise :class:`RefusedMessage` unless ``found`` has the entries, shapes and types of ``like``, all finite.

    ``what``: the name of ``found`` in the message, for example ``"the upload"``. ``free``: the axes, by entry, that may
    have any length of 1 or more, or the length in ``like``.
    """
    for name in like.keys() - found.keys():
        raise RefusedMessage(f"{what} lacks entry {name!r}")
    for name in found.keys() - like.keys():
        raise RefusedMessage(f"{what} has an entry {name!r}, which does not belong there")
    for name, tensor in found.items():
        wanted, open_axes = like[name], free.get(name, ())
        if tensor.ndim != wanted.ndim or any(
            length != usual and not (length and axis in open_axes)
            for axis, (length, usual) in enumerate(zip(tensor.shape, wanted.shape, strict=True))
        ):
            shape = tuple("any" if axis in open_axes else length for axis, length in enumerate(wanted.shape))
            said = str(shape).replace("'", "")
            raise RefusedMessage(f"entry {name!r} of {what} has shape {tuple(tensor.shape)} in place of {said}")
        if tensor.dtype != wanted.dtype:
            raise RefusedMessage(f"entry {name!r} of {what} has type {tensor.dtype} in place of {wanted.dtype}")
        check_finite(name, tensor, what)


def check_finite(name: str, tensor: Tensor, what: str) -> None:
    """Raise :class:`RefusedMessage` if ``tensor`` contains NaN or infinity."""
    if tensor.is_floating_point() and not tensor.isfinite().all():
        raise RefusedMessage(f"entry {name!r} of {what} holds NaN or infinity")


def check_update(
    plan: Plan,
    server: ServerState,
    shared: State,
    memory: State,
    weight: float,
    steps: int,
    like_memory: Mapping[str, Tensor] | None = None,
    most: float | None = None,
) -> Update:
    """Check one client's upload and return it with entries in the server's order.

    Args:
        plan: the trial's plan.
        server: the server state whose entries, shapes and types the upload must have.
        shared: exactly the entries that the method's scope sends; they must be finite.
        memory: the rules' uploads by their names on the wire; they must be finite.
        weight: samples used this round, an integer from 1 to ``most``.
        steps: local steps, each with at least one sample.
        like_memory: the entries, shapes and types that ``memory`` must have; None: any.
        most: the largest weight, at most :data:`MOST_SAMPLES`.

    Raises:
        RefusedMessage: if the upload cannot be used.

    """
    check_state(shared, {name: server.shared[name] for name in server.shared if name in plan.sent}, "the upload")
    if like_memory is not None:
        check_state(memory, like_memory, "the upload's rule memory")
    for name, tensor in memory.items():
        check_finite(name, tensor, "the upload's rule memory")
    samples = check_weight(weight, most)
    if not 1 <= steps <= samples:
        raise RefusedMessage(f"{steps} local steps on {samples:.0f} samples: each step takes one sample or more")
    ordered = {name: shared[name] for name in server.shared}
    return Update(shared=ordered, memory=split_state(plan.rule_names, memory), weight=samples, steps=steps)


def check_weight(weight: float, most: float | None = None) -> float:
    """Return ``weight`` as a float; raise :class:`RefusedMessage` unless it is an integer from 1 to ``most``."""
    bound = MOST_SAMPLES if most is None else min(most, MOST_SAMPLES)
    if not (1 <= weight <= bound and weight == math.floor(weight)):
        raise RefusedMessage(
            f"the weight is {weight!r:.24}: it must be a number of samples, whole and from 1 to {bound:.0f}"
        )
    return float(weight)


def _to_array(name: str, tensor: Tensor) -> Array:
    kind, plain = str(tensor.dtype).removeprefix("torch."), tensor.detach().cpu().contiguous()
    if kind in NUMPY_TYPES:
        buffer = BytesIO()
        np.save(buffer, plain.numpy(), allow_pickle=False)
        return Array(kind, tuple(plain.shape), NUMPY, buffer.getvalue())
    if kind in RAW_TYPES:
        return Array(kind, tuple(plain.shape), RAW, plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    raise RefusedMessage(f"entry {name!r} has type {tensor.dtype}, which cannot travel: {KNOWN_TYPES} can")


def _to_tensor(name: str, array: Array) -> Tensor:
    known = {NUMPY: NUMPY_TYPES, RAW: RAW_TYPES}.get(array.stype, {})
    if array.dtype not in known:
        raise RefusedMessage(
            f"entry {name!r} comes as {array.dtype!r} in {array.stype!r}, which is not read: {KNOWN_TYPES} are"
        )
    dtype, shape = known[array.dtype], tuple(array.shape)
    start, column_major = _numpy_header(name, array) if array.stype == NUMPY else (0, False)
    wanted, found = math.prod(shape) * dtype.itemsize, len(array.data) - start
    if min(shape, default=0) < 0 or wanted != found:
        raise RefusedMessage(
            f"entry {name!r} of shape {shape} and type {array.dtype} takes {wanted} bytes, but has {found}"
        )
    try:
        flat = torch.empty(found, dtype=torch.uint8)
        flat.numpy()[:] = np.frombuffer(array.data, np.uint8, offset=start)
        if dtype == torch.bool and (flat > 1).any():
            raise ValueError("a truth value is neither 0 nor 1")
        tensor = flat.view(dtype).reshape(shape[::-1] if column_major else shape)
    except (RuntimeError, ValueError, OverflowError, TypeError) as error:
        raise RefusedMessage(f"entry {name!r} of shape {shape} cannot be read: {error}") from error
    return tensor.permute(*reversed(range(tensor.ndim))).contiguous() if column_major else tensor


def _numpy_header(name: str, array: Array) -> tuple[int, bool]:
    """Check the header; return the offset of the values, and whether they are in Fortran order."""
    buffer = BytesIO(array.data)
    try:
        version = np.lib.format.read_magic(buffer)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, column_major, dtype = read(buffer)
    except ValueError as error:
        raise RefusedMessage(f"entry {name!r} is not in NumPy's format: {error}") from error
    if (shape, dtype) != (tuple(array.shape), np.dtype(array.dtype)):
        raise RefusedMessage(
            f"entry {name!r} is declared as {array.dtype} of shape {tuple(array.shape)}, but its bytes are {dtype} of "
            f"shape {shape}"
        )
    return buffer.tell(), column_major
