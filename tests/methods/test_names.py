"""Every method's file: one function named like it, a cited source, and names that compose."""

import importlib
import pkgutil

import pytest

import fedshift.methods
from fedshift.config.expressions import list_catalog
from fedshift.core.method import Method
from fedshift.experiments.restoration import find_method, select_trials
from fedshift.methods.fedavg import fedavg
from fedshift.methods.fedbn import fedbn
from fedshift.methods.silobn import silobn
from fedshift.utils.errors import UsageError

FILES = [module.name for module in pkgutil.iter_modules(fedshift.methods.__path__)]


@pytest.mark.parametrize("name", FILES)
def test_a_method_is_one_function_named_like_its_file_with_a_described_source(name):
    module = importlib.import_module(f"fedshift.methods.{name}")
    assert isinstance(getattr(module, name)(), Method)
    assert name in list_catalog("methods")
    assert len(module.__doc__.splitlines()) >= 1
    assert any(word in module.__doc__ for word in ("arXiv:", "openreview.net", "table"))


def test_names_tell_how_methods_are_composed():
    assert fedbn().name == fedbn(fedavg()).name == "fedbn"
    assert silobn(fedavg(weighting="uniform")).name == "silobn+fedavg(weighting='uniform')"
    assert fedavg(fedbn(), weighting="samples").name == "fedbn+fedavg(weighting='samples')"


def test_an_unknown_weighting_is_refused_with_those_that_exist():
    with pytest.raises(UsageError, match=r"unknown weighting 'sample': did you mean 'samples'\? allowed are auto, sam"):
        fedavg(weighting="sample")


def test_every_method_is_found_by_what_was_typed_and_by_its_name_in_tables(make):
    typed = [*FILES, "fedprox( mu=1e-1 )", "fedavg(weighting='uniform')", "gn+silobn"]
    typed.remove("tuned")  # tuned() is fedavg
    experiment = make(methods=", ".join(typed))
    for text, made in zip(typed, experiment.methods, strict=True):
        assert find_method(text, experiment) == find_method(made.name, experiment) == made.label
        (chosen,) = select_trials(experiment, text).methods
        assert chosen is made
    assert find_method("gn", experiment) == "gn"


def test_the_text_of_a_method_tells_any_two_apart():
    texts = [method.text for method in (fedavg(), fedbn(), silobn(), fedavg(weighting="uniform"), fedbn(silobn()))]
    assert len(set(texts)) == len(texts)
    assert "0x" not in "".join(texts)
