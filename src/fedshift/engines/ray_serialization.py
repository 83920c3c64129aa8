"""Values as Ray carries them: tensors as arrays of bytes, which lie in its object store uncopied, the rest pickled."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from .shared_memory import pickle_without_tensors

SerializedTensors = tuple[bytes, list[NDArray[np.uint8]]]
"""A value without its tensors, pickled; and the bytes of each tensor."""


def serialize(value: Any) -> SerializedTensors:
    """``value`` for :func:`deserialize`; raises what pickling raises where it cannot be."""
    tensors, packed = pickle_without_tensors(value)
    return packed, [_raw_bytes(tensor.contiguous()) for tensor in tensors]


def deserialize(parcel: SerializedTensors) -> Any:
    """What was wrapped, in memory of this process."""
    packed, raw = parcel
    return _Unpacker(packed, raw).load()


def _raw_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """The bytes of ``tensor``, which is contiguous, where they lie."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


class _Unpacker(pickle.Unpickler):
    """Puts tensors back, each where torch would have laid it: its address decides how some kernels round."""

    def __init__(self, packed: bytes, raw: Sequence[NDArray[np.uint8]]) -> None:
        super().__init__(io.BytesIO(packed))
        self._raw, self._placed = raw, dict[int, Tensor]()

    @override
    def persistent_load(self, pid: Any) -> Tensor:
        number, dtype, shape = pid
        if number not in self._placed:
            self._placed[number] = torch.empty(shape, dtype=dtype)
            _raw_bytes(self._placed[number])[:] = self._raw[number]
        return self._placed[number]
