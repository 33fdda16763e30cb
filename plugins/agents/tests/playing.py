"""An episode with the command agent over a real gateway, for the tests of this suite."""

import contextlib
import logging
from types import SimpleNamespace

import numpy as np

from rollhook.component import BuildContext
from rollhook.engine import SamplingParams
from rollhook.environment import Box, Environment, Episode, Observation, Phase, Task, Verdict
from rollhook.messages import message
from rollhook.recipe.schema import Budgets, Outcomes
from rollhook.runtime.episode import EpisodeRequest, EpisodeRunner
from rollhook.sandbox import SandboxSpec
from rollhook.secrets import resolve_secret
from rollhook.session import Renderer
from rollhook.session.gateway import Gateway
from rollhook.testing.environment import build_context
from rollhook.testing.fake_engine import FakeEngine
from rollhook.testing.policy import says, serving
from rollhook_agents import CommandConfig
from rollhook_agents.command import Command

LIMITS = {"agent": 30.0, "verify": 10.0, "create": 30.0, "setup": 10.0}


class OnePhase(Phase):
    def __init__(self, box):
        self.box = box
        self.observation = Observation([message("system", "Be brief."), message("user", "Say two things.")])
        self.heard = []

    async def verify(self, transcript):
        self.heard.append(transcript)
        return Verdict(1.0)


class OneEpisode(Episode):
    def __init__(self, environment):
        self.boxes = {"main": Box(SandboxSpec())} if environment.boxed else {}
        self.phase = environment.phase

    async def phases(self):
        yield self.phase


class OnePlace(Environment):
    verifies_apart = False

    def __init__(self, boxed):
        super().__init__(None, build_context())
        self.boxed = boxed
        self.phase = OnePhase("main" if boxed else None)

    def tasks(self, split=None):
        return [Task("t", "d", "train", limits=LIMITS)]

    def episode(self, task, ctx):
        return OneEpisode(self)


class OneBoxPool:
    """Hands out sandboxes of a backend, as the pool does."""

    def __init__(self, backend):
        self.backend = backend
        self.last = None

    async def acquire(self, spec, **keys):
        from rollhook.sandbox.sandbox import Sandbox

        raw = await self.backend.create(spec)
        self.last = Sandbox(raw, capabilities=self.backend.capabilities, delete=self.backend.delete)
        return self.last

    async def release(self, sandbox):
        await sandbox.close()

    def waits_for(self, episode_id):
        return ""


@contextlib.asynccontextmanager
async def playing(directory, scratch, *replies, backend=None, engine=None, token=None, limits=None, **keys):
    """Give a function that runs one episode of the agent with these keys."""
    engine = engine or FakeEngine(says(Renderer(directory), *(replies or ["one", "two", "three"])))
    answers = []
    engine.mangle = lambda answer: answers.append(answer) or answer
    async with serving(engine, directory=directory) as policy:
        gateway = Gateway(policy, token=token)
        await gateway.start()
        context = BuildContext(logging.getLogger("t"), scratch, scratch, secret=resolve_secret)
        environment = OnePlace(backend is not None)
        where = "host" if backend is None else "sandbox"
        agent = Command(CommandConfig(**{"where": where, **keys}), context)
        budgets = Budgets(**{"turns": 4, "max_seq_len": 4096, "reply_tokens": 64, **(limits or {})})
        runner = EpisodeRunner(
            name="one", environment=environment, agent=agent, policy=policy, limits=budgets,
            pool=None if backend is None else OneBoxPool(backend), outcome_policy=Outcomes(), context=context,
        )  # fmt: skip
        runner.gateway = gateway

        async def run():
            request = EpisodeRequest("e1", "g1", environment.tasks()[0], 1, SamplingParams())
            return await runner.run(request)

        try:
            yield SimpleNamespace(
                run=run, engine=engine, gateway=gateway, policy=policy, phase=environment.phase,
                runner=runner, answers=answers,
            )  # fmt: skip
        finally:
            await gateway.stop()


def assert_exact(played, result):
    """Invariant 2: the ids and log-probabilities of the program's turns are those that the engine gave."""
    emitted = [row[:2] for answer in played.answers for row in answer["meta_info"]["output_token_logprobs"]]
    trained = [(s.token_ids[s.mask == 1], s.logprobs[s.mask == 1]) for s in result.samples]
    assert np.concatenate([ids for ids, _ in trained]).tolist() == [token for _, token in emitted]
    kept = np.concatenate([logprobs for _, logprobs in trained])
    assert np.array_equal(kept, np.array([logprob for logprob, _ in emitted], np.float32))
