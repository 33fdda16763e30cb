"""The double's answers, judged by the models that the SDK itself was generated with."""

from __future__ import annotations

import json
import urllib.request
from importlib.metadata import version
from typing import Any

import pytest
from doubles.client import Double


def ask(double: Double, method: str, path: str, body: Any = None) -> Any:
    request = urllib.request.Request(double.url("daytona") + path, method=method)
    request.add_header("Authorization", f"Bearer {double.key}")
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
        return json.loads(answer.read() or "null")


@pytest.fixture
def models(double: Double) -> Any:
    return pytest.importorskip("daytona_api_client")


def whole(model: Any, shown: Any) -> Any:
    """The model takes it, and nothing in it is unknown to the model of the release that the double is of."""
    made = model.from_dict(shown)
    if tuple(int(part) for part in version("daytona").split(".")[:2]) >= (0, 226):
        assert made.additional_properties == {}
    return made


def test_sandboxes_are_as_the_models_say(double: Double, models: Any) -> None:
    body = {
        "name": "by-name",
        "labels": {"wire": "yes"},
        "env": {"A": "1"},
        "cpu": 1,
        "memory": 2,
        "disk": 3,
        "networkBlockAll": True,
        "domainAllowList": "example.org",
        "buildInfo": {"dockerfileContent": "FROM debian:12\nRUN true\n"},
    }
    made = whole(models.Sandbox, ask(double, "POST", "/api/sandbox", body))
    assert made.state == models.SandboxState.PENDING_BUILD
    states = {made.state.value}
    while made.state.value != "started":
        made = whole(models.Sandbox, ask(double, "GET", "/api/sandbox/by-name"))
        assert made.state is not None, "a state that the SDK does not know"
        states.add(made.state.value)
    assert states <= {state.value for state in models.SandboxState}
    listed = ask(double, "GET", "/api/sandbox?labels=%7B%22wire%22%3A%22yes%22%7D")
    page = models.ListSandboxesResponse.from_dict(listed)
    assert [item.id for item in page.items] == [made.id]
    assert page.next_cursor is None
    whole(models.SandboxListItem, listed["items"][0])
    ask(double, "PUT", f"/api/sandbox/{made.id}/labels", {"labels": {"wire": "no"}})
    whole(models.Sandbox, ask(double, "POST", f"/api/sandbox/{made.id}/autostop/5"))
    whole(models.Sandbox, ask(double, "POST", f"/api/sandbox/{made.id}/stop"))
    logs = whole(models.Url, ask(double, "GET", f"/api/sandbox/{made.id}/build-logs-url"))
    assert logs.url.startswith("http://127.0.0.1")
    while ask(double, "GET", f"/api/sandbox/{made.id}")["state"] != "stopped":
        pass
    whole(models.Sandbox, ask(double, "DELETE", f"/api/sandbox/{made.id}"))


def test_snapshots_are_as_the_models_say(double: Double, models: Any) -> None:
    body = {"name": "wire", "buildInfo": {"dockerfileContent": "FROM debian:12\n"}, "cpu": 1}
    made = whole(models.SnapshotDto, ask(double, "POST", "/api/snapshots", body))
    while made.state.value != "active":
        made = whole(models.SnapshotDto, ask(double, "GET", "/api/snapshots/wire"))
    whole(models.Url, ask(double, "GET", "/api/snapshots/wire/build-logs-url"))
    assert ask(double, "DELETE", "/api/snapshots/wire") is None


def test_answers_of_the_toolbox_are_as_the_models_say(double: Double) -> None:
    models = pytest.importorskip("daytona_toolbox_api_client")
    made = ask(double, "POST", "/api/sandbox", {"user": "root"})
    while ask(double, "GET", f"/api/sandbox/{made['id']}")["state"] != "started":
        pass
    path = f"/toolbox/{made['id']}/process/execute"
    done = whole(models.ExecuteResponse, ask(double, "POST", path, {"command": "echo a; echo b >&2; exit 3"}))
    assert (done.exit_code, done.result) == (3, "a\nb\n")
    ask(double, "DELETE", f"/api/sandbox/{made['id']}")
