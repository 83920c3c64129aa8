"""Loading and using an exported model: images, table rows or arrays in; scores, classes, labels or numbers out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.far_values import warn_far
from ..data.patches import slide
from ..data.preparation import Preparation
from ..tasks import TASKS
from ..utils.errors import FedshiftError, UsageError

FORMAT = 1
DESCRIPTION, PROGRAM = "model.json", "program.pt2"


class ExportedModel:
    """A model in ``directory``, which can be called with samples; returned by :func:`load`.

    Attributes:
        directory: The model's directory.
        classes: Names of the classes, labels or targets, in the order of the outputs.
        task: Name of the task: ``classification``, ``segmentation``, ``multilabel``, ``regression``, ``survival``, or
            the name of a user task that derives from none of these.
        inputs: How samples become the program's inputs.
        facts: Facts about the model, as in ``model.json``.

    """

    def __init__(self, directory: Path, description: Mapping[str, Any], program: Callable[..., Tensor]) -> None:
        self.directory, self.classes = directory, tuple(description["classes"])
        self.inputs, self.facts = Preparation.from_json(description["input"]), description["model"]
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
                array; or several: a list of images or rows, a data frame, or an array with one more dimension. For a
                network with several inputs, a dictionary of arrays by name, for one sample or for several.

        Warns:
            FarValues: The samples are far from the training data's, such as in another unit.

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
        kind = TASKS.entries.get(self.task)
        named = name_predictions(kind().predict(scores) if kind else scores, self.task, self.classes)
        return named[0] if single else named

    def _score(self, samples: Any) -> tuple[Tensor, bool]:
        """Return the program's outputs ``[N, ...]``, and whether there was a single sample."""
        x, single = self.inputs.store(samples)
        warn_far(self.inputs, x, above=3)
        if self.inputs.patched:
            return torch.cat([slide(self._program, each[None], self.inputs.shape[1:]) for each in x]), single
        return self._program(*self.inputs.divide(x)), single


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
