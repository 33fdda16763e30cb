"""A Slurm of the test session's own: munged, slurmctld and four slurmd on this machine, as root.

Everything is in one short folder, on ports of its own; what is started is ended by its process id.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

#: what Slurm waits for before a job is started again, in seconds; 120 if it is not told
CRED_EXPIRE = 15
NODES = ("n1", "n2", "n3", "n4")
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue")
_CONF = """\
ClusterName=rollhook
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket,cred_expire={cred_expire}
CryptoType=crypto/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1
ReturnToService=2
KillWait=2
MinJobAge={min_job_age}
SlurmdTimeout=30
GresTypes=gpu
NodeName=n[1-4] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=8 RealMemory=4000 Gres=gpu:8
PartitionName=main Nodes=n[1-4] Default=YES MaxTime=INFINITE State=UP
PartitionName=closed Nodes=n[1-4] State=DOWN
"""


def missing() -> str:
    """Return why Slurm cannot be started here, or an empty string."""
    if os.geteuid() != 0:
        return "needs root (run the tests as root: slurmd and munged are started)"
    if absent := [name for name in _PROGRAMS if _program(name) is None]:
        return f"needs slurm ({', '.join(absent)} not found: apt-get install slurm-wlm munge)"
    return ""


def _program(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin")


@dataclass
class Slurm:
    """The cluster for tests: `environ` is what its commands need, `programs` are the daemons by name."""

    root: Path
    environ: dict[str, str] = field(default_factory=dict)
    programs: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *argv: str) -> None:
        """Start a daemon in the foreground, in a session of its own."""
        program = _program(argv[0])
        assert program is not None
        environ = {"PATH": os.environ.get("PATH", os.defpath), **self.environ}
        with (self.root / f"{name}.out").open("ab") as out:
            self.programs[name] = subprocess.Popen(
                [program, *argv[1:]], stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                env=environ, start_new_session=True, cwd=self.root,
            )  # fmt: skip

    def start_node(self, node: str) -> None:
        """Start the slurmd of a node."""
        self.start(node, "slurmd", "-D", "-N", node, "-f", str(self.root / "slurm.conf"))

    def end(self, name: str, number: int = signal.SIGTERM) -> None:
        """End a daemon by its process id."""
        program = self.programs.pop(name)
        program.send_signal(number)
        try:
            program.wait(5)
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait()

    def run(self, *argv: str, check: bool = True) -> str:
        """Run one of Slurm's commands and return what it prints."""
        done = subprocess.run(
            argv, env=os.environ | self.environ, capture_output=True, text=True, check=False
        )
        assert not check or done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout.strip()

    @staticmethod
    def processes() -> str:
        """Return the command lines of this machine."""
        return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout

    def wait_idle(self, seconds: float = 60.0, nodes: int = len(NODES)) -> None:
        """Wait until that many nodes have nothing to do."""
        deadline = time.monotonic() + seconds
        while True:
            said = self.run("sinfo", "-h", "-p", "main", "-N", "-o", "%N %t", check=False)
            if sum(line.endswith(" idle") for line in said.splitlines()) >= nodes:
                return
            if time.monotonic() > deadline:
                logs = "\n".join(
                    f"{path.name}: {path.read_text(errors='replace')[-800:]}"
                    for path in [*self.root.glob("*.out"), *self.root.glob("*.log")]
                )
                pytest.fail(f"the nodes of the tests' Slurm are not idle: {said!r}\n{logs}")
            time.sleep(0.05)


def _free_ports(count: int) -> int:
    """Return the first of so many ports in a row that nobody listens on, below the ephemeral range."""
    first = 24000 + os.getpid() % 500 * 10
    while True:
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                first += 10
                continue
            return first


def start_slurm(root: Path, min_job_age: int = 300) -> Slurm:
    """Start the daemons and return when all four nodes are idle; under five seconds on two free cores."""
    slurm = Slurm(root, {"SLURM_CONF": str(root / "slurm.conf")})
    first = _free_ports(6)
    host = socket.gethostname().partition(".")[0]
    values = {"root": root, "host": host, "port": first + 5, "first": first, "last": first + 3}
    (root / "slurm.conf").write_text(_CONF.format(min_job_age=min_job_age, cred_expire=CRED_EXPIRE, **values))
    for number in range(8):
        (root / f"gpu{number}").touch()
    (root / "gres.conf").write_text(f"NodeName=n[1-4] Name=gpu File={root}/gpu[0-7]\n")
    munge = root / "munge"
    munge.mkdir()
    key = munge / "key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    (root / "state").mkdir()
    slurm.start(
        "munged", "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge}/socket",
        f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed",
    )  # fmt: skip
    deadline = time.monotonic() + 10
    while not (munge / "socket").is_socket():
        assert time.monotonic() < deadline, (root / "munged.out").read_text()
        time.sleep(0.02)
    slurm.start("slurmctld", "slurmctld", "-D", "-i", "-f", str(root / "slurm.conf"))
    for node in NODES:
        (root / f"spool-{node}").mkdir()
        slurm.start_node(node)
    slurm.wait_idle()
    return slurm


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """Give the session's Slurm; its commands find it by SLURM_CONF."""
    if reason := missing():
        pytest.skip(reason)
    root = Path(tempfile.mkdtemp(prefix="rh-slurm-", dir="/tmp"))
    root.chmod(0o755)
    slurm = Slurm(root)
    try:
        slurm = start_slurm(root)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in slurm.environ.items():
                patch.setenv(name, value)
            yield slurm
            slurm.run("scancel", "--full", "--signal=KILL", "--user=root", check=False)
            slurm.run("scancel", "--user=root", check=False)
            deadline = time.monotonic() + 10
            while slurm.run("squeue", "-h", check=False) and time.monotonic() < deadline:
                time.sleep(0.1)
    finally:
        for name in reversed(list(slurm.programs)):
            slurm.end(name)
        shutil.rmtree(root, ignore_errors=True)
