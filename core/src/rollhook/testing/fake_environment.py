"""The smallest environment: sums, without a sandbox."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from typing import ClassVar

from rollhook.component import Config
from rollhook.environment import (
    Environment,
    Episode,
    EpisodeContext,
    Observation,
    Phase,
    Task,
    Transcript,
    Verdict,
)
from rollhook.errors import TaskError, UsageError
from rollhook.messages import Message, message


class SumsConfig(Config):
    """No keys."""


class SumsPhase(Phase):
    """Asks for a sum; the answer is the last assistant message."""

    def __init__(self, a: int, b: int, judged: bool) -> None:
        self._sum = a + b
        self._judged = judged
        self._solved = False
        self.observation = Observation([message("user", f"What is {a} + {b}? Answer with the number.")])

    async def solve(self) -> None:
        """Know the answer."""
        self._solved = True

    async def verify(self, transcript: Transcript) -> Verdict:
        """Compare."""
        if not self._judged:
            return Verdict(None, detail={"reason": "this task has no verifier"})
        right = self._solved or _answer(transcript.messages) == str(self._sum)
        return Verdict(float(right), {"right": float(right)})


class SumsEpisode(Episode):
    """One sum."""

    def __init__(self, phase: Phase) -> None:
        self._phase = phase

    async def phases(self) -> AsyncIterator[Phase]:
        """Yield the one phase."""
        yield self._phase


class Sums(Environment):
    """Four sums, one task without a verdict, one that cannot run."""

    verifies_apart: ClassVar[bool] = False

    def tasks(self, split: str | None = None) -> Sequence[Task]:
        """Return the tasks; the only split is `train`."""
        if split not in (None, "train"):
            raise UsageError(f"there is no split {split!r}; splits: train")
        sums = [_task(f"sum-{a}-{b}", (a, b, True)) for a, b in ((1, 2), (3, 4), (10, 20), (7, 5))]
        return [*sums, _task("unjudged", (1, 1, False)), _task("broken", None, "b is missing")]

    def episode(self, task: Task, ctx: EpisodeContext) -> Episode:
        """Return an attempt at one sum."""
        if task.problem is not None:
            raise TaskError(f"task {task.id} cannot run: {task.problem}", kind="user")
        return SumsEpisode(self.phase(*task.payload))

    def phase(self, a: int, b: int, judged: bool) -> Phase:
        """Return the phase that asks for one sum."""
        return SumsPhase(a, b, judged)


def _task(name: str, payload: tuple[int, int, bool] | None, problem: str | None = None) -> Task:
    digest = hashlib.sha256(repr((name, payload)).encode()).hexdigest()
    return Task(name, digest, "train", "sums", {"agent": 10.0}, payload, problem)


def _answer(messages: Sequence[Message]) -> str:
    said = [m["content"] or "" for m in messages if m["role"] == "assistant"]
    return said[-1].strip() if said else ""
