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
from rollhook.engine.server_info import dp_rank_field
from rollhook.engine.server_info import release as numbers
from rollhook.errors import EngineError
from rollhook.router import Worker
from rollhook.testing.fake_stream import EventStream

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
    rank: int = 0
    tokens: int = 0
    cached: int = 0
    aborted: bool = False
    admitted: bool = False


class FakeEngine:
    """Serves on a port of its own while it is entered; tests steer it through its attributes.

    `latency` seconds pass before each reply, `token_seconds` before each token. `hold(after)` stops every
    generation before token `after` until `release()`. Beyond `slots` requests the next ones queue.
    `fail(path, status, times)` scripts failures; `healthy` is what `/health` says; `queue_seconds` is
    reported, not waited. `requests` and `control` log what came in. With `prefix_cache` replies tell how many
    tokens of the prompt were in the cache of its `extra_key`, which a flush empties.

    What differs over the releases of SGLang is steered by `sglang`, a release: paths, the field of the rank,
    the form of `weight_versions`, and whether a paused engine flushes while requests are queued. The default,
    empty, is that of no release: every path, and one version per token (`exact_versions`).
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
        slots: int | None = None,
        prefix_cache: bool = False,
        sglang: str = "",
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.reply = reply or drawn(256)
        self.version = version
        self.latency = latency
        self.token_seconds = token_seconds
        self.queue_seconds = queue_seconds
        self.exact_versions = exact_versions
        self.dp_size = dp_size
        self.slots = slots
        self.sglang = sglang
        self._address = (host, port)
        self.model_path = ""
        self.healthy = True
        self.answers_aborts = True
        self.incremental = False
        self.mangle: Callable[[dict[str, Any]], Any] = lambda answer: answer
        self.requests: list[dict[str, Any]] = []
        self.control: list[tuple[str, Any]] = []
        self.peak = 0
        self.url = ""
        self._cache: dict[str | None, list[list[int]]] | None = {} if prefix_cache else None
        self._failures: dict[str, deque[tuple[int, Any]]] = defaultdict(deque)
        self._paused = ""
        self._running: dict[str, _Running] = {}
        self._hold: int | None = None
        self._cuts: deque[int] = deque()
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
        """Generations under way, queued ones among them."""
        return len(self._running)

    @property
    def queued(self) -> int:
        """Generations that wait for one of the slots, or were retracted."""
        return sum(not each.admitted for each in self._running.values())

    @property
    def paused(self) -> bool:
        """Whether it was told to pause and not to continue."""
        return bool(self._paused)

    def since(self, release: str) -> bool:
        """Return whether the double is of this release or a later one, or of none."""
        return not self.sglang or numbers(self.sglang) >= numbers(release)

    def fail(self, path: str, status: int = 500, times: int = 1, body: Any = None) -> None:
        """Let the next calls of a path fail; status 0 drops the connection, 200 answers `body`."""
        self._failures[path].extend([(status, body)] * times)

    def cut(self, *after: int) -> None:
        """Drop the connections of the next streams after so many tokens, one stream each."""
        self._cuts.extend(after)

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
                web.get("/health_generate", self._health_generate),
                web.get("/server_info", self._server_info),
                web.get("/get_server_info", self._server_info),
                web.get("/model_info", self._weight_version),
                web.get("/metrics", self._metrics),
                *self._older_paths(),
                web.post("/{control:[a-z_]+}", self._control),
            ]
        )
        self._runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, *self._address)
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
        rank = body.get(dp_rank_field(self.sglang))
        if rank is not None and not 0 <= rank < self.dp_size:
            return web.json_response({"error": {"message": f"no data-parallel rank {rank}"}}, status=400)
        running = _Running(str(body.get("rid")), rank or 0, len(body["input_ids"]))
        running.cached = self._in_cache(body)
        self._running[running.rid] = running
        self.peak = max(self.peak, len(self._running))
        await self._notify()
        try:
            if self.latency:
                await asyncio.sleep(self.latency)
            cut = self._cuts.popleft() if self._cuts and body.get("stream") else None
            stream = EventStream(request, self.incremental, cut) if body.get("stream") else None
            answer = await self._answer(body, running, stream)
        finally:
            del self._running[running.rid]
            await asyncio.shield(self._notify())
        if stream is not None:
            return await stream.end(self.mangle(answer))
        return web.json_response(self.mangle(answer))

    async def _answer(
        self, body: Mapping[str, Any], running: _Running, stream: EventStream | None
    ) -> dict[str, Any]:
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
            if len(ids) >= params["max_new_tokens"]:
                break
            if len(ids) == len(wanted):
                reason = {"type": "stop"}
                break
            ids.append(int(wanted[len(ids)]))
            running.tokens += 1
            versions.append(self.version)
            if stream is not None:
                await stream.send(self._so_far(running, prompt, ids, versions, None))
            if ids[-1] in stops:
                reason = {"type": "stop", "matched": ids[-1]}
                break
        if self._cache is not None:
            self._cache.setdefault(body.get("extra_key"), []).append(prompt + ids)
        return self._so_far(running, prompt, ids, versions, reason)

    def _in_cache(self, body: Mapping[str, Any]) -> int:
        """Return how many tokens of a prompt are in the cache; the last one is computed in any case."""
        known = (self._cache or {}).get(body.get("extra_key"), [])
        prompt = body["input_ids"][:-1]
        return max((_common(prompt, each) for each in known), default=0)

    def _so_far(
        self,
        running: _Running,
        prompt: list[int],
        ids: list[int],
        versions: list[int | str],
        reason: dict[str, Any] | None,
    ) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": running.rid,
            "finish_reason": reason,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
            "cached_tokens": running.cached,
            "weight_version": str(self.version),
            "output_token_logprobs": [[-(i + 1) / 128, token, None] for i, token in enumerate(ids)],
            "e2e_latency": self.latency,
        }
        if self.exact_versions and self.since("0.5.20"):
            meta["weight_versions"] = spans_of(versions) if self.sglang else versions
        if self.queue_seconds is not None:
            meta["queue_time"] = self.queue_seconds
        return {"text": "", "output_ids": list(ids), "meta_info": meta}

    async def _may_go_on(self, running: _Running, produced: int) -> None:
        def free() -> bool:
            if running.aborted:
                return True
            if not self._paused and not running.admitted:
                busy = sum(each.admitted for each in self._running.values())
                running.admitted = self.slots is None or busy < self.slots
            held = self._hold is not None and produced >= self._hold
            return running.admitted and not held and not self._paused

        if not free():
            await self.until(free)

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return self._failure(request) or web.Response(status=200 if self.healthy else 503)

    def _older_paths(self) -> list[web.RouteDef]:
        """Return the paths that come or go over the releases."""
        paths = [web.get("/v1/loads", self._loads)] if self.since("0.5.8") else []
        if not self.sglang or not self.since("0.5.23"):
            paths += [web.get("/get_load", self._load), web.get("/get_weight_version", self._weight_version)]
        return paths

    async def _health_generate(self, request: web.Request) -> web.StreamResponse:
        well = self.healthy and not self._paused
        return self._failure(request) or web.Response(status=200 if well else 503)

    async def _server_info(self, request: web.Request) -> web.StreamResponse:
        sizes = {"dp_size": self.dp_size, "enable_dp_attention": self.dp_size > 1, "tp_size": self.dp_size}
        if self.sglang and self.since("0.5.22"):
            sizes |= {"dp_size": 1, "attn_dp_size": self.dp_size}
        told = {"model_path": self.model_path, "version": self.sglang, "fake": True}
        return self._failure(request) or web.json_response({**sizes, **told})

    async def _weight_version(self, request: web.Request) -> web.StreamResponse:
        told = {"model_path": self.model_path, "weight_version": str(self.version)}
        return self._failure(request) or web.json_response(told)

    async def _loads(self, request: web.Request) -> web.StreamResponse:
        rows = [
            {
                "dp_rank": rank,
                "num_running_reqs": len(running) - waiting,
                "num_waiting_reqs": waiting,
                "num_used_tokens": sum(each.tokens for each in running),
            }
            for rank, running, waiting in self._by_rank()
        ]
        return self._failure(request) or web.json_response({"version": self.sglang, "loads": rows})

    async def _load(self, request: web.Request) -> web.StreamResponse:
        rows = [
            {
                "dp_rank": rank,
                "num_reqs": len(running),
                "num_waiting_reqs": waiting,
                "num_tokens": sum(each.tokens for each in running),
            }
            for rank, running, waiting in self._by_rank()
        ]
        return self._failure(request) or web.json_response(rows)

    def _by_rank(self) -> list[tuple[int, list[_Running], int]]:
        """Return, of each rank, its requests and how many of them are queued."""
        rows = []
        for rank in range(self.dp_size):
            of_rank = [each for each in self._running.values() if each.rank == rank]
            rows.append((rank, of_rank, sum(not each.admitted for each in of_rank)))
        return rows

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        gauges = {"num_running_reqs": self.running - self.queued, "num_queue_reqs": self.queued}
        text = "".join(f"# TYPE sglang:{key} gauge\nsglang:{key} {n}\n" for key, n in gauges.items())
        return self._failure(request) or web.Response(text=text)

    async def _control(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        name = request.match_info["control"]
        self.control.append((name, body))
        if (failure := self._failure(request)) is not None:
            return failure
        if name == "pause_generation":
            self._pause(body["mode"])
        elif name == "continue_generation":
            self._paused = ""
        elif name == "update_weights_from_disk":
            if not Path(body["model_path"]).is_dir():
                told = {"success": False, "message": f"no directory {body['model_path']}"}
                return web.json_response(told, status=400)
            self.version, self.model_path = int(body["weight_version"]), body["model_path"]
        elif name == "update_weight_version":
            self.version = int(body["new_version"])
        elif name == "abort_request":
            self._abort(body)
        elif name == "flush_cache":
            if not self._flushes():
                return web.Response(text="Flush cache failed.\n", status=400)
            if self._cache is not None:
                self._cache.clear()
        else:
            return web.json_response({"error": {"message": f"no endpoint {name}"}}, status=404)
        await self._notify()
        if name in ("flush_cache", "abort_request"):
            return web.Response(text="Cache flushed.\n" if name == "flush_cache" else "")
        return web.json_response({"success": True, "message": ""})

    def _flushes(self) -> bool:
        """Return whether the cache can be flushed: no request runs, and none is queued unless retracted."""
        live = [each for each in self._running.values() if not each.aborted]
        if self._paused and (self.since("0.5.21") or not self.since("0.5.10")):
            live = [each for each in live if each.admitted]
        return not live

    def _pause(self, mode: str) -> None:
        self._paused = mode
        for running in self._running.values():
            running.aborted |= mode == "abort"
            running.admitted &= mode != "retract"

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


def spans_of(versions: Sequence[int | str]) -> list[dict[str, Any]]:
    """Return versions of tokens as SGLang tells them from 0.5.20 on: a row per stretch of equal ones."""
    spans: list[dict[str, Any]] = []
    for index, version in enumerate(versions):
        if not spans or spans[-1]["version"] != str(version):
            spans.append({"version": str(version), "start": index})
        spans[-1]["end"] = index + 1
    return spans


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


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

    def describe(self) -> Mapping[str, str]:
        """Say that there is no model."""
        return {"servers": str(len(self.engines)), "model": "none"}

    async def stop(self) -> None:
        """Stop them."""
        engines, self.engines = self.engines, []
        for engine in engines:
            await engine.stop()
