"""What runs on each node of a Slurm job: Ray is started, waited for, used by the driver, and ended.

Delivered beside the job and run by the node's own Python, so it needs the standard library only. All nodes
see one directory, `up`, and tell each other there: `head.json` (where the head listens), `nodes/NAME.at` and
`nodes/NAME.failed` (how far a node is, why it cannot join), `stop` and `drain` (the job is to stop), `ended`
(the driver has). It is listed rather than looked into, as NFS remembers that a file was not there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rollhook_slurm.machine import (
    POLL,
    SERVICES,
    NodeError,
    Ports,
    check_gpus,
    end,
    in_network,
    lines,
    listens,
    local_addresses,
    outward_address,
    reachable,
    start,
)

#: offsets in a node's block of ports
PORTS = {
    "node-manager-port": 2,
    "object-manager-port": 3,
    "runtime-env-agent-port": 4,
    "dashboard-agent-listen-port": 5,
    "dashboard-agent-grpc-port": 6,
    "metrics-export-port": 7,
}
HEAD_PORTS = {"ray-client-server-port": 8, "dashboard-port": 9}
GCS = 1
START_SECONDS = 90.0
LOST_SECONDS = 90.0
#: a node whose head has gone would ask that to let it go for half a minute
LEAVE_SECONDS = 3.0
WORKER = "worker_node"

#: prints the nodes of the cluster each second until its input ends; Ray prints errors of others there, too
WATCH = """
import json, select, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
while True:
    nodes = [[n["NodeName"], n["Resources"]] for n in ray.nodes() if n["Alive"]]
    print("nodes", json.dumps(nodes), flush=True)
    if select.select([0], [], [], 1)[0]:
        break
"""


class HeadError(NodeError):
    """Ray's head has failed in the bring-up, and may be started again."""


class StoppedError(Exception):
    """The job was told to stop before its driver ran."""


class Node:
    """One node's part: `settings` as rendered, the rest from the environment that node.sh leaves."""

    def __init__(self, settings: dict[str, Any], environ: dict[str, str]) -> None:
        self.settings = settings
        self.environ = environ
        self.name = environ["ROLLHOOK_SLURM_NODE"]
        self.index = int(environ["ROLLHOOK_SLURM_INDEX"])
        self.job = int(environ["ROLLHOOK_SLURM_JOB"])
        self.directory = Path(environ["ROLLHOOK_JOB_DIR"])
        self.up = self.directory / "slurm" / "up"
        # short: Ray's sockets lie 64 characters below, and a socket's path may have 107
        self.temp = Path(settings["temp_dir"]) / f"rh{self.job}-{os.getpid()}"
        self.started = time.monotonic()
        self.cancelled = False
        self.ports = Ports(settings["first_port"], settings["last_port"], settings["ports_per_node"])

    # what is said, and to whom

    def say(self, text: str) -> None:
        """Print a line with the time; it lands in this node's log."""
        print(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {self.name}: {text}", flush=True)  # noqa: T201

    def phase(self, text: str) -> None:
        """Say it, and note when."""
        self.say(text)
        with (self.up / "phases.tsv").open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')}\t{text}\n")

    def write(self, name: str, text: str) -> None:
        """Write a file of `up` at once."""
        path = self.up / name
        part = path.with_name(f".{path.name}.{self.name}.tmp")
        part.write_text(text)
        part.replace(path)

    def there(self, name: str) -> bool:
        """Whether a file of `up` is there."""
        return name in os.listdir(self.up)

    def told(self) -> str:
        """Return `cancel`, `stop` or `drain` where the job was told so, or an empty string."""
        if self.cancelled:
            return "cancel"
        names = os.listdir(self.up)
        return "stop" if "stop" in names else "drain" if "drain" in names else ""

    # address and ports

    def address(self) -> str:
        """Return the address of this node in the wanted network. Raises NodeError."""
        network, mine = self.settings["network"], local_addresses()
        if network is None:
            return outward_address() or next((a for a in mine if not a.startswith("127.")), "127.0.0.1")
        for each in mine:
            if in_network(each, network):
                return each
        raise NodeError(
            f"no address of {self.name} is in launcher.network {network}; it has {', '.join(mine) or 'none'}"
        )

    def claim_ports(self) -> int:
        """Take a block of ports; jobs and nodes begin to look at different ones. Raises NodeError."""
        return self.ports.claim(self.job * 7 + self.index)

    # Ray

    def ray_arguments(self, *, head: bool) -> list[str]:
        """Return the arguments of `ray start` that are the same in both strategies."""
        settings, block = self.settings, self.ports.block
        plain = head and settings["dedicated_head"]
        cpus = settings["cpus_per_node"] or self.environ.get("ROLLHOOK_SLURM_CPUS") or os.cpu_count()
        ports = PORTS | HEAD_PORTS if head else PORTS
        arguments = [
            f"--num-cpus={0 if plain else cpus}",
            f"--num-gpus={0 if plain else settings['gpus_per_node']}",
            f"--node-name={self.name}",
            f"--temp-dir={self.temp}",
            *(f"--{name}={block + offset}" for name, offset in ports.items()),
            f"--min-worker-port={block + SERVICES}",
            f"--max-worker-port={block + settings['ports_per_node'] - 1}",
            "--disable-usage-stats",
        ]
        if head:
            arguments.append("--include-dashboard=false")
        if settings["dedicated_head"] and not head:
            arguments.append(f"--resources={json.dumps({WORKER: 1000})}")
        if settings["object_store_bytes"] is not None:
            arguments.append(f"--object-store-memory={settings['object_store_bytes']}")
        return [*arguments, *settings["ray_args"]]

    def own_temp(self) -> None:
        """Make this process's directory for Ray, and remove those of processes that were killed."""
        for path in self.temp.parent.glob("rh*-*"):
            name = re.fullmatch(r"rh\d+-(\d+)", path.name)
            with contextlib.suppress(OSError):
                if name is None or path.stat().st_uid != os.getuid() or Path(f"/proc/{name[1]}").exists():
                    continue
                if not listens(path / "session_latest" / "sockets" / "raylet"):
                    self.say(f"removes {path}, which a job that was killed has left")
                    shutil.rmtree(path, ignore_errors=True)
        self.temp.mkdir(mode=0o700, exist_ok=True)

    def keep_logs(self) -> None:
        """Move Ray's logs of this node into the job's directory and remove its local files."""
        logs = self.temp / "session_latest" / "logs"
        with contextlib.suppress(OSError, shutil.Error):
            if logs.is_dir():
                shutil.copytree(
                    logs.resolve(), self.directory / "logs" / "ray" / self.name,
                    dirs_exist_ok=True, ignore_dangling_symlinks=True,
                )  # fmt: skip
        shutil.rmtree(self.temp, ignore_errors=True)

    # the head

    def head(self) -> int:
        """Start the head, wait for all, run the driver; returns its exit code."""
        check_gpus(self.settings["gpus_per_node"])
        ip, deadline = self.address(), self.started + self.settings["join_seconds"]
        tries = self.settings["head_retries"] + 1
        try:
            for number in range(1, tries + 1):
                self.own_temp()
                ray, port = self.start_head(ip)
                try:
                    self.wait_for_head(ray, ip, port, deadline)
                    self.wait_for_nodes(ray, f"{ip}:{port}", deadline)
                    return self.drive(f"{ip}:{port}", ray)
                except HeadError as error:
                    why = str(error)
                    (self.up / "head.json").unlink(missing_ok=True)
                    self.phase(f"Ray's head {why}; try {number} of {tries}")
                finally:
                    end(ray)
                    self.keep_logs()
        finally:
            self.write("ended", "")
            self.ports.release()
        log = f"{self.directory}/logs/nodes/{self.name}.log"
        raise NodeError(f"Ray's head did not start on {self.name} ({why}); see {log}")

    def start_head(self, ip: str) -> tuple[subprocess.Popen[bytes], int]:
        """Start Ray's head on ports of its own."""
        port = self.claim_ports() + GCS
        ray = start(
            ["ray", "start", "--head", f"--node-ip-address={ip}", f"--port={port}", "--block",
             "--log-color=false", *self.ray_arguments(head=True)],
            self.environ,
        )  # fmt: skip
        return ray, port

    def wait_for_head(self, ray: subprocess.Popen[bytes], ip: str, port: int, deadline: float) -> None:
        """Return once Ray's head listens, and others are told. Raises HeadError."""
        limit = min(deadline, time.monotonic() + START_SECONDS)
        while not reachable(ip, port):
            if self.told():
                raise StoppedError
            if ray.poll() is not None:
                raise HeadError(f"ended with exit code {ray.returncode}")
            if time.monotonic() > limit:
                raise HeadError("did not listen in time")
            time.sleep(POLL)
        self.write("head.json", json.dumps({"node": self.name, "address": ip, "port": port}))
        self.write("address", f"{ip}:{port}\n")
        self.phase(f"head listens on {ip}:{port}")

    def wait_for_nodes(self, ray: subprocess.Popen[bytes], address: str, deadline: float) -> None:
        """Return when every node and GPU is in the cluster. Raises NodeError naming who is missing."""
        nodes = self.settings["nodes"]
        gpus = self.settings["gpus_per_node"] * (nodes - bool(self.settings["dedicated_head"]))
        watch = start(["python3", "-c", WATCH, address], self.environ, subprocess.PIPE)
        seen: dict[str, dict[str, float]] = {}
        said = ""
        try:
            for line in lines(watch):
                if line.startswith("nodes "):
                    seen = dict(json.loads(line.removeprefix("nodes ")))
                elif line:
                    self.say(line)
                there = sum(each.get("GPU", 0) for each in seen.values())
                now = f"{len(seen)} of {nodes} nodes, {there:g} of {gpus} GPUs"
                if now != said and seen:
                    self.phase(now)
                    self.write("progress", now)
                    said = now
                if len(seen) >= nodes and there >= gpus:
                    return
                if self.told():
                    raise StoppedError
                if ray.poll() is not None:
                    raise HeadError(f"ended with exit code {ray.returncode} in the bring-up")
                if watch.poll() is not None:
                    raise HeadError("did not say which nodes there are")
                failed = sorted(path.stem for path in (self.up / "nodes").glob("*.failed"))
                over = self.there("workers-ended")
                if failed or over or time.monotonic() > deadline:
                    raise NodeError(self.missing(now, seen, over=over))
            raise HeadError("did not say which nodes there are")
        finally:
            end(watch, 5.0, gently=True)

    def missing(self, now: str, seen: dict[str, dict[str, float]], *, over: bool) -> str:
        """Return who is missing, and why as far as it is known."""
        said = []
        wanted = self.settings["gpus_per_node"]
        for name in sorted(self.environ.get("ROLLHOOK_SLURM_NODES", "").split()):
            failed, waiting = self.up / "nodes" / f"{name}.failed", self.up / "nodes" / f"{name}.at"
            if failed.exists():
                said.append(f"{name} ({failed.read_text().strip()})")
            elif name not in seen and waiting.exists():
                said.append(f"{name} ({waiting.read_text().strip()})")
            elif name not in seen:
                said.append(f"{name} (its step has not begun: no word from it in logs/nodes/{name}.log)")
            elif seen[name].get("GPU", 0) < wanted and not (
                self.settings["dedicated_head"] and name == self.name
            ):
                said.append(f"{name} ({seen[name].get('GPU', 0):g} of {wanted} GPUs)")
        waited = (
            "the step of the other nodes has ended" if over else f"{time.monotonic() - self.started:.0f} s"
        )
        return f"only {now} after {waited}; missing: {', '.join(said) or 'unknown'}"

    def drive(self, address: str, ray: subprocess.Popen[bytes]) -> int:
        """Run the job's script with RAY_ADDRESS, hand on what the job is told, and return its exit code."""
        if self.settings["dedicated_head"]:
            self.environ["ROLLHOOK_WORKER_RESOURCE"] = WORKER
        self.write("ready", "")
        self.phase("driver begins")
        script = Path(self.environ["ROLLHOOK_JOB_FILES"]) / "job.sh"
        # it keeps its log itself, and is told to end if this process is killed
        environ = self.environ | {"RAY_ADDRESS": address}
        driver = start(["bash", str(script)], environ, subprocess.DEVNULL, subprocess.DEVNULL)
        handed, ray_ended = "", 0.0
        while driver.poll() is None:
            told = self.told()
            if told and told != handed:
                handed = told
                number = {"stop": signal.SIGINT, "drain": signal.SIGUSR1, "cancel": signal.SIGTERM}[told]
                self.phase(f"told to {told}")
                driver.send_signal(number)
            if ray.poll() is not None and not ray_ended:
                ray_ended = time.monotonic()
                self.phase(f"Ray's head ended with exit code {ray.returncode}")
                self.write("failure", f"Ray's head on {self.name} ended with exit code {ray.returncode}\n")
            if ray_ended and time.monotonic() > ray_ended + LOST_SECONDS and not handed:
                handed = "cancel"
                driver.terminate()
            time.sleep(POLL)
        self.phase(f"driver ended with exit code {driver.returncode}")
        return driver.returncode if driver.returncode >= 0 else 128 - driver.returncode

    # the others

    def worker(self) -> int:
        """Join the head, and leave when the driver has ended; joins again a bounded number of times."""
        check_gpus(self.settings["gpus_per_node"])
        ip, deadline = self.address(), self.started + self.settings["join_seconds"]
        tries = self.settings["worker_retries"] + 1
        for number in range(1, tries + 1):
            found = self.find_head(deadline)
            if found is None:
                return 0
            head, port = found
            self.own_temp()
            self.claim_ports()
            self.at(f"joining {head}:{port} from {ip}, try {number} of {tries}")
            ray = start(
                ["ray", "start", f"--address={head}:{port}", f"--node-ip-address={ip}", "--block",
                 "--log-color=false", *self.ray_arguments(head=False)],
                self.environ,
            )  # fmt: skip
            try:
                if self.stay(ray, head, port):
                    return 0
            finally:
                end(ray, LEAVE_SECONDS)
                self.keep_logs()
            self.say(f"Ray ended with exit code {ray.returncode}")
            if not self.pause(min(10.0, 0.5 * 2**number)):
                return 0
        raise NodeError(f"Ray on {self.name} ended {tries} times, last with exit code {ray.returncode}")

    def at(self, text: str) -> None:
        """Say how far this node is; the head quotes it if the node never joins."""
        self.say(text)
        self.write(f"nodes/{self.name}.at", text)

    def find_head(self, deadline: float) -> tuple[str, int] | None:
        """Return where the head listens, once it can be reached; None when the job is over before."""
        self.at("waits for the head to listen")
        tried: tuple[str, int] | None = None
        while not self.over():
            head = self.head_now()
            if head is not None and reachable(*head):
                return head
            if head != tried:  # it may have been started again, elsewhere
                tried, limit = head, min(deadline, time.monotonic() + START_SECONDS)
            if head is None and time.monotonic() > deadline:
                raise NodeError(f"the head did not listen within {self.settings['join_seconds']:g} s")
            if head is not None and time.monotonic() > limit:
                raise NodeError(
                    f"{self.name} cannot reach the head at {head[0]}:{head[1]}; choose the network that both "
                    f"are in with launcher.network ({self.name} has {', '.join(local_addresses())}), or open "
                    f"the ports from {self.settings['first_port']} to {self.settings['last_port']}"
                )
            time.sleep(POLL)
        return None

    def head_now(self) -> tuple[str, int] | None:
        """Return where the head says that it listens."""
        if not self.there("head.json"):
            return None
        try:
            head = json.loads((self.up / "head.json").read_text())
        except FileNotFoundError:
            return None
        return str(head["address"]), int(head["port"])

    def stay(self, ray: subprocess.Popen[bytes], head: str, port: int) -> bool:
        """Return whether the job is over, else Ray has ended here. Raises NodeError without a head."""
        seen = time.monotonic()
        while ray.poll() is None:
            if self.over():
                return True
            if self.head_now() != (head, port):
                return False
            if reachable(head, port):
                seen = time.monotonic()
            elif time.monotonic() > seen + LOST_SECONDS:
                raise NodeError(
                    f"{self.name} has not reached the head at {head}:{port} for {LOST_SECONDS:g} s"
                )
            time.sleep(4 * POLL)
        return self.over()

    def over(self) -> bool:
        """Whether the driver has ended, or this node's step is being cancelled."""
        return self.cancelled or self.there("ended")

    def pause(self, seconds: float) -> bool:
        """Wait; False when the job is over meanwhile."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.over():
                return False
            time.sleep(POLL)
        return True

    # ray symmetric-run

    def symmetric(self) -> int:
        """Run `ray symmetric-run`, the same on every node; returns its exit code."""
        deadline, first = self.started + self.settings["join_seconds"], self.index == 0
        check_gpus(self.settings["gpus_per_node"])
        self.own_temp()
        block = self.claim_ports()
        if first:
            head, port = self.address(), block + GCS
            self.write("head.json", json.dumps({"node": self.name, "address": head, "port": port}))
        else:
            while not self.there("head.json"):
                if time.monotonic() > deadline:
                    raise NodeError("the first node did not say where the head is to be")
                time.sleep(POLL)
            data = json.loads((self.up / "head.json").read_text())
            head, port = str(data["address"]), int(data["port"])
        script = Path(self.environ["ROLLHOOK_JOB_FILES"]) / "job.sh"
        run = 'echo $$ > "$1/job.pid"; : > "$1/ready"; export RAY_ADDRESS=$2; exec bash "$3"'
        nodes = str(self.settings["nodes"])
        self.environ["RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT"] = str(int(self.settings["join_seconds"]))
        process = start(
            ["ray", "symmetric-run", "--address", f"{head}:{port}", "--min-nodes", nodes,
             *self.ray_arguments(head=first), "--", "bash", "-c", run, "bash", str(self.up), f"{head}:{port}",
             str(script)],
            self.environ,
        )  # fmt: skip
        handed = ""
        try:
            while process.poll() is None:
                told = self.told()
                if first and told and told != handed and self.there("job.pid"):
                    handed = told
                    number = {"stop": signal.SIGINT, "drain": signal.SIGUSR1, "cancel": signal.SIGTERM}[told]
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int((self.up / "job.pid").read_text()), number)
                elif told and not self.there("job.pid"):
                    raise StoppedError
                time.sleep(POLL)
            return process.returncode
        finally:
            end(process)
            self.ports.release()
            self.keep_logs()


def main(role: str, path: str) -> int:
    """Do a node's part and return the step's exit code."""
    node = Node(json.loads(Path(path).read_text()), dict(os.environ))

    def cancel(number: int, frame: object) -> None:
        node.cancelled = True

    signal.signal(signal.SIGTERM, cancel)
    try:
        return {"head": node.head, "worker": node.worker, "symmetric": node.symmetric}[role]()
    except StoppedError:
        node.say("told to stop before the driver began")
        return 143
    except NodeError as error:
        node.say(str(error))
        if role == "worker":
            node.write(f"nodes/{node.name}.failed", f"{error}\n")
        else:
            node.write("failure", f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
