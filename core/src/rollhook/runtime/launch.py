"""From a loaded recipe to a finished run: what it needs first, its directory, its driver."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollhook import plugins as loader
from rollhook.recipe.load import Loaded, load_recipe
from rollhook.recipe.lock import write_lock
from rollhook.recipe.names import component_names
from rollhook.runtime.progress import Display
from rollhook.runtime.results import RunResult, finished_run, recipe_digest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollhook.cluster import Cluster
    from rollhook.plugins import Plugins
    from rollhook.recipe.schema import Need
    from rollhook.rundir import RunDir


class Stop:
    """Turns signals into an orderly end: the first SIGINT drains, the second (or SIGTERM) cancels."""

    def __init__(self, display: Display) -> None:
        self.drain = asyncio.Event()
        self._display = display

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM while the block runs; what is cancelled is the current task."""
        task = asyncio.current_task()
        loop = asyncio.get_running_loop()

        def interrupt() -> None:
            if not self.drain.is_set():
                self.drain.set()
                self._display.say("Stopping after the step under way; interrupt once more to stop at once.")
            elif task is not None:
                task.cancel()

        def terminate() -> None:
            self.drain.set()
            if task is not None:
                task.cancel()

        loop.add_signal_handler(signal.SIGINT, interrupt)
        loop.add_signal_handler(signal.SIGTERM, terminate)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            loop.remove_signal_handler(signal.SIGTERM)


async def run_recipe(
    loaded: Loaded, source: Path | str, overrides: list[str], display: Display, run_id: str | None
) -> RunResult:
    """Run a recipe and, before it, the recipes that it needs; returns the result of the recipe itself."""
    from rollhook.cluster import Cluster

    stop = Stop(display)
    with stop.watching():
        root = storage_root(loaded)
        display.say("Starting Ray on this machine ...")
        cluster = await Cluster.start(root / ".cluster")
        try:
            results = await _run_needs(loaded.recipe.needs, root, cluster, display, stop)
            if stop.drain.is_set():
                return RunResult(loaded.recipe.name, "stopped", "")
            if results:
                loaded = load_recipe(source, overrides, needs_results=results)
            return await _run(loaded, cluster, display, stop, run_id)
        finally:
            await asyncio.shield(cluster.stop())


def storage_root(loaded: Loaded) -> Path:
    """Return the directory of the recipe's runs."""
    return Path(loaded.recipe.storage.root).expanduser().resolve()


async def drive_run(run: RunDir, loaded: Loaded, display: Display) -> RunResult:
    """Drive the next attempt of a run whose lock is already on disk."""
    from rollhook.cluster import Cluster

    stop = Stop(display)
    with stop.watching():
        cluster = await Cluster.start(run.path / ".cluster")
        try:
            return await _drive(loaded, run, cluster, display, stop)
        finally:
            await asyncio.shield(cluster.stop())


async def _run_needs(
    needs: Mapping[str, Need], root: Path, cluster: Cluster, display: Display, stop: Stop
) -> dict[str, dict[str, Any]]:
    """Return, by alias, the results of the runs that a recipe needs, running those that are missing."""
    results: dict[str, dict[str, Any]] = {}
    for alias, need in needs.items():
        overrides = [*need.overrides, f"storage.root={root}"]
        loaded = load_recipe(need.recipe, overrides)
        digest = _digest(loaded, _plugins(loaded))
        result = finished_run(root, digest)
        if result is not None:
            display.say(f"Needs {alias} ({need.recipe}): run {result.run_id} did it already.")
        else:
            display.say(f"Needs {alias} ({need.recipe}): running it first.")
            inner = await _run_needs(loaded.recipe.needs, root, cluster, display, stop)
            if inner:
                loaded = load_recipe(need.recipe, overrides, needs_results=inner)
            result = await _run(loaded, cluster, display, stop, None)
        if result.status != "succeeded":
            stop.drain.set()
            return results
        results[alias] = {"checkpoint": result.checkpoint, "run_id": result.run_id}
    return results


async def _run(
    loaded: Loaded, cluster: Cluster, display: Display, stop: Stop, run_id: str | None
) -> RunResult:
    from rollhook.rundir import RunDir

    run = RunDir.create(storage_root(loaded), loaded.recipe.name, run_id=run_id)
    run.recipe_path.write_text(loaded.text)
    write_lock(run.lock_path, loaded, _plugins(loaded))
    return await _drive(loaded, run, cluster, display, stop)


async def _drive(loaded: Loaded, run: RunDir, cluster: Cluster, display: Display, stop: Stop) -> RunResult:
    from rollhook.runtime.driver import Driver

    plugins = _plugins(loaded)
    display.say(f"Run {run.run_id} in {run.path}")
    driver = Driver(
        loaded.recipe,
        loaded.resolved,
        _digest(loaded, plugins),
        plugins,
        run,
        cluster,
        display,
        stop.drain,
    )
    return await driver.run()


def _plugins(loaded: Loaded) -> Plugins:
    return loader.load(component_names(loaded.recipe), loaded.recipe.plugins)


def _digest(loaded: Loaded, plugins: Plugins) -> str:
    versions = {f"{k}.{n}": "==".join(plugins.distribution(k, n)) for k, n in component_names(loaded.recipe)}
    return recipe_digest(loaded.resolved, versions)
