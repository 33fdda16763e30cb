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
    "a part of a value from the host": (
        '[verifier.env]\nKEY = "Bearer ${TOKEN}"\n',
        [
            "task.toml:1: verifier.env: KEY takes a part of its value from the host; only a whole value can "
            "be, as ${NAME} or ${NAME:-default}"
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
    "hosts without an allowlist": (
        '[environment]\nallowed_hosts = ["pypi.org"]\n',
        ["task.toml:1: environment: allowed_hosts has an effect only with network_mode = 'allowlist'"],
    ),
    "an address in an allowlist": (
        '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["10.0.0.0/8"]\n',
        [
            "task.toml:3: environment.allowed_hosts: '10.0.0.0/8' is an address; sandboxes take host names "
            "only"
        ],
    ),
    "a wildcard in an allowlist": (
        '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["*.pypi.org"]\n',
        [
            "task.toml:3: environment.allowed_hosts: '*.pypi.org' is a wildcard; sandboxes take whole host "
            "names only"
        ],
    ),
    "a URL in an allowlist": (
        '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["https://pypi.org"]\n',
        ["task.toml:3: environment.allowed_hosts: 'https://pypi.org' is no host name (no URL, port or path)"],
    ),
    "a health check without a command": (
        "[environment.healthcheck]\nretries = 1\n",
        ["task.toml:1: environment.healthcheck.command: missing"],
    ),
    "no tries at all": (
        '[environment.healthcheck]\ncommand = "x"\nretries = 0\n',
        ["task.toml:3: environment.healthcheck.retries: input should be greater than 0, not 0"],
    ),
    "Windows": (
        '[environment]\nos = "windows"\n',
        ["task.toml:2: environment.os: Windows (os = 'windows'): not supported"],
    ),
    "a verifier in two places": (
        '[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\ncpus = 1\n',
        ["task.toml:1: verifier: environment_mode = 'shared' contradicts [verifier.environment]; keep one"],
    ),
    "a second service": (
        '[[verifier.collect]]\ncommand = "x"\nservice = "db"\n',
        ["task.toml:3: verifier.collect.0.service: input should be 'main', not 'db'"],
    ),
    "an artifact outside": (
        'artifacts = ["/work/../etc"]\n',
        ["task.toml:1: artifacts.0.source: '/work/../etc' is no path of a file or directory without '..'"],
    ),
    "an artifact that is everything": (
        'artifacts = ["/"]\n',
        ["task.toml:1: artifacts.0.source: '/' is no path of a file or directory without '..'"],
    ),
    "an artifact at the verifier's place": (
        'artifacts = ["/logs/verifier/reward.txt"]\n',
        [
            "task.toml:1: artifacts.0.source: '/logs/verifier/reward.txt' is where only the verifier may "
            "leave anything"
        ],
    ),
    "a destination outside": (
        '[[artifacts]]\nsource = "/work"\ndestination = "../x"\n',
        [
            "task.toml:3: artifacts.0.destination: '../x' is no relative path with forward slashes and "
            "without '..'"
        ],
    ),
    "the name of the manifest": (
        '[[artifacts]]\nsource = "/work"\ndestination = "manifest.json"\n',
        [
            "task.toml:3: artifacts.0.destination: 'manifest.json' is the name of the list of what was "
            "collected"
        ],
    ),
    "a key of an artifact": (
        '[[artifacts]]\nsource = "/work"\nexcludes = ["x"]\n',
        ["task.toml:3: artifacts.0.excludes: unknown key, did you mean 'exclude'?"],
    ),
    "a step without a name": ("[[steps]]\nmin_reward = 1.0\n", ["task.toml:1: steps.0.name: missing"]),
    "a step that is a path": (
        '[[steps]]\nname = "../x"\n',
        ["task.toml:2: steps.0.name: '../x' is no portable name of a directory"],
    ),
    "two steps of one name": (
        '[[steps]]\nname = "a"\n[[steps]]\nname = "A"\n',
        ["task.toml: two steps have the same name"],
    ),
    "a strategy for nothing": (
        'multi_step_reward_strategy = "final"\n',
        ["task.toml: multi_step_reward_strategy has an effect only with [[steps]]"],
    ),
    "an unknown key of a step": (
        '[[steps]]\nname = "a"\n[[steps]]\nname = "b"\nmin_rewards = 1.0\n',
        ["task.toml:5: steps.1.min_rewards: unknown key, did you mean 'min_reward'?"],
    ),
    "a legacy spelling of a verifier's box": (
        '[verifier.environment]\nmemory = "2G"\nmemory_mb = 1024\n',
        [
            "task.toml:2: verifier.environment.memory: says 2048 where verifier.environment.memory_mb says "
            "1024; keep one"
        ],
    ),
    "a name without its organisation": (
        '[task]\nname = "x"\n',
        ["task.toml:2: task.name: string should match pattern"],
    ),
    "a number of too many digits": (f"[agent]\ntimeout_sec = {'9' * 5000}\n", ["task.toml: not TOML: "]),
    "a key that is nested too deep": (
        f"[{'.'.join('a' * 5000)}]\n",
        ["task.toml: not TOML: it is nested too"],
    ),
    "a size of too many digits": (
        f"[environment]\nmemory = '{'9' * 400}G'\n",
        ["task.toml:2: environment.memory: '999"],
    ),
    "a number that is a mistake": (
        "[agent]\ntimeout_sec = 1e308\n[environment]\nmemory_mb = 10000000000000\ncpus = 1e300\n"
        "[environment.healthcheck]\ncommand = 'x'\nretries = 99999999\ninterval_sec = 1e10\n",
        [
            "task.toml:5: environment.cpus: input should be less than or equal to 1000000",
            "task.toml:4: environment.memory_mb: input should be less than or equal to 1073741824",
            "task.toml:9: environment.healthcheck.interval_sec: input should be less than or equal to",
            "task.toml:8: environment.healthcheck.retries: input should be less than or equal to 1000000",
            "task.toml:2: agent.timeout_sec: input should be less than or equal to 1000000000, not 1e+308",
        ],
    ),
    "a gate that nothing reaches": (
        '[[steps]]\nname = "a"\nmin_reward = nan\n[[steps]]\nname = "b"\nmin_reward = {x = inf}\n',
        [
            "task.toml:3: steps.0.min_reward: input should be a finite number, not nan",
            "task.toml:3: steps.0.min_reward: input should be a valid dictionary, not nan",
            "task.toml:6: steps.1.min_reward: input should be a valid number, not {'x': inf}",
            "task.toml:6: steps.1.min_reward.x: input should be a finite number, not inf",
        ],
    ),
    "a text that no program can be given": (
        '[environment]\nworkdir = "/a\\u0000"\n[environment.env]\nA = "\\u0000"\n'
        '[[artifacts]]\nsource = "/a\\u0000b"\n',
        [
            "task.toml:2: environment.workdir: holds the character NUL",
            "task.toml:4: environment.env.A: holds the character NUL",
            "task.toml:6: artifacts.0.source: holds the character NUL",
        ],
    ),
    "a number that TOML does not have": (
        f"[metadata]\nyear = {10**20}\n",
        ["task.toml:2: metadata.year: is no number of 64 bits, which is what TOML has"],
    ),
    "artifacts where the list of them is": (
        'artifacts = ["manifest.json", {source = "/a", destination = "./manifest.json/x"}]\n',
        [
            "task.toml:1: artifacts.0: 'manifest.json' is the name of the list of what was collected",
            "task.toml:1: artifacts.1.destination: 'manifest.json' is the name of the list of what was",
        ],
    ),
    "names of variables": (
        '[environment.env]\n"A=B" = "x"\n[verifier.env]\n"" = "y"\n',
        [
            "task.toml:1: environment.env: 'A=B' is no name of a variable",
            "task.toml:3: verifier.env: '' is no name of a variable",
        ],
    ),
    "users": (
        '[agent]\nuser = "--help"\n[verifier]\nuser = -1\n[[verifier.collect]]\ncommand = "x"\nuser = ""\n',
        [
            "task.toml:2: agent.user: '--help' is no user",
            "task.toml:4: verifier.user: -1 is no user",
            "task.toml:7: verifier.collect.0.user: '' is no user",
        ],
    ),
    "images": (
        '[environment]\ndocker_image = ""\n[verifier.environment]\ndocker_image = "a\\nRUN b"\n',
        [
            "task.toml:2: environment.docker_image: '' is no name of an image",
            "task.toml:4: verifier.environment.docker_image: 'a\\nRUN b' is no name of an image",
        ],
    ),
    "a place of the verifier in another spelling": (
        'artifacts = ["//tests/x"]\n',
        ["task.toml:1: artifacts.0.source: '//tests/x' is where only the verifier may leave anything"],
    ),
    "something that is no table": (
        "agent = 2020-12-25\nsteps = [1]\n",
        ["task.toml:1: agent: must be a table, not ", "task.toml:2: steps.0: must be a table, not 1"],
    ),
    "everything at once": (
        "[environment]\ngpus = 1\ncpus = -1\n[agent]\nusers = 1\n",
        [
            "task.toml:2: environment.gpus: GPUs (gpus = 1): not supported",
            "task.toml:3: environment.cpus: input should be greater than 0, not -1",
            "task.toml:5: agent.users: unknown key, did you mean 'user'?",
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


NO, CHECK = "not supported", "command = 'true'"
#: every key of a table of Harbor 0.26.0 that describes a box: (its value, what is refused of it)
BOX_KEYS = {
    "network_mode": ("'no-network'", ""),
    "allowed_hosts": ("['pypi.org']\nnetwork_mode = 'allowlist'", ""),
    "build_timeout_sec": ("30.0", ""),
    "docker_image": ("'debian:12'", ""),
    "os": ("'Linux'", ""),
    "cpus": ("0.5", ""),
    "memory_mb": ("64", ""),
    "storage_mb": ("64", ""),
    "gpus": ("1", NO),
    "gpu_types": ("['H100']", NO),
    "tpu": ("{type = 'v6e', topology = '2x2'}", NO),
    "mcp_servers": ("[{name = 'x', transport = 'stdio', command = 'y', args = []}]", NO),
    "env": ("{A = '1', B = '${B}', C = '${C:-}'}", ""),
    "skills_dir": ("'/skills'", NO),
    "healthcheck": (
        "{command = 'x', interval_sec = 1, timeout_sec = 1, start_period_sec = 0, start_interval_sec = 1, "
        "retries = 1}",
        "",
    ),
    "workdir": ("'/app'", ""),
    "allow_internet": ("false", ""),
    "memory": ("'64M'", ""),
    "storage": ("'64M'", ""),
}
VERIFIER_KEYS = {
    "network_mode": "'public'",
    "allowed_hosts": "[]",
    "timeout_sec": "1.5",
    "env": "{A = '${A:-x}'}",
    "user": "'judge'",
    "environment_mode": "'separate'",
    "collect": "[{command = 'x', service = 'main', timeout_sec = 1, user = 0}]",
}
AGENT_KEYS = {"network_mode": "'public'", "allowed_hosts": "[]", "timeout_sec": "9", "user": "1000"}
ARTIFACTS = "['/a', {source = '/b', destination = 'b', exclude = ['*.o'], service = 'main'}]"
STEP_KEYS = {
    "min_reward": "{reward = 0.5}",
    "healthcheck": "{command = 'x'}",
    "artifacts": ARTIFACTS,
}
ROOT_KEYS = {
    "schema_version": "'1.4'",
    "source": "'somewhere'",
    "task": "{name = 'a/b', version = '1', description = 'd', authors = [{name = 'n', email = 'e'}], "
    "keywords = ['k']}",
    "metadata": "{any = 'thing'}",
    "solution": "{env = {A = '1'}}",
    "artifacts": ARTIFACTS,
    "multi_step_reward_strategy": "'final'\n[[steps]]\nname = 'a'",
}
STEP = "[[steps]]\nname = 'a'\n"


@pytest.mark.parametrize("key", BOX_KEYS)
@pytest.mark.parametrize(
    "table", ["[environment]\n", "[verifier.environment]\n", f"{STEP}[steps.verifier.environment]\n"]
)
def test_every_key_of_a_box_is_taken_or_refused_by_name(table: str, key: str) -> None:
    value, refused = BOX_KEYS[key]
    config, problems = parse_task_toml(f"{table}{key} = {value}\n")
    assert (config is None) == bool(refused)
    assert [refused in str(problem) for problem in problems] == ([True] if refused else [])


@pytest.mark.parametrize(
    ("table", "keys"),
    [
        ("", ROOT_KEYS),
        ("[agent]\n", AGENT_KEYS),
        ("[verifier]\n", VERIFIER_KEYS),
        (STEP, STEP_KEYS),
        (f"{STEP}[steps.agent]\n", AGENT_KEYS),
        (f"{STEP}[steps.verifier]\n", VERIFIER_KEYS),
    ],
    ids=["root", "agent", "verifier", "step", "step agent", "step verifier"],
)
def test_every_other_key_is_taken(table: str, keys: dict[str, str]) -> None:
    for key, value in keys.items():
        config, problems = parse_task_toml(f"{table}{key} = {value}\n")
        assert (config is not None, problems) == (True, []), key


def test_a_health_check_that_names_only_its_command_has_the_defaults_of_docker() -> None:
    config, _ = parse_task_toml(f"[environment.healthcheck]\n{CHECK}\n")
    assert config is not None
    check = config.environment.healthcheck
    assert check is not None
    assert (check.interval_sec, check.timeout_sec, check.retries) == (5, 30, 3)
    assert (check.start_period_sec, check.start_interval_sec) == (0, 5)
