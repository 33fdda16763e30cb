"""The surviving lineage of a run, read from the journals of its attempts.

Each attempt goes on from a committed step, its base. What earlier attempts did beyond that base has no part
in the weights: it counts as untrained, and its rows of metrics are superseded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from rollhook import journal
from rollhook.errors import RunError
from rollhook.rundir import RunDir


@dataclass
class Lineage:
    """What the journals say, in the order of the attempts.

    `bases`: attempt -> the step it went on from, if it came that far. `versions`: weight version -> optimizer
    steps in it; `newest_version` is the highest number ever published, dead ones included. `prompts`: group
    id -> the drawn prompt. `batches` by step. `next_step` is the first nominal step that was not drawn,
    `draw` the state of the draws before it.
    """

    bases: dict[int, int] = field(default_factory=lambda: {1: 0})
    versions: dict[int, int] = field(default_factory=dict)
    newest_version: int = 0
    prompts: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    next_step: int = 0
    draw: Mapping[str, Any] | None = None
    batches: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    evaluations: list[Mapping[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, run: RunDir) -> Self:
        """Read every attempt's journal. Blocks on the disk; JournalError when one is damaged."""
        lineage = cls()
        for attempt in run.attempts():
            if attempt.journal_path.exists():
                for entry in journal.read(attempt.journal_path):
                    lineage._take(attempt.number, entry)
        return lineage

    @property
    def newest_base(self) -> int:
        """The base of the newest attempt that went on."""
        return self.bases[max(self.bases)]

    @property
    def consumed(self) -> set[str]:
        """The groups that surviving steps took, to train on or to reject."""
        return {
            group_id
            for batch in self.batches.values()
            for group_id in (*(group["group_id"] for group in batch["groups"]), *batch["rejected"])
        }

    def cut(self, step: int) -> None:
        """Forget what was done beyond a committed step; prompts and used numbers stay."""
        self.batches = {key: batch for key, batch in self.batches.items() if key < step}
        self.evaluations = [each for each in self.evaluations if each["step"] <= step]
        self.versions = {version: at for version, at in self.versions.items() if at <= step}

    def assert_whole(self, run: RunDir, steps: int) -> None:
        """Raise RunError where the journals do not say what each committed step trained: lines were lost."""
        lost = [step for step in range(steps) if step not in self.batches]
        if lost:
            raise RunError(
                f"the journals of run {run.run_id} do not say what step {lost[0] + 1} trained, which is "
                f"committed: {run.path / 'attempts'} has lost lines or files; {journal.WAY_OUT}"
            )

    def surviving(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """Yield the rows (with `attempt` and `step`, the steps done) that no later attempt supersedes."""
        for row in rows:
            later = (base for attempt, base in self.bases.items() if attempt > row["attempt"])
            if all(row["step"] <= base for base in later):
                yield row

    def _take(self, attempt: int, entry: journal.Entry) -> None:
        data = entry.data
        if entry.event == "resumed":
            self.bases[attempt] = data["step"]
            self.cut(data["step"])
        elif entry.event == "published":
            self.versions[data["version"]] = data["step"]
            self.newest_version = max(self.newest_version, data["version"])
        elif entry.event == "prompts":
            self.prompts |= {prompt["group_id"]: prompt for prompt in data["prompts"]}
            self.next_step, self.draw = data["step"] + 1, data["draw"]
        elif entry.event == "batch":
            self.batches[data["step"]] = data
        elif entry.event == "evaluated":
            self.evaluations.append(data["evaluation"])
