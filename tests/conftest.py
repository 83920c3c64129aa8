"""A tiny federation, the program called in this process or as a process of its own, and runs compared bit for bit."""

import gc
import json
import os
import signal
import subprocess
import sys
from copy import copy
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # networks this small gain nothing from threads

import hypothesis
import numpy as np
import pytest
import torch
from cyclopts import App, ArgumentCollection
from matplotlib.figure import Figure

from fedshift.cli.app import main
from fedshift.config.settings_file import format_settings, read_run_settings
from fedshift.config.spec import CompareSpec, RunSpec
from fedshift.data.assembly import federation
from fedshift.data.federation import Federation
from fedshift.engines import ENGINES
from fedshift.experiments.callbacks import Callback
from fedshift.experiments.factory import make_experiment
from fedshift.utils.execution.workers import Workers

hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # begun in the background of a script: so would what tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until all tests are known: they and modules stay, so that looking for garbage among them finds none

SIZES = {"ann": 26, "bob": 17, "cid": 33}
"""Training samples of each client; each has 12 test samples."""


def images(count: int, light: int, key: int) -> tuple[np.ndarray, np.ndarray]:
    """``count`` images [N, 8, 8, 3] of three classes that differ in the place of a bright bar, and their labels."""
    random = np.random.default_rng(key)
    y = np.arange(count) % 3
    x = random.integers(light, light + 60, (count, 8, 8, 3))
    for image, label in zip(x, y, strict=True):
        image[:, 2 * label : 2 * label + 3] += 80
    return x.astype(np.uint8), y


ARRAYS = {
    name: (*images(size, 50 * place, 2 * place), *images(12, 50 * place, 2 * place + 1))
    for place, (name, size) in enumerate(SIZES.items())
}
"""``x_train, y_train, x_test, y_test`` of each client."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases of a sampled test as slow, so that as many as its mark says stay fast, evenly spread."""
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") is not None and item.get_closest_marker("slow") is None:
            cases.setdefault((item.path, item.originalname), []).append(item)
    for each in cases.values():
        count = each[0].get_closest_marker("sampled").args[0]
        kept = {(2 * place + 1) * len(each) // (2 * count) for place in range(count)}
        for place, item in enumerate(each):
            if place not in kept:
                item.add_marker("slow")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


TOGETHER = {
    "tests/engines/test_spread.py": "ray",
    "tests/utils/test_execution.py": "ray",
    "tests/utils/test_ray_cluster.py": "ray",
    "tests/report/test_figures.py": "pages",
    "tests/report/test_page.py": "pages",
    "tests/report/test_page_browser.py": "pages",
}
"""Files whose tests share a cluster, or pages that are drawn once."""


def place_test(nodeid: str) -> str:
    """Return the name of what runs in one process: a file, or all laws of one method, which share its rounds."""
    file, _, name = nodeid.partition("::")
    given = name.partition("[")[2].removesuffix("]").split("-")
    if not file.startswith("tests/laws/"):
        return TOGETHER.get(file, file)
    return "ray" if "ray" in given else next((each for each in given if each and each not in ENGINES), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Keep together what shares fixtures, by file; a scope for each of thousands of tests costs more than many tests.

    Marks (``xdist_group``) do nothing under pytest 9.2 with pytest-xdist 3.8, where a test's name cannot be changed.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Places(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return place_test(nodeid)

    return Places(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session", autouse=True)
def unsynced():
    """Do not wait for the disk, which takes a sixth of the time of all tests: only a power failure could tell."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: None)
        yield


def copy_arguments(arguments: ArgumentCollection) -> ArgumentCollection:
    """Return a copy into which a command line can be parsed."""
    copies = ArgumentCollection()
    for argument in arguments:
        copies.append(copy(argument))
        copies[-1].tokens = list(argument.tokens)
    places = {id(argument): made for argument, made in zip(arguments, copies, strict=True)}
    for made in copies:
        made.children = ArgumentCollection(places[id(child)] for child in made.children)
    return copies


@pytest.fixture(scope="session", autouse=True)
def parsed_once():
    """Read the arguments of a command from its types once, which otherwise takes most of a short command's time."""
    assemble, known = App.assemble_argument_collection, {}

    def assemble_once(app: App, **given: object) -> ArgumentCollection:
        key = id(app), app.default_command, *given.items()
        if key not in known:
            known[key] = app, assemble(app, **given)
        return copy_arguments(known[key][1])

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(App, "assemble_argument_collection", assemble_once)
        yield


class LastingWorkers(Workers):
    """Worker processes that stay when whoever used them closes them; they end with this process."""

    def close(self) -> None:
        pass


@pytest.fixture(scope="session", autouse=True)
def shared_workers():
    """Let engines, runs and searches of this process use the same worker processes: each takes seconds to start."""
    workers = LastingWorkers()
    with pytest.MonkeyPatch.context() as patched:
        for module in ("engines.spread", "experiments.experiment", "experiments.run_queue", "diagnosis.search"):
            patched.setattr(f"fedshift.{module}.Workers", lambda: workers)
        patched.syspath_prepend(Path(__file__).parents[1])  # where they find tests' own modules
        yield workers
    Workers.close(workers)


@pytest.fixture
def tiny() -> Federation:
    """Three clients of 26, 17 and 33 training images, 3 x 8 x 8, three classes."""
    return federation(ARRAYS, name="tiny")


def write_npz(path: Path, **arrays: np.ndarray) -> None:
    np.savez(path, **arrays)  # type: ignore[arg-type]


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    """The same as .npz files in a directory of its own."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    for name, arrays in ARRAYS.items():
        write_npz(folder / f"{name}.npz", **dict(zip(("x_train", "y_train", "x_test", "y_test"), arrays, strict=True)))
    return folder


@pytest.fixture
def rewrite(tiny_folder: Path):
    """Write one client's file again with some arrays replaced (or left out, where None)."""

    def write(client: str = "bob", **changed: np.ndarray | None) -> Path:
        file = tiny_folder / f"{client}.npz"
        with np.load(file) as packed:
            arrays = {**packed, **changed}
        write_npz(file, **{name: array for name, array in arrays.items() if array is not None})
        return file

    return write


@dataclass(frozen=True)
class Outcome:
    """Output and exit code of one command."""

    code: int
    out: str
    err: str


@pytest.fixture
def cli(capsys, monkeypatch, tmp_path):
    """Call the program in this process, in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> Outcome:
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return Outcome(stopped.value.code, said.out, said.err)

    return call


@pytest.fixture
def unpublished(monkeypatch):
    """Leave out tables, figures and page, which take most of the time of a tiny run."""
    monkeypatch.setattr("fedshift.report.publication.publish_summary", lambda *_, **__: None)


@pytest.fixture
def undrawn(monkeypatch):
    """Leave figures out of directories and pages of runs and sweeps, whose words and tables stay."""
    monkeypatch.setattr("fedshift.report.publication.save_figures", lambda *_: [])
    monkeypatch.setattr("fedshift.report.page.make_panels", lambda _: [])
    monkeypatch.setattr("fedshift.report.sweep_report.sweep_figures", lambda _: {})


@pytest.fixture
def vector_only(monkeypatch):
    """Save each figure as SVG, and an empty file in place of its PNG."""
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, to, **how: to.touch() if isinstance(to, Path) else save(figure, to, **how)
    )


@pytest.fixture
def program():
    """Start the program as a process of its own; ``before`` is Python that runs in it first."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object, before: str = "", **options) -> subprocess.Popen[str]:
        code = f"{before}\nfrom fedshift.cli.app import main\nmain()"
        process = subprocess.Popen(
            [sys.executable, "-P", "-W", "error", "-c", code, *map(str, arguments)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


VARYING = ("seconds", "elapsed", "ended", "crc32")
"""Entries of a round's record that differ between equal runs."""


def left_behind(path: Path) -> dict[str, object]:
    """What run directory ``path`` holds that must not depend on how often it was stopped, by trial and file."""
    found: dict[str, object] = {}
    for trial in sorted((path / "trials").iterdir()):
        for file in sorted(trial.iterdir()):
            key = f"{trial.name}/{file.name}"
            if file.name == "rounds.jsonl":
                rows = map(json.loads, file.read_text().splitlines())
                found[key] = [{name: value for name, value in row.items() if name not in VARYING} for row in rows]
            else:
                found[key] = file.read_bytes()
    return found


def change_settings(run: Path, **changes: object) -> None:
    """Write the settings of ``run`` again with ``changes``, as if it had been begun with them."""
    values = {**read_run_settings(run).values, **changes}
    (run / "config.toml").write_text(format_settings(values, run))


@pytest.fixture
def assert_same():
    """Fail unless two run directories hold bitwise the same trials."""

    def check(one: Path, other: Path) -> None:
        first, second = left_behind(one), left_behind(other)
        assert first.keys() == second.keys()
        assert len(first) >= 3
        for key, value in first.items():
            assert value == second[key], f"{key} differs"

    return check


@pytest.fixture
def make(tiny_folder: Path):
    """An experiment on the tiny clients; several methods make a comparison."""

    def experiment(method="fedbn", **settings):
        several = "methods" in settings
        spec = CompareSpec if several else RunSpec
        chosen = {"data": str(tiny_folder), "rounds": 3, "batch_size": 8} | ({} if several else {"method": method})
        return make_experiment(spec(**(chosen | settings)))

    return experiment


@pytest.fixture
def Listener():  # noqa: N802 - it is a class
    """The callback that keeps notices and rounds, and calls ``when`` as each round is saved."""

    class Listening(Callback):
        def __init__(self, when=lambda done: None):
            self.notices, self.rounds, self.when = [], [], when

        def on_round_end(self, done):
            self.rounds.append(done)
            self.when(done)

        def on_notice(self, text):
            self.notices.append(text)

    return Listening


@pytest.fixture
def unchanged(tiny):
    """Fails at the end if any tensor of ``tiny`` was written to."""
    before = [(part, part.x.clone(), part.y.clone()) for c in tiny.clients for part in c.splits.values()]
    yield
    for part, x, y in before:
        assert torch.equal(part.x, x)
        assert torch.equal(part.y, y)
