"""Episodes against an endpoint: a record without samples, and a policy without weights, tokenizer or Ray."""

import asyncio
import re
from contextlib import AsyncExitStack

from rollhook.agent import Agent, StopReason
from rollhook.component import Config
from rollhook.engine import SamplingParams
from rollhook.engine.messages import BusyError, Completion, MessageEngine, RequestLimits, Usage
from rollhook.errors import EngineError
from rollhook.recipe.check import check_recipe
from rollhook.recipe.schema import Budgets, Outcomes
from rollhook.runtime.endpoint import asks_endpoint, open_endpoint
from rollhook.runtime.episode import EpisodeRequest, EpisodeRunner
from rollhook.runtime.evaluate import evaluate
from rollhook.runtime.parts import Parts
from rollhook.session import MessagePolicy
from rollhook.testing.environment import build_context
from rollhook.testing.fake_environment import Sums

COUNTED = Usage(12, 3)


class Adder(MessageEngine):
    """Adds what it is asked to, in a reply of so many tokens; `wrong` is raised instead."""

    limits = RequestLimits(max_retries=1)

    def __init__(self, reason="stop", wrong=None, usage=COUNTED):
        super().__init__(Config(), None)
        self.reason, self.wrong, self.usage = reason, wrong, usage

    async def start(self):
        pass

    async def stop(self):
        pass

    async def complete(self, request):
        if self.wrong:
            raise self.wrong
        numbers = map(int, re.findall(r"\d+", request.messages[-1]["content"]))
        return Completion({"role": "assistant", "content": str(sum(numbers))}, self.reason, self.usage)


class Asks(Agent):
    async def run(self, context):
        reply = await context.session.chat(context.observation.messages)
        return StopReason.LENGTH if reply.finish_reason == "length" else StopReason.DONE


def running(engine, directory):
    async def sleep(seconds):
        pass

    context = build_context(directory)
    return EpisodeRunner(
        name="sums",
        environment=Sums(Config(), context),
        agent=Asks(Config(), context),
        pool=None,
        policy=MessagePolicy(engine, sleep=sleep),
        limits=Budgets(),
        outcome_policy=Outcomes(),
        context=context,
    )


async def episode(engine, directory):
    runner = running(engine, directory)
    task = runner.environment.tasks()[0]
    request = EpisodeRequest("e1", "g1", task, 7, SamplingParams(), purpose="eval")
    result = await runner.run(request)
    assert not runner.policy.sessions
    return result


async def test_an_evaluated_episode_has_a_record_and_no_samples(tmp_path):
    result = await episode(Adder(), tmp_path)
    record = result.record
    assert (record.ended, record.outcome.kind, record.reward) == ("done", "scored", 1.0)
    assert [each["content"] for each in record.messages][1:] == ["3"]
    assert (record.turns, record.prompt_tokens, record.completion_tokens) == (1, 12, 3)
    assert record.versions is None
    assert record.warnings == []
    assert not result.samples


async def test_a_record_says_that_nobody_counted_its_tokens(tmp_path):
    record = (await episode(Adder(usage=None), tmp_path)).record
    assert record.completion_tokens > 0
    assert record.warnings == ["token counts are estimates: the endpoint reports no usage"]


async def test_a_reply_that_was_cut_and_an_endpoint_that_fails_end_as_on_engines_of_ours(tmp_path):
    assert (await episode(Adder("length"), tmp_path)).record.ended == "length"
    for wrong in (EngineError("no such model", kind="user"), BusyError("overloaded")):
        record = (await episode(Adder(wrong=wrong), tmp_path)).record
        assert (record.ended, record.outcome.kind, record.outcome.boundary) == (
            "infra",
            "infra_error",
            "engine",
        )
        assert str(wrong) in record.outcome.cause


async def test_an_endpoint_that_answers_too_late_is_an_error_of_an_evaluation_and_no_failure(tmp_path):
    runner = running(Adder(wrong=BusyError("the endpoint did not answer within 3600 s")), tmp_path)
    tasks = runner.environment.tasks()[:2]
    keys = {"step": 0, "attempt": 1, "seed": 0, "slots": asyncio.Semaphore(2), "retries": 1}
    total = (await evaluate(runner, tasks, SamplingParams(), **keys)).total
    assert (total.passed, total.count, total.errors) == (0, 0, 2)


RECIPE = """\
name: base
environment: room
agent: talker
engine: generator
router: spread
launcher: here
model: {path: /nowhere, context_length: 40000}
budgets: {max_seq_len: 40000}
"""


async def test_a_recipe_s_endpoint_is_opened_without_anything_else(toys):
    (toys / "endpoint.yaml").write_text(RECIPE)
    checked = check_recipe("endpoint.yaml", ["engine=text"], site="here")
    assert checked.problems == []
    assert asks_endpoint(checked.loaded.recipe, checked.plugins)
    parts = Parts(checked.loaded.recipe, checked.plugins, toys, "r", 1)
    async with AsyncExitStack() as stack:
        policy = await open_endpoint(parts, stack)
        session = policy.open("s", max_seq_len=50_000, reply_tokens=10, turns=1)
        assert session.max_seq_len == 40_000
    assert session.closed


def test_an_engine_with_tokens_is_no_endpoint_and_needs_its_model(toys):
    (toys / "endpoint.yaml").write_text(RECIPE)
    checked = check_recipe("endpoint.yaml", site="here")
    assert [each.key for each in checked.problems] == ["model.path"]
    assert not asks_endpoint(checked.loaded.recipe, checked.plugins)
