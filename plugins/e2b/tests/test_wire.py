"""The double's answers, judged by the models that the SDK itself was generated with."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest


def ask(double: Any, method: str, path: str, body: Any = None) -> tuple[int, Any, Any]:
    """Return status, headers and the answer."""
    request = urllib.request.Request(double.url("e2b_api") + path, method=method)
    request.add_header("X-API-KEY", double.key)
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=30) as answer:
            return answer.status, answer.headers, json.loads(answer.read() or "null")
    except urllib.error.HTTPError as error:
        return error.code, error.headers, json.loads(error.read() or "null")


@pytest.fixture
def models(double: Any) -> Any:
    return pytest.importorskip("e2b.api.client.models", reason="needs e2b (pip install 'e2b>=2.53,<3')")


def whole(model: Any, shown: Any) -> Any:
    """The model takes it, nothing in it is unknown to the model, and nothing of it is lost."""
    made = model.from_dict(dict(shown))
    assert not getattr(made, "additional_properties", {})
    assert shown.keys() <= made.to_dict().keys()
    return made


@pytest.mark.parametrize("generation", ["", "/v2"])
def test_sandboxes_are_as_the_models_say(double: Any, models: Any, generation: str) -> None:
    body = {
        "templateID": "base",
        "timeout": 60,
        "metadata": {"wire": f"yes{generation}"},
        "envVars": {"A": "1"},
    }
    status, _, shown = ask(double, "POST", f"{generation}/sandboxes", body)
    assert status == 201
    box = whole(models.Sandbox, shown).sandbox_id
    status, _, shown = ask(double, "POST", f"{generation}/sandboxes/{box}/connect", {"timeout": 60})
    assert status == 200
    assert whole(models.Sandbox, shown).sandbox_id == box
    status, _, shown = ask(double, "GET", f"/sandboxes/{box}")
    assert whole(models.SandboxDetail, shown).state.value == "running"
    status, _, listed = ask(double, "GET", f"{generation}/sandboxes?metadata=wire%3Dyes{generation}")
    assert [whole(models.ListedSandbox, each).sandbox_id for each in listed] == [box]
    assert ask(double, "POST", f"/sandboxes/{box}/timeout", {"timeout": 30})[0] == 204
    assert ask(double, "POST", f"/sandboxes/{box}/pause", {})[0] == 204
    status, _, refused = ask(double, "POST", f"/sandboxes/{box}/pause", {})
    assert status == 409
    whole(models.Error, refused)
    assert ask(double, "POST", f"{generation}/sandboxes/{box}/connect", {"timeout": 60})[0] == 201
    assert ask(double, "DELETE", f"/sandboxes/{box}")[0] == 204
    status, _, refused = ask(double, "DELETE", f"/sandboxes/{box}")
    assert status == 404
    whole(models.Error, refused)


def test_lists_have_pages(double: Any, models: Any) -> None:
    double.options(page=2)
    body = {"templateID": "base", "metadata": {"wire": "pages"}}
    made = {ask(double, "POST", "/v2/sandboxes", body)[2]["sandboxID"] for _ in range(3)}
    _, headers, first = ask(double, "GET", "/v2/sandboxes?metadata=wire%3Dpages")
    _, last, second = ask(
        double, "GET", f"/v2/sandboxes?metadata=wire%3Dpages&nextToken={headers['X-Next-Token']}"
    )
    assert last["X-Next-Token"] is None
    assert {each["sandboxID"] for each in [*first, *second]} == made
    for box in made:
        ask(double, "DELETE", f"/sandboxes/{box}")


def test_templates_are_as_the_models_say(double: Any, models: Any) -> None:
    body = {"name": "wire-template", "cpuCount": 2, "memoryMB": 512}
    status, _, shown = ask(double, "POST", "/v3/templates", body)
    assert status == 202
    build = whole(models.TemplateRequestResponseV3, shown)
    at = f"/templates/{build.template_id}"
    status, _, shown = ask(double, "GET", f"{at}/files/0123")
    assert status == 201
    whole(models.TemplateBuildFileUpload, shown)
    assert ask(double, "GET", "/templates/aliases/wire-template")[0] == 200
    assert ask(double, "GET", "/templates/aliases/wire-template%3Adefault")[0] == 404, "not built yet"
    steps = {"fromImage": "debian:12", "steps": [{"type": "RUN", "args": ["echo said; exit 3"]}]}
    assert ask(double, "POST", f"/v2{at}/builds/{build.build_id}", steps)[0] == 202
    while True:
        _, _, shown = ask(double, "GET", f"{at}/builds/{build.build_id}/status?logsOffset=0")
        status = whole(models.TemplateBuildInfo, shown)
        if status.status.value not in ("waiting", "building"):
            break
    assert status.status.value == "error"
    assert "said" in [entry.message for entry in status.log_entries]
    assert "exit code: 3" in status.reason.message


def test_a_key_that_is_not_the_runs_is_refused(double: Any, models: Any) -> None:
    double.options(accept_key=False)
    status, _, shown = ask(double, "GET", "/v2/sandboxes")
    assert status == 401
    whole(models.Error, shown)
