"""environment.tbench2: Terminal-Bench 2 tasks, from a directory or a generated pack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

from rollhook.component import BuildContext
from rollhook.environment import Environment, Episode, EpisodeContext, Task
from rollhook.errors import TaskError, UsageError
from rollhook.packs import ensure
from rollhook_tbench2 import lint
from rollhook_tbench2.boxes import Ground, refusal
from rollhook_tbench2.config import TBench2Config
from rollhook_tbench2.episode import TBench2Episode
from rollhook_tbench2.stages import TaskDir
from rollhook_tbench2.tasks import TaskSet, read_task_set, tasks_root

#: what the agent is told where neither the recipe nor the tasks' pack.json says otherwise
SYSTEM_PROMPT = """\
You solve tasks in a Linux terminal. In each turn, answer with exactly one shell command in one ```bash \
block; you are then shown its exit code and output. Commands do not wait for input, so avoid interactive \
programs. When the task is done, answer TASK_COMPLETE without a block."""

#: tasks that a refusal names; the others are counted
_NAMED = 3


class TBench2(Environment):
    """Tasks in the Terminal-Bench 2 directory form; each runs in one sandbox."""

    verifies_apart: ClassVar[bool] = False
    config: TBench2Config

    def __init__(self, config: TBench2Config, context: BuildContext) -> None:
        super().__init__(config, context)
        self._read: TaskSet | None = None
        self._values: dict[str, str] = {}
        self._ground = Ground(frozenset(), config.floor, self._value, self._hide)

    def tasks(self, split: str | None = None) -> Sequence[Task]:
        """Return the tasks of a split in its order; `all` or None: every task, by name."""
        found = self._task_set()
        if split is None or (split == "all" and "all" not in found.splits):
            return list(found.tasks.values())
        if split not in found.splits:
            known = ", ".join(found.splits) or "none"
            raise UsageError(
                f"there is no split {split!r} (here: {known}, and all for every task): "
                "name it in environment.splits or in splits.json beside the tasks"
            )
        return [found.tasks[task] for task in found.splits[split]]

    def problems(
        self, sandbox_capabilities: frozenset[str], tasks: Sequence[Task] | None = None
    ) -> Sequence[str]:
        """Return which tasks this sandbox cannot run and why; episodes made later suit what it can do."""
        self._ground = Ground(sandbox_capabilities, self.config.floor, self._value, self._hide)
        reasons: dict[str, list[str]] = {}
        for task in self._task_set().tasks.values() if tasks is None else tasks:
            if task.problem is None and (why := refusal(task.payload, self._ground, self.config.host_env)):
                reasons.setdefault(why, []).append(task.id)
        return [f"{_named(names)}: {why}" for why, names in reasons.items()]

    def episode(self, task: Task, ctx: EpisodeContext) -> Episode:
        """Return an attempt at a task. Raises TaskError for one with a problem, Unsupported by name."""
        if not isinstance(task.payload, TaskDir):
            raise TaskError(f"task {task.id} cannot run: {task.problem}", kind="user")
        prompt = self.config.system_prompt
        if prompt is None:
            prompt = str(self._task_set().about.get("system_prompt", SYSTEM_PROMPT))
        limit = self.config.artifact_mb * 2**20
        return TBench2Episode(task.payload, ctx, prompt, self.config.reward_key, self._ground, limit)

    def lint(self, task: Task) -> Sequence[str]:
        """Return what is doubtful about a task's files."""
        return lint.doubts(task.payload)

    def hidden(self, task: Task) -> Mapping[str, bytes]:
        """Return the files of tests/ and solution/, those of steps included."""
        return lint.hidden_files(task.payload)

    def describe(self) -> Mapping[str, str]:
        """Say how many tasks there are, how they are split, and what the demonstrations of a pack are."""
        found = self._task_set()
        splits = ", ".join(f"{name} {len(ids)}" for name, ids in found.splits.items())
        broken = sum(task.problem is not None for task in found.tasks.values())
        said = {"tasks": f"{len(found.tasks)} ({splits or 'no splits'}), {broken} with problems"}
        demonstrations, config = found.about.get("demonstrations"), found.about.get("config")
        if isinstance(demonstrations, dict) and isinstance(config, dict):
            said["demonstrations"] = (
                f"{demonstrations['rows']}, of which {demonstrations['correct']} are correct "
                f"(noise {config['noise']:g} in {demonstrations['noisy_families']} families)"
            )
        return said

    def _task_set(self) -> TaskSet:
        if self._read is None:
            if self.config.pack is not None:
                root = ensure(self.context.build("pack", self.config.pack), name=self.config.pack.use)
                self._read = (
                    _read_pack(root) if not self.config.splits else read_task_set(root, self.config.splits)
                )
            else:
                assert self.config.tasks_dir is not None
                root = tasks_root(self.config.tasks_dir)
                self._read = read_task_set(root, self.config.splits)
        return self._read

    def _value(self, name: str) -> str | None:
        """Return what a task's `${name}` stands for, which the recipe says by reference."""
        if name not in self._values and name in self.config.host_env:
            self._values[name] = self.context.secret(str(self.config.host_env[name]))
        return self._values.get(name)

    def _hide(self, text: str) -> str:
        # the longest first: one may be a part of another
        for name, value in sorted(self._values.items(), key=lambda item: -len(item[1])):
            text = text.replace(value, f"${{{name}}}") if value else text
        return text


@lru_cache(maxsize=2)
def _read_pack(root: Path) -> TaskSet:
    """Read a pack once per process: its directory is named after its content and never changes."""
    return read_task_set(root, {})


def _named(tasks: Sequence[str]) -> str:
    more = f" and {len(tasks) - _NAMED} more" if len(tasks) > _NAMED else ""
    return f"task{'s' if len(tasks) > 1 else ''} {', '.join(tasks[:_NAMED])}{more}"
