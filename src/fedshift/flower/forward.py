"""What a site's SuperNode starts for each message: it passes the message on to ``fedshift join`` and the answer back.

Flower would run whatever app the coordinator sends. This program stands in for Flower's ``flwr-clientapp`` at a site
(:mod:`fedshift.flower.programs`) and runs nothing but what is installed there: the app that came is not even unpacked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from multiprocessing.connection import Client

from . import quiet as quiet  # isort: split

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from .exchange import Exchange

SITE = "FEDSHIFT_SITE"
"""Names the socket on which ``fedshift join`` listens."""

app = ClientApp()


@app.query()
@app.train()
@app.evaluate()
def forward(message: Message, context: Context) -> Message:
    """The answer of the site to ``message``."""
    with Client(os.environ[SITE], family="AF_UNIX") as talk:
        replace(Exchange.of(message.content), run=context.run_id).send(talk)
        answer = Exchange.receive(talk)
    return Message(answer.content(), reply_to=message)


def clientapp() -> None:
    """``flwr-clientapp``, but running :data:`app` alone."""
    from flwr.supernode.cli import flwr_clientapp

    runtime = import_module("flwr.supernode.runtime.run_clientapp")
    _replace(runtime, "install_from_fab", lambda *_, **__: None)
    _replace(runtime, "get_load_client_app_fn", lambda *_, **__: lambda *_, **__: app)
    flwr_clientapp()


def serverapp() -> None:
    """``flwr-serverapp``, but refusing every app but fedshift's own."""
    from flwr.superlink.cli import flwr_serverapp

    runtime = import_module("flwr.superlink.runtime.run_serverapp")
    install = runtime.install_from_fab

    def install_own(content: bytes, *rest: object, **named: object) -> object:
        from .programs import is_own

        if not is_own(content):
            raise RuntimeError("another app than fedshift's was submitted to this SuperLink: refused")
        return install(content, *rest, **named)

    _replace(runtime, "install_from_fab", install_own)
    flwr_serverapp()


def _replace(module: object, name: str, by: Callable[..., object]) -> None:
    if not hasattr(module, name):
        sys.exit(f"this version of Flower has no {name}: fedshift cannot keep it from running foreign apps")
    setattr(module, name, by)
