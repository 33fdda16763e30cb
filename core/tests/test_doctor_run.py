"""How a run stands: what live episodes wait for, which deadline is next, and what a dead run leaves."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from driving import Rig

from rollhook.agent import Agent, Reply, StopReason
from rollhook.checkpoints import CheckpointStore
from rollhook.cli.main import main
from rollhook.component import BuildContext
from rollhook.durable import from_json, to_json
from rollhook.engine import SamplingParams
from rollhook.environment import Box, Environment, Episode, Observation, Phase, Task, Verdict
from rollhook.errors import RunError
from rollhook.messages import message
from rollhook.recipe.schema import Budgets, Outcomes
from rollhook.rundir import Attempt, RunDir
from rollhook.runtime.diagnosis import diagnose
from rollhook.runtime.episode import EpisodeRequest, EpisodeRunner
from rollhook.runtime.live import Live
from rollhook.runtime.live_file import publishing, read_live, snapshot
from rollhook.runtime.mirror import begin_anew
from rollhook.runtime.vitals import state_of
from rollhook.sandbox import SandboxSpec
from rollhook.sandbox.pool import SandboxPool
from rollhook.session.common import SessionStats
from rollhook.testing.fake_engine import FakeEngine
from rollhook.testing.policy import serving
from rollhook.testing.scripted import ListJournal, ScriptedBackend, ThrottledError, settle

TASK = Task(
    "t1", "d1", "train", "sort", limits={"agent": 50.0, "verify": 20.0, "create": 30.0, "setup": 10.0}
)


class Gates:
    """Where the parts of an episode wait until the test lets them go; a hand-moved clock."""

    def __init__(self) -> None:
        self.at = ""
        self.now = 100.0
        self._go = asyncio.Event()

    async def wait(self, where: str) -> None:
        self.at, self._go = where, asyncio.Event()
        await self._go.wait()

    async def reach(self, where: str) -> None:
        self._go.set()
        await settle()
        assert self.at == where


class GatedBox:
    id = "box-1"

    def __init__(self, gates: Gates) -> None:
        self._gates = gates

    async def exec(self, argv: Any, **keys: Any) -> Any:
        await self._gates.wait("command")
        return type("Result", (), {"timed_out": False})()

    async def quiesce(self) -> Any:
        return type("Census", (), {"killed": []})()


class GatedPool:
    def __init__(self, gates: Gates) -> None:
        self._gates = gates

    async def acquire(self, spec: SandboxSpec, **keys: Any) -> GatedBox:
        await self._gates.wait("create")
        return GatedBox(self._gates)

    def waits_for(self, episode_id: str) -> str:
        return f"a place for {episode_id}"

    async def release(self, box: GatedBox) -> None:
        await self._gates.wait("teardown")


class GatedSession:
    turns_left, tokens_left, versions = 9, 99, None

    def __init__(self, gates: Gates) -> None:
        self._gates = gates
        self.stats = SessionStats()
        self.waits_for = "tokens of http://engine"

    async def chat(self, messages: Any, *, tools: Any = None) -> Reply:
        await self._gates.wait("reply")
        self.stats.turns += 1
        self.stats.completion_tokens += 12
        return Reply(message("assistant", "ls"), "stop", 3, 2, 95)

    def leaves(self) -> list[Any]:
        return []

    async def close(self) -> None:
        pass


class GatedPhase(Phase):
    box = "main"

    def __init__(self, gates: Gates) -> None:
        self.observation = Observation([message("user", "go")])
        self._gates = gates

    async def verify(self, transcript: Any) -> Verdict:
        await self._gates.wait("verify")
        return Verdict(1.0)


class GatedEpisode(Episode):
    boxes = {"main": Box(SandboxSpec())}

    def __init__(self, gates: Gates) -> None:
        self._gates = gates

    async def __aenter__(self) -> GatedEpisode:
        await self._gates.wait("setup")
        return self

    async def phases(self) -> Any:
        yield GatedPhase(self._gates)


class GatedEnvironment(Environment):
    verifies_apart = False

    def __init__(self, gates: Gates) -> None:
        self._gates = gates

    def tasks(self, split: str | None = None) -> list[Task]:
        return [TASK]

    def episode(self, task: Task, ctx: Any) -> GatedEpisode:
        return GatedEpisode(self._gates)


class GatedAgent(Agent):
    def __init__(self, gates: Gates) -> None:
        self._gates = gates

    async def run(self, context: Any) -> StopReason:
        await context.session.chat(context.observation.messages)
        await context.sandbox.exec(["make", "all tests"], timeout=7.0)
        await self._gates.wait("itself")
        return StopReason.DONE


class GatedPolicy:
    def __init__(self, gates: Gates) -> None:
        self._gates = gates

    def open(self, session_id: str, **keys: Any) -> GatedSession:
        return GatedSession(self._gates)


async def test_an_episode_that_is_in_no_node_yet_is_there_since_it_began_or_began_anew() -> None:
    now = 1000.0
    live = Live(now=lambda: now)
    with live.running(EpisodeRequest("e1", "g1", TASK, 7, SamplingParams()), 90.0) as episode:
        now = 1003.0
        assert snapshot(live, ())["episodes"][0]["seconds_in_node"] == 3.0
        live.enter(episode, "agent", 60.0)
        begin_anew(episode, now)
        now = 1004.0
        (found,) = snapshot(live, ())["episodes"]
    assert (found["node"], found["seconds_in_node"], found["seconds"]) == ("", 1.0, 4.0)


async def test_a_live_episode_says_where_it_is_what_it_waits_for_and_which_deadline_is_next() -> None:
    gates = Gates()
    live = Live(now=lambda: gates.now)
    runner = EpisodeRunner(
        name="rooms", environment=GatedEnvironment(gates), agent=GatedAgent(gates), pool=GatedPool(gates),
        policy=GatedPolicy(gates), limits=Budgets(episode=90.0, slack=10.0), outcome_policy=Outcomes(),
        context=BuildContext(logging.getLogger("test"), None, None), live=live, now=lambda: gates.now,
    )  # fmt: skip
    task = asyncio.create_task(runner.run(EpisodeRequest("e1", "g1", TASK, 7, SamplingParams())))

    async def seen(where: str) -> dict[str, Any]:
        await gates.reach(where)
        gates.now += 4.0
        (found,) = snapshot(live, ())["episodes"]
        return found

    def summary(found: dict[str, Any]) -> tuple[Any, ...]:
        deadline = found["deadline"]
        return found["node"], found["waits_for"], deadline["name"], deadline["seconds_left"]

    found = await seen("create")
    assert summary(found) == ("create", "a place for e1", "create", 26.0)
    assert (found["seconds_waiting"], found["seconds_in_node"], found["seconds"]) == (4.0, 4.0, 4.0)
    assert summary(await seen("setup")) == ("setup", "", "setup", 6.0)
    found = await seen("reply")
    assert summary(found) == ("agent", "tokens of http://engine", "agent's clock", 50.0)
    assert (found["turns"], found["sandboxes"]) == (0, {"main": "box-1"})
    found = await seen("command")
    assert summary(found) == ("agent", "command make 'all tests'", "command", 3.0)
    assert (found["turns"], found["tokens"], found["seconds_in_node"]) == (1, 12, 8.0)
    found = await seen("itself")
    assert found["waits_for"] == "tokens of http://engine", "an agent outside asks its session over HTTP"
    assert found["deadline"]["name"] == "agent's clock"
    assert summary(await seen("verify")) == ("verify", "", "verify", 16.0)
    assert (await seen("teardown"))["node"] == "teardown"
    await gates.reach("teardown")
    assert (await task).record.outcome.reward == 1.0
    assert snapshot(live, ())["episodes"] == []


async def test_a_pool_says_what_a_create_waits_for() -> None:
    backend, gate, pause = ScriptedBackend(), asyncio.Event(), asyncio.Event()

    async def sleep(seconds: float) -> None:
        await pause.wait()

    def fails(spec: SandboxSpec) -> None:
        raise ThrottledError("too much")

    backend.plan = [lambda spec: gate.wait(), fails, lambda spec: gate.wait()]
    pool = SandboxPool(
        backend, run_id="r", attempt=1, journal=ListJournal(), create_concurrency=1, sleep=sleep
    )  # fmt: skip
    first, second = (
        asyncio.create_task(pool.acquire(SandboxSpec(), episode_id=name)) for name in ("e1", "e2")
    )
    await settle()
    assert pool.waits_for("e1") == "the backend, which makes a sandbox (try 1)"
    assert pool.waits_for("e2") == "a place among the creates"
    assert pool.waits_for("e3") == ""
    gate.set()
    await first
    await settle()
    assert pool.waits_for("e1") == ""
    assert pool.waits_for("e2") == "another try after 1"
    pause.set()
    await second
    await pool.aclose()


async def test_a_session_says_what_its_reply_waits_for(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, directory=tmp_path) as policy:
        session = policy.open("s", max_seq_len=5000, reply_tokens=10, turns=2)
        (worker,) = engine.workers
        assert session.waits_for == ""
        policy.pause()
        reply = asyncio.create_task(session.chat([message("user", "go")]))
        await settle()
        assert session.waits_for == "a weight update"
        reply.cancel()
        await asyncio.wait({reply})
        policy.resume()
        assert session.waits_for == ""
        assert policy.waits_for(session.route) == f"tokens of {worker.url}"
        policy.table.get(worker).queue_seconds = 2.5
        assert policy.waits_for(session.route).endswith(", where requests queue for 2.5 s")
        (shown,) = snapshot(Live(), policy.table)["engines"]
        assert (shown["url"], shown["healthy"], shown["open_sessions"]) == (worker.url, True, 1)
        policy.leave(session.route)
        assert policy.waits_for(session.route) == "an engine that is healthy"


async def test_the_file_is_there_while_the_run_is_and_a_bad_disk_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with publishing(tmp_path, Live(), lambda: (), interval=0.001):
        async with asyncio.timeout(10):
            while read_live(tmp_path) is None:
                await asyncio.sleep(0.001)
        assert read_live(tmp_path)["episodes"] == []
    assert list(tmp_path.iterdir()) == []
    async with publishing(tmp_path / "absent", Live(), lambda: (), interval=0.001), asyncio.timeout(10):
        while not caplog.records:
            await asyncio.sleep(0.001)
    assert "will not see the live episodes" in caplog.text
    (tmp_path / "live.json").write_text('{"schema": 99}')
    with pytest.raises(RunError, match="schema 99"):
        read_live(tmp_path)


# -- a run on disk


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "runs", "demo", run_id="demo")


def lease(attempt: Attempt, nonce: str, *, released: bool = False) -> None:
    journal = attempt.journal
    journal.append("lease", nonce=nonce, host="here", expiry=1e9, episode=f"e-{nonce}", box="main")
    journal.append("lease_created", nonce=nonce, sandbox_id=f"sb-{nonce}")
    if released:
        journal.append("lease_released", nonce=nonce)


def live(attempt: Attempt, *, written_at: float, healthy: bool = True) -> None:
    def one(name: str, deadline: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
        return {
            "episode_id": name, "group_id": "g", "task_id": "t1", "purpose": "train", "node": "agent",
            "waits_for": "", "seconds_waiting": 1.0, "seconds_in_node": 2.0, "seconds": 3.0,
            "deadline": deadline, "turns": 4, "tokens": 5, "sandboxes": {}, "cancelled": "", **more,
        }  # fmt: skip

    episodes = [
        one("e-none", None),
        one("e-late", {"name": "episode", "seconds_left": 900.0}),
        one("e-soon", {"name": "command", "seconds_left": 3.0}, waits_for="\x1b[31mrm\n", task_id="\u202et"),
    ]  # fmt: skip
    engine = {
        "url": "http://engine", "dp_rank": None, "healthy": healthy, "version": 3, "open_sessions": 1,
        "tokens_in_flight": 2, "queue_seconds": 0.5,
    }  # fmt: skip
    data = {"schema": 1, "written_at": written_at, "episodes": episodes, "engines": [engine]}
    (attempt.path / "live.json").write_bytes(to_json(data))


def kill(attempt: Attempt) -> None:
    """Leave an attempt as a crash does: no status, its process gone."""
    attempt.finish("failed")
    (attempt.path / "status.json").unlink()
    owner = attempt.path / "owner.json"
    owner.write_bytes(to_json(from_json(owner.read_bytes()) | {"pid": 0}))


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code, capsys.readouterr().out


def test_a_run_in_progress(run: RunDir) -> None:
    attempt = run.claim()
    lease(attempt, "n1")
    attempt.journal.flush()
    live(attempt, written_at=100.0, healthy=False)
    found = diagnose(run, watch=set, wall=lambda: 101.0)
    attempt.finish("stopped")
    assert (found.state, found.attempt, found.live_seconds_ago) == ("running", 1, 1.0)
    assert [each["episode_id"] for each in found.episodes] == ["e-soon", "e-late", "e-none"]
    assert found.journal is not None
    assert (found.journal.seq, found.journal.event) == (3, "lease_created")
    assert found.open_leases == [], "a living attempt's sandboxes are its own"
    assert found.findings == [f"the engine at http://engine is not healthy; logs: {attempt.path / 'logs'}"]
    assert found.way_on == []


def test_a_driver_that_lives_but_says_nothing_is_held_up(run: RunDir) -> None:
    attempt = run.claim()
    live(attempt, written_at=100.0)
    found = diagnose(run, watch=set, wall=lambda: 160.0)
    attempt.finish("stopped")
    assert "said nothing of its episodes for 60 s" in found.findings[0]


def test_a_dead_run_says_what_died_what_is_left_and_the_way_on(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run.claim()
    lease(first, "n1")
    lease(first, "n2")
    kill(first)
    second = run.claim()
    second.journal.append("lease_reaped", nonce="n1", sandbox_id="sb-n1", reason="over")
    lease(second, "n3", released=True)
    lease(second, "n4")
    store = CheckpointStore(run.checkpoints, attempt=2)
    store.commit(store.begin(3), 3, 4, [], second.journal.seq)
    live(second, written_at=100.0)
    kill(second)
    code, out = doctor(capsys, "demo")
    assert code == 1
    lines = out.splitlines()
    assert lines[0] == "run demo: dead"
    assert "committed: step 3, weight version 4" in lines
    assert "! attempt 2 ended without a word: its process is gone" in lines
    assert any(line.startswith("3 episodes were live") for line in lines)
    assert "sb-n2" in out
    assert "sb-n4" in out
    assert "sb-n1" not in out
    assert "sb-n3" not in out
    assert "go on with: rollhook run --resume demo" in lines
    assert "\\x1b[31mrm\\n" in out
    assert "\\u202et" in out
    assert not {"\x1b", "\u202e"} & set(out)
    code, out = doctor(capsys, "demo", "--json")
    assert code == 1
    data = json.loads(out)
    assert (data["state"], data["committed_step"]) == ("dead", 3)
    assert [each["nonce"] for each in data["open_leases"]] == ["n2", "n4"]
    assert data["way_on"][0] == "rollhook run --resume demo"


def test_a_finished_run_is_well_and_one_without_attempts_is_told(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = doctor(capsys, "demo")
    assert (code, out.splitlines()) == (0, ["run demo: not started", "! no attempt was ever made at it"])
    run.claim().finish("succeeded")
    code, out = doctor(capsys, str(run.path))
    assert code == 0
    assert "go on" not in out
    assert "committed: no step yet" in out


def test_the_way_on_is_that_of_the_verb_that_began_it(run: RunDir) -> None:
    run.claim("eval").finish("stopped")
    assert diagnose(run).way_on == ["rollhook eval --resume demo"]


def test_a_damaged_journal_is_a_finding(run: RunDir) -> None:
    attempt = run.claim()
    lease(attempt, "n1")
    lease(attempt, "n2")
    attempt.finish("failed")
    path = attempt.path / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"nonsense\n", *lines[4:]]))
    found = diagnose(run)
    assert [each.nonce for each in found.open_leases] == ["n1"]
    assert "the checksum does not fit" in found.findings[0]
    assert diagnose(run).journal.seq == 3


def test_an_attempt_that_ends_while_it_is_looked_at_has_not_died(run: RunDir) -> None:
    attempt = run.claim()
    before = run.newest_attempt()
    attempt.finish("succeeded")
    assert state_of(before, watch=lambda paths: set()) == "succeeded"


async def test_a_driven_run_leaves_no_live_file_and_a_died_one_does(tmp_path: Path) -> None:
    rig = Rig(tmp_path, steps=1)
    rig.die("checkpoint.before_marker")
    found = diagnose(rig.run)
    assert found.state == "dead"
    assert found.live_seconds_ago is not None
    assert found.way_on[0] == f"rollhook run --resume {rig.run.run_id}"
    await rig.drive()
    assert diagnose(rig.run).state == "succeeded"
    assert read_live(rig.run.path / "attempts/2") is None


async def test_leases_of_a_dead_attempt_are_closed_by_the_next_which_found_none_of_their_sandboxes(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path, steps=1)
    rig.die("sandbox.before_create", hit=2)
    assert len(diagnose(rig.run).open_leases) > 0
    await rig.drive()
    assert diagnose(rig.run).open_leases == []
