"""SGLang's releases: which are supported, which one an interpreter has, and what they call their options."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from rollhook.engine.server_info import release

#: the first release that has every option used here, and whose server takes a weight version while paused
OLDEST = (0, 5, 7)
#: the first one that is not supported
END = (0, 6)
#: those whose options, fields and paths are compared with the ones used here
COMPARED = ("0.5.7", "0.5.10", "0.5.16", "0.5.23")
ASK_SECONDS = 60.0

#: option -> (the release that renamed it, its name since then)
RENAMED = {
    "--cuda-graph-max-bs": ((0, 5, 14), "--cuda-graph-max-bs-decode"),
    "--nsa-prefill-backend": ((0, 5, 14), "--dsa-prefill-backend"),
    "--nsa-decode-backend": ((0, 5, 14), "--dsa-decode-backend"),
}
_ATTENTION_RANKS_APART = (0, 5, 22)
_STREAMS_INCREMENTS = (0, 5, 10)
_ASK = (
    "from importlib import metadata; d = metadata.distribution('sglang');"
    "print(d.version); print(d.locate_file('sglang'))"
)


@dataclass(frozen=True)
class Installed:
    """The SGLang of an interpreter: its version, and the directory of the package."""

    version: str
    package: Path


def supported(version: str) -> bool:
    """Return whether a release is supported."""
    return OLDEST <= release(version) < END


def unsupported(version: str) -> str:
    """Return that a release is not supported, and which are, in words."""
    oldest, end = (".".join(map(str, numbers)) for numbers in (OLDEST, END))
    return f"SGLang {version} is not supported; releases from {oldest} on and below {end} are"


def flag(name: str, version: str) -> str:
    """Return what a release calls an option."""
    since, renamed = RENAMED.get(name, (END, name))
    return renamed if release(version) >= since else name


def attention_ranks_are_apart(version: str) -> bool:
    """Return whether the ranks of data-parallel attention have an option of their own."""
    return release(version) >= _ATTENTION_RANKS_APART


def streams_increments(version: str) -> bool:
    """Return whether a server can stream what is new alone, not all of a reply again in every event."""
    return release(version) >= _STREAMS_INCREMENTS


def installed(python: str | None, env: Mapping[str, str]) -> Installed | None:
    """Return the SGLang that an interpreter has, None without one; it is not imported.

    Blocks, up to a minute, unless the interpreter is this one.
    """
    if python is None and "PYTHONPATH" not in env:
        try:
            found = metadata.distribution("sglang")
        except metadata.PackageNotFoundError:
            return None
        return Installed(found.version, Path(str(found.locate_file("sglang"))))
    try:
        done = subprocess.run(
            [python or sys.executable, "-c", _ASK],
            capture_output=True,
            text=True,
            env=os.environ | env,
            timeout=ASK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    said = done.stdout.splitlines()
    return Installed(said[0], Path(said[1])) if done.returncode == 0 and len(said) == 2 else None
