"""``fedshift serve``: the coordinator of an experiment across machines.

One process is Flower's SuperLink for nodes (:mod:`.superlink`) and runs the experiment (:mod:`.coordinator`).
``--resume`` continues the run from the last saved round.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from ...config.expressions import trust_only
from ...config.settings_file import FILE
from ...config.spec import CompareSpec, RunOptions, RunSpec
from ...console.printing import Console
from ...console.terminal import catch_interrupts, print_line, report_stop, show_progress
from ...experiments.callbacks import Callbacks
from ...results.run_directory import MACHINES, acquire_lock
from ...results.summary import require_series
from ...utils.errors import FedshiftError, UsageError
from ...utils.files import owner_only
from ..keys import LOOPBACK, PublicKeys, check_server, read_end
from .coordinator import Coordinator, Progress
from .link import serve_nodes
from .metrics import serve_metrics
from .remote_engine import RoundOptions
from .rounds import go_back


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """A coordinator's address.

    ``tls``: directory made by `fedshift pki`; None: plain text, which leaves this machine only if ``forced``.
    ``metrics``: loopback port for metrics; None: no metrics.
    """

    host: str
    port: int
    tls: Path | None
    forced: bool = False
    metrics: int | None = None

    @property
    def flags(self) -> str:
        """The equivalent command-line flags."""
        secured = f"--tls {shlex.quote(str(self.tls))}" if self.tls else "--insecure"
        metrics = "" if self.metrics is None else f" --metrics {self.metrics}"
        return f"{secured} --host {self.host} --port {self.port}{metrics}{' --force-insecure' * self.forced}"

    def check(self) -> None:
        """Raise :class:`UsageError` if files are missing or do not fit, or plain text would be sent away."""
        if self.tls:
            for name in ("ca.crt", "server.crt", "server.key"):
                if not (self.tls / name).is_file():
                    raise UsageError(f"--tls {self.tls}: contains no {name}: create it with `fedshift pki`")
            if not any((self.tls / "nodes").glob("*.pub")):
                raise UsageError(f"--tls {self.tls}: contains no site's key: put each site's public key into nodes/")
            check_server(self.tls)
        elif self.host not in LOOPBACK and not self.forced:
            raise UsageError(
                f"--insecure on --host {self.host} would send models in plain text to other machines: give --tls, or "
                "listen on 127.0.0.1 behind a tunnel, or force it (--force-insecure)"
            )


def serve(
    spec: RunSpec | CompareSpec, listen: ListenOptions, rounds: RoundOptions, place: RunOptions, directory: Path,
    from_round: int | None = None,
) -> int:  # fmt: skip
    """Run ``spec`` in ``directory`` with the sites that connect; return an exit code, as ``fedshift run`` does.

    All files are accessible only to their owner. ``from_round``: the trial in progress first goes back to this round;
    None: it continues where it stopped.
    """
    console = Console()
    if place.resume is None and (directory / "config.toml").exists():
        raise UsageError(
            f"{directory} already holds a run: continue it (--resume {directory}), or choose another --out"
        )
    if place.resume:
        require_series(directory)
    finished, failure = False, list[FedshiftError | OSError]()
    with owner_only():
        try:
            finished = _run(spec, listen, rounds, place, directory, from_round, console)
        except UsageError:
            raise
        except FedshiftError as error:
            failure.append(error)
        except KeyboardInterrupt:
            pass
        from ...report.publication import publish_safely

        failure += filter(None, [publish_safely(directory, console)])
    if failure:
        raise failure[0]
    return 0 if finished else report_stop(console, f"serve {rounds.flags} {listen.flags}", directory)


def _run(
    spec: RunSpec | CompareSpec, listen: ListenOptions, rounds: RoundOptions, place: RunOptions, directory: Path,
    from_round: int | None, console: Console,
) -> bool:  # fmt: skip
    """Listen and run the experiment; return whether it finished."""
    keys = PublicKeys(listen.tls, lambda text: print_line(console, text)) if listen.tls else None
    log = directory / MACHINES / "superlink.log"
    with (
        acquire_lock(directory / MACHINES),
        catch_interrupts(console) as stop,
        show_progress(Console(quiet=place.quiet)) as shown,
        serve_metrics(listen.metrics, read_end(listen.tls) if listen.tls else None) as counted,
        trust_only(place.code, place.config or directory / FILE),
        serve_nodes(listen.host, listen.port, listen.tls, keys, log) as grid,
    ):
        print_line(console, f"{directory}: listening on {listen.host}:{listen.port}")
        if from_round is not None:
            go_back(directory, from_round)
        report = Progress(Callbacks(shown, counted), stop, listen.tls)
        return Coordinator(grid, spec, directory.resolve(), rounds, report, keys).run()
