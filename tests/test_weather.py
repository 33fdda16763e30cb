"""Bad weather over real local sandboxes: what fails so never trains, and nothing is left.

WEATHER_SEED=N repeats the faults of a night; which episode they meet is up to the machine.
"""

import asyncio
import io
import os
import shutil
from collections import Counter

import driving
import pytest
from driving import Answers, Rig
from rich.console import Console
from surviving import assert_survived, events, trained

from rollhook.agent import StopReason
from rollhook.environment import Box, Episode, Observation, Phase, Verdict
from rollhook.episode_store import read_records, read_samples
from rollhook.installed import EntryInfo, installed
from rollhook.messages import message
from rollhook.metrics_file import read_metrics
from rollhook.plugins import Plugins
from rollhook.recipe.schema import Recipe
from rollhook.runtime.driver import Driver
from rollhook.runtime.progress import Display
from rollhook.sandbox import Sandbox, SandboxSpec
from rollhook.testing.storm import build_backend

needs_bubblewrap = pytest.mark.skipif(
    not shutil.which("bwrap"), reason="needs bubblewrap (apt-get install bubblewrap)"
)
RATES = {
    "throttled": 0.15,
    "lost_replies": 0.1,
    "deaths": 0.05,
    "cut_streams": 0.05,
    "garbage": 0.1,
    "full_disks": 0.1,
    "latency": 0.002,
    "retry_after": 0.01,
}
PROOF = "proof"
SEED = int(os.environ.get("WEATHER_SEED", "7"))


class Workshop(driving.Rooms):
    """Each task is to write a file; the verifier runs a program in the sandbox that writes the reward."""

    def episode(self, task, ctx):
        return WorkshopEpisode(ctx)


class WorkshopEpisode(Episode):
    boxes = {"main": Box(SandboxSpec())}

    def __init__(self, ctx):
        self._ctx = ctx

    async def __aenter__(self):
        await self._ctx.box().write("task", b"write a file\n")
        return self

    async def phases(self):
        yield WorkshopPhase(self._ctx)


class WorkshopPhase(Phase):
    box = "main"

    def __init__(self, ctx):
        self._ctx = ctx
        self.observation = Observation([message("user", "Write a file.")])

    async def verify(self, transcript):
        box = self._ctx.box()
        await box.write("check", f"test -s {PROOF} && echo 1 > verdict || echo 0 > verdict\n".encode())
        result = await box.exec(["sh", "check"], timeout=30)
        if result.exit_code != 0:
            return Verdict(None, {}, {"reason": f"the check ended with {result.exit_code}"})
        return Verdict(float((await box.read("verdict", limit=10)).decode()))


class Worker(Answers):
    """Writes the file in every other episode, after some commands; asks the policy between them."""

    async def run(self, context):
        for number in range(3):
            await context.session.chat([message("user", str(number))])
            await context.sandbox.exec(["sh", "-c", f"echo {number} >> log; cat task log"], timeout=30)
        if int(context.episode_id.split("-e")[1][:2]) % 2:
            await context.sandbox.exec(["cp", "log", PROOF], timeout=30)
        return StopReason.DONE


COMPONENTS = driving.COMPONENTS | {
    "environment.rooms": "test_weather:Workshop",
    "agent.answers": "test_weather:Worker",
}


def entries():
    found = [
        EntryInfo(*name.split("."), module="driving", distribution="driving", version="1")
        for name in COMPONENTS
    ]
    return [*found, *(each for each in installed() if each.full_name in ("sandbox.chaos", "sandbox.local"))]


@needs_bubblewrap
@pytest.mark.timeout(300)
async def test_a_run_in_bad_weather(tmp_path, monkeypatch, record_property):
    """Three steps over local sandboxes, with every fault of `chaos`."""
    record_property("figure", await endure(tmp_path, monkeypatch, steps=3, seed=SEED))


@needs_bubblewrap
@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(11, 16))
async def test_runs_in_other_weather(tmp_path, monkeypatch, record_property, seed):
    record_property("figure", await endure(tmp_path, monkeypatch, steps=20, seed=seed))


async def endure(tmp_path, monkeypatch, *, steps, seed):
    """Drive a run, look at what is left, and return what happened in words."""
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setattr(driving, "COMPONENTS", COMPONENTS)
    over = {"use": "local", "mode": "bubblewrap", "prices": {"per_hour": 3600.0}}
    rig = Rig(tmp_path, steps=steps, rollout={"group_size": 4, "refill_limit": 6})
    rig.keys["sandbox"] = {"use": "chaos", "over": over, "seed": seed, "warm": 2, **RATES}
    plugins = Plugins(entries())
    plugins.add(tuple(name.split(".")) for name in COMPONENTS if name != "sandbox.shelf")
    plugins.add([("sandbox", "chaos"), ("sandbox", "local")])
    driver = Driver(
        Recipe.model_validate(rig.keys), rig.keys, "digest", plugins, rig.run, driving.FakeCluster(),
        Display(Console(file=io.StringIO(), width=200)), asyncio.Event(),
    )  # fmt: skip
    await driver.run()
    batches = assert_survived(rig.run, steps)
    records = {record.episode_id: record for record in read_records(rig.run.episodes)}
    for episode in [episode for batch in batches for episode in trained(batch)]:
        assert records[episode].outcome.kind == "scored", "what did not reach its verdict was trained"
    assert {sample.episode_id for sample in read_samples(rig.run.episodes)} == {
        name for name, record in records.items() if record.outcome.trains
    }
    outcomes = Counter(record.outcome.kind for record in records.values())
    assert outcomes["infra_error"] > 0, "the weather was fair"
    backend = build_backend(over, tmp_path)
    assert await backend.list({}) == []
    await backend.aclose()
    opened = Counter(entry.data["nonce"] for entry in events(rig.run) if entry.event == "lease")
    closed = Counter(entry.data["nonce"] for entry in events(rig.run) if entry.event == "lease_released")
    assert opened == closed
    last = [row for row in read_metrics(rig.run.metrics_path) if "sandbox/creates" in row][-1]
    assert last["sandbox/leaked"] == 0
    assert last["sandbox/cost"] == pytest.approx(last["sandbox/seconds"])
    counted = ", ".join(f"{last[f'sandbox/{name}']:.0f} {name}" for name in ("creates", "create_retries"))
    causes = Counter(record.outcome.boundary for record in records.values() if record.outcome.boundary)
    return f"seed {seed}, {steps} steps: {len(records)} episodes {dict(outcomes)} {dict(causes)}, {counted}"


@needs_bubblewrap
async def test_a_full_disk_is_full_for_commands_too(tmp_path):
    use = {"use": "chaos", "over": {"use": "local", "mode": "bubblewrap"}, "full_disks": 1.0}
    backend = build_backend(use, tmp_path)
    await backend.start()
    raw = await backend.create(SandboxSpec())
    box = Sandbox(raw, capabilities=backend.capabilities, delete=backend.delete)
    try:
        result = await box.shell("head -c 1000000 /dev/zero > large", timeout=30)
        assert not result.ok
        assert "No space left" in result.error_text
        assert await box.alive()
    finally:
        await box.close()
        await backend.aclose()
