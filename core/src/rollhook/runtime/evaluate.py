"""Evaluation: episodes that never train, counted by family."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rollhook.engine import SamplingParams
from rollhook.environment import Task
from rollhook.runtime.episode import EpisodeRequest, EpisodeResult, EpisodeRunner
from rollhook.runtime.seeds import derive


@dataclass
class Evaluation:
    """What one evaluation found, in all and by family.

    `environment` is its name in a run that has several, else empty.
    """

    step: int
    mode: str
    families: dict[str, Rate] = field(default_factory=dict)
    seconds: float = 0.0
    environment: str = ""

    @property
    def total(self) -> Rate:
        """All families together."""
        rates = self.families.values()
        return Rate(sum(r.passed for r in rates), sum(r.count for r in rates), sum(r.errors for r in rates))

    def metrics(self) -> dict[str, float]:
        """Return the metrics: `eval/pass_rate` and `eval_family/<name>`, with `_greedy` for greedy ones.

        With several environments the names are `eval/<environment>/pass_rate` and so on.
        """
        suffix = "_greedy" if self.mode == "greedy" else ""
        of = f"{self.environment}/" if self.environment else ""
        total = self.total
        found = {
            f"eval/{of}pass_rate{suffix}": total.value,
            f"eval/{of}stderr{suffix}": total.stderr,
            f"eval/{of}episodes{suffix}": float(total.count),
            f"eval/{of}errors{suffix}": float(total.errors),
        }
        for family, rate in self.families.items():
            found[f"eval_family{suffix}/{of}{family or 'all'}"] = rate.value
        return found


def choose(tasks: Sequence[Task], episodes: int | None, samples: int, seed: int) -> list[Task]:
    """Return the tasks of an evaluation's episodes: the same ones at every step of a run.

    At most `episodes` of them in a seeded order, spread evenly over the families; each `samples` times.
    """
    families: dict[str, list[Task]] = {}
    for task in tasks:
        families.setdefault(task.family, []).append(task)
    for name, members in families.items():
        random.Random(derive(seed, "eval", name)).shuffle(members)  # noqa: S311 - not for secrets
    rounds = [
        members[n]
        for n in range(max(map(len, families.values()), default=0))
        for members in families.values()
        if n < len(members)
    ]
    chosen = rounds if episodes is None else rounds[: max(1, episodes // samples)]
    return [task for task in chosen for _ in range(samples)]


async def evaluate(  # noqa: PLR0913 - what an evaluation is made of
    runner: EpisodeRunner,
    tasks: Sequence[Task],
    sampling: SamplingParams,
    *,
    step: int,
    attempt: int,
    seed: int,
    slots: asyncio.Semaphore,
    retries: int = 2,
    started: Callable[[EpisodeRequest], None] = lambda request: None,
    finished: Callable[[EpisodeResult], None] = lambda result: None,
    name: str = "",
) -> Evaluation:
    """Run one episode per task; one that gave no verdict for want of machinery is tried again."""
    mode = "greedy" if sampling.temperature == 0 else "sampled"
    began = asyncio.get_running_loop().time()
    counts: dict[str, list[int]] = {}
    prefix = "-".join(filter(None, [f"a{attempt}", f"s{step:05d}", name, mode]))

    async def one(number: int, task: Task) -> None:
        for attempt_no in range(retries + 1):
            episode_id = f"{prefix}-{number:05d}-t{attempt_no}"
            request = EpisodeRequest(
                episode_id, f"eval-{task.id}", task, derive(seed, mode, number), sampling, purpose="eval"
            )
            async with slots:
                started(request)
                result = await runner.run(request)
            finished(result)
            if result.record.outcome.kind != "infra_error":
                break
        passed, count, errors = counts.setdefault(task.family, [0, 0, 0])
        outcome = result.record.outcome
        missing = outcome.kind in ("infra_error", "cancelled")
        good = outcome.reward is not None and outcome.reward >= 1.0
        counts[task.family] = [passed + good, count + (not missing), errors + missing]

    async with asyncio.TaskGroup() as group:
        for number, task in enumerate(tasks):
            group.create_task(one(number, task))
    families = {name: Rate(*counts[name]) for name in sorted(counts)}
    return Evaluation(step, mode, families, asyncio.get_running_loop().time() - began, name)


def comparison(before: Evaluation, after: Evaluation) -> list[tuple[str, Rate, Rate]]:
    """Return (family, before, after) rows, the total last."""
    names = sorted({*before.families, *after.families})
    nothing = Rate(0, 0)
    rows = [(n, before.families.get(n, nothing), after.families.get(n, nothing)) for n in names]
    return [*rows, ("all", before.total, after.total)]
