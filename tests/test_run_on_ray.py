"""`rollhook run` with launcher `ray`, as a user does it, on a real cluster of three nodes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from rollhook.ray_jobs import RayJobs
from rollhook.testing.ray_cluster import RayCluster, ray_cluster

pytest.importorskip("torch", reason="needs torch: `python3 core test` installs it")
pytest.importorskip("ray", reason="needs ray: `python3 core test` installs it")

#: the quickstart with a model that knows nothing
SMALL = [
    "~needs",
    "~model.path",
    "+model.init={architecture: llama, sizes: {hidden_size: 32, num_hidden_layers: 1, "
    "num_attention_heads: 2, num_key_value_heads: 2, intermediate_size: 64, max_position_embeddings: 256}}",
    "+model.tokenizer={train: 'pack:pocket/demos.jsonl', vocab_size: 400}",
    "budgets.reply_tokens=8",
    "sandbox.warm=2",
    "rollout.batch_groups=2",
    "rollout.group_size=2",
    "+rollout.drop_zero_variance=false",
    "evaluation.every=0",
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with ray_cluster(tmp_path_factory.mktemp("cluster"), environment={"PATH": path}) as cluster:
        yield cluster


def rollhook(*words: str, place: Path, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "rollhook.cli.main", *words],
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout or done.stderr


def wait_for_row(run: Path, attempt: int) -> None:
    deadline = time.monotonic() + 300
    while True:
        rows = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
        if any(orjson.loads(row)["attempt"] == attempt for row in rows):
            return
        assert time.monotonic() < deadline, rollhook("jobs", "logs", run.name, place=run.parent)
        time.sleep(0.5)


@pytest.mark.nightly
@pytest.mark.timeout(900)
async def test_a_run_is_submitted_stopped_in_order_and_resumed(cluster: RayCluster, tmp_path: Path) -> None:
    ray = [f"launcher={{use: ray, address: '{cluster.dashboard}'}}", f"storage.root={tmp_path}/runs"]
    words = ["run", "quickstart", *SMALL, "steps=4000", *ray, "--detach", "--json"]
    run = tmp_path / "runs" / orjson.loads(rollhook(*words, place=tmp_path))["run_id"]
    client = RayJobs(cluster.dashboard)
    for attempt in (1, 2):
        wait_for_row(run, attempt)
        job = await client.job(f"{run.name}-a{attempt}")
        assert job is not None
        node = job.node(await client.nodes())
        assert node is not None
        assert not node.head
        assert "was asked to stop" in rollhook("jobs", "stop", run.name, "--wait", place=tmp_path)
        log = rollhook("jobs", "logs", run.name, place=tmp_path)
        assert "Stopping after the step under way" in log
        assert "Stopped." not in log, "a second signal cancels the step"
        assert "stopped" in rollhook("jobs", "status", run.name, place=tmp_path, code=3)
        assert list((run / "checkpoints").iterdir())
        if attempt == 1:
            rollhook("run", "--resume", run.name, "--detach", place=tmp_path)
