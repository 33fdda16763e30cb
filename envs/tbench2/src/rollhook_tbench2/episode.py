"""One attempt at one task: its boxes, what is staged in them, and a phase for each of its stages."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Self

from rollhook.environment import Box, Episode, EpisodeContext, Phase
from rollhook.errors import TaskError
from rollhook.sandbox import Sandbox
from rollhook_tbench2.boxes import Ground, box_spec
from rollhook_tbench2.dockerfile import target_of
from rollhook_tbench2.health import wait_until_healthy
from rollhook_tbench2.phase import PLACES, TBench2Phase
from rollhook_tbench2.stages import BoxPlan, Stage, TaskDir, judge_policy


class TBench2Episode(Episode):
    """A task in one sandbox, `main`, and those of its separate verifiers."""

    def __init__(
        self, task: TaskDir, ctx: EpisodeContext, prompt: str, reward_key: str, ground: Ground, limit: int
    ) -> None:
        self.task = task
        self.ctx = ctx
        self.prompt = prompt
        self.reward_key = reward_key
        self.ground = ground
        self.artifact_limit = limit
        self.combine = task.config.multi_step_reward_strategy or ("mean" if task.config.steps else "final")
        main = box_spec(task, task.box, task.network, ground, task.user)
        self.boxes = {"main": Box(main)}
        judges = iter(task.judges.items())
        for stage in task.stages:
            if stage.judge is not None:
                name, plan = next(judges)
                spec = box_spec(task, plan, judge_policy(task, stage), ground, None)
                self.boxes[name] = Box(spec, "verify")

    async def __aenter__(self) -> Self:
        await self.ctx.box("main").remove(PLACES)
        await self.stage("main", self.task.box)
        return self

    async def stage(self, name: str, plan: BoxPlan) -> None:
        """Put into a box what its image would hold, where it has none, and wait until it is ready."""
        if plan.dockerfile is not None and self.ground.how(plan) == "host":
            for source, destination in plan.dockerfile.copies:
                await self._copy(name, Path(self.task.path, plan.directory, source), destination)
        if plan.table.healthcheck is not None:
            box = self.ctx.box(name)
            user = self.image_user(plan, box)
            await wait_until_healthy(box, plan.table.healthcheck, user=user, hide=self.ground.hide)

    def image_user(self, plan: BoxPlan, box: Sandbox) -> str | None:
        """Return who works in a box where nobody else is named: the image's user, not the agent's own."""
        if plan.dockerfile is not None and plan.dockerfile.user and self.ground.how(plan) != "host":
            return plan.dockerfile.user
        return None if box.spec.user is None else "root"

    async def phases(self) -> AsyncIterator[Phase]:
        """Yield a phase for each stage."""
        judges = iter(self.task.judges)
        for stage in self.task.stages:
            if stage.name:
                await self._begin(stage)
            yield TBench2Phase(self, stage, next(judges) if stage.judge is not None else None)

    async def _begin(self, stage: Stage) -> None:
        """Clear what the step before left of its verifier, then do what the step's own files say."""
        box = self.ctx.box("main")
        if stage is not self.task.stages[0]:
            await box.remove([*PLACES, "/solution"])
        files = Path(self.task.path, stage.directory, "workdir")
        if await asyncio.to_thread(files.is_dir):
            await self.upload(box, str(files.relative_to(self.task.path)), box.spec.workdir)
            if await asyncio.to_thread((files / "setup.sh").is_file):
                result = await box.exec(["bash", "setup.sh"], cwd=box.spec.workdir, user=stage.user)
                if not result.ok:
                    said = self.ground.hide(result.error_text)[-500:].strip()
                    raise TaskError(f"setup.sh of step {stage.name} ended with {result.exit_code}: {said}")
        if stage.healthcheck is not None:
            await wait_until_healthy(box, stage.healthcheck, user=stage.user, hide=self.ground.hide)

    async def upload(self, box: Sandbox, directory: str, target: str) -> None:
        """Copy one of the task's directories into a box. Raises TaskError where it is no more."""
        try:
            await box.upload_dir(Path(self.task.path, directory), target)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self._changed(directory, error) from error

    async def _copy(self, name: str, source: Path, destination: str) -> None:
        """Do what COPY does: the contents of a directory, or one file."""
        box: Sandbox = self.ctx.box(name)
        if await asyncio.to_thread(source.is_dir):
            await self.upload(box, str(source.relative_to(self.task.path)), destination.rstrip("/") or "/")
        else:
            try:
                data, mode = await asyncio.to_thread(_content, source)
            except OSError as error:
                raise self._changed(str(source.relative_to(self.task.path)), error) from error
            await box.write(target_of(source, destination), data, mode=mode)

    def _changed(self, what: str, error: OSError) -> TaskError:
        return TaskError(f"task {Path(self.task.path).name}: {what} changed while it was in use: {error}")


def _content(path: Path) -> tuple[bytes, int]:
    with open(path, "rb") as file:
        executable = os.fstat(file.fileno()).st_mode & 0o100
        return file.read(), 0o755 if executable else 0o644
