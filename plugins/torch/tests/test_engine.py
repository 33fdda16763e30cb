"""`engine.transformers` against the contract of engines, with real server processes."""

import asyncio
import json
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from rollhook.component import BuildContext
from rollhook.engine.base import Engine
from rollhook.engine.client import EngineClient
from rollhook.errors import EngineError
from rollhook.router import Worker
from rollhook.testing.engine import EngineContract, NextWeights
from rollhook.testing.placement import LocalPlacement, LocalProcess
from rollhook_torch.config import EngineConfig
from rollhook_torch.engine import TransformersEngine


def build(scratch: Path, **keys: object) -> TransformersEngine:
    context = BuildContext(logging.getLogger("test"), scratch=scratch, cache=scratch)
    return TransformersEngine(EngineConfig(threads=1, device="cpu", **keys), context)


@pytest.fixture(scope="module")
def long_model(make_model: Callable[..., Path]) -> Path:
    """A model with room for long replies, and without a token that ends them."""
    directory = make_model(context_length=4096)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps({**settings, "eos_token_id": None}))
    return directory


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, long_model: Path) -> Iterator[Worker]:
    """One server for all cases."""
    loop = asyncio.new_event_loop()
    engine = build(tmp_path_factory.mktemp("engine"))
    try:
        (worker,) = loop.run_until_complete(engine.start(LocalPlacement(), long_model, 1))
        yield worker
    finally:
        loop.run_until_complete(engine.stop())
        loop.close()


@pytest.fixture(scope="module")
def versions() -> Iterator[int]:
    return count(2)


class TestTransformersEngine(EngineContract):
    long_reply = 1500

    @pytest.fixture
    def engine(self, tmp_path: Path) -> Engine:
        return build(tmp_path)

    @pytest.fixture
    def model_dir(self, long_model: Path) -> Path:
        return long_model

    @pytest.fixture
    def worker(self, running: Worker) -> Worker:
        return running

    @pytest.fixture
    def next_weights(self, versions: Iterator[int], make_model: Callable[..., Path]) -> NextWeights:
        def make() -> tuple[int, Path]:
            version = next(versions)
            return version, make_model(seed=version, context_length=4096)

        return make


async def test_processes_are_workers_and_a_dead_one_is_revived(tmp_path: Path, model_dir: Path) -> None:
    engine = build(tmp_path, processes=2)
    client = EngineClient()
    try:
        workers = await engine.start(LocalPlacement(), model_dir, 1)
        assert len(set(workers)) == 2
        process = engine._processes[workers[0]]
        assert isinstance(process, LocalProcess)
        assert process._process is not None
        os.kill(process._process.pid, signal.SIGKILL)
        await process._process.wait()
        assert not await client.health(workers[0])
        assert await engine.revive(workers[0], model_dir, 5)
        assert await client.health(workers[0])
        assert await client.weight_version(workers[0]) == 5
        assert await client.weight_version(workers[1]) == 1
        assert not await engine.revive(Worker("http://127.0.0.1:1"), model_dir, 5)
    finally:
        await client.aclose()
        await engine.stop()


class TakenPorts(LocalPlacement):
    """Gives a port that somebody listens on first."""

    def __init__(self, taken: int) -> None:
        self._ports = [taken]

    def free_port(self) -> int:
        return self._ports.pop() if self._ports else super().free_port()


async def test_a_port_that_was_taken_meanwhile_is_tried_elsewhere(tmp_path: Path, model_dir: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = listener.getsockname()[1]
        engine = build(tmp_path)
        try:
            (worker,) = await engine.start(TakenPorts(taken), model_dir, 1)
            assert not worker.url.endswith(f":{taken}")
        finally:
            await engine.stop()


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    engine = build(tmp_path)
    with pytest.raises(EngineError, match=r"ended while starting.*holds no causal LM"):
        await engine.start(LocalPlacement(), tmp_path, 1)
