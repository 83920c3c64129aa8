"""Loading and using an exported model: images, table rows or arrays in; scores, classes, labels or numbers out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.decoding.masks import place_mask
from ..data.decoding.resizing import resize_volume
from ..data.decoding.volumes import read_volume_header
from ..data.far_values import warn_far
from ..data.patches import slide
from ..data.preparation import Preparation
from ..tasks import TASKS, Task
from ..tasks.task import BATCH
from ..utils.errors import FedshiftError, UsageError

FORMAT = 1
NO_NUMBERS = "has outputs of the model that are not numbers (NaN): check the image, and whether training diverged"
DESCRIPTION, PROGRAM = "model.json", "program.pt2"


class Predictor:
    """A model that can be called with samples as users have them.

    Attributes:
        inputs: How samples become stored ones.
        task: Name of the task: ``classification``, ``segmentation``, ``multilabel``, ``regression``, ``survival``, or
            the name of a user task that derives from none of these.
        classes: Names of the classes, labels or targets, in the order of the outputs.

    """

    def __init__(
        self, inputs: Preparation, task: str, classes: Sequence[str], score: Callable[[Tensor], Tensor],
        rule: Task | None = None,
    ) -> None:  # fmt: skip
        """``score`` returns outputs of stored samples, or of windows; ``rule`` predicts: by default ``task``."""
        self.inputs, self.task, self.classes, self._score_stored = inputs, task, tuple(classes), score
        known = rule or (TASKS.entries[task]() if task in TASKS.entries else None)
        self._choose = known.predict if known else lambda scores: scores

    def __call__(self, samples: Any) -> Tensor:
        """Return the scores of one sample ``[classes]`` or of several ``[N, classes]``; for pixels ``[..., H, W]``.

        Scores are before softmax, or before the logistic function for multilabel. In regression, they are the predicted
        numbers in the unit of the data, float64 if targets were standardized. Scores of pixels are on the model's grid.

        Args:
            samples: An image (file, PIL image or pixel array), a table row (a mapping from columns to values), or an
                array; or several: a list of images or rows, a data frame, or an array with one more dimension. For a
                network with several inputs, a dictionary of arrays by name, for one sample or for several.

        Warns:
            FarValues: The samples are far from the training data's, such as in another unit.

        Raises:
            UsageError: The samples do not have the model's input format.

        """
        scores, single = self._score(samples)
        return scores[0] if single else scores

    def predict(self, samples: Any) -> Any:
        """Return the prediction for one sample, or a list of predictions for several, by the rule of the task.

        A prediction is the name of the class; for multilabel, a list of the names of the sample's labels; in
        regression, a number or a list with a number for each target. For a user task, it is the result of calling the
        model. A class and labels are None where an output is NaN. For segmentation, it is a mask, a tensor of class
        numbers, uint8, on the sample's own grid: of a file, the array that ``fedshift predict`` writes (a NIfTI file
        has its own axes, columns first); of an image, ``[H, W]``; of an array of a volume, ``[D, H, W]``. Several masks
        of one size are stacked.

        Args:
            samples: As for a call of the model.

        Warns:
            FarValues: As for a call.

        Raises:
            UsageError: As for a call, and for a file whose pixels have outputs that are not numbers.

        """
        several = isinstance(samples, list | tuple) and not isinstance((*samples, 0)[0], list | tuple | int | float)
        if self.task == "segmentation" and several:
            masks = [self.predict(each) for each in samples]
            return torch.stack(masks) if len({mask.shape for mask in masks}) == 1 else masks
        if self.task == "segmentation" and isinstance(samples, str | Path) and self.inputs.decoding.kind != "signal":
            return torch.from_numpy(place_mask(self.segment(samples).numpy(), Path(samples)))
        scores, single = self._score(samples)
        if self.task == "segmentation" and self.inputs.is_image:
            size = tuple(replace(self.inputs, patched=True, resized=()).store(samples)[0].shape[2:])
            scores = torch.stack([resize_volume(each.float(), size) for each in scores])
        named = name_predictions(self._choose(scores), self.task, self.classes)
        if self.task in ("classification", "multilabel"):
            unknown = scores.isnan().any(dim=1).tolist()
            named = [None if nan else name for nan, name in zip(unknown, named, strict=True)]
        return named[0] if single else named

    def segment(self, file: str | Path) -> Tensor:
        """Return the class of each pixel or voxel in ``file``, uint8 ``[D, H, W]`` or ``[H, W]``, on the file's grid.

        It has the axes of :func:`~fedshift.data.decoding.volumes.decode_mask`. Scores on another grid are
        interpolated linearly before the class of the highest is chosen. Raises :class:`UsageError` as a call does, and
        for outputs that are not numbers.
        """
        scores = self(file).float()
        if scores.isnan().any():
            raise UsageError(f"{file} {NO_NUMBERS}")
        return self._choose(resize_volume(scores, read_volume_header(Path(file)).shape)[None])[0].to(torch.uint8)

    @torch.no_grad()
    def _score(self, samples: Any) -> tuple[Tensor, bool]:
        """Return the outputs ``[N, ...]``, and whether there was a single sample."""
        x, single = self.inputs.store(samples)
        warn_far(self.inputs, x)
        if self.inputs.patched:
            return torch.cat([slide(self._score_stored, each[None], self.inputs.shape[1:]) for each in x]), single
        return torch.cat([self._score_stored(some) for some in torch.split(x, BATCH)]), single


class ExportedModel(Predictor):
    """A model in ``directory``, which can be called with samples; returned by :func:`load`.

    Attributes:
        directory: The model's directory.
        facts: Facts about the model, as in ``model.json``.
        steps: What is done to a sample, in order and in sentences by a word for each, as on the model card.

    """

    def __init__(self, directory: Path, description: Mapping[str, Any], program: Callable[..., Tensor]) -> None:
        inputs = Preparation.from_json(description["input"])
        task, classes = str(description.get("task", "classification")), description["classes"]
        super().__init__(inputs, task, classes, lambda x: self._program(*inputs.divide(x)))
        self.directory, self.facts, self._program = directory, description["model"], program
        self.steps = dict(description.get("steps", {}))
        self._outputs = str(description.get("outputs", f"{len(self.classes)} classes"))

    def __repr__(self) -> str:
        whose = f"client {self.facts['client']}" if self.facts["client"] else "global model"
        return f"<model {self.directory}: {self.facts['method']}, {whose}, {self._outputs}>"


def name_predictions(predictions: Tensor, task: str, classes: Sequence[str]) -> Any:
    """Convert predictions ``[N, ...]`` of ``Task.predict`` to the format of :meth:`ExportedModel.predict`."""
    if task == "segmentation":
        return predictions.to(torch.uint8)
    if task == "classification":
        return [classes[k] for k in predictions.tolist()]
    if task == "multilabel":
        pairs = (zip(classes, row, strict=True) for row in predictions.tolist())
        return [[name for name, chosen in row if chosen] for row in pairs]
    if task in ("regression", "survival"):
        return (predictions[:, 0] if len(classes) == 1 else predictions).tolist()
    return predictions


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
        raise UsageError(f"{path} contains no model: give a directory that `fedshift export` wrote") from error
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
