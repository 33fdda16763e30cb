"""`rollhook workload` and `rollhook code`: what is planned, refused, recorded, and checked on the node."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollhook.cli.main import main
from rollhook.testing.ray_cluster import RayCluster
from rollhook_ray.node import precheck
from rollhook_ray.prepare import make_tree, prepare_model, prepare_rl, prepare_sft
from rollhook_ray.snapshot import take

pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'rollhook-ray[data]'")
HERE = Path(__file__).parent
EXAMPLES = sorted((HERE.parent / "examples").glob("[!b]*.yaml"))
BASE = HERE.parent / "examples/base.yaml"
NOWHERE = "http://127.0.0.1:9"
SENTINEL = "sentinel-of-workloads-do-not-print"


class Cli:
    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self.capfd = capfd

    def __call__(self, *arguments: object, expected: int = 0) -> tuple[str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(each) for each in arguments])
        out, err = self.capfd.readouterr()
        assert (ended.value.code or 0) == expected, out + err
        return out, err


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capfd)


@pytest.fixture(scope="module")
def shared_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a shared root with a model, data sets and the snapshot codeA."""
    scratch = tmp_path_factory.mktemp("shared")
    root, model, questions = scratch / "private", scratch / "tiny", scratch / "q.jsonl"
    model.mkdir()
    (model / "config.json").write_text("{}")
    questions.write_text("\n".join(json.dumps({"question": "1?", "answer": "#### 1"}) for _ in range(20)))
    make_tree(root, print)
    prepare_model(str(model), "tiny", root, print)
    prepare_rl(questions, None, "gsm8k", root, print)
    prepare_sft(questions, None, "gsm8k_sft", root, print)
    take(HERE / "stub_verl", "codeA", root=root)
    return root


def spec_file(root: Path, directory: Path, name: str = "spec.json", **keys: Any) -> Path:
    data = {
        "workload": "ppo",
        "shared_root": str(root),
        "code_path": f"{root}/common/code/verl/codeA",
        "model": f"{root}/common/models/tiny",
        "dataset": f"{root}/datasets/gsm8k",
    }
    path = directory / name
    path.write_text(json.dumps(data | keys, indent=3) + "\n")
    return path


def base_file(directory: Path, address: str, **keys: Any) -> Path:
    path = directory / "base.yaml"
    path.write_text(yaml.safe_dump({"address": address, "gpus_per_node": 0} | keys))
    return path


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_planned(cli: Cli, example: Path) -> None:
    arguments = ("workload", "plan", example, "--base", BASE, "--id", "demo-1", "--json")
    out, _ = cli(*arguments)
    plan = json.loads(out)
    body = plan["requests"]["submit"]
    assert body["submission_id"] == "demo-1-a1"
    assert body["entrypoint_resources"] == {"worker_node": 1}
    assert body["entrypoint_num_cpus"] == 1
    path = "/private/common/code/verl/codeA:${PYTHONPATH}"
    assert body["runtime_env"]["env_vars"]["PYTHONPATH"] == path
    assert "working_dir" not in body["runtime_env"]
    assert f"trainer.default_local_dir={plan['job']['artefacts'][0]}" in plan["command"]
    assert cli(*arguments)[0] == out


def test_the_plan_in_the_docs_is_that_of_the_example(cli: Cli, tmp_path: Path) -> None:
    page = (HERE.parents[2] / "docs/how-to/verl-workloads.md").read_text()
    example = HERE.parent / "examples/ppo.yaml"
    cli("workload", "plan", example, "--base", BASE, "--id", "ppo-1", "-o", tmp_path)
    assert f"```bash\n{(tmp_path / 'attempts/1/job/entry.sh').read_text()}```" in page


def test_a_plan_can_be_read_and_written(cli: Cli, tmp_path: Path) -> None:
    out, _ = cli("workload", "plan", EXAMPLES[0], "--base", BASE, "--id", "demo-1")
    for part in (
        "verl.trainer.main_ppo",
        "# config/submit_cmd.txt",
        "# attempts/1/job/entry.sh",
        "precheck.py",
    ):
        assert part in out
    cli("workload", "plan", EXAMPLES[0], "--base", BASE, "--id", "demo-1", "-o", tmp_path / "plan")
    written = {str(path.relative_to(tmp_path / "plan")) for path in (tmp_path / "plan").rglob("*.*")}
    assert written >= {"config/runtime_env.json", "config/job_spec.yaml", "attempts/1/job/job.sh"}


def test_the_written_command_line_says_what_is_sent(cli: Cli, tmp_path: Path) -> None:
    keys = {"env_vars": {"GREETING": 'it\'s "here" $HOME'}, "submission_id": "demo-1"}
    spec = spec_file(tmp_path / "a root", tmp_path, **keys)
    arguments = ("workload", "plan", spec, "--base", base_file(tmp_path, NOWHERE))
    body = json.loads(cli(*arguments, "--json")[0])["requests"]["submit"]
    cli(*arguments, "-o", tmp_path / "plan")
    words = shlex.split((tmp_path / "plan/config/submit_cmd.txt").read_text())
    options, entrypoint = words[3 : words.index("--")], words[words.index("--") + 1 :]
    options.remove("--no-wait")
    said = dict(zip(options[::2], options[1::2], strict=True))
    assert said["--address"] == NOWHERE
    assert said["--submission-id"] == body["submission_id"]
    assert json.loads(said["--runtime-env-json"]) == body["runtime_env"]
    assert json.loads(said["--entrypoint-resources"]) == body["entrypoint_resources"]
    assert float(said["--entrypoint-num-cpus"]) == body["entrypoint_num_cpus"]
    assert entrypoint == shlex.split(body["entrypoint"])
    assert json.loads((tmp_path / "plan/config/runtime_env.json").read_text()) == body["runtime_env"]
    assert (tmp_path / "plan/config/job_spec.json").read_bytes() == spec.read_bytes()


def test_all_that_is_missing_is_said_at_once_and_nothing_is_written(cli: Cli, tmp_path: Path) -> None:
    root = tmp_path / "private"
    (root / "datasets").mkdir(parents=True)
    spec = spec_file(root, tmp_path, reward_fn_path=f"{root}/user/code/r.py")
    base = base_file(tmp_path, NOWHERE)
    out, _ = cli("workload", "check", spec, "--base", base, expected=1)
    for part in (
        f"{root} lacks hf, jobs, outputs",
        "codeA is not there: `rollhook code snapshot",
        "r.py is no file",
        "tiny is not there: `rollhook workload prepare --model",
        "train.parquet is not there",
        "test.parquet is not there",
        NOWHERE,
    ):
        assert part in out
    _, err = cli("workload", "submit", spec, "--base", base, expected=2)
    assert "was not submitted" in err
    assert err.count("\n  - ") == out.count("- ") - out.count(" - ")
    assert not (root / "jobs").exists()


@pytest.mark.parametrize("workload", ["ppo", "grpo", "sft"])
def test_what_is_there_is_enough(shared_root: Path, tmp_path: Path, cli: Cli, workload: str) -> None:
    dataset = f"{shared_root}/datasets/gsm8k" + ("_sft" if workload == "sft" else "")
    spec = spec_file(shared_root, tmp_path, workload=workload, dataset=dataset)
    out, _ = cli("workload", "check", spec, "--base", base_file(tmp_path, NOWHERE), expected=1)
    assert [line for line in out.splitlines() if NOWHERE not in line] == []


def test_sft_is_told_from_rl_data_before_anything_is_sent(
    shared_root: Path, tmp_path: Path, cli: Cli
) -> None:
    spec = spec_file(shared_root, tmp_path, workload="sft")
    out, _ = cli("workload", "check", spec, "--base", base_file(tmp_path, NOWHERE), expected=1)
    assert "has no column messages" in out
    assert "looks like one for ppo and grpo" in out


def test_what_the_cluster_refuses_is_kept_in_the_directory(
    shared_root: Path, tmp_path: Path, cli: Cli
) -> None:
    spec = spec_file(shared_root, tmp_path, submission_id="down-1")
    arguments = ("workload", "submit", spec, "--base", base_file(tmp_path, NOWHERE))
    _, err = cli(*arguments, expected=1)
    assert "down-1 was not submitted" in err
    directory = shared_root / "jobs/down-1"
    assert {path.name for path in directory.iterdir()} == {
        *("config", "logs", "checkpoints", "debug", "attempts"),
    }
    names = {path.name for path in (directory / "config").iterdir()}
    assert names == {"job_spec.json", "runtime_env.json", "submit_cmd.txt", "base.yaml"}
    assert (directory / "config/job_spec.json").read_bytes() == spec.read_bytes()
    assert NOWHERE in json.loads((directory / "attempts/1/submit.json").read_text())["error"]
    out, _ = cli("jobs", "status", "down-1", expected=1)
    assert "failed" in out
    before = {path: path.lstat().st_mtime_ns for path in directory.rglob("*")}
    _, err = cli(*arguments, expected=1)
    assert "run down-1 exists" in err
    assert {path: path.lstat().st_mtime_ns for path in directory.rglob("*")} == before


def test_an_id_that_is_no_run_id_is_refused_with_one_that_is(cli: Cli, tmp_path: Path) -> None:
    spec = spec_file(Path("/private"), tmp_path, submission_id="PPO_2026-01-01")
    _, err = cli("workload", "submit", spec, expected=2)
    assert "try 'ppo-2026-01-01'" in err


def test_preparing_and_snapshots_by_the_command_line(cli: Cli, tmp_path: Path, shared_root: Path) -> None:
    root = tmp_path / "private"
    _, err = cli("workload", "prepare", "--root", root)
    assert "made below" in err
    rl, sft = (shared_root / f"datasets/{name}/train.parquet" for name in ("gsm8k", "gsm8k_sft"))
    cli("workload", "prepare", "--root", root, "--rl-data", rl, "--sft-data", sft, "--name", "mine")
    assert (root / "datasets/mine/test.parquet").is_file()
    assert (root / "datasets/mine_sft/train.parquet").is_file()
    _, err = cli("workload", "prepare", "--root", root, "--test-data", rl, expected=2)
    assert "--test-data goes with --data" in err
    out, _ = cli("code", "snapshot", HERE / "stub_verl", "--id", "x", "--root", root)
    assert out == f"{root}/common/code/verl/x\n"
    out, _ = cli("code", "snapshot", HERE / "stub_verl", "--id", "x", "--root", root, "--json")
    assert json.loads(out)["written"] is False


def checked(code_path: Path, *more: object, python_path: Path | None = None) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "-P", precheck.__file__, str(code_path), "verl", *map(str, more)],
        env=os.environ | {"PYTHONPATH": str(python_path or code_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, (done.stdout + done.stderr).splitlines()


def test_the_precheck_fails_for_code_from_elsewhere(tmp_path: Path) -> None:
    code = take(HERE / "stub_verl", "codeA", root=tmp_path).path
    (tmp_path / "empty").mkdir()
    status, lines = checked(tmp_path / "empty", python_path=code)
    assert status == 1
    assert lines[:2] == [f"MVP_PRECHECK_VERL_FILE={code}/verl/__init__.py", "MVP_PRECHECK_MARKER=codeA"]
    assert f"verl is imported from {code}/verl/__init__.py, not from {tmp_path}/empty" in lines[2]


def test_the_precheck_fails_without_the_package(tmp_path: Path) -> None:
    (tmp_path / "codeA").mkdir()
    status, lines = checked(tmp_path / "codeA")
    assert status == 1
    assert lines[0] == "MVP_PRECHECK_VERL_FILE=none"
    assert "there is no package verl" in lines[2]


def test_the_precheck_fails_for_another_marker_and_for_paths_that_are_not_seen(tmp_path: Path) -> None:
    code = take(HERE / "stub_verl", "codeA", root=tmp_path).path
    copy = code.with_name("codeC")
    shutil.copytree(code, copy)
    status, lines = checked(copy, tmp_path / "no-model")
    assert status == 1
    assert lines[:2] == [f"MVP_PRECHECK_VERL_FILE={copy}/verl/__init__.py", "MVP_PRECHECK_MARKER=codeA"]
    assert [line.partition(" (on ")[0] for line in lines[2:]] == [
        f"precheck: {tmp_path}/no-model is not there",
        f"precheck: mvp_marker says codeA, and {copy} was asked for",
    ]


def test_totals_are_compared_with_the_cluster_before_anything_waits(
    cluster: RayCluster, shared_root: Path, tmp_path: Path, cli: Cli
) -> None:
    spec = spec_file(shared_root, tmp_path, workload="sft", dataset=f"{shared_root}/datasets/gsm8k_sft")
    base = base_file(tmp_path, cluster.dashboard, gpus_per_node=4)
    out, err = cli("workload", "check", spec, "--base", base, expected=1)
    assert "asks for 2 nodes of 4 GPUs each" in out
    assert err.count("4 CPUs, 0 GPUs") == 2
    assert ": 0 CPUs, 0 GPUs" in err
    out, _ = cli("workload", "check", spec, "--base", base_file(tmp_path, cluster.dashboard))
    assert out == "nothing is missing\n"


@pytest.mark.timeout(180)
def test_a_job_that_is_not_waited_for_goes_on_until_it_is_stopped(
    cluster: RayCluster, shared_root: Path, tmp_path: Path, cli: Cli
) -> None:
    keys = {
        "submission_id": "long-1",
        "trainer_overrides": ["total_epochs=1000", "+trainer.step_seconds=0.1"],
    }
    spec = spec_file(shared_root, tmp_path, **keys)
    out, _ = cli("workload", "submit", spec, "--base", base_file(tmp_path, cluster.dashboard), "--no-wait")
    assert out == "long-1\n"
    log = shared_root / "jobs/long-1/logs/driver.log"
    deadline = time.monotonic() + 90
    while not log.exists() or "step:11" not in log.read_text():
        assert time.monotonic() < deadline, log.read_text() if log.exists() else "there is no log"
        time.sleep(0.2)
    assert "running" in cli("jobs", "status", "long-1")[0]
    assert "stopped" in cli("jobs", "stop", "long-1", "--wait")[1]
    cli("jobs", "status", "long-1", expected=3)
    assert (shared_root / "jobs/long-1/checkpoints/global_step_10").is_dir()


@pytest.mark.timeout(180)
def test_a_job_whose_code_comes_from_elsewhere_fails_and_no_secret_is_left(
    cluster: RayCluster, shared_root: Path, tmp_path: Path, cli: Cli
) -> None:
    """A package without __init__.py gives way to one further back on the path: Python's own trap."""
    code, secret = tmp_path / "codeT", tmp_path / "token"
    shutil.copytree(HERE / "stub_verl", code)
    (code / "verl/__init__.py").unlink()
    secret.write_text(SENTINEL)
    variables = {"PYTHONPATH": str(HERE / "stub_verl"), "HF_TOKEN": f"file:{secret}"}
    keys = {"submission_id": "else-1", "code_path": str(code), "env_vars": variables}
    spec = spec_file(shared_root, tmp_path, **keys)
    out, err = cli("workload", "submit", spec, "--base", base_file(tmp_path, cluster.dashboard), expected=1)
    assert f"MVP_PRECHECK_VERL_FILE={HERE}/stub_verl/verl/__init__.py" in out
    assert f"not from {code}" in out
    assert "the probe verl failed" in out
    assert "step:" not in out
    directory = shared_root / "jobs/else-1"
    texts = [path.read_bytes() for path in directory.rglob("*") if path.is_file()]
    assert SENTINEL.encode() not in b"".join(texts)
    assert SENTINEL not in out + err
