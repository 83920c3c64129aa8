"""Facts about a method on a model: its scope table, and the bytes that travel in a round."""

from __future__ import annotations

from .base.state import nbytes, pick
from .core.kernel import Server, Update, begin, finish, init_client, init_server
from .core.plan import Plan
from .records import MethodFacts


def downlink(plan: Plan, server: Server) -> int:
    """Bytes that one client receives in a round: the entries it loads, and the rules' server memory."""
    return nbytes(pick(server.shared, plan.loaded)) + nbytes(server.memory)


def uplink(update: Update) -> int:
    """Bytes that one client sends: the entries in its scope, and the rules' uploads."""
    return nbytes(update.shared) + nbytes(update.memory)


def method_facts(plan: Plan) -> MethodFacts:
    """The scope table of a method on a model, and the bytes that one client moves in one round."""
    server, client = init_server(plan), init_client(plan)
    _, update = finish(plan, begin(plan, client, server))
    rows = [
        {
            "name": entry.name,
            "type": type(entry.owner).__name__,
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
    return MethodFacts(
        text=plan.method.text,
        entries=tuple(rows),
        down=0 if pooled else downlink(plan, server),
        up=0 if pooled else uplink(update),
        has_global=plan.has_global,
    )
