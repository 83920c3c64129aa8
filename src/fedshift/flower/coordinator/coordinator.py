"""An experiment whose clients are behind Flower's grid.

Every round is saved in the run directory before the next begins, so the program may be killed at any time.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid
from typing_extensions import override

from ...config.seeds import parse_seeds
from ...config.spec import CompareSpec, RunSpec
from ...core.method import Method
from ...core.plan import Plan
from ...data.decoding.volumes import MEDIAN
from ...data.federation import Federation, count_labels
from ...engines.engine import Data
from ...experiments.callbacks import Callback, Callbacks
from ...experiments.experiment import Experiment
from ...experiments.factory import make_methods, make_settings, name_model, name_reference, resolve_model
from ...experiments.loggers import parse_loggers
from ...experiments.settings import Settings
from ...experiments.trial import RoundResult
from ...models import MODELS, LibraryModel
from ...report.formatting import format_bytes
from ...results.run_directory import MACHINES, POPULATION
from ...results.summary import holds_run, holds_summary
from ...utils.errors import FedshiftError, Ref, UsageError, as_flag
from ...utils.printable import to_printable
from ..keys import EndNotice, PublicKeys
from ..messages import Exchange
from .descriptions import ClientRegistry, RemoteFederation, SiteDescription
from .nodes import Nodes, StopRequested
from .remote_engine import RemoteEngine, RoundOptions
from .rounds import HistoryKeeper, describe_bound, repair

PARTING = 5.0
"""Seconds for which a finished experiment waits for sites, to inform them of its end."""
PRIVATE: dict[str, Any] = {"data": "", "root": None, "domains": None, "split": None, "newcomers": None, "log": None}
"""Settings that concern only the coordinator, with the values that sites see instead."""


class Progress(Callbacks):
    """Callbacks of the experiment, with the coordinator's own notices.

    ``stop``: end after this round. ``changed``: end the trial's work after this round, because sites came or all is to
    end. ``tls``: folder with the coordinator's certificate, whose end is announced.
    """

    def __init__(self, shown: Callback, stop: threading.Event, tls: Path | None = None) -> None:
        super().__init__(shown)
        self.stop, self.changed = stop, _Either(stop)
        self._ends = EndNotice(tls, self.on_notice)
        self._ends.check()

    @override
    def on_round_end(self, done: RoundResult) -> None:
        super().on_round_end(done)
        self._ends.check()
        moved = f"{format_bytes(done.down)} down, {format_bytes(done.up)} up, {done.seconds:.1f} s"
        self.on_notice(f"round {done.round}: {', '.join(done.participants)} took part; {moved}")


class _Either(threading.Event):
    """An event that is also set while another one is."""

    def __init__(self, other: threading.Event) -> None:
        super().__init__()
        self._other = other

    @override
    def is_set(self) -> bool:
        return super().is_set() or self._other.is_set()


class Coordinator:
    """Runs the experiment ``spec`` in ``directory`` with the sites behind ``grid``.

    ``options``: conditions of a round. ``keys``: returns the nodes' public keys; None: keys do not identify nodes.
    Raises :class:`UsageError` if the settings are impossible across machines.
    """

    def __init__(
        self, grid: Grid, spec: RunSpec | CompareSpec, directory: Path, options: RoundOptions, report: Progress,
        keys: PublicKeys | None = None,
    ) -> None:  # fmt: skip
        self.report, self.options, self.directory = report, options, directory
        self.order = tuple(name.strip() for name in spec.domains.split(",")) if spec.domains else ()
        weights = str(Path.cwd() / spec.weights) if spec.weights else None
        self.spec = replace(spec, engine="sequential", workers=None, weights=weights)
        settings = make_settings(replace(self.spec, newcomers=None), ())
        self.methods = make_methods(self.spec)
        _refuse_settings(self.spec, self.order, settings, self.methods)
        self.sent = {**asdict(self.spec), **PRIVATE, "weights": settings.weights and settings.weights.digest}
        self.refused: set[str] = set()
        self.path = directory / MACHINES / POPULATION
        begun = self.path.exists() or holds_run(directory)
        self.population = ClientRegistry.read(self.path) if begun else ClientRegistry()
        known = {client.name: client for client in self.population.clients}
        counts, experiment = bool(settings.loss and settings.loss.uses_counts), self.population.experiment
        hello = Exchange(kind="describe", facts={"experiment": experiment, "spec": self.sent, "labels": counts})
        self.nodes = Nodes(
            grid, hello, report.on_notice, known=known, changed=self._admit_newcomer, stop=report.stop, keys=keys
        )
        report.on_notice(f"experiment {experiment}: sites can restrict their policy to it (join --policy)")

    def run(self) -> bool:
        """Run until finished or stopped; return whether the experiment finished. Sites hear its end, or its error."""
        if begun := bool(self.population.clients) and holds_summary(self.directory):
            for notice in repair(self.directory, self.population.make_settings(self.spec)):
                self.report.on_notice(notice)
        try:
            self._finish(begun and self._make_experiment(self._to_federation()).is_trained(self.directory))
        except StopRequested:
            return False
        except FedshiftError as error:
            self._tell(f"the experiment cannot continue: {error.render(as_flag)}")
            raise
        self._tell("the experiment is finished", over=True)
        return True

    def _finish(self, done: bool) -> None:
        """Wait for sites, and do all work with them; raise :class:`StopRequested` if it is to be continued later.

        ``done``: all work that needs sites is done.
        """
        members = frozenset(client.name for client in self.population.training)
        clients = min(self.options.clients, len(members or self.order) or self.options.clients)
        if done:
            self.report.on_notice("all rounds are done: not waiting for sites")
        else:
            self.nodes.wait(clients, self.options.wait, members or frozenset(self.order) or None)
        while True:
            data = self._to_federation() if done else self._admit_waiting()
            self.report.changed.clear()
            if self.report.stop.is_set():
                raise StopRequested("stopped between two rounds")
            experiment = self._make_experiment(data)
            if not done:
                self._review(experiment, data)
            resume = (self.directory / "config.toml").exists()
            callback = Callbacks(HistoryKeeper(self.directory), self.report)
            if experiment.run(self.directory, resume=resume, callback=callback, stop=self.report.changed):
                break
        if done:  # also inform sites that connect soon
            with suppress(FedshiftError):
                self.nodes.wait(len(members), PARTING, members)

    def _tell(self, say: str, *, over: bool = False) -> None:
        """Tell all connected sites, and wait until each has heard it, for half a minute at most."""
        told = Exchange(kind="tell", facts={"say": to_printable(say), "over": over})
        for _ in self.nodes.ask(dict.fromkeys(self.nodes.online, told), 0, 30.0):
            pass

    def _to_federation(self) -> RemoteFederation:
        return self.population.to_federation(self.spec.classes, self.spec.task)

    def _review(self, experiment: Experiment, data: RemoteFederation) -> None:
        """Ask the sites whether they agree to each method, before anything is trained.

        Raises :class:`FedshiftError` naming the first method that too few sites accept, and each one's reason.
        """
        training = {client.name for client in self.population.training}
        enough = min(self.options.clients, len(training))
        for method in experiment.methods:
            question = Exchange(kind="review", facts={"trial": self._describe(data, method, experiment.seeds[0])})
            asked, refusals = dict.fromkeys(self.nodes.online & set(data.names), question), dict[str, str]()
            for name, answer in self.nodes.ask(asked, enough, self.options.seconds):
                if isinstance(answer, FedshiftError):
                    refusals[name] = str(answer)
                    self.nodes.say(f"{method.label}: {name} does not take part: {answer}", name)
            if len(training & asked.keys() - refusals.keys()) < enough:
                reasons = "; ".join(f"{name}: {why}" for name, why in sorted(refusals.items()))
                raise FedshiftError(
                    f"{method.label}: too few sites agree, since {enough} must (--min-clients): {reasons}. Nothing was "
                    "trained: change the settings, or have the sites change their policies"
                )

    def _describe(self, data: RemoteFederation, method: Method, seed: int) -> dict[str, Any]:
        """Return the facts that identify a trial in questions, so that a site makes the same plan."""
        return {
            "experiment": self.population.experiment, "spec": self.sent, "classes": data.classes,
            "class_names": data.meanings, "columns": list(map(asdict, data.columns)),
            "clients": len(self._find_members(data).clients), "labels": self._count_labels(data),
            "method": [each.name for each in self.methods].index(method.name), "seed": seed,
        }  # fmt: skip

    def _find_members(self, data: Federation) -> Federation:
        """Return the clients that train."""
        newcomers = self.population.make_settings(self.spec).newcomers
        return replace(data, clients=tuple(client for client in data.clients if client.name not in newcomers))

    def _count_labels(self, data: Federation) -> list[int] | None:
        """Return the training samples of each class; None unless sites counted them, which they do only on request."""
        members, counted = self._find_members(data), {site.name for site in self.population.clients if site.labels}
        return count_labels(members).tolist() if counted.issuperset(members.names) else None

    def _make_experiment(self, data: RemoteFederation) -> Experiment:
        settings = self.population.make_settings(self.spec)
        data = settings.request_metrics(data)
        if own := [metric.name for metric in data.task.requested if not metric.travels]:
            why = f"metric {own[0]} is code of this machine, which sites do not run: use another"
            raise UsageError(why).about("metric")
        if settings.loss and settings.loss.uses_counts and self._count_labels(data) is None:
            raise UsageError(
                f"loss {settings.loss}: its weights come from the number of samples of each class, which sites count "
                f"only for classification, not for {data.task}: give the weights as numbers"
            )

        def make_engine(plan: Plan, samples: Data, seed: int) -> RemoteEngine:
            return RemoteEngine(
                plan, samples, seed, federation=data, settings=settings, nodes=self.nodes, options=self.options,
                trial=self._describe(data, plan.method, seed),
            )  # fmt: skip

        return Experiment(
            methods=self.methods, data=data, settings=settings,
            model=resolve_model(self.spec.model, data.sample_shape, data.task, data.inputs),
            seeds=parse_seeds(self.spec.seeds), config=asdict(self.spec), make_engine=make_engine,
            log=parse_loggers(self.spec.log), compare_with=name_reference(self.spec, self.methods),
            margin=getattr(self.spec, "margin", None),
            origin={"fedshift at the sites": self.population.versions},
        )  # fmt: skip

    def _admit_waiting(self) -> RemoteFederation:
        """Admit connected clients whose data are compatible with the others'; return all admitted clients."""
        grown, waiting = self.population, self._find_new()
        if not grown.clients:  # training clients first, so that the others do not change what is trained
            grown = grown.add_clients([new for new in waiting if not new.validates], self.order)
            waiting = [new for new in waiting if new.validates]
        data = grown.to_federation(self.spec.classes, self.spec.task)
        for new in waiting:
            try:
                wider = grown.add_clients([new], self.order)
                joined = wider.to_federation(self.spec.classes, self.spec.task)
                if joined.columns != data.columns:
                    raise FedshiftError(f"{new.name!r} has {_extra_categories(joined, data)}, which the others lack")
                if joined.fingerprint != data.fingerprint:
                    raise FedshiftError(f"{new.name!r} has classes that the others lack")
            except FedshiftError as error:
                self.refused.add(new.name)
                self.nodes.say(f"{new.name} is not admitted: {error}", new.name)
            else:
                grown, data = wider, joined
        self.population = grown
        grown.write(self.path)
        sizes = {client.name: client.samples["train"] for client in grown.training}
        if bounded := describe_bound(sizes, self.options.max_share):
            self.nodes.say(bounded)
        return data

    def _find_new(self) -> list[SiteDescription]:
        """Return connected clients that are not yet admitted; if the settings name clients, only these."""
        members = {client.name for client in self.population.clients}
        names = sorted(self.nodes.online - members - self.refused)
        return [self.nodes.known[name] for name in names if not self.order or name in self.order]

    def _admit_newcomer(self) -> None:
        """Schedule new clients for admission after the current round, except those that the settings exclude.

        Also record the current versions of clients that have reconnected.
        """
        if (updated := self.population.update_versions(self.nodes.known)) != self.population:
            self.population = updated
            updated.write(self.path)
        for name in sorted(self.nodes.online - self.refused - set(self.order) if self.order else ()):
            self.refused.add(name)
            self.nodes.say(f"{name} does not take part: the settings name {', '.join(self.order)} (domains)", name)
        if self.population.clients and self._find_new():
            self.report.changed.set()


def _refuse_settings(
    spec: RunSpec | CompareSpec, order: tuple[str, ...], settings: Settings, methods: tuple[Method, ...]
) -> None:
    """Raise :class:`UsageError` for settings that are impossible across machines."""
    model = MODELS.parse(name_model(spec.model, ()))
    if isinstance(model, LibraryModel) and model.pretrained and not spec.normalize:
        raise UsageError(
            f"model {model}: sites scale images by name, not as its pretrained weights need: name the scaling that "
            "they were trained with ({})",
            Ref(normalize="imagenet"),
        )
    if any(set(name) & set("*?[!") for name in order):
        raise UsageError(
            "{}: patterns choose among data that are all here, and sites are not yet known: write each name",
            Ref(domains=spec.domains),
        )
    if spec.spacing == MEDIAN:
        raise UsageError(
            "{}: sites do not disclose the spacing of their voxels; give the millimeters, such as 1,1,3, or a plan "
            "made of the sites' counts (`fedshift plan`)",
            Ref(spacing=MEDIAN),
        )
    if settings.adapter and not settings.weights:
        raise UsageError(
            f"adapter {settings.adapter}: fixed layers are never sent, so that every machine needs the same: give a "
            "file with their weights, here and to each site ({})",
            Ref("weights"),
        )
    for method in methods:
        if method.pooled:
            raise UsageError(f"{method.label} needs all data in one place: omit it across machines")


def _extra_categories(joined: RemoteFederation, data: RemoteFederation) -> str:
    """List the categories in ``joined`` that are missing from ``data``, which has the same columns."""
    pairs = [(wide, column.categories or ()) for wide, column in zip(joined.columns, data.columns, strict=True)]
    extra = [(value, wide.name) for wide, known in pairs for value in wide.categories or () if value not in known]
    return ", ".join(f"{value!r} in column {name!r}" for value, name in extra)
