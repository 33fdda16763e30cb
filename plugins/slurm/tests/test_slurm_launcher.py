"""Jobs on a real Slurm; Ray is a double, but in test_slurm_ray.py."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollhook.errors import LauncherError
from rollhook.launcher import Handle, Job, Plan, Resources
from rollhook.runtime.jobs import watch
from rollhook.testing.environment import build_context
from rollhook.testing.launcher import SENTINEL, LauncherContract, LauncherSite, MakeLauncher
from rollhook_slurm.config import SlurmLauncherConfig
from rollhook_slurm.launcher import SlurmLauncher

DOUBLE = Path(__file__).parent / "ray_double"
SETUP = f'export PATH="{DOUBLE}/bin:$PATH" PYTHONPATH="{DOUBLE}/lib"'


def make(scratch: Path, **keys: Any) -> SlurmLauncher:
    given = {"exclusive": False, "cpus_per_node": 1, "export": ("PATH", "HOME"), **keys}
    return SlurmLauncher(SlurmLauncherConfig(**given), build_context(scratch))


class Site(LauncherSite):
    """A site whose jobs are ended with the test, and have the double of Ray."""

    handles: list[Handle]

    def job(self, script: str, **options: Any) -> Any:
        setup = "\n".join(filter(None, [SETUP, options.pop("setup", "")]))
        return super().job(script, setup=setup, **options)

    def using(self, **keys: Any) -> Site:
        """Return the same site with a launcher that has these keys."""
        other = copy.copy(self)
        other.launcher = make(self.root, **keys)
        return other

    async def submit(self, job: Any) -> Handle:
        handle = await super().submit(job)
        self.handles.append(handle)
        return handle


@pytest.fixture
def credentials(tmp_path: Path) -> Path:
    path = tmp_path / "credentials.env"
    path.touch(mode=0o600)
    path.write_text(f"SLURM_TEST_KEY={SENTINEL}\n")
    return path


DRAINS = """\
echo "attempt $ROLLHOOK_ATTEMPT in $ROLLHOOK_JOB_DIR"
step="${ROLLHOOK_JOB_DIR%/attempts/*}/step"
if [ -e "$step" ]; then echo "resumed from $(cat "$step")"; [ -n "${AGAIN:-}" ] || exit 0; fi
trap 'echo 7 > "$step"; echo checkpointed; exit 3' INT
echo ready
while :; do sleep 0.1; done
"""


@pytest.fixture(scope="module")
def limited(slurm: Any, tmp_path_factory: pytest.TempPathFactory) -> Handle:
    """A job with a time limit, which runs into it while the other tests run."""
    root = tmp_path_factory.mktemp("limited")
    launcher = make(root, time="1", signal_seconds=25, requeues=1, stop_grace_seconds=5)
    directory = str(root / "limited/attempts/1")
    job = Job("limited", 1, directory, DRAINS, setup=SETUP, stopped_code=3, stop_grace_seconds=5)
    plan = launcher.plan(job)
    deliver(plan)
    return asyncio.run(launcher.submit(plan))


@pytest.fixture
async def site(slurm: Any, limited: Handle, tmp_path: Path, credentials: Path) -> AsyncIterator[Site]:
    key = tmp_path / "a key"
    key.write_text(f"{SENTINEL}\n")
    root = tmp_path / "job's 100% root"
    root.mkdir()

    async def view() -> str:
        said = await asyncio.to_thread(slurm.run, "scontrol", "show", "job", "--details")
        return said + await asyncio.to_thread(slurm.run, "squeue", "--long")

    references = {"env": "env:SLURM_TEST_KEY", "file": f"file:{key}"}
    launcher = make(tmp_path, credentials=(str(credentials),))
    kept = Site(launcher, root, references, unknown, view, seconds=60)
    kept.handles = []
    yield kept
    for handle in kept.handles:
        await launcher.stop(handle, force=True)


def unknown(handle: Handle) -> Handle:
    return replace(handle, data={"job": "999999"})


class TestSlurmLauncher(LauncherContract):
    @pytest.fixture
    def make_launcher(self, tmp_path: Path) -> MakeLauncher:
        return lambda: make(tmp_path)

    @pytest.fixture
    def site(self, site: Site) -> LauncherSite:
        return site


async def test_the_code_of_a_failed_driver_is_the_jobs_and_all_nodes_end(
    slurm: Any, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMIX_RANK", "0")
    site = site.using(export=("PATH", "HOME", "PMIX_RANK"), temp_dir=str(slurm.root))
    script = (
        "python3 -c \"import ray, os; ray.init(os.environ['RAY_ADDRESS']); print(len(ray.nodes()))\"\n"
        "env | grep -E '^(SLURM|PMI|SRUN|SBATCH)' | sed 's/^/left: /'\n"
        "exit 41\n"
    )
    job = site.job(script, resources=Resources(nodes=4, gpus_per_node=2))
    handle = await site.submit(job)
    log: list[bytes] = []
    status = await site.watch(handle, log)
    text = b"".join(log).decode()
    assert (status.state, status.exit_code) == ("failed", 41), (status, text)
    assert "4\n" in text
    left = {line.partition("=")[0] for line in text.splitlines() if line.startswith("left: ")}
    assert left == {"left: SLURM_CONF"}
    assert status.raw["ExitCode"] == "41:0"
    files = await site.launcher.debug(handle)
    assert "4 of 4 nodes, 8 of 8 GPUs" in files["phases-1.tsv"]
    assert "driver ended with exit code 41" in files["phases-1.tsv"]
    assert sorted(path.stem for path in Path(job.directory, "logs/nodes").iterdir()) == [
        "n1",
        "n2",
        "n3",
        "n4",
    ]
    assert not (Path(job.directory) / "slurm/up/token").exists()
    assert not list(slurm.root.glob("rh*-*"))


async def test_what_prevents_a_bring_up_is_said(site: Site) -> None:
    wanted = {
        "missing: n2 (Ray on n2 ended 2 times, last with exit code 1)": (
            {"worker_retries": 1, "nodelist": "n[1-3]"},
            site.job("echo never", resources=Resources(nodes=3), env={"RAY_DOUBLE_FAILS": "n2"}),
        ),
        "2 of 3 nodes, 0 of 0 GPUs after 4 s; missing: n4 (joining ": (
            {"join_seconds": 4, "nodelist": "n[2-4]"},
            site.job("echo never", resources=Resources(nodes=3), env={"RAY_DOUBLE_HANGS": "n4"}),
        ),
        "Ray's head did not start on n3 (ended with exit code 1); see ": (
            {"head_retries": 1, "nodelist": "n3"},
            site.job("echo never", env={"RAY_DOUBLE_FAILS": "n3"}),
        ),
        "Ray's head did not start on n2 (ended with exit code 1 in the bring-up); see ": (
            {"head_retries": 2, "nodelist": "n[2-3]"},
            site.job(
                "echo never",
                resources=Resources(nodes=2),
                env={"RAY_DOUBLE_DIES": "n2", "RAY_DOUBLE_HANGS": "n3"},
            ),
        ),
        "no address of n4 is in launcher.network 203.0.113.0/24; it has ": (
            {"network": "203.0.113.0/24", "nodelist": "n4"},
            site.job("echo never"),
        ),
        "launcher.setup failed on n1 with exit code 5": (
            {"nodelist": "n1"},
            site.job("echo never", setup="(exit 5)"),
        ),
    }
    handles = []
    for keys, job in wanted.values():
        handles.append(await site.using(**keys).submit(job))
    logs: list[list[bytes]] = [[] for _ in handles]
    ends = await asyncio.gather(*(site.watch(*each) for each in zip(handles, logs, strict=True)))
    for part, end, log, (_, job) in zip(wanted, ends, logs, wanted.values(), strict=True):
        assert (end.state, end.exit_code) == ("failed", 1), end
        assert part in end.message, end.message
        assert part.encode() in b"".join(log), "where there is no driver's log, the bring-up's is shown"
        assert not (Path(job.directory) / "logs/driver.log").exists()
    tries = Path(handles[2].directory, "logs/nodes/n3.log").read_text()
    assert "try 2 of 2" in tries


async def test_a_network_by_prefix_or_cidr_gives_the_address(site: Site) -> None:
    handles = []
    for network in ("127.0.", "127.0.0.0/8"):
        handles.append(await site.using(network=network).submit(site.job("echo at $RAY_ADDRESS")))
    for handle in handles:
        assert (await site.watch(handle)).state == "succeeded"
        assert "at 127.0.0.1:" in (Path(handle.directory) / "logs/driver.log").read_text()


async def test_a_job_that_is_cancelled_from_outside_is_stopped(slurm: Any, site: Site) -> None:
    site = site.using()
    job = site.job("echo ready\nwhile :; do sleep 0.1; done", resources=Resources(nodes=2), stopped_code=3)
    handle = await site.submit(job)
    await site.until_said(job, "ready")
    await asyncio.to_thread(slurm.run, "scancel", handle.data["job"])
    status = await site.watch(handle)
    assert status.state == "stopped", status
    assert await site.launcher.cleanup(handle) == []


async def test_a_job_in_the_queue_is_taken_out(site: Site) -> None:
    site = site.using(extra_args=("--hold",))
    handle = await site.submit(site.job("echo never"))
    assert (await site.launcher.status(handle)).state == "pending"
    assert "cancelled" in await site.launcher.stop(handle)
    assert (await site.watch(handle)).state == "stopped"


async def test_stopping_in_the_bring_up_starts_no_driver(site: Site) -> None:
    site = site.using()
    job = site.job("echo never", resources=Resources(nodes=2), env={"RAY_DOUBLE_HANGS": "n2 n1 n3 n4"})
    handle = await site.submit(job)
    node = Path(job.directory) / "slurm/up/nodes"
    while not list(node.glob("*.at")):
        await asyncio.sleep(0.1)
    status = await site.launcher.status(handle)
    assert (status.state, "Ray is coming up" in status.message) == ("pending", True), status
    await site.launcher.stop(handle)
    assert (await site.watch(handle)).state == "stopped"


async def test_a_job_without_requeues_left_ends_with_its_checkpoint(slurm: Any, site: Site) -> None:
    site = site.using()
    job = site.job(DRAINS, stopped_code=3)
    handle = await site.submit(job)
    await site.until_said(job, "ready")
    await asyncio.to_thread(slurm.run, "scancel", "--batch", "--signal=USR1", handle.data["job"])
    status = await site.watch(handle)
    assert (status.state, status.exit_code) == ("stopped", 3)
    assert "it was started again 0 times (launcher.requeues is 0)" in status.message
    assert "checkpointed" in (Path(job.directory) / "logs/driver.log").read_text()


async def test_credentials_that_others_may_read_are_refused_on_the_node_too(
    site: Site, credentials: Path, tmp_path: Path
) -> None:
    site = site.using(credentials=(str(credentials),), worker_retries=0)
    job = site.job("echo never")
    credentials.chmod(0o644)
    with pytest.raises(LauncherError, match=r"may be read by others \(mode 644\): chmod 600"):
        await site.submit(job)
    credentials.chmod(0o600)
    job = site.job("echo never")
    plan = site.launcher.plan(job)
    deliver(plan)
    credentials.chmod(0o640)
    handle = await site.launcher.submit(plan)
    site.handles.append(handle)
    assert "may be read by others (mode 640)" in (await site.watch(handle)).message


def deliver(plan: Plan) -> None:
    for name, text in plan.files.items():
        path = Path(plan.job.directory) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


async def test_a_dedicated_head_keeps_its_resources_out_of_the_cluster(site: Site) -> None:
    site = site.using(dedicated_head=True)
    script = (
        "python3 -c \"import ray, os; ray.init(address=os.environ['RAY_ADDRESS'])\n"
        "for n in sorted(ray.nodes(), key=lambda n: n['NodeName']): print(n['Resources'])\"\n"
        "echo place on $ROLLHOOK_WORKER_RESOURCE\n"
    )
    job = site.job(script, resources=Resources(nodes=2, gpus_per_node=1))
    log: list[bytes] = []
    assert (await site.watch(await site.submit(job), log)).state == "succeeded"
    assert b"".join(log).decode().splitlines()[1:] == [
        "{'CPU': 0.0, 'GPU': 0.0}", "{'CPU': 1.0, 'GPU': 1.0, 'worker_node': 1000}", "place on worker_node",
    ]  # fmt: skip


async def test_symmetric_run_keeps_the_drivers_code_and_can_be_stopped(site: Site) -> None:
    site = site.using(strategy="symmetric")
    good = site.job("echo at $RAY_ADDRESS; exit 9", resources=Resources(nodes=2))
    slow = site.job(
        "trap 'echo drained; exit 3' INT; echo ready; while :; do sleep 0.1; done",
        resources=Resources(nodes=2), stopped_code=3,
    )  # fmt: skip
    handles = [await site.submit(good), await site.submit(slow)]
    await site.until_said(slow, "ready")
    await site.launcher.stop(handles[1])
    ends = [await site.watch(handle) for handle in handles]
    assert [(end.state, end.exit_code) for end in ends] == [("failed", 9), ("stopped", 3)]


async def test_a_container_is_unpacked_on_all_nodes_used_and_removed(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flags = tmp_path / "flags"
    double = Path(__file__).parent / "pyxis_double"
    monkeypatch.setenv("PYXIS_DOUBLE", str(flags))
    monkeypatch.setenv("PATH", f"{double}:{os.environ['PATH']}")
    container = {"image": "registry#lab/image:1", "mounts": ("/data:/data",)}
    site = site.using(export=("PATH", "HOME", "PYXIS_DOUBLE"), container=container)
    job = site.job("exit 6", resources=Resources(nodes=2))
    handle = await site.submit(job)
    status = await site.watch(handle)
    assert (status.state, status.exit_code) == ("failed", 6)
    name, run = f"rollhook_{handle.data['job']}", str(site.root / job.run_id)
    inside = (
        f"--container-name={name} --container-mounts={run}:{run},/data:/data "
        "--no-container-mount-home --container-writable"
    )
    said = flags.read_text().splitlines()
    image = "--container-image=registry#lab/image:1"
    assert said[0] == f"{image} --container-name={name} --no-container-mount-home"
    removed = f"enroot remove --force pyxis_{name}"
    assert sorted(said[1:]) == sorted([inside, inside, "bare", removed, removed])


async def test_preflight_names_all_that_is_wrong(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = site.job(
        "true", resources=Resources(nodes=2, gpus_per_node=9), secrets={"KEY": "env:NOBODY_SETS_IT"}
    )
    monkeypatch.setenv("SBATCH_PARTITION", "elsewhere")
    launcher = make(tmp_path, export=("PATH", "NOBODY_SETS_IT"))
    said = "\n".join(await launcher.preflight(launcher.plan(replace(job, directory="/dev/shm/r/attempts/1"))))
    for part in (
        "/dev/shm/r/attempts/1 is on tmpfs, which no node sees",
        "the secret KEY is env:NOBODY_SETS_IT, and no file of launcher.credentials sets",
        "SBATCH_PARTITION is set here",
        "launcher.export would put the secret NOBODY_SETS_IT into",
        "2 nodes with 9 GPUs each, and 0 in main have them (the most: 8",
    ):
        assert part in said, said


@pytest.mark.parametrize(
    ("keys", "nodes", "part"),
    [
        ({"partition": "mian"}, 1, "there is no mian here; there are closed, main"),
        ({"partition": "closed"}, 1, "the partition closed is down"),
        ({}, 5, "the job wants 5 nodes (launcher.nodes), and 4 of the 4 of partition main are up"),
        ({"nodelist": "n9"}, 1, "sbatch would refuse the job: "),
        ({"gpu_type": "h100"}, 1, "GPUs of type h100 each, and 0 in main"),
        ({"gpu_type": "h100", "gpu_request": "none"}, 1, ""),
    ],
)  # fmt: skip
async def test_preflight_asks_slurm(site: Site, keys: dict[str, Any], nodes: int, part: str) -> None:
    launcher = make(site.root, **keys)
    job = site.job("true", resources=Resources(nodes=nodes, gpus_per_node=2 if "gpu_type" in keys else 0))
    said = await launcher.preflight(launcher.plan(job))
    assert (part in said[0]) if part else not said, said


async def test_the_same_job_is_not_submitted_twice(site: Site) -> None:
    site = site.using(extra_args=("--hold",))
    job = site.job("true")
    handle = await site.submit(job)
    with pytest.raises(LauncherError, match=rf"scancel {handle.data['job']}"):
        await site.launcher.submit(site.launcher.plan(job))


async def test_slurm_that_cannot_be_asked_is_an_error_and_not_a_lost_job(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = Handle("slurm", "nobody-a1", str(site.root / "nobody"), {"job": "1"})
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(LauncherError, match="there is no `scontrol` on PATH"):
        await site.launcher.status(handle)
    said = await site.launcher.debug(handle)
    assert "there is no `squeue` on PATH" in said["squeue.txt"]


@pytest.mark.nightly
@pytest.mark.slow
async def test_a_killed_slurmd_fails_the_job_with_its_reason(slurm: Any, site: Site) -> None:
    site = site.using(nodelist="n4")
    job = site.job("echo ready\nwhile :; do sleep 0.1; done")
    handle = await site.submit(job)
    await site.until_said(job, "ready")
    await asyncio.to_thread(slurm.end, "n4", signal.SIGKILL)
    site.seconds = 110
    try:
        status = await site.watch(handle)
        assert status.state == "failed"
        assert status.message.startswith("Slurm lost a node of the job")
        deadline = time.monotonic() + 30
        while job.directory in slurm.processes():
            assert time.monotonic() < deadline, "the driver outlives its supervisor"
            await asyncio.sleep(0.2)
    finally:
        slurm.start_node("n4")
        await asyncio.to_thread(slurm.wait_idle)


async def test_the_time_limit_brings_a_checkpoint_and_another_attempt(
    limited: Handle, tmp_path: Path
) -> None:
    launcher = make(tmp_path)
    log: list[bytes] = []
    status = await watch(launcher, limited, follow=log.append, timeout=110)
    text = b"".join(log).decode()
    assert (status.state, status.exit_code) == ("succeeded", 0), (status, text)
    again = Path(limited.directory).with_name("2")
    said = [line for line in text.splitlines() if not line.startswith("rollhook")]
    assert said == [
        f"attempt 1 in {limited.directory}", "ready", "checkpointed",
        f"attempt 2 in {again}", "resumed from 7",
    ]  # fmt: skip
    assert (Path(limited.directory) / "exit_code").read_text() == "3\n", "the first keeps its own"
    assert "resumed" not in (Path(limited.directory) / "logs/driver.log").read_text()
    whole = [data async for data in launcher.logs(limited)]
    assert b"".join(whole).decode() == text
