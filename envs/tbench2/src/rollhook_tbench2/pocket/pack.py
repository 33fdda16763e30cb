"""The pack itself: configuration in, a directory of tasks, splits and demonstrations out."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import orjson

from rollhook.pack import Pack
from rollhook_tbench2.config import PocketConfig
from rollhook_tbench2.pocket.demos import SYSTEM_PROMPT, demonstration
from rollhook_tbench2.pocket.families import FAMILIES
from rollhook_tbench2.pocket.readme import page
from rollhook_tbench2.pocket.tasks import PocketTask, draw_tasks, task_files


class PocketPack(Pack):
    """Small terminal tasks in the Terminal-Bench 2 form, drawn from thirteen families."""

    config: PocketConfig

    def digest(self) -> str:
        """Return the hash of this generator's sources and of its configuration."""
        digest = hashlib.sha256(self.config.model_dump_json().encode())
        sources = resources.files("rollhook_tbench2.pocket")
        for source in sorted(sources.iterdir(), key=lambda entry: entry.name):
            if source.name.endswith(".py"):
                digest.update(source.name.encode() + b"\0" + source.read_bytes())
        return digest.hexdigest()[:16]

    def write(self, directory: Path, progress: Callable[[int, int], None] | None = None) -> None:
        """Write task directories, `splits.json`, `demos.jsonl`, `pack.json` and a page."""
        config = self.config
        tasks = list(draw_tasks(config.seed, config.train_per_family, config.heldout_per_family))
        for done, task in enumerate(tasks, start=1):
            _write_task(directory / task.id, task)
            if progress is not None:
                progress(done, len(tasks))
        splits = {name: [task.id for task in tasks if task.split == name] for name in ("train", "heldout")}
        rows = [
            demonstration(task, config.seed, config.noise, config.undemonstrated)
            for task in tasks
            if task.split == "train"
        ]
        (directory / "splits.json").write_text(json.dumps(splits, indent=1) + "\n")
        (directory / "demos.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
        about = {
            "pack": "pocket",
            "system_prompt": SYSTEM_PROMPT,
            "config": config.model_dump(mode="json"),
            "demonstrations": {
                "rows": len(rows),
                "correct": sum(row["correct"] for row in rows),
                "noisy_families": sum(family.noisy for family in FAMILIES),
            },
        }
        (directory / "README.md").write_text(page(config, tasks, rows))
        (directory / "pack.json").write_text(json.dumps(about, indent=1) + "\n")


def _write_task(directory: Path, task: PocketTask) -> None:
    made: set[str] = set()
    for path, (data, mode) in task_files(task).items():
        target = f"{directory}/{path}"
        parent = os.path.dirname(target)
        if parent not in made:
            os.makedirs(parent, exist_ok=True)
            made.add(parent)
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        try:
            os.write(descriptor, data)
            os.fchmod(descriptor, mode)
        finally:
            os.close(descriptor)
