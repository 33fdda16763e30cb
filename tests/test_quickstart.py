"""The quickstart's short form, as a user runs it: it must learn, and leave nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollhook import metric_names
from rollhook.journal import read
from rollhook.metrics_file import read_metrics
from rollhook.runtime.results import read_result
from rollhook.runtime.statistics import one_sided_p

ROOT = Path(__file__).parents[1]
SENTINEL = "sentinel-1f0c9e-never-to-be-seen"
pytest.importorskip("torch", reason="needs torch: `python3 core test` installs it")
pytest.importorskip("ray", reason="needs ray: `python3 core test` installs it")

SHORT = [
    "steps=14",
    "evaluation.every=14",
    "evaluation.episodes=260",
    "evaluation.greedy=false",
    "engine.processes=2",
]


def command(*words):
    return [sys.executable, "-m", "rollhook.cli.main", *words]


def environment(tmp_path):
    homes = {name: str(tmp_path / name.lower()) for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME")}
    return os.environ | homes | {"ROLLHOOK_SENTINEL": SENTINEL}


def leftovers(tmp_path):
    """Return the processes that still speak of this run's directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            argv = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(tmp_path) in argv and int(path.parent.name) != os.getpid():
            found.append(argv)
    return found


def wait_until_gone(tmp_path, seconds=20):
    deadline = time.monotonic() + seconds
    while leftovers(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    return leftovers(tmp_path)


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    """The short quickstart, run once for all that look at what it left: its place, and how it ended."""
    place = tmp_path_factory.mktemp("short")
    root = f"storage.root={place / 'runs'}"
    return place, in_place(place, "run", "quickstart", *SHORT, root, "--run-id", "q", "--json")


def in_place(place, *words):
    return subprocess.run(
        command(*words),
        cwd=place, env=environment(place), capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_short_quickstart_learns_and_leaves_nothing(short_run):
    """Invariant 3: every prompt has an owner on disk; and it learns."""
    place, done = short_run
    root = place / "runs"
    assert done.returncode == 0, done.stderr[-4000:]
    result = read_result(root / "q")
    before, after = (e.total for e in result.evaluations if e.mode == "sampled")
    assert min(before.count, after.count) >= 200
    assert before.errors == after.errors == 0
    assert one_sided_p(before, after) < 0.01, (before, after)
    assert json.loads(done.stdout)["metrics"]["eval/pass_rate"] == pytest.approx(after.value)
    one_sandbox_per_episode(root / "q")
    every_prompt_has_an_owner(root / "q")
    the_metrics_are_those_of_the_table(root)
    assert wait_until_gone(place) == []
    for path in root.rglob("*"):
        if path.is_file():
            assert SENTINEL.encode() not in path.read_bytes(), path
    assert SENTINEL not in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_its_replay_gives_the_same_numbers_without_engine_and_sandbox(short_run):
    place, _ = short_run
    done = in_place(place, "replay", "q", "--run-id", "again", "--json")
    assert done.returncode == 0, done.stderr[-4000:]
    steps = json.loads(done.stdout)["steps"]
    assert [step["step"] for step in steps] == list(range(1, 15))
    trained = [step for step in steps if step["groups"]]
    assert len(trained) > 7
    assert all(step["recorded"]["train/loss"] is not None for step in trained)
    journal = [entry.event for entry in read(place / "runs/again/attempts/1/journal.jsonl")]
    assert journal == ["journal"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_its_verdicts_are_the_same_when_the_commands_run_again(short_run):
    place, _ = short_run
    done = in_place(place, "rescore", "q", "--limit", "60", "--json")
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 60
    assert {row["purpose"] for row in rows} == {"train", "eval"}
    assert {row["old"] for row in rows} == {0.0, 1.0}
    assert wait_until_gone(place) == []


def one_sandbox_per_episode(run):
    """A sandbox is never used by two episodes, nor an episode's work done without one."""
    events = list(read(run / "attempts/1/journal.jsonl"))
    owners = [
        e.data["episode"] for e in events if e.event in ("lease", "lease_assigned") and e.data.get("episode")
    ]
    finished = [e.data["episode_id"] for e in events if e.event == "episode_finished"]
    assert sorted(owners) == sorted(finished)
    assert len(set(owners)) == len(owners)


def every_prompt_has_an_owner(run):
    events = list(read(run / "attempts/1/journal.jsonl"))
    started = [e.data["episode_id"] for e in events if e.event == "episode_started"]
    trained = [
        i
        for p in sorted(run.glob("checkpoints/*/checkpoint.json"))
        for i in json.loads(p.read_bytes())["episode_ids"]
    ]
    assert len(started) == len(set(started))
    assert len(trained) == len(set(trained))
    assert set(trained) <= set(started)


def the_metrics_are_those_of_the_table(root):
    """None is missing in the table of metrics, and none there that is always written is missing here."""
    rows = [row for path in root.glob("*/metrics.jsonl") for row in read_metrics(path)]
    names = {name for row in rows for name in row} - {"schema", "step", "attempt", "time"}
    found = {metric_names.find(name) for name in names}
    assert metric_names.unlisted(names) == set()
    assert "train/<name>" not in {metric.name for metric in found}, "trainer torch's are all listed"
    always = {metric for section in metric_names.SECTIONS for metric in section.metrics if not metric.when}
    assert always - found == set()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("signals", ["INT", "INT INT", "TERM"])
def test_a_signal_drains_or_stops_and_nothing_is_left(tmp_path, signals):
    root = tmp_path / "runs"
    overrides = ["steps=500", "evaluation.every=0", "needs.sft.overrides=[steps=4]", f"storage.root={root}"]
    process = subprocess.Popen(
        command("run", "quickstart", *overrides, "--run-id", "q"),
        cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    metrics = root / "q/metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (metrics.exists() and metrics.read_bytes()) and time.monotonic() < deadline:
        assert process.poll() is None, process.stdout.read()[-3000:]
        time.sleep(0.2)
    for name in signals.split():
        process.send_signal(signal.Signals[f"SIG{name}"])
        time.sleep(0.3)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 3, output[-3000:]
    assert "Traceback" not in output
    assert "stack" not in output.lower()
    assert read_result(root / "q").status == "stopped"
    assert wait_until_gone(tmp_path) == []


def peak_memory(process):
    """Return the peak of the memory (proportional set size, bytes) of a process and all below it."""
    most = 0
    while process.poll() is None:
        most = max(most, sum(proportional(pid) for pid in tree(process.pid)))
        time.sleep(0.5)
    return most


def tree(pid):
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, todo = [], [pid]
    while todo:
        found.append(todo.pop())
        todo += parents.get(found[-1], [])
    return found


def proportional(pid):
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), 0)


def run_whole(tmp_path, recipe, *overrides):
    root, log = tmp_path / "runs", tmp_path / "log"
    started = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command("run", recipe, f"storage.root={root}", "--run-id", "q", *overrides),
            cwd=tmp_path, env=environment(tmp_path), stdout=output, stderr=output,
        )  # fmt: skip
        memory = peak_memory(process)
    assert process.returncode == 0, log.read_text()[-4000:]
    return read_result(root / "q"), time.monotonic() - started, memory


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_quickstart_learns_on_every_seed(tmp_path, seed, record_property):
    result, seconds, memory = run_whole(tmp_path, "quickstart", f"seed={seed}")
    sampled = [e.total for e in result.evaluations if e.mode == "sampled"]
    greedy = [e.total for e in result.evaluations if e.mode == "greedy"]
    record_property(
        "figure",
        f"quickstart seed {seed}: sampled {sampled[0].value:.3f} -> {sampled[-1].value:.3f} "
        f"({sampled[0].count} episodes each), greedy {greedy[0].value:.3f} -> {greedy[-1].value:.3f}, "
        f"{seconds:.0f} s in all, peak memory {memory / 2**30:.2f} GiB",
    )
    assert min(e.count for e in (*sampled, *greedy)) >= 400
    assert 0.30 <= sampled[0].value <= 0.65
    assert sampled[-1].value >= 0.75
    assert sampled[-1].value - sampled[0].value >= 0.20
    assert greedy[-1].value - greedy[0].value >= 0.10
    assert memory < 4 * 2**30


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_permuted_rewards_teach_nothing(tmp_path, record_property):
    result, seconds, _ = run_whole(tmp_path, "quickstart-control")
    before, after = (e.total for e in result.evaluations)
    record_property(
        "figure",
        f"control, rewards permuted: {before.value:.3f} -> {after.value:.3f} "
        f"({before.count} episodes each), {seconds:.0f} s in all",
    )
    assert min(before.count, after.count) >= 1000
    assert after.value - before.value < 0.05
