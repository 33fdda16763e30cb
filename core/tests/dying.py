"""Processes that die at a failpoint, and what they were writing: what is left is what a reader finds."""

import asyncio
import multiprocessing
import os
import signal

import numpy as np

from rollhook import failpoints
from rollhook.checkpoints import CheckpointStore
from rollhook.durable import write_atomic
from rollhook.engine.weights import WeightStore
from rollhook.episode_store import EpisodeStore
from rollhook.journal import Journal
from rollhook.metrics_file import MetricsWriter
from rollhook.records import EpisodeRecord, Outcome, Sample
from rollhook.rundir import RunDir
from rollhook.runtime.results import RunResult

DIED = -signal.SIGKILL


def elsewhere(failpoint, hit, function, *args):
    """Call a function of an importable module in a process of its own; return the exit code of that.

    It is forked from a server that has no threads and no state of the tests.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rollhook.runtime.rollouts", "rollhook.testing.fake_engine"])
    process = context.Process(target=_call, args=(dict(os.environ), failpoint, hit, function, args))
    process.start()
    process.join(60)
    assert process.exitcode is not None, "it hangs"
    return process.exitcode


def _call(environ, failpoint, hit, function, args):
    os.environ.clear()
    os.environ.update(environ)
    if failpoint is not None:
        failpoints.arm(failpoint, hit)
    function(*args)


def keep_a_journal(path):
    with Journal(path) as journal:
        for number in range(3):
            journal.append("step", number=number)
            journal.flush()


def replace_a_file(path):
    write_atomic(path, b"new" * 100)


def replace_a_file_as_the_environment_says(path):
    failpoints.arm_from_environment()
    for _ in range(2):
        replace_a_file(path)


def commit_steps(directory):
    """Commit steps 1 and 2 and keep the newer."""
    store = CheckpointStore(directory)
    for step in (1, 2):
        save(store, step)
    store.prune(1)


def save(store, step):
    path = store.begin(step)
    (path / "model").write_text(f"weights of {step}")
    store.commit(path, step, step + 10, [f"e{step}"], step)


def publish_versions(directory):
    """Publish versions 1 to 4 and keep the two newest."""
    store = WeightStore(directory)
    for version in (1, 2, 3, 4):
        publish(store, version)
    store.prune()


def publish(store, version):
    path = store.new(version)
    (path / "model").write_text(f"weights of {version}")
    store.commit(path, version)


def finish_episodes(directory):
    """Finish three episodes, each flushed; the second flush closes a part."""
    store = EpisodeStore(directory, part_bytes=1000)
    for number in range(3):
        finish(store, f"e{number}")
    store.close()


def finish(store, episode_id):
    record = EpisodeRecord(
        episode_id=episode_id, run_id="demo", attempt=1, purpose="train", group_id="g", task_id="t",
        task_digest="d", environment="rooms", family="rooms", seed=1, ended="done",
        outcome=Outcome("scored", 1.0), reward=1.0,
    )  # fmt: skip
    sample = Sample(
        episode_id, "g", "t", 0, np.arange(9, dtype=np.int32), np.ones(9, dtype=np.uint8),
        np.zeros(9, dtype=np.float32), np.array([[0, 9, 1, 1]], dtype=np.int32), 1.0, "scored",
    )  # fmt: skip
    store.append(record, [sample])
    store.flush()


def make_a_run(root):
    RunDir.create(root, "demo", run_id="demo")


def attempt_a_run(path):
    """Claim the next attempt, end it and write its result."""
    attempt = RunDir(path).claim()
    RunResult("demo", "succeeded", "digest", steps=7).write(path)
    attempt.finish("succeeded")


def write_metrics(path):
    writer = MetricsWriter(path)
    for step in (1, 2):
        writer.write(step, 1, {"loss": 0.5})
    writer.close()


def ask_for_a_sandbox(path, provider):
    """Let an attempt ask its pool for a sandbox."""
    from driving import Shelf, ShelfConfig

    from rollhook.sandbox import SandboxSpec
    from rollhook.sandbox.pool import SandboxPool

    async def ask():
        attempt = RunDir(path).claim()
        backend = Shelf(ShelfConfig(directory=provider), None)
        pool = SandboxPool(backend, run_id="demo", attempt=attempt.number, journal=attempt.journal)
        await pool.acquire(SandboxSpec(), episode_id="e1")

    asyncio.run(ask())
