"""The data sets that verl draws prompts from, a row per task: `python3 -m rollhook_verl.bridge.data`."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rollhook.environment import Environment
from rollhook.errors import RollhookError, UsageError
from rollhook.runtime.hosted import Row, read_hosted, tasks_of
from rollhook.runtime.parts import Parts
from rollhook.runtime.rollout_worker import distinct
from rollhook_verl.bridge import KEY
from rollhook_verl.overrides import LOOP


def write_data(lock: Path, directory: Path) -> tuple[int, int]:
    """Write `train.parquet` and, with an evaluation, `eval.parquet`; return how many rows each has.

    Raises RecipeError for a lock that cannot run here, UsageError for a split without tasks.
    """
    loaded, plugins = read_hosted(lock)
    recipe = loaded.recipe
    parts = Parts(recipe, plugins, directory, recipe.name, 0)
    train: list[dict[str, Any]] = []
    heldout: list[dict[str, Any]] = []
    names = distinct([use.use for use in recipe.environment])
    for number, (name, use) in enumerate(zip(names, recipe.environment, strict=True)):
        environment: Environment = parts.build("environment", use, f"environment.{number}")
        try:
            train += rows(name, environment, use.split, "train")
            if recipe.evaluation.every:
                heldout += rows(name, environment, recipe.evaluation.split, "eval")
        finally:
            asyncio.run(environment.aclose())
    directory.mkdir(parents=True, exist_ok=True)
    for file, found in (("train.parquet", train), ("eval.parquet", heldout)):
        if found:
            pq.write_table(pa.Table.from_pylist(found), directory / file)
    return len(train), len(heldout)


def rows(name: str, environment: Environment, split: str, purpose: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each task of a split that can run."""
    tasks = tasks_of(environment, split)
    if not tasks:
        raise UsageError(f"environment {name}: split {split!r} has no task that can run")
    for number, task in enumerate(tasks):
        about = dataclasses.asdict(Row(name, task.id, task.digest))
        yield {
            "data_source": name,
            "agent_name": LOOP,
            "prompt": [{"role": "user", "content": f"{name}/{task.id}"}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": number, KEY: {**about, "split": purpose}},
        }


def main() -> None:
    """Write the data sets of a lock into a directory."""
    try:
        train, heldout = write_data(Path(sys.argv[1]), Path(sys.argv[2]))
    except RollhookError as error:
        sys.exit(f"rollhook: {error}")
    sys.stdout.write(f"rollhook: {train} tasks to train on, {heldout} held out\n")


if __name__ == "__main__":
    main()
