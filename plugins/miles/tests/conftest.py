"""A run of toy parts, and stand-ins for miles: its callback side and its session server."""

from __future__ import annotations

import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from rollhook.testing.distributions import write_distribution

TOYS = '''
from rollhook import Component, Config, hookimpl
from rollhook.agent import Agent, StopReason
from rollhook.errors import SandboxError
from rollhook.testing.fake_environment import SumsConfig


class Asks(Agent):
    """Asks once; the policy's word `break` breaks the machinery after the turn."""

    async def run(self, context):
        reply = await context.session.chat(context.observation.messages)
        if "break" in (reply.message.get("content") or ""):
            raise SandboxError("the sandbox is gone")
        return StopReason.LENGTH if reply.finish_reason == "length" else StopReason.DONE


@hookimpl
def rollhook_environments():
    return [Component("sums", SumsConfig, "rollhook.testing.fake_environment:Sums", "sums")]


@hookimpl
def rollhook_agents():
    return [Component("asks", Config, "toys_of_miles:Asks", "asks once")]
'''
RECIPE = """\
name: sums
model: {path: /models/m}
environment: {use: sums, split: train}
agent: asks
engine: {use: sglang}
rollout: {group_size: 2, batch_groups: 1, refill_limit: 2, drop_zero_variance: true, max_staleness: null}
trainer: {use: miles, model_type: m, ref_load: /models/r}
launcher: {use: slurm, nodes: 16, gpus_per_node: 4}
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of a run whose job has been delivered; the current one is its parent."""
    site, job = tmp_path / "site", tmp_path / "runs" / "sums-1" / "attempts" / "1"
    site.mkdir()
    points = {"environment.sums": "toys_of_miles", "agent.asks": "toys_of_miles"}
    write_distribution(site, "rollhook-toys", entry_points=points, modules={"toys_of_miles": TOYS})
    monkeypatch.syspath_prepend(site)
    monkeypatch.syspath_prepend(Path(__file__).parent / "stand_in")
    (job / "job").mkdir(parents=True)
    (job / "job" / "recipe.lock.yaml").write_text(RECIPE)
    monkeypatch.setenv("ROLLHOOK_JOB_DIR", str(job))
    monkeypatch.setenv("ROLLHOOK_JOB_FILES", str(job / "job"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield job.parent.parent
    for name in [name for name in sys.modules if name.split(".")[0] in ("miles", "toys_of_miles")]:
        del sys.modules[name]


@pytest.fixture
async def sessions() -> AsyncIterator[Any]:
    """A stand-in for miles' session server; `say(messages)` is its policy, `open` its sessions."""
    server = SimpleNamespace(say=lambda messages: "42", open={}, url="", seen=[])

    async def create(request: web.Request) -> web.Response:
        session = uuid.uuid4().hex
        server.open[session] = []
        return web.json_response({"session_id": session})

    async def chat(request: web.Request) -> web.Response:
        body = await request.json()
        server.seen.append(body)
        said = server.say(body["messages"])
        if isinstance(said, int):
            return web.Response(status=said, text="the policy is ill")
        server.open[request.match_info["session"]].append({"request": body, "response": said})
        message = {"role": "assistant", "content": said, "tool_calls": None}
        usage = {"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": usage})

    async def records(request: web.Request) -> web.Response:
        return web.json_response({"records": server.open[request.match_info["session"]]})

    async def delete(request: web.Request) -> web.Response:
        del server.open[request.match_info["session"]]
        return web.Response(status=204)

    app = web.Application()
    app.router.add_post("/sessions", create)
    app.router.add_post("/sessions/{session}/v1/chat/completions", chat)
    app.router.add_get("/sessions/{session}", records)
    app.router.add_delete("/sessions/{session}", delete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()
