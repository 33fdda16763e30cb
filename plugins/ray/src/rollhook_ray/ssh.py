"""Hosts of a cluster: this machine, or one that the ssh program reaches, with its configuration as it is.

Each request is one program run on the host: its Python gets the text of the `clusters_*` modules and the
request on standard input, so that nothing has to be installed there and nothing secret is in an argument.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import socket
import sys
from collections.abc import AsyncIterator, Callable
from importlib import resources
from typing import Any

from rollhook.errors import LauncherError
from rollhook_ray.cluster_keys import Ssh
from rollhook_ray.clusters_node import MARK

MODULES = ("clusters_node", "clusters_old", "clusters_host")
#: loads the modules from standard input, and answers the request
_BOOT = """\
import json, sys, types
sent = json.loads(sys.stdin.buffer.read())
for name, text in [("rollhook_ray", "")] + sent["modules"]:
    module = sys.modules[name] = types.ModuleType(name)
    module.SOURCE = ""
    exec(compile(text, name + ".py", "exec"), module.__dict__)
    module.SOURCE = text
    setattr(sys.modules["rollhook_ray"], name.rpartition(".")[2], module)
module.main(sent["request"])
"""
_MAX_LINE = 1 << 24
#: what ssh says, and the way out
_REFUSALS = {
    "Host key verification failed": "its host key is unknown or has changed; connect once by hand",
    "Permission denied": "no key that ssh offers is accepted there; see launcher.cluster.ssh.options",
    "Could not resolve hostname": "its name cannot be resolved; see launcher.cluster.hosts",
    "Connection refused": "nothing answers at ssh's port there",
    "timed out": "it does not answer; see launcher.cluster.ssh.connect_seconds",
    "No route to host": "there is no route to it",
    "UNPROTECTED PRIVATE KEY": "the key's file can be read by others: chmod 600",
    "Can't open user config file": "see launcher.cluster.ssh.config",
}


class HostError(LauncherError):
    """A host did not do what was asked; the text does not name the host."""


class Machine:
    """This machine."""

    def __init__(self, name: str, python: str) -> None:
        self.name = name
        self.python = python

    def argv(self, command: list[str]) -> list[str]:
        """Return what runs a command on the host."""
        return command

    async def call(
        self, request: dict[str, Any], *, seconds: float, say: Callable[[str], None] | None = None
    ) -> Any:
        """Let the host answer a request. Raises HostError with a sentence, also after `seconds`."""
        package = resources.files("rollhook_ray")
        texts = [[f"rollhook_ray.{each}", (package / f"{each}.py").read_text("utf-8")] for each in MODULES]
        sent = json.dumps({"modules": texts, "request": request}).encode()
        argv = self.argv([self.python, "-c", _BOOT])
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=_MAX_LINE,
            )
        except OSError as error:
            raise HostError(f"{argv[0]} cannot be run: {error.strerror}", kind="user") from error
        try:
            async with asyncio.timeout(seconds):
                answer = await _converse(process, sent, say)
        except TimeoutError:
            raise HostError(f"it did not answer `{request['do']}` within {seconds:.0f} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return self._result(answer, process.returncode)

    def _result(self, answer: dict[str, Any], code: int | None) -> Any:
        if "error" in answer:
            raise HostError(answer["error"])
        if "result" in answer:
            return answer["result"]
        said = answer["stderr"].strip()
        raise HostError(self._failure(said, code))

    def _failure(self, said: str, code: int | None) -> str:
        return f"{self.python} ended with code {code}: {said[-300:] or 'it said nothing'}"

    @contextlib.asynccontextmanager
    async def forward(self, address: str, port: int, local: int) -> AsyncIterator[str]:
        """Give `host:port` of this machine that leads to an address of the host while the block runs."""
        yield f"{address}:{port}"


class SshMachine(Machine):
    """A machine behind ssh. It asks for nothing: who is refused is told, not prompted."""

    def __init__(self, name: str, python: str, keys: Ssh) -> None:
        super().__init__(name, python)
        self._options = ["-T", "-oBatchMode=yes", f"-oConnectTimeout={keys.connect_seconds}"]
        self._options += ["-oServerAliveInterval=10", "-oServerAliveCountMax=3"]
        self._options += [f"-o{option}" for option in keys.options]
        if keys.config is not None:
            self._options[:0] = ["-F", os.path.expanduser(keys.config)]

    def argv(self, command: list[str]) -> list[str]:
        """Return what runs a command on the host: there a shell reads it."""
        return ["ssh", *self._options, self.name, shlex.join(command)]

    def _failure(self, said: str, code: int | None) -> str:
        last = said.splitlines()[-1][-300:] if said else "it said nothing"
        if code == 255:
            way = next((way for words, way in _REFUSALS.items() if words in said), "")
            return f"ssh cannot reach it ({last})" + (f": {way}" if way else "")
        if code in (126, 127):
            return f"{self.python} cannot be run there ({last}); set launcher.cluster.python"
        return super()._failure(said, code)

    @contextlib.asynccontextmanager
    async def forward(self, address: str, port: int, local: int) -> AsyncIterator[str]:
        """Forward a port of this machine's loopback address by ssh."""
        local = local or _free_port()
        options = [
            *self._options,
            "-oExitOnForwardFailure=yes",
            "-N",
            "-L",
            f"127.0.0.1:{local}:{address}:{port}",
        ]
        process = await asyncio.create_subprocess_exec(
            "ssh", *options, self.name, stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
        try:
            while not await _connects(local):
                if process.returncode is not None:
                    assert process.stderr is not None
                    said = (await process.stderr.read()).decode("utf-8", "replace")
                    raise HostError(f"port {local} cannot be forwarded: {self._failure(said.strip(), 255)}")
                await asyncio.sleep(0.05)
            yield f"127.0.0.1:{local}"
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


def local_python(configured: str | None) -> str:
    """Return the Python of nodes on this machine."""
    return configured or sys.executable


async def _converse(
    process: asyncio.subprocess.Process, sent: bytes, say: Callable[[str], None] | None
) -> dict[str, Any]:
    """Send a request and return its last answer, with what went to stderr."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    stderr = asyncio.ensure_future(process.stderr.read())
    answer: dict[str, Any] = {}
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # what it says then is on stderr
            process.stdin.write(sent)
            await process.stdin.drain()
            process.stdin.close()
        async for line in process.stdout:
            text = line.decode("utf-8", "replace")
            if not text.startswith(MARK):
                continue  # a banner, or a shell's own start
            said = json.loads(text[len(MARK) :])
            if "say" in said and say is not None:
                say(said["say"])
            answer |= said
        answer["stderr"] = (await stderr).decode("utf-8", "replace")
    finally:
        stderr.cancel()
    await process.wait()
    return answer


async def _connects(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
