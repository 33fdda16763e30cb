"""The control plane's requests that the SDK makes too strictly or too often.

Its `list` fails as a whole for one sandbox with an odd label, its `delete` needs the sandbox's description
first and is sent several times over. Paths: SDK 0.180 to 0.226.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from typing import Any

import aiohttp

from rollhook.errors import SandboxDead, SandboxError
from rollhook.sandbox import SandboxInfo
from rollhook_daytona.errors import Refusal, translate

_PAGE = 100
#: the SDK adds it to every sandbox
_OWN_LABEL = "code-toolbox-language"
_DELETE_SECONDS = 45.0
#: seconds after which a delete that has not happened is asked for again
_ASK_AGAIN = 2.0


class Rest:
    """One HTTP session to the control plane; made on the loop that uses it."""

    def __init__(self, api_url: str, key: str, request_seconds: float) -> None:
        self._url = api_url
        self._key = key
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}", "X-Daytona-Source": "rollhook"},
            timeout=aiohttp.ClientTimeout(total=request_seconds),
            trust_env=True,
        )

    async def list(self, labels: Mapping[str, str]) -> list[SandboxInfo]:
        """Return the sandboxes that carry all these labels, from all pages."""
        found = {}
        async for item in self._items(labels):
            info = _info(item)
            if info is not None and labels.items() <= dict(info.labels).items():
                found[info.id] = info
        return list(found.values())

    async def _items(self, labels: Mapping[str, str]) -> AsyncIterator[dict[str, Any]]:
        query = {"limit": str(_PAGE)}
        if labels:
            query["labels"] = json.dumps(dict(labels))
        seen: set[str] = set()
        while True:
            page = await self._ask("GET", "/sandbox", "listing sandboxes", query)
            items = page.get("items") if isinstance(page, dict) else None
            if not isinstance(items, list):
                raise SandboxError("Daytona, listing sandboxes: the answer is no list", kind="retryable")
            for item in items:
                if isinstance(item, dict):
                    yield item
            cursor = page.get("nextCursor")
            if not cursor or cursor in seen:
                return
            seen.add(cursor)
            query["cursor"] = cursor

    async def state(self, sandbox_id: str) -> str:
        """Return a sandbox's state, "destroyed" for one that is not there."""
        try:
            found = await self._ask("GET", f"/sandbox/{sandbox_id}", "asking for a sandbox")
        except SandboxDead:
            return "destroyed"
        return str(found.get("state") or "unknown") if isinstance(found, dict) else "unknown"

    async def build_log(self, sandbox_id: str, most: int) -> str:
        """Return why a sandbox's image was not built: the service's reason and the end of the log."""
        found = await self._ask("GET", f"/sandbox/{sandbox_id}", "asking for a sandbox")
        reason = str(found.get("errorReason") or "it failed") if isinstance(found, dict) else "it failed"
        try:
            url = (await self._ask("GET", f"/sandbox/{sandbox_id}/build-logs-url", "asking for a log"))["url"]
            async with self._session.get(url) as answer:
                log = (await answer.text(errors="replace"))[-most:]
        except (SandboxError, aiohttp.ClientError, TimeoutError, LookupError, TypeError):
            return reason
        return f"{reason}; the end of its log: {log.strip()}"

    async def delete(self, sandbox_id: str) -> None:
        """Delete a sandbox and wait until it is gone; one that is not there is a success.

        Asked again while the service is changing its state, and when it sticks. Raises a retryable
        SandboxError when it is still there in the end.
        """
        deadline = time.monotonic() + _DELETE_SECONDS
        asked, pause = float("-inf"), 0.02
        while True:
            try:
                if time.monotonic() - asked > _ASK_AGAIN:
                    await self._ask("DELETE", f"/sandbox/{sandbox_id}", "deleting a sandbox")
                    asked = time.monotonic()
                if await self.state(sandbox_id) == "destroyed":
                    return
            except SandboxDead:
                return
            except SandboxError as error:
                if "HTTP 409" not in str(error):
                    raise
            if time.monotonic() > deadline:
                raise SandboxError(f"sandbox {sandbox_id} is still there", kind="retryable")
            await asyncio.sleep(pause)
            pause = min(pause * 2, 2.0)

    async def _ask(self, method: str, path: str, what: str, query: Mapping[str, str] | None = None) -> Any:
        try:
            async with self._session.request(method, self._url + path, params=query) as answer:
                body = await answer.text(errors="replace")
                if answer.status >= 400:
                    raise Refusal(answer.status, body, answer.headers)
                return json.loads(body) if body else {}
        except (Refusal, aiohttp.ClientError, TimeoutError, ValueError, OSError) as error:
            raise translate(error, what, key=self._key) from error

    async def aclose(self) -> None:
        """Close the session."""
        await self._session.close()


def _info(item: Mapping[str, Any]) -> SandboxInfo | None:
    labels, sandbox_id = item.get("labels"), item.get("id")
    if not isinstance(labels, dict) or not isinstance(sandbox_id, str) or item.get("state") == "destroyed":
        return None
    shown = {str(name): str(value) for name, value in labels.items() if name != _OWN_LABEL}
    return SandboxInfo(sandbox_id, shown, _epoch(item.get("createdAt")))


def _epoch(text: object) -> float | None:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None
