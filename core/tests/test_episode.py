"""One episode from end to end, over fakes of the sandbox pool and the session."""

import asyncio
import dataclasses
import logging
import math
from types import SimpleNamespace

import numpy as np
import pytest

from rollhook.agent import Agent, Reply, StopReason
from rollhook.component import BuildContext
from rollhook.engine import SamplingParams
from rollhook.environment import Box, Environment, Episode, Observation, Phase, Task, Verdict
from rollhook.episode_store import EpisodeStore
from rollhook.errors import BudgetExceeded, EngineError, SandboxError
from rollhook.messages import message
from rollhook.recipe.schema import Budgets, Outcomes
from rollhook.runtime.episode import EpisodeRequest, EpisodeRunner
from rollhook.sandbox import SandboxSpec
from rollhook.session.common import SessionStats

TASK = Task("t1", "d1", "train", "sort", limits={"agent": 5.0, "verify": 0.5, "create": 0.5, "setup": 0.5})


class FakeBox:
    def __init__(self, spec, log):
        self.spec, self.id, self.log = spec, "box-1", log

    async def quiesce(self):
        self.log.append("quiesce")
        return SimpleNamespace(killed=[])


class FakePool:
    def __init__(self, log, fail=None):
        self.log, self.fail = log, fail

    async def acquire(self, spec, *, episode_id, box, timeout):
        self.log.append(f"create {box}")
        if self.fail:
            raise self.fail
        return FakeBox(spec, self.log)

    async def release(self, sandbox):
        self.log.append("release")


@dataclasses.dataclass
class FakeSession:
    clock: object = None
    closed: bool = False
    turns_left: int = 3
    tokens_left: int = 100

    def __post_init__(self):
        self.stats = SessionStats(prompt_tokens=3, completion_tokens=2, wait_seconds=0.1)

    async def chat(self, messages, *, tools=None):
        self.stats.turns += 1
        return Reply(message("assistant", "ls"), "stop", 3, 2, 95)

    def leaves(self):
        if not self.stats.turns:
            return []
        return [
            SimpleNamespace(
                token_ids=np.arange(5, dtype=np.int32), mask=np.array([0, 0, 0, 1, 1], np.uint8),
                logprobs=np.zeros(5, np.float32), spans=np.array([[3, 5, 2, 4]], np.int32),
            )
        ]  # fmt: skip

    async def close(self):
        self.closed = True


class FakePolicy:
    def __init__(self):
        self.sessions = []

    def open(self, session_id, **kw):
        self.sessions.append(FakeSession())
        return self.sessions[-1]


class OnePhase(Phase):
    box = "main"

    def __init__(self, verify, log, limits):
        self.limits = limits
        self.observation = Observation([message("user", "do it")])
        self._verify, self._log = verify, log

    async def verify(self, transcript):
        self._log.append(f"verify {transcript.ended}")
        return await self._verify()


class OneEpisode(Episode):
    boxes = {"main": Box(SandboxSpec()), "judge": Box(SandboxSpec(), when="verify")}

    def __init__(self, verify, log, phases):
        self._verify, self._log, self._phases = verify, log, phases

    async def phases(self):
        for limits in self._phases:
            yield OnePhase(self._verify, self._log, limits)


class FakeEnvironment(Environment):
    verifies_apart = False

    def __init__(self, verify, log, phases):
        self._verify, self._log, self._phases = verify, log, phases

    def tasks(self, split=None):
        return [TASK]

    def episode(self, task, ctx):
        return OneEpisode(self._verify, self._log, self._phases)


class FakeAgent(Agent):
    def __init__(self, work):
        self._work = work

    async def run(self, context):
        return await self._work(context)


async def one_turn(context):
    await context.session.chat(context.observation.messages)
    return StopReason.DONE


async def passes():
    return Verdict(1.0, {"tests": 1.0})


async def run(work=one_turn, verify=passes, pool=None, outcomes=None, times=1, phases=({},), **budgets):
    log = []
    policy = FakePolicy()
    runner = EpisodeRunner(
        name="fake", environment=FakeEnvironment(verify, log, phases), agent=FakeAgent(work),
        pool=pool or FakePool(log), policy=policy, limits=Budgets(**budgets),
        outcome_policy=outcomes or Outcomes(), context=BuildContext(logging.getLogger("test"), None, None),
    )  # fmt: skip
    for number in range(1, times + 1):
        result = await runner.run(EpisodeRequest(f"e{number}", "g1", TASK, 7, SamplingParams()))
    assert all(session.closed for session in policy.sessions)
    return result, log


async def test_an_episode_creates_works_quiesces_verifies_and_releases_in_that_order():
    result, log = await run()
    assert log == ["create main", "quiesce", "create judge", "verify done", "release", "release"]
    record = result.record
    assert (record.outcome.kind, record.reward, record.ended) == ("scored", 1.0, "done")
    assert record.components == {"tests": 1.0}
    assert record.versions == (2, 4)
    assert [m["role"] for m in record.messages] == ["user", "assistant"]
    (sample,) = result.samples
    assert sample.reward == 1.0
    assert sample.oldest_version == 2
    assert record.timings["wait/engine"] == 0.1


async def fails():
    raise OSError("the disk of the verifier is gone")


async def none():
    return Verdict(None, detail={"reason": "reward.txt is missing"})


async def hangs():
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("verify", "cause"),
    [(fails, "OSError: the disk"), (none, "reward.txt is missing"), (hangs, "longer than 0.5 s")],
)
async def test_a_verifier_that_fails_after_recorded_turns_trains_nothing(verify, cause):
    result, log = await run(verify=verify)
    assert result.record.turns == 1
    assert result.record.outcome.kind == "infra_error"
    assert result.record.outcome.boundary == "verifier"
    assert cause in result.record.outcome.cause
    assert result.samples == ()
    assert log[-1] == "release"
    assert result.record.fired == ("verify" if verify is hangs else "")


@pytest.mark.parametrize(
    ("verdict", "cause"),
    [
        (Verdict(math.nan), "the reward, nan, is not a finite number"),
        (Verdict(True), "the reward, True, is not a finite number"),
        (Verdict(1.0, {"speed": math.inf}), "component speed, inf, is not a finite number"),
        (Verdict(1.0, {"speed": "fast"}), "component speed, 'fast', is not a finite number"),
    ],
)
async def test_a_verdict_that_is_no_number_is_the_verifiers_failure_and_can_be_kept(verdict, cause, tmp_path):
    async def verify():
        return verdict

    result, _ = await run(verify=verify)
    assert (result.record.outcome.kind, result.record.outcome.boundary) == ("infra_error", "verifier")
    assert cause in result.record.outcome.cause
    store = EpisodeStore(tmp_path)
    store.append(result.record, result.samples)
    store.close()


async def test_each_phase_has_its_own_conversation_and_the_record_has_them_all():
    seen = []

    async def looks(context):
        await context.session.chat(context.observation.messages)
        return StopReason.DONE

    async def judges():
        seen.append(1)
        return Verdict(1.0)

    result, log = await run(looks, judges, phases=({}, {}))
    assert len(seen) == 2
    assert [m["role"] for m in result.record.messages] == ["user", "assistant"] * 2
    assert log.count("verify done") == 2


async def test_a_phase_may_have_less_time_than_its_task_and_time_is_counted_once():
    left = []

    async def works(context):
        left.append(context.budget.seconds_left)
        context.budget._clock.charge("command", 1.5)
        return StopReason.DONE

    result, _ = await run(works, phases=({"agent": 2.0}, {"agent": 60.0}, {}))
    assert left == [2.0, 3.5, 2.0]
    assert result.record.timings["agent/command"] == 4.5
    result, _ = await run(verify=hangs, phases=({"verify": 0.1},))
    assert "longer than 0.1 s" in result.record.outcome.cause


async def test_the_record_has_the_reward_that_the_phases_come_to_together(monkeypatch):
    monkeypatch.setattr(OneEpisode, "combine", "mean")
    rewards = [1.0, 0.0]

    async def judges():
        return Verdict(rewards.pop(0))

    result, _ = await run(verify=judges, phases=({}, {}))
    assert result.record.reward == result.record.outcome.reward == 0.5


async def test_an_episode_that_breaks_in_a_later_phase_keeps_no_reward_of_an_earlier_one():
    verdicts = [Verdict(1.0)]

    async def judges():
        return verdicts.pop(0)

    result, _ = await run(verify=judges, phases=({}, {}))
    assert result.record.outcome.kind == "infra_error"
    assert result.record.reward is None
    assert not result.samples


async def out_of_time(context):
    await context.session.chat(context.observation.messages)
    raise BudgetExceeded("the agent used up its 5 s (agent)", node="agent")


@pytest.mark.parametrize(
    ("policy", "kind", "reward", "samples"),
    [("verify", "scored", 1.0, 1), ("zero", "timeout", 0.0, 1), ("drop", "timeout", None, 0)],
)
async def test_an_agent_out_of_time_becomes_what_the_recipe_says(policy, kind, reward, samples):
    result, log = await run(out_of_time, outcomes=Outcomes(timeout=policy))
    assert (result.record.outcome.kind, result.record.outcome.reward) == (kind, reward)
    assert len(result.samples) == samples
    assert (result.record.ended, result.record.fired) == ("agent_timeout", "agent")
    assert ("verify agent_timeout" in log) == (policy == "verify")


async def broken(context):
    return context.no_such_thing


async def engine_gone(context):
    raise EngineError("http://127.0.0.1:1 does not answer")


@pytest.mark.parametrize(("work", "boundary"), [(broken, "agent"), (engine_gone, "engine")])
async def test_a_failing_agent_or_engine_is_infrastructure_and_is_not_verified(work, boundary):
    result, log = await run(work)
    assert result.record.outcome.kind == "infra_error"
    assert result.record.outcome.boundary == boundary
    assert not any(entry.startswith("verify") for entry in log)
    assert "release" in log


async def test_the_same_fault_of_an_agent_is_logged_once_with_its_traceback(caplog):
    await run(broken, times=3)
    (entry,) = caplog.records
    assert entry.getMessage() == "the agent failed in episode e1 (the same again is not shown)"
    assert entry.exc_info is not None
    assert "no_such_thing" in caplog.text


async def test_a_sandbox_that_cannot_be_made_is_infrastructure():
    log = []
    result, _ = await run(pool=FakePool(log, SandboxError("no room")))
    assert (result.record.outcome.kind, result.record.outcome.boundary) == ("infra_error", "sandbox")


async def test_the_record_says_that_the_time_for_sandboxes_ran_out():
    late = BudgetExceeded("no sandbox within 0.5 s", node="create")
    result, _ = await run(pool=FakePool([], late))
    assert result.record.outcome.boundary == "budget"
    assert (result.record.ended, result.record.fired) == ("infra", "create")


async def test_a_cancelled_episode_releases_its_boxes_and_passes_the_cancellation_on():
    started = asyncio.Event()

    async def waits(context):
        started.set()
        await asyncio.Event().wait()

    log = []
    task = asyncio.create_task(run(waits, pool=FakePool(log)))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log == ["create main", "release"]


async def test_an_environment_that_never_leaves_does_not_hold_its_slot_for_ever(monkeypatch):
    async def never(*args):
        await asyncio.Event().wait()

    monkeypatch.setattr(OneEpisode, "__aexit__", never)
    async with asyncio.timeout(5):
        result, log = await run(work=never, episode=0.1, slack=0.1, teardown=0.1)
    assert log[-1] == "release"
    assert result.record.outcome.kind == "infra_error"
    assert result.record.fired == "episode"
