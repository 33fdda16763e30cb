"""Templates: what an image, a Dockerfile and a size come down to, and the name that follows from it.

A template's name is the hash of all that it is made of, so that a changed recipe is another template and an
unchanged one is found again, from any process and any host.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import io
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollhook.errors import SandboxError
from rollhook.sandbox import SandboxSpec

if TYPE_CHECKING:
    from rollhook_e2b import E2BConfig

#: changes when the same recipe would give another template
_FORMAT = 1
_MIB = 1 << 20
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Step:
    """One build step: RUN (command, user), COPY (source, target, user, mode), ENV, WORKDIR, USER."""

    kind: str
    args: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """A template to be: what it starts from, its steps and its size.

    `files` are the files that COPY steps take, as (path, mode, content's hash or link's target). `user` is
    the last USER of a Dockerfile; `context` is where its files are on this host.
    """

    base: str
    from_template: bool
    steps: tuple[Step, ...]
    cpus: int | None
    memory_mib: int | None
    files: tuple[tuple[str, int, str], ...] = ()
    user: str | None = None
    context: str | None = None

    def alias(self, prefix: str) -> str:
        """Return the template's name."""
        parts = {
            "format": _FORMAT,
            "base": ["template" if self.from_template else "image", self.base],
            "steps": [[step.kind, *step.args] for step in self.steps],
            "size": [self.cpus, self.memory_mib],
            "files": self.files,
        }
        text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
        return f"{prefix}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


class Recorder:
    """Takes down the steps that the SDK's Dockerfile parser would put into a template."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def _add(self, kind: str, *args: str) -> Recorder:
        self.steps.append(Step(kind, args))
        return self

    def run_cmd(self, command: str | list[str], user: str | None = None) -> Recorder:
        """Take a RUN."""
        text = command if isinstance(command, str) else " && ".join(command)
        return self._add("RUN", text, user or "")

    def copy(
        self,
        src: str,
        dest: str,
        force_upload: bool | None = None,
        user: str | None = None,
        mode: int | None = None,
        resolve_symlinks: bool | None = None,
        gzip: bool | None = None,
    ) -> Recorder:
        """Take a COPY."""
        return self._add("COPY", str(src), str(dest), user or "", "" if mode is None else f"{mode:o}")

    def set_workdir(self, workdir: str) -> Recorder:
        """Take a WORKDIR."""
        return self._add("WORKDIR", str(workdir))

    def set_user(self, user: str) -> Recorder:
        """Take a USER."""
        return self._add("USER", user)

    def set_envs(self, envs: dict[str, str]) -> Recorder:
        """Take an ENV."""
        return self._add("ENV", *(part for pair in envs.items() for part in pair))

    def set_start_cmd(self, start_cmd: str, ready_cmd: str) -> Recorder:
        """Leave CMD and ENTRYPOINT out: a sandbox runs the commands that it is given."""
        return self


Parser = Callable[[str, Any], str]


def plan_for(spec: SandboxSpec, config: E2BConfig, parse: Parser) -> Plan | None:
    """Return the template that a sandbox of this spec needs; None where the configured one will do.

    `parse` is the SDK's Dockerfile parser. Reads the files of the build context. Raises
    SandboxError(kind="user") for a Dockerfile or a context that cannot be used.
    """
    cpus, memory = _size(spec, config)
    first = (Step("USER", (config.build_user,)), Step("WORKDIR", ("/",)))
    if spec.dockerfile is not None:
        plan = _from_dockerfile(spec, first, parse)
    elif spec.image is not None:
        plan = Plan(spec.image, False, first, None, None)
    elif cpus is None and memory is None:
        return None
    else:
        plan = Plan(config.template, True, (), None, None)
    return replace(plan, cpus=cpus, memory_mib=memory)


def _size(spec: SandboxSpec, config: E2BConfig) -> tuple[int | None, int | None]:
    """Return processors and MiB, at least what the task asks for: whole processors, an even number of MiB."""
    cpus = config.cpus if spec.cpus is None else max(1, -int(-spec.cpus // 1))
    memory = config.memory_mib
    if spec.memory_bytes is not None:
        memory = max(config.least_memory_mib, -(-spec.memory_bytes // _MIB))
    return cpus, None if memory is None else memory + memory % 2


def _from_dockerfile(spec: SandboxSpec, first: tuple[Step, ...], parse: Parser) -> Plan:
    text = spec.dockerfile or ""
    recorder = Recorder()
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the parser prints what it leaves out
            base = parse(text + "\n", recorder)
    except Exception as error:
        raise SandboxError(f"E2B cannot build this Dockerfile: {error}", kind="user") from error
    # The parser starts with root in / and ends with a user and a directory of E2B where none is named.
    steps = recorder.steps[2:]
    named = {word for word in ("USER", "WORKDIR") if re.search(rf"(?im)^\s*{word}\s", text)}
    while steps and steps[-1].kind in ("USER", "WORKDIR") and steps[-1].kind not in named:
        steps.pop()
    users = [step.args[0] for step in steps if step.kind == "USER"]
    sources = [step.args[0] for step in steps if step.kind == "COPY"]
    if sources and spec.context_dir is None:
        raise SandboxError(f"the Dockerfile copies {sources[0]}, but there is no build context", kind="user")
    files = tuple(_files(Path(spec.context_dir), sources)) if spec.context_dir and sources else ()
    user = users[-1] if users and users[-1] not in ("root", "0") else None
    return Plan(base, False, (*first, *steps), None, None, files, user, spec.context_dir)


def _files(context: Path, sources: list[str]) -> Iterator[tuple[str, int, str]]:
    """Yield the files that these COPY sources name, sorted, each once."""
    root = context.resolve()
    found: set[Path] = set()
    for source in sources:
        matches = [root / name for name in glob.glob(source.lstrip("/"), root_dir=root, include_hidden=True)]
        if not matches:
            raise SandboxError(f"the build context {context} has no {source}", kind="user")
        for path in matches:
            found.add(path)
            if path.is_dir() and not path.is_symlink():
                found.update(path.rglob("*"))
    for path in sorted(found):
        # a link counts by where it is, what lies below one by where that is
        inside = path == root or path.parent.resolve().is_relative_to(root)
        if not (inside and Path(os.path.normpath(path)).is_relative_to(root)):
            raise SandboxError(f"COPY {path}: it lies outside the build context {context}", kind="user")
        yield _described(path, root)


def _described(path: Path, root: Path) -> tuple[str, int, str]:
    name = path.relative_to(root).as_posix()
    status = path.lstat()
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISLNK(status.st_mode):
        return name, 0, f"link {os.readlink(path)}"
    if stat.S_ISDIR(status.st_mode):
        return name, mode, "directory"
    if not stat.S_ISREG(status.st_mode):
        raise SandboxError(f"{path} is neither a file nor a directory nor a link", kind="user")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return name, mode, digest.hexdigest()


def fill(builder: Any, plan: Plan) -> Any:
    """Put a plan's steps into a template builder of the SDK and return it."""
    builder = builder.from_template(plan.base) if plan.from_template else builder.from_image(plan.base)
    for step in plan.steps:
        args = step.args
        if step.kind == "RUN":
            builder = builder.run_cmd(args[0], user=args[1] or None)
        elif step.kind == "COPY":
            mode = int(args[3], 8) if args[3] else None
            builder = builder.copy(args[0], args[1], user=args[2] or None, mode=mode)
        elif step.kind == "ENV":
            builder = builder.set_envs(dict(zip(args[::2], args[1::2], strict=True)))
        elif step.kind == "WORKDIR":
            builder = builder.set_workdir(args[0])
        else:
            builder = builder.set_user(args[0])
    return builder
