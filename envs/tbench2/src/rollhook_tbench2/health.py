"""Waiting until a box is ready, as its health check says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from rollhook.errors import TaskError
from rollhook.sandbox import Sandbox
from rollhook_tbench2.task_toml import HealthCheck


async def wait_until_healthy(
    box: Sandbox,
    check: HealthCheck,
    *,
    user: str | None = None,
    hide: Callable[[str], str] = str,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    now: Callable[[], float] = time.monotonic,
) -> int:
    """Return the number of tries that it took. Raises TaskError when the box does not get ready.

    `hide` is what becomes of the output that the error quotes.
    """
    begun, failed, tries = now(), 0, 0
    while True:
        starting = now() - begun < check.start_period_sec
        result = await box.shell(check.command, cwd=box.spec.workdir, user=user, timeout=check.timeout_sec)
        tries += 1
        if result.ok:
            return tries
        if not starting:
            failed += 1
            if failed >= check.retries:
                said = (
                    f"took longer than {check.timeout_sec:g} s"
                    if result.timed_out
                    else f"ended with {result.exit_code}: {hide(result.error_text)[-200:].strip()}"
                )
                raise TaskError(
                    f"the health check {check.command!r} failed {failed} times in a row; the last one {said}"
                )
        await sleep(check.start_interval_sec if starting else check.interval_sec)
