"""Whether a run is alive, seen from outside: by its newest attempt's status, process and heartbeat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollhook.heartbeat import moving
from rollhook.rundir import AttemptInfo

#: in words; `dead` is an attempt that ended without a word
STATES = ("succeeded", "failed", "stopped", "running", "dead", "not started")


def state_of(attempt: AttemptInfo | None, watch: Callable[..., set[Any]] = moving) -> str:
    """Return one of `STATES`.

    Blocks for up to 20 s where the heartbeat of another machine has to be watched.
    """
    if attempt is None:
        return "not started"
    if attempt.status is not None:
        return attempt.status
    if not attempt.surely_dead() and watch([attempt.heartbeat_path]):
        return "running"
    return attempt.read_again().status or "dead"  # it may have ended in good order meanwhile
