"""An engine of SGLang's endpoints without a model: what it says is a function of the prompt's ids."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from aiohttp import web

from rollhook.component import BuildContext
from rollhook.engine.base import Engine, Placement
from rollhook.errors import EngineError
from rollhook.router import Worker

#: (prompt ids, sampling params) -> ids of the reply, the stop token included
ReplyFunction = Callable[[list[int], Mapping[str, Any]], Sequence[int]]


def scripted(*replies: Sequence[int]) -> ReplyFunction:
    """Return a reply function that gives these replies in turn and repeats the last."""
    left = deque(replies)
    return lambda ids, params: left.popleft() if len(left) > 1 else left[0]


def drawn(vocab_size: int, length: int = 8) -> ReplyFunction:
    """Return a reply function that draws ids, the same ones for the same prompt and `sampling_seed`."""

    def reply(ids: list[int], params: Mapping[str, Any]) -> Sequence[int]:
        greedy, seed = params.get("temperature") == 0, params.get("sampling_seed")
        key = f"{ids}" if greedy else f"{ids}/{seed}" if seed is not None else None
        draw = random.Random(key)
        return [draw.randrange(vocab_size) for _ in range(length)]

    return reply


@dataclass
class _Running:
    rid: str
    aborted: bool = False
    restart: bool = False


class FakeEngine:
    """Serves on 127.0.0.1 while it is entered; tests steer it through its attributes.

    `latency` seconds pass before each reply, `token_seconds` before each token. `hold(after)` stops every
    generation before token `after` until `release()`. `fail(path, status, times)` scripts failures;
    `healthy` is what `/health` says; `queue_seconds` is reported, not waited. `requests` and `control` log
    what came in.
    """

    def __init__(
        self,
        reply: ReplyFunction | None = None,
        *,
        version: int | str = 1,
        latency: float = 0.0,
        token_seconds: float = 0.0,
        queue_seconds: float | None = None,
        exact_versions: bool = True,
        dp_size: int = 1,
    ) -> None:
        self.reply = reply or drawn(256)
        self.version = version
        self.latency = latency
        self.token_seconds = token_seconds
        self.queue_seconds = queue_seconds
        self.exact_versions = exact_versions
        self.dp_size = dp_size
        self.healthy = True
        self.answers_aborts = True
        self.mangle: Callable[[dict[str, Any]], Any] = lambda answer: answer
        self.requests: list[dict[str, Any]] = []
        self.control: list[tuple[str, Any]] = []
        self.peak = 0
        self.url = ""
        self._failures: dict[str, deque[tuple[int, Any]]] = defaultdict(deque)
        self._paused = False
        self._running: dict[str, _Running] = {}
        self._hold: int | None = None
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None

    @property
    def worker(self) -> Worker:
        """The engine as a worker without ranks."""
        return Worker(self.url)

    @property
    def workers(self) -> list[Worker]:
        """The engine's workers, one per rank when it has several."""
        return (
            [self.worker] if self.dp_size == 1 else [Worker(self.url, rank) for rank in range(self.dp_size)]
        )

    @property
    def running(self) -> int:
        """Generations under way."""
        return len(self._running)

    def fail(self, path: str, status: int = 500, times: int = 1, body: Any = None) -> None:
        """Let the next calls of a path fail; status 0 drops the connection, 200 answers `body`."""
        self._failures[path].extend([(status, body)] * times)

    def hold(self, after: int = 0) -> None:
        """Stop generations before their token number `after`."""
        self._hold = after

    async def release(self) -> None:
        """Let them go on."""
        self._hold = None
        await self._notify()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once a condition on this engine holds; it is looked at when state changes."""
        async with self._changed:
            await self._changed.wait_for(condition)

    async def start(self) -> None:
        """Listen on a free port."""
        app = web.Application(client_max_size=256 << 20)
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.get("/health", self._health),
                web.get("/get_server_info", self._server_info),
                web.get("/get_weight_version", self._weight_version),
                web.get("/model_info", self._weight_version),
                web.post("/{control:[a-z_]+}", self._control),
            ]
        )
        self._runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = "http://{}:{}".format(*self._runner.addresses[0][:2])

    async def stop(self) -> None:
        """Stop listening and drop what runs; safe to call twice."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    # -- endpoints

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        if (failure := self._failure(request)) is not None:
            return failure
        if not body.get("input_ids"):
            return web.json_response({"error": {"message": "input_ids is empty"}}, status=400)
        running = _Running(str(body.get("rid")))
        self._running[running.rid] = running
        self.peak = max(self.peak, len(self._running))
        await self._notify()
        try:
            if self.latency:
                await asyncio.sleep(self.latency)
            answer = await self._answer(body, running)
        finally:
            del self._running[running.rid]
            await asyncio.shield(self._notify())
        return web.json_response(self.mangle(answer))

    async def _answer(self, body: Mapping[str, Any], running: _Running) -> dict[str, Any]:
        params = body["sampling_params"]
        prompt = list(body["input_ids"])
        stops = set(params.get("stop_token_ids") or ())
        wanted = list(self.reply(prompt, params))
        ids: list[int] = []
        versions: list[int | str] = []
        reason: dict[str, Any] = {"type": "length", "length": params["max_new_tokens"]}
        while True:
            if self.token_seconds:
                await asyncio.sleep(self.token_seconds)
            await self._may_go_on(running, len(ids))
            if running.aborted:
                reason = {"type": "abort", "message": "aborted"}
                break
            if running.restart:
                ids, versions, running.restart = [], [], False
                continue
            if len(ids) >= params["max_new_tokens"]:
                break
            if len(ids) == len(wanted):
                reason = {"type": "stop"}
                break
            ids.append(int(wanted[len(ids)]))
            versions.append(self.version)
            if ids[-1] in stops:
                reason = {"type": "stop", "matched": ids[-1]}
                break
        meta = {
            "id": running.rid,
            "finish_reason": reason,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": str(self.version),
            "output_token_logprobs": [[-(i + 1) / 128, token, None] for i, token in enumerate(ids)],
            "e2e_latency": self.latency,
        }
        if self.exact_versions:
            meta["weight_versions"] = versions
        if self.queue_seconds is not None:
            meta["queue_time"] = self.queue_seconds
        return {"text": "", "output_ids": ids, "meta_info": meta}

    async def _may_go_on(self, running: _Running, produced: int) -> None:
        def free() -> bool:
            held = self._hold is not None and produced >= self._hold
            return running.aborted or running.restart or not (held or self._paused)

        if not free():
            await self.until(free)

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return self._failure(request) or web.Response(status=200 if self.healthy else 503)

    async def _server_info(self, request: web.Request) -> web.StreamResponse:
        return self._failure(request) or web.json_response({"dp_size": self.dp_size, "fake": True})

    async def _weight_version(self, request: web.Request) -> web.StreamResponse:
        return self._failure(request) or web.json_response({"weight_version": str(self.version)})

    async def _control(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        name = request.match_info["control"]
        self.control.append((name, body))
        if (failure := self._failure(request)) is not None:
            return failure
        if name == "pause_generation":
            self._pause(body["mode"])
        elif name == "continue_generation":
            self._paused = False
        elif name == "update_weights_from_disk":
            if not Path(body["model_path"]).is_dir():
                return web.json_response({"success": False, "message": f"no directory {body['model_path']}"})
            self.version = int(body["weight_version"])
        elif name == "abort_request":
            self._abort(body)
        elif name != "flush_cache":
            return web.json_response({"error": {"message": f"no endpoint {name}"}}, status=404)
        await self._notify()
        return web.json_response({"success": True, "message": ""})

    def _pause(self, mode: str) -> None:
        self._paused = mode != "abort"
        for running in self._running.values():
            running.aborted |= mode == "abort"
            running.restart |= mode == "retract"

    def _abort(self, body: Mapping[str, Any]) -> None:
        if not self.answers_aborts:
            return
        for running in self._running.values():
            if body.get("abort_all") or running.rid == body.get("rid"):
                running.aborted = True

    def _failure(self, request: web.Request) -> web.StreamResponse | None:
        queue = self._failures[request.path]
        if not queue:
            return None
        status, body = queue.popleft()
        if status == 0:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return web.json_response(
            {"error": {"message": "scripted failure"}} if body is None else body, status=status
        )

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class FakeEngines(Engine):
    """Fake engines behind the engine interface; `config.reply` and `config.count` steer them."""

    def __init__(self, config: Any, context: BuildContext) -> None:
        super().__init__(config, context)
        self.engines: list[FakeEngine] = []

    def make(self, version: int) -> FakeEngine:
        """Return an engine that is not started; broken variants override this."""
        reply = getattr(self.config, "reply", None)
        return FakeEngine(reply, version=version, token_seconds=0.001, queue_seconds=0.0)

    async def start(self, placement: Placement, model_dir: Path, weight_version: int) -> Sequence[Worker]:
        """Start the engines; EngineError when there is no weight directory."""
        if not model_dir.is_dir():
            raise EngineError(f"there are no weights in {model_dir}")
        for _ in range(getattr(self.config, "count", 1)):
            engine = self.make(weight_version)
            await engine.start()
            self.engines.append(engine)
        return [worker for engine in self.engines for worker in engine.workers]

    async def stop(self) -> None:
        """Stop them."""
        engines, self.engines = self.engines, []
        for engine in engines:
            await engine.stop()
