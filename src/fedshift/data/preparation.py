"""How samples become the inputs of a network: one value for training, evaluation, exported programs and new clients.

Images are stored unscaled, uint8 ``[N, C, H, W]`` (volumes ``[N, C, D, H, W]``) from 0 to 255, and scaled when a batch
is taken, to [-1, 1] by default (as in FedBN's experiments, Li et al. 2021, arXiv:2102.07623, section 5.1). Table rows
are filled and scaled once, by the client's own training rows. Floating-point arrays are used unchanged; other integers,
such as tokens, are passed to the network as integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from pydantic import TypeAdapter
from torch import Tensor

from ..nn.several_inputs import Input, Inputs, divide_rows
from ..utils.errors import UsageError
from .columns import Column
from .decoding import ARRAY, Decoding, decode
from .decoding.images import Unreadable
from .decoding.resizing import resize
from .inputs import join_inputs, require_held, to_numbers
from .usual_values import SCALE_RATIO, UsualValues

Augment = Callable[[Tensor], Tensor]
"""Function that augments a training batch of images ``[B, C, H, W]`` with values in [0, 1]."""


def find_numeric(columns: Sequence[Column]) -> NDArray[np.bool_]:
    """Return which features of a table are columns of numbers, not only of 0 and 1, ``[D]``."""
    widths = [column.width for column in columns]
    return np.repeat([column.categories is None and column.holds == "numbers" for column in columns], widths)


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureScaling:
    """Preparation of a table's rows from one client's training rows; each field is float64 ``[D]``.

    A missing value becomes ``fill``, then each feature becomes ``(x - mean) / std``; an infinite ``std`` makes it 0.
    ``digests``: of each row of the table before, uint64 ``[rows, 2]``, which tell copies at clients that scale
    differently; empty if the rows are not known. ``far``: values far from all others of their column before, in words.
    """

    fill: NDArray[np.float64]
    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    digests: NDArray[np.uint64] = field(default_factory=lambda: np.empty((0, 2), np.uint64))
    far: tuple[str, ...] = ()

    stamp: ClassVar[str] = ""
    """Part of a fingerprint: empty, since the rows themselves are scaled."""
    fitted: ClassVar[bool] = True

    def __str__(self) -> str:
        return "each column by the client's own training rows"

    def apply(self, x: Tensor) -> Tensor:
        """Return rows ``x [N, D]``, with NaN for missing values, filled and scaled, in their type."""
        fill, mean, std = (
            torch.tensor(each.tolist(), dtype=torch.float64) for each in (self.fill, self.mean, self.std)
        )
        filled = torch.where(torch.isnan(x), fill.to(x.dtype), x)
        return ((filled.to(torch.float64) - mean) / std).to(x.dtype)

    def find_usual(self, columns: Sequence[Column] = ()) -> UsualValues | None:
        """Return the usual values of the rows that it was fitted to; None if it changes nothing."""
        known = np.isfinite(self.std) & (find_numeric(columns) if columns else True)
        if not ((self.mean != 0) | (self.std != 1))[known].any():
            return None
        return UsualValues(mean=np.where(known, self.mean, np.nan), std=np.where(known, self.std, np.nan))

    def to_json(self) -> dict[str, Any]:
        """Return the scaling as JSON values; ``unused``: features that become 0."""
        unused = np.isinf(self.std)
        std = np.where(unused, 1, self.std).tolist()
        return {
            "fill": self.fill.tolist(), "mean": self.mean.tolist(), "std": std,
            "unused": np.flatnonzero(unused).tolist(),
        }  # fmt: skip

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> FeatureScaling:
        """Return the scaling described by the result of :meth:`to_json`."""
        std: NDArray[np.float64] = np.array(facts["std"], float)
        std[facts["unused"]] = np.inf
        return cls(fill=np.array(facts["fill"], float), mean=np.array(facts["mean"], float), std=std)


@dataclass(frozen=True, kw_only=True)
class Normalization:
    """Mean and standard deviation per channel (one number: for all) for pixels in [0, 1], and their ``source``.

    ``fitted``: whether the numbers come from the client's own training images.
    """

    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)
    source: str = field(default="FedBN, arXiv:2102.07623, section 5.1: pixels scaled to [-1, 1]", compare=False)
    fitted: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        mean, std = (", ".join(f"{value:.3g}" for value in values) for values in (self.mean, self.std))
        return f"pixels in [0, 1] minus {mean} over {std} ({self.source})"

    @property
    def stamp(self) -> str:
        """Part of a fingerprint that distinguishes scalings."""
        return f"{self.mean}{self.std}"

    def apply(self, x: Tensor, places: int, augment: Augment | None = None) -> Tensor:
        """Return floats ``x [..., C, *places]`` from 0 to 255, augmented and scaled, in place.

        ``places``: number of axes after the channels.
        """
        if augment is None and self == HALF:
            return x.div_(127.5).sub_(1.0)
        x = x.div_(255.0)
        x = x if augment is None else augment(x)
        mean, std = (
            torch.tensor(values, dtype=x.dtype, device=x.device).reshape(-1, *[1] * places)
            for values in (self.mean, self.std)
        )
        return (x - mean) / std

    def find_usual(self, columns: Sequence[Column] = ()) -> UsualValues | None:
        """Return the usual values, from 0 to 255, of the images that it was fitted to; None if it is not."""
        mean, std = 255 * np.array(self.mean), 255 * np.array(self.std)
        return UsualValues(mean=mean, std=std, factor=SCALE_RATIO) if self.fitted else None

    def to_json(self) -> dict[str, Any]:
        """Return the scaling as JSON values."""
        return {"divide_by": 255, "mean": self.mean, "std": self.std, "source": self.source, "fitted": self.fitted}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Normalization:
        """Return the scaling described by the result of :meth:`to_json`."""
        mean, std = tuple(facts["mean"]), tuple(facts["std"])
        return cls(mean=mean, std=std, source=str(facts["source"]), fitted=bool(facts["fitted"]))

    @classmethod
    def fit(cls, pieces: Iterable[Tensor]) -> Normalization:
        """Return the mean and standard deviation per channel of images, given in ``pieces`` ``[N, C, ...]`` uint8."""
        total, squares, count = torch.zeros(1), torch.zeros(1), 0
        for piece in pieces:
            x = piece.double() / 255
            places = (0, *range(2, x.ndim))
            total, squares = total + x.sum(places), squares + x.square().sum(places)
            count += x[:, 0].numel()
        mean = total / count
        std = (squares / count - mean.square()).clamp(min=0).sqrt()
        std = torch.where(std > 0, std, 1.0)
        return cls(
            mean=tuple(mean.tolist()), std=tuple(std.tolist()), fitted=True, source="the client's own training images"
        )


Scaling: TypeAlias = Normalization | FeatureScaling
"""How pixels, or a table's rows, are scaled."""

HALF = Normalization()
UNIT = Normalization(mean=(0.0,), std=(1.0,), source="pixels scaled to [0, 1]")
IMAGENET = Normalization(
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    source="torchvision's for ImageNet; FLamby's for Fed-ISIC2019",
)


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What is done to a sample between its source and a network.

    Attributes:
        shape: Shape of one stored sample, ``(C, H, W)`` for images.
        dtype: Type of its numbers: uint8 (8-bit images), float32, ...
        decoding: How a file of a sample is decoded.
        scaling: Scaling of stored pixels, or of a table's raw rows; without effect on other samples.
        columns: Encodings of a table's columns in its raw rows; empty for other samples.
        values: Kinds of values that samples hold (:data:`~fedshift.data.agreement.KINDS`); empty for several inputs.
        inputs: Layout of a sample's row if a network is given several inputs; empty: a sample is one array.
        patched: Whether samples are cases of any size, which the network sees in windows of ``shape``.
        resized: Size of cases after resizing; empty: as in their files.
        measured: Usual values of the training samples, of an exported model whose scaling does not state them.

    """

    shape: tuple[int, ...]
    dtype: str
    decoding: Decoding = ARRAY
    scaling: Scaling = HALF
    columns: tuple[Column, ...] = ()
    values: tuple[str, ...] = ()
    inputs: Inputs = ()
    patched: bool = False
    resized: tuple[int, ...] = ()
    measured: UsualValues | None = field(default=None, compare=False)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Torch type of stored numbers."""
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    @property
    def is_image(self) -> bool:
        """Return whether samples are images."""
        return len(self.shape) == 3

    @property
    def takes_files(self) -> bool:
        """Return whether samples can be given as files."""
        return (self.is_image and self.dtype == "uint8") or self.decoding != ARRAY

    @property
    def is_whole(self) -> bool:
        """Return whether samples are integers that are not scaled, such as tokens."""
        return self.dtype != "uint8" and not self.torch_dtype.is_floating_point

    @property
    def scales(self) -> bool:
        """Return whether inputs differ from stored samples: pixels and a table's rows are scaled, other numbers not."""
        return self.dtype == "uint8" or isinstance(self.scaling, FeatureScaling)

    @property
    def usual(self) -> UsualValues | None:
        """Return the usual values of stored samples in training; None if they are not known."""
        if self.measured is not None or self.inputs or self.is_whole:
            return self.measured
        if isinstance(self.scaling, FeatureScaling):
            return self.scaling.find_usual(self.columns)
        return self.scaling.find_usual() if self.dtype == "uint8" else None

    def describe_far(self, x: Tensor) -> list[str]:
        """Return how stored samples, or a table's raw rows, ``x [N, ...]`` are far from the training data's."""
        usual = self.usual
        return self.name_features(usual.describe_far(x.cpu().numpy())) if usual and len(x) else []

    def name_features(self, texts: Mapping[int, str]) -> list[str]:
        """Return texts on features, by their number, with the name of the column or channel."""
        names = [f"column {column.name!r}" for column in self.columns for _ in range(column.width)]
        noun = "column" if len(self.shape) == 1 else "channel"
        return [f"{names[number] if names else f'{noun} {number}'}: {text}" for number, text in sorted(texts.items())]

    def __str__(self) -> str:
        if self.inputs:
            return f"several inputs: {self.describe_inputs()}"
        sizes = ", ".join(map(str, ("N", *self.shape)))
        if self.patched:
            size = f"resized to {self.resized}" if self.resized else "of any size"
            return f"{self.dtype} [N, {self.shape[0]}, ...] {size}, seen in windows of {self.shape[1:]}"
        if self.is_image:
            kind = "pixels from 0 to 255" if self.dtype == "uint8" else "pixels as the run read them"
            return f"{self.dtype} [{sizes}], images of {self.shape[0]} channels, height, width; {kind}"
        if self.columns:
            return f"{self.dtype} [{sizes}], a table's rows: a number each column, 1 or 0 each category, NaN if missing"
        if self.decoding.units:
            leads = zip(self.decoding.leads, self.decoding.units, strict=True)
            channels = ", ".join(f"{lead} ({unit or 'no unit'})" for lead, unit in leads)
            return f"{self.dtype} [{sizes}], signals at {self.decoding.rate:g} Hz: {channels}"
        return f"{self.dtype} [{sizes}], numbers as the run read them"

    def describe_inputs(self) -> str:
        """Return the names, shapes and types of several inputs."""
        kinds = {"pixels": "pixels, divided by 127.5, minus 1", "integers": "int64", "bools": "bool"}
        return ", ".join(
            f"{each.name} [{', '.join(map(str, ('N', *each.shape)))}] ({kinds.get(each.kind, self.dtype)})"
            for each in self.inputs
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the inputs of a program: ``x``, unless there are several."""
        return tuple(each.name for each in self.inputs) or ("x",)

    def divide(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs of a program for stored samples ``x [N, ...]``: these, or the several inputs in rows."""
        return tuple(divide_rows(x, self.inputs).values()) if self.inputs else (x,)

    def scale(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a network's inputs in its type ``dtype`` for stored samples, or a table's raw rows, ``x [N, ...]``."""
        if isinstance(self.scaling, FeatureScaling):
            return self.scaling.apply(x).to(dtype)
        return scale_stored(x, self.scaling, len(self.shape) - 1, dtype)

    def to_json(self) -> dict[str, Any]:
        """Return the preparation as JSON values."""
        facts = {"shape": list(self.shape), "dtype": self.dtype, "decoding": asdict(self.decoding)}
        scaling = "features" if isinstance(self.scaling, FeatureScaling) else "pixels"
        others = {
            scaling: self.scaling.to_json() if self.scales else None,
            "columns": list(map(asdict, self.columns)), "inputs": list(map(asdict, self.inputs)),
            "patched": self.patched, "resized": list(self.resized),
            "measured": self.measured and self.measured.to_json(),
        }  # fmt: skip
        return facts | {name: value for name, value in others.items() if value} | {"values": list(self.values)}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Preparation:
        """Return the preparation described by the result of :meth:`to_json`."""
        read = {name: parse.validate_python(facts[name]) for name, parse in _READ.items() if name in facts}
        known: tuple[tuple[str, str, Any], ...] = (
            ("features", "scaling", FeatureScaling), ("pixels", "scaling", Normalization),
            ("measured", "measured", UsualValues),
        )  # fmt: skip
        return cls(**read, **{field: kind.from_json(facts[name]) for name, field, kind in known if name in facts})

    def store(self, samples: Any) -> tuple[Tensor, bool]:
        """Return ``samples`` as stored samples, or a table's raw rows, ``[N, *shape]``; and whether there was only one.

        Args:
            samples: An image (file, PIL image or pixel array), a table row (a mapping from columns to values), or an
                array; or several: a list of images or rows, a data frame, or an array with one more dimension. For
                several inputs, a dictionary of arrays by name, of one sample or of several.

        Raises:
            UsageError: The samples cannot be brought to this form.

        """
        if self.inputs and not isinstance(samples, np.ndarray | Tensor):
            return self._join(samples)
        if self.columns and not isinstance(samples, np.ndarray | Tensor):
            return self._encode_rows(samples)
        if isinstance(samples, str | Path | Image.Image):
            return self._read_file(samples)[None], True
        if isinstance(samples, list | tuple) and samples and (self.is_image or isinstance(samples[0], str | Path)):
            each = [one[0] for one, _ in map(self.store, samples)]
            if len({one.shape for one in each}) > 1:
                raise UsageError("samples differ in size: give the model one at a time")
            return torch.stack(each), False
        return self._arrange_array(samples)

    def _join(self, samples: Any) -> tuple[Tensor, bool]:
        """Return rows of a dictionary of inputs, of one sample or of several, or of a list of them."""
        if isinstance(samples, list | tuple) and samples:
            return torch.cat([self._join(each)[0] for each in samples]), False
        if not isinstance(samples, Mapping):
            raise UsageError(
                f"samples are a {type(samples).__name__}: the model takes {self}: give a dictionary of these names"
            )
        arrays = {name: to_numbers(array, f"samples, input {name!r}") for name, array in samples.items()}
        single = all(each.name in arrays and arrays[each.name].shape in _list_shapes(each) for each in self.inputs)
        arrays = {name: array[None] for name, array in arrays.items()} if single else arrays
        rows = torch.from_numpy(join_inputs(arrays, self.inputs, "samples"))
        return rows.to(self.torch_dtype), single

    def _encode_rows(self, samples: Any) -> tuple[Tensor, bool]:
        single = isinstance(samples, Mapping)
        rows: Sequence[Any] = (
            [samples] if single else samples.to_dict("records") if hasattr(samples, "to_dict") else samples
        )
        encoded = []
        for row in rows:
            if not isinstance(row, Mapping):
                raise UsageError(f"a row is a {type(row).__name__}: give a mapping from columns to values")
            lacking = [column.name for column in self.columns if column.name not in row]
            if lacking:
                raise UsageError(f"a row has no {', '.join(map(repr, lacking))}: give every column, None where missing")
            encoded.append([number for column in self.columns for number in column.encode(row[column.name])])
        return torch.tensor(encoded, dtype=self.torch_dtype).reshape(len(encoded), -1), single

    def _read_file(self, file: str | Path | Image.Image) -> Tensor:
        """Return the sample in a file, or a PIL image, read as in the run."""
        if not self.takes_files:
            raise UsageError(f"the model takes {self}: give an array of them, not a file")
        channels, *window = self.shape
        size = self.resized if self.patched else tuple(window)
        try:
            source = file if isinstance(file, Image.Image) else Path(file)
            values, _ = decode(source, self.decoding, channels, size)
        except (Unreadable, FileNotFoundError) as error:
            raise UsageError(f"{file} {error}: give a file that the model takes, {self}") from error
        stored = torch.from_numpy(np.array(self.decoding.rescale(values), order="C"))
        if stored.shape[0] not in (1, channels) or stored.ndim != len(self.shape) or size not in ((), stored.shape[1:]):
            raise UsageError(f"{file} holds values of shape {tuple(stored.shape)}: the model takes {self}")
        return stored.expand(channels, *stored.shape[1:]).contiguous()

    def _arrange_array(self, samples: Any) -> tuple[Tensor, bool]:
        """Return an array as ``[N, *shape]``: move channels to the front, repeat gray, and resize images."""
        array = to_numbers(samples, "samples")
        require_held(array, "samples")
        x = samples if isinstance(samples, Tensor) else torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
        wanted = f"the model takes {self}"
        if x.dtype != self.torch_dtype:
            if self.dtype == "uint8" or not x.is_floating_point():
                raise UsageError(f"samples are of {x.dtype}: {wanted}")
            x = x.to(self.torch_dtype)
        single = x.ndim < len(self.shape) + 1
        if self.is_image:
            channels = self.shape[0]
            if x.ndim == 2 or (x.ndim == 3 and x.shape[0] not in (1, channels) and x.shape[2] not in (1, channels)):
                x, single = (x[None, None], True) if x.ndim == 2 else (x[:, None], False)
            x = x[None] if x.ndim == 3 else x
            if x.ndim == 4 and x.shape[1] not in (1, channels) and x.shape[3] in (1, channels):
                x = x.permute(0, 3, 1, 2)
            if x.ndim == 4 and x.shape[1] in (1, channels):
                size = self.resized or tuple(x.shape[2:]) if self.patched else self.shape[1:]
                x = resize(x.expand(-1, channels, -1, -1), size)
        elif single:
            x = x[None]
        expected = (self.shape[0], *x.shape[2:]) if self.patched and x.ndim == len(self.shape) + 1 else self.shape
        if tuple(x.shape[1:]) != expected:
            raise UsageError(f"samples have shape {tuple(np.shape(samples))}: {wanted}")
        return x.contiguous(), single


_READ: Mapping[str, TypeAdapter[Any]] = {
    "shape": TypeAdapter(tuple[int, ...]), "dtype": TypeAdapter(str), "decoding": TypeAdapter(Decoding),
    "columns": TypeAdapter(tuple[Column, ...]), "values": TypeAdapter(tuple[str, ...]), "inputs": TypeAdapter(Inputs),
    "patched": TypeAdapter(bool), "resized": TypeAdapter(tuple[int, ...]),
}  # fmt: skip
"""Parses fields of a :class:`Preparation` from JSON values."""


def _list_shapes(one: Input) -> list[tuple[int, ...]]:
    """Return the shapes that an input of one sample may have; of pixels, also with channels last or, gray, none."""
    channels, *places = one.shape or (1,)
    moved = [(*places, channels), *([tuple(places)] if channels == 1 else [])]
    return [one.shape, *(moved if one.kind == "pixels" else [])]


def scale_stored(
    x: Tensor, scaling: Scaling, places: int, dtype: torch.dtype = torch.float32, augment: Augment | None = None
) -> Tensor:
    """Return copies ``x [..., C, *places]`` of stored samples as network inputs of type ``dtype``, possibly in place.

    Args:
        x: Samples; a table's rows were scaled when they were read.
        scaling: Scaling of 8-bit pixels.
        places: Number of axes after the channels.
        dtype: Type of the network's numbers.
        augment: Function for a single batch of images; floating-point images reach it as values from 0 to 1.

    """
    if x.dtype == torch.uint8:
        assert isinstance(scaling, Normalization)
        return scaling.apply(x.to(dtype), places, augment)
    if not x.is_floating_point():
        return x
    x = x.to(dtype)
    return x if augment is None else augment(x.add_(1).div_(2)).mul(2).sub(1)
