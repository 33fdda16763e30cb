"""The data set that miles draws prompts from, a row per task: `python3 -m rollhook_miles.bridge.data`."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from rollhook.durable import write_atomic
from rollhook.environment import Environment, Task
from rollhook.errors import RollhookError, UsageError
from rollhook.runtime.hosted import Row, read_hosted, tasks_of
from rollhook.runtime.parts import Parts
from rollhook.runtime.rollout_worker import distinct
from rollhook_miles.bridge import KEY


def write_data(lock: Path, directory: Path) -> tuple[int, int]:
    """Write `train.jsonl` and `eval.jsonl` and return how many rows each has.

    Raises RecipeError for a lock that cannot run here, UsageError for a split without tasks.
    """
    loaded, plugins = read_hosted(lock)
    recipe = loaded.recipe
    parts = Parts(recipe, plugins, directory, recipe.name, 0)
    train: list[str] = []
    heldout: list[str] = []
    names = distinct([use.use for use in recipe.environment])
    for number, (name, use) in enumerate(zip(names, recipe.environment, strict=True)):
        environment: Environment = parts.build("environment", use, f"environment.{number}")
        try:
            train += rows(name, environment, use.split)
            if recipe.evaluation.every:
                heldout += rows(name, environment, recipe.evaluation.split)
        finally:
            asyncio.run(environment.aclose())
    directory.mkdir(parents=True, exist_ok=True)
    write_atomic(directory / "train.jsonl", "".join(train).encode())
    write_atomic(directory / "eval.jsonl", "".join(heldout).encode())
    return len(train), len(heldout)


def rows(name: str, environment: Environment, split: str) -> Iterator[str]:
    """Yield a line for each task of a split that can run."""
    tasks = tasks_of(environment, split)
    if not tasks:
        raise UsageError(f"environment {name}: split {split!r} has no task that can run")
    for task in tasks:
        yield json.dumps(_row(name, task)) + "\n"


def _row(name: str, task: Task) -> dict[str, object]:
    row = Row(name, task.id, task.digest)
    # the prompt is the environment's to give; miles wants one to shuffle and to show
    prompt = [{"role": "user", "content": f"{name}/{task.id}"}]
    return {"prompt": prompt, "metadata": {KEY: dataclasses.asdict(row)}}


def main() -> None:
    """Write the data set of a lock into a directory."""
    try:
        train, heldout = write_data(Path(sys.argv[1]), Path(sys.argv[2]))
    except RollhookError as error:
        sys.exit(f"rollhook: {error}")
    sys.stdout.write(f"rollhook: {train} tasks to train on, {heldout} held out\n")


if __name__ == "__main__":
    main()
