"""The oldest and the newest supported SDK, on two Pythons: the tests of this directory in each."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from rollhook.testing.parts import find_python, needs_part

ROOT = Path(__file__).resolve().parents[3]
#: what a release of the SDK brings in its own version, so that the constraints of this checkout do not count
OF_THE_SDK = r"(?i)(e2b|connectrpc|pyqwest|protobuf-py|dockerfile-parse|wcmatch|bracex)"
TOOLS = ("pytest>=8.3", "pytest-asyncio>=1", "pytest-timeout>=2.3", "hypothesis>=6.120", "python-socketio>=5")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where environments are made: of the cache where one is given, so that the next night finds them."""
    kept = os.environ.get("TEST_VENVS")
    return Path(kept) if kept else tmp_path_factory.mktemp("venvs")


RELEASES = {"oldest": "==2.53.1", "newest": ">=2.53,<3"}


def environment(directory: Path, python: str, release: str) -> Path:
    """Return the interpreter of an environment with this release of the SDK."""
    found = find_python(python)
    assert found is not None
    venv = directory / f"e2b-{python}-{release}"
    program = venv / "bin/python"
    if not program.exists():
        subprocess.run([found, "-m", "venv", venv], check=True)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = directory / f"{venv.name}.txt"
    constraints.write_text("\n".join(line for line in lines if not re.match(OF_THE_SDK, line)))
    wanted = [f"e2b{RELEASES[release]}", "-e", str(ROOT / "core"), "-e", str(ROOT / "plugins/e2b"), *TOOLS]
    pip = [program, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", constraints, *wanted]
    subprocess.run(pip, check=True)
    return program


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("python", ["3.11", "3.12"])
@pytest.mark.parametrize("release", RELEASES)
def test_the_suite_passes(directory: Path, python: str, release: str) -> None:
    if python != "3.11":
        needs_part(f"python{python}")
    program = environment(directory, python, release)
    argv = [program, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ROOT, "--ignore", __file__]
    shown = subprocess.run(
        [program, "-c", "import e2b; print(e2b.__file__)"], capture_output=True, check=True
    )
    assert str(directory) in shown.stdout.decode()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ROLLHOOK_")}
    done = subprocess.run(
        [*argv, Path(__file__).parent], cwd=ROOT, env=environ, capture_output=True, check=False
    )
    said = done.stdout.decode()
    print(said[-4000:])
    assert done.returncode == 0, said[-4000:]
