"""One phase: the agent works on an instruction, then test.sh judges what it left."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollhook.environment import Observation, Phase, Transcript, Verdict
from rollhook.errors import AgentError, SandboxDead, SandboxError, Unsupported, VerifierError
from rollhook.messages import message
from rollhook.sandbox import ExecResult, Sandbox
from rollhook.sandbox.tools import SandboxTools
from rollhook_tbench2 import artifacts, templates
from rollhook_tbench2.artifacts import Collected
from rollhook_tbench2.stages import Stage
from rollhook_tbench2.verdict import MAX_REWARD_BYTES, verdict

if TYPE_CHECKING:
    from rollhook_tbench2.episode import TBench2Episode

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
_ROOT = (None, "root", "0")


class TBench2Phase(Phase):
    """The agent works on the instruction; tests/test.sh judges what it left."""

    box = "main"

    def __init__(self, episode: TBench2Episode, stage: Stage, judge: str | None) -> None:
        self._episode = episode
        self._stage = stage
        self._judge = judge
        self._sandbox: Sandbox = episode.ctx.box("main")
        self._solved_with: int | None = None
        self.user = stage.user if stage.user != episode.task.user else None
        acting = stage.user or self._sandbox.spec.user
        self.tools = SandboxTools(self._sandbox, None if acting in _ROOT else acting)
        self.judges = () if judge is None else (judge,)
        self.min_reward = stage.min_reward
        if stage.name and stage.agent_seconds is not None:
            self.limits = {"agent": stage.agent_seconds}
        self.observation = Observation(
            [message("system", episode.prompt), message("user", stage.instruction)]
        )

    async def solve(self) -> None:
        """Stage solution/ and run solve.sh; its exit code is recorded, the verifier judges."""
        source = Path(self._episode.task.path, self._stage.solution)
        if not await asyncio.to_thread((source / "solve.sh").is_file):
            name = Path(self._episode.task.path).name
            raise Unsupported(f"task {name} has no {self._stage.solution}/solve.sh")
        box, limit = self._sandbox, self._stage.agent_seconds
        await self._episode.upload(box, self._stage.solution, "/solution")
        user = self._stage.user or box.spec.user
        if user not in _ROOT:
            await box.shell("chmod -R a+rX /solution && chmod a+x /solution/solve.sh", cwd="/", user="root")
        env = {"DEBIAN_FRONTEND": "noninteractive", **self._resolved(self._episode.task.config.solution.env)}
        argv = ["/bin/sh", "-c", RUN, "sh", box.spec.workdir, "/solution/solve.sh"]
        result = await box.exec(argv, cwd="/", env=env, user=user, timeout=limit)
        if result.timed_out:
            raise AgentError(f"solution/solve.sh took longer than {limit:g} s: {self._tail(result.stderr)}")
        self._solved_with = result.exit_code

    async def verify(self, transcript: Transcript) -> Verdict:
        """Collect what is kept, clear the verifier's places, stage tests/, run test.sh, read its reward."""
        detail: dict[str, Any] = {"step": self._stage.name} if self._stage.name else {}
        if self._solved_with is not None:
            detail["solution_exit_code"] = self._solved_with
        rows = await self._collect(detail)
        if planted := await self._sandbox.remove(PLACES):
            detail["planted"] = planted
        judge = self._sandbox
        if self._judge is not None:
            judge = await self._prepare_judge(self._judge, rows)
        if self._stage.judge is None or not self._stage.judge.bundled:
            for directory in self._stage.tests:
                await self._episode.upload(judge, directory, "/tests")
        result = await self._run_tests(judge)
        detail["exit_code"] = result.exit_code
        if output := "\n".join(filter(None, (self._tail(result.stdout), self._tail(result.stderr)))):
            detail["output"] = output[-_TAIL:]
        if result.timed_out:
            why = f"tests/test.sh took longer than its {self._stage.verifier.timeout_sec:g} s"
            return Verdict(None, {}, {**detail, "reason": why})
        files, why = [], ""
        for path in (REWARD_JSON, REWARD_TEXT):
            data, problem = await _read(judge, path)
            files.append(data)
            why = why or problem
        if why:
            return Verdict(None, {}, {**detail, "reason": why})
        return verdict(files[0], files[1], self._episode.reward_key, detail, self._episode.ground.hide)

    async def _collect(self, detail: dict[str, Any]) -> list[Collected]:
        """Run the collect hooks and fetch the artifacts; what fails is in the record."""
        for hook in self._stage.verifier.collect:
            user = None if hook.user is None else str(hook.user)
            cwd = self._sandbox.spec.workdir
            result = await self._sandbox.shell(hook.command, cwd=cwd, user=user, timeout=hook.timeout_sec)
            if not result.ok:
                said = "took too long" if result.timed_out else f"ended with {result.exit_code}"
                detail.setdefault("warnings", []).append(f"collect hook {hook.command!r} {said}")
        if self._stage.verifier.collect:
            # what it called may be the agent's own
            await self._sandbox.quiesce()
        if not self._stage.artifacts:
            return []
        rows = await artifacts.collect(
            self._sandbox, self._stage.artifacts, self._kept, self._episode.artifact_limit
        )
        detail["artifacts"] = [
            {"source": row.source, "files": row.files, "bytes": row.bytes}
            | ({"reason": row.reason} if row.reason else {})
            for row in rows
        ]
        return rows

    @property
    def _kept(self) -> Path:
        """Where the artifacts go: below the attempt's directory, by episode and step."""
        ctx = self._episode.ctx
        return ctx.build.scratch / "artifacts" / ctx.episode_id.replace("/", "_") / self._stage.name

    async def _prepare_judge(self, name: str, rows: list[Collected]) -> Sandbox:
        """Return the verifier's own box with the artifacts in it."""
        judge: Sandbox = self._episode.ctx.box(name)
        assert self._stage.judge is not None
        await self._episode.stage(name, self._stage.judge)
        await artifacts.deliver(judge, rows, self._kept)
        await judge.remove(PLACES[:-1] if self._stage.judge.bundled else PLACES)
        return judge

    async def _run_tests(self, judge: Sandbox) -> ExecResult:
        verifier = self._stage.verifier
        user = self._verifier_user(judge)
        env = self._resolved(verifier.env)
        script = MAKE_LOGS + RUN
        if user not in _ROOT:
            prepare = f"{MAKE_LOGS}chmod a+rx /logs && chmod 777 /logs/verifier && chmod a+rx /tests/test.sh"
            root = None if judge.spec.user is None else "root"
            made = await judge.shell(prepare, cwd="/", user=root, timeout=60.0)
            if not made.ok:
                raise VerifierError(f"/logs/verifier cannot be made: {self._tail(made.stderr)}")
            script = RUN
        else:
            # packages that root installed for itself alone are not part of a task, and a way to plant code
            env = {"PYTHONNOUSERSITE": "1", **env}
        return await judge.exec(
            ["/bin/sh", "-c", script, "sh", judge.spec.workdir, "/tests/test.sh"],
            cwd="/",
            env=env,
            user=user,
            timeout=verifier.timeout_sec,
        )

    def _verifier_user(self, judge: Sandbox) -> str | None:
        """Return whom test.sh runs as: as asked, else the image's user, never the agent's own."""
        asked = self._stage.verifier.user
        if asked is not None:
            return None if str(asked) in _ROOT and judge.spec.user is None else str(asked)
        return self._episode.image_user(self._stage.judge or self._episode.task.box, judge)

    def _tail(self, data: bytes) -> str:
        """Return the end of what a program printed; what is to be hidden is so before it is cut."""
        return self._episode.ground.hide(data.decode("utf-8", "replace"))[-_TAIL:].strip()

    def _resolved(self, env: Mapping[str, str]) -> dict[str, str]:
        return templates.resolve(env, self._episode.ground.lookup)


async def _read(judge: Sandbox, path: str) -> tuple[bytes | None, str]:
    """Return a reward file's bytes or None, and why it cannot be used."""
    try:
        return await judge.read(path, limit=MAX_REWARD_BYTES), ""
    except FileNotFoundError:
        return None, ""
    except (OSError, SandboxError) as error:
        if isinstance(error, SandboxDead) or (isinstance(error, SandboxError) and error.kind != "user"):
            raise
        return None, f"{path} cannot be read: {error}"
