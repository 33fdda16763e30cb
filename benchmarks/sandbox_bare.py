"""The least that each sandbox can be had for: the Engine API called directly, the vendors' SDKs called bare.

Each class has the same five calls. They do what a program without Rollhook would: no lease, no label, no
limit on output, no kill of a tree, no safety against what the sandbox sends.
"""

from __future__ import annotations

import asyncio
import io
import json
import struct
import tarfile
from typing import Any, Protocol

import aiohttp

FILE = "/tmp/rollhook-benchmark"


class Calls(Protocol):
    """What is measured."""

    async def open(self) -> None: ...

    async def create(self) -> Any: ...

    async def exec(self, box: Any, command: str) -> bytes: ...

    async def write(self, box: Any, data: bytes) -> None: ...

    async def read(self, box: Any) -> bytes: ...

    async def close(self, box: Any) -> None: ...

    async def aclose(self) -> None: ...


class BareDocker:
    """The Engine API over aiohttp, with the same container as ours."""

    def __init__(self, host: str, container: dict[str, Any]) -> None:
        self._path = host.removeprefix("unix://")
        self._container = container

    async def open(self) -> None:
        connector = aiohttp.UnixConnector(self._path, limit=0)
        self._session = aiohttp.ClientSession("http://localhost", connector=connector)

    async def _ask(self, method: str, path: str, body: Any = None, **options: Any) -> bytes:
        if body is not None:
            options |= {"data": json.dumps(body), "headers": {"Content-Type": "application/json"}}
        async with self._session.request(method, f"/v1.41/{path}", **options) as answer:
            answer.raise_for_status()
            return await answer.read()

    async def create(self) -> str:
        made = json.loads(await self._ask("POST", "containers/create", self._container))
        await self._ask("POST", f"containers/{made['Id']}/start")
        return str(made["Id"])

    async def exec(self, box: str, command: str) -> bytes:
        wanted = {"Cmd": ["/bin/sh", "-c", command], "AttachStdout": True, "AttachStderr": True}
        number = json.loads(await self._ask("POST", f"containers/{box}/exec", wanted))["Id"]
        said = io.BytesIO(await self._ask("POST", f"exec/{number}/start", {"Detach": False, "Tty": False}))
        out = b""
        while header := said.read(8):
            stream, length = struct.unpack(">BxxxL", header)
            out += said.read(length) if stream == 1 else b""
        assert json.loads(await self._ask("GET", f"exec/{number}/json"))["ExitCode"] == 0
        return out

    async def write(self, box: str, data: bytes) -> None:
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            member = tarfile.TarInfo(FILE.lstrip("/"))
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        headers = {"Content-Type": "application/x-tar"}
        path = f"containers/{box}/archive"
        await self._ask("PUT", path, params={"path": "/"}, data=archive.getvalue(), headers=headers)

    async def read(self, box: str) -> bytes:
        got = await self._ask("GET", f"containers/{box}/archive", params={"path": FILE})
        with tarfile.open(fileobj=io.BytesIO(got)) as tar:
            member = tar.next()
            content = tar.extractfile(member) if member else None
            assert content is not None
            return content.read()

    async def close(self, box: str) -> None:
        await self._ask("DELETE", f"containers/{box}", params={"force": "1", "v": "1"})

    async def aclose(self) -> None:
        await self._session.close()


class BareDaytona:
    """Daytona's SDK."""

    def __init__(self, url: str, key: str) -> None:
        self._url, self._key = url, key

    async def open(self) -> None:
        import daytona

        self._sdk = daytona
        settings = daytona.DaytonaConfig(
            api_key=self._key, api_url=f"{self._url}/api", target="local", connection_pool_maxsize=None
        )
        self._client = daytona.AsyncDaytona(settings)

    async def create(self) -> Any:
        params = self._sdk.CreateSandboxFromImageParams(image="debian:12")
        return await self._client.create(params, timeout=120)

    async def exec(self, box: Any, command: str) -> bytes:
        answer = await box.process.exec(command, timeout=60)
        assert answer.exit_code == 0
        return str(answer.result).encode()

    async def write(self, box: Any, data: bytes) -> None:
        await box.fs.upload_file(data, FILE)

    async def read(self, box: Any) -> bytes:
        return bytes(await box.fs.download_file(FILE))

    async def close(self, box: Any) -> None:
        await box.delete()

    async def aclose(self) -> None:
        await self._client.close()


class BareE2B:
    """E2B's SDK."""

    def __init__(self, api_url: str, sandbox_url: str, key: str) -> None:
        self._options = {"api_url": api_url, "sandbox_url": sandbox_url, "api_key": key}

    async def open(self) -> None:
        import e2b

        self._class = e2b.AsyncSandbox

    async def create(self) -> Any:
        return await self._class.create(timeout=300, **self._options)

    async def exec(self, box: Any, command: str) -> bytes:
        answer = await box.commands.run(command, timeout=60, user="root")
        assert answer.exit_code == 0
        return str(answer.stdout).encode()

    async def write(self, box: Any, data: bytes) -> None:
        await box.files.write(FILE, data, user="root")

    async def read(self, box: Any) -> bytes:
        return bytes(await box.files.read(FILE, format="bytes", user="root"))

    async def close(self, box: Any) -> None:
        await box.kill()

    async def aclose(self) -> None:
        await asyncio.sleep(0)
