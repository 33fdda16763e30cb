"""The ten verbs over kr8s: it brings every way to log in, and HTTP and WebSockets that are logged in.

Exec and port-forward are spoken here (channel protocols v5 and v4 of Kubernetes), as kr8s keeps neither the
reason for which a forward failed nor input in protocol v4. kr8s is imported when a client is opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollhook.errors import Kind
from rollhook_kuberay.config import KubeRayLauncherConfig
from rollhook_kuberay.marks import HASH
from rollhook_kuberay.port import KINDS, Executed, KubeError, Object

if TYPE_CHECKING:
    from kr8s.asyncio import Api

logger = logging.getLogger(__name__)
ATTEMPTS = 3
#: what a command is given to end by itself when nobody waits for it any more
_CANCEL_SECONDS = 5.0
_MESSAGE_BYTES = 16 * 1024 * 1024
_STDOUT, _STDERR, _ERROR = 1, 2, 3


class Connection:
    """A login that is kept, and network connections that end with the last one who uses them."""

    def __init__(self, keys: KubeRayLauncherConfig) -> None:
        self._keys = keys
        self._opened: dict[int, Kubernetes] = {}
        self._logging_in: dict[int, asyncio.Lock] = {}
        self._users = 0

    @contextlib.asynccontextmanager
    async def use(self, namespace: str = "") -> AsyncIterator[Kubernetes]:
        """Give the client, logged in once per event loop. Raises KubeError where there is no way to."""
        loop = id(asyncio.get_running_loop())
        async with self._logging_in.setdefault(loop, asyncio.Lock()):
            if loop not in self._opened:
                self._opened[loop] = await Kubernetes.open(self._keys)
        client = self._opened[loop]
        self._users += 1
        try:
            yield client.within(namespace) if namespace else client
        finally:
            self._users -= 1
            if not self._users:
                await client.aclose()


class Kubernetes:
    """A namespace of the cluster that a kubeconfig, or the pod's own account, leads to."""

    def __init__(self, api: Api, namespace: str, seconds: float, opening: asyncio.Lock | None = None) -> None:
        self._api = api
        self._opening = opening or asyncio.Lock()
        self._namespace = namespace
        self._seconds = seconds

    @property
    def namespace(self) -> str:
        """The namespace in which everything happens."""
        return self._namespace

    @classmethod
    async def open(cls, keys: KubeRayLauncherConfig) -> Kubernetes:
        """Log in. Raises KubeError where there is no way to, or the server does not answer."""
        seconds, api = keys.request_seconds, None
        try:
            kr8s = await asyncio.to_thread(_kr8s)
            api = kr8s.Api(kubeconfig=keys.kubeconfig, context=keys.context, bypass_factory=True)
            async with asyncio.timeout(seconds):
                await api
        except Exception as error:
            if api is not None and api._session is not None:  # its own factory would have lost it
                await api._session.aclose()
            raise _failed("log in to Kubernetes", error) from error
        api.timeout = seconds
        return cls(api, keys.namespace or _own_namespace() or api.auth.namespace, seconds)

    def within(self, namespace: str) -> Kubernetes:
        """Return the same login in another namespace."""
        return Kubernetes(self._api, namespace, self._seconds, self._opening)

    async def aclose(self) -> None:
        """End the network connections; the next request makes new ones."""
        async with self._opening:
            if self._api._session is not None:
                await self._api._session.aclose()

    async def _connect(self) -> None:
        """Make kr8s' session, which it would make several times for several requests at once."""
        async with self._opening:
            if self._api._session is None or self._api._session.is_closed:
                await self._api._create_session()

    async def get(self, kind: str, name: str) -> Object | None:
        """Return an object; of a Secret its metadata alone."""
        try:
            return await self._json("GET", kind, name)
        except KubeError as error:
            if error.status == 404:
                return None
            raise

    async def list(self, kind: str, labels: Mapping[str, str] = {}) -> list[Object]:
        """Return the objects with these labels; of Secrets their metadata alone."""
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        params = {"labelSelector": selector} if selector else {}
        items: list[Object] = []
        while True:
            page = await self._json("GET", kind, params=params)
            items += page.get("items") or []
            more = (page.get("metadata") or {}).get("continue")
            if not more:
                return items
            params["continue"] = more

    async def create(self, manifest: Object) -> Object:
        """Create an object; one with our hash that is there already is ours from a lost reply."""
        kind, metadata = manifest["kind"], manifest.get("metadata") or {}
        try:
            return await self._json("POST", kind, body=manifest)
        except KubeError as error:
            mark = (metadata.get("annotations") or {}).get(HASH)
            if error.status != 409 or mark is None:
                raise
            there = await self.get(kind, metadata["name"])
            notes = (there or {}).get("metadata", {}).get("annotations") or {}
            if there is None or notes.get(HASH) != mark or not error.retried:
                raise
            return there

    async def apply(self, manifest: Object) -> Object:
        """Create an object or change it to what is said (server-side apply)."""
        params = {"fieldManager": "rollhook", "force": "true"}
        headers = {"content-type": "application/apply-patch+yaml"}  # JSON is YAML
        name = manifest["metadata"]["name"]
        return await self._json(
            "PATCH", manifest["kind"], name, body=manifest, params=params, headers=headers
        )

    async def patch(self, kind: str, name: str, patch: Object) -> Object:
        """Change an object by a JSON merge patch."""
        headers = {"content-type": "application/merge-patch+json"}
        return await self._json("PATCH", kind, name, body=patch, headers=headers)

    async def delete(self, kind: str, name: str) -> bool:
        """Delete an object, its dependants in the background; False if there was none."""
        try:
            await self._json("DELETE", kind, name, body={"propagationPolicy": "Background"})
        except KubeError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def watch(self, kind: str, name: str, version: str) -> AsyncIterator[tuple[str, Object]]:
        """Give (event, object) from a resource version on, until the server ends it."""
        import httpx

        api_version, plural = KINDS[kind]
        params = {"watch": "true", "fieldSelector": f"metadata.name={name}", "resourceVersion": version}
        what = f"watch {kind} {name}"
        try:
            await self._connect()
            async with self._api.call_api(
                "GET", version=api_version, namespace=self._namespace, url=plural, params=params,
                stream=True, timeout=httpx.Timeout(self._seconds, read=None),
            ) as response:  # fmt: skip
                async for line in response.aiter_lines():
                    if line.strip():
                        event = json.loads(line)
                        if event["type"] == "ERROR":
                            said = event["object"]
                            raise KubeError(
                                f"cannot {what}: {said.get('message')}", status=said.get("code", 0)
                            )
                        yield event["type"], event["object"]
        except KubeError:
            raise
        except Exception as error:
            raise _failed(what, error) from error

    async def logs(
        self, pod: str, *, follow: bool = False, container: str | None = None
    ) -> AsyncIterator[bytes]:
        """Give a container's output from its beginning."""
        import httpx

        params = {"follow": "true"} if follow else {}
        params |= {"container": container} if container else {}
        try:
            await self._connect()
            async with self._api.call_api(
                "GET", version="v1", namespace=self._namespace, url=f"pods/{pod}/log", params=params,
                stream=True, timeout=httpx.Timeout(self._seconds, read=None if follow else self._seconds),
            ) as response:  # fmt: skip
                async for chunk in response.aiter_bytes():
                    yield chunk
        except Exception as error:
            raise _failed(f"read the log of pod {pod}", error) from error

    async def exec(
        self, pod: str, argv: Sequence[str], *, stdin: bytes = b"", container: str | None = None
    ) -> Executed:
        """Run a command in a container; stdin is not closed after what is given."""
        running = asyncio.create_task(self._exec(pod, argv, stdin, container))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:  # a WebSocket that is cancelled as it opens is never closed
            await asyncio.wait({running}, timeout=_CANCEL_SECONDS)
            running.cancel()
            raise

    async def _exec(self, pod: str, argv: Sequence[str], stdin: bytes, container: str | None) -> Executed:
        import httpx_ws

        params: list[tuple[str, str]] = [("command", word) for word in argv]
        params += [("stdout", "true"), ("stderr", "true"), ("stdin", "true" if stdin else "false")]
        params += [("container", container)] if container else []
        output = {_STDOUT: bytearray(), _STDERR: bytearray(), _ERROR: bytearray()}
        what = f"run a command in pod {pod}"
        try:
            async with self._socket(
                f"pods/{pod}/exec", params, ["v5.channel.k8s.io", "v4.channel.k8s.io"]
            ) as ws:
                for start in range(0, len(stdin), 32768):
                    await ws.send_bytes(b"\0" + stdin[start : start + 32768])
                with contextlib.suppress(httpx_ws.WebSocketDisconnect):
                    while not output[_ERROR]:
                        message = await ws.receive_bytes()
                        if message and message[0] in output:
                            output[message[0]] += message[1:]
        except Exception as error:
            raise _failed(what, error) from error
        if not output[_ERROR]:
            raise KubeError(f"cannot {what}: the connection ended before the command did", kind="retryable")
        code = self.exit_code(json.loads(bytes(output[_ERROR])), what)
        return Executed(code, bytes(output[_STDOUT]), bytes(output[_STDERR]))

    @staticmethod
    def exit_code(status: Mapping[str, Any], what: str) -> int:
        """Return the exit code that a command's last message says. Raises KubeError for another failure."""
        if status.get("status") == "Success":
            return 0
        for cause in (status.get("details") or {}).get("causes") or []:
            if cause.get("reason") == "ExitCode":
                return int(cause["message"])
        raise KubeError(f"cannot {what}: {status.get('message') or status}")

    def terminal(self, pod: str, argv: Sequence[str]) -> Any:
        """Give the WebSocket of a command that has a terminal."""
        params: list[tuple[str, str]] = [("command", word) for word in argv]
        params += [(name, "true") for name in ("stdin", "stdout", "tty")]
        return self._socket(f"pods/{pod}/exec", params, ["v5.channel.k8s.io", "v4.channel.k8s.io"])

    @contextlib.asynccontextmanager
    async def forward(
        self, pod: Callable[[], Awaitable[str]], port: int, *, local_port: int = 0
    ) -> AsyncIterator[str]:
        """Give `127.0.0.1:PORT`, which leads to a port of a pod; `pod` is asked for each connection."""
        running: set[asyncio.Task[None]] = set()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            running.add(task)
            try:
                await self._carry(await pod(), port, reader, writer)
            except asyncio.CancelledError:
                pass  # by us, at the end of the forward: asyncio would print it
            except Exception as error:  # noqa: BLE001 - the client sees its connection end
                logger.info("port-forward to port %d: %s", port, _failed("forward", error))
            finally:
                running.discard(task)
                writer.close()

        try:
            server = await asyncio.start_server(connected, "127.0.0.1", local_port)
        except OSError as error:
            raise KubeError(
                f"the local port {local_port} cannot be used: {error.strerror}", kind="user"
            ) from error
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _carry(
        self, pod: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Carry one connection: data on channel 0, errors on 1, each begun by a message with the port."""
        import httpx_ws

        path, params = f"pods/{pod}/portforward", [("ports", str(port))]
        async with self._socket(path, params, ["v4.channel.k8s.io"]) as ws:

            async def up() -> None:
                while data := await reader.read(65536):
                    await ws.send_bytes(b"\0" + data)

            async def down() -> None:
                begun: set[int] = set()
                with contextlib.suppress(httpx_ws.WebSocketDisconnect):
                    while message := await ws.receive_bytes():
                        channel, data = message[0], message[1:]
                        if channel not in begun:
                            begun.add(channel)
                        elif channel == 1 and data:
                            raise KubeError(
                                f"pod {pod} refuses port {port}: {data.decode('utf-8', 'replace')}"
                            )
                        elif channel == 0:
                            writer.write(data)
                            await writer.drain()

            tasks = [asyncio.ensure_future(up()), asyncio.ensure_future(down())]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    with contextlib.suppress(ConnectionError):
                        task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def _socket(self, path: str, params: Any, protocols: Sequence[str]) -> AsyncIterator[Any]:
        await self._connect()
        async with self._api.open_websocket(
            version="v1", namespace=self._namespace, url=path, params=params, subprotocols=list(protocols),
            max_message_size_bytes=_MESSAGE_BYTES, queue_size=64,
        ) as socket:  # fmt: skip
            yield socket

    async def _json(
        self,
        method: str,
        kind: str,
        name: str = "",
        *,
        body: Object | None = None,
        params: Mapping[str, str] = {},
        headers: Mapping[str, str] = {},
    ) -> Object:
        """Ask, and ask again where that is safe and may help."""
        version, plural = KINDS[kind]
        url = f"{plural}/{name}" if name else plural
        named = name or ((body or {}).get("metadata") or {}).get("name", "")
        what = f"{_VERBS[method]} {kind} {named}".strip()
        asked: dict[str, Any] = {"params": dict(params), "headers": dict(headers)}
        if kind == "Secret" and method == "GET":  # its values are none of our business
            of = "PartialObjectMetadata" if name else "PartialObjectMetadataList"
            asked["headers"]["Accept"] = f"application/json;as={of};g=meta.k8s.io;v=v1"
        if body is not None:
            asked["content"] = json.dumps(body)
        namespace = None if kind == "SelfSubjectAccessReview" else self._namespace
        for attempt in range(ATTEMPTS):
            try:
                await self._connect()
                async with self._api.call_api(
                    method, version=version, namespace=namespace, url=url, timeout=self._seconds, **asked
                ) as response:
                    return _shown(response.json())
            except Exception as error:
                failed = _failed(what, error)
                failed.retried = attempt > 0
                if failed.kind != "retryable" or attempt == ATTEMPTS - 1:
                    raise failed from error
            await asyncio.sleep(0.5 * 2**attempt)
        raise AssertionError


def _shown(found: Object) -> Object:
    """Drop values of Secrets, which an answer to a change has, and one of an old server."""
    for each in (found, *(found.get("items") or [])):
        if each.get("kind") == "Secret" or found.get("kind") == "SecretList":
            each.pop("data", None)
    return found


_VERBS = {"GET": "read", "POST": "create", "PATCH": "change", "DELETE": "delete"}


def _failed(what: str, error: BaseException) -> KubeError:
    """Return an error of kr8s, httpx or the login as a sentence with the way out."""
    if isinstance(error, KubeError):
        return error
    if isinstance(error, BaseExceptionGroup):
        return _failed(what, error.exceptions[0])
    response = getattr(error, "response", None)
    status = int(getattr(response, "status_code", 0) or 0)
    reason = _reason(error, response)
    kind: Kind = "user"
    if status == 401:
        text = f"the cluster does not know you: log in again, your login may have expired ({reason})"
    elif status == 403:
        text = f"you may not; ask for the role `edit` in the namespace ({reason})"
    elif status in {429, 500, 502, 503, 504}:
        kind, text = "retryable", f"the API server cannot now ({status}: {reason}); try again soon"
    elif status:
        text = reason
    else:
        kind, text = _unanswered(error, reason)
    return KubeError(f"cannot {what}: {text}", status=status, kind=kind)


def _unanswered(error: BaseException, reason: str) -> tuple[Kind, str]:
    """Say why there was no answer, and whether another try may help."""
    names = " ".join(each.__name__ for each in type(error).__mro__)
    if isinstance(error, OSError) or any(part in names for part in ("Timeout", "Connect", "Network")):
        text = f"the API server does not answer ({reason}); is its address right, and the VPN up?"
        return "retryable", text
    if any(part in names for part in ("Protocol", "ReadError", "WriteError", "WebSocket")):
        return "retryable", f"the connection to the API server broke ({reason})"
    if isinstance(error, ValueError | LookupError):
        return (
            "user",
            f"there is no way to log in ({reason}); set KUBECONFIG, or launcher.kubeconfig and context",
        )
    return "infrastructure", f"{type(error).__name__}: {reason}"


def _reason(error: BaseException, response: Any) -> str:
    with contextlib.suppress(Exception):  # not every error answer is a Status, or read
        said = response.json()["message"]
        return " ".join(str(said).split())[:500]
    return " ".join(str(error).split())[:500] or type(error).__name__


def _own_namespace() -> str | None:
    from pathlib import Path

    try:
        return Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace").read_text().strip() or None
    except OSError:
        return None


def _kr8s() -> Any:
    import kr8s.asyncio

    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every request otherwise
    return kr8s.asyncio
