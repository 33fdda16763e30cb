"""The contract of engines: inherit `EngineContract`, give it a running worker, run pytest."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import get_args
from uuid import uuid4

import pytest

from rollhook.engine.base import (
    Engine,
    Generation,
    GenerationRequest,
    PauseMode,
    Placement,
    SamplingParams,
)
from rollhook.engine.client import EngineClient
from rollhook.engine.weights import update_workers
from rollhook.errors import EngineError
from rollhook.router import Worker
from rollhook.testing.contract import Contract
from rollhook.testing.placement import LocalPlacement

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8)
DRAWN = SamplingParams(temperature=1.0, max_new_tokens=24)
#: what the next weight directory is: a complete one for a version that was never used
NextWeights = Callable[[], tuple[int, Path]]


class EngineContract(Contract):
    """What every engine must do over its endpoints. A suite gives the fixtures.

    `engine` is one that is not started, `model_dir` what it starts with. `worker` belongs to a running
    engine; let it depend on a fixture of wider scope to share one among the cases. `next_weights` returns a
    version that was never used, and its directory. `prompts` are a few different ones, in ids of the model;
    the class's `long_reply` is a number of tokens that takes the engine a good fraction of a second. The
    model should not end its replies early.
    """

    long_reply = 300
    patience = 60.0

    @pytest.fixture
    def engine(self) -> Engine:
        """Return the engine under test, not started."""
        raise NotImplementedError("give the contract a fixture engine that returns an unstarted engine")

    @pytest.fixture
    def placement(self) -> Placement:
        """Return where it may start processes."""
        return LocalPlacement()

    @pytest.fixture
    def model_dir(self) -> Path:
        """Return the weights that it starts with."""
        raise NotImplementedError("give the contract a fixture model_dir")

    @pytest.fixture
    def worker(self) -> Worker:
        """Return the worker of a running engine."""
        raise NotImplementedError("give the contract a fixture worker")

    @pytest.fixture
    def next_weights(self) -> NextWeights:
        """Return a function that gives an unused version and a weight directory for it."""
        raise NotImplementedError("give the contract a fixture next_weights")

    @pytest.fixture
    def prompts(self) -> Sequence[Sequence[int]]:
        """Return a few prompts in ids of the model."""
        return [[5, 6, 7], [9, 8], [11, 12, 13, 14, 15], [7]]

    # -- life

    async def test_it_starts_healthy_and_is_gone_after_stop(
        self, engine: Engine, placement: Placement, model_dir: Path
    ) -> None:
        async with _client() as client:
            try:
                workers = await asyncio.wait_for(engine.start(placement, model_dir, 3), self.patience)
                assert workers
                for worker in workers:
                    assert await client.health(worker)
                    assert await client.weight_version(worker) == 3
            finally:
                await engine.stop()
            assert not any([await client.health(worker) for worker in workers])

    async def test_stop_is_safe_before_start_and_twice(self, engine: Engine) -> None:
        await engine.stop()
        await engine.stop()

    async def test_a_start_without_weights_fails_in_words(
        self, engine: Engine, placement: Placement, tmp_path: Path
    ) -> None:
        try:
            with pytest.raises(EngineError, match=r"\w"):
                await asyncio.wait_for(engine.start(placement, tmp_path / "absent", 1), self.patience)
        finally:
            await engine.stop()

    # -- generation

    async def test_each_token_has_an_id_and_a_logprob(
        self, worker: Worker, prompts: Sequence[Sequence[int]]
    ) -> None:
        generation = await _generate(worker, prompts[0], DRAWN)
        assert 0 < len(generation.token_ids) <= DRAWN.max_new_tokens
        assert len(generation.logprobs) == len(generation.token_ids)
        assert all(math.isfinite(p) and p <= 1e-6 for p in generation.logprobs)

    async def test_max_new_tokens_is_the_limit(
        self, worker: Worker, prompts: Sequence[Sequence[int]]
    ) -> None:
        for count in (1, 3):
            generation = await _generate(worker, prompts[0], replace(DRAWN, max_new_tokens=count))
            if generation.finish_reason == "length":
                assert len(generation.token_ids) == count
            assert len(generation.token_ids) <= count

    async def test_a_stop_token_ends_the_reply_and_is_part_of_it(
        self, worker: Worker, prompts: Sequence[Sequence[int]]
    ) -> None:
        free = await _generate(worker, prompts[0], GREEDY)
        stop = free.token_ids[-1]
        until = list(free.token_ids).index(stop) + 1
        stopped = await _generate(worker, prompts[0], replace(GREEDY, stop_token_ids=(stop,)))
        assert list(stopped.token_ids) == list(free.token_ids[:until])
        assert stopped.finish_reason == "stop"

    async def test_a_seed_decides_what_is_drawn(
        self, worker: Worker, prompts: Sequence[Sequence[int]]
    ) -> None:
        same = [await _generate(worker, prompts[0], replace(DRAWN, seed=7)) for _ in range(2)]
        assert same[0].token_ids == same[1].token_ids
        others = [await _generate(worker, prompts[0], replace(DRAWN, seed=seed)) for seed in range(20, 24)]
        assert any(other.token_ids != same[0].token_ids for other in others)

    async def test_greedy_is_the_same_every_time(
        self, worker: Worker, prompts: Sequence[Sequence[int]]
    ) -> None:
        first, second = [await _generate(worker, prompts[1], GREEDY) for _ in range(2)]
        assert first.token_ids == second.token_ids

    async def test_a_stream_gives_what_one_answer_gives(
        self, worker: Worker, prompts: Sequence[Sequence[int]]
    ) -> None:
        whole = await _generate(worker, prompts[1], GREEDY)
        streamed: list[int] = []
        async with _client() as client:
            request = GenerationRequest(f"contract-{uuid4().hex}", prompts[1], GREEDY)
            generation = await client.generate(worker, request, streamed.extend)
        assert streamed == list(generation.token_ids) == list(whole.token_ids)
        assert len(generation.logprobs) == len(streamed)
        assert (generation.finish_reason, generation.versions) == (whole.finish_reason, whole.versions)

    async def test_requests_at_once_get_what_they_get_alone(
        self, worker: Worker, prompts: Sequence[Sequence[int]]
    ) -> None:
        alone = [await _generate(worker, prompt, GREEDY) for prompt in prompts]
        together = await asyncio.gather(*(_generate(worker, prompt, GREEDY) for prompt in prompts))
        assert [g.token_ids for g in together] == [g.token_ids for g in alone]
        lengths = [1, 2, 5, 8]
        ends = await asyncio.gather(
            *(_generate(worker, prompts[0], replace(GREEDY, max_new_tokens=n)) for n in lengths)
        )
        assert [list(g.token_ids) for g in ends] == [list(alone[0].token_ids[:n]) for n in lengths]

    async def test_a_wrong_request_is_refused_and_the_engine_lives(
        self, worker: Worker, prompts: Sequence[Sequence[int]]
    ) -> None:
        with pytest.raises(EngineError) as caught:
            await _generate(worker, [], GREEDY)
        assert caught.value.kind == "user"
        await _generate(worker, prompts[0], GREEDY)

    # -- control

    async def test_an_abort_ends_one_request_and_no_other(
        self, worker: Worker, prompts: Sequence[Sequence[int]]
    ) -> None:
        async with _client() as client, self._long(client, worker, prompts) as (rid, long):
            other = asyncio.ensure_future(_generate(worker, prompts[1], GREEDY))
            await client.abort(worker, rid)
            aborted = await asyncio.wait_for(long, self.patience)
            assert aborted.finish_reason == "abort"
            assert len(aborted.token_ids) < self.long_reply
            assert (await asyncio.wait_for(other, self.patience)).finish_reason != "abort"

    async def test_aborting_what_is_not_there_is_no_error(self, worker: Worker) -> None:
        async with _client() as client:
            await client.abort(worker, "no-such-request")

    async def test_abort_all_ends_every_request(
        self, worker: Worker, prompts: Sequence[Sequence[int]]
    ) -> None:
        async with (
            _client() as client,
            self._long(client, worker, prompts) as (_, one),
            self._long(client, worker, prompts) as (_, two),
        ):
            await client.abort(worker)
            ends = await asyncio.wait_for(asyncio.gather(one, two), self.patience)
            assert [g.finish_reason for g in ends] == ["abort", "abort"]

    async def test_a_pause_in_place_freezes_and_continue_goes_on(
        self, worker: Worker, prompts: Sequence[Sequence[int]]
    ) -> None:
        async with _client() as client, self._paused(client, worker, "in_place"):
            waiting = asyncio.ensure_future(_generate(worker, prompts[0], GREEDY))
            done, _ = await asyncio.wait({waiting}, timeout=0.3)
            assert not done
            assert await client.health(worker)
            await client.continue_(worker)
            assert (await asyncio.wait_for(waiting, self.patience)).token_ids

    async def test_a_pause_by_abort_ends_what_runs(
        self, worker: Worker, prompts: Sequence[Sequence[int]]
    ) -> None:
        async with (
            _client() as client,
            self._long(client, worker, prompts) as (_, long),
            self._paused(client, worker, "abort"),
        ):
            assert (await asyncio.wait_for(long, self.patience)).finish_reason == "abort"

    async def test_a_request_that_was_retracted_is_answered_after_continue(
        self, worker: Worker, prompts: Sequence[Sequence[int]]
    ) -> None:
        async with _client() as client, self._long(client, worker, prompts) as (_, long):
            async with self._paused(client, worker, "retract"):
                assert not long.done()
            generation = await asyncio.wait_for(long, self.patience)
            assert generation.finish_reason != "abort"
            assert generation.token_ids

    # -- weights

    async def test_an_update_changes_the_version(
        self, worker: Worker, next_weights: NextWeights, prompts: Sequence[Sequence[int]]
    ) -> None:
        version, path = await asyncio.to_thread(next_weights)
        async with _client() as client:
            await client.update_weights_from_disk(worker, path, version)
            assert await client.weight_version(worker) == version
            generation = await _generate(worker, prompts[0], GREEDY)
            assert generation.weight_version == version

    async def test_an_update_from_nowhere_fails_and_the_old_weights_serve(
        self, worker: Worker, tmp_path: Path, prompts: Sequence[Sequence[int]]
    ) -> None:
        async with _client() as client:
            before = await client.weight_version(worker)
            with pytest.raises(EngineError):
                await client.update_weights_from_disk(worker, tmp_path / "absent", 10**6)
            assert await client.weight_version(worker) == before
            assert (await _generate(worker, prompts[0], GREEDY)).weight_version == before

    async def test_an_update_in_the_middle_of_a_reply_is_told_by_the_versions_of_its_tokens(
        self, worker: Worker, next_weights: NextWeights, prompts: Sequence[Sequence[int]]
    ) -> None:
        version, path = await asyncio.to_thread(next_weights)
        async with _client() as client:
            before = await client.weight_version(worker)
            async with self._long(client, worker, prompts) as (_, long):
                async with self._paused(client, worker, "in_place"):
                    assert not long.done()
                    await client.update_weights_from_disk(worker, path, version)
                generation = await asyncio.wait_for(long, self.patience)
        assert generation.weight_version == version
        if generation.versions is None:
            pytest.skip("this engine reports one version per reply; the gateway brackets it")
        assert list(generation.versions) == sorted(generation.versions)
        assert set(generation.versions) <= {before, version}
        assert generation.versions[-1] == version

    async def test_an_update_goes_through_in_every_mode_with_a_request_under_way(
        self, worker: Worker, next_weights: NextWeights, prompts: Sequence[Sequence[int]]
    ) -> None:
        for mode in get_args(PauseMode):
            version, path = await asyncio.to_thread(next_weights)
            async with _client() as client, self._long(client, worker, prompts) as (_, long):
                assert await update_workers(client, [worker], path, version, mode) == {}
                assert await client.weight_version(worker) == version
                if mode == "abort":
                    assert (await asyncio.wait_for(long, self.patience)).finish_reason == "abort"
            assert (await _generate(worker, prompts[0], GREEDY)).weight_version == version

    async def test_it_describes_itself(self, worker: Worker) -> None:
        async with _client() as client:
            info = await client.server_info(worker)
            assert info.dp_size >= 1
            assert Worker(worker.url) in info.workers(worker.url) or info.dp_size > 1

    async def test_the_cache_can_be_flushed_when_nothing_runs(
        self, worker: Worker, prompts: Sequence[Sequence[int]]
    ) -> None:
        async with _client() as client:
            async with self._long(client, worker, prompts):
                with pytest.raises(EngineError):
                    await client.flush(worker, tries=1)
            await client.flush(worker)

    async def test_a_cache_of_another_name_gives_the_same_reply(
        self, worker: Worker, prompts: Sequence[Sequence[int]]
    ) -> None:
        async with _client() as client:
            replies = []
            for key in (None, "weight-version:1", "weight-version:1", "weight-version:2"):
                request = GenerationRequest(f"contract-{uuid4().hex}", prompts[2], GREEDY, key)
                replies.append((await client.generate(worker, request)).token_ids)
        assert replies == [replies[0]] * 4

    async def test_it_says_whether_it_generates(self, worker: Worker) -> None:
        async with _client() as client:
            assert await client.health_generate(worker)
            async with self._paused(client, worker, "in_place"):
                assert not await client.health_generate(worker, timeout=1.0)

    # -- helpers

    @asynccontextmanager
    async def _long(
        self, client: EngineClient, worker: Worker, prompts: Sequence[Sequence[int]]
    ) -> AsyncIterator[tuple[str, asyncio.Future[Generation]]]:
        """Yield a long generation that is under way, and end it afterwards."""
        rid = f"contract-{uuid4().hex}"
        sampling = SamplingParams(temperature=1.0, max_new_tokens=self.long_reply, seed=1)
        task = asyncio.ensure_future(client.generate(worker, GenerationRequest(rid, prompts[0], sampling)))
        try:
            await asyncio.sleep(0.05)
            yield rid, task
        finally:
            if not task.done():
                with suppress(EngineError):
                    await client.abort(worker, rid)
            with suppress(EngineError, TimeoutError):
                await asyncio.wait_for(task, self.patience)

    @asynccontextmanager
    async def _paused(self, client: EngineClient, worker: Worker, mode: PauseMode) -> AsyncIterator[None]:
        await client.pause(worker, mode)
        try:
            yield
        finally:
            await client.continue_(worker)


@asynccontextmanager
async def _client() -> AsyncIterator[EngineClient]:
    client = EngineClient(generate_timeout=60.0, control_timeout=30.0, sleep=_soon)
    try:
        yield client
    finally:
        await client.aclose()


async def _soon(seconds: float) -> None:
    """Wait less long than a real client between its tries."""
    await asyncio.sleep(seconds / 20)


async def _generate(worker: Worker, ids: Sequence[int], sampling: SamplingParams) -> Generation:
    async with _client() as client:
        return await client.generate(worker, GenerationRequest(f"contract-{uuid4().hex}", ids, sampling))
