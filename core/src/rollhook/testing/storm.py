"""Many sandboxes made and given up in bad weather, here or in a driver process that is to be killed."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollhook import plugins
from rollhook.component import BuildContext
from rollhook.errors import SandboxError
from rollhook.rundir import Attempt, RunDir
from rollhook.sandbox.backend import RawSandbox, SandboxBackend, SandboxInfo, SandboxSpec
from rollhook.sandbox.deletions import PoolTimes
from rollhook.sandbox.pool import SandboxPool
from rollhook.secrets import resolve_secret

#: seconds of a pool that has no time to lose
TIMES = PoolTimes(backoff_first=0.01, backoff_most=0.1, look_again=0.2, abandoned_create=60.0)


class ReplyLostError(SandboxError):
    """The provider did what it was asked, and its answer did not arrive."""

    kind = "retryable"


class Unreliable(SandboxBackend):
    """A backend behind a bad line: some creates fail before they are made, of some the reply is lost.

    Half of those are missing from the next list too, as with a provider whose lists lag.
    """

    def __init__(self, inner: SandboxBackend, rng: random.Random, *, refused: float, lost: float) -> None:
        super().__init__(inner.config, inner.context)
        self._inner = inner
        self._rng = rng
        self._refused, self._lost = refused, lost
        self._hidden: set[str] = set()
        self.asked = self.replies_lost = 0

    @property
    def capabilities(self) -> frozenset[str]:  # type: ignore[override]
        """Those of the other."""
        return self._inner.capabilities

    async def create(self, spec: SandboxSpec) -> RawSandbox:
        """Make one, if the line holds."""
        self.asked += 1
        draw = self._rng.random()
        if draw < self._refused:
            raise ReplyLostError("the connection was reset")
        raw = await self._inner.create(spec)
        if draw < self._refused + self._lost:
            self.replies_lost += 1
            if self._rng.random() < 0.5:
                self._hidden.add(raw.id)
            raise ReplyLostError("the connection was reset")
        return raw

    async def adopt(self, sandbox_id: str, spec: SandboxSpec) -> RawSandbox:
        """Attach."""
        return await self._inner.adopt(sandbox_id, spec)

    async def list(self, labels: Mapping[str, str]) -> Sequence[SandboxInfo]:
        """List, but for what lags; a list that shows something else of it is none that was waited for."""
        found = await self._inner.list(labels)
        late = {info.id for info in found} & self._hidden
        self._hidden -= late
        return [info for info in found if info.id not in late]

    async def delete(self, sandbox_id: str) -> None:
        """Delete."""
        await self._inner.delete(sandbox_id)

    def retryable(self, error: Exception) -> bool:
        """Judge as the other does, and call a lost reply retryable."""
        return isinstance(error, ReplyLostError) or self._inner.retryable(error)

    def ambiguous(self, error: Exception) -> bool:
        """Judge as the other does."""
        return isinstance(error, ReplyLostError) or self._inner.ambiguous(error)


def build_backend(use: Mapping[str, Any], scratch: Path) -> SandboxBackend:
    """Build an installed backend by a recipe's `sandbox` section."""
    keys = dict(use)
    name = keys.pop("use")
    context = BuildContext(logging.getLogger("rollhook.sandbox"), scratch, scratch, secret=resolve_secret)
    backend: SandboxBackend = plugins.load([("sandbox", name)]).build("sandbox", name, keys, context)
    return backend


def make_pool(backend: SandboxBackend, attempt: Attempt, **options: Any) -> SandboxPool:
    """Return a pool of this attempt."""
    return SandboxPool(
        backend,
        run_id=attempt.run.run_id,
        attempt=attempt.number,
        journal=attempt.journal,
        times=TIMES,
        **options,
    )


async def storm(
    pool: SandboxPool,
    spec: SandboxSpec,
    creates: int,
    concurrency: int,
    rng: random.Random,
    done: Callable[[int], None] = lambda number: None,
) -> None:
    """Ask for so many sandboxes, so many at once; give up half of the requests at a random moment.

    Moments are drawn up to twice the time that a create takes here. `done` is told of each that ended.
    """
    loop = asyncio.get_running_loop()
    numbers = iter(range(creates))
    mean = 0.05

    async def one(number: int) -> None:
        nonlocal mean
        begun = loop.time()
        call = asyncio.create_task(pool.acquire(spec, episode_id=f"e{number}"))
        if rng.random() < 0.5:
            await asyncio.wait({call}, timeout=rng.random() * 2 * mean)
            call.cancel()
        try:
            sandbox = await call
        except (asyncio.CancelledError, SandboxError):
            return
        mean = 0.8 * mean + 0.2 * (loop.time() - begun)
        ending = asyncio.create_task(pool.release(sandbox))
        if rng.random() < 0.2:
            await asyncio.sleep(0)
            ending.cancel()
        await asyncio.wait({ending})

    async def worker() -> None:
        for number in numbers:
            await one(number)
            done(number)

    await asyncio.gather(*(worker() for _ in range(concurrency)))


async def _drive(run: Path, use: Mapping[str, Any], labels: Mapping[str, str], seed: int) -> None:
    """Be a driver: claim an attempt, and go on until somebody kills this process."""
    rng = random.Random(seed)
    attempt = RunDir.find(run).claim()
    backend = build_backend(use, attempt.path)
    await backend.start()
    pool = make_pool(Unreliable(backend, rng, refused=0.05, lost=0.1), attempt, create_concurrency=8, warm=2)

    def done(number: int) -> None:
        print(number, flush=True)  # noqa: T201 - the parent counts

    while True:
        await storm(pool, SandboxSpec(labels=labels, lifetime_seconds=600.0), 1000, 8, rng, done)


if __name__ == "__main__":
    asyncio.run(_drive(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4])))
