"""Stored inputs: arrays as tensors, channels first, and several inputs of a sample as one row.

:mod:`fedshift.nn.several_inputs` divides rows for a network. Of several inputs, 8-bit integers with two axes a sample
or more are images, with channels first, scaled from -1 to 1; others keep their shape, and integers and Booleans their
values. Rows are integers (int64) if no input is of floats; else floats, which hold integers up to :data:`EXACT`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..nn.several_inputs import Input, Inputs, Kind, name_inputs
from ..utils.errors import UsageError

EXACT = 2**24
"""Floats of 32 bits hold every integer up to this magnitude."""
MOST_INPUTS = 64
"""Largest number of inputs of a sample."""
Array = NDArray[Any]


def is_mapped(x: object) -> TypeGuard[np.memmap[Any, Any]]:
    """Return whether ``x`` is an array mapped from a file, without changes that exist only in memory."""
    if not isinstance(x, np.memmap) or getattr(x, "_mmap", None) is None or x.filename is None or x.mode == "c":
        return False
    return x.dtype.kind in "uifb" and x.ndim > 0 and x.size > 0


def to_numbers(x: Any, where: str) -> Array:
    """Return an array of any library, or lists of numbers, as an array of NumPy.

    Raises :class:`UsageError` for sparse and masked arrays, lists of unequal lengths, and values other than numbers.
    """
    if isinstance(x, Tensor):
        x = x.detach().cpu()
        x = x.float() if x.dtype.is_floating_point and x.dtype.itemsize < 4 else x
    if isinstance(x, np.ma.MaskedArray) and np.ma.is_masked(x):
        raise UsageError(f"{where}: values are masked: fill them (x.filled(value)), or leave their samples out")
    try:
        array = np.asarray(x)
    except Exception as error:  # libraries raise exceptions of any type
        raise UsageError(
            f"{where}: a {type(x).__name__} cannot become an array ({error}): give an array of numbers, samples "
            "along its first axis (.to_dense() of sparse ones; sequences padded to one length)"
        ) from error
    if hasattr(x, "toarray") and array.ndim == 0:
        raise UsageError(f"{where}: a sparse {type(x).__name__}: give an array of all numbers, x.toarray()")
    if array.dtype.kind not in "uifb":
        shown = ", ".join(f"{value!r:.40}" for value in array.reshape(-1)[:3].tolist())
        raise UsageError(
            f"{where}: {array.dtype} ({shown}) where numbers are expected: give integers, floats or Booleans "
            "(x.astype(float)); labels as classes 0, 1, ..., numbered alike at all clients"
        )
    return array


def to_tensor(x: Array, where: str, *, copy: bool = True) -> Tensor:
    """Return samples ``[N, ...]`` as a tensor, channels first; without ``copy``, it may share memory with ``x``.

    For shapes and types see :func:`fedshift.data.samples.to_samples`; raises :class:`UsageError` for others.
    """
    convert = np.array if copy else np.asarray
    if x.ndim == 2 and x.dtype.kind == "i" and x.dtype.itemsize == 8:
        return torch.from_numpy(convert(x, dtype=np.int64, order="C"))
    x = channels_first(x, where)
    if x.ndim == 2 or x.dtype.kind == "f":
        require_held(x, where)
        kept = np.promote_types(x.dtype, np.float32)  # float64 if it has more than seven digits
        return torch.from_numpy(convert(x, dtype=min(kept, np.dtype(np.float64)), order="C"))
    if x.dtype.kind == "b":
        return torch.from_numpy(np.where(x, np.uint8(255), np.uint8(0)))  # black and white, as in image files
    if x.dtype != np.uint8 and x.size and (x.min() < 0 or x.max() > 255):
        raise UsageError(
            f"{where}: integer pixels from {x.min()} to {x.max()}; they must lie in 0..255: scale them, or give floats"
        )
    return torch.from_numpy(convert(x, dtype=np.uint8, order="C"))


def require_held(x: Array, where: str) -> None:
    """Raise :class:`UsageError` for numbers of ``x [N, ...]`` beyond the floats of 32 bits that networks compute with.

    Signed integers of 64 bits stay integers.
    """
    most = float(np.finfo(np.float32).max)
    if x.dtype.itemsize < 8 or not x.size:
        return
    if x.dtype.kind != "f":
        if x.dtype != np.int64 and x.max() > 2**53:
            raise UsageError(f"{where}: integers up to {x.max()}, beyond the {2**53} of floats: number them from 0")
    elif max(np.fmax.reduce(x, axis=None), -np.fmin.reduce(x, axis=None)) > most:
        beyond = np.argwhere(np.isfinite(x) & (np.abs(x) > most))
        if len(beyond):  # else infinite, which every check of samples names
            values = ", ".join(f"{x[tuple(place)]:g}" for place in beyond[:3])
            raise UsageError(
                f"{where}: sample {beyond[0][0]}, place {tuple(beyond[0][1:].tolist())}: {len(beyond)} values such as "
                f"{values} are beyond {most:.2g}, the largest number of networks: divide, or standardize them"
            )


def channels_first(x: Array, where: str) -> Array:
    """Return a view of samples ``[N, ...]`` with channels in the second place; raise :class:`UsageError` if unclear.

    Floats ``[N, C, L]`` with L at least 2 C are signals and stay unchanged; other samples of two axes are gray images.
    Images whose second and last axes may both be channels are taken as ``[N, C, H, W]``, the order of torch.
    """
    if x.ndim == 2 or (x.ndim == 3 and x.dtype.kind == "f" and x.shape[2] >= 2 * x.shape[1]):
        return x
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
        x = x.transpose(0, 3, 1, 2)
    elif x.ndim > 5 or (x.shape[1] not in (1, 3) and (x.shape[-1] in (1, 3) or x.shape[-1] < min(x.shape[1:-1]))):
        raise UsageError(
            f"{where}: samples of shape {x.shape}; images are [N, H, W], [N, H, W, C] with 1 or 3 channels or "
            "[N, C, H, W] with any, volumes [N, C, D, H, W], signals [N, C, L], features [N, D]: bring channels to the "
            "second place (numpy.moveaxis)"
        )
    return x


def refuse_several(x: object, where: str) -> None:
    """Raise :class:`UsageError` if ``x`` are several inputs by name, or a list or tuple of arrays."""
    if isinstance(x, Mapping):
        raise UsageError(
            f"{where} has the inputs {', '.join(map(repr, x))}, where one array of a sample is expected: give one"
        )
    if isinstance(x, list | tuple) and len(x) > 1 and all(len(getattr(each, "shape", ())) > 0 for each in x):
        raise UsageError(
            f"{where}: the inputs are a {type(x).__name__} of {len(x)} arrays: give several inputs of a sample as a "
            "dictionary by the names of the network's parameters, {'tokens': ..., 'mask': ...}, and samples as one "
            "array (numpy.stack)"
        )


def arrange(x: Any, names: Iterable[str]) -> Any:
    """Return inputs in the order of ``names`` if these are their names; of a dictionary of one, its array."""
    if not isinstance(x, Mapping):
        return x
    order = list(names)
    x = {name: x[name] for name in order} if set(order) == set(x) else x
    return next(iter(x.values())) if len(x) == 1 else x


def find_layout(x: Mapping[Any, Any], where: str) -> Inputs:
    """Return the names, shapes and kinds of the arrays of ``x``, each ``[N, ...]``.

    Raises :class:`UsageError` for names other than texts, arrays of other things than numbers, and lengths that
    differ.
    """
    if not 0 < len(x) <= MOST_INPUTS:
        raise UsageError(f"{where}: {len(x)} inputs: give from 1 to {MOST_INPUTS}")
    inputs, first = [], next(iter(x))
    for name, given in x.items():
        if not isinstance(name, str) or not name.isprintable() or not name:
            raise UsageError(f"{where}: the input {name!r}: name inputs by texts, as the network's parameters")
        array = np.atleast_1d(to_numbers(given, f"{where}, input {name!r}"))
        if len(array) != len(x[first]):
            raise UsageError(
                f"{where}: {len(array)} samples in the input {name!r}, and {len(x[first])} in {first!r}: give the same "
                "number in each"
            )
        kind = _find_kind(array)
        shape = (channels_first(array, f"{where}, input {name!r}") if kind == "pixels" else array).shape[1:]
        inputs.append(Input(name=name, shape=tuple(map(int, shape)), kind=kind))
    return tuple(inputs)


def _find_kind(array: Array) -> Kind:
    if array.dtype == np.uint8 and array.ndim > 2:
        return "pixels"
    return "floats" if array.dtype.kind == "f" else "bools" if array.dtype.kind == "b" else "integers"


def join_inputs(x: Mapping[str, Any], inputs: Inputs, where: str) -> Array:
    """Return rows ``[N, P]`` of the arrays of ``x``, whose layout is ``inputs``.

    Raises :class:`UsageError` if it is another, and for integers that a row of floats would round.
    """
    x = {each.name: x[each.name] for each in inputs} if {each.name for each in inputs} == set(x) else x
    require_layout(find_layout(x, where), inputs, where, "expected")
    arrays = [to_numbers(x[each.name], where) for each in inputs]
    whole = not any(each.is_float for each in inputs)
    double = any(array.dtype.kind == "f" and array.dtype.itemsize > 4 for array in arrays)
    dtype = np.int64 if whole else np.float64 if double else np.float32
    parts = []
    for each, array in zip(inputs, arrays, strict=True):
        most = 2**63 - 1 if whole else EXACT
        if each.kind == "integers" and array.size and max(int(array.max()), -int(array.min()) - whole) > most:
            why = "int64" if whole else "floats, which other inputs are"
            raise UsageError(
                f"{where}: the input {each.name!r} holds integers beyond {most:,}, which {why} cannot hold exactly: "
                "number them from 0, or divide them and give floats"
            )
        require_held(array, f"{where}, input {each.name!r}")
        if each.kind == "pixels":
            array = to_tensor(array, where).float().div_(127.5).sub_(1).numpy()
        parts.append(array.reshape(len(array), each.size).astype(dtype))
    return np.concatenate(parts, axis=1)


def require_layout(found: Inputs, wanted: Inputs, where: str, whose: str) -> None:
    """Raise :class:`UsageError` naming the first difference of the inputs ``found`` from ``wanted``.

    ``where``, ``whose``: what has them, in messages.
    """
    if found == wanted:
        return
    names, others = (name_inputs(inputs) or "one array a sample" for inputs in (found, wanted))
    if names != others:
        names = f"the inputs {names}" if found else names
    else:
        names, others = next(
            (f"the input {one}", str(other)) for one, other in zip(found, wanted, strict=True) if one != other
        )
    raise UsageError(
        f"{where}: {names}, and {whose}: {others}: give the same inputs everywhere, of one order, shape and kind"
    )
