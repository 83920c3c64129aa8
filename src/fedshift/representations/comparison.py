"""Comparison of the representations of one run: similarity of feature maps, and distance of BatchNorm statistics.

Pairs of clients are compared on test images of both clients; the server is compared with each client on that client's
test images. A similarity is the mean over images and channels, then over pairs.

The server's model is the initial model of each client's last local work; each client's model is its own model
after local work. With one global model, all clients have the same model after aggregation and differ only after local
work. With every method, each client is therefore trained one round further than the checkpoint, with the learning rate
of the last round (a schedule may end at 0), and its model is taken before aggregation. The result depends only on the
run, is computed by the sequential engine, and is not stored.

Feature maps are the outputs of convolutions. A convolution is recognized by its type (including scaled weight
standardization), never by its name. Its maps are its own output, before any normalization, activation or pooling: the
only place that networks with and without BatchNorm have in common.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from ..analysis.similarity import Reals, cosine, mean_distance, variance_distance
from ..config.spec import CompareSpec
from ..core.plan import Plan, forward
from ..data.federation import ClientData
from ..data.files.read_options import Progress
from ..data.partition import match_names
from ..evaluation.metrics import BATCH
from ..experiments.cross_site import train_further
from ..experiments.experiment import Experiment
from ..experiments.restoration import count_rounds_done, iterate_trials, load_experiment, restore_trial, select_trials
from ..experiments.trial import Trial
from ..nn.several_inputs import Inputs, divide_rows
from ..results.run_directory import trial_folder
from ..results.schema import PICTURED
from ..results.trial_records import read_stop
from ..utils.errors import UsageError, unknown_name
from ..utils.random_streams import stream
from ..utils.state import State
from ..utils.threads import limit_threads

DISTANCES = ("mean_client_client", "variance_client_client", "mean_server_client", "variance_server_client")


@dataclass(frozen=True, kw_only=True)
class Similarity:
    """Mean cosine similarity of feature maps between clients' models, and between the server's and clients' models.

    NaN if there are no pairs: with a single client, or with all data in one place.
    """

    client_client: float
    server_client: float


class Statistics(NamedTuple):
    """Running mean and variance per channel, ``[C]`` each, of one BatchNorm layer in one model."""

    mean: Reals
    variance: Reals


@dataclass(frozen=True, kw_only=True, eq=False)
class PictureData:
    """Data for the pictures of one method and seed.

    ``maps``: feature maps ``[C, H, W]`` of one test image of each client in its local model, by client and convolution;
    ``server`` and ``clients``: statistics by BatchNorm layer (and client).
    """

    maps: Mapping[str, Mapping[str, Reals]]
    server: Mapping[str, Statistics]
    clients: Mapping[str, Mapping[str, Statistics]]


@dataclass(frozen=True, kw_only=True, eq=False)
class RepresentationComparison:
    """Similarities and distances of one run.

    ``of``: number of training clients; ``clients``: clients that are compared; ``layers``: the convolution whose maps
    are compared, by method; ``similarity``: one for each seed, by method; ``distances``: a row for each method, seed
    and BatchNorm layer, with columns :data:`DISTANCES`; ``drawn``: picture data for the first seed, by method;
    ``images``: the stored test sample of each client whose maps are drawn, none in runs without pictures.
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


def compare_representations(
    directory: Path,
    *,
    samples: int = 64,
    clients: str | Sequence[str] | None = None,
    layer: str | None = None,
    methods: str | Sequence[str] | None = None,
    seeds: int | Sequence[int] | None = None,
    device: str | None = None,
    run_data: Path | None = None,
    code: Collection[str] = (),
    progress: Progress | None = None,
) -> RepresentationComparison:
    """Compare the models of the finished run in ``directory``, without changing it.

    Args:
        directory: run directory of the command line.
        samples: number of test images per client; all if a client has fewer.
        clients: names, or a pattern such as ``"usps-*"``; by default the first
            :data:`~fedshift.results.schema.PICTURED` clients that train.
        layer: convolution whose maps are compared and drawn; by default the last is compared and all are drawn.
        methods: methods of the run to compare, as in :func:`~fedshift.experiments.restoration.select_trials`.
        seeds: seeds of the run to compare, as in the same function.
        device: device to compute on; by default the run's if available, else the CPU.
        run_data: data of the run, if they have moved.
        code: user functions (``package.module:function``) that the run's settings may name.
        progress: called while data are read and for each trial.

    Raises:
        UsageError: a choice does not exist, the run is not finished, or the network has no convolution.
        FedshiftError: files of the run are damaged, or a client's further round diverges.

    """
    spec, experiment = load_experiment(directory, progress, device, run_data, code)
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
    """Compare the models of all trials that ``experiment`` left in ``directory``, as :func:`compare_representations`.

    ``experiment`` must use the sequential engine; ``go_on`` is the command that resumes a run, for error messages.
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
        trial_key = {"method": method, "seed": seed}
        rows += [{**trial_key, "layer": name, **_compute_distances(server, own)} for name, server, own in kept]
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
        images={name: image for name, client in tests.items() for image in _find_images(client, data.inputs)}
        if experiment.settings.pictures
        else {},
    )


def _find_images(client: ClientData, inputs: Inputs) -> list[NDArray[np.generic]]:
    """Return the first chosen test sample in a list; of several inputs, the image among them, or none."""
    x = client.test.read(choose_rows(client, 1))
    parts = [part for part in divide_rows(x, inputs).values() if part.ndim == 4] if inputs else [x]
    return [part[0].numpy() for part in parts[:1]]


def _compute_similarity(models: TrainedModels, x: Mapping[str, Tensor], layer: str) -> Similarity:
    """Compare all models on each client's images ``x [N, ...]``."""
    plan, local = models.trial.plan, models.local

    def maps(state: State, client: str) -> Reals:
        return record_maps(plan, state, x[client], (layer,))[layer]

    # by client pair: the first client's model against the second's, on the second client's images
    alike: dict[tuple[str, str], NDArray[np.float64]] = {}
    server = []
    for client, state in local.items():
        own = maps(state, client)
        alike |= {(o, client): cosine(own, maps(s, client)).mean(axis=1) for o, s in local.items() if o != client}
        server.append(float(cosine(own, maps(models.server, client)).mean()))
    pairs = (float(np.concatenate([alike[a, b], alike[b, a]]).mean()) for a, b in combinations(local, 2))
    return Similarity(client_client=_mean(pairs), server_client=_mean(server))


def _collect_statistics(models: TrainedModels) -> Iterator[tuple[str, Statistics, dict[str, Statistics]]]:
    """Yield name, server's and clients' statistics of each BatchNorm layer with statistics, if there are clients."""

    def read(state: State, layer: str) -> Statistics:
        return Statistics(*(state[f"{layer}.{name}"].cpu().numpy() for name in ("running_mean", "running_var")))

    for name, layer in models.trial.plan.module.named_modules() if models.local else ():
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None:
            yield name, read(models.server, name), {client: read(state, name) for client, state in models.local.items()}


def _compute_distances(server: Statistics, clients: Mapping[str, Statistics]) -> dict[str, float]:
    found = []
    for pairs in (list(combinations(clients.values(), 2)), [(server, own) for own in clients.values()]):
        found.append(_mean(mean_distance(*a, *b) for a, b in pairs))
        found.append(_mean(variance_distance(a.variance, b.variance) for a, b in pairs))
    return dict(zip(DISTANCES, found, strict=True))


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return fmean(found) if found else math.nan


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedModels:
    """Models of one method and seed: the ``server`` model and each client's ``local`` model; ``trial`` has the plan.

    ``local`` is empty if all data are pooled.
    """

    trial: Trial
    server: State
    local: Mapping[str, State]


def require_finished(experiment: Experiment, directory: Path, go_on: str) -> None:
    """Raise :class:`UsageError` unless ``directory`` has all rounds of all trials; ``go_on``: command to resume it.

    Raises :class:`FedshiftError` if a trial left no checkpoint.
    """
    for name, seed in iterate_trials(experiment):
        done = count_rounds_done(directory, name, seed)
        if done < experiment.settings.rounds and not read_stop(trial_folder(directory, name, seed), done):
            raise UsageError(
                f"{directory} is not finished: {name} with seed {seed} has done {done} of "
                f"{experiment.settings.rounds} rounds; leave it out (methods, seeds), or continue it: {go_on}"
            )


def select_clients(experiment: Experiment, clients: str | Sequence[str] | None) -> tuple[str, ...]:
    """Select clients by name or by a pattern such as ``"usps-*"``; None: the first :data:`PICTURED` that train.

    Raises :class:`UsageError` if a client is unknown or never trained.
    """
    names = experiment.data.names
    training = tuple(name for name in names if name not in experiment.settings.newcomers)
    if clients is None:
        return training[:PICTURED]
    asked = match_names(clients, names) if isinstance(clients, str) else tuple(dict.fromkeys(clients))
    if not asked:
        raise UsageError("clients: name at least one, or leave it out for all")
    for name in asked:
        if experiment.data.client(name).name not in training:
            raise UsageError(f"client {name!r} is a newcomer, which never trains: choose from {', '.join(training)}")
    return asked


def train_models(trial: Trial, clients: Sequence[str]) -> TrainedModels:
    """Return the current models of ``trial`` and, one round further, of ``clients`` (:func:`.train_further`).

    If the server has only part of a model (FedBN), it is completed with the clients' local entries, averaged with the
    method's weighting, as ``unseen="average"`` does; a real server cannot see these entries.
    """
    local = dict(train_further(trial, clients))
    client = trial.data.clients[0]  # its data are not used
    server = trial.make_unseen_state("average", client.name, client.train)
    assert server is not None  # in a finished run, at least one client has trained
    return TrainedModels(trial=trial, server=server, local=local)


def list_convolutions(plan: Plan, x: Tensor) -> tuple[str, ...]:
    """List the convolutions in the order in which inputs ``x [N, ...]`` pass; raise :class:`UsageError` without any."""
    names = [name for name, layer in plan.module.named_modules() if isinstance(layer, _ConvNd)]
    found = tuple(record_maps(plan, plan.initial, x, names))
    if not found:
        raise UsageError(
            f"the network of {plan.method.label} has no convolution, and so no feature maps: choose a run of one that "
            "has, for example small-cnn"
        )
    return found


def find_layer(plan: Plan, x: Tensor, wanted: str | None) -> str:
    """Return the convolution named ``wanted``, or the last one; raise :class:`UsageError` if there is none."""
    names = list_convolutions(plan, x)
    if wanted is not None and wanted not in names:
        raise unknown_name("convolution", wanted, names)
    return wanted or names[-1]


def record_maps(plan: Plan, state: State, x: Tensor, layers: Collection[str]) -> dict[str, Reals]:
    """Record the outputs ``[N, C, *pixels]`` of ``layers`` with ``state``, by layer in the order of execution.

    If a layer runs several times, the last output is used. Outputs are copied, because an activation may work in place.
    """
    parts: list[dict[str, Reals]] = []

    def keep(name: str, _layer: nn.Module, _inputs: Any, output: Tensor) -> None:
        parts[-1].pop(name, None)
        plain = torch.promote_types(output.dtype, torch.float32)  # NumPy has no bfloat16
        parts[-1][name] = output.detach().to("cpu", plain, copy=True).numpy()

    named = ((name, layer) for name, layer in plan.module.named_modules() if name in layers)
    hooks = [layer.register_forward_hook(partial(keep, name)) for name, layer in named]
    try:
        for part in torch.split(x, BATCH):
            parts.append({})
            forward(plan, state, part)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def choose_rows(client: ClientData, samples: int) -> Tensor:
    """Choose at most ``samples`` test samples of ``client``, int64 ``[N]``, the same in every trial."""
    return torch.from_numpy(stream(0, "features", client.name).permutation(len(client.test))[:samples])


def select_inputs(plan: Plan, client: ClientData, samples: int) -> Tensor:
    """Return the chosen samples as inputs of the network of ``plan``, ``[N, ...]``."""
    return client.test.inputs(choose_rows(client, samples).to(client.test.y.device), plan.dtype)
