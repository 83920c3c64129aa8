"""A site: it holds one client's data and state, which never leave it, and answers a coordinator's questions.

An answer contains the entries that the method's scope sends, the rules' uploads, numbers of samples, and counts of
correct predictions on the site's own test data. The site makes the same plan as the coordinator from the same settings,
and the sequential engine does the work with the same streams, so that results equal the results of ``fedshift run``,
bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import ValidationError

from ...analysis.privacy import find_mechanism
from ...config.expressions import trust_only
from ...config.spec import CompareSpec, DataSpec, RunSpec
from ...core.disclosure import check_upload
from ...core.kernel import init_server, trained_state
from ...core.plan import Plan
from ...core.states import ServerState
from ...data.agreement import name_scales
from ...data.copies import count_copies
from ...data.federation import Federation, count_labels, encode_targets
from ...data.joining import match_labels
from ...data.schema import Layout
from ...data.sources import SCALES, prepare_clients
from ...diagnosis.quality import check_data
from ...engines.engine import Diverged
from ...engines.frozen import FITTING, Inputs
from ...engines.sequential import Sequential
from ...evaluation.metrics import evaluate_clients, evaluate_trained
from ...evaluation.policy import POLICIES, SKIP, make_lone_state
from ...evaluation.statistics_lag import evaluate_reestimated
from ...evaluation.unseen_clients import make_personal_state
from ...experiments.factory import make_methods, make_settings, name_model, resolve_model
from ...experiments.initial_weights import as_initial_weights
from ...experiments.private_training import list_uncovered, refuse_uncovered
from ...experiments.settings import Settings, make_plan
from ...export.package import write_package
from ...models import ModelFactory
from ...results.run_directory import to_file_name
from ...results.schema import REESTIMATED, Row, compute_metric, is_of_numbers, metric_unit, name_metric, rows_to_frame
from ...tasks import CLASSIFICATION, TASKS, describe_task
from ...utils.allocator import keep_freed_memory
from ...utils.errors import FedshiftError, UsageError, as_flag
from ...utils.state import State, join_states, pick, split_state
from ...utils.version import __version__, find_series, is_own_series
from ..server.registry import COLUMNS
from ..transport.arrays import RefusedMessage, check_state, from_record, to_record
from ..transport.exchange import HEAD, UPLOAD, VERSION, Exchange, digest_records
from .account import FILE, Account, name_data
from .gate import Confirmation, Gate, Work
from .ledger import TRAINS, VALIDATES, Ledger
from .local_data import ALL_SITES, DataRefused, drop_training, holds_table, holds_test_alone, load_local
from .offer import refuse_identifying_classes
from .policy import SitePolicy
from .review import TrialReview
from .site_model import collect_site_model
from .site_state import Retention, SiteState

Say = Callable[[str], None]
Answer = Callable[[Exchange, "_Trial | None", Work | None], Exchange]
Checked = Callable[[Exchange, int], Exchange]
DATA = tuple(field.name for field in fields(DataSpec))
LESS_MEMORY = "give it more, or agree on smaller batches, images or a smaller network"


@dataclass(kw_only=True, eq=False)
class _Trial:
    """A site's objects for one method and seed of an experiment."""

    plan: Plan
    data: Federation
    inputs: Inputs
    engine: Sequential
    kept: SiteState
    model: ModelFactory
    settings: Settings
    review: TrialReview

    def follow(self, server: ServerState) -> None:
        """Train and measure on samples from now on if features do not fit the entries of ``server``."""
        if not self.inputs.fit(server):
            train = {client.name: client.train for client in self.data.clients}
            self.inputs = Inputs(plan=self.plan, train=train, measured=self.data)
            self.engine = replace(self.engine, plan=self.plan, data=train)

    def plan_work(self, facts: Mapping[str, Any], *, trains: bool) -> Work:
        """Return what a question with ``facts`` about the trial uses, and the client's state if it ``trains``."""
        samples = self.engine.data[self.kept.name]
        if not trains:
            return Work(review=self.review, settings=self.settings, samples=len(samples))
        client = self.kept.load_after(int(facts["base"]), str(facts.get(UPLOAD, "")))
        bounds, steps = self.engine.steps_of_round(self.kept.name, client)
        return Work(
            review=self.review, settings=self.settings, samples=len(samples), bounds=bounds, steps=steps, client=client
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Measured:
    """The model that the site's client used after ``round``, and its measurements here."""

    trial: _Trial
    state: State
    round: int
    rows: tuple[Row, ...]


class Site:
    """The client in ``data`` (see :func:`.local_data.load_local`), with its states below ``folder``.

    Args:
        data: path or name of the data.
        name: the client's name; None: derived from the path.
        folder: the site's own folder.
        device: torch device for the work.
        code: functions on this machine (``package.module:function``) that an experiment may name.
        weights: file with initial weights that an experiment may use; must be the same as the coordinator's.
        export: directory for the model of each trial, in the format of ``fedshift export``; None: write no models.
        checked: takes a question and its run number, and raises :class:`RefusedMessage` unless the question comes from
            the coordinator (``transport.signatures``).
        say: called with a line of text for each thing done.
        policy: what the site offers and does not allow.
        confirmation: asks before the first description and each method and seed; None: nobody is asked.
        key: signs the ledger; None: it is not signed.
        account: file of what the data were used for; None: ``account.json`` next to ``folder``.
        validates: whether it only validates: it trains nothing, and measures the models that it would use.
        retention: earlier states to keep, so that a coordinator that was restored from an older copy can continue.

    """

    def __init__(
        self, data: str, name: str | None, folder: Path, *, device: str = "cpu", code: frozenset[str] = frozenset(),
        weights: str | None = None, export: Path | None = None, checked: Checked = lambda asked, _: asked,
        say: Say = lambda _: None, policy: SitePolicy | None = None, confirmation: Confirmation | None = None,
        validates: bool = False, key: ec.EllipticCurvePrivateKey | None = None, account: Path | None = None,
        retention: Retention | None = None,
    ) -> None:  # fmt: skip
        self.data, self.name, self.folder, self.device = data, name, folder, device
        self.code, self.weights, self.checked, self.say = code, weights, checked, say
        self.export, self._exporting = export, Lock()
        self._latest: _Measured | None = None
        self._sources: dict[str, Federation] = {}
        self._trials: dict[str, _Trial] = {}
        self.policy, self.confirmation = policy or SitePolicy(), confirmation
        self.validates, self._test_alone = validates, validates and holds_test_alone(data)
        self.key, self.account, self.retention = key, account or folder.parent / FILE, retention
        self.answers: dict[str, Answer] = {
            "describe": self._describe, "introduce": self._introduce, "train": self._train,
            "evaluate": self._evaluate, "end": self._end,
        }  # fmt: skip

    @cached_property
    def gate(self) -> Gate:
        """Gate through which every question and answer passes."""
        return Gate(
            policy=self.policy, confirmation=self.confirmation,
            account=Account(self.account, *name_data(self.data, self.name)),
            ledger=Ledger(self.folder, VALIDATES if self.validates else TRAINS, self.key),
            say=lambda text: self.say(text),
        )  # fmt: skip

    def sign_with(self, key: ec.EllipticCurvePrivateKey) -> None:
        """Sign the ledger with ``key`` from now on."""
        self.key = key
        self.gate.ledger.sign_with(key)

    def answer(self, asked: Exchange) -> Exchange:
        """Return the answer to a coordinator's question, after writing it to the site's ledger.

        An answer of kind ``refused`` contains the reason for the refusal. A question that the coordinator did not sign
        is counted and refused.
        """
        gate = self.gate
        try:
            question = self.checked(asked, asked.run)
        except RefusedMessage as error:
            if _is_power(number := gate.account.count_unsigned()):
                self.say(f"refused: {error} ({number} such questions so far)")
            return Exchange(kind="refused", facts={"why": str(error)})
        facts = dict(question.facts)
        head, version = facts.pop(HEAD, None), str(facts.pop(VERSION, __version__))
        question = replace(question, facts=facts)
        answer, work = self._find_answer(question, version)
        return gate.record(question, answer, work, {**head, "version": version} if head else None)

    def _find_answer(self, question: Exchange, version: str) -> tuple[Exchange, Work | None]:
        work = None
        try:
            asks = self.gate.admit(question)
            if not is_own_series(version) and question.kind != "end":
                raise RefusedMessage(
                    f"the coordinator runs fedshift {version}, and this site {__version__}, which may compute other "
                    f"numbers: install fedshift {find_series(version)} here, or {find_series(__version__)} there"
                )
            trial = self._trial(question.facts["trial"], question.signer) if asks.of_trial else None
            if trial:
                work = trial.plan_work(question.facts, trains=asks.spends == "uploads" and asks.steps)
                work = self.gate.check(asks, question, work)
            answer = self.answers[question.kind](question, trial, work)
            return self.gate.release(asks, question, answer, work), work
        except DataRefused as error:
            self.say(f"refused: {error.render(as_flag)}")
            return _refuse("its data cannot be used: its log has the reason"), None
        except (FedshiftError, OSError) as error:
            why = error.render(as_flag) if isinstance(error, FedshiftError) else str(error)
            self.say(f"refused: {why}")
            return _refuse(why, diverged=isinstance(error, Diverged)), None
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            if _lacks_memory(error):
                why = f"this site has too little memory for the {question.kind} question: {LESS_MEMORY} ({why})"
            self.say(f"failed: {why}")
            return _refuse(why), None

    def _end(self, asked: Exchange, _trial: _Trial | None, _work: Work | None) -> Exchange:
        self.export_latest()
        return Exchange(kind="ended", facts={"say": asked.facts["say"]})

    def _describe(self, asked: Exchange, _trial: _Trial | None, _work: Work | None) -> Exchange:
        spec = self._make_spec(asked.facts["spec"])
        source = self._load_source(spec)
        data = self._prepare(source, spec)
        try:
            for line in check_data(data, "ignore" if self._test_alone else spec.on_data_error).notices:
                self.say(line)
        except UsageError as error:
            raise DataRefused("{}", error) from error
        client = data.clients[0]
        samples = {name: len(split) for name, split in client.splits.items() if name == "test" or not self.validates}
        told = self.policy.told
        counts = asked.facts["labels"] and data.task == CLASSIFICATION and not self.validates and told.class_counts
        facts = {
            "name": client.name, "version": __version__, "shape": data.sample_shape,
            "dtype": str(client.train.dtype).removeprefix("torch."), "classes": data.classes,
            "class_names": source.meanings, "columns": list(map(asdict, source.columns)),
            "samples": samples, "labels": told.round_counts(count_labels(data).tolist()) if counts else None,
            "task": describe_task(data.task), "validates": self.validates,
            "scale": next((name for name, scale in SCALES.items() if scale == client.train.normalization), ""),
            "values": {
                name: kind for name, kind in name_scales(client.splits).items() if name in samples and not data.inputs
            },
        }  # fmt: skip
        facts |= {"inputs": list(map(asdict, data.inputs))} if data.inputs else {}
        does = f"{VALIDATES}, on {len(client.test)} test samples"
        does = does if self.validates else f"{len(client.train)} training samples"
        self.say(f"in touch with the coordinator as {client.name!r}, {does}")
        return Exchange(kind="described", facts=facts)

    def export_latest(self) -> None:
        """Write the model that was measured last, if not yet written; say where, or why this is impossible."""
        with self._exporting:
            latest, self._latest = self._latest, None
            if self.export is None or latest is None:
                return
            trial = latest.trial
            place = self.export / trial.kept.folder.name
            try:
                model = collect_site_model(
                    trial.plan, trial.data, trial.settings, trial.model, latest.state, round=latest.round,
                    rows=latest.rows, sites=trial.review.sites,
                )  # fmt: skip
                report = write_package(model, place, renew=True)
                self.say(f"{place}: {', '.join(report.files)}")
                for text in (*report.checks, *report.notices):
                    self.say(text)
            except FedshiftError as error:
                self.say(f"the model of {trial.plan.method.label} is not exported: {error.render(as_flag)}")

    def _introduce(self, _asked: Exchange, trial: _Trial | None, _work: Work | None) -> Exchange:
        """Answer with what rules send once, before round 1: the same however often it is asked."""
        assert trial  # the gate made it
        update = trial.engine.introduce_client(trial.kept.name)
        check_upload(trial.plan, update.shared, update.memory, prelude=True)
        self.say(f"{trial.plan.method.name}, before round 1: {update.weight:.0f} samples")
        arrays = {"memory": to_record(join_states(trial.plan.rule_names, update.memory))}
        return Exchange(kind="introduced", facts={"name": trial.kept.name, "round": 0}, arrays=arrays)

    def _train(self, asked: Exchange, trial: _Trial | None, work: Work | None) -> Exchange:
        assert trial  # the gate made it
        assert work
        assert work.client
        server, base = self._broadcast(trial.plan, trial.plan.received, asked)
        round, client = server.round + 1, work.client
        trial.follow(server)
        with keep_freed_memory():
            trained = trial.engine.train_client(server, trial.kept.name, client)
        update = trained.update
        check_upload(trial.plan, update.shared, update.memory)
        arrays = {
            "shared": to_record(update.shared),
            "memory": to_record(join_states(trial.plan.rule_names, update.memory)),
        }
        upload = digest_records(arrays)
        trial.kept.save(trained.client, base, round, upload)
        loss = trained.loss_sum / update.weight
        again = f" (again: round {work.reached} was reached before)" if work.reached >= round else ""
        self.say(
            f"{trial.plan.method.label}, round {round}{again}: {update.weight:.0f} samples, training loss {loss:.4f}"
        )
        facts = {
            "name": trial.kept.name, "round": round, "weight": update.weight, "steps": update.steps,
            "loss_sum": trained.loss_sum, UPLOAD: upload,
        }  # fmt: skip
        if splits := tuple(asked.facts["splits"]):  # on these, the model is measured before aggregation
            state = trained_state(trial.plan, trained.client, update, server)
            facts["rows"] = evaluate_trained(
                trial.inputs.plan, state, trial.inputs.measured.clients, splits, trial.data.task, trial.data.classes
            )
        return Exchange(kind="trained", facts=facts, arrays=arrays)

    def _evaluate(self, asked: Exchange, trial: _Trial | None, _work: Work | None) -> Exchange:
        assert trial  # the gate made it
        plan, data = trial.plan, trial.data
        server, base = self._broadcast(plan, plan.sent if plan.has_global else plan.received, asked)
        if base or not plan.personalizes:
            kept, only = trial.kept.load_after(base, str(asked.facts.get(UPLOAD, ""))), data.clients[0]
            augment = trial.settings.augment
            own: State | None = make_personal_state(plan, kept, server, only.name, only.train, augment)
        else:
            own = self._make_unseen_state(trial, server)
        if asked.facts["moment"] == REESTIMATED:
            return self._evaluate_reestimated(trial, server, tuple(asked.facts["splits"]), own)
        if own is not None:
            trial.kept.export_model(own, server.round)
        splits = ("test",) if self.validates else tuple(asked.facts["splits"])
        trial.follow(server)
        rows = evaluate_clients(trial.inputs.plan, server, trial.inputs.measured, splits, lambda _: own)
        if own is not None:
            self._latest = _Measured(trial=trial, state=own, round=server.round, rows=tuple(rows))
            if server.round == trial.settings.rounds:
                self.export_latest()
        for row in rows:
            if (row["split"], row["model"]) == ("test", "personal"):
                metric = trial.settings.metric
                value, (factor, digits, unit) = (
                    float(compute_metric(rows_to_frame([row]), metric)[0]),
                    metric_unit(metric, numbers=is_of_numbers(row)),
                )
                said = f"{name_metric(metric)} {factor * value:.{digits}f} {'%' if unit == 'percent' else unit} here"
                if value != value:
                    said = f"{name_metric(metric)} is not defined by the test data here"
                self.say(f"{plan.method.label}, after round {server.round}: {said}")
        return Exchange(kind="evaluated", facts={"name": trial.kept.name, "round": server.round, "rows": rows})

    def _evaluate_reestimated(
        self, trial: _Trial, server: ServerState, splits: tuple[str, ...], own: State | None
    ) -> Exchange:
        """Return measurements of the client's model with its BatchNorm statistics re-estimated on its data."""
        data = trial.data
        training = {} if self.validates else {client.name: client.train for client in data.clients}
        rows = evaluate_reestimated(
            trial.plan, server, data.clients, training, splits, (data.task, data.classes), lambda _: own, alone=True
        )
        return Exchange(kind="evaluated", facts={"name": trial.kept.name, "round": server.round, "rows": rows})

    def _make_unseen_state(self, trial: _Trial, server: ServerState) -> State | None:
        """Return the model of a client that never trained, by the experiment's policy, or None if it makes none."""
        policy, client, data = trial.settings.unseen, trial.data.clients[0], trial.data
        if self.validates and policy != SKIP and POLICIES.parse(policy).trains:
            raise RefusedMessage(
                f"this site {VALIDATES}, and unseen={policy!r} trains: use unseen='average' or 'reestimate'"
            )
        measured = data.task, data.classes
        augment = trial.settings.augment
        return make_lone_state(
            trial.plan, server, policy, client.name, client.train, augment, measured, may_train=not self.validates
        )

    def _broadcast(self, plan: Plan, names: frozenset[str], asked: Exchange) -> tuple[ServerState, int]:
        """Return the broadcast, after checking its entries ``names`` and the rules' memory, and the client's base."""
        arrays = {kind: from_record(asked.arrays[kind]) for kind in ("shared", "memory")}
        check_state(arrays["shared"], pick(plan.initial, names), "the broadcast")
        bound = zip(plan.rule_names, plan.rules, strict=True)
        free = {f"{rule}/{entry}": axes for rule, each in bound for entry, axes in each.own.growing.items()}
        like = join_states(plan.rule_names, init_server(plan).memory)
        check_state(arrays["memory"], like, "the broadcast's rule memory", free)
        shared, memory = ({name: x.to(self.device) for name, x in state.items()} for state in arrays.values())
        server = ServerState(
            round=int(asked.facts["round"]), shared=shared, memory=split_state(plan.rule_names, memory)
        )
        return server, int(asked.facts["base"])

    def _trial(self, asked: Mapping[str, Any], signer: str) -> _Trial:
        key = json.dumps([asked, signer], sort_keys=True)
        if key not in self._trials:
            self._trials = {key: self._make_trial(asked, signer)}  # trials run one after another
        return self._trials[key]

    def _make_trial(self, asked: Mapping[str, Any], signer: str) -> _Trial:
        spec = self._make_spec(asked["spec"])
        classes = int(asked["classes"])
        layout = replace(ALL_SITES, columns=COLUMNS.validate_python(asked["columns"]))
        source = self._load_source(spec, layout)
        named = replace(layout, task=source.task, classes=classes, class_names=tuple(asked["class_names"]))
        try:
            source = match_labels(source, named, named.name)
        except UsageError as error:
            raise DataRefused("{}", error) from error
        data = self._prepare(source, spec).to(torch.device(self.device))
        client, seed = data.clients[0], int(asked["seed"])
        with trust_only(self.code):
            method, model = (
                make_methods(spec)[int(asked["method"])],
                resolve_model(spec.model, data.sample_shape, data.task, data.inputs),
            )
            settings = make_settings(spec, ())
            data = settings.request_metrics(data)
            settings = settings.for_task(data.task)
        plan = make_plan(
            method, model, settings, seed, sample=client.test.inputs(slice(0, 1)), classes=classes,
            labels=torch.tensor(asked["labels"] or [0] * classes), clients=int(asked["clients"]), task=data.task,
        )  # fmt: skip
        refuse_uncovered(plan, settings, data)
        experiment = str(asked["experiment"])
        if not experiment.isalnum():
            raise RefusedMessage(f"{experiment!r} is not the name of an experiment")
        # by name, so that a site finds its state however the experiment spells the method
        folder = self.folder / experiment / f"{to_file_name(method.name)}-seed{seed}"
        review = TrialReview(
            plan=plan,
            model=name_model(spec.model, data.sample_shape, data.task),
            seed=seed,
            rounds=settings.rounds,
            sites=int(asked["clients"]),
            code=self.code,
            validates=self.validates,
            samples=len(client.train),
            uncovered=list_uncovered(plan, settings, data),
            metrics=tuple(metric.name for metric in data.task.requested),
            copies=count_copies({client.name: client.train}) if find_mechanism((method.gradient,)) else 1,
            trial=f"{experiment}/{folder.name}",
            coordinator=signer,
            measured=sum(map(settings.is_evaluated, range(1, settings.rounds + 1))),
        )
        self.gate.agree(review, asked)
        samples = Inputs(plan=plan, train={client.name: client.train}, measured=data)
        inputs = samples.extract(settings.augment) if settings.unseen in FITTING else samples
        engine = Sequential(inputs.plan, inputs.train, seed, augment=settings.augment)
        kept = SiteState(folder, client.name, plan, data.fingerprint, self.retention)
        return _Trial(
            plan=plan, data=data, inputs=inputs, engine=engine, kept=kept, model=model, settings=settings, review=review
        )

    def _load_source(self, spec: DataSpec, layout: Layout = ALL_SITES) -> Federation:
        """Return the cached data; ``layout``: columns of all sites' tables (see :func:`.local_data.load_local`)."""
        key = json.dumps({name: getattr(spec, name) for name in DATA}, sort_keys=True) + repr(layout.columns)
        columns = self.policy.data.columns
        layout = replace(layout, only=None if columns is None else tuple(columns))
        if key not in self._sources:
            with trust_only(self.code):
                TASKS.parse(spec.task or CLASSIFICATION)  # raises for a local class that was not allowed
            alone = self._test_alone
            self._sources = {key: load_local(self.data, self.name, spec, self.folder, layout, test_alone=alone)}
        return self._sources[key]

    def _prepare(self, source: Federation, spec: DataSpec) -> Federation:
        """Return the data split, scaled and checked; without training samples if the site has only test samples."""
        if self._test_alone and spec.normalize == "client":
            raise UsageError("normalize='client' scales by training images, which this site lacks: add some")
        if self._test_alone:
            spec = replace(spec, samples=None, validation=DataSpec.validation, allow_single_class=True)
        data = encode_targets(prepare_clients(source, spec))
        data = drop_training(data) if self._test_alone else data
        try:
            refuse_identifying_classes(data)
            self.policy.told.check(data)
        except UsageError as error:
            raise DataRefused("{}", error) from error
        return data

    def _make_spec(self, given: Mapping[str, Any]) -> RunSpec | CompareSpec:
        """Return the coordinator's settings with this machine's own values for those that concern only this machine."""
        kind = RunSpec if "method" in given else CompareSpec
        own: dict[str, Any] = dict.fromkeys(("root", "domains", "split", "newcomers", "plan"))
        own |= {"data": self.data, "weights": self._find_weights(given.get("weights"))}
        try:
            made = kind(**{**given, **own, "device": self.device, "engine": "sequential", "workers": None})
        except (ValidationError, TypeError) as error:
            raise UsageError(
                f"the coordinator's settings are not understood by fedshift {__version__} here: {error}"
            ) from error
        return self.policy.data.apply(made, table=holds_table(self.data))

    def _find_weights(self, digest: str | None) -> str | None:
        """Return this machine's weights file; raise :class:`RefusedMessage` if its digest is not ``digest``."""
        if digest is None:
            return None
        own = as_initial_weights(self.weights)
        if own is None or own.digest != digest:
            which = f"others than {self.weights}" if own else "which are not here"
            raise RefusedMessage(
                f"the experiment starts from weights {which}: bring the coordinator's file here (--weights FILE)"
            )
        return self.weights


def _lacks_memory(error: Exception) -> bool:
    """Return whether memory ran out; torch has no error class for it on CPUs."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _refuse(why: str, *, diverged: bool = False) -> Exchange:
    return Exchange(kind="refused", facts={"why": why, "diverged": diverged})


def _is_power(number: int) -> bool:
    """Return whether ``number`` is a power of ten; frequent events are reported at these numbers only."""
    return set(str(number)[1:]) <= {"0"} and str(number)[0] == "1"
