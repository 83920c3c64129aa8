"""A site: it holds one client's data and state, and answers what a coordinator asks; neither leaves it.

What leaves is what the method's scope sends, the rules' uploads, numbers of samples, and counts of what was right on
the site's own test data. The site makes the same plan as the coordinator from the same settings, and the sequential
engine does the work with the same streams, so that results are those of ``fedshift run``, bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from .. import __version__
from ..base.allocator import freed_memory_kept
from ..base.errors import FedshiftError, UsageError
from ..base.state import pick
from ..build import methods_of, model_of, settings_of
from ..config import CompareSpec, DataSpec, RunSpec
from ..core.kernel import Server, personal_state, trained_state
from ..core.plan import Plan
from ..data.federation import Federation, label_counts
from ..data.files.columns import Column
from ..engines.engine import Diverged
from ..engines.sequential import Sequential
from ..evaluate import evaluate_clients, evaluate_trained
from ..names import trusting
from ..planning import plan_of
from ..rundir import slug
from ..sources import split_of
from .agreement import columns_of
from .arrays import Refused, check_state, from_record, to_record
from .exchange import Exchange
from .local_data import TableRefused, local, meaning
from .site_state import SiteState

Say = Callable[[str], None]
Checked = Callable[[Exchange, int], Exchange]
DATA = tuple(field.name for field in fields(DataSpec))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Trial:
    """What a site has made for one method and seed of an experiment."""

    plan: Plan
    data: Federation
    engine: Sequential
    kept: SiteState

    @property
    def name(self) -> str:
        """The client's."""
        return self.data.names[0]


class Site:
    """The client in ``data`` (see :func:`local_data.local`), its states below ``folder``.

    ``code``: functions of the site's own, ``package.module:function``, that an experiment may name. ``checked`` takes a
    question and the number of its run, and raises :class:`Refused` unless the coordinator asked it (``proof``). ``say``
    hears what is done.
    """

    def __init__(
        self, data: str, name: str | None, folder: Path, *, device: str = "cpu", code: frozenset[str] = frozenset(),
        checked: Checked = lambda asked, _: asked, say: Say = lambda _: None,
    ) -> None:  # fmt: skip
        self.data, self.name, self.folder, self.device = data, name, folder, device
        self.code, self.checked, self.say = code, checked, say
        self._sources: dict[str, Federation] = {}
        self._trials: dict[str, _Trial] = {}

    def answer(self, asked: Exchange) -> Exchange:
        """The answer to what a coordinator asks; what cannot be answered is said in the answer (``refused``)."""
        answers = {"describe": self._describe, "train": self._train, "evaluate": self._evaluate, "end": self._end}
        try:
            return answers[asked.kind](self.checked(asked, asked.run))
        except TableRefused as error:
            self.say(f"refused: {error}")
            return Exchange(kind="refused", facts={"why": "its table cannot be used: its own log says why"})
        except (FedshiftError, OSError) as error:
            self.say(f"refused: {error}")
            return Exchange(kind="refused", facts={"why": str(error), "diverged": isinstance(error, Diverged)})
        except Exception as error:
            self.say(f"failed: {type(error).__name__}: {error}")
            return Exchange(kind="refused", facts={"why": f"{type(error).__name__}: {error}"})

    def _describe(self, asked: Exchange) -> Exchange:
        spec = self._spec(asked.facts["spec"])
        source = self._source(spec)
        data = split_of(source, spec)
        client = data.clients[0]
        facts = {
            "name": client.name, "version": __version__, "shape": data.sample_shape,
            "dtype": str(client.train.store.dtype).removeprefix("torch."), "classes": data.classes,
            "class_names": source.meanings, "columns": list(map(asdict, source.columns)),
            "samples": {name: len(split) for name, split in client.splits.items()},
            "labels": label_counts(data).tolist() if asked.facts["labels"] else None,
        }  # fmt: skip
        texts = [f"{column.name} ({', '.join(column.categories)})" for column in source.columns if column.categories]
        if texts:
            self.say(f"the coordinator is told the columns' names, and the categories of {'; '.join(texts)}")
        self.say(f"in touch with the coordinator as {client.name!r}, {len(client.train)} training samples")
        return Exchange(kind="described", facts=facts)

    def _train(self, asked: Exchange) -> Exchange:
        trial = self._trial(asked.facts["trial"])
        server, base = self._broadcast(trial.plan, trial.plan.loaded, asked)
        round = server.round + 1
        with freed_memory_kept():
            trained = trial.engine.work(server, trial.name, trial.kept.after(base))
        trial.kept.keep(trained.client, base, round)
        update = trained.update
        loss = trained.loss_sum / update.weight
        self.say(f"{trial.plan.method.name}, round {round}: {update.weight:.0f} samples, training loss {loss:.4f}")
        facts = {
            "name": trial.name, "round": round, "weight": update.weight, "steps": update.steps,
            "loss_sum": trained.loss_sum,
        }  # fmt: skip
        if splits := tuple(asked.facts["splits"]):  # on which the model is to be measured before it is aggregated
            state = trained_state(trial.plan, trained.client, update, server)
            facts["rows"] = evaluate_trained(trial.plan, state, trial.data.clients, splits, trial.data.classes)
        arrays = {"shared": to_record(update.shared), "memory": to_record(update.memory)}
        return Exchange(kind="trained", facts=facts, arrays=arrays)

    def _evaluate(self, asked: Exchange) -> Exchange:
        trial = self._trial(asked.facts["trial"])
        plan, data = trial.plan, trial.data
        server, base = self._broadcast(plan, plan.sent if plan.has_global else plan.loaded, asked)
        own = None
        if base or not plan.personalizes:
            own = personal_state(plan, trial.kept.after(base), server)
            trial.kept.leave_model(own, server.round)
        rows = evaluate_clients(plan, server, data, tuple(asked.facts["splits"]), lambda _: own)
        for row in rows:
            if (row["split"], row["model"]) == ("test", "personal"):
                right = 100 * sum(row["hits"]) / row["samples"]
                self.say(f"{plan.method.name}, after round {server.round}: accuracy {right:.2f} % here")
        return Exchange(kind="evaluated", facts={"name": trial.name, "round": server.round, "rows": rows})

    def _end(self, asked: Exchange) -> Exchange:
        return Exchange(kind="ended", facts={"say": asked.facts["say"]})

    def _broadcast(self, plan: Plan, names: frozenset[str], asked: Exchange) -> tuple[Server, int]:
        """What the coordinator broadcast, entries ``names`` checked against the plan, and the client's base."""
        arrays = {kind: from_record(asked.arrays[kind]) for kind in ("shared", "memory")}
        check_state(arrays["shared"], pick(plan.initial, names), "the broadcast")
        moved = {kind: {name: x.to(self.device) for name, x in state.items()} for kind, state in arrays.items()}
        return Server(round=int(asked.facts["round"]), **moved), int(asked.facts["base"])

    def _trial(self, asked: Mapping[str, Any]) -> _Trial:
        key = json.dumps(asked, sort_keys=True)
        if key not in self._trials:
            self._trials = {key: self._made(asked)}  # trials run one after another
        return self._trials[key]

    def _made(self, asked: Mapping[str, Any]) -> _Trial:
        spec = self._spec(asked["spec"])
        classes = int(asked["classes"])
        source = meaning(self._source(spec, columns_of(asked["columns"])), classes, asked["class_names"])
        data = split_of(source, spec).to(torch.device(self.device))
        client, seed = data.clients[0], int(asked["seed"])
        with trusting(self.code):
            method, model = methods_of(spec)[int(asked["method"])], model_of(spec.model, data.sample_shape)
            settings = settings_of(spec, ())
        plan = plan_of(
            method, model, settings, seed, sample=client.train.inputs(slice(0, 1)), classes=classes,
            labels=torch.tensor(asked["labels"] or [0] * classes), clients=int(asked["clients"]),
        )  # fmt: skip
        if not str(asked["experiment"]).isalnum():
            raise Refused(f"{asked['experiment']!r} is no experiment's name")
        folder = self.folder / str(asked["experiment"]) / f"{slug(method.name)}-seed{seed}"
        return _Trial(
            plan=plan, data=data, engine=Sequential(plan, {client.name: client.train}, seed),
            kept=SiteState(folder, client.name, plan, data.fingerprint),
        )  # fmt: skip

    def _source(self, spec: DataSpec, columns: tuple[Column, ...] = ()) -> Federation:
        """The data, a table read by ``columns`` where there are some: see :func:`local_data.local`."""
        key = json.dumps({name: getattr(spec, name) for name in DATA}, sort_keys=True) + repr(columns)
        if key not in self._sources:
            self._sources = {key: local(self.data, self.name, spec, self.folder, columns)}
        return self._sources[key]

    def _spec(self, given: Mapping[str, Any]) -> RunSpec | CompareSpec:
        """The settings that a coordinator sent, but for what is this machine's own business."""
        kind = RunSpec if "method" in given else CompareSpec
        own = {"data": self.data, "root": None, "domains": None, "split": None, "classes": None, "newcomers": None}
        try:
            return kind(**{**given, **own, "device": self.device, "engine": "sequential", "workers": None})
        except (ValidationError, TypeError) as error:
            raise UsageError(
                f"the coordinator's settings are not understood by fedshift {__version__} here: {error}"
            ) from error
