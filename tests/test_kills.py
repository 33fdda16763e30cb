"""Real runs of which a process is killed with -9 at a seeded moment: what is left goes on, and is whole."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from killing import processes_of, wait_until_gone
from safetensors.numpy import load_file
from surviving import assert_survived

from rollhook import journal
from rollhook.checkpoints import CheckpointStore
from rollhook.rundir import RunDir

pytest.importorskip("torch", reason="needs torch: `python3 core test` installs it")
pytest.importorskip("ray", reason="needs ray: `python3 core test` installs it")

#: so many that the kill, at most 0.6 s after an event of the second or third step, meets a live run
STEPS = 12
VICTIMS = ("driver", "engine", "trainer", "worker")
#: the quickstart with a model that knows nothing, so that nothing needs to be run before
SMALL = [
    "~needs",
    "~model.path",
    "+model.init={architecture: llama, sizes: {hidden_size: 32, num_hidden_layers: 1, "
    "num_attention_heads: 2, num_key_value_heads: 2, intermediate_size: 64, max_position_embeddings: 256}}",
    "+model.tokenizer={train: 'pack:pocket/demos.jsonl', vocab_size: 400}",
    "budgets.reply_tokens=8",
    "sandbox.warm=2",
    "rollout.batch_groups=4",
    "rollout.group_size=4",
    "+rollout.max_staleness=1",
    "+rollout.drop_zero_variance=false",
    "evaluation.every=0",
    f"steps={STEPS}",
]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("victim", "seed"), list(zip(VICTIMS, range(4), strict=True)))
def test_a_run_survives_a_kill(tmp_path, victim, seed):
    """Invariants 3 and 4, with a real kill -9."""
    survive(tmp_path, victim, seed)


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(4, 24))
def test_a_run_survives_many_kills(tmp_path, seed, record_property):
    rng = random.Random(seed)
    record_property("figure", survive(tmp_path, rng.choice(VICTIMS), seed, workers=rng.choice([1, 2])))


def survive(tmp_path, victim, seed, workers=1):
    """Run, kill, resume where that was needed, and look at what is left; return what happened in words."""
    started = time.monotonic()
    workers = 2 if victim == "worker" else workers
    process = rollhook(tmp_path, "run", "quickstart", *SMALL, f"seed={seed}", f"+rollout.workers={workers}",
                       "--run-id", "k", f"storage.root={tmp_path / 'runs'}")  # fmt: skip
    when = kill(tmp_path, process, victim, random.Random(seed))
    output, code = end(process)
    if victim == "driver":
        assert code == -signal.SIGKILL
    elif code != 0:
        assert code == 1, output[-3000:]
        assert "Traceback" not in output
        assert victim != "worker", output[-3000:]
        assert f"{victim} " in output or "engine" in output, output[-3000:]
    if code != 0:
        output, again = end(rollhook(tmp_path, "run", "--resume", "k"))
        assert again == 0, output[-3000:]
    run = RunDir(tmp_path / "runs/k")
    assert_survived(run, STEPS)
    assert steps_of_the_optimizer(run) == {STEPS}
    assert wait_until_gone(tmp_path) == []
    assert end(rollhook(tmp_path, "sandboxes", "list", "k"))[0].startswith("0 sandboxes")
    return (
        f"{victim} of {workers} processes killed {when}; {'resumed' if code else 'survived'}, "
        f"{time.monotonic() - started:.0f} s in all"
    )


def kill(tmp_path, process, victim, rng):
    """Kill the victim a seeded while after a seeded event of the journal; return the moment in words."""
    event = rng.choice(["published", "episode_started", "episode_finished", "batch", "step_committed"])
    count, pause = rng.randrange(2, 4), rng.uniform(0.0, 0.6)
    path = tmp_path / "runs/k/attempts/1/journal.jsonl"
    deadline = time.monotonic() + 150
    while not path.exists() or sum(entry.event == event for entry in journal.read(path)) < count:
        assert process.poll() is None, process.stdout.read()[-3000:]
        assert time.monotonic() < deadline, f"no {event} in time"
        time.sleep(0.02)
    time.sleep(pause)
    pids = [process.pid] if victim == "driver" else processes_of(tmp_path, victim)
    assert pids, f"there is no {victim}"
    os.kill(rng.choice(sorted(pids)), signal.SIGKILL)
    return f"{pause:.2f} s after {event} number {count}"


def steps_of_the_optimizer(run):
    """Return how many steps the newest checkpoint's optimizer has done, of each of its parameters."""
    tensors = load_file(CheckpointStore(run.checkpoints).newest().path / "optimizer.safetensors")
    return {int(value) for name, value in tensors.items() if name.startswith("step/")}


def rollhook(tmp_path, *words):
    homes = {name: str(tmp_path / name.lower()) for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME")}
    return subprocess.Popen(
        [sys.executable, "-m", "rollhook.cli.main", *words],
        cwd=tmp_path, env=os.environ | homes, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def end(process):
    output, _ = process.communicate(timeout=200)
    return output, process.returncode
