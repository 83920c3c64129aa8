"""Results of a comparison for Python: data frames, figures, the page, and the trained models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
import torch
from torch import Tensor, nn

from ..config.expressions import find_title
from ..config.spec import DataSpec
from ..console.printing import Console
from ..core.network import forward
from ..data.far_values import measure_training
from ..evaluation.policy import parse_policies
from ..experiments.cross_site import cross_validate
from ..experiments.experiment import Experiment
from ..experiments.python_settings import note_user_code, simplify
from ..experiments.restoration import find_method, restore_trial, select_trials
from ..experiments.trial import Trial
from ..export.loading import Predictor
from ..export.programs import require_samplewise
from ..export.source import export_run
from ..new_clients.policies import adapt_all
from ..new_clients.policy_tables import mean_over_seeds, seed_table
from ..new_clients.site_data import describe_newcomers, load_site
from ..nn.adapters import merge_adapters
from ..report.cases import tabulate_cases
from ..report.clinical import bin_calibration, count_confusions, find_positive, measure_classes, tabulate_benefit
from ..report.differences import compare_methods, list_frames
from ..report.figures import make_figures
from ..report.formatting import FEW, TextTable, rename, to_latex
from ..report.formatting import transpose as turn
from ..report.html import render_template
from ..report.page import make_metric_table, write_page
from ..report.publication import list_parts, print_parts
from ..report.survival import tabulate_survival
from ..report.tables import accuracy_table, cross_table, tabulate_history
from ..representations import RepresentationComparison, compare_representations
from ..results.schema import MOMENTS, RunSummary
from ..results.summary import read_summary
from ..tasks import find_kind
from ..utils.errors import FedshiftError, UsageError, unknown_name
from ..utils.state import State, load_entries
from ..utils.warning import warn_of
from ..utils.words import is_information

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Comparison:
    """Results of a comparison in ``directory``: tables as data frames, figures, a report page, the trained models.

    ``print`` shows the same tables as the command line, and a notebook shows them as HTML. ``experiment``: the
    experiment that was run, or a function that makes it when models are needed.
    """

    def __init__(self, experiment: Experiment | Callable[[], Experiment], directory: Path) -> None:
        self._experiment, self.directory = experiment, directory

    @property
    def experiment(self) -> Experiment:
        """The experiment, with its data, methods, model and settings."""
        if not isinstance(self._experiment, Experiment):
            with note_user_code():
                self._experiment = self._experiment()
        return self._experiment

    @property
    def summary(self) -> RunSummary:
        """All records so far, with a description of the run."""
        return read_summary(self.directory)

    @property
    def records(self) -> pd.DataFrame:
        """Measurements so far, one row for each client, round and model (columns: :mod:`fedshift.results.schema`)."""
        return self.summary.rows

    def __repr__(self) -> str:
        summary = self.summary
        return f"<Comparison of {', '.join(summary.methods)} on {summary.name} in {self.directory}>"

    def __str__(self) -> str:
        written = StringIO()
        print_parts(Console(file=written, width=1000), self._list_parts())
        return "\n".join(line.rstrip() for line in written.getvalue().splitlines()).strip("\n")

    def _repr_html_(self) -> str:
        return render_template("notebook.html.j2", parts=list(self._list_parts()))

    def _list_parts(self) -> Iterator[str | TextTable]:
        """Yield the run's notices, which the command line prints during the run, around its tables and sentences."""
        summary = self.summary
        yield from (f"note: {notice}" for notice in summary.notices if not is_information(notice))
        yield from list_parts(summary)
        yield from (f"note: {notice}" for notice in summary.notices if is_information(notice))

    def table(
        self,
        metric: str | None = None,
        model: Literal["personal", "global"] = "personal",
        split: Literal["test", "validation"] = "test",
        moment: Literal["loaded", "trained", "reestimated"] | None = None,
        number: int | None = None,
    ) -> pd.DataFrame:
        """Return the metric of each client and the aggregates (rows) by method (columns), at the reported round.

        Args:
            metric: metric to report; None: the comparison's.
            model: the model that each client would use, or the server's.
            split: samples to measure; choose learning rates and methods on ``validation``, if some were held out.
            moment: ``trained`` is available with ``moments="loaded,trained"``; ``loaded`` has running BatchNorm
                statistics, ``reestimated`` re-estimated ones; None: the reported ones of these two.
            number: a single mask class to measure, from 1; None: the mean over classes.

        Returns:
            Mean, std and number of seeds, as fractions in [0, 1]; NaN where nothing was measured.

        Raises:
            UsageError: the metric, model, split or moment is unknown.

        """
        return accuracy_table(self.summary, metric, model, split, moment, number)

    def to_latex(
        self,
        metric: str | None = None,
        model: Literal["personal", "global"] = "personal",
        split: Literal["test", "validation"] = "test",
        moment: Literal["loaded", "trained", "reestimated"] | None = None,
        *,
        caption: str | None = None,
        label: str | None = None,
        digits: int | None = None,
        transpose: bool | None = None,
        names: Mapping[str, str] | None = None,
    ) -> str:
        r"""Return :meth:`table` as LaTeX for a paper; it needs ``\usepackage{booktabs}``.

        Args:
            metric: metric to report; None: the comparison's.
            model: the model that each client would use, or the server's.
            split: samples to measure.
            moment: as in :meth:`table`.
            caption: caption of the table; None: a generated one that describes it; empty: the bare ``tabular``.
            label: label of the table; None: a generated one such as ``tab:accuracy``.
            digits: decimals; None: 2, and 3 for the loss.
            transpose: whether methods are rows and clients columns; None: if there are more than five methods.
            names: display names of methods and clients, by their names here. Other methods without arguments are
                written as in their papers: FedBN.

        """
        summary = self.summary
        self.table(metric, model, split, moment)  # raises if there is no such table
        shown = make_metric_table(summary, metric=metric, model=model, split=split, moment=moment, digits=digits)
        caption, label = (shown.caption if caption is None else caption), label or f"tab:{shown.file}"
        known = [*summary.methods, *summary.clients]
        if unknown := sorted(set(names or {}) - set(known)):
            raise unknown_name("method or client", unknown[0], known).about("names")
        text = rename(shown.text, {name: find_title("methods", name) for name in summary.methods} | dict(names or {}))
        turned = len(summary.methods) > FEW if transpose is None else transpose
        return to_latex(turn(text) if turned else text, caption, label)

    def history(
        self,
        metric: str | None = None,
        model: Literal["personal", "global"] = "personal",
        split: Literal["test", "validation"] = "test",
        moment: Literal["loaded", "trained"] = "loaded",
    ) -> pd.DataFrame:
        """Return the metric at every evaluated round, as fractions in [0, 1], one row for each measurement.

        Args:
            metric: metric to report; None: the comparison's.
            model: the model that each client would use, or the server's.
            split: samples to measure.
            moment: just after aggregation, or just after local work.

        Returns:
            Columns ``method``, ``seed``, ``round``, ``client`` and ``value``.

        Raises:
            UsageError: the metric, model, split or moment is unknown.

        """
        return tabulate_history(self.summary, metric, model, split, moment)

    def scope(self, method: str) -> pd.DataFrame:
        """Return how ``method`` treats each entry of the network (loaded, sent, trained), with its layer and bytes."""
        summary = self.summary
        return pd.DataFrame(summary.methods[find_method(method, summary)].entries).set_index("name")

    def differences(
        self, baseline: str | None = None, metric: str | None = None, model: Literal["personal", "global"] = "personal"
    ) -> pd.DataFrame:
        """Return each method's metric minus the baseline's, for the mean over clients (``macro``) and at each client.

        Args:
            baseline: method that others are compared with; None: FedAvg (else the first method), and ``single``.
            metric: metric to compare; None: the comparison's.
            model: the model that each client would use, or the server's.

        Returns:
            One row for each reference, method and client, with the columns of
            :func:`~fedshift.report.differences.compare_methods`: the difference, its 95 % interval, and its standard
            errors over seeds and over test units with their degrees of freedom. Values are fractions in [0, 1].

        Raises:
            UsageError: the baseline, metric or model is unknown.

        """
        summary = self.summary
        accuracy_table(summary, metric, model)  # raises if there is no such table
        if baseline is None:
            return pd.concat(list_frames(summary, metric, model) or {"": pd.DataFrame()}, names=["reference"])
        reference = find_method(baseline, summary)
        return pd.concat({reference: compare_methods(summary, reference, metric, model)}, names=["reference"])

    def cases(self, model: Literal["personal", "global"] = "personal") -> pd.DataFrame:
        """Return the result of each test sample, a row for each method, seed, client and sample, for other programs.

        Columns: method, seed, client, case, patient, truth, prediction, scores and losses, as
        :func:`~fedshift.report.cases.tabulate_cases` describes. Empty where sites keep the results of single samples.
        """
        return tabulate_cases(self.summary, model)

    def classes(
        self,
        method: str,
        *,
        positive: str | int | None = None,
        subgroups: Mapping[str, Sequence[object]] | None = None,
        model: Literal["personal", "global"] = "personal",
    ) -> pd.DataFrame:
        """Return sensitivity, specificity, predictive values, AUC and Brier score of each class, with 95 % intervals.

        Args:
            method: method to measure.
            positive: class that counts as positive, by name or number, from a score on that validation data choose
                (``operating_point``); None: of two classes the second, of more each against the rest, where the class
                of the highest score counts as predicted.
            subgroups: for each client a label for each test sample, such as the patient's sex, to measure by.
            model: the model that each client would use, or the server's.

        Returns:
            A row for each client (or subgroup), all together, and class; columns ``samples``, ``threshold`` and, for
            each measure, ``value``, ``low`` and ``high`` as fractions. Empty if there are no results of single samples.

        Raises:
            UsageError: the method or class is unknown, or subgroups do not fit.

        """
        summary = self.summary
        chosen = find_method(method, summary)
        return measure_classes(summary, chosen, positive=positive, model=model, subgroups=subgroups)

    def confusion(self, method: str, client: str | None = None) -> pd.DataFrame:
        """Return the number of test samples by class (rows) and predicted class (columns), mean over seeds.

        ``client``: only its samples; None: those of all clients. Raises :class:`UsageError` if either is unknown.
        """
        summary = self.summary
        return count_confusions(summary, find_method(method, summary), client)

    def calibration(self, method: str, *, positive: str | int | None = None, client: str | None = None) -> pd.DataFrame:
        """Return the calibration curve: number of samples, mean score and share of positives by tenth of the score.

        ``positive``: as for :meth:`classes`; of more classes than two, None takes the highest score and whether it is
        right. ``client``: only its test samples.
        """
        summary = self.summary
        return bin_calibration(summary, find_method(method, summary), find_positive(summary, positive), client=client)

    def decision_curve(
        self, method: str, *, positive: str | int | None = None, client: str | None = None
    ) -> pd.DataFrame:
        """Return the net benefit by threshold probability of ``method``, of calling all samples positive, and none.

        ``positive``: class that counts as positive, of two classes the second. Raises :class:`UsageError` without one.
        """
        summary = self.summary
        if (place := find_positive(summary, positive)) is None:
            raise UsageError("a decision curve is of one class: say which (positive=...)").about("positive")
        return tabulate_benefit(summary, find_method(method, summary), place, client=client)

    def survival(self, method: str) -> pd.DataFrame:
        """Return Kaplan-Meier curves of test patients in thirds by predicted risk, with 95 % intervals.

        Returns:
            A row for each third (``low risk``, ``middle risk``, ``high risk``) and time of an event, and for the last
            time; columns ``share`` (of patients without an event), ``low``, ``high`` and ``at_risk``. Empty unless the
            task is survival.

        Raises:
            UsageError: the method is unknown.

        """
        summary = self.summary
        return tabulate_survival(summary, find_method(method, summary))

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

        The network is in evaluation mode; with ``select="best"`` it is the one of the reported round. ``seed`` defaults
        to the first. Raises :class:`UsageError` if the method's server holds no complete model.
        """
        trial, state = self._restore(method, client, seed)
        network = trial.make_network()
        load_entries(network, state)
        return merge_adapters(network).eval()

    def predict(self, method: str, client: str | None, samples: Any, seed: int | None = None) -> Any:
        """Return the prediction of a model for one sample, or a list of predictions for several.

        Args:
            method: method whose model to use.
            client: client whose model and scaling to use; None: the server's model, with the scaling of all clients.
            samples: an image (file, PIL image or pixel array), a table row, an array, or several, as for a model that
                :func:`fedshift.load` returns; they are prepared as in training.
            seed: seed; None: the first.

        Returns:
            Names of classes or labels, numbers or masks, as :meth:`fedshift.export.loading.Predictor.predict` returns
            them.

        Raises:
            UsageError: there is no such method, client, model or seed, clients are scaled differently and none is
                named, the samples do not fit the model, or the prediction for a sample depends on others.

        """
        trial, state = self._restore(method, client, seed)
        require_samplewise(trial.make_network())
        data = trial.data
        if client is None and len({(each.train.normalization, each.decoding.window) for each in data.clients}) > 1:
            raise UsageError(
                f"each client's samples are scaled by its own statistics: name the client whose scaling these samples "
                f"have, one of {', '.join(data.names)}"
            )
        schema = data.schema if client is None else data.describe_client(data.client(client))
        prepare, plan = schema.preparation, trial.plan
        trained = data if client is None else replace(data, clients=(data.client(client),))
        usual = replace(prepare, measured=measure_training(trained, trial.settings.newcomers))

        def score(x: Tensor) -> Tensor:
            outputs = forward(plan, state, prepare.scale(x, plan.dtype).to(trial.settings.device)).cpu()
            return data.task.decode(outputs)

        return Predictor(usual, find_kind(data.task), schema.names, score, data.task).predict(samples)

    def _restore(self, method: str, client: str | None, seed: int | None) -> tuple[Trial, State]:
        """Return the trial of a method at the reported round, and the entries of a model in it."""
        if seed is not None and seed not in self.experiment.seeds:
            raise UsageError(f"no seed {seed} here: there are {', '.join(map(str, self.experiment.seeds))}")
        trial = restore_trial(
            self.experiment, self.directory, method, self.experiment.seeds[0] if seed is None else seed
        )
        state = trial.model_state(client)
        if state is None:
            raise UsageError(f"{method} has no global model: name a client, one of {', '.join(trial.data.names)}")
        return trial, state

    def export(
        self, out: str | Path, *, method: str | None = None, client: str | None = None, seed: int | None = None,
        onnx: bool = True,
    ) -> Path:  # fmt: skip
        """Write a trained model for use elsewhere into the new directory ``out``, and return its path.

        Args:
            out: Directory to write: weights, a program that needs no fedshift, inputs and classes, a model card.
                :func:`fedshift.load` makes it a function.
            method: Method; None: the only one.
            client: Client whose model to export; None: the server's.
            seed: Seed; None: the first.
            onnx: Also write the program in ONNX, if it can be converted.

        Warns:
            UserWarning: a file could not be made, or outputs differ from the records.

        Raises:
            UsageError: there is no such model.
            FedshiftError: files are damaged.

        """
        made = export_run(
            self.experiment, self.directory, Path(out), method=method, client=client, seed=seed, onnx=onnx
        )
        warn_of(made.notices)
        return made.directory

    def adapt(
        self, data: Any, policies: str | Sequence[str] | None = None, *, rounds: int = 1,
        methods: str | Sequence[str] | None = None,
    ) -> pd.DataFrame:  # fmt: skip
        """Return the results of each policy for new clients on the test data of the clients in ``data``.

        Args:
            data: clients that took no part, in any form that :func:`compare` accepts; they are converted to the
                comparison's shape, scale and classes.
            policies: names (``fedshift list policies``), some with arguments, "tent(steps=3)", or "package.module:name"
                of one's own; None: all that apply.
            rounds: rounds of local work of policies that train.
            methods: methods to adapt; None: all.

        Returns:
            The comparison's metric: rows are clients and their mean, ``macro``; columns are method and policy with
            mean, std and number of seeds.

        Warns:
            UserWarning: files were left out, the data have errors, a client took part in training, or a model could not
                be made.

        Raises:
            UsageError: the data do not fit the run.
            FedshiftError: files are damaged.

        """
        wanted, experiment = parse_policies(policies), select_trials(self.experiment, methods)
        if rounds < 1:
            raise UsageError(f"rounds={rounds}: must be at least 1")
        reading = {each.name: experiment.config.get(each.name, each.default) for each in fields(DataSpec)}
        with note_user_code():
            new = load_site(simplify("data", data), DataSpec(**reading), experiment.data.schema)
        new = new.to(torch.device(experiment.settings.device))
        training = {client.name: client.train for client in new.clients}
        made = adapt_all(experiment, self.directory, training, wanted, data=new, rounds=rounds)
        warn_of((*describe_newcomers(new, experiment), *made.notices, *(made.inapplicable if policies else ())))
        if made.failures:
            raise FedshiftError("; ".join(made.failures))
        return mean_over_seeds(seed_table(made.rows, experiment.settings.metric))

    def cross_site(
        self, moment: Literal["loaded", "trained"] = "loaded", *, methods: str | Sequence[str] | None = None,
        seeds: int | Sequence[int] | None = None,
    ) -> pd.DataFrame:  # fmt: skip
        """Measure each client's model on the test data of every client, and add the records to the comparison's.

        Later reports have a table for each method.

        Args:
            moment: ``loaded``: the models that clients would use, and the server's if it has a complete one;
                ``trained``: the clients' models after one more round of local work, before aggregation.
            methods: Methods to measure; None: all.
            seeds: How many of the first seeds, or a list of seeds; None: all.

        Returns:
            The comparison's metric as fractions in [0, 1]: rows are method and owner of the model, columns the client
            whose data were measured, with mean, std and number of seeds.

        Raises:
            UsageError: There is no such method or seed.
            FedshiftError: Files are damaged, or the additional round diverges.

        """
        if moment not in MOMENTS:
            raise unknown_name("moment", moment, MOMENTS).about("moment")
        chosen = select_trials(self.experiment, methods, seeds)
        cross_validate(chosen, self.directory, moment)
        summary = self.summary
        return pd.concat(
            {method.label: cross_table(summary, method.label, moment) for method in chosen.methods}, names=["method"]
        )

    def features(
        self,
        *,
        samples: int = 64,
        clients: str | Sequence[str] | None = None,
        layer: str | None = None,
        methods: str | Sequence[str] | None = None,
        seeds: int | Sequence[int] | None = None,
    ) -> RepresentationComparison:
        """Compare feature maps and BatchNorm of clients and server (:func:`.compare_representations`)."""
        go_on = "compare(..., out=..., resume=True)"
        experiment = select_trials(self.experiment, methods, seeds)
        return compare_representations(experiment, self.directory, go_on, samples=samples, clients=clients, layer=layer)
