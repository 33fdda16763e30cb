"""The ten verbs against the double: faults, pages, exec and port-forward as they come over the wire."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kuberay_site import MakeLauncher

from rollhook_kuberay.client import Kubernetes
from rollhook_kuberay.marks import with_hash
from rollhook_kuberay.port import KubeError, Object, wait_for


def config_map(name: str, **data: str) -> Object:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def a_pod(name: str = "one") -> Object:
    container = {"name": "main", "image": "x", "command": ["sleep", "1000"]}
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": "x"}},
        "spec": {"containers": [container]},
    }  # fmt: skip


@pytest.fixture
async def port(make: MakeLauncher) -> AsyncIterator[Kubernetes]:
    async with make(request_seconds=3)._site.port() as opened:
        assert isinstance(opened, Kubernetes)
        yield opened


async def running_pod(port: Kubernetes, name: str = "one") -> str:
    await port.create(a_pod(name))

    def runs(each: Object | None) -> bool:
        return each is not None and (each.get("status") or {}).get("phase") == "Running"

    await wait_for(port, "Pod", name, runs, seconds=20, poll_seconds=0.1)
    return name


async def test_objects_are_made_read_changed_and_deleted(port: Kubernetes, namespace: str) -> None:
    assert port.namespace == namespace
    assert await port.get("ConfigMap", "a") is None
    made = await port.create(config_map("a", x="1"))
    assert made["metadata"]["uid"]
    assert (await port.patch("ConfigMap", "a", {"data": {"y": "2"}}))["data"] == {"x": "1", "y": "2"}
    assert (await port.apply(config_map("b", x="1")))["data"] == {"x": "1"}
    assert (await port.apply(config_map("b", x="2")))["data"] == {"x": "2"}
    assert {each["metadata"]["name"] for each in await port.list("ConfigMap")} >= {"a", "b"}
    assert await port.delete("ConfigMap", "a") is True
    assert await port.delete("ConfigMap", "a") is False


async def test_values_of_secrets_are_not_read(port: Kubernetes) -> None:
    secret: Object = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "s"},
        "data": {"k": "c2VjcmV0"},
    }
    await port.create(secret)
    assert "data" not in (await port.get("Secret", "s") or {"data": 1})
    assert all("data" not in each for each in await port.list("Secret"))


async def test_long_lists_come_in_pages(double: Any, port: Kubernetes) -> None:
    for number in range(5):
        await port.create(
            {**config_map(f"m{number}"), "metadata": {"name": f"m{number}", "labels": {"a": "b"}}}
        )
    double.options(page=2)
    assert len(await port.list("ConfigMap", {"a": "b"})) == 5


@pytest.mark.parametrize("status", [500, 502, 503, 504, 429])
async def test_what_may_pass_is_tried_again(double: Any, port: Kubernetes, status: int) -> None:
    double.fault(path="/configmaps", times=2, status=status, body={"kind": "Status", "message": "later"})
    assert isinstance(await port.list("ConfigMap"), list)
    double.fault(path="/configmaps", times=3, status=status, body={"kind": "Status", "message": "later"})
    with pytest.raises(KubeError, match=rf"cannot now \({status}: .*; try again soon"):
        await port.list("ConfigMap")


async def test_a_reply_that_was_lost_makes_nothing_twice(double: Any, port: Kubernetes) -> None:
    double.fault(method="POST", path="/configmaps", drop="after")
    made = await port.create(with_hash(config_map("a", x="1")))
    assert made["data"] == {"x": "1"}
    with pytest.raises(KubeError) as caught:
        await port.create(with_hash(config_map("a", x="1")))
    assert caught.value.status == 409


async def test_who_may_not_is_told_whom_to_ask(double: Any, port: Kubernetes) -> None:
    double.options(deny=[{"verb": "list", "resource": "configmaps"}])
    with pytest.raises(KubeError, match=r"you may not; ask for the role `edit`") as caught:
        await port.list("ConfigMap")
    assert caught.value.status == 403


async def test_who_is_not_known_is_told_to_log_in(double: Any, make: MakeLauncher) -> None:
    double.options(accept_key=False)
    with pytest.raises(KubeError, match=r"log in again"):
        async with make()._site.port() as opened:
            await opened.list("ConfigMap")


async def test_a_server_that_is_slow_is_given_up_in_time(double: Any, port: Kubernetes) -> None:
    double.fault(path="/configmaps", times=None, delay_before=30)
    begun = time.monotonic()
    with pytest.raises(KubeError, match="does not answer"):
        await asyncio.wait_for(port.get("ConfigMap", "a"), 30)
    assert time.monotonic() - begun < 20


async def test_several_who_begin_at_once_share_one_login(double: Any, make: MakeLauncher) -> None:
    launcher, before = make(), len(double.requests("GET", "/version"))

    async def ask() -> None:
        async with launcher._site.port() as opened:
            await opened.list("ConfigMap")

    await asyncio.gather(*(ask() for _ in range(5)))
    assert len(double.requests("GET", "/version")) == before + 1


async def test_a_kubeconfig_that_is_not_there_is_a_sentence(make: MakeLauncher) -> None:
    with pytest.raises(KubeError, match=r"no way to log in .*launcher\.kubeconfig"):
        async with make(kubeconfig="/nowhere/config")._site.port():
            pass


async def test_waiting_survives_ended_old_and_broken_watches(double: Any, port: Kubernetes) -> None:
    await port.create(config_map("a", x="1"))

    async def change() -> None:
        await asyncio.sleep(0.5)
        double.compact()
        double.fault(
            method="GET", path="watch=true", times=2, status=500, body={"kind": "Status", "message": "x"}
        )
        await port.patch("ConfigMap", "a", {"data": {"x": "2"}})

    double.fault(method="GET", path="watch=true", hint={"gone": 0})
    changing = asyncio.create_task(change())
    found = await wait_for(
        port, "ConfigMap", "a", lambda each: each is not None and each["data"]["x"] == "2",
        seconds=20, poll_seconds=0.1,
    )  # fmt: skip
    assert found is not None
    await changing
    with pytest.raises(TimeoutError, match="ConfigMap a was waited for"):
        await wait_for(port, "ConfigMap", "a", lambda each: each is None, seconds=0.5, poll_seconds=0.1)


async def test_commands_have_input_output_and_exit_codes(port: Kubernetes) -> None:
    pod = await running_pod(port)
    done = await port.exec(pod, ["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (done.exit_code, done.stdout, done.stderr) == (3, b"out\n", b"err\n")
    big = b"x" * 300_000
    done = await port.exec(pod, ["sh", "-c", f"head -c {len(big)} | wc -c"], stdin=big)
    assert (done.exit_code, done.text) == (0, str(len(big)))
    done = await port.exec(pod, ["sh", "-c", "head -c 500000 /dev/zero"])
    assert len(done.stdout) == 500_000
    with pytest.raises(KubeError) as caught:
        await port.exec("nobody", ["true"])
    assert "nobody" in str(caught.value)


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[int]:
    """Serve something on this machine, as a pod's port."""

    async def hello(request: web.Request) -> web.Response:
        return web.Response(text="hello " * 50_000)

    app = web.Application()
    app.router.add_get("/", hello)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server: Any = site._server
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        await runner.cleanup()


async def test_a_forward_carries_many_connections_and_outlives_one_that_drops(
    double: Any, port: Kubernetes, namespace: str
) -> None:
    pod = await running_pod(port)

    async def which() -> str:
        return pod

    async with serving() as number, port.forward(which, 8265) as address:
        double.serve(namespace, pod, {8265: number})

        async def ask() -> int:
            async with aiohttp.ClientSession() as session, session.get(f"http://{address}/") as reply:
                return len(await reply.text())

        assert await asyncio.gather(*(ask() for _ in range(5))) == [300_000] * 5
        double.fault(path="/portforward", status=502, body={"kind": "Status", "message": "no"})
        host, _, local = address.partition(":")
        reader, writer = await asyncio.open_connection(host, int(local))
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        assert await ask() == 300_000


async def test_a_local_port_in_use_is_said(port: Kubernetes) -> None:
    async def which() -> str:
        return "none"

    async with serving() as number:
        with pytest.raises(KubeError, match=f"local port {number} cannot be used"):
            async with port.forward(which, 1, local_port=number):
                pass
