"""What routing costs and what it is worth: calls in the process, `rollhook router`, and sglang-router 0.3.2.

Latency: one request after the other to a mock engine that answers at once, directly and through each
router in turn; what is added to the direct way. Requests per second of a core come from the CPU time of the
router's process under 16 requests at once; in the process, of the choice itself.

Replay: a trace of agents (router_trace.py says what is in it, --trace takes another) on 2 simulated engines
of 4 data-parallel ranks with prefix caches (sim_engine.py). The clock of the engines jumps, so that the
speed of this machine does not matter; through routers, every request still is a real one. sglang-router
chooses between ranks itself (--dp-aware), but for power_of_two: it asks engines for their loads under the
ranks' names, which fails, so that each rank is an engine of its own there. A limit of this: it asks for loads
in real time, once a second, its fastest. Each of its policies runs at the defaults of its command line, and
cache_aware also with the values of its documentation.

Limits: a call in the process at most a fifth of a proxy's added latency; the best of our policies a higher
hit rate than each of sglang-router's, at no more imbalance.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import measuring
import mock_engine
import numpy as np
import orjson
import router_trace
from router_replay import ENGINES, RANKS, InProcess, OverHttp, Replay, Result, Well
from sim_engine import Clock, Hardware, Rank, SimServer

from rollhook import plugins
from rollhook.router import RouteRequest, Worker
from rollhook.routing import build_chain
from rollhook.session.fleet import Fleet
from rollhook.session.workers import Gate
from rollhook.testing.environment import build_context

PEER = "sglang-router==0.3.2"
#: how each of sglang-router's policies is started
PEER_POLICIES: dict[str, Sequence[str]] = {
    "random": (),
    "round_robin": (),
    "cache_aware": (),
    "cache_aware, as documented": (
        *("--cache-threshold", "0.5"),
        *("--balance-abs-threshold", "32", "--balance-rel-threshold", "1.5"),
    ),
    "power_of_two": ("--worker-startup-check-interval", "1"),
    "manual, random": ("--assignment-mode", "random"),
    "manual, min_load": ("--assignment-mode", "min_load"),
    "manual, min_group": ("--assignment-mode", "min_group"),
}
#: our policies by the name of their row, with keys
POLICIES: dict[str, tuple[str, dict[str, dict[str, float]]]] = {
    "random": ("random", {}),
    "round_robin": ("round_robin", {}),
    "power_of_two": ("power_of_two", {}),
    "min_load": ("min_load", {}),
    "consistent_hash": ("consistent_hash", {}),
    "prefix_cache": ("prefix_cache", {}),
    "prefix_cache, recompute_cost 16": ("prefix_cache", {"prefix_cache": {"recompute_cost": 16}}),
    "prefix_cache, recompute_cost 32": ("prefix_cache", {"prefix_cache": {"recompute_cost": 32}}),
    "sticky+prefix_cache": ("sticky+prefix_cache", {}),
}
PROMPT = list(range(1000, 3000))


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextmanager
def process(argv: Sequence[str | Path]) -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen(
        [str(each) for each in argv],
        env={**os.environ, **measuring.SILENT},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield started
    finally:
        started.kill()
        started.wait()


@asynccontextmanager
async def routed(
    argv: Sequence[str | Path], port: int, http: aiohttp.ClientSession, workers: int
) -> AsyncIterator[tuple[str, int]]:
    """Run a router until all its workers are there; yield its address and process id."""
    url = f"http://127.0.0.1:{port}"
    with process(argv) as started:
        async with asyncio.timeout(120):
            while started.poll() is None:
                try:
                    async with http.get(f"{url}/workers") as response:
                        if len((await response.json())["workers"]) == workers:
                            break
                except aiohttp.ClientConnectionError:
                    pass
                await asyncio.sleep(0.1)
        if started.returncode is not None:
            raise RuntimeError(f"{argv[0]} ended with {started.returncode}")
        yield url, started.pid


def ours(urls: Sequence[str], port: int, policy: str) -> list[str | Path]:
    name, keys = POLICIES[policy]
    sets = [f"--set={part}.{key}={value}" for part, values in keys.items() for key, value in values.items()]
    workers = [f"--worker={url}" for url in urls]
    return [
        sys.executable,
        "-m",
        "rollhook.cli.main",
        "router",
        f"--port={port}",
        f"--policy={name}",
        *sets,
        *workers,
    ]


def theirs(python: Path, urls: Sequence[str], port: int, *options: str) -> list[str | Path]:
    own = ["--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]
    metrics = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    return [python, "-m", "sglang_router.launch_router", *own, *metrics, "--worker-urls", *urls, *options]


# -- latency


async def latency(rounds: int, each: int, python: Path | None) -> None:
    body = orjson.dumps({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 64}})
    count = rounds * each
    async with AsyncExitStack() as stack:
        engine = stack.enter_context(mock_engine.mock_engine())
        connector = aiohttp.TCPConnector(limit=0)
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        ways: dict[str, tuple[str, int]] = {"direct": (engine, 0)}
        port = free_port()
        router = routed(ours([engine], port, "min_load"), port, http, 1)
        ways["rollhook router"] = await stack.enter_async_context(router)
        if python is not None:
            port = free_port()
            router = routed(theirs(python, [engine], port, "--policy", "round_robin"), port, http, 1)
            ways[PEER] = await stack.enter_async_context(router)
        took: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, (url, _) in ways.items():
                took[name] += [await asked(http, url, body) for _ in range(each)]
        rates = {
            name: await per_core(http, url, pid, body, count) for name, (url, pid) in ways.items() if pid
        }
    base = quantiles(took.pop("direct"))
    choices = await picks(count)
    rows: list[list[object]] = [["direct", *base, "", "", ""]]
    of_a_core = f"{1e3 / statistics.mean(choices):.0f}"
    rows.append(["a call in the process", "", "", *(f"{each:.3f}" for each in quantiles(choices)), of_a_core])
    for name, times in took.items():
        found = quantiles(times)
        rows.append([name, *found, found[0] - base[0], found[1] - base[1], f"{rates[name]:.0f}"])
    columns = ["", "p50 ms", "p99 ms", "added p50", "added p99", "requests/s of a core"]
    measuring.table(f"{count} requests of {len(PROMPT)} tokens, one after the other", columns, rows)


def quantiles(times: Sequence[float]) -> tuple[float, float]:
    return float(np.quantile(times, 0.5)), float(np.quantile(times, 0.99))


async def asked(http: aiohttp.ClientSession, url: str, body: bytes) -> float:
    """Return the milliseconds of a request."""
    began = time.perf_counter()
    headers = {"Content-Type": "application/json", "X-SMG-Routing-Key": "session"}
    async with http.post(f"{url}/generate", data=body, headers=headers) as response:
        await response.read()
        assert response.status == 200, response.status
    return (time.perf_counter() - began) * 1e3


async def per_core(http: aiohttp.ClientSession, url: str, pid: int, body: bytes, count: int) -> float:
    """Return requests per second of a process's CPU time, 16 at once."""
    before = cpu_seconds(pid)

    async def client() -> None:
        for _ in range(count // 16 + 1):
            await asked(http, url, body)

    await asyncio.gather(*(client() for _ in range(16)))
    return 16 * (count // 16 + 1) / (cpu_seconds(pid) - before)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def picks(count: int) -> list[float]:
    """Return the milliseconds of each choice between 8 workers for 128 sessions, the counting included."""
    names = [("router", "sticky"), ("router", "min_load")]
    fleet = Fleet(
        build_chain("sticky+min_load", {}, plugins.load(names), build_context()), Well(), Gate(lambda: 0.0)
    )
    fleet.set_workers([Worker(f"http://{n}", rank) for n in range(ENGINES) for rank in range(RANKS)], 1)
    routes = [fleet.enter(RouteRequest(f"s{n}", expected_tokens=4096)) for n in range(128)]
    took = []
    for number in range(count):
        began = time.perf_counter()
        entry = await fleet.worker(routes[number % len(routes)], set(), 0, PROMPT)
        with fleet.sending(entry, 4096):
            took.append((time.perf_counter() - began) * 1e3)
    await fleet.close()
    return took


# -- replay


async def in_process(trace: router_trace.Trace, policy: str) -> Result:
    clock = Clock()
    ranks = [Rank(clock, Hardware()) for _ in range(ENGINES * RANKS)]
    name, keys = POLICIES[policy]
    router = InProcess(name, ranks, keys)
    await Replay(trace, clock, router).run()
    await router.fleet.close()
    return Result.of(ranks)


async def through(trace: router_trace.Trace, policy: str, python: Path | None) -> Result:
    """Replay through our router, or with a Python that has it through sglang-router."""
    clock = Clock()
    ranks = [Rank(clock, Hardware()) for _ in range(ENGINES * RANKS)]
    apart = python is not None and policy == "power_of_two"
    size = 1 if apart else RANKS
    servers = [SimServer(ranks[first : first + size]) for first in range(0, len(ranks), size)]
    connector = aiohttp.TCPConnector(limit=0)
    async with AsyncExitStack() as stack:
        for server in servers:
            await server.start()
            stack.push_async_callback(server.stop)
        urls = [server.url for server in servers]
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        port = free_port()
        if python is None:
            argv = ours(urls, port, policy)
        else:
            aware = [] if apart else ["--dp-aware"]
            chosen = ["--policy", policy.partition(",")[0], *aware, *PEER_POLICIES[policy]]
            argv = theirs(python, urls, port, *chosen)
        url, _ = await stack.enter_async_context(routed(argv, port, http, len(ranks)))
        await Replay(trace, clock, OverHttp(url, servers, http, told=python is None)).run()
    return Result.of(ranks)


async def replays(trace: router_trace.Trace, python: Path | None, proxied: str) -> None:
    rows: list[list[object]] = []

    def note(name: str, result: Result) -> None:
        row = [100 * result.hit_rate, result.imbalance, result.queue_mean, result.queue_p99, result.seconds]
        rows.append([name, *(f"{value:.2f}" for value in row)])
        print(*rows[-1], file=sys.stderr, flush=True)  # a whole replay takes minutes

    for policy in POLICIES:
        note(f"rollhook: {policy}", await in_process(trace, policy))
    note(f"rollhook router: {proxied}", await through(trace, proxied, None))
    if python is not None:
        for policy in PEER_POLICIES:
            note(f"sglang-router: {policy}", await through(trace, policy, python))
    columns = ["", "prompt tokens cached %", "imbalance", "queued s", "p99", "seconds in all"]
    measuring.table(f"replay: {router_trace.summary(trace)}", columns, rows)


def main() -> None:
    parser = measuring.arguments(__doc__ or "")
    parser.add_argument("--trace", type=Path, default=router_trace.COMMITTED, help="another trace to replay")
    parser.add_argument("--only", choices=["latency", "replay"], help="one of the two; default: both")
    options = parser.parse_args()
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # sglang-router tries HTTP/2 first
    python = None if options.quick else measuring.peer(PEER)
    if options.only != "replay":
        asyncio.run(latency(*((2, 20) if options.quick else (20, 100)), python))
    if options.only != "latency":
        trace = router_trace.read(options.trace)
        if options.quick:
            trace = replace(trace, concurrency=4, sessions=trace.sessions[:6])
        asyncio.run(replays(trace, python, "prefix_cache"))


if __name__ == "__main__":
    main()
