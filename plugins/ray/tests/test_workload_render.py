"""What is submitted for a job spec: verl's command line word by word, its environment and its probe."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from workload_files import base_file, written

from rollhook.errors import UsageError
from rollhook.job_script import script_files
from rollhook_ray.workload import read_request
from rollhook_ray.workload_render import _hydra, last, render

COMMON = [
    "trainer.logger=[console]",
    "trainer.nnodes=2",
    "trainer.n_gpus_per_node=4",
    "trainer.total_epochs=1",
    "trainer.save_freq=10",
    "trainer.default_local_dir=/private/jobs/ppo-1/checkpoints",
]
GOLDEN = {
    "ppo": [
        *("python3", "-m", "verl.trainer.main_ppo"),
        "data.train_files=/private/datasets/gsm8k/train.parquet",
        "data.val_files=/private/datasets/gsm8k/test.parquet",
        "actor_rollout_ref.model.path=/private/common/models/qwen",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "algorithm.adv_estimator=gae",
        "critic.model.path=/private/common/models/qwen",
        "trainer.project_name=rollhook-ppo",
        "trainer.experiment_name=ppo-1",
        *COMMON,
    ],
    "grpo": [
        *("python3", "-m", "verl.trainer.main_ppo"),
        "data.train_files=/private/datasets/gsm8k/train.parquet",
        "data.val_files=/private/datasets/gsm8k/test.parquet",
        "actor_rollout_ref.model.path=/private/common/models/qwen",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=8",
        "trainer.project_name=rollhook-grpo",
        "trainer.experiment_name=ppo-1",
        *COMMON,
    ],
    "sft": [
        *("python3", "-m", "verl.trainer.sft_trainer_ray"),
        "data.train_files=/private/datasets/gsm8k/train.parquet",
        "model.path=/private/common/models/qwen",
        "trainer.total_training_steps=20",
        "trainer.device=cpu",
        "trainer.project_name=rollhook-sft",
        "trainer.experiment_name=ppo-1",
        *COMMON,
    ],
}


@pytest.mark.parametrize("workload", ["ppo", "grpo", "sft"])
def test_the_command_line_of_a_workload(tmp_path: Path, workload: str) -> None:
    assert render(read_request(written(tmp_path, workload=workload))).command == GOLDEN[workload]


def test_overrides_of_the_base_come_after_the_defaults_and_those_of_the_spec_last(tmp_path: Path) -> None:
    base = base_file(tmp_path, nodes=3, trainer_overrides={"save_freq": 20, "test_freq": 5})
    keys = {"trainer_overrides": {"save_freq": 30, "data": {"train_batch_size": 8, "max": {"length": 9}}}}
    command = render(read_request(written(tmp_path, **keys), base)).command
    assert command[-5:] == [
        *("trainer.save_freq=20", "trainer.test_freq=5"),
        *("trainer.save_freq=30", "data.train_batch_size=8", "data.max.length=9"),
    ]
    assert last(command, "trainer.save_freq") == "30"
    assert last(command, "trainer.nnodes") == "3"


def test_overrides_can_be_a_list_in_hydras_own_words(tmp_path: Path) -> None:
    given = ["total_epochs=3", "+data.extra=1", "~trainer.logger", "++x.y={a:1}"]
    command = render(read_request(written(tmp_path, trainer_overrides=given))).command
    assert command[-4:] == ["trainer.total_epochs=3", "+data.extra=1", "~trainer.logger", "++x.y={a:1}"]


def test_a_reward_function_is_named_to_verl(tmp_path: Path) -> None:
    request = read_request(written(tmp_path, reward_fn_path="/private/user/code/r.py:score"))
    command = render(request).command
    assert "custom_reward_function.path=/private/user/code/r.py" in command
    assert "custom_reward_function.name=score" in command
    request = read_request(written(tmp_path, reward_fn_path="/private/user/code/r.py"))
    assert not [each for each in render(request).command if each.startswith("custom_reward_function.name")]


def test_a_data_set_may_be_one_file(tmp_path: Path) -> None:
    command = render(read_request(written(tmp_path, dataset="/private/d/x.parquet"))).command
    assert command[3:5] == ["data.train_files=/private/d/x.parquet", "data.val_files=/private/d/x.parquet"]


def test_the_launcher_checks_what_the_overrides_ask_for(tmp_path: Path) -> None:
    keys = {"trainer_overrides": {"nnodes": 5, "n_gpus_per_node": 2}}
    rendered = render(read_request(written(tmp_path, **keys)))
    assert (rendered.job.resources.nodes, rendered.job.resources.gpus_per_node) == (5, 2)
    assert (rendered.config.nodes, rendered.config.gpus_per_node) == (5, 2)
    for value in ("many", 0, "${x}"):
        with pytest.raises(UsageError, match=r"trainer.nnodes=.* is not a whole number of at least 1"):
            render(read_request(written(tmp_path, trainer_overrides={"nnodes": value})))


def test_secrets_of_env_vars_are_references_and_others_go_to_all_processes(tmp_path: Path) -> None:
    variables = {"HF_TOKEN": "file:/private/user/token", "URI": "file:///private/x", "NCCL_DEBUG": "INFO"}
    rendered = render(read_request(written(tmp_path, env_vars=variables)))
    assert {k: str(v) for k, v in rendered.job.secrets.items()} == {"HF_TOKEN": "file:/private/user/token"}
    assert rendered.config.env_vars == {"URI": "file:///private/x", "NCCL_DEBUG": "INFO"}


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("/private/common/code/verl/codeA:$PYTHONPATH", "${PYTHONPATH}"),
        ("/private/common/code/verl/codeA", None),
        ("/opt/lib:$PYTHONPATH", "/opt/lib:${PYTHONPATH}"),
        ("/opt/lib:", "/opt/lib"),
    ],
)
def test_the_code_path_comes_before_a_users_own_python_path(
    tmp_path: Path, given: str, kept: str | None
) -> None:
    config = render(read_request(written(tmp_path, env_vars={"PYTHONPATH": given}))).config
    assert config.env_vars.get("PYTHONPATH") == kept


def test_no_file_of_a_job_names_another_root(tmp_path: Path) -> None:
    root = str(tmp_path / "elsewhere")
    keys = dict.fromkeys(("code_path", "model", "dataset"), f"{root}/x")
    rendered = render(read_request(written(tmp_path, shared_root=root, **keys)))
    text = "\n".join([*script_files(rendered.job).values(), rendered.job.directory, *rendered.job.artefacts])
    assert root in text
    assert "/private" not in text
    assert "/mnt/shared" not in text


def test_the_script_is_bash_and_keeps_every_word(tmp_path: Path) -> None:
    keys = {"trainer_overrides": {"x.prompt": 'it\'s "$HOME" `id`\\', "x.n": -1}}
    rendered = render(read_request(written(tmp_path, **keys)))
    script = rendered.job.script.replace("exec python3 -m", "printf '%s\\0' python3 -m", 1)
    done = subprocess.run(
        ["bash", "-c", script], env={"ROLLHOOK_JOB_DIR": str(tmp_path)}, capture_output=True, check=True
    )
    assert done.stdout.decode().split("\0")[:-1] == list(rendered.command)


def trainer(root: Path, text: str, version: str | None) -> str:
    code = root / "code"
    (code / "verl/trainer").mkdir(parents=True)
    (code / "verl/trainer/sft_trainer_ray.py").write_text(text)
    if version is not None:
        (code / "verl/version").mkdir()
        (code / "verl/version/version").write_text(f"{version}\n")
    return str(code)


NEW = "        self.training_client = RayWorkerGroup(\n            device_name=self.config.trainer.device,\n"


def test_sft_on_a_verl_that_only_counts_on_the_device_runs_on_cpu(tmp_path: Path) -> None:
    code = trainer(tmp_path, "self.device_name = self.config.trainer.device\n", "0.7.0.dev")
    rendered = render(read_request(written(tmp_path, workload="sft", code_path=code)))
    assert last(rendered.command, "trainer.device") == "cpu"
    assert rendered.notes == []


@pytest.mark.parametrize("version", ["0.8.0.dev", None])
def test_sft_on_a_verl_that_places_workers_by_the_device_leaves_it_and_says_so(
    tmp_path: Path, version: str | None
) -> None:
    code = trainer(tmp_path, NEW, version)
    rendered = render(read_request(written(tmp_path, workload="sft", code_path=code)))
    assert last(rendered.command, "trainer.device") is None
    assert f"verl {version or 'of an unknown version'} places workers by trainer.device" in rendered.notes[0]
    keys: dict[str, Any] = {"workload": "sft", "code_path": code, "trainer_overrides": {"device": "cpu"}}
    with pytest.raises(UsageError, match="with 'cpu' the job would wait forever"):
        render(read_request(written(tmp_path, **keys)))


def test_sft_on_code_that_is_not_seen_says_what_it_assumed(tmp_path: Path) -> None:
    rendered = render(read_request(written(tmp_path, workload="sft")))
    assert "is not seen from here" in rendered.notes[0]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "True"),
        (1e-06, "1e-06"),
        ("/a/b.parquet", "/a/b.parquet"),
        ("true", "'true'"),
        ("10", "'10'"),
        ("a b", "'a b'"),
        ("it's", r"'it\'s'"),
        ("a\\", r"'a\\'"),
        (["a", 1, None], "[a,1,null]"),
        ([{"k": "v w"}], "[{k:'v w'}]"),
        ("", "''"),
    ],
)
def test_values_in_hydras_grammar(value: Any, text: str) -> None:
    assert _hydra(value) == text


@given(st.text(st.characters(blacklist_categories=["Cs"]), max_size=30))
def test_a_text_is_one_quoted_value_or_plain(text: str) -> None:
    """A quote is escaped by a backslash, and a backslash is doubled only before a quote or at the end."""
    value = _hydra(text)
    if not value.startswith("'"):
        assert value == text
        return
    inner = value[1:-1]
    back = re.sub(r"(\\+)('|$)", lambda found: "\\" * (len(found[1]) // 2) + found[2], inner)
    assert back == text
    assert shlex.split(shlex.quote(value)) == [value]
