"""The router policies, alone and chained."""

from collections import Counter
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollhook.errors import UsageError
from rollhook.router import RouteRequest, RouterPolicy, Worker, WorkerLoad
from rollhook.routing import Chain, build_chain
from rollhook.testing.environment import build_context
from rollhook.testing.router import RouterPolicyContract
from rollhook_routing import (
    ConsistentHashConfig,
    MinLoadConfig,
    PowerOfTwoConfig,
    PrefixCacheConfig,
    RandomConfig,
    RoundRobinConfig,
    StickyConfig,
    rollhook_router_policies,
)
from rollhook_routing.policies import MinLoad, PowerOfTwo, Random, RoundRobin, Sticky
from rollhook_routing.prefix import PrefixCache, PrefixTree
from rollhook_routing.ring import ConsistentHash

A, B, C = WORKERS = [Worker(f"http://{name}") for name in "abc"]


def min_load(seed=0):
    return MinLoad(MinLoadConfig(), build_context(seed=seed))


def round_robin(seed=0):
    return RoundRobin(RoundRobinConfig(), build_context(seed=seed))


def drawn(seed=0):
    return Random(RandomConfig(), build_context(seed=seed))


def sticky(seed=0, now=lambda: 0.0, **keys):
    return Sticky(StickyConfig(**keys), build_context(seed=seed), now)


def power_of_two(seed=0):
    return PowerOfTwo(PowerOfTwoConfig(), build_context(seed=seed))


def consistent_hash(seed=0, **keys):
    return ConsistentHash(ConsistentHashConfig(**keys), build_context(seed=seed))


def prefix_cache(seed=0, **keys):
    return PrefixCache(PrefixCacheConfig(**keys), build_context(seed=seed))


class TestPowerOfTwo(RouterPolicyContract):
    @pytest.fixture
    def make_policy(self):
        return power_of_two


class TestConsistentHash(RouterPolicyContract):
    @pytest.fixture
    def make_policy(self):
        return consistent_hash


class TestBoundedConsistentHash(RouterPolicyContract):
    @pytest.fixture
    def make_policy(self):
        return lambda seed: consistent_hash(seed, load_factor=1.25, key="task")


class TestPrefixCache(RouterPolicyContract):
    @pytest.fixture
    def make_policy(self):
        return lambda seed: prefix_cache(seed, chunk=2, max_chunks=500)


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


def ask(policy, session="s", offered=WORKERS, ids=(), task=""):
    loads = [load if isinstance(load, WorkerLoad) else WorkerLoad(load) for load in offered]
    request = RouteRequest(session, task, ids)
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


def test_a_session_that_was_forgotten_stays_on_the_worker_that_it_has():
    now = [0.0]
    chain = Chain([sticky(ttl=10, now=lambda: now[0]), round_robin()])
    chain.workers_changed([A, B])
    ask(chain, "s", [A])
    now[0] = 11
    chain.workers_changed(WORKERS)
    assert chain.each_turn
    request = RouteRequest("s", worker=A)
    assert [chain.pick(request, offer(A, B)) for _ in range(3)] == [A] * 3


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


# -- sticky, when workers join


def serve(chain, sessions, workers, turns=1):
    """Give each session turns in order, with the loads that follow; return the sessions' workers."""
    table = {}
    for _ in range(turns):
        for session in sessions:
            counts = Counter(table.values())
            table[session] = ask(chain, session, [WorkerLoad(w, counts[w]) for w in workers])
    return table


def turn_of_all(chain, table, workers):
    """Give each session of a table one turn and note where it went; return how many moved."""
    moved = 0
    for session, old in list(table.items()):
        counts = Counter(table.values())
        table[session] = ask(chain, session, [WorkerLoad(w, counts[w]) for w in workers])
        moved += table[session] != old
    return moved


def test_a_worker_that_joins_gets_its_share_and_then_nobody_moves():
    chain = Chain([sticky(), min_load()])
    chain.workers_changed([A, B])
    table = serve(chain, [f"s{n}" for n in range(12)], [A, B])
    assert not chain.each_turn
    chain.workers_changed(WORKERS)
    assert chain.each_turn
    moved = turn_of_all(chain, table, WORKERS)
    counts = Counter(table.values())
    assert moved == counts[C]
    assert 2 <= counts[C] <= 4
    assert max(counts.values()) <= 1.25 * 4
    assert [turn_of_all(chain, table, WORKERS) for _ in range(3)] == [0, 0, 0]
    for number in range(3):
        counts = Counter(table.values())
        table[f"new{number}"] = ask(chain, f"new{number}", [WorkerLoad(w, counts[w]) for w in WORKERS])
    assert turn_of_all(chain, table, WORKERS) == 0
    assert not chain.each_turn, "with its share it is no newcomer any more"


def test_the_first_workers_are_no_newcomers():
    policy = sticky()
    policy.workers_changed(WORKERS)
    assert not policy.each_turn


def test_within_the_margin_and_with_none_nobody_moves():
    for rebalance in (5.0, None):
        chain = Chain([sticky(rebalance=rebalance), min_load()])
        chain.workers_changed([A, B])
        table = serve(chain, [f"s{n}" for n in range(12)], [A, B])
        chain.workers_changed(WORKERS)
        assert chain.each_turn == (rebalance is not None)
        assert turn_of_all(chain, table, WORKERS) == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 60))
def test_one_joining_moves_a_session_at_most_once(before, after, sessions):
    workers = [Worker(f"http://w{n}") for n in range(before + after)]
    chain = Chain([sticky(), min_load()])
    chain.workers_changed(workers[:before])
    table = serve(chain, [f"s{n}" for n in range(sessions)], workers[:before])
    chain.workers_changed(workers)
    moves = Counter()
    for _ in range(3):
        old = dict(table)
        turn_of_all(chain, table, workers)
        moves.update(session for session in table if table[session] != old[session])
    assert all(count == 1 for count in moves.values())
    assert all(table[session] in workers[before:] for session in moves)


# -- power of two


def test_power_of_two_never_takes_the_most_loaded():
    policy, loads = power_of_two(), [WorkerLoad(A, 1), WorkerLoad(B, 2), WorkerLoad(C, 9)]
    picks = Counter(ask(policy, offered=loads) for _ in range(300))
    assert set(picks) == {A, B}
    assert picks[A] > picks[B]


def test_power_of_two_is_nearly_even():
    """The maximum is the mean plus log log n / log 2 + O(1) with high probability (Mitzenmacher 2001)."""
    policy, counts = power_of_two(), Counter()
    workers = [Worker(f"http://w{n}") for n in range(20)]
    for number in range(2000):
        counts[ask(policy, f"s{number}", [WorkerLoad(w, counts[w]) for w in workers])] += 1
    assert max(counts.values()) <= 100 + 5


# -- consistent hash


def test_a_key_has_one_worker_whoever_asks():
    first = [ask(consistent_hash(), f"s{n}") for n in range(200)]
    assert first == [ask(consistent_hash(), f"s{n}", offered=WORKERS[::-1]) for n in range(200)]
    assert set(first) == set(WORKERS)
    assert first != [ask(consistent_hash(1), f"s{n}") for n in range(200)]


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 8), st.data())
def test_only_the_keys_of_a_worker_that_left_move(count, data):
    workers = [Worker(f"http://w{n}", n % 2) for n in range(count)]
    gone = data.draw(st.sampled_from(workers))
    policy = consistent_hash()
    policy.workers_changed(workers)
    before = {n: ask(policy, f"s{n}", workers) for n in range(100)}
    left = [worker for worker in workers if worker != gone]
    ill = {n: ask(policy, f"s{n}", left) for n in range(100)}
    assert all(ill[n] == worker for n, worker in before.items() if worker != gone)
    policy.workers_changed(left)
    assert ill == {n: ask(policy, f"s{n}", left) for n in range(100)}
    assert before == {n: ask(policy, f"s{n}", workers) for n in range(100)}


def test_shares_of_keys_are_near_each_other():
    policy, workers = consistent_hash(), [Worker(f"http://w{n}") for n in range(8)]
    counts = Counter(ask(policy, f"s{n}", workers) for n in range(8000))
    assert all(600 < counts[worker] < 1400 for worker in workers)  # about 9 % of 1000, several times over


def test_a_task_can_be_the_key_and_is_where_there_is_no_session():
    by_task = consistent_hash(key="task")
    assert len({ask(by_task, f"s{n}", task="t") for n in range(50)}) == 1
    assert len({ask(consistent_hash(), "", task=f"t{n}") for n in range(50)}) == 3
    assert len({ask(consistent_hash(), f"s{n}", task="t") for n in range(50)}) == 3


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(0, 80), st.sampled_from([1.0, 1.25, 2.0]))
def test_no_worker_gets_more_than_its_bound(count, sessions, factor):
    workers = [Worker(f"http://w{n}") for n in range(count)]
    policies = consistent_hash(load_factor=factor, key="task"), prefix_cache(load_factor=factor, chunk=1)
    for policy in policies:
        counts = Counter()
        for number in range(sessions):
            loads = [WorkerLoad(w, counts[w]) for w in workers]
            counts[ask(policy, f"s{number}", loads, ids=[1, 2, 3], task="t")] += 1
            assert max(counts.values()) <= -(-factor * (number + 1) // count)


# -- prefix cache

SYSTEM, TASKS = list(range(8)), [[100 + n] * 8 for n in range(6)]


def test_siblings_gather_where_their_prompt_is_known():
    policy, loads = prefix_cache(chunk=4, load_factor=3.0), offer(*WORKERS)
    first = ask(policy, "s0", loads, ids=SYSTEM + TASKS[0])
    assert all(ask(policy, f"s{n}", loads, ids=SYSTEM + TASKS[0]) == first for n in range(1, 9))


def test_a_prompt_that_nobody_knows_goes_to_the_least_loaded():
    assert ask(prefix_cache(chunk=4), "s", [WorkerLoad(A, 1, 9), WorkerLoad(B, 1, 8)], ids=SYSTEM) == B
    assert ask(prefix_cache(chunk=4), "s", [WorkerLoad(A, 2), WorkerLoad(B, 1)], ids=SYSTEM) == B


def test_a_worker_that_is_too_full_gets_no_new_session():
    policy = prefix_cache(chunk=4)
    policy.assigned(RouteRequest("s", "", SYSTEM), A)
    assert ask(policy, "t", [WorkerLoad(A, 1), WorkerLoad(B, 1)], ids=SYSTEM) == A
    assert ask(policy, "u", [WorkerLoad(A, 9), WorkerLoad(B, 1)], ids=SYSTEM) == B


@pytest.mark.parametrize(("in_flight", "picked"), [(79, A), (81, B)])
def test_a_known_token_weighs_as_much_as_so_many_in_flight(in_flight, picked):
    policy = prefix_cache(chunk=4, recompute_cost=10)
    policy.assigned(RouteRequest("s", "", SYSTEM), A)
    assert ask(policy, "t", [WorkerLoad(A, 1, in_flight), WorkerLoad(B, 1)], ids=[*SYSTEM, 7]) == picked


def test_the_longest_known_prefix_wins():
    policy = prefix_cache(chunk=4)
    policy.assigned(RouteRequest("s", "", SYSTEM), A)
    policy.assigned(RouteRequest("t", "", SYSTEM + TASKS[0]), B)
    assert ask(policy, "u", ids=SYSTEM + TASKS[0] + [5]) == B


def turn(policy, requests, home, in_flight=(0, 0, 0), ids=SYSTEM):
    """Ask for a later turn of a session, with these requests and tokens in flight at each worker."""
    rows = zip(WORKERS, requests, in_flight, strict=True)
    loads = [WorkerLoad(worker, 1, tokens, requests=count) for worker, count, tokens in rows]
    request = RouteRequest("s", "", ids, worker=home)
    worker = policy.pick(request, loads)
    policy.assigned(request, worker)
    return worker


@pytest.mark.parametrize(
    ("requests", "in_flight", "where"),
    [
        ((4, 2, 1), (900, 500, 100), C),
        ((4, 2, 1), (900, 0, 901), A),
        ((4, 5, 1), (900, 500, 100), A),
        ((4, 2, 1), (180, 500, 100), A),
        ((4, 2, 1), (181, 500, 100), C),
        ((0, 0, 0), (0, 0, 0), A),
    ],
    ids=[
        "to who has the fewest",
        "not to the second emptiest",
        "others are as full",
        "what is computed again outweighs it",
        "or just does not",
        "all idle",
    ],
)
def test_a_session_leaves_the_fullest_worker_when_that_costs_less(requests, in_flight, where):
    policy = prefix_cache(chunk=4, recompute_cost=10)  # 8 tokens to compute again weigh 80 in flight
    assert turn(policy, requests, A, in_flight) == where


def test_of_two_that_are_emptiest_the_one_that_knows_more_is_taken():
    policy = prefix_cache(chunk=4, recompute_cost=10)
    policy.assigned(RouteRequest("t", "", SYSTEM[:4]), B)
    assert turn(policy, (5, 1, 1), A, (900, 30, 0)) == B


def test_a_session_that_moved_is_known_where_it_was():
    policy = prefix_cache(chunk=4, recompute_cost=1000)
    policy.assigned(RouteRequest("s", "", SYSTEM), A)
    assert turn(policy, (5, 0, 0), A, (9999, 1, 0)) == C
    assert turn(policy, (0, 0, 5), C, (0, 0, 10)) == A


def test_behind_sticky_no_session_moves_and_alone_any_may():
    loads = [WorkerLoad(A, 1, 10**6, requests=9), WorkerLoad(B)]
    request = RouteRequest("s", "", SYSTEM, worker=A)
    assert prefix_cache().each_turn
    assert prefix_cache().pick(request, loads) == B
    assert Chain([sticky(), prefix_cache()]).pick(request, loads) == A


def test_a_worker_that_left_is_no_home():
    assert turn(prefix_cache(chunk=4), (0, 1, 1), Worker("http://gone")) in WORKERS


counts = st.lists(st.integers(0, 9), min_size=3, max_size=3)
tokens = st.lists(st.integers(0, 2000), min_size=3, max_size=3)


@settings(max_examples=200)
@given(counts, tokens, st.sampled_from(WORKERS), st.integers(0, 100))
def test_a_move_makes_the_fullest_worker_emptier_and_costs_less_than_staying(counts, tokens, home, price):
    worker = turn(prefix_cache(chunk=4, recompute_cost=price), counts, home, tokens)
    to, at = WORKERS.index(worker), WORKERS.index(home)
    if to != at:
        assert all(counts[at] >= count for count in counts)
        assert counts[to] == min(count for number, count in enumerate(counts) if number != at)
        assert tokens[to] + price * len(SYSTEM) < tokens[at]


def test_what_a_worker_held_is_forgotten_when_it_leaves():
    policy = prefix_cache(chunk=4)
    policy.assigned(RouteRequest("s", "", SYSTEM), A)
    policy.workers_changed([B, C])
    assert len(policy) == 0
    policy.workers_changed(WORKERS)
    assert ask(policy, "t", [WorkerLoad(A, 2), WorkerLoad(B, 1)], ids=SYSTEM) == B


prompts = st.lists(st.integers(0, 1), max_size=12)


@settings(max_examples=100)
@given(st.lists(st.tuples(prompts, st.sampled_from(WORKERS)), max_size=15), prompts, st.integers(1, 4))
def test_a_match_is_the_longest_prefix_in_whole_chunks(sent, wanted, chunk):
    tree = PrefixTree(chunk, 10_000)
    for ids, worker in sent:
        tree.add(ids, worker)

    def common(ids):
        equal = takewhile(lambda pair: pair[0] == pair[1], zip(ids, wanted, strict=False))
        return len(list(equal)) // chunk * chunk

    expected = {worker: max(common(ids) for ids, w in sent if w == worker) for _, worker in sent}
    assert tree.match(wanted) == {worker: length for worker, length in expected.items() if length}


@settings(max_examples=100)
@given(st.lists(st.tuples(prompts, st.sampled_from(WORKERS)), max_size=25), st.integers(1, 6))
def test_the_longest_unused_is_forgotten_first_and_a_leaf_before_what_it_starts_with(sent, most):
    tree = PrefixTree(1, most)
    for ids, worker in sent:
        tree.add(ids, worker)
        assert len(tree) <= most
        assert tree.match(ids).get(worker, 0) == min(len(ids), most)
        reached = {
            tuple(each[: n + 1]) for each, _ in sent for n in range(max(tree.match(each).values(), default=0))
        }
        assert len(reached) == len(tree), "all that is remembered can be found"


events = st.lists(
    st.tuples(
        st.sampled_from(["ask", "close", "leave"]),
        st.integers(0, 5),
        st.sets(st.sampled_from(range(3)), min_size=0),
    ),
    max_size=60,
)


@settings(max_examples=100)
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


def test_a_chain_wants_what_one_of_its_policies_wants():
    assert Chain([sticky(), prefix_cache()]).needs_prefix
    assert not Chain([sticky(), min_load()]).needs_prefix
    assert not Chain([sticky(), min_load()]).each_turn


def test_a_chain_in_which_nobody_decides_takes_the_first():
    assert ask(Chain([Recorder()])) == A
    assert Chain([Recorder()]).pick(RouteRequest("s"), []) is None


def test_a_policy_that_picks_who_is_not_on_offer_is_named():
    with pytest.raises(UsageError, match=r"Recorder picked .*not on offer"):
        ask(Chain([Recorder(B)]), offered=[A])


class Loader:
    """Builds from this distribution's components."""

    classes = {"sticky": Sticky, "min_load": MinLoad}

    def build(self, kind, name, keys, context, key_path=""):
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
