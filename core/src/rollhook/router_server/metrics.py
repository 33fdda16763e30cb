"""What the router counts, for Prometheus, and the metrics of all engines in one text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from rollhook.engine.client import EngineClient
from rollhook.errors import EngineError
from rollhook.router import Worker
from rollhook.router_server.engines import Engines
from rollhook.router_server.names import worker_name
from rollhook.router_server.pool import Pool
from rollhook.router_server.proxy import Watcher
from rollhook.session.workers import Entry


class Metrics(Watcher):
    """Counts requests; what is true of workers now is read from the pool when it is asked for."""

    def __init__(self, pool: Pool) -> None:
        self._registry = CollectorRegistry()
        self._answers = Counter(
            "rollhook_router_answers",
            "Answers of engines, by worker, path and status; status 0: none",
            ["worker", "path", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "rollhook_router_answer_seconds",
            "Seconds from a request to the headers of its answer, by path",
            ["path"],
            buckets=(0.005, 0.025, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600),
            registry=self._registry,
        )
        self._retries = Counter(
            "rollhook_router_retries", "Requests that were tried again", registry=self._registry
        )
        self._registry.register(_Workers(pool))

    def answered(self, entry: Entry, path: str, status: int, seconds: float) -> None:
        """Count an answer."""
        self._answers.labels(worker_name(entry.worker), path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def failed(self, entry: Entry, path: str) -> None:
        """Count a request that got no answer."""
        self._answers.labels(worker_name(entry.worker), path, "0").inc()

    def retried(self) -> None:
        """Count a request that is tried again."""
        self._retries.inc()

    def text(self) -> bytes:
        """Return all in Prometheus' text format."""
        return generate_latest(self._registry)


class _Workers(Collector):
    """Gauges of the workers as they are now."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def collect(self) -> Iterable[Metric]:
        """Read them from the pool."""
        offered = self._pool.table.offered()
        values: dict[str, tuple[str, Callable[[Entry], float]]] = {
            "healthy": ("1 when the worker may get requests, else 0", lambda each: each in offered),
            "in_flight": ("Requests under way", lambda each: each.requests),
            "sessions": ("Sessions that count as open", lambda each: each.open_sessions),
            "tokens_in_flight": ("Tokens of the requests under way", lambda each: each.tokens_in_flight),
        }
        for name, (text, value) in values.items():
            gauge = GaugeMetricFamily(f"rollhook_router_worker_{name}", text, labels=["worker"])
            for entry in self._pool.table:
                gauge.add_metric([worker_name(entry.worker)], value(entry))
            yield gauge


def routes(metrics: Metrics, engines: Engines, client: EngineClient) -> list[web.RouteDef]:
    """Return the endpoints: the router's own metrics, and those of all engines."""

    async def own(request: web.Request) -> web.Response:
        return web.Response(body=metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def of_engines(request: web.Request) -> web.Response:
        async def ask(url: str) -> str:
            try:
                return await client.metrics(Worker(url))
            except EngineError:
                return ""  # an engine without metrics is no reason to hide those of others

        urls = engines.urls
        texts = dict(zip(urls, await asyncio.gather(*map(ask, urls)), strict=True))
        return web.Response(body=merged(texts), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return [web.get("/metrics", own), web.get("/engine_metrics", of_engines)]


def merged(texts: Mapping[str, str]) -> bytes:
    """Return the metrics of many engines as one text, each sample with its engine's URL as `worker_addr`."""
    registry = CollectorRegistry()
    registry.register(_Merged(texts))
    return generate_latest(registry)


class _Merged(Collector):
    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def collect(self) -> Iterator[Metric]:
        """Put samples of one name together."""
        found: dict[str, Metric] = {}
        for url, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                whole = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    labels = {**sample.labels, "worker_addr": url}
                    whole.add_sample(sample.name, labels, sample.value, sample.timestamp, sample.exemplar)
        yield from found.values()
