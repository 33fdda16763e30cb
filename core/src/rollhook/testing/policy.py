"""A policy over fake engines, for tests of whatever asks one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from rollhook.component import Config
from rollhook.engine.client import EngineClient
from rollhook.router import RouteRequest, RouterPolicy, Worker, WorkerLoad
from rollhook.routing import Chain
from rollhook.session import PolicyClient, Renderer
from rollhook.testing.environment import build_context
from rollhook.testing.fake_engine import FakeEngine, ReplyFunction
from rollhook.testing.tokenizer import write_tokenizer


def says(renderer: Renderer, *texts: str, stop: bool = True) -> ReplyFunction:
    """Return a reply function that says these texts in turn, with the stop token, and repeats the last."""
    ends = renderer.stop_token_ids[:1] if stop else ()
    left = [[*renderer.encode(text), *ends] for text in texts]
    return lambda ids, params: left.pop(0) if len(left) > 1 else left[0]


class First(RouterPolicy):
    """Picks the first worker on offer."""

    def pick(self, request: RouteRequest, workers: Sequence[WorkerLoad]) -> Worker | None:
        """Return the first."""
        return workers[0].worker if workers else None


@asynccontextmanager
async def serving(
    *engines: FakeEngine,
    directory: Path,
    policies: Sequence[RouterPolicy] = (),
    client: EngineClient | None = None,
    context_length: int = 100_000,
    **keys: Any,
) -> AsyncIterator[PolicyClient]:
    """Start engines that are not running yet and yield a policy over them.

    The tokenizer is that of `directory`, written if there is none. `keys` go to PolicyClient. Without
    `policies` sessions go to the first worker on offer.
    """
    if not (directory / "tokenizer.json").exists():
        write_tokenizer(directory)
    chain = Chain(policies or [First(Config(), build_context(directory))])
    async with AsyncExitStack() as stack:
        for engine in engines:
            if not engine.url:
                await stack.enter_async_context(engine)
        client = client or EngineClient(control_timeout=5.0)
        stack.push_async_callback(client.aclose)
        policy = PolicyClient(Renderer(directory), chain, client, context_length=context_length, **keys)
        stack.push_async_callback(policy.close)
        workers = [worker for engine in engines for worker in engine.workers]
        policy.set_workers(workers, int(engines[0].version) if engines else 0)
        yield policy
