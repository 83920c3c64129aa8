"""Communication of a method on a model: its scope table, the bytes of a round, and its requirements for clients."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ..core.declarations import Reveals, Send
from ..core.kernel import init_client, init_server
from ..core.method import Method
from ..core.optimizer import SGD
from ..core.plan import Plan
from ..core.preparation import prepare
from ..core.rule import Rule
from ..core.selection import (
    Entry,
    batch_norm,
    buffers,
    everything,
    hybrid_factors,
    last_layers,
    norm_layers,
    norm_statistics,
    nothing,
)
from ..core.states import ServerState, Update
from ..models.digits import small_cnn
from ..models.mlp import fnn2
from ..results.disclosure import MODEL, Disclosure
from ..results.schema import MethodSummary
from ..utils.state import nbytes, pick


def downlink_bytes(plan: Plan, server: ServerState) -> int:
    """Return the bytes that one client receives in a round: entries, and the rules' server memory."""
    return nbytes(pick(server.shared, plan.downloaded)) + sum(map(nbytes, server.memory))


def uplink_bytes(update: Update) -> int:
    """Return the bytes that one client sends: the entries in its scope, and the rules' uploads."""
    return nbytes(update.shared) + sum(map(nbytes, update.memory))


def summarize_method(plan: Plan) -> MethodSummary:
    """Return the scope table of a method on a model, and the bytes that one client exchanges in one round."""
    leaves = list_disclosures(plan)
    rows = [
        {
            "name": entry.name,
            "type": entry.layer,
            "shape": list(plan.initial[entry.name].shape),
            "dtype": str(plan.initial[entry.name].dtype).removeprefix("torch."),
            "bytes": nbytes({entry.name: plan.initial[entry.name]}),
            "buffer": entry.is_buffer,
            "load": entry.name in plan.loaded,
            "send": entry.name in plan.sent,
            "trained": entry.name in plan.trained,
        }
        for entry in plan.entries
    ]
    pooled = plan.method.pooled
    return MethodSummary(
        name=plan.method.name,
        text=plan.method.text,
        entries=tuple(rows),
        down=0 if pooled else downlink_bytes(plan, init_server(plan)),
        up=sum(each.bytes for each in leaves),
        leaves=leaves,
        kept=describe_kept(plan),
        has_global=plan.has_global,
        pooled=bool(pooled),
    )


def list_disclosures(plan: Plan) -> tuple[Disclosure, ...]:
    """Return all tensors that leave each client: entries of the model, then what rules send."""
    return () if plan.method.pooled else (*_list_entries(plan), *_list_sends(plan))


def _list_entries(plan: Plan) -> Iterator[Disclosure]:
    passed_on = bool(plan.method.aggregator and plan.method.aggregator.passes_on)
    for entry in plan.entries:
        if entry.name in plan.sent:
            alone = (passed_on or entry.kind == "state") and entry.name not in plan.made
            loaded = "each" if alone else "all"
            send = Send.like(pick(plan.initial, {entry.name}), _find_grain(entry, plan.made))[entry.name]
            yield _describe(entry.name, MODEL, send, loaded if entry.name in plan.downloaded else "server")


def _find_grain(entry: Entry, made: frozenset[str]) -> Reveals:
    """Return what an entry of the model reveals: layers write into buffers what they see, BatchNorm its statistics."""
    written = entry.kind in ("mean", "variance", "average", "state") and entry.name not in made
    return "client" if written else "update"


def _list_sends(plan: Plan) -> Iterator[Disclosure]:
    for bound, prefix in zip(plan.rules, plan.rule_names, strict=True):
        used = bound.server or bound.sets  # what the server broadcasts of a rule, it computes from uploads
        for name, send in bound.sends.items():
            receivers = "each" if send.passed_on else "all" if used else "server"
            yield _describe(f"{prefix}/{name}", bound.rule.source_method, send, receivers)


def _describe(name: str, source: str, send: Send, receivers: str) -> Disclosure:
    return Disclosure(
        name=name, source=source, shape=send.shape, dtype=str(send.dtype).removeprefix("torch."), bytes=send.nbytes,
        reveals=send.reveals, receivers=receivers,
    )  # fmt: skip


def describe_kept(plan: Plan) -> str:
    """Return what the server keeps of single clients from round to round, in words."""
    kept = ["the uploads of the last round, one by one"] if plan.mixes else []
    keeping = [bound.rule.source_method for bound in plan.rules if bound.rule.keeps]
    kept += [f"what {source} remembers of each client that took part" for source in keeping]
    return "; ".join(kept) or "nothing of single clients"


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Properties of a method, derived from its plan on a small network with BatchNorm (FedWon's table 7, extended).

    A method that refuses BatchNorm is planned on a network without it.

    ``state``: a client's state between rounds; ``""`` means none, so that the method suits clients that come and go.
    ``normalization``: the treatment of BatchNorm. ``sent``: the entries that a client uploads. ``up``: their bytes
    relative to FedAvg's. ``has_global``: whether the server holds a complete model.
    """

    state: str
    normalization: str
    sent: str
    up: float
    has_global: bool


def find_capabilities(method: Method) -> Capabilities:
    """Derive the properties of ``method``, which may be a custom one."""
    by_sample = any(type(rule).combine_samples is not Rule.combine_samples for rule in method.rules)
    refuses = by_sample and not method.surgery
    model, optimizer = (fnn2 if refuses else small_cnn)((1, 8, 8), 10), SGD(lr=0.1)
    plan = prepare(method, model, optimizer=optimizer)
    summary, fedavg = (
        summarize_method(each) for each in (plan, prepare(Method(name="fedavg"), model, optimizer=optimizer))
    )
    if method.pooled:
        return Capabilities(state="", normalization="shared", sent="the data", up=0.0, has_global=True)
    client = init_client(plan)
    memories = [
        re.sub(r"(?<!^)(?=[A-Z])", " ", type(rule).__name__).lower()
        for rule, memory in zip(plan.method.rules, client.memory, strict=True)
        if memory
    ]
    if plan.optimizer.keep:
        memories.append("momentum")
    if plan.work.epochs is None:
        memories.append("its place in the pass")
    kept = [text for text in (_describe_entries(plan, plan.personal), *memories) if text != "nothing"]
    unsent = _describe_entries(plan, frozenset(plan.initial) - plan.sent)
    opposite = {"nothing": "everything", "everything": "nothing"}
    return Capabilities(
        state=", ".join(kept),
        normalization="refused" if refuses else _describe_normalization(plan),
        sent=opposite.get(unsent, f"all but {unsent}"),
        up=summary.up / fedavg.up,
        has_global=summary.has_global,
    )


def _describe_entries(plan: Plan, names: frozenset[str]) -> str:
    """Return a description of the entries ``names``."""
    known = {
        "nothing": nothing, "everything": everything, "BatchNorm": batch_norm,
        "BatchNorm's statistics": norm_statistics, "the last layer": last_layers(1),
        "BatchNorm's affine parameters": batch_norm & ~buffers, "HybridBatchNorm's factors": hybrid_factors,
    }  # fmt: skip
    for text, selection in known.items():
        if names == frozenset(entry.name for entry in plan.entries if selection(entry)):
            return text
    layers = {name.rpartition(".")[0] for name in names}
    return f"{len(layers)} {'layer' if len(layers) == 1 else 'layers'}"


def _describe_normalization(plan: Plan) -> str:
    if not any(map(batch_norm, plan.entries)):
        kinds = {entry.layer for entry in plan.entries if norm_layers(entry)}
        return f"replaced by {', '.join(sorted(kinds))}" if kinds else "removed"
    owned = {name for name in plan.personal if name in {entry.name for entry in plan.entries if batch_norm(entry)}}
    statistics = {entry.name for entry in plan.entries if norm_statistics(entry)}
    local = "shared" if not owned else "statistics local" if owned == statistics else "local"
    return f"{local}, then frozen" if plan.freeze_from != float("inf") else local
