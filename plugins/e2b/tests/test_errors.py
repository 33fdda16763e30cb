"""What becomes of whatever the SDK raises; the last ones against the double, through the SDK as it is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollhook.errors import SandboxDead, SandboxError
from rollhook.sandbox import SandboxSpec
from rollhook_e2b.errors import ServiceError, translate

SENTINEL = "e2b_5ent1nel0123456789abcdef"


def by_name(name: str, *args: Any, **kwargs: Any) -> BaseException:
    module = pytest.importorskip("e2b.exceptions", reason="needs e2b (pip install 'e2b>=2.53,<3')")
    error = getattr(module, name)(*args, **kwargs)
    assert isinstance(error, BaseException)
    return error


@pytest.mark.parametrize(
    ("name", "kind", "refused"),
    [
        ("AuthenticationException", "user", True),
        ("RateLimitException", "retryable", True),
        ("ServiceBusyException", "retryable", True),
        ("InvalidArgumentException", "user", True),
        ("TemplateException", "user", True),
        ("NotEnoughSpaceException", "infrastructure", False),
        ("TimeoutException", "retryable", False),
        ("SandboxUnreachableException", "retryable", False),
        ("SandboxException", "retryable", False),
    ],
)
def test_exceptions_of_the_sdk(name: str, kind: str, refused: bool) -> None:
    error = translate(by_name(name, "said so"), "doing this", "")
    assert isinstance(error, ServiceError)
    assert (error.kind, error.refused) == (kind, refused)
    assert str(error).startswith("doing this: ")
    assert "said so" in str(error)


@pytest.mark.parametrize("name", ["SandboxNotRunningException", "SandboxNotFoundException"])
def test_a_sandbox_that_is_gone_is_dead(name: str) -> None:
    assert isinstance(translate(by_name(name, "x"), "doing this", ""), SandboxDead)


@pytest.mark.parametrize(
    ("status", "said", "kind"),
    [
        (400, "bad", "user"),
        (404, "template 'x' not found", "user"),
        (403, "you have reached the maximum number of sandboxes", "retryable"),
        (403, "no access", "user"),
        (402, "quota exceeded", "retryable"),
        (409, "conflict", "retryable"),
        (500, "oops", "retryable"),
        (504, "gateway", "retryable"),
    ],
)
def test_statuses(status: int, said: str, kind: str) -> None:
    error = translate(by_name("SandboxException", said, status_code=status), "creating", "")
    assert isinstance(error, ServiceError)
    assert (error.kind, error.status) == (kind, status)


@pytest.mark.parametrize(
    "error", [KeyError("sandboxID"), ValueError("529"), RuntimeError(), OSError(5, "io")]
)
def test_what_is_not_known_may_be_tried_again(error: Exception) -> None:
    made = translate(error, "listing", "")
    assert made.kind == "retryable"
    assert type(error).__name__ in str(made)


def test_a_broken_reply_may_be_tried_again() -> None:
    with pytest.raises(json.JSONDecodeError) as raised:
        json.loads("<html>")
    assert translate(raised.value, "listing", "").kind == "retryable"


def test_the_key_is_in_no_error() -> None:
    error = translate(ValueError(f"header X-API-KEY {SENTINEL} is bad"), "creating", SENTINEL)
    assert SENTINEL not in str(error)
    assert "***" in str(error)


def test_a_long_text_is_cut() -> None:
    assert len(str(translate(ValueError("x" * 100_000), "creating", ""))) < 1200


HTML = "<html><body>502 Bad Gateway</body></html>"


@pytest.mark.parametrize(
    ("rule", "kind", "ambiguous"),
    [
        ({"status": 400, "body": None}, "user", False),
        ({"status": 401, "body": None}, "user", False),
        ({"status": 403, "body": {"code": 403, "message": "no access"}}, "user", False),
        (
            {"status": 403, "body": {"code": 403, "message": "You reached the maximum number of sandboxes"}},
            "retryable",
            False,
        ),
        ({"status": 404, "body": {"code": 404, "message": "template 'base' not found"}}, "user", False),
        ({"status": 429, "body": None}, "retryable", False),
        ({"status": 500, "body": None}, "retryable", True),
        ({"status": 503, "body": None}, "retryable", False),
        ({"status": 529}, "retryable", True),
        ({"status": 400, "body": {"message": "without a code"}}, "retryable", True),
        ({"status": 400, "body": HTML}, "retryable", True),
        ({"status": 401, "body": HTML}, "retryable", True),
        ({"status": 500, "body": HTML}, "retryable", True),
        ({"status": 201, "body": {"sandboxID": "x"}}, "retryable", True),
        ({"drop": "before"}, "retryable", True),
        ({"truncate": 10}, "retryable", True),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else None,
)
async def test_a_create_that_fails(
    make_e2b: Any, double: Any, rule: dict[str, Any], kind: str, ambiguous: bool
) -> None:
    backend = make_e2b()
    if "body" in rule and rule["body"] is None:
        rule = {**rule, "body": {"code": rule["status"], "message": "as a rule says"}}
    double.fault(surface="e2b_api", method="POST", path="/sandboxes", times=None, **rule)
    with pytest.raises(SandboxError) as raised:
        await backend.create(SandboxSpec())
    assert raised.value.kind == kind
    assert backend.retryable(raised.value) == (kind == "retryable")
    assert backend.ambiguous(raised.value) == ambiguous
    assert double.key not in str(raised.value)
    double.clear_faults()
    for info in await backend.list({}):
        await backend.delete(info.id)
    await backend.aclose()


async def test_a_service_that_is_not_there_is_said_so(make_e2b: Any) -> None:
    backend = make_e2b(api_url="http://127.0.0.1:9")
    with pytest.raises(SandboxError) as raised:
        await backend.start()
    assert raised.value.kind == "retryable"
    await backend.aclose()


async def test_a_key_that_is_refused_is_told_at_the_start(make_e2b: Any, double: Any) -> None:
    double.options(accept_key=False)
    backend = make_e2b()
    with pytest.raises(SandboxError, match="api_key") as raised:
        await backend.start()
    assert raised.value.kind == "user"
    await backend.aclose()


async def test_a_full_disk_is_said(make_e2b: Any, double: Any) -> None:
    backend = make_e2b()
    raw = await backend.create(SandboxSpec())
    double.fault(surface="e2b_envd", method="POST", path="/files", status=507)
    with pytest.raises(OSError, match="No space left"):
        await raw.write("/work/large", bytes(1 << 20))
    await backend.delete(raw.id)
    await backend.aclose()
