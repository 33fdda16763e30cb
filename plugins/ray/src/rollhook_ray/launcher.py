"""The launcher: a run's job goes to an existing Ray cluster by its job API, its driver to a worker node."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollhook.component import BuildContext
from rollhook.errors import LauncherError
from rollhook.job_script import LOG, read_exit_code, signalled
from rollhook.launcher import ENDED, Handle, Job, JobStatus, Launcher, Plan
from rollhook.ray_jobs import START_SECONDS, RayJob, RayJobs, Unreachable, job_status, without_values
from rollhook.ray_package import pack
from rollhook_ray import jobs
from rollhook_ray.clusters import RayClusters
from rollhook_ray.preflight import problems_of_cluster, problems_of_directory

_POLL_SECONDS = 0.5
#: seconds for Ray to start a driver whose node must be looked at, and for a job to be ended at once
_PLACED_SECONDS = 60.0
_ENDED_SECONDS = 45.0


class RayLauncher(RayClusters, Launcher):
    """Submits to the cluster whose dashboard is at `address`."""

    def __init__(self, config: Any, context: BuildContext) -> None:
        super().__init__(config, context)
        self._placed: set[str] = set()  # running jobs whose node has been looked at

    @property
    def shares_files(self) -> bool:
        """Whether this machine sees the run's directory as the nodes do."""
        return bool(self.config.shared)

    def plan(self, job: Job) -> Plan:
        """Return the request that Ray's job API gets, and the files beside it."""
        config = self.config
        body = jobs.request(config, job)
        requests: dict[str, Any] = {"submit": body}
        notes = [
            f"POST {config.address}/api/jobs/ with `submit`; the driver runs on a node that has what it asks"
        ]
        upload = jobs.upload(config, job)
        if upload is None:
            notes.append("by hand: " + shlex.join(jobs.by_hand(config.address, body)))
        else:
            requests["upload"] = upload
            notes.append("the upload goes first, and becomes the working directory on every node")
        return Plan("ray", job, files=jobs.files(config, job), requests=requests, notes=notes)

    async def preflight(self, plan: Plan) -> Sequence[str]:
        """Look at the dashboard, nodes and totals, at an upload's size, and at the directory from a node."""
        client = self._client()
        problems = await problems_of_cluster(client, self.config, plan.job)
        try:
            await self._pack(plan)
        except LauncherError as error:
            problems.append(str(error))
        return problems or await problems_of_directory(client, self.config, plan.job)

    async def submit(self, plan: Plan) -> Handle:
        """Upload what goes along and submit; when a head node could take the driver, see where it went."""
        client = self._client()
        body = dict(plan.requests["submit"])
        packed = await self._pack(plan)
        if packed is not None:
            uri = await client.upload(*packed)
            body["runtime_env"] = body["runtime_env"] | {"working_dir": uri}
        job_id = await client.submit_once(body)
        handle = Handle("ray", job_id, plan.job.directory, {"address": self.config.address})
        demand = jobs.demand(self.config, plan.job)
        if not self.config.driver_on_head and jobs.may_land_on_head(demand, await client.nodes()):
            job = await client.wait(job_id, _PLACED_SECONDS, started=True)
            if misplaced := await self._misplaced(client, job):
                await client.stop(job_id)
                raise LauncherError(misplaced, kind="user")
        return handle

    async def status(self, handle: Handle) -> JobStatus:
        """Ask Ray; a driver on the head node is stopped and has failed, unless it may be there."""
        recorded, asked = await asyncio.to_thread(self._left_by, handle)
        try:
            client = self._client()
            job = await client.job(handle.job_id)
            misplaced = await self._misplaced(client, job)
            if job is not None and misplaced and not job.ended:
                await client.stop(handle.job_id)
        except Unreachable:
            if recorded is None:
                raise
            job, misplaced = None, ""
        if job is not None and misplaced:
            return JobStatus("failed", misplaced, job.exit_code, job.raw)
        return job_status(job, recorded=recorded, stopped_code=handle.stopped_code, asked=asked)

    async def logs(self, handle: Handle, *, follow: bool = False) -> AsyncIterator[bytes]:
        """Give the log in the run's directory if it is seen here, else what Ray kept on the driver's node."""
        client = self._client()
        if not self.config.shared:
            if follow:
                async for chunk in client.follow(handle.job_id):
                    yield chunk
            elif await client.job(handle.job_id) is not None:
                yield await client.log(handle.job_id)
            return
        log, given = Path(handle.directory) / LOG, 0
        while True:
            ended = not follow or await self._has_ended(handle)
            while chunk := await asyncio.to_thread(_read_from, log, given):
                given += len(chunk)
                yield chunk
            if ended:
                break
            await asyncio.sleep(_POLL_SECONDS)
        if not given and await client.job(handle.job_id) is not None:
            yield await client.log(handle.job_id)  # the script never ran; Ray may say why

    async def stop(self, handle: Handle, *, force: bool = False) -> str:
        """Ask the job to stop, end one that has not started, or kill it."""
        client, job_id = self._client(), handle.job_id
        job = await client.job(job_id)
        if job is None:
            return f"Ray does not know job {job_id}, so there is nothing to stop"
        if job.ended:
            left = await self._kill_left(client, job, handle) if force else ""
            return f"job {job_id} had ended already ({job.status.lower()}){left}"
        await client.stop(job_id)
        if job.status == "PENDING":
            return await self._cancel(client, handle)
        if not force:
            return f"job {job_id} was asked to stop; it has {self.config.stop_grace_seconds:g} s for that"
        node = job.node(await client.nodes())
        if node is None:
            return f"job {job_id} was asked to stop, but its node is not known, so it could not be killed"
        await self._small(client, jobs.killing(job_id, handle.directory, node.ip))
        ended = await client.wait(job_id, _ENDED_SECONDS)
        state = (
            "was killed" if ended is None or ended.ended else "was sent KILL, and Ray still shows it running"
        )
        return f"job {job_id} {state}"

    async def cleanup(self, handle: Handle) -> Sequence[str]:
        """Delete the ended job, and small jobs that looked at it or ended it, from Ray's memory."""
        client, removed = self._client(), []
        for job in await client.jobs():
            if job.id == handle.job_id and (left := await self._kill_left(client, job, handle)):
                removed.append(f"job {job.id} had ended{left}")
            if job.ended and (job.id == handle.job_id or jobs.is_small_job_of(handle.job_id, job.id)):
                await client.delete(job.id)
                removed.append(f"job {job.id} was deleted from Ray at {client.address}")
        return removed

    async def debug(self, handle: Handle) -> Mapping[str, str]:
        """Return Ray's status, nodes, jobs and actors, without values of environment variables."""
        client = self._client(seconds=10.0)

        async def listed(rows: Awaitable[Sequence[Any]]) -> str:
            return _json([without_values(row) if isinstance(row, dict) else vars(row) for row in await rows])

        async def all_jobs() -> str:
            rows = [
                row.raw if row.id == handle.job_id else {"submission_id": row.id, "status": row.status}
                for row in await client.jobs()
            ]
            return _json(rows)

        wanted: dict[str, Callable[[], Awaitable[str]]] = {
            "ray-status.txt": client.cluster_status,
            "ray-nodes.json": lambda: listed(client.nodes()),
            "ray-jobs.json": all_jobs,
            "ray-actors.json": lambda: listed(client.actors()),
            "ray-job.log": lambda: _tail_of(client.log(handle.job_id)),
        }
        texts = await asyncio.gather(*(_or_error(ask) for ask in wanted.values()))
        return dict(zip(wanted, texts, strict=True))

    def _client(self, seconds: float = 30.0) -> RayJobs:
        token = self.config.token or self.own_token(self.config.address)
        secret = None if token is None else lambda: self.context.secret(str(token))
        return RayJobs(self.config.address, token=secret, seconds=seconds)

    async def _pack(self, plan: Plan) -> tuple[bytes, str] | None:
        upload = plan.requests.get("upload")
        if upload is None:
            return None
        below = upload["files"]
        carried = {f"{below}/{path}": text for path, text in plan.files.items()} if below else {}
        return await asyncio.to_thread(pack, upload["directory"], carried, exclude=upload["exclude"])

    def _left_by(self, handle: Handle) -> tuple[int | None, bool]:
        if not self.config.shared:
            return None, False
        return read_exit_code(handle.directory), bool(signalled(handle.directory))

    async def _has_ended(self, handle: Handle) -> bool:
        try:
            return (await self.status(handle)).state in {*ENDED, "lost"}
        except Unreachable:
            return False

    async def _misplaced(self, client: RayJobs, job: RayJob | None) -> str:
        """Return why a started job's driver is where it must not be; empty if it may be there."""
        if self.config.driver_on_head or job is None or job.status == "PENDING" or job.id in self._placed:
            return ""
        node = job.node(await client.nodes())
        if node is None and job.ended:  # it never started, or Ray has forgotten its node
            return ""
        if node is not None and not node.head:
            self._placed.add(job.id)
            return ""
        where = "its node cannot be told" if node is None else f"{node.ip} is the head node"
        return (
            f"the driver of job {job.id} is not on a worker node ({where}), so it was stopped; give "
            "`entrypoint_resources` something that only worker nodes have"
        )

    async def _kill_left(self, client: RayJobs, job: RayJob, handle: Handle) -> str:
        """Kill what a job left whose supervisor died: Ray ends its script then, but not what that started."""
        node = job.node(await client.nodes()) if job.error_type == "JOB_SUPERVISOR_ACTOR_DIED" else None
        if node is None or not node.alive:
            return ""
        await self._small(client, jobs.killing(job.id, handle.directory, node.ip))
        return f"; what it may have left on {node.ip} was killed"

    async def _cancel(self, client: RayJobs, handle: Handle) -> str:
        """End a job that waits: Ray's own stop reaches it only when it has started."""
        job_id = handle.job_id
        done = await self._small(client, jobs.cancelling(job_id, self.config.setup))
        job = await client.wait(job_id, _ENDED_SECONDS if done else 0)
        if job is not None and job.ended and job.node_id is not None:  # it started just then
            return f"job {job_id} was stopped{await self._kill_left(client, job, handle)}"
        if job is None or job.ended:
            return f"job {job_id} had not started yet, and will not"
        return (
            f"job {job_id} was asked to stop, but it is still waiting to start, and python3 on the head node "
            f"could not cancel it; Ray ends it when it starts, or fails it after {START_SECONDS} s"
        )

    async def _small(self, client: RayJobs, body: Mapping[str, Any]) -> bool:
        """Run a small job of our own to its end, and return whether it did what it is for."""
        name = await client.submit(body)
        ended = await client.wait(name, _ENDED_SECONDS)
        if ended is not None and ended.ended:
            await client.delete(name)
        return ended is not None and ended.status == "SUCCEEDED"


def _read_from(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as stream:  # opened anew each time, so that a shared file system looks again
            stream.seek(offset)
            return stream.read(1 << 20)
    except FileNotFoundError:
        return b""


async def _tail_of(log: Awaitable[bytes], size: int = 100_000) -> str:
    return (await log)[-size:].decode("utf-8", "replace")


async def _or_error(ask: Callable[[], Awaitable[str]]) -> str:
    try:
        return await ask()
    except Exception as error:  # noqa: BLE001 - what cannot be had is said in its place
        return f"not available: {error or type(error).__name__}\n"


def _json(rows: Any) -> str:
    return json.dumps(rows, indent=2, sort_keys=True, default=str) + "\n"
