"""The connection to the engine: where it is, what its errors mean, and the stream of a command."""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp

from rollhook.errors import SandboxError

if TYPE_CHECKING:
    import aiodocker

    from rollhook_docker import DockerSandboxConfig

_CONNECT_SECONDS = 10.0
#: how long the engine may stay silent within an answer
_SILENCE_SECONDS = 300.0
_BUFFER = 1 << 18
_UNREACHABLE = 900  # aiodocker's status for it
_PASSING = re.compile(
    r"toomanyrequests|too many requests|resource temporarily unavailable|cannot allocate memory"
    r"|i/o timeout|connection re(set|fused)|database is locked|device or resource busy|tls handshake timeout",
    re.IGNORECASE,
)
WAY_OUT = (
    "start Docker or `podman system service --time=0 unix:///path`, and name its socket in `host` or in "
    "DOCKER_HOST"
)


class EngineApiError(SandboxError):
    """The engine refused a request (`status` as in HTTP) or could not be reached (`status` 0)."""

    def __init__(self, message: str, *, status: int, **options: Any) -> None:
        super().__init__(message, **options)
        self.status = status

    @property
    def gone(self) -> bool:
        """Whether it says that the container is not there; Podman does not always say so by the status."""
        return self.status == 404 or "no such container" in str(self).lower()


@dataclass(frozen=True)
class Address:
    """Where the engine listens: `path` of a socket, or `host` and `port`, with TLS or without."""

    shown: str
    path: str = ""
    host: str = ""
    port: int = 0
    tls: bool = False


def address(config: DockerSandboxConfig, environ: Mapping[str, str]) -> Address:
    """Return where the engine is. Raises SandboxError(kind="user")."""
    said = config.host or environ.get("DOCKER_HOST", "")
    if not said:
        runtime = environ.get("XDG_RUNTIME_DIR", "/run/user/0")
        sockets = ["/var/run/docker.sock", f"{runtime}/podman/podman.sock", "/run/podman/podman.sock"]
        found = [path for path in sockets if Path(path).is_socket()]
        if not found:
            raise SandboxError(
                f"no container engine: there is no socket at {', '.join(sockets)}; {WAY_OUT}", kind="user"
            )
        said = found[0]
    if said.startswith("/"):
        return Address(f"unix://{said}", path=said)
    url = urlsplit(said)
    try:
        port = url.port
    except ValueError:
        port = -1
    if url.scheme == "unix" and url.path:
        return Address(said, path=url.path)
    if url.scheme in ("tcp", "http", "https") and url.hostname and port != -1 and not url.username:
        tls = url.scheme == "https" or config.tls_ca is not None or config.tls_cert is not None
        return Address(said, host=url.hostname, port=port or (2376 if tls else 2375), tls=tls)
    where = "host" if config.host else "DOCKER_HOST"
    raise SandboxError(
        f"{where}: {said!r} is no address of a container engine; write unix:///path, tcp://host:port or "
        "https://host:port (for ssh, forward the socket with `ssh -L`)",
        kind="user",
    )


def tls_context(config: DockerSandboxConfig) -> ssl.SSLContext:
    """Return what checks the engine's certificate and shows ours. Raises SandboxError(kind="user")."""
    try:
        context = ssl.create_default_context(cafile=config.tls_ca)
        if config.tls_cert is not None:
            context.load_cert_chain(config.tls_cert, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        files = [path for path in (config.tls_ca, config.tls_cert, config.tls_key) if path]
        raise SandboxError(
            f"tls_ca, tls_cert or tls_key: {', '.join(files)} cannot be used: {error}", kind="user"
        ) from error
    return context


class Engine:
    """A connected engine, made by `connect`; every error that leaves it is an EngineApiError."""

    def __init__(self, where: Address, client: aiodocker.Docker, tls: ssl.SSLContext | None) -> None:
        self.where = where
        self.client = client
        self.info: Mapping[str, Any] = {}
        self.version: Mapping[str, Any] = {}
        self._tls = tls

    @classmethod
    async def connect(cls, config: DockerSandboxConfig) -> Engine:
        """Reach the engine and ask what it is. Raises SandboxError."""
        where = address(config, os.environ)
        aiodocker = await asyncio.to_thread(_sdk)
        tls = await asyncio.to_thread(tls_context, config) if where.tls else None
        connector: aiohttp.BaseConnector
        if where.path:
            connector = aiohttp.UnixConnector(where.path, limit=0)
            url = "http://localhost"
        else:
            connector = aiohttp.TCPConnector(limit=0, ssl=tls or True)
            host = f"[{where.host}]" if ":" in where.host else where.host
            url = f"{'https' if tls else 'http'}://{host}:{where.port}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=_SILENCE_SECONDS)
        session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        engine = cls(
            where, aiodocker.Docker(url=url, session=session, connector=connector, timeout=timeout), tls
        )
        try:
            async with engine.asked("what it is"):
                engine.version = await engine.client.version()
                engine.info = await engine.client.system.info()
        except EngineApiError as error:
            await engine.aclose()
            if error.status == 0:
                raise SandboxError(f"{error}; {WAY_OUT}", kind="user") from error
            raise
        except BaseException:
            await engine.aclose()
            raise
        return engine

    @asynccontextmanager
    async def asked(self, what: str) -> AsyncIterator[None]:
        """Say what was asked of the engine, should it fail."""
        aiodocker = _sdk()
        try:
            yield
        except aiodocker.DockerError as error:
            if error.status == _UNREACHABLE:
                cause = error.__context__
                why = getattr(cause, "strerror", None) or str(cause or error.message)
                raise self._lost(what, why) from error
            raise self._refused(what, error.status, error.message) from error
        except (aiohttp.ClientError, ConnectionError, FileNotFoundError, TimeoutError) as error:
            raise self._lost(what, str(error) or type(error).__name__) from error

    def _refused(self, what: str, status: int, message: str) -> EngineApiError:
        text = f"asked for {what}, the container engine at {self.where.shown} says: {message.strip()}"
        if status in (429, 502, 503, 504) or _PASSING.search(message):
            return EngineApiError(text, status=status, kind="retryable")
        return EngineApiError(text, status=status, kind="user" if status in (400, 401, 403) else None)

    def _lost(self, what: str, why: str) -> EngineApiError:
        text = f"asked for {what}, the container engine at {self.where.shown} gives no answer: {why}"
        return EngineApiError(text, status=0, kind="retryable")

    @asynccontextmanager
    async def answer(
        self, what: str, path: str, method: str = "GET", **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and give the answer, whose body is the block's to read, or to leave."""
        url = f"{self.client.docker_host}/{self.client.api_version}/{path}"
        async with self.asked(what):
            response = await self.client.session.request(method, url, **options)
            try:
                if response.status >= 400:
                    raise self._refused(what, response.status, _message(await response.read()))
                yield response
            finally:
                response.close()

    async def make(self, what: str, path: str, log: Callable[[str], None], **options: Any) -> None:
        """Send a request that makes an image, and follow what is told of it, a line of JSON at a time."""
        patient = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
        rest = b""
        async with self.answer(what, path, "POST", timeout=patient, **options) as response:
            async for piece in response.content.iter_any():
                *lines, rest = (rest + piece).split(b"\n")
                for line in filter(None, map(bytes.strip, lines)):
                    told = json.loads(line)
                    log(str(told.get("stream") or told.get("status") or ""))
                    if said := told.get("error") or told.get("errorDetail"):
                        raise self._refused(what, 500, str(said))

    @property
    def name(self) -> str:
        """What it calls itself: "Podman Engine", for one."""
        parts = self.version.get("Components") or [{}]
        return str(parts[0].get("Name") or "Engine")

    async def processes(self, container_id: str) -> list[tuple[int, str]]:
        """Return (pid, command) of what runs in a container; Podman's pids are inside, Docker's outside.

        Podman looks by itself when it is given names of columns; with options it would run `ps` inside. It
        does not mark its answer as JSON.
        """
        columns = {"ps_args": "pid,args" if "podman" in self.name.lower() else "-eo pid,args"}
        async with self.answer("its processes", f"containers/{container_id}/top", params=columns) as response:
            rows = json.loads(await response.read())["Processes"]
        return [(int(pid), " ".join(command)) for pid, *command in rows]

    async def attach(self, exec_id: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Start a command that was made, and return its stream: frames out, bare bytes in.

        Protocol: `POST /exec/{id}/start` with an upgrade, "Attach" in the reference of the Engine API.
        """
        async with self.asked("a command"):
            reader, writer = await self._open()
            try:
                body = b'{"Detach":false,"Tty":false}'
                version = self.client.api_version
                writer.write(
                    f"POST /{version}/exec/{exec_id}/start HTTP/1.1\r\nHost: localhost\r\n"
                    "Content-Type: application/json\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
                    f"Content-Length: {len(body)}\r\n\r\n".encode()
                    + body
                )
                await writer.drain()
                await self._answered(reader, "a command")
            except asyncio.IncompleteReadError as error:
                writer.close()
                raise ConnectionError("it closed the connection") from error
            except BaseException:
                writer.close()
                raise
        return reader, writer

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with asyncio.timeout(_CONNECT_SECONDS):
            if self.where.path:
                return await asyncio.open_unix_connection(self.where.path, limit=_BUFFER)
            return await asyncio.open_connection(
                self.where.host, self.where.port, ssl=self._tls, limit=_BUFFER
            )

    async def upload(self, what: str, path: str, pieces: AsyncIterator[bytes]) -> None:
        """Send a tar with PUT.

        On a connection of its own, which is cut when the engine answers before it has read all; there is
        no other way to stop sending.
        """
        async with self.asked(what):
            reader, writer = await self._open()
            sending = asyncio.create_task(self._send(writer, path, pieces))
            try:
                await self._answered(reader, what)
            except asyncio.IncompleteReadError as error:
                raise ConnectionError("it closed the connection") from error
            finally:
                sending.cancel()
                await asyncio.wait({sending})
                if not sending.cancelled():
                    sending.exception()  # the engine's answer says more
                writer.transport.abort()

    async def _send(self, writer: asyncio.StreamWriter, path: str, pieces: AsyncIterator[bytes]) -> None:
        writer.write(
            f"PUT /{self.client.api_version}/{path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            "Content-Type: application/x-tar\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )
        async for piece in pieces:
            writer.write(b"%x\r\n" % len(piece))
            writer.write(piece)
            writer.write(b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _answered(self, reader: asyncio.StreamReader, what: str) -> None:
        """Read the head of an answer; raises what the engine says when it refuses."""
        async with asyncio.timeout(_SILENCE_SECONDS):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            status = int(head[0].split(" ")[1])
            if status < 400:
                return
            fields = [line.lower().partition(":") for line in head[1:]]
            length = "".join(value.strip() for name, _, value in fields if name == "content-length")
            said = await (reader.readexactly(int(length)) if length.isdecimal() else reader.read(1 << 16))
        raise self._refused(what, status, _message(said))

    async def aclose(self) -> None:
        """Close the connections."""
        await self.client.close()
        await self.client.session.close()
        await asyncio.sleep(0)  # transports end in the loop's next turn


def _message(body: bytes) -> str:
    """Return what an answer says that is an error."""
    with suppress(ValueError, TypeError, KeyError):
        return str(json.loads(body)["message"])
    return body.decode("utf-8", "replace")


def _sdk() -> Any:
    import aiodocker

    return aiodocker
