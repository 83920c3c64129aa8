"""Names from inside Flower, which are not public and may move with any release: all of them stand here.

Flower's public packages (``flwr.app``, ``flwr.serverapp``, ``flwr.clientapp``) are imported where they are used. A
module is imported when one of its names is first used, so that a site needs nothing of the server's.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Any

from ..utils.errors import UsageError

RELEASES = ("1.41", "1.42")
"""Releases of Flower in which all names stand, and with which the tests were run."""
_NAMES = {
    "flwr.app.message": "remove_content_from_message",
    "flwr.common.constant": "NOOP_ACCOUNT_NAME NOOP_FLWR_AID SYSTEM_TIME_TOLERANCE TIMESTAMP_TOLERANCE ErrorCode",
    "flwr.common.serde": "message_from_proto message_to_proto",
    "flwr.proto.fleet_pb2": "ActivateNodeRequest DeactivateNodeRequest PullMessagesRequest PushMessagesRequest "
    "RegisterNodeFleetRequest",
    "flwr.proto.heartbeat_pb2": "SendNodeHeartbeatRequest",
    "flwr.proto.message_pb2": "Message",
    "flwr.proto.node_pb2": "Node",
    "flwr.supercore.constant": "FLWR_IN_MEMORY_DB_NAME NOOP_FEDERATION_ID TaskType",
    "flwr.supercore.error": "ApiErrorCode http_error_translator",
    "flwr.supercore.heartbeat": "HeartbeatSender",
    "flwr.supercore.inflatable.inflatable_object": "get_all_nested_objects get_object_tree no_object_id_recompute",
    "flwr.supercore.inflatable.inflatable_protobuf_utils": "make_confirm_message_received_fn_protobuf "
    "make_pull_object_fn_protobuf make_push_object_fn_protobuf",
    "flwr.supercore.inflatable.inflatable_utils": "ObjectPullError ObjectPushError "
    "pull_and_inflate_object_from_tree push_objects",
    "flwr.supercore.interceptors.http.runtime_version": "RuntimeVersionHttpInterceptor",
    "flwr.supercore.primitives.asymmetric": "bytes_to_public_key public_key_to_bytes verify_signature",
    "flwr.supercore.protobuf.translation": "ProtobufTranslationMiddleware",
    "flwr.supercore.task_identity": "TaskIdentity",
    "flwr.superlink.config_loader": "get_objectstore_linkstate_factories",
    "flwr.superlink.federation": "NoOpFederationManager",
    "flwr.superlink.grid.http_grid": "HttpGrid",
    "flwr.superlink.routers.fleet.node_auth": "NodeAuthMiddleware",
    "flwr.superlink.routers.fleet.router": "router",
    "flwr.superlink.servicer.runtime.runtime_handlers": "confirm_message_received get_nodes pull_messages pull_object "
    "push_messages push_object",
    "flwr.supernode.fleet_http_client": "FleetHttpClient",
    "flwr.supernode.node_auth_http_interceptor": "NodeAuthHttpInterceptor",
}
HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
"""Module of each name."""


def __getattr__(name: str) -> Any:
    """Return the object ``name``; raise :class:`UsageError` if the installed release of Flower does not have it."""
    if name not in HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(HOME[name]), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"flwr {version('flwr')} has no {name} in {HOME[name]}, which fedshift needs: install a release that does "
            f"({' or '.join(RELEASES)}): pip install 'flwr=={RELEASES[-1]}.*'"
        ) from error
