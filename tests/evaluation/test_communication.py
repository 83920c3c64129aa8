"""What methods need and do, as the program derives it, against what their papers say."""

import pytest

from fedshift.config.expressions import list_catalog
from fedshift.evaluation.communication import find_capabilities
from fedshift.methods import METHODS
from fedshift.methods.agc import agc
from fedshift.methods.fedbn import fedbn
from fedshift.nn.surgery import ScaledStandardization


def of(written):
    return find_capabilities(METHODS.parse_all(written)[0])


@pytest.mark.parametrize(
    ("written", "state", "normalization", "sent", "has_global"),
    [
        # FedWon's table 7: FedBN and SiloBN need clients with a state, FedWon and GN do not.
        ("fedavg", "", "shared", "everything", True),
        ("fedbn", "BatchNorm", "local", "all but BatchNorm", False),
        ("silobn", "BatchNorm's statistics", "statistics local", "all but BatchNorm's statistics", False),
        ("fixbn", "", "shared, then frozen", "everything", True),
        ("fixbn(keep_momentum=True)", "momentum", "shared, then frozen", "everything", True),
        ("fedavg+gn", "", "replaced by GroupNorm", "everything", True),
        ("fedwon", "", "removed", "everything", True),
        ("hbn", "HybridBatchNorm's factors", "replaced by HybridBatchNorm", "everything", True),
        ("partialfed_fix(layers='batch_norm')", "BatchNorm", "local", "everything", True),
        ("partialfed_adaptive", "gates", "shared", "everything", True),
        ("scaffold", "control variates", "shared", "everything", True),
        ("dp_sgd", "", "refused", "everything", True),
        ("dp_sgd+gn", "", "replaced by GroupNorm", "everything", True),
        ("ditto", "personal model", "shared", "everything", True),
        ("single", "everything", "local", "nothing", False),
        ("centralized", "", "shared", "the data", True),
        ("fedmmb", "its place in the pass", "shared", "everything", True),
        ("fedbn+fedper", "4 layers", "local", "all but 4 layers", False),  # three of BatchNorm and the classifier
        ("fedper", "the last layer", "shared", "all but the last layer", False),
    ],
)
def test_capabilities_are_those_of_the_paper(written, state, normalization, sent, has_global):
    found = of(written)
    assert (found.state, found.normalization, found.sent, found.has_global) == (state, normalization, sent, has_global)


def test_what_travels_is_counted_against_fedavg():
    assert of("fedavg").up == 1.0
    assert of("scaffold").up > 1.9  # a control variate for every parameter
    assert of("single").up == 0.0
    assert 0.9 < of("fedbn").up < 1.0


@pytest.mark.slow
def test_every_method_has_a_row(capsys):
    from fedshift.cli.app import main

    with pytest.raises(SystemExit) as done:
        main(["list", "capabilities"])
    assert done.value.code == 0
    printed = capsys.readouterr().out
    table = printed[printed.index("what methods need and do") :]
    assert [line.split()[0] for line in table.splitlines() if line[:1].isalpha()][2:] == list(list_catalog("methods"))


def test_clipping_takes_the_place_of_a_methods_own(tiny):
    from fedshift.config.spec import CompareSpec
    from fedshift.experiments.factory import make_experiment

    spec = CompareSpec(methods="fedavg+agc, fedwon+agc(classifier=False), agc+agc(clip=2.0)+fedbn")
    made = make_experiment(spec).methods
    assert [method.name for method in made] == [
        "fedavg+agc", "fedwon+agc(classifier=False)", "fedbn+agc+agc(clip=2)",
    ]  # fmt: skip
    assert [repr(method.rules) for method in made] == [
        f"(Clipping(clip=0.64, classifier={classifier}),)" for classifier in (True, False, True)
    ]
    assert ScaledStandardization() in made[1].surgery
    both = agc(fedbn(), clip=0.64), fedbn(agc(clip=0.64))
    assert both[0].text.partition(":")[2] == both[1].text.partition(":")[2]
