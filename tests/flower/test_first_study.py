"""The page of a first study is followed as it is printed, with fewer rounds and another port."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flower.processes import free_port

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_page_leads_from_keys_to_models(tmp_path):
    port, program = str(free_port()), tmp_path / "bin" / "fedshift"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m fedshift "$@"\n')
    program.chmod(0o755)
    environment = os.environ | {"PATH": f"{program.parent}:{os.environ['PATH']}"}

    def start(commands, folder):
        shell, output = ["bash", "-ec", commands], subprocess.PIPE
        return subprocess.Popen(shell, cwd=folder, env=environment, text=True, stdout=output, stderr=subprocess.STDOUT)

    def follow(commands, folder):
        with start(commands, folder) as running:
            printed, _ = running.communicate(timeout=300)
        assert running.returncode == 0, commands
        return printed

    page = (ROOT / "docs" / "deployment.md").read_text().replace("9091", port).replace("rounds = 20", "rounds = 2")
    prepare, hospitals, begin, look = (text for kind, text in BLOCK.findall(page) if kind == "console")
    installing, making = prepare.split("\n", 1)
    assert "pip install" in installing
    study = tmp_path / "study"
    follow(making.replace("pip wheel --no-deps --wheel-dir study/archive .", "mkdir study/archive"), tmp_path)
    (settings,) = (text for kind, text in BLOCK.findall(page) if kind == "toml")
    (study / "coordinator" / "experiment.toml").write_text(settings)
    follow(hospitals, study)
    follow(f"{sys.executable} {ROOT}/examples/deployment/make_sites.py", study)
    serving, *joining = begin.splitlines()
    serving = serving.replace("--tls pki", f"--tls pki --port {port}")
    for running in [start(command, study) for command in (serving, *(f"{each} --poll 0.2" for each in joining))]:
        printed, _ = running.communicate(timeout=300)
        assert running.returncode == 0, printed
    _, ledger, _, predict = look.splitlines()
    assert "2 uploads, 3 evaluations, 1 descriptions in all" in follow(ledger, study)
    follow(predict, study)
    assert len((study / "answers" / "cases.csv").read_text().splitlines()) == 15
    assert (study / "coordinator" / "runs" / "first" / "report.html").exists()
