"""The overrides, golden and composed by verl's own configuration; what is refused."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollhook.component import BuildContext
from rollhook.recipe.load import read_recipe
from rollhook.recipe.schema import Recipe
from rollhook.trainer import Place, Rendered
from rollhook_verl.checks import problems
from rollhook_verl.config import VerlConfig
from rollhook_verl.trainer import VerlTrainer

VERL, HYDRA = "verl==0.9.1", "hydra-core==1.3.8"
ENGINE = ["--tp-size", "2", "--mem-fraction-static", "0.6", "--context-length", "16384", "--page-size", "64"]
RECIPE = """\
name: tasks
model: {path: /models/m}
environment: {use: tbench2, tasks_dir: /tasks}
agent: shell
sandbox: docker
budgets: {max_seq_len: 16384, reply_tokens: 2048}
engine: {use: sglang, tp_size: 2}
rollout: {batch_groups: 16, group_size: 8}
evaluation: {every: 10, samples: 2}
checkpoint: {every: 20, keep: 3}
trainer: {use: verl}
launcher: {use: ray, nodes: 2, gpus_per_node: 8}
steps: 60
seed: 7
"""
COMPOSE = """\
import json, sys
from hydra import compose, initialize_config_dir
with initialize_config_dir(sys.argv[1], version_base=None):
    config = compose(sys.argv[2], overrides=sys.argv[3:])
from omegaconf import OmegaConf
print(json.dumps(OmegaConf.to_container(config, resolve=False)))
"""


def recipe(tmp_path: Path, *overrides: str) -> Recipe:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    loaded = read_recipe(tmp_path / "recipe.yaml", list(overrides))
    assert loaded.validated is not None, loaded.problems
    return loaded.validated


def render(found: Recipe, engine: Sequence[str] = ENGINE) -> Rendered:
    import logging

    context = BuildContext(logging.getLogger("test"), Path("/nowhere"), Path("/nowhere"))
    assert found.trainer is not None
    trainer = VerlTrainer(VerlConfig(**found.trainer.keys), context)
    return trainer.render(found, engine, Place(2, 8, "/runs/t-1"))


def words(rendered: Rendered, tmp_path: Path) -> list[str]:
    """Return what bash would give to Python, job variables filled in."""
    show = tmp_path / "show"
    show.write_text("#!/bin/sh\nfor word; do printf '%s\\0' \"$word\"; done\n")
    show.chmod(0o755)
    last = rendered.script.rpartition("exec python3")[2]
    env = {
        "PATH": os.environ["PATH"], "ROLLHOOK_JOB_DIR": "/job dir", "ROLLHOOK_JOB_FILES": "/job dir/job",
        "ROLLHOOK_RUN_ID": "t-1", "ROLLHOOK_ATTEMPT": "1",
    }  # fmt: skip
    argv = ["bash", "-c", f"{shlex.quote(str(show))} {last}"]
    done = subprocess.run(argv, env=env, capture_output=True, check=True)
    return done.stdout.decode().split("\0")[:-1]


@pytest.fixture(scope="module")
def composer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Compose verl's own configuration: its YAML from its wheel, its Hydra in a venv of its own."""
    place = tmp_path_factory.mktemp("verl")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    done = subprocess.run(
        [*pip, "download", VERL, "--no-deps", "-d", str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"needs pypi: {(done.stderr.strip().splitlines() or ['pip gave no reason'])[-1]}")
    with zipfile.ZipFile(next(place.glob("*.whl"))) as wheel:
        wheel.extractall(place / "x")
    venv.create(place / "venv", with_pip=False)
    python = place / "venv/bin/python"
    subprocess.run([*pip, "--python", str(python), "install", HYDRA], check=True)

    def composed(name: str, overrides: Sequence[str]) -> dict[str, Any]:
        argv = [str(python), "-c", COMPOSE, str(place / "x/verl/trainer/config"), name, *overrides]
        made = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stderr[-2000:]
        found: dict[str, Any] = json.loads(made.stdout)
        return found

    return composed


def test_verl_takes_every_override_of_grpo(composer: Any, tmp_path: Path) -> None:
    argv = words(render(recipe(tmp_path)), tmp_path)
    assert argv[:2] == ["-m", "verl.trainer.main_ppo"]
    config = composer("ppo_trainer", argv[2:])
    rollout = config["actor_rollout_ref"]["rollout"]
    assert config["algorithm"]["adv_estimator"] == "grpo"
    assert (rollout["name"], rollout["n"], rollout["agent"]["num_workers"]) == ("sglang", 8, 1)
    assert rollout["agent"]["agent_loop_config_path"] == "/job dir/job/verl_agent_loop.yaml"
    assert rollout["tensor_model_parallel_size"] == 2
    assert rollout["gpu_memory_utilization"] == 0.6
    assert rollout["engine_kwargs"]["sglang"] == {"page_size": 64}
    trainer = config["trainer"]
    assert (trainer["total_training_steps"], trainer["save_freq"], trainer["test_freq"]) == (60, 20, 10)
    assert (trainer["nnodes"], trainer["n_gpus_per_node"]) == (2, 8)
    assert trainer["v1"]["sampler"]["sync_refill_failed_groups"] is True
    assert config["data"]["train_files"] == "/job dir/data/train.parquet"
    environment = config["ray_kwargs"]["ray_init"]["runtime_env"]["env_vars"]
    assert environment["ROLLHOOK_JOB_DIR"] == "/job dir"


def test_verl_takes_every_override_of_ppo(composer: Any, tmp_path: Path) -> None:
    found = recipe(
        tmp_path, "+trainer.algorithm=ppo", "evaluation.every=0", "+trainer.overrides=['trainer.nnodes=9']"
    )
    config = composer("ppo_trainer", words(render(found), tmp_path)[2:])
    assert config["algorithm"]["adv_estimator"] == "gae"
    assert config["critic"]["model"]["path"] == "/models/m"
    assert config["trainer"]["test_freq"] == -1
    assert config["trainer"]["nnodes"] == 9


def test_verl_takes_every_override_of_sft(composer: Any, tmp_path: Path) -> None:
    found = recipe(tmp_path, "trainer={use: verl, algorithm: sft, data: /d/sft.parquet}")
    argv = words(render(found, []), tmp_path)
    assert argv[:2] == ["-m", "verl.trainer.sft_trainer_ray"]
    config = composer("sft_trainer_engine", argv[2:])
    assert config["data"]["train_files"] == "/d/sft.parquet"
    assert config["trainer"]["total_training_steps"] == 60
    assert config["trainer"]["device"] == "cuda"


def test_overrides_come_last_and_hold_no_secret() -> None:
    with pytest.raises(ValueError, match=r"may not hold trainer\.wandb\.api_key"):
        VerlConfig(overrides=["+trainer.wandb.api_key=x"])
    with pytest.raises(ValueError, match="is no override of Hydra"):
        VerlConfig(overrides=["trainer.nnodes"])


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["~launcher.gpus_per_node"], "launcher.gpus_per_node"),
        (["~model"], "model.path"),
        (["engine={use: transformers}"], "engine"),
        (["+trainer.prompt_tokens=20000"], "trainer.prompt_tokens"),
        (["rollout.group_size=1"], "rollout.group_size"),
        (["+trainer.mini_batch_groups=3"], "trainer.mini_batch_groups"),
    ],
)
def test_what_cannot_be_is_told_before_a_gpu_is_held(
    tmp_path: Path, overrides: Sequence[str], key: str
) -> None:
    assert [problem.key for problem in problems(recipe(tmp_path, *overrides))] == [key]


def test_sft_needs_data_and_no_other_does() -> None:
    with pytest.raises(ValueError, match="data is for algorithm sft"):
        VerlConfig(algorithm="sft")
    with pytest.raises(ValueError, match="data is for algorithm sft"):
        VerlConfig(data="/d")
