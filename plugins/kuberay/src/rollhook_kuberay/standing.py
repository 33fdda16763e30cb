"""A job on a RayCluster that stays: by Ray's job API through the Kubernetes API, or a process on the head."""

from __future__ import annotations

import asyncio
import io
import re
import shlex
import tarfile
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from rollhook.errors import LauncherError
from rollhook.job_script import EXIT_CODE, LOG, SIGNALLED, ended_state, read_exit_code, signalled
from rollhook.launcher import Handle, Job, JobStatus
from rollhook.ray_jobs import TELLS_ALL, job_status
from rollhook.ray_package import pack
from rollhook_kuberay import daemons
from rollhook_kuberay.config import KubeRayLauncherConfig
from rollhook_kuberay.heads import GCS, head_pod, ray_jobs
from rollhook_kuberay.port import KubeError, Object, Port
from rollhook_kuberay.rayjob import read
from rollhook_kuberay.render import WORKER_RESOURCE, driver_resources, has_worker_resource, runtime_env_vars
from rollhook_kuberay.site import Site

#: the job's files inside the package that Ray unpacks; the code of the submitter may have a directory `job`
PACKAGED = "rollhook-job"
PACKAGE = "(the package of code_path and the job's files, named by its content)"
_STARTED_SECONDS = 30.0

_START = """\
set -u
mkdir -p {directory} && cd {directory} && head -c {size} | tar -xf - || exit 1
printf %s {job} > {directory}/directory
{exports}setsid nohup bash {directory}/job/job.sh </dev/null >{directory}/stdout.log 2>&1 &
echo $! > {directory}/pid
"""
#: one that has ended and is not reaped has no command line; another process may have its number
_PROBE = """\
d={job} t={directory} pid=$(cat {directory}/pid 2>/dev/null)
if [ -f $d/{code} ]; then echo "ended $(cat $d/{code}) $(cat $d/{signalled} 2>/dev/null)"
elif [ -n "$pid" ] && grep -q /job.sh "/proc/$pid/cmdline" 2>/dev/null; then echo running
elif [ -f $d/{code} ]; then echo "ended $(cat $d/{code}) $(cat $d/{signalled} 2>/dev/null)"
elif [ -n "$pid" ]; then echo gone; else echo absent; fi
"""
#: TERM to all of a session; after two seconds KILL to all but the script itself, which reaps and records, and
#: after nine to that as well; then say so where nobody else could
_END = """\
import os, signal, sys, time
def session(pid):
    try:
        state, _, _, sid = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[:4]
        return None if state == "Z" else int(sid)
    except (OSError, ValueError, IndexError):
        return None
def tell(number, sid, leader=True):
    mine = [int(each) for each in os.listdir("/proc") if each.isdigit() and session(each) == sid]
    for pid in mine:
        if leader or pid != sid:
            try:
                os.kill(pid, number)
            except OSError:
                pass
    return mine
def ours(pid):
    try:
        line, environ = open(f"/proc/{pid}/cmdline", "rb").read(), open(f"/proc/{pid}/environ", "rb").read()
        return b"/job.sh" in line or b"ROLLHOOK_JOB_DIR=" in environ
    except OSError:
        return False
sid = int(open(sys.argv[1]).read())
if sid <= 1 or not any(ours(pid) for pid in tell(0, sid)):
    sys.exit(0)  # it has ended, and another process may have its number
begun = time.monotonic()
tell(signal.SIGTERM, sid)
while tell(0, sid):
    took = time.monotonic() - begun
    if took > 2:
        tell(signal.SIGKILL, sid, leader=took > 9)
    time.sleep(0.3)
beside = os.path.join(os.path.dirname(sys.argv[1]), "directory")
if os.path.exists(beside):
    job = open(beside).read()
    for name, text in (("signalled", "KILL"), ("exit_code", "137")):
        if os.path.isdir(job) and not os.path.exists(os.path.join(job, name)):
            open(os.path.join(job, name), "w").write(text + chr(10))
"""


def request(keys: KubeRayLauncherConfig, job: Job, files: Mapping[str, str], cluster_spec: Object) -> Object:
    """Return what Ray is sent for a job. The package without code has its name here, by its content."""
    working_dir = PACKAGE
    if keys.code != "upload":
        working_dir = f"gcs://{pack(None, packaged(files))[1]}"
    path = 'export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"; ' if keys.code == "upload" else ""
    body: Object = {
        "submission_id": job.id,
        "entrypoint": f"{path}echo $$ > {_pid_file(job.id)}; exec env {TELLS_ALL} bash {PACKAGED}/job.sh",
        "runtime_env": {"working_dir": working_dir, "env_vars": runtime_env_vars(job, cluster_spec)},
        "metadata": {"rollhook_run": job.run_id, "rollhook_attempt": str(job.attempt)},
        "entrypoint_num_cpus": job.resources.driver_cpus,
    }
    if resources := driver_resources(job, cluster_spec):
        body["entrypoint_resources"] = resources
    return body


def _pid_file(job_id: str) -> str:
    return f"/tmp/rollhook-{job_id}.pid"  # noqa: S108 - inside a pod


def packaged(files: Mapping[str, str]) -> dict[str, str]:
    """Return the job's files under their names inside the package."""
    return {f"{PACKAGED}/{path.removeprefix('job/')}": text for path, text in files.items()}


def exec_command(
    keys: KubeRayLauncherConfig, job: Job, files: Mapping[str, str], cluster_spec: Object
) -> str:
    """Return the shell text that is run on the head; the files come on its standard input."""
    exports = f'export RAY_ADDRESS="${{RAY_ADDRESS:-127.0.0.1:{GCS}}}"\n'  # KubeRay sets it on the head
    if has_worker_resource(cluster_spec):
        exports += f"export ROLLHOOK_WORKER_RESOURCE={WORKER_RESOURCE}\n"
    return _START.format(
        directory=shlex.quote(scratch(keys, job.id)),
        job=shlex.quote(job.directory),
        size=len(archive(files)),
        exports=exports,
    )


def scratch(keys: KubeRayLauncherConfig, job_id: str) -> str:
    """Return where a job that was started by exec has its files on the head."""
    return f"{keys.exec_directory.rstrip('/')}/rollhook-{job_id}"


def archive(files: Mapping[str, str]) -> bytes:
    """Return the files as a tar, the same bytes for the same files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path, text in sorted(files.items()):
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(text.encode()), 0o644
            tar.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


async def submit(
    site: Site, port: Port, cluster: str, body: Object, files: Mapping[str, str], job: Job
) -> dict[str, str]:
    """Submit by the configured way, and return what the handle has to know."""
    if site.keys.submit == "port_forward":
        code = site.keys.code_path if site.keys.code == "upload" else None
        package, name = await asyncio.to_thread(pack, code, packaged(files))
        async with ray_jobs(port, cluster, site.token()) as jobs:
            environment = {**body["runtime_env"], "working_dir": await jobs.upload(package, name)}
            await jobs.submit({**body, "runtime_env": environment})
        return {}
    pod = await head_pod(port, cluster)
    directory = scratch(site.keys, job.id)
    there = await port.exec(pod, ["sh", "-c", f"test -e {shlex.quote(directory)}/pid"])
    if there.exit_code == 0:
        raise LauncherError(
            f"the job {job.id} was started on {pod} before; give another --run-id", kind="user"
        )
    done = await port.exec(pod, ["bash", "-c", body["command"]], stdin=archive(files))
    if done.exit_code:
        raise LauncherError(f"the job could not be started on {pod}: {done.text[:500]}")
    return {"pod": pod, "scratch": directory}


async def replace(site: Site, port: Port, cluster: str, say: Callable[[str], None]) -> None:
    """Stop what runs on the cluster but its daemons: Ray jobs, pending ones too, and jobs started by exec."""
    kept = [each.daemon.id for each in site.keys.clusters.values() if each.daemon is not None]
    async with ray_jobs(port, cluster, site.token()) as jobs:
        for job in await jobs.jobs():
            if not job.ended and not any(daemons.newest([job], base) for base in kept):
                await daemons.stop(jobs, job.id, say)
    if site.keys.submit == "exec":
        pod = await head_pod(port, cluster)
        pattern = f"{site.keys.exec_directory.rstrip('/')}/rollhook-*/pid"
        found = await port.exec(pod, ["sh", "-c", f"ls {pattern} 2>/dev/null"])
        for path in found.stdout.decode().split():
            await port.exec(pod, ["python3", "-c", _END, path])
            say(f"what {path} names was ended")


async def status(site: Site, handle: Handle, port: Port) -> JobStatus:
    """Return how the job stands."""
    if "scratch" in handle.data:
        return await _exec_status(handle, port)
    stopped_code = handle.stopped_code
    shared = site.keys.shares_files
    code = read_exit_code(handle.directory) if shared else None
    asked = bool(shared and signalled(handle.directory))
    if await port.get("RayCluster", str(handle.data["cluster"])) is None:
        return job_status(None, recorded=code, stopped_code=stopped_code, asked=asked)
    async with ray_jobs(port, str(handle.data["cluster"]), site.token()) as jobs:
        job = await jobs.job(handle.job_id)
    return job_status(job, recorded=code, stopped_code=stopped_code, asked=asked)


async def _exec_status(handle: Handle, port: Port) -> JobStatus:
    pod = str(handle.data["pod"])
    text = _PROBE.format(
        job=shlex.quote(handle.directory), directory=shlex.quote(str(handle.data["scratch"])),
        code=EXIT_CODE, signalled=SIGNALLED,
    )  # fmt: skip
    try:
        said = (await port.exec(pod, ["sh", "-c", text])).text
    except KubeError as error:
        if error.status != 404:
            raise
        return JobStatus("lost", f"the pod {pod} is gone, and the job with it")
    raw = {"pod": pod, "said": said}
    if said == "running":
        return JobStatus("running", raw=raw)
    if match := re.fullmatch(r"ended (\d+) ?(\w*)", said):
        code = int(match[1])
        state = ended_state(code, stopped_code=handle.stopped_code, asked=bool(match[2]))
        message = (
            "it was stopped on request" if state == "stopped" else f"its script ended with exit code {code}"
        )
        return JobStatus(state, message, code, raw)
    return JobStatus("lost", f"it does not run on {pod} any more, and left no exit code", raw=raw)


async def logs(site: Site, handle: Handle, port: Port, *, follow: bool) -> AsyncIterator[bytes]:
    """Give the job's output; a connection that drops is made anew, and nothing is given twice."""
    if "scratch" in handle.data:
        async for chunk in _exec_logs(site, handle, port, follow=follow):
            yield chunk
        return
    given = 0
    while True:
        now = await status(site, handle, port)
        over = now.state not in ("pending", "running")
        try:
            async with ray_jobs(port, str(handle.data["cluster"]), site.token()) as jobs:
                async for chunk in read(jobs, handle.job_id, given, follow=follow):
                    given += len(chunk)
                    yield chunk
            if not follow or over:
                return
        except LauncherError as error:
            if error.kind != "retryable" or over or not follow:
                raise
        await asyncio.sleep(site.keys.poll_seconds)


async def _exec_logs(site: Site, handle: Handle, port: Port, *, follow: bool) -> AsyncIterator[bytes]:
    pod, path = str(handle.data["pod"]), f"{handle.directory}/{LOG}"
    fallback = f"{handle.data['scratch']}/stdout.log"
    given = 0
    while True:
        now = await status(site, handle, port)
        text = f"tail -c +{given + 1} {shlex.quote(path)} 2>/dev/null || cat {shlex.quote(fallback)}"
        if now.state == "lost" and "gone" in now.message:
            raise LauncherError(f"{now.message}; its output is in {path} on the shared volume")
        chunk = (await port.exec(pod, ["sh", "-c", text])).stdout
        given += len(chunk)
        if chunk:
            yield chunk
        if not follow or now.state not in ("pending", "running"):
            return
        await asyncio.sleep(site.keys.poll_seconds)


async def stop(site: Site, handle: Handle, port: Port, *, force: bool) -> str:
    """Ask the job to stop as its script understands it; `force` ends its processes within seconds."""
    if "scratch" in handle.data:
        pid = f"{handle.data['scratch']}/pid"
        if (await status(site, handle, port)).state != "running":
            return f"{handle.job_id} has ended already"
        told = f'pid=$(cat {shlex.quote(pid)}) && grep -q /job.sh "/proc/$pid/cmdline"'
        text = f'{told} && kill -s INT "$pid"'
        argv = ["python3", "-c", _END, pid] if force else ["sh", "-c", text]
        await port.exec(str(handle.data["pod"]), argv)
        return f"{handle.job_id} was {'ended' if force else 'asked to stop'}"
    async with ray_jobs(port, str(handle.data["cluster"]), site.token()) as jobs:
        job = await jobs.job(handle.job_id)
        if job is None or job.ended:
            return f"{handle.job_id} has ended already"
        await jobs.stop(handle.job_id)
        if job.status == "PENDING":
            return f"{handle.job_id} is pending: Ray was asked to drop it, and does so once it would start"
        if force:
            node = job.node(await jobs.nodes())
            killed = await _kill(port, str(handle.data["cluster"]), node.ip if node else "", handle.job_id)
            if not killed:
                return f"{handle.job_id} was asked to stop; no pod has its process, so it was not killed"
    return f"{handle.job_id} was {'ended' if force else 'asked to stop'}"


async def _kill(port: Port, cluster: str, ip: str, job_id: str) -> bool:
    """End the processes of a job in the pod that has its pid: that of its node's address is asked first."""
    pods = await port.list("Pod", {"ray.io/cluster": cluster})
    pods.sort(key=lambda pod: (pod.get("status") or {}).get("podIP") != ip)
    for pod in pods:
        if (pod.get("status") or {}).get("phase") == "Running":
            name = str(pod["metadata"]["name"])
            if (await port.exec(name, ["test", "-e", _pid_file(job_id)])).exit_code == 0:
                return (await port.exec(name, ["python3", "-c", _END, _pid_file(job_id)])).exit_code == 0
    return False


async def cleanup(handle: Handle, port: Port) -> list[str]:
    """Remove what a job that was started by exec left on the head; the cluster stays."""
    if "scratch" not in handle.data:
        return []
    directory = str(handle.data["scratch"])
    if not re.fullmatch(rf"/([^/]+/)*rollhook-{re.escape(handle.job_id)}", directory) or "/../" in directory:
        raise LauncherError(
            f"the record of job {handle.job_id} is damaged: {directory} is not its own, so it was not removed"
        )
    done: Any = await port.exec(str(handle.data["pod"]), ["rm", "-rf", directory])
    return [f"removed {directory} on {handle.data['pod']}"] if done.exit_code == 0 else []
