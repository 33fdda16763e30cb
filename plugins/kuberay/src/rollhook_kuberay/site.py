"""What the parts of the launcher share: keys, owner, login."""

from __future__ import annotations

import getpass
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rollhook.errors import LauncherError
from rollhook_kuberay.client import Connection
from rollhook_kuberay.config import KubeRayLauncherConfig
from rollhook_kuberay.marks import sanitise
from rollhook_kuberay.port import Port, wait_for

GONE_SECONDS = 600.0


class Site:
    """A place in a Kubernetes cluster, as the keys name it."""

    def __init__(self, keys: KubeRayLauncherConfig, secret: Callable[[str], str]) -> None:
        self.keys = keys
        self.user = owner(keys.user)
        self._secret = secret
        self._connection = Connection(keys)

    @asynccontextmanager
    async def port(self, namespace: str = "") -> AsyncIterator[Port]:
        """Give the API, in the namespace of the keys or a recorded one."""
        async with self._connection.use(namespace) as port:
            yield port

    def token(self) -> Callable[[], str] | None:
        """Return how to get the token of Ray clusters; None without one."""
        token = self.keys.token
        return None if token is None else lambda: self._secret(str(token))

    async def gone(self, port: Port, kind: str, name: str) -> None:
        """Wait until an object is gone. Raises LauncherError with what keeps it."""
        try:
            await wait_for(
                port, kind, name, lambda each: each is None,
                seconds=GONE_SECONDS, poll_seconds=self.keys.poll_seconds,
            )  # fmt: skip
        except TimeoutError as error:
            left = await port.get(kind, name)
            holds = (
                ", ".join(((left or {}).get("metadata") or {}).get("finalizers") or [])
                or "nothing that it says"
            )
            raise LauncherError(
                f"{kind} {name} is not gone after {GONE_SECONDS:.0f} s; it waits for {holds}"
            ) from error


def owner(user: str | None) -> str:
    """Return the name under which things are owned: that of the key, of ROLLHOOK_USER, or of the account."""
    if user is None:
        user = os.environ.get("ROLLHOOK_USER") or ""
    if not user:
        try:
            user = getpass.getuser()
        except (KeyError, OSError):
            user = "nobody"
    return sanitise(user)
