"""What several rollout worker processes cost the routing: how even the engines' loads are, with 4 against 1.

The sessions of a trace (`router_trace.py`) run through rollout workers on a Ray of their own, `concurrency`
at once, the next when one ends. The engine is a process with 4 data-parallel ranks that answers after as
long as the reply would take. Every tenth of a second the open sessions of all workers are counted per rank:
imbalance is the greatest count over the mean, 1 at best. Stickiness is the share of turns after a session's
first that went to the rank of the turn before. The workers tell each other of their sessions every 0.2
seconds, in real time; `--speed` makes the sessions shorter beside that, which makes it harder for several.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import math
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from statistics import fmean

import measuring
import mock_engine
import orjson
import router_trace
from aiohttp import web

from rollhook import Component, Config, hookimpl
from rollhook.agent import Agent, AgentContext, StopReason
from rollhook.cluster import Cluster
from rollhook.engine.base import SamplingParams
from rollhook.environment import (
    Environment,
    Episode,
    EpisodeContext,
    Observation,
    Phase,
    Task,
    Transcript,
    Verdict,
)
from rollhook.installed import EntryInfo, installed
from rollhook.messages import message
from rollhook.plugins import Plugins
from rollhook.recipe.schema import Recipe
from rollhook.router import Worker
from rollhook.rundir import RunDir
from rollhook.runtime.episode import EpisodeRequest
from rollhook.runtime.live import Live
from rollhook.runtime.parts import Parts
from rollhook.runtime.rollout_workers import RolloutWorkers
from rollhook.testing.tokenizer import write_tokenizer

RANKS = 4
SECONDS_PER_TOKEN = 0.01
#: tokens that are really sent per reply: how long it takes is what matters here
TOKENS = 8
POLICIES = ("min_load", "power_of_two", "consistent_hash", "round_robin")
ME = "workers"


class Script(Agent):
    """Says what the trace says, and is busy with tools in between."""

    async def run(self, context: AgentContext) -> StopReason:
        messages = list(context.observation.messages)
        turns = json.loads(str(messages.pop()["content"]))
        for tool_seconds in turns:
            messages.append(message("user", "ok"))
            reply = await context.session.chat(messages)
            messages.append(reply.message)
            await asyncio.sleep(tool_seconds)
        return StopReason.DONE


class Traced(Environment):
    """Sessions of a trace; the payload of a task is the seconds of the tool after each turn."""

    verifies_apart = False

    def tasks(self, split: str | None = None) -> Sequence[Task]:
        return ()

    def episode(self, task: Task, ctx: EpisodeContext) -> Episode:
        return TracedEpisode(task.payload)


class TracedEpisode(Episode):
    def __init__(self, turns: object) -> None:
        self._turns = turns

    async def phases(self) -> AsyncIterator[Phase]:
        yield TracedPhase(self._turns)


class TracedPhase(Phase):
    def __init__(self, turns: object) -> None:
        words = [message("user", "Go on."), message("user", json.dumps(turns))]
        self.observation = Observation(words)

    async def verify(self, transcript: Transcript) -> Verdict:
        return Verdict(1.0)


@hookimpl
def rollhook_environments() -> list[Component]:
    return [Component("traced", Config, f"{ME}:Traced", "sessions of a trace")]


@hookimpl
def rollhook_agents() -> list[Component]:
    return [Component("script", Config, f"{ME}:Script", "says what the trace says")]


def serve(speed: float) -> None:
    """An engine with four ranks: answers take as long as replies as long as the trace's would, drawn anew."""
    shape, rng = router_trace.Shape(), random.Random(1)
    answer = orjson.dumps(
        {
            "text": "word",
            "output_ids": mock_engine.IDS[:TOKENS],
            "meta_info": {
                "id": "x",
                "finish_reason": {"type": "stop", "matched": None},
                "prompt_tokens": 1,
                "completion_tokens": TOKENS,
                "weight_version": "1",
                "output_token_logprobs": [[-0.5, token, None] for token in mock_engine.IDS[:TOKENS]],
            },
        }
    )

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        tokens = min(8192.0, rng.lognormvariate(math.log(shape.reply), shape.reply_sigma))
        await asyncio.sleep(tokens * SECONDS_PER_TOKEN / speed)
        return web.Response(body=answer, content_type="application/json")

    async def info(request: web.Request) -> web.Response:
        return web.json_response({"version": "0.5.9", "dp_size": RANKS, "weight_version": "1"})

    async def say(app: web.Application) -> None:
        print(f"http://127.0.0.1:{sock.getsockname()[1]}", flush=True)

    sock = socket.create_server(("127.0.0.1", 0), backlog=4096)
    app = web.Application(client_max_size=1 << 26)
    app.add_routes([web.post("/generate", generate), web.get("/{any:.*}", info)])
    app.on_startup.append(say)
    web.run_app(app, sock=sock, print=None, access_log=None)


@contextlib.contextmanager
def engine(speed: float) -> Iterator[str]:
    """Run one in a process of its own and yield its address."""
    argv = [sys.executable, __file__, "--part", "engine", "--speed", str(speed)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def parts_of(run: RunDir, policy: str, count: int) -> Parts:
    keys = {
        "name": "workers",
        "environment": [{"use": "traced"}],
        "agent": {"use": "script"},
        "router": {"use": policy},
        "rollout": {"workers": count, "max_concurrent": 4096},
        "budgets": {"max_seq_len": 1 << 20, "reply_tokens": 8192, "turns": 1000},
    }
    entries = [EntryInfo(kind, name, module=ME, distribution=ME, version="1")
               for kind, name in (("environment", "traced"), ("agent", "script"))]  # fmt: skip
    plugins = Plugins([*installed(), *entries])
    return Parts(Recipe.model_validate(keys), plugins, run.path, run.run_id, 1)


async def measure(
    cluster: Cluster, directory: Path, url: str, policy: str, count: int, options: argparse.Namespace
) -> dict[str, float]:
    """Run the sessions of the trace and return the figures of the routing."""
    run = RunDir.create(directory, "workers", run_id=f"{policy.replace('_', '-')}-{count}")
    attempt = run.claim()
    parts = parts_of(run, policy, count)
    model = directory / "model"
    write_tokenizer(model)
    (model / "config.json").write_text('{"max_position_embeddings": 1048576}')
    workers = RolloutWorkers(parts, attempt, cluster, ["traced"], None, Live(), lambda: None)
    ranks = [Worker(url, rank) for rank in range(RANKS)]
    try:
        workers.place()
        await workers.load(model)
        await workers.open_policy(ranks, 1, lambda worker: asyncio.sleep(0, False))
        found = await share_out(workers, options)
        await workers._pause(2)
        figures = workers.router_stats()
        return {**found, "stickiness": figures.get("router/stickiness", 1.0)}
    finally:
        await workers.aclose()
        attempt.finish("succeeded")


async def share_out(workers: RolloutWorkers, options: argparse.Namespace) -> dict[str, float]:
    """Keep `concurrency` sessions under way until the trace is used up; sample while it is."""
    trace = router_trace.read(router_trace.COMMITTED)
    sessions = list(trace.sessions)[: options.sessions]
    width = min(trace.concurrency, len(sessions))
    waiting, over = iter(sessions), asyncio.Event()
    imbalances: list[float] = []

    async def one(session: router_trace.Session) -> None:
        turns = [turn.tool_seconds / options.speed for turn in session.turns]
        task = Task(session.name, hashlib.sha256(session.name.encode()).hexdigest(), "train", payload=turns)
        request = EpisodeRequest(session.name, session.group, task, 1, SamplingParams())
        result = await workers.runners["traced"].run(request)
        assert result.record.outcome.kind == "scored", result.record.outcome

    async def slot() -> None:
        for session in waiting:
            await one(session)
        over.set()  # from now on fewer are under way

    async def sample() -> None:
        while not over.is_set():
            await asyncio.sleep(0.1)
            loads = [0] * RANKS
            for worker in workers._workers:
                for engine_worker, (open_sessions, _) in worker.loads.items():
                    loads[engine_worker.dp_rank or 0] += open_sessions
            if sum(loads) >= width / 2:
                imbalances.append(max(loads) / fmean(loads))

    began = time.monotonic()
    sampling = asyncio.ensure_future(sample())
    await asyncio.gather(*(slot() for _ in range(width)))
    await sampling
    ordered = sorted(imbalances) or [1.0]
    return {
        "imbalance": fmean(ordered),
        "p99": ordered[int(len(ordered) * 0.99)],
        "seconds": time.monotonic() - began,
    }


async def report(options: argparse.Namespace) -> None:
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    rows = []
    with tempfile.TemporaryDirectory() as name, engine(options.speed) as url:
        os.environ["XDG_STATE_HOME"] = f"{name}/state"
        cluster = await Cluster.start(Path(name) / "ray")
        try:
            for policy in options.policies:
                for count in options.workers:
                    found = await measure(cluster, Path(name) / "runs", url, policy, count, options)
                    values = [found[key] for key in ("imbalance", "p99", "stickiness", "seconds")]
                    rows.append([f"{policy}, {count} worker{'s' * (count > 1)}", *values])
        finally:
            await cluster.stop()
    title = f"{options.sessions} sessions over {RANKS} ranks, {options.speed:g} times as fast as they are"
    measuring.table(title, ["", "imbalance", "p99", "stickiness", "seconds"], rows)


def main() -> None:
    parser = measuring.arguments(__doc__ or "")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), help="default: %(default)s")
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 4], help="default: 1 4")
    parser.add_argument("--sessions", type=int, default=384, help="of the trace (default: all 384)")
    parser.add_argument(
        "--speed", type=float, default=2.0, help="how much faster than the trace (default: 2)"
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        serve(options.speed)
        return
    if options.quick:
        options.policies, options.workers, options.sessions, options.speed = ["min_load"], [1, 2], 12, 50.0
    asyncio.run(report(options))


if __name__ == "__main__":
    main()
