"""A recipe to evaluate: tasks with a box each, a token engine over sockets, an endpoint in the process.

It is the plugin module of the components that the recipe names. What happens to an episode is decided by its
seed, and by files that a test puts into the directory `faults`: `broken-<task>` lets verification fail,
`kill-<task>` ends the process, `interrupt-<task>` interrupts it.
"""

import asyncio
import hashlib
import json
import os
import signal
from pathlib import Path

from driving import AnswersConfig, ShelfConfig

from rollhook import Component, Config, hookimpl
from rollhook.engine.messages import Completion, MessageEngine, RequestLimits
from rollhook.environment import Box, Environment, Episode, Observation, Phase, Task, Verdict
from rollhook.messages import message
from rollhook.runtime import standalone_eval
from rollhook.sandbox import SandboxSpec
from rollhook.testing.distributions import write_distribution
from rollhook.testing.placement import LocalPlacement
from rollhook.testing.tokenizer import write_tokenizer

POINTS = ["environment.riddles", "agent.answers", "sandbox.shelf", "engine.fake", "engine.oracle"]
POINTS += ["router.first", "launcher.here", "trainer.counting"]
RECIPE = """\
name: riddles
model: {{path: {model}}}
environment: {{use: riddles, faults: {root}/faults}}
agent: answers
sandbox: {{use: shelf, directory: {root}/provider}}
router: first
engine: {engine}
launcher: here
budgets: {{max_seq_len: 256, reply_tokens: 8}}
rollout: {{max_concurrent: 1, max_staleness: 1}}
evaluation: {{samples: 2}}
storage: {{root: {root}/runs}}
"""
TRAINED = """\
trainer: counting
steps: 7
checkpoint: {every: 2}
"""


def install(site):
    """Write the distribution that supplies the parts."""
    write_distribution(
        site, "rollhook-toy-eval", entry_points=dict.fromkeys(POINTS, "evaluating"), modules={},
        requires=["rollhook>=0.1"],
    )  # fmt: skip


def write_recipe(root, engine="fake", more=TRAINED):
    """Write the recipe with its model and return its path."""
    model = root / "model"
    if not model.exists():
        write_tokenizer(model)
        (model / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    (root / "faults").mkdir(exist_ok=True)
    path = root / "riddles.yaml"
    path.write_text(RECIPE.format(model=model, root=root, engine=engine) + more)
    return path


def evaluate_until_killed(arguments):
    """Evaluate in this process, which a task will kill; what has finished is durable at once."""
    from rollhook.cli import main
    from rollhook.cluster import Cluster

    standalone_eval.FLUSH_SECONDS = 0.01
    Cluster.start = start_nowhere
    main.main(arguments)


async def start_nowhere(scratch):
    """Stand for `Cluster.start`."""
    return Nowhere()


class Nowhere:
    placement = LocalPlacement()

    async def stop(self):
        pass


class RiddlesConfig(Config):
    faults: Path


class Riddles(Environment):
    verifies_apart = False

    def tasks(self, split=None):
        assert split == "heldout", "an evaluation reads its own split only"
        names = [f"{family}-{number}" for family in ("easy", "hard") for number in range(3)]
        return [Task(n, hashlib.sha256(n.encode()).hexdigest(), split, n[:4]) for n in names]

    def episode(self, task, ctx):
        return Riddle(task, ctx, self.config.faults)


class Riddle(Episode):
    boxes = {"main": Box(SandboxSpec())}

    def __init__(self, *about):
        self._about = about

    async def phases(self):
        yield RiddlePhase(*self._about)


class RiddlePhase(Phase):
    def __init__(self, task, ctx, faults):
        self._task, self._ctx, self._faults = task, ctx, faults
        self.observation = Observation([message("user", "Who goes on four legs?")])

    async def verify(self, transcript):
        if (self._faults / f"kill-{self._task.id}").exists():
            episodes = self._faults.parent / "runs" / "e" / "episodes"
            while not any(path.stat().st_size for path in episodes.glob("*.jsonl")):
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        if (self._faults / f"interrupt-{self._task.id}").exists():
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
        if (self._faults / f"broken-{self._task.id}").exists():
            raise OSError("the judge is ill")
        return Verdict(float(self._task.family == "easy" and self._ctx.seed % 3 > 0))


class Oracle(MessageEngine):
    limits = RequestLimits()

    async def start(self):
        pass

    async def complete(self, request):
        return Completion(message("assistant", "man"), "stop")

    async def stop(self):
        pass


COMPONENTS = {
    "environments": ("riddles", RiddlesConfig, "evaluating:Riddles"),
    "agents": ("answers", AnswersConfig, "driving:Answers"),
    "sandboxes": ("shelf", ShelfConfig, "driving:Shelf"),
    "router_policies": ("first", Config, "rollhook.router:RouterPolicy"),
    "launchers": ("here", Config, "toy_plugins:Here"),
    "trainers": ("counting", Config, "driving:CountingTrainer"),
}


def _component(kind):
    name, config, load = COMPONENTS[kind]
    return [Component(name, config, load, "for tests")]


@hookimpl
def rollhook_environments():
    return _component("environments")


@hookimpl
def rollhook_agents():
    return _component("agents")


@hookimpl
def rollhook_sandboxes():
    return _component("sandboxes")


@hookimpl
def rollhook_engines():
    return [
        Component("fake", Config, "rollhook.testing.fake_engine:FakeEngines", "for tests"),
        Component("oracle", Config, "evaluating:Oracle", "for tests"),
    ]


@hookimpl
def rollhook_router_policies():
    return _component("router_policies")


@hookimpl
def rollhook_launchers():
    return _component("launchers")


@hookimpl
def rollhook_trainers():
    return _component("trainers")
