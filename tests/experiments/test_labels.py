"""Labels: a method is called what was typed for it, wherever it is shown, and found by that and by its name."""

from dataclasses import replace
from html import unescape

import pytest
import torch

import fedshift
from fedshift import Method, Rule
from fedshift.config.expressions import list_catalog, tidy
from fedshift.experiments.restoration import find_method, select_trials
from fedshift.methods import METHODS
from fedshift.results.checkpoint import load_checkpoint
from fedshift.results.run_directory import to_file_name
from fedshift.results.summary import read_summary
from fedshift.utils.errors import UsageError

WRITTEN = {"tuned": "tuned(lr=0.05)", "dp_sgd": "gn+dp_sgd"}
"""Methods that need an argument, or another method."""
TYPED = [WRITTEN.get(name, name) for name in list_catalog("methods")]
HOW = {"rounds": 1, "batch_size": 8, "lr": 0.01, "engine": "sequential", "jobs": 1}


class Noted(Rule):
    """A rule that changes nothing."""


def noted(base=None):
    return replace((base or Method()).with_rule(Noted()), name="noted")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of every method of the catalog."""
    x = torch.randint(0, 255, (24, 8, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).numpy()
    sizes = {"a": 12, "b": 8, "c": 10}
    data = {name: (x[:size], [0, 1] * (size // 2), x[12:], [0, 1] * 6) for name, size in sizes.items()}
    out = tmp_path_factory.mktemp("whole") / "run"
    return fedshift.compare(", ".join(TYPED), data=data, out=out, **HOW)


@pytest.mark.slow
def test_every_method_of_the_catalog_is_shown_as_it_was_typed(whole):
    summary = whole.summary
    assert list(summary.methods) == list(dict.fromkeys(summary.rows["method"])) == TYPED
    assert {facts.name for facts in summary.methods.values()} & {"fedavg+gn", "fedavg+tuned(lr=0.05)"}
    assert list(whole.table().columns.unique(0)) == TYPED
    assert {path.name for path in (whole.directory / "trials").iterdir()} == {
        f"{to_file_name(text)}-seed0" for text in TYPED
    }


@pytest.mark.slow
def test_tables_sentences_and_the_page_call_methods_as_they_were_typed(tiny, tmp_path, undrawn):
    result = fedshift.compare("fedavg(), gn, tuned(lr=0.05)", data=tiny, out=tmp_path / "run", seeds=2, **HOW)
    assert [*result.differences().index.unique("method")] == ["gn", "tuned(lr=0.05)"]
    assert [*result.differences().index.unique("reference")] == ["fedavg()"]
    page = unescape(result.report().read_text())
    for method in result.summary.methods.values():  # all choices in a line begin with the name
        page = page.replace(method.text, "")
    for shown, name in ((str(result), "gn"), (result.to_latex(), "FedAvg+GN"), (page, "gn")):  # papers have names
        assert name in shown
        assert "fedavg+" not in shown
        assert "fedavg()" in shown


@pytest.mark.slow
def test_every_method_of_the_catalog_is_found_by_label_name_and_text(whole):
    for run in (whole.summary, whole.experiment):
        methods = run.methods.items() if isinstance(run.methods, dict) else [(m.label, m) for m in run.methods]
        for label, method in methods:
            for asked in (label, f" {label} ", method.name, method.text):
                assert find_method(asked, run) == label
    some = select_trials(whole.experiment, "fedavg + gn, fedprox(mu=1e-2), fed*bn")
    assert [method.label for method in some.methods] == [
        text for text in TYPED if text in ("gn", "fedprox") or (text.startswith("fed") and text.endswith("bn"))
    ]


@pytest.mark.parametrize(
    ("typed", "labels"),
    [
        ("fedavg,gn", ["fedavg", "gn"]),
        (" fedprox( mu = 0.10,)  ,\n fedbn + FedProx ", ["fedprox(mu=0.10, )", "fedbn+FedProx"]),
        ("fedbn(keep = 'norm_layers'), fedprox(fedavg(weighting=\"uniform\"),mu=1)",
         ["fedbn(keep='norm_layers')", 'fedprox(fedavg(weighting="uniform"), mu=1)']),
        ("fedavg,", ["fedavg"]),
    ],
)  # fmt: skip
def test_white_space_alone_is_changed(typed, labels):
    assert [method.label for method in METHODS.parse_all(typed)] == labels
    assert [METHODS.parse(label).text for label in labels] == [method.text for method in METHODS.parse_all(typed)]


def test_what_quotes_hold_is_left_as_it_is():
    assert tidy(" f( a = ' b ,  c+d ' , e=\"'  ' \") ") == "f(a=' b ,  c+d ', e=\"'  ' \")"


def test_what_was_not_typed_is_called_by_its_name():
    assert fedshift.gn().label == "fedavg+gn"
    assert METHODS.parse(fedshift.fedprox(mu=0.1)).label == METHODS.parse(fedshift.fedprox).label + "(mu=0.1)"
    assert fedshift.tuned(METHODS.parse("gn"), lr=0.1).label == "gn+tuned(lr=0.1)"
    assert fedshift.fedbn(METHODS.parse("fedavg")).label == "fedbn"


def test_what_is_computed_and_written_does_not_depend_on_the_label(tiny, tmp_path):
    for name, typed in (("one", "fedavg+dp(noise_multiplier=1.0)"), ("other", "dp( noise_multiplier=1e0 )+fedavg")):
        fedshift.compare(typed, data=tiny, out=tmp_path / name, **HOW)
    one, other = (next((tmp_path / name / "trials").iterdir()) for name in ("one", "other"))
    assert one.name != other.name
    assert (one / "checkpoint.safetensors").read_bytes() == (other / "checkpoint.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("gn, gn", "method 'gn' is given twice: leave one out"),
        ("gn, fedavg+gn", "methods 'gn' and 'fedavg+gn' are both 'fedavg+gn': leave one out"),
        (["gn", fedshift.gn()], "methods 'gn' and 'fedavg+gn' are both 'fedavg+gn': leave one out"),
        ([noted(), noted(fedshift.fedbn())], "method 'noted' is given twice: give one of them another name"),
        (["gn", replace(noted(), name="gn")], "method 'gn' is given twice: give one of them another name"),
        (
            [replace(noted(), name="a b"), replace(noted(), name="a-b")],
            "methods 'a b' and 'a-b' would share the folder a-b: give one of them another name",
        ),
    ],
)
def test_two_methods_that_cannot_be_told_apart_are_refused(tiny, given, said):
    with pytest.raises(UsageError, match=said.replace("+", r"\+")) as refused:
        fedshift.compare(given, data=tiny)
    assert refused.value.settings == ("methods",)


@pytest.mark.slow
def test_a_run_that_is_continued_in_another_spelling_keeps_the_first(make, tmp_path):
    first = "gn, fedprox(mu=0.1), dp(noise_multiplier=1)"
    later = "fedbn, fedavg + gn, fedprox(mu=1e-1), DP(noise_multiplier=1.0)"
    make(methods=first, rounds=1).run(tmp_path / "run")
    make(methods=later, rounds=2).check_compatible(tmp_path / "run")
    make(methods=later, rounds=2).run(tmp_path / "run", resume=True)
    make(methods=f"fedbn, {first}", rounds=2).run(tmp_path / "whole")
    run, whole = (read_summary(tmp_path / name) for name in ("run", "whole"))
    assert list(run.methods) == list(whole.methods) == ["fedbn", "gn", "fedprox(mu=0.1)", "dp(noise_multiplier=1)"]
    for trial in (tmp_path / "whole" / "trials").iterdir():
        one, other = (
            load_checkpoint(tmp_path / name / "trials" / trial.name / "checkpoint.safetensors")[0]
            for name in ("run", "whole")
        )
        assert all(torch.equal(one[entry], other[entry]) for entry in one.keys() | other.keys())
    again = fedshift.read_run(tmp_path / "run")
    assert [method.label for method in again.experiment.methods] == list(run.methods)
    for asked in ("gn", "fedavg+gn", "fedavg + gn"):
        model, same = again.model(asked), fedshift.read_run(tmp_path / "whole").model("gn")
        assert all(torch.equal(each, other) for each, other in zip(model.parameters(), same.parameters(), strict=True))


def test_a_method_of_objects_is_found_where_its_text_is_another(tiny, tmp_path):
    """A run of an object records its name; what the settings file makes again has the text that was written."""
    fedshift.compare([fedshift.gn, fedshift.fedprox(mu=0.1)], data=tiny, out=tmp_path / "run", **HOW)
    again = fedshift.read_run(tmp_path / "run", data=tiny)
    assert [method.label for method in again.experiment.methods] == ["fedavg+gn", "fedprox(mu=0.1)"]
    assert again.model("gn").state_dict().keys() == again.model("fedavg+gn").state_dict().keys()
