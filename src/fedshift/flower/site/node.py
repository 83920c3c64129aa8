"""Flower's SuperNode in this process: messages reach the process that holds the data, and no code ever does.

``flower-supernode`` downloads and starts the app that a run names. Here the same requests are made by Flower's own
client, and each message goes to one function.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import version
from threading import Event, Thread
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message

from ...utils.version import __version__
from .. import internals
from .reasons import describe_clock

HEARTBEAT = 10.0
"""Seconds between heartbeats, the least that a SuperLink accepts; a node that misses two is gone."""
TRIES, LONGEST_PAUSE = 10, 5.0
"""How often a request is repeated before the node reconnects, and most seconds in between."""
TIMEOUT = httpx.Timeout(30.0, connect=10.0)


class Connection:
    """A connection as ``node``; a request that is cut or comes at a busy time is repeated.

    ``answered``: headers of the last answer.
    """

    def __init__(self, client: Any, stop: Event, answered: httpx.Headers) -> None:
        self.client, self.stop, self.answered = client, stop, answered
        self.node: Any = None
        self._failure: Exception | None = None

    def call(self, name: str, request: Any, most: int = TRIES) -> Any:
        """Make one of the client's requests, at most so often; raise ``httpx.HTTPError`` if it fails for good."""
        for tries in range(1, most + 1):
            if self._failure:
                raise self._failure
            try:
                return getattr(self.client, name)(request)
            except (httpx.TransportError, httpx.HTTPStatusError) as error:
                again = tries < most and _may_be_repeated(error, name)
                if not again or self.stop.wait(min(0.05 * 2**tries, LONGEST_PAUSE)):
                    raise
            except ValueError as error:  # no protobuf
                raise ConnectionError(
                    f"what answers is no coordinator of fedshift ({error}): check the address"
                ) from error
        raise AssertionError

    def receive(self) -> Message | None:
        """Return the next message; None if there is none."""
        found = self.call("PullMessages", internals.PullMessagesRequest(node=self.node))
        if not found.messages_list:
            return None
        run, tree = found.messages_list[0].metadata.run_id, found.message_object_trees[0]
        pull = internals.make_pull_object_fn_protobuf(partial(self.call, "PullObject"), self.node, run)
        make_confirm = internals.make_confirm_message_received_fn_protobuf
        confirm = make_confirm(partial(self.call, "ConfirmMessageReceived"), self.node, run)
        inflate = internals.pull_and_inflate_object_from_tree
        try:
            message: Message = inflate(tree, pull, confirm, return_type=Message, initial_backoff=0.05)
        except internals.ObjectPullError as error:
            raise ConnectionError(f"a message was withdrawn while it was fetched ({error})") from error
        message.metadata.__dict__["_message_id"] = tree.object_id
        internals.TaskIdentity.run_id = run
        return message

    def send(self, reply: Message, seconds: float) -> None:
        """Send a reply, which took so many ``seconds``."""
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with internals.no_object_id_recompute():
            head = internals.message_to_proto(internals.remove_content_from_message(reply))
            asked = internals.PushMessagesRequest(
                node=self.node, messages_list=[head], message_object_trees=[internals.get_object_tree(reply)],
                clientapp_runtime_list=[seconds],
            )  # fmt: skip
            taken = self.call("PushMessages", asked)
            push = internals.make_push_object_fn_protobuf(
                partial(self.call, "PushObject"), self.node, reply.metadata.run_id, taken.session_id
            )
            wanted = set(taken.objects_to_push)
            try:
                internals.push_objects(internals.get_all_nested_objects(reply), push, object_ids_to_push=wanted)
            except internals.ObjectPushError as error:
                raise ConnectionError(f"the coordinator waits for this answer no longer ({error})") from error

    def beat_until(self, over: Event) -> None:
        """Tell the SuperLink that this node is here until ``over`` is set; an unforeseen failure ends the next call."""
        try:
            while not over.wait(0.6 * HEARTBEAT):
                with suppress(httpx.HTTPError):
                    request = internals.SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=HEARTBEAT)
                    self.client.SendNodeHeartbeat(request)
        except Exception as error:
            self._failure = None if over.is_set() else error


def _may_be_repeated(error: httpx.HTTPError, name: str) -> bool:
    """Return whether a request that failed may be made again.

    Flower delivers a message once. If the answer that held it was lost, the node reconnects, and is asked again.
    """
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in (502, 503, 504)
    return name != "PullMessages" or isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)


class _Listening:
    """Keeps the headers of the last answer, as an interceptor of Flower's client."""

    def __init__(self) -> None:
        self.headers = httpx.Headers()

    def intercept(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
        response = call_next(context)
        self.headers.update(response.headers)
        return response


@contextmanager
def connect(
    address: str, root: str | None, key: ec.EllipticCurvePrivateKey, stop: Event, *, register: bool = False
) -> Iterator[Connection]:
    """Yield a connection to the SuperLink at ``address``; raise ``httpx.HTTPError`` or ``OSError`` if there is none.

    ``root``: file of the authority's certificate; None: plain text, where a node may ``register`` its own ``key``.
    """
    public, headers = internals.public_key_to_bytes(key.public_key()), _Listening()
    signed = internals.NodeAuthHttpInterceptor(key, key.public_key())
    client = internals.FleetHttpClient(
        f"{'https' if root else 'http'}://{address}", timeout=TIMEOUT,
        verify=ssl.create_default_context(cafile=root) if root else True,
        interceptors=[internals.RuntimeVersionHttpInterceptor("SuperNode"), signed, headers],
    )  # fmt: skip
    with client:
        made, over = Connection(client, stop, headers.headers), Event()
        if register:
            with suppress(httpx.HTTPStatusError):  # registered before
                made.call("RegisterNode", internals.RegisterNodeFleetRequest(public_key=public), 1)
        asked = internals.ActivateNodeRequest(public_key=public, heartbeat_interval=HEARTBEAT)
        made.node = internals.Node(node_id=made.call("ActivateNode", asked, 1).node_id)
        identity = internals.TaskIdentity
        identity.task_id, identity.node_id = 1, made.node.node_id
        Thread(target=made.beat_until, args=(over,), daemon=True).start()
        try:
            yield made
        finally:
            over.set()
            with suppress(httpx.HTTPError):
                client.DeactivateNode(internals.DeactivateNodeRequest(node_id=made.node.node_id))


def answer_all(made: Connection, answer: Callable[[Message], Message], stop: Event, poll: float) -> None:
    """Answer each message until ``stop`` is set; ask for the next every ``poll`` seconds.

    Raises ``httpx.HTTPError`` or ``OSError`` once the connection is lost, and what ``answer`` raises.
    """
    while not stop.is_set():
        message = made.receive()
        if message is None:
            stop.wait(poll)
            continue
        began = time.monotonic()
        reply = answer(message)
        made.send(reply, time.monotonic() - began)


def check_connection(address: str, root: str | None, key: ec.EllipticCurvePrivateKey) -> list[str]:
    """Connect as a site does, leave, and return in lines what was learned; raise what :func:`connect` raises."""
    began = time.monotonic()
    with connect(address, root, key, Event(), register=root is None) as made:
        there = made.answered.get("fedshift-version", "unknown")
        return [
            f"connected to {address} in {time.monotonic() - began:.1f} seconds, "
            f"{'with TLS, and the coordinator knows this key' if root else 'in plain text'}",
            describe_clock(made.answered.get("date")),
            f"fedshift {__version__} here, {there} at the coordinator; flwr {version('flwr')} here",
        ]
