"""`engine.sglang` with the double of SGLang in real child processes: contract, deaths, ranks and nodes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from rollhook.cluster import Cluster
from rollhook.engine.base import Engine, Process
from rollhook.engine.client import EngineClient
from rollhook.engine.weights import update_workers
from rollhook.errors import EngineError, RollhookError
from rollhook.router import Worker
from rollhook.testing.engine import EngineContract, NextWeights
from rollhook.testing.placement import LocalPlacement
from rollhook.testing.policy import serving as policy_over
from rollhook_sglang import engine as watching
from rollhook_sglang import server as serving
from rollhook_sglang.engine import SGLangEngine

Build = Callable[..., SGLangEngine]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "WATCH_SECONDS", 0.02)
    monkeypatch.setattr(serving, "POLL_SECONDS", 0.02)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, build: Build, weights: Path) -> Iterator[Worker]:
    """One server for all cases."""
    loop = asyncio.new_event_loop()
    engine = build(tmp_path_factory.mktemp("engine"))
    try:
        (worker,) = loop.run_until_complete(engine.start(LocalPlacement(), weights, 1))
        yield worker
    finally:
        loop.run_until_complete(engine.stop())
        loop.close()


versions = count(2)


class TestSGLangEngine(EngineContract):
    """Everything up to the start of the process is real; the process speaks SGLang's protocol."""

    @pytest.fixture
    def engine(self, tmp_path: Path, build: Build) -> Engine:
        return build(tmp_path)

    @pytest.fixture
    def model_dir(self, weights: Path) -> Path:
        return weights

    @pytest.fixture
    def worker(self, running: Worker) -> Worker:
        return running

    @pytest.fixture
    def next_weights(self, tmp_path: Path) -> NextWeights:
        return lambda: (next(versions), tmp_path)


@contextlib.asynccontextmanager
async def started(engine: SGLangEngine, weights: Path, version: int = 1) -> AsyncIterator[list[Worker]]:
    try:
        yield [*await engine.start(LocalPlacement(), weights, version)]
    finally:
        await engine.stop()


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    client = EngineClient(control_timeout=10)
    yield client
    await client.aclose()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not (found := condition()) or (asyncio.iscoroutine(found) and not await found):
            await asyncio.sleep(0.02)


def pids(engine: SGLangEngine) -> list[int]:
    return [process._process.pid for server in engine.servers for process in server._processes]  # type: ignore[attr-defined]


async def test_servers_have_logs_and_seeds_of_their_own(tmp_path: Path, build: Build, weights: Path) -> None:
    engine = build(tmp_path, engines=2)
    async with started(engine, weights) as workers:
        assert len({worker.url for worker in workers}) == 2
    texts = [(tmp_path / f"sglang-{index}.log").read_text() for index in (0, 1)]
    assert [re.findall(r"--random-seed (\d+)", text) for text in texts] == [["7"], ["8"]]


def test_of_a_long_log_only_the_end_is_read(tmp_path: Path) -> None:
    log = tmp_path / "sglang-0.log"
    with log.open("wb") as file:
        file.truncate(64 << 20)
        file.seek(0, os.SEEK_END)
        file.write(b"\nthe end")
    tracemalloc.start()
    try:
        assert serving._said([(log, 0)]).endswith("the end")
        assert serving._said([(log, log.stat().st_size - 3)]) == "end"
        assert serving._said([(log, 1 << 40), (tmp_path / "absent", 0)]) == "nothing"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("release", ["0.5.7", "0.5.16", "0.5.23"])
async def test_the_ranks_of_a_server_are_those_that_were_asked_for(
    tmp_path: Path, build: Build, weights: Path, client: EngineClient, release: str
) -> None:
    engine = build(tmp_path, release, tp_size=4, dp_size=4, dp_attention=True)
    async with started(engine, weights) as (worker,):
        info = await client.server_info(worker)
        assert (info.version, info.dp_size, info.dp_attention) == (release, 4, True)
        assert engine.servers[0].info == info
        assert engine.describe() == {"SGLang": release, "servers": "1", "ranks each": "4"}


async def test_a_server_that_dies_while_starting_says_why(
    tmp_path: Path, build: Build, weights: Path
) -> None:
    engine = build(tmp_path, double="dies")
    with pytest.raises(EngineError, match=r"sglang-0 .*ended while starting; .*Not enough memory"):
        await engine.start(LocalPlacement(), weights, 1)


async def test_one_server_that_does_not_come_up_ends_the_start_of_all(
    tmp_path: Path, build: Build, weights: Path
) -> None:
    class OneDies(LocalPlacement):
        async def start_process(self, name: str, argv: Any, *, env: Any, **keys: Any) -> Process:
            how = {"DOUBLE": "dies" if name.startswith("sglang-1") else "hangs"}
            return await super().start_process(name, argv, env=env | how, **keys)

    engine = build(tmp_path, engines=2)
    with pytest.raises(EngineError, match=r"sglang-1 .*Not enough memory"):
        await engine.start(OneDies(), weights, 1)
    assert not any([await server.alive() for server in engine.servers])


async def test_a_server_that_is_silent_says_so_with_its_log(
    tmp_path: Path, build: Build, weights: Path
) -> None:
    engine = build(tmp_path, double="hangs", start_timeout=3)
    with pytest.raises(EngineError, match=r"did not generate within 3 s .*server_args="):
        await engine.start(LocalPlacement(), weights, 1)
    assert not await engine.servers[0].alive()


async def test_a_cluster_without_room_is_told_in_time(tmp_path: Path, build: Build, weights: Path) -> None:
    class Full(LocalPlacement):
        async def start_process(self, *args: Any, **keys: Any) -> Process:
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

    engine = build(tmp_path, tp_size=8, gpus=None, nnodes=2, host="node", start_timeout=0.1)
    with pytest.raises(EngineError, match=r"no 4 free GPUs on each of 2 nodes within 0\.1 s"):
        await engine.start(Full(), weights, 1)


async def test_an_option_that_the_release_lacks_stops_the_start(
    tmp_path: Path, build: Build, weights: Path
) -> None:
    engine = build(tmp_path, extra_args=["--no-such-option"])
    with pytest.raises(EngineError, match="unrecognized arguments: --no-such-option"):
        await engine.start(LocalPlacement(), weights, 1)


async def test_a_port_that_was_taken_meanwhile_is_no_failure(
    tmp_path: Path, build: Build, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "GENERATE_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]

        class Late(LocalPlacement):
            ports = [taken]

            def free_port(self) -> int:
                return self.ports.pop() if self.ports else super().free_port()

        engine = build(tmp_path)
        try:
            (worker,) = await engine.start(Late(), weights, 1)
            assert not worker.url.endswith(f":{taken}")
        finally:
            await engine.stop()


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"python": "/no/such/python"}, "/no/such/python has no SGLang"),
        ({"version": "0.4.6"}, "SGLang 0.4.6 is not supported"),
    ],
)
async def test_without_a_release_that_is_supported_nothing_starts(
    tmp_path: Path, build: Build, weights: Path, keys: dict[str, str], told: str
) -> None:
    engine = build(tmp_path, **keys)
    with pytest.raises(EngineError, match=told) as caught:
        await engine.start(LocalPlacement(), weights, 1)
    assert caught.value.kind == "user"
    await engine.stop()


async def test_a_dead_server_is_started_anew_with_the_newest_weights(
    tmp_path: Path, build: Build, weights: Path, client: EngineClient, caplog: pytest.LogCaptureFixture
) -> None:
    engine = build(tmp_path, engines=2, restart_seconds=0.05)
    async with started(engine, weights) as workers:
        newer = tmp_path / "v2"
        newer.mkdir()
        engine.published(newer, 2)
        assert await update_workers(client, workers, newer, 2) == {}
        victim = pids(engine)[0]
        os.kill(victim, signal.SIGKILL)
        await until(lambda: engine.servers[0].restarts == 1 and client.health(workers[0]))
        assert await client.weight_version(workers[0]) == 2
        assert await client.health_generate(workers[0])
        assert victim not in pids(engine)
        assert engine.servers[1].restarts == 0
    assert f"{workers[0].url} died and is started anew in 0.05 s" in caplog.text
    assert f"--model-path {newer} " in (tmp_path / "sglang-0.log").read_text()


async def test_weights_that_were_published_during_a_restart_are_sent_before_it_counts_as_done(
    tmp_path: Path, build: Build, weights: Path, client: EngineClient
) -> None:
    engine = build(tmp_path, restart_seconds=0.05)
    async with started(engine, weights) as (worker,):
        (server,) = engine.servers
        restart = server.restart

        async def overtaken(directory: Path, version: int) -> None:
            await restart(directory, version)
            engine.published(weights, 9)

        server.restart = overtaken  # type: ignore[method-assign]
        os.kill(pids(engine)[0], signal.SIGKILL)
        await until(lambda: server.restarts == 1)
        await until(lambda: client.health(worker))
        async with server.lock:
            assert await client.weight_version(worker) == 9


async def test_a_server_that_died_gets_requests_again_once_it_serves_the_weights_of_today(
    tmp_path: Path, build: Build, weights: Path, client: EngineClient
) -> None:
    engine = build(tmp_path, engines=2, restart_seconds=0.05)
    newer = tmp_path / "v2"
    newer.mkdir()
    async with started(engine, weights) as workers, policy_over(directory=tmp_path) as policy:
        policy.set_workers(workers, 1)
        os.kill(pids(engine)[0], signal.SIGKILL)
        engine.published(newer, 2)
        failed = await policy.update_weights(newer, 2)
        assert set(failed) <= {workers[0]}
        assert len(policy.table.offered()) == 2 - len(failed)

        async def both_are_offered() -> bool:
            await policy.check_health()
            return len(policy.table.offered()) == 2

        await until(both_are_offered)
        assert [await client.weight_version(worker) for worker in workers] == [2, 2]


async def test_restarts_are_bounded_and_wait_longer_each_time(
    tmp_path: Path, build: Build, weights: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = build(tmp_path, restart_seconds=0.01, max_restarts=2)
    async with started(engine, weights):
        os.kill(pids(engine)[0], signal.SIGKILL)
        engine.published(tmp_path / "gone", 2)
        await until(engine._watchers[0].done)
    found = re.findall(r"started anew in ([\d.]+) s", caplog.text)
    assert found == ["0.01", "0.02"]
    assert "died and is left so after 2 restarts" in caplog.text
    assert "gone is not a local folder" in caplog.text


async def test_a_watch_goes_on_whatever_goes_wrong(
    tmp_path: Path, build: Build, weights: Path, caplog: pytest.LogCaptureFixture, client: EngineClient
) -> None:
    engine = build(tmp_path, restart_seconds=0.01)
    async with started(engine, weights) as (worker,):
        (server,) = engine.servers
        restart, alive, failures = server.restart, server.alive, ["restart", "alive"]

        async def broken(*args: Any) -> Any:
            if "restart" in failures:
                failures.remove("restart")
                raise OSError("the disk is gone")
            return await restart(*args)

        async def blind() -> bool:
            if "alive" in failures:
                failures.remove("alive")
                raise RuntimeError("the cluster does not answer")
            return await alive()

        server.restart, server.alive = broken, blind  # type: ignore[method-assign]
        await until(lambda: "alive" not in failures)
        os.kill(pids(engine)[0], signal.SIGKILL)
        await until(lambda: server.restarts == 2 and client.health(worker))
    assert "could not be looked at" in caplog.text
    assert "could not be started anew" in caplog.text
    assert "the disk is gone" in caplog.text


async def test_the_log_of_a_server_is_cut_when_it_is_large(
    tmp_path: Path, build: Build, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(tmp_path)
    async with started(engine, weights):
        log = tmp_path / "sglang-0.log"
        with log.open("a") as file:
            file.write("x" * 1000 + "the last line\n")
        monkeypatch.setattr(serving, "LOG_BYTES", 1000)
        await until((tmp_path / "sglang-0.log.1").exists)
        await until(lambda: log.stat().st_size == 0)
        assert (tmp_path / "sglang-0.log.1").read_text().endswith("the last line\n")
        os.kill(pids(engine)[0], signal.SIGKILL)
        await until(lambda: engine.servers[0].restarts == 1)
        assert engine.servers[0].last_words() == "nothing"


async def test_revive_starts_a_server_anew_unless_it_serves_already(
    tmp_path: Path, build: Build, weights: Path, client: EngineClient
) -> None:
    engine = build(tmp_path, max_restarts=0)
    async with started(engine, weights) as (worker,):
        before = pids(engine)
        assert await engine.revive(worker, weights, 1)
        assert pids(engine) == before
        os.kill(before[0], signal.SIGKILL)
        assert await engine.revive(worker, weights, 5)
        assert pids(engine) != before
        assert await client.weight_version(worker) == 5
        assert not await engine.revive(Worker("http://127.0.0.1:1"), weights, 5)


async def test_revive_never_goes_back_behind_weights_that_were_published_while_it_waited(
    tmp_path: Path, build: Build, weights: Path, client: EngineClient
) -> None:
    engine = build(tmp_path, max_restarts=0)
    async with started(engine, weights) as (worker,):
        before = pids(engine)
        async with engine.servers[0].lock:
            reviving = asyncio.ensure_future(engine.revive(worker, weights, 1))
            await asyncio.sleep(0)
            engine.published(weights, 2)
            assert await update_workers(client, [worker], weights, 2) == {}
        assert await reviving
        assert await client.weight_version(worker) == 2
        assert pids(engine) == before


async def test_a_server_across_nodes_has_a_process_and_a_log_for_each(
    tmp_path: Path, build: Build, weights: Path
) -> None:
    engine = build(tmp_path, nnodes=2, host="node", tp_size=2)
    async with started(engine, weights):
        assert len(pids(engine)) == 2
        await until((tmp_path / "sglang-0-node-1.log").read_text)
        os.kill(pids(engine)[1], signal.SIGKILL)
        await until(lambda: engine.servers[0].restarts == 1)
    texts = [(tmp_path / name).read_text() for name in ("sglang-0.log", "sglang-0-node-1.log")]
    assert "--nnodes 2 --node-rank 0 --dist-init-addr 127.0.0.1:" in texts[0]
    assert "--nnodes 2 --node-rank 1 --dist-init-addr 127.0.0.1:" in texts[1]
    assert "{host}" not in "".join(texts)
    (first,), (second,) = (set(re.findall(r"--dist-init-addr (\S+)", text)[:1]) for text in texts)
    assert first == second


@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_on_a_cluster_of_ray_servers_run_in_actors_and_are_started_anew(
    tmp_path: Path, build: Build, weights: Path, client: EngineClient
) -> None:
    pytest.importorskip("ray")
    cluster = await Cluster.start(tmp_path / "scratch", cpus=2)
    engine = build(tmp_path, host="node", restart_seconds=0.05)
    try:
        with pytest.raises(RollhookError, match=r"sglang-0-0 needs 4096 GPUs, and the cluster has \d"):
            await build(tmp_path, tp_size=4096, gpus=None).start(cluster.placement, weights, 4)
        (worker,) = await engine.start(cluster.placement, weights, 4)
        assert await client.weight_version(worker) == 4
        (process,) = engine.servers[0]._processes
        assert worker.url.startswith(f"http://{await process.host()}:")
        os.kill(await process.pid(), signal.SIGKILL)  # type: ignore[attr-defined]
        await until(lambda: engine.servers[0].restarts == 1 and client.health(worker))
        assert await client.weight_version(worker) == 4
    finally:
        await engine.stop()
        await cluster.stop()
    assert not await client.health(worker)
