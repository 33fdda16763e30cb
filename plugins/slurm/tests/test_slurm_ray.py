"""Real Ray clusters in allocations of a real Slurm, and a real run across one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollhook.job_script import LOG, read_exit_code
from rollhook.journal import read
from rollhook.launcher import Job, Resources
from rollhook.rundir import RunDir
from rollhook.runtime.jobs import submit_job, watch
from rollhook.testing.environment import build_context
from rollhook.testing.parts import needs_part
from rollhook_slurm.config import SlurmLauncherConfig
from rollhook_slurm.launcher import SlurmLauncher

needs_part("ray")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STORE = 80_000_000
SETUP = f'export PATH="{Path(sys.executable).parent}:$PATH"'
COUNT = """\
python3 - <<'EOP'
import os, ray
ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
@ray.remote(num_gpus=2)
class Node:
    def name(self):
        return os.environ["ROLLHOOK_SLURM_NODE"], os.environ["A_KEY"]
nodes = [Node.remote() for _ in range(2)]
print("on", sorted(ray.get([each.name.remote() for each in nodes])))
print("leaked", [name for name in os.environ if name.startswith(("SLURM_JOB", "SLURM_STEP", "PMI"))])
EOP
"""


async def test_actors_are_on_every_node_with_its_credentials_and_nothing_is_left(
    slurm: Any, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    key = tmp_path / "keys.env"
    key.touch(mode=0o600)
    key.write_text("A_KEY=of-the-nodes\n")
    config = SlurmLauncherConfig(
        exclusive=False,
        cpus_per_node=1,
        credentials=(str(key),),
        object_store_bytes=STORE,
        temp_dir=str(slurm.root),
    )
    launcher = SlurmLauncher(config, build_context(tmp_path))
    run = RunDir.create(tmp_path / "runs", "count", run_id="count")
    wanted = Resources(nodes=2, gpus_per_node=2)
    job = Job("count", 1, str(run.path / "attempts/1"), COUNT, setup=SETUP, resources=wanted)
    began = time.monotonic()
    handle = await submit_job(launcher, job, run=run)
    said = ""

    async def changed(status: Any) -> None:
        nonlocal said
        if status.state == "running":
            record_property("figure", f"sbatch to driver, 2 nodes: {time.monotonic() - began:.1f} s")
            said = (await launcher.debug(handle))["ray.txt"]

    log: list[bytes] = []
    status = await watch(launcher, handle, follow=log.append, timeout=120, changed=changed)
    text = b"".join(log).decode()
    assert (status.state, status.exit_code) == ("succeeded", 0), (status, text)
    first, second = slurm.run("scontrol", "show", "hostnames", status.raw["NodeList"]).split()
    assert f"on [('{first}', 'of-the-nodes'), ('{second}', 'of-the-nodes')]" in text
    assert "leaked []" in text
    assert "Active:" in said, said
    assert sorted(path.name for path in Path(job.directory, "logs/ray").iterdir()) == [first, second]
    assert not list(slurm.root.glob("rh*-*"))
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert f"{slurm.root}/rh" not in left


@pytest.mark.nightly
def test_ray_symmetric_run_takes_our_options_and_keeps_the_code(tmp_path: Path) -> None:
    """In a namespace of its own, for it refuses a host on which any Ray runs, and ends all of them."""
    needs_part("root", "unshare")
    directory = tmp_path / "runs/sym/attempts/1"
    config = SlurmLauncherConfig(
        strategy="symmetric", object_store_bytes=STORE, cpus_per_node=1, join_seconds=90
    )
    job = Job("sym", 1, str(directory), "echo at $RAY_ADDRESS; exit 9", resources=Resources(1, 2))
    for name, text in SlurmLauncher(config, build_context(tmp_path)).plan(job).files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    (directory / "slurm/up/nodes").mkdir(parents=True)
    (directory / "logs/nodes").mkdir(parents=True)
    environ = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": os.environ["HOME"],
        "ROLLHOOK_JOB_DIR": str(directory),
        "ROLLHOOK_JOB_FILES": str(directory / "job"),
        "ROLLHOOK_SLURM_JOB": "3",
        "SLURMD_NODENAME": "n1",
        "SLURM_NODEID": "0",
    }
    argv = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    argv += ["bash", str(directory / "slurm/node.sh"), "symmetric"]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=200, check=False)
    said = (directory / "logs/nodes/n1.log").read_text()
    assert done.returncode == 9, (done, said)
    assert read_exit_code(directory) == 9
    assert re.search(r"at [\d.]+:\d+", (directory / LOG).read_text())


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
]
EXPORT = "[PATH, HOME, XDG_CACHE_HOME, XDG_STATE_HOME, HF_HUB_OFFLINE, TRANSFORMERS_OFFLINE]"
KEYS = (
    f"use: slurm, nodes: 2, exclusive: false, cpus_per_node: 2, object_store_bytes: {STORE}, requeues: 1, "
    f"stop_grace_seconds: 60, export: {EXPORT}"
)


def rollhook(*words: str, code: int = 0, cwd: Path) -> str:
    command = [sys.executable, "-m", "rollhook.cli.main", *words]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, (done.returncode, done.stdout[-3000:], done.stderr[-3000:])
    return done.stdout


def test_the_quickstart_across_two_nodes_goes_on_in_another_allocation(slurm: Any, tmp_path: Path) -> None:
    needs_part(
        "torch", "rollhook_torch", "rollhook_tbench2", "rollhook_agents", "rollhook_local", "bubblewrap"
    )
    setup = json.dumps(SETUP)
    words = [
        "run",
        "quickstart",
        *SMALL,
        "steps=400",
        f"+storage.root={tmp_path}/runs",
        f"launcher={{{KEYS}, setup: {setup}}}",
    ]
    said = json.loads(rollhook(*words, "--run-id", "far", "--detach", "--json", cwd=tmp_path))
    assert (said["job_id"], said["launcher"]) == ("far-a1", "slurm")
    run = RunDir.find("far")
    number = json.loads((run.path / "attempts/1/submit.json").read_text())["handle"]["data"]["job"]
    try:
        until_committed(run, 1, 2)
        slurm.run("scancel", "--batch", "--signal=USR1", number)
        until_committed(run, 2, 1)
        assert read_exit_code(run.path / "attempts/1") == 3, "it was drained, with a checkpoint"
        rollhook("jobs", "status", "far", cwd=tmp_path, code=0)
        rollhook("jobs", "stop", "far", "--wait", "--timeout", "120", cwd=tmp_path)
        log = rollhook("jobs", "logs", "far", cwd=tmp_path)
    finally:
        slurm.run("scancel", number, check=False)
    assert log.count("Joining the Ray cluster at ") == 2
    rollhook("jobs", "status", "far", cwd=tmp_path, code=3)
    assert [each.number for each in run.attempts()] == [1, 2]
    assert [each.status for each in run.attempts()] == ["stopped", "stopped"]


def until_committed(run: RunDir, number: int, steps: int) -> None:
    """Wait until the attempt has committed so many steps of its own."""
    path, deadline = run.path / "attempts" / str(number), time.monotonic() + 350
    while True:
        journal = path / "journal.jsonl"
        entries = list(read(journal)) if journal.exists() else []
        if sum(entry.event == "step_committed" for entry in entries) >= steps:
            return
        log = (path / LOG).read_text()[-3000:] if (path / LOG).exists() else "no log"
        assert read_exit_code(path) is None, log
        assert time.monotonic() < deadline, log
        time.sleep(0.2)
