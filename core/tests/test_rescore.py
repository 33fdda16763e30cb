"""Rescoring: recorded conversations are played again, in sandboxes of the fake backend, and judged."""

import asyncio
import hashlib
import signal

import orjson
import pytest
import yaml

from rollhook.agent import Agent, StopReason
from rollhook.budgets import AgentClock
from rollhook.cli.main import main
from rollhook.environment import Box, Environment, Episode, Observation, Phase, Task, Verdict
from rollhook.episode_store import EpisodeStore
from rollhook.errors import AgentError, BudgetExceeded, UsageError
from rollhook.messages import message
from rollhook.recipe.schema import Recipe
from rollhook.records import EpisodeRecord, Outcome
from rollhook.rundir import RunDir
from rollhook.runtime.parts import Parts
from rollhook.runtime.recorded_session import RecordedSession, compare
from rollhook.runtime.rescore import RESULTS, Rescorer, Results, choose, counts
from rollhook.sandbox import SandboxSpec
from rollhook.testing.distributions import write_distribution
from rollhook.testing.fakes_sandbox import FakeSandboxes

PROMPT = "Write 7 to answer.txt."


def digest_of(name):
    return hashlib.sha256(name.encode()).hexdigest()


class WritePhase(Phase):
    box = "main"

    def __init__(self, ctx, gate):
        self._ctx, self.min_reward = ctx, gate
        self.observation = Observation([message("user", PROMPT), message("assistant", "For example: true")])

    async def verify(self, transcript):
        try:
            found = await self._ctx.box().read("answer.txt")
        except Exception:
            found = b""
        return Verdict(float(found.strip() == b"7"))


class WriteEpisode(Episode):
    boxes = {"main": Box(SandboxSpec())}

    def __init__(self, task, ctx):
        self._task, self._ctx = task, ctx

    async def phases(self):
        for _ in range(self._task.payload):
            yield WritePhase(self._ctx, 0.0)


class Writing(Environment):
    """Tasks `one` and `two`, of one and of two phases, and `broken`; `digests` says what is another now."""

    verifies_apart = False
    digests = {}

    def tasks(self, split=None):
        found = {"one": 1, "two": 2}
        tasks = [Task(n, self.digests.get(n, digest_of(n)), "train", "", {}, k) for n, k in found.items()]
        return [*tasks, Task("broken", "b", "train", problem="a file is missing")]

    def episode(self, task, ctx):
        return WriteEpisode(task, ctx)


class Typist(Agent):
    """Types each reply into the sandbox until it says DONE."""

    async def run(self, context):
        messages = list(context.observation.messages)
        while context.budget.turns_left > 0:
            reply = await context.session.chat(messages)
            if reply.finish_reason == "length":
                return StopReason.LENGTH
            if reply.message["content"] == "DONE":
                return StopReason.DONE
            done = await context.sandbox.exec(["sh", "-c", reply.message["content"]])
            messages += [reply.message, message("user", done.stdout.decode().strip())]
        return StopReason.MAX_TURNS


class Boxes(FakeSandboxes):
    def __init__(self, config, context):
        super().__init__()


class FakePlugins:
    def build(self, kind, name, keys, context):
        return {"environment": Writing, "agent": Typist, "sandbox": Boxes}[kind](None, context)


RECIPE = Recipe.model_validate(
    {"name": "demo", "environment": [{"use": "writing"}], "agent": {"use": "typist"},
     "sandbox": {"use": "fake"}, "budgets": {"turns": 6}, "outcomes": {"truncated": "verify"}}
)  # fmt: skip


def phase(*turns):
    """Return a recorded phase; turns are what was replied and, for all but the last, what came back."""
    said = [message("user", PROMPT), message("assistant", "For example: true")]
    for number, text in enumerate(turns):
        said.append(message("user" if number % 2 else "assistant", text))
    return said


def record(name, messages, reward, task="one", **keys):
    fields = {"task_digest": digest_of(task), "ended": "done", "group_id": f"g-{name}", "purpose": "train"}
    if "outcome" not in keys:
        fields["outcome"] = Outcome("scored", reward)
    turns = sum(m["role"] == "assistant" for m in messages) - messages.count(phase()[1])
    return EpisodeRecord(
        episode_id=name, run_id="demo", attempt=1, task_id=task, environment="writing", family="", seed=1,
        reward=reward, messages=messages, turns=turns, **fields | keys,
    )  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return RunDir.create(tmp_path / "runs", "demo", run_id="demo")


def recorded(run, *records):
    store = EpisodeStore(run.episodes)
    for each in records:
        store.append(each, [])
    store.close()


def rescore(run, *, resume=None, changed_tasks=False, **keys):
    """Rescore and return the rows by episode."""
    own = resume or RunDir.create(run.path.parent, "rescore")
    attempt = own.claim()
    results = Results(own.path / RESULTS, run)
    ran = []

    async def work():
        parts = Parts(RECIPE, FakePlugins(), attempt.path, own.run_id, attempt.number)
        choice = choose(run, purposes=("train", "eval"), **keys)
        todo = [each for each in choice.episode_ids if each not in results.kept]
        async with Rescorer(run, parts, attempt, changed_tasks=changed_tasks) as rescorer:
            await rescorer.run(todo, 3, lambda row: (ran.append(row.episode_id), results.add(row)))

    try:
        asyncio.run(work())
    finally:
        results.close()
        attempt.finish("succeeded")
    return own, results.kept, ran


RIGHT = phase("echo 7 > answer.txt; echo ok", "ok", "DONE")


def test_the_recorded_commands_are_run_again_and_judged(run):
    recorded(
        run,
        record("right", RIGHT, 1.0),
        record("wrong", phase("echo 8 > answer.txt", "", "DONE"), 0.0, purpose="eval"),
        record("lucky", phase("echo 8 > answer.txt", "", "DONE"), 1.0),
    )
    own, rows, _ = rescore(run)
    assert {name: (row.old, row.new) for name, row in rows.items()} == {
        "right": (1.0, 1.0), "wrong": (0.0, 0.0), "lucky": (1.0, 0.0),
    }  # fmt: skip
    assert counts(list(rows.values())) == {"same": 2, "up": 0, "down": 1, "new": 0, "missing": 0}
    assert [rows[name].changed for name in ("right", "wrong", "lucky")] == [False, False, True]
    assert {row.observed for row in rows.values()} == {"same"}
    lines = [orjson.loads(line) for line in (own.path / RESULTS).read_bytes().splitlines()]
    assert {(line["schema"], line["run"]) for line in lines} == {(1, "demo")}


def test_what_the_agent_is_told_is_compared_with_the_record(run):
    recorded(
        run,
        record("numbers", phase("echo 7 > answer.txt; echo took 5 s", "took 31 s", "DONE"), 1.0),
        record("text", phase("echo 7 > answer.txt; echo yes", "no", "DONE"), 1.0),
    )
    _, rows, _ = rescore(run)
    assert (rows["numbers"].observed, rows["text"].observed) == ("numbers", "text")
    assert all(row.same for row in rows.values())


def test_each_phase_is_answered_from_its_own_part_of_the_record(run):
    first = phase("echo 8 > answer.txt", "", "DONE")
    recorded(run, record("both", [*first, *phase("echo 7 > answer.txt", "", "DONE")], 1.0, task="two"))
    _, rows, _ = rescore(run)
    assert (rows["both"].new, rows["both"].observed, rows["both"].why) == (1.0, "same", "")


def test_a_reply_that_was_cut_is_not_executed_and_other_turns_are(run):
    cut = phase("echo 8 > answer.txt", "", "echo 7 > answer.txt")
    recorded(run, record("cut", cut, 0.0, ended="length"), record("last", cut, 1.0, ended="max_turns"))
    _, rows, _ = rescore(run)
    assert rows["cut"].same
    assert rows["cut"].why == ""
    assert rows["last"].why == "agent: the record has no reply after 6 messages: the agent went another way"


def test_tasks_that_are_others_now_or_gone_are_named_and_not_scored(run, monkeypatch):
    recorded(run, record("kept", RIGHT, 1.0), record("gone", RIGHT, 1.0, task="lost"),
             record("ill", RIGHT, 1.0, task="broken", task_digest="b"))  # fmt: skip
    monkeypatch.setattr(Writing, "digests", {"one": "f" * 64})
    _, rows, _ = rescore(run)
    now = f"(recorded {digest_of('one')[:12]}, here ffffffffffff)"
    assert {name: row.why for name, row in rows.items()} == {
        "kept": f"task one is another now {now}",
        "gone": "environment writing has no task lost now",
        "ill": "task broken cannot run: a file is missing",
    }
    assert all(row.new is None and not row.same and not row.changed for row in rows.values())
    _, rows, _ = rescore(run, changed_tasks=True)
    assert rows["kept"].same


def test_a_resumed_rescoring_runs_only_what_has_no_verdict(run, monkeypatch):
    recorded(run, record("right", RIGHT, 1.0), record("gone", RIGHT, 1.0, task="lost"))
    own, _, ran = rescore(run)
    assert sorted(ran) == ["gone", "right"]
    _, rows, ran = rescore(run, resume=own)
    assert ran == ["gone"]
    assert sorted(rows) == ["gone", "right"]
    other = RunDir.create(run.path.parent, "other", run_id="other")
    with pytest.raises(UsageError, match="has rows of run demo, not of other"):
        Results(own.path / RESULTS, other)


def test_only_episodes_whose_verifier_ran_or_failed_are_chosen(run):
    failed = Outcome("infra_error", boundary="verifier", cause="no reward file")
    recorded(
        run,
        record("scored", RIGHT, 1.0),
        record("unjudged", RIGHT, None, outcome=failed, ended="infra"),
        record("lost", [], None, outcome=Outcome("infra_error", boundary="sandbox", cause="gone")),
        record("zeroed", RIGHT, None, outcome=Outcome("truncated", 0.0)),
        record("held-out", RIGHT, 1.0, purpose="eval"),
    )
    choice = choose(run, purposes=("train", "eval"))
    assert (choice.episode_ids, choice.unverified) == (["scored", "unjudged", "held-out"], 2)
    assert choose(run, purposes=("eval",)).episode_ids == ["held-out"]
    assert choose(run, purposes=("train",), groups={"g-scored"}).episode_ids == ["scored"]
    assert choose(run, purposes=("train",), episodes=["unjudged"]).episode_ids == ["unjudged"]
    _, rows, _ = rescore(run)
    assert counts(list(rows.values())) == {"same": 2, "up": 0, "down": 0, "new": 1, "missing": 0}


def test_a_limit_spreads_the_choice_over_the_run(run):
    recorded(run, *(record(f"e{number}", RIGHT, 1.0) for number in range(9)))
    assert choose(run, purposes=("train",), limit=3).episode_ids == ["e0", "e3", "e6"]
    assert len(choose(run, purposes=("train",), limit=100).episode_ids) == 9


def test_an_unknown_episode_and_an_empty_choice_are_refused(run):
    recorded(run, record("right", RIGHT, 1.0))
    with pytest.raises(UsageError, match="run demo has no episode wrong"):
        choose(run, purposes=("train",), episodes=["wrong"])
    with pytest.raises(UsageError, match="no such episode whose verifier ran"):
        choose(run, purposes=("eval",))


def test_every_sandbox_is_given_back(run):
    recorded(run, record("right", RIGHT, 1.0))
    own, _, _ = rescore(run)
    text = (own.path / "attempts/1/journal.jsonl").read_text()
    assert text.count('"event":"lease"') == 1
    assert '"event":"lease_ended"' in text or '"event":"lease_released"' in text


PLUGIN = """
from rollhook import Component, Config, hookimpl

@hookimpl
def rollhook_environments():
    return [Component("writing", Config, "test_rescore:Writing", "for tests")]

@hookimpl
def rollhook_agents():
    return [Component("typist", Config, "test_rescore:Typist", "for tests")]

@hookimpl
def rollhook_sandboxes():
    return [Component("fake", Config, "test_rescore:Boxes", "for tests")]
"""


@pytest.fixture
def verb(site, run, monkeypatch):
    """`rollhook rescore demo` with the components of this module installed; returns its exit code."""
    names = dict.fromkeys(("environment.writing", "agent.typist", "sandbox.fake"), "rescore_plugin")
    modules = {"rescore_plugin": PLUGIN}
    write_distribution(site, "rollhook-fake", entry_points=names, modules=modules, requires=["rollhook>=0.1"])
    run.lock_path.write_text(yaml.safe_dump({"lock": 1, "recipe": RECIPE.model_dump(mode="json")}))

    def call(*words):
        with pytest.raises(SystemExit) as ended:
            main(["rescore", "demo", "--root", str(run.path.parent), *words])
        return ended.value.code

    return call


def test_the_verb_lists_what_changed_and_fails_for_it(run, verb, capsys):
    lucky = record("lucky", phase("echo 8 > answer.txt", "", "DONE"), 1.0)
    recorded(run, record("right", RIGHT, 1.0), lucky)
    assert verb("--run-id", "again", "--json") == 1
    said = capsys.readouterr()
    rows = [orjson.loads(line) for line in said.out.splitlines()]
    assert [(row["episode_id"], row["old"], row["new"]) for row in rows] == [
        ("right", 1.0, 1.0), ("lucky", 1.0, 0.0),
    ]  # fmt: skip
    assert "[1 -> 0] lucky of one" in said.err
    assert "1 of 2 verdicts are the recorded ones; 0 went up and 1 down" in said.err
    assert verb("--resume", "again") == 1
    assert "2 episodes were scored before and are not run again" in capsys.readouterr().err
    assert verb("--episode", "right") == 0
    assert verb("--resume", "again", "--run-id", "other") == 2
    run.claim().finish("succeeded")
    assert verb("--resume", "demo") == 1
    assert "demo is one of `rollhook run`, so `rollhook rescore` cannot" in capsys.readouterr().err
    assert len(run.attempts()) == 1


def test_the_verb_takes_the_episodes_of_steps(run, verb, capsys):
    recorded(run, record("right", RIGHT, 1.0), record("other", RIGHT, 1.0), record("lost", RIGHT, 0.0))
    attempt = run.claim()
    for step, trained in enumerate(("right", "lost")):
        group = {"group_id": f"g-{trained}", "episodes": [trained]}
        rejected = ["g-other"] if step == 0 else []
        attempt.journal.append("batch", step=step, version=1, groups=[group], rejected=rejected)
    attempt.finish("succeeded")
    assert verb("--steps", "1", "--json") == 0
    rows = [orjson.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["episode_id"] for row in rows] == ["right", "other"]
    assert verb("--steps", "3") == 2
    assert verb("--purpose", "oracle") == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_verb_in_order(run, verb, capsys, monkeypatch, number):
    """SIGTERM too, which would else leave sandboxes."""
    recorded(run, record("right", RIGHT, 1.0), record("other", RIGHT, 1.0))
    before = signal.signal(signal.SIGTERM, lambda *_: None)

    async def verify(self, transcript):
        signal.raise_signal(number)
        await asyncio.Event().wait()

    try:
        with monkeypatch.context() as patch:
            patch.setattr("test_rescore.WritePhase.verify", verify)
            assert verb("--run-id", "again") == 3
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "Stopped; go on with --resume again" in capsys.readouterr().err
    again = RunDir(run.path.parent / "again")
    assert [attempt.status for attempt in again.attempts()] == ["stopped"]
    text = (again.path / "attempts/1/journal.jsonl").read_text()
    assert text.count('"event":"lease"') == text.count('"event":"lease_released"') > 0
    assert verb("--resume", "again") == 0


def session(messages, ended="done", **keys):
    clock = AgentClock(10.0, 1.0)
    return RecordedSession(
        record("e", messages, 1.0, ended=ended, **keys), turns=3, max_seq_len=99, clock=clock
    )


async def test_a_session_counts_turns_and_says_how_many_were_not_asked_for():
    made = session(RIGHT)
    assert (made.turns_left, made.tokens_left, made.unused) == (3, 99, 2)
    reply = await made.chat(RIGHT[:2])
    assert (reply.message, reply.finish_reason) == (RIGHT[2], "stop")
    assert (made.turns_left, made.unused, made.leaves()) == (2, 1, [])


async def test_a_recorded_timeout_ends_where_the_record_ends():
    made = session(RIGHT[:2], ended="agent_timeout", fired="turn")
    with pytest.raises(BudgetExceeded) as raised:
        await made.chat(RIGHT[:2])
    assert raised.value.node == "turn"


async def test_a_conversation_that_goes_another_way_is_an_error_of_the_agent():
    made = session(RIGHT)
    with pytest.raises(AgentError, match="no reply after 3 messages"):
        await made.chat([*RIGHT[:2], message("user", "and now?")])


async def test_each_turn_has_its_time_and_the_agents_own_is_over_when_it_is():
    made = session([*RIGHT[:3], RIGHT[3], RIGHT[4]])
    await made.chat(RIGHT[:2])
    made._clock.charge("command", 0.9)
    await made.chat(RIGHT[:4])
    assert made._clock.remaining == 1.0
    made._clock.charge("command", 9.1)
    with pytest.raises(BudgetExceeded):
        await made.chat(RIGHT)


def test_a_tool_call_is_recognised():
    call = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    made = session([*RIGHT[:2], {"role": "assistant", "content": None, "tool_calls": [call]}])
    assert asyncio.run(made.chat(RIGHT[:2])).finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [("took 5 s", "took 5 s", "same"), ("took 5.25 s", "took 31.5 s", "numbers"), ("a 1", "b 1", "text")],
)
def test_differences_are_of_three_degrees(one, other, found):
    assert compare([message("user", one)], [message("user", other)]) == found
