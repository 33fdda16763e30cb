"""Evaluation: episodes that never train, counted by family."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import cache

from rollhook.engine import SamplingParams
from rollhook.environment import Task
from rollhook.records import EpisodeRecord
from rollhook.runtime.episode import EpisodeRequest, EpisodeResult, Runner
from rollhook.runtime.seeds import derive
from rollhook.runtime.statistics import Rate, mean_pass_at_k, stderr_over_tasks

logger = logging.getLogger(__name__)

Started = Callable[[EpisodeRequest], None]
Finished = Callable[[EpisodeResult], None]
#: passed, judged, without a verdict
Tally = list[int]


@dataclass
class Evaluation:
    """What one evaluation found, in all and by family.

    `environment` is its name in a run that has several, else empty. `tasks` holds (samples, passes) of each
    task while the process that ran them lives; files keep the families alone.
    """

    step: int
    mode: str
    families: dict[str, Rate] = field(default_factory=dict)
    seconds: float = 0.0
    environment: str = ""
    tasks: Sequence[tuple[int, int]] = ()

    @property
    def total(self) -> Rate:
        """All families together."""
        rates = self.families.values()
        return Rate(sum(r.passed for r in rates), sum(r.count for r in rates), sum(r.errors for r in rates))

    def metrics(self) -> dict[str, float]:
        """Return the metrics: `eval/pass_rate` and `eval_family/<name>`, with `_greedy` for greedy ones.

        With several environments the names are `eval/<environment>/pass_rate` and so on. With several
        samples per task there is `eval/pass_at_<samples>`, and the standard error is over tasks.
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
        if (samples := max((n for n, _ in self.tasks), default=0)) > 1:
            found[f"eval/{of}stderr{suffix}"] = stderr_over_tasks(self.tasks)
            if estimate := mean_pass_at_k(self.tasks, samples):
                found[f"eval/{of}pass_at_{samples}{suffix}"] = estimate.value
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
    if episodes is not None and episodes > len(rounds) * samples:
        _remark_few(episodes, len(rounds), samples)
    chosen = rounds if episodes is None else rounds[: max(1, episodes // samples)]
    return [task for task in chosen for _ in range(samples)]


@dataclass(frozen=True)
class Trial:
    """One episode that an evaluation wants; its tries are `<name>-t0` and so on."""

    name: str
    task: Task
    seed: int
    sampling: SamplingParams


def judged(record: EpisodeRecord) -> bool:
    """Return whether an episode counts: what the machinery failed or somebody cancelled does not."""
    return record.outcome.kind not in ("infra_error", "cancelled")


def passed(record: EpisodeRecord) -> bool:
    """Return whether an episode passed: a reward of at least 1."""
    return record.outcome.reward is not None and record.outcome.reward >= 1.0


async def run_trial(
    runner: Runner,
    trial: Trial,
    slots: AbstractAsyncContextManager[object],
    *,
    started: Started,
    finished: Finished,
    retries: int = 2,
) -> EpisodeRecord:
    """Run a trial, up to `retries` times more while the machinery fails it; return the last try's record."""
    for number in range(retries + 1):
        request = EpisodeRequest(
            f"{trial.name}-t{number}",
            f"eval-{trial.task.id}",
            trial.task,
            trial.seed,
            trial.sampling,
            purpose="eval",
        )
        async with slots:
            started(request)
            result = await runner.run(request)
        finished(result)
        if result.record.outcome.kind != "infra_error":
            break
    return result.record


async def evaluate(  # noqa: PLR0913 - what an evaluation is made of
    runner: Runner,
    tasks: Sequence[Task],
    sampling: SamplingParams,
    *,
    step: int,
    attempt: int,
    seed: int,
    slots: AbstractAsyncContextManager[object],
    retries: int = 2,
    started: Started = lambda request: None,
    finished: Finished = lambda result: None,
    name: str = "",
) -> Evaluation:
    """Run one episode per task; one that gave no verdict for want of machinery is tried again."""
    mode = mode_of(sampling)
    began = asyncio.get_running_loop().time()
    families: defaultdict[str, Tally] = defaultdict(lambda: [0, 0, 0])
    by_task: defaultdict[str, Tally] = defaultdict(lambda: [0, 0, 0])
    prefix = "-".join(filter(None, [f"a{attempt}", f"s{step:05d}", name, mode]))

    async def one(number: int, task: Task) -> None:
        trial = Trial(f"{prefix}-{number:05d}", task, derive(seed, mode, number), sampling)
        record = await run_trial(runner, trial, slots, started=started, finished=finished, retries=retries)
        for tally in (families[task.family], by_task[task.id]):
            tally[0] += passed(record)
            tally[1] += judged(record)
            tally[2] += not judged(record)

    async with asyncio.TaskGroup() as group:
        for number, task in enumerate(tasks):
            group.create_task(one(number, task))
    return Evaluation(
        step,
        mode,
        {family: Rate(*families[family]) for family in sorted(families)},
        asyncio.get_running_loop().time() - began,
        name,
        [(n, c) for c, n, _ in by_task.values()],
    )


def mode_of(sampling: SamplingParams) -> str:
    """Return how an evaluation's replies are drawn: `greedy` or `sampled`."""
    return "greedy" if sampling.temperature == 0 else "sampled"


@cache
def _remark_few(episodes: int, tasks: int, samples: int) -> None:
    """Say, once in a process, that an evaluation is smaller than was asked for."""
    logger.warning(
        "evaluation.episodes is %d, and %d tasks, %d samples each, give %d: all of these are run",
        episodes, tasks, samples, tasks * samples,
    )  # fmt: skip


def comparison(before: Evaluation, after: Evaluation) -> list[tuple[str, Rate, Rate]]:
    """Return (family, before, after) rows, the total last."""
    names = sorted({*before.families, *after.families})
    nothing = Rate(0, 0)
    rows = [(n, before.families.get(n, nothing), after.families.get(n, nothing)) for n in names]
    return [*rows, ("all", before.total, after.total)]
