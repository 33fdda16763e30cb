"""Routing of Acme: long sessions keep apart from short ones."""

from collections.abc import Sequence

from pydantic import Field

from rollhook import Component, Config, hookimpl
from rollhook.router import RouteRequest, RouterPolicy, Worker, WorkerLoad


class LanesConfig(Config):
    """Keys of lanes."""

    long: int = Field(10_000, description="tokens beyond which a session is long")


class Lanes(RouterPolicy):
    """Sends long sessions to the first worker on offer, and leaves the others to the next policy."""

    def pick(self, request: RouteRequest, workers: Sequence[WorkerLoad]) -> Worker | None:
        """Return the first worker for a session that may become long."""
        return workers[0].worker if workers and request.expected_tokens > self.config.long else None


@hookimpl
def rollhook_router_policies() -> list[Component]:
    """Supply the policy."""
    return [Component("lanes", LanesConfig, "acme_lanes:Lanes", "long sessions apart from short ones")]
