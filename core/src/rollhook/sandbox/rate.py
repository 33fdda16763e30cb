"""How fast sandboxes are created: a token bucket in a file that all processes of this host share."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from rollhook.errors import SandboxError

_SIZE = 256
#: seconds that turns may be given out ahead, beyond 1000 of them
_AHEAD = 600.0


def bucket_path(cache: Path, account: str) -> Path:
    """Return the file of the bucket of one provider's account on this host."""
    name = hashlib.sha256(json.dumps([socket.gethostname(), account]).encode()).hexdigest()
    return cache / "rates" / f"{name[:32]}.json"


class CreateRate:
    """Lets `per_second` creates begin on average, and `burst` at once after a pause.

    The generic cell rate algorithm (ITU-T I.371): the file holds the time at which the next create is due if
    they came evenly, on the clock of this boot, which all processes share. In one process a single create at
    a time asks for its turn, so one that is killed takes at most one turn along.
    """

    def __init__(
        self,
        path: Path,
        per_second: float,
        burst: int = 1,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._path = path
        self._interval = 1.0 / per_second
        self._allowance = (burst - 1) / per_second
        self._clock = clock
        self._sleep = sleep
        self._turn = asyncio.Lock()

    async def wait(self) -> None:
        """Return when a create may begin, in the order of asking.

        Raises SandboxError for a file that cannot be used.
        """
        async with self._turn:
            pause = await asyncio.to_thread(self._take)
            if pause > 0:
                await self._sleep(pause)

    def check(self) -> None:
        """Raise SandboxError for a file that cannot be used, and take no turn."""
        self._take(turns=0)

    def _take(self, turns: int = 1) -> float:
        """Take the next turn; return in how many seconds it comes."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
                now = self._clock()
                due = self._due(os.pread(handle, _SIZE, 0))
                # more cannot be waiting: the file is damaged, or a clock went back
                turn = due if now < due <= now + _AHEAD + 1000 * self._interval else now
                said = json.dumps({"boot": _boot(), "due": turn + turns * self._interval}).encode()
                os.pwrite(handle, said.ljust(_SIZE), 0)
                return turn - self._allowance - now
            finally:
                os.close(handle)
        except OSError as error:
            raise SandboxError(
                f"sandbox.create_rate: {self._path} cannot be used ({error.strerror}); "
                "set XDG_CACHE_HOME to a directory that can be written, or create_rate to null",
                kind="user",
            ) from error

    @staticmethod
    def _due(data: bytes) -> float:
        """Return when the next create is due; 0 in a new file, in one of another boot, and in a torn one."""
        try:
            said = json.loads(data)
            return float(said["due"]) if said["boot"] == _boot() else 0.0
        except (ValueError, KeyError, TypeError):
            return 0.0


def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
