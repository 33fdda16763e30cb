"""One attempt at one task: stage what the image would hold, let the agent work, then run tests/test.sh."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

from rollhook.environment import Box, Episode, EpisodeContext, Observation, Phase, Transcript, Verdict
from rollhook.errors import AgentError, SandboxDead, SandboxError, Unsupported, VerifierError
from rollhook.messages import message
from rollhook.sandbox import ExecResult, SandboxSpec
from rollhook_tbench2.dockerfile import target_of
from rollhook_tbench2.task_toml import VerifierTable
from rollhook_tbench2.tasks import TaskDir
from rollhook_tbench2.verdict import MAX_REWARD_BYTES, verdict

REWARD_JSON = "/logs/verifier/reward.json"
REWARD_TEXT = "/logs/verifier/reward.txt"
#: characters of a test's or solution's output that are kept, from its end
_TAIL = 2000

#: where only the verifier may have left anything: removed before the agent works, so that what is
#: there when it has ended is the agent's
PLACES = (REWARD_JSON, REWARD_TEXT, "/logs/verifier", "/tests")
#: runs "$2" in the directory "$1" if that is still there
RUN = """
cd -- "$1" 2>/dev/null || cd /
[ -x "$2" ] || chmod +x "$2"
exec "$2"
"""
#: makes the verifier's directory, in the same shell where no other user needs it; an agent that put something
#: else in the place of its parent is not spared the verdict
MAKE_LOGS = """
if [ -L /logs ] || [ ! -d /logs ]; then rm -f /logs; fi
mkdir -p /logs/verifier
"""


class TBench2Episode(Episode):
    """A task in one sandbox, `main`."""

    def __init__(
        self, task: TaskDir, ctx: EpisodeContext, prompt: str, reward_key: str, images: bool
    ) -> None:
        self.task = task
        self.ctx = ctx
        self.prompt = prompt
        self.reward_key = reward_key
        self._staged = not images
        self.boxes = {"main": Box(box_spec(task, images))}

    async def __aenter__(self) -> Self:
        await self.ctx.box("main").remove(PLACES)
        if self._staged and self.task.dockerfile is not None:
            for source, destination in self.task.dockerfile.copies:
                await self._copy(Path(self.task.path, "environment", source), destination)
        return self

    async def phases(self) -> AsyncIterator[Phase]:
        """Yield the one phase."""
        yield TBench2Phase(self)

    async def _copy(self, source: Path, destination: str) -> None:
        """Do what COPY does: the contents of a directory, or one file."""
        box = self.ctx.box("main")
        if await asyncio.to_thread(source.is_dir):
            await box.upload_dir(source, destination.rstrip("/") or "/")
        else:
            data, mode = await asyncio.to_thread(_content, source)
            await box.write(target_of(source, destination), data, mode=mode)


class TBench2Phase(Phase):
    """The agent works on the instruction; tests/test.sh judges what it left."""

    box = "main"

    def __init__(self, episode: TBench2Episode) -> None:
        self._task = episode.task
        self._sandbox = episode.ctx.box("main")
        self._workdir = episode.boxes["main"].spec.workdir
        self._reward_key = episode.reward_key
        self._solved_with: int | None = None
        self.observation = Observation(
            [message("system", episode.prompt), message("user", episode.task.instruction)]
        )

    async def solve(self) -> None:
        """Stage solution/ and run solve.sh; its exit code is recorded, the verifier judges."""
        source = Path(self._task.path, "solution")
        if not await asyncio.to_thread((source / "solve.sh").is_file):
            raise Unsupported(f"task {source.parent.name} has no solution/solve.sh")
        await self._sandbox.upload_dir(source, "/solution")
        limit = self._task.config.agent.timeout_sec
        env = {"DEBIAN_FRONTEND": "noninteractive", **self._task.config.solution.env}
        result = await self._sandbox.exec(
            ["sh", "-c", RUN, "sh", self._workdir, "/solution/solve.sh"], cwd="/", env=env, timeout=limit
        )
        if result.timed_out:
            raise AgentError(f"solution/solve.sh took longer than {limit:g} s: {_tail(result.stderr)}")
        self._solved_with = result.exit_code

    async def verify(self, transcript: Transcript) -> Verdict:
        """Clear the verifier's places, stage tests/, run test.sh, read the reward that it wrote."""
        verifier = self._task.config.verifier
        detail: dict[str, Any] = {}
        if self._solved_with is not None:
            detail["solution_exit_code"] = self._solved_with
        if planted := await self._sandbox.remove(PLACES):
            detail["planted"] = planted
        await self._sandbox.upload_dir(Path(self._task.path, "tests"), "/tests")
        result = await self._run_tests(verifier)
        detail["exit_code"] = result.exit_code
        if output := _tail(result.stdout) + _tail(result.stderr):
            detail["output"] = output[-_TAIL:]
        if result.timed_out:
            why = f"tests/test.sh took longer than its {verifier.timeout_sec:g} s"
            return Verdict(None, {}, {**detail, "reason": why})
        files, why = [], ""
        for path in (REWARD_JSON, REWARD_TEXT):
            data, problem = await self._read(path)
            files.append(data)
            why = why or problem
        if why:
            return Verdict(None, {}, {**detail, "reason": why})
        return verdict(files[0], files[1], self._reward_key, detail)

    async def _run_tests(self, verifier: VerifierTable) -> ExecResult:
        user = None if verifier.user in (None, "root", 0, "0") else str(verifier.user)
        script = MAKE_LOGS + RUN
        if user is not None:
            prepare = f"{MAKE_LOGS}chmod a+rx /logs && chmod 777 /logs/verifier && chmod a+rx /tests/test.sh"
            made = await self._sandbox.shell(prepare, cwd="/", timeout=60.0)
            if not made.ok:
                raise VerifierError(f"/logs/verifier cannot be made: {_tail(made.stderr)}")
            script = RUN
        return await self._sandbox.exec(
            ["sh", "-c", script, "sh", self._workdir, "/tests/test.sh"],
            cwd="/",
            env=verifier.env,
            user=user,
            timeout=verifier.timeout_sec,
        )

    async def _read(self, path: str) -> tuple[bytes | None, str]:
        """Return a reward file's bytes or None, and why it cannot be used."""
        try:
            return await self._sandbox.read(path, limit=MAX_REWARD_BYTES), ""
        except FileNotFoundError:
            return None, ""
        except (OSError, SandboxError) as error:
            if isinstance(error, SandboxDead) or (isinstance(error, SandboxError) and error.kind != "user"):
                raise
            return None, f"{path} cannot be read: {error}"


def box_spec(task: TaskDir, images: bool) -> SandboxSpec:
    """Return what the task's sandbox must be. Raises Unsupported when it cannot run without images."""
    environment, dockerfile = task.config.environment, task.dockerfile
    if not images and (why := why_not_on_host(task)):
        raise Unsupported(f"task {Path(task.path).name}: {why}")
    inherited = dockerfile.workdir if dockerfile else None
    default = "/" if images and task.needs_image else SandboxSpec().workdir
    build = images and environment.docker_image is None and dockerfile is not None
    return SandboxSpec(
        image=environment.docker_image if images else None,
        dockerfile=str(Path(task.path, "environment", "Dockerfile")) if build else None,
        workdir=environment.workdir or inherited or default,
        env={**(dockerfile.env if dockerfile and not images else {}), **environment.env},
        memory_bytes=environment.memory_mb * 2**20 if environment.memory_mb else None,
        cpus=environment.cpus,
        disk_bytes=environment.storage_mb * 2**20 if environment.storage_mb else None,
        network=environment.network_mode == "public",
    )


def why_not_on_host(task: TaskDir) -> str:
    """Return why a task cannot run in a sandbox without images; empty: it can."""
    if not task.needs_image:
        return ""
    if not task.config.host_ok:
        return "it needs its container image, and its task.toml does not say `[metadata] host_ok = true`"
    refused = task.dockerfile.refused if task.dockerfile else None
    return str(refused) if refused else ""


def _content(path: Path) -> tuple[bytes, int]:
    with open(path, "rb") as file:
        executable = os.fstat(file.fileno()).st_mode & 0o100
        return file.read(), 0o755 if executable else 0o644


def _tail(data: bytes) -> str:
    return data[-4 * _TAIL :].decode("utf-8", "replace")[-_TAIL:].strip()
