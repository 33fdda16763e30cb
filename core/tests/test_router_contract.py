"""The router contract passes for a policy that keeps it, and each broken one fails just its cases."""

import random

import pytest

from rollhook.component import Config
from rollhook.router import RouterPolicy, Worker
from rollhook.testing.contract import failing_cases
from rollhook.testing.environment import build_context
from rollhook.testing.router import RouterPolicyContract


class First(RouterPolicy):
    """Picks the first on offer, and remembers sessions for no reason."""

    def __init__(self, seed):
        super().__init__(Config(), build_context(seed=seed))
        self.seen = set()

    def pick(self, request, workers):
        return workers[0].worker if workers else None

    def assigned(self, request, worker):
        self.seen.add(request.session_id)

    def closed(self, session_id):
        self.seen.discard(session_id)


class TestFirst(RouterPolicyContract):
    @pytest.fixture
    def make_policy(self):
        return First


class TestSilent(RouterPolicyContract):
    @pytest.fixture
    def make_policy(self):
        return lambda seed: RouterPolicy(Config(), build_context(seed=seed))


class Elsewhere(First):
    """Picks a worker that nobody offers."""

    def pick(self, request, workers):
        return Worker("http://elsewhere") if workers else None


class Loyal(First):
    """Keeps sessions on workers that are gone."""

    def __init__(self, seed):
        super().__init__(seed)
        self.table = {}

    def pick(self, request, workers):
        return self.table.get(request.session_id) or super().pick(request, workers)

    def assigned(self, request, worker):
        self.table.setdefault(request.session_id, worker)

    def closed(self, session_id):
        self.table.pop(session_id, None)


class Eager(First):
    """Fails when nobody is on offer."""

    def pick(self, request, workers):
        return workers[0].worker


class Moody(First):
    """Draws from the process's own randomness."""

    def pick(self, request, workers):
        return random.SystemRandom().choice(workers).worker if workers else None


class Strict(First):
    """Insists on closing what it knows."""

    def closed(self, session_id):
        self.seen.remove(session_id)


class Asynchronous(First):
    """Answers later."""

    def closed(self, session_id):
        async def later():
            return None

        work = later()
        work.close()
        return work


class Vain(First):
    """Sorts the list that it is given."""

    def pick(self, request, workers):
        workers.sort(key=lambda load: load.worker.url, reverse=True)
        return super().pick(request, workers)


class Hoarder(First):
    """Never forgets a session."""

    def closed(self, session_id):
        self.seen.add(session_id)


class Ascii(First):
    """Knows only session ids that are text."""

    def assigned(self, request, worker):
        request.session_id.encode()
        super().assigned(request, worker)


ON_OFFER = "test_it_picks_a_worker_on_offer_or_none"
LEFT = "test_a_worker_that_has_left_is_not_missed"
CLOSING = "test_closing_is_harmless_for_sessions_unknown_and_known"
LIFE = "test_any_life_of_sessions_and_workers_is_served"
CHURN = "test_workers_may_come_and_go_at_every_turn"
BOUNDED = "test_what_it_keeps_of_closed_sessions_is_bounded"
MANY = "test_it_serves_ten_thousand_sessions_over_sixty_four_workers"
RANKS = "test_ranks_of_one_engine_are_workers_of_their_own"


@pytest.mark.parametrize(
    ("broken", "cases"),
    [
        (Elsewhere, {ON_OFFER, LEFT, CLOSING, LIFE, CHURN, MANY, RANKS}),
        (Loyal, {ON_OFFER, LEFT, LIFE, CHURN}),
        (Moody, {"test_the_same_seed_and_history_give_the_same_choices", LIFE}),
        (Hoarder, {BOUNDED}),
        (Asynchronous, {"test_it_answers_at_once_and_is_no_coroutine", BOUNDED}),
        (Vain, {"test_it_does_not_alter_what_it_is_given"}),
        (Ascii, {"test_any_session_id_will_do"}),
    ],
)
def test_a_broken_policy_fails_just_its_cases(broken, cases):
    assert failing_cases(RouterPolicyContract, {"make_policy": lambda: broken}) == cases


@pytest.mark.parametrize(
    ("broken", "case"),
    [(Eager, "test_with_nobody_on_offer_it_picks_nobody"), (Strict, CLOSING)],
)
def test_a_policy_that_raises_is_caught(broken, case):
    assert case in failing_cases(RouterPolicyContract, {"make_policy": lambda: broken})
