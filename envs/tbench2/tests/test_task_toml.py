"""task.toml: defaults, legacy spellings, and every refusal with file, line, key and reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollhook_tbench2.problems import line_of
from rollhook_tbench2.task_toml import parse_task_toml


def test_an_empty_file_has_the_defaults_of_the_format() -> None:
    config, problems = parse_task_toml("")
    assert problems == []
    assert config is not None
    assert config.environment.network_mode == "public"
    assert config.environment.build_timeout_sec == 600
    assert config.verifier.timeout_sec == 600
    assert config.agent.timeout_sec is None
    assert not config.host_ok


def test_a_terminal_bench_2_file_with_legacy_spellings_is_understood() -> None:
    config, problems = parse_task_toml(
        """
version = "1.0"
[metadata]
difficulty = "medium"
category = "software-engineering"
tags = ["a", "b"]
[verifier]
timeout_sec = 900.0
[agent]
timeout_sec = 1200
[environment]
build_timeout_sec = 600.0
docker_image = "example/fix-git:20251031"
cpus = 2
memory = "4G"
storage = "512M"
allow_internet = false
"""
    )
    assert problems == []
    assert config is not None
    assert config.schema_version == "1.0"
    assert config.family == "software-engineering"
    environment = config.environment
    assert (environment.memory_mb, environment.storage_mb) == (4096, 512)
    assert environment.network_mode == "no-network"
    assert config.agent.timeout_sec == 1200


@pytest.mark.parametrize(
    ("size", "megabytes"),
    [("2G", 2048), ("512M", 512), ("1.5G", 1536), ("1T", 1048576), ("100K", 1), ("2GB", 2048)],
)
def test_legacy_sizes(size: str, megabytes: int) -> None:
    config, problems = parse_task_toml(f'[environment]\nmemory = "{size}"\n')
    assert problems == []
    assert config is not None
    assert config.environment.memory_mb == megabytes


def test_an_unused_feature_may_be_spelt_out() -> None:
    text = """
artifacts = []
[environment]
os = "linux"
gpus = 0
gpu_types = []
mcp_servers = []
allowed_hosts = []
[verifier]
environment_mode = "shared"
collect = []
"""
    assert parse_task_toml(text)[1] == []


BAD = {
    "not TOML": ("[agent\n", ["task.toml:1: not TOML: "]),
    "a schema from the future": (
        'schema_version = "1.5"\n',
        ["task.toml:1: schema_version: input should be '1.0', '1.1', '1.2', '1.3' or '1.4', not '1.5'"],
    ),
    "two schemas": (
        'schema_version = "1.4"\nversion = "1.0"\n',
        ["task.toml:2: version: says '1.0' where schema_version says '1.4'; keep one"],
    ),
    "an unknown key": (
        "[environment]\nmemory_mbs = 5\n",
        ["task.toml:2: environment.memory_mbs: unknown key, did you mean 'memory_mb'?"],
    ),
    "an unknown table": (
        "[enviroment]\n",
        ["task.toml:1: enviroment: unknown key, did you mean 'environment'?"],
    ),
    "a number as text": (
        '[agent]\n\ntimeout_sec = "60"\n',
        ["task.toml:3: agent.timeout_sec: input should be a valid number, not '60'"],
    ),
    "no time at all": (
        "[verifier]\ntimeout_sec = 0\n",
        ["task.toml:2: verifier.timeout_sec: input should be greater than 0, not 0"],
    ),
    "endless time": (
        "[verifier]\ntimeout_sec = inf\n",
        ["task.toml:2: verifier.timeout_sec: input should be a finite number, not inf"],
    ),
    "a size that is none": (
        '[environment]\nmemory = "much"\n',
        ["task.toml:2: environment.memory: 'much' is not a size such as '512M' or '2G'"],
    ),
    "two sizes": (
        '[environment]\nmemory = "2G"\nmemory_mb = 1024\n',
        ["task.toml:2: environment.memory: says 2048 where environment.memory_mb says 1024; keep one"],
    ),
    "two network policies": (
        '[environment]\nallow_internet = true\nnetwork_mode = "no-network"\n',
        [
            "task.toml:2: environment.allow_internet: says 'public' where environment.network_mode says "
            "'no-network'; keep one"
        ],
    ),
    "a relative directory": (
        '[environment]\nworkdir = "app"\n',
        ["task.toml:2: environment.workdir: string should match pattern '^/', not 'app'"],
    ),
    "a value from the host": (
        '[verifier.env]\nKEY = "${OPENAI_API_KEY:-none}"\n',
        [
            "task.toml:1: verifier.env: KEY takes a value from the host (${OPENAI_API_KEY:-none}), "
            "which is not supported"
        ],
    ),
    "GPUs": ("[environment]\ngpus = 1\n", ["task.toml:2: environment.gpus: GPUs (gpus = 1): not supported"]),
    "GPU types": (
        '[environment]\ngpu_types = ["H100"]\n',
        ["task.toml:2: environment.gpu_types: GPU types (gpu_types = ['H100']): not supported"],
    ),
    "a TPU": (
        '[environment.tpu]\ntype = "v5"\n',
        ["task.toml:1: environment.tpu: TPUs (tpu = {'type': 'v5'}): not supported"],
    ),
    "MCP servers": (
        '[[environment.mcp_servers]]\nname = "x"\n',
        ["task.toml:1: environment.mcp_servers: MCP servers (mcp_servers = [{'name': 'x'}]): not supported"],
    ),
    "skills": (
        '[environment]\nskills_dir = "/skills"\n',
        ["task.toml:2: environment.skills_dir: skills (skills_dir = '/skills'): not supported"],
    ),
    "a health check": (
        '[environment.healthcheck]\ncommand = "true"\n',
        [
            "task.toml:1: environment.healthcheck: health checks (healthcheck = {'command': 'true'}): "
            "not supported"
        ],
    ),
    "an allowlist": (
        '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["pypi.org"]\n',
        [
            "task.toml:3: environment.allowed_hosts: a network allowlist (allowed_hosts = ['pypi.org']): "
            "not supported",
            "task.toml:2: environment.network_mode: a network allowlist (network_mode = 'allowlist'): "
            "not supported",
        ],
    ),
    "Windows": (
        '[environment]\nos = "windows"\n',
        ["task.toml:2: environment.os: Windows (os = 'windows'): not supported"],
    ),
    "a separate verifier": (
        '[verifier]\nenvironment_mode = "separate"\n[verifier.environment]\ncpus = 1\n',
        [
            "task.toml:3: verifier.environment: a verifier environment of its own "
            "(environment = {'cpus': 1}): not supported",
            "task.toml:2: verifier.environment_mode: a separate verifier environment "
            "(environment_mode = 'separate'): not supported",
        ],
    ),
    "collect hooks": (
        '[[verifier.collect]]\ncommand = "x"\n',
        ["task.toml:1: verifier.collect: collect hooks (collect = [{'command': 'x'}]): not supported"],
    ),
    "a user for the agent": (
        '[agent]\nuser = "me"\n',
        ["task.toml:2: agent.user: a user of the agent's own (user = 'me'): not supported"],
    ),
    "a network for the agent": (
        '[agent]\nnetwork_mode = "public"\n',
        [
            "task.toml:2: agent.network_mode: a network policy of the agent's own "
            "(network_mode = 'public'): not supported"
        ],
    ),
    "a network for the verifier": (
        '[verifier]\nnetwork_mode = "public"\n',
        [
            "task.toml:2: verifier.network_mode: a network policy of the verifier's own "
            "(network_mode = 'public'): not supported"
        ],
    ),
    "artifacts": (
        'artifacts = ["/work/out"]\n',
        ["task.toml:1: artifacts: artifacts (artifacts = ['/work/out']): not supported"],
    ),
    "steps": (
        '[agent]\ntimeout_sec = 1\n[[steps]]\nname = "one"\n',
        ["task.toml:3: steps: tasks of several steps (steps = [{'name': 'one'}]): not supported"],
    ),
    "everything at once": (
        '[environment]\ngpus = 1\ncpus = -1\n[agent]\nuser = "me"\n',
        [
            "task.toml:2: environment.gpus: GPUs (gpus = 1): not supported",
            "task.toml:5: agent.user: a user of the agent's own (user = 'me'): not supported",
            "task.toml:3: environment.cpus: input should be greater than 0, not -1",
        ],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said_with_file_line_key_and_reason(name: str) -> None:
    text, expected = BAD[name]
    config, problems = parse_task_toml(text)
    assert config is None
    assert len(problems) == len(expected)
    for problem, message in zip(problems, expected, strict=True):
        assert str(problem).startswith(message)


@given(st.text())
def test_any_text_is_parsed_or_refused(text: str) -> None:
    config, problems = parse_task_toml(text)
    assert (config is None) == bool(problems)


def test_lines_are_found_in_tables_inline_tables_and_arrays() -> None:
    text = 'a = 1\n[t]\nb = {c = 1}\nd.e = 2\n[[s]]\nx = 1\n[[s]]\nx = 2\n[t."u"]\ny = 3\n'
    assert line_of(text, ["a"]) == 1
    assert line_of(text, ["t"]) == 2
    assert line_of(text, ["t", "b", "c"]) == 3
    assert line_of(text, ["t", "d", "e"]) == 4
    assert line_of(text, ["s", 0, "x"]) == 6
    assert line_of(text, ["s", 1, "x"]) == 8
    assert line_of(text, ["t", "u", "y"]) == 10
    assert line_of(text, ["nowhere"]) == 0
