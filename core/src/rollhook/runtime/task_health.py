"""Examining tasks without a model: does each ask what it seems to ask, and judge it the same every time?"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollhook.agent import Agent, AgentContext, StopReason
from rollhook.component import BuildContext, Config
from rollhook.environment import Task
from rollhook.rundir import Attempt
from rollhook.runtime.oracle import failure, record_output
from rollhook.runtime.parts import Parts
from rollhook.runtime.rows import Rows
from rollhook.runtime.task_runs import Choose, TaskRuns, all_tasks, each

RESULTS = "doctor.jsonl"
#: bytes of a hidden file below which finding its like means nothing
_LEAST_BYTES = 24
_LOOK_SECONDS = 120.0
#: prints the hash and the path of every file that has one of the sizes in $@, then what is in the two places
_LOOK = r"""
command -v find >/dev/null && command -v sha256sum >/dev/null || exit 99
for size; do set -- "$@" -o -size "${size}c"; shift; done
[ $# -eq 0 ] || { shift; find / \( -path /proc -o -path /sys -o -path /dev \) -prune -o \
  -type f \( "$@" \) -exec sha256sum {} + 2>/dev/null; }
find /tests /solution -mindepth 1 2>/dev/null | sed 's/^/- /' | head -n 20
"""


@dataclass(frozen=True)
class TaskHealth:
    """One row of the results: the rewards of every try (None: no verdict), and what was found.

    `flakes` is the share of tries that scored another than most tries of their agent, `leaks` are hidden
    files that the agent could read. `why` is empty when `ok`.
    """

    task_id: str
    digest: str
    family: str
    oracle: list[float | None]
    nop: list[float | None]
    flakes: float
    lint: list[str]
    leaks: list[str]
    ok: bool
    why: str
    seconds: float

    @property
    def final(self) -> bool:
        """Whether a resumed run may keep this row: an error may have been the machine's."""
        return bool(self.oracle) and None not in (*self.oracle, *self.nop)


class Results(Rows[TaskHealth]):
    """The rows of an examination, by task."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, TaskHealth, key=lambda row: row.task_id, keep=lambda row: row.final)

    def todo(self, tasks: Sequence[Task], repeat: int) -> list[Task]:
        """Return the tasks without a row of this very content and of as many tries."""
        kept = {row.task_id for row in self.kept.values() if len(row.oracle) >= repeat}
        return [t for t in tasks if t.id not in kept or self.kept[t.id].digest != t.digest]


class Looker(Agent):
    """Does nothing but look for files of `sizes`, by episode; what it saw is kept until it is taken."""

    needs_policy = False

    def __init__(self, context: BuildContext) -> None:
        super().__init__(Config(), context)
        self.sizes: dict[str, set[int]] = {}
        self._seen: dict[str, list[str]] = {}

    async def run(self, context: AgentContext) -> StopReason:
        """Look, once in each phase."""
        if context.sandbox is not None:
            sizes = [str(size) for size in sorted(self.sizes[context.episode_id])]
            argv = ["/bin/sh", "-c", _LOOK, "sh", *sizes]
            result = await context.sandbox.exec(argv, cwd="/", timeout=_LOOK_SECONDS)
            lines = self._seen.setdefault(context.episode_id, [])
            lines += result.text.splitlines()
            if result.timed_out or result.exit_code == 99:
                lines.append("!")
        return StopReason.DONE

    def take(self, episode: str) -> list[str]:
        """Return what was printed in an episode, and forget it; a line "!" says that it could not look."""
        self.sizes.pop(episode, None)
        return self._seen.pop(episode, [])


class Examination(TaskRuns):
    """Runs solution and nothing on tasks several times each, and looks around; a context manager."""

    def __init__(self, parts: Parts, attempt: Attempt, repeat: int, choose: Choose = all_tasks) -> None:
        self._looker = Looker(parts.context("agent.looker"))
        super().__init__(parts, attempt, ("oracle", "nop"), {"looker": self._looker}, choose)
        self._repeat = repeat

    async def run(
        self, tasks: Sequence[Task], concurrency: int, finished: Callable[[TaskHealth], None]
    ) -> None:
        """Examine every task; `finished` gets each row as it is there."""

        async def examine(task: Task) -> None:
            finished(await self._examine(task))

        await each(tasks, concurrency, examine)

    async def _examine(self, task: Task) -> TaskHealth:
        if task.problem is not None:
            why = task.problem.replace("\n", "; ")
            return TaskHealth(task.id, task.digest, task.family, [], [], 0.0, [why], [], False, why, 0.0)
        lint = list(await asyncio.to_thread(self.environment.lint, task))
        hidden = await asyncio.to_thread(self.environment.hidden, task)
        solved = [await self.episode("oracle", task, f"-{n}") for n in range(self._repeat)]
        name = f"{self._attempt.run.run_id}-a{self._attempt.number}-{task.id}-looker-0"
        self._looker.sizes[name] = {len(data) for data in hidden.values() if len(data) >= _LEAST_BYTES}
        idle = [await self.episode("looker" if n == 0 else "nop", task, f"-{n}") for n in range(self._repeat)]
        leaks = sorted(set(leaks_in(self._looker.take(name), hidden)))
        scored, unscored = ([record.outcome.reward for record in records] for records in (solved, idle))
        errors = [failure(agent, r) for agent, rs in (("oracle", solved), ("nop", idle)) for r in rs]
        said = next((record_output(r) for r in solved if r.outcome.reward not in (1, None)), "")
        reasons = [*dict.fromkeys(filter(None, errors)), *_reasons(scored, unscored, said), *leaks, *lint]
        return TaskHealth(
            task_id=task.id,
            digest=task.digest,
            family=task.family,
            oracle=scored,
            nop=unscored,
            flakes=round(max(flakes(scored), flakes(unscored)), 4),
            lint=lint,
            leaks=leaks,
            ok=not reasons,
            why="; ".join(reasons),
            seconds=round(sum(record.timings.get("total", 0.0) for record in (*solved, *idle)), 3),
        )


def flakes(rewards: Sequence[float | None]) -> float:
    """Return the share of tries that scored another than most did."""
    return 1 - Counter(rewards).most_common(1)[0][1] / len(rewards) if rewards else 0.0


def leaks_in(lines: Sequence[str], hidden: Mapping[str, bytes]) -> Iterator[str]:
    """Yield what is wrong with what the looker saw."""
    names = {hashlib.sha256(d).hexdigest(): n for n, d in hidden.items() if len(d) >= _LEAST_BYTES}
    for line in lines:
        if line == "!":
            yield "whether the agent can read hidden files is not known: no find, no sha256sum or no time"
        elif line.startswith("- "):
            yield f"{line[2:]} is there while the agent works"
        else:
            digest, _, path = line.lstrip("\\").partition("  ")
            if digest in names:
                yield f"the agent can read {names[digest]} at {path}"


def _reasons(oracle: Sequence[float | None], nop: Sequence[float | None], said: str) -> Iterator[str]:
    solved = [reward for reward in oracle if reward is not None]
    idle = [reward for reward in nop if reward is not None]
    if outside := sorted({reward for reward in (*solved, *idle) if not 0 <= reward <= 1}):
        yield f"rewards outside 0 to 1: {', '.join(f'{reward:g}' for reward in outside)}"
    if missed := [reward for reward in solved if reward != 1]:
        times = f" in {len(missed)} of {len(oracle)} tries" if len(missed) < len(oracle) else ""
        yield f"the solution scores {missed[0]:g}{times}" + (f" ({said})" if said else "")
    if given := [reward for reward in idle if reward >= 1]:
        times = f" in {len(given)} of {len(nop)} tries" if len(given) < len(nop) else ""
        yield f"doing nothing scores {given[0]:g}{times}"
    for agent, rewards in (("solution", oracle), ("doing nothing", nop)):
        if (share := flakes(rewards)) > 0:
            scores = ", ".join("no verdict" if reward is None else f"{reward:g}" for reward in rewards)
            yield f"{agent} flakes in {share:.0%} of {len(rewards)} tries ({scores})"
