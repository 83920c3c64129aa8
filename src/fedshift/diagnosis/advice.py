"""Advice: methods worth trying for the shifts in a federation, each with the evidence for it.

Numbers come from the papers on FedBN (Li et al. 2021, arXiv:2102.07623), FedWon (Zhuang and Lyu 2024, arXiv:2306.05879)
and FedMMB (Nasirigerdeh et al. 2020, arXiv:2011.07006). ``docs/methods`` has a page on each method.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .shift_tests import Kind, ShiftFinding

CROSS_DEVICE = 20
"""Maximum number of clients that are expected in every round; more are taken for devices that come and go."""

_MOST = 8

REMEMBERS = frozenset({"apfl", "ditto", "fedala", "feddyn", "fedper", "fedrep", "fedrod", "moon", "scaffold"})
"""Methods whose clients keep state from round to round, and so need to participate repeatedly."""
COUNTS_CLASSES = frozenset({"fedrod"})
"""Methods that need one class per sample."""

REASONS: Mapping[Kind, Mapping[str, str]] = {
    "feature shift": {
        "fedbn": "each client keeps its own BatchNorm layers: accuracy on SVHN, one of five digit data sets, rises "
        "from 70.59 to 76.93 % (FedBN, table 11)",
        "fedbabu": "clients learn the body together, then each fine-tunes the whole model, normalization included, to "
        "its own images (Oh et al. 2022, arXiv:2106.06042)",
        "apfl": "each client learns how much of a personal model to mix with the shared one (Deng et al. 2020, "
        "arXiv:2003.13461)",
        "ditto": "each client trains a personal model, normalization included, that stays close to the shared one (Li "
        "et al. 2021, arXiv:2012.04221)",
        "silobn": "only BatchNorm's statistics stay local, a smaller change than FedBN where images differ in "
        "brightness, contrast or staining (Andreux et al. 2020, arXiv:2008.07424)",
        "fedwon": "no normalization and one model for all, unseen clients included: best average on all three "
        "benchmarks (88.5, 75.6, 51.1 %; FedWon, table 1); tune its learning rate separately",
        "gn": "one model that normalizes each sample by itself: 88.0 % on Digits-Five, where FedAvg reaches 86.5 % "
        "(FedWon, table 1)",
        "partialfed_adaptive": "each client learns which layers to share: 71.3 % on Office-Caltech-10 (FedWon, table "
        "17), where FedAvg reaches 66.3 % (table 1)",
    },
    "label skew": {
        "fedrod": "the shared model learns as if all {classes} were equally frequent, and a personal head adapts to "
        "each client's frequencies (Chen and Chao 2022, arXiv:2107.00778)",
        "fedbabu": "skewed {classes} bias the head most, so it is not trained together; each client fine-tunes the "
        "model to its data (Oh et al. 2022, arXiv:2106.06042)",
        "gn": "no statistics that depend on a client's {classes}: group normalization recovers much of what BatchNorm "
        "loses under label skew (Hsieh et al. 2020, arXiv:1910.00189)",
        "apfl": "each client learns how much of a model for its own {classes} to mix with the shared one (Deng et al. "
        "2020, arXiv:2003.13461)",
        "scaffold": "control variates remove the drift toward a client's own {classes} from each step (Karimireddy et "
        "al. 2020, arXiv:1910.06378)",
        "fedper": "shared features, and a personal classifier that knows which {classes} a client has (Arivazhagan et "
        "al. 2019, arXiv:1912.00818)",
        "ditto": "each client trains a personal model for its own {classes} that stays close to the shared one (Li et "
        "al. 2021, arXiv:2012.04221)",
        "feddyn": "a regularizer that follows each client, so that clients with different {classes} agree on the "
        "optimum (Acar et al. 2021, arXiv:2111.04263)",
        "fedala": "each client learns, weight by weight, how much of the shared classifier to adopt (Zhang et al. "
        "2023, arXiv:2212.01197)",
        "fedrep": "like fedper, with head and body trained in turn (Collins et al. 2021, arXiv:2102.07078)",
        "moon": "features stay similar to the shared model's in long local training (Li et al. 2021, arXiv:2103.16257)",
        "fedprox": "a penalty keeps long local training close to the shared model (Li et al. 2020, arXiv:1812.06127)",
        "fedavgm": "momentum on the server averages out rounds that favor different {classes} (Hsu et al. 2019, "
        "arXiv:1909.06335)",
        "fedmmb": "fewer batches between exchanges, for more rounds: 72.6 % with five, 65.9 % with fifty, on CIFAR-10 "
        "with two labels per client (FedMMB, table 4)",
        "fedadam": "the server adapts the step size of each weight (Reddi et al. 2021, arXiv:2003.00295)",
    },
    "target skew": {
        "scaffold": "control variates remove the drift toward a client's own targets from each step (Karimireddy et "
        "al. 2020, arXiv:1910.06378)",
        "fedprox": "a penalty keeps long local training close to the shared model (Li et al. 2020, arXiv:1812.06127)",
        "fedadam": "the server adapts the step size of each weight (Reddi et al. 2021, arXiv:2003.00295)",
    },
    "quantity skew": {
        "fednova": "clients with more data take more steps in an epoch, which would count them twice in the average "
        "(Wang et al. 2020, arXiv:2007.07481)",
        "fedmmb": "the same number of batches for every client in a round (FedMMB, algorithm 1)",
        'fedavg(weighting="uniform")': "weights all clients equally, for cases where small clients matter as much",
    },
    "concept shift": {
        "ditto": "each client trains a personal model that stays close to the shared one (Li et al. 2021, "
        "arXiv:2012.04221)",
        "fedper": "shared features, a personal classifier (Arivazhagan et al. 2019, arXiv:1912.00818)",
        "apfl": "each client learns how much of a model for its own labels to mix with the shared one (Deng et al. "
        "2020, arXiv:2003.13461)",
        "fedbabu": "the classifier is never trained together; each client fine-tunes its own (Oh et al. 2022, "
        "arXiv:2106.06042)",
        "single": "local training is the baseline for any sharing where labels disagree",
        "fedrep": "like fedper, with head and body trained in turn (Collins et al. 2021, arXiv:2102.07078)",
    },
}
"""Methods against each kind of shift, with the evidence for them; ``{classes}`` is the word for the task's targets."""

TARGET_WORDS: Mapping[str, str] = {"segmentation": "shares of classes", "multilabel": "labels", "regression": "targets"}
"""Word for targets by task; "classes" for classification and users' tasks."""


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """A method in the spelling of ``--methods``, and the reason for it."""

    method: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Methods to compare, those with the strongest support first, and cautions."""

    methods: tuple[Recommendation, ...]
    cautions: tuple[str, ...] = ()


def advise(findings: Sequence[ShiftFinding], *, clients: int, images: bool, task: str = "classification") -> Advice:
    """Recommend methods for the named shifts, those for stronger shifts first.

    Args:
        findings: Results of the tests for shifts.
        clients: Number of clients.
        images: Whether the samples are images, so that the network has convolutions.
        task: Kind of the federation's task (:func:`fedshift.tasks.find_kind`).

    """
    order = ("negligible", "weak", "moderate", "strong")
    named = sorted((each for each in findings if each.named), key=lambda each: -order.index(each.strength))
    skewed = any(each.kind in ("label skew", "target skew") and each.strength != "weak" for each in named)
    chosen: dict[str, str] = {}
    depth = max(2, -(-_MOST // max(1, len(named))))
    for each in named:
        methods = _order_methods(each.kind, skewed, clients > CROSS_DEVICE, images)
        for method in [m for m in methods if task == "classification" or m not in COUNTS_CLASSES][:depth]:
            reason = REASONS[each.kind][method].replace("{classes}", TARGET_WORDS.get(task, "classes"))
            chosen.setdefault(method, reason)
    baseline = "the baseline for all others" if named else "no shift is named, so the simplest method is enough"
    chosen = {"fedavg": baseline, **dict(list(chosen.items())[:_MOST])}
    if not named:
        chosen["fedavgm"] = "momentum on the server may save rounds (Hsu et al. 2019, arXiv:1909.06335)"
    return Advice(
        methods=tuple(Recommendation(method=method, reason=reason) for method, reason in chosen.items()),
        cautions=tuple(_list_cautions(named, skewed, clients, task)),
    )


def _order_methods(kind: Kind, skewed: bool, devices: bool, images: bool) -> list[str]:
    """Return the methods against one kind of shift in order; ``skewed``: labels are skewed too, more than weakly."""
    if kind != "feature shift":
        return [method for method in REASONS[kind] if not (devices and method in REMEMBERS)]
    shared, *rest = ["fedwon", "gn"] if images else ["gn"]
    if devices:
        return [shared, *rest, "fedbabu"]
    if skewed:
        return [shared, "fedbn", "fedbabu", *rest, "apfl", "ditto", "silobn"]
    return ["fedbn", shared, "fedbabu", "apfl", "ditto", "silobn", "partialfed_adaptive", *rest]


def _list_cautions(named: Sequence[ShiftFinding], skewed: bool, clients: int, task: str) -> Iterator[str]:
    kinds = {each.kind for each in named}
    if not named:
        yield "Tuning the learning rate and the local work will gain more than changing the method."
    elif all(each.strength == "weak" for each in named):
        yield "All named shifts are weak: FedAvg may do as well, and tuning may gain more."
    if skewed:
        yield (
            "Beware of FedBN where labels or targets are skewed: a client's BatchNorm statistics then reflect its "
            "labels as much as its images, each model suits only its client, and none suits all."
        )
        yield (
            "A personalized method (fedrod, fedbabu, apfl, fedper, ditto) works where a client's future data resemble "
            "its training data: if a client must also serve other clients' data, compare models on the data of all."
        )
    if named and task in TARGET_WORDS:
        yield f"The papers report classification: for {task}, only a comparison can decide."
    if "quantity skew" in kinds:
        yield (
            "FedAvg already weights clients by size; with --split 'repeat()', small clients repeat samples until all "
            "clients take the same number of steps."
        )
    if "concept shift" in kinds:
        yield "Check the labels first: a coding error cannot be distinguished from a different labeling practice."
    if named and clients > CROSS_DEVICE:
        yield (
            f"With {clients} clients, remember that methods with state on a client (fedbn, silobn, scaffold, ditto, "
            "fedper) need every client to participate repeatedly."
        )
