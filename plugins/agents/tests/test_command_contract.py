"""The contract of agents, kept by the command agent with a program that asks once."""

import asyncio
import dataclasses
import logging
import sys
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from rollhook.component import BuildContext
from rollhook.testing.agent import PATIENCE, AgentContract, ScriptedSession, context
from rollhook_agents import CommandConfig
from rollhook_agents.command import Command

PROGRAM = """
import json, os, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": os.environ["ROLLHOOK_TASK"]}]}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})).read()
"""


class Endpoint:
    """A session over HTTP that says its script."""

    public_url = None
    token = "t"
    finish_reason = "stop"

    def __init__(self, url, session):
        self.url = url
        self.session = session

    @property
    def turns(self):
        return len(self.session.requests)

    async def attend(self, work):
        return await work


@asynccontextmanager
async def serving(session):
    async def chat(request):
        reply = await session.chat((await request.json())["messages"])
        return web.json_response({"choices": [{"message": reply.message, "finish_reason": "stop"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield Endpoint(f"http://127.0.0.1:{runner.addresses[0][1]}", session)
    finally:
        await runner.cleanup()


class TestCommand(AgentContract):
    @pytest.fixture
    def agent(self, tmp_path):
        made = BuildContext(logging.getLogger("t"), tmp_path, tmp_path)
        return Command(CommandConfig(argv=[sys.executable, "-c", PROGRAM], where="host"), made)

    async def _run(self, agent, session=None, sandbox=None, *, solved=None, **keys):
        session = session or ScriptedSession(self.script())
        async with serving(session) as endpoint:
            asked = dataclasses.replace(context(session, sandbox, **keys), endpoint=endpoint)
            return await asyncio.wait_for(agent.run(asked), PATIENCE)
