"""An attempt of a verb that works in a run directory of its own: how it begins and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rollhook.rundir import Attempt, Status, Verb
    from rollhook.runtime.progress import Display

EXIT_STOPPED = 3


def begin(verb: Verb, root: str, name: str, run_id: str | None, resume: str | None = None) -> Attempt:
    """Claim the first attempt of a new run, or the next of the run to resume.

    Raises UsageError for an id beside a run to resume, RunError for a run of another verb.
    """
    from rollhook.errors import UsageError
    from rollhook.rundir import RunDir

    if resume is not None and run_id is not None:
        raise UsageError("--resume goes on with a run that has its id; give no --run-id beside it")
    run = RunDir.find(resume) if resume is not None else RunDir.create(root, name, run_id=run_id)
    return run.claim(verb)


@contextmanager
def ending(attempt: Attempt, display: Display, way_on: str = "") -> Iterator[None]:
    """Show the display, and end the attempt with how the block ended.

    An interrupt exits with the code of a stopped run, after `way_on` was said.
    """
    status: Status = "failed"
    try:
        with display.running():
            yield
        status = "succeeded"
    except (KeyboardInterrupt, asyncio.CancelledError):
        status = "stopped"
        display.say(f"Stopped; {way_on}" if way_on else "Stopped.")
        raise typer.Exit(EXIT_STOPPED) from None
    finally:
        attempt.finish(status)
