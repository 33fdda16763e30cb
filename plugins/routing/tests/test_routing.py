"""The router policies, alone and chained."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollhook.errors import UsageError
from rollhook.router import RouteRequest, RouterPolicy, Worker, WorkerLoad
from rollhook.routing import Chain, build_chain
from rollhook.testing.environment import build_context
from rollhook.testing.router import RouterPolicyContract
from rollhook_routing import (
    MinLoadConfig,
    RandomConfig,
    RoundRobinConfig,
    StickyConfig,
    rollhook_router_policies,
)
from rollhook_routing.policies import MinLoad, Random, RoundRobin, Sticky

A, B, C = WORKERS = [Worker(f"http://{name}") for name in "abc"]


def min_load(seed=0):
    return MinLoad(MinLoadConfig(), build_context(seed=seed))


def round_robin(seed=0):
    return RoundRobin(RoundRobinConfig(), build_context(seed=seed))


def drawn(seed=0):
    return Random(RandomConfig(), build_context(seed=seed))


def sticky(seed=0, now=lambda: 0.0, **keys):
    return Sticky(StickyConfig(**keys), build_context(seed=seed), now)


class TestMinLoad(RouterPolicyContract):
    @pytest.fixture
    def make_policy(self):
        return min_load


class TestRoundRobin(RouterPolicyContract):
    @pytest.fixture
    def make_policy(self):
        return round_robin


class TestRandom(RouterPolicyContract):
    @pytest.fixture
    def make_policy(self):
        return drawn


class TestSticky(RouterPolicyContract):
    @pytest.fixture
    def make_policy(self):
        return sticky


def offer(*workers):
    return [WorkerLoad(worker) for worker in workers]


def ask(policy, session="s", offered=WORKERS):
    loads = [load if isinstance(load, WorkerLoad) else WorkerLoad(load) for load in offered]
    request = RouteRequest(session)
    worker = policy.pick(request, loads)
    if worker is not None:
        policy.assigned(request, worker)
    return worker


# -- round robin and random


def test_round_robin_takes_each_in_turn():
    policy = round_robin()
    assert [ask(policy) for _ in range(5)] == [A, B, C, A, B]


def test_round_robin_skips_who_is_absent_and_goes_on_from_there():
    policy = round_robin()
    assert ask(policy) == A
    assert ask(policy, offered=[A, C]) == C
    assert ask(policy) == A
    assert ask(policy, offered=[B, C]) == B


def test_random_reaches_every_worker_about_equally():
    policy = drawn(5)
    counts = Counter(ask(policy) for _ in range(3000))
    assert all(900 < counts[worker] < 1100 for worker in WORKERS)


# -- min_load


@pytest.mark.parametrize(
    ("loads", "least"),
    [
        ([WorkerLoad(A, 1), WorkerLoad(B, 0, 999), WorkerLoad(C, 2)], B),
        ([WorkerLoad(A, 1, 500), WorkerLoad(B, 1, 100), WorkerLoad(C, 1, 300)], B),
        ([WorkerLoad(A, 1, 1, 4), WorkerLoad(B, 1, 1, 7), WorkerLoad(C, 1, 1, 3)], C),
        ([WorkerLoad(A, 1, 1, 4), WorkerLoad(B, 1, 1, None), WorkerLoad(C, 1, 1, 3)], B),
    ],
    ids=["sessions first", "then tokens", "then the queue", "an unreported queue is none"],
)
def test_min_load_orders_by_sessions_then_tokens_then_queue(loads, least):
    assert ask(min_load(), offered=loads) == least


def test_ties_spread_over_sessions_and_fall_by_the_seed():
    picks = [ask(min_load(1), session=f"s{n}") for n in range(300)]
    assert all(count > 60 for count in Counter(picks).values())
    assert picks == [ask(min_load(1), session=f"s{n}") for n in range(300)]
    assert picks != [ask(min_load(2), session=f"s{n}") for n in range(300)]


@settings(max_examples=100)
@given(st.lists(st.integers(0, 9), max_size=60))
def test_open_sessions_differ_by_at_most_one_while_none_closes(sessions):
    counts = dict.fromkeys(WORKERS, 0)
    for number, _ in enumerate(sessions):
        worker = ask(min_load(), session=f"s{number}", offered=[WorkerLoad(w, n) for w, n in counts.items()])
        counts[worker] += 1
        assert max(counts.values()) - min(counts.values()) <= 1


# -- sticky


def test_a_session_keeps_its_worker_while_that_is_offered():
    chain = Chain([sticky(), round_robin()])
    first = ask(chain, "s")
    ask(chain, "t")
    assert all(ask(chain, "s") == first for _ in range(5))
    others = [worker for worker in WORKERS if worker != first]
    moved = ask(chain, "s", offered=others)
    assert moved in others
    assert ask(chain, "s") == moved


def test_sticky_leaves_an_unknown_session_to_the_next_policy():
    assert sticky().pick(RouteRequest("s"), offer(A)) is None


def test_a_closed_session_is_forgotten():
    policy = sticky()
    policy.assigned(RouteRequest("s"), A)
    policy.closed("s")
    assert len(policy) == 0
    assert policy.pick(RouteRequest("s"), offer(A)) is None


def test_an_idle_session_is_forgotten_after_its_ttl_and_use_renews_it():
    now = [0.0]
    policy = sticky(ttl=10, now=lambda: now[0])
    policy.assigned(RouteRequest("used"), A)
    policy.assigned(RouteRequest("idle"), B)
    now[0] = 9
    assert policy.pick(RouteRequest("used"), offer(*WORKERS)) == A
    now[0] = 11
    assert policy.pick(RouteRequest("idle"), offer(*WORKERS)) is None
    assert policy.pick(RouteRequest("used"), offer(*WORKERS)) == A
    assert len(policy) == 1


def test_the_table_is_bounded_and_loses_the_longest_idle():
    policy = sticky(max_sessions=3)
    for name in "abcd":
        policy.assigned(RouteRequest(name), A)
    assert len(policy) == 3
    assert policy.pick(RouteRequest("a"), offer(A)) is None
    assert policy.pick(RouteRequest("d"), offer(A)) == A


def test_sessions_of_a_worker_that_has_left_are_forgotten():
    policy = sticky()
    policy.assigned(RouteRequest("s"), A)
    policy.assigned(RouteRequest("t"), B)
    policy.workers_changed([B, C])
    assert len(policy) == 1


events = st.lists(
    st.tuples(
        st.sampled_from(["ask", "close", "leave"]),
        st.integers(0, 5),
        st.sets(st.sampled_from(range(3)), min_size=0),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(events, st.sampled_from(["min_load", "round_robin", "random"]))
def test_no_chain_picks_an_absent_worker_and_sticky_sessions_stay(history, second):
    policies = {"min_load": min_load, "round_robin": round_robin, "random": drawn}
    chain = Chain([sticky(), policies[second]()])
    chain.workers_changed(WORKERS)
    known = {}
    for event, number, present in history:
        session = f"s{number}"
        offered = [WORKERS[i] for i in sorted(present)]
        if event == "close":
            chain.closed(session)
            known.pop(session, None)
            continue
        if event == "leave" and offered:
            chain.workers_changed(offered)
            known = {s: w for s, w in known.items() if w in offered}
        picked = ask(chain, session, offered)
        assert (picked in offered) if offered else picked is None
        if known.get(session) in offered:
            assert picked == known[session]
        if picked is not None:
            known[session] = picked


# -- chains


class Recorder(RouterPolicy):
    """Notes what it is told."""

    def __init__(self, answer=None):
        self.answer, self.told = answer, []

    def pick(self, request, workers):
        return self.answer

    def assigned(self, request, worker):
        self.told.append(("assigned", worker))

    def closed(self, session_id):
        self.told.append(("closed", session_id))

    def workers_changed(self, workers):
        self.told.append(("workers", list(workers)))


def test_all_policies_of_a_chain_learn_what_happens():
    one, two = Recorder(), Recorder(B)
    chain = Chain([one, two])
    chain.workers_changed(WORKERS)
    chain.workers_changed(WORKERS)
    assert ask(chain) == B
    chain.closed("s")
    assert one.told == two.told == [("workers", WORKERS), ("assigned", B), ("closed", "s")]


def test_a_chain_in_which_nobody_decides_takes_the_first():
    assert ask(Chain([Recorder()])) == A
    assert Chain([Recorder()]).pick(RouteRequest("s"), []) is None


def test_a_policy_that_picks_who_is_not_on_offer_is_named():
    with pytest.raises(UsageError, match=r"Recorder picked .*not on offer"):
        ask(Chain([Recorder(B)]), offered=[A])


class Loader:
    """Builds from this distribution's components."""

    classes = {"sticky": Sticky, "min_load": MinLoad, "round_robin": RoundRobin, "random": Random}

    def build(self, kind, name, keys, context):
        component = {c.name: c for c in rollhook_router_policies()}[name]
        return self.classes[name](component.config(**keys), context)


def test_a_chain_is_built_from_names_with_the_keys_of_each():
    chain = build_chain("sticky+min_load", {"sticky": {"ttl": 5}}, Loader(), build_context())
    assert [type(policy) for policy in chain.policies] == [Sticky, MinLoad]
    assert chain.policies[0].config.ttl == 5


@pytest.mark.parametrize(
    ("use", "keys", "told"),
    [
        ("sticky+", {}, "empty name"),
        ("", {}, "empty name"),
        ("sticky+sticky", {}, "names a policy twice"),
        ("min_load", {"sticky": {"ttl": 1}}, r"router\.sticky: no such policy in 'min_load'"),
    ],
)
def test_a_chain_that_makes_no_sense_is_refused_in_words(use, keys, told):
    with pytest.raises(UsageError, match=told):
        build_chain(use, keys, Loader(), build_context())


def test_every_component_can_be_loaded_and_has_described_keys():
    import importlib

    for component in rollhook_router_policies():
        module, _, name = component.load.partition(":")
        assert issubclass(getattr(importlib.import_module(module), name), RouterPolicy)
        for field in component.config.model_fields.values():
            assert field.description
