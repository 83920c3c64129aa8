"""The app that ``fedshift serve`` submits to its SuperLink: an experiment whose clients are behind Flower's grid.

It tells ``fedshift serve``, which shows it to a person, what happens, over a local socket, and ends with it. Every
round is saved in the run directory before the next begins, so it may be killed at any moment.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from . import quiet as quiet  # isort: split

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from typing_extensions import override

from ..base.errors import FedshiftError, UsageError
from ..build import methods_of, model_of, seeds_of, settings_of
from ..config import CompareSpec, RunSpec
from ..data.federation import label_counts
from ..engines.auto import Choice
from ..experiment import Observer
from ..rundir import MACHINES
from ..trial import RoundDone
from .across import ExperimentAcross, Terms
from .exchange import FACTS, Exchange
from .nodes import Nodes, Stopped
from .population import Described, Elsewhere, Population

COORDINATOR = "FEDSHIFT_COORDINATOR"
"""Names the socket on which ``fedshift serve`` listens."""
PRIVATE: dict[str, Any] = {"data": "", "root": None, "domains": None, "split": None, "newcomers": None}
"""Settings that are the coordinator's own business, as sites see them."""

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment that the run's configuration describes."""
    sys.path.append("")  # methods and models of the person's own, beside which `fedshift serve` was started
    with Client(os.environ[COORDINATOR], family="AF_UNIX") as talk:
        order = json.loads(talk.recv_bytes())
        spec = submitted(str(context.run_config[FACTS]), order["settings"])
        report = Report(talk)
        try:
            finished = Coordinator(grid, spec, order, report, context.run_id).run()
        except FedshiftError as error:
            report.tell("failed", str(error), isinstance(error, UsageError))
            raise
        report.tell("ended", finished)


def submitted(settings: str, expected: str) -> RunSpec | CompareSpec:
    """The settings of a run; raises :class:`FedshiftError` unless they are the ones that `fedshift serve` submitted.

    Whoever reaches a SuperLink can submit a run, and settings may name any function of this machine.
    """
    if settings != expected:
        raise FedshiftError("a run with other settings than those of `fedshift serve` was submitted: refused")
    return spec_of(json.loads(settings))


def spec_of(given: dict[str, Any]) -> RunSpec | CompareSpec:
    """The settings in ``given``, one method's or several methods'."""
    return RunSpec(**given) if "method" in given else CompareSpec(**given)


class Report(Observer):
    """Tells what an observer hears to the process at the other end of ``talk``, and ends with that."""

    def __init__(self, talk: Connection) -> None:
        self.talk, self.stop, self.changed = talk, threading.Event(), threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def tell(self, what: str, *values: Any) -> None:
        """One message."""
        self.talk.send_bytes(json.dumps([what, *values]).encode())

    def _listen(self) -> None:
        try:
            self.talk.recv_bytes()  # the only thing that it is ever told
        except (EOFError, OSError):
            os._exit(1)
        self.stop.set()
        self.changed.set()

    @override
    def begin(
        self, methods: Sequence[str], seeds: Sequence[int], rounds: int, clients: Sequence[str], metric: str
    ) -> None:
        self.tell("begin", list(methods), list(seeds), rounds, list(clients), metric)

    @override
    def trial(self, method: str, seed: int, done: int) -> None:
        self.tell("trial", method, seed, done)

    @override
    def engine(self, method: str, choice: Choice) -> None:
        """Sites run the sequential engine."""

    @override
    def client(self, client: str, loss: float) -> None:
        self.tell("client", client, loss)

    @override
    def round(self, done: RoundDone) -> None:
        self.tell("round", asdict(done))

    @override
    def notice(self, text: str) -> None:
        self.tell("notice", text)


class Coordinator:
    """Runs the experiment ``spec`` with whoever is behind ``grid``.

    ``order``: ``directory`` (the run's), ``clients`` and ``seconds`` (see :class:`Terms`), ``wait`` (seconds for the
    first clients to come), and ``keys``: where the coordinator's and the nodes' public keys are (None: questions are
    not signed, and nodes not told apart by keys). ``run``: the number of Flower's run.
    """

    def __init__(
        self, grid: Grid, spec: RunSpec | CompareSpec, order: dict[str, Any], report: Report, run: int
    ) -> None:
        self.report, self.wait = report, float(order["wait"])
        self.directory = Path(order["directory"])
        self.order = tuple(name.strip() for name in spec.domains.split(",")) if spec.domains else ()
        self.spec = replace(spec, engine="sequential", workers=None)
        self.terms = Terms(clients=int(order["clients"]), seconds=float(order["seconds"]))
        self.sent = {**asdict(self.spec), **PRIVATE}
        self.turned_away: set[str] = set()
        labels = settings_of(replace(self.spec, newcomers=None), ()).loss.counted
        hello = Exchange(kind="describe", facts={"spec": self.sent, "labels": labels})
        self.path = self.directory / MACHINES / "population.json"
        self.population = Population.read(self.path) if self.path.exists() else Population.new()
        known = {client.name: client for client in self.population.clients}
        secured = _secured(Path(order["keys"]), run) if order["keys"] else {}
        self.nodes = Nodes(grid, hello, report.notice, known=known, changed=self._came, stop=report.stop, **secured)

    def run(self) -> bool:
        """Run to the end, or until it is told to stop; whether it got to the end."""
        try:
            return self._run()
        except Stopped:
            return False

    def _run(self) -> bool:
        members = frozenset(client.name for client in self.population.clients)
        clients = min(self.terms.clients, len(members or self.order) or self.terms.clients)
        self.nodes.wait(clients, self.wait, members or frozenset(self.order) or None)
        while True:
            data = self._admitted()
            self.report.changed.clear()
            if self.report.stop.is_set():
                return False
            resume = (self.directory / "config.toml").exists()
            experiment = self._experiment(data)
            finished = experiment.run(self.directory, resume=resume, observer=self.report, stop=self.report.changed)
            if finished or self.report.stop.is_set():
                if finished:
                    self._part()
                return finished

    def _experiment(self, data: Elsewhere) -> ExperimentAcross:
        facts = {
            "experiment": self.population.experiment, "spec": self.sent, "classes": data.classes,
            "class_names": data.meanings, "columns": list(map(asdict, data.columns)), "labels": self._labels(data),
        }  # fmt: skip
        return ExperimentAcross(
            methods=methods_of(self.spec), data=data, model=model_of(self.spec.model, data.sample_shape),
            settings=settings_of(self.spec, data.names), seeds=seeds_of(self.spec), config=asdict(self.spec),
            nodes=self.nodes, terms=self.terms, facts=facts,
        )  # fmt: skip

    def _admitted(self) -> Elsewhere:
        """The clients, with those who have come; one whose data do not go with the others' is not admitted."""
        if not self.population.clients:
            grown = self.population.with_clients(self._new(), self.order)
            data = grown.federation(self.spec.classes)
        else:
            grown, data = self.population, self.population.federation(self.spec.classes)
            for new in self._new():
                try:
                    wider = grown.with_clients([new], self.order)
                    found = wider.federation(self.spec.classes)
                    if found.columns != data.columns:
                        raise FedshiftError(f"{new.name!r} has {_further(found, data)}, which the others lack")
                    if found.fingerprint != data.fingerprint:
                        raise FedshiftError(f"{new.name!r} has classes that the others lack")
                except FedshiftError as error:
                    self.turned_away.add(new.name)
                    self.report.notice(f"{new.name} is not admitted: {error}")
                else:
                    grown, data = wider, found
        self.population = grown
        grown.write(self.path)
        return data

    def _new(self) -> list[Described]:
        """Clients that are connected and not in yet, of those that the settings name, if they name some."""
        members = {client.name for client in self.population.clients}
        names = sorted(self.nodes.online - members - self.turned_away)
        return [self.nodes.known[name] for name in names if not self.order or name in self.order]

    def _came(self) -> None:
        """A client that is new is admitted after the round in progress, where the settings do not leave it out."""
        for name in sorted(self.nodes.online - self.turned_away - set(self.order) if self.order else ()):
            self.turned_away.add(name)
            self.report.notice(f"{name} takes no part: the settings name {', '.join(self.order)} (domains)")
        if self.population.clients and self._new():
            self.report.changed.set()

    def _labels(self, data: Elsewhere) -> list[int] | None:
        """Training samples of each class at all sites, where they were asked for."""
        return label_counts(data).tolist() if all(client.labels for client in self.population.clients) else None

    def _part(self) -> None:
        """Tell the sites that it is over."""
        end = Exchange(kind="end", facts={"say": "the experiment is finished"})
        for _ in self.nodes.ask(dict.fromkeys(self.nodes.online, end), 0, 30.0):
            pass


def _further(found: Elsewhere, data: Elsewhere) -> str:
    """The categories that ``found`` has and ``data``, of the same columns, has not."""
    return ", ".join(
        f"{value!r} in column {wide.name!r}"
        for wide, column in zip(found.columns, data.columns, strict=True)
        for value in wide.categories or ()
        if value not in (column.categories or ())
    )


def _secured(tls: Path, run: int) -> dict[str, Any]:
    from .pki import load_public_keys
    from .proof import Signer

    return {"keys": partial(load_public_keys, tls), "signed": Signer(tls, run)}
