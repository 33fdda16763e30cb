"""The data sets that verl draws prompts from, a row per task: `python3 -m rollhook_verl.bridge.data`."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rollhook.errors import RollhookError
from rollhook.runtime.hosted import Row, task_rows
from rollhook_verl.bridge import KEY
from rollhook_verl.overrides import LOOP


def write_data(lock: Path, directory: Path) -> tuple[int, int]:
    """Write `train.parquet` and, with an evaluation, `eval.parquet`; return how many rows each has.

    Raises as `task_rows` does.
    """
    train, heldout = task_rows(lock, directory)
    directory.mkdir(parents=True, exist_ok=True)
    for purpose, rows in (("train", train), ("eval", heldout)):
        if rows:
            table = pa.Table.from_pylist([_row(n, row, purpose) for n, row in enumerate(rows)])
            pq.write_table(table, directory / f"{purpose}.parquet")
    return len(train), len(heldout)


def _row(number: int, row: Row, purpose: str) -> dict[str, Any]:
    return {
        "data_source": row.environment,
        "agent_name": LOOP,
        "prompt": [{"role": "user", "content": f"{row.environment}/{row.task_id}"}],
        "reward_model": {"style": "rule", "ground_truth": ""},
        "extra_info": {"index": number, KEY: {**dataclasses.asdict(row), "split": purpose}},
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
