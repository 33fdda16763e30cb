"""One episode, start to end: boxes, phases, agent, verification, outcome, samples."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import functools
import logging
import math
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from rollhook import budgets, outcomes
from rollhook.agent import Agent, AgentContext, StopReason
from rollhook.budgets import AgentClock, Limits
from rollhook.component import BuildContext
from rollhook.environment import Environment, Episode, EpisodeContext, Phase, Task, Transcript, Verdict
from rollhook.errors import AgentError, BudgetExceeded, RollhookError, TaskError, VerifierError
from rollhook.records import EpisodeRecord, Outcome, Sample
from rollhook.runtime.course import Course
from rollhook.runtime.generated import Generated, generated
from rollhook.runtime.live import Live
from rollhook.runtime.verifier import VerifierTimeoutError, verify_apart, verify_here
from rollhook.runtime.views import Boxes, OnAgentClock, Recorder, RemainingBudget
from rollhook.sandbox.agent_view import AgentSandbox
from rollhook.session.outside import OutsideSession

if TYPE_CHECKING:
    from rollhook.engine import SamplingParams
    from rollhook.recipe.schema import Budgets, Outcomes
    from rollhook.sandbox import Sandbox
    from rollhook.sandbox.pool import SandboxPool
    from rollhook.session import Policy, PolicySession
    from rollhook.session.gateway import Gateway

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EpisodeRequest:
    """What one episode is to do."""

    episode_id: str
    group_id: str
    task: Task
    seed: int
    sampling: SamplingParams | None = None
    purpose: Literal["train", "eval", "oracle"] = "train"


@dataclass(frozen=True)
class EpisodeResult:
    """A finished episode: its record and, when it may train, its samples."""

    record: EpisodeRecord
    samples: Sequence[Sample] = ()


class Runner(Protocol):
    """Runs episodes of one environment, here or elsewhere."""

    async def run(self, request: EpisodeRequest) -> EpisodeResult:
        """Run one episode; every failure becomes its outcome, only cancellation passes through."""


class EpisodeRunner:
    """Runs episodes of one environment with one agent; used by many episodes at once.

    `pool` is None where the environment has no boxes, `policy` None where the agent asks no policy.
    """

    def __init__(
        self,
        *,
        name: str,
        environment: Environment,
        agent: Agent,
        pool: SandboxPool | None,
        policy: Policy | None,
        limits: Budgets,
        outcome_policy: Outcomes,
        context: BuildContext,
        live: Live | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.environment = environment
        self.agent = agent
        self.pool = pool
        self.policy = policy
        #: the HTTP face of the policy's sessions, once there is one
        self.gateway: Gateway | None = None
        self.budgets = limits
        self.outcome_policy = outcome_policy
        self.context = context
        self.live = live or Live()
        self._now = now
        self._reported: set[tuple[object, ...]] = set()

    def asking(self, policy: Policy) -> EpisodeRunner:
        """Return a runner that differs in the policy that its agent asks."""
        other = copy.copy(self)
        other.policy = policy
        return other

    async def run(self, request: EpisodeRequest) -> EpisodeResult:
        """Run one episode; every failure becomes its outcome, only cancellation passes through.

        An episode that `LiveEpisode.cancel` ended has the outcome `cancelled` with its reason.
        """
        limits = budgets.resolve(self.budgets, request.task.limits)
        with self.live.running(request, limits.episode + self.budgets.slack) as live:
            return await self._course(request, limits, Course(live))

    async def _course(self, request: EpisodeRequest, limits: Limits, course: Course) -> EpisodeResult:
        started_at, started = time.time(), self._now()
        clock = AgentClock(limits.agent, limits.turn, limits.command)
        session = course.live.session = self._open_session(request, clock)
        course.live.clock = clock
        try:
            async with asyncio.timeout(limits.episode + self.budgets.slack):
                await self._run(request, limits, session, clock, course)
        except TimeoutError:
            cause = f"the episode took longer than {limits.episode:g} s and its slack"
            course.fail("budget", cause, "episode")
        except asyncio.CancelledError:
            course.ended, course.outcome = "cancelled", Outcome("cancelled", cause=course.live.cancelled)
            task = asyncio.current_task()
            if not course.live.cancelled or task is None or task.uncancel() > 0:
                raise
        except RollhookError as error:
            fired = error.node if isinstance(error, BudgetExceeded) else ""
            course.fail(error.boundary, str(error), fired)
        except Exception as error:  # noqa: BLE001 - logged, and the outcome says it
            self._report(f"episode {request.episode_id} of task {request.task.id} failed", error)
            course.fail("environment", f"{type(error).__name__}: {error}")
        finally:
            course.timings["total"] = self._now() - started
            self.live.enter(course.live, "teardown", None)
            if session is not None:
                await session.close()
        trains = course.outcome is not None and course.outcome.trains
        tokens = await generated(session, trains=trains, seed=request.seed)
        if tokens.lost:
            course.fail("rollhook", tokens.lost)
        return self._result(request, course, tokens, started_at)

    async def _run(
        self,
        request: EpisodeRequest,
        limits: Limits,
        session: PolicySession | None,
        clock: AgentClock,
        course: Course,
    ) -> None:
        boxes: dict[str, Sandbox] = {}
        course.live.boxes = boxes
        home = asyncio.get_running_loop() if self.environment.verifies_apart else None
        ctx = EpisodeContext(request.episode_id, request.seed, Boxes(boxes, home), self.context)
        episode = self.environment.episode(request.task, ctx)
        try:
            await self._create(request, episode, "start", limits, boxes, course)
            async with self._entered(episode, limits, course):
                phases = episode.phases()
                while (phase := await self._next(phases, limits, course)) is not None:
                    if not await self._phase(request, phase, limits, session, clock, boxes, episode, course):
                        break
            if course.outcome is None:
                course.verdicts.append(outcomes.combine(course.verdicts, episode.combine))
                course.outcome = outcomes.verified(course.verdicts[-1])
        finally:
            await self._teardown(boxes, limits, course)

    async def _create(
        self,
        request: EpisodeRequest,
        episode: Episode,
        when: str,
        limits: Limits,
        boxes: dict[str, Sandbox],
        course: Course,
        only: Sequence[str] | None = None,
    ) -> None:
        """Create the boxes of one moment, at once; on failure those that came up are left in `boxes`."""
        wanted = {
            name: box
            for name, box in episode.boxes.items()
            if box.when == when and name not in boxes and (only is None or name in only)
        }
        if not wanted:
            return
        pool = self.pool
        if pool is None:
            raise TaskError(f"task {request.task.id} needs a sandbox and the recipe names none", kind="user")

        async def one(name: str) -> None:
            spec = dataclasses.replace(wanted[name].spec, lifetime_seconds=limits.lifetime)
            boxes[name] = await pool.acquire(
                spec, episode_id=request.episode_id, box=name, timeout=limits.create
            )

        def making() -> str:
            return pool.waits_for(request.episode_id)

        with self._timed(course, "create", limits.create), self.live.waiting(course.live, making):
            try:
                async with asyncio.TaskGroup() as creates:
                    for name in wanted:
                        creates.create_task(one(name))
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None

    @contextlib.asynccontextmanager
    async def _entered(self, episode: Episode, limits: Limits, course: Course) -> AsyncIterator[None]:
        with self._timed(course, "setup", limits.setup):
            try:
                async with asyncio.timeout(limits.setup):
                    await episode.__aenter__()
            except TimeoutError:
                course.fired = "setup"
                raise TaskError(f"entering the episode took longer than {limits.setup:g} s") from None
        try:
            yield
        finally:
            try:
                async with asyncio.timeout(limits.teardown) as leaving:
                    await episode.__aexit__(None, None, None)
            except TimeoutError:
                if not leaving.expired():
                    raise
                logger.warning("leaving an episode took longer than %g s and is given up", limits.teardown)

    async def _next(self, phases: AsyncIterator[Phase], limits: Limits, course: Course) -> Phase | None:
        """Return the next phase, prepared by the environment; None after the last."""
        with self._timed(course, "setup", limits.setup):
            try:
                async with asyncio.timeout(limits.setup) as preparing:
                    return await anext(phases, None)
            except TimeoutError:
                if not preparing.expired():
                    raise
                course.fired = "setup"
                raise TaskError(f"preparing a phase took longer than {limits.setup:g} s") from None

    async def _phase(
        self,
        request: EpisodeRequest,
        phase: Phase,
        limits: Limits,
        session: PolicySession | None,
        clock: AgentClock,
        boxes: dict[str, Sandbox],
        episode: Episode,
        course: Course,
    ) -> bool:
        """Run one phase; False when no other follows."""
        await self._agent(request, phase, session, clock, boxes, course)
        act = outcomes.action(course.ended, self.outcome_policy)
        if act != "verify":
            course.outcome = outcomes.unverified(course.ended, act)
            return False
        with self._timed(course, "verify", limits.verify):
            for name, box in boxes.items():
                census = await box.quiesce()
                if census.killed:
                    course.warnings.append(
                        f"{len(census.killed)} processes of the agent were killed in box {name}"
                    )
            await self._create(request, episode, "verify", limits, boxes, course, phase.judges)
            seconds = min(limits.verify, phase.limits.get("verify", limits.verify))
            verdict = await self._verify(phase, seconds, course)
        course.verdicts.append(verdict)
        return outcomes.reaches(verdict, phase.min_reward)

    async def _agent(
        self,
        request: EpisodeRequest,
        phase: Phase,
        session: PolicySession | None,
        clock: AgentClock,
        boxes: Mapping[str, Sandbox],
        course: Course,
    ) -> None:
        box = boxes[phase.box] if phase.box is not None else None
        course.begin_phase(phase.observation.messages)
        clock.begin_phase(phase.limits.get("agent", math.inf))
        waiting = functools.partial(self.live.waiting, course.live)
        context = AgentContext(
            session=Recorder(session, course.heard, waiting),
            observation=phase.observation,
            budget=RemainingBudget(session, clock),
            sandbox=AgentSandbox(box, clock, self._now, waiting, phase.user) if box is not None else None,
            tools=phase.tools,
            respond=phase.respond,
            seed=request.seed,
            solve=phase.solve if request.purpose == "oracle" and self.agent.needs_solution else None,
            episode_id=request.episode_id,
            endpoint=self._endpoint(session, clock, course),
            note=course.notes.update,
            heard=course.heard,
            on_clock=OnAgentClock(clock, self._now),
        )
        with self._timed(course, "agent", None):
            try:
                reason = await self.agent.run(context)
                course.ended = StopReason(reason).value
            except BudgetExceeded as error:
                course.ended, course.fired, course.used_by = "agent_timeout", error.node, clock.used_by
            except RollhookError:
                raise
            except Exception as error:
                self._report(f"the agent failed in episode {request.episode_id}", error)
                raise AgentError(f"{type(error).__name__}: {error}") from error
            finally:
                for kind, seconds in clock.used.items():
                    course.timings[f"agent/{kind}"] = seconds

    async def _verify(self, phase: Phase, seconds: float, course: Course) -> Verdict:
        transcript = Transcript(list(course.messages), course.ended)
        run = verify_apart if self.environment.verifies_apart else verify_here
        try:
            return outcomes.checked(await run(lambda: phase.verify(transcript), seconds))
        except VerifierTimeoutError:
            course.fired = "verify"
            raise
        except VerifierError:
            raise
        except RollhookError as error:
            raise VerifierError(f"{error.boundary}: {error}") from error
        except Exception as error:
            self._report("a verifier failed", error)
            raise VerifierError(f"{type(error).__name__}: {error}") from error

    async def _teardown(self, boxes: Mapping[str, Sandbox], limits: Limits, course: Course) -> None:
        """Give the boxes back; a failure is the pool's to retry and never changes the outcome."""
        if self.pool is None or not boxes:
            return
        with self._timed(course, "teardown", limits.teardown):
            for name, box in boxes.items():
                try:
                    async with asyncio.timeout(limits.teardown):
                        await self.pool.release(box)
                except Exception as error:  # noqa: BLE001 - logged, and the lease keeps it reapable
                    logger.warning("box %s (%s) could not be closed now: %s", name, box.id, error)

    def _report(self, what: str, error: Exception) -> None:
        """Log a fault in a plugin's code with its traceback, once for each place; records have them all."""
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = (type(error), last.filename, last.lineno)
        if place not in self._reported:
            self._reported.add(place)
            logger.error("%s (the same again is not shown)", what, exc_info=error)

    def _endpoint(
        self, session: PolicySession | None, clock: AgentClock, course: Course
    ) -> OutsideSession | None:
        if session is None or self.gateway is None:
            return None
        return OutsideSession(session, self.gateway, clock, course.heard, self._now)

    def _open_session(self, request: EpisodeRequest, clock: AgentClock) -> PolicySession | None:
        if self.policy is None or request.sampling is None:
            return None
        return self.policy.open(
            request.episode_id,
            task_id=request.task.id,
            sampling=request.sampling,
            max_seq_len=self.budgets.max_seq_len,
            reply_tokens=self.budgets.reply_tokens,
            turns=self.budgets.turns,
            seed=request.seed,
            clock=clock,
        )

    @contextlib.contextmanager
    def _timed(self, course: Course, node: str, limit: float | None) -> Iterator[None]:
        """Add the block's seconds to a budget node and show it as what the episode is doing."""
        started = self._now()
        outer = course.live.node, course.live.node_since, course.live.deadline
        self.live.enter(course.live, node, limit)
        try:
            yield
        finally:
            course.live.node, course.live.node_since, course.live.deadline = outer
            course.spent(node, self._now() - started)

    def _result(
        self, request: EpisodeRequest, course: Course, tokens: Generated, started_at: float
    ) -> EpisodeResult:
        outcome = course.outcome or Outcome(
            "infra_error", boundary="rollhook", cause="the episode has no outcome"
        )
        verdict = course.verdicts[-1] if course.verdicts else Verdict(None)
        failed = outcome.kind in ("infra_error", "cancelled")  # then a verdict is one of an earlier phase
        if (stats := tokens.stats) is not None:
            course.timings["wait/engine"] = stats.wait_seconds
            if stats.estimated:
                course.warnings.append("token counts are estimates: the endpoint reports no usage")
        record = EpisodeRecord(
            episode_id=request.episode_id,
            run_id=self.context.run_id,
            attempt=self.context.attempt,
            purpose=request.purpose,
            group_id=request.group_id,
            task_id=request.task.id,
            task_digest=request.task.digest,
            environment=self.name,
            family=request.task.family,
            seed=request.seed,
            ended=course.ended,
            outcome=outcome,
            reward=None if failed else verdict.reward,
            components=verdict.components,
            detail={**verdict.detail, "agent": course.notes} if course.notes else verdict.detail,
            messages=[*course.earlier, *course.messages],
            timings={k: round(v, 6) for k, v in course.timings.items()},
            fired=course.fired,
            used_by=course.used_by,
            warnings=course.warnings,
            started_at=started_at,
            **tokens.fields(),
        )
        if outcome.reward is None:
            return EpisodeResult(record)
        return EpisodeResult(record, tokens.samples(record))
