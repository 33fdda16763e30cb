"""What all surfaces of the double share: machines, images, faults, the journal and the options of the run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from doubles.faults import Faults
from doubles.images import Images
from doubles.machines import Machines


@dataclass
class Options:
    """What a test may set through the control port; times in seconds."""

    #: how long a minute of the vendor's timers lasts
    minute: float = 60.0
    #: items on a page of a list, at most
    page: int = 3
    #: how long a sandbox takes in each of its intermediate states
    step: float = 0.01
    #: how long a new sandbox is missing from lists, and a deleted one still in them
    list_lag: float = 0.0
    #: sandboxes that may live at once, None for any number
    most_live: int | None = None
    #: what is answered beyond `most_live`
    most_live_status: int = 429
    most_live_text: str = "Maximum number of concurrent sandboxes reached"
    #: state events are pushed (Daytona)
    events: bool = True
    #: the state in which the next sandboxes end instead of running
    fail_state: str | None = None
    #: a command's own time limit is obeyed
    obey_timeout: bool = True
    #: sandboxes whose deletion never ends
    stuck_deletes: int = 0
    #: a key other than the run's is refused; False refuses every key
    accept_key: bool = True


@dataclass
class World:
    """One run of the double."""

    directory: Path
    key: str
    machines: Machines
    images: Images
    options: Options = field(default_factory=Options)
    faults: Faults = field(default_factory=Faults)
    #: what was asked: see `faults.watch`
    journal: list[dict[str, Any]] = field(default_factory=list)
    #: base URL of each surface
    urls: dict[str, str] = field(default_factory=dict)
    #: what a surface wants to be ended with the double
    closing: list[Any] = field(default_factory=list)
    #: counts a test may ask for: images built, sandboxes made, the most that lived at once
    counts: dict[str, int] = field(default_factory=dict)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    @classmethod
    def make(cls, directory: Path, key: str) -> World:
        machines = Machines(directory / "machines")
        return cls(directory, key, machines, Images(directory / "images", machines))

    def set_options(self, values: dict[str, Any]) -> None:
        """Set options by name; KeyError for one that is not there."""
        known = {each.name for each in fields(Options)}
        if unknown := set(values) - known:
            raise KeyError(", ".join(sorted(unknown)))
        for name, value in values.items():
            setattr(self.options, name, value)

    def count(self, name: str, by: int = 1) -> int:
        """Add to a count."""
        self.counts[name] = self.counts.get(name, 0) + by
        return self.counts[name]

    def peak(self, name: str, value: int) -> None:
        """Note the highest value."""
        self.counts[name] = max(self.counts.get(name, 0), value)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something beside the requests; its failure is a line of the journal."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.journal.append({"surface": "double", "failed": repr(error), "at": time.time()})

    async def aclose(self) -> None:
        """End everything."""
        for task in list(self._tasks):
            task.cancel()
        for close in self.closing:
            await close()
        await self.machines.aclose()
