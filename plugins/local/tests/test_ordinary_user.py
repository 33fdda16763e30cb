"""The contract as an ordinary user: when the tests run as root, in a child that is none."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[2]
NOBODY = "65534"

#: binds what the child needs to places that any user can reach, then gives up every privilege
SCRIPT = """
set -e
mount -t tmpfs -o mode=0755 tmpfs /mnt
mkdir /mnt/python /mnt/site /mnt/checkout /mnt/home
mount --bind "$1" /mnt/python
mount --bind "$2" /mnt/site
mount --bind "$3" /mnt/checkout
chown 65534:65534 /mnt/home
cd /mnt/checkout
shift 3
exec setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps=-all --bounding-set=-all "$@"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="these tests run as an ordinary user already")
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["Bubblewrap", "Unshare"])
def test_the_contract_holds_for_an_ordinary_user(mode: str) -> None:
    python = f"/mnt/python/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    sources = ["core/src", "plugins/local/src"]
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": "/mnt/home",
        "PYTHONPATH": ":".join(["/mnt/site", *(f"/mnt/checkout/{source}" for source in sources)]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    tests = "plugins/local/tests/test_contract.py"
    some = "user or link or fast or tree or seen or closing or timeout"
    chosen = mode if mode == "Bubblewrap" else f"Unshare and ({some})"
    pytest_argv = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, tests]
    places = [sys.base_prefix, sysconfig.get_path("purelib"), str(CHECKOUT)]
    result = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", SCRIPT, "sh", *places, *pytest_argv],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    print(result.stdout[-2000:])
    assert " passed" in result.stdout
