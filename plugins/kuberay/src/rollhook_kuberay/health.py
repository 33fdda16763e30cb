"""Whether something serves: it is asked over a port-forward, so names inside the cluster need not resolve."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import aiohttp

_POLL_SECONDS = 2.0


async def answers(url: str, seconds: float, what: str, say: Callable[[str], None]) -> None:
    """Wait until an address answers with a status below 500. Raises TimeoutError with its last word."""
    deadline, last = time.monotonic() + seconds, "nothing"
    say(f"waiting until {what} serves")
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as session:
        while True:
            try:
                async with session.get(url) as reply:
                    if reply.status < 500:
                        return
                    last = f"status {reply.status}"
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                last = str(error) or type(error).__name__
            if time.monotonic() + _POLL_SECONDS > deadline:
                raise TimeoutError(f"{what} does not serve after {seconds:.0f} s; its last answer: {last}")
            await asyncio.sleep(_POLL_SECONDS)
