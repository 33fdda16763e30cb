"""The environment contract holds for a correct environment, and each broken one fails just its cases."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Sequence

import pytest

from rollhook.environment import Environment, Episode, EpisodeContext, Phase, Task, Transcript, Verdict
from rollhook.testing.contract import failing_cases
from rollhook.testing.environment import EnvironmentContract, MakeEnvironment, build_context
from rollhook.testing.fake_environment import Sums, SumsConfig, SumsEpisode, SumsPhase


class TestSums(EnvironmentContract):
    @pytest.fixture
    def make_environment(self) -> MakeEnvironment:
        return lambda: Sums(SumsConfig(), build_context())

    @pytest.fixture
    def problem_task(self) -> str:
        return "broken"

    @pytest.fixture
    def no_reward_task(self) -> str:
        return "unjudged"


class NoTasks(Sums):
    def tasks(self, split: str | None = None) -> Sequence[Task]:
        return [task for task in super().tasks(split) if task.problem]


class OneIdForAll(Sums):
    def tasks(self, split: str | None = None) -> Sequence[Task]:
        tasks = list(super().tasks(split))
        return [*tasks, tasks[0]]


class OtherTasksEachTime(Sums):
    _calls = itertools.count()

    def tasks(self, split: str | None = None) -> Sequence[Task]:
        tasks = list(super().tasks(split))
        shift = next(self._calls) % 4
        return [*tasks[shift:4], *tasks[:shift], *tasks[4:]]


class ADigestOfTheMoment(Sums):
    _calls = itertools.count()

    def tasks(self, split: str | None = None) -> Sequence[Task]:
        return [dataclasses.replace(t, digest=f"{next(self._calls)}") for t in super().tasks(split)]


class AnySplitWillDo(Sums):
    def tasks(self, split: str | None = None) -> Sequence[Task]:
        return super().tasks(None)


class APayloadThatStays(Sums):
    def tasks(self, split: str | None = None) -> Sequence[Task]:
        return [dataclasses.replace(t, payload=lambda: None) for t in super().tasks(split)]

    def episode(self, task: Task, ctx: EpisodeContext) -> Episode:
        return super().episode(next(t for t in super().tasks() if t.id == task.id), ctx)


class LimitsInNothing(Sums):
    def tasks(self, split: str | None = None) -> Sequence[Task]:
        return [dataclasses.replace(t, limits={"agent_ms": 10}) for t in super().tasks(split)]


class EmptyProblems(Sums):
    def problems(
        self, sandbox_capabilities: frozenset[str], tasks: Sequence[Task] | None = None
    ) -> Sequence[str]:
        return [""]


class RunsWhatCannotRun(Sums):
    def episode(self, task: Task, ctx: EpisodeContext) -> Episode:
        return SumsEpisode(SumsPhase(1, 1, True))


class Mute(Sums):
    def phase(self, a: int, b: int, judged: bool) -> Phase:
        phase = super().phase(a, b, judged)
        phase.observation.messages[0]["content"] = " "
        return phase


class Altered(Sums):
    def alter(self, verdict: Verdict) -> Verdict:
        raise NotImplementedError

    def phase(self, a: int, b: int, judged: bool) -> Phase:
        alter = self.alter

        class AlteredPhase(SumsPhase):
            async def verify(self, transcript: Transcript) -> Verdict:
                return alter(await super().verify(transcript))

        return AlteredPhase(a, b, judged)


class NothingIsRight(Altered):
    def alter(self, verdict: Verdict) -> Verdict:
        return verdict if verdict.reward is None else dataclasses.replace(verdict, reward=0.0)


class EverythingIsRight(Altered):
    def alter(self, verdict: Verdict) -> Verdict:
        return verdict if verdict.reward is None else dataclasses.replace(verdict, reward=1.0)


class ABooleanComponent(Altered):
    def alter(self, verdict: Verdict) -> Verdict:
        return dataclasses.replace(verdict, components={"right": True})


class MissingIsZero(Altered):
    def alter(self, verdict: Verdict) -> Verdict:
        return verdict if verdict.reward is not None else Verdict(0.0)


class OneSolutionForAll(Sums):
    """Whoever solves, solves for every episode that runs at the time."""

    solvers = 0

    def phase(self, a: int, b: int, judged: bool) -> Phase:
        environment = self

        class Shared(SumsPhase):
            async def solve(self) -> None:
                environment.solvers += 1

            async def verify(self, transcript: Transcript) -> Verdict:
                if not judged:
                    return await super().verify(transcript)
                await asyncio.sleep(0)
                right = float(environment.solvers > 0)
                await asyncio.sleep(0)
                environment.solvers = 0
                return Verdict(right)

        return Shared(a, b, judged)


class ClosesOnce(Sums):
    closed = False

    async def aclose(self) -> None:
        assert not self.closed
        self.closed = True


BROKEN: dict[type[Environment], set[str]] = {
    OneIdForAll: {"test_task_ids_are_unique", "test_digests_are_stable_and_tell_tasks_apart"},
    OtherTasksEachTime: {"test_the_same_configuration_gives_the_same_tasks"},
    ADigestOfTheMoment: {"test_digests_are_stable_and_tell_tasks_apart"},
    AnySplitWillDo: {"test_an_unknown_split_is_a_usage_error"},
    APayloadThatStays: {"test_tasks_travel_between_processes"},
    LimitsInNothing: {"test_limits_are_seconds_of_budget_nodes"},
    EmptyProblems: {"test_problems_are_sentences"},
    RunsWhatCannotRun: {
        "test_a_task_that_cannot_run_says_why_and_is_refused",
        "test_a_missing_reward_is_none_and_says_why",
    },
    Mute: {"test_the_agent_is_told_what_to_do"},
    NothingIsRight: {
        "test_the_reference_solution_earns_the_full_reward",
        "test_episodes_at_once_do_not_disturb_each_other",
    },
    EverythingIsRight: {
        "test_doing_nothing_earns_less",
        "test_episodes_at_once_do_not_disturb_each_other",
    },
    ABooleanComponent: {"test_rewards_and_components_are_finite_numbers"},
    MissingIsZero: {"test_a_missing_reward_is_none_and_says_why"},
    OneSolutionForAll: {
        "test_episodes_at_once_do_not_disturb_each_other",
        "test_judging_again_gives_the_same_reward",
    },
    ClosesOnce: {"test_closing_twice_is_safe"},
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_environment_fails_just_its_cases(broken: type[Environment]) -> None:
    assert _failing(broken) == BROKEN[broken]


def test_an_environment_without_tasks_fails_what_needs_one() -> None:
    assert "test_there_is_a_task_that_can_run" in _failing(NoTasks)


def test_every_case_of_the_contract_is_failed_by_some_broken_environment() -> None:
    cases = {name for name in dir(EnvironmentContract) if name.startswith("test_")}
    with_sandbox = {"test_files_that_a_verifier_leaves_earn_nothing_when_planted"}  # tests/test_authors.py
    assert cases == set().union(*BROKEN.values()) | {"test_there_is_a_task_that_can_run"} | with_sandbox


def _failing(environment: type[Environment]) -> set[str]:
    return failing_cases(
        EnvironmentContract,
        {
            "make_environment": lambda: lambda: environment(SumsConfig(), build_context()),
            "open_box": lambda: None,
            "problem_task": lambda: "broken",
            "no_reward_task": lambda: "unjudged",
        },
    )
