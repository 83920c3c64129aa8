"""Loading and using an exported model: images, table rows or arrays in; scores, classes, labels or numbers out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..data.files.image_decoding import Unreadable, convert_image, decode_image
from ..data.samples import resize
from ..tasks import CATALOG
from ..utils.errors import FedshiftError, UsageError
from .inputs import InputFormat

FORMAT = 1
DESCRIPTION, PROGRAM = "model.json", "program.pt2"


class ExportedModel:
    """A model in ``directory``, which can be called with samples; returned by :func:`load`.

    Attributes:
        directory: The model's directory.
        classes: Names of the classes, labels or targets, in the order of the outputs.
        task: Name of the task: ``classification``, ``segmentation``, ``multilabel``, ``regression``, or the name of a
            user task that derives from none of these.
        inputs: Format of the program's inputs.
        facts: Facts about the model, as in ``model.json``.

    """

    def __init__(self, directory: Path, description: Mapping[str, Any], program: Callable[[Tensor], Tensor]) -> None:
        self.directory, self.classes = directory, tuple(description["classes"])
        self.inputs, self.facts = InputFormat.from_json(description["input"]), description["model"]
        self.task = str(description.get("task", "classification"))
        self._outputs = str(description.get("outputs", f"{len(self.classes)} classes"))
        self._program = program

    def __repr__(self) -> str:
        whose = f"client {self.facts['client']}" if self.facts["client"] else "global model"
        return f"<model {self.directory}: {self.facts['method']}, {whose}, {self._outputs}>"

    @torch.no_grad()
    def __call__(self, samples: Any) -> Tensor:
        """Return the scores of one sample ``[classes]`` or of several ``[N, classes]``; for pixels ``[..., H, W]``.

        Scores are before softmax, or before the logistic function for multilabel. In regression, they are the predicted
        numbers in the unit of the data, float64 if targets were standardized.

        Args:
            samples: An image (file, PIL image or pixel array), a table row (a mapping from columns to values), or an
                array; or several: a list of images or rows, a data frame, or an array with one more dimension.

        Raises:
            UsageError: The samples do not have the model's input format.

        """
        scores, single = self._score(samples)
        return scores[0] if single else scores

    @torch.no_grad()
    def predict(self, samples: Any) -> Any:
        """Return the prediction for one sample, or a list of predictions for several, by the rule of the task.

        A prediction is the name of the class; for multilabel, a list of the names of the sample's labels; in
        regression, a number or a list with a number for each target. For segmentation, the result is a tensor of class
        numbers, uint8 ``[H, W]`` or ``[N, H, W]``, with the depth before the height for volumes. For a user task, it is
        the result of calling the model.
        """
        scores, single = self._score(samples)
        kind = CATALOG.get(self.task)
        named = self.name_predictions(kind().predict(scores) if kind else scores)
        return named[0] if single else named

    def name_predictions(self, predictions: Tensor) -> Any:
        """Return predictions ``[N, ...]`` of the task (``Task.predict``) as :meth:`predict` gives those of several."""
        if self.task == "segmentation":
            return predictions.to(torch.uint8)
        if self.task == "classification":
            return [self.classes[k] for k in predictions.tolist()]
        if self.task == "multilabel":
            pairs = (zip(self.classes, row, strict=True) for row in predictions.tolist())
            return [[name for name, chosen in row if chosen] for row in pairs]
        if self.task == "regression":
            return (predictions[:, 0] if len(self.classes) == 1 else predictions).tolist()
        return predictions

    def _score(self, samples: Any) -> tuple[Tensor, bool]:
        """Return the program's outputs ``[N, ...]``, and whether there was a single sample."""
        x, single = to_batch(samples, self.inputs)
        return self._program(x), single


def load(directory: str | Path) -> ExportedModel:
    """Load a model that ``fedshift export`` wrote to ``directory``; neither data nor training code is needed.

    Load programs only from sources that you trust.

    Raises:
        UsageError: There is no exported model, or it has no program.
        FedshiftError: A file is damaged.

    """
    path = Path(directory)
    try:
        description = json.loads((path / DESCRIPTION).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(f"{path} holds no model: give a directory that `fedshift export` wrote") from error
    except ValueError as error:
        raise FedshiftError(f"{path / DESCRIPTION} is damaged ({error}): export the model again") from error
    if description.get("format") != FORMAT:
        raise UsageError(f"{path} was written by another version of fedshift: export the model again with this one")
    if PROGRAM not in description["files"]:
        raise UsageError(
            f"{path} has no {PROGRAM}, since torch could not trace its network: load weights.safetensors into the "
            "network by its own code"
        )
    try:
        content = (path / PROGRAM).read_bytes()
    except OSError as error:
        raise FedshiftError(f"{path / PROGRAM} cannot be read ({error.strerror}): export the model again") from error
    if sha256(content).hexdigest() != description["files"][PROGRAM]:
        raise FedshiftError(f"{path / PROGRAM} is not the file that was exported: copy or export the model again")
    return ExportedModel(path, description, torch.export.load(path / PROGRAM).module())


def to_batch(samples: Any, form: InputFormat) -> tuple[Tensor, bool]:
    """Return raw ``samples`` as a batch in the model's format ``form``, and whether it was a single sample."""
    if form.columns and not isinstance(samples, np.ndarray | Tensor):
        return _encode_rows(samples, form)
    if form.is_image and isinstance(samples, str | Path | Image.Image):
        return _read_image(samples, form)[None], True
    if isinstance(samples, list | tuple) and samples and form.is_image:
        return torch.stack([one[0] for one, _ in (to_batch(each, form) for each in samples)]), False
    return _arrange_array(samples, form)


def _encode_rows(samples: Any, form: InputFormat) -> tuple[Tensor, bool]:
    single = isinstance(samples, Mapping)
    rows: Sequence[Any] = (
        [samples] if single else samples.to_dict("records") if hasattr(samples, "to_dict") else samples
    )
    encoded = []
    for row in rows:
        if not isinstance(row, Mapping):
            raise UsageError(f"a row is a {type(row).__name__}: give a mapping from columns to values")
        lacking = [column.name for column in form.columns if column.name not in row]
        if lacking:
            raise UsageError(f"a row has no {', '.join(map(repr, lacking))}: give every column, None where missing")
        encoded.append([number for column in form.columns for number in column.encode(row[column.name])])
    return torch.tensor(encoded, dtype=form.torch_dtype).reshape(len(encoded), -1), single


def _read_image(image: str | Path | Image.Image, form: InputFormat) -> Tensor:
    """Return an image ``[C, H, W]``, read as in the run."""
    if form.dtype != "uint8":
        raise UsageError(f"the model takes {form.describe()}: give an array of them, not an image")
    channels, height, width = form.shape
    try:
        if isinstance(image, Image.Image):
            pixels = convert_image(image.copy(), kind="byte", channels=channels, height=height, width=width)[0]
        else:
            pixels = decode_image(Path(image), kind="byte", channels=channels, height=height, width=width)[0]
    except (Unreadable, FileNotFoundError) as error:
        raise UsageError(f"{image} {error}: give an image that can be read") from error
    return torch.from_numpy(np.array(pixels, order="C"))


def _arrange_array(samples: Any, form: InputFormat) -> tuple[Tensor, bool]:
    """Return an array as ``[N, *shape]``: move channels to the front, repeat gray, and resize images."""
    x = samples if isinstance(samples, Tensor) else torch.from_numpy(np.array(samples))
    wanted = f"the model takes {form.describe()}"
    if x.dtype != form.torch_dtype:
        if form.dtype == "uint8" or not x.is_floating_point():
            raise UsageError(f"samples are of {x.dtype}: {wanted}")
        x = x.to(form.torch_dtype)
    single = x.ndim < len(form.shape) + 1
    if form.is_image:
        channels = form.shape[0]
        if x.ndim == 2 or (x.ndim == 3 and x.shape[0] not in (1, channels) and x.shape[2] not in (1, channels)):
            x, single = (x[None, None], True) if x.ndim == 2 else (x[:, None], False)
        x = x[None] if x.ndim == 3 else x
        if x.ndim == 4 and x.shape[1] not in (1, channels) and x.shape[3] in (1, channels):
            x = x.permute(0, 3, 1, 2)
        if x.ndim == 4 and x.shape[1] in (1, channels):
            x = resize(x.expand(-1, channels, -1, -1), form.shape[1:])
    elif single:
        x = x[None]
    if tuple(x.shape[1:]) != form.shape:
        raise UsageError(f"samples have shape {tuple(np.shape(samples))}: {wanted}")
    return x.contiguous(), single
