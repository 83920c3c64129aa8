"""Sites behind one of Flower's grids within the process: messages go as bytes, and faults are made to order."""

from __future__ import annotations

import re
import threading
import warnings
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import fedshift.flower  # noqa: F401  isort: skip  (before anything of flwr: it keeps Flower quiet)

with warnings.catch_warnings():  # what Flower imports (typer, click) is no matter of ours
    warnings.simplefilter("ignore", DeprecationWarning)
    from flwr.app import Error, Message, RecordDict
    from flwr.common.serde import message_from_proto, message_to_proto
    from flwr.proto.message_pb2 import Message as ProtoMessage
    from flwr.serverapp import Grid

from fedshift.config.spec import RunSpec
from fedshift.experiments.callbacks import Callback
from fedshift.experiments.client_store import to_tensors
from fedshift.experiments.experiment import Experiment
from fedshift.experiments.factory import make_experiment
from fedshift.flower.coordinator.coordinator import Coordinator
from fedshift.flower.coordinator.remote_engine import RoundOptions
from fedshift.flower.messages import Exchange
from fedshift.flower.site.policy import Limits, SitePolicy
from fedshift.flower.site.site import Site
from fedshift.results.checkpoint import load_checkpoint
from fedshift.results.run_directory import trial_folder
from tests.flower.gated import NETWORK

ALL, OTHERS, PHOTO = ("pen", "photo", "print"), ("pen", "print"), 2
"""The sites, those that do nothing wrong, and the node of the one that does."""
SMALL = {"domains": "pen,photo,print", "samples": 24, "image_size": 8, "rounds": 2, "lr": 0.05}


def as_sent(message):
    """``message`` as it arrives on the other side."""
    return message_from_proto(ProtoMessage.FromString(message_to_proto(message).SerializeToString()))


class SiteGrid(Grid):
    """``sites``: the site of each node. ``away``: nodes that are not connected. ``asked``: what arrived at each node.

    ``most``: the most answers that were fetched at a time.
    ``tamper(node, question, answer)`` gives what arrives in place of an answer: another, any content of a message, an
    exception of Flower's grid that reads it; None: nothing.
    """

    def __init__(self, sites):
        self.sites, self.away, self.asked, self.most = dict(sites), set(), [], 0
        self.tamper = lambda node, question, answer: answer
        self._replies, self._numbers = {}, count(1)

    def get_nodes(self):
        here = ((node, f"key {node}".encode()) for node in self.sites if node not in self.away)
        return [SimpleNamespace(node_id=node, last_activated_at="", public_key=key) for node, key in here]

    def push_messages(self, messages):
        numbers = []
        for message in messages:
            number = f"message {next(self._numbers)}"
            message.metadata.__dict__["_message_id"] = number
            numbers.append(number)
            node = message.metadata.dst_node_id
            if node in self.away:
                continue
            arrived = as_sent(message)
            question = Exchange.of(arrived.content)
            self.asked.append((node, question))
            answer = self.tamper(node, question, self.sites[node].answer(question))
            if isinstance(answer, Exchange | RecordDict):
                content = answer.content() if isinstance(answer, Exchange) else answer
                self._replies[number] = as_sent(Message(content, reply_to=arrived))
            elif isinstance(answer, Exception):
                self._replies[number] = answer
            elif answer is not None:
                reply = Message(Error(answer, "made to\n order"), reply_to=arrived)
                reply.metadata.__dict__["_src_node_id"] = 1  # as Flower's own error replies
                self._replies[number] = as_sent(reply)
        return numbers

    def pull_messages(self, message_ids):
        found = [self._replies.pop(number) for number in list(message_ids) if number in self._replies]
        self.most = max(self.most, len(found))
        for reply in found:
            if isinstance(reply, Exception):  # as Flower's grid where it cannot read an answer
                raise reply
        return found

    def set_run(self, run):
        raise NotImplementedError

    run = property()
    create_message = send_and_receive = get_node_ids = set_run


class Heard(Callback):
    """Keeps what a coordinator tells."""

    def __init__(self):
        self.stop, self.changed, self.notices, self.rounds = threading.Event(), threading.Event(), [], []
        self.after = lambda done: None

    @property
    def took_part(self):
        """The sites of each round."""
        return [done.participants for done in self.rounds]

    @property
    def complaints(self):
        """Notices about sites that were left out."""
        return [text for text in self.notices if re.search("left out|not measured", text)]

    def stop_after(self, round):
        """Stop the coordinator after ``round``, as Ctrl-C does."""
        self.after = lambda done: (self.stop.set(), self.changed.set()) if done.round == round else None
        return self

    def told(self, node):
        """The texts that the coordinator told a site, without its greeting."""
        texts = [asked.facts["say"] for at, asked in self.grid.asked if (at, asked.kind) == (node, "tell")]
        return [text for text in texts if "is connected" not in text]

    def tell(self, what, *values):
        pass

    def on_notice(self, text):
        self.notices.append(text)

    def on_round_end(self, done):
        self.rounds.append(done)
        self.after(done)


def spec_for(method="fedbn", **changes):
    return RunSpec(**SMALL | {"method": method} | changes)


def allow(**limits):
    """A policy with ``limits``, and uploads of any size, which by default are refused of so few samples."""
    return SitePolicy(limits=Limits(**{"least_samples": 1, "least_steps": 1} | limits))


def make_site(data, name, folder, **named):
    """A site of few samples that allows :data:`NETWORK`."""
    return Site(str(data), name, folder / name, **{"policy": allow(), "code": frozenset({NETWORK})} | named)


def sites_of(spec, folder, **named):
    """A site for each client of the embedded digits that ``spec`` names, by its node's number."""
    names = enumerate(spec.domains.split(","), 1)
    return {number: make_site("digits", name, folder, **named) for number, name in names}


def sites_at(place, folder, **named):
    """A site for each file in ``place``."""
    files = enumerate(sorted(place.iterdir()), 1)
    return {number: make_site(file, file.stem, folder, **named) for number, file in files}


def coordinator(spec, grid, directory, heard, **options):
    given = {"clients": len(grid.sites), "seconds": 5.0, "wait": 5.0}
    return Coordinator(grid, spec, directory, RoundOptions(**given | options), heard)


def grid_of(spec, folder):
    return SiteGrid(sites_of(spec, folder))


def serve(spec, folder, sites=None, *, heard=None, tamper=None, after=None, late=(), ends=True, **options):
    """Run ``spec`` in ``folder / "served"``; return what its coordinator told, with the ``grid`` of its sites.

    ``sites``: those of other data, or a grid. ``after``: called after each round. ``late``: nodes that connect after
    round 1. ``ends``: whether it is done then, or stopped.
    """
    grid, heard = sites if isinstance(sites, SiteGrid) else SiteGrid(sites or sites_of(spec, folder)), heard or Heard()
    grid.away |= set(late)
    heard.grid, heard.after = grid, after or ((lambda done: grid.away.clear()) if late else heard.after)
    grid.tamper = tamper or grid.tamper
    assert coordinator(spec, grid, folder / "served", heard, **options).run() is ends
    return heard


def change(question, *, trial=None, spec=None, **facts):
    """``question`` with other facts of its own, of its trial or of the settings."""
    changed = {**question.facts, **facts}
    own = changed.get("trial", changed)
    if "spec" in own:
        settings = {**own["spec"], **(spec or {})}
        settings = {key: value for key, value in settings.items() if key != "method" or "methods" not in settings}
        own = {**own, "spec": settings, **(trial or {})}
    return replace(question, facts={**changed, "trial": own} if "trial" in changed else own)


def in_process(spec, directory, engine="sequential") -> Experiment:
    """The same experiment in one process, by ``engine``."""
    experiment = make_experiment(replace(spec, engine=engine))
    experiment.run(directory)
    return experiment


def same_as_in_process(spec, directory, folder=None, reference=None, engine="sequential"):
    """Assert that the run in ``directory``, with sites in ``folder``, left what one ``engine`` does, bit for bit.

    Returns that process's trials; ``reference``: its folder. Either is beside ``directory`` by default.
    """
    folder, reference = folder or directory.parent, reference or directory.parent / "reference"
    experiment = in_process(spec, reference, engine)
    return [
        same_trial(experiment.make_trial(name, seed), trial_folder(directory, name, seed), folder, reference)
        for name in (method.label for method in experiment.methods)
        for seed in experiment.seeds
    ]


def list_rows(summary):
    """Return every record of a run as a text, sorted."""
    return sorted(summary.rows.to_json(orient="records", lines=True, double_precision=15).splitlines())


def same_trial(trial, place, folder, reference):
    """:func:`same_as_in_process` for one of its trials, which is in ``place``."""
    other = reference / "trials" / place.name
    trial.restore(*load_checkpoint(other / "checkpoint.safetensors"), other)
    found, facts = load_checkpoint(place / "checkpoint.safetensors")
    wanted = trial._server_tensors()
    assert facts["round"] == trial.server.round
    assert {name for name in found if name.startswith("server/")} == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].equal(tensor), name
    own = trial_folder(folder, trial.plan.method.name, trial.seed).name  # sites know no label
    for client in trial.clients.seen:
        (state,) = (folder / client).glob(f"*/{own}/state-{facts['bases'][client]}.safetensors")
        kept, said = load_checkpoint(state)
        entries = to_tensors(trial.clients[client], trial.plan.rule_names)
        assert said["steps"] == trial.clients[client].steps
        assert kept.keys() == entries.keys()
        for name, tensor in entries.items():
            assert kept[name].equal(tensor), (client, name)
    return trial
