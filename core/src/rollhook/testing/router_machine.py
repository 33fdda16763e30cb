"""The life of a router policy as a state machine; the contract runs it where hypothesis is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from rollhook.router import RouteRequest, RouterPolicy, Worker, WorkerLoad

WORKERS = [Worker(f"http://{name}", rank) for name in "ab" for rank in (None, 0, 1)]
SESSIONS = [f"s{number}" for number in range(6)]


def run_life(make_policy: Callable[[int], RouterPolicy]) -> None:
    """Let a policy and its twin of the same seed live through sequences of events; raise what goes wrong."""

    class Life(RuleBasedStateMachine):
        """Sessions come, come back, move and close; workers join, leave, fall ill and recover."""

        @initialize(seed=st.integers(0, 3), workers=st.sets(st.sampled_from(WORKERS)))
        def begin(self, seed: int, workers: set[Worker]) -> None:
            self.policies = [make_policy(seed), make_policy(seed)]
            self.sessions: dict[str, Worker] = {}
            self.ill: set[Worker] = set()
            self.change(workers)

        @rule(workers=st.sets(st.sampled_from(WORKERS)))
        def change(self, workers: set[Worker]) -> None:
            self.workers = sorted(workers, key=WORKERS.index)
            for policy in self.policies:
                policy.workers_changed(self.workers)

        @rule(workers=st.sets(st.sampled_from(WORKERS)))
        def fall_ill(self, workers: set[Worker]) -> None:
            self.ill = workers

        @rule(
            session=st.sampled_from(SESSIONS),
            task=st.sampled_from(["", "t", "u"]),
            ids=st.lists(st.integers(0, 1), max_size=8),
        )
        def turn(self, session: str, task: str, ids: list[int]) -> None:
            offered = self.loads()
            request = RouteRequest(session, task, ids, 100)
            picked = [policy.pick(request, list(offered)) for policy in self.policies]
            assert picked[0] == picked[1], "two policies of one seed and history differ"
            assert picked[0] is None or picked[0] in [load.worker for load in offered]
            if picked[0] is not None:
                self.sessions[session] = picked[0]
                for policy in self.policies:
                    policy.assigned(request, picked[0])

        @rule(session=st.sampled_from(SESSIONS))
        def close(self, session: str) -> None:
            self.sessions.pop(session, None)
            for policy in self.policies:
                policy.closed(session)

        @invariant()
        def each_turn_is_a_plain_yes_or_no(self) -> None:
            assert all(isinstance(policy.each_turn, bool) for policy in self.policies)

        def loads(self) -> Sequence[WorkerLoad]:
            chosen = list(self.sessions.values())
            return [WorkerLoad(w, chosen.count(w)) for w in self.workers if w not in self.ill]

    plan = settings(
        max_examples=30,
        stateful_step_count=20,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],  # lives are short: shrinking one takes longer than reading it
    )
    run_state_machine_as_test(Life, settings=plan)
