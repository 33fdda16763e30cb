"""The trainer side of a run: where its weights come from, its steps, what it publishes and saves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollhook.checkpoints import Checkpoint
from rollhook.engine.weights import WeightStore
from rollhook.errors import UsageError
from rollhook.packs import cache_directory, resolve_all
from rollhook.records import Sample
from rollhook.runtime.model import is_path, local_model
from rollhook.runtime.parts import Parts
from rollhook.runtime.seeds import derive

if TYPE_CHECKING:
    from rollhook.cluster import Cluster, Remote
    from rollhook.recipe.schema import Use


def trainer_use(parts: Parts) -> Use:
    """Return the recipe's trainer; UsageError when it has none."""
    if parts.recipe.trainer is None:
        raise UsageError("trainer: a run needs a trainer, e.g. `trainer: {use: torch, ...}`")
    return parts.recipe.trainer


def trains_on_episodes(parts: Parts) -> bool:
    """Return whether the recipe's trainer takes episodes, or brings its own data."""
    use = trainer_use(parts)
    config = parts.plugins.config("trainer", use.use, use.keys, "trainer")
    return bool(parts.plugins.load_class("trainer", use.use).needs_rollouts(config))


class Training:
    """A native trainer in a process of its own; entered once, stopped with `stop`."""

    def __init__(self, parts: Parts, cluster: Cluster, scratch: Path) -> None:
        self._parts = parts
        self._recipe = parts.recipe
        self._cluster = cluster
        self._scratch = scratch
        self._placing: asyncio.Future[Remote] | None = None

    def place(self) -> None:
        """Begin to start the process; what needs it waits for it."""
        self._placing = asyncio.ensure_future(self._place())

    async def _place(self) -> Remote:
        use = trainer_use(self._parts)
        component = self._parts.plugins.component("trainer", use.use)
        config = self._parts.plugins.config("trainer", use.use, self._parts.keys(use), "trainer")
        return await self._cluster.place(
            "rollhook.runtime.trainer_host:TrainerHost",
            component.load,
            config,
            str(self._scratch),
            str(cache_directory()),
            derive(self._recipe.seed, "trainer"),
            name="trainer",
            gpus=getattr(config, "gpus", 0.0),
        )

    async def _call(self, method: str, *args: Any) -> Any:
        assert self._placing is not None
        trainer = await asyncio.shield(self._placing)
        return await trainer.call(method, *args)

    async def first_model(self) -> Path:
        """Return the directory of a run's first weights, made by the trainer where the recipe says `init`."""
        model = self._recipe.model
        if self._recipe.checkpoint.load_from:
            return await self._pretrained(self._recipe.checkpoint.load_from)
        if model is None or (model.path is None and model.init is None):
            raise UsageError("model: name weights with `path` or make fresh ones with `init`")
        if model.init is None:
            return await self._pretrained(model.path or "")
        directory = self._scratch / "model"
        directory.mkdir()
        keys = resolve_all(model.model_dump(), self._parts.plugins)
        await self._call("initialise_model", keys, str(directory), derive(self._recipe.seed, "model"))
        return directory

    async def _pretrained(self, name: str) -> Path:
        if await asyncio.to_thread(is_path, name):
            return await asyncio.to_thread(local_model, name)
        return Path(await self._call("fetch_model", name))

    async def set_up(self, model_dir: Path, checkpoint: Checkpoint | None) -> None:
        """Load weights, and the trainer's whole state where a checkpoint is gone on from."""
        await self._call("setup", str(model_dir), self._recipe.steps, derive(self._recipe.seed, "trainer"))
        if checkpoint is not None:
            await self._call("load", str(checkpoint.path))

    async def step(
        self, groups: Sequence[Sequence[Sample]], step: int, *, own_data: bool
    ) -> dict[str, float]:
        """Do a training step and return its metrics; nothing is done without groups or data of its own."""
        if not groups and not own_data:
            return {"time/train": 0.0}
        began = time.monotonic()
        metrics: dict[str, float] = await self._call("step", groups, step)
        return {**metrics, "time/train": time.monotonic() - began}

    async def publish(self, weights: WeightStore, version: int) -> Path:
        """Write the current weights as a version; complete when this returns."""
        path = await asyncio.to_thread(weights.new, version)
        await self._call("publish", str(path))
        await asyncio.to_thread(weights.commit, path, version)
        return path

    async def save(self, path: Path) -> None:
        """Write the trainer's whole state into an empty directory."""
        await self._call("save", str(path))

    async def stop(self) -> None:
        """End the process; safe to call twice and after a failed start."""
        placing, self._placing = self._placing, None
        if placing is None:
            return
        if not placing.done():
            placing.cancel()
            await asyncio.wait({placing})
        if not placing.cancelled() and placing.exception() is None:
            await placing.result().stop()
