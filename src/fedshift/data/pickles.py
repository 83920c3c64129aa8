"""Pickles of arrays and plain values, read without running code in them.

A pickle is a program that may call any function of any module by name. Here, names are looked up in a short list of
stand-ins in this module, and numbers are read from the bytes with :func:`numpy.frombuffer`, so that not even NumPy's
constructors receive untrusted state. Pickles from Python 2 are supported (their strings are read as Latin-1).
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ..utils.errors import UsageError
from .formats import decompress, explain_errors

_DEPTH = 8
"""Maximum nesting depth of containers; published data sets need three."""


def read_pickle(path: Path) -> Any:
    """Read arrays, numbers, text and containers of these from a pickle, plain or compressed; text keys are ``str``.

    Arrays are read-only. Raises :class:`UsageError` for anything else, naming the file and any function that it calls.
    """
    with explain_errors(path, "a pickle of arrays"), decompress(path) as file:
        return load_pickle(file, path)


def load_pickle(file: IO[bytes], where: Path | str) -> Any:
    """Read a pickle as :func:`read_pickle` does, from an open file called ``where`` in error messages."""
    with explain_errors(where, "a pickle of arrays"):
        return _require_plain(_Unpickler(file, where).load(), where)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], where: Path | str) -> None:
        super().__init__(file, encoding="latin1")
        self.where = where

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise UsageError(
                f"{self.where} calls for {module}.{name}, which no array needs and which may run code: nothing of it "
                "was read. Get the file from its publisher again, or convert it to .npz where you trust it"
            )
        return _ADMITTED[module, name]


class _Dtype:
    """Safe replacement of ``numpy.dtype``: a type of numbers, text or objects, never a structure."""

    def __init__(self, code: str | bytes, *_: Any) -> None:
        code = code.decode("latin1") if isinstance(code, bytes) else code
        if not re.fullmatch(r"[biufSUO]\d{0,9}", code):
            raise pickle.UnpicklingError(f"arrays of type {code!r}")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        byte_order = state[1]
        self.dtype = self.dtype.newbyteorder("=" if byte_order == "|" else byte_order)


class _Array:
    """Safe replacement of ``numpy.ndarray``."""

    array: NDArray[Any]

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, by_columns, data = state
        self.array = _read_numbers(data, dtype, shape, "F" if by_columns else "C")


def _read_numbers(data: Any, dtype: _Dtype, shape: tuple[int, ...], order: str) -> NDArray[Any]:
    if dtype.dtype == object:
        flat = np.empty(len(data), object)
        for place, item in enumerate(list(data)):
            flat[place] = item
    else:
        flat = np.frombuffer(data.encode("latin1") if isinstance(data, str) else data, dtype.dtype)
    return flat.reshape(shape, order="F" if order == "F" else "C")


def _encode(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"text in encoding {encoding!r}")
    return text.encode("latin1")


_ADMITTED: dict[tuple[str, str], Callable[..., Any]] = {
    **{
        (f"numpy.{core}.{module}", name): read
        for core in ("core", "_core")
        for module, name, read in (
            ("multiarray", "_reconstruct", lambda *_: _Array()),
            ("multiarray", "scalar", lambda dtype, data: _read_numbers(data, dtype, (), "C")[()]),
            ("numeric", "_frombuffer", _read_numbers),
        )
    },
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
    **{
        (module, kind.__name__): kind
        for module in ("builtins", "__builtin__")
        for kind in (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict)
    },
}
"""Stand-ins by module and name; ``core`` became ``_core`` in NumPy 2."""


def _require_plain(value: Any, where: Path | str, depth: int = _DEPTH) -> Any:
    """Replace stand-ins with their arrays; raise :class:`UsageError` for other objects."""
    if depth == 0:
        raise UsageError(f"{where} holds containers more than {_DEPTH} deep: this is not a published data set")
    if isinstance(value, _Array):
        value = value.array
        if value.dtype == object:
            value.flat = [_require_plain(item, where, depth - 1) for item in value.flat]
        return value
    if isinstance(value, dict):
        return {
            key.decode("latin1") if isinstance(key, bytes) else key: _require_plain(item, where, depth - 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(_require_plain(item, where, depth - 1) for item in value)
    if value is None or isinstance(
        value, bool | int | float | complex | str | bytes | bytearray | np.generic | np.ndarray
    ):
        return value
    raise UsageError(f"{where} holds a {type(value).__name__} where arrays, numbers and text are expected")
