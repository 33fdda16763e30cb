"""How a job stands, by what its RayJob says: every pair of statuses, and what the script left."""

from __future__ import annotations

from typing import Any

import pytest

from rollhook_kuberay.rayjob import judge, taken


def rayjob(over: str, ray: str = "", message: str = "", reason: str = "", **notes: str) -> dict[str, Any]:
    said = {"jobDeploymentStatus": over, "jobStatus": ray, "message": message, "reason": reason}
    return {
        "metadata": {"name": "demo-a1", "annotations": notes},
        "status": {k: v for k, v in said.items() if v},
    }


FAILED = "Job entrypoint command failed with exit code 3, last available logs (truncated to 20,000 chars):\nx"


@pytest.mark.parametrize(
    ("over", "ray", "state"),
    [
        ("", "", "pending"),
        ("Initializing", "", "pending"),
        ("Waiting", "", "pending"),
        ("Retrying", "FAILED", "pending"),
        ("Running", "", "pending"),
        ("Running", "PENDING", "pending"),
        ("Running", "RUNNING", "running"),
        ("Running", "SUCCEEDED", "running"),
        ("Suspending", "STOPPED", "running"),
        ("Suspended", "", "pending"),
        ("Complete", "SUCCEEDED", "succeeded"),
        ("Complete", "STOPPED", "stopped"),
        ("Complete", "FAILED", "failed"),
        ("Complete", "", "failed"),
        ("Failed", "FAILED", "failed"),
        ("Failed", "RUNNING", "failed"),
        ("Failed", "SUCCEEDED", "failed"),
        ("ValidationFailed", "", "failed"),
        ("SomethingNew", "RUNNING", "pending"),
    ],
)
def test_every_pair(over: str, ray: str, state: str) -> None:
    assert judge(rayjob(over, ray), stopped_code=3).state == state


def test_a_script_that_says_that_it_was_stopped_is_believed() -> None:
    status = judge(rayjob("Failed", "FAILED", FAILED, "AppFailed"), stopped_code=3)
    assert (status.state, status.exit_code) == ("stopped", 3)
    other = judge(rayjob("Failed", "FAILED", FAILED, "AppFailed"), stopped_code=None)
    assert (other.state, other.exit_code) == ("failed", 3)
    assert "AppFailed" in other.message
    assert "exit code 3" in other.message


def test_a_validation_that_failed_ends_it_and_says_why() -> None:
    said = judge(
        rayjob("ValidationFailed", "", "The RayJob spec is invalid: x", "ValidationFailed"), stopped_code=3
    )
    assert said.state == "failed"
    assert "spec is invalid" in said.message


def test_one_that_was_suspended_by_us_is_stopped() -> None:
    assert judge(rayjob("Suspended", **{"rollhook/stopped": "true"}), stopped_code=None).state == "stopped"


def test_one_that_is_gone_is_judged_by_what_it_left() -> None:
    assert judge(None, stopped_code=3).state == "lost"
    assert judge(None, stopped_code=3, recorded=0).state == "succeeded"
    assert judge(None, stopped_code=3, recorded=3).state == "stopped"
    assert judge(None, stopped_code=3, recorded=7).state == "failed"


def test_a_name_in_use_is_said_with_the_way_out() -> None:
    assert "launcher.replace=true" in taken("demo-a1", rayjob("Complete"))
    assert "stop it" in taken("demo-a1", rayjob("Running"))
