"""What the network says is not believed: settings that nobody submitted here, functions that nobody allowed."""

import json
from dataclasses import asdict

import pytest

from fedshift.config.spec import RunSpec
from fedshift.flower.server.coordinator import PRIVATE, read_submission
from fedshift.flower.site.site import Site
from fedshift.flower.transport.exchange import Exchange
from fedshift.utils.errors import FedshiftError

CALLED = []
NAME = "tests.flower.test_trust:called"


def called(*given):
    CALLED.append(given)


def test_a_run_has_the_settings_that_serve_submitted():
    settings = json.dumps(asdict(RunSpec(rounds=3)))
    assert read_submission(settings, settings) == RunSpec(rounds=3)


def test_a_run_with_other_settings_is_refused_before_they_are_read():
    with pytest.raises(FedshiftError, match="refused a run that `fedshift serve` did not submit"):
        read_submission("no settings at all", json.dumps(asdict(RunSpec())))


@pytest.mark.parametrize("setting", ["method", "model", "augment"])
def test_a_site_calls_no_function_of_its_machine_that_nobody_allowed(setting, tmp_path):
    spec = RunSpec(**{"method": "fedavg", "model": "small-cnn", "samples": 24} | {setting: NAME})
    trial = {
        "spec": asdict(spec) | PRIVATE, "classes": 10, "class_names": [], "columns": [], "seed": 0, "method": 0,
        "labels": None, "clients": 1, "experiment": "e1",
    }  # fmt: skip
    asked = Exchange(kind="train", facts={"trial": trial, "round": 0, "base": 0})
    CALLED.clear()
    answer = Site("digits", "pen", tmp_path).answer(asked)
    assert answer.kind == "refused"
    assert f"nobody allowed: allow it (--code {NAME})" in answer.facts["why"]
    assert CALLED == []
    Site("digits", "pen", tmp_path, code=frozenset({NAME})).answer(asked)
    assert CALLED != []
