"""The driver: one attempt at a run, from a resolved recipe to its last committed step."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollhook.checkpoints import Checkpoint, CheckpointStore
from rollhook.engine.weights import WeightStore
from rollhook.episode_store import EpisodeStore
from rollhook.errors import RunError, UsageError, first_of
from rollhook.metrics_file import MetricsWriter
from rollhook.observers import Observers
from rollhook.packs import cache_directory, resolve_all
from rollhook.records import Sample
from rollhook.runtime.episode import EpisodeResult
from rollhook.runtime.evaluate import Evaluation
from rollhook.runtime.model import is_path, local_model
from rollhook.runtime.parts import Parts
from rollhook.runtime.progress import Display
from rollhook.runtime.results import RunResult
from rollhook.runtime.rollout import Batch, VerdictWatch, batch_metrics
from rollhook.runtime.seeds import derive
from rollhook.runtime.watchdog import Watchdog

if TYPE_CHECKING:
    from rollhook.cluster import Cluster, Remote
    from rollhook.plugins import Plugins
    from rollhook.recipe.schema import Recipe
    from rollhook.rundir import Attempt, RunDir, Status
    from rollhook.runtime.rollouts import Rollouts

logger = logging.getLogger(__name__)
FIRST_VERSION = 1


class Driver:
    """Drives one attempt. The step loop is synchronous: rollouts, training, commit, weights.

    `drain` set means: stop after the step under way has committed. Cancelling `run` stops at once;
    either way everything that was started is released before `run` returns.
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
        self._version = FIRST_VERSION
        self._pending: list[str] = []
        self._verdicts = VerdictWatch()

    async def run(self) -> RunResult:
        """Claim the next attempt and drive it to its end; raises what stopped it, after cleaning up."""
        began = time.monotonic()
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
            rollouts = await self._prepare_rollouts(parts, attempt, stack)
            trainer = await self._start(parts, rollouts, attempt, stack)
            self.observers.run_started(attempt.run.run_id, attempt.number, self.recipe)
            weights = WeightStore(self.run_dir.path / "weights")
            status: Status = "failed"
            try:
                await self._loop(trainer, rollouts, weights, attempt)
                status = self._ended()
            except asyncio.CancelledError:
                status = "stopped"
                raise
            finally:
                self.observers.run_finished(attempt.run.run_id, status)

    def _ended(self) -> Status:
        """Return the status of a run whose loop has ended without an error."""
        return "stopped" if self.drain.is_set() and self.result.steps < self.recipe.steps else "succeeded"

    async def _start(
        self, parts: Parts, rollouts: Rollouts | None, attempt: Attempt, stack: AsyncExitStack
    ) -> Remote:
        """Bring up trainer and engines, at once where the first weights exist already."""
        placing = asyncio.ensure_future(self._place_trainer(parts, attempt, stack))
        try:
            model_dir = await self._initial_model(parts, placing, attempt)
        except BaseException:
            placing.cancel()
            await asyncio.wait({placing})
            raise

        async def set_up() -> Remote:
            trainer = await placing
            seed = derive(self.recipe.seed, "trainer")
            await trainer.call("setup", str(model_dir), self.recipe.steps, seed)
            return trainer

        try:
            async with asyncio.TaskGroup() as starting:
                trainer = starting.create_task(set_up())
                if rollouts is not None:
                    starting.create_task(rollouts.start(self.cluster.placement, model_dir, self._version))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if rollouts is not None:
            self.result.notes.update(rollouts.descriptions)
        return trainer.result()

    def _open_records(self, parts: Parts, attempt: Attempt, stack: AsyncExitStack) -> None:
        self.store = EpisodeStore(self.run_dir.episodes)
        stack.callback(self.store.close)
        self.metrics = MetricsWriter(self.run_dir.metrics_path)
        stack.callback(self.metrics.close)
        trackers = {
            use.use: parts.build("tracker", use, f"trackers.{use.use}") for use in self.recipe.trackers
        }
        self.observers = Observers(self.plugins, trackers, dict(self.resolved))
        stack.push_async_callback(asyncio.to_thread, self.observers.close)
        self.checkpoints = CheckpointStore(self.run_dir.checkpoints, attempt=attempt.number)
        self.attempt = attempt

    async def _prepare_rollouts(
        self, parts: Parts, attempt: Attempt, stack: AsyncExitStack
    ) -> Rollouts | None:
        if not self._trains_on_episodes():
            return None
        from rollhook.runtime.rollouts import Rollouts

        rollouts = Rollouts(parts, attempt, self._finished)
        stack.push_async_callback(rollouts.aclose)
        await rollouts.prepare()
        return rollouts

    async def _place_trainer(self, parts: Parts, attempt: Attempt, stack: AsyncExitStack) -> Remote:
        use = self._trainer_use()
        component = self.plugins.component("trainer", use.use)
        config = self.plugins.config("trainer", use.use, parts.keys(use), "trainer")
        trainer = await self.cluster.place(
            "rollhook.runtime.trainer_host:TrainerHost",
            component.load,
            config,
            str(attempt.path),
            str(cache_directory()),
            derive(self.recipe.seed, "trainer"),
            name="trainer",
        )
        stack.push_async_callback(trainer.stop)
        return trainer

    async def _initial_model(self, parts: Parts, placing: Awaitable[Remote], attempt: Attempt) -> Path:
        """Return the directory of the first weights, made by the trainer where the recipe says `init`."""
        model = self.recipe.model
        if self.recipe.checkpoint.load_from:
            return await self._pretrained(self.recipe.checkpoint.load_from, placing)
        if model is None or (model.path is None and model.init is None):
            raise UsageError("model: name weights with `path` or make fresh ones with `init`")
        if model.init is None:
            return await self._pretrained(model.path or "", placing)
        directory = attempt.path / "model"
        directory.mkdir()
        keys = resolve_all(model.model_dump(), self.plugins)
        trainer = await placing
        await trainer.call("initialise_model", keys, str(directory), derive(self.recipe.seed, "model"))
        return directory

    async def _pretrained(self, name: str, placing: Awaitable[Remote]) -> Path:
        if await asyncio.to_thread(is_path, name):
            return await asyncio.to_thread(local_model, name)
        trainer = await placing
        return Path(await trainer.call("fetch_model", name))

    async def _loop(
        self, trainer: Remote, rollouts: Rollouts | None, weights: WeightStore, attempt: Attempt
    ) -> None:
        recipe = self.recipe
        if rollouts is not None and recipe.evaluation.every and recipe.evaluation.first:
            await self._evaluate(rollouts, 0)
        for step in range(recipe.steps):
            if self.drain.is_set():
                return
            began = time.monotonic()
            metrics: dict[str, float] = {}
            groups: list[list[Sample]] = []
            if rollouts is not None:
                self.display.begin(
                    f"step {step + 1}: episodes", recipe.rollout.batch_groups * recipe.rollout.group_size
                )
                batch = await rollouts.collect(step)
                rollouts.observe(batch.groups)
                metrics.update(batch_metrics(batch))
                groups = batch.samples()
                self._verdicts.check(batch)
                if not groups:
                    logger.warning(
                        "step %d trains nothing: no group was accepted (%s)", step + 1, batch.why_rejected()
                    )
                self._pending.extend(dict.fromkeys(s.episode_id for group in groups for s in group))
                self._journal_groups(attempt, step, batch)
            metrics.update(await self._train(trainer, groups, step, rollouts is None))
            done = step + 1
            if rollouts is not None:
                metrics.update(await self._renew(trainer, rollouts, weights, attempt, done))
            elif self._due(done):
                metrics.update(await self._commit(trainer, attempt, done, {}))
            self.result.steps = done
            metrics["time/step"] = time.monotonic() - began
            metrics["loop/longest_wait_seconds"] = self.watchdog.longest
            self._row(done, metrics)
            self.display.step(done, recipe.steps, metrics, every=max(1, recipe.steps // 20))
            if rollouts is not None and self._evaluates(done):
                await self._evaluate(rollouts, done)

    async def _train(
        self, trainer: Remote, groups: Sequence[Sequence[Sample]], step: int, own_data: bool
    ) -> dict[str, float]:
        if not groups and not own_data:
            return {"time/train": 0.0}
        began = time.monotonic()
        metrics: dict[str, float] = await trainer.call("step", groups, step)
        return {**metrics, "time/train": time.monotonic() - began}

    async def _renew(
        self, trainer: Remote, rollouts: Rollouts, weights: WeightStore, attempt: Attempt, done: int
    ) -> dict[str, float]:
        """Publish the step's weights, commit the step if it is due, and bring the engines up to date."""
        metrics: dict[str, float] = {}
        began = time.monotonic()
        self._version += 1
        path = await self._publish(trainer, weights)
        metrics["time/publish"] = time.monotonic() - began
        if self._due(done):
            metrics.update(await self._commit(trainer, attempt, done, {"draw": rollouts.draw_state()}))
        began = time.monotonic()
        await rollouts.update(path, self._version)
        await asyncio.to_thread(weights.prune, {self._version})
        metrics["time/update"] = time.monotonic() - began
        metrics["weights/version"] = float(self._version)
        metrics.update(rollouts.sandbox_stats())
        return metrics

    async def _publish(self, trainer: Remote, weights: WeightStore) -> Path:
        path = await asyncio.to_thread(weights.new, self._version)
        await trainer.call("publish", str(path))
        await asyncio.to_thread(weights.commit, path, self._version)
        return path

    async def _commit(
        self, trainer: Remote, attempt: Attempt, done: int, extra: Mapping[str, Any]
    ) -> dict[str, float]:
        """Write a checkpoint; the step is committed when its marker is durable."""
        began = time.monotonic()
        await asyncio.to_thread(attempt.assert_newest)
        await self.store.commit()
        path = await asyncio.to_thread(self.checkpoints.begin, done)
        await trainer.call("save", str(path))
        await attempt.journal.commit()
        made: Checkpoint = await asyncio.to_thread(
            self.checkpoints.commit,
            path,
            done,
            self._version,
            list(self._pending),
            attempt.journal.seq,
            dict(extra),
        )
        attempt.journal.append(
            "step_committed", step=done, version=self._version, episodes=len(self._pending)
        )
        await attempt.journal.commit()
        self._pending.clear()
        self.result.checkpoint = str(made.path)
        await asyncio.to_thread(self.checkpoints.prune, self.recipe.checkpoint.keep)
        return {"time/checkpoint": time.monotonic() - began}

    async def _evaluate(self, rollouts: Rollouts, step: int) -> None:
        found = await rollouts.evaluate(step, self.display.begin)
        self.display.end()
        for evaluation in found:
            self.result.evaluations.append(evaluation)
            self.display.say(_line(evaluation))
        metrics = {k: v for e in found for k, v in e.metrics().items()}
        self.result.metrics.update(metrics)
        self._row(step, {**metrics, "time/evaluate": sum(e.seconds for e in found)})

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

    def _journal_groups(self, attempt: Attempt, step: int, batch: Batch) -> None:
        for group, reason in batch.rejected:
            attempt.journal.append(
                "group_rejected", step=step, group_id=group.group_id, task_id=group.task_id, reason=reason
            )

    def _due(self, done: int) -> bool:
        return done % self.recipe.checkpoint.every == 0 or done == self.recipe.steps or self.drain.is_set()

    def _evaluates(self, done: int) -> bool:
        every = self.recipe.evaluation.every
        return bool(every) and (done % every == 0 or done == self.recipe.steps)

    def _trainer_use(self) -> Any:
        if self.recipe.trainer is None:
            raise UsageError("trainer: a run needs a trainer, e.g. `trainer: {use: torch, ...}`")
        return self.recipe.trainer

    def _trains_on_episodes(self) -> bool:
        use = self._trainer_use()
        config = self.plugins.config("trainer", use.use, use.keys, "trainer")
        return bool(self.plugins.load_class("trainer", use.use).needs_rollouts(config))


def _line(evaluation: Evaluation) -> str:
    total = evaluation.total
    errors = f", {total.errors} errors not counted" if total.errors else ""
    of = f" of {evaluation.environment}" if evaluation.environment else ""
    return (
        f"held-out{of} at step {evaluation.step}, {evaluation.mode}: {total} "
        f"({total.passed} of {total.count}{errors}, {evaluation.seconds:.1f} s)"
    )
