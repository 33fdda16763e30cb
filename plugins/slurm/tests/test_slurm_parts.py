"""Plans, Slurm's words, ports and addresses: what needs no Slurm."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollhook.errors import LauncherError, UsageError
from rollhook.launcher import Handle, Job, Resources
from rollhook.testing.environment import build_context
from rollhook.testing.launcher import JOB
from rollhook_slurm import supervise
from rollhook_slurm.config import SlurmLauncherConfig
from rollhook_slurm.launcher import SlurmLauncher, status_of
from rollhook_slurm.machine import NodeError, Ports, in_network, local_addresses
from rollhook_slurm.slurm import count_gpus, parse_record, state_word

RECORD = (
    "JobId=7 JobName=a b-a1 UserId=root(0) JobState=CANCELLED Reason=None Dependency=(null) Restarts=2 "
    "ExitCode=0:15 Comment=x=y and more Command=/shared/a b/batch.sh StdOut=/a=1/%j.log Power="
)


def make(scratch: Path, **keys: Any) -> SlurmLauncher:
    return SlurmLauncher(SlurmLauncherConfig(**keys), build_context(scratch))


def directives(launcher: SlurmLauncher, job: Job) -> list[str]:
    batch = launcher.plan(job).files["slurm/batch.sh"]
    return [line.removeprefix("#SBATCH ") for line in batch.splitlines() if line.startswith("#SBATCH ")]


def test_keys_become_arguments_of_sbatch(tmp_path: Path) -> None:
    launcher = make(
        tmp_path, partition="gpu", account="lab", qos="high", constraint="a100|h100", reservation="r",
        nodelist="n[1-2]", exclude="n3", time="2-00:00:00", memory="0", gpu_type="h100", requeues=2,
        extra_args=("--dependency=singleton", "--comment=a \"b\" c"), signal_seconds=600,
    )  # fmt: skip
    said = directives(launcher, replace(JOB, resources=Resources(nodes=2, gpus_per_node=4)))
    for each in (
        "--job-name=demo-0a1b2c-a1", "--nodes=2-2", "--ntasks-per-node=1", "--partition=gpu", "--account=lab",
        "--qos=high", "--constraint=a100|h100", "--reservation=r", "--nodelist=n[1-2]", "--exclude=n3",
        "--time=2-00:00:00", "--mem=0", "--gres=gpu:h100:4", "--signal=B:USR1@600", "--requeue",
        "--exclusive",
        "--export=PATH,HOME,USER,LOGNAME,SHELL,LANG", "--dependency=singleton", '"--comment=a \\"b\\" c"',
        '"--output=/shared/a b/demo-0a1b2c/attempts/1/logs/slurm.log"', "--open-mode=append",
    ):  # fmt: skip
        assert each in said, (each, said)


def test_a_directory_with_a_line_break_adds_no_line_to_the_script(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="line break"):
        make(tmp_path).plan(replace(JOB, directory="/shared/a\necho mine #/demo-0a1b2c/attempts/1"))


@pytest.mark.parametrize("number", ["--me", "", "7 8", "-u", None, "7_1"])
async def test_a_damaged_record_gives_slurm_no_argument(tmp_path: Path, number: object) -> None:
    launcher, handle = make(tmp_path), Handle("slurm", "demo-a1", str(tmp_path), {"job": number})
    for work in (launcher.stop(handle, force=True), launcher.status(handle), launcher.cleanup(handle)):
        with pytest.raises(LauncherError, match="damaged"):
            await work


def test_names_of_the_environment_are_not_those_of_a_nodes_script(tmp_path: Path) -> None:
    (tmp_path / "slurm/up").mkdir(parents=True)
    (tmp_path / "slurm/up/address").write_text("10.0.0.1:6379\n")
    env = {"role": "worker", "up": "/nowhere", "node": "n9", "files": "/", "address": "other", "doing": "x"}
    job = replace(JOB, env=env, secrets={}, setup="fail() { :; }")
    text = make(tmp_path).plan(job).files["slurm/node.sh"]
    (tmp_path / "slurm/node.sh").write_text(text)
    ray = tmp_path / "bin/ray"
    ray.parent.mkdir()
    ray.write_text('#!/bin/sh\necho "ray $*"\n')
    ray.chmod(0o755)
    done = subprocess.run(
        ["bash", str(tmp_path / "slurm/node.sh"), "status"],
        env={"PATH": f"{ray.parent}:{os.environ['PATH']}", "ROLLHOOK_JOB_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "ray status -v --address 10.0.0.1:6379\n"), done.stderr


def test_gpus_can_be_asked_for_in_two_ways_or_not(tmp_path: Path) -> None:
    job = replace(JOB, resources=Resources(gpus_per_node=8))
    assert "--gpus-per-node=8" in directives(make(tmp_path, gpu_request="gpus-per-node"), job)
    asked = directives(make(tmp_path, gpu_request="none", signal_seconds=0), job)
    assert not [each for each in asked if "gpu" in each or "signal" in each]


def test_a_container_is_unpacked_first_and_its_mounts_hold_the_run(tmp_path: Path) -> None:
    keys = {"image": "nvcr.io#lab/image:1", "mounts": ["/data:/data:ro"], "workdir": "/work", "args": ["--x"]}
    batch = make(tmp_path, container=keys).plan(JOB).files["slurm/batch.sh"]
    assert "pull=('--container-image=nvcr.io#lab/image:1' " in batch
    assert (
        'container=("--container-name=rollhook_$SLURM_JOB_ID" '
        "'--container-mounts=/shared/a b/demo-0a1b2c:/shared/a b/demo-0a1b2c,/data:/data:ro' "
        "--no-container-mount-home --container-writable --container-workdir=/work --x)"
    ) in batch
    assert "enroot remove --force pyxis_rollhook_$ROLLHOOK_SLURM_JOB" in batch
    keys = {"image": "/images/a.sqsh", "pull": False}
    batch = make(tmp_path, container=keys).plan(JOB).files["slurm/batch.sh"]
    assert "pull=()\n" in batch
    assert "container=(--container-image=/images/a.sqsh '--container-mounts=" in batch
    assert "cleanup=\n" in batch


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"exclusive": False}, "needs cpus_per_node"),
        ({"requeues": 1, "signal_seconds": 60}, "must be more than stop_grace_seconds"),
        ({"network": "eth0"}, "neither a prefix"),
        ({"network": "10.0.0.0/99"}, "99"),
        ({"time": "2days"}, "is no time limit"),
        ({"last_port": 40000}, "less than 32768"),
        ({"first_port": 31500}, "are fewer than 1000 ports"),
        ({"container": {"image": "a.sqsh"}}, "must begin with / or ./"),
        ({"credentials": ["here.env"]}, "credentials"),
        ({"export": ["A=b"]}, "export"),
        ({"extra_args": ["singleton"]}, "each begins with -"),
        ({"code": "upload"}, "code: upload is not for slurm"),
        ({"temp_dir": "/a/rather/long/directory/of/a/node"}, "temp_dir"),
    ],
)
def test_keys_that_cannot_work_are_refused(keys: dict[str, Any], part: str) -> None:
    with pytest.raises(ValidationError, match=part):
        SlurmLauncherConfig(**keys)


def test_the_nodes_modules_run_by_the_standard_library_alone(tmp_path: Path) -> None:
    for name, text in make(tmp_path).plan(JOB).files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    program = (
        "import sys; sys.path = [sys.argv[1], *[p for p in sys.path if 'site-packages' not in p]]\n"
        "import rollhook_slurm.supervise as s; print(s.__file__)"
    )
    argv = [sys.executable, "-I", "-S", "-c", program, str(tmp_path / "slurm")]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "slurm/rollhook_slurm/supervise.py")


def test_a_record_of_scontrol_is_read() -> None:
    fields = parse_record(RECORD)
    assert fields["JobName"] == "a b-a1"
    assert fields["Command"] == "/shared/a b/batch.sh"
    assert fields["Restarts"] == "2"
    assert fields["Power"] == ""
    assert state_word({"JobState": "CANCELLED by 0"}) == "CANCELLED"


@given(
    st.dictionaries(
        st.from_regex(r"[A-Z][A-Za-z]{0,8}", fullmatch=True), st.from_regex(r"[a-z0-9/.:-]*", fullmatch=True)
    )
)
def test_whatever_scontrol_says_is_read_back(fields: dict[str, str]) -> None:
    assert parse_record(" ".join(f"{name}={value}" for name, value in fields.items())) == fields


@given(st.lists(st.tuples(st.sampled_from(["", "a100", "h100.1"]), st.integers(0, 99)), max_size=4))
def test_gpus_of_a_node_are_counted(parts: list[tuple[str, int]]) -> None:
    text = ",".join(["mps:100", *(f"gpu:{kind}:{n}(S:0-1)" if kind else f"gpu:{n}" for kind, n in parts)])
    counted = count_gpus(text)
    assert sum(counted.values()) == sum(n for _, n in parts)
    assert count_gpus("(null)") == {}


@pytest.mark.parametrize(
    ("said", "left", "stopped", "state", "part"),
    [
        ("JobState=PENDING Reason=Priority", None, False, "pending", "PENDING (Priority)"),
        ("JobState=CONFIGURING Reason=None", None, False, "pending", "CONFIGURING"),
        ("JobState=COMPLETED ExitCode=0:0", 0, False, "succeeded", "exit code 0"),
        ("JobState=FAILED ExitCode=7:0", 7, False, "failed", "exit code 7"),
        ("JobState=FAILED ExitCode=3:0", 3, False, "stopped", "exit code 3"),
        ("JobState=FAILED ExitCode=1:0", None, False, "failed", "may not be seen on the nodes"),
        ("JobState=FAILED ExitCode=0:12", None, True, "stopped", "FAILED"),
        ("JobState=CANCELLED ExitCode=0:15", None, False, "stopped", "CANCELLED"),
        ("JobState=CANCELLED ExitCode=0:15", 0, False, "succeeded", "exit code 0"),
        ("JobState=NODE_FAIL Reason=NodeDown", None, False, "failed", "lost a node"),
        ("JobState=TIMEOUT Reason=TimeLimit", 143, False, "failed", "time limit"),
        ("JobState=OUT_OF_MEMORY Reason=OutOfMemory", None, False, "failed", "for memory"),
        ("JobState=PREEMPTED", None, False, "failed", "preempted"),
        ("JobState=NEWWORD", None, False, "failed", "NEWWORD"),
        (None, None, False, "lost", "left no exit code"),
        (None, None, True, "stopped", "forgotten"),
        (None, 5, False, "failed", "exit code 5"),
    ],
)
def test_states_are_truthful(
    tmp_path: Path, said: str | None, left: int | None, stopped: bool, state: str, part: str
) -> None:
    handle = Handle("slurm", "r-a1", str(tmp_path), {"job": "5"}, stopped_code=3)
    if left is not None:
        (tmp_path / "exit_code").write_text(f"{left}\n")
    if stopped:
        (tmp_path / "slurm").mkdir()
        (tmp_path / "slurm/stop").touch()
    status = status_of(handle, None if said is None else parse_record(said))
    assert (status.state, part in status.message) == (state, True), status


def test_blocks_of_ports_are_apart_and_given_back() -> None:
    with socket.socket() as finder:
        finder.bind(("", 0))
        first = 20000 + finder.getsockname()[1] % 5000
    one, two, three = (Ports(first, first + 119, 60) for _ in range(3))
    assert {one.claim(0), two.claim(0)} == {first, first + 60}
    with pytest.raises(NodeError, match=r"all 2 blocks of 60 ports from .* are in use"):
        three.claim(1)
    one.release()
    assert three.claim(1) == first
    two.release()
    with socket.socket() as other:  # a service of someone else, in the middle
        other.bind(("", first + 63))
        other.listen()
        with pytest.raises(NodeError):
            one.claim(0)
    assert one.claim(0) == first + 60
    one.release()
    three.release()


@pytest.mark.parametrize(
    ("address", "network", "inside"),
    [
        ("10.1.2.3", "10.1.", True),
        ("10.11.2.3", "10.1.", False),
        ("10.1.2.3", "10.1.0.0/16", True),
        ("10.2.2.3", "10.1.0.0/16", False),
        ("fd00::2", "10.1.0.0/16", False),
        ("fd00::2", "fd00::/8", True),
    ],
)
def test_an_address_is_in_a_network(address: str, network: str, inside: bool) -> None:
    assert in_network(address, network) is inside


def test_the_addresses_of_a_machine_are_read_without_a_program(tmp_path: Path) -> None:
    table = tmp_path / "fib_trie"
    table.write_text(
        "Local:\n  +-- 0.0.0.0/0 3 0 4\n     |-- 10.1.0.0\n        /24 link UNICAST\n     |-- 10.1.0.7\n"
        "        /32 host LOCAL\n     |-- 10.1.0.255\n        /32 link BROADCAST\n"
    )
    assert local_addresses(str(table))[0] == "10.1.0.7"
    assert "127.0.0.1" in local_addresses()


def node(tmp_path: Path, **settings: Any) -> supervise.Node:
    (tmp_path / "slurm/up/nodes").mkdir(parents=True)
    given = json.loads(make(tmp_path).plan(JOB).files["slurm/settings.json"]) | settings
    environ = {
        "ROLLHOOK_SLURM_NODE": "n2",
        "ROLLHOOK_SLURM_INDEX": "1",
        "ROLLHOOK_SLURM_JOB": "9",
        "ROLLHOOK_JOB_DIR": str(tmp_path),
    }
    return supervise.Node(given, environ)


def test_a_node_that_loses_the_head_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "LOST_SECONDS", 0.3)
    mine = node(tmp_path)
    with socket.socket() as nobody, subprocess.Popen(["sleep", "60"]) as ray:
        nobody.bind(("127.0.0.1", 0))
        try:
            port = nobody.getsockname()[1]
            mine.write("head.json", json.dumps({"address": "127.0.0.1", "port": port + 1}))
            assert mine.stay(ray, "127.0.0.1", port) is False, "the head was started again elsewhere"
            mine.write("head.json", json.dumps({"address": "127.0.0.1", "port": port}))
            with pytest.raises(
                NodeError, match=r"n2 has not reached the head at 127\.0\.0\.1:\d+ for 0\.3 s"
            ):
                mine.stay(ray, "127.0.0.1", port)
        finally:
            ray.kill()


def test_a_head_that_cannot_be_reached_is_said_with_the_nodes_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "START_SECONDS", 0.1)
    mine = node(tmp_path)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        head = {"node": "n1", "address": "127.0.0.1", "port": nobody.getsockname()[1]}
        mine.write("head.json", json.dumps(head))
        with pytest.raises(NodeError, match=r"n2 cannot reach the head at .* launcher.network \(n2 has "):
            mine.find_head(mine.started + 60)


def test_what_a_killed_job_left_on_a_node_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    dead, alive, served, other = f"rh5-{ended.pid}", f"rh6-{os.getpid()}", f"rh7-{ended.pid}", "rh-slurm-5"
    for name in (dead, alive, served, other):
        (tmp_path / name / "session_latest/sockets").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)  # a socket's path may have 107 characters
    with socket.socket(socket.AF_UNIX) as raylet:
        raylet.bind(f"{served}/session_latest/sockets/raylet")
        raylet.listen()
        node(Path("job"), temp_dir=".").own_temp()
    assert {path.name for path in tmp_path.glob("rh*")} == {alive, served, other, f"rh9-{os.getpid()}"}


def test_a_node_of_a_job_that_is_over_leaves(tmp_path: Path) -> None:
    mine = node(tmp_path)
    mine.write("ended", "")
    assert mine.find_head(mine.started + 60) is None
    assert mine.pause(60) is False


def test_a_node_with_fewer_gpus_than_given_does_not_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: a (UUID: 1)'\necho 'GPU 1: a (UUID: 2)'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(NodeError, match="shows 2 of 8 GPUs"):
        node(tmp_path, gpus_per_node=8).worker()
