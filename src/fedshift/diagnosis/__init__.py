"""Diagnosis of a federation: its shifts, their strength, p-values, and the methods that the evidence favors.

Four tests, each valid in the presence of the other shifts, compare the clients' labels, their sizes, their features
within a class, and their labels of similar inputs. Tasks other than classification use other tests of targets
(``targets``) and omit the last one. P-values are corrected for the number of tests (Holm 1979), so that a federation
without any shift is reported to have one with probability 0.05 at most. Only one small network is trained, on the
pooled samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from ..data.federation import ClientData, Federation
from ..data.files.read_options import Progress
from ..nn.several_inputs import name_inputs
from ..tasks import find_kind
from ..utils.errors import UsageError, unknown_name
from ..utils.random_streams import stream
from .advice import Advice, advise
from .concept_shift import concept_shift, predict_by_neighbors
from .feature_shift import TwoSample, feature_shift
from .inputs import appearance_features, classifier_features, gather_samples, principal_components, to_vectors, warm_up
from .shift_tests import LEVEL, SIZES, Evidence, Ints, ShiftFinding, assess, label_skew, layer_shift, quantity_skew
from .targets import group_targets, read_targets, remove_targets, target_skew

MOST_CLIENTS, MOST_SAMPLES = 20, 6_000
"""Maximum number of clients, and of their samples in total, in the tests of features and concepts.

Larger data are subsampled.
"""

GROUPED = {
    "multilabel": "group of similar label sets",
    "segmentation": "group of similar masks",
    "regression": "tenth of the targets",
}
"""What a group of samples within which features are compared is called, by task."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Divergence of the clients' statistics in one BatchNorm layer."""

    name: str
    evidence: Evidence


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Shifts found in a federation, with the evidence.

    ``sizes``: training samples of each client. ``tested``: clients on which features and concepts were tested, in the
    order of ``pairs`` (AUC of one client against another, None on the diagonal) and of the evidence. ``layers``: in
    the order of the network. ``single_class``: whether some client has only one class. ``validation``: whether any
    client has validation data. ``notes``: remarks on how to read the numbers. ``task``: the federation's task, or the
    built-in task that it derives from.
    """

    federation: str
    clients: tuple[str, ...]
    sizes: tuple[int, ...]
    findings: tuple[ShiftFinding, ...]
    tested: tuple[str, ...]
    pairs: tuple[tuple[float | None, ...], ...]
    layers: tuple[Layer, ...]
    advice: Advice
    single_class: bool
    validation: bool
    notes: tuple[str, ...] = ()
    task: str = "classification"

    def __getitem__(self, kind: str) -> ShiftFinding:
        """Return the finding for one kind of shift."""
        return {finding.kind: finding for finding in self.findings}[kind]  # type: ignore[index]

    @property
    def named(self) -> tuple[str, ...]:
        """Kinds of shift that the federation has."""
        return tuple(finding.kind for finding in self.findings if finding.named)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as dictionaries, lists, numbers, strings and None."""
        return asdict(self)


def diagnose(
    data: Federation,
    *,
    seed: int = 0,
    permutations: int = 999,
    features: Literal["pixels", "network"] = "pixels",
    limit: int = 1000,
    progress: Progress | None = None,
) -> Diagnosis:
    """Test the training data of ``data``, of any task, for shifts between clients, and recommend methods.

    Features and concepts of samples with several inputs are not tested.

    Args:
        data: Federation with at least two clients.
        seed: Seed of every random draw; the result depends only on the data and the arguments.
        permutations: Permutations in each test, at least 99.
        features: Inputs of the tests of features and concepts: principal components of the pixels (or columns), or of
            the channel statistics of a small network trained briefly on the pooled samples.
        limit: Maximum number of samples drawn from each client for the tests of features and concepts; the tests of
            labels and sizes use all samples.
        progress: Called with the name of each test before it starts.

    Raises:
        UsageError: There is only one client, an argument is out of range, or
            :meth:`~fedshift.data.federation.Federation.check` refuses the data.

    """
    _check(data, permutations, features, limit)
    steps = iter(range(1, 7))

    def now(what: str) -> None:
        if progress is not None:
            progress(f"testing {what}", next(steps), 6)

    now("labels")
    kind = find_kind(data.task)
    kind = kind if kind in ("classification", "multilabel", "segmentation") else "regression"
    members, rows = _draw_samples(data, seed, limit)
    x = gather_samples([member.train for member in members], rows)
    drawn = zip(members, map(torch.from_numpy, rows), strict=True)
    targets = torch.cat([member.train.take_targets(index) for member, index in drawn])
    client = np.repeat(np.arange(len(rows)), [len(drawn) for drawn in rows])
    evidence: dict[Any, Evidence] = {}
    single_class, numbers = False, np.empty(0)
    if kind == "classification":
        y = targets.numpy()
        counts = [np.bincount(client.train.y.numpy(), minlength=data.classes) for client in data.clients]
        evidence["label skew"] = label_skew(counts, stream(seed, "diagnose/labels"), permutations)
        single_class = data.classes > 1 and any((each > 0).sum() == 1 for each in counts)
    else:
        numbers = read_targets(kind, targets, data.classes)
        y = group_targets(kind, numbers)
        skew = target_skew(kind, numbers, client, len(rows), stream(seed, "diagnose/labels"), permutations)
        known = dict(zip((member.name for member in members), skew.clients, strict=True))
        name = "target skew" if kind == "regression" else "label skew"
        evidence[name] = replace(skew, clients=tuple(map(known.get, data.names)))
    now("sizes")
    sizes = tuple(len(client.train) for client in data.clients)
    sized = quantity_skew(sizes, stream(seed, "diagnose/sizes"), permutations)

    disagree, layers = False, tuple[Layer, ...]()
    if data.inputs:
        names = name_inputs(data.inputs)
        concept = Evidence(untestable_because=f"samples have several inputs, {names}, and the test compares one array")
        two_sample = TwoSample(evidence=concept)
    else:
        now("layers")
        moments = warm_up(x, torch.from_numpy(y), data.classes if kind == "classification" else int(y.max()) + 1, seed)
        if features == "network":
            inputs = principal_components(
                np.concatenate([part for each in moments for part in (each.mean, each.square)], axis=1), seed
            )
            seen = classifier_features(inputs)
        else:
            inputs = principal_components(to_vectors(x), seed)
            seen = classifier_features(inputs, appearance_features(x))

        now("features")
        if kind != "classification":
            seen = remove_targets(kind, seen, numbers, y)
        two_sample = feature_shift(
            seen, y, client, len(rows), stream(seed, "diagnose/features"), permutations, GROUPED.get(kind, "class")
        )
        now("concepts")
        trusted = y
        concept = Evidence(untestable_because=f"the test compares the classes of similar samples, and {kind} has none")
        if kind == "classification":
            strata = predict_by_neighbors(inputs, y)
            marginal = feature_shift(seen, strata, client, len(rows), stream(seed, "diagnose/marginal"), permutations)
            concept = concept_shift(
                inputs, y, strata, client, marginal.evidence.clients or (None,) * len(rows),
                align=two_sample.evidence.p is not None and two_sample.evidence.p <= LEVEL,
                rng=stream(seed, "diagnose/concepts"), permutations=permutations,
            )  # fmt: skip
            disagree = (
                concept.p is not None and concept.p <= LEVEL and (concept.statistic or 0) >= SIZES["concept shift"][0]
            )
            if disagree:
                two_sample, trusted = marginal, strata
        now("layers by client")
        layers = tuple(
            Layer(
                name=each.layer,
                evidence=layer_shift(
                    each, trusted, client, len(rows), stream(seed, "diagnose/layers", each.layer), permutations
                ),
            )
            for each in moments
        )
    evidence |= {"feature shift": two_sample.evidence, "quantity skew": sized, "concept shift": concept}
    findings = assess(evidence)
    images = x.ndim == 4
    return Diagnosis(
        federation=data.name,
        clients=data.names,
        sizes=sizes,
        findings=findings,
        tested=tuple(member.name for member in members),
        pairs=two_sample.pairs,
        layers=layers,
        advice=advise(findings, clients=len(sizes), images=images, task=kind),
        validation=any(client.validation is not None for client in data.clients),
        single_class=single_class,
        notes=tuple(_list_notes(data, x.flatten(1).numpy(), y, client, disagree)),
        task=kind,
    )


def _check(data: Federation, permutations: int, features: str, limit: int) -> None:
    data.check(allow_single_class=True)
    if len(data.clients) < 2:
        raise UsageError(
            f"federation {data.name!r} has only one client, {data.names[0]!r}: a diagnosis compares two or more clients"
        )
    if features not in ("pixels", "network"):
        raise unknown_name("kind of features", features, ("pixels", "network"))
    if permutations < 99:
        raise UsageError(
            f"permutations={permutations}: must be at least 99, or no corrected p-value can be small; 999 is usual"
        )
    if limit < 1:
        raise UsageError(f"limit={limit} samples per client: must be at least 1; 1000 is usual")


def _draw_samples(data: Federation, seed: int, limit: int) -> tuple[list[ClientData], list[Ints]]:
    """Draw the clients to test and the rows of their training samples; both keep their order."""
    members = list(data.clients)
    if len(members) > MOST_CLIENTS:
        drawn = stream(seed, "diagnose/clients").choice(len(members), MOST_CLIENTS, replace=False)
        members = [members[number] for number in sorted(drawn)]
    most = min(limit, MOST_SAMPLES // len(members))
    streams = (stream(seed, "diagnose/samples", member.name) for member in members)
    rows = [np.sort(rng.permutation(len(member.train))[:most]) for member, rng in zip(members, streams, strict=True)]
    return members, rows


def _list_notes(data: Federation, x: np.ndarray, y: Ints, client: Ints, disagree: bool) -> Iterator[str]:
    if len(data.clients) > MOST_CLIENTS:
        what = "Features and concepts" if find_kind(data.task) == "classification" else "Targets and features"
        yield f"{what} were tested on {MOST_CLIENTS} of {len(data.clients)} clients, drawn at random."
    repeated = len(x) - len(np.unique(np.column_stack([x, y, client]), axis=0))
    if repeated > len(x) // 100:
        yield (
            f"{repeated} of {len(x)} samples are copies of another sample of the same client. The tests assume "
            "independent samples: with copies, or many pictures of one patient, chance can pass for a shift of "
            "features or concepts."
        )
    if disagree:
        yield (
            "Because clients label similar inputs differently, features were compared within classes predicted from "
            "the inputs instead of within labels."
        )
