"""Stand-ins for the programs that Flower starts for each message and run (:mod:`.programs`).

Flower would run any app that the coordinator sends. At a site nothing runs but what is installed there, and the app
that was sent is not even unpacked: the message is forwarded to ``fedshift join``, and its answer back. Flower starts a
process for each message, which takes a second of imports; here one process imports once and forks.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from .exchange import Exchange, connect_locally
from .programs import exit_with_parent, is_own, poll_quickly

SITE = "FEDSHIFT_SITE"
"""Names the socket on which ``fedshift join`` listens."""
PIPE = "FEDSHIFT_PIPE"
"""Names the pipe through which a site's SuperNode requests programs."""

app = ClientApp()


@app.query()
@app.train()
@app.evaluate()
def forward(message: Message, context: Context) -> Message:
    """Return the site's answer to ``message``."""
    with connect_locally(Path(os.environ[SITE])) as connection:
        replace(Exchange.of(message.content), run=context.run_id).send(connection)
        answer = Exchange.receive(connection)
    return Message(answer.content(), reply_to=message)


def serve_requests() -> None:
    """Run ``flwr-clientapp`` with :data:`app` in a fork of this process for each line of arguments.

    The lines arrive through the pipe that :data:`PIPE` names. Forks end with this process.
    """
    poll_quickly()
    runtime = import_module("flwr.supernode.runtime.run_clientapp")
    _replace(runtime, "install_from_fab", lambda *_, **__: None)
    _replace(runtime, "get_load_client_app_fn", lambda *_, **__: lambda *_, **__: app)
    run = import_module("flwr.supernode.cli").flwr_clientapp
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are not waited for
    with os.fdopen(
        os.open(os.environ[PIPE], os.O_RDWR), encoding="utf-8"
    ) as lines:  # read and write, so that it stays open without writers
        for line in lines:
            if os.fork() == 0:
                threading.Thread(target=exit_with_parent, args=(sys.stdin.fileno(),), daemon=True).start()
                sys.argv[1:] = line.split()
                try:
                    run()
                finally:
                    os._exit(0)


def run_serverapp() -> None:
    """Run ``flwr-serverapp``, refusing all apps but fedshift's own."""
    from flwr.superlink.cli import flwr_serverapp

    poll_quickly()
    runtime = import_module("flwr.superlink.runtime.run_serverapp")
    install = runtime.install_from_fab

    def install_own(content: bytes, *rest: object, **named: object) -> object:
        if not is_own(content):
            raise RuntimeError("another app than fedshift's was submitted to this SuperLink: refused")
        return install(content, *rest, **named)

    _replace(runtime, "install_from_fab", install_own)
    flwr_serverapp()


def _replace(module: object, name: str, by: Callable[..., object]) -> None:
    if not hasattr(module, name):
        sys.exit(f"this version of Flower has no {name}: fedshift cannot keep it from running foreign apps")
    setattr(module, name, by)
