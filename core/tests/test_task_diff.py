"""What of two sandboxes counts as a difference, and what the doctor concludes from what was seen."""

from __future__ import annotations

import hashlib

import pytest

from rollhook.errors import UsageError
from rollhook.runtime.task_diff import Difference, Seen, differences, facts_of
from rollhook.runtime.task_health import flakes, leaks_in
from rollhook.runtime.task_runs import sandbox_source


def seen(reward: str, **facts: str) -> Seen:
    return Seen({"reward": reward}, {tuple(name.split("__")): value for name, value in facts.items()})  # type: ignore[misc]


def test_verdicts_come_first_and_equal_differences_are_one_row() -> None:
    pairs = {
        "a": (seen("1", user__id="0", user__umask="0022"), seen("1", user__id="1000", user__umask="0022")),
        "b": (seen("1", user__id="0", env__LANG="C"), seen("0", user__id="1000")),
    }
    assert differences(pairs) == [
        Difference("verdict", "reward", "1", "0", ("b",)),
        Difference("user", "id", "0", "1000", ("a", "b")),
        Difference("env", "LANG", "C", "-", ("b",)),
    ]


def test_equal_sandboxes_have_no_differences() -> None:
    assert differences({"a": (seen("1", user__id="0"), seen("1", user__id="0"))}) == []


def test_lines_of_other_programs_are_no_facts() -> None:
    printed = "motd: welcome\nuser\tid\t0\nenvironment\tA\tb\tc\n\n"
    assert facts_of(printed) == {("user", "id"): "0", ("environment", "A"): "b\tc"}


@pytest.mark.parametrize(
    ("rewards", "share"),
    [
        ([1.0, 1.0, 1.0], 0.0),
        ([1.0, 0.0, 1.0, 1.0], 0.25),
        ([1.0, None], 0.5),
        ([None, None], 0.0),
        ([], 0.0),
    ],
)
def test_a_flake_is_a_try_that_differs_from_most(rewards: list[float | None], share: float) -> None:
    assert flakes(rewards) == share


def test_leaks_are_files_of_the_same_bytes_whatever_their_names() -> None:
    secret, short = b"assert answer == 'the long secret'\n", b"x\n"
    hidden = {"tests/t.py": secret, "tests/__init__.py": short}
    digest = hashlib.sha256(secret).hexdigest()
    lines = [
        f"{digest}  /opt/other name.py",
        f"\\{digest}  /opt/new\\nline",
        f"{hashlib.sha256(short).hexdigest()}  /opt/x",
        f"{'0' * 64}  /opt/y",
        "- /tests/t.py",
        "!",
    ]
    assert list(leaks_in(lines, hidden)) == [
        "the agent can read tests/t.py at /opt/other name.py",
        "the agent can read tests/t.py at /opt/new\\nline",
        "/tests/t.py is there while the agent works",
        "whether the agent can read hidden files is not known: no find, no sha256sum or no time",
    ]


def test_a_sandbox_is_a_name_or_yaml() -> None:
    assert sandbox_source("docker") == {"use": "docker"}
    assert sandbox_source("none") is None
    assert sandbox_source("{use: local, mode: unshare}") == {"use": "local", "mode": "unshare"}
    for text in ("{mode: x}", "[local]", "{use: 1}", "{", "3"):
        with pytest.raises(UsageError):
            sandbox_source(text)
    with pytest.raises(UsageError) as raised:
        sandbox_source("{use: [local")
    assert "\n" not in str(raised.value)
