"""Values passed between processes: tensors are copied into shared memory, the rest is pickled.

The memory is a file without a name, so that nothing is left behind whichever process is killed. Classes and functions
that cannot be imported elsewhere (from a notebook, inside a function) are pickled by value, by cloudpickle.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import tempfile
from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import cloudpickle
import torch
from torch import Tensor

ALIGNMENT = 64
"""Tensors begin at multiples of this many bytes."""


class SharedMemoryBuffer:
    """Shared memory behind the file descriptor ``fd``, which it owns; without one, new memory. It holds one value."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = _open_unnamed_file() if fd is None else fd
        self._map: mmap.mmap | None = None

    def write(self, value: Any) -> bytes:
        """Replace the content by ``value``; return the layout that :meth:`read` needs."""
        tensors, packed = pickle_without_tensors(value)
        end, starts = 0, []
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        if end > os.fstat(self.fd).st_size:
            os.ftruncate(self.fd, end)
        for start, tensor in zip(starts, tensors, strict=True):
            self._view(start, tensor.dtype, tuple(tensor.shape)).copy_(tensor.detach())
        return pickle.dumps((starts, packed))

    def read(self, layout: bytes) -> Any:
        """Return the value that :meth:`write` stored, its tensors still in the buffer: they change with its content."""
        starts, packed = pickle.loads(layout)
        return unpickle_with_tensors(packed, lambda number, dtype, shape: self._view(starts[number], dtype, shape))

    def take(self, layout: bytes) -> Any:
        """Return the value that :meth:`write` stored, in memory of this process: the buffer can be written again."""
        starts, packed = pickle.loads(layout)
        return unpickle_with_tensors(
            packed, lambda number, dtype, shape: self._view(starts[number], dtype, shape).clone()
        )

    def close(self) -> None:
        """Release the memory, which lasts as long as a tensor uses it."""
        os.close(self.fd)

    def _view(self, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor that begins at byte ``start``."""
        count = prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        if self._map is None or len(self._map) < start + count * dtype.itemsize:
            self._map = mmap.mmap(self.fd, 0)  # the whole file; tensors on a smaller map keep that one alive
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=start).reshape(shape)


def _open_unnamed_file() -> int:
    if hasattr(os, "memfd_create"):  # not in /dev/shm, of which a container has 64 MB: writing beyond it kills
        return os.memfd_create("fedshift")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def pickle_without_tensors(value: Any) -> tuple[list[Tensor], bytes]:
    """Return the tensors in ``value``, and the rest pickled; raise the error of pickling where that is impossible."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return pickler.tensors, file.getvalue()


def unpickle_with_tensors(packed: bytes, load: Callable[[int, torch.dtype, tuple[int, ...]], Tensor]) -> Any:
    """Return the value that :func:`pickle_without_tensors` pickled; ``load`` gives each tensor by its number."""
    return _Unpickler(packed, load).load()


def _reduce_torch_constant(value: Any) -> Any:
    return getattr, (torch, str(value).removeprefix("torch."))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves plain tensors out, and numbers them; names torch's constants as torch does.

    Pickle by itself names them after any module that imported torch, which another process may not find.
    """

    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child(
        dict.fromkeys((torch.dtype, torch.layout, torch.memory_format), _reduce_torch_constant)
    )

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> Any:
        plain = type(value) is Tensor and value.device.type == "cpu" and value.layout == torch.strided
        if not plain or value.requires_grad or value.is_quantized:
            return None
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return self._numbers[id(value)], value.dtype, tuple(value.shape)


class _Unpickler(pickle.Unpickler):
    """Puts tensors back, one that occurs several times as one."""

    def __init__(self, packed: bytes, load: Callable[[int, torch.dtype, tuple[int, ...]], Tensor]) -> None:
        super().__init__(io.BytesIO(packed))
        self._load = cache(load)

    def persistent_load(self, pid: Any) -> Tensor:
        return self._load(*pid)
