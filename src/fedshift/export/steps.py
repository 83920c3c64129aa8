"""The way from a sample to its prediction, in steps that a reader can follow without fedshift.

The same :class:`~fedshift.data.preparation.Preparation` prepares samples in a run, in ``fedshift.load`` and in
``fedshift predict``. ``steps.txt.j2`` is its only description: model card, ``model.json`` and programs quote it.
"""

from __future__ import annotations

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined

from ..data.columns import Column
from ..data.decoding.ranges import PERCENTILES, SPARSE, UNIT_RANGE
from ..data.decoding.resizing import COARSE
from ..data.patches import DEVIATION, LEAST_WEIGHT, OVERLAP
from ..data.preparation import FeatureScaling, Preparation
from ..utils.words import join_some

OUTPUTS = {
    "classification": "scores [N, classes] before softmax, in the order of the classes; the largest is the answer",
    "segmentation": "scores [N, classes, H, W] before softmax, in the order of the classes; the largest is the answer",
    "multilabel": "scores [N, labels] before the logistic function, in the order of the labels; one above 0, a "
    "probability above one half, means yes",
    "regression": "numbers [N, targets] in the unit of the data, in the order of the targets",
    "survival": "log-risks [N, 1]; of two patients of one client, the event is expected first for the one with the "
    "higher risk",
}
"""Outputs of a program by task."""
OWN_OUTPUTS = "the network's outputs for each sample, [N, ...]"
"""Outputs for a user task that derives from no task of fedshift."""
LISTED = 50
"""Maximum number of columns, clients and classes that are listed one by one."""


@cache
def make_environment() -> Environment:
    """Return the templates of this package."""
    loader = PackageLoader("fedshift", "export")
    return Environment(loader=loader, autoescape=False, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def list_steps(preparation: Preparation, task: str) -> dict[str, str]:
    """Return the steps from a sample to its prediction, in order: sentences by a word for each step.

    Args:
        preparation: The preparation of the model's samples.
        task: Name of the task, or of a user task that derives from none of fedshift's.

    """
    size, decoding = preparation.shape[1:], preparation.decoding
    leads = zip(decoding.leads, decoding.units or ("",) * len(decoding.leads), strict=True)
    text = make_environment().get_template("steps.txt.j2").render(
        p=preparation, kind=decoding.kind, files=preparation.takes_files, segmentation=task == "segmentation",
        spacing=[f"{step:g}" for step in decoding.spacing], coarse=f"{COARSE:g}", percentiles=PERCENTILES,
        sparse=SPARSE, unit=UNIT_RANGE,
        leads=", ".join(f"{lead} ({unit or 'no unit'})" for lead, unit in leads), several=preparation.describe_inputs(),
        columns=join_some(map(_describe_column, preparation.columns), "; ", LISTED, "more, as in `model.json`"),
        places=("depth", "height", "width")[3 - len(size):], inside=_describe_scaling(preparation),
        outputs=OUTPUTS.get(task, OWN_OUTPUTS), steps=" x ".join(str(max(1, int(n * OVERLAP))) for n in size),
        middles=" x ".join(f"{(n - 1) / 2:g}" for n in size), deviations=" x ".join(f"{DEVIATION * n:g}" for n in size),
        least=f"{LEAST_WEIGHT:g}",
    )  # fmt: skip
    return dict(line.split(": ", 1) for line in text.splitlines())


def _describe_column(column: Column) -> str:
    if column.categories is not None:
        return f"1 or 0 for each category of {column.name!r} ({', '.join(column.categories)})"
    return f"{column.name!r}" + " (1 for True, 0 for False)" * (column.holds == "True and False")


def _describe_scaling(preparation: Preparation) -> str:
    scaling = preparation.scaling
    if isinstance(scaling, FeatureScaling):
        return f"Inside, a missing value is filled, and each column scaled ({scaling})"
    if preparation.dtype != "uint8":
        return "Inside, numbers are used unchanged"
    mean, std = (", ".join(f"{value:.6g}" for value in values) for values in (scaling.mean, scaling.std))
    return f"Inside, pixels are divided by 255; minus {mean}; over {std} ({scaling.source})"
