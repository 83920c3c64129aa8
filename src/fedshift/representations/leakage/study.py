"""The study of ``fedshift leak``: methods and batch sizes attacked over several seeds, images and moments of training.

For each method and seed, a federation is trained (:class:`~fedshift.experiments.trial.Trial`). After each requested
number of rounds, some clients take ``steps`` local steps on one batch, and the resulting upload is attacked. With one
seed, all methods see the same clients, batches and starting images. The baseline is two guesses that need no upload:
the mean of the client's test images, and other test images of the client.

A record is one image in one attack: ``psnr`` in decibels, ``ssim``, ``correlation`` with the original (which ignores
brightness and contrast), and ``identified``: whether the original is, among all training images of the client, the one
that correlates most with its reconstruction (Yin et al. 2021, arXiv:2104.07586, do the same with network features).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ...analysis.inversion import compute_psnr, compute_ssim, correlate_images, match_images
from ...core.kernel import broadcast
from ...core.method import Method
from ...core.optimizer import SGD
from ...data.federation import ClientData, Federation
from ...data.files.read_options import Progress
from ...experiments.experiment import Experiment
from ...experiments.trial import Trial
from ...results.checkpoint import load_checkpoint, refuse_other, save_checkpoint
from ...results.run_directory import to_file_name
from ...utils.errors import Ref, UsageError
from ...utils.random_streams import stream
from ...utils.state import State
from ...utils.threads import limit_threads
from .attack import AttackSettings, Observation, Source, invert, upload

MEAN, ANOTHER = "mean image", "another image"
"""Guesses that need no upload, in place of a method's name."""
KNOWN, INFERRED = "known", "inferred"
"""Sources of the attacker's labels."""
ORIGINAL = "original"
COLUMNS = (
    "method", "seed", "rounds", "batch_size", "batch", "client", "image", "label", "attack", "labels", "labels_found",
    "psnr", "ssim", "correlation", "identified",
)  # fmt: skip
"""Columns of the records."""
SMALLEST = 4
"""Minimum height and width of an image in pixels."""


@dataclass(frozen=True, kw_only=True)
class LeakageSettings:
    """Settings of the study in addition to the experiment's.

    Attributes:
        rounds: Numbers of training rounds after which uploads are attacked; 0 is the untrained network.
        batch_sizes: Numbers of samples in the batch behind an upload.
        images: Number of images to attack in each case and seed, rounded up to whole batches.
        steps: Local steps on the batch before the upload.
        iterations: Iterations of an attack.

    Raises:
        UsageError: A value is out of bounds.

    """

    rounds: tuple[int, ...] = (0, 10)
    batch_sizes: tuple[int, ...] = (1, 4, 8)
    images: int = 2
    steps: int = 1
    iterations: int = 150

    def __post_init__(self) -> None:
        for field in fields(self):
            value, name = getattr(self, field.name), field.name.replace("_", "-")
            numbers, least = value if isinstance(value, tuple) else (value,), int(field.name != "rounds")
            if not numbers or len(set(numbers)) != len(numbers):
                raise UsageError(f"{name}={value}: give at least one number, each once")
            for number in numbers:
                if type(number) is not int or number < least:
                    raise UsageError(f"{name}={number}: must be a whole number of at least {least}")

    def complete(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the ``given`` settings of an experiment, completed with those that the study needs."""
        rounds = max(1, *self.rounds)
        return {"engine": "sequential", **given, "rounds": rounds, "evaluate_every": rounds}

    @property
    def attack(self) -> AttackSettings:
        """Settings of each attack."""
        return AttackSettings(iterations=self.iterations)


@dataclass(frozen=True, kw_only=True, eq=False)
class Leakage:
    """Results of the study.

    Attributes:
        settings: Settings of the study.
        methods: Names of the methods, in order.
        seeds: Seeds of networks, batches and starting images.
        records: One row for each image and attack, see the module docstring. Columns are ``method`` (or the name of a
            guess), ``seed``, ``rounds``, ``batch_size``, ``batch``, ``client``, ``image`` (its number among the
            client's training images), ``label``, ``attack``, ``labels`` (known or inferred), ``labels_found`` (fraction
            of the batch's labels that the attacker gets right), ``psnr``, ``ssim``, ``correlation`` and ``identified``.
        pictures: Images ``[N, C, H, W]`` in [0, 1] for the first seed, by number of rounds and batch size, then by name
            of the row, originals first.

    """

    settings: LeakageSettings
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    records: pd.DataFrame
    pictures: Mapping[tuple[int, int], Mapping[str, Tensor]]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Batch:
    """A batch to attack: ``rows`` of the client's training samples, ordered by label, and the attack's ``start``."""

    size: int
    number: int
    client: ClientData
    rows: Tensor
    start: Tensor

    @property
    def originals(self) -> Tensor:
        """The images, in [0, 1]."""
        return _to_unit(self.client.train.copy_rows(self.rows))

    @property
    def labels(self) -> Tensor:
        """The labels, ascending."""
        return self.client.train.targets(self.rows)

    def score(self, found: Tensor) -> Iterator[dict[str, Any]]:
        """Yield the part of each image's record that depends on ``found``, images in [0, 1] in any order."""
        originals, pool = self.originals, _to_unit(self.client.train.copy_rows(slice(None)))
        found = match_images(found, originals)
        alike = correlate_images(found, pool)
        scores = zip(
            self.rows, self.labels, compute_psnr(found, originals), compute_ssim(found, originals), strict=True
        )
        for place, (row, label, psnr, ssim) in enumerate(scores):
            yield {
                "batch_size": self.size, "batch": self.number, "client": self.client.name, "image": int(row),
                "label": int(label), "psnr": float(psnr), "ssim": float(ssim),
                "correlation": float(alike[place, row]), "identified": bool(alike[place].argmax() == row),
            }  # fmt: skip


def measure_leakage(
    experiment: Experiment,
    settings: LeakageSettings,
    directory: Path | None = None,
    progress: Progress | None = None,
) -> Leakage:
    """Attack uploads of every method and seed of ``experiment``.

    Args:
        experiment: Methods, seeds, data, network and local training, with at least as many rounds as requested.
        settings: Settings of the study.
        directory: Directory in which each method and seed is saved when it ends, so that it is not computed again.
        progress: Called as each method and seed begins.

    Raises:
        UsageError: Data, network and method do not fit, or ``directory`` has a study with other settings.
        FedshiftError: Training diverges, or a file of ``directory`` is damaged.

    """
    _check(experiment, settings)
    records: list[dict[str, Any]] = []
    pictures: dict[tuple[int, int], dict[str, Tensor]] = {}
    data, seeds = experiment.data, experiment.seeds
    with limit_threads(1):
        for method in experiment.methods:  # methods that do not fit are refused before any is trained
            _check_trial(_make_trial(experiment, method, seeds[0]), settings)
        for size in settings.batch_sizes:
            originals = torch.cat([batch.originals for batch in _draw_batches(data, size, settings, seeds[0])])
            pictures |= {(rounds, size): {ORIGINAL: originals} for rounds in sorted(settings.rounds)}
        cells = [(method, seed) for seed in seeds for method in experiment.methods]
        for done, (method, seed) in enumerate(cells):
            if progress:
                progress(f"{method.label}, seed {seed}", done, len(cells))
            rows, images = _attack_or_read(_make_trial(experiment, method, seed), settings, directory)
            records += rows
            for key, tensor in images.items() if seed == seeds[0] else ():
                moment, of, row = key.split("/", 2)
                pictures[int(moment), int(of)][row] = _to_unit(tensor)
        for seed in seeds:
            records += _measure_guesses(data, settings, seed)
    names, table = tuple(method.label for method in experiment.methods), pd.DataFrame(records, columns=COLUMNS)
    return Leakage(settings=settings, methods=names, seeds=seeds, records=table, pictures=pictures)


def _attack_or_read(
    trial: Trial, settings: LeakageSettings, directory: Path | None
) -> tuple[list[dict[str, Any]], State]:
    """Return the records and pictures of one method and seed, read from ``directory`` or computed now."""
    identity = {**trial.identity, "rounds": str(trial.settings.rounds), "study": str(settings)}
    if directory is None:
        return _attack_trial(trial, settings)
    path = directory / "cells" / f"{to_file_name(trial.plan.method.label)}-seed{trial.seed}.safetensors"
    if path.exists():
        images, facts = load_checkpoint(path)
        refuse_other(facts["identity"], identity)
        return facts["rows"], images
    rows, images = _attack_trial(trial, settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint(path, images, {"identity": identity, "rows": rows})
    return rows, images


def _attack_trial(trial: Trial, settings: LeakageSettings) -> tuple[list[dict[str, Any]], State]:
    """Return the records of one method and seed, and reconstructions as 8-bit images by rounds, batch size and row."""
    records: list[dict[str, Any]] = []
    images: dict[str, list[Tensor]] = {}
    try:
        for rounds in sorted(settings.rounds):
            while trial.server.round < rounds:
                trial.advance()
            for size in settings.batch_sizes:
                for batch in _draw_batches(trial.data, size, settings, trial.seed):
                    for facts, found in _attack_batch(trial, batch, settings):
                        common = {"method": trial.plan.method.label, "seed": trial.seed, "rounds": rounds, **facts}
                        records += [{**common, **row} for row in batch.score(found)]
                        if facts["labels"] == KNOWN:
                            row = f"{rounds}/{size}/{name_row(trial.plan.method.label, facts['attack'])}"
                            shown = match_images(found, batch.originals).mul(255).round().to(torch.uint8)
                            images.setdefault(row, []).append(shown)
    finally:
        trial.close()
    return records, {row: torch.cat(parts) for row, parts in images.items()}


def _attack_batch(trial: Trial, batch: _Batch, settings: LeakageSettings) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Yield source, labels and reconstructed images in [0, 1] of each attack on one upload."""
    plan, split = trial.plan, batch.client.train
    x = split.inputs(batch.rows, plan.dtype)
    name = batch.client.name
    server = broadcast(trial.server, name)
    _, update = upload(plan, trial.clients[name], server, x, batch.labels, steps=settings.steps)
    seen = Observation(plan=plan, server=server, update=update)
    ends = torch.tensor([0, 255], dtype=torch.uint8).reshape(2, *(1 for _ in split.shape)).expand(2, *split.shape)
    low, high = split.scale(ends.clone(), plan.dtype)[:, :, :1, :1]
    guessed = seen.infer_labels()

    def attack(source: Source, labels: Tensor) -> Tensor:
        found = invert(seen, source, labels, batch.start.to(plan.dtype), (low, high), settings.attack)
        return torch.div(found - low, high - low).float()

    for source in seen.sources:
        found = attack(source, batch.labels)
        yield {"attack": source, "labels": KNOWN, "labels_found": 1.0}, found
        if guessed is not None and source == "everything":
            right = _count_common(guessed, batch.labels) / batch.size
            found = found if right == 1 else attack(source, guessed)
            yield {"attack": source, "labels": INFERRED, "labels_found": right}, found


def _count_common(one: Tensor, other: Tensor) -> int:
    """Return how many labels two batches have in common."""
    classes = int(max(one.max(), other.max())) + 1
    return int(torch.minimum(*(torch.bincount(each, minlength=classes) for each in (one, other))).sum())


def _measure_guesses(data: Federation, settings: LeakageSettings, seed: int) -> Iterator[dict[str, Any]]:
    """Yield records of the guesses that need no upload, the same for each number of rounds."""
    for size in settings.batch_sizes:
        for batch in _draw_batches(data, size, settings, seed):
            test = batch.client.test
            others = stream(seed, "leak/others", size, batch.number).choice(len(test), size, replace=len(test) < size)
            mean = _to_unit(test.copy_rows(slice(None))).mean(dim=0, keepdim=True).expand(size, *test.shape)
            for name, found in ((MEAN, mean), (ANOTHER, _to_unit(test.copy_rows(torch.from_numpy(others))))):
                common = {"method": name, "seed": seed, "attack": "", "labels": KNOWN, "labels_found": np.nan}
                for row in batch.score(found):
                    yield from ({**common, "rounds": rounds, **row} for rounds in sorted(settings.rounds))


def _draw_batches(data: Federation, size: int, settings: LeakageSettings, seed: int) -> list[_Batch]:
    """Return the batches of ``size`` samples to attack with ``seed``, the same for every method."""
    batches = []
    for number in range(-(-settings.images // size)):
        client = data.clients[(seed + number) % len(data.clients)]
        drawn = stream(seed, "leak/batch", size, number).choice(len(client.train), size, replace=False)
        rows = torch.from_numpy(drawn)
        rows = rows[client.train.targets(rows).argsort(stable=True)]
        start = torch.from_numpy(stream(seed, "leak/start", size, number).standard_normal((size, *client.train.shape)))
        batches.append(_Batch(size=size, number=number, client=client, rows=rows, start=start))
    return batches


def name_row(method: str, source: str) -> str:
    """Return the name of a method's row in tables and pictures, with the attack's source."""
    return method if source == "everything" else f"{method}, {source} alone"


def _to_unit(images: Tensor) -> Tensor:
    return images.float() / 255


def _make_trial(experiment: Experiment, method: Method, seed: int) -> Trial:
    return Trial(method, experiment.model, experiment.data, experiment.settings, seed)


def _check(experiment: Experiment, settings: LeakageSettings) -> None:
    """Raise :class:`UsageError` if the data cannot be attacked."""
    data = experiment.data
    if data.task.name != "classification":
        raise UsageError(f"the data's task is {data.task}: leak attacks networks that classify images")
    for client in data.clients:
        for name, split in (("training", client.train), ("test", client.test)):
            if split.dtype != torch.uint8 or len(split.shape) != 3 or split.lazy or min(split.shape[1:]) < SMALLEST:
                raise UsageError(
                    f"client {client.name!r}: {name} samples of shape {split.shape} ({split.dtype}); leak takes 8-bit "
                    f"images in memory of at least {SMALLEST} x {SMALLEST} pixels, such as {{}}",
                    Ref(data="digits"),
                )
        if len(client.train) < max(settings.batch_sizes):
            raise UsageError(
                f"batch-sizes={max(settings.batch_sizes)}: client {client.name!r} has {len(client.train)} training "
                "samples; ask for at most as many"
            )
    if experiment.settings.rounds < max(settings.rounds):
        raise UsageError(
            f"rounds={max(settings.rounds)}: the experiment has {experiment.settings.rounds}; give it as many"
        )


def _check_trial(trial: Trial, settings: LeakageSettings) -> None:
    """Raise :class:`UsageError` if the method's uploads cannot be attacked; release the trial's resources."""
    plan, smallest = trial.plan, min(settings.batch_sizes)
    trial.close()
    if smallest < plan.smallest_batch:
        raise UsageError(
            f"batch-sizes={smallest}: the network of {plan.method.label} cannot train on one sample, since a BatchNorm "
            "after a linear layer has no variance over it: use 2 or more, or small-cnn(dense_norm=False)"
        )
    optimizer = plan.optimizer
    if not isinstance(optimizer, SGD) or optimizer.momentum or optimizer.weight_decay or not optimizer.lr:
        raise UsageError(
            f"optimizer={optimizer}: leak reads gradients from the changes of plain SGD: use sgd with a learning rate "
            "above 0, without momentum and weight decay"
        )
    if not plan.trained & plan.loaded & plan.sent or plan.method.pooled:
        raise UsageError(f"method {plan.method.label!r} sends no trained entry, so that there is nothing to invert")
    if plan.reads.first:
        raise UsageError(
            f"method {plan.method.label!r} sends statistics of samples beside its entries, which leak does not attack: "
            "leave it out"
        )
