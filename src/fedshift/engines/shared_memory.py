"""Values handed from one process to another: their tensors are laid in shared memory, the rest is pickled.

The memory is a file without a name, so that nothing is left behind whichever process is killed. Classes and functions
that cannot be imported elsewhere (of a notebook, inside a function) travel whole, by cloudpickle.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import tempfile
from collections.abc import Callable
from math import prod
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from ..utils.state import clone

ALIGNMENT = 64
"""Bytes at whose multiples tensors begin."""
TensorLocation = tuple[int, torch.dtype, tuple[int, ...]]
"""Where a tensor lies: its first byte, its type, its shape."""


class SharedMemoryBuffer:
    """Shared memory behind the file descriptor ``fd``, which it owns; without one, new memory. It holds one value."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = _open_unnamed_file() if fd is None else fd
        self._map: mmap.mmap | None = None

    def write(self, value: Any) -> bytes:
        """Put ``value`` on the shelf, in place of what was there; returns what :meth:`read` needs to find it."""
        tensors, packed = pickle_without_tensors(value)
        end, starts = 0, []
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        if end > os.fstat(self.fd).st_size:
            os.ftruncate(self.fd, end)
        for start, tensor in zip(starts, tensors, strict=True):
            self._tensor((start, tensor.dtype, tuple(tensor.shape))).copy_(tensor.detach())
        return pickle.dumps((starts, packed))

    def read(self, laid: bytes) -> Any:
        """What :meth:`write` put there, its tensors still on the shelf: copy what must outlast the next value."""
        starts, packed = pickle.loads(laid)
        return _Unpacker(io.BytesIO(packed), starts, self._tensor).load()

    def close(self) -> None:
        """Let go of the memory, which lasts until no tensor lies in it."""
        os.close(self.fd)

    def _tensor(self, place: TensorLocation) -> Tensor:
        start, dtype, shape = place
        count = prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        if self._map is None or len(self._map) < start + count * dtype.itemsize:
            self._map = mmap.mmap(self.fd, 0)  # all of the file; tensors on a smaller map keep that one alive
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=start).reshape(shape)


def _open_unnamed_file() -> int:
    if hasattr(os, "memfd_create"):  # not in /dev/shm, of which a container has 64 MB: writing beyond it kills
        return os.memfd_create("fedshift")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def copy_out(value: Any) -> Any:
    """The dataclass ``value`` with its states in memory of this process, so that the shelf can be used again."""

    def copied(part: Any) -> Any:
        if isinstance(part, tuple):
            return tuple(map(copied, part))
        return clone(part) if isinstance(part, dict) else part

    return type(value)(**{name: copied(part) for name, part in vars(value).items()})


def pickle_without_tensors(value: Any) -> tuple[list[Tensor], bytes]:
    """The tensors in ``value``, and the rest pickled; raises what pickling raises where it cannot be."""
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(value)
    return packer.tensors, file.getvalue()


def _reduce_torch_constant(value: Any) -> Any:
    return getattr, (torch, str(value).removeprefix("torch."))


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
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


class _Unpacker(pickle.Unpickler):
    """Puts tensors back: the numbered begin at ``starts``, and ``at`` gives what lies at a place."""

    def __init__(self, file: io.BytesIO, starts: list[int], at: Callable[[TensorLocation], Tensor]) -> None:
        super().__init__(file)
        self._starts, self._at, self._placed = starts, at, dict[int, Tensor]()

    def persistent_load(self, pid: Any) -> Tensor:
        number, dtype, shape = pid
        if number not in self._placed:
            self._placed[number] = self._at((self._starts[number], dtype, shape))
        return self._placed[number]
