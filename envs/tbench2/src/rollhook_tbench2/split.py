"""pack.tbench2: a directory of tasks, split into train and held-out, with prompts in the form others read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path

import orjson

from rollhook.environment import Task
from rollhook.errors import UsageError
from rollhook.pack import Pack
from rollhook_tbench2.config import SplitConfig
from rollhook_tbench2.environment import SYSTEM_PROMPT
from rollhook_tbench2.tasks import ids_of, read_task_set, tasks_root

NAMES = ("train", "heldout")


class SplitPack(Pack):
    """Links to the tasks, `splits.json`, and `train.jsonl` and `heldout.jsonl` with a prompt for each task.

    A row is `{"prompt": [{"role": "system", "content": ...}], "metadata": {"task_id": ...}}`. Tasks that
    cannot run anywhere are left out; `pack.json` counts them.
    """

    config: SplitConfig

    def digest(self) -> str:
        """Return the hash of the configuration and of every task's content."""
        digest = hashlib.sha256(json.dumps([self._about, self._splits], sort_keys=True).encode())
        for task in self._tasks:
            digest.update(f"{task.id}\0{task.digest}\n".encode())
        return digest.hexdigest()[:16]

    def write(self, directory: Path, progress: Callable[[int, int], None] | None = None) -> None:
        """Write the pack."""
        for done, task in enumerate(self._tasks, start=1):
            (directory / task.id).symlink_to(self._root / task.id)
            if progress is not None:
                progress(done, len(self._tasks))
        (directory / "splits.json").write_text(json.dumps(self._splits, indent=1) + "\n")
        prompt = [{"role": "system", "content": self._prompt}]
        for name, ids in self._splits.items():
            rows = [{"prompt": prompt, "metadata": {"task_id": task}} for task in ids]
            (directory / f"{name}.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
        (directory / "pack.json").write_text(json.dumps(self._about, indent=1) + "\n")

    @property
    def _root(self) -> Path:
        return tasks_root(self.config.tasks_dir)

    @property
    def _prompt(self) -> str:
        return self.config.system_prompt if self.config.system_prompt is not None else SYSTEM_PROMPT

    @property
    def _about(self) -> dict[str, object]:
        counts = {name: len(ids) for name, ids in self._splits.items()}
        left_out = len(self._all) - len(self._tasks)
        return {
            "pack": "tbench2",
            "tasks_dir": str(self._root),
            "system_prompt": self._prompt,
            "splits": counts,
            "left_out": left_out,
        }

    @cached_property
    def _all(self) -> Sequence[Task]:
        return list(read_task_set(self._root, {}).tasks.values())

    @cached_property
    def _tasks(self) -> Sequence[Task]:
        return [task for task in self._all if task.problem is None]

    @cached_property
    def _splits(self) -> dict[str, list[str]]:
        known = [task.id for task in self._tasks]
        if self.config.heldout is None:
            heldout = {task for task in known if is_held_out(task, self.config.heldout_fraction)}
        else:
            heldout = _named(ids_of(self.config.heldout), {task.id for task in self._all}, self._root)
        parts = ([t for t in known if t not in heldout], [t for t in known if t in heldout])
        return dict(zip(NAMES, parts, strict=True))


def is_held_out(task: str, fraction: float) -> bool:
    """Return whether a task is held out: by the hash of its id alone, so that other tasks change nothing."""
    return int.from_bytes(hashlib.sha256(f"heldout:{task}".encode()).digest()[:8]) < fraction * 2**64


def _named(ids: Iterable[str], known: set[str], root: Path) -> set[str]:
    wanted = set(ids)
    if unknown := sorted(wanted - known):
        raise UsageError(
            f"heldout names {len(unknown)} tasks that {root} does not hold: {', '.join(unknown[:5])}"
        )
    return wanted
