"""The driver: one attempt at a run, from a resolved recipe to its last committed step."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollhook.checkpoints import Checkpoint, CheckpointStore
from rollhook.engine.weights import WeightStore
from rollhook.episode_store import EpisodeStore
from rollhook.errors import RunError, first_of
from rollhook.metrics_file import MetricsWriter, read_metrics
from rollhook.observers import Observers
from rollhook.runtime.batch import Batch, VerdictWatch, batch_metrics
from rollhook.runtime.episode import EpisodeResult
from rollhook.runtime.evaluate import Evaluation
from rollhook.runtime.lineage import Lineage
from rollhook.runtime.parts import Parts
from rollhook.runtime.progress import Display
from rollhook.runtime.report import write_report
from rollhook.runtime.results import RunResult, evaluation_data, read_evaluation
from rollhook.runtime.training import Training, trains_on_episodes
from rollhook.runtime.watchdog import Watchdog

if TYPE_CHECKING:
    from rollhook.cluster import Cluster
    from rollhook.plugins import Plugins
    from rollhook.recipe.schema import Recipe
    from rollhook.rundir import Attempt, RunDir, Status
    from rollhook.runtime.rollouts import Rollouts

logger = logging.getLogger(__name__)
#: seconds between two writes of finished episodes, so that a crash loses few
FLUSH_INTERVAL = 5.0


class Driver:
    """Drives one attempt: from the newest committed step, or from the start.

    Episodes are made beside training (`rollhook.runtime.producer`). `drain` set means: stop after the step
    under way has committed. Cancelling `run` stops at once; either way everything that was started is
    released before `run` returns.
    """

    def __init__(
        self,
        recipe: Recipe,
        resolved: Mapping[str, Any],
        digest: str,
        plugins: Plugins,
        run: RunDir,
        cluster: Cluster,
        display: Display,
        drain: asyncio.Event,
    ) -> None:
        self.recipe = recipe
        self.resolved = resolved
        self.plugins = plugins
        self.run_dir = run
        self.cluster = cluster
        self.display = display
        self.drain = drain
        self.result = RunResult(run.run_id, "failed", digest)
        self._version = 0
        self._committed = 0
        self._pending: list[str] = []
        self._in_use: list[Path] = []
        self._verdicts = VerdictWatch()
        self._idle = 0

    async def run(self, claimed: Attempt | None = None) -> RunResult:
        """Drive an attempt, by default the next, to its end; raises what stopped it, after cleaning up."""
        began = time.monotonic()
        attempt = claimed
        if attempt is None:
            attempt = await asyncio.to_thread(self.run_dir.claim)
        status: Status = "failed"
        failure: BaseException | None = None
        try:
            with self.display.running(), Watchdog(limit=1.0, report=True) as self.watchdog:
                await self._attempt(attempt)
            status = self._ended()
        except asyncio.CancelledError as error:
            status, failure = "stopped", error
        except BaseException as error:  # noqa: BLE001 - raised below, once the attempt is over
            failure = first_of(error)
        self.result.status = status
        self.result.seconds = time.monotonic() - began
        try:
            self._conclude(attempt, status)
            if status != "succeeded":
                self.display.say(f"Go on with: rollhook run --resume {self.run_dir.run_id}")
            await asyncio.to_thread(write_report, self.run_dir)
        except RunError as error:
            if failure is None:
                raise
            logger.warning("%s", error)
        if failure is not None:
            raise failure
        return self.result

    def _conclude(self, attempt: Attempt, status: Status) -> None:
        """Write how the attempt ended, unless a newer one has taken over the run."""
        try:
            attempt.assert_newest()
            self.result.write(self.run_dir.path)
        finally:
            attempt.finish(status)

    async def _attempt(self, attempt: Attempt) -> None:
        async with AsyncExitStack() as stack:
            parts = Parts(self.recipe, self.plugins, attempt.path, attempt.run.run_id, attempt.number)
            self._open_records(parts, attempt, stack)
            base = await self._go_on(attempt)
            rollouts = await self._prepare_rollouts(parts, attempt, stack)
            training = Training(parts, self.cluster, attempt.path)
            stack.push_async_callback(training.stop)
            await self._start(training, rollouts, attempt, base)
            await asyncio.to_thread(self._complete_rows, base)
            self.observers.run_started(attempt.run.run_id, attempt.number, self.recipe)
            status: Status = "failed"
            try:
                async with self._flushing():
                    await self._loop(training, rollouts, attempt)
                status = self._ended()
            except asyncio.CancelledError:
                status = "stopped"
                raise
            finally:
                if self._idle > 1:
                    logger.warning("%d steps trained nothing: no group was accepted in them", self._idle)
                self.observers.run_finished(attempt.run.run_id, status)

    def _ended(self) -> Status:
        """Return the status of a run whose loop has ended without an error."""
        return "stopped" if self.drain.is_set() and self.result.steps < self.recipe.steps else "succeeded"

    # -- starting

    def _open_records(self, parts: Parts, attempt: Attempt, stack: AsyncExitStack) -> None:
        self.store = EpisodeStore(self.run_dir.episodes)
        stack.callback(self.store.close)
        self.metrics = MetricsWriter(self.run_dir.metrics_path, guard=attempt.assert_newest)
        stack.callback(self.metrics.close)
        trackers = {
            use.use: parts.build("tracker", use, f"trackers.{use.use}") for use in self.recipe.trackers
        }
        self.observers = Observers(self.plugins, trackers, dict(self.resolved))
        stack.push_async_callback(asyncio.to_thread, self.observers.close)
        self.checkpoints = CheckpointStore(self.run_dir.checkpoints, attempt=attempt.number)
        self.weights = WeightStore(self.run_dir.path / "weights")
        self.attempt = attempt

    async def _go_on(self, attempt: Attempt) -> Checkpoint | None:
        """Return the committed step to go on from, None for the start, and say so in the journal."""
        self.lineage = await asyncio.to_thread(Lineage.read, self.run_dir)
        base = await asyncio.to_thread(self.checkpoints.newest)
        step = base.step if base is not None else 0
        self.lineage.bases[attempt.number] = step
        self.lineage.cut(step)
        used = max(self.lineage.newest_version, base.version if base is not None else 0)
        self._version = used + 1
        self.result.steps = self._committed = step
        self.result.evaluations = [read_evaluation(data) for data in self.lineage.evaluations]
        if base is not None:
            self.result.checkpoint = str(base.path)
            self._in_use = [base.path]  # the trainer's model directory as long as this attempt lives
        if attempt.number > 1:
            where = base.path.name if base is not None else None
            attempt.journal.append("resumed", step=step, version=self._version, checkpoint=where)
            self.display.say(f"Attempt {attempt.number} goes on from step {step}.")
            await asyncio.to_thread(self.checkpoints.prune, self.recipe.checkpoint.keep, self._in_use)
        await self._publishes(attempt, step)
        return base

    async def _publishes(self, attempt: Attempt, step: int) -> None:
        """Write down, before it is published, that the current version has `step` optimizer steps."""
        await attempt.journal.append_durable("published", version=self._version, step=step)
        self.lineage.versions[self._version] = step

    async def _prepare_rollouts(
        self, parts: Parts, attempt: Attempt, stack: AsyncExitStack
    ) -> Rollouts | None:
        if not trains_on_episodes(parts):
            return None
        self.lineage.assert_whole(self.run_dir, self.result.steps)
        from rollhook.runtime.rollouts import Rollouts

        rollouts = Rollouts(parts, attempt, self._finished, self.drain.is_set, self.cluster)
        stack.push_async_callback(rollouts.aclose)
        await rollouts.prepare()
        return rollouts

    async def _start(
        self, training: Training, rollouts: Rollouts | None, attempt: Attempt, base: Checkpoint | None
    ) -> None:
        """Bring up trainer and engines, at once where the first weights exist already."""
        training.place()
        model_dir = base.path if base is not None else await training.first_model()
        try:
            async with asyncio.TaskGroup() as starting:
                starting.create_task(training.set_up(model_dir, base))
                if rollouts is not None:
                    starting.create_task(rollouts.start(self.cluster.placement, model_dir, self._version))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if rollouts is not None:
            self.result.notes.update(rollouts.descriptions)

    @contextlib.asynccontextmanager
    async def _flushing(self) -> AsyncIterator[None]:
        """Write finished episodes now and then while the block runs."""

        async def flush() -> None:
            while True:
                await asyncio.sleep(FLUSH_INTERVAL)
                await self.store.commit()

        async with asyncio.TaskGroup() as tasks:
            flushing = tasks.create_task(flush())
            yield
            flushing.cancel()

    # -- the steps

    async def _loop(self, training: Training, rollouts: Rollouts | None, attempt: Attempt) -> None:
        recipe, base = self.recipe, self.result.steps
        metrics: dict[str, float] = {}
        if rollouts is not None:
            if self._evaluates(base) and all(each.step != base for each in self.result.evaluations):
                await self._evaluate(rollouts, base)
            await rollouts.produce(base, self.lineage)
        for step in range(base, recipe.steps):
            if self.drain.is_set():
                if self._committed < step:  # asked for when that step's commit had been decided
                    await self._commit(training, attempt, step, metrics)
                return
            began = time.monotonic()
            metrics = {}
            batch = Batch()
            if rollouts is not None:
                self.display.begin(
                    f"step {step + 1}: episodes", recipe.rollout.batch_groups * recipe.rollout.group_size
                )
                batch = await self._take(rollouts, attempt, step)
                metrics.update(batch_metrics(batch, several=len(self.recipe.environment) > 1))
            metrics.update(await training.step(batch.samples(), step, own_data=rollouts is None))
            done = step + 1
            if rollouts is not None:
                if self._evaluates(done):
                    rollouts.pause()
                metrics.update(await self._renew(training, rollouts, attempt, done, metrics))
            elif self._due(done):
                metrics.update(await self._commit(training, attempt, done, metrics))
            self.result.steps = done
            metrics["time/step"] = time.monotonic() - began
            metrics["loop/longest_wait_seconds"] = self.watchdog.longest
            self._row(done, metrics)
            self.display.workers = {} if rollouts is None else rollouts.worker_names()
            self.display.step(done, recipe.steps, metrics, every=max(1, recipe.steps // 20))
            if rollouts is not None and self._evaluates(done):
                await self._evaluate(rollouts, done)

    async def _take(self, rollouts: Rollouts, attempt: Attempt, step: int) -> Batch:
        """Take the groups of a step, and write down what it trains."""
        batch = await rollouts.batch()
        rollouts.observe(batch.groups)
        self._verdicts.check(batch)
        if not batch.accepted:
            why = batch.why_rejected()
            self._idle += 1
            level = logging.WARNING if self._idle == 1 else logging.INFO
            logger.log(level, "step %d trains nothing: no group was accepted (%s)", step + 1, why)
        for group, reason in batch.rejected:
            attempt.journal.append(
                "group_rejected", step=step, group_id=group.group_id, task_id=group.task_id, reason=reason
            )
        groups = [
            {"group_id": group.group_id, "episodes": list(dict.fromkeys(s.episode_id for s in group.samples))}
            for group in batch.accepted
        ]
        attempt.journal.append(
            "batch",
            step=step,
            version=self._version,
            groups=groups,
            rejected=[group.group_id for group, _ in batch.rejected],
        )
        self._pending.extend(episode for group in groups for episode in group["episodes"])
        return batch

    async def _renew(
        self,
        training: Training,
        rollouts: Rollouts,
        attempt: Attempt,
        done: int,
        so_far: Mapping[str, float],
    ) -> dict[str, float]:
        """Publish the step's weights, commit the step if it is due, and bring the engines up to date."""
        metrics: dict[str, float] = {}
        began = time.monotonic()
        self._version += 1
        await self._publishes(attempt, done)
        path = await training.publish(self.weights, self._version)
        metrics["time/publish"] = time.monotonic() - began
        if self._due(done):
            metrics.update(await self._commit(training, attempt, done, {**so_far, **metrics}))
        began = time.monotonic()
        await rollouts.update(path, self._version, done)
        await asyncio.to_thread(self.weights.prune, {self._version})
        metrics["time/update"] = time.monotonic() - began
        metrics["weights/version"] = float(self._version)
        metrics.update(rollouts.sandbox_stats())
        metrics.update(rollouts.router_stats())
        return metrics

    async def _commit(
        self, training: Training, attempt: Attempt, done: int, metrics: Mapping[str, float]
    ) -> dict[str, float]:
        """Write a checkpoint; the step is committed when its marker is durable."""
        began = time.monotonic()
        await self.store.commit()
        path = await asyncio.to_thread(self.checkpoints.begin, done)
        await training.save(path)
        await attempt.journal.commit()
        await asyncio.to_thread(attempt.assert_newest)
        made: Checkpoint = await asyncio.to_thread(
            self.checkpoints.commit,
            path,
            done,
            self._version,
            list(self._pending),
            attempt.journal.seq,
            {"metrics": dict(metrics)},
        )
        attempt.journal.append(
            "step_committed", step=done, version=self._version, episodes=len(self._pending)
        )
        await attempt.journal.commit()
        self._pending.clear()
        self._committed = done
        self.result.checkpoint = str(made.path)
        await asyncio.to_thread(self.checkpoints.prune, self.recipe.checkpoint.keep, self._in_use)
        return {"time/checkpoint": time.monotonic() - began}

    async def _evaluate(self, rollouts: Rollouts, step: int) -> None:
        if not self.display.console.is_terminal:
            self.display.say(f"evaluating at step {step} ...")
        found = await rollouts.evaluate(step, self.display.begin)
        self.display.end()
        for evaluation in found:
            self.attempt.journal.append("evaluated", evaluation=evaluation_data(evaluation))
            self.result.evaluations.append(evaluation)
            self.display.say(_line(evaluation))
        metrics = {k: v for e in found for k, v in e.metrics().items()}
        self.result.metrics.update(metrics)
        self._row(step, {**metrics, "time/evaluate": sum(e.seconds for e in found)})
        await self.attempt.journal.commit()

    def _complete_rows(self, base: Checkpoint | None) -> None:
        """Write the row of the step that the run goes on from, if the crash came between commit and row."""
        if base is None or base.attempt is None or "metrics" not in base.extra:
            return
        rows = self.lineage.surviving(read_metrics(self.run_dir.metrics_path))
        if all(row["step"] != base.step or "time/train" not in row for row in rows):
            self.metrics.write(base.step, base.attempt, base.extra["metrics"])

    def _row(self, step: int, metrics: Mapping[str, float]) -> None:
        self.metrics.write(step, self.attempt.number, metrics)
        self.observers.step(step, dict(metrics))

    def _finished(self, result: EpisodeResult) -> None:
        record = result.record
        self.store.append(record, result.samples if record.purpose == "train" else ())
        self.attempt.journal.append(
            "episode_finished",
            episode_id=record.episode_id,
            group_id=record.group_id,
            outcome=record.outcome.kind,
            ended=record.ended,
            reward=record.outcome.reward,
        )
        self.observers.episode(record)
        self.display.episode(record)

    def _due(self, done: int) -> bool:
        return done % self.recipe.checkpoint.every == 0 or done == self.recipe.steps or self.drain.is_set()

    def _evaluates(self, done: int) -> bool:
        """Whether an evaluation is due after so many steps, 0 being before the first."""
        settings = self.recipe.evaluation
        if not settings.every:
            return False
        return settings.first if done == 0 else done % settings.every == 0 or done == self.recipe.steps


def _line(evaluation: Evaluation) -> str:
    total = evaluation.total
    errors = f", {total.errors} errors not counted" if total.errors else ""
    of = f" of {evaluation.environment}" if evaluation.environment else ""
    return (
        f"held-out{of} at step {evaluation.step}, {evaluation.mode}: {total} "
        f"({total.passed} of {total.count}{errors}, {evaluation.seconds:.1f} s)"
    )
