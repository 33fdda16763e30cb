"""A native run as a job on a real Ray cluster of several nodes: where its parts are, and how it dies.

The nodes are processes of this machine with addresses of their own, so what listens on loopback alone, or is
announced by the wrong address, is not reached.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import orjson
import pytest
from killing import wait_until_gone
from namespaces import namespaced_cluster
from surviving import assert_survived

from rollhook import cluster as ray_of_ours
from rollhook import journal
from rollhook.cluster import Cluster
from rollhook.errors import RollhookError
from rollhook.job_script import LOG, read_exit_code, script_files
from rollhook.launcher import Job
from rollhook.rundir import RunDir
from rollhook.testing.ray_cluster import WORKER_RESOURCE, ray_cluster

pytest.importorskip("torch", reason="needs torch: `python3 core test` installs it")
pytest.importorskip("ray", reason="needs ray: `python3 core test` installs it")

STEPS = 80
SENTINEL = "sentinel-7c1f-never-to-be-seen"
#: the quickstart with a model that knows nothing, an engine and a rollout worker for each node
SMALL = [
    "~needs",
    "~model.path",
    "+model.init={architecture: llama, sizes: {hidden_size: 32, num_hidden_layers: 1, "
    "num_attention_heads: 2, num_key_value_heads: 2, intermediate_size: 64, max_position_embeddings: 256}}",
    "+model.tokenizer={train: 'pack:pocket/demos.jsonl', vocab_size: 400}",
    "budgets.reply_tokens=8",
    "sandbox.warm=2",
    "engine.processes=2",
    "+rollout.workers=2",
    "rollout.batch_groups=2",
    "rollout.group_size=4",
    "+rollout.max_staleness=1",
    "+rollout.drop_zero_variance=false",
    "evaluation.every=0",
    f"steps={STEPS}",
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with ray_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


class Jobs:
    """Attempts at one run, each a job on a node that sees the run's directory; its submitter does not."""

    def __init__(self, place, cluster):
        self.place, self.cluster = place, cluster
        self.run = RunDir(place / "shared/runs/far")
        homes = {name: str(place / name.lower()) for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME")}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environ = os.environ | homes | {"PATH": path}
        rollhook = [sys.executable, "-m", "rollhook.cli.main"]
        root = f"storage.root={self.run.path.parent}"
        words = ["lock", "quickstart", *SMALL, root, "--output", str(place / "lock.yaml")]
        subprocess.run([*rollhook, *words], cwd=place, env=self.environ, check=True)

    def submit(self, number):
        """Start a job as a launcher does: the script, by bash, on one node."""
        job = Job(
            run_id="far",
            attempt=number,
            directory=str(self.run.path / "attempts" / str(number)),
            script=f'exec rollhook drive "$ROLLHOOK_JOB_FILES/recipe.lock.yaml" --into {self.run.path}',
            files={"recipe.lock.yaml": (self.place / "lock.yaml").read_text()},
            stopped_code=3,
        )
        sent = self.place / f"sent-{number}"
        for name, text in script_files(job).items():
            (sent / name).parent.mkdir(parents=True, exist_ok=True)
            (sent / name).write_text(text)
        there = {"RAY_ADDRESS": self.cluster.address, "ROLLHOOK_WORKER_RESOURCE": WORKER_RESOURCE}
        return subprocess.Popen(
            ["bash", str(sent / "job/job.sh")],
            cwd=self.place, env=self.environ | there, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def log(self, number):
        return (self.run.path / "attempts" / str(number) / LOG).read_text()

    def until_committed(self, number, process, steps):
        """Wait until the attempt has committed so many steps of its own."""
        path = self.run.path / "attempts" / str(number) / "journal.jsonl"
        deadline = time.monotonic() + 200
        while True:
            entries = list(journal.read(path)) if path.exists() else []
            if sum(entry.event == "step_committed" for entry in entries) >= steps:
                return
            assert process.poll() is None, self.log(number)[-3000:]
            assert time.monotonic() < deadline, self.log(number)[-3000:]
            time.sleep(0.1)

    def engines(self, number):
        """Return what the attempt says of its engines, once that is known of all."""
        path = self.run.path / "attempts" / str(number) / "live.json"
        deadline = time.monotonic() + 20
        while len(found := orjson.loads(path.read_bytes())["engines"]) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def driver(self):
        """Return the process that drives the newest attempt."""
        return self.run.newest_attempt().owner["pid"]

    def ended(self, number, process):
        """Return the job's exit code, as it left it."""
        process.wait(90)
        return read_exit_code(self.run.path / "attempts" / str(number))


def actors_of(node):
    """Return the logs of the actors on a node by their process."""
    found = {}
    for pid in node.processes():
        try:
            log = Path(os.readlink(f"/proc/{pid}/fd/1"))
            title = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if title.startswith(b"ray::Resident"):
            found[pid] = log.stem
    return found


PART = """
import os

class Part:
    def env(self, name):
        return os.environ.get(name)
"""


async def test_what_is_placed_on_a_cluster_that_is_there(tmp_path, cluster, monkeypatch):
    """Invariant 5: a secret is resolved on the node that uses it, and Ray is not told its value."""
    (tmp_path / "secret").write_text(SENTINEL)
    (tmp_path / "parts_of_tests.py").write_text(PART)
    secrets = {"PART_SECRET": f"file:{tmp_path / 'secret'}", "PART_ABSENT": "file:/nowhere/at/all"}
    monkeypatch.setattr(ray_of_ours, "JOIN_SECONDS", 0.1)
    with pytest.raises(RollhookError, match=r"cluster at 127\.0\.0\.1:1 cannot be joined .*refused"):
        await Cluster.attach("127.0.0.1:1", tmp_path)
    with pytest.raises(RollhookError, match="the run needs a node with the resource nobodys"):
        await Cluster.attach(cluster.address, tmp_path, "nobodys")
    env = {"PART_KEY": "in clear", "PYTHONPATH": str(tmp_path)}
    joined = await Cluster.attach(cluster.address, tmp_path, WORKER_RESOURCE, env=env, secrets=secrets)
    part = "parts_of_tests:Part"
    try:
        places = [joined.place(part, name=f"part-{number}") for number in range(4)]
        parts = await asyncio.gather(*places)
        assert sorted(each.host for each in parts) == ["127.0.0.2"] * 2 + ["127.0.0.3"] * 2
        names = ("PART_KEY", "PART_SECRET", "PART_ABSENT")
        assert [await parts[0].call("env", name) for name in names] == ["in clear", SENTINEL, None]

        # a program that is started anew comes back to its node, or says that this is gone
        process = await joined.placement.start_process("p", ["sleep", "600"], env={}, log=tmp_path / "p.log")
        host = await process.host()
        await process.restart()
        assert await process.host() == host
        with pytest.raises(RollhookError, match=r"part-9 needs node 10\.9\.9\.9, which has left"):
            await joined.place(part, name="part-9", node="10.9.9.9")
        with pytest.raises(RollhookError, match=r"needs 1 GPUs, and the cluster has 0"):
            await joined.place(part, name="part-9", gpus=1)
        unseen = tmp_path / "not-there" / "part.log"
        with pytest.raises(RollhookError, match=r"node 127\.0\.0\.\d cannot write .*storage\.root must be"):
            await joined.place(part, name="part-9", log=unseen)
        assert joined.placement.address == "{host}"
    finally:
        await joined.stop()
    # where no resource is named, a head without CPUs takes nothing either
    joined = await Cluster.attach(cluster.address, tmp_path, env={"PYTHONPATH": str(tmp_path)})
    try:
        parts = await asyncio.gather(*(joined.place(part, name=f"part-{number}") for number in range(3)))
        assert {each.host for each in parts} == {"127.0.0.2", "127.0.0.3"}
    finally:
        await joined.stop()

    # nothing of it is left, and the cluster is as it was
    deadline = time.monotonic() + 20
    while any(actors_of(node) for node in cluster.workers) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert [actors_of(node) for node in cluster.workers] == [{}, {}]
    assert all(node.process.poll() is None for node in [cluster.head, *cluster.workers]), "it is not ours"
    for path in (cluster.directory / "ray").resolve().rglob("*"):
        if path.is_file():
            assert SENTINEL.encode() not in path.read_bytes(), path


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_across_nodes_survives_its_drivers_and_a_node(tmp_path, cluster, record_property):
    jobs = Jobs(tmp_path, cluster)
    run, began = jobs.run, time.monotonic()

    # parts on every worker, none on the head; engines are reached at their nodes' addresses
    process = jobs.submit(1)
    jobs.until_committed(1, process, 2)
    assert actors_of(cluster.head) == {}
    names = [sorted(actors_of(node).values()) for node in cluster.workers]
    assert all(names), names
    engines = jobs.engines(1)
    assert {each["url"].split("/")[2].split(":")[0] for each in engines} == {"127.0.0.2", "127.0.0.3"}
    assert all(each["healthy"] for each in engines)
    assert sorted(name for each in names for name in each) == sorted(
        path.stem for path in (run.path / "attempts/1/logs").glob("*.log") if path.stem != "driver"
    )

    assert (run.path.parent / ".cache/packs").is_dir()  # the trainer read the pack that the driver made

    # kill -9 of the driver: nothing of it is left on any node
    os.kill(jobs.driver(), signal.SIGKILL)
    killed = time.monotonic()
    assert jobs.ended(1, process) == 128 + signal.SIGKILL
    while any(actors_of(node) for node in cluster.workers) and time.monotonic() < killed + 20:
        time.sleep(0.05)
    gone = time.monotonic() - killed
    assert [actors_of(node) for node in cluster.workers] == [{}, {}]
    assert wait_until_gone(run.path) == []

    # the next attempt goes on, on the same cluster; the trainer's node goes, and it fails and says why
    process = jobs.submit(2)
    jobs.until_committed(2, process, 1)
    assert "Attempt 2 goes on from step" in jobs.log(2)
    lost = next(node for node in cluster.workers if "trainer" in actors_of(node).values())
    lost.kill()
    assert jobs.ended(2, process) == 1
    said = jobs.log(2)
    assert f"the process of trainer on node {lost.host} died" in said, said[-3000:]
    assert "Traceback" not in said

    # queued again, the same job is the next attempt; the node that is left takes the run to its end
    cluster.workers.remove(lost)
    process = jobs.submit(2)
    process.wait(200)
    assert jobs.ended(2, process) == 0, jobs.log(2)[-3000:]
    assert [each.status for each in run.attempts()] == [None, "failed", "succeeded"]
    assert_survived(run, STEPS)
    assert wait_until_gone(run.path) == []
    record_property(
        "figure", f"{STEPS} steps in 3 attempts on a cluster, {time.monotonic() - began:.0f} s; "
        f"all processes gone {gone:.1f} s after kill -9 of the driver"
    )  # fmt: skip


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_submitted_run_across_machines_goes_on_after_its_driver_was_killed(tmp_path, record_property):
    """By the launcher, on nodes with networks and processes of their own: addresses are what they seem."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    homes = {name: str(tmp_path / name.lower()) for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME")}
    environ = os.environ | homes
    rollhook = [sys.executable, "-m", "rollhook.cli.main", "run"]
    run = RunDir(tmp_path / "runs/ns")
    began = time.monotonic()
    with namespaced_cluster(tmp_path, environment={"PATH": path}) as nodes:
        launcher = f"launcher={{use: ray, address: '{nodes.dashboard}'}}"
        words = ["quickstart", *SMALL, launcher, f"storage.root={run.path.parent}", "--run-id", "ns"]
        watching = subprocess.Popen(
            [*rollhook, *words], cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip
        marker = run.path / "attempts/1/journal.jsonl"
        while not (marker.exists() and any(e.event == "step_committed" for e in journal.read(marker))):
            assert watching.poll() is None, watching.stdout.read()[-4000:]
            time.sleep(0.1)
        live = run.path / "attempts/1/live.json"
        while len(engines := orjson.loads(live.read_bytes())["engines"]) < 2:
            time.sleep(0.1)
        assert {each["url"].split("/")[2].split(":")[0] for each in engines} == set(nodes.workers)
        assert run.newest_attempt().owner["pid_namespace"] != os.readlink("/proc/self/ns/pid")
        (driver,) = [pid for pid, words in commands() if "drive" in words and str(run.path) in words]
        os.kill(driver, signal.SIGKILL)
        output, _ = watching.communicate(timeout=200)
        assert watching.returncode == 1, output[-4000:]
        assert wait_until_gone(run.path) == []
        done = subprocess.run(
            [*rollhook, "--resume", "ns"], cwd=tmp_path, env=environ, capture_output=True, text=True,
            timeout=400, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        assert_survived(run, STEPS)
        assert wait_until_gone(run.path) == []
    record_property("figure", f"{STEPS} steps in 2 jobs across namespaces, {time.monotonic() - began:.0f} s")


def commands():
    """Yield the processes of this machine that are Python programs, with their words."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "python" in words[0]:
            yield int(path.parent.name), words
