"""An environment behind MCP: tools that begin an episode, act in it and end it."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from rollhook.errors import UsageError
from rollhook_tools.serve.seats import Said, Seat, Table

if TYPE_CHECKING:
    from fastmcp import FastMCP

_ABOUT = (
    "{name}, an environment of {count} tasks, served by Rollhook. `start` begins an episode and says what "
    "to do and with which tools; `call` calls one of these; `reply` says something to the environment, or, "
    "where it has nothing to say to that, gives the answer; `finish` ends a phase. The answer to the last "
    "has the reward. Each takes the episode that `start` returned."
)


def server(table: Table, name: str) -> FastMCP[Any]:
    """Return the server."""
    from fastmcp import FastMCP
    from fastmcp.exceptions import ToolError

    made: FastMCP[Any] = FastMCP(name, instructions=_ABOUT.format(name=name, count=len(table.tasks)))
    seats: dict[str, Seat] = {}

    def answer(episode: str, said: Said) -> dict[str, Any]:
        if said.done:
            seats.pop(episode, None)
        return {
            "episode": episode,
            "text": said.text,
            "tools": list(said.tools),
            "done": said.done,
            "reward": said.reward,
            "error": said.error,
        }

    def seat_of(episode: str) -> Seat:
        if episode not in seats:
            raise ToolError(f"there is no episode {episode!r}: it has ended, or start did not return it")
        return seats[episode]

    @made.tool
    def tasks() -> list[str]:
        """List the ids of the tasks."""
        return [task.id for task in table.tasks]

    @made.tool
    async def start(task_id: str | None = None, seed: int | None = None) -> dict[str, Any]:
        """Begin an episode of a task by id, or by seed; else of the next in turn."""
        try:
            seat, said = await table.sit(table.choose(task_id, seed))
        except UsageError as error:
            raise ToolError(str(error)) from None
        episode = secrets.token_hex(8)
        seats[episode] = seat
        return answer(episode, said)

    @made.tool
    async def call(episode: str, tool: str, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        """Call a tool of the episode."""
        return answer(episode, await seat_of(episode).call(tool, arguments or {}))

    @made.tool
    async def reply(episode: str, message: str) -> dict[str, Any]:
        """Say something to the environment."""
        return answer(episode, await seat_of(episode).say(message))

    @made.tool
    async def finish(episode: str) -> dict[str, Any]:
        """End the phase."""
        return answer(episode, await seat_of(episode).finish())

    return made
