"""What is created ahead: for several specs at once, bounded in total, and only as long as it is of use."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollhook.sandbox.backend import SandboxSpec
from rollhook.sandbox.pool import SandboxPool
from rollhook.sandbox.warm import Warm, recipe_key
from rollhook.testing.scripted import FakeTime, ListJournal, ScriptedBackend, settle

A, B, C = (SandboxSpec(image=name, lifetime_seconds=100.0) for name in "abc")


@dataclass(eq=False)
class One:
    created: float
    lifetime: float | None = None


class Books:
    """A warm pool whose creates are done at once."""

    def __init__(self, places: int) -> None:
        self.now = 0.0
        self.warm = Warm[One](places, 600.0, lambda: self.now)

    def ask(self, *specs: SandboxSpec) -> None:
        for spec in specs:
            self.warm.asked(spec)

    def fill(self) -> list[str]:
        """Create what is planned; return the images."""
        missing, _ = self.warm.plan()
        for spec in missing:
            self.warm.add(spec, One(self.now))
        return sorted(str(spec.image) for spec in missing)

    def count(self) -> int:
        return len(list(self.warm))


CHANGES: dict[str, Any] = {
    "image": "x",
    "dockerfile": "FROM x",
    "workdir": "/x",
    "env": {"X": "1"},
    "cpus": 2.0,
    "memory_bytes": 1,
    "network": True,
    "user": "x",
    "network_allow": ("x",),
}


@pytest.mark.parametrize("field", CHANGES)
def test_what_makes_another_sandbox_makes_another_key(field: str) -> None:
    assert recipe_key(dataclasses.replace(A, **{field: CHANGES[field]})) != recipe_key(A)
    alike = dataclasses.replace(A, lifetime_seconds=5.0, labels={"rollhook.nonce": "1"})
    assert recipe_key(alike) == recipe_key(A)


def test_places_are_shared_by_how_often_a_spec_is_asked_for() -> None:
    books = Books(4)
    books.ask(A, A, A, B)
    assert books.fill() == ["a", "a", "a", "b"]
    assert books.fill() == []


def test_one_spec_alone_has_all_places() -> None:
    books = Books(3)
    books.ask(A)
    assert books.fill() == ["a", "a", "a"]


def test_a_spec_that_comes_up_takes_places_from_one_that_has_too_many() -> None:
    books = Books(2)
    books.ask(A)
    assert books.fill() == ["a", "a"]
    books.ask(B)
    missing, spare = books.warm.plan()
    assert ([spec.image for spec in missing], len(spare)) == (["b"], 1)
    assert books.count() == 1


def test_equals_leave_what_is_there() -> None:
    """With one place and two specs in turn nothing is made only to be deleted."""
    books = Books(1)
    books.ask(A)
    books.fill()
    books.ask(B)
    assert books.warm.plan() == ([], [])
    books.ask(B)
    missing, spare = books.warm.plan()
    assert ([spec.image for spec in missing], len(spare)) == (["b"], 1)


def test_one_that_would_end_before_its_episode_is_not_taken() -> None:
    books = Books(1)
    short, long = One(0.0, lifetime=100.0 + 50.0), One(0.0, lifetime=700.0)
    books.warm.add(A, short)
    books.now = 60.0
    assert books.warm.take(A) is None
    books.warm.add(A, long)
    assert books.warm.take(A) is long
    assert books.warm.take(dataclasses.replace(A, lifetime_seconds=10.0)) is short


def test_what_waited_too_long_goes_whatever_is_asked_for() -> None:
    books = Books(2)
    old = One(0.0)
    books.warm.add(C, old)
    books.now = 599.0
    assert books.warm.expired() == []
    books.now = 600.0
    assert books.warm.take(C) is None
    assert books.warm.expired() == [old]
    assert books.count() == 0


def test_what_nobody_asks_for_any_more_is_forgotten() -> None:
    books = Books(1)
    books.ask(A)
    books.ask(*[B] * 64)
    assert books.fill() == ["b"]


@given(
    st.integers(0, 5),
    st.lists(st.tuples(st.sampled_from([A, B, C]), st.sampled_from(["ask", "take", "begin", "later"]))),
)
def test_the_total_is_never_above_the_places(places: int, steps: list[tuple[SandboxSpec, str]]) -> None:
    books = Books(places)
    making: list[SandboxSpec] = []
    held = 0
    for spec, step in steps:
        if step == "ask":
            books.ask(spec)
            missing, spare = books.warm.plan()
            held -= len(spare)
            for wanted in missing:
                books.warm.begin(wanted)
                making.append(wanted)
        elif step == "take":
            held -= books.warm.take(spec) is not None
        elif step == "begin" and making:
            made = making.pop(0)
            books.warm.end(made)
            books.warm.add(made, One(books.now))
            held += 1
        elif step == "later":
            books.now += 250.0
            held -= len(books.warm.expired())
        assert books.count() == held
        assert held + len(making) <= places


async def test_a_pool_keeps_several_images_ready_within_its_total() -> None:
    backend, time = ScriptedBackend(), FakeTime()
    pool = SandboxPool(
        backend,
        run_id="demo",
        attempt=1,
        journal=ListJournal(),
        warm=2,
        create_concurrency=8,
        clock=time.clock,
        sleep=time.sleep,
    )
    first = await pool.acquire(A, episode_id="e1")
    await settle(40)
    second = await pool.acquire(B, episode_id="e2")
    await settle(40)
    ready = [raw for raw in backend.live.values() if raw.id not in (first.id, second.id)]
    assert sorted(str(raw.spec.image) for raw in ready) == ["a", "b"]
    for spec in (A, B):
        taken = await pool.acquire(spec, episode_id="e3")
        assert taken.id in {raw.id for raw in ready}
    await pool.aclose()
    assert backend.live == {}
