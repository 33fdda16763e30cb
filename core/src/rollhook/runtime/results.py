"""What a run leaves for those who come after: its result, and how a recipe finds a run that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from rollhook.checkpoints import MARKER
from rollhook.durable import check_schema, write_atomic
from rollhook.errors import RunError
from rollhook.failpoints import fail
from rollhook.rundir import Status
from rollhook.runtime.evaluate import Evaluation
from rollhook.runtime.statistics import Rate

SCHEMA_VERSION = 1
NAME = "result.json"


@dataclass
class RunResult:
    """How an attempt ended. `checkpoint` is the newest committed one's directory."""

    run_id: str
    status: Status
    digest: str
    steps: int = 0
    checkpoint: str | None = None
    seconds: float = 0.0
    evaluations: list[Evaluation] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def write(self, directory: Path) -> None:
        """Write `result.json` into the run's directory."""
        data = {
            "schema": SCHEMA_VERSION,
            "run_id": self.run_id,
            "status": self.status,
            "digest": self.digest,
            "steps": self.steps,
            "checkpoint": self.checkpoint,
            "seconds": self.seconds,
            "metrics": self.metrics,
            "notes": self.notes,
            "evaluations": [evaluation_data(each) for each in self.evaluations],
        }
        fail("result.before_write")
        write_atomic(directory / NAME, orjson.dumps(data, option=orjson.OPT_INDENT_2))
        fail("result.after_write")


def read_result(directory: Path) -> RunResult | None:
    """Return a run's result; None where there is none or it cannot be read, such as one of a later schema."""
    try:
        data = dict(orjson.loads((directory / NAME).read_bytes()))
        check_schema(data.pop("schema"), SCHEMA_VERSION, directory / NAME)
        evaluations = [read_evaluation(each) for each in data.pop("evaluations")]
        return RunResult(**data, evaluations=evaluations)
    except (OSError, ValueError, TypeError, KeyError, RunError):
        return None


def finished_run(root: Path, digest: str) -> RunResult | None:
    """Return a finished run below `root` with this digest whose checkpoint is still there and complete."""
    for path in sorted(root.glob(f"*/{NAME}"), reverse=True):
        result = read_result(path.parent)
        if result is None or result.digest != digest or result.status != "succeeded":
            continue
        if result.checkpoint and (Path(str(result.checkpoint)) / MARKER).is_file():
            return result
    return None


def evaluation_data(evaluation: Evaluation) -> dict[str, Any]:
    """Return an evaluation as plain data, as `result.json` and the journal keep it."""
    return {
        "environment": evaluation.environment,
        "step": evaluation.step,
        "mode": evaluation.mode,
        "seconds": evaluation.seconds,
        "families": {name: [r.passed, r.count, r.errors] for name, r in evaluation.families.items()},
    }


def read_evaluation(data: Mapping[str, Any]) -> Evaluation:
    """Return what `evaluation_data` was made of; KeyError or TypeError for anything else."""
    families = {name: Rate(*counts) for name, counts in data["families"].items()}
    return Evaluation(data["step"], data["mode"], families, data["seconds"], data["environment"])
