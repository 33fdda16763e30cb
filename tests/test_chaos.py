"""A run whose engines and rollout workers go wrong all the time: its books balance throughout, it ends well.

CHAOS_SEED=N repeats the faults of a night, which the figure names; what they meet is up to the machine.
"""

import asyncio
import io
import itertools
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import get_args

import chaos
import numpy as np
import pytest
from driving import Rig
from killing import processes_of, wait_until_gone
from producing import CheckedBooks
from rich.console import Console
from surviving import assert_survived, events, trained

from rollhook.engine.base import PauseMode
from rollhook.episode_store import read_records, read_samples
from rollhook.metrics_file import read_metrics
from rollhook.recipe.schema import Recipe
from rollhook.runtime import producer
from rollhook.runtime.driver import Driver
from rollhook.runtime.lineage import Lineage
from rollhook.runtime.progress import Display

pytest.importorskip("ray", reason="needs ray: `python3 core test` installs it")

ENGINES = 3
#: seconds between steps, and from the end of the last fault to the end of the run
PACE, CALM = 1.5, 6.0
STALENESS = 2
KINDS = (*chaos.FAULTS, "kill", "hang")
#: fewer deaths of workers than any one of them may have in a row
MOST_WORKERS_KILLED = 4


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_minute_of_chaos(tmp_path, monkeypatch, record_property):
    record_property("figure", await endure(tmp_path, monkeypatch, seconds=60, workers=2, seed=5))


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("workers", [1, 2])
async def test_ten_minutes_of_chaos(tmp_path, monkeypatch, record_property, workers):
    seed = int(os.environ.get("CHAOS_SEED") or random.randrange(1 << 16))
    record_property("figure", await endure(tmp_path, monkeypatch, seconds=600, workers=workers, seed=seed))


@dataclass(frozen=True)
class Fault:
    """What befalls an engine, or a rollout worker, `at` seconds after the first episode, for `seconds`."""

    at: float
    kind: str
    engine: int
    seconds: float


def plan(seed, seconds, workers):
    """Return the faults of a run; each kind is met before any is met again."""
    rng = random.Random(seed)
    faults, at, kinds = [], 1.0, []
    while at < seconds - CALM:
        kinds = kinds or rng.sample(KINDS, len(KINDS))
        kind, length = kinds.pop(), rng.uniform(1.0, 6.0)
        if kind == "hang" and seconds > 300 and rng.random() < 0.1:
            length = 40.0  # longer than an engine has to answer a control call
        many = rng.choice([1, 1, 1, 2, ENGINES])
        faults += [Fault(at, kind, engine, length) for engine in rng.sample(range(ENGINES), many)]
        at += rng.uniform(1.0, 4.0)
    if workers > 1:
        count = min(MOST_WORKERS_KILLED, 1 + int(seconds) // 60)
        faults += [Fault(rng.uniform(5.0, seconds - 4 * CALM), "kill worker", 0, 0.0) for _ in range(count)]
    return faults


async def endure(tmp_path, monkeypatch, *, seconds, workers, seed):
    """Run for so long among faults, look at what is left, and return what happened in words."""
    from rollhook.cluster import Cluster

    books = []
    monkeypatch.setattr(producer, "Books", lambda: books.append(CheckedBooks()) or books[-1])
    # for the processes of the cluster
    paths = [os.path.dirname(chaos.__file__), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    steps = round(seconds / PACE)
    rig = Rig(
        tmp_path,
        engine={"use": "chaos", "count": ENGINES},
        agent={"use": "talks"},
        trainer={"use": "paced", "seconds": PACE},
        router={
            "use": "sticky+min_load",
            "load_interval": 1.0,
            "health": {"interval": 0.5, "down_after": 2},
            "breaker": {"faults": 4, "seconds": 1.0},
        },
        rollout={
            "group_size": 4,
            "min_group": 2,
            "max_staleness": STALENESS,
            "pause_mode": get_args(PauseMode)[seed % 3],
            "workers": workers,
        },
        budgets={"reply_tokens": 12, "agent": 8.0},
        steps=steps,
    )
    started = time.monotonic()
    cluster = await Cluster.start(tmp_path / "ray", cpus=2)
    try:
        driver = Driver(
            Recipe.model_validate(rig.keys), rig.keys, "digest", chaos.plugins(), rig.run, cluster,
            Display(Console(file=io.StringIO(), width=200)), asyncio.Event(),
        )  # fmt: skip
        driving = asyncio.ensure_future(driver.run())
        befell = await befall(tmp_path, rig.run, plan(seed, seconds, workers), driving)
        await driving
    finally:
        await cluster.stop()
    took = time.monotonic() - started
    (kept,) = books
    kept.check()
    assert (kept.wrong, kept.in_flight, kept.buffered) == (0, 0, 0)
    batches = assert_survived(rig.run, steps)
    assert kept.trained == sum(len(trained(batch)) for batch in batches)
    assert_as_emitted(rig.run, batches)
    assert rig.sandboxes() == []
    assert open_leases(rig.run) == set()
    assert await asyncio.to_thread(wait_until_gone, tmp_path) == []
    assert set(befell) >= {*KINDS, *(["kill worker"] if workers > 1 else [])}, f"{befell} of seed {seed}"
    return told(rig.run, seed, took, workers, befell)


# -- faults


async def befall(root, run, faults, driving):
    """Let the faults come about while the driver drives; return how many of each kind did."""
    befell = Counter()
    engines = [asyncio.Lock() for _ in range(ENGINES)]
    directory = run.path / "attempts/1/engines"

    async def one(fault):
        await asyncio.sleep(fault.at)
        if fault.kind == "kill worker":
            pids = processes_of(root, "worker")
            if pids:
                with suppress(ProcessLookupError):
                    os.kill(min(pids), signal.SIGKILL)
                    befell[fault.kind] += 1
            return
        async with engines[fault.engine]:  # one at a time
            pid = int(sorted(directory.glob("*.pid"))[fault.engine].read_text())
            befell[fault.kind] += await strike(fault, pid, directory)

    while not any(entry.event == "episode_started" for entry in events(run)):
        await asyncio.wait({driving}, timeout=0.2)
        if driving.done():
            await driving
    striking = asyncio.gather(*map(one, faults))
    await asyncio.wait({driving, striking}, return_when=asyncio.FIRST_COMPLETED)
    if not striking.done():
        striking.cancel()
    with suppress(asyncio.CancelledError):
        await striking
    return befell


async def strike(fault, pid, directory):
    """Do one thing to the process of an engine and undo it; return whether it was there."""
    if fault.kind in chaos.FAULTS:
        file = directory / f"{pid}.fault"
        file.write_text(fault.kind)
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            file.unlink()
        return True
    try:
        os.kill(pid, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
    except ProcessLookupError:  # it is being started anew
        return False
    if fault.kind == "hang":
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    return True


# -- what is left


def assert_as_emitted(run, batches):
    """Every token of a sample is what the engines generate there; none is of a failed episode.

    None that trained was too old. What failed did so for the engines.
    """
    lineage = Lineage.read(run)
    outcomes = {record.episode_id: record.outcome for record in read_records(run.episodes)}
    assert {each.boundary for each in outcomes.values() if each.kind == "infra_error"} <= {"engine"}
    steps = {episode: batch["step"] for batch in batches for episode in trained(batch)}
    for sample in read_samples(run.episodes):
        assert outcomes[sample.episode_id].trains
        ids, before = sample.token_ids.tolist(), 0.0
        for place in np.flatnonzero(sample.mask):
            told = float(sample.logprobs[place])
            # an engine counts its tokens by their log-probabilities, and begins anew where a stream was cut
            assert told in (-1 / 128, before - 1 / 128)
            assert ids[place] == chaos.next_token(ids[:place]), sample.episode_id
            before = told
        if (step := steps.get(sample.episode_id)) is not None:
            versions = {int(version) for version in np.unique(sample.spans[:, 2:])}
            assert versions, f"{sample.episode_id} has no token to train on"
            assert all(step - STALENESS <= lineage.versions[version] <= step for version in versions)


def open_leases(run):
    """Return the sandboxes that were made and neither deleted nor given up."""
    found = set()
    for entry in events(run):
        if entry.event == "lease_created":
            found.add(entry.data["nonce"])
        elif entry.event in ("lease_released", "lease_lost"):
            found.discard(entry.data["nonce"])
    return found


def told(run, seed, took, workers, befell):
    rows = [row for row in read_metrics(run.metrics_path) if "time/train" in row]
    total = Counter()
    for row, name in itertools.product(
        rows, ("rollout/refills", "router/retries", "router/breaker_openings")
    ):
        total[name] += row.get(name, 0.0)
    books = {name: rows[-1].get(f"books/{name}", 0.0) for name in ("submitted", "trained", "rejected")}
    outcomes = Counter(record.outcome.kind for record in read_records(run.episodes))
    return (
        f"seed {seed}, {took:.0f} s, {len(rows)} steps, {workers} workers: "
        + ", ".join(f"{count} {kind}" for kind, count in sorted(befell.items()))
        + f"; {books['submitted']:.0f} episodes ({dict(outcomes)}), {books['trained']:.0f} trained, "
        + f"{total['rollout/refills']:.0f} refills, {total['router/retries']:.0f} retries, "
        + f"{total['router/breaker_openings']:.0f} openings of breakers"
    )
