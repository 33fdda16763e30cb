"""A whole driver without Ray, engines or models: for tests of what a run leaves on disk, and of its death.

    rig = Rig(tmp_path, steps=3)
    rig.die("checkpoint.before_marker")   # in a process of its own, killed at that failpoint
    result = await rig.drive()            # the next attempt, here
    rig.trained()                         # what the newest checkpoint's weights were made of

It is also the plugin module of the components that its recipe names.
"""

import asyncio
import functools
import hashlib
import importlib
import io
import itertools
import json
import os
import pickle
import re
import threading
from collections import defaultdict
from pathlib import Path

from dying import DIED, elsewhere
from rich.console import Console

from rollhook import Component, Config, hookimpl
from rollhook.agent import Agent, StopReason
from rollhook.checkpoints import CheckpointStore
from rollhook.environment import Box, Environment, Episode, Observation, Phase, Task, Verdict
from rollhook.errors import RollhookError
from rollhook.installed import EntryInfo
from rollhook.messages import message
from rollhook.plugins import Plugins
from rollhook.processes import ProcessDiedError
from rollhook.recipe.schema import Recipe
from rollhook.rundir import RunDir
from rollhook.runtime.driver import Driver
from rollhook.runtime.progress import Display
from rollhook.sandbox import SandboxBackend, SandboxInfo, SandboxSpec
from rollhook.testing.placement import LocalPlacement
from rollhook.testing.scripted import ScriptedRaw
from rollhook.testing.tokenizer import write_tokenizer
from rollhook.trainer import NativeTrainer

COMPONENTS = {
    "environment.rooms": "driving:Rooms",
    "agent.answers": "driving:Answers",
    "sandbox.shelf": "driving:Shelf",
    "engine.fake": "rollhook.testing.fake_engine:FakeEngines",
    "router.first": "rollhook.router:RouterPolicy",
    "trainer.counting": "driving:CountingTrainer",
}
TASKS = 6
_NUMBERS = itertools.count(1)
#: what was placed: a loop that stands still holds sockets, which nobody closes
_KEPT = []


class Rig:
    """A run in `root`/runs whose attempts are driven here (`drive`) or by a process that dies (`die`).

    `changes` are keys of the recipe; a section is merged with what is here.
    """

    def __init__(self, root, **changes):
        self.root = root
        model = root / "model"
        write_tokenizer(model)
        (model / "weights.json").write_text('{"digest": ""}')
        (model / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
        self.keys = {
            "name": "rig",
            "model": {"path": str(model)},
            "environment": [{"use": "rooms"}],
            "agent": {"use": "answers"},
            "sandbox": {"use": "shelf", "directory": str(root / "provider")},
            "engine": {"use": "fake"},
            "router": {"use": "first"},
            "trainer": {"use": "counting"},
            "rollout": {"batch_groups": 2, "group_size": 2, "max_concurrent": 8},
            "budgets": {"max_seq_len": 256, "reply_tokens": 8},
            "steps": 3,
        }
        for key, value in changes.items():
            old = self.keys.get(key)
            self.keys[key] = {**old, **value} if isinstance(old, dict) else value
        self.run = RunDir.create(root / "runs", "rig", run_id=f"rig-{next(_NUMBERS)}")

    async def drive(self, drain=None, shown=None, cluster=None):
        """Drive the next attempt to its end and return its result; `shown` takes what a user sees."""
        return await _drive(self.run.path, self.keys, drain or asyncio.Event(), shown, cluster)

    def die(self, failpoint, hit=1):
        """Drive the next attempt in a process that is killed at a failpoint."""
        assert self.attempt_elsewhere(failpoint, hit) == DIED, f"{failpoint} was not reached"

    def attempt_elsewhere(self, failpoint=None, hit=1):
        """Drive the next attempt in another process and return its exit code."""
        return elsewhere(failpoint, hit, _attempt, self.run.path, self.keys)

    def trouble(self, function, *args):
        """Drive the next attempt in another process, after a call there; return its last words."""
        said = self.root / "said"
        said.unlink(missing_ok=True)
        assert elsewhere(None, 0, _attempt_in_trouble, self.run.path, self.keys, said, function, args) == 0
        return said.read_text() if said.exists() else ""

    def trained(self):
        """Return the state of the trainer in the newest checkpoint: steps, and a chain over its batches."""
        newest = CheckpointStore(self.run.checkpoints).newest()
        return None if newest is None else json.loads((newest.path / "trainer.json").read_bytes())

    def sandboxes(self):
        """Return the labels of the sandboxes that exist at the provider."""
        found = sorted((self.root / "provider").glob("*.json"))
        return [json.loads(path.read_bytes()) for path in found]


def chain(digest, step, episode_ids):
    """Return the digest of a trainer that trained these samples in step `step` (0-based)."""
    return hashlib.sha256(json.dumps([digest, step, list(episode_ids)]).encode()).hexdigest()[:16]


def _attempt(path, keys):
    asyncio.run(_drive(path, keys, asyncio.Event()))


def _attempt_in_trouble(path, keys, said, function, args):
    function(*args)
    try:
        _attempt(path, keys)
    except RollhookError as error:
        said.write_text(str(error))


async def _drive(path, keys, drain, shown=None, cluster=None):
    recipe = Recipe.model_validate(keys)
    plugins = Plugins(
        EntryInfo(*name.split("."), module="driving", distribution="driving", version="1")
        for name in COMPONENTS
    )
    plugins.add(tuple(name.split(".")) for name in COMPONENTS)
    display = Display(Console(file=shown or io.StringIO(), width=200))
    cluster = cluster or FakeCluster()
    driver = Driver(recipe, keys, "digest", plugins, RunDir(path), cluster, display, drain)
    return await driver.run()


class FakeCluster:
    """Places objects in this process; what crosses the seam is pickled, as it would be.

    `remotes` holds what was placed, by name, the newest last.
    """

    def __init__(self):
        self.placement = LocalPlacement()
        self.remotes = defaultdict(list)
        self.gpus = {}

    async def place(self, target, *args, name, gpus=0, env=None, log=None, calls=1):
        module, _, attribute = target.partition(":")
        made = getattr(importlib.import_module(module), attribute)
        self.gpus[name] = gpus
        self.remotes[name].append(FakeRemote(name, made(*pickle.loads(pickle.dumps(args)))))
        return self.remotes[name][-1]

    async def stop(self):
        pass


class FakeRemote:
    """Calls an object here, each call on a thread of its own, until it dies."""

    def __init__(self, name, target):
        self.name = name
        self.died = asyncio.Event()
        self._target = target
        _KEPT.append(target)

    def die(self):
        """Do nothing from now on: its loop, where it has one, stands still as it is."""
        self.died.set()
        self.stand_still()

    def stand_still(self):
        """Let its loop do nothing from now on, though the process is there."""
        if (loop := getattr(self._target, "_loop", None)) is not None:
            loop.call_soon_threadsafe(loop.stop)

    async def call(self, method, *args, **keys):
        if self.died.is_set():
            raise ProcessDiedError(f"the process of {self.name} died")
        args, keys = pickle.loads(pickle.dumps((args, keys)))
        answer = asyncio.get_running_loop().create_future()
        function = functools.partial(getattr(self._target, method), *args, **keys)
        threading.Thread(target=_answer, args=(function, answer), daemon=True).start()
        death = asyncio.ensure_future(self.died.wait())
        await asyncio.wait({answer, death}, return_when=asyncio.FIRST_COMPLETED)
        death.cancel()
        if not answer.done():
            raise ProcessDiedError(f"the process of {self.name} died")
        return pickle.loads(pickle.dumps(answer.result()))

    async def stop(self):
        self.stand_still()
        self._target = None


def _answer(function, answer):
    loop, result, error = answer.get_loop(), None, None
    try:
        result = function()
    except Exception as caught:
        error = caught

    def give():
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)

    if not loop.is_closed():
        loop.call_soon_threadsafe(give)


class CountingConfig(Config):
    gpus: float = 0.0


class CountingTrainer(NativeTrainer):
    """Its weights are a digest over the batches in order, its optimizer the number of steps."""

    def setup(self, model_dir, *, total_steps, seed):
        self._files = {path.name: path.read_bytes() for path in model_dir.iterdir() if path.is_file()}
        self._steps = 0
        self._digest = json.loads(self._files["weights.json"])["digest"]

    def step(self, groups, step):
        ids = [sample.episode_id for group in groups for sample in group]
        self._steps, self._digest = self._steps + 1, chain(self._digest, step, ids)
        return {"train/loss": 1.0 / self._steps}

    def publish(self, directory):
        for name, data in self._files.items():  # a marker among them is not what it says it is
            (directory / name).write_bytes(data)
        (directory / "weights.json").write_text(json.dumps({"digest": self._digest}))

    def save(self, directory):
        self.publish(directory)
        state = {"steps": self._steps, "digest": self._digest}
        (directory / "trainer.json").write_text(json.dumps(state))

    def load(self, directory):
        state = json.loads((directory / "trainer.json").read_bytes())
        self._steps, self._digest = state["steps"], state["digest"]


class Rooms(Environment):
    """Tasks with a box each; the members of a group are rewarded in turn, so that each group may train."""

    verifies_apart = False

    def tasks(self, split=None):
        names = [f"room-{number}" for number in range(TASKS)]
        return [Task(n, hashlib.sha256(n.encode()).hexdigest(), split or "train", "rooms") for n in names]

    def episode(self, task, ctx):
        return RoomEpisode(ctx)


class RoomEpisode(Episode):
    boxes = {"main": Box(SandboxSpec())}

    def __init__(self, ctx):
        self._ctx = ctx

    async def phases(self):
        yield RoomPhase(self._ctx)


class RoomPhase(Phase):
    def __init__(self, ctx):
        self._ctx = ctx
        self.observation = Observation([message("user", "Open the door.")])

    async def verify(self, transcript):
        assert await self._ctx.box().alive(), "somebody deleted the sandbox of a live episode"
        member = re.search(r"-e(\d+)-t", self._ctx.episode_id)  # there is none in an evaluation
        return Verdict(float(int(member[1]) % 2 if member else 1))


class AnswersConfig(Config):
    gate: Path | None = None


class Answers(Agent):
    """Says one thing; with `gate` it leaves a file there first, and waits for one named `open`."""

    async def run(self, context):
        if (gate := self.config.gate) is not None:
            (gate / f"{context.episode_id}.{os.getpid()}").touch()
            while not (gate / "open").exists():
                await asyncio.sleep(0.01)
        await context.session.chat(context.observation.messages)
        return StopReason.DONE


class ShelfConfig(Config):
    directory: Path


class Shelf(SandboxBackend):
    """A provider that keeps its sandboxes, a file with labels each, also when its client dies."""

    async def create(self, spec):
        self.config.directory.mkdir(exist_ok=True)
        raw = ShelfRaw(os.urandom(4).hex(), spec)
        raw.path = self.config.directory / f"{raw.id}.json"
        unfinished = raw.path.with_suffix(".new")
        unfinished.write_text(json.dumps(dict(spec.labels)))
        unfinished.rename(raw.path)  # a provider's sandbox is there wholly or not at all
        return raw

    async def list(self, labels):
        found = [(p.stem, json.loads(p.read_bytes())) for p in self.config.directory.glob("*.json")]
        return [SandboxInfo(name, held) for name, held in found if labels.items() <= held.items()]

    async def delete(self, sandbox_id):
        (self.config.directory / f"{sandbox_id}.json").unlink(missing_ok=True)


class ShelfRaw(ScriptedRaw):
    async def alive(self):
        return self.path.exists()

    async def kill_tree(self, mark):
        return []


@hookimpl
def rollhook_accept_group(group):
    """Reject the first group of each odd step."""
    return "odd" if int(group.group_id.rpartition("s")[2][:5]) % 2 and "-g000" in group.group_id else None


def _component(kind, name):
    own = {"shelf": ShelfConfig, "answers": AnswersConfig, "counting": CountingConfig}
    config = own.get(name, Config)
    return [Component(name, config, COMPONENTS[f"{kind}.{name}"], "for tests")]


@hookimpl
def rollhook_environments():
    return _component("environment", "rooms")


@hookimpl
def rollhook_agents():
    return _component("agent", "answers")


@hookimpl
def rollhook_sandboxes():
    return _component("sandbox", "shelf")


@hookimpl
def rollhook_engines():
    return _component("engine", "fake")


@hookimpl
def rollhook_router_policies():
    return _component("router", "first")


@hookimpl
def rollhook_trainers():
    return _component("trainer", "counting")
