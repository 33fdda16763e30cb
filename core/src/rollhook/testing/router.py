"""The contract of router policies: inherit `RouterPolicyContract`, give it a builder, run pytest."""

from __future__ import annotations

import copy
import gc
import inspect
import random
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from rollhook.router import RouteRequest, RouterPolicy, Worker, WorkerLoad
from rollhook.testing.contract import Contract

#: builds the policy under test from a seed
MakePolicy = Callable[[int], RouterPolicy]

WORKERS = (
    Worker("http://a"),
    Worker("http://b"),
    Worker("http://c"),
    Worker("http://c", 0),
    Worker("http://c", 1),
)


class RouterPolicyContract(Contract):
    """What every router policy must do, whatever it prefers. A suite gives the fixture `make_policy`."""

    @pytest.fixture
    def make_policy(self) -> MakePolicy:
        """Build the policy under test from a seed, each time anew."""
        raise NotImplementedError("give the contract a fixture make_policy that returns a builder")

    def test_it_picks_a_worker_on_offer_or_none(self, make_policy: MakePolicy) -> None:
        for policy, request, offered in _life(make_policy(0)):
            picked = policy.pick(request, offered)
            assert picked is None or picked in [load.worker for load in offered]
            assert picked is not None or not (policy.always_picks and offered)
            if picked is not None:
                policy.assigned(request, picked)

    def test_it_answers_at_once_and_is_no_coroutine(self, make_policy: MakePolicy) -> None:
        policy: Any = make_policy(0)
        request = RouteRequest("s")
        for answer in (
            policy.pick(request, _offer(WORKERS)),
            policy.assigned(request, WORKERS[0]),
            policy.closed("s"),
            policy.workers_changed(WORKERS),
        ):
            assert not inspect.isawaitable(answer)

    def test_the_same_seed_and_history_give_the_same_choices(self, make_policy: MakePolicy) -> None:
        assert _choices(make_policy(3)) == _choices(make_policy(3))

    def test_it_does_not_alter_what_it_is_given(self, make_policy: MakePolicy) -> None:
        policy = make_policy(0)
        request, offered = RouteRequest("s", "t", [1, 2], 100), _offer(WORKERS)
        before = copy.deepcopy((request, offered))
        picked = policy.pick(request, offered)
        policy.assigned(request, picked or WORKERS[0])
        assert (request, offered) == before

    def test_a_worker_that_has_left_is_not_missed(self, make_policy: MakePolicy) -> None:
        policy = make_policy(0)
        policy.workers_changed(WORKERS)
        requests = [RouteRequest(f"s{n}") for n in range(30)]
        for request in requests:
            policy.assigned(request, policy.pick(request, _offer(WORKERS)) or WORKERS[0])
        policy.workers_changed(WORKERS[1:2])
        for request in requests:
            assert policy.pick(request, _offer(WORKERS[1:2])) in (None, WORKERS[1])
        policy.workers_changed(())
        policy.workers_changed(WORKERS)
        assert policy.pick(requests[0], _offer(WORKERS)) in (None, *WORKERS)

    def test_ranks_of_one_engine_are_workers_of_their_own(self, make_policy: MakePolicy) -> None:
        policy = make_policy(0)
        ranks = [Worker("http://x", rank) for rank in range(4)]
        policy.workers_changed(ranks)
        for number in range(40):
            request = RouteRequest(f"s{number}")
            picked = policy.pick(request, _offer(ranks))
            assert picked is None or picked in ranks
            policy.assigned(request, picked or ranks[0])

    def test_closing_is_harmless_for_sessions_unknown_and_known(self, make_policy: MakePolicy) -> None:
        policy = make_policy(0)
        policy.closed("never seen")
        policy.assigned(RouteRequest("s"), WORKERS[0])
        policy.closed("s")
        policy.closed("s")
        assert policy.pick(RouteRequest("s"), _offer(WORKERS)) in (None, *WORKERS)

    def test_with_nobody_on_offer_it_picks_nobody(self, make_policy: MakePolicy) -> None:
        assert make_policy(0).pick(RouteRequest("s"), []) is None

    def test_any_session_id_will_do(self, make_policy: MakePolicy) -> None:
        policy = make_policy(0)
        for session_id in ("", "a/b@3", "ünïcode", "\ud800", "x" * 10_000):
            request = RouteRequest(session_id)
            policy.assigned(request, policy.pick(request, _offer(WORKERS)) or WORKERS[0])
            policy.closed(session_id)

    def test_workers_may_come_and_go_at_every_turn(self, make_policy: MakePolicy) -> None:
        policy, draw = make_policy(0), random.Random(2)
        for number in range(300):
            present = [worker for worker in WORKERS if draw.random() < 0.5]
            policy.workers_changed(present)
            request = RouteRequest(f"s{draw.randrange(10)}", "t", [number % 3] * 70)
            picked = policy.pick(request, _offer(present, draw))
            assert picked is None or picked in present
            if picked is not None:
                policy.assigned(request, picked)

    def test_what_it_keeps_of_closed_sessions_is_bounded(self, make_policy: MakePolicy) -> None:
        policy = make_policy(0)
        policy.workers_changed(WORKERS)
        kept = []
        for beginning in (0, 1500):
            for number in range(beginning, beginning + 1500):
                request = RouteRequest(f"s{number}", f"t{number}", [number] * 70)
                policy.assigned(request, policy.pick(request, _offer(WORKERS)) or WORKERS[0])
                policy.closed(request.session_id)
            kept.append(_objects(policy))
        assert kept[1] <= 1.1 * kept[0] + 20, f"objects kept after 1500 and 3000 sessions: {kept}"

    def test_it_serves_ten_thousand_sessions_over_sixty_four_workers(self, make_policy: MakePolicy) -> None:
        policy = make_policy(0)
        workers = [Worker(f"http://w{n // 8}", n % 8) for n in range(64)]
        policy.workers_changed(workers)
        loads = {worker: WorkerLoad(worker) for worker in workers}
        for number in range(10_000):
            request = RouteRequest(f"s{number}", f"t{number // 8}", [number // 8] * 256, 1000)
            picked = policy.pick(request, list(loads.values()))
            assert picked is None or picked in loads
            policy.assigned(request, picked or workers[0])
            if picked is not None:
                loads[picked] = WorkerLoad(picked, loads[picked].open_sessions + 1)
        for number in range(10_000):
            policy.closed(f"s{number}")

    def test_any_life_of_sessions_and_workers_is_served(self, make_policy: MakePolicy) -> None:
        pytest.importorskip("hypothesis", reason="the state machine needs hypothesis")
        from rollhook.testing.router_machine import run_life

        run_life(make_policy)


def _objects(policy: RouterPolicy) -> int:
    """Return how many objects a policy holds, but for its context, classes and code."""
    seen: dict[int, Any] = {}
    left: list[Any] = [value for name, value in vars(policy).items() if name not in ("context", "config")]
    while left:
        each = left.pop()
        if id(each) not in seen and not isinstance(each, type | types.ModuleType | types.FunctionType):
            seen[id(each)] = each
            left += gc.get_referents(each)
    return len(seen)


def _offer(workers: Sequence[Worker], draw: random.Random | None = None) -> list[WorkerLoad]:
    if draw is None:
        return [WorkerLoad(worker) for worker in workers]
    return [
        WorkerLoad(worker, draw.randrange(4), draw.randrange(3) * 1000, draw.choice([None, 0, 5]))
        for worker in workers
    ]


def _life(policy: RouterPolicy) -> Iterator[tuple[RouterPolicy, RouteRequest, list[WorkerLoad]]]:
    """Yield a few hundred situations: sessions come back and close, workers fail, drain and return."""
    draw = random.Random(1)
    policy.workers_changed(WORKERS)
    for _ in range(300):
        offered = [worker for worker in WORKERS if draw.random() < 0.7]
        request = RouteRequest(
            f"s{draw.randrange(20)}", f"t{draw.randrange(3)}", [1] * draw.randrange(5), 100
        )
        yield policy, request, _offer(offered, draw)
        if draw.random() < 0.1:
            policy.closed(f"s{draw.randrange(20)}")
        if draw.random() < 0.02:
            policy.workers_changed(WORKERS[draw.randrange(len(WORKERS)) :])


def _choices(policy: RouterPolicy) -> list[Worker | None]:
    choices = []
    for _, request, offered in _life(policy):
        picked = policy.pick(request, offered)
        if picked is not None:
            policy.assigned(request, picked)
        choices.append(picked)
    return choices
