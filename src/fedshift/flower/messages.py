"""Questions and answers between coordinator and sites: facts as JSON and named records of arrays, without pickle.

An :class:`Exchange` is the content of a Flower message. Entries travel in NumPy's format without pickle
(``np.lib.format``), which other Flower code can read too. NumPy has no bfloat16, which is sent as raw bytes with
fedshift's own serialization name. Flower does not compare the declared shape and type with the bytes, so
:func:`from_record` does this before it allocates anything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from io import BytesIO
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from torch import Tensor

from ..core.plan import Plan
from ..core.states import ServerState, Update
from ..utils.errors import FedshiftError, Part
from ..utils.state import State, split_state

FACTS = "fedshift"
VERSION = "version"
"""Fact of a question: the coordinator's version of fedshift."""
UPLOAD = "upload"
"""Fact of an upload, and of later questions: its digest, which identifies the client's state."""
LONGEST_FACTS = 2**24
"""Maximum number of characters in an exchange's facts as JSON."""
MOST_FAULTS, LONGEST_VALUE = 3, 80
"""Maximum number of faults that a refusal lists, and of characters of a refused value."""


class RefusedMessage(FedshiftError):
    """Received content is invalid; the message is one sentence with the reason, which may leave this machine.

    ``here``: text for the log of this machine only (paths, file names, values), which is never sent.
    """

    def __init__(self, text: str = "", *parts: Part, here: str = "") -> None:
        super().__init__(text, *parts)
        self.here = here


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn any exception into a :class:`RefusedMessage` that begins with ``what``: untrusted input fails in any way."""
    try:
        yield
    except RefusedMessage:
        raise
    except ValidationError as error:
        faults = list(map(_describe_fault, error.errors(include_url=False, include_context=False)))
        more = "; ..." if len(faults) > MOST_FAULTS else ""
        raise RefusedMessage(f"{what} ({'; '.join(faults[:MOST_FAULTS])}{more})") from error
    except FedshiftError as error:
        raise RefusedMessage(f"{what} ({{}})", error) from error
    except Exception as error:
        raise RefusedMessage(f"{what} ({type(error).__name__}: {error})") from error


def _describe_fault(fault: ErrorDetails) -> str:
    """Return the place of a fault, what is allowed there, and the value, unless it is a collection."""
    where, value, allowed = ".".join(map(str, fault["loc"])), fault["input"], fault["msg"].removeprefix("Value error, ")
    shown = f", not {value!r:.{LONGEST_VALUE}}" if isinstance(value, str | int | float | None) else ""
    return f"{where!r}: {allowed}{shown}" if where else allowed


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A question or an answer.

    Attributes:
        kind: the kind of question or answer.
        facts: JSON values by name.
        arrays: states by name, such as ``shared``.

    """

    kind: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, ArrayRecord] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of all entries, with the headers of their format."""
        return sum(len(array.data) for record in self.arrays.values() for array in record.values())

    def content(self) -> RecordDict:
        """Return the exchange as the content of a message."""
        facts = ConfigRecord({FACTS: json.dumps({"kind": self.kind, **self.facts})})
        return RecordDict({"config": facts, **self.arrays})

    @staticmethod
    def of(content: RecordDict) -> Exchange:
        """Return the exchange in a message's content; raise :class:`RefusedMessage` if there is none."""
        with refusing("it sent a message that is not fedshift's"):
            config = content.config_records["config"]
            text = config[FACTS]
            if len(content) > 1 + len(content.array_records) or len(config) > 1:
                raise ValueError("it has records that nobody asked for")
            if not isinstance(text, str) or len(text) > LONGEST_FACTS:
                raise ValueError(f"its facts are not a text of at most {LONGEST_FACTS} letters")
            facts = json.loads(text)
            return Exchange(kind=str(facts.pop("kind")), facts=facts, arrays=dict(content.array_records))


def digest_records(records: Mapping[str, ArrayRecord]) -> str:
    """Return a digest of ``records`` by their names: of names, declared types and shapes, and bytes of all arrays."""
    whole = sha256()
    for kind, record in sorted(records.items()):
        whole.update(json.dumps([kind, len(record)]).encode())
        for name, array in sorted(record.items()):  # a checkpoint has another order
            head = [name, array.dtype, list(array.shape), array.stype, len(array.data)]
            whole.update(json.dumps(head).encode())
            whole.update(array.data)
    return whole.hexdigest()


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
TYPES = NUMPY_TYPES | RAW_TYPES
"""Types of entries by name; :data:`NUMPY_TYPES` travel in NumPy's format."""
KNOWN_TYPES = ", ".join(TYPES)
NONE: Mapping[str, Sequence[int]] = MappingProxyType({})
MOST_SAMPLES = 10**12
"""More samples than any client uses in a round; a larger weight is an error."""


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
    if lacking := like.keys() - found.keys():
        raise RefusedMessage(f"{what} lacks entry {min(lacking)!r}")
    if beyond := found.keys() - like.keys():
        raise RefusedMessage(f"{what} has an entry {min(beyond)!r}, which does not belong there")
    for name, tensor in found.items():
        wanted, open_axes = like[name], free.get(name, ())
        shape = [length if axis in open_axes and length else usual
                 for axis, (length, usual) in enumerate(zip(tensor.shape, wanted.shape, strict=False))]  # fmt: skip
        if tensor.ndim != wanted.ndim or list(tensor.shape) != shape:
            allowed = tuple("any" if axis in open_axes else length for axis, length in enumerate(wanted.shape))
            said = str(allowed).replace("'", "")
            raise RefusedMessage(f"entry {name!r} of {what} has shape {tuple(tensor.shape)} in place of {said}")
        if tensor.dtype != wanted.dtype:
            raise RefusedMessage(f"entry {name!r} of {what} has type {tensor.dtype} in place of {wanted.dtype}")
        check_finite(name, tensor, what, wanted)


def check_finite(name: str, tensor: Tensor, what: str, wanted: Tensor) -> None:
    """Raise :class:`RefusedMessage` if ``tensor`` contains NaN, or infinity where ``wanted`` has another value."""
    same = tensor == wanted if tensor.shape == wanted.shape else torch.zeros_like(tensor, dtype=torch.bool)
    if tensor.is_floating_point() and not (tensor.isfinite() | same).all():
        raise RefusedMessage(f"entry {name!r} of {what} holds NaN or infinity")


def check_update(
    plan: Plan, server: ServerState, shared: State, memory: State, weight: float, steps: int,
    like_memory: Mapping[str, Tensor] | None = None, most: float | None = None,
) -> Update:  # fmt: skip
    """Return one client's upload with entries in the server's order; raise :class:`RefusedMessage` if it is invalid.

    ``shared``: exactly the entries that the scope of ``plan`` sends, with the shapes and types in ``server``.
    ``memory``: the rules' uploads by their names on the wire, with the entries, shapes and types of ``like_memory``
    unless that is None. All must be finite. ``weight``: samples used this round, an integer from 1 to ``most``
    (:func:`check_weight`). ``steps``: local steps, each with at least one sample.
    """
    check_state(shared, {name: x for name, x in server.shared.items() if name in plan.sent}, "the upload")
    check_state(memory, memory if like_memory is None else like_memory, "the upload's rule memory")
    samples = check_weight(weight, most)
    if not 1 <= steps <= samples:
        raise RefusedMessage(f"{steps} local steps on {samples:.0f} samples: each step takes one sample or more")
    ordered = {name: shared[name] for name in server.shared}
    return Update(shared=ordered, memory=split_state(plan.rule_names, memory), weight=samples, steps=steps)


def check_weight(weight: float, most: float | None = None) -> float:
    """Return ``weight`` as a float; raise :class:`RefusedMessage` unless it is an integer from 1 to ``most``."""
    bound = min(most or MOST_SAMPLES, MOST_SAMPLES)
    if not (1 <= weight <= bound and weight == math.floor(weight)):
        raise RefusedMessage(
            f"the weight is {weight!r:.24}: it must be a number of samples, whole and from 1 to {bound:.0f}"
        )
    return float(weight)


def describe_entries(record: ArrayRecord) -> dict[str, Any]:
    """Return number, bytes (of values, without headers), digest and names of the entries of a record."""
    size = sum(math.prod(array.shape) * TYPES[array.dtype].itemsize for array in record.values())
    return {"entries": len(record), "bytes": size, "digest": digest_records({"": record}), "names": sorted(record)}


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
