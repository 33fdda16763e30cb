"""The trivial subset of a Dockerfile that a sandbox without images can follow: FROM, WORKDIR, ENV, COPY."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from rollhook_tbench2.problems import TaskProblem

FILE = "environment/Dockerfile"


@dataclass(frozen=True)
class Dockerfile:
    """What was understood. `workdir` and `env` hold for image sandboxes too.

    `copies` are (source below environment/, absolute destination), as COPY reads them; `refused` says why
    the file cannot be followed without images, and is None if it can.
    """

    workdir: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    copies: tuple[tuple[str, str], ...] = ()
    refused: TaskProblem | None = None


def parse_dockerfile(text: str) -> Dockerfile:
    """Read a Dockerfile; what is beyond the subset is named in `refused`, never skipped in silence."""
    workdir: str | None = None
    env: dict[str, str] = {}
    copies: list[tuple[str, str]] = []
    refused: TaskProblem | None = None
    stages = 0
    for line, words in _instructions(text):
        name, rest = words[0].upper(), words[1:]
        why = None
        if name == "FROM":
            stages += 1
            workdir, env, copies = None, {}, []
            why = "several build stages" if stages > 1 else None
        elif name == "WORKDIR" and len(rest) == 1 and "$" not in rest[0]:
            workdir = posixpath.normpath(posixpath.join(workdir or "/", rest[0]))
        elif name == "ENV" and rest and not any("$" in word for word in rest):
            env.update(_env(rest))
        elif name == "COPY" and len(rest) >= 2:
            why = _copy(rest, workdir or "/", copies)
        else:
            why = f"{name} is not among FROM, WORKDIR, ENV and COPY"
        if why and refused is None:
            refused = TaskProblem(FILE, name, line, f"{why}: it needs a sandbox that runs images")
    return Dockerfile(workdir, env, tuple(copies), refused)


def target_of(source: Path, destination: str) -> str:
    """Return where COPY puts a file: below a destination that ends with a slash, else there."""
    return str(PurePosixPath(destination, source.name)) if destination.endswith("/") else destination


def _instructions(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, words) of each instruction, continuation lines joined."""
    joined, first = "", 0
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if line.startswith("#") or not line:
            continue
        first = first or number
        joined += line
        if joined.endswith("\\"):
            joined = joined[:-1] + " "
            continue
        try:
            words = shlex.split(joined)
        except ValueError:
            words = joined.split()
        yield first, words
        joined, first = "", 0


def _env(words: list[str]) -> dict[str, str]:
    if "=" not in words[0]:
        return {words[0]: " ".join(words[1:])}
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def _copy(words: list[str], workdir: str, copies: list[tuple[str, str]]) -> str | None:
    *sources, destination = words
    for word in words:
        if word.startswith(("--", "[")) or re.search(r"[$*?\[]", word):
            return f"COPY with {word!r}"
        if ".." in PurePosixPath(word).parts:
            return f"COPY of {word!r}, which leaves environment/,"
    if not destination.startswith("/"):
        destination = posixpath.join(workdir, destination)
    if len(sources) > 1 and not destination.endswith("/"):
        destination += "/"
    copies.extend((source.strip("/") or ".", destination) for source in sources)
    return None
