"""Many nodes of a SuperLink in one process, for ``flower.py``: they fetch and send as sites do, and train nothing.

    python benchmarks/flower_crowd.py ADDRESS SITES forward|backward IMAGE_SIZE SAMPLES

A question has come to all of them before the first answer leaves; answers leave in the order of the nodes' names, or in
the opposite one. An upload is the broadcast, each node's scaled by a little, so that no two have the same bytes.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from typing import Any

import fedshift.flower  # noqa: F401  isort: skip  (before anything of flwr: it keeps Flower quiet)

from flwr.app import Message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_connection import http_request_response

from fedshift import __version__
from fedshift.flower.transport.arrays import from_record, to_record
from fedshift.flower.transport.exchange import Exchange

LOOK = 0.02


def answer(number: int, size: int, samples: int, asked: Exchange) -> Exchange:
    """What node ``number`` answers; ``size``: height and width of its images."""
    name = f"site-{number:02}"
    if asked.kind == "describe":
        facts = {
            "name": name, "version": __version__, "shape": (3, size, size), "dtype": "uint8", "classes": 10,
            "class_names": (), "samples": {"train": samples, "test": samples}, "labels": None,
        }  # fmt: skip
        return Exchange(kind="described", facts=facts)
    if asked.kind == "evaluate":
        counts = [samples, *[0] * 9]
        row = {
            "split": "test", "model": "global", "samples": samples, "loss_sum": 1.0, "hits": counts,
            "support": counts, "auc": None,
        }  # fmt: skip
        return Exchange(kind="evaluated", facts={"name": name, "round": asked.facts["round"], "rows": [row]})
    moved = {
        entry: tensor * (1 + 1e-6 * number) if tensor.is_floating_point() else tensor
        for entry, tensor in from_record(asked.arrays["shared"]).items()
    }
    facts = {"name": name, "round": asked.facts["round"] + 1, "weight": samples, "steps": 1, "loss_sum": 1.0}
    return Exchange(kind="trained", facts=facts, arrays={"shared": to_record(moved), "memory": asked.arrays["memory"]})


class Node:
    """Node ``number`` on ``connection``, which is what Flower's SuperNode has."""

    def __init__(self, number: int, connection: Any) -> None:
        self.number = number
        self.node, self.receive, self.send, _, _, self.pull, self.push, self.confirm = connection

    def respond(self, head: Message, tree: Any, size: int, samples: int) -> None:
        """Fetch the question with this ``head``, and answer it."""
        run = head.metadata.run_id
        TaskIdentity.node_id, TaskIdentity.run_id, TaskIdentity.task_id = self.node, run, run
        question = pull_and_inflate_object_from_tree(
            tree, lambda which: self.pull(run, which), lambda which: self.confirm(run, which), return_type=Message
        )
        question.metadata.__dict__["_message_id"] = head.metadata.message_id
        said = answer(self.number, size, samples, Exchange.of(question.content))
        reply = Message(said.content(), reply_to=question)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        wanted, session = self.send(reply, get_object_tree(reply), 0.0)
        for which, part in get_all_nested_objects(reply).items():
            if which in wanted:
                self.push(run, session, which, part.deflate())


def main(address: str, sites: str, order: str, size: str, samples: str) -> None:
    with ExitStack() as stack:
        connected = (stack.enter_context(http_request_response(address, True)) for _ in range(int(sites)))
        nodes = [Node(number, connection) for number, connection in enumerate(connected)]
        if order == "backward":
            nodes.reverse()
        while True:
            asked: dict[int, Any] = {}
            while len(asked) < len(nodes):
                for node in nodes:
                    if node.number not in asked and (question := node.receive()):
                        asked[node.number] = question
                time.sleep(LOOK)
            for node in nodes:
                node.respond(*asked[node.number], int(size), int(samples))


if __name__ == "__main__":
    main(*sys.argv[1:])
