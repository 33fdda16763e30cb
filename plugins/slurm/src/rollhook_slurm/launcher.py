"""The launcher: one Slurm job, a Ray cluster of its own inside, and what it leaves in its directory."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rollhook.errors import LauncherError
from rollhook.job_script import LOG, left_status, read_log, script_files
from rollhook.launcher import ENDED, Handle, Job, JobStatus, Launcher, Plan
from rollhook_slurm.config import SlurmLauncherConfig
from rollhook_slurm.preflight import problems
from rollhook_slurm.render import (
    ATTEMPTS,
    BATCH,
    BATCH_LOG,
    FOLDER,
    NODE,
    UP,
    container_arguments,
    render_files,
)
from rollhook_slurm.slurm import STATES, WHY, call, show_job, state_word

#: below FOLDER, written by `stop`: the job was stopped from outside, whatever it leaves behind
STOP = "stop"
_DEBUG_SECONDS = 20.0


class SlurmLauncher(Launcher):
    """Submits a batch script with sbatch; the job's directory must be one that all nodes see."""

    config: SlurmLauncherConfig

    def plan(self, job: Job) -> Plan:
        """Return the batch script, what runs on each node, and the command that submits."""
        config = self.config
        notes = [
            f"{job.directory} must be on a file system that this machine and all nodes mount",
            f"Ray listens between the ports {config.first_port} and {config.last_port}",
        ]
        if config.requeues:
            notes.append(
                f"{config.signal_seconds} s before its time limit the job writes a checkpoint and goes back "
                f"into the queue, at most {config.requeues} times"
            )
        files = script_files(job) | render_files(job, config)
        return Plan(
            "slurm", job, files, [["sbatch", "--parsable", f"{job.directory}/{FOLDER}/{BATCH}"]], notes=notes
        )

    async def preflight(self, plan: Plan) -> Sequence[str]:
        """Return what the cluster would refuse or lacks; nothing is submitted."""
        return await problems(plan, self.config)

    async def submit(self, plan: Plan) -> Handle:
        """Run sbatch. Raises LauncherError with what it said."""
        job = plan.job
        if there := await self._by_name(job.id):
            raise LauncherError(
                f"Slurm has a job named {job.id} already; stop it (scancel {there}) or start a new run",
                kind="user",
            )
        (Path(job.directory) / "logs").mkdir(parents=True, exist_ok=True)
        said = await call(plan.commands[0])
        number = said.out.strip().partition(";")[0]
        if said.code != 0 or not number.isdecimal():
            # where the answer was lost on its way the job may be there
            number = await self._by_name(job.id) if "timed out" in said.err.lower() else ""
        if not number:
            raise LauncherError(
                f"sbatch did not take job {job.id}: {said.err or said.out or said.code}", kind="user"
            )
        return Handle("slurm", job.id, job.directory, {"job": number}, job.stopped_code)

    async def _by_name(self, name: str) -> str:
        """Return the number of a job of this user with that name which has not ended, or an empty string."""
        said = await call(["squeue", "--noheader", "--me", f"--name={name}", "--format=%A"])
        if said.code != 0:
            raise LauncherError(f"Slurm cannot be asked for its jobs: {said.err}", kind="retryable")
        return said.out.split()[0] if said.out.split() else ""

    async def status(self, handle: Handle) -> JobStatus:
        """Ask scontrol, else read what the job left; before its driver runs it is pending."""
        fields = await show_job(_number(handle))
        return await asyncio.to_thread(status_of, handle, fields)

    async def logs(self, handle: Handle, *, follow: bool = False) -> AsyncIterator[bytes]:
        """Give the driver's log of each attempt in turn; where it came to none, what Slurm's script said."""
        if not follow:
            for directory in await asyncio.to_thread(_attempts, handle):
                async for data in read_log(directory, self._never):
                    yield data
        else:
            number, over = 0, False
            while not over:
                directories = await asyncio.to_thread(_attempts, handle)

                async def ended(own: int = number) -> bool:
                    nonlocal over
                    over = over or (await self.status(handle)).state in {*ENDED, "lost"}
                    return over or len(await asyncio.to_thread(_attempts, handle)) > own + 1

                async for data in read_log(directories[number], ended, follow=True):
                    yield data
                number += 1
                over = over and len(await asyncio.to_thread(_attempts, handle)) <= number
        newest = (await asyncio.to_thread(_attempts, handle))[-1]
        if not await asyncio.to_thread((newest / LOG).exists):
            with contextlib.suppress(OSError):
                yield await asyncio.to_thread((Path(handle.directory) / BATCH_LOG).read_bytes)

    @staticmethod
    async def _never() -> bool:
        return True

    async def stop(self, handle: Handle, *, force: bool = False) -> str:
        """Tell the job's nodes to stop, or have Slurm kill it; one that waits in the queue is taken out."""
        job = _number(handle)
        status = await self.status(handle)
        if status.state in {*ENDED, "lost"}:
            return f"Job {handle.job_id} has ended already: {status.state}."
        await asyncio.to_thread(_touch, Path(handle.directory) / FOLDER / STOP)
        up = (await asyncio.to_thread(_attempts, handle))[-1] / FOLDER / UP
        running = str(status.raw.get("JobState", "")).startswith(("RUNNING", "COMPLETING"))
        if running and not force and await asyncio.to_thread(up.is_dir):
            await asyncio.to_thread(_touch, up / STOP)
            await call(["scancel", "--batch", "--signal=USR2", job])
            return f"Job {handle.job_id} (Slurm's {job}) was asked to stop."
        if running and force:
            await call(["scancel", "--full", "--signal=KILL", job])
        said = await call(["scancel", job])
        if said.code != 0 and "already completing or completed" not in said.err:
            raise LauncherError(f"scancel {job} failed: {said.err}")
        return f"Job {handle.job_id} (Slurm's {job}) was cancelled."

    async def cleanup(self, handle: Handle) -> Sequence[str]:
        """Remove what an attempt that was killed has left: the token of its Ray cluster."""
        if (await self.status(handle)).state not in {*ENDED, "lost"}:
            return []
        return await asyncio.to_thread(_remove_tokens, handle)

    async def debug(self, handle: Handle) -> Mapping[str, str]:
        """Return Slurm's view of the job and its nodes, Ray's of its cluster, and the bring-up."""
        job = _number(handle)
        commands = {
            "squeue.txt": ["squeue", "--jobs", job, "--steps"],
            "queue.txt": ["squeue", "--jobs", job, "--format=%A %j %T %r %M %l %D %N %S"],
            "job.txt": ["scontrol", "--details", "show", "job", job],
            "sinfo.txt": ["sinfo", "--Node", "--long"],
        }
        files = dict(zip(commands, await asyncio.gather(*map(_say, commands.values())), strict=True))
        with contextlib.suppress(LauncherError):
            fields = await show_job(job) or {}
            if nodes := fields.get("NodeList", "").replace("(null)", ""):
                files["nodes.txt"] = await _say(["scontrol", "show", "node", nodes])
            files["ray.txt"] = await self._ray_status(handle, job, fields)
        return files | await asyncio.to_thread(_bring_up, handle)

    async def _ray_status(self, handle: Handle, job: str, fields: Mapping[str, str]) -> str:
        newest = (await asyncio.to_thread(_attempts, handle))[-1]
        if state_word(fields) != "RUNNING" or not await asyncio.to_thread(
            (newest / FOLDER / UP / "ready").exists
        ):
            return "Ray is not up\n"
        bare = Job("none", 1, handle.directory, "")
        keys = self.config.container
        unpacked = container_arguments(bare, keys.model_copy(update={"pull": False}) if keys else None)[1]
        inside = shlex.split(" ".join(unpacked))
        head = fields.get("BatchHost", "")
        return await _say(
            ["srun", f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={head}", *inside,
             "env", f"ROLLHOOK_JOB_DIR={newest}", f"ROLLHOOK_SLURM_JOB={job}",
             "bash", f"{handle.directory}/{FOLDER}/{NODE}", "status"]
        )  # fmt: skip


def status_of(handle: Handle, fields: Mapping[str, str] | None) -> JobStatus:  # noqa: PLR0911 - a table of cases
    """Return how a job stands by Slurm's record of it, if it has one, and by the job's directory."""
    newest = _attempts(handle)[-1]
    left = left_status(replace(handle, directory=str(newest)))
    up = newest / FOLDER / UP
    failure = _read(up / "failure")
    if left is not None and failure:
        left = replace(left, message=failure)
    if fields is None:
        if left is not None:
            return left
        if (Path(handle.directory) / FOLDER / STOP).exists():
            return JobStatus("stopped", "it was cancelled, and Slurm has forgotten it since")
        return JobStatus("lost", f"Slurm does not know job {handle.data['job']}, and it left no exit code")
    word = state_word(fields)
    raw = dict(fields)
    state = STATES.get(word)
    reason = fields.get("Reason", "None")
    said = f"{word}" + (f" ({reason})" if reason not in ("None", "") else "")
    code = None if left is None else left.exit_code
    if word == "RUNNING" and not (up / "ready").exists():
        return JobStatus("pending", f"Ray is coming up: {_read(up / 'progress') or 'no node yet'}", None, raw)
    if state in ("pending", "running"):
        return JobStatus(state, said, None, raw)
    if state == "stopped" and left is not None and left.state != "failed":
        return replace(left, raw=raw)
    if state is not None:
        return JobStatus(state, WHY.get(word, said) + (f": {failure}" if failure else ""), code, raw)
    if left is not None:
        return replace(left, raw=raw)
    if (Path(handle.directory) / FOLDER / STOP).exists():
        return JobStatus("stopped", f"it was stopped; {said}", None, raw)
    own, _, number = fields.get("ExitCode", "").partition(":")
    if word == "COMPLETED":
        return JobStatus("succeeded", said, 0, raw)
    why = _last_line(Path(handle.directory) / BATCH_LOG)
    if not why:
        why = f"it left no log, so {handle.directory} may not be seen on the nodes"
    died = f" by signal {number}" if number not in ("0", "") else ""
    return JobStatus(
        "failed", f"{said}, exit code {own}{died}: {why}", int(own) if own.isdecimal() else None, raw
    )


def _number(handle: Handle) -> str:
    """Return Slurm's number of a job; nothing else of a record becomes an argument of scancel."""
    number = str(handle.data.get("job", ""))
    if not (number.isascii() and number.isdecimal()):
        raise LauncherError(f"the record of job {handle.job_id} is damaged: {number!r} is no number of a job")
    return number


def _attempts(handle: Handle) -> list[Path]:
    """Return the directories of the job's attempts, oldest first; each time Slurm started it is one."""
    said = _read(Path(handle.directory) / FOLDER / ATTEMPTS).splitlines()
    return [Path(line) for line in dict.fromkeys(said) if line] or [Path(handle.directory)]


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace").strip()
    except OSError:
        return ""


def _last_line(path: Path) -> str:
    lines = _read(path).splitlines()
    own = [line for line in lines if "rollhook: " in line] or lines
    return own[-1].rpartition("rollhook: ")[2] if own else ""


def _touch(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise LauncherError(f"{path} cannot be written: {error.strerror}") from error


def _remove_tokens(handle: Handle) -> list[str]:
    removed = []
    for directory in _attempts(handle):
        token = directory / FOLDER / UP / "token"
        if token.exists():
            token.unlink(missing_ok=True)
            removed.append(f"Removed {token}.")
    return removed


async def _say(argv: Sequence[str]) -> str:
    """Return what a command says, or why it does not."""
    try:
        said = await call(argv, seconds=_DEBUG_SECONDS)
    except LauncherError as error:
        return f"{error}\n"
    return said.out + (f"{said.err}\n" if said.err else "")


def _bring_up(handle: Handle) -> dict[str, str]:
    """Return when each phase began, by attempt, and what the batch script said."""
    found = {"slurm.log": _read(Path(handle.directory) / BATCH_LOG) + "\n"}
    for directory in _attempts(handle):
        found[f"phases-{directory.name}.tsv"] = _read(directory / FOLDER / UP / "phases.tsv") + "\n"
    return found
