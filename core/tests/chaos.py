"""Engines that go wrong on demand, and the rest of a run among them; the plugin of its components, too.

Each engine is a fake one in a process of its own (`python chaos.py DIRECTORY PORT VERSION`), which can be
killed and frozen. What a server does wrong is in a file that is named by its process id, so that one that was
started anew is well. Its tokens follow from those before them, so that any sample can be checked.
"""

import asyncio
import json
import math
import os
import random
import sys
import time
import zlib
from pathlib import Path

import driving
from aiohttp import web

from rollhook import Component, Config, hookimpl
from rollhook.agent import Agent, StopReason
from rollhook.engine.base import Engine
from rollhook.engine.client import EngineClient
from rollhook.errors import EngineError
from rollhook.installed import EntryInfo
from rollhook.messages import message
from rollhook.plugins import Plugins
from rollhook.router import Worker
from rollhook.testing.fake_engine import FakeEngine

COMPONENTS = {
    "engine.chaos": "chaos:ChaosEngines",
    "agent.talks": "chaos:Talks",
    "trainer.paced": "chaos:PacedTrainer",
}
OTHERS = {
    "environment.rooms": "driving",
    "sandbox.shelf": "driving",
    "router.sticky": "rollhook_routing",
    "router.min_load": "rollhook_routing",
}
#: what a server may do wrong while it lives: answer 500 to generations or to all, be 100 times as slow,
#: answer in a wrong form, drop the connection, answer half, cut streams
FAULTS = ("error", "ill", "slow", "wrong", "reset", "half", "cut")
TOKEN_SECONDS = 0.01
#: ids of the toy tokenizer: the end of a reply, and the bytes
STOP, IDS = 2, range(3, 259)


def plugins():
    modules = {**dict.fromkeys(COMPONENTS, "chaos"), **OTHERS}
    found = Plugins(
        EntryInfo(*name.split("."), module=module, distribution="chaos", version="1")
        for name, module in modules.items()
    )
    found.add(tuple(name.split(".")) for name in modules)
    return found


# -- tokens


def next_token(ids):
    """Return the token that every engine generates after these; a sixth of them are STOP."""
    drawn = zlib.crc32(json.dumps([*map(int, ids)]).encode())
    return STOP if drawn % 6 == 0 else IDS[drawn // 6 % len(IDS)]


def reply(prompt, params):
    assert STOP in params["stop_token_ids"]
    ids = [*prompt, next_token(prompt)]
    while len(ids) < len(prompt) + params["max_new_tokens"] and ids[-1] != STOP:
        ids.append(next_token(ids))
    return ids[len(prompt) :]


# -- one server


def short(rows, meta, answer):
    rows.pop()


def long(rows, meta, answer):
    answer["output_ids"] += [IDS[0]] * 64
    rows += [[-0.5, IDS[0], None]] * 64
    meta["completion_tokens"] += 64
    meta.pop("weight_versions")


def apart(rows, meta, answer):
    answer["output_ids"].append(IDS[0])


def infinite(rows, meta, answer):
    rows[0] = [-math.inf, *rows[0][1:]]


def versionless(rows, meta, answer):
    meta["weight_versions"] = meta["weight_versions"][1:]


def without(rows, meta, answer):
    del meta["output_token_logprobs"]


WRONG = (short, long, apart, infinite, versionless, without)


class FaultyEngine(FakeEngine):
    """A fake engine that does what the file says, also in the middle of a reply."""

    def __init__(self, directory, port, version):
        super().__init__(reply, version=version, token_seconds=TOKEN_SECONDS, port=port)
        self._file = directory / f"{os.getpid()}.fault"
        self._draw = random.Random(port)
        self.mangle = self._mangle

    @property
    def fault(self):
        return self._file.read_text() if self._file.exists() else ""

    def _failure(self, request):
        fault, generates = self.fault, request.path == "/generate"
        self.token_seconds = TOKEN_SECONDS * (100 if fault == "slow" else 1)
        if fault == "ill" or (fault == "error" and generates):
            return web.json_response({"error": {"message": "chaos"}}, status=500)
        if fault == "reset" and generates:
            request.transport.abort()
            return web.Response()
        if fault == "half" and generates:
            head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 4096\r\n\r\n"
            request.transport.write(head + b'{"text": "')
            request.transport.close()
            return web.Response()
        if fault == "cut" and not self._cuts:
            self.cut(self._draw.randrange(4))
        return super()._failure(request)

    def _mangle(self, answer):
        if self.fault == "wrong" and answer["output_ids"]:
            self._draw.choice(WRONG)(
                answer["meta_info"]["output_token_logprobs"], answer["meta_info"], answer
            )
        return answer


async def serve(directory, port, version):
    async with FaultyEngine(directory, port, version):
        pid = directory / f"{port}.pid"
        pid.with_suffix(".new").write_text(str(os.getpid()))
        pid.with_suffix(".new").rename(pid)
        await asyncio.Event().wait()


# -- the components


class ChaosConfig(Config):
    count: int


class ChaosEngines(Engine):
    """So many servers; one that is dead is started anew when it is asked for."""

    def __init__(self, config, context):
        super().__init__(config, context)
        self._processes = {}
        self._client = EngineClient()

    async def start(self, placement, model_dir, weight_version):
        directory = self.context.scratch / "engines"
        directory.mkdir()
        for number in range(self.config.count):
            port = placement.free_port()
            words = [sys.executable, __file__, str(directory), str(port), str(weight_version)]
            name = f"chaos-{number}"
            self._processes[Worker(f"http://127.0.0.1:{port}")] = await placement.start_process(
                name, words, env={}, log=directory / f"{name}.log"
            )
        await asyncio.gather(*map(self._up, self._processes))
        return list(self._processes)

    async def stop(self):
        await asyncio.gather(*(process.stop() for process in self._processes.values()))
        await self._client.aclose()

    async def revive(self, worker, model_dir, weight_version):
        await self._processes[worker].restart()
        await self._up(worker)
        await self._client.update_weights_from_disk(worker, model_dir, weight_version)
        return True

    async def _up(self, worker):
        for _ in range(600):
            if await self._client.health(worker):
                return
            await asyncio.sleep(0.1)
        raise EngineError(f"{worker.url} does not come up")


class Talks(Agent):
    """Talks of itself for up to three turns, in every second episode of a group as a stream."""

    async def run(self, context):
        session, messages = context.session, [message("user", context.episode_id)]
        streams = {}
        if int(context.episode_id.rpartition("-e")[2][:2]) % 2:
            session = (
                session._session
            )  # agents in the process get whole replies, those over HTTP streams, too
            streams = {"on_delta": lambda delta: None}
        for _ in range(3):
            said = await session.chat(messages, **streams)
            if said.finish_reason == "length":
                return StopReason.LENGTH
            messages += [said.message, message("user", "Go on.")]
        return StopReason.DONE


class PacedConfig(Config):
    seconds: float


class PacedTrainer(driving.CountingTrainer):
    """Does no step before its time, `seconds` after the one before, so that a run lasts long enough."""

    _began = 0.0

    def step(self, groups, step):
        self._began = self._began or time.monotonic()
        time.sleep(max(0.0, self._began + (step + 1) * self.config.seconds - time.monotonic()))
        return super().step(groups, step)


def _component(kind, name, config=Config):
    return [Component(name, config, COMPONENTS[f"{kind}.{name}"], "for tests")]


@hookimpl
def rollhook_engines():
    return _component("engine", "chaos", ChaosConfig)


@hookimpl
def rollhook_agents():
    return _component("agent", "talks")


@hookimpl
def rollhook_trainers():
    return _component("trainer", "paced", PacedConfig)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
