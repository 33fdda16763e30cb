"""Images: directory templates, built step by step and kept by the hash of what they are made of.

A base is the host's system with a small /etc of its own, whatever its name; a name that contains `absent`
is not there. Steps are (kind, arguments), as a Dockerfile and a template build both come down to.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from doubles.machines import Machine, Machines

#: what a machine has of the host's /etc, beside what is mounted there
_ETC = [
    "bash.bashrc",
    "debian_version",
    "default",
    "environment",
    "group",
    "gshadow",
    "host.conf",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "login.defs",
    "nsswitch.conf",
    "os-release",
    "pam.d",
    "passwd",
    "profile",
    "profile.d",
    "protocols",
    "resolv.conf",
    "security",
    "services",
    "shadow",
    "shells",
    "skel",
]
_OWN = {"tmp": 0o1777, "var/tmp": 0o1777, "run": 0o755, "root": 0o700, "home": 0o755, "opt": 0o755}
_OWN |= {"srv": 0o755, "mnt": 0o755, "proc": 0o755, "dev": 0o755, "usr": 0o755, "var/lib": 0o755}
#: users that vendors' own images have: name, uid
USERS = {"daytona": 1001, "user": 1002}


class BuildError(Exception):
    """A step failed; the log says how."""


@dataclass(frozen=True)
class Step:
    """One step: RUN [script, user?], COPY [source, target], ENV [name, value, ...], WORKDIR, USER."""

    kind: str
    args: Sequence[str] = ()
    #: what COPY takes from: the key of a directory among the files given to `build`
    files: str = ""


@dataclass(frozen=True)
class Template:
    """A built image: its files, and what commands in it start with."""

    key: str
    root: Path
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "root"


class Images:
    """The templates of a run."""

    def __init__(self, directory: Path, machines: Machines) -> None:
        self._directory = directory
        self._machines = machines
        self._built: dict[str, Template] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        #: how many builds have begun (a hit of the cache is none)
        self.builds = 0

    async def base(self, name: str) -> Template:
        """Return the template of a base image; BuildError for one that is not there."""
        if "absent" in name:
            raise BuildError(f"failed to resolve source metadata for {name}: not found")
        async with self._locks.setdefault("base", asyncio.Lock()):
            if "base" not in self._built:
                root = self._directory / "base"
                await asyncio.to_thread(_make_base, root)
                self._built["base"] = Template("base", root)
        return self._built["base"]

    def known(self, base: str, steps: Sequence[Step]) -> Template | None:
        """Return the template of these steps if it is built."""
        return self._built.get(key_of(base, steps))

    async def build(
        self,
        base: str | Template,
        steps: Sequence[Step],
        *,
        files: Mapping[str, Path] | None = None,
        log: Callable[[str], None] = lambda line: None,
    ) -> Template:
        """Build once however many ask; `log` takes lines. BuildError when a step fails."""
        start = await self.base(base) if isinstance(base, str) else base
        key = key_of(start.key, steps)
        async with self._locks.setdefault(key, asyncio.Lock()):
            if key not in self._built:
                self.builds += 1
                self._built[key] = await self._build(key, start, steps, files or {}, log)
        return self._built[key]

    async def _build(
        self,
        key: str,
        start: Template,
        steps: Sequence[Step],
        files: Mapping[str, Path],
        log: Callable[[str], None],
    ) -> Template:
        machine = await self._machines.create(start.root, machine_id=f"build-{key[:12]}", env=start.env)
        now = replace(start, key=key, root=self._directory / key)
        try:
            for number, step in enumerate(steps, 1):
                log(f"#{number} {step.kind} {' '.join(step.args)[:200]}")
                machine.env, machine.workdir, machine.user = dict(now.env), now.workdir, now.user
                now = await self._step(now, step, machine, files, log)
            await machine.stop()
            await asyncio.to_thread(shutil.move, machine.root, now.root)
        finally:
            await self._machines.delete(machine.id)
        return now

    async def _step(
        self,
        now: Template,
        step: Step,
        machine: Machine,
        files: Mapping[str, Path],
        log: Callable[[str], None],
    ) -> Template:
        args = list(step.args)
        if step.kind == "ENV":
            return replace(now, env={**now.env, **dict(zip(args[::2], args[1::2], strict=True))})
        if step.kind == "USER":
            return replace(now, user=args[0])
        if step.kind == "WORKDIR":
            made = await machine.run(["mkdir", "-p", "--", args[0]], cwd="/", user="root")
            _check(made.code, made.text + made.stderr.decode(), log)
            if now.user != "root":
                await machine.run(["chown", now.user, "--", args[0]], cwd="/", user="root")
            return replace(now, workdir=args[0])
        if step.kind == "RUN":
            user = args[1] if len(args) > 1 and args[1] else now.user
            done = await machine.run(["/bin/sh", "-c", args[0]], user=user, merged=True)
            _check(done.code, done.text, log, args[0])
            return now
        if step.kind == "COPY":
            await self._copy(step, machine, files, log)
            return now
        raise BuildError(f"the double has no step {step.kind}")

    async def _copy(
        self, step: Step, machine: Machine, files: Mapping[str, Path], log: Callable[[str], None]
    ) -> None:
        if step.files not in files:
            raise BuildError(f"COPY {' '.join(step.args)}: its files were not uploaded")
        tar = await asyncio.create_subprocess_exec(
            "tar", "-C", str(files[step.files]), "-c", ".", stdout=asyncio.subprocess.PIPE
        )
        data, _ = await tar.communicate()
        target = step.args[1]
        script = 'mkdir -p -- "$1" && tar -x --no-same-owner -C "$1"'
        done = await machine.run(["/bin/sh", "-c", script, "sh", target], user="root", stdin=data)
        _check(done.code, done.stderr.decode(), log)


def _check(code: int, output: str, log: Callable[[str], None], what: str = "") -> None:
    for line in output.splitlines():
        log(line)
    if code != 0:
        raise BuildError(f'process "/bin/sh -c {what}" did not complete successfully: exit code: {code}')


def key_of(base: str, steps: Sequence[Step]) -> str:
    """Return the hash of a build; a base has its own name."""
    if not steps:
        return base
    text = json.dumps([base, [[step.kind, list(step.args), step.files] for step in steps]])
    return hashlib.sha256(text.encode()).hexdigest()


def _make_base(root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    (root / "etc").mkdir(parents=True)
    for name in _ETC:
        source = Path("/etc", name)
        if source.is_dir() and not source.is_symlink():
            shutil.copytree(source, root / "etc" / name, symlinks=True, ignore_dangling_symlinks=True)
        elif source.exists():
            shutil.copy2(source, root / "etc" / name, follow_symlinks=True)
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        if Path("/", name).is_symlink():
            (root / name).symlink_to(Path("/", name).readlink())
    for name, mode in _OWN.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name).chmod(mode)
    (root / "etc/hostname").write_text("machine\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost machine\n")
    for name, uid in USERS.items():
        with (root / "etc/passwd").open("a") as file:
            file.write(f"{name}:x:{uid}:{uid}::/home/{name}:/bin/bash\n")
        with (root / "etc/group").open("a") as file:
            file.write(f"{name}:x:{uid}:\n")
        (root / "home" / name).mkdir()
        try:
            shutil.chown(root / "home" / name, uid, uid)
        except PermissionError:
            (root / "home" / name).chmod(0o777)


def parse_dockerfile(text: str) -> tuple[str, list[Step]]:
    """Return the base and the steps of a Dockerfile: one stage, no COPY; BuildError for what is not known."""
    base, steps = "", []
    for line in _logical_lines(text):
        word, _, rest = line.partition(" ")
        kind, rest = word.upper(), rest.strip()
        if kind == "FROM":
            if base:
                raise BuildError("the double builds one stage")
            base = rest.split()[0]
        elif kind == "RUN":
            if rest.startswith("["):
                rest = shlex.join(json.loads(rest))
            steps.append(Step("RUN", [rest]))
        elif kind == "ENV":
            steps.append(Step("ENV", _pairs(rest)))
        elif kind in ("WORKDIR", "USER"):
            steps.append(Step(kind, [rest]))
        elif kind in ("COPY", "ADD"):
            raise BuildError(f"{line}: there is no build context")
        elif kind not in ("CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "SHELL", "STOPSIGNAL", "VOLUME", "ARG"):
            raise BuildError(f"dockerfile parse error: unknown instruction: {word}")
    if not base:
        raise BuildError("dockerfile parse error: no FROM")
    return base, steps


def _logical_lines(text: str) -> list[str]:
    lines, open_line = [], ""
    for line in text.splitlines():
        if len(line) > 65_535:
            raise BuildError("dockerfile line greater than max allowed size of 65535")
        if line.lstrip().startswith("#") or (not line.strip() and not open_line):
            continue
        open_line += line
        if re.search(r"\\\s*$", open_line):
            open_line = re.sub(r"\\\s*$", "", open_line)
        else:
            lines.append(open_line.strip())
            open_line = ""
    return [*lines, open_line.strip()] if open_line.strip() else lines


def _pairs(rest: str) -> list[str]:
    words = shlex.split(rest)
    if "=" not in words[0]:
        return [words[0], rest.partition(" ")[2].strip()]
    return [part for word in words for part in (word.partition("=")[0], word.partition("=")[2])]
