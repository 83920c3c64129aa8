"""Similarities and distances of one run, and what pictures of it need.

Client against client: all pairs, on test images of both; server against client: on test images of the client. A
similarity is the mean over images and channels, then over pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ..analysis.similarity import Reals, cosine, mean_distance, variance_distance
from ..config.spec import CompareSpec
from ..data.files.read_options import Progress
from ..engines.cost_model import limit_threads
from ..experiments.experiment import Experiment
from ..experiments.restoration import iterate_trials, load_experiment, restore_trial, select_trials
from ..utils.errors import UsageError
from ..utils.state import State
from .feature_maps import choose_rows, find_layer, list_convolutions, record_maps, select_inputs
from .trained_models import TrainedModels, require_finished, select_clients, train_models

DISTANCES = ("mean_client_client", "variance_client_client", "mean_server_client", "variance_server_client")


@dataclass(frozen=True, kw_only=True)
class Similarity:
    """Mean cosine similarity of feature maps between clients' models, and between the server's and a client's.

    NaN where there is no pair: one client alone, or all data in one place.
    """

    client_client: float
    server_client: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Statistics:
    """Running mean and variance by channel, ``[C]`` each, of one BatchNorm layer of one model."""

    mean: Reals
    variance: Reals


@dataclass(frozen=True, kw_only=True, eq=False)
class PictureData:
    """What pictures show of one method under one seed.

    ``maps``: of one test image of each client, ``[C, H, W]`` by client and convolution, as its local model sees it;
    ``server`` and ``clients``: statistics by BatchNorm layer (and client).
    """

    maps: Mapping[str, Mapping[str, Reals]]
    server: Mapping[str, Statistics]
    clients: Mapping[str, Mapping[str, Statistics]]


@dataclass(frozen=True, kw_only=True, eq=False)
class RepresentationComparison:
    """What is found of a run.

    ``of``: how many clients train, of which ``clients`` are looked at; ``layers``: by method, the convolution whose
    maps are compared; ``similarity``: by method, one for each seed; ``distances``: a row for each method, seed and
    BatchNorm layer, with columns :data:`DISTANCES`; ``drawn``: by method, under the first seed; ``images``: the test
    sample of each client whose maps are drawn, as it is kept.
    """

    clients: tuple[str, ...]
    of: int
    seeds: tuple[int, ...]
    samples: int
    layers: Mapping[str, str]
    similarity: dict[str, list[Similarity]]
    distances: pd.DataFrame
    drawn: Mapping[str, PictureData]
    images: Mapping[str, NDArray[np.generic]]


def compute_similarities(
    directory: Path, samples: int = 64, clients: str | Sequence[str] | None = None
) -> dict[str, list[Similarity]]:
    """For each method of the run in ``directory``, one :class:`Similarity` a seed, of the last convolution's maps.

    Arguments and errors as of :func:`compare_representations`.
    """
    return compare_representations(directory, samples=samples, clients=clients).similarity


def compare_representations(
    directory: Path,
    *,
    samples: int = 64,
    clients: str | Sequence[str] | None = None,
    layer: str | None = None,
    methods: str | Sequence[str] | None = None,
    seeds: int | Sequence[int] | None = None,
    device: str | None = None,
    progress: Progress | None = None,
) -> RepresentationComparison:
    """Look at the finished run that the command line left in ``directory``, which is left as it is.

    ``samples``: test images of each client, or all where it has fewer; ``clients``: names, or a pattern such as
    ``"usps-*"``, by default the first :data:`~fedshift.results.schema.PICTURED` that train; ``layer``: the convolution whose
    maps are compared and drawn, by default the last and all; ``methods``, ``seeds``: some of the run's alone, as
    :func:`~fedshift.experiments.restoration.select_trials` takes them; ``device``: where it computes, by default where the run did if that
    is here, else the CPU; ``progress`` hears of what is read, and of trials.

    Raises :class:`UsageError` where one of them does not exist, the run is not finished or the network has no
    convolution, and :class:`FedshiftError` where files of the run are damaged or a client's further round diverges.
    """
    spec, experiment = load_experiment(directory, progress, device)
    go_on = f"fedshift {'compare' if isinstance(spec, CompareSpec) else 'run'} --resume {directory}"
    with limit_threads(spec.threads):
        return collect_comparison(
            select_trials(experiment, methods, seeds), directory, go_on,
            samples=samples, clients=clients, layer=layer, progress=progress,
        )  # fmt: skip


def collect_comparison(
    experiment: Experiment,
    directory: Path,
    go_on: str,
    *,
    samples: int = 64,
    clients: str | Sequence[str] | None = None,
    layer: str | None = None,
    progress: Progress | None = None,
) -> RepresentationComparison:
    """What is found in every trial that ``experiment`` left in ``directory``; arguments and errors as of :func:`compare_representations`.

    ``experiment`` is to run its trials by the sequential engine; ``go_on`` says how a run is gone on with.
    """
    if samples < 1:
        raise UsageError(f"samples={samples}: must be at least 1")
    clients = select_clients(experiment, clients)
    require_finished(experiment, directory, go_on)
    trials = [*iterate_trials(experiment)]
    layers: dict[str, str] = {}
    similarity: dict[str, list[Similarity]] = {}
    rows: list[dict[str, Any]] = []
    drawn: dict[str, PictureData] = {}
    for number, (method, seed) in enumerate(trials):
        if progress:
            progress(f"{method}, seed {seed}", number, len(trials))
        trial = restore_trial(experiment, directory, method, seed)
        plan = trial.plan
        x = {name: select_inputs(plan, trial.measured.client(name), samples) for name in clients}
        first = next(iter(x.values()))[:1]
        layers[method] = find_layer(plan, first, layer)
        models = train_models(trial, clients)
        similarity.setdefault(method, []).append(_compute_similarity(models, x, layers[method]))
        kept = [*_collect_statistics(models)]
        of = {"method": method, "seed": seed}
        rows += [{**of, "layer": name, **_compute_distances(server, own)} for name, server, own in kept]
        if method not in drawn:
            shown = (layer,) if layer else list_convolutions(plan, first)
            seen = ((name, record_maps(plan, state, x[name][:1], shown)) for name, state in models.local.items())
            drawn[method] = PictureData(
                maps={who: {n: maps[0] for n, maps in found.items() if maps.ndim == 4} for who, found in seen},
                server={name: server for name, server, _ in kept},
                clients={name: own for name, _, own in kept},
            )
    data, newcomers = experiment.data, experiment.settings.newcomers
    tests = {name: data.client(name) for name in clients}
    return RepresentationComparison(
        clients=clients,
        of=len(data.clients) - len(newcomers),
        seeds=experiment.seeds,
        samples=samples,
        layers=layers,
        similarity=similarity,
        distances=pd.DataFrame(rows, columns=["method", "seed", "layer", *DISTANCES]),
        drawn=drawn,
        images={name: client.test.copy_rows(choose_rows(client, 1))[0].numpy() for name, client in tests.items()},
    )


def _compute_similarity(models: TrainedModels, x: Mapping[str, Tensor], layer: str) -> Similarity:
    """Over the clients' images ``x [N, ...]``, each given to every model."""
    plan, local = models.trial.plan, models.local

    def maps(state: State, client: str) -> Reals:
        return record_maps(plan, state, x[client], (layer,))[layer]

    alike: dict[
        tuple[str, str], NDArray[np.float64]
    ] = {}  # of the model of one client with that of another, on the latter's images
    server = []
    for client, state in local.items():
        own = maps(state, client)
        alike |= {(o, client): cosine(own, maps(s, client)).mean(axis=1) for o, s in local.items() if o != client}
        server.append(float(cosine(own, maps(models.server, client)).mean()))
    pairs = (float(np.concatenate([alike[a, b], alike[b, a]]).mean()) for a, b in combinations(local, 2))
    return Similarity(client_client=_mean(pairs), server_client=_mean(server))


def _collect_statistics(models: TrainedModels) -> Iterator[tuple[str, Statistics, dict[str, Statistics]]]:
    """Of each BatchNorm layer that keeps some: its name, the server's and each client's; nothing without clients."""

    def of(state: State, layer: str) -> Statistics:
        mean, variance = (state[f"{layer}.{name}"].cpu().numpy() for name in ("running_mean", "running_var"))
        return Statistics(mean=mean, variance=variance)

    for name, layer in models.trial.plan.module.named_modules() if models.local else ():
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None:
            yield name, of(models.server, name), {client: of(state, name) for client, state in models.local.items()}


def _compute_distances(server: Statistics, clients: Mapping[str, Statistics]) -> dict[str, float]:
    found = []
    for pairs in (list(combinations(clients.values(), 2)), [(server, own) for own in clients.values()]):
        found.append(_mean(mean_distance(a.mean, a.variance, b.mean, b.variance) for a, b in pairs))
        found.append(_mean(variance_distance(a.variance, b.variance) for a, b in pairs))
    return dict(zip(DISTANCES, found, strict=True))


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return fmean(found) if found else math.nan
