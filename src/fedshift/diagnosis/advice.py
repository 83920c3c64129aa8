"""From the shifts that were found to methods worth trying, each with the evidence that speaks for it.

Numbers are the papers': FedBN (Li et al. 2021, arXiv:2102.07623), FedWon (Zhuang and Lyu 2024, arXiv:2306.05879) and
FedMMB (Nasirigerdeh et al. 2020, arXiv:2011.07006). The pages of ``docs/methods`` say more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .shift_tests import Kind, ShiftFinding

CROSS_DEVICE = 20
"""More clients than these are taken for devices that come and go, of which methods should expect no memory."""

_MOST = 6


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """A method as ``--methods`` takes it, and why."""

    method: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Methods to compare, the best supported first, and what to beware of."""

    methods: tuple[Recommendation, ...]
    cautions: tuple[str, ...] = ()


def advise(findings: Sequence[ShiftFinding], *, clients: int, images: bool) -> Advice:
    """Advice for what was named, stronger shifts first; ``images``: whether a network has convolutions."""
    order = ("negligible", "weak", "moderate", "strong")
    named = sorted((each for each in findings if each.named), key=lambda each: -order.index(each.strength))
    kinds: list[Kind] = [each.kind for each in named]
    skewed = any(each.kind == "label skew" and each.strength != "weak" for each in named)
    chosen: dict[str, str] = {}
    depth = max(2, -(-_MOST // max(1, len(kinds))))
    for kind in kinds:
        for method, reason in list(_recommend(kind, skewed, clients > CROSS_DEVICE, images))[:depth]:
            chosen.setdefault(method, reason)
    baseline = "what all others have to beat" if kinds else "clients look alike, and the simplest method then does"
    chosen = {"fedavg": baseline, **dict(list(chosen.items())[:_MOST])}
    if not kinds:
        chosen["fedavgm"] = "momentum on the server may save rounds (Hsu et al. 2019, arXiv:1909.06335)"
    return Advice(
        methods=tuple(Recommendation(method=method, reason=reason) for method, reason in chosen.items()),
        cautions=tuple(_list_cautions(named, skewed, clients)),
    )


def _recommend(kind: Kind, skewed: bool, devices: bool, images: bool) -> Iterator[tuple[str, str]]:
    """Methods against one kind of shift, in order; ``skewed``: labels are so too, and more than weakly."""
    match kind:
        case "feature shift":
            local = [
                ("fedbn", "each client keeps its own BatchNorm: SVHN among five looks of digits rises from 70.59 to "
                 "76.93 % (FedBN, table 11)"),
                ("silobn", "only BatchNorm's statistics stay, the smaller step where looks differ in brightness, "
                 "contrast or staining (Andreux et al. 2020, arXiv:2008.07424)"),
            ]  # fmt: skip
            shared = [
                ("fedwon", "no normalization and one model for all, newcomers too: best average on all three "
                 "benchmarks (88.5, 75.6, 51.1 %; FedWon, table 1); give it a learning rate of its own"),
            ] if images else []  # fmt: skip
            shared.append(("gn", "one model, each sample normalized by itself: 88.0 % on Digits-Five where FedAvg has "
                           "86.5 % (FedWon, table 1)"))  # fmt: skip
            adaptive = ("partialfed_adaptive", "each client learns which layers to share: 71.3 % on Office-Caltech-10 "
                        "(FedWon, table 17) where FedAvg has 66.3 % (table 1)")  # fmt: skip
            if devices:
                yield from shared
            elif skewed:
                yield from [shared[0], local[0], *shared[1:], *local[1:]]
            else:
                yield from [local[0], shared[0], local[1], adaptive, *shared[1:]]
        case "label skew":
            yield ("gn", "no statistics that depend on a client's classes: group normalization recovers much of what "
                   "BatchNorm loses under label skew (Hsieh et al. 2020, arXiv:1910.00189)")  # fmt: skip
            if not devices:
                yield ("scaffold", "control variates take the drift toward a client's own classes out of each step "
                       "(Karimireddy et al. 2020, arXiv:1910.06378)")  # fmt: skip
            yield ("fedprox", "holds long local work near the shared model (Li et al. 2020, arXiv:1812.06127)")
            yield ("fedavgm", "momentum on the server evens out rounds that pull to different classes (Hsu et al. "
                   "2019, arXiv:1909.06335)")  # fmt: skip
            yield ("fedmmb", "fewer batches between exchanges: 72.6 % with five, 65.9 % with fifty, on CIFAR-10 with "
                   "two labels a client, for more rounds (FedMMB, table 4)")  # fmt: skip
            yield ("fedadam", "a step size for each weight on the server (Reddi et al. 2021, arXiv:2003.00295)")
        case "quantity skew":
            yield ("fednova", "clients with more data make more steps in an epoch, which would pull the average to "
                   "them twice (Wang et al. 2020, arXiv:2007.07481)")  # fmt: skip
            yield ("fedmmb", "the same number of batches for every client in a round (FedMMB, algorithm 1)")
            yield ('fedavg(weighting="uniform")', "counts clients equally, where the small ones matter as much")
        case "concept shift":
            yield ("ditto", "a model of one's own, held near the shared one (Li et al. 2021, arXiv:2012.04221)")
            yield ("fedper", "shared features, a classifier of one's own (Arivazhagan et al. 2019, arXiv:1912.00818)")
            yield ("single", "training alone is what any sharing has to beat where labels disagree")
            yield ("fedrep", "as fedper, head and body trained in turn (Collins et al. 2021, arXiv:2102.07078)")


def _list_cautions(named: Sequence[ShiftFinding], skewed: bool, clients: int) -> Iterator[str]:
    kinds = {each.kind for each in named}
    if not named:
        yield "Tuning the learning rate and the local work will gain more than another method."
    elif all(each.strength == "weak" for each in named):
        yield "What was found is weak: FedAvg may do as well, and tuning gain more."
    if skewed:
        yield (
            "Beware of FedBN under label skew: a client's BatchNorm statistics then describe its classes as much as "
            "its looks, each client's model suits its own classes only, and there is none for all."
        )
    if "quantity skew" in kinds:
        yield (
            "FedAvg weighs clients by size already; --split 'repeat()' lets small clients repeat samples until all "
            "take as many steps."
        )
    if "concept shift" in kinds:
        yield "Look at the labels first: a mistake in coding them looks just like a different habit of labeling."
    if named and clients > CROSS_DEVICE:
        yield (
            f"With {clients} clients those that keep state on a client (fedbn, silobn, scaffold, ditto, fedper) "
            "need every client again and again."
        )
