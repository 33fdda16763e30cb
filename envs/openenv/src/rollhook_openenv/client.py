"""A session with an OpenEnv server: its WebSocket protocol (openenv 0.3 to 0.10, `/ws`)."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from rollhook.errors import TaskError

logger = logging.getLogger(__name__)
#: codes with which a server says that the action, not the session, was at fault
_ACTION = ("VALIDATION_ERROR", "EXECUTION_ERROR")
_SAID = 500
_BACKOFF = (0.2, 5.0)


#: returns the base URL of a server
Where = Callable[[], Awaitable[str]]


class RefusedActionError(Exception):
    """The server did not take an action; the text says why."""


@dataclass(frozen=True)
class Step:
    """What reset or a step gave."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool


class OpenEnvSession:
    """One environment instance behind one WebSocket. Raises TaskError for whatever breaks."""

    def __init__(self, http: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._http = http
        self._socket = socket

    @classmethod
    async def connect(
        cls, where: Where, headers: Mapping[str, str], reset: Mapping[str, Any], *, seconds: float, most: int
    ) -> tuple[OpenEnvSession, Step]:
        """Open a session and reset it; a server that is full, or not there now, is asked for again."""
        http = aiohttp.ClientSession(headers=dict(headers), timeout=aiohttp.ClientTimeout(total=None))
        why: list[str] = []
        try:
            async with asyncio.timeout(seconds):
                return await _opened(http, where, reset, most, why)
        except BaseException as error:
            await http.close()
            if isinstance(error, TimeoutError):
                last = f": {why[-1]}" if why else ""
                raise TaskError(f"the OpenEnv server gave no session within {seconds:g} s{last}") from None
            raise

    async def step(self, action: Mapping[str, Any], *, seconds: float) -> Step:
        """Take one step. Raises RefusedActionError for an action that the server does not take."""
        return await self.ask("step", action, seconds)

    async def ask(self, kind: str, data: Mapping[str, Any], seconds: float) -> Step:
        """Send one message and return the observation that answers it."""
        try:
            async with asyncio.timeout(None if seconds == math.inf else seconds):
                await self._socket.send_str(orjson.dumps({"type": kind, "data": data}).decode())
                answer = await self._socket.receive()
        except TimeoutError:
            raise TaskError(f"the OpenEnv server did not answer {kind} within {seconds:g} s") from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise TaskError(f"the OpenEnv server is gone: {error}") from error
        if answer.type is not aiohttp.WSMsgType.TEXT:
            why = answer.extra or answer.data or self._socket.close_code
            raise TaskError(f"the OpenEnv server ended the session amid {kind}: {str(why)[:_SAID]}")
        return _step(answer.data)

    async def aclose(self) -> None:
        """End the session."""
        try:
            if not self._socket.closed:
                async with asyncio.timeout(5.0):
                    await self._socket.send_str('{"type": "close"}')
                    await self._socket.close()
        except (TimeoutError, aiohttp.ClientError, ConnectionError):
            pass
        finally:
            await self._http.close()


class _FullError(Exception):
    """The server has no room for another session now."""


async def _opened(
    http: aiohttp.ClientSession, where: Where, reset: Mapping[str, Any], most: int, why: list[str]
) -> tuple[OpenEnvSession, Step]:
    """Ask until there is a session; why there is none yet is logged once and kept in `why`."""
    pause = _BACKOFF[0]
    while True:
        url = await where()
        try:
            socket = await http.ws_connect(f"{url}/ws", max_msg_size=most, heartbeat=None)
            session = OpenEnvSession(http, socket)
            return session, await session.ask("reset", reset, math.inf)
        except aiohttp.WSServerHandshakeError as error:
            if error.status < 500:
                raise TaskError(f"{url} is no OpenEnv server: /ws answers {error.status}") from error
        except RefusedActionError as error:
            raise TaskError(f"the OpenEnv server does not take the task's reset: {error}") from error
        except (_FullError, aiohttp.ClientConnectionError) as error:
            if not why:
                logger.warning("%s gives no session yet (%s); asking again", url, error or "it is full")
            why.append(str(error) or "it is full")
        await asyncio.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311 - not for secrets
        pause = min(2 * pause, _BACKOFF[1])


def _step(text: str) -> Step:
    """Read an answer. Raises RefusedActionError or TaskError for an error, TaskError for what is neither."""
    try:
        answer = orjson.loads(text)
        kind, data = answer["type"], answer["data"]
        if kind == "error":
            code, said = str(data.get("code")), str(data.get("message"))[:_SAID]
            if code == "CAPACITY_REACHED":
                raise _FullError
            if code in _ACTION:
                raise RefusedActionError(f"{said} {_places(data)}".strip())
            raise TaskError(f"the OpenEnv server reports {code}: {said}")
        reward, observation = data.get("reward"), data["observation"]
        if kind != "observation" or not isinstance(observation, dict):
            raise TypeError(kind)
        if reward is not None and not (isinstance(reward, bool | int | float) and math.isfinite(reward)):
            raise TypeError("reward")
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise TaskError(f"the OpenEnv server says what is no answer ({error!r}): {text[:100]!r}") from None
    return Step(observation, None if reward is None else float(reward), bool(data.get("done")))


def _places(data: Mapping[str, Any]) -> str:
    errors = data.get("errors")
    found = [each for each in errors if isinstance(each, dict)] if isinstance(errors, list) else []
    said = [f"{'.'.join(map(str, each.get('loc') or ()))}: {each.get('msg')}" for each in found[:5]]
    return f"({'; '.join(said)})"[:_SAID] if said else ""
