"""A copy of a run's metrics to a path of the user's choice: one JSON object per row."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import orjson

from rollhook.tracker import Tracker


class Jsonl(Tracker):
    """Appends rows `{run_id, attempt, step, <metric>: value, ...}`; runs may share a file."""

    _file: IO[bytes] | None = None

    def start(self, run_id: str, attempt: int, recipe: Mapping[str, Any]) -> None:
        """Open the file, its directory made where it is absent."""
        named = self.config.path
        path = Path(named.replace("{run_id}", run_id)) if named else self.context.scratch / "tracker.jsonl"
        path = path.expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._about = {"run_id": run_id, "attempt": attempt}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one row in one write."""
        if self._file is None:
            raise RuntimeError("log was called before start")
        values = {name: float(value) for name, value in metrics.items()}
        self._file.write(orjson.dumps({**self._about, "step": step, **values}) + b"\n")

    def finish(self, status: str) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
