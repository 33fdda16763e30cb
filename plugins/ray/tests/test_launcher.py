"""Jobs on a real Ray cluster of a head without CPUs and two workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from rollhook.errors import LauncherError
from rollhook.job_script import LOG, read_exit_code
from rollhook.launcher import Code, Job, Plan, Resources
from rollhook.ray_jobs import RayJobs, Unreachable
from rollhook.rundir import RunDir
from rollhook.runtime.job_records import attempt_directory, read_record
from rollhook.runtime.jobs import collect, prepare, submit_plan, watch
from rollhook.secrets import resolve_secret
from rollhook.testing.environment import build_context
from rollhook.testing.launcher import SENTINEL, LauncherContract, LauncherSite, MakeLauncher
from rollhook.testing.ray_cluster import RayCluster, processes_below, ray_cluster
from rollhook_ray import RayLauncherConfig
from rollhook_ray.launcher import RayLauncher

NODE_SECRET = "RAY_TESTS_NODE_SECRET"  # see conftest.py
NOWHERE = "http://127.0.0.1:9"
FOREVER = "echo ready\nwhile :; do sleep 0.1; done\n"


def make(scratch: Path, address: str, **keys: Any) -> RayLauncher:
    context = replace(build_context(scratch), secret=resolve_secret)
    return RayLauncher(RayLauncherConfig(address=address, **keys), context)


def deliver(plan: Plan) -> None:
    for name, text in plan.files.items():
        path = Path(plan.job.directory) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
async def site(cluster: RayCluster, tmp_path: Path) -> AsyncIterator[LauncherSite]:
    key = tmp_path / "a key"
    key.write_text(f"{SENTINEL}\n")
    root = tmp_path / "shared root"
    root.mkdir()
    client = RayJobs(cluster.dashboard)

    async def view() -> str:
        rows = await client._request("GET", "/api/jobs/")  # as Ray shows them: `jobs` hides values
        logs = [await client.log(job.id) for job in await client.jobs() if job.node_id]
        return f"{rows!r} {logs!r} {await client.actors()} {await client.cluster_status()}"

    references = {"env": f"env:{NODE_SECRET}", "file": f"file:{key}"}
    yield LauncherSite(make(tmp_path, cluster.dashboard), root, references, lambda handle: handle, view, 60)
    for job in await client.jobs():
        if not job.ended:
            await client.stop(job.id)


class TestRayLauncher(LauncherContract):
    @pytest.fixture
    def make_launcher(self, tmp_path: Path, request: pytest.FixtureRequest) -> MakeLauncher:
        if "site" not in request.fixturenames:
            return lambda: make(tmp_path, NOWHERE)
        address = request.getfixturevalue("cluster").dashboard
        return lambda: make(tmp_path, address)

    @pytest.fixture
    def site(self, site: LauncherSite) -> LauncherSite:
        return site


async def test_a_driver_runs_on_a_worker_and_where_it_landed_on_the_head_the_job_has_failed(
    site: LauncherSite, cluster: RayCluster, tmp_path: Path
) -> None:
    client = RayJobs(cluster.dashboard)
    handle = await site.submit(site.job("echo no driver connects to Ray"))
    assert (await site.watch(handle)).state == "succeeded"
    job = await client.job(handle.job_id)
    assert job is not None
    assert job.driver_ip is None, "the entrypoint never connected, so Ray has no driver_info"
    node = job.node(await client.nodes())
    assert node is not None
    assert node.ip in {worker.host for worker in cluster.workers}

    careless = make(tmp_path, cluster.dashboard, entrypoint_resources={}, entrypoint_num_cpus=0)
    plan = careless.plan(site.job(FOREVER))
    (problem,) = await careless.preflight(plan)
    assert "nothing keeps the driver off the head node" in problem
    deliver(plan)
    with pytest.raises(LauncherError, match="is the head node"):
        await careless.submit(plan)
    ended = await client.wait(plan.job.id, 120)
    assert ended is not None
    assert ended.status == "STOPPED"
    seen = make(tmp_path, cluster.dashboard)  # as from another process
    status = await seen.status(type(handle)("ray", plan.job.id, plan.job.directory))
    assert status.state == "failed"
    assert "is not on a worker node" in status.message


async def test_what_can_never_run_is_a_problem_and_a_waiting_job_can_be_stopped(
    site: LauncherSite, cluster: RayCluster, tmp_path: Path
) -> None:
    launcher = make(tmp_path, cluster.dashboard, entrypoint_resources={"nope": 1}, gpus_per_node=4, nodes=3)
    plan = launcher.plan(site.job(FOREVER, resources=Resources(nodes=3, gpus_per_node=4)))
    problems = await launcher.preflight(plan)
    assert len(problems) == 2, problems
    assert "CPU 1 (the most is 4), nope 1 (the most is 0)" in problems[0]
    assert "asks for 3 nodes, and the cluster has 2 worker nodes" in problems[1]
    gpus = Resources(nodes=2, gpus_per_node=4)
    (problem,) = await site.launcher.preflight(site.launcher.plan(site.job("true", resources=gpus)))
    assert "2 nodes of 4 GPUs each, and the cluster's worker nodes have 0, 0" in problem

    deliver(plan)
    handle = await launcher.submit(plan)
    status = await launcher.status(handle)
    assert status.state == "pending"
    assert "waiting for resources" in status.message
    said = await launcher.stop(handle)
    assert said == f"job {handle.job_id} had not started yet, and will not"
    status = await launcher.status(handle)
    assert (status.state, status.exit_code) == ("stopped", None)
    assert status.message == "it was stopped before it had started"
    assert not (Path(plan.job.directory) / LOG).exists()
    *_, problem = await launcher.preflight(plan)
    assert f"Ray has a job {handle.job_id} already (failed); an id is used once" in problem
    assert await launcher.cleanup(handle) == [
        f"job {handle.job_id} was deleted from Ray at {cluster.dashboard}"
    ]


async def test_a_directory_that_the_nodes_do_not_see_is_found_before_submission(
    site: LauncherSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = site.launcher.plan(site.job("true"))
    assert list(await site.launcher.preflight(plan)) == []
    assert [path.name for path in site.root.iterdir()] == [], "looking leaves nothing behind"

    def only_here(directory: Path) -> Path:
        gone = tmp_path / "elsewhere" / "marker"
        gone.parent.mkdir()
        return gone

    monkeypatch.setattr("rollhook_ray.preflight._write_marker", only_here)
    (problem,) = await site.launcher.preflight(plan)
    assert "a node of the cluster does not see" in problem
    assert "elsewhere, which this machine does" in problem


async def test_a_submission_that_fails_leaves_its_files_and_a_record_with_the_error(tmp_path: Path) -> None:
    launcher = make(tmp_path, NOWHERE)
    run = RunDir.create(tmp_path, "demo", run_id="demo-0a1b2c")
    plan = launcher.plan(Job(run.run_id, 1, str(attempt_directory(run, 1)), "true"))
    with pytest.raises(LauncherError, match=r"127\.0\.0\.1:9 does not answer"):
        await prepare(launcher, plan.job)
    with pytest.raises(Unreachable):
        await submit_plan(launcher, plan, run=run)
    record = read_record(run.path / "attempts/1/submit.json")
    assert record.handle is None
    assert record.error is not None
    assert "is the cluster up" in record.error
    assert (run.path / "attempts/1/job/job.sh").exists()


async def test_code_and_files_are_carried_to_nodes_that_share_nothing_with_us(
    site: LauncherSite, cluster: RayCluster, tmp_path: Path
) -> None:
    code = tmp_path / "code"
    (code / "demo_code").mkdir(parents=True)
    (code / "demo_code/__init__.py").write_text("WHO = 'uploaded'\n")
    (code / ".gitignore").write_text("demo_code/data.txt\n")
    (code / "demo_code/data.txt").write_text("ignored by git, needed by the job\n")
    script = (
        'cat "$ROLLHOOK_JOB_FILES/note.txt" demo_code/data.txt; sleep 2\n'
        'python3 -c "import demo_code, os; print(demo_code.WHO, os.path.isabs(demo_code.__file__))"\n'
    )
    job = site.job(script, files={"note.txt": "carried\n"}, code=Code("upload", str(code)))
    async with Proxy(cluster.dashboard) as proxy:
        launcher = make(tmp_path, proxy.address, shared=False)
        plan = launcher.plan(job)
        assert list(await launcher.preflight(plan)) == []
        handle = await launcher.submit(plan)
        log: list[bytes] = []
        watching = asyncio.create_task(watch(launcher, handle, follow=log.append, timeout=60, poll=0.2))
        while b"needed by the job" not in b"".join(log):
            await asyncio.sleep(0.1)
        await proxy.down()
        with pytest.raises(Unreachable):
            await launcher.status(handle)
        await asyncio.sleep(1)
        await proxy.up()
        status = await watching
    text = b"".join(log).decode()
    assert (status.state, status.exit_code) == ("succeeded", 0), (status, text)
    assert text.count("carried\n") == text.count("needed by the job\n") == 1, text
    assert "uploaded True" in text
    assert not Path(job.directory, "job").exists(), "this launcher shares no files"


async def test_an_upload_that_ray_would_refuse_is_a_problem_with_the_largest_files(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "weights.bin").write_bytes(bytes(range(256)) * 400)
    (code / "small.py").write_text("pass\n")
    monkeypatch.setattr("rollhook.ray_package.pack.__kwdefaults__", {"exclude": (), "limit": 100})
    launcher = make(tmp_path, cluster.dashboard)
    job = Job("demo-0a1b2c", 1, str(tmp_path / "job"), "true", code=Code("upload", str(code)))
    (problem,) = await launcher.preflight(launcher.plan(job))
    assert "the largest files are weights.bin (0.1 MiB), small.py (0.0 MiB)" in problem


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cluster_with_a_token_a_killed_worker_and_a_killed_dashboard(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef" * 4)
    token.chmod(0o600)
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    with ray_cluster(tmp_path / "cluster", workers=1, environment=environment) as cluster:
        asyncio.run(_through_its_losses(cluster, tmp_path, f"file:{token}"))


async def _through_its_losses(cluster: RayCluster, tmp_path: Path, token: str) -> None:
    launcher = make(tmp_path, cluster.dashboard, token=token)
    root = tmp_path / "root"
    root.mkdir()
    site = LauncherSite(launcher, root, {}, lambda handle: handle, cluster_view, 60)
    plan = launcher.plan(site.job("true"))
    (problem,) = await make(tmp_path, cluster.dashboard).preflight(plan)
    assert "refuses us (401" in problem
    assert "`token`" in problem
    (problem,) = await make(tmp_path, cluster.dashboard, token="file:/none").preflight(plan)
    assert "the secret file /none cannot be read" in problem

    orphaned = site.job(FOREVER)
    handle = await site.submit(orphaned)
    await site.until_said(orphaned, "ready")
    (supervisor,) = named(cluster.workers[0].process.pid, b"JobSupervisor")
    os.kill(supervisor, signal.SIGKILL)
    assert (await site.watch(handle)).state == "failed"
    removed = await launcher.cleanup(handle)
    assert any("what it may have left on" in each for each in removed), removed
    assert not [path for path in Path("/proc").glob("[0-9]*/environ") if in_file(orphaned.directory, path)]

    lost = site.job(FOREVER)
    handle = await site.submit(lost)
    await site.until_said(lost, "ready")
    cluster.workers[0].kill()
    status = await site.watch(handle)
    assert status.state == "failed"
    assert status.message.startswith("the process of Ray that ran its script died"), status
    assert read_exit_code(lost.directory) is None

    cluster.add_worker()
    job = site.job(f"echo ready\nwhile [ ! -e {root}/go ]; do sleep 0.1; done\n")
    handle = await site.submit(job)
    await site.until_said(job, "ready")
    kill_dashboard(cluster)
    (root / "go").touch()
    status = await site.watch(handle)
    assert (status.state, status.exit_code) == ("succeeded", 0), "the script's own record is believed"
    directory = await collect(launcher, handle, Path(job.directory), "end")
    said = {path.name: path.read_text() for path in directory.iterdir()}
    assert len(said) == 5
    assert all("does not answer" in text for text in said.values())


async def cluster_view() -> str:
    return ""


def kill_dashboard(cluster: RayCluster) -> None:
    for pid in named(cluster.head.process.pid, b"dashboard/dashboard.py"):
        os.kill(pid, signal.SIGKILL)


def named(root: int, word: bytes) -> list[int]:
    return [pid for pid in processes_below(root) if in_file(word, Path(f"/proc/{pid}/cmdline"))]


def in_file(word: bytes | str, path: Path) -> bool:
    try:
        return (word if isinstance(word, bytes) else word.encode()) in path.read_bytes()
    except OSError:  # it has ended
        return False


class Proxy:
    """Passes connections on to a dashboard, and can be down: a port-forward or network that drops."""

    def __init__(self, dashboard: str) -> None:
        self._target = urlsplit(dashboard)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._port = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def up(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def down(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self) -> Proxy:
        await self.up()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.down()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            there = await asyncio.open_connection(self._target.hostname, self._target.port)
            with contextlib.closing(there[1]), contextlib.closing(writer):
                async with asyncio.TaskGroup() as group:
                    group.create_task(_copy(reader, there[1]))
                    group.create_task(_copy(there[0], writer))
        except (OSError, ExceptionGroup, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            self._tasks.discard(task)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
