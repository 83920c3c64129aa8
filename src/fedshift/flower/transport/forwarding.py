"""The apps that Flower's programs run for each message and run, instead of the apps that they were sent.

Flower would run any app that the coordinator sends. A site runs only code that is installed there and does not even
unpack the app that was sent: each message is forwarded to ``fedshift join``, and its answer back. Flower starts a
process for each task, which spends a second on imports and gets its secret token on the command line, where every
account on the machine can read it. Here, one process imports once and forks.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult

from .exchange import Exchange, connect_locally
from .programs import exit_with_parent, is_own, poll_quickly, replace_part

SITE = "FEDSHIFT_SITE"
"""Environment variable with the path of the socket on which ``fedshift join`` listens."""

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


class ForkExecutor:
    """Flower executor that starts tasks of ``kind`` as forks of this process that call ``run``.

    Other tasks are refused. If a fork is killed, this process exits, and its parent restarts it; the fork's message is
    then answered again.
    """

    def __init__(self, kind: TaskType, run: Callable[[], None]) -> None:
        self.kind, self.run = kind, run
        self._copies: set[int] = set()

    def get_eligible_capacity(self, supported: set[TaskType], **_: object) -> tuple[set[TaskType], set[str]]:
        """Return the kinds of tasks that can be started."""
        return supported & {self.kind}, set()

    def wait_for_capacity(self, *_: object, **__: object) -> None:
        """Return at once."""

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start a task."""
        if spec.task_type != self.kind:
            return LaunchResult.failed(f"a task of kind {spec.task_type} is not for this machine")
        secured = ["--insecure"] if spec.insecure else ["--root-certificates", str(spec.root_certificates_path)]
        copy = os.fork()
        if copy:
            self._copies.add(copy)
            return LaunchResult.accepted()
        code = 1
        try:
            threading.Thread(target=exit_with_parent, args=(sys.stdin.fileno(),), daemon=True).start()
            sys.argv = [self.kind, "--runtime-api-address", spec.runtime_api_address, "--token", spec.token, *secured]
            self.run()
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)

    def reconcile(self) -> None:
        """Forget forks that have ended; exit if one was killed."""
        for copy in list(self._copies):
            ended, status = os.waitpid(copy, os.WNOHANG)
            if ended:
                self._copies.discard(copy)
            if ended and os.WIFSIGNALED(status):
                print(f"a process at work was killed (signal {os.WTERMSIG(status)})", flush=True)
                os._exit(1)

    def close(self) -> None:
        """Do nothing: forks end with this process."""


def execute_tasks() -> None:
    """Run ``flower-superexec`` with a :class:`ForkExecutor`: for a site's messages, or for the coordinator's app."""
    poll_quickly()
    if SITE in os.environ:
        runtime, run = "flwr.supernode.runtime.run_clientapp", "run_clientapp"
        replace_part(runtime, "install_from_fab", lambda *_, **__: None, used_by=run)
        replace_part(runtime, "get_load_client_app_fn", lambda *_, **__: lambda *_, **__: app, used_by=run)
        executor = ForkExecutor(TaskType.CLIENT_APP, import_module("flwr.supernode.cli").flwr_clientapp)
    else:
        runtime, run = "flwr.superlink.runtime.run_serverapp", "run_serverapp"
        install = import_module(runtime).install_from_fab

        def install_own(content: bytes, *rest: object, **named: object) -> object:
            if not is_own(content):
                raise RuntimeError("another app than fedshift's was submitted to this SuperLink: refused")
            return install(content, *rest, **named)

        replace_part(runtime, "install_from_fab", install_own, used_by=run)
        executor = ForkExecutor(TaskType.SERVER_APP, import_module("flwr.superlink.cli").flwr_serverapp)
    superexec = "flwr.supercore.superexec.run_superexec"
    replace_part(superexec, "get_executor", lambda *_, **__: executor, used_by="run_superexec")
    import_module("flwr.supercore.cli").flower_superexec()
