"""The data set that miles draws prompts from, a row per task: `python3 -m rollhook_miles.bridge.data`."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from rollhook.durable import write_atomic
from rollhook.errors import RollhookError
from rollhook.runtime.hosted import Row, task_rows
from rollhook_miles.bridge import KEY


def write_data(lock: Path, directory: Path) -> tuple[int, int]:
    """Write `train.jsonl` and `eval.jsonl` and return how many rows each has; raises as `task_rows` does."""
    train, heldout = task_rows(lock, directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_atomic(directory / "train.jsonl", "".join(map(_line, train)).encode())
    write_atomic(directory / "eval.jsonl", "".join(map(_line, heldout)).encode())
    return len(train), len(heldout)


def _line(row: Row) -> str:
    # the prompt is the environment's to give; miles wants one to shuffle and to show
    prompt = [{"role": "user", "content": f"{row.environment}/{row.task_id}"}]
    return json.dumps({"prompt": prompt, "metadata": {KEY: dataclasses.asdict(row)}}) + "\n"


def main() -> None:
    """Write the data set of a lock into a directory."""
    try:
        train, heldout = write_data(Path(sys.argv[1]), Path(sys.argv[2]))
    except RollhookError as error:
        sys.exit(f"rollhook: {error}")
    sys.stdout.write(f"rollhook: {train} tasks to train on, {heldout} held out\n")


if __name__ == "__main__":
    main()
