"""Engines as their data-parallel ranks: each rank has a cache of its own, so each is a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal, Protocol

from rollhook.engine.server_info import ServerInfo
from rollhook.errors import EngineError
from rollhook.router import Worker

DpAware = Literal["auto", "on", "off"]


class Described(Protocol):
    """What is asked of an engine client."""

    async def server_info(self, worker: Worker) -> ServerInfo:
        """Return the engine's description of itself."""


async def expand(client: Described, workers: Sequence[Worker], dp_aware: DpAware = "auto") -> list[Worker]:
    """Return one worker per rank of each engine that has several; workers with a rank stay as they are.

    `off` leaves the choice of a rank to the engines. `on` wants ranks: EngineError for an engine that has one
    only. An engine without `/server_info` counts as one rank. SGLang takes ranks with data-parallel attention
    and without it (one node), so both are expanded.
    """
    if dp_aware == "off":
        return list(workers)
    found = await asyncio.gather(*(_ranks(client, worker) for worker in workers))
    if dp_aware == "on":
        for (first, *others), worker in zip(found, workers, strict=True):
            if not others and first.dp_rank is None:
                raise EngineError(
                    f"router.dp_aware is on, but the engine at {worker.url} has one data-parallel rank; start"
                    " it with several (SGLang: --dp-size) or set router.dp_aware to auto"
                )
    return [rank for ranks in found for rank in ranks]


async def _ranks(client: Described, worker: Worker) -> list[Worker]:
    if worker.dp_rank is not None:
        return [worker]
    try:
        return (await client.server_info(worker)).workers(worker.url)
    except EngineError as error:
        if error.status == 404:
            return [worker]
        raise
