"""The double of Kubernetes itself: objects, patches, watches, who may, and the schemas of KubeRay."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from doubles.kubernetes import patch, resources, spdy
from doubles.kubernetes.client import Cluster, cluster
from doubles.kubernetes.store import Store
from hypothesis import given
from hypothesis import strategies as st

MERGE, JSON_PATCH = "application/merge-patch+json", "application/json-patch+json"
STRATEGIC, APPLY = "application/strategic-merge-patch+json", "application/apply-patch+yaml"
RAY = "/apis/ray.io/v1/namespaces/{}/rayclusters"


class Client:
    """Bare requests to the API."""

    def __init__(self, session: aiohttp.ClientSession, double: Cluster) -> None:
        self.session, self.double = session, double
        config = json.loads(double.kubeconfig.read_text())
        self.headers = {"Authorization": f"Bearer {config['users'][0]['user']['token']}"}

    async def __call__(
        self, method: str, path: str, body: Any = None, media: str = "application/json", **headers: str
    ) -> tuple[int, Any]:
        sent = (
            {"Content-Type": media, **self.headers, **headers}
            if body is not None
            else {**self.headers, **headers}
        )
        data = None if body is None else json.dumps(body)
        async with self.session.request(method, self.double.url + path, data=data, headers=sent) as answer:
            return answer.status, json.loads(await answer.read())

    @asynccontextmanager
    async def watch(self, path: str) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        async with self.session.get(self.double.url + path, headers=self.headers) as answer:

            async def lines() -> AsyncIterator[dict[str, Any]]:
                async for line in answer.content:
                    yield json.loads(line)

            yield lines()


@pytest.fixture(scope="module")
def double() -> Iterator[Cluster]:
    with cluster(operator=False) as running:
        yield running


@pytest.fixture
async def ask(double: Cluster) -> AsyncIterator[Client]:
    authority = json.loads(double.kubeconfig.read_text())["clusters"][0]["cluster"][
        "certificate-authority-data"
    ]
    tls = ssl.create_default_context(cadata=base64.b64decode(authority).decode())
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls)) as session:
        yield Client(session, double)
    double.clear_faults()
    double.clear_scripts()


@pytest.fixture
def space(double: Cluster, request: pytest.FixtureRequest) -> str:
    return double.namespace(f"t{abs(hash(request.node.nodeid)) % 10**9}")


def config_map(name: str, **labels: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": labels},
        "data": {"a": "1"},
    }


def ray_cluster(name: str, **spec: Any) -> dict[str, Any]:
    template = {"spec": {"containers": [{"name": "ray", "image": "ray", "ports": [{"containerPort": 8265}]}]}}
    head = {"rayStartParams": {}, "template": template}
    body = {"headGroupSpec": head, "workerGroupSpecs": [{**head, "groupName": "w"}], **spec}
    return {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": name}, "spec": body}


def maps(space: str) -> str:
    return f"/api/v1/namespaces/{space}/configmaps"


async def test_objects_are_created_once_and_changed_only_from_their_newest_version(
    ask: Client, space: str
) -> None:
    status, made = await ask("POST", maps(space), config_map("a"))
    assert (status, made["metadata"]["namespace"]) == (201, space)
    assert made["metadata"]["uid"]
    status, told = await ask("POST", maps(space), config_map("a"))
    assert (status, told["reason"], told["message"]) == (
        409,
        "AlreadyExists",
        'configmaps "a" already exists',
    )
    made["data"] = {"a": "2"}
    status, newer = await ask("PUT", f"{maps(space)}/a", made)
    assert (status, newer["data"]) == (200, {"a": "2"})
    status, told = await ask("PUT", f"{maps(space)}/a", {**made, "data": {"a": "3"}})
    assert (status, told["reason"]) == (409, "Conflict")
    assert "the object has been modified" in told["message"]
    again = await ask("PUT", f"{maps(space)}/a", newer)
    assert again[1]["metadata"]["resourceVersion"] == newer["metadata"]["resourceVersion"]
    async with ask.session.get(f"{ask.double.url}{maps(space)}/b", headers=ask.headers) as answer:
        assert answer.headers["Content-Type"] == "application/json"  # as it is, or lightkube reads no Status
    status, told = await ask("GET", f"{maps(space)}/b")
    assert (status, told["reason"], told["details"]) == (404, "NotFound", {"name": "b", "kind": "configmaps"})
    status, told = await ask("POST", maps("nowhere"), config_map("a"))
    assert (status, told["message"]) == (404, 'namespaces "nowhere" not found')
    status, generated = await ask("POST", maps(space), {**config_map(""), "metadata": {"generateName": "x-"}})
    assert status == 201
    assert len(generated["metadata"]["name"]) == 7


async def test_a_path_that_is_unknown_fails_the_test_that_asks_for_it() -> None:
    with pytest.raises(AssertionError, match="/apis/nothing/v1/things"), cluster() as other:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=False)) as session:
            assert (await Client(session, other)("GET", "/apis/nothing/v1/things"))[0] == 404


async def test_who_has_no_token_or_no_right_is_told_so(ask: Client, double: Cluster, space: str) -> None:
    status, told = await ask("GET", maps(space), Authorization="Bearer wrong")
    assert (status, told["reason"], told["message"]) == (401, "Unauthorized", "Unauthorized")
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {"verb": "list", "resource": "configmaps", "namespace": space}},
    }
    reviews = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    assert (await ask("POST", reviews, review))[1]["status"]["allowed"] is True
    double.options(deny=[{"verb": "list", "resource": "configmaps", "namespace": space}])
    try:
        assert (await ask("POST", reviews, review))[1]["status"]["allowed"] is False
        status, told = await ask("GET", maps(space))
        assert (status, told["reason"]) == (403, "Forbidden")
        assert told["message"] == (
            'configmaps is forbidden: User "rollhook-tester" cannot list resource "configmaps" in API group '
            f'"" in the namespace "{space}"'
        )
        assert (await ask("POST", maps(space), config_map("a")))[0] == 201
    finally:
        double.options(deny=[])


async def test_an_account_may_what_a_role_binding_gives_it(ask: Client, space: str) -> None:
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {"verb": "get", "resource": "pods", "namespace": space}},
    }
    account = {"Impersonate-User": f"system:serviceaccount:{space}:default"}
    reviews = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    assert not (await ask("POST", reviews, review, **account))[1]["status"]["allowed"]
    assert (await ask("GET", f"/api/v1/namespaces/{space}/pods", **account))[0] == 403
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "edit"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "edit"},
        "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": space}],
    }
    path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{space}/rolebindings"
    assert (await ask("POST", path, binding))[0] == 201
    assert (await ask("POST", reviews, review, **account))[1]["status"]["allowed"]


async def test_ray_kinds_are_pruned_defaulted_and_checked_by_their_schemas(ask: Client, space: str) -> None:
    path = RAY.format(space)
    body = ray_cluster("a", unknown=1)
    status, told = await ask("POST", f"{path}?fieldValidation=Strict", body)
    assert (status, told["message"].endswith('strict decoding error: unknown field "spec.unknown"')) == (
        400,
        True,
    )
    status, made = await ask("POST", path, body)
    assert status == 201
    assert "unknown" not in made["spec"]
    group = made["spec"]["workerGroupSpecs"][0]
    found = {
        name: group[name] for name in ("replicas", "minReplicas", "maxReplicas", "numOfHosts", "priority")
    }
    assert found == {
        "replicas": 0,
        "minReplicas": 0,
        "maxReplicas": 2147483647,
        "numOfHosts": 1,
        "priority": 0,
    }
    port = made["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["ports"][0]
    assert port == {"containerPort": 8265, "protocol": "TCP"}

    def wrong(change: dict[str, Any]) -> dict[str, Any]:
        return patch.merge(ray_cluster("b"), {"spec": change})  # type: ignore[no-any-return]

    containers = [{"name": "c", "image": "x", "resources": {"limits": {"cpu": "2 cores"}}}]
    cases = {
        "headGroupSpec": (wrong({"headGroupSpec": None}), "spec.headGroupSpec: Required value"),
        "suspend": (wrong({"suspend": "no"}), "must be of type boolean"),
        "managedBy": (wrong({"managedBy": "me"}), "the managedBy field value must be either"),
        "cpu": (
            wrong({"headGroupSpec": {"template": {"spec": {"containers": containers}}}}),
            "resources.limits.cpu in body should match",
        ),
        "twice": (
            wrong(
                {
                    "headGroupSpec": {
                        "template": {"spec": {"containers": [*containers[:0], *[{"name": "c"}] * 2]}}
                    }
                }
            ),
            'Duplicate value: {"name": "c"}',
        ),
    }
    for name, (each, message) in cases.items():
        status, told = await ask("POST", path, each)
        assert (status, told["reason"]) == (422, "Invalid"), name
        assert message in told["message"], name
    status, told = await ask("PATCH", f"{path}/a", {"spec": {"headGroupSpec": {"template": 3}}}, MERGE)
    assert status == 422


async def test_generation_counts_changes_of_the_spec_and_status_is_apart(ask: Client, space: str) -> None:
    path = RAY.format(space)
    _, made = await ask("POST", path, {**ray_cluster("a"), "status": {"state": "ready"}})
    assert made["metadata"]["generation"] == 1
    assert "status" not in made
    _, made = await ask("PATCH", f"{path}/a", {"metadata": {"labels": {"x": "y"}}}, MERGE)
    assert made["metadata"]["generation"] == 1
    _, made = await ask(
        "PATCH", f"{path}/a", {"spec": {"suspend": True}, "status": {"state": "ready"}}, MERGE
    )
    assert (made["metadata"]["generation"], "status" in made) == (2, False)
    change = {"spec": {"suspend": False}, "status": {"state": "suspended"}}
    _, made = await ask("PATCH", f"{path}/a/status", change, MERGE)
    assert (made["metadata"]["generation"], made["spec"]["suspend"]) == (2, True)
    assert made["status"]["state"] == "suspended"


async def test_each_kind_of_patch(ask: Client, space: str) -> None:
    pods = f"/api/v1/namespaces/{space}/pods"
    spec = {
        "containers": [{"name": "a", "image": "x"}, {"name": "b", "image": "y"}],
        "tolerations": [{"key": "k"}],
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "labels": {"l": "1"}}, "spec": spec}
    assert (await ask("POST", pods, pod))[0] == 201
    change = {
        "spec": {"containers": [{"name": "b", "image": "z"}]},
        "metadata": {"labels": {"l": None, "m": "2"}},
    }
    _, made = await ask("PATCH", f"{pods}/p", change, STRATEGIC)
    assert [each["image"] for each in made["spec"]["containers"]] == ["x", "z"]
    assert made["metadata"]["labels"] == {"m": "2"}
    operations = [
        {"op": "test", "path": "/metadata/labels/m", "value": "2"},
        {"op": "add", "path": "/metadata/labels/a~1b", "value": "3"},
        {"op": "replace", "path": "/spec/containers/0/image", "value": "w"},
    ]
    _, made = await ask("PATCH", f"{pods}/p", operations, JSON_PATCH)
    assert made["metadata"]["labels"] == {"m": "2", "a/b": "3"}
    assert made["spec"]["containers"][0]["image"] == "w"
    status, told = await ask(
        "PATCH", f"{pods}/p", [{"op": "test", "path": "/kind", "value": "X"}], JSON_PATCH
    )
    assert (status, "testing value failed" in told["message"]) == (422, True)
    status, told = await ask("PATCH", f"{pods}/p", {"spec": {"restartPolicy": "Never"}}, MERGE)
    assert (status, "pod updates may not change fields" in told["message"]) == (422, True)
    await ask("POST", RAY.format(space), ray_cluster("a"))
    status, told = await ask("PATCH", f"{RAY.format(space)}/a", {"spec": {}}, STRATEGIC)
    assert (status, told["reason"]) == (415, "UnsupportedMediaType")


async def test_server_side_apply_knows_whose_a_field_is(ask: Client, space: str) -> None:
    path = f"{RAY.format(space)}/a"
    config = ray_cluster("a", suspend=True)
    status, made = await ask("PATCH", f"{path}?fieldManager=one", config, APPLY)
    assert (status, made["spec"]["suspend"]) == (201, True)
    mine = {**ray_cluster("a"), "spec": {"suspend": False}}
    status, told = await ask("PATCH", f"{path}?fieldManager=two", mine, APPLY)
    assert (status, told["details"]["causes"][0]["field"]) == (409, ".spec.suspend")
    assert 'conflict with "one"' in told["message"]
    status, made = await ask("PATCH", f"{path}?fieldManager=two&force=true", mine, APPLY)
    assert (status, made["spec"]["suspend"]) == (200, False)
    status, made = await ask("PATCH", f"{path}?fieldManager=one", ray_cluster("a"), APPLY)
    assert (status, made["spec"]["suspend"]) == (200, False)
    status, made = await ask("PATCH", f"{path}?fieldManager=two", {**mine, "spec": {}}, APPLY)
    assert "suspend" not in made["spec"]
    assert made["spec"]["headGroupSpec"]
    assert (await ask("PATCH", path, mine, APPLY))[0] == 422
    status, _ = await ask("PATCH", f"{path}?fieldManager=two&dryRun=All", mine, APPLY)
    assert (status, "suspend" in (await ask("GET", path))[1]["spec"]) == (200, False)


async def test_lists_are_selected_and_come_in_pages(ask: Client, double: Cluster, space: str) -> None:
    for number in range(5):
        await ask("POST", maps(space), config_map(f"m{number}", odd=str(number % 2), n=str(number)))

    async def names(query: str) -> list[str]:
        status, found = await ask("GET", f"{maps(space)}?{query}")
        assert status == 200, found
        return [each["metadata"]["name"] for each in found["items"]]

    assert await names("labelSelector=odd%3D1") == ["m1", "m3"]
    assert await names("labelSelector=odd!%3D1,n") == ["m0", "m2", "m4"]
    assert await names("labelSelector=n+in+(1,2),!nothing") == ["m1", "m2"]
    assert await names("labelSelector=n+notin+(1,2),odd%3D%3D0") == ["m0", "m4"]
    assert await names("fieldSelector=metadata.name%3Dm3") == ["m3"]
    assert (await ask("GET", f"{maps(space)}?fieldSelector=data.a%3D1"))[0] == 400
    _, page = await ask("GET", f"{maps(space)}?limit=2")
    assert page["metadata"]["remainingItemCount"] == 3
    token = page["metadata"]["continue"]
    assert await names(f"limit=2&continue={token}") == ["m2", "m3"]
    double.compact()
    status, told = await ask("GET", f"{maps(space)}?limit=2&continue={token}")
    assert (status, told["reason"]) == (410, "Expired")


async def test_a_watch_tells_changes_and_bookmarks_and_410(ask: Client, double: Cluster, space: str) -> None:
    await ask("POST", maps(space), config_map("a", x="1"))
    _, found = await ask("GET", maps(space))
    version = found["metadata"]["resourceVersion"]
    query = f"{maps(space)}?watch=1&resourceVersion={version}&labelSelector=x%3D1&allowWatchBookmarks=true"
    async with asyncio.timeout(20), ask.watch(query) as events:
        await ask("POST", maps(space), config_map("b", x="2"))
        await ask("PATCH", f"{maps(space)}/a", {"data": {"a": "2"}}, MERGE)
        await ask("PATCH", f"{maps(space)}/b", {"metadata": {"labels": {"x": "1"}}}, MERGE)
        await ask("PATCH", f"{maps(space)}/a", {"metadata": {"labels": {"x": "3"}}}, MERGE)
        await ask("DELETE", f"{maps(space)}/b")
        seen = [await anext(events) for _ in range(5)]
    told = [(each["type"], each["object"]["metadata"].get("name")) for each in seen]
    assert told == [("MODIFIED", "a"), ("ADDED", "b"), ("DELETED", "a"), ("DELETED", "b"), ("BOOKMARK", None)]
    double.compact()
    await ask("POST", maps(space), config_map("c"))
    async with asyncio.timeout(20), ask.watch(f"{maps(space)}?watch=1&resourceVersion={version}") as events:
        event = await anext(events)
        assert (event["type"], event["object"]["code"], event["object"]["reason"]) == (
            "ERROR",
            410,
            "Expired",
        )
    async with asyncio.timeout(20), ask.watch(f"{maps(space)}?watch=1&timeoutSeconds=1") as events:
        assert [each["object"]["metadata"]["name"] async for each in events] == ["a", "c"]


async def test_a_watch_goes_wrong_as_a_rule_says(ask: Client, double: Cluster, space: str) -> None:
    for name in ("a", "b", "c"):
        await ask("POST", maps(space), config_map(name))
    double.fault(method="GET", path=f"{space}/configmaps?watch", hint={"gone": 3})
    async with asyncio.timeout(20), ask.watch(f"{maps(space)}?watch=1") as events:
        assert [each["object"].get("code") async for each in events] == [None, None, None, 410]
    double.fault(method="GET", path=f"{space}/configmaps?watch", hint={"cut": 2})
    async with asyncio.timeout(20), ask.watch(f"{maps(space)}?watch=1") as events:
        assert [(await anext(events))["type"] for _ in range(2)] == ["ADDED", "ADDED"]
        with pytest.raises(aiohttp.ClientError):
            await anext(events)
    double.fault(method="GET", path=f"{space}/configmaps", status=503, body={"kind": "Status", "code": 503})
    assert (await ask("GET", maps(space)))[0] == 503
    double.fault(method="GET", path=f"{space}/configmaps", drop="before", times=2)  # the client tries twice
    with pytest.raises(aiohttp.ClientError):
        await ask("GET", maps(space))
    assert (await ask("GET", maps(space)))[0] == 200


async def test_what_is_owned_goes_after_its_owner(ask: Client, double: Cluster, space: str) -> None:
    async def pair(name: str) -> None:
        _, owner = await ask("POST", maps(space), config_map(name))
        child = config_map(f"{name}-child")
        child["metadata"]["ownerReferences"] = [
            {"apiVersion": "v1", "kind": "ConfigMap", "name": name, "uid": owner["metadata"]["uid"]}
        ]
        assert (await ask("POST", maps(space), child))[0] == 201

    def names() -> set[str]:
        found = {each["metadata"]["name"] for each in double.objects("ConfigMap", space)}
        return {name for name in found if "-child" in name or len(name) == 1}

    for name in ("a", "b", "c"):
        await pair(name)
    await ask("DELETE", f"{maps(space)}/a")
    await ask("DELETE", f"{maps(space)}/b?propagationPolicy=Orphan")
    _, left = await ask("DELETE", f"{maps(space)}/c", {"propagationPolicy": "Foreground"})
    assert left["metadata"]["finalizers"] == ["foregroundDeletion"]
    await eventually(lambda: names() == {"b-child"})
    held = config_map("h")
    held["metadata"]["finalizers"] = ["example.com/hold"]
    await ask("POST", maps(space), held)
    _, held = await ask("DELETE", f"{maps(space)}/h")
    assert held["metadata"]["deletionTimestamp"]
    assert (await ask("GET", f"{maps(space)}/h"))[0] == 200
    await ask("PATCH", f"{maps(space)}/h", {"metadata": {"finalizers": None}}, MERGE)
    assert (await ask("GET", f"{maps(space)}/h"))[0] == 404
    status, told = await ask("DELETE", f"{maps(space)}/b-child", {"preconditions": {"uid": "other"}})
    assert (status, told["reason"]) == (409, "Conflict")


async def test_core_kinds_are_checked_and_filled_in(ask: Client, space: str) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "stringData": {"k": "v"}}
    _, made = await ask("POST", f"/api/v1/namespaces/{space}/secrets", secret)
    assert (made["data"], made["type"], "stringData" in made) == ({"k": "dg=="}, "Opaque", False)
    status, told = await ask("POST", maps(space), config_map("Not_A_Name"))
    assert (status, "RFC 1123" in told["message"]) == (422, True)
    status, told = await ask("POST", maps(space), config_map("a", x="not a label"))
    assert (status, "a valid label must be" in told["message"]) == (422, True)
    container = {"name": "c", "image": "x", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [container]}}
    status, told = await ask("POST", f"/api/v1/namespaces/{space}/pods", pod)
    assert (status, told["details"]["causes"][0]["field"]) == (422, "spec.containers[0].volumeMounts[0].name")
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "s"},
        "spec": {"ports": [{"port": 80}, {"port": 81}]},
    }
    status, told = await ask("POST", f"/api/v1/namespaces/{space}/services", service)
    assert (status, told["details"]["causes"][0]["field"]) == (422, "spec.ports[0].name")
    template = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "x"}]}}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "d"},
        "spec": {"selector": {"matchLabels": {"a": "c"}}, "template": template},
    }
    status, told = await ask("POST", f"/apis/apps/v1/namespaces/{space}/deployments", deployment)
    assert (status, "does not match template `labels`" in told["message"]) == (422, True)


def pod(name: str) -> dict[str, Any]:
    spec = {"containers": [{"name": "c", "image": "x"}], "restartPolicy": "Never"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


async def running(ask: Client, space: str, name: str) -> str:
    """Make a pod, wait until it runs, and return its path."""
    assert (await ask("POST", f"/api/v1/namespaces/{space}/pods", pod(name)))[0] == 201
    path = f"/api/v1/namespaces/{space}/pods/{name}"
    async with asyncio.timeout(20):
        while (await ask("GET", path))[1].get("status", {}).get("phase") in (None, "Pending"):
            await asyncio.sleep(0.01)
    return path


async def test_a_followed_log_ends_with_its_container_and_breaks_when_told(
    ask: Client, double: Cluster, space: str
) -> None:
    double.pods(match=f"{space}/waits", pending=None, reason="ImagePullBackOff")
    double.pods(match=space, logs=["one", "two"], dies=30, exit_code=0)
    await ask("POST", f"/api/v1/namespaces/{space}/pods", pod("waits"))
    await eventually(lambda: "ImagePullBackOff" in json.dumps(double.objects("Pod", space)))
    status, told = await ask("GET", f"/api/v1/namespaces/{space}/pods/waits/log")
    assert (status, "is waiting to start: ImagePullBackOff" in told["message"]) == (400, True)
    path = await running(ask, space, "p")
    async with asyncio.timeout(20):
        async with ask.session.get(f"{double.url}{path}/log?follow=true", headers=ask.headers) as answer:
            assert await answer.text() == "one\ntwo\n"
    assert (await ask("GET", path))[1]["status"]["phase"] == "Succeeded"
    double.fault(path=f"{path}/log", hint={"cut": 5})
    async with ask.session.get(f"{double.url}{path}/log?follow=true", headers=ask.headers) as answer:
        with pytest.raises(aiohttp.ClientError):
            await answer.read()


async def test_a_forward_carries_bytes_refuses_a_closed_port_and_drops_when_told(
    ask: Client, double: Cluster, space: str
) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.readexactly(5))[::-1])
        writer.close()

    path = await running(ask, space, "p")
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    double.serve(space, "p", {8265: server.sockets[0].getsockname()[1]})
    url = f"{double.url}{path}/portforward?ports="
    async with asyncio.timeout(20), server:
        async with ask.session.ws_connect(url + "8265", headers=ask.headers) as socket:
            told = [(await socket.receive()).data for _ in range(2)]
            assert told == [b"\x00" + (8265).to_bytes(2, "little"), b"\x01" + (8265).to_bytes(2, "little")]
            await socket.send_bytes(b"\x00hello")
            assert (await socket.receive()).data == b"\x00olleh"
            assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE
        async with ask.session.ws_connect(url + "9", headers=ask.headers) as socket:
            data = [(await socket.receive()).data for _ in range(3)][-1]
            assert data[0] == 1
            assert b"connection refused" in data
        double.fault(path="portforward", hint={"cut": 0.1})
        async with ask.session.ws_connect(url + "8265", headers=ask.headers) as socket:
            kinds = [(await socket.receive()).type for _ in range(3)]
            assert kinds[-1] in (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR)
    status, told = await ask("GET", f"{path}/portforward")
    assert (status, told["message"]) == (400, "Upgrade request required")


@pytest.mark.parametrize("steps", range(4))
async def test_who_waits_for_changes_can_be_ended_while_one_comes(steps: int) -> None:
    store, spaces = Store(), resources.named("namespaces")

    async def follow() -> None:
        while True:
            await store.wait(10)

    task = asyncio.create_task(follow())
    await asyncio.sleep(0.01)
    store.create(spaces, "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "n"}})
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task}, timeout=5)
    assert task.cancelled()


async def eventually(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


@given(st.lists(st.tuples(st.integers(1, 9), st.binary(max_size=40), st.booleans())), st.integers(1, 30))
def test_frames_come_out_as_they_went_in_however_the_bytes_are_cut(
    sent: list[tuple[int, bytes, bool]], step: int
) -> None:
    framer = spdy.Framer()
    raw = b"".join(framer.data(stream, data, fin=fin) for stream, data, fin in sent)
    receiver = spdy.Framer()
    frames = [frame for at in range(0, len(raw), step) for frame in receiver.feed(raw[at : at + step])]
    assert [(each.stream, each.data, bool(each.flags & spdy.FIN)) for each in frames] == sent


TREES = st.recursive(
    st.none() | st.booleans() | st.text(max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


@given(TREES, TREES)
def test_a_merge_patch_is_idempotent_and_leaves_no_null_of_its_own(target: Any, change: Any) -> None:
    once = patch.merge(target, change)
    assert patch.merge(once, change) == once
    if isinstance(change, dict) and isinstance(target, dict):
        assert {name for name in target if name not in change} <= set(once)
        assert not {name for name, value in change.items() if value is None} & set(once)


@given(st.dictionaries(st.sampled_from("abc"), st.text(max_size=2), min_size=1))
def test_an_applied_configuration_owns_what_it_says_and_can_take_it_back(labels: dict[str, str]) -> None:
    resource = resources.named("configmaps")
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "m", "labels": labels}}
    made = patch.apply(resource, None, config, "one", False)
    assert patch.apply(resource, made, config, "two", False)["metadata"]["labels"] == labels
    bare = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "m"}}
    assert not patch.apply(resource, made, bare, "one", False)["metadata"].get("labels")
