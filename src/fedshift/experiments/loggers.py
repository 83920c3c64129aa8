"""Logging to TensorBoard, MLflow and Weights & Biases, from the records of a run.

A round is logged once it is saved, with the values from its records. When a trial begins or continues, each logger
reports the last round in its store, and later rounds are logged from the records: after any interruption no point is
missing or duplicated. All stores are files in the run directory, unless environment variables name a server
(``MLFLOW_TRACKING_URI``, ``WANDB_MODE=online``).
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from secrets import token_hex
from shutil import rmtree
from typing import Any

from typing_extensions import override

from ..results.run_directory import to_file_name
from ..results.schema import Row, adds_up, compute_metric, is_lower_better, rows_to_frame
from ..results.trial_records import read_rounds, stream_measurements
from ..utils.checked_json import read_checked, write_checked
from ..utils.errors import FedshiftError, Ref, UsageError, unknown_name

LOGS, ID = "logs", "id.json"
"""Folder of a run directory for local stores, and the file in it with the run's id in remote stores."""
NONE = "none"
"""Name that means no logger."""
PROJECT = "fedshift"
"""MLflow experiment and W&B project, unless an environment variable names another."""
ALWAYS = "bytes/down"
"""Value that every round has."""


@dataclass(frozen=True, kw_only=True)
class RunLabel:
    """Label of a run in a store: the directory's ``name``, a unique ``id``, and the settings in ``config``."""

    name: str
    id: str
    config: Mapping[str, Any]


class Logger(ABC):
    """Log of one trial at a time in a store; each trial that runs side by side has a copy.

    ``folder``: for local stores. Call ``describe`` after ``open``. Methods may raise any error of the library.
    """

    def __init__(self, folder: Path, run: RunLabel) -> None:
        self.folder, self.run = folder, run

    @abstractmethod
    def open(self, method: str, seed: int) -> int:
        """Begin or continue the log of a trial; return the last round in it, 0 for none."""

    @abstractmethod
    def write(self, number: int, values: Mapping[str, float]) -> None:
        """Add the values of round ``number``."""

    @abstractmethod
    def close(self, status: str) -> None:
        """End the log of the trial, which is ``finished``, ``stopped`` or ``failed``."""

    @abstractmethod
    def describe(self) -> str:
        """Return the command that shows the log, or its address."""


class TensorBoardLogger(Logger):
    """Event files, one folder per trial. A round is one event, so that a file contains all of it or nothing."""

    @override
    def open(self, method: str, seed: int) -> int:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = self.folder / "tensorboard" / f"{to_file_name(method)}-seed{seed}"
        files = folder.glob("events.out.tfevents.*")
        last = max((event.step for file in files for event in EventFileLoader(str(file)).Load()), default=0)
        self.writer = EventFileWriter(str(folder))
        return int(last)

    @override
    def write(self, number: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self.writer.add_event(Event(wall_time=time.time(), step=number, summary=Summary(value=points)))
        self.writer.flush()

    @override
    def close(self, status: str) -> None:
        self.writer.close()

    @override
    def describe(self) -> str:
        return f"tensorboard --logdir {shlex.quote(str(self.folder / 'tensorboard'))}"


class MLflowLogger(Logger):
    """One MLflow run per trial, in a SQLite file or on the server that ``MLFLOW_TRACKING_URI`` names.

    A round is one batch, which the store accepts or rejects as a whole.
    """

    STATUS: Mapping[str, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}

    def __init__(self, folder: Path, run: RunLabel) -> None:
        super().__init__(folder, run)
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # the default of 7 takes minutes each round
        logging.getLogger("mlflow.store.db").setLevel(logging.WARNING)  # it logs a line for each table it creates
        from mlflow.tracking import MlflowClient
        from sqlalchemy import URL

        self.remote = os.environ.get("MLFLOW_TRACKING_URI")
        local = URL.create("sqlite", database=str(folder.resolve() / "mlflow.db")).render_as_string()
        self.uri = self.remote or local
        self.client = MlflowClient(tracking_uri=self.uri)
        self.client.search_experiments(max_results=1)

    @override
    def open(self, method: str, seed: int) -> int:
        from mlflow.entities import Param

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        if found := self.client.get_experiment_by_name(name):
            experiment = found.experiment_id
        else:
            files = None if self.remote else (self.folder.resolve() / "mlflow-artifacts").as_uri()
            experiment = self.client.create_experiment(name, artifact_location=files)
        tags = {"fedshift.trial": f"{self.run.id}/{to_file_name(method)}-seed{seed}", "fedshift.run": self.run.name}
        begun = self.client.search_runs([experiment], f"tags.`fedshift.trial` = '{tags['fedshift.trial']}'")
        if begun:
            self.id = begun[0].info.run_id
            self.client.update_run(self.id, status="RUNNING")
            return max((point.step for point in self.client.get_metric_history(self.id, ALWAYS)), default=0)
        self.id = self.client.create_run(experiment, run_name=f"{method} seed {seed}", tags=tags).info.run_id
        settings = {"method": method, "seed": seed, **self.run.config}
        self.client.log_batch(self.id, params=[Param(key, str(value)[:500]) for key, value in settings.items()])
        return 0

    @override
    def write(self, number: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        points = [Metric(_to_mlflow_key(name), value, now, number) for name, value in values.items()]
        self.client.log_batch(self.id, metrics=points)

    @override
    def close(self, status: str) -> None:
        self.client.set_terminated(self.id, self.STATUS[status])

    @override
    def describe(self) -> str:
        return self.uri if self.remote else f"mlflow ui --backend-store-uri {shlex.quote(self.uri)}"


class WandbLogger(Logger):
    """One Weights & Biases run per trial, offline unless ``WANDB_MODE`` is set.

    When a trial continues, the files of an offline run are rewritten from the records, since only a server can resume a
    run.
    """

    def __init__(self, folder: Path, run: RunLabel) -> None:
        super().__init__(folder, run)
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self.mode: Any = os.environ.get("WANDB_MODE", "offline")

    @override
    def open(self, method: str, seed: int) -> int:
        import wandb

        trial = f"{to_file_name(method)}-seed{seed}"
        unique = f"{self.run.id}-{zlib.crc32(trial.encode()):08x}"
        if self.mode == "offline":
            for files in (self.folder / "wandb").glob(f"offline-run-*-{unique}*"):
                rmtree(files)
        self.handle = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), dir=self.folder, id=unique, name=f"{method} seed {seed}",
            group=self.run.name, config={"method": method, "seed": seed, **self.run.config}, mode=self.mode,
            resume="allow" if self.mode == "online" else None, reinit="create_new",
            settings=wandb.Settings(
                console="off", silent=True, save_code=False, disable_git=True, x_disable_stats=True,
                x_disable_meta=True, x_save_requirements=False,
            ),
        )  # fmt: skip
        return self.handle.step - 1 if self.handle.resumed else 0

    @override
    def write(self, number: int, values: Mapping[str, float]) -> None:
        self.handle.log(dict(values), step=number, commit=True)

    @override
    def close(self, status: str) -> None:
        self.handle.finish(exit_code=0 if status == "finished" else 1)

    @override
    def describe(self) -> str:
        files = f"{shlex.quote(str(self.folder))}/wandb/offline-run-*"
        return f"wandb sync {files}" if self.mode == "offline" else self.handle.url or f"WANDB_MODE={self.mode}"


LOGGERS: Mapping[str, type[Logger]] = {"tensorboard": TensorBoardLogger, "mlflow": MLflowLogger, "wandb": WandbLogger}
"""Loggers by name, which is also the name of the extra that installs their packages."""
NEEDED: Mapping[str, Sequence[str]] = {"mlflow": ("mlflow", "sqlalchemy", "alembic")}
"""Packages that a logger needs, if not the package of the same name."""


def parse_loggers(text: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the loggers in ``text``, separated by commas; raise :class:`UsageError` for an unknown name."""
    parts = text.split(",") if isinstance(text, str) else text or ()
    names = tuple(dict.fromkeys(part.strip() for part in parts if part.strip() not in ("", NONE)))
    for name in names:
        if name not in LOGGERS:
            raise unknown_name("logger", name, (*LOGGERS, NONE)).about("log")
    return names


def require_packages(names: Sequence[str]) -> None:
    """Raise :class:`UsageError` if a package that one of the loggers ``names`` needs is missing."""
    for name in names:
        for package in NEEDED.get(name, (name,)):
            if find_spec(package) is None:
                raise UsageError(
                    f"log={name} needs the package {package}, which is not installed: pip install 'fedshift[{name}]'"
                )


class RecordLog:
    """Log of a run in ``directory`` with the loggers ``names``.

    Args:
        names: loggers.
        directory: run directory.
        config: settings of the run.
        metric: metric of the tables.
        announce: called once with the place of each log, and again if the run is logged as a new one.
        warn: called if a logger fails during the run; the run then continues without it.

    Raises:
        FedshiftError: a logger cannot start.

    """

    def __init__(
        self,
        names: Sequence[str],
        directory: Path,
        config: Mapping[str, Any],
        metric: str,
        announce: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self.metric, self.announce, self.warn = metric, announce, warn
        self.loggers: dict[str, Logger] = {}
        self._begun: set[str] = set()
        if names:
            folder = directory / LOGS
            if folder.is_dir() and not (folder / ID).exists():
                announce(
                    f"{LOGS}/{ID} is missing, which identifies this run for MLflow and Weights & Biases: they log it "
                    "as a new run"
                )
            given = {key: value for key, value in config.items() if value is not None}
            run = RunLabel(name=directory.resolve().name, id=_read_id(folder), config=given)
            for name in names:
                with self._refuse(name):
                    self.loggers[name] = LOGGERS[name](folder, run)

    @contextmanager
    def trial(self, method: str, seed: int, folder: Path, rounds: int) -> Iterator[Callable[[Row, list[Row]], None]]:
        """Log a trial inside the block, first the records in ``folder``; yield the function that logs a round.

        Call the function with the round's cost and its measurements. ``rounds``: the last round of the trial.
        """
        loggers = {name: copy(logger) for name, logger in self.loggers.items()}
        opened = {name: last for name in loggers if (last := self._open(name, loggers[name], method, seed)) is not None}
        last = 0

        def add(cost: Row, rows: list[Row]) -> None:
            nonlocal last
            last = cost["round"]
            due = [name for name, stored in opened.items() if stored < last]
            values = summarize_round(cost, rows, self.metric) if due else {}
            for name in due:
                try:
                    loggers[name].write(last, values)
                except Exception as error:  # a library or server error must not end the run
                    del opened[name]
                    self._report(name, error)

        try:
            for cost, rows in _read_rounds(folder) if opened else ():
                add(cost, rows)
            status = "failed"
            yield add
            status = "finished" if last == rounds else "stopped"
        finally:
            for name in opened:
                try:
                    loggers[name].close(status)
                except Exception as error:
                    self._report(name, error)

    def _open(self, name: str, logger: Logger, method: str, seed: int) -> int | None:
        """Return the last round of a trial in a logger's store; None if the logger fails."""
        if name not in self._begun:
            with self._refuse(name):
                last = logger.open(method, seed)
            self._begun.add(name)
            self.announce(f"logged for {name}: {logger.describe()}")
            return last
        try:
            return logger.open(method, seed)
        except Exception as error:
            self._report(name, error)
            return None

    @contextmanager
    def _refuse(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise FedshiftError(
                f"log={name} cannot begin ({_describe_error(error)}), and no round is trained without it: repair it "
                f"and continue ({{}}), or continue without it ({{}})",
                Ref(resume=True),
                Ref(log=NONE),
            ) from error

    def _report(self, name: str, error: Exception) -> None:
        self.warn(
            f"log={name} failed ({_describe_error(error)}); the run goes on, and rounds that are missing there are "
            "logged when it is resumed"
        )


def summarize_round(cost: Row, rows: Sequence[Row], metric: str) -> dict[str, float]:
    """Return a round's defined values by name.

    ``metric`` and loss of the personal model: ``test/accuracy/client/<name>``, and ``macro``, ``pooled`` and ``worst``
    over the clients measured in the round; with more than :data:`~fedshift.report.tables.ONE_BY_ONE` clients, quantiles
    replace single clients. ``test_trained`` is measured just after local work, ``train/loss`` during it.
    """
    from ..report.tables import ONE_BY_ONE, QUANTILES, pool_metric  # imports Matplotlib, which takes a second

    values: dict[str, float] = {
        ALWAYS: cost["down"],
        "bytes/up": cost["up"],
        "seconds": cost["seconds"],
        "participants": len(cost["participants"]),
    }
    frame = rows_to_frame(row for row in rows if row["model"] == "personal")
    for (split, moment), measured in frame.groupby(["split", "moment"], sort=False):
        trained = split == "train"
        for name in ("loss",) if trained else (metric, "loss"):
            clients = compute_metric(measured, name).set_axis(measured["client"]).astype(float).dropna()
            if clients.empty:
                continue
            found: dict[str, Any] = {
                "macro": clients.mean(),
                "worst": clients.max() if is_lower_better(name) else clients.min(),
            }
            if not trained and adds_up(measured, name):
                found["pooled"] = pool_metric(measured, name).iloc[0]
            if len(clients) > ONE_BY_ONE:
                found |= {f"quantile_{share:g}": clients.quantile(share) for share in QUANTILES.values()}
            else:
                found |= {f"client/{client}": value for client, value in clients.items()}
            prefix = f"{split}{'_trained' if moment == 'trained' and not trained else ''}/{name}"
            values |= {f"{prefix}/{key}": float(value) for key, value in found.items()}
    return values


def _read_rounds(folder: Path) -> Iterator[tuple[Row, list[Row]]]:
    """Yield the cost and the measurements of each round recorded in a trial's folder."""
    costs = read_rounds(folder)
    for number, rows in groupby(stream_measurements(folder, costs), key=lambda row: row["round"]):
        yield costs[number - 1], list(rows)


def _read_id(folder: Path) -> str:
    """Return the id of the run whose logs are in ``folder``; the first call draws it."""
    path = folder / ID
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_checked(path, {"id": token_hex(6)})
    return str(read_checked(path, "remove it: the run is then logged under a new id")["id"])


def _to_mlflow_key(name: str) -> str:
    """Return ``name`` in a form that MLflow allows, with a checksum if characters or length had to be changed."""
    parts = name.split("/", 3)
    allowed = "/".join([*parts[:3], *(re.sub(r"[^\w\-. :]|^\.+", "_", part)[:100] for part in parts[3:])])
    return allowed if allowed == name else f"{allowed}-{zlib.crc32(name.encode()):08x}"


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
