"""The job API of a Ray cluster, for launchers: plain HTTP to its dashboard, so Ray itself is not imported.

Endpoints and fields are those of Ray 2.49 and newer (its job submission REST API and state API). Errors are
LauncherError with the address and the way out; `Unreachable` is one of them, for what may pass.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp
import orjson

from rollhook.errors import LauncherError, RollhookError
from rollhook.job_script import ended_state
from rollhook.launcher import JobStatus

#: the oldest Ray that is supported
OLDEST = "2.49"
#: for `env` before the job's script: Ray sends its stop signal to every process, so the script must not
TELLS_ALL = "ROLLHOOK_TELLS_ALL=1"
ENDED = frozenset({"STOPPED", "SUCCEEDED", "FAILED"})
#: Ray's dashboard takes no larger request
MAX_PACKAGE_BYTES = 100 * 1024 * 1024
#: how long a job that nobody can give its resources waits until Ray fails it (its default)
START_SECONDS = 900
_POLL_SECONDS = 0.5


class Unreachable(LauncherError):  # noqa: N818 - a state, which may pass
    """The dashboard does not answer, or answers that it cannot now."""

    kind = "retryable"


@dataclass(frozen=True)
class RayNode:
    """A node of the cluster, dead ones included; `resources` are its totals."""

    id: str
    ip: str
    head: bool
    alive: bool
    resources: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RayJob:
    """What Ray says of a submitted job; `status` is PENDING, RUNNING or one of `ENDED`.

    `node_id` and `agent_address` are of the node that runs its entrypoint, None until it has started;
    `driver_ip` is None for an entrypoint that never connects to Ray.
    """

    id: str
    status: str
    message: str = ""
    error_type: str = ""
    exit_code: int | None = None
    node_id: str | None = None
    agent_address: str | None = None
    driver_ip: str | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        """Whether it will not change any more."""
        return self.status in ENDED

    def node(self, nodes: Sequence[RayNode]) -> RayNode | None:
        """Return the node that runs it: by its id, else by the address of that node's agent or driver."""
        host = urlsplit(self.agent_address or "").hostname or self.driver_ip
        by_id = [node for node in nodes if node.id == self.node_id]
        return next(iter(by_id or [node for node in nodes if host and node.ip == host]), None)


class RayJobs:
    """A client of one cluster's dashboard; it holds no connection between calls.

    `address` is its URL. `token` gives the bearer token of a cluster with RAY_AUTH_MODE=token; it is called
    for each request and its value is kept nowhere. `seconds` limits a request.
    """

    def __init__(
        self, address: str, *, token: Callable[[], str] | None = None, seconds: float = 30.0
    ) -> None:
        self.address = address.rstrip("/")
        self._token = token
        self._timeout = aiohttp.ClientTimeout(total=seconds)

    async def version(self) -> str:
        """Return the cluster's Ray version."""
        return str(await self._json("GET", "/api/version", field=("ray_version",)))

    async def nodes(self) -> list[RayNode]:
        """Return all nodes that Ray remembers, dead ones too."""
        return [
            RayNode(
                id=str(row["node_id"]),
                ip=str(row["node_ip"]),
                head=bool(row["is_head_node"]),
                alive=row["state"] == "ALIVE",
                resources=row.get("resources_total") or {},
            )
            for row in await self._state("nodes")
        ]

    async def actors(self) -> list[dict[str, Any]]:
        """Return the rows of the cluster's actors."""
        return await self._state("actors")

    async def cluster_status(self) -> str:
        """Return the text of `ray status`."""
        field = ("data", "clusterStatus")
        return str(await self._json("GET", "/api/cluster_status?format=1", field=field))

    async def submit(self, request: Mapping[str, Any]) -> str:
        """Submit a job (the fields of Ray's JobSubmitRequest) and return its submission id."""
        return str(await self._json("POST", "/api/jobs/", json=dict(request), field=("submission_id",)))

    async def submit_once(self, request: Mapping[str, Any], *, seconds: float = 20.0) -> str:
        """Submit a job with an id of its own, also where the answer is lost: then it is asked for.

        Raises LauncherError when Ray does not have it after all.
        """
        try:
            return await self.submit(request)
        except Unreachable as error:
            if isinstance(error.__cause__, aiohttp.ClientConnectorError):  # it was not even sent
                raise
            deadline = time.monotonic() + seconds
            while True:
                try:
                    job = await self.job(request["submission_id"])
                except Unreachable:
                    job = None
                if job is not None and job.raw.get("metadata") == request.get("metadata"):
                    return job.id
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_POLL_SECONDS)

    async def job(self, job_id: str) -> RayJob | None:
        """Return a job, None if Ray does not know it."""
        row = await self._json("GET", f"/api/jobs/{quote(job_id, safe='')}", missing=None)
        return None if row is None else _job(row)

    async def jobs(self) -> list[RayJob]:
        """Return all submitted jobs (not the drivers that were started beside the job API)."""
        rows = await self._json("GET", "/api/jobs/")
        return [_job(row) for row in rows if row.get("type") == "SUBMISSION"]

    async def stop(self, job_id: str) -> bool:
        """Ask a job to stop; False if it had ended. Raises LauncherError for an unknown one."""
        path = f"/api/jobs/{quote(job_id, safe='')}/stop"
        return bool(await self._json("POST", path, field=("stopped",)))

    async def delete(self, job_id: str) -> bool:
        """Delete an ended job from Ray's memory; False if Ray does not know it."""
        path = f"/api/jobs/{quote(job_id, safe='')}"
        return bool(await self._json("DELETE", path, missing=None, field=("deleted",)))

    async def wait(self, job_id: str, seconds: float, *, started: bool = False) -> RayJob | None:
        """Return a job once it has ended (or `started`), or as it stands when the time is up."""
        deadline = time.monotonic() + seconds
        while True:
            job = await self.job(job_id)
            done = job is None or job.ended or (started and job.status == "RUNNING")
            if done or time.monotonic() > deadline:
                return job
            await asyncio.sleep(_POLL_SECONDS)

    async def log(self, job_id: str) -> bytes:
        """Return what Ray kept of a job's output; it is on the driver's node, and gone with that."""
        logs = await self._json("GET", f"/api/jobs/{quote(job_id, safe='')}/logs", field=("logs",))
        return str(logs).encode("utf-8", "surrogateescape")

    async def follow(self, job_id: str, *, patience: float = 120.0) -> AsyncIterator[bytes]:
        """Give a job's output from its beginning until it has ended.

        A dashboard that is away is asked again; what was given is not given twice. Raises Unreachable when it
        has been away for `patience` seconds.
        """
        given, away_since = 0, None
        while True:
            try:
                async for offset, chunk in self._tail(job_id):
                    away_since = None
                    if fresh := chunk[max(0, given - offset) :]:
                        given = offset + len(chunk)
                        yield fresh
                job = await self.job(job_id)
                if job is None or job.ended:
                    if rest := (await self.log(job_id) if job else b"")[given:]:
                        yield rest
                    return
                away_since = None
            except Unreachable:
                away_since = away_since or time.monotonic()
                if time.monotonic() - away_since > patience:
                    raise
            await asyncio.sleep(1.0)

    async def upload(self, package: bytes, name: str) -> str:
        """Upload a zip that jobs may name as runtime_env.working_dir, unless it is there; return its URI."""
        path = f"/api/packages/gcs/{name}"
        if await self._request("GET", path, missing=None) is None:  # asking also keeps it for ten minutes
            await self._request("PUT", path, data=package, seconds=600.0)
        return f"gcs://{name}"

    async def _tail(self, job_id: str) -> AsyncIterator[tuple[int, bytes]]:
        """Give (offset, bytes) of a job's output while the connection lasts."""
        url = f"{self.address}/api/jobs/{quote(job_id, safe='')}/logs/tail"
        offset = 0
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(connect=20.0)) as session,
                session.ws_connect(url, headers=self._headers(), heartbeat=20.0, max_msg_size=0) as socket,
            ):
                async for message in socket:
                    if message.type is aiohttp.WSMsgType.TEXT:
                        chunk = str(message.data).encode("utf-8", "surrogateescape")
                        yield offset, chunk
                        offset += len(chunk)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._unreachable(error) from error

    async def _state(self, what: str) -> list[dict[str, Any]]:
        field = ("data", "result", "result")
        rows: list[dict[str, Any]] = await self._json(
            "GET", f"/api/v0/{what}?detail=1&limit=10000", field=field
        )
        return rows

    async def _json(self, method: str, path: str, *, field: Sequence[str] = (), **keys: Any) -> Any:
        """Return the JSON value of an answer, or a field of it; None for what does not exist."""
        body = await self._request(method, path, **keys)
        if body is None:
            return None
        try:
            value = orjson.loads(body)
            for name in field:
                value = value[name]
        except (ValueError, LookupError, TypeError) as error:
            raise LauncherError(
                f"what answers {method} {path} at {self.address} is no dashboard of Ray {OLDEST} or newer: "
                f"{_last_line(body.decode('utf-8', 'replace'))[:100]}; check the address",
                kind="user",
            ) from error
        return value

    async def _request(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        data: bytes | None = None,
        seconds: float | None = None,
        missing: object = ...,
    ) -> bytes | None:
        """Return the body of an answer; with `missing`, None for what does not exist."""
        timeout = aiohttp.ClientTimeout(total=seconds) if seconds else self._timeout
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.request(
                    method, self.address + path, json=json, data=data, headers=self._headers()
                ) as reply,
            ):
                body = await reply.read()
                status = reply.status
        except aiohttp.InvalidURL as error:
            raise LauncherError(f"{self.address} is no address of a Ray dashboard", kind="user") from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._unreachable(error) from error
        if status == 404 and missing is None:
            return None
        if status >= 400:
            raise self._refused(method, path, status, body.decode("utf-8", "replace"))
        return body

    def _headers(self) -> dict[str, str]:
        if self._token is None:
            return {}
        try:
            return {"Authorization": f"Bearer {self._token()}"}
        except RollhookError as error:
            raise LauncherError(f"the token of {self.address} is not there: {error}", kind="user") from error

    def _unreachable(self, error: BaseException) -> Unreachable:
        reason = str(error) or type(error).__name__
        return Unreachable(
            f"the Ray dashboard at {self.address} does not answer ({reason}); is the cluster up, and the "
            "address right as seen from here?"
        )

    def _refused(self, method: str, path: str, status: int, body: str) -> LauncherError:
        said = _last_line(body)
        if status in {401, 403}:
            return LauncherError(
                f"the Ray dashboard at {self.address} refuses us ({status}: {said}); give the launcher's key "
                "`token` a reference to the cluster's token",
                kind="user",
            )
        if "No available agent" in body or "Failed to get head node agent" in body:
            return Unreachable(
                f"the Ray dashboard at {self.address} is up, but the agent of its head node is not, so that "
                "it takes no jobs; its dashboard_agent.log says why (often: another Ray has its port)"
            )
        if status in {502, 503, 504}:
            return Unreachable(f"the Ray dashboard at {self.address} cannot answer now ({status}: {said})")
        if "already exists" in body:
            return LauncherError(f"Ray at {self.address} has a job of this id already: {said}", kind="user")
        if status == 413:
            return LauncherError(
                f"the Ray dashboard at {self.address} takes no upload of this size", kind="user"
            )
        return LauncherError(f"Ray at {self.address} answered {status} to {method} {path}: {said}")


def job_status(
    job: RayJob | None, *, recorded: int | None, stopped_code: int | None, asked: bool = False
) -> JobStatus:
    """Say how a job stands from what Ray says of it and from what its script left (`rollhook.job_script`).

    `recorded` is the exit code that the script left, `stopped_code` the one with which it says that it was
    stopped, `asked` whether it was told to stop.
    """
    raw = dict(job.raw) if job else {}
    if job is not None and job.status == "PENDING":
        return JobStatus("pending", job.message, raw=raw)
    if job is not None and job.status == "RUNNING":
        return JobStatus("running", raw=raw)
    asked = asked or (job is not None and job.status == "STOPPED")
    code = recorded if recorded is not None or job is None else job.exit_code
    if code is not None:
        state = ended_state(code, stopped_code=stopped_code, asked=asked)
        how = f"its script ended with exit code {code}" if code >= 0 else f"it was killed by signal {-code}"
        return JobStatus(state, "it was stopped on request" if state == "stopped" else how, code, raw)
    if job is None:
        return JobStatus("lost", "Ray does not know the job, and it left no exit code")
    return _without_exit_code(job, raw)


def _without_exit_code(job: RayJob, raw: Mapping[str, Any]) -> JobStatus:
    if job.status == "SUCCEEDED":
        return JobStatus("succeeded", "", 0, raw)
    if job.status == "STOPPED":
        return JobStatus("stopped", "it was stopped, and killed before it recorded an exit code", raw=raw)
    if "ray.kill" in job.message:  # by ourselves: nothing else knows the actor's name
        when = "it had started" if job.node_id is None else "it recorded an exit code"
        return JobStatus("stopped", f"it was stopped before {when}", raw=raw)
    died = "the process of Ray that ran its script died (with its node, or for want of memory): "
    why = died if job.error_type == "JOB_SUPERVISOR_ACTOR_DIED" else f"{job.error_type or 'failed'}: "
    return JobStatus("failed", why + _first_line(job.message), raw=raw)


def without_values(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of Ray's APIs whose environment variables have names only, for files and bug reports."""
    hidden = dict(row)
    environment = hidden.get("runtime_env")
    if isinstance(environment, Mapping) and environment.get("env_vars"):
        hidden["runtime_env"] = dict(environment) | {
            "env_vars": dict.fromkeys(environment["env_vars"], "(hidden)")
        }
    for name in ("serialized_runtime_env", "runtime_env_info", "runtime_env_json"):
        if hidden.get(name):
            hidden[name] = "(hidden)"
    return hidden


def _job(row: Mapping[str, Any]) -> RayJob:
    code = row.get("driver_exit_code")
    return RayJob(
        id=str(row.get("submission_id") or row.get("job_id")),
        status=str(row["status"]),
        message=str(row.get("message") or ""),
        error_type=str(row.get("error_type") or ""),
        exit_code=None if code is None else int(code),
        node_id=row.get("driver_node_id"),
        agent_address=row.get("driver_agent_http_address"),
        driver_ip=(row.get("driver_info") or {}).get("node_ip_address"),
        raw=without_values(row),
    )


def _last_line(body: str) -> str:
    """Return what a traceback or a message ends with."""
    lines = [line.strip() for line in body.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no reason given"


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else "no reason given"
