"""Comparison of the representations of one run: similarity of feature maps, and distance of BatchNorm statistics.

Pairs of clients are compared on test images of both clients; the server is compared with each client on that client's
test images. A similarity is the mean over images and channels, then over pairs.

The paper does not specify its models, images and pairs. With one global model, all clients have the same model after
aggregation and differ only after local work. With every method, each client is therefore trained one round further than
the checkpoint, with the learning rate of the last round (a schedule may end at 0), and its model is taken before
aggregation; the server's is the start of that round. The result depends only on the run and is not stored.

Feature maps are the outputs of convolutions. A convolution is recognized by its type (including scaled weight
standardization), never by its name. Its maps are its own output, before any normalization, activation or pooling: the
only place that networks with and without BatchNorm have in common.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from ..core.network import forward
from ..core.plan import Plan
from ..data.federation import ClientData
from ..data.partition import match_names
from ..data.source import Progress
from ..evaluation.metrics import BATCH
from ..experiments.cross_site import train_further
from ..experiments.experiment import Experiment
from ..experiments.restoration import count_rounds_done, iterate_trials, restore_trial
from ..experiments.trial import Trial
from ..nn.several_inputs import Inputs, divide_rows
from ..results.run_directory import trial_folder
from ..results.schema import PICTURED
from ..results.trial_records import read_stop
from ..utils.errors import UsageError, unknown_name
from ..utils.random_streams import stream
from ..utils.state import State

DISTANCES = ("mean_client_client", "variance_client_client", "mean_server_client", "variance_server_client")
"""Columns of distances of BatchNorm statistics."""


class Statistics(NamedTuple):
    """Running mean and variance per channel, ``[C]`` each, of one BatchNorm layer in one model."""

    mean: Reals
    variance: Reals


@dataclass(frozen=True, kw_only=True, eq=False)
class PictureData:
    """Data for the pictures of one method and seed.

    ``maps``: feature maps ``[C, H, W]`` of a test image of each client in its local model, by client and convolution;
    ``statistics``: the server's and the clients', by BatchNorm layer.
    """

    maps: Mapping[str, Mapping[str, Reals]]
    statistics: Mapping[str, tuple[Statistics, Mapping[str, Statistics]]]


@dataclass(frozen=True, kw_only=True, eq=False)
class RepresentationComparison:
    """Similarities and distances of one run.

    ``clients``: clients that are compared; ``of``: number of training clients; ``samples``: most test images of each;
    ``similarity``: a row for each method and seed with ``layer``, the convolution whose maps are compared, and the mean
    cosines ``client_client`` and ``server_client``, NaN without pairs (a single client, or all data in one place);
    ``distances``: a row for each method, seed and BatchNorm layer, with columns :data:`DISTANCES`; ``drawn``: picture
    data for the first seed, by method; ``images``: the stored test sample of each client whose maps are drawn,
    none in runs without pictures.
    """

    clients: tuple[str, ...]
    of: int
    seeds: tuple[int, ...]
    samples: int
    similarity: pd.DataFrame
    distances: pd.DataFrame
    drawn: Mapping[str, PictureData]
    images: Mapping[str, NDArray[np.generic]]


def compare_representations(
    experiment: Experiment,
    directory: Path,
    go_on: str,
    *,
    samples: int = 64,
    clients: str | Sequence[str] | None = None,
    layer: str | None = None,
    progress: Progress | None = None,
) -> RepresentationComparison:
    """Compare the models of all trials that ``experiment`` left in ``directory``, without changing it.

    Args:
        experiment: experiment of the run, as :func:`~fedshift.experiments.restoration.select_trials` returns it.
        directory: run directory.
        go_on: command that resumes the run, for error messages.
        samples: number of test images per client; all if a client has fewer.
        clients: names, or a pattern such as ``"usps-*"``; by default the first
            :data:`~fedshift.results.schema.PICTURED` clients that train.
        layer: convolution whose maps are compared and drawn; by default the last is compared and all are drawn.
        progress: called for each trial.

    Raises:
        UsageError: a choice does not exist, the run is not finished, or the network has no convolution.
        FedshiftError: files of the run are damaged, or a client's further round diverges.

    """
    if samples < 1:
        raise UsageError(f"samples={samples}: must be at least 1")
    clients = _select_clients(experiment, clients)
    _require_finished(experiment, directory, go_on)
    trials = [*iterate_trials(experiment)]
    similarity, distances, drawn = [], [], {}
    for number, (method, seed) in enumerate(trials):
        if progress:
            progress(f"{method}, seed {seed}", number, len(trials))
        trial = restore_trial(experiment, directory, method, seed)
        x = {name: select_inputs(trial.plan, trial.measured.client(name), samples) for name in clients}
        names = list_convolutions(trial.plan, x[clients[0]][:1])
        if layer is not None and layer not in names:
            raise unknown_name("convolution", layer, names)
        server, local = train_models(trial, clients)
        compared = layer or names[-1]
        key = {"method": method, "seed": seed}
        similarity.append({**key, "layer": compared, **_compare_maps(trial.plan, server, local, x, compared)})
        kept = dict(_collect_statistics(trial.plan, server, local))
        distances += [{**key, "layer": name, **_compare_statistics(*models)} for name, models in kept.items()]
        if method not in drawn:
            shown = (layer,) if layer else names
            maps = {name: record_maps(trial.plan, state, x[name][:1], shown) for name, state in local.items()}
            drawn[method] = PictureData(
                maps={who: {n: m[0] for n, m in seen.items() if m.ndim == 4} for who, seen in maps.items()},
                statistics=kept,
            )
    data = experiment.data
    pictured = clients if experiment.settings.pictures else ()
    return RepresentationComparison(
        clients=clients, of=len(data.clients) - len(experiment.settings.newcomers), seeds=experiment.seeds,
        samples=samples, similarity=pd.DataFrame(similarity),
        distances=pd.DataFrame(distances, columns=["method", "seed", "layer", *DISTANCES]), drawn=drawn,
        images={name: image for name in pictured for image in _find_images(data.client(name), data.inputs)},
    )  # fmt: skip


def _select_clients(experiment: Experiment, clients: str | Sequence[str] | None) -> tuple[str, ...]:
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


def _require_finished(experiment: Experiment, directory: Path, go_on: str) -> None:
    for name, seed in iterate_trials(experiment):
        done = count_rounds_done(directory, name, seed)
        if done < experiment.settings.rounds and not read_stop(trial_folder(directory, name, seed), done):
            raise UsageError(
                f"{directory} is not finished: {name} with seed {seed} has done {done} of "
                f"{experiment.settings.rounds} rounds; leave it out (methods, seeds), or continue it: {go_on}"
            )


def train_models(trial: Trial, clients: Sequence[str]) -> tuple[State, dict[str, State]]:
    """Return the server's current model and, one round further, those of ``clients`` (:func:`.train_further`).

    If the server has only part of a model (FedBN), it is completed with the clients' local entries, averaged with the
    method's weighting, as ``unseen="average"`` does; a real server cannot see these entries. No client has a model if
    all data are pooled. All have running BatchNorm statistics.
    """
    local = dict(train_further(trial, clients))
    client = trial.data.clients[0]  # its data are not used
    server = trial.make_unseen_state("average", client.name, client.train, server=trial.server)
    assert server is not None  # in a finished run, at least one client has trained
    return server, local


def _compare_maps(
    plan: Plan, server: State, local: Mapping[str, State], x: Mapping[str, Tensor], layer: str
) -> dict[str, float]:
    """Compare all models on each client's images ``x [N, ...]``."""
    alike: dict[tuple[str, str], NDArray[np.float64]] = {}  # of a client's model and the owner's, on the owner's images
    with_server = []
    for client, state in local.items():
        maps = [record_maps(plan, each, x[client], (layer,))[layer] for each in (state, server)]
        with_server.append(float(cosine(*maps).mean()))
        for name in local.keys() - {client}:
            other = record_maps(plan, local[name], x[client], (layer,))[layer]
            alike[name, client] = cosine(maps[0], other).mean(axis=1)
    pairs = [float(np.concatenate([alike[a, b], alike[b, a]]).mean()) for a, b in combinations(local, 2)]
    return {"client_client": _average(pairs), "server_client": _average(with_server)}


def _collect_statistics(
    plan: Plan, server: State, local: Mapping[str, State]
) -> Iterator[tuple[str, tuple[Statistics, dict[str, Statistics]]]]:
    """Yield each BatchNorm layer with the server's and the clients' statistics, if it has any and there are clients."""

    def read(state: State, layer: str) -> Statistics:
        return Statistics(*(state[f"{layer}.{name}"].cpu().numpy() for name in ("running_mean", "running_var")))

    for name, layer in plan.module.named_modules() if local else ():
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None:
            yield name, (read(server, name), {client: read(state, name) for client, state in local.items()})


def _compare_statistics(server: Statistics, clients: Mapping[str, Statistics]) -> dict[str, float]:
    distances = []
    for pairs in (list(combinations(clients.values(), 2)), [(server, own) for own in clients.values()]):
        distances.append(_average([mean_distance(*a, *b) for a, b in pairs]))
        distances.append(_average([variance_distance(a.variance, b.variance) for a, b in pairs]))
    return dict(zip(DISTANCES, distances, strict=True))


def _average(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def list_convolutions(plan: Plan, x: Tensor) -> tuple[str, ...]:
    """List the convolutions in the order in which inputs ``x [N, ...]`` pass; raise :class:`UsageError` without any."""
    names = [name for name, layer in plan.module.named_modules() if isinstance(layer, _ConvNd)]
    passed = tuple(record_maps(plan, plan.initial, x, names))
    if not passed:
        raise UsageError(
            f"the network of {plan.method.label} has no convolution, and so no feature maps: choose a run of one that "
            "has, for example small-cnn"
        )
    return passed


def record_maps(plan: Plan, state: State, x: Tensor, layers: Collection[str]) -> dict[str, Reals]:
    """Record the outputs ``[N, C, *pixels]`` of ``layers`` with ``state``, by layer in the order of execution.

    If a layer runs several times, the last output is used. Outputs are copied, because an activation may work in place.
    """
    batches: list[dict[str, Reals]] = []

    def keep(name: str, _layer: nn.Module, _inputs: Any, output: Tensor) -> None:
        batches[-1].pop(name, None)
        plain = torch.promote_types(output.dtype, torch.float32)  # NumPy has no bfloat16
        batches[-1][name] = output.detach().to("cpu", plain, copy=True).numpy()

    named = ((name, layer) for name, layer in plan.module.named_modules() if name in layers)
    hooks = [layer.register_forward_hook(partial(keep, name)) for name, layer in named]
    try:
        for batch in torch.split(x, BATCH):
            batches.append({})
            forward(plan, state, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def choose_rows(client: ClientData, samples: int) -> Tensor:
    """Choose at most ``samples`` test samples of ``client``, int64 ``[N]``, the same in every trial."""
    return torch.from_numpy(stream(0, "features", client.name).permutation(len(client.test))[:samples])


def select_inputs(plan: Plan, client: ClientData, samples: int) -> Tensor:
    """Return the chosen samples as inputs of the network of ``plan``, ``[N, ...]``."""
    return client.test.inputs(choose_rows(client, samples).to(client.test.y.device), plan.dtype)


def _find_images(client: ClientData, inputs: Inputs) -> list[NDArray[np.generic]]:
    """Return the first chosen test sample in a list; of several inputs, the image among them, or none."""
    x = client.test.read(choose_rows(client, 1))
    images = [column for column in divide_rows(x, inputs).values() if column.ndim == 4] if inputs else [x]
    return [image[0].numpy() for image in images[:1]]
