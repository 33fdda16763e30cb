"""Named points around each durable write where a test, or `ROLLHOOK_FAILPOINT`, lets the process die.

Dying is the real thing, SIGKILL, so that nothing is cleaned up and no thread goes on. Unless one is armed,
reaching a point costs a comparison. `ROLLHOOK_FAILPOINT=NAME[:HIT]` arms a point at the start of any verb;
`HIT` counts from 1 how often it is reached in that process.
"""

from __future__ import annotations

import os
import signal

from rollhook.errors import UsageError

VARIABLE = "ROLLHOOK_FAILPOINT"

#: every point, in the order of the code; a test proves that each is reached
NAMES = (
    # a file that is replaced as a whole: weights' marker, checkpoint's marker, status, result, tokens
    "durable.before_write",
    "durable.before_rename",
    "durable.after_rename",
    "journal.before_write",
    "journal.before_fsync",
    "journal.after_fsync",
    "rundir.before_index",
    "rundir.before_owner",
    "rundir.after_owner",
    "rundir.before_status",
    "result.before_write",
    "result.after_write",
    "checkpoint.after_begin",
    "checkpoint.before_rename",
    "checkpoint.before_marker",
    "checkpoint.after_marker",
    "checkpoint.amid_removal",
    "weights.after_new",
    "weights.before_marker",
    "weights.after_marker",
    "weights.amid_removal",
    "episodes.after_open",
    "episodes.before_tokens",
    "episodes.before_lines",
    "episodes.after_lines",
    "metrics.before_row",
    "metrics.after_row",
    "sandbox.before_create",
    "sandbox.after_create",
)

#: what is armed: name -> how often it may still be reached
_armed: dict[str, int] = {}


def fail(name: str) -> None:
    """Die here if this point is armed and has been reached as often as was asked for."""
    if name in _armed:
        _armed[name] -= 1
        if _armed[name] == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def arm(name: str, hit: int = 1) -> None:
    """Let the process die when it reaches this point for the `hit`-th time; UsageError for no such point."""
    if name not in NAMES or hit < 1:
        raise UsageError(f"there is no failpoint {name}:{hit}; there are: {', '.join(NAMES)}")
    _armed[name] = hit


def arm_from_environment() -> None:
    """Arm what `ROLLHOOK_FAILPOINT` names; UsageError when that is no point."""
    name, _, hit = os.environ.get(VARIABLE, "").partition(":")
    if name:
        arm(name, int(hit) if hit.isdecimal() else int(not hit))
