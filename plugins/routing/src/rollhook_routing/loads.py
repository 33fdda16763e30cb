"""What the policies that look at loads share: their order, the bound on a worker, seeded draws."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from rollhook.router import RouteRequest, Worker, WorkerLoad


def amount(load: WorkerLoad) -> tuple[int, int, int]:
    """Return what workers are ordered by: open sessions, tokens in flight, requests queued."""
    return load.open_sessions, load.tokens_in_flight, load.queued or 0


def least_loaded(seed: int, request: RouteRequest, workers: Sequence[WorkerLoad]) -> Worker | None:
    """Return the worker with the least `amount`, ties by seeded hash; None when there is none."""
    if not workers:
        return None
    least = min(map(amount, workers))
    tied = [load.worker for load in workers if amount(load) == least]
    return min(tied, key=lambda worker: draw(seed, request.session_id, worker))


def mean_sessions(workers: Sequence[WorkerLoad]) -> float:
    """Return the mean of open sessions over workers; there is at least one."""
    return sum(load.open_sessions for load in workers) / len(workers)


def with_room(workers: Sequence[WorkerLoad], factor: float) -> list[WorkerLoad]:
    """Return the workers that one more session leaves within `factor` times the mean, rounded up.

    Never empty for a factor of at least 1 (bounded loads: Mirrokni, Thorup, Zadimoghaddam 2018).
    """
    limit = -(-factor * (sum(load.open_sessions for load in workers) + 1) // len(workers))
    return [load for load in workers if load.open_sessions + 1 <= limit]


def draw(seed: int, text: str, worker: Worker, number: int = 0) -> int:
    """Return a 64-bit number that depends on all of these and nothing else, in any process."""
    return position(f"{seed}\n{text}\n{worker.url}\n{worker.dp_rank}\n{number}")


def position(text: str) -> int:
    """Return a text's place on a ring of 64 bits."""
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big")
