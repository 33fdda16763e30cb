"""The keeper's loop: requests come over one socket, one message each, answers and events go back."""

from __future__ import annotations

import contextlib
import errno
import gc
import heapq
import itertools
import json
import mmap
import os
import resource
import select
import signal
import socket
import sys
import time

from rollhook_local.keeper import files, linux, tree
from rollhook_local.keeper.box import Box, run_command

TYPE_CHECKING = False  # importing typing would make every fork dearer
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

_MESSAGE = 1 << 17
_MOST_FDS = 16
_KILL_ROUNDS_SECONDS = 10.0
#: between two looks of a keeper without a driver at what is left
_FORGET_SECONDS = 1.0
_CREATE_SECONDS = 30.0
#: of what was killed: how many are told, and the bytes of their names
_MOST_NAMED, _NAMES_BYTES = 500, 1 << 16


class Keeper:
    """Holds the sandboxes of one backend."""

    def __init__(self, sock: socket.socket, home: tree.Home | None, files_limit: int) -> None:
        self._sock = sock
        self._files_limit = files_limit
        self._home = home
        self._boxes: dict[str, Box] = {}
        self._commands: dict[int, tuple[int, str, Box]] = {}  # pid -> (number, mark, box)
        self._init_pids: dict[int, Box] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._inside: Box | None = None
        self._detached = False
        self._over = False
        self._poll = select.epoll()
        self._waiting: dict[int, Callable[[], None]] = {}
        wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._wake = wake_read
        self._watch(wake_read, self._reap)
        self._watch(sock.fileno(), self._receive)

    def run(self) -> None:
        """Serve until told to end, or until the other side is gone."""
        while not self._over and not (self._detached and not self._boxes):
            timeout = -1.0
            if self._timers:
                timeout = max(0.0, self._timers[0][0] - time.monotonic())
            for fd, _ in self._poll.poll(timeout):
                if fd in self._waiting:
                    self._waiting[fd]()
            while self._timers and self._timers[0][0] <= time.monotonic():
                heapq.heappop(self._timers)[2]()
        for box in self._boxes.values():
            box.kill()

    def _watch(self, fd: int, act: Callable[[], None]) -> None:
        self._waiting[fd] = act
        self._poll.register(fd, select.EPOLLIN)

    def _unwatch(self, fd: int) -> None:
        if self._waiting.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), act))

    # the wire

    def _receive(self) -> None:
        try:
            data, fds = linux.receive(self._sock, _MESSAGE, _MOST_FDS)
        except ConnectionResetError:  # the driver was killed and had not read all that was sent to it
            data, fds = b"", []
        if not data:
            self._unwatch(self._sock.fileno())
            self._over = not self._detached
            return
        if data[:1] == b"@":  # too large for a message: in a memory file
            big = fds.pop(0)
            with mmap.mmap(big, 0, prot=mmap.PROT_READ) as view:
                data = view[:]
            os.close(big)
        head, _, blob = data.partition(b"\n")
        request = json.loads(head)
        try:
            answer = getattr(self, "_do_" + request["op"])(request, fds, blob)
        except OSError as error:
            answer = {"errno": error.errno or errno.EIO, "error": os.strerror(error.errno or errno.EIO)}
        except _DeadError:
            answer = {"dead": True}
        except Exception as error:  # noqa: BLE001 - one bad request must not end every sandbox
            sys.excepthook(type(error), error, error.__traceback__)
            answer = {"errno": errno.EIO, "error": f"{type(error).__name__}: {error}"}
        finally:
            for fd in fds:
                os.close(fd)
        if answer is not None and "r" in request:
            self._answer(request["r"], answer)

    def _answer(self, number: int, answer: dict[str, Any]) -> None:
        fds = answer.pop("fds", [])
        self._send({"r": number, **answer}, fds)
        for fd in fds:
            os.close(fd)

    def _send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its end is read as end of file
            socket.send_fds(self._sock, [json.dumps(message).encode()], list(fds))

    def _box(self, name: str) -> Box:
        box = self._boxes.get(name)
        if box is None or not box.ready or box.ending():
            raise _DeadError
        return box

    # requests

    def _do_bye(self, request: dict[str, Any], fds: list[int], blob: bytes) -> None:
        self._detached = True
        self._forget_deleted()

    def _forget_deleted(self) -> None:
        """Drop plain directories that somebody else deletes; no process 1 of theirs tells of it by dying."""
        for name, box in list(self._boxes.items()):
            if not box.monitor and box.root >= 0 and os.fstat(box.root).st_nlink == 0:
                del self._boxes[name]
                box.release()
        self._after(_FORGET_SECONDS, self._forget_deleted)

    def _do_create(self, request: dict[str, Any], fds: list[int], blob: bytes) -> None:
        rlimits = {"RLIMIT_NOFILE": [self._files_limit] * 2, **request["rlimits"]}
        box = Box(request["id"], rlimits, request["env"], fds[:])
        fds.clear()
        if "directory" in request:
            box.hold_directory(request["directory"])
            self._boxes[box.name] = box
            self._answer(request["r"], {})
            return
        self._enter(None)
        try:
            channel = box.launch(request["argv"])
        except BaseException:
            box.release()
            raise
        self._boxes[box.name] = box
        self._init_pids[box.monitor] = box
        box.created = request["r"]
        self._watch(channel, lambda: self._created(box, request))
        self._after(_CREATE_SECONDS, lambda: None if box.ready else box.kill())
        if request.get("lifetime"):
            self._after(request["lifetime"], box.kill)

    def _created(self, box: Box, request: dict[str, Any]) -> None:
        """Process 1 of a sandbox has spoken, or ended before it could."""
        self._unwatch(box.channel.fileno())
        try:
            if not box.greet():
                return  # its end is reaped, and answered there
            if request["loopback"]:
                self._enter(None)
                box.raise_loopback()
            for path, mode in request["dirs"]:
                fd = files.make_directories(box.root, path)
                os.chmod(f"/proc/self/fd/{fd}", mode)
                os.close(fd)
        except OSError as error:
            box.failure = f"{error.strerror}: {error.filename}"
            box.kill()
            return
        box.ready = True
        self._answer(request["r"], {"fds": [os.dup(box.pidfd)]})

    def _do_start(self, request: dict[str, Any], fds: list[int], blob: bytes) -> dict[str, Any] | None:
        box = self._boxes.get(request["s"])
        try:
            if box is None or not box.ready or (not box.pid and box.ending()):
                raise _DeadError
            self._enter(box)
            pid = os.fork()
        except (OSError, _DeadError):
            self._send({"x": request["x"], "code": -1, "dead": True})
            return None
        if pid == 0:
            run_command(box, request, fds, self._home)
        self._commands[pid] = (request["x"], request["mark"], box)
        return None

    def _enter(self, box: Box | None) -> None:
        """Choose whose process namespace the next fork is born into."""
        if self._home is None or box is self._inside:
            return
        linux.setns(self._home.processes if box is None else box.pidfd, linux.CLONE_NEWPID)
        self._inside = box

    def _do_signal(self, request: dict[str, Any], fds: list[int], blob: bytes) -> None:
        for pid, (number, _, _) in self._commands.items():
            if number == request["x"]:
                os.kill(pid, signal.SIGKILL)

    def _do_kill(self, request: dict[str, Any], fds: list[int], blob: bytes) -> None:
        box = self._box(request["s"])
        killed: dict[int, str] = {}
        deadline = time.monotonic() + _KILL_ROUNDS_SECONDS
        self._kill_round(box, request["mark"], killed, deadline, 0, request["r"])

    def _kill_round(
        self, box: Box, mark: str, killed: dict[int, str], deadline: float, rounds: int, answer: int
    ) -> None:
        """Kill what is found, and look again soon until nothing is."""
        if box.ending():
            self._answer(answer, {"dead": True})
            return
        leaders = [pid for pid, (_, of, b) in self._commands.items() if b is box and mark in of]
        found = box.census(mark)
        killed.update((pid, command) for pid, command in found if pid not in killed)
        if not found and not leaders:
            self._answer(answer, {"killed": _listed(killed)})
            return
        if time.monotonic() > deadline:
            self._answer(answer, {"errno": errno.EBUSY, "error": f"{len(found)} processes do not end"})
            return
        with contextlib.suppress(OSError):  # no process to be had, or the sandbox ends: the next round tells
            for pid in leaders:
                os.kill(pid, signal.SIGKILL)
            if mark or (len(found) < 16 and rounds < 4):
                box.kill_inside([pid for pid, _ in found])
            else:
                self._kill_everything(box)
        pause = 0.0005 * (rounds + 1)
        self._after(
            min(pause, 0.02), lambda: self._kill_round(box, mark, killed, deadline, rounds + 1, answer)
        )

    def _kill_everything(self, box: Box) -> None:
        """One kill(-1) from within, which no fork can outrun."""
        self._enter(box)
        if os.fork() == 0:
            try:
                os.kill(-1, signal.SIGKILL)
            finally:
                os._exit(0)

    def _do_ping(self, request: dict[str, Any], fds: list[int], blob: bytes) -> dict[str, Any]:
        self._box(request["s"])
        return {}

    def _do_open(self, request: dict[str, Any], fds: list[int], blob: bytes) -> dict[str, Any]:
        return {"fds": [files.open_for_reading(self._box(request["s"]).root, request["path"])]}

    def _do_write(self, request: dict[str, Any], fds: list[int], blob: bytes) -> dict[str, Any]:
        files.write(self._box(request["s"]).root, request["path"], blob, request["mode"])
        return {}

    def _do_remove(self, request: dict[str, Any], fds: list[int], blob: bytes) -> dict[str, Any]:
        root = self._box(request["s"]).root
        return {"existed": [files.remove(root, path) for path in request["paths"]]}

    def _do_delete(self, request: dict[str, Any], fds: list[int], blob: bytes) -> dict[str, Any] | None:
        box = self._boxes.get(request["id"])
        if box is None:
            return {}
        if box.monitor == 0:
            self._forget(box)
            return {}
        box.deleted.append(request["r"])
        box.kill()
        return None

    # children

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._commands:
                number, _, box = self._commands.pop(pid)
                code = os.waitstatus_to_exitcode(status)
                dead = code == -signal.SIGKILL and box.ending()
                self._send({"x": number, "code": code if code >= 0 else 128 - code, "dead": dead})
            elif (ended := self._init_pids.pop(pid, None)) is not None:
                self._ended(ended)

    def _ended(self, box: Box) -> None:
        if not box.ready:
            box.kill()  # what the program that was to make it has left
        if not box.ready and not box.deleted:
            self._answer(box.created, {"errno": errno.EIO, "error": box.why()})
        elif not box.deleted:
            self._send({"gone": box.name})
        elif not box.ready:
            self._answer(box.created, {"dead": True})
        self._forget(box)

    def _forget(self, box: Box) -> None:
        self._boxes.pop(box.name, None)
        if self._inside is box:
            self._enter(None)
        if box.channel_open:
            self._unwatch(box.channel.fileno())
        box.release()
        for number in box.deleted:
            self._answer(number, {})


class _DeadError(Exception):
    pass


def _listed(killed: dict[int, str]) -> list[tuple[int, str]]:
    """Return what fits into a message: the agent chose the names, and how long they are when escaped."""
    rows, room = [], _NAMES_BYTES
    for pid, command in itertools.islice(killed.items(), _MOST_NAMED):
        room -= len(json.dumps(command))
        rows.append((pid, command if room >= 0 else ""))
    return rows


def main() -> None:
    """Serve on file descriptor 3; the first message says where the keeper should live."""
    sock = socket.socket(fileno=3)
    sock.set_inheritable(False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    setup = json.loads(sock.recv(_MESSAGE))
    try:
        home = None
        if setup["isolate"]:
            home = tree.enter(setup["read_only"], setup["hidden"], setup["tools"])
    except OSError as error:
        text = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
        sock.send(json.dumps({"error": text}).encode())
        sys.exit(1)
    os.chdir("/")
    keeper = Keeper(sock, home, soft)
    sock.send(json.dumps({"many_ids": bool(home and home.many_ids)}).encode())
    gc.collect()
    gc.freeze()
    gc.disable()
    keeper.run()
