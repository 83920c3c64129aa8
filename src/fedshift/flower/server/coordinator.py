"""The app that ``fedshift serve`` submits to its SuperLink: an experiment whose clients are behind Flower's grid.

It reports progress to ``fedshift serve`` over a local socket and exits when ``fedshift serve`` does. Every round is
saved in the run directory before the next begins, so the app may be killed at any time.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial, partialmethod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from typing_extensions import override

from ...config.expressions import trust_only
from ...config.seeds import parse_seeds
from ...config.spec import CompareSpec, RunSpec
from ...core.kernel import init_server
from ...core.plan import Plan
from ...data.federation import count_labels
from ...data.files.volume_decoding import MEDIAN
from ...engines.engine import Data
from ...evaluation.communication import downlink_bytes, list_disclosures
from ...experiments.callbacks import Callback, Callbacks
from ...experiments.experiment import Experiment
from ...experiments.factory import make_methods, make_settings, name_model, name_reference, resolve_model
from ...experiments.loggers import parse_loggers
from ...experiments.trial import RoundResult
from ...models import MODELS, LibraryModel
from ...results.run_directory import MACHINES, POPULATION, trial_folder
from ...results.summary import holds_run, holds_summary
from ...utils.errors import FedshiftError, Ref, UsageError, as_flag
from ..transport.exchange import FACTS, Exchange, connect_locally
from ..transport.firewall import allow_uploads, write_sizes
from ..transport.pki import PublicKeys
from ..transport.signatures import Signer, fingerprint
from .anchors import FILE, Anchors
from .claims import MAX_SHARE, judge_claims
from .history import HistoryKeeper, SpoiledModel, TrialHistory, list_histories
from .nodes import Nodes, StopRequested
from .outliers import BOUND
from .registry import ClientRegistry, RemoteFederation, SiteDescription
from .remote_engine import RemoteEngine

COORDINATOR = "FEDSHIFT_COORDINATOR"
"""Environment variable with the path of the socket on which ``fedshift serve`` listens."""
PARTING = 5.0
"""Seconds for which a finished experiment waits for sites, to inform them of its end."""
PRIVATE: dict[str, Any] = {"data": "", "root": None, "domains": None, "split": None, "newcomers": None, "log": None}
"""Settings that concern only the coordinator, with the values that sites see instead."""

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment described in the run's configuration."""
    sys.path.append("")  # the directory where `fedshift serve` was started, with the user's methods and models
    with connect_locally(Path(os.environ[COORDINATOR])) as connection:
        order = json.loads(connection.recv_bytes())
        spec = read_submission(str(context.run_config[FACTS]), order["settings"])
        report = ProgressReport(connection)
        try:
            with trust_only(order["code"], order["file"]):
                finished = Coordinator(grid, spec, order, report, context.run_id).run()
        except FedshiftError as error:
            report.send("failed", error.render(as_flag), isinstance(error, UsageError))
            raise
        report.send("ended", finished)


def read_submission(settings: str, expected: str) -> RunSpec | CompareSpec:
    """Return a run's settings; raise :class:`FedshiftError` unless `fedshift serve` submitted them.

    Anyone who can reach a SuperLink can submit a run, and settings may name any function on this machine.
    """
    if settings != expected:
        raise FedshiftError("refused a run that `fedshift serve` did not submit: its settings differ")
    fields = json.loads(settings)
    return RunSpec(**fields) if "method" in fields else CompareSpec(**fields)


class ProgressReport(Callback):
    """Forwards a callback's events over ``connection``, and exits when the process at the other end exits."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.stop, self.changed = connection, threading.Event(), threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, event: str, *values: Any) -> None:
        """Send one message."""
        self.connection.send_bytes(json.dumps([event, *values]).encode())

    def _listen(self) -> None:
        try:
            self.connection.recv_bytes()  # the only message is the request to stop
        except (EOFError, OSError):
            os._exit(1)
        self.stop.set()
        self.changed.set()

    @override
    def on_round_end(self, done: RoundResult) -> None:
        self.send("on_round_end", asdict(done))

    # The arguments of these events are JSON values, which are sent unchanged.
    on_run_begin = partialmethod(send, "on_run_begin")
    on_trial_begin = partialmethod(send, "on_trial_begin")
    on_recorded = partialmethod(send, "on_recorded")
    on_client_end = partialmethod(send, "on_client_end")
    on_trial_end = partialmethod(send, "on_trial_end")
    on_notice = partialmethod(send, "on_notice")
    alert = partialmethod(send, "alert")


class Coordinator:
    """Runs the experiment ``spec`` with the sites behind ``grid``.

    ``order`` has these keys: ``directory`` (run directory), ``clients`` (minimum number of clients in a round),
    ``seconds`` (maximum duration of a round), ``wait`` (seconds to wait for the first clients to connect),
    ``update_bound`` (maximum ratio of a client's update length to the others'; 0: no limit), ``max_share`` (maximum
    weight of one client among three or more), ``home`` (the SuperLink's folder), and ``keys`` (directory with the
    coordinator's keys and the nodes' public keys; None: questions are unsigned, and keys do not identify nodes).
    ``run`` is Flower's run number.
    """

    def __init__(
        self, grid: Grid, spec: RunSpec | CompareSpec, order: dict[str, Any], report: ProgressReport, run: int
    ) -> None:
        self.report, self.wait = report, float(order["wait"])
        self.directory = Path(order["directory"])
        self.order = tuple(name.strip() for name in spec.domains.split(",")) if spec.domains else ()
        weights = str(Path.cwd() / spec.weights) if spec.weights else None
        self.spec = replace(spec, engine="sequential", workers=None, weights=weights)
        self.min_clients, self.seconds = int(order["clients"]), float(order["seconds"])
        self.update_bound = float(order.get("update_bound", BOUND))
        self.max_share = float(order.get("max_share", MAX_SHARE))
        settings = make_settings(replace(self.spec, newcomers=None), ())
        make_methods(self.spec)  # report methods that cannot be made before waiting for sites
        model = MODELS.parse(name_model(self.spec.model, ()))
        if isinstance(model, LibraryModel) and model.pretrained and not self.spec.normalize:
            raise UsageError(
                f"model {model}: sites scale images by name, not as its pretrained weights need: name the scaling that "
                "they were trained with ({})",
                Ref(normalize="imagenet"),
            )
        if any(set(name) & set("*?[!") for name in self.order):
            raise UsageError(
                "{}: patterns choose among data that are all here, and sites are not yet known: write each name",
                Ref(domains=spec.domains),
            )
        if self.spec.spacing == MEDIAN:
            raise UsageError(
                "{}: sites do not tell how far their voxels are apart; give the millimeters, such as 1,1,3, or a plan "
                "made of the sites' counts (`fedshift plan`)",
                Ref(spacing=MEDIAN),
            )
        if settings.adapter and not settings.weights:
            raise UsageError(
                f"adapter {settings.adapter}: fixed layers are never sent, so that every machine needs the same: "
                "give a file with their weights, here and to each site ({})",
                Ref("weights"),
            )
        self.sent = {**asdict(self.spec), **PRIVATE, "weights": settings.weights and settings.weights.digest}
        self.refused: set[str] = set()
        self.path = self.directory / MACHINES / POPULATION
        begun = self.path.exists() or holds_run(self.directory)
        self.population = ClientRegistry.read(self.path) if begun else ClientRegistry()
        known = {client.name: client for client in self.population.clients}
        counts, experiment = bool(settings.loss and settings.loss.uses_counts), self.population.experiment
        hello = Exchange(kind="describe", facts={"experiment": experiment, "spec": self.sent, "labels": counts})
        secured: dict[str, Any] = {}
        signer = None
        if order["keys"]:
            keys = Path(order["keys"])
            signer = Signer(keys, run)
            secured = {"keys": PublicKeys(keys, report.on_notice), "signed": signer}
        self.home = Path(order["home"]) if order.get("home") else None
        if self.home:
            secured["allow"] = partial(allow_uploads, self.home)
        self.nodes = Nodes(
            grid, hello, report.on_notice, known=known, changed=self._admit_newcomer, stop=report.stop,
            anchors=Anchors(self.path.with_name(FILE), experiment, signer.key if signer else None, report.on_notice),
            alert=report.alert, **secured,
        )  # fmt: skip
        whose = f", with the key {fingerprint(signer.key.public_key())}" if signer else ""
        report.on_notice(f"experiment {experiment}{whose}: sites can restrict their policy to it (join --policy)")

    def run(self) -> bool:
        """Run until finished or stopped; return whether the experiment finished."""
        self._repair()
        members = frozenset(client.name for client in self.population.training)
        clients = min(self.min_clients, len(members or self.order) or self.min_clients)
        done = self._is_trained()
        if done:
            self.report.on_notice("all rounds are done: not waiting for sites")
        try:
            if not done:
                self.nodes.wait(clients, self.wait, members or frozenset(self.order) or None)
            while True:
                data = self._to_federation() if done else self._admit_waiting()
                self.report.changed.clear()
                if self.report.stop.is_set():
                    return False
                resume = (self.directory / "config.toml").exists()
                experiment = self._make_experiment(data)
                callback = Callbacks(HistoryKeeper(self.directory), self.report)
                try:
                    if experiment.run(self.directory, resume=resume, callback=callback, stop=self.report.changed):
                        break
                except SpoiledModel as error:
                    self._take_back(error)
            if done:  # also inform sites that connect soon
                with suppress(FedshiftError):
                    self.nodes.wait(len(members), PARTING, members)
        except StopRequested:
            return False
        facts = {"experiment": self.population.experiment, "say": "the experiment is finished"}
        end = Exchange(kind="end", facts=facts)
        for _ in self.nodes.ask(dict.fromkeys(self.nodes.online, end), 0, 30.0):
            pass
        return True

    def _repair(self) -> None:
        """Replace damaged checkpoints by intact ones, with a notice."""
        if not self.population.clients or not holds_summary(self.directory):
            return
        settings = self.population.make_settings(self.spec)
        for history in list_histories(self.directory):
            if notice := history.repair(settings):
                self.report.on_notice(notice)

    def _is_trained(self) -> bool:
        """Return whether all work that needs sites is done."""
        return bool(self.population.clients) and self._make_experiment(self._to_federation()).is_trained(self.directory)

    def _to_federation(self) -> RemoteFederation:
        return self.population.to_federation(self.spec.classes, self.spec.task)

    def _take_back(self, spoiled: SpoiledModel) -> None:
        """Repeat the round that spoiled the model, without the client whose update was by far the longest.

        Raises ``spoiled`` if the round was already repeated, or the checkpoint before it is missing.
        """
        if not TrialHistory(spoiled.folder).take_back(spoiled.round, spoiled.suspect):
            raise spoiled
        self.nodes.say(
            f"too few sites can continue from the model of round {spoiled.round}: going back to the previous model and "
            f"repeating the round without {spoiled.suspect}, whose update was {spoiled.ratio:.3g} times as long as "
            "the others'",
            "diverged",
        )

    def _make_experiment(self, data: RemoteFederation) -> Experiment:
        methods, settings = make_methods(self.spec), self.population.make_settings(self.spec)
        data = settings.request_metrics(data)
        if own := [metric.name for metric in data.task.requested if not metric.travels]:
            raise UsageError(f"metric {own[0]} is code of this machine, which sites do not run: use another").about(
                "metric"
            )
        for method in methods:
            if method.pooled:
                raise UsageError(f"{method.label} needs all data in one place: omit it across machines")
        names = [method.name for method in methods]
        members = [client for client in data.clients if client.name not in settings.newcomers]
        labels = {client.name: client.labels for client in self.population.clients}
        counted = all(labels[client.name] for client in members)  # sites count labels only on request
        if settings.loss and settings.loss.uses_counts and not counted:
            raise UsageError(
                f"loss {settings.loss}: its weights come from the number of samples of each class, which sites count "
                f"only for classification, not for {data.task}: give the weights as numbers"
            )
        description = {
            "experiment": self.population.experiment, "spec": self.sent, "classes": data.classes,
            "class_names": data.meanings, "columns": list(map(asdict, data.columns)),
            "labels": count_labels(replace(data, clients=tuple(members))).tolist() if counted else None,
        }  # fmt: skip

        def make_engine(plan: Plan, samples: Data, seed: int) -> RemoteEngine:
            if self.home:
                up = sum(each.bytes for each in list_disclosures(plan) if not each.once)
                write_sizes(self.home, down=downlink_bytes(plan, init_server(plan)), up=up, seconds=self.seconds)
            return RemoteEngine(
                plan, samples, seed, federation=data, settings=settings, nodes=self.nodes,
                min_clients=self.min_clients, seconds=self.seconds, update_bound=self.update_bound,
                max_share=self.max_share, history=TrialHistory(trial_folder(self.directory, plan.method.label, seed)),
                description={**description, "method": names.index(plan.method.name), "seed": seed},
            )  # fmt: skip

        return Experiment(
            methods=methods, data=data, settings=settings,
            model=resolve_model(self.spec.model, data.sample_shape, data.task, data.inputs),
            seeds=parse_seeds(self.spec.seeds), config=asdict(self.spec), make_engine=make_engine,
            log=parse_loggers(self.spec.log), compare_with=name_reference(self.spec, methods),
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
                self.report.on_notice(f"{new.name} is not admitted: {error}")
            else:
                grown, data = wider, joined
        self.population = grown
        grown.write(self.path)
        claimed = {client.name: client.samples["train"] for client in grown.training}
        for text in judge_claims(claimed, self.max_share):
            self.nodes.say(text)
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
            self.report.on_notice(f"{name} does not take part: the settings name {', '.join(self.order)} (domains)")
        if self.population.clients and self._find_new():
            self.report.changed.set()


def _extra_categories(joined: RemoteFederation, data: RemoteFederation) -> str:
    """List the categories in ``joined`` that are missing from ``data``, which has the same columns."""
    return ", ".join(
        f"{value!r} in column {wide.name!r}"
        for wide, column in zip(joined.columns, data.columns, strict=True)
        for value in wide.categories or ()
        if value not in (column.categories or ())
    )
