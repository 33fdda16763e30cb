"""`rollhook eval`: a recipe's evaluation alone, without its trainer, as a run of its own."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollhook.engine import SamplingParams
from rollhook.episode_store import EpisodeStore, read_records
from rollhook.errors import RollhookError, RunError, first_of
from rollhook.metrics_file import MetricsWriter
from rollhook.observers import Observers
from rollhook.recipe.lock import complete, digest
from rollhook.runtime.endpoint import asks_endpoint, open_endpoint
from rollhook.runtime.eval_setup import weights
from rollhook.runtime.evaluate import Trial, judged, mode_of, run_trial
from rollhook.runtime.parts import Parts
from rollhook.runtime.rollouts import Rollouts
from rollhook.runtime.scores import Scores, conditions, evaluations, score, write_scores
from rollhook.runtime.seeds import derive
from rollhook.runtime.stopping import stopping

if TYPE_CHECKING:
    from rollhook.cluster import Cluster
    from rollhook.plugins import Plugins
    from rollhook.recipe.load import Loaded
    from rollhook.recipe.schema import Recipe
    from rollhook.records import EpisodeRecord
    from rollhook.rundir import Attempt, RunDir, Status
    from rollhook.runtime.episode import EpisodeRequest, EpisodeResult, Runner
    from rollhook.runtime.progress import Display

#: finished episodes are durable after at most this long
FLUSH_SECONDS = 1.0
#: tries in a row without a single verdict after which something is broken, not just hard
HOPELESS = 24
VERSION = 1


@dataclass(frozen=True)
class Planned:
    """A trial with its runner; `name` is that of its environment."""

    name: str
    runner: Runner
    trial: Trial


async def evaluate_run(
    loaded: Loaded, plugins: Plugins, run: RunDir, ks: Sequence[int], display: Display
) -> Scores:
    """Drive the next attempt of an evaluation and write `evaluation.json`, with pass@k for these k.

    Episodes that have a verdict are kept. Raises CancelledError when a signal stopped it, in order, and
    RunError when nothing comes to a verdict.
    """
    attempt = await asyncio.to_thread(run.claim, "eval")
    status: Status = "failed"
    try:
        with display.running(), stopping(display) as take_signals:
            scores = await _Evaluation(loaded, plugins, attempt, display, take_signals).run()
            await asyncio.to_thread(write_scores, run.path, scores, ks)
        status = "succeeded"
    except asyncio.CancelledError:
        status = "stopped"
        raise
    except ExceptionGroup as errors:
        raise first_of(errors) from None
    finally:
        attempt.finish(status)
    return scores


class _Evaluation:
    """One attempt."""

    def __init__(
        self,
        loaded: Loaded,
        plugins: Plugins,
        attempt: Attempt,
        display: Display,
        take_signals: Callable[[], None],
    ) -> None:
        self._loaded = loaded
        self._plugins = plugins
        self._recipe = _only_held_out(loaded.recipe)
        self._attempt = attempt
        self._display = display
        self._take_signals = take_signals
        self._cluster: Cluster | None = None
        self._causes: Counter[str] = Counter()
        self._judged = False
        sampling = loaded.recipe.rollout.sampling
        self._sampling = SamplingParams(sampling.temperature, sampling.top_p, sampling.top_k)
        self._mode = mode_of(self._sampling)
        self._endpoint = asks_endpoint(loaded.recipe, plugins)

    async def run(self) -> Scores:
        """Run the episodes that are missing, then count all."""
        run = self._attempt.run
        self._display.say(f"Evaluation {run.run_id} in {run.path}")
        async with AsyncExitStack() as stack:
            parts = Parts(self._recipe, self._plugins, self._attempt.path, run.run_id, self._attempt.number)
            self._store = EpisodeStore(run.episodes)
            stack.callback(self._store.close)
            self._observers = self._observe(parts, stack)
            status: Status = "failed"
            try:
                scores = await self._evaluate(parts)
                status = "succeeded"
            except asyncio.CancelledError:
                status = "stopped"
                raise
            finally:
                self._observers.run_finished(run.run_id, status)
        return scores

    async def _evaluate(self, parts: Parts) -> Scores:
        began = time.monotonic()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._stop_cluster)
            rollouts = Rollouts(parts, self._attempt, self._finished)
            stack.push_async_callback(rollouts.aclose)
            await rollouts.prepare()
            wanted = list(self._plan(rollouts))
            done = {record.seed for record in await self._recorded() if judged(record)}
            todo = [each for each in wanted if each.trial.seed not in done]
            if len(todo) < len(wanted):
                self._display.say(f"{len(wanted) - len(todo)} of {len(wanted)} episodes are kept")
            if todo:
                await self._open_policy(parts, rollouts, stack)
                await self._run(todo)
            await self._store.commit()
        scores = self._count({each.trial.seed for each in wanted}, await self._recorded())
        scores.seconds = time.monotonic() - began
        metrics = {name: value for each in evaluations(scores) for name, value in each.metrics().items()}
        await asyncio.to_thread(self._write_metrics, {**metrics, "time/evaluate": scores.seconds})
        return scores

    def _observe(self, parts: Parts, stack: AsyncExitStack) -> Observers:
        trackers = {u.use: parts.build("tracker", u, f"trackers.{u.use}") for u in self._recipe.trackers}
        observers = Observers(self._plugins, trackers, dict(self._loaded.resolved))
        stack.push_async_callback(asyncio.to_thread, observers.close)
        observers.run_started(self._attempt.run.run_id, self._attempt.number, self._recipe)
        return observers

    def _plan(self, rollouts: Rollouts) -> Iterator[Planned]:
        """Yield a trial per task and sample. Its seed is its identity, whatever else is evaluated."""
        prefix = f"a{self._attempt.number}-{self._mode}"
        number = 0
        for name, runner, tasks in rollouts.held_out():
            samples: Counter[str] = Counter()
            for task in tasks:
                seed = derive(self._recipe.seed, "evaluate", name, task.digest, samples[task.digest])
                samples[task.digest] += 1
                yield Planned(name, runner, Trial(f"{prefix}-{number:05d}", task, seed, self._sampling))
                number += 1

    async def _recorded(self) -> list[EpisodeRecord]:
        return await asyncio.to_thread(lambda: list(read_records(self._attempt.run.episodes)))

    async def _open_policy(self, parts: Parts, rollouts: Rollouts, stack: AsyncExitStack) -> None:
        """Bring up the engine; Ray is started only for one that needs processes of ours."""
        if self._recipe.engine is None:
            return
        if self._endpoint:
            await rollouts.use(await open_endpoint(parts, stack))
            return
        model_dir = await asyncio.to_thread(weights, self._recipe, self._plugins)
        from rollhook.cluster import Cluster

        self._display.say("Starting Ray on this machine ...")
        self._cluster = await Cluster.start(self._attempt.run.path / ".cluster")
        self._take_signals()  # Ray's native code has put its own handler of SIGTERM there
        await rollouts.start(self._cluster.placement, model_dir, VERSION)

    async def _stop_cluster(self) -> None:
        if self._cluster is not None:
            await self._cluster.stop()

    async def _run(self, todo: Sequence[Planned]) -> None:
        slots = asyncio.Semaphore(self._recipe.rollout.max_concurrent)
        self._display.begin(f"evaluate ({self._mode})", len(todo))

        async def one(each: Planned) -> None:
            record = await run_trial(
                each.runner, each.trial, slots, started=self._started, finished=self._finished
            )
            self._display.episode(record)

        async with asyncio.TaskGroup() as group:
            flushing = group.create_task(self._flush())
            trials = [group.create_task(one(each)) for each in todo]
            await asyncio.wait(trials)
            flushing.cancel()
        self._display.end()

    async def _flush(self) -> None:
        """Make what has finished durable now and then."""
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            await self._store.commit()

    def _started(self, request: EpisodeRequest) -> None:
        self._attempt.journal.append(
            "episode_started",
            episode_id=request.episode_id,
            group_id=request.group_id,
            task_id=request.task.id,
            seed=request.seed,
        )

    def _finished(self, result: EpisodeResult) -> None:
        record = result.record
        self._store.append(record, ())
        self._attempt.journal.append(
            "episode_finished",
            episode_id=record.episode_id,
            group_id=record.group_id,
            outcome=record.outcome.kind,
            ended=record.ended,
            reward=record.outcome.reward,
        )
        self._observers.episode(record)
        if judged(record):
            self._judged = True
        elif not self._judged:
            self._causes[f"{record.outcome.boundary}: {record.outcome.cause}"] += 1
            if self._causes.total() >= HOPELESS:
                raise self._no_verdict()

    def _no_verdict(self) -> RollhookError:
        cause = self._causes.most_common(1)[0][0] if self._causes else "no episode was run"
        return RunError(
            f"no episode came to a verdict ({cause}); mend that, "
            f"then go on with --resume {self._attempt.run.run_id}"
        )

    def _count(self, wanted: Collection[int], records: Sequence[EpisodeRecord]) -> Scores:
        """Count the records of the wanted trials, of this attempt and of earlier ones."""
        plain = complete(self._loaded, self._plugins)
        path = plain["checkpoint"]["load_from"] or (plain["model"] or {}).get("path")
        tasks = score((record.seed, record) for record in records if record.seed in wanted)
        scores = Scores(self._attempt.run.run_id, self._mode, tasks, conditions(plain, self._mode))
        if not scores.samples:
            raise self._no_verdict()
        scores.about = {
            "recipe": self._recipe.name,
            "digest": digest(self._loaded, self._plugins),
            "model": None if self._endpoint else path,
            "engine": plain["engine"],
            "seed": self._recipe.seed,
        }
        return scores

    def _write_metrics(self, metrics: Mapping[str, float]) -> None:
        writer = MetricsWriter(self._attempt.run.metrics_path)
        try:
            writer.write(0, self._attempt.number, metrics)
        finally:
            writer.close()
        self._observers.step(0, metrics)


def _only_held_out(recipe: Recipe) -> Recipe:
    """Return the recipe with the evaluation's split in place of what is trained on, in one process."""
    split = recipe.evaluation.split
    return recipe.model_copy(
        update={
            "environment": [use.model_copy(update={"split": split}) for use in recipe.environment],
            "rollout": recipe.rollout.model_copy(update={"workers": 1}),
            "evaluation": recipe.evaluation.model_copy(update={"every": 1}),
        }
    )
