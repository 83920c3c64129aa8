"""A site: it holds one client's data and state, which never leave it, and answers a coordinator's questions.

An answer contains the entries that the method's scope sends, the rules' uploads, numbers of samples, and counts of
correct predictions on the site's own test data. The site makes the same plan as the coordinator from the same settings,
and the sequential engine does the work with the same streams, so that results equal the results of ``fedshift run``,
bit for bit. Texts of errors may quote the data, so that only :class:`~fedshift.flower.messages.RefusedMessage` leaves
in words; of other errors, the kind and the number do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from ...analysis.privacy import find_mechanism
from ...config.expressions import trust_only
from ...config.seeds import parse_seeds
from ...config.spec import CompareSpec, DataSpec, RunSpec
from ...core.states import ClientState
from ...data.agreement import name_scales
from ...data.checks.quality import check_data
from ...data.copies import count_copies
from ...data.federation import Federation, count_labels, encode_targets
from ...data.joining import match_labels
from ...data.schema import Layout
from ...data.sources import SCALES, prepare_clients
from ...engines.engine import Diverged
from ...experiments.factory import make_methods, make_settings, name_model, resolve_model
from ...experiments.initial_weights import as_initial_weights
from ...experiments.private_training import list_uncovered, refuse_uncovered
from ...experiments.settings import make_plan
from ...results.run_directory import to_file_name
from ...tasks import CLASSIFICATION, TASKS, describe_task
from ...utils.errors import FedshiftError, UsageError
from ...utils.printable import to_printable
from ...utils.version import __version__, find_series, is_own_series
from ..messages import UPLOAD, VERSION, Exchange, RefusedMessage, refusing
from .data import ALL_SITES, COLUMNS, drop_training, holds_table, holds_test_alone, load_local
from .gate import SPLITS, Gate
from .policy import SitePolicy, refuse_identifying_classes
from .record import FILE, Record, RecordFailed, name_data
from .review import VALIDATES, TrialReview
from .state import KEEP_ROUNDS, SiteState
from .trial import SiteTrial, as_setting, understanding

Say = Callable[[str], None]
DATA = tuple(field.name for field in fields(DataSpec))
LESS_MEMORY = "give it more, or agree on smaller batches, images or a smaller network"


class Site:
    """The client ``name`` in ``data`` (see :func:`.data.load_local`), with its states below ``folder``.

    Args:
        data: path or name of the data.
        name: the client's name; None: derived from the path.
        folder: the site's own folder.
        device: torch device for the work.
        code: functions on this machine (``package.module:function``) that an experiment may name.
        weights: file with initial weights that an experiment may use; must be the same as the coordinator's.
        export: directory for the model of each trial, in the format of ``fedshift export``; None: write no models.
        say: called with a line of text for each thing done.
        policy: what the site offers and does not allow.
        confirm: asks before the first description and each method and seed (:class:`~.gate.Gate`); None: nobody is.
        account: file of what the data were used for; None: ``record.db`` next to ``folder``.
        validates: whether it only validates: it trains nothing, and measures the models that it would use.
        keep_rounds: number of states to keep of each trial.
        coordinator: address of the coordinator, for consent.

    """

    def __init__(
        self, data: str, name: str | None, folder: Path, *, device: str = "cpu", code: frozenset[str] = frozenset(),
        weights: str | None = None, export: Path | None = None, say: Say = lambda _: None,
        policy: SitePolicy | None = None, confirm: Callable[[str, str], bool] | None = None, validates: bool = False,
        account: Path | None = None, keep_rounds: int = KEEP_ROUNDS, coordinator: str = "",
    ) -> None:  # fmt: skip
        self.data, self.name, self.folder, self.device = data, name, folder, device
        self.code, self.weights, self.say, self.coordinator = code, weights, say, coordinator
        self.export, self._exporting, self._described = export, Lock(), ""
        self._sources, self._trials = dict[str, Federation](), dict[str, SiteTrial]()
        self.policy, self.confirm = policy or SitePolicy(), confirm
        self.validates, self._test_alone = validates, validates and holds_test_alone(data)
        self.account, self.keep_rounds = account or folder.parent / FILE, keep_rounds

    @cached_property
    def gate(self) -> Gate:
        """Gate through which every question and answer passes."""
        return Gate(
            policy=self.policy, confirm=self.confirm, validates=self.validates, coordinator=self.coordinator,
            record=Record(self.account, *name_data(self.data, self.name)), say=lambda text: self.say(text),
        )  # fmt: skip

    def answer(self, question: Exchange) -> Exchange:
        """Return the answer to a coordinator's question, after writing it to the site's record.

        An answer of kind ``refused`` contains the reason for the refusal. Raises :class:`RecordFailed` if the record
        cannot be written.
        """
        facts = dict(question.facts)
        version = str(facts.pop(VERSION, __version__))
        try:
            return self._find_answer(replace(question, facts=facts), version)
        except RecordFailed:
            raise
        except RefusedMessage as error:
            if error.here:
                self.say(error.here)
            return self.gate.refuse(error.render(as_setting))
        except Diverged as error:
            return self.gate.refuse(error.render(as_setting), diverged=True)
        except Exception as error:
            text = error.render(as_setting) if isinstance(error, FedshiftError) else f"{type(error).__name__}: {error}"
            self.say(text)
            return self.gate.refuse(_name_kind(error, question.kind))

    def _find_answer(self, question: Exchange, version: str) -> Exchange:
        asks = self.gate.admit(question)
        if not is_own_series(version) and question.kind != "tell":
            raise RefusedMessage(
                f"the coordinator runs fedshift {version}, and this site {__version__}, which may compute other "
                f"numbers: install fedshift {find_series(version)} here, or {find_series(__version__)} there"
            )
        if question.kind == "tell":
            self._hear(question)
            return Exchange(kind="told")
        if not asks.of_trial:
            return self.gate.release(asks, question, self._describe(question), None, None, self._described)
        trial, client = self._trial(question.facts["trial"]), None
        if asks.uploads:
            client = trial.kept.load_after(int(question.facts["base"]), str(question.facts.get(UPLOAD, "")))
        if asks.spends:
            self.gate.check(asks, question, trial, client)
        return self.gate.release(asks, question, self._work(question, trial, client), trial, client)

    def _work(self, question: Exchange, trial: SiteTrial, client: ClientState | None) -> Exchange:
        """Do what a question about a trial asks, and say it."""
        label = trial.plan.method.label
        if question.kind == "review":
            return Exchange(kind="agreed", facts={"name": trial.kept.name})
        if client is not None:
            answer, reached = trial.train(question, client), self.gate.record.reached(trial.review.trial)[0]
            weight, round = answer.facts["weight"], answer.facts["round"]
            again = f" (again: round {reached} was reached before)" if reached >= round else ""
            loss = answer.facts["loss_sum"] / weight
            self.say(f"{label}, round {round}{again}: {weight:.0f} samples, training loss {loss:.4f}")
        else:
            answer = trial.evaluate(question)
            for text in trial.describe_results(answer) if question.facts["moment"] == "loaded" else ():
                self.say(text)
            if answer.facts["round"] == trial.settings.rounds:
                self.export_latest()
        return answer

    def _hear(self, asked: Exchange) -> None:
        """Print a message of the coordinator; at the end of the experiment, write the last model."""
        self.say(f"message of the coordinator: {to_printable(str(asked.facts.get('say')))}")
        if asked.facts.get("over"):
            self.export_latest()

    def _describe(self, asked: Exchange) -> Exchange:
        spec = self._make_spec(asked.facts["spec"])
        source = self._load_source(spec)
        data = self._prepare(source, spec)
        for line in check_data(data, "ignore" if self._test_alone else spec.on_data_error).notices:
            self.say(line)
        client, told = data.clients[0], self.policy.told
        samples = {name: len(split) for name, split in client.splits.items() if name == "test" or not self.validates}
        least = self.policy.limits.least_samples
        for name, number in samples.items():
            if name in SPLITS and number < least:
                self.say(
                    f"no model is measured on the {number} {name} samples: the policy asks for {least} (least_samples)"
                )
        counts = asked.facts["labels"] and data.task == CLASSIFICATION and not self.validates and told.class_counts
        values = {} if data.inputs else name_scales(client.splits)
        facts = {
            "name": client.name, "version": __version__, "shape": data.sample_shape, "classes": data.classes,
            "dtype": str(client.train.dtype).removeprefix("torch."), "class_names": source.meanings,
            "columns": list(map(asdict, source.columns)), "task": describe_task(data.task), "samples": samples,
            "labels": told.round_counts(count_labels(data).tolist()) if counts else None, "validates": self.validates,
            "measures": [name for name in SPLITS if samples.get(name, 0) >= least],
            "scale": next((name for name, scale in SCALES.items() if scale == client.train.normalization), ""),
            "values": {name: values[name] for name in values if name in samples},
            "inputs": list(map(asdict, data.inputs)), "files": client.decoding.kind, "window": client.decoding.window,
        }  # fmt: skip
        self._described = data.fingerprint
        does = f"{VALIDATES}, on {samples['test']} test samples"
        does = does if self.validates else f"{samples['train']} training samples"
        self.say(f"in touch with the coordinator as {client.name!r}, {does}")
        return Exchange(kind="described", facts=facts)

    def export_latest(self) -> None:
        """Write the model that was measured last, if not yet written; say where, or why this is impossible."""
        with self._exporting:
            for trial in self._trials.values():
                for text in trial.export_latest(self.export):
                    self.say(text)

    def _trial(self, asked: Mapping[str, Any]) -> SiteTrial:
        key = json.dumps(asked, sort_keys=True)
        if key not in self._trials:
            self._trials = {key: self._make_trial(asked)}  # trials run one after another
        return self._trials[key]

    def _make_trial(self, asked: Mapping[str, Any]) -> SiteTrial:
        spec, experiment = self._make_spec(asked["spec"]), str(asked["experiment"])
        if not experiment.isalnum():
            raise RefusedMessage(f"{experiment!r} is not the name of an experiment")
        seeds, seed = parse_seeds(spec.seeds), int(asked["seed"])
        if seed not in seeds:
            raise RefusedMessage(f"the experiment has seeds {', '.join(map(str, seeds))}, and not {seed}")
        with trust_only(self.code), understanding():
            method, settings = make_methods(spec)[int(asked["method"])], make_settings(spec, ())
        layout = replace(ALL_SITES, columns=COLUMNS.validate_python(asked["columns"]))
        source, classes = self._load_source(spec, layout), int(asked["classes"])
        named = replace(layout, task=source.task, classes=classes, class_names=tuple(asked["class_names"]))
        data = self._prepare(match_labels(source, named, named.name), spec).to(torch.device(self.device))
        client = data.clients[0]
        with trust_only(self.code), understanding():
            model = resolve_model(spec.model, data.sample_shape, data.task, data.inputs)
            data = settings.request_metrics(data)
            settings = settings.for_task(data.task)
            plan = make_plan(
                method, model, settings, seed, sample=client.test.inputs(slice(0, 1)), classes=classes,
                labels=torch.tensor(asked["labels"] or [0] * classes), clients=int(asked["clients"]), task=data.task,
            )  # fmt: skip
            refuse_uncovered(plan, settings, data)
        # by name, so that a site finds its state however the experiment spells the method
        folder = self.folder / experiment / f"{to_file_name(method.name)}-seed{seed}"
        review = TrialReview(
            plan=plan, model=name_model(spec.model, data.sample_shape, data.task), seeds=len(seeds), code=self.code,
            rounds=settings.rounds, measured=sum(map(settings.is_evaluated, range(1, settings.rounds + 1))),
            sites=int(asked["clients"]), samples=len(client.train), uncovered=list_uncovered(plan, settings, data),
            metrics=tuple(metric.name for metric in data.task.requested), validates=self.validates,
            copies=count_copies({client.name: client.train}) if find_mechanism(method.rules, clients=False) else 1,
            trial=f"{experiment}/{folder.name}",
        )  # fmt: skip
        self.gate.agree(review, asked, data.fingerprint)
        kept = SiteState(folder, client.name, plan, data.fingerprint, self.keep_rounds)
        return SiteTrial(plan=plan, data=data, model=model, settings=settings, review=review, kept=kept)

    def _load_source(self, spec: DataSpec, layout: Layout = ALL_SITES) -> Federation:
        """Return the cached data; ``layout``: columns of all sites' tables (see :func:`.data.load_local`)."""
        key = json.dumps({name: getattr(spec, name) for name in DATA}, sort_keys=True) + repr(layout.columns)
        columns = self.policy.data.columns
        layout = replace(layout, only=None if columns is None else tuple(columns))
        if key not in self._sources:
            with trust_only(self.code), understanding():
                TASKS.parse(spec.task or CLASSIFICATION)  # raises for a local class that was not allowed
            alone = self._test_alone
            self._sources = {key: load_local(self.data, self.name, spec, self.folder, layout, test_alone=alone)}
        return self._sources[key]

    def _prepare(self, source: Federation, spec: DataSpec) -> Federation:
        """Return the data split, scaled and checked; without training samples if the site has only test samples."""
        if self._test_alone and spec.normalize == "client":
            raise RefusedMessage("normalize='client' scales by training images, which this site lacks: add some")
        if self._test_alone:
            spec = replace(spec, samples=None, validation=DataSpec.validation, allow_single_class=True)
        data = encode_targets(prepare_clients(source, spec))
        data = drop_training(data) if self._test_alone else data
        refuse_identifying_classes(data)
        self.policy.told.check(data)
        return data

    def _make_spec(self, given: Mapping[str, Any]) -> RunSpec | CompareSpec:
        """Return the coordinator's settings with this machine's own values for those that concern only this machine."""
        kind = RunSpec if "method" in given else CompareSpec
        own: dict[str, Any] = dict.fromkeys(("root", "domains", "split", "newcomers", "plan"))
        own |= {"data": self.data, "weights": self._find_weights(given.get("weights"))}
        own |= {"device": self.device, "engine": "sequential", "workers": None}
        with refusing(f"the coordinator's settings are not understood by fedshift {__version__} here"):
            spec = kind(**{**given, **own})
        return self.policy.data.apply(spec, table=holds_table(self.data))

    def _find_weights(self, digest: str | None) -> str | None:
        """Return this machine's weights file; raise :class:`RefusedMessage` if its digest is not ``digest``."""
        if digest is None:
            return None
        own = as_initial_weights(self.weights)
        if own is None or own.digest != digest:
            raise RefusedMessage(
                f"the experiment starts from weights that are not here{' (another file is)' if own else ''}: bring the "
                "coordinator's file to this site (--weights FILE)"
            )
        return self.weights


def _name_kind(error: Exception, question: str) -> str:
    """Return the kind of an error and a count, which may leave in place of its text."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return f"this site has too little memory for the {question} question: {LESS_MEMORY}"
    if not isinstance(error, UsageError | OSError):
        return f"the {question} question failed ({type(error).__name__}): this site's log has the reason"
    counted = re.match(r"\d+( of \d+)? (errors?|files?)\b", str(error))
    return f"its data cannot be used ({counted[0] if counted else '1 error'}): this site's log has the reason"
