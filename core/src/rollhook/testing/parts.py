"""Parts of a machine that a test may need: a module, a program, a device, a privilege."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest


def _program(name: str) -> Callable[[], bool]:
    return lambda: shutil.which(name) is not None


def _module(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.loader is not None and spec.origin is not None


def find_python(version: str) -> str | None:
    """Return an interpreter of a version such as "3.12", of the system or of pyenv; None without one."""
    found = [shutil.which(f"python{version}")]
    if root := os.environ.get("PYENV_ROOT"):
        found += [str(path) for path in sorted(Path(root, "versions").glob(f"{version}.*/bin/python"))]
    for path in found:
        if path and subprocess.run([path, "--version"], capture_output=True, check=False).returncode == 0:
            return path
    return None


#: part -> (is it here?, how to get it); any other name is that of a module
PARTS: dict[str, tuple[Callable[[], bool], str]] = {
    "bubblewrap": (_program("bwrap"), "apt-get install bubblewrap"),
    "unshare": (_program("unshare"), "apt-get install util-linux"),
    "git": (_program("git"), "apt-get install git"),
    "root": (lambda: os.geteuid() == 0, "run the tests as root"),
    "user": (lambda: os.geteuid() != 0, "run the tests as an ordinary user"),
    "nvidia": (lambda: any(Path("/dev").glob("nvidia[0-9]*")), "a machine with an NVIDIA device"),
    "python3.12": (lambda: find_python("3.12") is not None, "install Python 3.12, by pyenv for one"),
    "cgroup2": (
        lambda: os.access("/sys/fs/cgroup/cgroup.procs", os.W_OK),
        "a cgroup v2 tree that this user may write to",
    ),
}


def has_part(name: str) -> bool:
    """Return whether a part is here: a key of `PARTS`, else a module that can be imported."""
    return PARTS[name][0]() if name in PARTS else _module(name)


def needs_part(*names: str) -> None:
    """Skip the test, or at module level the whole file, unless all these parts are here.

    The reason begins with `needs NAME`. Where `.ci/run` says that it installed a part, a skip for it
    is a failure (the root's conftest.py sees to that).
    """
    for name in names:
        if not has_part(name):
            way = PARTS[name][1] if name in PARTS else f"pip install {name}"
            pytest.skip(f"needs {name} ({way})", allow_module_level=True)
