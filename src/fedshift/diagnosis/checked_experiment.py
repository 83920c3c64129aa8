"""Experiments that start: made from settings, and their data checked for errors that training would hide."""

from __future__ import annotations

from dataclasses import replace

from ..config.spec import CompareSpec, RunSpec
from ..data.checks.faults import judge_test_sizes
from ..data.checks.quality import check_data
from ..data.files.read_options import Progress
from ..experiments.experiment import Experiment
from ..experiments.factory import make_experiment


def make_checked(spec: RunSpec | CompareSpec, progress: Progress | None = None) -> Experiment:
    """Return the experiment that ``spec`` describes, with notices about its data, or refuse data with errors."""
    experiment = make_experiment(spec, progress)
    data = check_data(experiment.data, spec.on_data_error)
    found = judge_test_sizes(data)
    few = tuple(f"{finding.text} {finding.fix}" for finding in found if finding.kind == "no-verdict")
    return replace(experiment, data=replace(data, notices=(*data.notices, *few)))
