"""Many nodes of a coordinator in one process, for ``flower.py``: they fetch and send as sites do, and train nothing.

    python benchmarks/flower_crowd.py ADDRESS SITES forward|backward IMAGE_SIZE SAMPLES

Notices are answered at once. A question has come to all of them before the first answer leaves; answers leave in the
order of the nodes' names, or in the opposite one. An upload is the broadcast, each node's scaled by a little, so that
no two have the same bytes.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from threading import Event

import fedshift.flower  # noqa: F401  isort: skip  (before anything of flwr: it keeps Flower quiet)

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message

from fedshift import __version__
from fedshift.flower import internals
from fedshift.flower.messages import Exchange, from_record, to_record
from fedshift.flower.site.node import connect

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
    if asked.kind == "review":
        return Exchange(kind="agreed", facts={"name": name})
    if asked.kind == "evaluate":
        counts = [samples, *[0] * 9]
        row = {
            "client": name, "moment": asked.facts["moment"], "split": "test", "model": "global", "samples": samples,
            "loss_sum": 1.0, "hits": counts, "support": counts, "auc": None,
        }  # fmt: skip
        return Exchange(kind="evaluated", facts={"name": name, "round": asked.facts["round"], "rows": [row]})
    moved = {
        entry: tensor * (1 + 1e-6 * number) if tensor.is_floating_point() else tensor
        for entry, tensor in from_record(asked.arrays["shared"]).items()
    }
    facts = {"name": name, "round": asked.facts["round"] + 1, "weight": samples, "steps": 2, "loss_sum": 1.0}
    return Exchange(kind="trained", facts=facts, arrays={"shared": to_record(moved), "memory": asked.arrays["memory"]})


def main(address: str, sites: str, order: str, size: str, samples: str) -> None:
    with ExitStack() as stack:
        keys = [ec.generate_private_key(ec.SECP384R1()) for _ in range(int(sites))]
        nodes = [stack.enter_context(connect(address, None, key, Event(), register=True)) for key in keys]
        numbers = {node.node.node_id: number for number, node in enumerate(nodes)}
        if order == "backward":
            nodes.reverse()
        while True:
            asked: dict[int, Message] = {}
            while len(asked) < len(nodes):
                for node in nodes:
                    internals.TaskIdentity.node_id = node.node.node_id
                    question = None if node.node.node_id in asked else node.receive()
                    if question and Exchange.of(question.content).kind == "tell":
                        node.send(Message(Exchange(kind="told").content(), reply_to=question), 0.0)
                    elif question:
                        asked[node.node.node_id] = question
                time.sleep(LOOK)
            for node in nodes:
                question = asked[node.node.node_id]
                internals.TaskIdentity.node_id = node.node.node_id
                said = answer(numbers[node.node.node_id], int(size), int(samples), Exchange.of(question.content))
                node.send(Message(said.content(), reply_to=question), 0.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
