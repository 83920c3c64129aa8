"""Inputs of an exported model: raw samples as the user has them, and the scaling that is part of the program.

Images are stored pixels, uint8 ``[N, C, H, W]``, which the program scales as the run did. A table row has one number
for each numeric column and one for each category of the other columns, and NaN for missing values: the program fills
and scales them based on the training rows of the model's client. Other samples are used as in the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..data.samples import HALF, FeatureScaling, Normalization, Samples
from ..utils.errors import UsageError

if TYPE_CHECKING:
    from ..data.files.table_schema import Column

MISSING = ("", "?", "NA", "N/A", "NaN", "nan", "NULL", "null")
"""Texts that mark a missing value, as in table files."""


@dataclass(frozen=True, kw_only=True)
class TableColumn:
    """A table column: one feature for each of its ``categories``, in this order; None: a number."""

    name: str
    categories: tuple[str, ...] | None = None

    @property
    def width(self) -> int:
        """Number of features."""
        return 1 if self.categories is None else len(self.categories)

    def encode(self, value: Any) -> list[float]:
        """Return a cell's features, NaN if it is missing; raise :class:`UsageError` for an invalid value."""
        text = str(value).strip()
        if value is None or value != value or text in MISSING:
            return [float("nan")] * self.width
        if self.categories is None:
            try:
                return [float(value)]
            except (TypeError, ValueError) as error:
                raise UsageError(f"column {self.name!r} holds numbers, not {value!r}: give a number or None") from error
        if text not in self.categories:
            raise UsageError(
                f"column {self.name!r} holds one of {', '.join(self.categories)}, not {value!r}: give one of them, or "
                "None where it is missing"
            )
        return [float(text == category) for category in self.categories]


@dataclass(frozen=True, kw_only=True, eq=False)
class InputFormat:
    """Format of a program's raw samples, and how the program prepares them for the network.

    Args:
        shape: Shape of one sample.
        dtype: Type of its numbers: uint8 (8-bit images), float32 or float64.
        normalization: Scaling of pixels, or of a table's features.
        columns: A table's columns; empty for other samples.

    """

    shape: tuple[int, ...]
    dtype: str
    normalization: Normalization
    columns: tuple[TableColumn, ...] = ()

    @classmethod
    def of(cls, samples: Samples, columns: Sequence[Column] = ()) -> InputFormat:
        """Return the format of ``samples``; ``columns``: columns if the samples are table rows."""
        scaled = samples.normalization.features is not None
        return cls(
            shape=samples.shape,
            dtype=str(samples.dtype).removeprefix("torch."),
            normalization=samples.normalization,
            columns=tuple(TableColumn(name=c.name, categories=c.categories) for c in columns) if scaled else (),
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """Torch type of the raw numbers."""
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    @property
    def is_image(self) -> bool:
        """Return whether samples are images."""
        return len(self.shape) == 3

    def describe(self) -> str:
        """Return the format in words, for use in a sentence."""
        sizes = ", ".join(map(str, ("N", *self.shape)))
        if self.is_image:
            kind = "pixels from 0 to 255" if self.dtype == "uint8" else "pixels as the run read them"
            return f"{self.dtype} [{sizes}], images of {self.shape[0]} channels, height, width; {kind}"
        if self.columns:
            return f"{self.dtype} [{sizes}], a table's rows: a number each column, 1 or 0 each category, NaN if missing"
        return f"{self.dtype} [{sizes}], numbers as the run read them"

    def to_json(self) -> dict[str, Any]:
        """Return the format as JSON values."""
        facts: dict[str, Any] = {"shape": list(self.shape), "dtype": self.dtype, "description": self.describe()}
        features = self.normalization.features
        if self.dtype == "uint8":
            scale = self.normalization
            facts["pixels"] = {"divide_by": 255, "mean": scale.mean, "std": scale.std, "source": scale.source}
        if self.columns:
            facts["columns"] = [{"name": column.name, "categories": column.categories} for column in self.columns]
        if features is not None:
            unused = np.isinf(features.std)
            facts["features"] = {
                "fill": features.fill.tolist(), "mean": features.mean.tolist(),
                "std": np.where(unused, 1, features.std).tolist(), "unused": np.flatnonzero(unused).tolist(),
            }  # fmt: skip
        return facts

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> InputFormat:
        """Return the format described by the result of :meth:`to_json`."""
        pixels, given = facts.get("pixels"), facts.get("features")
        normalization = HALF
        if pixels:
            normalization = Normalization(
                mean=tuple(pixels["mean"]), std=tuple(pixels["std"]), source=str(pixels["source"])
            )
        if given:
            std: NDArray[np.float64] = np.array(given["std"], float)
            std[given["unused"]] = np.inf
            scaling = FeatureScaling(fill=np.array(given["fill"], float), mean=np.array(given["mean"], float), std=std)
            normalization = Normalization(features=scaling)
        columns = tuple(
            TableColumn(name=c["name"], categories=None if c["categories"] is None else tuple(c["categories"]))
            for c in facts.get("columns", ())
        )
        return cls(shape=tuple(facts["shape"]), dtype=str(facts["dtype"]), normalization=normalization, columns=columns)


class Scaling(nn.Module):
    """Prepares raw samples ``[N, ...]`` as the run did, in the network's type ``dtype``.

    Names of buffers differ from those of ONNX operators, which ONNX would otherwise confuse.
    """

    missing_values: Tensor
    feature_means: Tensor
    feature_deviations: Tensor
    pixel_means: Tensor
    pixel_deviations: Tensor

    def __init__(self, form: InputFormat, dtype: torch.dtype) -> None:
        super().__init__()
        scale = form.normalization
        self.dtype, self.scales_pixels = dtype, form.dtype == "uint8"
        self.scales_to_half, self.scales_features = scale == HALF, scale.features is not None
        if scale.features is not None:
            self.register_buffer("missing_values", torch.from_numpy(scale.features.fill).to(form.torch_dtype))
            self.register_buffer("feature_means", torch.from_numpy(scale.features.mean))
            self.register_buffer("feature_deviations", torch.from_numpy(scale.features.std))
        elif self.scales_pixels and not self.scales_to_half:
            places = [1] * (len(form.shape) - 1)
            self.register_buffer("pixel_means", torch.tensor(scale.mean, dtype=dtype).reshape(-1, *places))
            self.register_buffer("pixel_deviations", torch.tensor(scale.std, dtype=dtype).reshape(-1, *places))

    def forward(self, x: Tensor) -> Tensor:
        """Return the network's inputs for raw samples ``x``, with the same operations as ``Samples.inputs``."""
        if self.scales_features:
            filled = torch.where(torch.isnan(x), self.missing_values, x)
            scaled = (filled.to(torch.float64) - self.feature_means) / self.feature_deviations
            return scaled.to(x.dtype).to(self.dtype)
        if not (self.scales_pixels or x.is_floating_point()):
            return x
        x = x.to(self.dtype)
        if not self.scales_pixels:
            return x
        if self.scales_to_half:
            return x / 127.5 - 1.0
        return (x / 255.0 - self.pixel_means) / self.pixel_deviations
