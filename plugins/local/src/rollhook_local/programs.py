"""Where the programs are that sandboxes are made with."""

from __future__ import annotations

import os
import shutil


def which(name: str) -> str | None:
    """Return where a program is on this machine, system directories included."""
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin")
