"""The bridge against a stand-in of miles' callback side: generation, reward, filter and session server."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollhook import journal
from rollhook.episode_store import read_records
from rollhook.errors import RollhookError
from rollhook.rundir import RunDir
from rollhook_miles import bridge
from rollhook_miles.bridge import data

SAMPLING = {"temperature": 0.8, "top_p": 1.0, "max_new_tokens": 64}


@pytest.fixture
async def miles(run: Path, sessions: Any) -> AsyncIterator[Any]:
    """Groups as miles makes them: `group(n)` returns the samples and what the filter says of them."""
    from miles.rollout.generate_hub.agentic_tool_call import GenerateFnInput, Sample

    await asyncio.to_thread(data.write_data, run / "attempts/1/job/recipe.lock.yaml", run / "attempts/1/data")
    rows = [json.loads(line) for line in (run / "attempts/1/data/train.jsonl").read_text().splitlines()]
    args = SimpleNamespace(
        custom_agent_function_path="rollhook_miles.bridge.run", session_server=sessions.url, failures=[]
    )

    async def one(sample: Any, evaluation: bool) -> Any:
        asked = GenerateFnInput(args, sample, dict(SAMPLING), evaluation)
        made = (await bridge.generate(asked)).samples
        if made.status is not Sample.Status.ABORTED and made.reward is None:
            made.reward = await bridge.reward(args, made)
        return made

    async def group(size: int = 2, row: int = 0, evaluation: bool = False) -> tuple[list[Any], Any]:
        made = [Sample(n, 7, rows[row]["prompt"], dict(rows[row]["metadata"])) for n in range(size)]
        samples = await asyncio.gather(*(one(sample, evaluation) for sample in made))
        return samples, None if evaluation else bridge.keep_group(args, samples)

    yield SimpleNamespace(group=group, args=args, rows=rows, sessions=sessions, run=run)
    await bridge.close()


def answers(miles: Any, *words: Any) -> None:
    """Let the policy say these words, one per request, then the last for ever; `right`: the right one."""
    left = list(words)

    def say(messages: list[dict[str, Any]]) -> Any:
        word = left.pop(0) if len(left) > 1 else left[0]
        question = messages[-1]["content"].split()
        return str(int(question[2]) + int(question[4].rstrip("?"))) if word == "right" else word

    miles.sessions.say = say


async def test_a_group_has_the_rewards_of_its_episodes_and_trains(miles: Any) -> None:
    answers(miles, "right", "wrong")
    samples, verdict = await miles.group()
    assert sorted(sample.reward for sample in samples) == [0.0, 1.0]
    assert verdict.keep
    assert {sample.metadata["end_reason"] for sample in samples} == {"done"}
    assert samples[0].metadata["agent_metrics"]["turns"] == 1


async def test_a_failed_episode_is_made_again_within_its_group(miles: Any) -> None:
    answers(miles, "break it", "right", "wrong")
    samples, verdict = await miles.group()
    assert verdict.keep
    assert sorted(sample.reward for sample in samples) == [0.0, 1.0]
    await bridge.close()
    outcomes = [record.outcome.kind for record in read_records(miles.run / "episodes")]
    assert sorted(outcomes) == ["infra_error", "scored", "scored"]


async def test_an_infrastructure_failure_never_trains_though_its_turns_were_recorded(miles: Any) -> None:
    answers(miles, "break it")
    samples, verdict = await miles.group()
    assert [sample.turns for sample in samples if sample.turns] != []  # the trap: they would train as 0
    assert [sample.status.value for sample in samples] == ["aborted", "aborted"]
    assert [sample.reward for sample in samples] == [None, None]
    assert (verdict.keep, verdict.reason) == (False, "group_has_aborted")
    assert len(miles.sessions.seen) == 2 * 3  # refill_limit 2


async def test_a_policy_that_gives_no_answer_is_no_reward_of_zero(miles: Any) -> None:
    answers(miles, 500)
    samples, verdict = await miles.group()
    assert not verdict.keep
    assert [sample.reward for sample in samples] == [None, None]


async def test_equal_rewards_are_dropped_as_the_recipe_says(miles: Any) -> None:
    answers(miles, "right")
    _, verdict = await miles.group()
    assert (verdict.keep, verdict.reason) == (False, "zero_variance")


async def test_a_failed_evaluation_counts_as_zero_because_miles_cannot_leave_it_out(miles: Any) -> None:
    answers(miles, "break it")
    samples, _ = await miles.group(evaluation=True)
    assert [sample.reward for sample in samples] == [0.0, 0.0]
    await bridge.close()
    assert {record.purpose for record in read_records(miles.run / "episodes")} == {"eval"}


async def test_the_books_are_those_of_any_run(miles: Any) -> None:
    answers(miles, "right", "wrong")
    samples, _ = await miles.group()
    run = RunDir.find(miles.run)
    attempt = run.newest_attempt()
    assert attempt is not None
    assert attempt.surely_there()
    await bridge.close()
    ids = [sample.metadata["rollhook"]["episode_id"] for sample in samples]
    assert sorted(ids) == sorted(record.episode_id for record in read_records(run.episodes))
    kinds = [entry.event for entry in journal.read(attempt.journal_path)]
    assert kinds.count("episode_started") == kinds.count("episode_finished") == 2
    assert attempt.read_again().status == "succeeded"


async def test_a_data_set_of_other_tasks_is_told_and_trains_nothing(miles: Any) -> None:
    answers(miles, "right")
    miles.rows[0]["metadata"]["rollhook"]["digest"] = "old"
    _, verdict = await miles.group()
    assert not verdict.keep
    assert "is not the one that the data set was made of" in str(miles.args.failures[0])


async def test_what_is_asked_of_the_policy_is_what_miles_samples_with(miles: Any) -> None:
    answers(miles, "right")
    await miles.group(1)
    asked = miles.sessions.seen[0]
    assert asked["temperature"] == 0.8
    assert asked["max_tokens"] <= 8192
    assert "seed" not in asked or asked["seed"] is None


async def test_without_a_job_the_run_ends_with_a_sentence(
    miles: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROLLHOOK_JOB_DIR")
    with pytest.raises(RollhookError, match="ROLLHOOK_JOB_DIR is not set: run miles by `rollhook run`"):
        await miles.group()


async def test_a_recipe_that_cannot_run_ends_the_run(miles: Any) -> None:
    lock = miles.run / "attempts/1/job/recipe.lock.yaml"
    lock.write_text(lock.read_text().replace("agent: asks", "agent: nobody"))
    with pytest.raises(RollhookError, match="nobody"):
        await miles.group()


def test_miles_arguments_of_its_own_generation_are_kept(run: Path) -> None:
    parser = argparse.ArgumentParser()
    bridge.generate.add_arguments(parser)  # type: ignore[attr-defined]
    assert parser.parse_args(["--max-seq-len", "9"]).max_seq_len == 9
