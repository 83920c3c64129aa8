"""A site's work for one method and seed of an experiment: training, measuring and exporting the client's model.

The sequential engine does the work with the same streams as ``fedshift run``, so that results are equal, bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from ...core.checks import check_upload
from ...core.kernel import init_server, trained_state
from ...core.plan import Plan
from ...core.preparation import change_layers
from ...core.states import ClientState, ServerState
from ...core.work import Bounds
from ...data.federation import Federation
from ...engines.frozen import FITTING, Inputs
from ...engines.sequential import Sequential
from ...evaluation.metrics import evaluate_clients, evaluate_trained, record_clients
from ...evaluation.policy import POLICIES, SKIP, make_lone_state
from ...evaluation.statistics_lag import reestimate_models
from ...evaluation.unseen_clients import make_personal_state
from ...experiments.settings import Settings
from ...export.package import write_package
from ...export.source import find_licenses, list_versions, make_model
from ...models import ModelFactory, make_network
from ...results.run_directory import describe_environment
from ...results.schema import REESTIMATED, Row, compute_metric, is_of_numbers, is_share, name_metric, rows_to_frame
from ...utils.allocator import keep_freed_memory
from ...utils.errors import FedshiftError, UsageError, as_flag
from ...utils.state import State, join_states, pick, split_state
from ..messages import UPLOAD, Exchange, RefusedMessage, check_state, digest_records, from_record, to_record
from .review import VALIDATES, TrialReview
from .state import SiteState

FLAGS = ("code", "device", "weights")
"""Settings of this machine, which are flags of ``join``."""


def as_setting(name: str, *value: object) -> str:
    """Write a setting as in the experiment's settings file, unless ``join`` has a flag for it."""
    if name in FLAGS:
        return as_flag(name, *value)
    if name == "resume":
        return "the same `fedshift join`"
    plain = (text if text.isdecimal() else json.dumps(text) for text in map(str, value))
    return f"{' = '.join([name, *plain])} in the experiment's settings"


@contextmanager
def understanding() -> Iterator[None]:
    """Let errors leave in words that follow from the question and the shape of samples, which are disclosed anyway."""
    try:
        yield
    except UsageError as error:
        raise RefusedMessage(error.render(as_setting)) from error


@dataclass(kw_only=True, eq=False)
class SiteTrial:
    """A site's objects for one method and seed.

    ``plan``: the method on the site's network. ``data``: the site's data, a federation of one client. ``model``: makes
    the network. ``settings``: the experiment's. ``review``: summary for policy and operator. ``kept``: the client's
    states. ``latest``: the model that the client used last, unless it is exported, with the server's state of its round
    and its measurements.
    """

    plan: Plan
    data: Federation
    model: ModelFactory
    settings: Settings
    review: TrialReview
    kept: SiteState
    latest: tuple[State, ServerState, Sequence[Row]] | None = field(default=None, init=False)

    @cached_property
    def inputs(self) -> Inputs:
        """Samples, or their features where a frozen backbone allows it."""
        whole = self._use_samples()
        return whole.extract(self.settings.augment) if self.settings.unseen in FITTING else whole

    @cached_property
    def engine(self) -> Sequential:
        """The engine that trains on :attr:`inputs`."""
        return Sequential(self.inputs.plan, self.inputs.train, self.plan.seed, augment=self.settings.augment)

    @property
    def samples(self) -> Mapping[str, int]:
        """Number of the client's samples in each split."""
        return {part: len(split) for part, split in self.data.clients[0].splits.items()}

    def list_steps(self, client: ClientState) -> tuple[Bounds, range]:
        """Return the bounds of each batch of a pass, and the steps of the round after the state ``client``."""
        return self.engine.steps_of_round(self.kept.name, client)

    def train(self, asked: Exchange, client: ClientState) -> Exchange:
        """Answer with the upload of a round that begins with the state ``client``, and keep the state after it."""
        plan = self.plan
        server, base = self._read_broadcast(plan.downloaded, asked)
        self._follow(server)
        with keep_freed_memory():
            trained = self.engine.train_client(server, self.kept.name, client)
        update = trained.update
        check_upload(plan, update.shared, update.memory)
        arrays = {"shared": to_record(update.shared), "memory": to_record(join_states(plan.rule_names, update.memory))}
        upload = digest_records(arrays)
        self.kept.save(trained.client, base, server.round + 1, upload)
        facts = {
            "name": self.kept.name, "round": server.round + 1, "weight": update.weight, "steps": update.steps,
            "loss_sum": trained.loss_sum, UPLOAD: upload,
        }  # fmt: skip
        if splits := tuple(asked.facts["splits"]):  # on these, the model is measured before aggregation
            state, measured = trained_state(plan, trained.client, update, server), self.inputs.measured.clients
            facts["rows"] = evaluate_trained(
                self.inputs.plan, state, measured, splits, self.data.task, self.data.classes
            )
        return Exchange(kind="trained", facts=facts, arrays=arrays)

    def evaluate(self, asked: Exchange) -> Exchange:
        """Answer with measurements of the models that the site would use, and keep the client's model."""
        plan, client, splits = self.plan, self.data.clients[0], tuple(asked.facts["splits"])
        server, base = self._read_broadcast(plan.sent if plan.has_global else plan.downloaded, asked)
        if base or not plan.personalizes:
            kept, augment = self.kept.load_after(base, str(asked.facts.get(UPLOAD, ""))), self.settings.augment
            own: State | None = make_personal_state(plan, kept, server, client.name, client.train, augment)
        else:
            own = self._make_unseen_state(server)
        if asked.facts["moment"] == REESTIMATED:
            training = {} if self.review.validates else {client.name: client.train}
            found = reestimate_models(plan, server, training, lambda _: own, alone=True)
            measured, state = [client] if client.name in found else [], {**(own or {}), **found.get(client.name, {})}
            rows = evaluate_trained(plan, state, measured, splits, self.data.task, self.data.classes)
            rows = [{**row, "moment": REESTIMATED} for row in rows]
        else:
            self._follow(server)
            data = self.inputs.measured
            rows = evaluate_clients(self.inputs.plan, server, data, splits, lambda _: own) if splits else []
            if own is not None:
                self.kept.export_model(own, server.round)
                self.latest = own, server, rows
        return Exchange(kind="evaluated", facts={"name": self.kept.name, "round": server.round, "rows": rows})

    def describe_results(self, answer: Exchange) -> Iterator[str]:
        """Yield the measurements in ``answer`` of the client's model on the site's test data, as lines of text."""
        for row in answer.facts["rows"]:
            if (row["split"], row["model"]) == ("test", "personal"):
                result = _describe_result(row, self.settings.metric)
                yield f"{self.plan.method.label}, after round {answer.facts['round']}: {result}"

    def export_latest(self, folder: Path | None) -> Iterator[str]:
        """Write the latest model below ``folder``, unless it was written; yield where, or why this is impossible.

        It is described by facts about this site's own data and results, but no other site's. None: it is not written.
        """
        latest, self.latest = self.latest, None
        if folder is None or latest is None:
            return
        (state, server, rows), data, settings, client = latest, self.data, self.settings, self.data.clients[0]
        try:
            known = record_clients(self.inputs.plan, server, self.inputs.measured, lambda _: state) if rows else {}
            network = make_network(self.model, data.sample_shape, data.classes, settings.precision)
            model = make_model(
                change_layers(self.plan.method, network), state, self.plan, data, client, settings, self.model,
                tests={client.name: client.test}, client=client.name, seed=self.plan.seed, round=server.round,
                choice=f"of {settings.rounds}", data_in_words=f"{client.name}, at this site",
                origin=f"{self.review.sites} sites took part, whose samples stayed there.",
                licenses=find_licenses(None, client.name), versions=list_versions(describe_environment()),
                measured=[row for row in rows if row["model"] == "personal"],
                records={("test", *key): records for key, records in known.items() if records},
            )  # fmt: skip
            report = write_package(model, folder / self.kept.folder.name, renew=True)
        except FedshiftError as error:
            yield f"the model of {self.plan.method.label} is not exported: {error.render(as_setting)}"
        else:
            yield f"{report.directory}: {', '.join(report.files)}"
            yield from (*report.checks, *report.notices)

    def _use_samples(self) -> Inputs:
        train = {client.name: client.train for client in self.data.clients}
        return Inputs(plan=self.plan, train=train, measured=self.data)

    def _follow(self, server: ServerState) -> None:
        """Train and measure on samples from now on if features do not fit the entries of ``server``."""
        if not self.inputs.fit(server):
            self.inputs = self._use_samples()
            self.engine = replace(self.engine, plan=self.plan, data=self.inputs.train)

    def _make_unseen_state(self, server: ServerState) -> State | None:
        """Return the model of a client that never trained, by the experiment's policy, or None if it makes none."""
        policy, client, data = self.settings.unseen, self.data.clients[0], self.data
        validates = self.review.validates
        if validates and policy != SKIP and POLICIES.parse(policy).trains:
            raise RefusedMessage(
                f"this site {VALIDATES}, and unseen={policy!r} trains: use unseen='average' or 'reestimate'"
            )
        with understanding():
            return make_lone_state(
                self.plan, server, policy, client.name, client.train, self.settings.augment, (data.task, data.classes),
                may_train=not validates,
            )  # fmt: skip

    def _read_broadcast(self, names: frozenset[str], asked: Exchange) -> tuple[ServerState, int]:
        """Return the broadcast, after checking its entries ``names`` and the rules' memory, and the client's base."""
        plan, device = self.plan, next(iter(self.plan.initial.values())).device
        arrays = {kind: from_record(asked.arrays[kind]) for kind in ("shared", "memory")}
        check_state(arrays["shared"], pick(plan.initial, names), "the broadcast")
        bound = zip(plan.rule_names, plan.rules, strict=True)
        free = {f"{rule}/{entry}": axes for rule, each in bound for entry, axes in each.growing.items()}
        like = join_states(plan.rule_names, init_server(plan).memory)
        check_state(arrays["memory"], like, "the broadcast's rule memory", free)
        shared, memory = ({name: x.to(device) for name, x in state.items()} for state in arrays.values())
        parts = split_state(plan.rule_names, memory)
        return ServerState(round=int(asked.facts["round"]), shared=shared, memory=parts), int(asked.facts["base"])


def _describe_result(row: Row, metric: str) -> str:
    value = float(compute_metric(rows_to_frame([row]), metric)[0])
    from ...report.formatting import difference_unit  # with it Matplotlib, for which a site would wait at its start

    unit = difference_unit(metric, numbers=is_of_numbers(row))
    if value != value:
        return f"{name_metric(metric)} is not defined by the test data here"
    return f"{name_metric(metric)} {unit.format(value)} {'%' if is_share(metric) else unit.name} here"
