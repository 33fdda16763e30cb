"""What goes over a connection of its own: logs, exec and port-forward."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from doubles.kubernetes.errors import ApiError
from doubles.kubernetes.world import World


async def answer(
    world: World, request: web.Request, subresource: str, pod: dict[str, Any]
) -> web.StreamResponse:
    """Answer a request for a pod's stream."""
    raise ApiError(500, "not yet")
