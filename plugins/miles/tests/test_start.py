"""The environment that miles' workers get, and how Ray is told of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from rollhook_miles import start


def test_the_rendered_environment_wins_and_the_networks_is_passed_on() -> None:
    here = {"NCCL_SOCKET_IFNAME": "eth7", "HOME": "/root", "ROLLHOOK_RUN_ID": "glm-1", "DAYTONA_API_KEY": "x"}
    found = start.worker_environment({"NCCL_DEBUG": "INFO", "no_proxy": "*"}, here, "10.4.0.2")
    assert found == {
        "NCCL_SOCKET_IFNAME": "eth7",
        "ROLLHOOK_RUN_ID": "glm-1",
        "MASTER_ADDR": "10.4.0.2",
        "no_proxy": "*",
        "NCCL_DEBUG": "INFO",
    }


def test_what_a_job_of_ray_says_already_is_kept() -> None:
    before = json.dumps(
        {"metadata": {"job_submission_id": "glm-1-a1"}, "runtime_env": {"env_vars": {"A": "1"}}}
    )
    config = json.loads(start.job_config(before, {"B": "2"}))
    assert config["metadata"] == {"job_submission_id": "glm-1-a1"}
    assert config["runtime_env"]["env_vars"] == {"A": "1", "B": "2"}
    assert json.loads(start.job_config("", {"B": "2"})) == {"runtime_env": {"env_vars": {"B": "2"}}}


def test_it_becomes_the_program(tmp_path: Path) -> None:
    rendered = tmp_path / "env.json"
    rendered.write_text(json.dumps({"GREETING": "it's"}))
    show = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
    argv = [
        sys.executable,
        "-m",
        "rollhook_miles.start",
        str(rendered),
        sys.executable,
        "-c",
        show,
        "--lr",
        "a b",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    words, environment = json.loads(done.stdout)
    assert words == ["--lr", "a b"]
    assert environment["GREETING"] == "it's"
    config = json.loads(environment[start.JOB_CONFIG])
    assert config["runtime_env"]["env_vars"]["GREETING"] == "it's"


def test_the_address_is_the_one_on_the_way_to_the_head() -> None:
    assert start.node_address("127.0.0.1:6379") == "127.0.0.1"
    assert start.node_address("") == "127.0.0.1"
