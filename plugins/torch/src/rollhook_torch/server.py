"""The engine's server process: SGLang's endpoints over one decode thread.

`python -m rollhook_torch.server --model DIR --port PORT`. Requests and answers follow SGLang's: token ids
in (`input_ids`), ids and log-probabilities out, the stop token included; with `stream`, server-sent events
of which each holds all so far. Beside `weight_version`, `meta_info.weight_versions` holds the version of
every token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from rollhook_torch import quiet
from rollhook_torch.generate_body import BadRequestError, answer, extra_key, parameters, prompt_ids

if TYPE_CHECKING:
    from rollhook_torch.decode import Decoder
    from rollhook_torch.request import Request

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PAUSE_MODES = ("abort", "retract", "in_place")
HEALTH_SECONDS = 20.0
MAX_BODY_BYTES = 64 * 1024 * 1024


class Server:
    """Handlers over a decoder."""

    def __init__(self, decoder: Decoder, arguments: Mapping[str, Any], eos: Sequence[int], vocab_size: int):
        self.decoder = decoder
        self.model_path = str(arguments["model"])
        self._arguments = dict(arguments)
        self._eos = frozenset(eos)
        self._vocab_size = vocab_size
        self._started = time.time()

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
        app.router.add_post("/generate", self.generate)
        for path, handler in {
            "/health": self.health,
            "/health_generate": self.health_generate,
            "/get_server_info": self.server_info,
            "/server_info": self.server_info,
            "/model_info": self.model_info,
            "/get_model_info": self.model_info,
            "/get_weight_version": self.weight_version,
            "/metrics": self.metrics,
            "/flush_cache": self.flush_cache,
        }.items():
            app.router.add_get(path, handler)
        for path, handler in {
            "/flush_cache": self.flush_cache,
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/update_weights_from_disk": self.update_weights,
            "/abort_request": self.abort,
        }.items():
            app.router.add_post(path, handler)
        return app

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Generate for one sequence; a caller that goes away ends its request."""
        body = await _body(request)
        changed = asyncio.Event()
        row = self._row(body, changed)
        self.decoder.submit(row)
        try:
            if body.get("stream"):
                return await self._stream(request, body, row, changed)
            while row.finish is None:
                await _next(changed)
        finally:
            if row.finish is None:
                self.decoder.abort(lambda other: other is row)
        if (failure := self._failure(row)) is not None:
            return _error(*failure)
        return _json(answer(row, body, self.decoder.version))

    async def _stream(
        self, request: web.Request, body: Mapping[str, Any], row: Request, changed: asyncio.Event
    ) -> web.StreamResponse:
        """Send what there is whenever there is more; an event of its own tells of a failure."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            finished = False
            while not finished:
                await _next(changed)
                finished = row.finish is not None
                event = answer(row, body, self.decoder.version, finished=finished)
                if (failure := self._failure(row)) is not None:
                    event, finished = {"error": {"message": failure[1]}}, True
                await response.write(b"data: " + _dumps(event).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        return response

    def _failure(self, row: Request) -> tuple[int, str] | None:
        """Return status and reason where what was generated is of no use."""
        if self.decoder.error is not None:
            return 503, f"the decode thread died: {self.decoder.error}"
        if not all(map(math.isfinite, row.logprobs)):
            return 500, f"the weights in {self.model_path} give probabilities that are no numbers"
        return None

    async def health(self, request: web.Request) -> web.Response:
        """Answer 200 while the decode thread lives."""
        if self.decoder.error is not None:
            return _error(503, f"the decode thread died: {self.decoder.error}")
        return web.Response()

    async def health_generate(self, request: web.Request) -> web.Response:
        """Answer 200 when one token could be generated."""
        if self.decoder.paused:
            return _error(503, "generation is paused")
        changed = asyncio.Event()
        row = self._row({"input_ids": [0], "sampling_params": {"max_new_tokens": 1}}, changed)
        self.decoder.submit(row)
        try:
            await asyncio.wait_for(changed.wait(), HEALTH_SECONDS)
        except TimeoutError:
            self.decoder.abort(lambda other: other is row)
            return _error(503, f"no token within {HEALTH_SECONDS:g} s")
        return web.Response()

    async def server_info(self, request: web.Request) -> web.Response:
        """Describe the server and its load."""
        counts = self.decoder.counts
        return _json(
            {
                **self._arguments,
                "model_path": self.model_path,
                "served_by": "rollhook engine.transformers",
                "dp_size": 1,
                "weight_version": self.decoder.version,
                "context_length": self.decoder.context_length,
                "vocab_size": self._vocab_size,
                "eos_token_ids": sorted(self._eos),
                "num_running_reqs": self.decoder.running,
                "num_waiting_reqs": self.decoder.waiting,
                "paused": self.decoder.paused,
                "generated_tokens": counts.generated_tokens,
                "busy_seconds": counts.busy_seconds,
                "uptime_seconds": time.time() - self._started,
            }
        )

    async def model_info(self, request: web.Request) -> web.Response:
        """Say which weights are served."""
        return _json(
            {
                "model_path": self.model_path,
                "tokenizer_path": self.model_path,
                "is_generation": True,
                "weight_version": self.decoder.version,
            }
        )

    async def weight_version(self, request: web.Request) -> web.Response:
        """Say which version of the weights is served."""
        return _json({"weight_version": self.decoder.version})

    async def pause(self, request: web.Request) -> web.Response:
        """Stop generating after the iteration under way."""
        mode = (await _body(request)).get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise BadRequestError(f"mode {mode!r} is none of {', '.join(PAUSE_MODES)}")
        await asyncio.wrap_future(self.decoder.pause(mode))
        return _json({"success": True, "message": f"paused, mode {mode}"})

    async def resume(self, request: web.Request) -> web.Response:
        """Go on generating."""
        await asyncio.wrap_future(self.decoder.resume())
        return _json({"success": True, "message": "generating"})

    async def update_weights(self, request: web.Request) -> web.Response:
        """Load weights between two iterations."""
        body = await _body(request)
        path, version = body.get("model_path"), body.get("weight_version")
        if not isinstance(path, str) or not path:
            raise BadRequestError("model_path is missing: the directory of the new weights")
        try:
            await asyncio.wrap_future(
                self.decoder.load(Path(path), None if version is None else str(version))
            )
        except Exception as error:  # noqa: BLE001 - SGLang's answer to a failed update
            return _json({"success": False, "message": str(error), "num_paused_requests": 0}, status=400)
        self.model_path = path
        return _json({"success": True, "message": "weights updated", "num_paused_requests": 0})

    async def flush_cache(self, request: web.Request) -> web.Response:
        """Drop the prefixes; refused while requests run or wait, as SGLang does."""
        if not await asyncio.wrap_future(self.decoder.flush()):
            return _error(400, "requests are running or waiting")
        return _json({"success": True, "message": "the prefixes are dropped"})

    async def abort(self, request: web.Request) -> web.Response:
        """End one request by id (or by the beginning of it, `prefix`), or all."""
        body = await _body(request)
        rid = body.get("rid")
        if body.get("abort_all"):
            match: Callable[[Request], bool] = lambda row: True  # noqa: E731
        elif not isinstance(rid, str) or not rid:
            raise BadRequestError("rid is missing, and abort_all is not set")
        elif body.get("prefix"):
            match = lambda row: row.rid.startswith(rid)  # noqa: E731
        else:
            match = lambda row: row.rid == rid  # noqa: E731
        count = await asyncio.wrap_future(self.decoder.abort(match))
        return _json({"success": True, "aborted": count})

    async def metrics(self, request: web.Request) -> web.Response:
        """A few gauges and counters under SGLang's names, in Prometheus' text format."""
        counts = self.decoder.counts
        values = {
            "sglang:num_running_reqs": self.decoder.running,
            "sglang:num_queue_reqs": self.decoder.waiting,
            "sglang:generation_tokens_total": counts.generated_tokens,
            "sglang:prompt_tokens_total": counts.prompt_tokens,
            "sglang:cached_tokens_total": counts.cached_tokens,
            "sglang:num_requests_total": counts.requests,
            "rollhook:decode_busy_seconds_total": round(counts.busy_seconds, 6),
            "rollhook:prefix_cache_bytes": self.decoder.prefixes.size,
        }
        lines = [
            f"# TYPE {k} {'counter' if k.endswith('_total') else 'gauge'}\n{k} {v}\n"
            for k, v in values.items()
        ]
        return web.Response(text="".join(lines), content_type="text/plain")

    def _row(self, body: Mapping[str, Any], changed: asyncio.Event) -> Request:
        """Return a request that sets `changed` when it ends, and at each token where it streams."""
        from rollhook_torch.request import Request

        prompt = prompt_ids(body, self._vocab_size)
        context = self.decoder.context_length
        if len(prompt) >= context:
            raise BadRequestError(
                f"input_ids has {len(prompt)} tokens, the model's context {context}: no room to generate"
            )
        params = parameters(body)
        stops = frozenset(params["stop_token_ids"]) | (frozenset() if params["ignore_eos"] else self._eos)
        loop = asyncio.get_running_loop()

        def tell(row: Request) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and everybody with it
                loop.call_soon_threadsafe(changed.set)

        seed = params["sampling_seed"]
        return Request(
            rid=str(body.get("rid") or uuid.uuid4().hex),
            prompt=prompt,
            temperature=params["temperature"],
            top_p=params["top_p"],
            top_k=params["top_k"],
            max_new_tokens=params["max_new_tokens"],
            stops=stops,
            random=random.Random(seed),  # noqa: S311 - sampling, not secrecy
            done=tell,
            progress=tell if body.get("stream") else None,
            extra_key=extra_key(body),
        )


async def _next(changed: asyncio.Event) -> None:
    await changed.wait()
    changed.clear()


async def _body(request: web.Request) -> dict[str, Any]:
    raw = await request.read()
    if not raw.strip():
        return {}
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    return body


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except BadRequestError as error:
        return _error(400, str(error))


def _error(status: int, message: str) -> web.Response:
    return _json({"success": False, "message": message, "error": {"message": message}}, status=status)


def _json(value: object, status: int = 200) -> web.Response:
    return web.json_response(value, status=status, dumps=_dumps)


def _dumps(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def main(argv: Sequence[str] | None = None) -> None:
    """Load the model, then serve until SIGTERM."""
    arguments = _parse(argv)
    quiet.prepare(arguments.threads)
    quiet.quiet_transformers()
    from rollhook.errors import RollhookError

    try:
        server = build(vars(arguments))
    except RollhookError as error:
        sys.exit(str(error))
    with contextlib.suppress(web.GracefulExit):
        web.run_app(
            server.app(),
            host=arguments.host,
            port=arguments.port,
            access_log=None,
            print=None,
            shutdown_timeout=1.0,
            handler_cancellation=True,
        )


def build(arguments: Mapping[str, Any]) -> Server:
    """Load the model and start the decode thread."""
    from rollhook_torch.decode import Decoder
    from rollhook_torch.weights import choose_device, load_model

    model = load_model(Path(arguments["model"]), arguments["dtype"], choose_device(arguments["device"]))
    own = getattr(model.config, "max_position_embeddings", None) or sys.maxsize
    decoder = Decoder(
        model,
        arguments["weight_version"],
        context_length=arguments["context_length"] or own,
        max_batch=arguments["max_batch"],
        prefill_tokens=arguments["prefill_tokens"],
        prefix_cache_bytes=arguments["prefix_cache_bytes"],
    )
    return Server(decoder, arguments, stop_ids(model), model.get_input_embeddings().weight.shape[0])


def stop_ids(model: Any) -> list[int]:
    """Return the ids that end a reply by the model's own configuration."""
    for config in (model.generation_config, model.config):
        value = getattr(config, "eos_token_id", None)
        if value is not None:
            return list(value) if isinstance(value, list | tuple) else [value]
    return []


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rollhook_torch.server", description=__doc__)
    parser.add_argument("--model", required=True, help="directory of weights, Hugging Face layout")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--threads", type=int, default=None, help="default: all CPUs")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-batch", type=int, default=256)
    parser.add_argument("--prefill-tokens", type=int, default=2048)
    parser.add_argument("--prefix-cache-bytes", type=int, default=512 * 1024**2)
    parser.add_argument("--context-length", type=int, default=None)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
