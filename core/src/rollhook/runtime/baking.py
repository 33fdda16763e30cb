"""Making ahead of a run what its sandboxes need: every image, template or snapshot of its tasks, once."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rollhook.component import BuildContext
from rollhook.environment import Environment, EpisodeContext, Task
from rollhook.errors import RollhookError
from rollhook.sandbox.backend import SandboxBackend, SandboxSpec
from rollhook.sandbox.deletions import Backoff, PoolTimes
from rollhook.sandbox.warm import recipe_key

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """One distinct spec; `tasks` are the ids of those that need it, `key` as `recipe_key` has it."""

    key: str
    spec: SandboxSpec
    tasks: list[str] = field(default_factory=list)

    @property
    def image(self) -> str:
        """What it is made from, in a word."""
        return self.spec.image or ("Dockerfile" if self.spec.dockerfile else "default")


@dataclass(frozen=True)
class Baked:
    """How the baking of one spec ended: `name` of what is there now ("": nothing had to be made)."""

    key: str
    image: str
    tasks: Sequence[str]
    name: str = ""
    seconds: float = 0.0
    error: str = ""


def wanted_by(
    environment: Environment, tasks: Iterable[Task], context: BuildContext
) -> tuple[list[Wanted], dict[str, str]]:
    """Return the distinct specs of all boxes of these tasks, and by id why a task has none.

    Reads files, so it is called off the event loop.
    """
    found: dict[str, Wanted] = {}
    refused: dict[str, str] = {}
    for task in tasks:
        if task.problem is not None:
            refused[task.id] = task.problem
            continue
        try:
            episode = environment.episode(task, EpisodeContext(f"bake-{task.id}", 0, {}, context))
            specs = [box.spec for box in episode.boxes.values()]
        except RollhookError as error:
            refused[task.id] = str(error)
            continue
        for key, spec in {recipe_key(spec): spec for spec in specs}.items():
            found.setdefault(key, Wanted(key, spec)).tasks.append(task.id)
    return list(found.values()), refused


async def bake_all(
    backend: SandboxBackend,
    wanted: Sequence[Wanted],
    *,
    concurrency: int,
    retries: int,
    finished: Callable[[Baked], None],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> list[Baked]:
    """Bake every spec, so many at once; one that fails does not stop the others.

    What the backend calls retryable is tried again. `finished` gets each as it ends.
    """
    backoff = Backoff(PoolTimes(), random.Random())  # noqa: S311 - jitter
    waiting, rows = iter(wanted), []

    async def one(want: Wanted) -> Baked:
        begun = time.monotonic()
        row = Baked(want.key, want.image, want.tasks)
        for tries in itertools.count(1):
            try:
                name = await backend.bake(want.spec)
            except Exception as error:  # noqa: BLE001 - it becomes the row's error
                if tries <= retries and backend.retryable(error):
                    logger.info("baking %s failed (try %d): %s", want.image, tries, error)
                    await sleep(backoff(tries, error))
                    continue
                said = str(error) if isinstance(error, RollhookError) else f"{type(error).__name__}: {error}"
                return dataclasses.replace(row, seconds=time.monotonic() - begun, error=said)
            return dataclasses.replace(row, seconds=time.monotonic() - begun, name=name)
        raise AssertionError("unreachable")

    async def worker() -> None:
        for want in waiting:
            rows.append(await one(want))
            finished(rows[-1])

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(wanted))):
            group.create_task(worker())
    return rows
