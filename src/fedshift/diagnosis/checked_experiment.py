"""Experiments that start: made from settings, and their data checked for errors that training would hide."""

from __future__ import annotations

from dataclasses import replace

from ..config.spec import CompareSpec, RunSpec
from ..data.files.read_options import Progress
from ..experiments.experiment import Experiment
from ..experiments.factory import make_experiment
from .quality import check_data


def make_checked(spec: RunSpec | CompareSpec, progress: Progress | None = None) -> Experiment:
    """Return the experiment that ``spec`` describes, with a notice about errors in its data, or refuse such data."""
    experiment = make_experiment(spec, progress)
    return replace(experiment, data=check_data(experiment.data, spec.on_data_error))
