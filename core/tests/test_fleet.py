"""The fleet of engine workers: loads, health, breaker, draining, ranks."""

from rollhook.router import Worker, WorkerLoad
from rollhook.session.workers import WorkerTable

A, B, C = WORKERS = [Worker(f"http://{name}") for name in "abc"]


# -- loads


def test_the_load_of_other_processes_adds_to_the_own():
    table = WorkerTable()
    table.set_workers([A, B], 1)
    own = table.get(A)
    own.open_sessions, own.tokens_in_flight = 2, 100
    table.set_remote({A: (3, 1000), C: (9, 9)})
    assert [table.load(entry) for entry in table] == [WorkerLoad(A, 5, 1100), WorkerLoad(B, 0, 0)]
    assert table.local_loads() == {A: (2, 100), B: (0, 0)}
    table.set_remote({})
    assert table.load(own) == WorkerLoad(A, 2, 100)
