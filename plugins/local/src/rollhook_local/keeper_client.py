"""This process's side of the keeper: requests, answers and events."""

from __future__ import annotations

import array
import asyncio
import itertools
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rollhook.errors import SandboxDead, SandboxError
from rollhook_local.command import Command

_BOOTSTRAP = (
    "import sys, types; package = types.ModuleType('rollhook_local'); "
    "package.__path__ = [sys.argv[1]]; "
    "sys.modules['rollhook_local'] = package; "
    "from rollhook_local.keeper.main import main; main()"
)
_MESSAGE = 1 << 18
_INLINE = 60_000
_START_SECONDS = 30.0

logger = logging.getLogger(__name__)


class Keeper:
    """A running keeper, made by `start`; methods raise SandboxDead when it or the sandbox is gone."""

    def __init__(self, sock: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self.many_ids = False
        self.pid = process.pid
        self._sock = sock
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[tuple[dict[str, Any], list[int]]]] = {}
        self._commands: dict[int, Command] = {}
        self._queue: list[tuple[bytes, list[int]]] = []
        self._on_gone: Callable[[str], None] = lambda name: None
        self.closed = False

    @classmethod
    async def start(cls, setup: Mapping[str, Any], on_gone: Callable[[str], None]) -> Keeper:
        """Start the program and wait until it lives in its namespaces; SandboxError says why it could not."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        process = await asyncio.to_thread(_launch, theirs)
        theirs.close()
        ours.setblocking(False)
        keeper = cls(ours, process)
        keeper._on_gone = on_gone
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(ours, json.dumps(setup).encode())
            async with asyncio.timeout(_START_SECONDS):
                said = json.loads(await loop.sock_recv(ours, _MESSAGE) or b'{"error": "it ended at once"}')
        except (OSError, TimeoutError) as error:
            said = {"error": f"it does not answer: {error}"}
        if "error" in said:
            ours.close()
            await asyncio.to_thread(_end, process)
            raise SandboxError(str(said["error"]), kind="user")
        keeper.many_ids = said["many_ids"]
        loop.add_reader(ours, keeper._readable)
        return keeper

    # requests

    async def ask(
        self, op: str, *, fds: Sequence[int] = (), blob: bytes = b"", **request: Any
    ) -> tuple[dict[str, Any], list[int]]:
        """Send a request and return the answer with its descriptors, which are the caller's to close.

        Raises OSError with the keeper's errno, SandboxDead.
        """
        number = next(self._numbers)
        future: asyncio.Future[tuple[dict[str, Any], list[int]]] = self._loop.create_future()
        self._answers[number] = future
        self._send({"op": op, "r": number, **request}, fds, blob)
        try:
            answer, received = await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                for fd in future.result()[1]:
                    os.close(fd)
            raise
        finally:
            self._answers.pop(number, None)
        if answer.get("dead"):
            raise SandboxDead(f"sandbox {request.get('s', '')} is gone")
        if "errno" in answer:
            raise OSError(answer["errno"], answer["error"])
        return answer, received

    def command(self, request: Mapping[str, Any], *, stdin: bool) -> Command:
        """Send a command and return its handle at once."""
        number = next(self._numbers)
        out_read, out_write = os.pipe2(os.O_CLOEXEC)
        err_read, err_write = os.pipe2(os.O_CLOEXEC)
        theirs, in_write = [out_write, err_write], -1
        if stdin:
            in_read, in_write = os.pipe2(os.O_CLOEXEC)
            theirs.append(in_read)
        command = Command(partial(self.signal, number), out_read, err_read, in_write)
        self._commands[number] = command
        try:
            self._send({"op": "start", "x": number, **request}, theirs, b"")
        except BaseException:
            del self._commands[number]
            command.drop()
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        return command

    def signal(self, number: int) -> None:
        """Kill a command's own process."""
        with suppress(SandboxDead):
            self._send({"op": "signal", "x": number}, (), b"")

    def _send(self, request: Mapping[str, Any], fds: Sequence[int], blob: bytes) -> None:
        if self.closed:
            raise SandboxDead("the keeper of the local sandboxes is gone")
        data = json.dumps(request).encode() + b"\n" + blob
        owned = [os.dup(fd) for fd in fds]
        if len(data) > _INLINE:
            big = os.memfd_create("request", os.MFD_CLOEXEC)
            view = memoryview(data)
            while view:
                view = view[os.write(big, view) :]
            data, owned = b"@", [big, *owned]
        self._queue.append((data, owned))
        if len(self._queue) == 1:
            self._flush()

    def _flush(self) -> None:
        while self._queue:
            data, fds = self._queue[0]
            try:
                socket.send_fds(self._sock, [data], fds)
            except BlockingIOError:
                self._loop.add_writer(self._sock, self._flush)
                return
            except OSError as error:
                self._lost(error)
                return
            del self._queue[0]
            for fd in fds:
                os.close(fd)
        self._loop.remove_writer(self._sock)

    # answers

    def _readable(self) -> None:
        while not self.closed:
            try:
                data, fds = _receive(self._sock)
            except BlockingIOError:
                return
            except OSError as error:
                self._lost(error)
                return
            if not data:
                self._lost(None)
                return
            message = json.loads(data)
            if "x" in message:
                command = self._commands.pop(message["x"], None)
                if command is not None:
                    command.ended(message["code"], message["dead"])
            elif "gone" in message:
                self._on_gone(message["gone"])
            else:
                future = self._answers.get(message["r"])
                if future is not None and not future.done():
                    future.set_result((message, fds))
                    fds = []
            for fd in fds:
                os.close(fd)

    def _lost(self, error: OSError | None) -> None:
        """The keeper is gone, and every sandbox with it."""
        if self.closed:
            return
        logger.error("the keeper of the local sandboxes ended, and its sandboxes with it: %s", error)
        self._shut()

    def _shut(self) -> None:
        self.closed = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        for _, fds in self._queue:
            for fd in fds:
                os.close(fd)
        self._queue.clear()
        for future in self._answers.values():
            if not future.done():
                future.set_exception(SandboxDead("the keeper of the local sandboxes is gone"))
        for command in self._commands.values():
            command.ended(-1, True)
        self._commands.clear()

    async def aclose(self, *, keep: bool) -> None:
        """Leave the keeper: with `keep` it lives on until its sandboxes are gone, else it ends with them."""
        if not self.closed:
            if keep:
                self._send({"op": "bye"}, (), b"")
                while self._queue and not self.closed:  # noqa: ASYNC110 - a full socket, rare and short
                    await asyncio.sleep(0.001)
            self._shut()
        if not keep:
            await asyncio.to_thread(_end, self._process)
        else:
            self._process.returncode = 0  # it ends by itself, later: no warning about it


def _receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    data, ancillary, _, _ = sock.recvmsg(_MESSAGE, socket.CMSG_SPACE(16), socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for _, kind, content in ancillary:
        if kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds)


def _launch(theirs: socket.socket) -> subprocess.Popen[bytes]:
    """Start the program with nothing of this process's environment; its socket is descriptor 3."""
    here = str(Path(__file__).resolve().parent)
    script = 'exec 3<&0 </dev/null; exec "$@"'  # by way of 0: dash knows descriptors of one digit only
    interpreter = [sys.executable, "-E", "-s", "-S", "-B", "-X", "utf8", "-c", _BOOTSTRAP, here]
    return subprocess.Popen(
        ["/bin/sh", "-c", script, "sh", *interpreter],
        stdin=theirs.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=None,
        env={"PATH": os.environ.get("PATH", os.defpath)},
        start_new_session=True,
        cwd="/",
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
