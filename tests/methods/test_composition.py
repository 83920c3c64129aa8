"""Every method on every other: the pair runs a round, or is refused for the reason in the table below.

The table is complete: a pair that begins or ceases to be refused, or is refused for another reason, fails here.
"""

from itertools import product

import numpy as np
import pytest
from torch import nn

from fedshift.config.expressions import list_catalog
from fedshift.core.optimizer import SGD
from fedshift.core.work import Work
from fedshift.data.assembly import federation
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.utils.errors import UsageError

METHODS = list_catalog("methods")

ROBUST = ["krum", "multi_krum", "median", "trimmed_mean", "geometric_median"]
FOR_DOMAINS = ["fedgma", "fedheal", "feddg_ga"]
MIXES = ["fedap"]
MIXES_HEADS = ["fedpac"]
MIXES_WEIGHTS = ["fedcac"]
FOLDS = ["fednova", *ROBUST, "dp", *FOR_DOMAINS, *MIXES, *MIXES_HEADS, *MIXES_WEIGHTS]
STEPS = ["fedavgm", "fedadagrad", "fedadam", "fedyogi"]
WITH_RULE = ["fedheal", "feddg_ga", "feddyn", *MIXES_HEADS]
"""Methods of FOLDS and STEPS that change local work, too."""
FOLDS_ALONE = {*FOLDS, *STEPS} - {*WITH_RULE, *MIXES}
"""Those that change nothing but how uploads are folded."""
WORKS = ["fedmmb", "fedsmb"]
KEEPS_NORM = ["fedbn", "silobn", *MIXES]
ASSEMBLED = ["gperxan"]
"""Decides what becomes of BatchNorm, keeps it, and reads the shared classifier."""
KEEPS_INPUTS = ["fedrdn"]
"""Keeps what normalizes inputs, and makes the client's model with it."""
KEEPS_HEAD = ["fedper", "fedrep", "partialfed_fix"]
OWN_MODEL = ["ditto", "partialfed_adaptive", "apfl", "fedbabu", "fedala"]
UNEVEN = ["fedrep", "partialfed_adaptive", "fedala"]
PROTOTYPES = ["fedplvm", "fedproto", "fpl"]
SAMPLES = ["dp_sgd"]
MEASURED = ["hbn"]
READS_UPLOADS = ["fedfa"]
"""Computes entries from those of single clients."""
FROM_SERVER = ["harmofl", *MEASURED, *READS_UPLOADS]
SENDS_MORE = ["scaffold", "feddg_elcfs", "harmofl", *MEASURED, *KEEPS_INPUTS, *PROTOTYPES]
GROUPS = ["gn", "ln"]
NO_NORM = ["fedwon", "nonorm"]
DECIDES_NORM = NO_NORM + GROUPS + MEASURED + ASSEMBLED
ALONE, POOLED = ["single"], ["centralized"]
KEEPS = KEEPS_NORM + KEEPS_HEAD + KEEPS_INPUTS + MEASURED + ASSEMBLED


def both_ways(one, other):
    return {*product(one, other), *product(other, one)}


REFUSED = {
    "already replaces the aggregation": both_ways(FOLDS, FOLDS),
    "sends each client its own mix of uploads, but a server optimizer updates one global model": both_ways(
        MIXES + MIXES_HEADS + MIXES_WEIGHTS, STEPS
    ),
    "FedPAC averages features of clients, of which these share none": both_ways(ALONE, MIXES_HEADS),
    "FedPAC mixes classifiers of clients": both_ways(["fedper", "partialfed_fix"], MIXES_HEADS),
    "has fedrep twice": both_ways(["fedrep"], MIXES_HEADS),
    "already has a server optimizer": both_ways([*STEPS, "feddyn"], [*STEPS, "feddyn"]),
    "the mean of the clients' changes, but": both_ways(["feddyn"], FOLDS),
    "already sets the local work": both_ways(WORKS, WORKS),
    "there is nothing to aggregate: clients send nothing": both_ways(ALONE, FOLDS_ALONE),
    "there is nothing to aggregate: all data are in one place": both_ways(POOLED, {*FOLDS_ALONE, *MIXES_HEADS}),
    "pools all data but keeps entries on clients": both_ways(POOLED, ALONE + KEEPS),
    "pools all data but personalizes models": both_ways(POOLED, ["partialfed_adaptive"]),
    "pools all data already": {*product(POOLED, POOLED)},
    "freezes statistics already": {("fixbn", "fixbn")},
    "both define the client's model: choose one of the two": {
        *both_ways(OWN_MODEL, OWN_MODEL) - {(name, name) for name in OWN_MODEL},
        *both_ways(OWN_MODEL, ["fedrod", *KEEPS_INPUTS]),
        *both_ways(["fedrod"], KEEPS_INPUTS),
    },
    "partialfed_adaptive chooses which layers to load": both_ways(
        ["partialfed_adaptive"], KEEPS_NORM + KEEPS_HEAD + ALONE + MEASURED + ASSEMBLED
    ),
    "is kept on the client twice": {
        *both_ways(KEEPS_NORM, KEEPS_NORM) - both_ways(MIXES, MIXES),
        *both_ways(KEEPS_HEAD, KEEPS_HEAD),
        *both_ways(KEEPS_NORM, ASSEMBLED),
        *product(KEEPS_INPUTS, KEEPS_INPUTS),
    },
    "cannot stay on the client, because it is never sent": {*product(KEEPS, ALONE)},
    "selects exchanged entries, but single exchanges nothing": {*product(ALONE, KEEPS + ALONE)},
    "SCAFFOLD corrects the drift of shared entries": both_ways(ALONE + POOLED, ["scaffold"]),
    "FedProx keeps parameters near the server's": both_ways(ALONE + POOLED, ["fedprox"]),
    "FedDyn regularizes shared entries": both_ways(ALONE + POOLED, ["feddyn"]),
    "FedHEAL weighs changes of shared entries": both_ways(ALONE + POOLED, ["fedheal"]),
    "FedDG-GA compares each client's model with the shared model": both_ways(ALONE + POOLED, ["feddg_ga"]),
    "APFL mixes each client's model": both_ways(ALONE + POOLED, ["apfl"]),
    "fine-tuning for use starts from what clients share": both_ways(ALONE + POOLED, ["fedbabu"]),
    "FedALA learns weights for adopting": both_ways(ALONE + POOLED, ["fedala"]),
    "but another part keeps '4.bias' on clients: use one of the two, or choose other layers": both_ways(
        ["fedala", "fedrod", *ASSEMBLED], KEEPS_HEAD
    ),
    "fedrep has a phase that trains '4.bias', which another part leaves untrained": both_ways(
        ["fedrep", *MIXES_HEADS], ["fedbabu"]
    ),
    "FedDG-ELCFS trains on images in the styles of clients": both_ways(ALONE + POOLED, ["feddg_elcfs"]),
    "MOON attracts features to the shared model's": both_ways(ALONE + POOLED, ["moon"]),
    "FedRoD adds a personal head to the shared head": both_ways(ALONE + POOLED, ["fedrod"]),
    "Ditto keeps each client's model near the shared model": both_ways(ALONE + POOLED, ["ditto"]),
    "SCAFFOLD's control variate holds only if every step updates": both_ways(["scaffold"], UNEVEN + MIXES_HEADS),
    "FedNova's normalization by the number of steps holds only if every step updates": both_ways(["fednova"], UNEVEN),
    "sends more than the entries that dp clips": both_ways(SENDS_MORE, ["dp"]),
    "sends more than the entries that robust aggregation protects": both_ways(SENDS_MORE, ROBUST),
    "computes from the entries of single clients, beside those that": both_ways(READS_UPLOADS, ["dp", *ROBUST]),
    "twice: remove one of the two": {
        (name, name)
        for name in (
            "fedprox",
            "feddg_elcfs",
            "harmofl",
            "scaffold",
            "moon",
            "fedrod",
            "fedsr",
            "fn",
            "greg",
            *READS_UPLOADS,
            *PROTOTYPES,
            *(name for name in OWN_MODEL if name != "fedbabu"),
        )
    },
    "matches no entry of the model": {
        *both_ways(NO_NORM + GROUPS, KEEPS_NORM),
        *both_ways(NO_NORM + GROUPS, ["fixbn"]),
        *both_ways(MEASURED, [*KEEPS_NORM, "fixbn"]),
    },
    "dp_sgd combines the gradients of single samples, but through BatchNorm": both_ways(
        SAMPLES, METHODS.keys() - {*GROUPS, *NO_NORM, *SAMPLES}
    ),
    "GReg compares with statistics that clients share": both_ways(["greg"], [*KEEPS_NORM, *ALONE, *ASSEMBLED]),
    "GReg compares statistics of BatchNorm, which the model does not have": both_ways(
        ["greg"], NO_NORM + GROUPS + MEASURED
    ),
    "already fine-tunes models for use": {("fedbabu", "fedbabu")},
    "already combines the gradients of samples": {("dp_sgd", "dp_sgd")},
    "both replace normalization layers": both_ways(DECIDES_NORM, DECIDES_NORM),
    "another model on each client, but the server computes": both_ways(FROM_SERVER, ["ditto", "apfl"]),
    "from what clients measure, but another part keeps it on clients": both_ways(ALONE, ["harmofl", *READS_UPLOADS]),
    "feddg_elcfs trains on amplitudes of other clients' images, but harmofl": both_ways(["harmofl"], ["feddg_elcfs"]),
    "images are normalized before their amplitudes are: write harmofl+fedrdn": {("fedrdn", "harmofl")},
}
"""Words of the reason, and the ordered pairs (outer, inner) that are refused for it."""
REASON = {pair: words for words, pairs in REFUSED.items() for pair in pairs}


def network(shape, classes):
    return nn.Sequential(
        nn.Conv2d(shape[0], 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, classes)
    )


def data():
    rng = np.random.default_rng(0)
    clients = {}
    for shift, (name, size) in enumerate({"a": 8, "b": 5, "c": 7}.items()):
        x, y = rng.normal(shift, 1 + shift, (size, 1, 4, 4)), np.arange(size) % 3
        clients[name] = (x, y, x[:3], y[:3])
    return federation(clients)


DATA = data()


def trial(method):
    settings = Settings(rounds=2, work=Work(batch_size=4, epochs=1), optimizer=SGD(lr=0.05), evaluate_every=2)
    return Trial(method, network, DATA, settings, seed=0)


def test_each_refused_pair_stands_once_and_names_methods_that_exist():
    assert sum(map(len, REFUSED.values())) == len(REASON)
    assert {name for pair in REASON for name in pair} <= METHODS.keys()


def test_what_dp_and_robust_aggregation_refuse_is_whatever_sends_more_than_entries():
    bases = {"dp_sgd": METHODS["gn"]()}
    plans = {name: trial(made(bases.get(name))).plan for name, made in METHODS.items()}
    assert {name for name, plan in plans.items() if any(bound.uploads for bound in plan.rules)} == {
        *SENDS_MORE,
        "fedheal",
        "feddg_ga",
        "fedpac",
    }


@pytest.mark.sampled(6)
@pytest.mark.parametrize("third", [0, *(pytest.param(third, marks=pytest.mark.slow) for third in (1, 2))])
@pytest.mark.parametrize("outer", METHODS)
def test_every_pair_runs_a_round_or_is_refused_for_its_reason(outer, third):
    wrong, names = [], list(METHODS)
    for inner in names[(names.index(outer) + third) % 3 :: 3]:
        expected = REASON.get((outer, inner))
        try:
            running = trial(METHODS[outer](METHODS[inner]()))
            trains = names.index(outer) <= names.index(inner)  # the other way around it is refused or named alike
            if trains:
                running.advance()
        except UsageError as error:
            if expected is None or expected not in str(error) or len(str(error)) <= 40:
                wrong.append(f"{outer}({inner}()) is refused: {error}; the table says {expected}")
            continue
        if expected is not None:
            wrong.append(f"{outer}({inner}()) runs, but the table says: {expected}")
        for part in (outer, inner):
            if part not in running.plan.method.name and part not in ("fedavg", "tuned"):
                wrong.append(f"{outer}({inner}()) is called {running.plan.method.name}, without {part}")
        if not trains:
            continue
        state = running.model_state("a")
        if not all(tensor.isfinite().all() for tensor in state.values()):
            wrong.append(f"{outer}({inner}()) gives values that are not finite")
        if all((tensor == running.plan.initial[name]).all() for name, tensor in state.items()):
            wrong.append(f"{outer}({inner}()) changes nothing in a round")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "names",
    [
        ("fedbn", "fedmmb", "fedadam", "agc"),
        ("silobn", "scaffold", "fedprox", "fedavgm"),
        ("fixbn", "ditto", "krum", "tuned"),
        ("fedrep", "fedbn", "median", "fedyogi"),
        ("fedwon", "fednova", "agc", "centralized"),
        ("partialfed_adaptive", "fixbn", "fedmmb", "trimmed_mean"),
        ("gn", "fedper", "geometric_median", "fedadagrad"),
    ],
    ids="+".join,
)
def test_four_at_once_run_or_are_refused(names):
    method = None
    for name in reversed(names):
        method = METHODS[name](method)
    if names[-1] == "centralized":
        with pytest.raises(UsageError, match="there is nothing to aggregate: all data are in one place"):
            trial(method)
        return
    running = trial(method)
    for _ in range(2):
        running.advance()
    assert all(tensor.isfinite().all() for tensor in running.model_state("b").values())
    assert all(name in running.plan.method.name for name in names if name != "tuned")
