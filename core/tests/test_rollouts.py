"""The rollout side of a run over fake engines, without Ray: several environments, an engine that dies."""

import asyncio
import json
import logging
from types import SimpleNamespace

import pytest

from rollhook.agent import Agent, StopReason
from rollhook.component import BuildContext, Config
from rollhook.errors import EngineError
from rollhook.recipe.schema import Recipe, RouterUse
from rollhook.router import RouterPolicy, Worker
from rollhook.runtime.batch import batch_metrics
from rollhook.runtime.lineage import Lineage
from rollhook.runtime.model import vocab_size
from rollhook.runtime.parts import Parts
from rollhook.runtime.rollout_worker import distinct, limits_of
from rollhook.runtime.rollouts import Rollouts
from rollhook.session import Renderer
from rollhook.session.turn import Limits
from rollhook.testing.fake_engine import FakeEngines
from rollhook.testing.fake_environment import Sums
from rollhook.testing.fakes_sandbox import FakeSandboxes
from rollhook.testing.placement import LocalPlacement
from rollhook.testing.policy import says
from rollhook.testing.tokenizer import write_tokenizer


class Answers(Agent):
    async def run(self, context):
        assert context.endpoint.url.endswith(f"/sessions/{context.episode_id}")
        await context.session.chat(context.observation.messages)
        return StopReason.DONE


class Halves(Sums):
    """The sums again, those that can run as training and as held-out tasks."""

    def tasks(self, split=None):
        return [task for task in super().tasks("train") if task.problem is None and task.id != "unjudged"]


class Described(FakeSandboxes):
    def __init__(self, config, context):
        super().__init__()

    def describe(self):
        return {"mode": "fake", "limits": "none"}


class FakeParts(Parts):
    """Builds the parts of this test; what the recipe calls them does not matter."""

    def __init__(self, recipe, directory, reply):
        self.recipe, self.directory, self.plugins = recipe, directory, self
        self._run_id, self._attempt = "r", 1
        self.engine = FakeEngines(SimpleNamespace(reply=reply, count=2), self.context("engine"))

    def context(self, name):
        return BuildContext(logging.getLogger(name), self.directory, self.directory, run_id="r", attempt=1)

    def build(self, kind, use, name, context=None, key_path=""):
        made = {
            "environment": Halves, "agent": Answers, "router": RouterPolicy, "sandbox": Described,
        }  # fmt: skip
        return self.engine if kind == "engine" else made[kind](Config(), self.context(kind))

    def build_agent(self):
        return self.build("agent", None, "agent")

    def accept_group(self, group):
        return None


class FakeAttempt:
    def __init__(self, path):
        self.path, self.logs, self.number, self.run = path, path, 1, SimpleNamespace(run_id="r")
        self.events = []
        self.journal = self

    def append(self, event, /, **data):
        self.events.append((event, data))

    async def append_durable(self, event, /, **data):
        self.append(event, **data)


@pytest.fixture
async def started(tmp_path):
    """Rollouts over two equal environments and two engines that always answer 3, and what they finished."""
    directory = write_tokenizer(tmp_path / "model")
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    recipe = Recipe.model_validate(
        {
            "name": "two",
            "environment": [{"use": "sums", "weight": 3}, {"use": "sums"}],
            "agent": {"use": "answers"},
            "sandbox": {"use": "described"},
            "engine": {"use": "fake"},
            "router": {"use": "first"},
            "rollout": {"batch_groups": 4, "group_size": 2, "drop_zero_variance": False},
            "evaluation": {"every": 1, "greedy": True},
            "budgets": {"max_seq_len": 256, "reply_tokens": 16},
        }
    )
    results = []
    attempt = FakeAttempt(tmp_path)
    parts = FakeParts(recipe, tmp_path, says(Renderer(directory), "3"))
    rollouts = Rollouts(parts, attempt, results.append)
    await rollouts.prepare()
    await rollouts.start(LocalPlacement(), directory, 1)
    await rollouts.produce(0, Lineage(versions={1: 0}))
    yield SimpleNamespace(
        rollouts=rollouts, results=results, attempt=attempt, engine=parts.engine, model=directory
    )
    await rollouts.aclose()


async def test_environments_share_a_batch_by_weight_and_are_evaluated_apart(started):
    batch = await started.rollouts.batch()
    assert sorted(group.environment for group in batch.groups) == ["sums", "sums", "sums", "sums-2"]
    assert all(record.outcome.kind == "scored" for record in batch.records)
    figures = batch_metrics(batch, several=True)
    assert (figures["rollout/sums/episodes"], figures["rollout/sums-2/episodes"]) == (6, 2)
    assert {"rollout/sums/reward_mean", "rollout/sums-2/pass_rate"} <= set(figures)
    assert not [name for name in batch_metrics(batch) if "sums" in name]
    found = await started.rollouts.evaluate(1, lambda what, total: None)
    assert [(e.environment, e.mode) for e in found] == [
        ("sums", "sampled"), ("sums", "greedy"), ("sums-2", "sampled"), ("sums-2", "greedy"),
    ]  # fmt: skip
    assert {(e.total.passed, e.total.count) for e in found} == {(1, 4)}
    ids = [result.record.episode_id for result in started.results]
    assert len(set(ids)) == len(ids)
    assert sorted(d["episode_id"] for e, d in started.attempt.events if e == "episode_started") == sorted(ids)


async def test_environments_keep_their_weights_and_their_tasks_across_a_resume(tmp_path):
    async def prompts(attempt, lineage, path):
        model = write_tokenizer(path / "model")
        (model / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
        recipe = Recipe.model_validate(
            {
                "name": "two",
                "environment": [{"use": "sums", "weight": 3}, {"use": "sums", "weight": 2}],
                "agent": {"use": "answers"},
                "engine": {"use": "fake"},
                "router": {"use": "first"},
                "rollout": {"batch_groups": 2, "group_size": 2, "drop_zero_variance": False},
                "budgets": {"max_seq_len": 256, "reply_tokens": 16},
            }
        )
        rollouts = Rollouts(FakeParts(recipe, path, says(Renderer(model), "3")), attempt, lambda result: None)
        await rollouts.prepare()
        await rollouts.start(LocalPlacement(), model, 1)
        await rollouts.produce(lineage.next_step, lineage)
        await rollouts.batch()
        await rollouts.aclose()
        return [data for event, data in attempt.events if event == "prompts"]

    drawn, draw = [], {}
    for step in range(5):
        path = tmp_path / str(step)
        path.mkdir()
        lineage = Lineage(versions={1: step}, next_step=step, draw=draw)
        (row, *_) = await prompts(FakeAttempt(path), lineage, path)
        drawn += [(each["environment"], each["task_id"]) for each in row["prompts"]]
        draw = row["draw"]
    assert [name for name, _ in drawn].count("sums") == 6
    tasks = [task for name, task in drawn if name == "sums"]
    assert len(set(tasks[:4])) == 4


async def test_the_books_of_a_run_balance_in_its_metrics_and_hold_each_episode_once(started):
    await started.rollouts.batch()
    weights = started.model.parent / "weights"
    write_tokenizer(weights)
    await started.rollouts.update(weights, 2, 1)
    metrics = batch_metrics(await started.rollouts.batch())
    parts = ("trained", "rejected", "in_flight", "buffered")
    assert metrics["books/submitted"] == sum(metrics[f"books/{part}"] for part in parts)
    assert metrics["books/trained"] == 2 * 4 * 2
    assert metrics["books/finished"] == len(started.results)


async def test_groups_are_made_again_after_an_evaluation_that_failed(started):
    def broken(what, total):
        raise RuntimeError("no evaluation today")

    await started.rollouts.batch()
    with pytest.raises(RuntimeError, match="no evaluation today"):
        await started.rollouts.evaluate(1, broken)
    await started.rollouts.update(started.model, 2, 1)
    assert len((await started.rollouts.batch()).groups) == 4


async def test_a_run_says_how_its_sandboxes_are_made(started):
    assert started.rollouts.descriptions["sandbox"] == "mode fake, limits none"


async def test_a_run_says_what_generates(started):
    assert started.rollouts.descriptions["engine"] == "servers 2, model none"


async def test_samples_hold_what_the_engines_emitted_with_its_version(started):
    weights = started.model.parent / "weights"
    write_tokenizer(weights)
    await started.rollouts.batch()
    await started.rollouts.update(weights, 2, 1)
    batch = await started.rollouts.batch()
    emitted = says(Renderer(started.model), "3")([], {})
    for sample in (s for group in batch.samples() for s in group):
        assert [int(t) for t in sample.token_ids[sample.mask == 1]] == list(emitted)
        assert sample.spans[:, 2:].tolist() == [[2, 2]]


async def test_the_sessions_of_a_run_have_an_http_face(started):
    url = json.loads((started.attempt.path / "gateway.json").read_bytes())["url"]
    assert url.startswith("http://127.0.0.1:")


async def test_episodes_go_on_with_the_engines_that_are_left(started):
    await started.engine.engines[0].stop()
    batch = await started.rollouts.batch()
    assert {record.outcome.kind for record in batch.records} == {"scored"}


async def test_an_engine_that_does_not_start_anew_leaves_the_others_at_work(started):
    async def revive(worker, model_dir, weight_version):
        raise EngineError(f"{worker.url} does not start: its GPU is gone")

    started.engine.revive = revive
    weights = started.model.parent / "weights"
    write_tokenizer(weights)
    await started.engine.engines[0].stop()
    await started.rollouts.batch()
    await started.rollouts.update(weights, 2, 1)
    await started.rollouts.batch()
    await started.engine.engines[1].stop()
    with pytest.raises(EngineError, match="its GPU is gone"):
        await started.rollouts.update(weights, 3, 2)


async def test_a_weight_update_does_not_wait_until_an_engine_that_failed_it_is_back(started):
    """It gets requests once it serves the newest weights, which it was started with."""
    one, other = started.engine.engines
    start = asyncio.Event()

    async def revive(worker, model_dir, weight_version):
        await start.wait()
        one.version = weight_version
        return True

    started.engine.revive = revive
    weights = started.model.parent / "weights"
    write_tokenizer(weights)
    one.fail("/update_weights_from_disk", 500)
    await started.rollouts.batch()
    await asyncio.wait_for(started.rollouts.update(weights, 2, 1), 20)
    table = started.rollouts._rollout.policy.table
    assert [entry.worker for entry in table.offered()] == [other.worker]
    assert (await started.rollouts.batch()).groups
    start.set()
    async with asyncio.timeout(20):
        while len(table.offered()) < 2:
            await asyncio.sleep(0.01)
    await started.rollouts.update(weights, 3, 2)
    assert (one.version, other.version) == (3, 3)


async def test_an_engine_that_came_back_by_itself_is_started_anew_again_when_it_dies(started):
    tried = []

    async def revive(worker, model_dir, weight_version):
        tried.append(weight_version)
        raise EngineError("no room yet")

    started.engine.revive = revive
    weights = started.model.parent / "weights"
    write_tokenizer(weights)
    worker = started.engine.engines[0].worker
    for _ in range(2):
        with pytest.raises(EngineError, match="no room yet"):
            await started.rollouts._revive(worker)
    await started.rollouts.batch()
    await started.rollouts.update(weights, 2, 1)  # which it takes
    with pytest.raises(EngineError, match="no room yet"):
        await started.rollouts._revive(worker)
    assert tried == [1, 2]


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"vocab_size": 300}, 300),
        ({"text_config": {"vocab_size": 300}}, 300),
        ({}, None),
        ({"vocab_size": None}, None),
    ],
)
def test_a_models_config_says_how_many_tokens_it_has(tmp_path, config, size):
    assert vocab_size(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert vocab_size(tmp_path) == size


async def test_an_engine_is_routed_to_by_rank_with_the_health_and_breaker_of_the_recipe(tmp_path):
    class Ranked(FakeEngines):
        def make(self, version):
            engine = super().make(version)
            engine.dp_size = 3
            return engine

        async def start(self, *args):
            return [Worker(worker.url) for worker in {w.url: w for w in await super().start(*args)}.values()]

    directory = write_tokenizer(tmp_path / "model")
    config = {"max_position_embeddings": 512, "vocab_size": 300}
    (directory / "config.json").write_text(json.dumps(config))
    router = {"use": "first", "breaker": {"faults": 4}, "health": {"down_after": 1}, "drain_on_update": 2}
    recipe = Recipe.model_validate(
        {
            "name": "ranks",
            "environment": [{"use": "sums"}],
            "agent": {"use": "answers"},
            "engine": {"use": "fake"},
            "router": router,
            "evaluation": {"every": 1},
        }
    )
    parts = FakeParts(recipe, tmp_path, says(Renderer(directory), "3"))
    parts.engine = Ranked(SimpleNamespace(reply=None, count=1), parts.context("engine"))
    rollouts = Rollouts(parts, FakeAttempt(tmp_path), lambda result: None)
    try:
        await rollouts.prepare()
        await rollouts.start(LocalPlacement(), directory, 1)
        policy = next(iter(rollouts.held_out()))[1].policy
        assert [worker.dp_rank for worker in policy.table.workers] == [0, 1, 2]
        assert rollouts.router_stats()["router/workers"] == 3
        parts.engine.engines[0].reply = lambda ids, params: [300]
        session = policy.open("s", max_seq_len=500, reply_tokens=5, turns=1)
        with pytest.raises(EngineError, match="token id 300 where the model has 300"):
            await session.chat([{"role": "user", "content": "hi"}], on_delta=lambda delta: None)
        await session.close()
        parts.engine.engines[0].healthy = False
        await policy.fleet.health.probe()
        assert policy.table.offered() == []
    finally:
        await rollouts.aclose()


def test_the_limits_of_turns_are_those_of_the_recipe():
    router = RouterUse(
        use="x",
        drain_on_update=2,
        load_interval=3,
        health={"interval": 4, "down_after": 5, "up_after": 6},
        breaker={"faults": 7, "seconds": 8},
    )
    found = limits_of(router)
    assert (found.drain, found.load_interval, found.health_interval) == (2, 3, 4)
    assert (found.down_after, found.up_after, found.breaker_faults, found.breaker_seconds) == (5, 6, 7, 8)
    assert limits_of(RouterUse(use="x")) == Limits(), "the defaults of the recipe are those of the code"


def test_equal_names_are_told_apart():
    assert distinct(["a", "b", "a", "a"]) == ["a", "b", "a-2", "a-3"]
