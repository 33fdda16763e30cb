"""What authors get: packages that install and say what is left to write, and contracts that bite."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollhook.environment import (
    Box,
    Environment,
    Episode,
    EpisodeContext,
    Observation,
    Phase,
    Task,
    Transcript,
    Verdict,
)
from rollhook.errors import UsageError
from rollhook.messages import message
from rollhook.sandbox import SandboxSpec
from rollhook.scaffold import KINDS, write
from rollhook.testing.boxes import open_box_with
from rollhook.testing.contract import failing_cases
from rollhook.testing.environment import EnvironmentContract, build_context
from rollhook.testing.parts import needs_part

ROOT = Path(__file__).parents[1]


def run(*argv: str | Path, cwd: Path, code: int | None = 0) -> str:
    done = subprocess.run(
        [str(each) for each in argv],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"NO_COLOR": "1"},
    )
    assert code is None or done.returncode == code, f"{argv}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write one package of each kind, from the command line."""
    root = tmp_path_factory.mktemp("written")
    for kind in KINDS:
        name = f"spare_{kind.replace('-', '_')}"
        run(
            sys.executable,
            "-m",
            "rollhook.cli.main",
            "new",
            kind,
            name,
            "--distribution",
            f"acme-{kind}",
            cwd=root,
        )
    return {kind: root / f"acme-{kind}" for kind in KINDS}


@pytest.fixture(scope="module")
def python(written: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment with all packages of this one, and install what was written into it."""
    environment = tmp_path_factory.mktemp("authors") / "env"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=environment.parent)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "all.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    made = environment / "bin/python"
    options = ["-q", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        made,
        "install",
        *options,
        *written.values(),
        cwd=environment.parent,
    )
    return made


def test_what_was_written_is_listed_and_loads(python: Path, tmp_path: Path) -> None:
    rows = json.loads(
        run(python, "-m", "rollhook.cli.main", "plugins", "--check", "--json", cwd=tmp_path, code=None)
    )
    ours = {row["name"]: row for row in rows if row["distribution"].startswith("acme-")}
    assert {name: row["state"] for name, row in ours.items()} == {
        f"spare_{kind.replace('-', '_')}": "ok" for kind in KINDS
    }


@pytest.mark.parametrize("kind", KINDS)
def test_its_suite_fails_where_the_author_must_write_and_says_what(
    kind: str, python: Path, written: dict[str, Path]
) -> None:
    said = run(
        python,
        "-m",
        "pytest",
        "-q",
        "--tb=line",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        cwd=written[kind],
        code=1,
    )
    failed, errors = (
        int(found[1]) if (found := re.search(rf"(\d+) {word}", said)) else 0 for word in ("failed", "error")
    )
    assert failed > 0, said
    assert errors == 0, said
    instructions = set(re.findall(r"to write: (\S+)", said))
    assert instructions, said
    for what in instructions:
        assert re.search(
            rf"\b{what.split('.')[0].rstrip(';')}\b",
            "".join(p.read_text() for p in written[kind].rglob("*.py")),
        )


def test_what_was_written_is_linted_and_typed(python: Path, written: dict[str, Path]) -> None:
    root = next(iter(written.values())).parent
    run(
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--line-length",
        "110",
        "--select",
        "D1,E,F,I,N,UP,B,RUF",
        "--ignore",
        "D105,D107,E501",
        "--exclude",
        "tests",
        ".",
        cwd=root,
    )
    sources = [path / "src" for path in written.values()]
    run(
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--python-executable",
        python,
        "--no-incremental",
        *sources,
        cwd=root,
    )


@pytest.mark.parametrize(
    ("kind", "name", "options", "words"),
    [
        ("environment", "Riddles", {}, "cannot be a plugin's name"),
        ("environment", "rid-dles", {}, "cannot be a plugin's name"),
        ("environment", "class", {}, "cannot be a plugin's name"),
        ("environment", "tbench2", {}, "use another name"),
        ("router-policy", "sticky", {}, "use another name"),
        ("agent", "mine", {"distribution": "../up"}, "cannot be a package's name"),
        ("agent", "mine", {"distribution": "rollhook"}, "the core's own name"),
        ("sandbox", "none", {}, "would not be read as a name"),
        ("environment", "true", {}, "would not be read as a name"),
        ("agent", "off", {}, "would not be read as a name"),
        ("agent", "agent", {}, "its class would be called Agent, which means something else there"),
        ("agent", "exception", {}, "would be called Exception"),
        ("environment", "any", {}, "would be called Any"),
        ("router-policy", "worker", {}, "would be called Worker"),
        ("sandbox", "raw", {}, "would be called RawSandbox"),
        ("agent", "mine", {"distribution": "class"}, "Python would not take class for a package"),
        ("agent", "mine", {"distribution": "json"}, "a module json is there already"),
        ("agent", "mine", {"distribution": "pytest-asyncio"}, "a module pytest_asyncio is there already"),
    ],
)
def test_a_name_that_cannot_be_is_refused(
    kind: str, name: str, options: dict[str, str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=words):
        write(kind, name, **options)
    assert list(tmp_path.iterdir()) == []


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds files already"):
        write("agent", "spare", directory=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    with pytest.raises(UsageError, match="cannot be written"):
        write("agent", "spare", directory=tmp_path / "mine.txt/deeper")


class Trusting(Environment):
    """Believes a result that lies in the sandbox: what its own verifier left there."""

    def tasks(self, split: str | None = None) -> Sequence[Task]:
        if split not in (None, "train"):
            raise UsageError("only train")
        return [Task("one", "1", "train")]

    def episode(self, task: Task, ctx: EpisodeContext) -> Episode:
        return TrustingEpisode(ctx)


class TrustingEpisode(Episode):
    def __init__(self, ctx: EpisodeContext) -> None:
        self.ctx = ctx
        self.boxes = {"main": Box(SandboxSpec())}

    async def phases(self) -> AsyncIterator[Phase]:
        yield TrustingPhase(self.ctx)


class TrustingPhase(Phase):
    box = "main"

    def __init__(self, ctx: EpisodeContext) -> None:
        self.sandbox = ctx.box("main")
        self.observation = Observation([message("user", "Make the file /work/done.")])

    async def solve(self) -> None:
        await self.sandbox.write("/work/done", b"")

    async def verify(self, transcript: Transcript) -> Verdict:
        judge = "[ -e /tmp/result ] || { [ -e /work/done ] && echo 1 > /tmp/result; }; cat /tmp/result"
        found = await self.sandbox.shell(judge, timeout=30)
        return Verdict(1.0 if found.text.strip() == "1" else 0.0)


def test_the_contract_finds_a_verifier_that_believes_planted_files(tmp_path: Path) -> None:
    needs_part("bubblewrap")
    fixtures: dict[str, Any] = {
        "make_environment": lambda: lambda: Trusting(None, build_context()),
        "open_box": lambda: open_box_with("local", tmp_path),
        "problem_task": lambda: None,
        "no_reward_task": lambda: None,
    }
    assert failing_cases(EnvironmentContract, fixtures) == {
        "test_files_that_a_verifier_leaves_earn_nothing_when_planted"
    }
