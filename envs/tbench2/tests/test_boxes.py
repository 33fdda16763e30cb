"""The sandbox that a task asks for on a backend, and what is refused before one starts."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from rollhook.environment import EpisodeContext
from rollhook.errors import Unsupported
from rollhook.sandbox import SandboxSpec
from rollhook.secrets import resolve_secret
from rollhook.testing.environment import build_context
from rollhook_tbench2.config import TBench2Config
from rollhook_tbench2.environment import TBench2

HOST = frozenset({"isolation", "network_off", "user"})
IMAGES = HOST | {"image", "image_build", "network_on", "network_allowlist"}
GIB = 2**30


def write_task(root: Path, toml: str, **files: str) -> Path:
    content = {"task.toml": toml, "instruction.md": "Do it.", "tests/test.sh": "#!/bin/sh\n", **files}
    for name, text in content.items():
        path = root / "t" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "t"


def environment(task: Path, capabilities: frozenset[str], **keys: object) -> TBench2:
    context = dataclasses.replace(build_context(), secret=resolve_secret)
    made = TBench2(TBench2Config(tasks_dir=str(task), **keys), context)  # type: ignore[arg-type]
    made.problems(capabilities)
    return made


def boxes(task: Path, capabilities: frozenset[str] = IMAGES, **keys: object) -> dict[str, SandboxSpec]:
    made = environment(task, capabilities, **keys)
    (only,) = made.tasks()
    assert only.problem is None, only.problem
    episode = made.episode(only, EpisodeContext("e", 0, {}, build_context()))
    return {name: box.spec for name, box in episode.boxes.items()}


def refused(task: Path, capabilities: frozenset[str] = IMAGES, **keys: object) -> str:
    return " ".join(environment(task, capabilities, **keys).problems(capabilities))


@pytest.mark.parametrize(
    ("asked", "cpus", "memory", "storage"),
    [
        ("", 1, 2, 10),
        ("cpus = 0.5\nmemory_mb = 100\nstorage_mb = 10", 1, 2, 10),
        ("cpus = 4\nmemory_mb = 8192\nstorage_mb = 20480", 4, 8, 20),
        ("memory = '4G'", 1, 4, 10),
    ],
)
def test_a_box_made_from_an_image_has_at_least_the_floor(
    tmp_path: Path, asked: str, cpus: float, memory: int, storage: int
) -> None:
    """Row 95."""
    spec = boxes(write_task(tmp_path, f"[environment]\ndocker_image = 'debian:12'\n{asked}\n"))["main"]
    assert (spec.cpus, spec.memory_bytes, spec.disk_bytes) == (cpus, memory * GIB, storage * GIB)


def test_the_floor_is_a_key_and_holds_for_images_only(tmp_path: Path) -> None:
    toml = "[metadata]\nhost_ok = true\n[environment]\ndocker_image = 'x:1'\nmemory_mb = 64\n"
    task = write_task(tmp_path, toml)
    low = boxes(task, floor={"cpus": 0, "memory_mb": 0, "storage_mb": 0})["main"]
    assert (low.cpus, low.memory_bytes, low.disk_bytes) == (None, 64 << 20, None)
    here = boxes(task, HOST)["main"]
    assert (here.cpus, here.memory_bytes, here.disk_bytes) == (None, 64 << 20, None)


DOCKERFILE = """\
ARG BASE=debian:12
FROM ${BASE} AS one
ENV APP=/srv/app MODE=x
RUN <<EOF
WORKDIR /not/this
EOF
WORKDIR $APP
USER ${WHO:-worker}:staff
"""


def test_a_dockerfile_is_built_with_environment_as_its_context_and_nothing_else(tmp_path: Path) -> None:
    """Row 93: neither solution/ nor tests/ can enter the image."""
    toml = "[environment]\nbuild_timeout_sec = 77.0\n[environment.env]\nB = '2'\n"
    task = write_task(
        tmp_path, toml, **{"environment/Dockerfile": DOCKERFILE, "solution/solve.sh": "#!/bin/sh"}
    )
    spec = boxes(task)["main"]
    assert (spec.image, spec.dockerfile, spec.build_seconds) == (None, DOCKERFILE, 77.0)
    assert spec.context_dir == str(task / "environment")
    assert sorted(os.listdir(task / "environment")) == ["Dockerfile"]
    assert (spec.workdir, spec.user) == ("/srv/app", "worker")
    # the image has its own ENV, and so its PATH
    assert dict(spec.env) == {"B": "2"}


def test_an_image_by_name_goes_before_the_dockerfile_that_made_it(tmp_path: Path) -> None:
    files = {"environment/Dockerfile": DOCKERFILE}
    task = write_task(tmp_path, "[environment]\ndocker_image = 'a/b:1'\n", **files)
    spec = boxes(task)["main"]
    assert (spec.image, spec.dockerfile, spec.context_dir) == ("a/b:1", None, None)
    assert (spec.workdir, spec.user) == ("/srv/app", "worker")
    built = boxes(task, IMAGES - {"image"})["main"]
    assert (built.image, built.dockerfile) == (None, DOCKERFILE)
    alone = write_task(tmp_path / "alone", "[environment]\ndocker_image = 'a/b:1'\n")
    built = boxes(alone, IMAGES - {"image"})["main"]
    assert (built.dockerfile, built.context_dir, built.workdir) == ("FROM a/b:1\n", None, "/")


def test_without_images_the_trivial_dockerfile_is_followed(tmp_path: Path) -> None:
    toml = (
        "[metadata]\nhost_ok = true\n[environment]\ndocker_image = 'debian:12'\nnetwork_mode = 'no-network'\n"
    )
    toml += "workdir = '/else'\n[environment.env]\nB = '2'\n"
    task = write_task(
        tmp_path, toml, **{"environment/Dockerfile": "FROM debian:12\nENV A=1 B=1\nWORKDIR /app\n"}
    )
    spec = boxes(task, HOST)["main"]
    assert (spec.image, spec.dockerfile, spec.workdir) == (None, None, "/else")
    assert dict(spec.env) == {"A": "1", "B": "2"}
    assert refused(task, HOST) == ""


def test_the_agent_works_as_the_user_that_the_task_names(tmp_path: Path) -> None:
    task = write_task(tmp_path, "[agent]\nuser = 1000\n[environment]\ndocker_image = 'x:1'\n")
    assert boxes(task)["main"].user == "1000"
    assert refused(task, IMAGES - {"user"}) == "task t: agent.user needs a sandbox with the capability user"
    image = write_task(tmp_path / "image", "", **{"environment/Dockerfile": "FROM x:1\nUSER worker\n"})
    assert refused(image, IMAGES - {"user"}) == (
        "task t: USER in environment/Dockerfile needs a sandbox with the capability user"
    )


@pytest.mark.parametrize(
    ("toml", "network", "allow", "capability"),
    [
        ("", True, (), "network_on"),
        ("network_mode = 'no-network'\n", False, (), "network_off"),
        (
            "network_mode = 'allowlist'\nallowed_hosts = ['PyPI.org.', 'a.b']\n",
            False,
            ("pypi.org", "a.b"),
            "network_allowlist",
        ),
        (
            "[agent]\nnetwork_mode = 'no-network'\n[verifier]\nnetwork_mode = 'no-network'\n",
            False,
            (),
            "network_off",
        ),
    ],
)
def test_a_network_policy_is_kept_or_refused_before_anything_starts(
    tmp_path: Path, toml: str, network: bool, allow: tuple[str, ...], capability: str
) -> None:
    task = write_task(tmp_path, f"[environment]\ndocker_image = 'x:1'\n{toml}")
    spec = boxes(task)["main"]
    assert (spec.network, spec.network_allow) == (network, allow)
    assert refused(task) == ""
    assert f"needs a sandbox with the capability {capability}" in refused(task, IMAGES - {capability})


def test_one_sandbox_cannot_have_two_networks(tmp_path: Path) -> None:
    toml = "[environment]\ndocker_image = 'x:1'\n[agent]\nnetwork_mode = 'no-network'\n"
    (task,) = environment(write_task(tmp_path, toml), IMAGES).tasks()
    assert str(task.problem).startswith(
        "task.toml: verifier.network_mode: 'public' for the verifier in the sandbox of an agent with "
        "'no-network': no sandbox changes its network while it runs"
    )
    apart = write_task(tmp_path / "apart", f"{toml}[verifier]\nenvironment_mode = 'separate'\n")
    specs = boxes(apart)
    assert (specs["main"].network, specs["verifier"].network) == (False, True)


def test_a_separate_verifier_has_the_tasks_box_again_or_one_of_its_own(tmp_path: Path) -> None:
    toml = "[environment]\ncpus = 2\n[verifier]\nenvironment_mode = 'separate'\n"
    same = boxes(write_task(tmp_path / "same", toml, **{"environment/Dockerfile": "FROM x:1\n"}))
    assert same["verifier"] == same["main"]
    own = boxes(
        write_task(
            tmp_path / "own",
            "[environment]\ncpus = 2\n[verifier.environment]\ncpus = 3\nnetwork_mode = 'no-network'\n",
            **{"environment/Dockerfile": "FROM x:1\n", "tests/Dockerfile": "FROM y:1\nCOPY . /tests/\n"},
        )
    )["verifier"]
    assert (own.dockerfile, own.cpus, own.network) == ("FROM y:1\nCOPY . /tests/\n", 3, False)
    assert own.context_dir == str(tmp_path / "own/t/tests")
    named = write_task(tmp_path / "named", "[verifier.environment]\ndocker_image = 'judge:1'\n")
    (named / "tests/test.sh").unlink()
    assert boxes(named)["verifier"].image == "judge:1"
    assert "its verifier is the image judge:1" in refused(named, HOST | {"network_on"}) or (
        "it needs its container image" in refused(named, HOST | {"network_on"})
    )


STEPS = """\
[verifier]
timeout_sec = 50.0
env = {A = '1', B = '1'}
[agent]
timeout_sec = 20.0
[[steps]]
name = "one"
min_reward = {reward = 0.5}
[steps.verifier]
env = {B = '2'}
[[steps]]
name = "two"
min_reward = 0.25
[steps.agent]
timeout_sec = 30.0
user = "other"
[steps.verifier]
timeout_sec = 60.0
environment_mode = 'separate'
"""


def steps(tmp_path: Path, toml: str = STEPS) -> Path:
    files = {f"steps/{name}/instruction.md": f"Do {name}." for name in ("one", "two")}
    task = write_task(tmp_path, toml, **files, **{"steps/two/tests/test.sh": "#!/bin/sh\n"})
    (task / "instruction.md").unlink()
    return task


def test_a_step_inherits_what_it_does_not_say(tmp_path: Path) -> None:
    made = environment(steps(tmp_path), IMAGES)
    (task,) = made.tasks()
    assert task.problem is None
    one, two = task.payload.stages
    assert (one.instruction, one.agent_seconds, one.user, one.judge) == ("Do one.", 20.0, None, None)
    assert (one.verifier.timeout_sec, one.verifier.env) == (50.0, {"A": "1", "B": "2"})
    assert (one.tests, two.tests) == (("tests",), ("tests", "steps/two/tests"))
    assert (two.agent_seconds, two.user, two.verifier.timeout_sec) == (30.0, "other", 60.0)
    assert two.judge is not None
    assert (one.min_reward, two.min_reward) == ({"reward": 0.5}, 0.25)
    assert task.limits == {"agent": 50.0, "verify": 290.0}
    episode = made.episode(task, EpisodeContext("e", 0, {}, build_context()))
    assert {name: box.when for name, box in episode.boxes.items()} == {
        "main": "start",
        "verifier-2": "verify",
    }
    assert episode.combine == "mean"
    final = environment(steps(tmp_path / "f", f"multi_step_reward_strategy = 'final'\n{STEPS}"), IMAGES)
    assert final.episode(final.tasks()[0], EpisodeContext("e", 0, {}, build_context())).combine == "final"


@pytest.mark.parametrize(
    ("missing", "problem"),
    [
        ("steps/two/instruction.md", "steps/two/instruction.md: missing"),
        ("tests/test.sh", "steps/one/tests/test.sh: missing"),
    ],
)
def test_a_step_without_its_files_is_a_problem(tmp_path: Path, missing: str, problem: str) -> None:
    task = steps(tmp_path)
    (task / missing).unlink()
    assert environment(task, IMAGES).tasks()[0].problem == problem


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("environment/docker-compose.yaml", "Docker Compose: not supported"),
        ("trajectory.json", "a conversation to begin with: not supported"),
        ("tests/.harborignore", "rules of files to leave out: not supported"),
    ],
)
def test_files_of_what_is_not_supported_are_named(tmp_path: Path, name: str, problem: str) -> None:
    task = write_task(tmp_path, "", **{name: "x"})
    assert environment(task, IMAGES).tasks()[0].problem == f"{name}: {problem}"


def test_the_canary_is_not_for_the_agent(tmp_path: Path) -> None:
    text = "<!-- harness canary GUID 1-2-3 -->\n# a canary too\n\n# Title\n\nDo it.\n"
    task = write_task(tmp_path, "", **{"instruction.md": text})
    assert environment(task, IMAGES).tasks()[0].payload.instruction == "# Title\n\nDo it."


ENV = """\
[environment]
docker_image = 'x:1'
[environment.env]
KEY = "${API_KEY}"
URL = "${API_URL:-http://localhost}"
EMPTY = "${NOTHING:-}"
PLAIN = "$HOME"
"""


def test_a_value_from_the_host_is_a_reference_until_a_sandbox_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sentinel-5a1e")
    monkeypatch.setenv("API_URL", "never read, the recipe does not say so")
    task = write_task(tmp_path, ENV)
    made = environment(task, IMAGES, host_env={"API_KEY": "env:MY_KEY"})
    assert made.problems(IMAGES) == []
    (only,) = made.tasks()
    episode = made.episode(only, EpisodeContext("e", 0, {}, build_context()))
    spec = episode.boxes["main"].spec
    assert dict(spec.env) == {
        "KEY": "sentinel-5a1e",
        "URL": "http://localhost",
        "EMPTY": "",
        "PLAIN": "$HOME",
    }
    shown = repr(only) + repr(made.config) + repr(spec) + repr(episode.boxes)
    assert "sentinel" not in shown
    assert "${API_KEY}" in shown


def test_a_value_without_a_default_that_the_recipe_does_not_give_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "there, but not for this task")
    assert refused(write_task(tmp_path, ENV)) == (
        "task t: environment.env: KEY takes API_KEY from the host, and the recipe does not give it: "
        "set environment.host_env.API_KEY=env:API_KEY (or file:PATH)"
    )


def test_a_box_that_cannot_be_had_is_unsupported_by_name(tmp_path: Path) -> None:
    task = write_task(tmp_path, "", **{"environment/Dockerfile": "FROM x:1\nRUN make\n"})
    with pytest.raises(Unsupported, match="task t: it needs its container image"):
        boxes(task, HOST)


@pytest.mark.parametrize(
    ("toml", "dockerfile", "create"),
    [
        ("", "FROM x:1\n", 600.0),
        ("build_timeout_sec = 90.0\n", "FROM x:1\n", 90.0),
        ("docker_image = 'x:1'\n", "FROM x:1\n", None),
    ],
)
def test_a_build_has_its_time_within_the_budget(
    tmp_path: Path, toml: str, dockerfile: str, create: float | None
) -> None:
    task = write_task(tmp_path, f"[environment]\n{toml}", **{"environment/Dockerfile": dockerfile})
    assert environment(task, IMAGES).tasks()[0].limits.get("create") == create
