"""The environment: two phases in one sandbox, judged by a program that comes in when the agent has ended."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from importlib import resources
from typing import Self

from acme_mazes import MazesConfig, grid
from rollhook.environment import (
    Box,
    Environment,
    Episode,
    EpisodeContext,
    Observation,
    Phase,
    Task,
    Transcript,
    Verdict,
)
from rollhook.errors import SandboxDead, SandboxError, UsageError
from rollhook.messages import message
from rollhook.sandbox import Sandbox, SandboxSpec

SPLITS = ("train", "heldout")
LENGTH = "maze.txt is a maze: S start, G goal, # wall. Write the steps of the shortest way into length.txt."
WALK = "Now write a way from S to G into way.txt, one letter per step: N, E, S or W."
#: characters of talk that cost all of the reward for short talk
TALK = 400
WALKER = resources.files("acme_mazes").joinpath("check/walk.awk").read_bytes()


class Mazes(Environment):
    """Mazes by number; all else follows from split, number and size."""

    config: MazesConfig
    verifies_apart = False

    def tasks(self, split: str | None = None) -> Sequence[Task]:
        """Return the mazes of one split or of both."""
        if split not in (None, *SPLITS):
            raise UsageError(f"there is no split {split!r}; splits: {', '.join(SPLITS)}")
        wanted = SPLITS if split is None else (split,)
        return [self._task(each, number) for each in wanted for number in range(self.config.count)]

    def _task(self, split: str, number: int) -> Task:
        size = self.config.sizes[number % len(self.config.sizes)]
        name = f"{split}-{size}x{size}-{number}"
        rows = grid.make(name, size)
        digest = hashlib.sha256(WALKER + "\n".join([name, LENGTH, WALK, *rows]).encode()).hexdigest()
        limits = {"agent": 60.0, "verify": 20.0}
        return Task(name, digest, split, family=f"{size}x{size}", limits=limits, payload=rows)

    def episode(self, task: Task, ctx: EpisodeContext) -> Episode:
        """Return an attempt at a maze."""
        return MazeEpisode(task.payload, ctx)


class MazeEpisode(Episode):
    """One sandbox, two phases, the mean of their rewards."""

    boxes = {"main": Box(SandboxSpec())}
    combine = "mean"

    def __init__(self, rows: list[str], ctx: EpisodeContext) -> None:
        self.rows = rows
        self.ctx = ctx

    async def __aenter__(self) -> Self:
        """Put the maze into the sandbox."""
        await self.ctx.box("main").write("maze.txt", "\n".join([*self.rows, ""]).encode())
        return self

    async def phases(self) -> AsyncIterator[Phase]:
        """Yield the two phases."""
        yield LengthPhase(self.rows, self.ctx.box("main"))
        yield WalkPhase(self.rows, self.ctx.box("main"))


class MazePhase(Phase):
    """What both have in common."""

    box = "main"
    ask: str
    answer: str

    def __init__(self, rows: list[str], sandbox: Sandbox) -> None:
        self.rows = rows
        self.way = grid.shortest(rows)
        self.sandbox = sandbox
        self.observation = Observation([message("user", self.ask)])

    @abstractmethod
    def solution(self) -> str:
        """Return what the file should hold."""

    @abstractmethod
    async def right(self, said: str) -> bool:
        """Return whether an answer is right."""

    async def solve(self) -> None:
        """Write the solution."""
        await self.sandbox.write(self.answer, self.solution().encode())

    async def verify(self, transcript: Transcript) -> Verdict:
        """Judge what was left, and how much was said."""
        right = float(await self.right(await self._left()))
        said = sum(len(m["content"] or "") for m in transcript.messages if m["role"] == "assistant")
        brevity = max(0.0, 1.0 - said / TALK)
        return Verdict(0.9 * right + 0.1 * brevity, {"right": right, "brevity": brevity})

    async def _left(self) -> str:
        """Return what the agent left; "" if that is no file of a sensible size."""
        try:
            return (await self.sandbox.read(self.answer, limit=1000)).decode(errors="replace").strip()
        except SandboxDead:
            raise
        except (OSError, SandboxError):
            return ""


class LengthPhase(MazePhase):
    """Ask for the length of the shortest way."""

    ask = LENGTH
    answer = "length.txt"

    def solution(self) -> str:
        """Return the number of steps."""
        return str(len(self.way))

    async def right(self, said: str) -> bool:
        """Compare."""
        return said == self.solution()


class WalkPhase(MazePhase):
    """Ask for the way; a program in the sandbox walks it."""

    ask = WALK
    answer = "way.txt"

    def solution(self) -> str:
        """Return the moves."""
        return self.way

    async def right(self, said: str) -> bool:
        """Walk it, with a program and a maze that the agent has never had."""
        await self.sandbox.remove(["/tests"])
        await self.sandbox.write("/tests/walk.awk", WALKER)
        await self.sandbox.write("/tests/maze.txt", "\n".join([*self.rows, ""]).encode())
        argv = ["awk", "-v", f"way={said}", "-f", "/tests/walk.awk", "/tests/maze.txt"]
        walked = await self.sandbox.exec(argv, timeout=10)
        if walked.text.strip() not in ("0", "1"):
            raise SandboxError(f"the walker printed {walked.text!r} {walked.error_text!r}")
        return walked.text.strip() == "1"
