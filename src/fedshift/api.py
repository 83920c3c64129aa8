"""The Python interface: a comparison in five lines, and its results.

>>> import fedshift
>>> result = fedshift.compare(
...     [fedshift.fedavg(), fedshift.fedbn()], data=fedshift.digits().limit_samples(64), rounds=2, seeds=2, lr=0.03
... )
>>> list(result.table().index)
['pen', 'photo', 'print', 'faded', 'worn', 'macro', 'pooled', 'worst client']
>>> result.model("fedbn", client="photo").bn1.running_mean.shape
torch.Size([16])
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from threading import Event
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeVar, get_type_hints
from warnings import warn
from weakref import finalize

import pandas as pd
import torch
from torch import nn

from .config.spec import SharedSpec, Spec, read_help
from .core.loss import Loss, as_loss
from .core.method import Method
from .core.optimizer import SGD, Optimizer
from .data.augmentation import Augmentation
from .data.federation import Federation
from .experiments.experiment import Experiment, Observer
from .experiments.factory import resolve_model, resolve_settings
from .experiments.loggers import parse_loggers
from .experiments.restoration import restore_trial, select_trials
from .export.source import export_run
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
from .utils.errors import FedshiftError, UsageError, unknown_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Comparison:
    """Results of a comparison in ``directory``: tables as data frames, figures, a report page, the trained models."""

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
        """Return the metric of clients and their aggregates (rows) by method (columns), at the reported round.

        Args:
            metric: metric to report; None: the comparison's.
            model: the model that each client would use, or the server's.
            split: samples to measure; choose learning rates and methods by ``validation``, where some were held out.
            moment: ``trained`` is available with ``moments="loaded,trained"``.

        Returns:
            Mean, std and number of seeds, as shares in [0, 1]; NaN where nothing was measured.

        Raises:
            UsageError: the metric, model, split or moment is unknown.

        """
        return accuracy_table(self.summary, metric, model, split, moment)

    def differences(self, baseline: str | None = None) -> pd.DataFrame:
        """Return each method's macro metric minus the baseline's (FedAvg, else the first), paired over seeds."""
        return difference_table(self.summary, baseline)

    def figures(self) -> dict[str, Figure]:
        """Return Matplotlib figures by name."""
        return make_figures(self.summary)

    def report(self, path: str | Path | None = None) -> Path:
        """Write the self-contained page (default ``report.html`` in the run directory) and return its path."""
        target = Path(path) if path else self.directory / "report.html"
        write_page(self.summary, target)
        return target

    def model(self, method: str, client: str | None = None, seed: int | None = None) -> nn.Module:
        """Return the network that ``client`` uses after training, or the server's (``client=None``).

        It is in evaluation mode; with ``select="best"`` it is that of the reported round. ``seed`` defaults to the
        first. Raises :class:`UsageError` where the method's server holds no whole model.
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

    def export(
        self, out: str | Path, *, method: str | None = None, client: str | None = None, seed: int | None = None,
        onnx: bool = True,
    ) -> Path:  # fmt: skip
        """Write a trained model for use elsewhere into the new directory ``out``, and return its path.

        Args:
            out: Directory to write: weights, a program that needs no fedshift, inputs and classes, a model card.
                :func:`fedshift.load` makes it a function.
            method: Method; None: the only one.
            client: Client whose model it is; None: the server's.
            seed: Seed; None: the first.
            onnx: Write the program in ONNX too, where it converts.

        Warns:
            UserWarning: a file could not be made, or answers differ from the records.

        Raises:
            UsageError: there is no such model.
            FedshiftError: files are damaged.

        """
        made = export_run(
            self.experiment, self.directory, Path(out), method=method, client=client, seed=seed, onnx=onnx
        )
        for notice in made.notices:
            warn(notice, stacklevel=2)
        return made.directory

    def adapt(
        self, data: Federation, policies: str | Sequence[str] | None = None, *, rounds: int = 1,
        methods: str | Sequence[str] | None = None,
    ) -> pd.DataFrame:  # fmt: skip
        """Return the results of each policy for new clients on the test data of the clients in ``data``.

        Args:
            data: clients that took no part, which are brought to the comparison's shape, scale and classes.
            policies: average, reestimate, nearest, finetune, finetune_bn; None: those that apply.
            rounds: rounds of local work under finetune and finetune_bn.
            methods: methods to adapt; None: all.

        Returns:
            The comparison's metric: rows are clients and their mean, ``macro``; columns are method and policy with
            mean, std and number of seeds.

        Warns:
            UserWarning: a client took part in training, or a model could not be made.

        Raises:
            UsageError: the data do not fit.
            FedshiftError: files are damaged.

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
        """Compare feature maps and BatchNorm of clients and server, as ``representations.compare_representations``."""
        go_on = "compare(..., out=..., resume=True)"
        experiment = select_trials(self.experiment, methods, seeds)
        return collect_comparison(experiment, self.directory, go_on, samples=samples, clients=clients, layer=layer)


@dataclass(frozen=True, kw_only=True)
class CompareArguments(SharedSpec):
    """Arguments of :func:`compare`: the settings of the command line, and these."""

    methods: Sequence[Method] = field(kw_only=False)
    """Methods to compare; those of one seed share initial weights and the order of samples."""

    data: Federation
    """Clients, for example ``digits()``, ``read_folder(path)`` or ``federation({...})``."""

    model: str | ModelFactory = Spec.model
    """Name of a network (``auto`` depends on the samples' shape), or a function ``(sample_shape, classes)`` that makes
    an ``nn.Module``."""

    seeds: int | Sequence[int] = Spec.seeds
    """Number of seeds (0, 1, ...), or the seeds."""

    batch_size: int | None = Spec.batch_size
    """Samples in a batch; None takes all of a client's."""

    optimizer: Optimizer | None = None
    """Local optimizer, for example ``SGD(lr=0.01, momentum=0.9)`` or ``AdamW(lr=1e-3)``; None: plain SGD, with ``lr``
    as its learning rate."""

    loss: str | Loss | nn.CrossEntropyLoss = Spec.loss
    """Training loss, an expression such as ``"focal(gamma=2.0, weights='balanced')"``, its value, or
    ``torch.nn.CrossEntropyLoss()``."""

    weights: str | Path | Mapping[str, torch.Tensor] | None = None
    """Weights from which every network starts, in place of random ones: a state dictionary, or a file of one,
    ``.safetensors`` or as ``torch.save`` writes it."""

    weights_skip_classifier: bool = Spec.weights_skip_classifier
    """Leave the last layer of ``weights`` out, as for other classes; it starts from random weights."""

    augment: str | Augmentation | None = Spec.augment
    """Augmentation of training images, an expression such as ``"flip(), rotate(degrees=30)"`` or its value."""

    newcomers: str | Sequence[str] = ()
    """Clients that never take part in training, a list of names or a pattern such as ``"usps-*"``."""

    moments: str | Sequence[str] = Spec.moments
    """Moments of an evaluated round at which clients' models are measured: ``"loaded"``, just after aggregation, or
    ``"loaded,trained"``, just after local work as well."""

    allow_single_class: bool = Spec.allow_single_class
    """Accept clients whose training data hold one class only."""

    out: str | Path | None = None
    """Run directory to keep; None: a temporary one that lives as long as the result."""

    resume: bool = False
    """Continue the run in ``out``."""

    observer: Observer | None = None
    """Callbacks for progress."""

    stop: Event | None = None
    """Event that ends the run after the round in progress once it is set."""


P = ParamSpec("P")
A = TypeVar("A")
R = TypeVar("R")


def _take_fields_of(kind: Callable[P, A]) -> Callable[[Callable[[A], R]], Callable[P, R]]:
    """Return a decorator that gives a function the fields of dataclass ``kind`` as its arguments, and their help."""

    def decorate(function: Callable[[A], R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in help_of:
                    raise TypeError(f"{function.__name__}(): {unknown_name('argument', name, help_of)}")
            return function(kind(*args, **kwargs))

        assert isinstance(kind, type)
        help_of, types = read_help(kind), get_type_hints(kind)
        found = [one.replace(annotation=types[one.name]) for one in inspect.signature(kind).parameters.values()]
        found.sort(key=lambda one: one.name not in vars(kind)["__annotations__"])
        lines = "\n".join(f"        {one.name}: {help_of[one.name]}" for one in found)
        call.__doc__ = str(function.__doc__).replace("    Returns:", f"    Args:\n{lines}\n\n    Returns:", 1)
        vars(call)["__signature__"] = inspect.Signature(found, return_annotation=function.__annotations__["return"])
        return call

    return decorate


@_take_fields_of(CompareArguments)
def compare(given: CompareArguments) -> Comparison:
    """Train every method with every seed on ``data`` and measure each client's test set after aggregation.

    The arguments are the fields of :class:`CompareArguments`.

    Returns:
        The :class:`Comparison`.

    Raises:
        UsageError: before anything starts, where data, model, methods or numbers do not fit.
        FedshiftError: where training diverges or the disk refuses.

    """
    data, model = given.data.fit_images().check(allow_single_class=given.allow_single_class), given.model
    experiment = Experiment(
        methods=tuple(given.methods),
        data=data,
        model=resolve_model(model, data.sample_shape) if isinstance(model, str) else _check_model(model),
        settings=resolve_settings(
            given,
            data.names,
            batch_size=given.batch_size,
            optimizer=given.optimizer or SGD(lr=given.lr),
            loss=as_loss(given.loss),
            augment=given.augment,
            weights=given.weights,
            skip_classifier=given.weights_skip_classifier,
            newcomers=given.newcomers,
            moments=given.moments,
        ),
        seeds=tuple(range(given.seeds)) if isinstance(given.seeds, int) else tuple(given.seeds),
        log=parse_loggers(given.log),
    )
    result = Comparison(experiment, Path(given.out or mkdtemp(prefix="fedshift-")))
    if not given.out:
        finalize(result, rmtree, result.directory, ignore_errors=True)
    experiment.run(result.directory, resume=given.resume, observer=given.observer, stop=given.stop)
    return result


def _check_model(model: ModelFactory) -> ModelFactory:
    if isinstance(model, nn.Module) or not callable(model):
        raise UsageError(
            f"model is a {type(model).__name__}: give a name, or a function (sample_shape, classes) -> nn.Module, "
            "which each seed calls for fresh weights"
        )
    return model
