"""environment.openenv: an episode is one session with a server; its steps are calls of a tool, or replies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import aiohttp

from rollhook.component import BuildContext
from rollhook.environment import (
    Environment,
    Episode,
    EpisodeContext,
    Observation,
    Phase,
    Task,
    Transcript,
    Verdict,
)
from rollhook.errors import AgentError, TaskError, Unsupported, UsageError
from rollhook.messages import Message, ToolSchema, message
from rollhook.tools import ToolResult
from rollhook_openenv import OpenEnvConfig
from rollhook_openenv.client import OpenEnvSession, RefusedActionError, Step
from rollhook_openenv.server import OwnServer

_KEYS = {"id", "reset", "prompt", "split", "family", "solution"}


class OpenEnv(Environment):
    """Tasks are what `reset` is given: the lines of a file, or seeds."""

    verifies_apart: ClassVar[bool] = False
    config: OpenEnvConfig

    def __init__(self, config: OpenEnvConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        self._server: OwnServer | None = None
        self._schema: dict[str, Any] | None = None
        if config.argv:
            self._server = OwnServer(config.argv, config.env, context.scratch, config.start_seconds)

    def tasks(self, split: str | None = None) -> Sequence[Task]:
        """Return the tasks of a split, in the file's order or by seed."""
        found = self._seeds() if self.config.tasks_file is None else self._file(Path(self.config.tasks_file))
        splits = list(dict.fromkeys(task.split for task in found))
        if split is not None and split not in splits:
            raise UsageError(f"there is no split {split!r}; splits: {', '.join(splits)}")
        return [task for task in found if split in (None, task.split)]

    def episode(self, task: Task, ctx: EpisodeContext) -> Episode:
        """Return an attempt at a task. Raises TaskError for one that has a problem."""
        if task.problem is not None:
            raise TaskError(f"task {task.id} cannot run: {task.problem}")
        return OpenEnvEpisode(self, task)

    def describe(self) -> Mapping[str, str]:
        """Return which server it is."""
        return {"server": self.config.url or self.config.argv[0]}

    async def aclose(self) -> None:
        """End the server, if it was started here."""
        if self._server is not None:
            await self._server.aclose()

    async def open(self, reset: Mapping[str, Any]) -> tuple[OpenEnvSession, Step, dict[str, Any]]:
        """Return a session that is reset, what reset gave, and the JSON Schema of its actions."""
        config = self.config
        headers = {name: self.context.secret(str(each)) for name, each in config.headers.items()}
        session, step = await OpenEnvSession.connect(
            self._url, headers, reset, seconds=config.start_seconds, most=config.message_bytes
        )
        try:
            if self._schema is None and config.act == "tool":
                self._schema = await _action_schema(await self._url(), headers)
        except BaseException:
            await session.aclose()
            raise
        return session, step, self._schema or {}

    async def _url(self) -> str:
        if self._server is not None:
            return await self._server.url()
        return (self.config.url or "").rstrip("/")

    def _seeds(self) -> list[Task]:
        config, found = self.config, []
        for seed in range(config.seeds):
            digest = self._digest(str(seed))
            held = int(hashlib.sha256(str(seed).encode()).hexdigest()[:8], 16) % 100 < config.heldout_percent
            payload = {"reset": {"seed": seed}}
            found.append(Task(f"seed-{seed}", digest, "heldout" if held else "train", payload=payload))
        return found

    def _file(self, path: Path) -> list[Task]:
        try:
            lines = path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise UsageError(f"environment.tasks_file: {path} cannot be read: {reason}") from None
        found: dict[str, Task] = {}
        for number, line in enumerate(lines, start=1):
            if line.strip():
                task = self._task(line, f"{path.name}:{number}")
                if task.id in found:
                    where = f"environment.tasks_file: {path}:{number}"
                    raise UsageError(f"{where} says {task.id!r} a second time")
                found[task.id] = task
        return list(found.values())

    def _task(self, line: str, where: str) -> Task:
        digest = self._digest(line)
        try:
            said = json.loads(line)
        except (ValueError, RecursionError) as error:
            return Task(where, digest, "train", problem=f"{where} is not JSON: {error}")
        if not isinstance(said, dict) or not isinstance(said.get("id"), str) or set(said) - _KEYS:
            return Task(where, digest, "train", problem=f"{where} is no object with id and {sorted(_KEYS)}")
        kinds = {"reset": dict, "prompt": str, "split": str, "family": str, "solution": list}
        if wrong := [key for key, kind in kinds.items() if not isinstance(said.get(key, kind()), kind)]:
            return Task(where, digest, "train", problem=f"{where}: {', '.join(wrong)} is of another kind")
        return Task(said["id"], digest, said.get("split", "train"), said.get("family", ""), payload=said)

    def _digest(self, text: str) -> str:
        config = self.config
        server = config.url or " ".join(config.argv)
        rules = [server, config.act, config.reply_field, config.reward, config.system_prompt, *config.show]
        return hashlib.sha256("\n".join([*rules, text]).encode()).hexdigest()


class OpenEnvEpisode(Episode):
    """One session."""

    def __init__(self, environment: OpenEnv, task: Task) -> None:
        self._environment = environment
        self._task = task
        self._session: OpenEnvSession | None = None
        self._phase: Phase | None = None

    async def __aenter__(self) -> Self:
        """Open the session. Raises TaskError when there is none to be had."""
        payload = self._task.payload
        self._session, step, schema = await self._environment.open(payload.get("reset", {}))
        self._phase = OpenEnvPhase(self._environment.config, payload, self._session, step, schema)
        return self

    async def __aexit__(self, *exception: object) -> None:
        """End the session."""
        if self._session is not None:
            await self._session.aclose()

    async def phases(self) -> AsyncIterator[Phase]:
        """Yield the one phase."""
        assert self._phase is not None
        yield self._phase


class OpenEnvPhase(Phase):
    """Steps by a tool or by replies; the rewards of the steps."""

    def __init__(
        self,
        config: OpenEnvConfig,
        task: Mapping[str, Any],
        session: OpenEnvSession,
        first: Step,
        schema: dict[str, Any],
    ) -> None:
        self._config = config
        self._task = task
        self._session = session
        self._rewards: list[float | None] = []
        self._refused = 0
        self._done = first.done
        texts = [task.get("prompt", ""), shown(first.observation, config.show)]
        system = [message("system", config.system_prompt)] if config.system_prompt else []
        prompt = "\n\n".join(text for text in texts if text) or "Begin."
        self.observation = Observation([*system, message("user", prompt)])
        self.tools = StepTool(self, schema) if config.act == "tool" else None

    async def act(self, action: Mapping[str, Any]) -> tuple[str, bool]:
        """Take a step; return what the agent is told, and whether the server refused the action."""
        if self._done:
            return "the episode is over", True
        try:
            step = await self._session.step(action, seconds=self._config.step_seconds)
        except RefusedActionError as error:
            self._refused += 1
            return str(error), True
        self._rewards.append(step.reward)
        self._done = step.done
        text = shown(step.observation, self._config.show)
        return (f"{text}\nThe episode is over." if step.done else text).strip(), False

    async def respond(self, said: Message) -> Observation | None:
        """Take a reply as an action, where replies are; None once the episode is over."""
        if self._config.act != "reply" or self._done:
            return None
        text, _ = await self.act({self._config.reply_field: said["content"] or ""})
        return None if self._done else Observation([message("user", text or "(nothing)")])

    async def solve(self) -> None:
        """Take the steps of the task's solution."""
        if "solution" not in self._task:
            raise Unsupported("this task has no solution")
        for action in self._task["solution"]:
            text, refused = await self.act(action)
            if refused:
                raise AgentError(f"the solution's action {action} is refused: {text}")

    async def verify(self, transcript: Transcript) -> Verdict:
        """Return what the steps earned: nothing without one, none where the end gave none."""
        rewards = [reward for reward in self._rewards if reward is not None]
        components = {"steps": float(len(self._rewards)), "refused": float(self._refused)}
        if self._done and self._rewards and self._rewards[-1] is None and not rewards:
            return Verdict(None, components, {"reason": "the episode is over and no step gave a reward"})
        if not rewards:
            return Verdict(0.0, components, {"reason": "the agent stopped before any reward"})
        total = {"last": rewards[-1], "sum": sum(rewards), "max": max(rewards)}[self._config.reward]
        return Verdict(total, components)


class StepTool:
    """The tool `step`; implements `rollhook.tools.Tools`."""

    def __init__(self, phase: OpenEnvPhase, schema: dict[str, Any]) -> None:
        self._phase = phase
        self._schema = schema

    async def list(self) -> Sequence[ToolSchema]:
        """Return the one tool, its parameters the server's schema of actions."""
        about = self._schema.get("description") or "Act in the environment."
        function = {"name": "step", "description": about, "parameters": self._schema}
        return [{"type": "function", "function": function}]

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Take a step."""
        if name != "step":
            return ToolResult(f"there is no tool {name!r}; there is step", is_error=True)
        text, refused = await self._phase.act(arguments)
        return ToolResult(text, is_error=refused)


def shown(observation: Mapping[str, Any], fields: Sequence[str]) -> str:
    """Return an observation as text: its fields that are filled, or these; one text field alone is bare."""
    names = fields or [name for name in observation if name != "metadata"]
    found = {name: observation[name] for name in names if observation.get(name) not in (None, "", [], {})}
    values = list(found.values())
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(found, ensure_ascii=False) if found else ""


async def _action_schema(url: str, headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the server's schema of actions, without the metadata that every action may have."""
    try:
        async with aiohttp.ClientSession(headers=dict(headers)) as http, http.get(f"{url}/schema") as answer:
            answer.raise_for_status()
            schema = (await answer.json())["action"]
            if not isinstance(schema.get("properties"), dict):
                raise TypeError("no properties")
    except (aiohttp.ClientError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TaskError(f"{url}/schema gives no schema of actions: {error}") from error
    schema["properties"].pop("metadata", None)
    found: dict[str, Any] = schema
    return found
