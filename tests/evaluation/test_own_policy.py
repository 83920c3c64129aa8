"""A policy of one's own, as docs/new-clients.md writes one: found, checked, refused and used like fedshift's."""

import re
import sys
from pathlib import Path

import pytest
import torch

from fedshift.evaluation.policy import POLICIES, parse_policies
from fedshift.experiments.trial import Trial
from fedshift.utils.errors import UsageError
from fedshift.utils.state import is_equal

PAGE = Path(__file__).parents[2] / "docs" / "new-clients.md"
CODE = re.search(r"test_own_policy.py -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The file of the page, in the directory where the command runs; with a function that is no policy."""
    (tmp_path / "my_policies.py").write_text(f"{CODE}\n\ndef bare():\n    return 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_policies:wise_ft"
    sys.modules.pop("my_policies", None)


def test_the_policy_of_the_page_is_the_average_at_one_end_and_fine_tuning_at_the_other(own, make):
    experiment = make(newcomers="cid", rounds=1, unseen=f"{own}(share=0.25)")
    trial = Trial(experiment.methods[0], experiment.model, experiment.data, experiment.settings, 0)
    trial.advance()
    train = trial.measured.client("cid").train

    def model(policy):
        return trial.make_unseen_state(policy, "cid", train)

    average, tuned, part = model("average"), model("finetune"), trial.model_state("cid")
    assert is_equal(model(f"{own}(share=1)"), tuned)
    unmoved = model(f"{own}(share=0.0)")
    for name in (name for name, start in average.items() if start.is_floating_point()):
        assert torch.equal(unmoved[name], average[name])
        assert torch.allclose(part[name], 0.75 * average[name] + 0.25 * tuned[name], rtol=1e-5, atol=1e-6)
    assert not is_equal(part, average)


def test_it_is_written_without_defaults_and_takes_what_its_types_allow(own):
    assert parse_policies(f"average, {own}(share=0.5), my_policies.wise_ft") == ("average", own)
    assert POLICIES.parse(f"{own}(share=0.3)").text == f"{own}(share=0.3)"
    with pytest.raises(UsageError, match=r"wise_ft: share=1.5 should be less than or equal to 1"):
        POLICIES.parse(f"{own}(share=1.5)")
    with pytest.raises(UsageError, match=r"unknown argument 'part'; my_policies.wise_ft takes share"):
        POLICIES.parse(f"{own}(part=1)")
    with pytest.raises(UsageError, match=r"'my_policies:bare' is a int: decorate the function with fedshift.policy"):
        POLICIES.parse("my_policies:bare")
    with pytest.raises(UsageError, match="module my_policies has no 'wise'"):
        POLICIES.parse("my_policies:wise")


def test_it_is_measured_beside_others_and_its_settings_file_needs_leave(own, cli, tiny_folder, tmp_path, undrawn):
    words = ("--methods", "fedbn", "--rounds", "1", "--newcomers", "cid", "--unseen", f"{own}(share=0.3)")
    done = cli("compare", "--data", tiny_folder, *words, "--image-size", "8", "--out", "run")
    assert done.code == 0, done.err
    done = cli("adapt", "run", "--data", tiny_folder, "--clients", "cid", "--policies", f"average,{own}")
    assert done.code == 2
    assert "'my_policies:wise_ft' is a function of this machine that nobody allowed" in done.err
    done = cli("adapt", "run", "--data", tiny_folder, "--clients", "cid", "--policies", f"average,{own}", "--code", own)
    assert done.code == 0, done.err
    assert f"fedbn: {own}" in done.out
    assert f"{own}: 1 round of the run's local work" in done.out
