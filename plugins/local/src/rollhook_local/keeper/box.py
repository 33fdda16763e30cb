"""One sandbox as the keeper holds it, and what a command goes through before it is executed."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import struct
import warnings  # noqa: F401 - os.execvpe imports it, in the child where no Python library is visible

from rollhook_local.keeper import linux
from rollhook_local.keeper.linux import open_in_root

TYPE_CHECKING = False  # importing typing would make every fork dearer
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn

    from rollhook_local.keeper import tree

_TOOLS_ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
_EXITING = 0x4  # PF_EXITING
_COMMAND_LENGTH = 160


class Box:
    """A sandbox: its process 1, its root, its control groups."""

    def __init__(
        self, name: str, rlimits: dict[str, list[int]], env: dict[str, str], groups: list[int]
    ) -> None:
        self.name = name
        self.rlimits = rlimits
        self.env = env
        self.groups = groups
        self.monitor = 0  # our child: the program that made the sandbox, or its process 1
        self.pid = 0
        self.start = 0
        self.pidfd = -1
        self.root = -1
        self.ready = False
        self.created = 0
        self.deleted: list[int] = []
        self.failure = ""
        self.channel_open = False
        self.channel: socket.socket
        self._proc = -1
        self._said = -1
        self._user_space = ""

    def hold_directory(self, directory: str) -> None:
        """Be a plain directory, without isolation."""
        self.root = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self.ready = True

    def launch(self, argv: Sequence[str]) -> int:
        """Start the program that makes the sandbox; return the descriptor on which process 1 will speak."""
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.channel_open = True
        self.channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._said = os.memfd_create("said", os.MFD_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            try:
                os.setpgid(0, 0)
                restore_signals()
                os.dup2(theirs.fileno(), 0)
                os.dup2(theirs.fileno(), 1)
                os.dup2(self._said, 2)
                os.execvpe(argv[0], list(argv), _TOOLS_ENV)  # noqa: S606 - no shell on purpose
            except OSError as error:
                os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
            finally:
                os._exit(127)
        theirs.close()
        with contextlib.suppress(PermissionError):  # it has executed, and done this itself
            os.setpgid(pid, pid)
        self.monitor = pid
        return self.channel.fileno()

    def greet(self) -> bool:
        """Learn who process 1 is; False when it has ended without a word."""
        data, ancillary, _, _ = self.channel.recvmsg(64, socket.CMSG_SPACE(12))
        if not data:
            return False
        credentials = next(data for _, kind, data in ancillary if kind == socket.SCM_CREDENTIALS)
        self.pid = struct.unpack("3i", credentials[:12])[0]
        self.pidfd = os.pidfd_open(self.pid)
        self.start = int(_stat(f"/proc/{self.pid}/stat")[19])
        self.root = os.open(f"/proc/{self.pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._proc = open_in_root(self.root, "/proc", os.O_RDONLY | os.O_DIRECTORY)
        self._user_space = os.readlink("1/ns/user", dir_fd=self._proc)
        return True

    def raise_loopback(self) -> None:
        """Bring up the loopback interface inside, which bubblewrap does by itself."""
        pid = os.fork()
        if pid == 0:
            try:
                linux.setns(self.pidfd, linux.CLONE_NEWNET)
                linux.raise_loopback()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)

    def why(self) -> str:
        """Return what the program that should have made the sandbox said."""
        if self.failure:
            return self.failure
        text = os.pread(self._said, 2000, 0).decode("utf-8", "replace").strip()
        return text or "it ended without a word"

    def ending(self) -> bool:
        """Return whether process 1 is gone or going."""
        if not self.pid:
            return not self.ready or os.fstat(self.root).st_nlink == 0
        try:
            fields = _stat(f"/proc/{self.pid}/stat")
        except OSError:
            return True
        return bool(int(fields[6]) & _EXITING) or fields[0] in ("Z", "X") or int(fields[19]) != self.start

    def kill(self) -> None:
        """End the sandbox; the kernel takes everything in it along."""
        try:
            if self.pidfd >= 0:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            elif self.monitor:  # with what it has forked, which does not yet die with it
                os.killpg(self.monitor, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def release(self) -> None:
        """Close what is held open."""
        if self.channel_open:
            self.channel.close()
            self.channel_open = False
        for fd in (self.pidfd, self.root, self._proc, self._said, *self.groups):
            if fd >= 0:
                os.close(fd)
        self.pidfd = self.root = self._proc = self._said = -1
        self.monitor = 0
        self.groups = []
        self.ready = False

    def join_groups(self) -> None:
        """Move the calling process into the sandbox's control groups.

        Commands do; process 1 does not, so that it can always reap.
        """
        for fd in self.groups:
            os.write(fd, b"0")

    # what runs inside

    def census(self, mark: str) -> list[tuple[int, str]]:
        """Return (pid inside, command) of what carries `mark` or descends from it; process 1 aside."""
        parents: dict[int, int] = {}
        found: set[int] = set()
        for name in os.listdir(self._proc):
            if not name.isdecimal() or name == "1":
                continue
            pid = int(name)
            try:
                fields = _stat(f"{name}/stat", self._proc)
                if fields[0] in ("Z", "X") and int(fields[17]) <= 1:
                    continue  # dead; a leader that is a zombie while its threads live is not
                if fields[1] == "1" and os.readlink(f"{name}/ns/user", dir_fd=self._proc) == self._user_space:
                    continue  # process 1's own, which no command can become
                parents[pid] = int(fields[1])
                if not mark or f"ROLLHOOK_EXEC={mark}".encode() in _read(f"{name}/environ", self._proc):
                    found.add(pid)
            except OSError:
                continue  # it has just ended
        grown = bool(found)
        while grown:
            more = {pid for pid, parent in parents.items() if parent in found} - found
            grown = bool(more)
            found |= more
        return [(pid, self._command(pid)) for pid in sorted(found)]

    def _command(self, pid: int) -> str:
        try:
            text = _read(f"{pid}/cmdline", self._proc, 4096)
        except OSError:
            return ""
        words = text.replace(b"\0", b" ").decode("utf-8", "replace").strip()
        return words[:_COMMAND_LENGTH]

    def kill_inside(self, pids: Sequence[int]) -> None:
        """Kill processes by their pids inside; a /proc directory is as good as a pidfd."""
        for pid in pids:
            try:
                fd = os.open(str(pid), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._proc)
            except OSError:
                continue
            try:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            except ProcessLookupError:
                pass
            finally:
                os.close(fd)


def run_command(box: Box, request: dict[str, Any], fds: Sequence[int], home: tree.Home | None) -> NoReturn:
    """In a fresh child: enter the sandbox and execute, or say why not and end as a shell would."""
    code = 126
    try:
        os.dup2(fds[0], 1)
        os.dup2(fds[1], 2)
        if len(fds) > 2:
            os.dup2(fds[2], 0)
        else:
            os.dup2(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), 0)
        os.setsid()
        box.join_groups()
        restore_signals()
        environment = {**box.env, **request["env"]}
        cwd = request["cwd"]
        if home is not None:
            spaces = linux.CLONE_NEWNS | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
            linux.setns(box.pidfd, spaces)
            linux.setns(home.inner, linux.CLONE_NEWUSER)
            linux.drop_capabilities()
            linux.forbid_calls()
        for name, (soft, hard) in box.rlimits.items():
            resource.setrlimit(getattr(resource, name), (soft, hard))
        if request["ids"]:
            uid, gid = request["ids"]
            os.setgroups([gid])
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
        os.chdir(cwd)
        argv = [os.fsencode(word) for word in request["argv"]]
        os.execvpe(argv[0], argv, environment)  # noqa: S606 - no shell on purpose
    except FileNotFoundError as error:
        code = 126 if error.filename == request["cwd"] else 127
        os.write(2, f"rollhook: {error.filename or request['argv'][0]!r}: {error.strerror}\n".encode())
    except OSError as error:
        os.write(2, f"rollhook: {error.filename or request['argv'][0]!r}: {error.strerror}\n".encode())
    finally:
        os._exit(code)


def restore_signals() -> None:
    """Undo what Python and the keeper have set, so that a command starts as any other."""
    for number in (
        signal.SIGPIPE,
        signal.SIGXFSZ,
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGCHLD,
    ):
        signal.signal(number, signal.SIG_DFL)


def _stat(path: str, directory: int | None = None) -> list[str]:
    """Return the fields of a stat file behind the command: state first."""
    text = _read(path, directory, 1024)
    return text[text.rindex(b")") + 2 :].decode().split()


def _read(path: str, directory: int | None = None, most: int = 1 << 20) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        parts = []
        while most > 0 and (part := os.read(fd, min(most, 1 << 16))):
            parts.append(part)
            most -= len(part)
        return b"".join(parts)
    finally:
        os.close(fd)
