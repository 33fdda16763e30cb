"""environment.arithmetic: one question, one reply, one exact answer."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import cached_property

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
from rollhook.errors import UsageError
from rollhook.messages import message
from rollhook_arithmetic import ArithmeticConfig
from rollhook_arithmetic.answers import answer_of
from rollhook_arithmetic.problems import Problem, decimal, make

SPLITS = ("train", "heldout")
#: draws per problem that is wanted, before there are too few different ones
_DRAWS = 20


class Arithmetic(Environment):
    """Problems by number; a problem is in the split that the hash of its text says, always."""

    config: ArithmeticConfig

    def tasks(self, split: str | None = None) -> Sequence[Task]:
        """Return the problems of a split or of both; UsageError where there are too few different ones."""
        if split not in (None, *SPLITS):
            raise UsageError(f"there is no split {split!r}; splits: {', '.join(SPLITS)}")
        return [task for task in self._tasks if split in (None, task.split)]

    def episode(self, task: Task, ctx: EpisodeContext) -> Episode:
        """Return an attempt at a problem."""
        return ArithmeticEpisode(task.payload, self.config.system_prompt)

    def describe(self) -> Mapping[str, str]:
        """Return how many problems there are."""
        counts = {split: sum(task.split == split for task in self._tasks) for split in SPLITS}
        return {"problems": ", ".join(f"{count} {split}" for split, count in counts.items())}

    @cached_property
    def _tasks(self) -> list[Task]:
        config = self.config
        found: dict[str, Task] = {}
        for number in range(_DRAWS * config.count):
            family = config.families[number % len(config.families)]
            problem = make(family, f"{config.seed}/{number}", config.largest)
            text = problem.question
            if text not in found:
                found[text] = self._task(f"{family}-{number:06d}", problem)
                if len(found) == config.count:
                    return list(found.values())
        raise UsageError(
            f"environment.count: there are only {len(found)} different problems with these families and "
            f"numbers up to {config.largest}; lower count, or raise largest"
        )

    def _task(self, name: str, problem: Problem) -> Task:
        place = int.from_bytes(hashlib.sha256(problem.question.encode()).digest()[:8], "big") % 100
        said = "\n".join([self.config.system_prompt, problem.question, str(problem.answer)])
        return Task(
            id=name,
            digest=hashlib.sha256(said.encode()).hexdigest(),
            split="heldout" if place < self.config.heldout_percent else "train",
            family=problem.family,
            limits={"verify": 30.0},
            payload=problem,
        )


class ArithmeticEpisode(Episode):
    """One phase, without a box."""

    def __init__(self, problem: Problem, system_prompt: str) -> None:
        self._phase = ArithmeticPhase(problem, system_prompt)

    async def phases(self) -> AsyncIterator[Phase]:
        """Yield the one phase."""
        yield self._phase


class ArithmeticPhase(Phase):
    """The question, and whether the last reply answers it."""

    def __init__(self, problem: Problem, system_prompt: str) -> None:
        self._problem = problem
        self._solution: str | None = None
        system = [message("system", system_prompt)] if system_prompt else []
        self.observation = Observation([*system, message("user", problem.question)])

    async def solve(self) -> None:
        """Give the answer in the policy's place."""
        self._solution = f"Answer: {decimal(self._problem.answer)}"

    async def verify(self, transcript: Transcript) -> Verdict:
        """Compare the number that the last reply gives with the answer, exactly."""
        said = [m["content"] or "" for m in transcript.messages if m["role"] == "assistant"]
        text = self._solution or (said[-1] if said else "")
        found = answer_of(text)
        right = float(found == self._problem.answer)
        detail = {"answered": None if found is None else str(found), "answer": str(self._problem.answer)}
        return Verdict(right, {"right": right, "answered": float(found is not None)}, detail)
