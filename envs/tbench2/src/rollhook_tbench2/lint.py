"""What is doubtful about a task, seen without running it, and which of its files no agent may read."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from rollhook_tbench2.stages import TaskDir

#: bytes of a file above which it is not looked at
_MAX_BYTES = 8 << 20
_REWARD = re.compile(rb"reward\.(?:json|txt)")


def doubts(task: TaskDir) -> list[str]:
    """Return findings as sentences without a full stop."""
    return list(_doubts(task))


def hidden_files(task: TaskDir) -> dict[str, bytes]:
    """Return the bytes of tests and solutions by path; huge and empty files are left out."""
    found = {}
    for stage in task.stages:
        for directory in [*stage.tests, stage.solution]:
            found.update(_files(Path(task.path), directory))
    return found


def _doubts(task: TaskDir) -> Iterator[str]:
    root = Path(task.path)
    hidden = hidden_files(task)
    for stage in task.stages:
        if not (root / stage.solution / "solve.sh").is_file():
            yield f"{stage.solution}/solve.sh is missing, so nothing proves that the task can be solved"
        if len(stage.instruction) < 20:
            yield f"{_path(stage.directory, 'instruction.md')} has {len(stage.instruction)} characters"
    for path, data in hidden.items():
        if path.endswith(".sh"):
            if not data.startswith(b"#!"):
                yield f"{path} does not begin with #!, so it depends on the shell that runs it"
            if b"\r\n" in data:
                yield f"{path} has Windows line ends"
    tests = [
        data
        for path, data in hidden.items()
        if path.startswith(("tests/", "steps/")) and "solution/" not in path
    ]
    if tests and not any(_REWARD.search(data) for data in tests):
        yield "no file of tests/ names reward.txt or reward.json, so it seems to write no reward"
    yield from _given(root, hidden)
    yield from _images(task)
    yield from _links(root)


def _given(root: Path, hidden: Mapping[str, bytes]) -> Iterator[str]:
    """Yield the hidden files that the image holds as well."""
    digests = {hashlib.sha256(data).digest(): path for path, data in hidden.items()}
    for path, data in _files(root, "environment").items():
        if (same := digests.get(hashlib.sha256(data).digest())) is not None:
            yield f"{path} is the same as {same}, so the agent can read it"


def _images(task: TaskDir) -> Iterator[str]:
    for plan in [task.box, *task.judges.values()]:
        image = plan.docker_image
        _, _, tag = image.rpartition("/")[2].partition(":") if image else ("", "", "")
        if image and "@" not in image and tag in ("", "latest"):
            yield f"the image {image} has no fixed tag, so the task may change"
        if plan.dockerfile is not None and re.search(r"(?m)^\s*FROM\s+\S+:latest\b", plan.dockerfile.text):
            yield f"{plan.directory}/Dockerfile builds on a tag `latest`, so the task may change"


def _links(root: Path) -> Iterator[str]:
    for directory in ("environment", "tests", "solution", "steps"):
        for path in sorted((root / directory).rglob("*")):
            if path.is_symlink() and not path.resolve().is_relative_to(root.resolve()):
                yield f"{path.relative_to(root)} is a link to {os.readlink(path)}, outside the task"


def _files(root: Path, directory: str) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted((root / directory).rglob("*"))
        if path.is_file() and not path.is_symlink() and 0 < path.stat().st_size <= _MAX_BYTES
    }


def _path(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory else name
