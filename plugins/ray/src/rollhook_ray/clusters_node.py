"""What runs on every host of a cluster: it starts, watches and ends Ray's processes there, and no others.

The standard library only, Python 3.9 or newer: the submitting machine gives this text to the host's Python,
with a request in JSON after it on standard input. Lines of the answer begin with MARK; others are noise.

A node is kept by a *keeper*, this program again, in a session of its own. It adopts what Ray leaves behind
(PR_SET_CHILD_SUBREAPER), so that all that was started is below it, and ends that when it is told to, or when
Ray has ended. What is known of a node is in `<state>/rollhook/clusters/<cluster>/nodes/<node>.json`, which is
written before anything is started. A process is meant by (pid, start ticks, boot id, pid namespace), and
found, if its keeper was killed, by a nonce in its environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import glob
import json
import os
import re
import shutil
import signal
import socket
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from typing import IO, Any, NamedTuple

MARK = "@rollhook "
COOKIE = "ROLLHOOK_CLUSTER_NODE"
KILL_SECONDS = 10.0
#: this text, set by who sends it
SOURCE = ""
#: environment of a request that is not for what Ray starts
_PRIVATE = ("SSH_AUTH_SOCK", "SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY", "RAY_ADDRESS", "RAY_AUTH_TOKEN")


class Refused(Exception):  # noqa: N818 - what is raised is a sentence for the user
    """Why a request cannot be met."""


class Process(NamedTuple):
    """A process as /proc shows it."""

    pid: int
    ticks: int
    parent: int
    session: int
    user: int


def emit(kind: str, value: Any) -> None:
    """Answer with a line."""
    print(MARK + json.dumps({kind: value}), flush=True)  # noqa: T201 - the protocol


# processes


def process(pid: int) -> Process | None:
    """Return a process that has not ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            fields = stream.read().rpartition(")")[2].split()
        user = os.stat(f"/proc/{pid}").st_uid
    except (OSError, ValueError):
        return None
    return None if fields[0] in "ZX" else Process(pid, int(fields[19]), int(fields[1]), int(fields[3]), user)


def processes() -> dict[int, Process]:
    """Return all that are alive, by pid."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return {each.pid: each for each in map(process, pids) if each is not None}


def below(roots: Iterable[int], table: dict[int, Process]) -> set[int]:
    """Return `roots` and all that descends from them."""
    children: dict[int, list[int]] = {}
    for each in table.values():
        children.setdefault(each.parent, []).append(each.pid)
    found: set[int] = set()
    stack = [pid for pid in roots if pid in table]
    while stack:
        pid = stack.pop()
        if pid not in found:
            found.add(pid)
            stack += children.get(pid, [])
    return found


def send(which: Process, number: int) -> None:
    """Send a signal to that process, never to another that has got its pid."""
    if hasattr(os, "pidfd_open"):
        try:
            handle = os.pidfd_open(which.pid)
        except OSError:
            return
        try:
            now = process(which.pid)
            if now is not None and now.ticks == which.ticks:
                signal.pidfd_send_signal(handle, number)  # type: ignore[attr-defined,unused-ignore]
        except ProcessLookupError:
            pass
        finally:
            os.close(handle)
        return
    now = process(which.pid)
    if now is not None and now.ticks == which.ticks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(which.pid, number)


def end(which: Iterable[Process], grace: float, ask: Process | None = None) -> int:
    """End processes, TERM (to `ask` alone, if given), then KILL; return how many it took a KILL to end."""
    left = [each for each in which if _is_alive(each)]
    for each in [ask] if ask else left:
        send(each, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = [each for each in left if _is_alive(each)]
    killed = len(left)
    deadline = time.monotonic() + KILL_SECONDS
    while left and time.monotonic() < deadline:
        for each in left:
            send(each, signal.SIGKILL)
        time.sleep(0.05)
        left = [each for each in left if _is_alive(each)]
    if left:
        raise Refused(f"process {left[0].pid} does not end, not even by KILL")
    return killed


def _is_alive(which: Process) -> bool:
    now = process(which.pid)
    return now is not None and now.ticks == which.ticks


def here() -> dict[str, str]:
    """Return what tells this machine from others, containers on one kernel too."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
        boot = stream.read().strip()
    return {"boot": boot, "pids": os.readlink("/proc/self/ns/pid"), "net": os.readlink("/proc/self/ns/net")}


def machine() -> str:
    """Return what this machine is called, also after it has been started anew."""
    try:
        with open("/etc/machine-id", encoding="ascii") as stream:
            return socket.gethostname() + "/" + stream.read().strip()
    except OSError:
        return socket.gethostname()


def keeper_of(state: dict[str, Any]) -> Process | None:
    """Return the keeper that a node's state names, if that very process is alive on this machine."""
    known = state.get("keeper") or {}
    now = process(known.get("pid", -1))
    place = here()
    same = now is not None and now.ticks == known.get("ticks")
    return now if same and all(known.get(key) == place[key] for key in ("boot", "pids")) else None


def belonging(state: dict[str, Any], table: dict[int, Process]) -> list[Process]:
    """Return what is alive of a node: its keeper, what carries its nonce, and all that is below these."""
    known, place = state.get("keeper") or {}, here()
    keeper = keeper_of(state)
    cookie = ("{}={}/{}".format(COOKIE, state["nonce"], state["node"])).encode()
    on_this = all(known.get(key) == place[key] for key in ("boot", "pids"))
    leader = table.get(known.get("pid", -1))
    roots = {keeper.pid} if keeper else set()
    for each in table.values():
        if each.user != os.getuid():
            continue
        in_session = on_this and each.session == known["pid"] and each.ticks >= known["ticks"]
        ours = in_session and (leader is None or leader.ticks == known["ticks"])
        if (ours and "ray" in command(each.pid)) or cookie in _environment(each.pid):
            roots.add(each.pid)
    spared = {os.getpid(), os.getppid()}
    return [table[pid] for pid in sorted(below(roots, table) - spared)]


def command(pid: int) -> str:
    """Return a process' command line as one line."""
    return " ".join(arguments(pid)).strip()


def arguments(pid: int) -> list[str]:
    """Return a process' argument vector."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as stream:
            return stream.read().decode("utf-8", "replace").split("\0")
    except OSError:
        return []


def _environment(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as stream:
            return stream.read().split(b"\0")
    except OSError:
        return []


# files


def clusters_directory() -> str:
    """Return where this user's clusters are known on this host."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "rollhook", "clusters")


def known() -> list[str]:
    """Return the names of the clusters that are known on this host."""
    return sorted(
        os.path.basename(path[:-1]) for path in glob.glob(os.path.join(clusters_directory(), "*", ""))
    )


def open_lock(cluster: str) -> IO[str]:
    """Open the file that who brings a cluster up or ends it from this machine holds a lock on."""
    os.makedirs(clusters_directory(), mode=0o700, exist_ok=True)
    return open(os.path.join(clusters_directory(), cluster + ".lock"), "w", encoding="ascii")


def directory(cluster: str) -> str:
    """Return the directory of a cluster, which only this user can read."""
    path = os.path.join(clusters_directory(), cluster)
    for each in (path, os.path.join(path, "nodes"), os.path.join(path, "logs")):
        os.makedirs(each, mode=0o700, exist_ok=True)
    return path


def write(path: str, text: str) -> None:
    """Write a private file, so that it is whole or as it was."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, path)


def states_here(cluster: str) -> dict[str, dict[str, Any]]:
    """Return what is known of a cluster's nodes of this machine; others may have the same home."""
    return {name: state for name, state in read_states(cluster).items() if state["machine"] == machine()}


def read_states(cluster: str) -> dict[str, dict[str, Any]]:
    """Return what is known of a cluster's nodes in this home, by node."""
    found = {}
    for path in sorted(glob.glob(os.path.join(clusters_directory(), cluster, "nodes", "*.json"))):
        try:
            with open(path, encoding="utf-8") as stream:
                state = json.load(stream)
        except (OSError, ValueError):
            continue
        if _is_state(state, cluster, os.path.basename(path)[: -len(".json")]):
            found[state["node"]] = state
    return found


def _is_state(state: Any, cluster: str, node: str) -> bool:
    """Return whether a file holds what `start` of this version wrote for a node."""
    if not isinstance(state, dict) or state.get("schema") != 1:
        return False
    texts = all(isinstance(state.get(key), str) for key in ("nonce", "machine", "spec", "temp_root", "from"))
    numbers = all(isinstance(state.get(key), (int, float)) for key in ("stop_seconds", "started"))
    return texts and numbers and (state.get("cluster"), state.get("node")) == (cluster, node)


def state_file(cluster: str, node: str) -> str:
    """Return where a node is known."""
    return os.path.join(directory(cluster), "nodes", node + ".json")


@contextlib.contextmanager
def locked(cluster: str, node: str) -> Iterator[None]:
    """Let one process at a time start or end a node."""
    with open(state_file(cluster, node)[:-4] + "lock", "w", encoding="ascii") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def end_node(state: dict[str, Any]) -> dict[str, Any]:
    """End all that is left of a node, remove its temporary directory and what is known of it."""
    table = processes()
    group, keeper = belonging(state, table), keeper_of(state)
    # the keeper itself needs twice that long at most
    killed = end(group, 2 * state["stop_seconds"] + 2 if keeper else state["stop_seconds"], keeper)
    late = belonging(state, processes())
    killed += end(late, state["stop_seconds"])
    others = states_here(state["cluster"]).values()
    if not any(each["nonce"] == state["nonce"] and each["node"] != state["node"] for each in others):
        _remove_temporary(state)
    with contextlib.suppress(FileNotFoundError):
        os.remove(state_file(state["cluster"], state["node"]))
    return {"node": state["node"], "processes": len(group) + len(late), "killed": killed}


def temporary(root: str, nonce: str) -> str:
    """Return the directory that is made for a cluster's Ray on each host; no other is ever removed."""
    return os.path.join(root, "rh-" + nonce[:10])


def _remove_temporary(state: dict[str, Any]) -> None:
    path = temporary(state["temp_root"], state["nonce"])
    if not re.fullmatch(r"rh-[0-9a-f]{10}", os.path.basename(path)):
        return
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(path)
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
            shutil.rmtree(path, ignore_errors=True)


def forget(cluster: str) -> None:
    """Remove a cluster's directory once no node is known in it, unless the submitting machine is this one.

    A node's file that cannot be read is one: it may run.
    """
    path = os.path.join(clusters_directory(), cluster)
    if not re.fullmatch(r"[a-z][a-z0-9-]*", cluster):
        return
    if not glob.glob(os.path.join(path, "nodes", "*.json")) and not os.path.exists(
        os.path.join(path, "cluster.json")
    ):
        shutil.rmtree(path, ignore_errors=True)


# the keeper


def keep(cluster: str, node: str) -> int:
    """Start Ray, wait until it ends or TERM comes, and end all that is below; the node's state says how."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    path = state_file(cluster, node)
    with open(path, encoding="utf-8") as stream:
        state = json.load(stream)
    waited = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    me = process(os.getpid())
    assert me is not None
    state["keeper"] = {"pid": me.pid, "ticks": me.ticks, **here()}
    write(path, json.dumps(state))
    child = os.fork()
    if child == 0:
        _become(state, me.pid, waited)
    asked, code = 0.0, None
    while code is None and not (asked and time.monotonic() > asked + state["stop_seconds"]):
        came = signal.sigtimedwait(waited, 0.5)
        if came is not None and came.si_signo == signal.SIGTERM and not asked:
            asked = time.monotonic()
            os.kill(child, signal.SIGTERM)
        for pid, status in _reap():
            if pid == child:
                code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
    deadline = (asked or time.monotonic()) + state["stop_seconds"]
    number = signal.SIGTERM
    while True:
        table = processes()
        left = [table[pid] for pid in below({me.pid}, table) - {me.pid}]
        if not left:
            break
        for each in left:
            send(each, number)
        signal.sigtimedwait(waited, 0.1)
        list(_reap())
        if time.monotonic() > deadline:
            number = signal.SIGKILL
    state["ended"] = {"code": code, "asked": bool(asked), "at": time.time()}
    if os.path.exists(path):
        write(path, json.dumps(state))
    return 0


def _become(state: dict[str, Any], keeper: int, waited: set[signal.Signals]) -> None:
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG: a killed keeper ends Ray
        if os.getppid() != keeper:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, waited)
        variables = {name: value for name, value in os.environ.items() if name not in _PRIVATE}
        # last, so that a process that writes its title over its environment keeps it the longest
        variables.update(state["env"])
        variables[COOKIE] = "{}/{}".format(state["nonce"], state["node"])
        argv = list(state["argv"])
        if os.path.isabs(argv[0]):  # jobs find what is installed beside it
            variables["PATH"] = os.path.dirname(argv[0]) + os.pathsep + variables.get("PATH", os.defpath)
        if state["setup"].strip():
            argv = ["bash", "-c", "set -e\n" + state["setup"] + '\nexec "$@"', "setup", *argv]
        os.execvpe(argv[0], argv, variables)  # noqa: S606
    except BaseException as error:  # noqa: BLE001 - a fork must not go on as its parent
        os.write(2, ("rollhook: {} cannot be started: {}\n".format(state["argv"][0], error)).encode())
    finally:
        os._exit(127)


def _reap() -> Iterator[tuple[int, int]]:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


if __name__ == "__main__":
    sys.exit(keep(*sys.argv[1:3]))
