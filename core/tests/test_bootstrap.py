"""The bootstrap behind `python3 core ...`, with a pip that only records what it is asked."""

from __future__ import annotations

import io
import json
import os
import runpy
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest

CORE = Path(__file__).parents[1]
VERSION = "{}.{}".format(*sys.version_info[:2])
PYPROJECT = """\
[build-system]
requires = ["hatchling", "editables"]
build-backend = "hatchling.build"
[project]
name = "{name}"
version = "0.1.0"
keywords = [{keywords}]
dependencies = [{dependencies}]
[project.entry-points.rollhook]
{components}
"""
NEEDS = ["environment.pocket", "sandbox.local", "trainer.torch", "agent.elsewhere"]
QUICKSTART_PARTS = ["-e", "core", "-e", "plugins/local", "-e", "plugins/torch", "-e", "envs/tbench2"]


def add_distribution(
    root: Path, directory: str, components: Sequence[str], dependencies: str = "", heavy: bool = False
) -> Path:
    file = root / directory / "pyproject.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        PYPROJECT.format(
            name="rollhook" if directory == "core" else f"rollhook-{file.parent.name}",
            keywords='"rollhook-heavy"' if heavy else "",
            dependencies=dependencies,
            components="\n".join(f'"{c}" = "x"' for c in components),
        )
    )
    return file


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "checkout"
    add_distribution(root, "core", [])
    for name in ("__main__.py", "bootstrap.py", "workspace.py"):
        shutil.copy(CORE / name, root / "core" / name)
    add_distribution(root, "plugins/local", ["sandbox.local", "launcher.local"])
    add_distribution(root, "plugins/torch", ["trainer.torch"], '"torch>=2.9,<2.14", "torch-other>=1"')
    add_distribution(root, "plugins/giant", ["engine.giant"], heavy=True)
    add_distribution(root, "envs/tbench2", ["environment.pocket"])
    (root / "constraints.txt").write_text("pluggy==1.7.0\n")
    (root / "recipes").mkdir()
    (root / "recipes/quickstart.yaml").write_text("name: quickstart\n")
    (root / "recipes/other.yaml").write_text("name: other\n")
    monkeypatch.chdir(root)
    return root


@pytest.fixture
def bootstrap(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(CORE))
    import bootstrap

    return bootstrap


@dataclass
class FakeMachine:
    """Stands for the programs that the bootstrap starts; `on_pip` decides how pip ends."""

    needs: Sequence[str] = tuple(NEEDS)
    venv_version: str = VERSION
    calls: list[list[str]] = field(default_factory=list)
    on_pip: Callable[[Sequence[str]], int] = lambda argv: 0

    def __call__(
        self, argv: Sequence[str], cwd: Path, env: Mapping[str, str], on_line: Callable[[str], None]
    ) -> int:
        self.calls.append(list(argv))
        if argv[1:3] == ["-m", "venv"]:
            make_venv(Path(argv[3]), "")
            self.venv_version = VERSION
        elif argv[1] == "-c":
            on_line(self.venv_version)
        elif argv[1:3] == ["-m", "pip"]:
            for n in range(30):
                on_line(f"pip says {n}")
            return self.on_pip(argv)
        elif argv[2] == "needs":
            for name in self.needs:
                on_line(name)
        return 0

    @property
    def pip_calls(self) -> list[list[str]]:
        """What each pip command was asked for, without what is common to all."""
        common = ["--progress-bar", "off", "--no-build-isolation", "-c", "constraints.txt"]
        found = [call[4:] for call in self.calls if call[1:4] == ["-m", "pip", "install"]]
        assert all(call[: len(common)] == common for call in found)
        return [call[len(common) :] for call in found]


def make_venv(path: Path, python_script: str) -> None:
    (path / "bin").mkdir(parents=True, exist_ok=True)
    (path / "pyvenv.cfg").write_text("")
    python = path / "bin/python"
    python.write_text("#!/bin/sh\n" + python_script)
    python.chmod(python.stat().st_mode | stat.S_IXUSR)


@dataclass
class Outcome:
    code: int
    said: str
    executed: list[str]


def call(bootstrap: ModuleType, root: Path, machine: FakeMachine, *argv: str, **env: str) -> Outcome:
    stream, executed = io.StringIO(), list[str]()
    code = bootstrap.main(
        argv,
        root=root,
        env={"PATH": os.environ["PATH"], **env},
        runner=machine,
        stream=stream,
        execute=lambda path, line: executed.extend(line),
    )
    return Outcome(code, stream.getvalue(), executed)


# --- what is installed --------------------------------------------------------------------------------


def test_run_installs_the_core_then_what_the_recipe_names_in_one_command(
    bootstrap: ModuleType, checkout: Path
) -> None:
    machine = FakeMachine()
    outcome = call(bootstrap, checkout, machine, "run", "recipes/quickstart.yaml", "seed=1")
    assert machine.pip_calls == [["hatchling", "editables"], ["-e", "core"], QUICKSTART_PARTS]
    rollhook = [f"{checkout}/.venv/bin/python", f"{checkout}/.venv/bin/rollhook"]
    assert [*rollhook, "needs", "recipes/quickstart.yaml", "seed=1"] in machine.calls
    assert outcome.executed == [*rollhook, "run", "recipes/quickstart.yaml", "seed=1"]


def test_test_installs_everything_and_heavy_parts_without_what_they_depend_on(
    bootstrap: ModuleType, checkout: Path
) -> None:
    machine = FakeMachine()
    outcome = call(bootstrap, checkout, machine, "test", "-k", "x")
    assert machine.pip_calls == [
        ["hatchling", "editables"],
        ["-e", "core[test]", "-e", "plugins/local", "-e", "plugins/torch", "-e", "envs/tbench2"],
        ["--no-deps", "-e", "plugins/giant"],
    ]
    assert outcome.executed == [f"{checkout}/.venv/bin/python", "-P", "-m", "pytest", "-k", "x"]


def test_a_heavy_part_that_a_recipe_names_is_installed_whole(bootstrap: ModuleType, checkout: Path) -> None:
    machine = FakeMachine(needs=["engine.giant"])
    call(bootstrap, checkout, machine, "test")
    call(bootstrap, checkout, machine, "run", "quickstart")
    assert machine.pip_calls[-1] == ["-e", "core", "-e", "plugins/giant"]


def test_a_second_call_installs_nothing_and_asks_nothing(bootstrap: ModuleType, checkout: Path) -> None:
    call(bootstrap, checkout, FakeMachine(), "run", "recipes/quickstart.yaml")
    machine = FakeMachine()
    outcome = call(bootstrap, checkout, machine, "run", "recipes/quickstart.yaml")
    assert machine.calls == []
    assert outcome.executed[-2:] == ["run", "recipes/quickstart.yaml"]


def test_test_after_run_and_run_after_test_install_only_what_is_new(
    bootstrap: ModuleType, checkout: Path
) -> None:
    call(bootstrap, checkout, FakeMachine(), "run", "recipes/quickstart.yaml")
    machine = FakeMachine()
    call(bootstrap, checkout, machine, "test")
    assert machine.pip_calls[0][:2] == ["-e", "core[test]"], "the build backend is there already"
    machine = FakeMachine()
    call(bootstrap, checkout, machine, "run", "recipes/quickstart.yaml")
    assert machine.calls == []


@pytest.mark.parametrize(
    "changed", ["core/pyproject.toml", "plugins/local/pyproject.toml", "constraints.txt"]
)
def test_a_changed_file_installs_again(bootstrap: ModuleType, checkout: Path, changed: str) -> None:
    call(bootstrap, checkout, FakeMachine(), "run", "recipes/quickstart.yaml")
    with (checkout / changed).open("a") as file:
        file.write("# changed\n")
    machine = FakeMachine()
    call(bootstrap, checkout, machine, "run", "recipes/quickstart.yaml")
    again = ["-e", "core"] if changed.startswith("core") else QUICKSTART_PARTS
    assert machine.pip_calls[-1] == again


def test_a_changed_recipe_or_override_asks_the_core_again(bootstrap: ModuleType, checkout: Path) -> None:
    call(bootstrap, checkout, FakeMachine(), "run", "recipes/quickstart.yaml")
    (checkout / "recipes/other.yaml").write_text("name: other\nagent: giant\n")
    machine = FakeMachine(needs=[*NEEDS, "engine.giant"])
    call(bootstrap, checkout, machine, "run", "recipes/quickstart.yaml")
    assert "plugins/giant" in machine.pip_calls[-1], "another recipe may be extended by this one"
    machine = FakeMachine()
    call(bootstrap, checkout, machine, "run", "recipes/quickstart.yaml", "~agent")
    assert machine.calls[0][-3:] == ["needs", "recipes/quickstart.yaml", "~agent"]


def test_another_python_makes_the_venv_again(bootstrap: ModuleType, checkout: Path) -> None:
    make_venv(checkout / ".venv", "")
    machine = FakeMachine(venv_version="3.9")
    outcome = call(bootstrap, checkout, machine, "run", "recipes/quickstart.yaml")
    assert ".venv is of Python 3.9; making it again" in outcome.said
    assert [c for c in machine.calls if c[1:3] == ["-m", "venv"]]


def test_a_directory_that_is_no_venv_is_left_alone(bootstrap: ModuleType, checkout: Path) -> None:
    (checkout / ".venv").mkdir()
    (checkout / ".venv/thesis.tex").write_text("")
    outcome = call(bootstrap, checkout, FakeMachine(), "run", "recipes/quickstart.yaml")
    assert outcome.code == 2
    assert "is not a virtual environment: move it away" in outcome.said
    assert (checkout / ".venv/thesis.tex").exists()


def test_other_verbs_get_the_parts_that_their_arguments_name(bootstrap: ModuleType, checkout: Path) -> None:
    machine = FakeMachine()
    outcome = call(bootstrap, checkout, machine, "data", "prepare", "pocket")
    assert machine.pip_calls[-1] == ["-e", "core", "-e", "envs/tbench2"]
    assert outcome.executed[-3:] == ["data", "prepare", "pocket"]
    machine = FakeMachine()
    call(bootstrap, checkout, machine, "tasks", "oracle", "pocket")
    assert machine.pip_calls[-1] == ["-e", "core", "-e", "plugins/local", "-e", "envs/tbench2"]
    assert (
        call(bootstrap, checkout, FakeMachine(), "check", "recipes/quickstart.yaml").executed[-2] == "check"
    )


# --- torch --------------------------------------------------------------------------------------------


def test_a_torch_index_is_given_to_pip_for_torch_alone(bootstrap: ModuleType, checkout: Path) -> None:
    machine = FakeMachine()
    url = "https://example.org/whl/cpu"
    outcome = call(bootstrap, checkout, machine, "run", "quickstart", ROLLHOOK_TORCH_INDEX=url)
    assert machine.pip_calls[2:] == [
        ["--index-url", url, "--no-deps", "torch>=2.9,<2.14"],
        ["--extra-index-url", url, *QUICKSTART_PARTS],
    ]
    assert "several GB" not in outcome.said


@pytest.mark.parametrize(
    ("nvidia", "here", "said"), [(False, False, True), (True, False, False), (False, True, False)]
)
def test_the_size_of_torch_is_said_before_it_is_installed(
    bootstrap: ModuleType,
    checkout: Path,
    monkeypatch: pytest.MonkeyPatch,
    nvidia: bool,
    here: bool,
    said: bool,
) -> None:
    monkeypatch.setattr(sys.modules["workspace"], "has_nvidia", lambda: nvidia)
    if here:
        make_venv(checkout / ".venv", "")
        (checkout / f".venv/lib/python{VERSION}/site-packages/torch-2.9.dist-info").mkdir(parents=True)
    outcome = call(bootstrap, checkout, FakeMachine(), "run", "quickstart")
    before, _, after = outcome.said.partition("installing 4 distributions")
    assert after
    assert ("several GB" in before) == said
    assert ("ROLLHOOK_TORCH_INDEX=https://download.pytorch.org/whl/cpu" in before) == said


# --- what goes wrong ----------------------------------------------------------------------------------


def test_a_failing_pip_shows_its_last_lines_and_the_way_out(bootstrap: ModuleType, checkout: Path) -> None:
    machine = FakeMachine(on_pip=lambda argv: 1 if "plugins/local" in argv else 0)
    outcome = call(bootstrap, checkout, machine, "run", "quickstart")
    assert outcome.code == 1
    assert outcome.executed == []
    assert "pip says 29" in outcome.said
    assert "pip says 3\n" not in outcome.said
    assert "PIP_INDEX_URL" in outcome.said
    assert "pip says 3\n" in (checkout / ".venv.log").read_text()
    again = FakeMachine()
    outcome = call(bootstrap, checkout, again, "run", "quickstart")
    assert again.pip_calls[-1] == QUICKSTART_PARTS, "not taken for done"
    assert "interrupted" not in outcome.said, "what pip ended by itself is usable"
    assert outcome.executed


@pytest.mark.parametrize("how", ["signal", "ctrl-c"])
def test_an_interrupted_pip_makes_the_next_call_begin_afresh(
    bootstrap: ModuleType, checkout: Path, how: str
) -> None:
    def interrupted(argv: Sequence[str]) -> int:
        if how == "ctrl-c":
            raise KeyboardInterrupt
        return -signal.SIGKILL

    outcome = call(bootstrap, checkout, FakeMachine(on_pip=interrupted), "run", "quickstart")
    assert outcome.code == (3 if how == "ctrl-c" else 1)
    (checkout / ".venv/half-written").write_text("")
    outcome = call(bootstrap, checkout, FakeMachine(), "run", "quickstart")
    assert "an earlier installation was interrupted; making .venv again" in outcome.said
    assert not (checkout / ".venv/half-written").exists()
    assert outcome.executed


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("recipes/quikstart.yaml", "Did you mean recipes/quickstart.yaml?"),
        ("quickstrt", "Did you mean recipes/quickstart.yaml?"),
        ("zzz.yaml", "Recipes here: recipes/other.yaml, recipes/quickstart.yaml."),
    ],
)
def test_a_missing_recipe_is_answered_before_anything_is_installed(
    bootstrap: ModuleType, checkout: Path, word: str, answer: str
) -> None:
    machine = FakeMachine()
    outcome = call(bootstrap, checkout, machine, "run", word)
    assert outcome.code == 2
    assert f"no recipe {word!r}" in outcome.said
    assert answer in outcome.said
    assert machine.calls == []


def test_a_recipe_that_the_core_refuses_ends_with_what_the_core_says(
    bootstrap: ModuleType, checkout: Path
) -> None:
    machine = FakeMachine(needs=["recipes/quickstart.yaml: agent.use: missing"])

    def runner(argv: Sequence[str], *rest: object) -> int:
        code = machine(argv, *rest)  # type: ignore[arg-type]
        return 2 if "needs" in argv else code

    stream = io.StringIO()
    assert bootstrap.main(["run", "quickstart"], root=checkout, env={}, runner=runner, stream=stream) == 2
    assert "agent.use: missing" in stream.getvalue()


def test_a_broken_pyproject_is_named(bootstrap: ModuleType, checkout: Path) -> None:
    (checkout / "plugins/local/pyproject.toml").write_text("[project\n")
    outcome = call(bootstrap, checkout, FakeMachine(), "test")
    assert outcome.code == 2
    assert "plugins/local/pyproject.toml: cannot be used" in outcome.said


def test_a_python_without_ensurepip_is_told_the_package(
    bootstrap: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    outcome = call(bootstrap, checkout, FakeMachine(), "test")
    assert outcome.code == 1
    assert f"python{VERSION}-venv" in outcome.said


@pytest.mark.parametrize(
    ("os_release", "command"),
    [
        ('ID=ubuntu\nID_LIKE="debian"\n', "apt-get install bubblewrap"),
        ('ID="rocky"\nID_LIKE="rhel centos fedora"\n', "dnf install bubblewrap"),
        ("ID=alpine\n", "apk add bubblewrap"),
        ('ID="opensuse-leap"\nID_LIKE="suse opensuse"\n', "zypper install bubblewrap"),
        ("ID=plan9\n", "the system's package manager (package bubblewrap)"),
        (None, "the system's package manager (package bubblewrap)"),
    ],
)
def test_the_command_for_a_system_package_follows_os_release(
    bootstrap: ModuleType, tmp_path: Path, os_release: str | None, command: str
) -> None:
    file = tmp_path / "os-release"
    if os_release is not None:
        file.write_text(os_release)
    assert bootstrap.package_command("bubblewrap", file) == command


@pytest.mark.parametrize(
    ("programs", "said"),
    [
        (["bwrap", "unshare"], None),
        (["unshare"], "sandboxes use `unshare`"),
        ([], "local sandboxes need bubblewrap"),
    ],
)
def test_absent_bubblewrap_is_said_with_the_way_to_get_it(
    bootstrap: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    programs: list[str],
    said: str | None,
) -> None:
    for program in programs:
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    stream = io.StringIO()
    bootstrap.advise_on_sandbox(["sandbox.local"], bootstrap.Progress(stream))
    assert (said or "") in stream.getvalue()
    assert bool(stream.getvalue()) == (said is not None)


def test_an_old_python_gets_a_sentence_that_names_a_newer_one() -> None:
    too_old = runpy.run_path(str(CORE / "__main__.py"))["too_old"]
    assert too_old((3, 11, 0), "/usr/bin/python3") is None
    text = too_old((3, 9, 2), "/usr/bin/python3", lambda name: name == "python3.12")
    assert text == (
        "rollhook: needs Python 3.11 or newer; /usr/bin/python3 is 3.9. "
        "This machine has python3.12: run `python3.12 core ...`."
    )
    assert "Install one" in too_old((3, 9, 2), "/usr/bin/python3", lambda name: None)


# --- real processes -----------------------------------------------------------------------------------

PYTHON_SCRIPT = f"""\
case "$1 $2 $3" in
  -c*) echo {VERSION};;
  "-m pip"*) echo "$@" >> "$LOG"; case "$*" in *plugins/local*) cat "$FIFO";; esac;;
  *needs*) echo sandbox.local;;
  *) echo "executed $*";;
esac
"""


@pytest.fixture
def real(checkout: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `python3 core ...` with a python in .venv that records and, in pip, waits for a FIFO."""
    make_venv(checkout / ".venv", PYTHON_SCRIPT)
    os.mkfifo(checkout / "fifo")
    started: list[subprocess.Popen[str]] = []
    env = {"PATH": os.environ["PATH"], "LOG": str(checkout / "log"), "FIFO": str(checkout / "fifo")}

    def start(*argv: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "core", *argv],
            cwd=checkout,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def let_pip_go(checkout: Path) -> None:
    """Wait until a pip reads the FIFO, and end it."""
    (checkout / "fifo").write_bytes(b"")


def test_two_calls_at_once_install_once(checkout: Path, real: Callable[..., subprocess.Popen[str]]) -> None:
    first = real("test")
    fifo = (checkout / "fifo").open("wb")
    second = real("test")
    assert second.stderr is not None
    said = second.stderr.readline()
    assert said == f"rollhook: process {first.pid} is installing into .venv; waiting for it to end\n"
    fifo.close()
    for process in (first, second):
        out, err = process.communicate(timeout=30)
        assert out == "executed -P -m pytest\n", err
    assert len((checkout / "log").read_text().splitlines()) == 3


def test_a_killed_call_is_not_taken_for_done(
    bootstrap: ModuleType, checkout: Path, real: Callable[..., subprocess.Popen[str]]
) -> None:
    process = real("test")
    fifo = (checkout / "fifo").open("wb")
    process.kill()
    process.communicate()
    fifo.close()
    machine = FakeMachine()
    outcome = call(bootstrap, checkout, machine, "test")
    assert "an earlier installation was interrupted; making .venv again" in outcome.said
    assert len(machine.pip_calls) == 3
    assert json.loads((checkout / ".venv/rollhook-stamp.json").read_text())["installed"]


def test_the_second_call_starts_within_half_a_second(
    checkout: Path, real: Callable[..., subprocess.Popen[str]]
) -> None:
    first = real("run", "recipes/quickstart.yaml")
    let_pip_go(checkout)
    _, err = first.communicate(timeout=30)
    assert first.returncode == 0, err
    took = []
    for _ in range(5):
        start = time.monotonic()
        out, _ = real("run", "recipes/quickstart.yaml").communicate(timeout=30)
        took.append(time.monotonic() - start)
        assert out == f"executed {checkout}/.venv/bin/rollhook run recipes/quickstart.yaml\n"
    assert min(took) < 0.5


def test_the_bare_command_teaches(real: Callable[..., subprocess.Popen[str]]) -> None:
    for argv in ([], ["help"]):
        out, _ = real(*argv).communicate(timeout=30)
        assert "python3 core run recipes/quickstart.yaml" in out
        assert "ROLLHOOK_TORCH_INDEX" in out
