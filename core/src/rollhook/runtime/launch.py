"""From a loaded recipe to a finished run: what it needs first, its directory, its driver."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollhook.checkpoints import CheckpointStore
from rollhook.durable import write_atomic
from rollhook.errors import RunError
from rollhook.recipe.check import compose
from rollhook.recipe.load import Loaded
from rollhook.recipe.lock import digest, write_lock
from rollhook.recipe.match import ALL
from rollhook.rundir import check_free
from rollhook.runtime.drive import joined_cluster, joins, share_cache
from rollhook.runtime.progress import Display
from rollhook.runtime.results import RunResult, finished_run, read_result

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from rollhook.cluster import Cluster
    from rollhook.plugins import Plugins
    from rollhook.recipe.schema import Need
    from rollhook.rundir import Attempt, RunDir


class Stop:
    """Turns signals into an orderly end: the first SIGINT drains, the second (or SIGTERM) cancels."""

    def __init__(self, display: Display) -> None:
        self.drain = asyncio.Event()
        self._display = display
        self._task: asyncio.Task[Any] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM while the block runs; what is cancelled is the current task."""
        self._task = asyncio.current_task()
        self.handle()
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().remove_signal_handler(number)

    def handle(self) -> None:
        """Take the signals; once more after a library has taken them for itself."""
        loop = asyncio.get_running_loop()
        for number, act in ((signal.SIGINT, self._interrupt), (signal.SIGTERM, self._terminate)):
            loop.remove_signal_handler(number)
            loop.add_signal_handler(number, act)

    def _interrupt(self) -> None:
        if self.drain.is_set():
            self._terminate()
            return
        self.drain.set()
        self._display.say("Stopping after the step under way; interrupt once more to stop at once.")

    def _terminate(self) -> None:
        self.drain.set()
        if self._task is not None:
            self._task.cancel()


async def run_recipe(
    source: Path | str,
    overrides: list[str],
    display: Display,
    run_id: str | None,
    allow_changed: Sequence[str] = (),
    composed: tuple[Loaded, Plugins] | None = None,
) -> RunResult:
    """Run a recipe or a lock and, before it, the recipes that it needs; returns the result of itself.

    `composed` is what `compose` has made of it already. Raises RecipeError with all that is wrong with any of
    them before anything is started, and with all that no longer matches a lock and is not in `allow_changed`.
    """
    if composed is None:
        composed = await asyncio.to_thread(compose, source, overrides, allow_changed=allow_changed)
    loaded, plugins = composed
    _say_remarks(loaded, display)
    root = storage_root(loaded)
    if run_id is not None:
        check_free(root, run_id)
    async with own_cluster(root / ".cluster", display) as (cluster, stop):
        results = await _run_needs(loaded.recipe.needs, root, cluster, display, stop)
        if stop.drain.is_set():
            raise asyncio.CancelledError  # stopped in a run that this one needs: there is none to report
        if results:
            loaded, plugins = await asyncio.to_thread(
                compose, source, overrides, needs_results=results, allow_changed=allow_changed
            )
        return await _run(loaded, plugins, cluster, display, stop, run_id)


async def drive_run(run: RunDir, display: Display, number: int | None = None) -> RunResult:
    """Drive the next attempt of a run whose lock is on disk: from its newest committed step, or the start.

    The attempt is `number` if that is free. As a job on a Ray cluster it joins that; what the run needs, and
    nobody has run yet, is run there first. A run that has done all its steps is left as it is. What no longer
    matches its lock is said, and stops nothing.
    """
    run.check_verb("run")
    if not run.lock_path.is_file():
        raise RunError(f"{run.path} has no {run.lock_path.name}, so nothing says what the run is to do")
    if joins():
        share_cache(run.path.parent)
    loaded, plugins = await asyncio.to_thread(compose, run.lock_path, allow_changed=[ALL])
    _say_remarks(loaded, display)
    newest = await asyncio.to_thread(CheckpointStore(run.checkpoints).newest)
    if newest is not None and newest.step >= loaded.recipe.steps:
        result = await asyncio.to_thread(read_result, run.path)
        if result is not None and result.status == "succeeded":
            display.say(f"Run {run.run_id} has done all its {newest.step} steps already.")
            return result
    claim = partial(run.claim, number=number)
    attempt = await asyncio.to_thread(claim)  # before Ray is started, for it may be refused
    try:
        if joins():
            context = joined_cluster(loaded.recipe, attempt.logs, display)
        else:
            context = own_cluster(run.path / ".cluster", display)
        async with context as (cluster, stop):
            if loaded.pending:
                loaded, plugins = await _after_needs(loaded, run, cluster, display, stop)
            return await _drive(loaded, plugins, run, cluster, display, stop, attempt)
    except asyncio.CancelledError:
        attempt.finish("stopped")
        raise
    finally:
        attempt.finish("failed")  # nothing, unless the driver was never reached


def _say_remarks(loaded: Loaded, display: Display) -> None:
    for remark in loaded.remarks:
        display.say(f"Lock: {remark}")


def storage_root(loaded: Loaded) -> Path:
    """Return the directory of the recipe's runs."""
    return Path(loaded.recipe.storage.root).expanduser().resolve()


@asynccontextmanager
async def own_cluster(scratch: Path, display: Display) -> AsyncIterator[tuple[Cluster, Stop]]:
    """Give a Ray instance of our own, with signals handled, and stop it whatever happens."""
    from rollhook.cluster import Cluster

    stop = Stop(display)
    with stop.watching():
        display.say("Starting Ray on this machine ...")
        cluster = await Cluster.start(scratch)
        stop.handle()  # Ray's native code has put its own handler of SIGTERM there
        try:
            yield cluster, stop
        finally:
            await asyncio.shield(cluster.stop())


async def _after_needs(
    loaded: Loaded, run: RunDir, cluster: Cluster, display: Display, stop: Stop
) -> tuple[Loaded, Plugins]:
    """Run what a run needs beside it, and return its recipe with the results, which its lock has then too."""
    results = await _run_needs(loaded.recipe.needs, run.path.parent, cluster, display, stop)
    if stop.drain.is_set():
        raise asyncio.CancelledError
    loaded, plugins = await asyncio.to_thread(
        compose, run.lock_path, needs_results=results, allow_changed=[ALL]
    )
    await asyncio.to_thread(write_lock, run.lock_path, loaded, plugins)
    return loaded, plugins


async def _run_needs(
    needs: Mapping[str, Need], root: Path, cluster: Cluster, display: Display, stop: Stop
) -> dict[str, dict[str, Any]]:
    """Return, by alias, the results of the runs that a recipe needs, running those that are missing."""
    results: dict[str, dict[str, Any]] = {}
    for alias, need in needs.items():
        overrides = [*need.overrides, f"storage.root={root}"]
        loaded, plugins = await asyncio.to_thread(compose, need.recipe, overrides)
        result = await asyncio.to_thread(finished_run, root, digest(loaded, plugins))
        if result is not None:
            display.say(f"Needs {alias} ({need.recipe}): run {result.run_id} did it already.")
        else:
            display.say(f"Needs {alias} ({need.recipe}): running it first.")
            inner = await _run_needs(loaded.recipe.needs, root, cluster, display, stop)
            if inner:
                loaded, plugins = await asyncio.to_thread(
                    compose, need.recipe, overrides, needs_results=inner
                )
            result = await _run(loaded, plugins, cluster, display, stop, None)
        if result.status != "succeeded":
            stop.drain.set()
            return results
        results[alias] = {"checkpoint": result.checkpoint, "run_id": result.run_id}
    return results


async def _run(
    loaded: Loaded, plugins: Plugins, cluster: Cluster, display: Display, stop: Stop, run_id: str | None
) -> RunResult:
    run = await asyncio.to_thread(_make_directory, loaded, plugins, run_id)
    return await _drive(loaded, plugins, run, cluster, display, stop)


def _make_directory(loaded: Loaded, plugins: Plugins, run_id: str | None) -> RunDir:
    from rollhook.rundir import RunDir

    run = RunDir.create(storage_root(loaded), loaded.recipe.name, run_id=run_id)
    write_atomic(run.recipe_path, loaded.text.encode())
    write_lock(run.lock_path, loaded, plugins)
    return run


async def _drive(
    loaded: Loaded,
    plugins: Plugins,
    run: RunDir,
    cluster: Cluster,
    display: Display,
    stop: Stop,
    attempt: Attempt | None = None,
) -> RunResult:
    from rollhook.runtime.driver import Driver

    display.say(f"Run {run.run_id} in {run.path}")
    driver = Driver(
        loaded.recipe,
        loaded.resolved,
        digest(loaded, plugins),
        plugins,
        run,
        cluster,
        display,
        stop.drain,
    )
    return await driver.run(attempt)
