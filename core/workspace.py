"""The checkout and its .venv: what is installed there, and how it gets there. Standard library only.

What is installed is remembered in a stamp, written after pip has ended well and removed before pip
starts; a lock file says whether an installation is under way, so that one that was killed is begun
afresh and two at once wait for each other.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

PACKAGE_COMMANDS = {
    "debian": "apt-get install {}",
    "ubuntu": "apt-get install {}",
    "fedora": "dnf install {}",
    "rhel": "dnf install {}",
    "suse": "zypper install {}",
    "alpine": "apk add {}",
    "arch": "pacman -S {}",
}
EXIT_FAILED, EXIT_USAGE, EXIT_STOPPED = 1, 2, 3

OnLine = Callable[[str], None]
#: argv, working directory, environment, what to do with each line of output -> exit code
Runner = Callable[[Sequence[str], Path, Mapping[str, str], OnLine], int]


class BootstrapError(Exception):
    """The way to the command is barred; the text says what to do."""

    def __init__(self, message: str, code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.code = code


class KilledError(BootstrapError):
    """A program was killed in the middle of installing: what it left cannot be trusted."""


@dataclass(frozen=True)
class Distribution:
    """One directory with a pyproject.toml, as far as installing it is concerned."""

    name: str
    directory: str
    components: frozenset[str]
    dependencies: tuple[str, ...]
    backend: tuple[str, ...]
    heavy: bool
    digest: str


@dataclass(frozen=True)
class Wanted:
    """A distribution to install; `code_only` leaves out what it depends on."""

    distribution: Distribution
    extra: str = ""
    code_only: bool = False

    @property
    def argument(self) -> str:
        """What pip is given after -e."""
        return self.distribution.directory + (f"[{self.extra}]" if self.extra else "")

    @property
    def label(self) -> str:
        """What the stamp calls it."""
        return self.argument + (" --no-deps" if self.code_only else "")

    def covered_by(self, label: str) -> bool:
        """Return whether what the stamp calls `label` includes this."""
        with_an_extra = not self.extra and label.startswith(f"{self.argument}[")
        return label in (self.label, self.argument) or with_an_extra


def read_distribution(root: Path, pyproject: Path) -> Distribution:
    """Read one pyproject.toml."""
    content = pyproject.read_bytes()
    try:
        data = tomllib.loads(content.decode())
        project = data["project"]
        return Distribution(
            name=project["name"],
            directory=pyproject.parent.relative_to(root).as_posix(),
            components=frozenset(project.get("entry-points", {}).get("rollhook", {})),
            dependencies=tuple(project.get("dependencies", ())),
            backend=tuple(data["build-system"]["requires"]),
            heavy="rollhook-heavy" in project.get("keywords", ()),
            digest=hashlib.sha256(content).hexdigest(),
        )
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError) as error:
        raise BootstrapError(f"{pyproject}: cannot be used: {error}", EXIT_USAGE) from error


def read_distributions(root: Path) -> list[Distribution]:
    """Read the distributions of the checkout, the core first."""
    files = [root / "core/pyproject.toml"]
    files += sorted(root.glob("plugins/*/pyproject.toml")) + sorted(root.glob("envs/*/pyproject.toml"))
    return [read_distribution(root, file) for file in files]


def run_program(argv: Sequence[str], cwd: Path, env: Mapping[str, str], on_line: OnLine) -> int:
    """Run a program, give its output line by line to `on_line`, and return its exit code."""
    with subprocess.Popen(
        argv,
        cwd=cwd,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        close_fds=False,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            on_line(line.decode(errors="replace").rstrip())
    return process.returncode


@dataclass
class Progress:
    """Says each step and how long it took; on a terminal also what pip is doing now."""

    stream: TextIO = field(default_factory=lambda: sys.stderr)

    def say(self, text: str) -> None:
        """Write one line."""
        self.stream.write(f"rollhook: {text}\n")
        self.stream.flush()

    @contextmanager
    def step(self, text: str) -> Iterator[OnLine]:
        """Announce a step, yield what shows a line of its output, and say how long it took."""
        live = self.stream.isatty()
        start = time.monotonic()
        self.stream.write(f"rollhook: {text} ... ")
        self.stream.flush()

        def show(line: str) -> None:
            if live and line.strip():
                room = max(20, shutil.get_terminal_size().columns - len(text) - 20)
                self.stream.write(f"\r\x1b[Krollhook: {text} ... {line.strip()[:room]}")
                self.stream.flush()

        ending = "failed after "
        try:
            yield show
            ending = ""
        finally:
            clear = f"\r\x1b[Krollhook: {text} ... " if live else ""
            self.stream.write(f"{clear}{ending}{time.monotonic() - start:.1f} s\n")
            self.stream.flush()


def package_command(package: str, os_release: Path = Path("/etc/os-release")) -> str:
    """Return the command that installs a system package on this distribution of Linux."""
    try:
        lines = os_release.read_text().splitlines()
    except OSError:
        lines = []
    values = dict(line.split("=", 1) for line in lines if "=" in line)
    for name in f"{values.get('ID', '')} {values.get('ID_LIKE', '')}".replace('"', "").split():
        for known, command in PACKAGE_COMMANDS.items():
            if name.startswith(known):
                return command.format(package)
    return f"the system's package manager (package {package})"


def has_nvidia(dev: Path = Path("/dev")) -> bool:
    """Return whether this machine seems to have an NVIDIA device."""
    return any(dev.glob("nvidia*")) or shutil.which("nvidia-smi") is not None


@dataclass
class Workspace:
    """The checkout and its .venv."""

    root: Path
    env: Mapping[str, str]
    progress: Progress = field(default_factory=Progress)
    runner: Runner = run_program

    def __post_init__(self) -> None:
        self.venv = self.root / ".venv"
        self.python = self.venv / "bin/python"
        self.stamp_path = self.venv / "rollhook-stamp.json"
        self.lock_path = self.root / ".venv.lock"
        self.log_path = self.root / ".venv.log"
        self.distributions = read_distributions(self.root)
        self.core = self.distributions[0]

    # --- what is installed ------------------------------------------------------------------------

    def base(self) -> str:
        """Hash what every installation here depends on."""
        parts = [
            "{}.{}".format(*sys.version_info[:2]),
            str(self.root),
            (self.root / "constraints.txt").read_text(),
            *self.core.backend,
        ]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def installed(self) -> dict[str, str]:
        """Return what the stamp says is installed: label -> digest; empty when it does not fit."""
        try:
            stamp = json.loads(self.stamp_path.read_text())
            fits = stamp["base"] == self.base() and self.python.exists()
            return dict(stamp["installed"]) if fits else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def missing(self, wanted: Sequence[Wanted]) -> bool:
        """Return whether any of these is not installed as its pyproject now says."""
        installed = self.installed().items()
        return any(
            not any(digest == w.distribution.digest and w.covered_by(label) for label, digest in installed)
            for w in wanted
        )

    def write_stamp(self, installed: Mapping[str, str]) -> None:
        """Write the stamp in one step."""
        temporary = self.stamp_path.with_suffix(".new")
        temporary.write_text(json.dumps({"base": self.base(), "installed": installed}))
        temporary.replace(self.stamp_path)

    # --- installing -------------------------------------------------------------------------------

    def ensure(self, wanted: Sequence[Wanted]) -> None:
        """Install these unless they are installed; raises BootstrapError."""
        if not self.missing(wanted):
            return
        try:
            with self.lock() as interrupted:
                if interrupted and self.venv.exists():
                    self.progress.say("an earlier installation was interrupted; making .venv again")
                    shutil.rmtree(self.venv)
                if self.missing(wanted):  # another call may have just done it
                    self.make_venv()
                    self.install(wanted)
        except OSError as error:
            raise BootstrapError(f"cannot install into {self.venv}: {error}") from error

    @contextmanager
    def lock(self) -> Iterator[bool]:
        """Hold the installation lock; yields whether its last holder was interrupted."""
        with self.lock_path.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "another call"
                self.progress.say(f"{holder} is installing into .venv; waiting for it to end")
                fcntl.flock(file, fcntl.LOCK_EX)
            os.set_inheritable(file.fileno(), True)  # a pip that outlives a killed call keeps the lock
            file.seek(0)
            interrupted = file.read() != ""
            file.truncate(0)
            file.write(f"process {os.getpid()}\n")
            file.flush()
            try:
                yield interrupted
            except (BootstrapError, OSError) as error:
                if not isinstance(error, KilledError):
                    file.truncate(0)  # pip or venv ended by itself: the next call goes on from here
                raise
            file.truncate(0)

    def make_venv(self) -> None:
        """Make .venv unless there is one of this Python with pip in it."""
        version = "{}.{}".format(*sys.version_info[:2])
        if self.venv.exists():
            if not (self.venv / "pyvenv.cfg").exists():
                raise BootstrapError(f"{self.venv} is not a virtual environment: move it away", EXIT_USAGE)
            seen: list[str] = []
            ask = "import sys, pip; print('{}.{}'.format(*sys.version_info[:2]))"
            if self.python.exists():
                self.runner([str(self.python), "-c", ask], self.root, self.pip_env(), seen.append)
            if seen == [version]:
                return
            if seen and re.fullmatch(r"\d+\.\d+", seen[0]):
                self.progress.say(f".venv is of Python {seen[0]}; making it again")
                shutil.rmtree(self.venv)
        self.refuse_without_ensurepip()
        interpreter = getattr(sys, "_base_executable", None) or sys.executable
        argv = [interpreter, "-m", "venv", str(self.venv)]
        self.run_step(f"making .venv with Python {version}", argv, "")

    def refuse_without_ensurepip(self) -> None:
        """Raise BootstrapError when this Python cannot make a virtual environment."""
        try:
            import ensurepip  # noqa: F401
            import venv  # noqa: F401
        except ImportError as error:
            package = "python{}.{}-venv".format(*sys.version_info[:2])
            raise BootstrapError(
                f"this Python has no module {error.name}, which makes virtual environments. "
                f"Install it: {package_command(package)}"
            ) from error

    def install(self, wanted: Sequence[Wanted]) -> None:
        """Run pip: the build backend, torch where its index is given, then all in one command."""
        installed = self.installed()
        self.stamp_path.unlink(missing_ok=True)
        backend = " ".join(self.core.backend)
        if backend not in installed:
            self.pip(f"installing the build backend ({', '.join(self.core.backend)})", self.core.backend)
            installed[backend] = ""
        full = [w for w in wanted if not w.code_only]
        companions = self.install_torch(full)
        if full:
            text = "installing the core" if len(full) == 1 else f"installing {len(full)} distributions"
            self.pip(text, [*companions, *(a for w in full for a in ("-e", w.argument))])
        for w in wanted:
            if w.code_only:
                text = f"installing {w.distribution.name} without what it depends on"
                self.pip(text, ["--no-deps", "-e", w.argument])
        self.write_stamp(installed | {w.label: w.distribution.digest for w in wanted})

    def install_torch(self, wanted: Sequence[Wanted]) -> list[str]:
        """Install torch from the index that was chosen, or say what the default one may bring.

        A command of its own: with the index as a mere extra one, pip would be free to take torch from
        elsewhere. Returns the options with which pip finds the packages that such a torch depends on.
        """
        torch = [d for w in wanted for d in w.distribution.dependencies if re.match(r"torch\b(?!-)", d)]
        if not torch:
            return []
        index = self.env.get("ROLLHOOK_TORCH_INDEX")
        here = any(self.venv.glob("lib/python*/site-packages/torch-*.dist-info"))
        if index and not here:
            self.pip(f"installing torch from {index}", ["--index-url", index, "--no-deps", torch[0]])
        elif not here and not has_nvidia():
            self.progress.say(
                "torch comes next, and no NVIDIA device is seen here: its build for CUDA takes several GB, "
                "its build for CPUs about 200 MB. To get the small one, stop this (Ctrl-C) and set "
                "ROLLHOOK_TORCH_INDEX=https://download.pytorch.org/whl/cpu"
            )
        return ["--extra-index-url", index] if index else []

    def pip(self, text: str, arguments: Sequence[str]) -> None:
        """Run one `pip install` in .venv."""
        argv = [str(self.python), "-m", "pip", "install", "--progress-bar", "off"]
        argv += ["--no-build-isolation", "-c", "constraints.txt", *arguments]
        way_out = (
            "Without a network, point pip to packages that you have (PIP_INDEX_URL, PIP_FIND_LINKS). "
            "Then run the same command again."
        )
        self.run_step(text, argv, way_out)

    def pip_env(self) -> dict[str, str]:
        """Return the environment for pip: the user's, less what does not work inside a venv."""
        own = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_USER": "0"}
        return {k: v for k, v in self.env.items() if k not in ("PYTHONHOME", "PYTHONPATH")} | own

    def run_step(self, text: str, argv: Sequence[str], way_out: str) -> None:
        """Run one program as a step; raises BootstrapError with the end of its output."""
        tail: deque[str] = deque(maxlen=15)
        with self.log_path.open("a") as log, self.progress.step(text) as show:
            log.write(f"$ {' '.join(argv)}\n")

            def on_line(line: str) -> None:
                log.write(line + "\n")
                tail.append(line)
                show(line)

            code = self.runner(argv, self.root, self.pip_env(), on_line)
            if code < 0:
                raise KilledError(f"{text} was killed by signal {-code}; run the same command again")
            if code != 0:
                lines = "\n".join(f"    {line}" for line in tail)
                raise BootstrapError(
                    f"{text} failed with exit code {code}; the last lines (all are in {self.log_path}):\n"
                    f"{lines}\n{way_out}".rstrip()
                )
