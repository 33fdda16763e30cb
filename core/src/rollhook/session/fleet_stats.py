"""Figures of the routing, as metrics: how even it is, and how often sessions stay."""

from __future__ import annotations

from collections.abc import Iterable

from rollhook.router import Worker
from rollhook.session.workers import Entry, WorkerTable


class FleetStats:
    """Counts over turns. Loads are looked at whenever a turn has got its worker, and averaged."""

    def __init__(self, table: WorkerTable) -> None:
        self._table = table
        self._begin()

    def sent(self, later: bool, kept: bool, *, retry: bool) -> None:
        """Note a try of a turn: `later` than the session's first, on the worker that it `kept`."""
        self._retries += retry
        self._later += later
        self._kept += later and kept
        offered = self._table.offered()
        if len(offered) > 1:
            loads = [self._table.load(entry) for entry in offered]
            self._looks += 1
            self._sessions += _imbalance([load.open_sessions for load in loads])
            self._tokens += _imbalance([load.tokens_in_flight for load in loads])

    def take(self) -> dict[str, float]:
        """Return the metrics of the time since this was called last; see `rollhook.metric_names`."""
        openings = self._openings()
        opened = sum(max(0, count - self._opened_before.get(worker, 0)) for worker, count in openings.items())
        found = {
            "router/workers": float(len(self._table.workers)),
            "router/offered": float(len(self._table.offered())),
            "router/retries": float(self._retries),
            "router/breaker_openings": float(opened),
        }
        if self._looks:
            found["router/session_imbalance"] = self._sessions / self._looks
            found["router/token_imbalance"] = self._tokens / self._looks
        if self._later:
            found["router/stickiness"] = self._kept / self._later
        names = worker_names(self._table)
        found |= {
            f"router/tokens_in_flight/{name}": float(self._table.load(entry).tokens_in_flight)
            for name, entry in names.items()
        }
        self._begin()
        return found

    def _begin(self) -> None:
        self._retries = self._later = self._kept = self._looks = 0
        self._sessions = self._tokens = 0.0
        self._opened_before = self._openings()

    def _openings(self) -> dict[Worker, int]:
        return {entry.worker: entry.breaker.openings for entry in self._table}


def _imbalance(loads: list[int]) -> float:
    """Return the greatest load over the mean: 1 when all are equal, their number when one has all."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def worker_names(workers: Iterable[Entry]) -> dict[str, Entry]:
    """Return the entries as metrics call them: `2` (the third engine) or `2.1` (its second rank)."""
    entries = list(workers)
    urls = list(dict.fromkeys(entry.worker.url for entry in entries))
    number = {url: str(n) for n, url in enumerate(urls)}
    return {
        number[entry.worker.url] + ("" if entry.worker.dp_rank is None else f".{entry.worker.dp_rank}"): entry
        for entry in entries
    }
