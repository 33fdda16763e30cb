"""The pod to work in, on the double: `rollhook dev` as it is typed, and secrets that are never arguments."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from kuberay_site import keys
from typer.testing import CliRunner

from rollhook_kuberay.dev import app
from rollhook_kuberay.dev_pod import manifest

Dev = Callable[..., Result]


@pytest.fixture
def dev(double: Any, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Dev:
    monkeypatch.setenv("KUBECONFIG", str(double.kubeconfig))
    monkeypatch.setenv("ROLLHOOK_USER", "Jane_D")

    def run(*words: str, given: str | None = None) -> Result:
        return CliRunner().invoke(app, [*words, "-n", namespace], input=given)

    return run


def test_a_pod_on_a_node_without_gpus_with_the_recipes_mounts() -> None:
    made = manifest(keys(mounts=[{"path": "/mnt/ws", "claim": "ws"}], image_pull_secrets=["pull"]), "jane")
    assert made["metadata"]["name"] == "jane-dev-pod"
    spec = made["spec"]
    terms = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert terms[0]["matchExpressions"] == [{"key": "nvidia.com/gpu.product", "operator": "DoesNotExist"}]
    assert spec["imagePullSecrets"] == [{"name": "pull"}]
    (container,) = spec["containers"]
    assert {"name": "USER", "value": "jane"} in container["env"]
    assert container["envFrom"] == [{"secretRef": {"name": "jane-secrets", "optional": True}}]
    assert container["volumeMounts"][0]["mountPath"] == "/mnt/ws"


def test_the_pod_is_made_once_and_ended(double: Any, dev: Dev, namespace: str) -> None:
    first = dev("connect", "--image", "img:1")
    assert first.exit_code == 0, first.output
    assert "jane-d-dev-pod was created" in first.output
    assert "kind: RoleBinding" in first.output  # nobody gave the pod's account rights
    again = dev("connect", "--image", "img:2")
    assert "has the image img:1; `rollhook dev stop` first for img:2" in again.output
    ran = dev("connect", "--image", "img:1", "-c", "echo here; exit 3")
    assert (ran.exit_code, "here" in ran.output) == (3, True)
    assert "was deleted" in dev("stop").output
    assert "there is no jane-d-dev-pod" in dev("stop").output or double.objects("Pod", namespace)


def test_secrets_come_from_stdin_the_environment_and_files(
    double: Any, dev: Dev, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "from-environment")
    key = tmp_path / "id_ed25519"
    key.write_text("PRIVATE\n")
    made = dev(
        "setup-secrets", "HF_TOKEN", "WANDB_API_KEY=env:MY_TOKEN", "--ssh-key", str(key), given="typed-in\n"
    )
    assert made.exit_code == 0, made.output
    (secret,) = double.objects("Secret", namespace)
    values = {name: base64.b64decode(value).decode() for name, value in secret["data"].items()}
    assert values == {
        "HF_TOKEN": "typed-in",
        "WANDB_API_KEY": "from-environment",
        "ssh-id_ed25519": "PRIVATE\n",
    }
    for value in ("typed-in", "from-environment", "PRIVATE"):
        assert value not in made.output
    assert dev("setup-secrets", "HF_TOKEN", given="new\n").exit_code == 0
    (secret,) = double.objects("Secret", namespace)
    assert base64.b64decode(secret["data"]["HF_TOKEN"]) == b"new"
    assert "WANDB_API_KEY" in secret["data"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["setup-secrets", "HF_TOKEN=hf_plain_value"], "holds no reference"),
        (["setup-secrets", "HF_TOKEN"], "no value was given for HF_TOKEN"),
        (["setup-secrets"], "say which secrets"),
        (["setup-secrets", "a b=env:HOME"], "letters, digits"),
        (["setup-secrets", "--ssh-key", "/nowhere/key"], "/nowhere/key cannot be read"),
        (["connect"], "say which image"),
    ],
)
def test_what_cannot_be_is_a_sentence(dev: Dev, words: list[str], said: str) -> None:
    result = dev(*words, given="")
    assert result.exit_code != 0
    assert said in str(result.exception)
    assert "hf_plain_value" not in str(result.exception) + result.output


def test_a_pod_that_has_ended_is_said(double: Any, dev: Dev) -> None:
    double.pods(dies=0, exit_code=1)
    dev("connect", "--image", "img:1")
    for _ in range(50):
        result = dev("connect", "--image", "img:1")
        if result.exception is not None and "has failed" in str(result.exception):
            return
        asyncio.run(asyncio.sleep(0.1))
    raise AssertionError(f"it never said that the pod has failed: {result.output} {result.exception}")


def test_nothing_of_it_is_in_the_journal(double: Any, dev: Dev) -> None:
    assert dev("setup-secrets", "HF_TOKEN", given="sentinel-77\n").exit_code == 0
    assert "sentinel-77" not in json.dumps([each["path"] for each in double.journal() if "path" in each])
