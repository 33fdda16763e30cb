"""What of a Dockerfile decides how commands run in its image, and the subset that needs no image.

A sandbox without images can follow FROM, WORKDIR, ENV and plain COPY.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from rollhook_tbench2.problems import TaskProblem

FILE = "environment/Dockerfile"

_VARIABLE = re.compile(r"\\\$|\$(?:(\w+)|\{(\w+)(?::([-+])([^}]*))?\})")
#: characters that the variables of one word may come to
_MOST = 1 << 16
_HEREDOC = re.compile(r"<<-?\s*([\"']?)(\w+)\1")


@dataclass(frozen=True)
class Dockerfile:
    """What was understood: `workdir`, `env` and `user` of the image that it builds, as far as it says.

    `copies` are (source below the context, absolute destination), as COPY reads them; `refused` says why
    the file cannot be followed without images, and is None if it can.
    """

    workdir: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    copies: tuple[tuple[str, str], ...] = ()
    refused: TaskProblem | None = None
    user: str | None = None
    text: str = ""


def parse_dockerfile(text: str, file: str = FILE) -> Dockerfile:
    """Read a Dockerfile; what is beyond the subset is named in `refused`, never skipped in silence."""
    stages: dict[str, Dockerfile] = {}
    now = Dockerfile()
    name, count = "", 0
    args: dict[str, str] = {}
    refused: TaskProblem | None = None
    for line, words in _instructions(text):
        instruction, rest = words[0].upper(), words[1:]
        known = {**args, **now.env}
        why = None
        if instruction == "FROM":
            if count:
                stages[name] = now
            count += 1
            flags = [word for word in rest if word.startswith("--")]
            base, *alias = [word for word in rest if word not in flags] or [""]
            name = alias[1].lower() if len(alias) > 1 else str(count - 1)
            now = replace(stages.get(base.lower(), Dockerfile()), copies=())
            why = "several build stages" if count > 1 else None
        elif instruction == "WORKDIR" and len(rest) == 1:
            path = posixpath.normpath(posixpath.join(now.workdir or "/", expand(rest[0], known)))
            if "$" in rest[0]:
                why = "WORKDIR is not among FROM, WORKDIR, ENV and COPY with plain words"
            now = replace(now, workdir=path)
        elif instruction == "ENV" and rest:
            if any("$" in word for word in rest):
                why = "ENV is not among FROM, WORKDIR, ENV and COPY with plain words"
            now = replace(now, env={**now.env, **_env([expand(word, known) for word in rest])})
        elif instruction == "ARG" and rest:
            args |= {key: expand(value, known) for key, _, value in (word.partition("=") for word in rest)}
            why = "ARG is not among FROM, WORKDIR, ENV and COPY"
        elif instruction == "USER" and len(rest) == 1:
            now = replace(now, user=expand(rest[0], known).partition(":")[0])
            why = "USER is not among FROM, WORKDIR, ENV and COPY"
        elif instruction == "COPY" and len(rest) >= 2:
            copies = list(now.copies)
            why = _copy(rest, now.workdir or "/", copies)
            now = replace(now, copies=tuple(copies))
        else:
            why = f"{instruction} is not among FROM, WORKDIR, ENV and COPY"
        if why and refused is None:
            refused = TaskProblem(file, instruction, line, f"{why}: it needs a sandbox that runs images")
    return replace(now, refused=refused, text=text)


def expand(word: str, known: Mapping[str, str]) -> str:
    """Replace $NAME, ${NAME}, ${NAME:-word} and ${NAME:+word}; a name that is not known is empty.

    So is what is beyond 64 KiB: a file may not grow without end by variables that hold one another.
    """

    left = _MOST

    def value(match: re.Match[str]) -> str:
        nonlocal left
        if match[0] == "\\$":
            return "$"
        found = known.get(match[1] or match[2], "")
        if match[3] == "-":
            found = found or match[4]
        elif match[3] == "+":
            found = match[4] if found else ""
        left -= len(found)
        return found if left >= 0 else ""

    return _VARIABLE.sub(value, word)


def target_of(source: Path, destination: str) -> str:
    """Return where COPY puts a file: below a destination that ends with a slash, else there."""
    return str(PurePosixPath(destination, source.name)) if destination.endswith("/") else destination


def _instructions(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, words) of each instruction, continuation lines joined, here-documents skipped."""
    parts: list[str] = []
    first = 0
    ends: list[str] = []
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if ends:
            if line == ends[0]:
                ends.pop(0)
            continue
        if line.startswith("#") or not line:
            continue
        first = first or number
        if line.endswith("\\"):
            parts.append(line[:-1])
            continue
        joined = " ".join([*parts, line])
        if not joined.strip():
            continue
        if joined.split(None, 1)[0].upper() in ("RUN", "COPY", "ADD"):
            ends = [match[2] for match in _HEREDOC.finditer(joined)]
        try:
            words = shlex.split(joined)
        except ValueError:
            words = joined.split()
        yield first, words
        parts, first = [], 0


def _env(words: list[str]) -> dict[str, str]:
    if "=" not in words[0]:
        return {words[0]: " ".join(words[1:])}
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def _copy(words: list[str], workdir: str, copies: list[tuple[str, str]]) -> str | None:
    *sources, destination = words
    for word in words:
        if word.startswith(("--", "[")) or re.search(r"[$*?\[]|<<", word):
            return f"COPY with {word!r}"
        if ".." in PurePosixPath(word).parts:
            return f"COPY of {word!r}, which leaves environment/,"
    if not destination.startswith("/"):
        destination = posixpath.join(workdir, destination)
    if len(sources) > 1 and not destination.endswith("/"):
        destination += "/"
    copies.extend((source.strip("/") or ".", destination) for source in sources)
    return None
