"""What the documents promise: every Python block runs, every command exists, every link leads somewhere."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fedshift.config.expressions import list_catalog
from fedshift.data.augmentation import CATALOG
from fedshift.data.sources import SPLITS

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language):
    return [
        pytest.param(text, id=f"{document.name}-{number}")
        for document in DOCUMENTS
        for number, (kind, text) in enumerate(BLOCK.findall(document.read_text()))
        if kind == language
    ]


@pytest.mark.parametrize("code", blocks("python"))
def test_every_python_block_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "document", "exec"), {"__name__": "document"})


@pytest.mark.parametrize("commands", blocks("console"))
def test_every_fedshift_command_is_understood(commands, monkeypatch):
    """The parser takes each command of the block; settings files and runs that it names need not exist."""
    from fedshift.cli.app import app

    monkeypatch.setattr(app, "config", ())
    spoken = [shlex.split(line, comments=True) for line in commands.splitlines()]
    for words in spoken:
        if words and words[0] == "fedshift":
            command, bound, _ = app.parse_args(words[1:], exit_on_error=False, print_error=False)
            parts = ("adapt", "data", "deployment", "features", "reproduce", "sweep", "theory")
            assert command.__module__ in ("fedshift.cli.app", *(f"fedshift.cli.{part}" for part in parts))
            known = "spec output directory model method what where name out json leave_out"
            adapting = "run data clients policies rounds unlabeled save methods seeds device"
            across = "address config data days host key min_clients names nodes port resume tls"
            papers = "table seeds scale version clients samples dimension width heterogeneity seed steps layer"
            assert set(bound.arguments) <= {*known.split(), *adapting.split(), *across.split(), *papers.split()}


def test_the_method_of_the_contributing_guide_runs_composed_from_the_command_line(tmp_path):
    text = (ROOT / "CONTRIBUTING.md").read_text()
    code = next(body for kind, body in BLOCK.findall(text) if kind == "python")
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 20
    (tmp_path / "my_methods.py").write_text(code)
    spoken = next(line for line in text.splitlines() if line.startswith("fedshift compare"))
    words = [*shlex.split(spoken)[1:], "--rounds", "1", "--samples", "40", "--out", "run"]
    done = subprocess.run(
        [sys.executable, "-m", "fedshift", *words],
        cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "fedbn+lgfedavg" in done.stdout
    assert (tmp_path / "run" / "report.html").exists()


def test_the_page_on_deployment_loads_the_model_that_a_site_left(tmp_path, monkeypatch):
    from fedshift.flower.site.site import SiteState
    from fedshift.models.digits import small_cnn

    text, page = (ROOT / "docs" / "deployment.md").read_text(), {}
    exec(next(body for kind, body in BLOCK.findall(text) if "def model_of" in body), page)
    left = small_cnn((3, 28, 28), 10).state_dict()
    SiteState(tmp_path / "sites" / "north" / "e1" / "fedbn-seed0", "north", None, "").export_model(left, 3)
    monkeypatch.chdir(tmp_path)
    found = page["model_of"]("north")
    assert not found.training
    assert all(tensor.equal(left[name]) for name, tensor in found.state_dict().items())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_pictures_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)\)|src=\"([^\"]+)\"", document.read_text()):
        path = next(filter(None, target))
        if "://" not in path:
            assert (document.parent / path).exists(), path


def test_versions_agree():
    import fedshift

    assert f"version: {fedshift.__version__}" in (ROOT / "CITATION.cff").read_text()
    assert f"## {fedshift.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_page_on_data_names_every_benchmark_split_and_augmentation():
    text = (ROOT / "docs" / "data.md").read_text()
    for name in (*list_catalog("data.datasets"), *SPLITS, *CATALOG):
        assert re.search(rf"`{name}\b", text), name
