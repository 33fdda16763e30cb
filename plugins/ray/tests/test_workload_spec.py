"""Job specs and base configs: every default, every refusal, and two forms of one spec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from workload_files import SPEC, base_file, written

from rollhook.errors import UsageError
from rollhook.recipe.problem import RecipeError
from rollhook.rundir import RUN_ID
from rollhook_ray.workload import check_id, read_request
from rollhook_ray.workload_render import render


def refused(spec: Path, base: Path | None = None) -> str:
    with pytest.raises(RecipeError) as caught:
        read_request(spec, base)
    return str(caught.value)


def test_defaults(tmp_path: Path) -> None:
    request = read_request(written(tmp_path))
    assert request.spec.shared_root == "/private"
    assert request.spec.reward_fn_path is None
    assert request.spec.env_vars == {}
    config = render(request).config
    assert config.address == "http://127.0.0.1:8265"
    assert config.entrypoint_resources == {"worker_node": 1}
    assert (config.nodes, config.gpus_per_node) == (2, 4)
    assert (config.code, config.code_path) == ("path", SPEC["code_path"])


@pytest.mark.parametrize("workload", ["ppo", "grpo", "sft"])
def test_json_and_yaml_give_identical_requests(tmp_path: Path, workload: str) -> None:
    keys = {
        "workload": workload,
        "trainer_overrides": {
            "total_epochs": 2,
            "data.lr": 1e-06,
            "on": True,
            "x.y": None,
            "n.l": [1, "a b"],
        },
        "env_vars": {"A": "值"},
        "resources": {"entrypoint_resources": {"worker_node": 2}, "entrypoint_num_cpus": 3},
        "ray": {"address": "http://head:8265"},
    }
    one = read_request(written(tmp_path, "spec.yaml", **keys))
    other = read_request(written(tmp_path, "spec.json", **keys))
    assert one.text != other.text
    assert one.spec == other.spec
    assert render(one) == render(other)


def test_what_both_files_name_the_spec_decides(tmp_path: Path) -> None:
    base = base_file(
        tmp_path,
        address="http://site:8265",
        entrypoint_resources={"gpu_node": 1},
        entrypoint_num_cpus=4,
        env_vars={"A": "site", "B": "site"},
    )
    config = render(read_request(written(tmp_path), base)).config
    assert config.address == "http://site:8265"
    assert config.entrypoint_resources == {"gpu_node": 1}
    assert config.entrypoint_num_cpus == 4
    keys = {"ray": {"address": "http://mine:8265"}, "env_vars": {"A": "mine"}}
    config = render(read_request(written(tmp_path, **keys), base)).config
    assert config.address == "http://mine:8265"
    assert config.env_vars == {"A": "mine", "B": "site"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"wrkload": "ppo"}, "'wrkload' is not a key"),
        ({"workload": "dpo"}, "'dpo' is not allowed"),
        ({"workload": None}, "workload: is missing"),
        ({"model": "/elsewhere/qwen"}, "'/elsewhere/qwen' is not below shared_root /private"),
        ({"model": "/private/../etc"}, "not an absolute path without '..'"),
        ({"model": "/privateer/qwen"}, "is not below shared_root"),
        ({"dataset": "gsm8k"}, "'gsm8k' is not an absolute path"),
        ({"code_path": "verl"}, "'verl' is not an absolute path"),
        ({"reward_fn_path": "/tmp/reward.py"}, "is not below shared_root"),
        ({"workload": "sft", "reward_fn_path": "/private/user/code/r.py"}, "sft knows no reward"),
        ({"submission_id": "PPO run/1"}, "try 'ppo-run-1'"),
        ({"resources": {"gpus": 1}}, "'gpus' is not a key"),
        ({"ray": {"adress": "http://x"}}, "did you mean 'address'?"),
        ({"trainer_overrides": ["total_epochs"]}, "'total_epochs' is no Hydra override: write KEY=VALUE"),
        ({"env_vars": {"HF_TOKEN": "hf_sentinel"}}, "HF_TOKEN holds a secret in clear"),
        ({"code_path": "/a:/b"}, "'/a:/b' has a colon"),
        ({"env_vars": {"A B": "x"}}, "'A B' is no name of a variable"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    text = refused(written(tmp_path, **keys))
    assert message in text
    assert "hf_sentinel" not in text


def test_all_that_is_wrong_in_both_files_is_said_at_once_with_lines(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("workload: dpo\ncode_path: verl\nmodel: /private/m\ndataset: /private/d\nx: 1\n")
    text = refused(spec, base_file(tmp_path, nodes=0, code_path="/x"))
    for part in (
        "spec.yaml:1: workload",
        "spec.yaml:2: code_path",
        "spec.yaml:5: x",
        "nodes",
        "belongs to the job",
    ):
        assert part in text


def test_secrets_of_a_base_config_are_references(tmp_path: Path) -> None:
    for keys in ({"env": {"HF_TOKEN": "hf_sentinel"}}, {"env_vars": {"HF_TOKEN": "hf_sentinel"}}):
        text = refused(written(tmp_path), base_file(tmp_path, **keys))
        assert "under `secrets`" in text
        assert "hf_sentinel" not in text
    base = base_file(tmp_path, secrets={"HF_TOKEN": "env:HF_TOKEN"})
    assert render(read_request(written(tmp_path), base)).job.secrets == {"HF_TOKEN": "env:HF_TOKEN"}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("spec.yaml", "a: [", "is not YAML"),
        ("spec.yaml", "- a", "not a mapping of keys"),
        ("spec.json", "{", "is not JSON"),
        ("spec.json", "[1]", "is not a mapping of keys"),
        ("spec.json", '{"workload": "ppo", "workload": "sft"}', "is given twice"),
        ("spec.yaml", "workload: ppo\nworkload: sft\n", "is given twice, in lines 1 and 2"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert message in refused(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in refused(tmp_path / "no.yaml")


def test_shared_root_stands_for_itself_in_every_value(tmp_path: Path) -> None:
    root = {"shared_root": "/mnt/a", "code_path": "${shared_root}/code", "model": "${SHARED_ROOT}/m"}
    keys = {"dataset": "${shared_root}/d", "trainer_overrides": {"x.y": "${shared_root}/z"}}
    spec = read_request(written(tmp_path, **root, **keys)).spec
    assert (spec.code_path, spec.model, spec.dataset) == ("/mnt/a/code", "/mnt/a/m", "/mnt/a/d")
    assert spec.trainer_overrides == {"x.y": "/mnt/a/z"}


@pytest.mark.parametrize("empty", [None, ""])
def test_an_empty_id_is_made_and_unique(tmp_path: Path, empty: str | None) -> None:
    path = written(tmp_path, submission_id=empty)
    ids = {read_request(path).id for _ in range(20)}
    assert len(ids) == 20
    assert all(RUN_ID.fullmatch(each) and each.startswith("ppo-") for each in ids)


def test_the_callers_id_comes_first(tmp_path: Path) -> None:
    assert read_request(written(tmp_path), submission_id="mine").id == "mine"
    with pytest.raises(UsageError, match="try 'mine-2'"):
        read_request(written(tmp_path), submission_id="Mine_2")


@given(st.text(max_size=60))
def test_an_id_is_taken_or_another_proposed_that_is(text: str) -> None:
    try:
        assert check_id(text) == text
    except ValueError as error:
        proposal = str(error).rpartition("try ")[2].strip("'")
        assert check_id(proposal) == proposal
