"""Running a verifier so that neither a hang nor a CPU-bound loop of it stops the event loop."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from rollhook.environment import Verdict
from rollhook.errors import VerifierError


class VerifierTimeoutError(VerifierError):
    """The verifier took longer than its limit."""


class HomeLoop:
    """An object of one event loop, usable from another: its coroutine methods run at home."""

    def __init__(self, target: Any, home: asyncio.AbstractEventLoop) -> None:
        self._target = target
        self._home = home

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if not inspect.iscoroutinefunction(value):
            return value

        @functools.wraps(value)
        async def call(*args: Any, **kwargs: Any) -> Any:
            if asyncio.get_running_loop() is self._home:
                return await value(*args, **kwargs)
            return await asyncio.wrap_future(
                asyncio.run_coroutine_threadsafe(value(*args, **kwargs), self._home)
            )

        return call


async def verify_here(verify: Callable[[], Awaitable[Verdict]], seconds: float) -> Verdict:
    """Verify on this loop, for environments whose verifier only awaits (it runs inside a sandbox)."""
    try:
        async with asyncio.timeout(seconds):
            return await verify()
    except TimeoutError:
        raise VerifierTimeoutError(f"the verifier took longer than {seconds:g} s") from None


async def verify_apart(verify: Callable[[], Awaitable[Verdict]], seconds: float) -> Verdict:
    """Verify on a thread with a loop of its own; past the limit the thread is left and told to end.

    Raises VerifierTimeoutError past the limit, and whatever the verifier raises.
    """
    home = asyncio.get_running_loop()
    answer: asyncio.Future[Verdict] = home.create_future()

    def settle(value: Verdict | None, error: BaseException | None) -> None:
        if answer.done():
            return
        if value is not None:
            answer.set_result(value)
        else:
            answer.set_exception(error or VerifierError("the verifier returned nothing"))

    def work() -> None:
        value: Verdict | None = None
        failure: BaseException | None = None
        try:
            value = asyncio.run(_awaited(verify))
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            failure = (
                error if isinstance(error, Exception) else VerifierError(f"the verifier died: {error!r}")
            )
        if not home.is_closed():
            home.call_soon_threadsafe(settle, value, failure)

    thread = threading.Thread(target=work, name="verifier", daemon=True)
    thread.start()
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except (TimeoutError, asyncio.CancelledError) as error:
        _interrupt(thread)
        if isinstance(error, asyncio.CancelledError):
            raise
        raise VerifierTimeoutError(f"the verifier took longer than {seconds:g} s") from None


async def _awaited(verify: Callable[[], Awaitable[Verdict]]) -> Verdict:
    return await verify()


def _interrupt(thread: threading.Thread) -> None:
    """Ask a thread that runs Python code in a loop to end; one blocked in C ends when it returns."""
    if thread.ident is not None and thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
