"""`attempts/<n>/live.json`: what the live episodes do and wait for, for readers outside the process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollhook.durable import check_schema, from_json, to_json, write_atomic
from rollhook.errors import RunError

if TYPE_CHECKING:
    from rollhook.runtime.live import Live, LiveEpisode
    from rollhook.session.workers import Entry

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
NAME = "live.json"
#: seconds between two writes
INTERVAL = 2.0


@contextlib.asynccontextmanager
async def publishing(
    directory: Path, live: Live, table: Callable[[], Iterable[Entry]], *, interval: float = INTERVAL
) -> AsyncIterator[None]:
    """Keep `live.json` of an attempt up to date while the block runs; it is gone afterwards.

    After a crash it stays, as what was going on then. A write that fails is logged once and stops nothing.
    """
    path, over = directory / NAME, asyncio.Event()

    async def publish() -> None:
        failing = False
        while not over.is_set():
            try:
                await asyncio.to_thread(_write, path, snapshot(live, table()))
                failing = False
            except RunError as error:
                if not failing:
                    logger.warning("`rollhook doctor` will not see the live episodes: %s", error)
                failing = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), interval)

    task = asyncio.create_task(publish(), name=NAME)
    try:
        yield
    finally:
        over.set()
        await asyncio.wait({task})
        with contextlib.suppress(OSError):  # where the disk fails, it stays as after a crash
            await asyncio.to_thread(path.unlink, missing_ok=True)


def _write(path: Path, data: dict[str, Any]) -> None:
    write_atomic(path, to_json({"schema": SCHEMA_VERSION, "written_at": time.time(), **data}) + b"\n")


def snapshot(live: Live, table: Iterable[Entry]) -> dict[str, Any]:
    """Return what the file holds of the episodes and of the engines' workers, as it is now."""
    now = live.now()
    return {
        "episodes": [_episode(each, now) for each in live.episodes.values()],
        "engines": [
            {
                "url": entry.worker.url,
                "dp_rank": entry.worker.dp_rank,
                "healthy": entry.healthy,
                "version": entry.version,
                "open_sessions": entry.open_sessions,
                "tokens_in_flight": entry.tokens_in_flight,
                "queue_seconds": entry.queue_seconds,
            }
            for entry in table
        ],
    }


def read_live(directory: Path) -> dict[str, Any] | None:
    """Return what an attempt's file holds; None where there is none. RunError for one of a later schema."""
    path = directory / NAME
    try:
        data = from_json(path.read_bytes())
        check_schema(data["schema"], SCHEMA_VERSION, path)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return dict(data)


def _episode(live: LiveEpisode, now: float) -> dict[str, Any]:
    request, session = live.request, live.session
    oldest = live.waits[0] if live.waits else None
    waits_for = oldest.what() if oldest is not None else ""
    if not waits_for and session is not None and live.node == "agent":
        waits_for = session.waits_for
    deadline = _next_deadline(live, now)
    return {
        "episode_id": request.episode_id,
        "group_id": request.group_id,
        "task_id": request.task.id,
        "purpose": request.purpose,
        "node": live.node,
        "waits_for": waits_for,
        "seconds_waiting": now - (oldest.since if oldest is not None else live.node_since),
        "seconds_in_node": now - live.node_since,
        "seconds": now - live.started,
        "deadline": None if deadline is None else {"name": deadline[1], "seconds_left": deadline[0]},
        "turns": session.stats.turns if session is not None else 0,
        "tokens": session.stats.completion_tokens if session is not None else 0,
        "sandboxes": {name: box.id for name, box in live.boxes.items()},
        "cancelled": live.cancelled,
    }


def _next_deadline(live: LiveEpisode, now: float) -> tuple[float, str] | None:
    """Return the nearest deadline: seconds left and name.

    The agent's clock stands still while the agent waits for others: it is due no earlier than shown.
    """
    found = [(live.episode_deadline, "episode"), (live.deadline, live.node)]
    found += [(wait.deadline, "command") for wait in live.waits]
    if live.node == "agent" and live.clock is not None:
        found.append((now + live.clock.remaining, "agent's clock"))
    due = [(when - now, name) for when, name in found if when is not None]
    return min(due, default=None)
