"""A shell in a pod on this terminal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Sequence

from rollhook_kuberay.client import Kubernetes
from rollhook_kuberay.port import KubeError, Port

_STDIN, _STDOUT, _STDERR, _ERROR, _RESIZE = range(5)


async def shell(port: Port, pod: str, argv: Sequence[str]) -> int:
    """Run a command on a terminal of its own in a pod, joined to this one; return its exit code."""
    assert isinstance(port, Kubernetes)
    loop, given = asyncio.get_running_loop(), asyncio.Queue[bytes]()
    fd, before = sys.stdin.fileno(), termios.tcgetattr(sys.stdin.fileno())

    def resized() -> None:
        size = shutil.get_terminal_size()
        text = json.dumps({"Width": size.columns, "Height": size.lines})
        given.put_nowait(bytes([_RESIZE]) + text.encode())

    def typed() -> None:
        if data := os.read(fd, 65536):
            given.put_nowait(bytes([_STDIN]) + data)

    async with port.terminal(pod, argv) as socket:

        async def send() -> None:
            while True:
                await socket.send_bytes(await given.get())

        sending = asyncio.create_task(send())
        resized()
        loop.add_signal_handler(signal.SIGWINCH, resized)
        loop.add_reader(fd, typed)
        tty.setraw(fd)
        try:
            while True:
                message = await socket.receive_bytes()
                if message[0] in (_STDOUT, _STDERR):
                    sys.stdout.buffer.write(message[1:])
                    sys.stdout.buffer.flush()
                elif message[0] == _ERROR and len(message) > 1:
                    return Kubernetes.exit_code(json.loads(message[1:]), f"run a shell in {pod}")
        except Exception as error:
            raise KubeError(
                f"the connection to {pod} ended ({error}); connect again", kind="retryable"
            ) from error
        finally:
            termios.tcsetattr(fd, termios.TCSADRAIN, before)
            loop.remove_reader(fd)
            loop.remove_signal_handler(signal.SIGWINCH)
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await sending
