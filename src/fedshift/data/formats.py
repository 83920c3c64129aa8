"""File formats of published data as NumPy arrays: IDX, MATLAB's .mat, LIBSVM and .npz.

A file may be plain or compressed with gzip or bzip2, which its first bytes (not its name) show. IDX is defined by the
publishers of MNIST (http://yann.lecun.com/exdb/mnist/); the .mat layout is SVHN's "format 2"
(http://ufldl.stanford.edu/housenumbers/), which SynthDigits also uses.

A pickle is a program that may call any function of any module by name. Here, names are looked up in a short list of
stand-ins in this module, and numbers are read from the bytes with :func:`numpy.frombuffer`, so that not even NumPy's
constructors receive untrusted state. Pickles from Python 2 are supported (their strings are read as Latin-1).
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import math
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from ..utils.errors import UsageError
from ..utils.files import BoundedReader, check_archive, check_expansion, open_regular

Bytes = NDArray[np.uint8]
Numbers = NDArray[Any]
Row = TypeVar("Row")


@contextmanager
def explain_errors(where: Path | str, kind: str, fix: str = "get it again") -> Iterator[None]:
    """Convert any exception of a library for a damaged file into a :class:`UsageError` with file, ``kind`` and fix."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:  # libraries raise exceptions of any type for damaged bytes
        raise UsageError(
            f"{where} cannot be read as {kind} ({str(error) or type(error).__name__}): "
            f"it is cut short, damaged or of another kind; {fix}"
        ) from error


@contextmanager
def open_arrays(path: Path) -> Iterator[NpzFile]:
    """Open an ``.npz`` file, without pickle, after checking its unpacked size.

    Raises :class:`UsageError` if it does not fit in memory, or if an array's declared size is wrong.
    """
    check_archive(path)
    with open_regular(path) as file:
        with zipfile.ZipFile(file) as packed:
            for entry in packed.infolist():
                with packed.open(entry) as content:
                    _check_header(path, entry, content)
        file.seek(0)
        with np.load(file, allow_pickle=False) as arrays:
            yield arrays


def _check_header(path: Path, entry: zipfile.ZipInfo, content: IO[bytes]) -> None:
    """Raise :class:`UsageError` if the size in an array's header differs from the size of its entry in the archive."""
    if not entry.filename.endswith(".npy"):
        return
    version = np.lib.format.read_magic(content)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(content)
    declared, found = math.prod(shape) * dtype.itemsize, entry.file_size - content.tell()
    if declared != found and not dtype.hasobject:
        raise UsageError(
            f"{path}: array {entry.filename.removesuffix('.npy')!r} is declared as {dtype} of shape {shape}, "
            f"{declared} bytes, but has {found}: it is damaged; write it again with numpy.savez"
        )


def read_npz(file: Path, names: Iterable[str]) -> dict[str, Numbers]:
    """Return the named arrays of an ``.npz`` file, without pickle; raise :class:`UsageError` if one is missing."""
    with explain_errors(file, "an .npz file of arrays"), open_arrays(file) as packed:
        missing = [name for name in names if name not in packed]
        if missing:
            raise UsageError(f"{file} has no array {missing[0]!r} (it has {', '.join(packed)}): get the file again")
        return {name: packed[name] for name in names}


def read_csv(file: Path, kind: str, parse: Callable[[dict[str, str]], Row]) -> list[Row]:
    """Apply ``parse`` to each row of a CSV file (TSV if named ``.tab``), a dictionary of its cells by column.

    Errors, also errors of ``parse``, call the file ``kind``.
    """
    with explain_errors(file, kind), open_regular(file) as content:
        table = io.TextIOWrapper(content, encoding="utf-8-sig", newline="")
        return [parse(row) for row in csv.DictReader(table, delimiter="\t" if file.suffix == ".tab" else ",")]


@contextmanager
def decompress(path: Path) -> Iterator[IO[bytes]]:
    """Open the file and decompress it if necessary; raise :class:`UsageError` if it is implausibly large."""
    with open_regular(path) as plain:
        start = plain.read(3)
        plain.seek(0)
        if start[:2] == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=plain) as file:
                yield io.BufferedReader(BoundedReader(path, cast("IO[bytes]", file)))
        elif start == b"BZh":
            with bz2.BZ2File(plain) as file:
                yield io.BufferedReader(BoundedReader(path, file))
        else:
            yield plain


def read_idx(path: Path, dimensions: int) -> Bytes:
    """Return the bytes of an IDX file: ``dimensions`` 3 for gray images ``[N, H, W]``, 1 for labels ``[N]``.

    Raises :class:`UsageError` naming the file if its header is wrong or does not match its length.
    """
    with explain_errors(path, "an IDX file"), decompress(path) as file:
        content = file.read()
    magic = bytes((0, 0, 8, dimensions))
    if content[:4] != magic:
        raise UsageError(
            f"{path} begins with {content[:4].hex(' ') or 'nothing'}, an IDX file of bytes in {dimensions} dimensions "
            f"with {magic.hex(' ')}: it is another file; get it again"
        )
    start = 4 + 4 * dimensions
    shape = tuple(int.from_bytes(content[at : at + 4]) for at in range(4, start, 4))
    if len(content) != start + math.prod(shape):
        raise UsageError(
            f"{path} should hold {' x '.join(map(str, shape))} bytes, and holds {max(0, len(content) - start)}: "
            "it is cut short or damaged; get it again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def read_digits_mat(path: Path) -> tuple[Bytes, Numbers]:
    """Return images ``[N, 32, 32, 3]`` and labels ``[N]`` from a .mat file with ``X [32, 32, 3, N]`` and ``y``.

    Label 10 becomes 0. Raises :class:`UsageError` for any other file.
    """
    from scipy.io import loadmat, whosmat

    with explain_errors(path, "a MATLAB file"), open_regular(path) as file:
        given: Any = file  # scipy accepts files as well as names
        held: Sequence[tuple[str, tuple[int, ...], str]] = whosmat(given)
        check_expansion(path, sum(math.prod(shape) for name, shape, _ in held if name in ("X", "y")))
        file.seek(0)
        content = loadmat(given, variable_names=("X", "y"))
    missing = [name for name in ("X", "y") if name not in content]
    if missing:
        raise UsageError(f"{path} has no variable {missing[0]!r}: this is not the file of cropped digits; get it again")
    x, y = content["X"], content["y"].reshape(-1)
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[2] != 3 or x.shape[3] != len(y):
        raise UsageError(
            f"{path} has X of {x.dtype} {x.shape} and {len(y)} labels: cropped digits are uint8 (32, 32, 3, N) "
            "with N labels; get it again"
        )
    return x.transpose(3, 0, 1, 2), np.where(y == 10, 0, y)


def read_libsvm(path: Path, features: int) -> tuple[Numbers, Numbers]:
    """Return values ``[N, features]`` and labels ``[N]`` from a text file in LIBSVM format; omitted values are 0."""
    from sklearn.datasets import load_svmlight_file  # takes a second, which each worker process would wait for

    with explain_errors(path, "LIBSVM text"), decompress(path) as file:
        x, y = load_svmlight_file(file, n_features=features, zero_based=False)
        return x.toarray(), y


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
        reader = _Unpickler(file, encoding="latin1")
        reader.where = where
        return _require_plain(reader.load(), where)


class _Unpickler(pickle.Unpickler):
    where: Path | str

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
        self.dtype = self.dtype.newbyteorder("=" if state[1] == "|" else state[1])


class _Array:
    """Safe replacement of ``numpy.ndarray``."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, by_columns, data = state
        self.array: NDArray[Any] = _read_numbers(data, dtype, shape, "F" if by_columns else "C")


def _read_numbers(data: Any, dtype: _Dtype, shape: tuple[int, ...], order: str) -> NDArray[Any]:
    held = data.encode("latin1") if isinstance(data, str) else data
    flat = np.fromiter(held, object, len(held)) if dtype.dtype == object else np.frombuffer(held, dtype.dtype)
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


_PLAIN = (bool, int, float, complex, str, bytes, bytearray, np.generic, np.ndarray)


def _require_plain(value: Any, where: Path | str, depth: int = _DEPTH) -> Any:
    """Replace stand-ins with their arrays; raise :class:`UsageError` for other objects."""
    if depth == 0:
        raise UsageError(f"{where} holds containers more than {_DEPTH} deep: this is not a published data set")
    convert = partial(_require_plain, where=where, depth=depth - 1)
    if isinstance(value, _Array):
        value = value.array
        if value.dtype == object:
            value.flat = list(map(convert, value.flat))
        return value
    if isinstance(value, dict):
        return {key.decode("latin1") if isinstance(key, bytes) else key: convert(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(convert, value))
    if value is None or isinstance(value, _PLAIN):
        return value
    raise UsageError(f"{where} holds a {type(value).__name__} where arrays, numbers and text are expected")
