"""The contract of engines: inherit `EngineContract`, give it a running worker, run pytest."""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from rollhook.engine.base import (
    Engine,
    Generation,
    GenerationRequest,
    PauseMode,
    Placement,
    Process,
    SamplingParams,
)
from rollhook.engine.client import EngineClient
from rollhook.errors import EngineError
from rollhook.router import Worker
from rollhook.testing.contract import Contract

LOOPBACK = "127.0.0.1"
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

    async def test_it_describes_itself(self, worker: Worker) -> None:
        async with _client() as client:
            info = await client.server_info(worker)
            assert info.dp_size >= 1
            assert Worker(worker.url) in info.workers(worker.url) or info.dp_size > 1

    async def test_the_cache_can_be_flushed_when_nothing_runs(self, worker: Worker) -> None:
        async with _client() as client:
            await client.flush(worker)

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


class LocalPlacement:
    """Starts processes as children of this one; for engines' tests without a cluster."""

    async def start_process(
        self, name: str, argv: Sequence[str], *, env: Mapping[str, str], log: Path, gpus: float = 0
    ) -> Process:
        """Start a program here."""
        process = LocalProcess(argv, env, log)
        await process.restart()
        return process

    def free_port(self) -> int:
        """Return a port that is free now."""
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            return int(probe.getsockname()[1])


class LocalProcess:
    """A child process whose output goes to a file."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self._argv, self._env, self._log = argv, env, log
        self._process: asyncio.subprocess.Process | None = None

    async def restart(self) -> None:
        """Kill it if it lives and start it anew."""
        await self.stop()
        with self._log.open("ab") as out:
            self._process = await asyncio.create_subprocess_exec(
                *(argument.replace("{host}", LOOPBACK) for argument in self._argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **self._env},
            )

    async def stop(self) -> None:
        """Terminate it, and kill it when that does not help."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 10)
        except TimeoutError:
            process.kill()
            await process.wait()

    async def alive(self) -> bool:
        """Return whether it runs."""
        return self._process is not None and self._process.returncode is None

    async def host(self) -> str:
        """Return the address of this machine, for itself."""
        return LOOPBACK


@asynccontextmanager
async def _client() -> AsyncIterator[EngineClient]:
    client = EngineClient(generate_timeout=60.0, control_timeout=30.0)
    try:
        yield client
    finally:
        await client.aclose()


async def _generate(worker: Worker, ids: Sequence[int], sampling: SamplingParams) -> Generation:
    async with _client() as client:
        return await client.generate(worker, GenerationRequest(f"contract-{uuid4().hex}", ids, sampling))
