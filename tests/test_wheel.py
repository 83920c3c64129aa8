"""The wheel holds all that the program needs, and runs away from the checkout."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_wheel_installs_and_runs_alone(tmp_path):
    def run(*words, **options):
        return subprocess.run(words, check=True, capture_output=True, text=True, **options)

    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("fedshift-*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    source = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src" / "fedshift").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert source <= packed
    assert not any(name.startswith("tests") for name in packed)

    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    (packages,) = home.glob("lib/python*/site-packages")
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel)
    # The dependencies come from this environment; the package itself from the wheel, which stands first.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    away = {**os.environ, "OMP_NUM_THREADS": "1"}
    where = run(python, "-c", "import fedshift; print(fedshift.__file__)", cwd=tmp_path, env=away).stdout
    assert Path(where.strip()).is_relative_to(home)
    done = run(
        home / "bin" / "fedshift", "run", "--rounds", "1", "--samples", "40", "--out", "run", cwd=tmp_path, env=away
    )
    assert "Test accuracy" in done.stdout
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
