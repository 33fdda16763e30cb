"""Dockerfiles for a service that gets only their text: what COPY takes from the context goes into RUN lines.

The files of a COPY are packed (reproducibly: same files, same bytes), compressed, and written as base64 by
several RUN lines below the builder's limit of a line; a last one unpacks them. `solution/` is no part of any
context.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import posixpath
import re
import shlex
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rollhook.errors import SandboxError

#: bytes of the packed files in one RUN line: as base64 it stays below the limit of 65535 a line
CHUNK = 45_000
#: build lines that a service accepts beside the others
MAX_CHUNKS = 90
_HIDDEN = "solution"
_MTIME = 946_684_800  # 2000-01-01; zip cannot store what is before 1980
_HEREDOC = re.compile(r"<<-?\s*([\"']?)([A-Za-z_][A-Za-z0-9_]*)\1")


@dataclass(frozen=True)
class Instruction:
    """One instruction: its word in capitals, its arguments with continued lines joined, its own text."""

    word: str
    rest: str
    text: str


def parse(text: str) -> list[Instruction]:
    """Return the instructions of a Dockerfile; comments and parser directives are left out."""
    return list(_instructions(text.splitlines()))


def _instructions(lines: list[str]) -> Iterator[Instruction]:
    pending, raw = "", []
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if line.lstrip().startswith("#") or not line.strip():
            continue
        raw.append(line)
        pending += line
        if re.search(r"\\\s*$", pending):
            pending = re.sub(r"\\\s*$", "", pending)
            continue
        word, _, rest = pending.strip().partition(" ")
        for heredoc in _HEREDOC.finditer(rest) if word.upper() in ("RUN", "COPY", "ADD") else ():
            while number < len(lines):
                raw.append(lines[number])
                number += 1
                if raw[-1].strip() == heredoc[2]:
                    break
        yield Instruction(word.upper(), rest.strip(), "\n".join(raw))
        pending, raw = "", []
    if pending.strip():
        word, _, rest = pending.strip().partition(" ")
        yield Instruction(word.upper(), rest.strip(), "\n".join(raw))


def embed(text: str, context: Path | None, limit: int) -> str:
    """Return the Dockerfile with the files of its COPY lines in its text.

    `limit` is in bytes of all packed files. Raises SandboxError(kind="user") for a COPY that cannot be met.
    """
    out, used, user = [], 0, "root"
    for instruction in parse(text):
        if instruction.word == "FROM":
            user = "root"
        if instruction.word == "USER":
            user = instruction.rest
        if instruction.word not in ("COPY", "ADD") or not _from_context(instruction):
            out.append(instruction.text)
            continue
        packed, script = _pack(instruction, context)
        used += len(packed)
        if used > limit or used > MAX_CHUNKS * CHUNK:
            raise SandboxError(
                f"the files of {instruction.text!r} make the build {used} bytes, more than the limit of "
                f"{min(limit, MAX_CHUNKS * CHUNK)}; fetch them in a RUN line or raise sandbox.context_bytes",
                kind="user",
            )
        lines = _run_lines(packed, script, len(out))
        out += lines if user in ("root", "0") else ["USER root", *lines, f"USER {user}"]
    return "\n".join(out) + "\n"


def _from_context(instruction: Instruction) -> bool:
    if _HEREDOC.search(instruction.rest) or "--from=" in instruction.rest:
        return False
    return not (instruction.word == "ADD" and re.search(r"(https?|git)://|git@", instruction.rest))


def _words(instruction: Instruction) -> tuple[dict[str, str], list[str]]:
    flags, rest = {}, instruction.rest
    while (found := re.match(r"--([a-z-]+)(?:=(\S+))?\s+", rest)) is not None:
        flags[found[1]] = found[2] or ""
        rest = rest[found.end() :]
    try:
        words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    except ValueError as error:
        raise SandboxError(f"{instruction.text!r} is not understood: {error}", kind="user") from None
    if len(words) < 2:
        raise SandboxError(f"{instruction.text!r} names no source or no destination", kind="user")
    if unknown := set(flags) - {"chown", "chmod", "link"}:
        raise SandboxError(f"{instruction.text!r}: --{min(unknown)} is not supported here", kind="user")
    return flags, [str(word) for word in words]


def _pack(instruction: Instruction, context: Path | None) -> tuple[bytes, str]:
    """Return the packed files and the script that unpacks standard input."""
    flags, (*sources, target) = _words(instruction)
    if context is None:
        raise SandboxError(f"{instruction.text!r} needs a build context, and there is none", kind="user")
    found: dict[str, Path] = {}
    one_file = False
    for source in sources:
        if "$" in source:
            raise SandboxError(f"{instruction.text!r}: variables in sources are not supported", kind="user")
        matches = _matches(context, source)
        if not matches:
            raise SandboxError(f"{instruction.text!r}: {source} is not in {context}", kind="user")
        for path in matches:
            if instruction.word == "ADD" and re.search(r"\.(tar|tgz|gz|xz|bz2|zst)$", path.name):
                raise SandboxError(f"{instruction.text!r}: archives are not unpacked; use RUN", kind="user")
            if path.is_dir() and not path.is_symlink():
                found |= {str(p.relative_to(path)): p for p in _below(path, context)}
            else:
                one_file = len(sources) == len(matches) == 1 and not target.endswith("/")
                found[path.name] = path
    where, name = shlex.quote(target), shlex.quote(next(iter(found), ""))
    script = f"mkdir -p {where} && tar -xzo -C {where}"
    changed = where
    if one_file and target not in (".", "./") and PurePosixPath(target).name not in ("", ".", ".."):
        parent = shlex.quote(posixpath.dirname(target) or ".")
        script = (
            f"mkdir -p {parent} && if [ -d {where} ]; then tar -xzo -C {where}; "
            f"else tar -xzOf - {name} > {where} && chmod {_mode(next(iter(found.values())))} {where}; fi"
        )
    else:
        changed = " ".join(shlex.quote(posixpath.join(target, top)) for top in sorted(_tops(found)))
    for command in ("chown", "chmod"):
        if command in flags and changed:
            script += f" && {command} -R {shlex.quote(flags[command])} {changed}"
    return _tar(found), script


def _tops(found: dict[str, Path]) -> set[str]:
    return {name.split("/", 1)[0] for name in found}


def _matches(context: Path, source: str) -> list[Path]:
    relative = posixpath.normpath("/" + source).lstrip("/")
    first = relative.split("/", 1)[0]
    if first == _HIDDEN:
        raise SandboxError(f"{source}: solution/ never enters an image", kind="user")
    if relative in ("", "."):
        return [context]
    if re.search(r"[*?\[]", relative):
        matches = sorted(path for path in context.glob(relative) if path.name != _HIDDEN)
    else:
        path = context / relative
        matches = [path] if path.is_symlink() or path.exists() else []
    root = context.resolve()
    for path in matches:
        if not path.resolve().is_relative_to(root):
            raise SandboxError(f"{source} leads out of the build context {context}", kind="user")
    return matches


def _below(directory: Path, context: Path) -> Iterator[Path]:
    hidden = context / _HIDDEN
    for path in sorted(directory.rglob("*")):
        if path != hidden and hidden not in path.parents:
            yield path


def _tar(found: dict[str, Path]) -> bytes:
    """Return a gzipped tar of these files: no owner, no times, in order."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, path in sorted(found.items()):
            entry = tar.gettarinfo(str(path), arcname=name)
            if entry is None or not (entry.isreg() or entry.isdir() or entry.issym() or entry.islnk()):
                continue
            if entry.islnk():
                entry.type, entry.linkname, entry.size = tarfile.REGTYPE, "", path.stat().st_size
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            entry.mtime = _MTIME
            if entry.isreg():
                with path.open("rb") as file:
                    tar.addfile(entry, file)
            else:
                tar.addfile(entry)
    return gzip.compress(raw.getvalue(), 9, mtime=0)


def _mode(path: Path) -> str:
    return f"{path.stat().st_mode & 0o777:o}"


def _run_lines(packed: bytes, script: str, number: int) -> list[str]:
    spool = f"/tmp/.rollhook-copy-{number}"  # noqa: S108 - in the image
    lines = []
    for start in range(0, len(packed), CHUNK):
        encoded = base64.b64encode(packed[start : start + CHUNK]).decode()
        lines.append(f"RUN printf %s {encoded} | base64 -d >> {spool}")
    return [*lines, f"RUN {{ {script}; }} < {spool} && rm {spool}"]
