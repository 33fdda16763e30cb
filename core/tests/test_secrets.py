from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from rollhook.errors import UsageError
from rollhook.plugins import load
from rollhook.recipe.check import check_recipe, secret_fields
from rollhook.recipe.load import load_recipe
from rollhook.recipe.lock import write_lock
from rollhook.recipe.names import component_names
from rollhook.recipe.parts import Part
from rollhook.secrets import Secret, resolve_secret

SENTINEL = "sentinel-5f2c9a-do-not-print"


class Keys(BaseModel):
    token: Secret


class ManyKeys(BaseModel):
    inner: Keys
    by_name: dict[str, Secret]
    listed: list[Keys]


def test_secrets_are_found_wherever_a_component_keeps_them() -> None:
    one = {"token": "env:A"}
    config = ManyKeys.model_validate({"inner": one, "by_name": {"b": "env:B"}, "listed": [one]})
    found = secret_fields([Part("sandbox", "sandbox", "x", {}, config, None)])
    assert [(key, str(secret)) for key, secret in found] == [
        ("sandbox.inner.token", "env:A"),
        ("sandbox.by_name.b", "env:B"),
        ("sandbox.listed.0.token", "env:A"),
    ]


@pytest.mark.parametrize(
    "text", ["env:NAME", "env:_n1", "file:/run/secrets/x", "file:~/token", "k8s:run-1/api.key"]
)
def test_a_reference_is_accepted_and_written_back_as_it_was(text: str) -> None:
    keys = Keys.model_validate({"token": text})
    assert str(keys.token) == text
    assert keys.model_dump(mode="json") == {"token": text}


@pytest.mark.parametrize(
    "value",
    [
        SENTINEL,
        f"env:{SENTINEL}",
        "env:",
        "file:",
        "k8s:name",
        "k8s:/key",
        "k8s:Name/key",
        "vault:a/b",
        "",
        7,
        None,
        ["env:A"],
        {"env": "A"},
        "ENV:A",
        " env:A",
    ],
)
def test_anything_else_is_refused_without_being_quoted(value: object) -> None:
    with pytest.raises(ValidationError) as caught:
        Keys.model_validate({"token": value})
    assert caught.value.errors()[0]["msg"] == "is not a reference to a secret"
    with pytest.raises(ValueError, match="not a reference") as plain:
        Secret.parse(value)
    assert SENTINEL not in str(plain.value)


def test_the_environment_and_files_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_TOKEN", SENTINEL)
    (tmp_path / "token").write_text(f"{SENTINEL}\n")
    assert resolve_secret("env:TOY_TOKEN") == SENTINEL
    assert resolve_secret(f"file:{tmp_path}/token") == SENTINEL


def test_a_resolved_secret_shows_neither_in_str_nor_in_repr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_TOKEN", SENTINEL)
    value = Secret.parse("env:TOY_TOKEN").resolve()
    assert SENTINEL not in f"{value} {value!r} {[value]} {Keys(token='env:TOY_TOKEN')!r}"
    assert value.get_secret_value() == SENTINEL


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("env:TOY_ABSENT", "the environment variable TOY_ABSENT is not set"),
        ("file:/nonexistent/token", "cannot be read: No such file or directory"),
        ("k8s:name/key", "can only be read inside a job on Kubernetes"),
        (SENTINEL, "that is not a reference to a secret; write env:NAME, file:PATH or k8s:SECRET/KEY"),
    ],
)
def test_a_secret_that_is_not_there_says_why(reference: str, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_secret(reference)
    assert reason in str(caught.value)
    assert SENTINEL not in str(caught.value)


def test_a_pipe_a_directory_or_a_huge_file_is_no_secret_and_nobody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 33)
    assert "is no regular file" in Secret.parse(f"file:{tmp_path}/pipe").absent()
    assert "is no regular file" in Secret.parse(f"file:{tmp_path}").absent()
    assert "is larger than" in Secret.parse(f"file:{tmp_path}/huge").absent()
    assert "Not a directory" in Secret.parse(f"file:{tmp_path}/huge/token").absent()


def test_a_secret_of_kubernetes_is_read_where_it_is_mounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLHOOK_K8S_SECRETS", str(tmp_path))
    (tmp_path / "daytona").mkdir()
    (tmp_path / "daytona" / "API_KEY").write_text(f"{SENTINEL}\n")
    assert resolve_secret("k8s:daytona/API_KEY") == SENTINEL
    absent = Secret.parse("k8s:daytona/OTHER").absent()
    assert f"{tmp_path}/daytona/OTHER is not there" in absent
    assert "is no regular file" in Secret.parse("k8s:daytona/..").absent()


def test_an_empty_secret_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_TOKEN", "")
    (tmp_path / "token").write_text("\n")
    assert "is not set" in Secret.parse("env:TOY_TOKEN").absent()
    assert "is empty" in Secret.parse(f"file:{tmp_path}/token").absent()


RECIPE = """\
extends: base.yaml
sandbox: {api_key: "env:TOY_TOKEN"}
gateway: {token: "env:TOY_TOKEN"}
storage: {root: "${oc.env:TOY_PLACE}/runs"}
"""


def test_a_sentinel_in_the_environment_is_found_nowhere(
    toys: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Invariant 5: a secret is a reference."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("TOY_TOKEN", SENTINEL)
    monkeypatch.setenv("TOY_PLACE", str(toys))
    (toys / "recipe.yaml").write_text(RECIPE)
    checked = check_recipe("recipe.yaml", site="here")
    assert checked.problems == []
    loaded = load_recipe("recipe.yaml")
    plugins = load(component_names(loaded.recipe))
    write_lock(toys / "recipe.lock.yaml", loaded, plugins)
    lock = (toys / "recipe.lock.yaml").read_text()
    assert "api_key: env:TOY_TOKEN" in lock
    shown = capfd.readouterr()
    for text in (lock, repr(checked), repr(loaded), caplog.text, shown.out, shown.err):
        assert SENTINEL not in text


@pytest.mark.parametrize(
    "line",
    [
        f"sandbox: {{api_key: {SENTINEL}}}",
        f"gateway: {{token: {SENTINEL}}}",
        "gateway: {token: '${oc.env:TOY_PLAIN}'}",
        "sandbox: {api_key: '${oc.env:TOY_PLAIN}'}",
        "steps: '${oc.env:TOY_PLAIN}'",
        "trainer: {algorithm: '${oc.env:TOY_PLAIN}'}",
        "gateway: {bind: '${oc.env:TOY_PLAIN}'}",
        "sandbox: '${oc.env:TOY_PLAIN}'",
    ],
)
def test_a_value_where_it_does_not_belong_is_refused_without_being_quoted(
    toys: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setenv("TOY_PLAIN", SENTINEL)
    (toys / "recipe.yaml").write_text(f"extends: base.yaml\n{line}\n")
    problems = check_recipe("recipe.yaml", site="here").problems
    assert problems
    assert SENTINEL not in "\n".join(str(problem) for problem in problems)


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "db_password"])
def test_a_variable_that_is_called_like_a_secret_is_not_interpolated(
    toys: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, SENTINEL)
    (toys / "recipe.yaml").write_text(f"extends: base.yaml\nstorage: {{root: '${{oc.env:{name}}}'}}\n")
    problems = check_recipe("recipe.yaml", site="here").problems
    assert [p.message for p in problems] == [f"${{oc.env:{name}}} would write a secret into the recipe"]


def test_errors_of_the_command_line_do_not_show_a_sentinel(toys: Path) -> None:
    (toys / "recipe.yaml").write_text(f"name: x\ngateway: {{token: {SENTINEL}}}\n")
    for verb in (["check"], ["explain"], ["--debug", "explain"]):
        done = subprocess.run(
            [sys.executable, "-m", "rollhook.cli.main", *verb, "recipe.yaml"],
            capture_output=True,
            text=True,
            check=False,
            env={"TOY_TOKEN": SENTINEL, "PATH": ""},
        )
        assert done.returncode in {1, 2}
        assert "is not a reference to a secret" in done.stdout + done.stderr
        assert SENTINEL not in done.stdout + done.stderr
