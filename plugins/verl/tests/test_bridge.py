"""The agent loop against stand-ins of verl's outputs and servers: tokens, rewards, what never trains."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from rollhook.episode_store import read_records
from rollhook.errors import RollhookError
from rollhook_verl import bridge
from rollhook_verl.bridge import data

SAMPLING = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


@pytest.fixture
async def verl(run: Path, servers: Any) -> AsyncIterator[Any]:
    """Samples as verl's agent loop worker makes them."""
    job = run / "attempts/1"
    await asyncio.to_thread(data.write_data, job / "job/recipe.lock.yaml", job / "data")
    rows = pq.read_table(job / "data/train.parquet").to_pylist()
    rollout = SimpleNamespace(prompt_length=512, response_length=2048)
    config = SimpleNamespace(config=SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)))

    async def sample(row: int = 0) -> Any:
        loop = bridge.RollhookAgentLoop(
            trainer_config=config, server_manager=servers, tokenizer=None, processor=None, tools=None
        )
        return await loop.run(dict(SAMPLING), uid="u1", session_id=0, raw_prompt=[], **rows[row])

    yield SimpleNamespace(sample=sample, rows=rows, rollout=rollout, run=run)
    await bridge.close()


async def test_what_is_trained_on_is_what_the_servers_emitted(verl: Any, servers: Any) -> None:
    servers.words = ["more of it", "right"]
    output = await verl.sample()
    first, second = servers.emitted
    generated = [token for token, kept in zip(output.response_ids, output.response_mask, strict=True) if kept]
    assert generated == [*first, *second]
    assert output.prompt_ids == servers.asked[0]["prompt_ids"]
    assert servers.asked[1]["prompt_ids"] == [*output.prompt_ids, *output.response_ids][: -len(second)]
    kept = [p for p, mask in zip(output.response_logprobs, output.response_mask, strict=True) if mask]
    assert kept == pytest.approx([-0.5 - n / 100 for each in (first, second) for n in range(len(each))])
    assert output.reward_score == 1.0
    assert output.extra_fields["reward_extra_info"] == {"outcome": "scored", "ended": "done"}


async def test_a_session_stays_on_one_server_and_samples_as_verl_does(verl: Any, servers: Any) -> None:
    servers.words = ["more", "right"]
    await verl.sample()
    assert len({asked["request_id"] for asked in servers.asked}) == 1
    assert servers.asked[0]["temperature"] == 0.7
    assert servers.asked[0]["max_new_tokens"] == 64


async def test_a_failed_episode_is_made_again(verl: Any, servers: Any) -> None:
    servers.words = ["break it", "right"]
    output = await verl.sample()
    assert output.reward_score == 1.0


async def test_an_infrastructure_failure_raises_so_that_its_group_is_replaced(
    verl: Any, servers: Any
) -> None:
    servers.words = ["break it"]
    with pytest.raises(RollhookError, match="does not train: the sandbox is gone"):
        await verl.sample()
    assert len(servers.asked) == 3
    await bridge.close()
    assert [record.outcome.kind for record in read_records(verl.run / "episodes")] == ["infra_error"] * 3


async def test_a_task_without_a_verdict_does_not_train(verl: Any, servers: Any) -> None:
    servers.words = ["2"]
    unjudged = next(
        n for n, row in enumerate(verl.rows) if row["extra_info"]["rollhook"]["task_id"] == "unjudged"
    )
    with pytest.raises(RollhookError, match="this task has no verifier"):
        await verl.sample(unjudged)


async def test_a_prompt_that_verl_would_cut_is_told(verl: Any, servers: Any) -> None:
    servers.words = ["right"]
    verl.rollout.prompt_length = 5
    with pytest.raises(RollhookError, match=r"more than trainer.prompt_tokens, 5"):
        await verl.sample()


async def test_tokens_without_log_probabilities_break_the_protocol(
    verl: Any, servers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = servers.generate

    async def without(*args: Any, **keys: Any) -> Any:
        found = await whole(*args, **keys)
        found.log_probs = None
        return found

    monkeypatch.setattr(servers, "generate", without)
    with pytest.raises(RollhookError, match="and 0 log-probabilities"):
        await verl.sample()


async def test_servers_that_are_down_are_asked_again_and_then_train_nothing(verl: Any, servers: Any) -> None:
    servers.words = ["down", "right"]
    assert (await verl.sample()).reward_score == 1.0


async def test_two_samples_at_once_share_one_attempt(verl: Any, servers: Any) -> None:
    servers.words = ["right"]
    outputs = await asyncio.gather(verl.sample(0), verl.sample(1))
    assert [output.reward_score for output in outputs] == [1.0, 1.0]
    await bridge.close()
    assert {record.attempt for record in read_records(verl.run / "episodes")} == {1}


def test_rows_name_the_loop_and_the_task(verl: Any) -> None:
    row = verl.rows[0]
    assert row["agent_name"] == "rollhook"
    assert row["extra_info"]["rollhook"]["environment"] == "sums"
    assert row["extra_info"]["rollhook"]["split"] == "train"
    assert all(row["extra_info"]["rollhook"]["task_id"] != "broken" for row in verl.rows)
