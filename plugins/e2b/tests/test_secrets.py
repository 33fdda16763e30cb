"""The key is a reference: its value is in no log, error, label, repr or file."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rollhook.component import BuildContext
from rollhook.errors import SandboxError, UsageError
from rollhook.sandbox import SandboxSpec
from rollhook.secrets import resolve_secret
from rollhook_e2b import E2BConfig
from rollhook_e2b.backend import E2BSandboxes

SENTINEL = "e2b_5ent1nel0123456789abcdef0123456789abcdef"


async def test_the_key_shows_nowhere(
    double: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MY_KEY", SENTINEL)
    caplog.set_level(logging.DEBUG)
    urls = {"api_url": double.url("e2b_api"), "sandbox_url": double.url("e2b_envd")}
    config = E2BConfig.model_validate({**urls, "api_key": "env:MY_KEY"})
    context = BuildContext(logging.getLogger("test"), tmp_path, tmp_path / "cache", secret=resolve_secret)
    backend = E2BSandboxes(config, context)
    with pytest.raises(SandboxError) as refused:  # it is not the double's
        await backend.create(SandboxSpec())
    shown = [str(refused.value), repr(config), repr(backend), config.model_dump_json(), caplog.text]
    shown += [str(backend.describe()), repr(refused.value.__cause__)]
    shown += [path.read_text("utf-8", "replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert not [text for text in shown if SENTINEL in text]
    assert "env:MY_KEY" in config.model_dump_json()
    await backend.aclose()


async def test_a_key_that_is_not_there_is_said_by_its_name(make_e2b: Any, tmp_path: Path) -> None:
    context = BuildContext(logging.getLogger("test"), tmp_path, tmp_path, secret=resolve_secret)
    backend = E2BSandboxes(E2BConfig(), context)
    with pytest.raises(UsageError, match="E2B_API_KEY"):
        await backend.start()
    await backend.aclose()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"api_key": SENTINEL}, "not a reference"),
        ({"api_url": f"https://{SENTINEL}@host"}, "api_key"),
        ({"api_url": f"https://host/?key={SENTINEL}"}, "api_key"),
        ({"sandbox_url": "https://host/path"}, "has a path"),
        ({"api_url": "host:8000"}, "no base URL"),
        ({"domain": "https://e2b.app"}, "no domain"),
        ({"template_prefix": "Has Spaces"}, "pattern"),
    ],
)
def test_keys_that_cannot_be(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said) as raised:
        E2BConfig.model_validate(keys)
    messages = " ".join(error["msg"] for error in raised.value.errors())
    assert SENTINEL not in re.sub(r"input_value=.*", "", messages)


def test_importing_the_plugin_loads_no_sdk() -> None:
    import subprocess
    import sys

    code = "import sys, rollhook_e2b, rollhook_e2b.backend; sys.exit('e2b' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
