"""The user's network, which fedshift never trained, adapted to clients by the policies for new clients.

It replaces a run's one global model: it is measured unchanged, with BatchNorm statistics of the client's
inputs, and fine-tuned, completely or only its BatchNorm, by the local work of the settings.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
from torch import nn

from ..config.spec import DataSpec, RunSpec
from ..core.method import Method
from ..data.checks.quality import check_data
from ..data.federation import Federation
from ..data.files.read_options import Progress
from ..data.joining import match_labels
from ..data.schema import Layout
from ..data.sources import load_source, prepare_clients
from ..evaluation.policy import explain_inapplicable, parse_policies
from ..experiments.factory import make_settings
from ..experiments.settings import Settings
from ..experiments.trial import Trial
from ..models import ModelFactory
from ..utils.errors import UsageError
from ..utils.warning import warn_of
from .policies import Adaptation, adapt_trial, require_models
from .policy_tables import mean_over_seeds, seed_table

NAME = "own network"
"""Name of the method in tables and files."""


def load_clients(
    data: str, spec: DataSpec, class_names: Sequence[str] = (), clients: str | None = None,
    progress: Progress | None = None,
) -> Federation:  # fmt: skip
    """Load the clients of ``data`` for a network whose classes, in the order of its scores, are ``class_names``.

    ``data``: as for ``--data`` of a run, or one client's folder or file. ``class_names``: empty if the data name no
    classes, or all of them. ``clients``: names or patterns; None: all.
    """
    layout = Layout(name="the network's data") if Path(data).exists() else None
    made = load_source(data, replace(spec, domains=clients), progress, schema=layout)
    return fit_clients(made, spec, class_names)


def fit_clients(data: Federation, spec: DataSpec, class_names: Sequence[str] = ()) -> Federation:
    """Convert ``data`` to the image size, the scale and the classes of a network, and check them."""
    data = data.fit_images(spec.image_size)
    if class_names:
        named = Layout(name="the network", classes=len(class_names), class_names=tuple(class_names))
        if not data.class_names and data.classes <= len(class_names):
            data = replace(data, classes=len(class_names), class_names=named.class_names)
        data = match_labels(data, named, "the network,")
    return check_data(prepare_clients(data, replace(spec, allow_single_class=True)), spec.on_data_error)


def make_trial(model: ModelFactory, data: Federation, settings: Settings) -> Trial:
    """Return a trial whose server holds the network from ``settings.weights`` (or as ``model`` makes it)."""
    try:
        trial = Trial(Method(name=NAME), model, data, replace(settings, engine="sequential", rounds=1), 0)
    except UsageError as error:
        if "classes" not in str(error) or data.class_names:
            raise
        fix = "name all of its in the order of its scores (class_names)"
        raise UsageError(f"{error}. Where the clients lack classes of the network, {fix}") from error
    trial.server = replace(trial.server, round=1)  # trained, elsewhere
    return trial


def adapt_own(trial: Trial, wanted: Sequence[str], *, rounds: int = 1) -> Adaptation:
    """Make and measure the models of the policies ``wanted`` for every client of the trial."""
    adapted, training = Adaptation(), {client.name: client.train for client in trial.measured.clients}
    adapt_trial(adapted, trial, training, wanted, data=trial.measured, rounds=rounds)
    adapted.inapplicable.extend(explain_inapplicable([trial.plan], wanted, trial.data.task))
    require_models(adapted)
    return adapted


def adapt_network(
    network: nn.Module, data: Federation, policies: str | Sequence[str] | None = None, *,
    class_names: Sequence[str] = (), rounds: int = 1, epochs: int = 1, lr: float = RunSpec.lr,
    batch_size: int | None = RunSpec.batch_size, metric: str = RunSpec.metric,
) -> pd.DataFrame:  # fmt: skip
    """Adapt your own network to clients with every policy for new clients, and measure each on their test data.

    Args:
        network: The network with its weights, which is copied; it outputs one score per class.
        data: Clients, scaled as the network expects, for example ``read_folder(path).normalize(IMAGENET)``.
        policies: reestimate, mixed, tent, finetune, finetune_bn; None: those that apply. The unchanged network is
            always measured.
        class_names: The network's classes in the order of its scores, if the data have other names or fewer classes.
        rounds: Rounds of local work of policies that train.
        epochs: Passes over a client's data in a round.
        lr: Learning rate of plain SGD.
        batch_size: Samples in a batch; None: all of a client's samples.
        metric: metric of the data's task; auto: its first.

    Returns:
        The metric: rows are clients and their mean, ``macro``; columns are policies with mean, std and number of seeds.

    Warns:
        UserWarning: the data have errors, or a model could not be made.

    Raises:
        UsageError: the network and the data are incompatible.

    """
    if rounds < 1:
        raise UsageError(f"rounds={rounds}: must be at least 1")
    spec = RunSpec(lr=lr, epochs=epochs, batch_size=batch_size or 0, metric=metric)
    clients = fit_clients(data, spec, class_names)
    trial = make_trial(lambda *_: copy.deepcopy(network), clients, make_settings(spec, clients.names))
    made = adapt_own(trial, parse_policies(policies), rounds=rounds)
    warn_of((*clients.notices, *made.notices, *(made.inapplicable if policies else ())))
    return mean_over_seeds(seed_table(made.rows, trial.settings.metric))
