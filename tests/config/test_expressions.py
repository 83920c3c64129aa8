"""Names and expressions: the accepted spellings, and that nothing written is ever executed."""

import inspect
import sys

import pytest

from fedshift.config.expressions import list_catalog, read_catalog
from fedshift.methods import METHODS
from fedshift.models import MODELS
from fedshift.utils.errors import UsageError


def test_a_name_may_be_written_with_dashes_or_underscores_in_any_case():
    assert MODELS.find("small-cnn") is MODELS.find("Small_CNN") is list_catalog("models")["small-cnn"]


@pytest.mark.parametrize("package", ["methods", "models"])
def test_the_catalog_holds_the_public_functions_of_the_package_only(package):
    for name, function in list_catalog(package).items():
        assert function.__module__.startswith(f"fedshift.{package}.")
        assert name == (function.__name__ if package == "methods" else function.__name__.replace("_", "-"))
        assert function.__doc__


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("fedavg", ["fedavg"]),
        ("fedavg, fedbn", ["fedavg", "fedbn"]),
        ("fedbn+fedprox", ["fedbn+fedprox"]),
        ("fedbn + fedprox(mu=0.1)", ["fedbn+fedprox(mu=0.1)"]),
        ("fedbn(fedprox(mu=0.1))", ["fedbn+fedprox(mu=0.1)"]),
        ("single+fedwon+tuned(lr=0.05)", ["single+fedwon+tuned(lr=0.05)"]),
        ("fedavg+gn, gn, fedbn+gn", ["fedavg+gn", "fedavg+gn", "fedbn+gn"]),
        ("trimmed_mean(trim=2)", ["trimmed_mean(trim=2)"]),
        ("fedavg(weighting='uniform'),fedbn", ["fedavg(weighting='uniform')", "fedbn"]),
        ("fedshift.methods.fedbn:fedbn", ["fedbn"]),
        ("fedshift.methods.fedbn:fedbn+fedshift.methods.fedprox:fedprox(mu=1)", ["fedbn+fedprox(mu=1)"]),
    ],
)
def test_expressions_make_the_methods_they_name(written, name):
    assert [method.name for method in METHODS.parse_all(written)] == name


def test_plus_composes_as_calls_do():
    (plus,), (call,) = METHODS.parse_all("fedbn+fedprox(mu=0.3)"), METHODS.parse_all("fedbn(fedprox(mu=0.3))")
    assert plus.text == call.text
    assert plus.text != METHODS.parse_all("fedbn+fedprox(mu=0.2)")[0].text


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("fedbm", "unknown method 'fedbm': did you mean 'fedbn'? allowed are agc, apfl, centralized"),
        ("fedavg,fedbm", "did you mean 'fedbn'"),
        ("", "names none: write name, name(key=value) or name+name"),
        ("fedbn(", "a bracket or a quotation mark is not closed"),
        ("fed bn", "'fed bn' cannot be read: write name"),
        ("fedbn fedavg", "cannot be read: write name"),
        ("fedbn-fedavg", "'fedbn - fedavg' is not a name"),
        ("3", "'3' is not a name"),
        ("fedbn(3)", "'3' is not a name"),
        ("'fedbn'", "is not a name"),
        ("krum(num_malicous=1)", "unknown argument 'num_malicous'; krum takes num_malicious=0"),
        ("fedprox(nu=1)", "unknown argument 'nu'; fedprox takes mu=0.01"),
        ("fedprox(mu=1, mu=2)", "an argument is given twice; fedprox takes mu=0.01"),
        ("fedprox(mu='a')", "fedprox takes"),
        ("fedprox(mu=-1)", "mu=-1 is negative; it must be 0 (FedAvg) or more"),
        ("fedprox(fedavg,fedavg)", "too many positional arguments"),
        ("fedprox(mu=nan)", "values must be numbers, strings or True, False, None"),
        ("fedprox(**{})", "fedprox takes"),
        ("single+fedbn", "single+fedbn: fedbn selects exchanged entries"),
        ("no_such_package.module:function", "No module named 'no_such_package'; install it"),
        ("fedshift.methods.fedbn:nothing_here", "module fedshift.methods.fedbn has no 'nothing_here'"),
        ("os:getcwd", "returned a str, not a Method"),
        ("os:sep", "sep is not a function"),
        ("math:sqrt", "math.sqrt takes x (by position)"),
        ("math:sqrt(x=2)", "math.sqrt takes x (by position)"),
        ("math:isclose(b=2)", "math.isclose takes a, b, rel_tol=1e-09, abs_tol=0.0"),
        ("textwrap:dedent", "textwrap.dedent takes text"),
        ("median(x=2)", "unknown argument 'x'; median takes no arguments"),
    ],
)
def test_a_bad_expression_is_refused_and_said_why(written, said):
    with pytest.raises(UsageError) as refused:
        METHODS.parse_all(written)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "written",
    [
        "fedprox(mu=print('executed'))",
        "(lambda: print('executed'))()",
        "[print('executed')]",
        "fedprox(mu=0 if print('executed') else 1)",
        "print('executed')",
    ],
)
def test_nothing_written_is_executed(written, capsys):
    with pytest.raises(UsageError):
        METHODS.parse_all(written)
    assert "executed" not in capsys.readouterr().out


def test_a_plug_in_is_found_by_module_and_function(tmp_path, monkeypatch):
    (tmp_path / "plug_in_for_names.py").write_text(
        "from fedshift import fedbn\ndef mine(base=None, *, strength=1):\n    return fedbn(base)\nnumber = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "plug_in_for_names", raising=False)
    assert METHODS.parse_all("plug_in_for_names:mine(strength=2)+fedprox")[0].name == "fedbn+fedprox"
    assert MODELS.find("plug_in_for_names.mine").__name__ == "mine"
    with pytest.raises(UsageError, match="number is not a function"):
        METHODS.find("plug_in_for_names:number")


@pytest.mark.parametrize("package", ["methods", "models", "data.datasets"])
def test_the_catalog_read_from_source_is_the_one_imported(package):
    read, imported = read_catalog(package), list_catalog(package)
    assert list(read) == list(imported)
    for name, function in imported.items():
        parameters = inspect.signature(function).parameters.values()
        named = [f"{each.name}={each.default!r}" for each in parameters if each.kind is each.KEYWORD_ONLY]
        assert package != "methods" or read[name].arguments == ", ".join(named), name
        assert read[name].summary, name
