"""Training again from what a run recorded, without engine and sandboxes: the same numbers, or not."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollhook.checkpoints import Checkpoint, CheckpointStore
from rollhook.episode_store import locate, read_records, read_samples
from rollhook.errors import RunError
from rollhook.metrics_file import read_metrics
from rollhook.records import EpisodeRecord, Group, Sample
from rollhook.runtime.batch import permute_rewards
from rollhook.runtime.lineage import Lineage
from rollhook.runtime.seeds import derive
from rollhook.runtime.training import Training, trains_on_episodes

if TYPE_CHECKING:
    from rollhook.rundir import RunDir
    from rollhook.runtime.parts import Parts

#: what is as good as zero: the loss of a policy on its own tokens is nothing but rounding
NOTHING = 1e-9
RESULTS = "replay.jsonl"

Metrics = Mapping[str, float | None]


@dataclass(frozen=True)
class ReplayedStep:
    """One step trained again; `step` counts from 1, as in `metrics.jsonl`.

    `recorded` and `replayed` are the trainer's metrics without its times, `differs` the names of those that
    are not the same; there are none where the run left no row of the step.
    """

    step: int
    groups: int
    recorded: Metrics
    replayed: Metrics
    differs: Sequence[str]


class Replay:
    """A run as it was trained, read from its directory, which is never written to. Blocks on the disk."""

    def __init__(self, run: RunDir, parts: Parts) -> None:
        self._run = run
        self._parts = parts
        self._recipe = parts.recipe
        self._lineage = Lineage.read(run)
        self._own_data = not trains_on_episodes(parts)
        self._recorded = self._read_metrics()
        self._located = {} if self._own_data else locate(run.episodes)
        self._finished = self._read_records() if self._recipe.rollout.permute_rewards else {}

    @property
    def steps(self) -> int:
        """How many steps the surviving lineage has trained."""
        return max(self._recorded)

    def checkpoint(self, first: int) -> Checkpoint | None:
        """Return the checkpoint that step `first` goes on from; None for the first step.

        Raises RunError, with those that are there, when it was not kept.
        """
        if first == 1:
            return None
        kept = {checkpoint.step: checkpoint for checkpoint in CheckpointStore(self._run.checkpoints).all()}
        if first - 1 not in kept:
            starts = ", ".join(str(step + 1) for step in (0, *kept) if step < self.steps)
            raise RunError(
                f"run {self._run.run_id} keeps no checkpoint of step {first - 1}, so a replay cannot start "
                f"at step {first}; it can start at step {starts}"
            )
        return kept[first - 1]

    async def run(
        self,
        training: Training,
        first: int,
        last: int,
        tolerance: float,
        finished: Callable[[ReplayedStep], None],
        drain: asyncio.Event,
    ) -> None:
        """Train steps `first` to `last`, or until `drain` is set; `finished` gets each as it is done.

        Raises RunError when the checkpoint to start from or a trained episode is gone.
        """
        checkpoint = self.checkpoint(first)
        training.place()
        model = checkpoint.path if checkpoint is not None else self._first_weights()
        await training.set_up(model or await training.first_model(), checkpoint)
        for step in range(first, last + 1):
            if drain.is_set():
                return
            groups = [] if self._own_data else await asyncio.to_thread(self._samples, step - 1)
            metrics = await training.step(groups, step - 1, own_data=self._own_data)
            recorded, replayed = self._recorded.get(step, {}), comparable(metrics)
            differs = differing(recorded, replayed, tolerance) if recorded else []
            finished(ReplayedStep(step, len(groups), recorded, replayed, differs))

    def _first_weights(self) -> Path | None:
        """Return the fresh weights that the run made, where it did and they are still there."""
        model = self._recipe.model
        if self._recipe.checkpoint.load_from or model is None or model.init is None:
            return None
        began = [number for number, base in self._lineage.bases.items() if base == 0]
        paths = [self._run.path / "attempts" / str(number) / "model" for number in reversed(began)]
        return next((path for path in paths if (path / "config.json").is_file()), None)

    def _read_metrics(self) -> dict[int, Metrics]:
        found: dict[int, Metrics] = {}
        for row in self._lineage.surviving(read_metrics(self._run.metrics_path)):
            if "time/train" in row:  # the others are evaluations
                found[row["step"]] = comparable(row)
        if not found:
            raise RunError(f"run {self._run.run_id} has trained no step, so there is nothing to replay")
        return found

    def _read_records(self) -> dict[str, list[EpisodeRecord]]:
        """Return the finished episodes of each group, in order, without their messages."""
        groups: dict[str, list[EpisodeRecord]] = defaultdict(list)
        for record in read_records(self._run.episodes):
            groups[record.group_id].append(dataclasses.replace(record, messages=()))
        return groups

    def _samples(self, step: int) -> list[list[Sample]]:
        """Return the samples of a step (0-based), group by group, as the trainer got them."""
        batch = self._lineage.batches.get(step)
        if batch is None:
            raise RunError(f"the journals of run {self._run.run_id} do not say what step {step + 1} trained")
        episodes = [episode for group in batch["groups"] for episode in group["episodes"]]
        if gone := [episode for episode in episodes if episode not in self._located]:
            raise RunError(
                f"episode {gone[0]}, which step {step + 1} trained, is not in {self._run.episodes}"
            )
        found: dict[str, list[Sample]] = defaultdict(list)
        for sample in read_samples(self._run.episodes, episodes, {self._located[each] for each in episodes}):
            found[sample.episode_id].append(sample)
        groups = [[s for each in group["episodes"] for s in found[each]] for group in batch["groups"]]
        return self._permuted(groups, batch, step) if self._recipe.rollout.permute_rewards else groups

    def _permuted(
        self, samples: list[list[Sample]], batch: Mapping[str, Any], step: int
    ) -> list[list[Sample]]:
        """Give the samples of a control experiment the rewards that they had then."""
        groups: dict[str, Group] = {}
        for trained, of in zip(batch["groups"], samples, strict=True):
            name, kept = trained["group_id"], set(trained["episodes"])
            groups[name] = _group(name, [r for r in self._finished[name] if r.episode_id in kept], of)
        for name in batch["rejected"]:
            groups[name] = _group(name, self._finished[name], [])
        permute_rewards([groups[name] for name in sorted(groups)], derive(self._recipe.seed, "permute", step))
        return [list(groups[trained["group_id"]].samples) for trained in batch["groups"]]


def differing(recorded: Metrics, replayed: Metrics, tolerance: float) -> list[str]:
    """Return the names of the metrics that are not the same within a relative tolerance."""

    def same(name: str) -> bool:
        one, other = recorded.get(name), replayed.get(name)
        if one is None or other is None:
            return one is other and name in recorded and name in replayed
        return math.isclose(one, other, rel_tol=tolerance, abs_tol=NOTHING)

    return [name for name in sorted({*recorded, *replayed}) if not same(name)]


def comparable(metrics: Mapping[str, Any]) -> Metrics:
    """Return a trainer's metrics without its times; what is not finite is None, as it is on disk."""
    return {
        name: float(value) if value is not None and math.isfinite(value) else None
        for name, value in metrics.items()
        if name.startswith("train/") and not name.endswith(("_seconds", "_per_second"))
    }


def _group(name: str, records: list[EpisodeRecord], samples: list[Sample]) -> Group:
    return Group(name, "", "", "", len(records), records, samples)
