"""Components of every kind that do nothing: what recipes under test name. Written into a distribution."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from rollhook import Component, ComponentRef, Config, Secret, hookimpl
from rollhook.agent import Agent
from rollhook.engine.base import Engine
from rollhook.engine.messages import MessageEngine, RequestLimits
from rollhook.environment import Environment, Task
from rollhook.errors import UsageError
from rollhook.job_script import script_files
from rollhook.launcher import Handle, JobKeys, JobStatus, Launcher, Plan
from rollhook.pack import Pack
from rollhook.recipe.problem import Problem
from rollhook.recipe.schema import Use
from rollhook.router import RouterPolicy
from rollhook.sandbox.backend import SandboxBackend
from rollhook.tracker import Tracker
from rollhook.trainer import NativeTrainer


class NoKeys(Config):
    """No keys."""


class GeneratorKeys(Config):
    context_length: Annotated[int | None, Field(description="tokens of prompt and reply")] = None


class RoomConfig(Config):
    size: Annotated[PositiveInt, Field(description="rooms")] = 1
    pack: Annotated[Use | None, ComponentRef("pack"), Field(description="a pack")] = None


class BoxConfig(Config):
    memory_bytes: Annotated[PositiveInt | None, Field(description="limit of memory")] = None
    api_key: Annotated[Secret | None, Field(description="the key")] = None


class WrapperConfig(Config):
    inner: Annotated[Use, ComponentRef("sandbox"), Field(description="the sandbox that is wrapped")]


class StickConfig(Config):
    ttl: Annotated[float, Field(gt=0, description="seconds")] = 60.0


class LearnConfig(Config):
    algorithm: Annotated[Literal["grpo", "sft"], Field(description="what is minimised")] = "grpo"
    lr: Annotated[float, Field(gt=0, description="learning rate")] = 1e-4
    data: Annotated[str | None, Field(description="rows")] = None
    betas: Annotated[tuple[float, float], Field(description="decay rates")] = (0.9, 0.95)


class Room(Environment):
    def tasks(self, split=None):
        if split not in {"train", "heldout"}:
            raise UsageError(f"room has no split {split!r}; it has train and heldout")
        return [Task("a", "1", split, limits={"agent": 300.0}), Task("b", "2", split, problem="no file")]

    def problems(self, capabilities, tasks=None):
        return [] if "isolation" in capabilities else ["it needs isolation"]

    def episode(self, task, ctx):
        raise NotImplementedError


class Talker(Agent):
    async def run(self, context):
        raise NotImplementedError


class Worker(Talker):
    needs_sandbox = True


class Caller(Talker):
    needs_tools = True


class Cheat(Talker):
    needs_policy = False
    needs_solution = True


class Idle(Talker):
    needs_policy = False


class Box(SandboxBackend):
    capabilities = frozenset({"isolation"})

    async def create(self, spec):
        raise NotImplementedError

    async def list(self, labels):
        raise NotImplementedError

    async def delete(self, sandbox_id):
        raise NotImplementedError


class Bare(Box):
    capabilities = frozenset()
    unsafe = True


class Policy(RouterPolicy):
    pass


class Spread(Policy):
    always_picks = True


class Generator(Engine):
    async def start(self, placement, model_dir, weight_version):
        raise NotImplementedError

    async def stop(self):
        pass


class TextOnly(MessageEngine):
    limits = RequestLimits()

    async def start(self):
        pass

    async def complete(self, request):
        raise NotImplementedError

    async def stop(self):
        pass


class Learner(NativeTrainer):
    can_initialise = True

    @classmethod
    def needs_rollouts(cls, config):
        return config.algorithm == "grpo"

    def setup(self, model_dir, *, total_steps, seed):
        raise NotImplementedError

    step = publish = save = load = setup


class Tuner(Learner):
    can_initialise = False


class Here(Launcher):
    in_process = True

    def plan(self, job):
        return Plan("here", job, files=script_files(job))


class Afar(Here):
    in_process = False

    #: job id -> how it stands; what the site lacks; plans that were submitted
    states = {}
    lacking = []
    plans = []

    @property
    def shares_files(self):
        return False

    async def preflight(self, plan):
        return self.lacking

    async def submit(self, plan):
        self.plans.append(plan)
        self.states[plan.job.id] = "running"
        return Handle("afar", plan.job.id, plan.job.directory)

    async def status(self, handle):
        return JobStatus(self.states[handle.job_id])

    async def logs(self, handle, *, follow=False):
        yield b"from afar\n"

    async def stop(self, handle, *, force=False):
        self.states[handle.job_id] = "stopped"
        return "It was stopped."


class Log(Tracker):
    def log(self, step, metrics):
        pass


class Data(Pack):
    def digest(self):
        return "0"

    def write(self, directory):
        pass


def _components(**named):
    return [Component(name, config, f"{__name__}:{cls}", name) for name, (config, cls) in named.items()]


@hookimpl
def rollhook_environments():
    return _components(room=(RoomConfig, "Room"))


@hookimpl
def rollhook_agents():
    return _components(
        talker=(NoKeys, "Talker"),
        worker=(NoKeys, "Worker"),
        caller=(NoKeys, "Caller"),
        cheat=(NoKeys, "Cheat"),
        idle=(NoKeys, "Idle"),
    )


@hookimpl
def rollhook_sandboxes():
    return _components(
        box=(BoxConfig, "Box"),
        bare=(NoKeys, "Bare"),
        wrapper=(WrapperConfig, "Box"),
        absent=(NoKeys, "NoSuchClass"),
    )


@hookimpl
def rollhook_router_policies():
    return _components(spread=(NoKeys, "Spread"), stick=(StickConfig, "Policy"))


@hookimpl
def rollhook_engines():
    return _components(generator=(GeneratorKeys, "Generator"), text=(NoKeys, "TextOnly"))


@hookimpl
def rollhook_trainers():
    return _components(learner=(LearnConfig, "Learner"), tuner=(LearnConfig, "Tuner"))


@hookimpl
def rollhook_launchers():
    return _components(here=(NoKeys, "Here"), afar=(JobKeys, "Afar"))


@hookimpl
def rollhook_trackers():
    return _components(log=(NoKeys, "Log"))


@hookimpl
def rollhook_packs():
    return _components(sand=(NoKeys, "Data"))


@hookimpl
def rollhook_check(recipe):
    if recipe.seed == 13:
        return [Problem("seed", "13 brings bad luck")]
    return []
