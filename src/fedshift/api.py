"""The Python interface: a comparison in five lines, and what came of it.

>>> import fedshift
>>> result = fedshift.compare(
...     [fedshift.fedavg(), fedshift.fedbn()], data=fedshift.digits().limit(64), rounds=2, seeds=2, lr=0.03
... )
>>> list(result.table().index)
['pen', 'photo', 'print', 'faded', 'worn', 'macro', 'pooled', 'worst client']
>>> result.model("fedbn", client="photo").bn1.running_mean.shape
torch.Size([16])
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from threading import Event
from typing import TYPE_CHECKING, Literal
from warnings import warn
from weakref import finalize

import pandas as pd
import torch
from torch import nn

from .core.loss import Loss, parse_loss
from .core.method import Method
from .core.optimizer import SGD, Optimizer
from .core.work import Work
from .data.augmentation import parse_augmentation
from .data.federation import Federation
from .data.image_transforms import Augmentation
from .data.partition import match_names
from .experiments.experiment import Experiment, Observer
from .experiments.factory import moments_of, resolve_model
from .experiments.restoration import restore_trial, select_trials
from .experiments.settings import Settings
from .models import ModelFactory
from .new_clients.policies import adapt_all, parse_policies
from .new_clients.policy_tables import mean_over_seeds, seed_table
from .new_clients.site_data import find_overlap, prepare_clients
from .report.claims import difference_table
from .report.figures import make_figures
from .report.page import write_page
from .report.tables import accuracy_table
from .representations import RepresentationComparison, collect_comparison
from .results.schema import RunSummary
from .results.summary import read_summary
from .utils.errors import FedshiftError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Comparison:
    """What a comparison left in ``directory``: tables as data frames, figures, a report page, the trained models."""

    def __init__(self, experiment: Experiment, directory: Path) -> None:
        self.experiment, self.directory = experiment, directory

    @property
    def summary(self) -> RunSummary:
        """All records so far."""
        return read_summary(self.directory)

    def table(
        self,
        metric: str | None = None,
        model: Literal["personal", "global"] = "personal",
        split: Literal["test", "validation"] = "test",
        moment: Literal["loaded", "trained"] = "loaded",
    ) -> pd.DataFrame:
        """Clients and their aggregates against methods, mean and std over seeds, at the reported round.

        ``metric`` defaults to the comparison's own; ``moment="trained"`` is there with ``moments="loaded,trained"``.
        Choose learning rates and methods by ``split="validation"``, which is there where some data were held out.
        """
        return accuracy_table(self.summary, metric, model, split, moment)

    def differences(self, baseline: str | None = None) -> pd.DataFrame:
        """Macro metric of each method minus the baseline's (FedAvg, else the first), paired over seeds."""
        return difference_table(self.summary, baseline)

    def figures(self) -> dict[str, Figure]:
        """Matplotlib figures by name."""
        return make_figures(self.summary)

    def report(self, path: str | Path | None = None) -> Path:
        """Write the self-contained page (default ``report.html`` in the run directory) and return its path."""
        target = Path(path) if path else self.directory / "report.html"
        write_page(self.summary, target)
        return target

    def model(self, method: str, client: str | None = None, seed: int | None = None) -> nn.Module:
        """The network that ``client`` uses after training, or the server's (``client=None``), in evaluation mode.

        ``seed`` defaults to the first. With ``select="best"`` it is that of the reported round. Raises
        :class:`UsageError` where the method's server holds no whole model.
        """
        if seed is not None and seed not in self.experiment.seeds:
            raise UsageError(f"no seed {seed} here: there are {', '.join(map(str, self.experiment.seeds))}")
        trial = restore_trial(
            self.experiment, self.directory, method, self.experiment.seeds[0] if seed is None else seed
        )
        state = trial.model_state(client)
        if state is None:
            raise UsageError(f"{method} has no global model: name a client, one of {', '.join(trial.data.names)}")
        network = trial.make_network()
        network.load_state_dict(state, strict=False)  # a tied parameter stands once in the state
        return network.eval()

    def adapt(
        self, data: Federation, policies: str | Sequence[str] | None = None, *, rounds: int = 1,
        methods: str | Sequence[str] | None = None,
    ) -> pd.DataFrame:  # fmt: skip
        """What each policy for new clients gets right on the test data of those of ``data``, which took no part.

        Rows are clients and their mean, ``macro``; columns are method and policy with mean, std and number of seeds, of
        the comparison's metric. ``data`` are brought to the comparison's shape, scale and classes;
        ``policies``: average, reestimate, nearest, finetune, finetune_bn, by default those that make sense;
        ``rounds`` of local work that the last two do; ``methods``: some alone. Warns where a client is known,
        or a model could not be made. Raises :class:`UsageError` where data do not fit, and
        :class:`FedshiftError` where files are damaged.
        """
        wanted, experiment = parse_policies(policies), select_trials(self.experiment, methods)
        if rounds < 1:
            raise UsageError(f"rounds={rounds}: must be at least 1")
        new = prepare_clients(data, experiment.data).to(torch.device(experiment.settings.device))
        training = {client.name: client.train for client in new.clients}
        made = adapt_all(experiment, self.directory, training, wanted, data=new, rounds=rounds)
        for notice in (*find_overlap(new, experiment), *made.notices, *(made.inapplicable if policies else ())):
            warn(notice, stacklevel=2)
        if made.failures:
            raise FedshiftError("; ".join(made.failures))
        return mean_over_seeds(seed_table(made.rows, experiment.settings.metric))

    def features(
        self,
        *,
        samples: int = 64,
        clients: str | Sequence[str] | None = None,
        layer: str | None = None,
        methods: str | Sequence[str] | None = None,
        seeds: int | Sequence[int] | None = None,
    ) -> RepresentationComparison:
        """How alike feature maps of clients and server are, and their BatchNorm; arguments of ``features.study``."""
        go_on = "compare(..., out=..., resume=True)"
        experiment = select_trials(self.experiment, methods, seeds)
        return collect_comparison(experiment, self.directory, go_on, samples=samples, clients=clients, layer=layer)


def compare(
    methods: Sequence[Method],
    *,
    data: Federation,
    model: str | ModelFactory = "auto",
    rounds: int = 20,
    seeds: int | Sequence[int] = 1,
    epochs: int | None = None,
    batches: int | None = None,
    batch_size: int | None = 32,
    lr: float = 0.01,
    optimizer: Optimizer | None = None,
    participation: int | float | None = None,
    evaluate_every: int | None = None,
    moments: str | Sequence[str] = "loaded",
    loss: str | Loss = "cross_entropy",
    augment: str | Augmentation | None = None,
    select: Literal["last", "best"] = "last",
    metric: Literal["accuracy", "balanced_accuracy", "auc"] = "accuracy",
    newcomers: str | Sequence[str] = (),
    unseen: Literal["skip", "average", "nearest", "reestimate", "finetune", "finetune_bn"] = "skip",
    engine: str = "auto",
    workers: int | None = None,
    precision: Literal["float32", "bfloat16"] = "float32",
    device: str = "cpu",
    allow_single_class: bool = False,
    out: str | Path | None = None,
    resume: bool = False,
    observer: Observer | None = None,
    stop: Event | None = None,
) -> Comparison:
    """Train every method with every seed on ``data`` and measure each client's test set after aggregation.

    Args:
        methods: what to compare; methods of one seed share initial weights and the order of samples.
        data: the clients, for example ``digits()``, ``read_folder(path)`` or ``federation({...})``.
        model: name of a network (``auto`` goes by the samples' shape), or a factory
            ``(sample_shape, classes) -> nn.Module``.
        rounds: communication rounds.
        seeds: how many (0, 1, ...), or which.
        epochs: passes of a client over its data in a round (1 unless ``batches`` is given).
        batches: batches of a client in a round, in place of ``epochs``.
        batch_size: samples in a batch; None takes all of the client's.
        lr: learning rate of plain SGD; for anything else give ``optimizer``.
        optimizer: for example ``SGD(lr=0.01, momentum=0.9)`` or ``AdamW(lr=1e-3)``.
        participation: clients in a round, a number or a fraction; None: all.
        evaluate_every: rounds between evaluations; None: about ten in all. The last round is always evaluated.
        moments: when clients' models are measured in an evaluated round: ``"loaded"``, just after aggregation, or
            ``"loaded,trained"``, just after local work as well.
        loss: what is trained on, an expression such as ``"focal(gamma=2.0, weights='balanced')"`` or its value.
        augment: what is done to training images, an expression such as ``"flip(), rotate(degrees=30)"`` or its value.
        select: the reported round, ``last`` or ``best`` (on validation data, see ``Federation.hold_out``).
        metric: what tables report and ``best`` goes by.
        newcomers: clients that never take part in training, a list of names or a pattern such as ``"usps-*"``.
        unseen: how a client that never trained is measured by a method that keeps state on clients: not at all, or on
            a model made by the policy (see ``fedshift.evaluation.unseen_clients``).
        engine: how clients are run: ``sequential``, ``stacked``, ``pool``, ``ray``, ``identity`` or ``auto``, which
            chooses.
        workers: processes of the engines pool and ray at most; None: one for each free processor, or of the cluster.
        precision: what layers compute in; ``bfloat16`` is inexact.
        device: torch device.
        allow_single_class: accept clients whose training data hold one class.
        out: run directory to keep; without it a temporary one that lives as long as the result.
        resume: go on with the run in ``out``.
        observer: hears of progress.
        stop: once set, the run ends after the round in progress.

    Returns:
        The :class:`Comparison`.

    Raises:
        UsageError: before anything starts, where data, model, methods or numbers do not fit.
        FedshiftError: where training diverges or the disk refuses.

    """
    experiment = Experiment(
        methods=tuple(methods),
        data=data.fit_images().check(allow_single_class=allow_single_class),
        model=resolve_model(model, data.sample_shape) if isinstance(model, str) else _resolve_model(model),
        settings=Settings(
            rounds=rounds,
            work=Work(
                batch_size=batch_size, epochs=1 if epochs is None and batches is None else epochs, batches=batches
            ),
            optimizer=optimizer or SGD(lr=lr),
            participation=participation,
            evaluate_every=evaluate_every,
            moments=moments_of(moments),
            loss=parse_loss(loss) if isinstance(loss, str) else loss,
            augment=parse_augmentation(augment) if isinstance(augment, str) else augment,
            select=select,
            metric=metric,
            newcomers=match_names(newcomers, data.names) if isinstance(newcomers, str) else tuple(newcomers),
            unseen=unseen,
            engine=engine,
            workers=workers,
            precision=precision,
            device=device,
        ),
        seeds=tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds),
    )
    result = Comparison(experiment, Path(out or mkdtemp(prefix="fedshift-")))
    if not out:
        finalize(result, rmtree, result.directory, ignore_errors=True)
    experiment.run(result.directory, resume=resume, observer=observer, stop=stop)
    return result


def _resolve_model(model: ModelFactory) -> ModelFactory:
    if isinstance(model, nn.Module) or not callable(model):
        raise UsageError(
            f"model is a {type(model).__name__}: give a name, or a function (sample_shape, classes) -> nn.Module, "
            "which each seed calls for fresh weights"
        )
    return model
