"""What is sent to Ray for a job."""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollhook.launcher import Code, Job, Resources
from rollhook.ray_jobs import RayNode
from rollhook_ray import RayLauncherConfig, jobs

JOB = Job("demo-0a1b2c", 2, "/private/demo-0a1b2c/attempts/2", "true")
DEFAULTS = RayLauncherConfig()


def test_by_default_the_driver_takes_a_cpu_and_a_worker_node_and_nothing_is_uploaded() -> None:
    assert DEFAULTS.address == "http://127.0.0.1:8265"
    assert jobs.request(DEFAULTS, JOB) == {
        "submission_id": "demo-0a1b2c-a2",
        "entrypoint": "exec env ROLLHOOK_TELLS_ALL=1 "
        "ROLLHOOK_JOB_DIR=/private/demo-0a1b2c/attempts/2 bash /private/demo-0a1b2c/attempts/2/job/job.sh",
        "entrypoint_num_cpus": 1.0,
        "entrypoint_resources": {"worker_node": 1.0},
        "runtime_env": {"env_vars": {"RAY_JOB_STOP_SIGNAL": "SIGINT", "RAY_JOB_STOP_WAIT_TIME_S": "80"}},
        "metadata": {"rollhook_run_id": "demo-0a1b2c", "rollhook_attempt": "2"},
    }
    assert jobs.upload(DEFAULTS, JOB) is None
    assert "export ROLLHOOK_WORKER_RESOURCE=worker_node" in jobs.files(DEFAULTS, JOB)["job/job.sh"]


def test_keys_of_the_recipe_go_before_what_the_job_asks() -> None:
    config = RayLauncherConfig(
        entrypoint_resources={"gold": 2}, entrypoint_num_cpus=0.5, entrypoint_num_gpus=0.1
    )
    asks = replace(JOB, resources=Resources(driver_cpus=4, driver_resources={"gold": 1, "disk": 1}))
    body = jobs.request(config, asks)
    assert (body["entrypoint_num_cpus"], body["entrypoint_num_gpus"]) == (0.5, 0.1)
    assert body["entrypoint_resources"] == {"gold": 2, "disk": 1}
    assert jobs.request(RayLauncherConfig(), asks)["entrypoint_num_cpus"] == 4


def test_ray_gives_a_stopped_job_longer_than_its_own_grace() -> None:
    env = jobs.environment(DEFAULTS, replace(JOB, stop_grace_seconds=30.5, stop_signal="TERM"))
    assert env["RAY_JOB_STOP_SIGNAL"] == "SIGTERM"
    assert int(env["RAY_JOB_STOP_WAIT_TIME_S"]) > 30.5 + 10


def test_code_goes_first_on_the_path_of_every_process(tmp_path: Path) -> None:
    job = replace(
        JOB, directory=str(tmp_path), code=Code("path", "/private/code/a"), script="echo $PYTHONPATH"
    )
    assert jobs.environment(DEFAULTS, job)["PYTHONPATH"] == "/private/code/a:${PYTHONPATH}"
    own = RayLauncherConfig(env_vars={"PYTHONPATH": "/opt/x"})
    assert jobs.environment(own, job)["PYTHONPATH"] == "/private/code/a:/opt/x"
    assert jobs.environment(own, JOB)["PYTHONPATH"] == "/opt/x"

    for name, text in jobs.files(DEFAULTS, job).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for expanded in ("/private/code/a:", "/private/code/a:/site"):  # what Ray makes of ${PYTHONPATH}
        done = subprocess.run(
            ["bash", str(tmp_path / "job/job.sh")], env={"PATH": "/usr/bin:/bin", "PYTHONPATH": expanded},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        path = done.stdout.strip().split(":")
        assert path[0] == "/private/code/a", done
        assert "" not in path, "an empty entry would be the working directory"


@given(st.text(st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1))
def test_any_directory_is_quoted_for_the_shell_that_ray_starts(name: str) -> None:
    body = jobs.request(DEFAULTS, replace(JOB, directory=f"/private/{name}"))
    said = shlex.split(body["entrypoint"])
    assert said[3:] == [f"ROLLHOOK_JOB_DIR=/private/{name}", "bash", f"/private/{name}/job/job.sh"]


def test_the_command_by_hand_says_what_the_request_says() -> None:
    config = RayLauncherConfig(env_vars={"NOTE": 'it\'s "here" $x'}, entrypoint_num_gpus=0.5)
    body = jobs.request(config, replace(JOB, directory="/private/a b"))
    words = shlex.split(shlex.join(jobs.by_hand("http://head:8265", body)))
    split = words.index("--")
    options = dict(zip(words[3:split:2], words[4:split:2], strict=False))
    assert words[:3] == ["ray", "job", "submit"]
    assert words[split + 1 :] == shlex.split(body["entrypoint"])
    del words[words.index("--no-wait")]
    options = dict(zip(words[3 : split - 1 : 2], words[4 : split - 1 : 2], strict=True))
    assert options["--address"] == "http://head:8265"
    assert options["--submission-id"] == body["submission_id"]
    assert json.loads(options["--runtime-env-json"]) == body["runtime_env"]
    assert json.loads(options["--entrypoint-resources"]) == body["entrypoint_resources"]
    assert json.loads(options["--metadata-json"]) == body["metadata"]
    assert float(options["--entrypoint-num-cpus"]) == body["entrypoint_num_cpus"]
    assert float(options["--entrypoint-num-gpus"]) == body["entrypoint_num_gpus"]


def test_where_nothing_is_shared_the_files_are_carried() -> None:
    config = RayLauncherConfig(shared=False, upload_exclude=["*.ckpt"])
    body = jobs.request(config, replace(JOB, code=Code("upload", "/home/me/code")))
    assert shlex.split(body["entrypoint"])[-1] == ".rollhook/job/job.sh"
    assert body["runtime_env"]["working_dir"] == jobs.UPLOADED
    upload = jobs.upload(config, replace(JOB, code=Code("upload", "/home/me/code")))
    assert upload is not None
    assert (upload["directory"], upload["files"]) == ("/home/me/code", ".rollhook")
    assert {".git", "*.ckpt"} <= set(upload["exclude"])


def test_only_what_the_head_lacks_keeps_a_driver_off_it() -> None:
    head = RayNode("a", "10.0.0.1", True, True, {"node:10.0.0.1": 1.0, "memory": 1e9})
    worker = RayNode("b", "10.0.0.2", False, True, {"CPU": 4.0, "worker_node": 100.0})
    assert not jobs.may_land_on_head(jobs.demand(DEFAULTS, JOB), [head, worker])
    nothing = RayLauncherConfig(entrypoint_resources={}, entrypoint_num_cpus=0)
    assert jobs.may_land_on_head(jobs.demand(nothing, JOB), [head, worker])
    big = replace(head, resources={"CPU": 8.0})
    cpus_only = RayLauncherConfig(entrypoint_resources={})
    assert not jobs.may_land_on_head(jobs.demand(cpus_only, JOB), [head, worker])
    assert jobs.may_land_on_head(jobs.demand(cpus_only, JOB), [big, worker])


@pytest.mark.parametrize(
    "name", ["WANDB_API_KEY", "hf_token", "DB_PASSWORD", "TOKEN", "AWS_SECRET_ACCESS_KEY"]
)
def test_what_is_named_like_a_secret_is_not_given_to_ray_in_clear(name: str) -> None:
    with pytest.raises(ValidationError, match=f"env_vars.{name} would be shown by Ray"):
        RayLauncherConfig(env_vars={name: "x"})


def test_harmless_names_and_addresses_are_taken_and_others_are_not() -> None:
    RayLauncherConfig(env_vars={"TOKENIZERS_PARALLELISM": "false", "NCCL_DEBUG": "INFO"})
    for address in ("127.0.0.1:8265", "ray://head:10001", "http://"):
        with pytest.raises(ValidationError, match="address"):
            RayLauncherConfig(address=address)


def test_small_jobs_are_known_by_the_job_that_they_are_for() -> None:
    for body in (
        jobs.looking(JOB, None, {"worker_node": 1}),
        jobs.cancelling(JOB.id, "source x"),
        jobs.killing(JOB.id, JOB.directory, "10.0.0.2"),
    ):
        assert jobs.is_small_job_of(JOB.id, body["submission_id"])
        assert not jobs.is_small_job_of("demo-0a1b2c-a1", body["submission_id"])
        assert body["entrypoint_num_cpus"] == 0
    assert not jobs.is_small_job_of(JOB.id, JOB.id)
    assert not jobs.is_small_job_of("demo", "demo-lookout-a1")
