"""Reading a directory of Terminal-Bench 2 tasks."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rollhook.budgets import DEFAULTS
from rollhook.environment import Task
from rollhook.errors import UsageError
from rollhook_tbench2.problems import TaskProblem
from rollhook_tbench2.stages import Stage, TaskDir, layout_problems, read_stages
from rollhook_tbench2.task_toml import parse_task_toml

__all__ = ["STAGING_SECONDS", "Stage", "TaskDir", "TaskSet", "read_task", "read_task_set"]

#: names below a tasks directory, or a task, that are no part of it
_IGNORED = ("__pycache__", ".DS_Store")
#: seconds of the budget node `verify` beyond the verifier's own, for staging and reading
STAGING_SECONDS = 30.0
#: and where it has artifacts, for fetching them and giving them to a separate verifier
_COLLECTING_SECONDS = 120.0
#: bytes of a file that we read above which it is taken for a mistake
_MAX_BYTES = 1 << 20
#: the files of a task that are read, and those that tell of what is not supported
_OURS = re.compile(
    r"task\.toml|trajectory\.json|\.harborignore|(?:tests|solution)/\.harborignore"
    r"|environment/(?:Dockerfile|docker-compose\.ya?ml)"
    r"|(?:steps/[^/]+/)?(?:instruction\.md|tests/(?:test\.sh|Dockerfile|docker-compose\.ya?ml))"
)


@dataclass(frozen=True)
class TaskSet:
    """All tasks of a directory: `splits` maps names to ids, `about` is what pack.json says."""

    tasks: Mapping[str, Task]
    splits: Mapping[str, Sequence[str]]
    about: Mapping[str, object]


def tasks_root(text: str) -> Path:
    """Return the absolute path of a tasks directory. Raises UsageError for a home that is not there."""
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise UsageError(f"tasks_dir {text} names a home directory that is not there") from error


def read_task_set(root: Path, extra_splits: Mapping[str, str | Sequence[str]]) -> TaskSet:
    """Read every task below `root`; a malformed one has its problem and harms no other.

    Raises UsageError when there is no task at all, or a split names tasks that are not there.
    """
    try:
        directories = [root] if (root / "task.toml").is_file() else list(_task_directories(root))
    except OSError as error:
        raise UsageError(f"tasks_dir {root} cannot be read: {error.strerror}") from error
    if not directories:
        raise UsageError(
            f"no tasks in {root}: give a directory whose subdirectories hold task.toml and instruction.md"
        )
    splits = {**_splits_file(root), **{name: ids_of(value) for name, value in extra_splits.items()}}
    split_of = {task: name for name, ids in splits.items() for task in ids}
    read = [read_task(path, split_of.get(path.name, "all")) for path in directories]
    tasks = {task.id: task for task in read}
    for name, ids in splits.items():
        missing = [task for task in ids if task not in tasks]
        if missing:
            raise UsageError(
                f"split {name!r} names {len(missing)} tasks that {root} does not hold: "
                f"{', '.join(missing[:5])}"
            )
        if twice := [task for task, count in Counter(ids).items() if count > 1]:
            raise UsageError(f"split {name!r} names {', '.join(twice[:5])} twice")
    return TaskSet(tasks, splits, _json_object(root / "pack.json"))


def read_task(directory: Path, split: str = "all") -> Task:
    """Read one task directory; what is wrong with it is in `problem`."""
    if not directory.name.isprintable():
        shown = directory.name.encode("unicode_escape", "surrogatepass").decode()
        return Task(
            shown, "", split, problem="the directory's name is no printable text; rename it", payload=None
        )
    try:
        digest, small = _hash(str(directory))
    except (OSError, RecursionError) as error:
        reason = "is nested too deep" if isinstance(error, RecursionError) else error.strerror
        file = os.path.relpath(error.filename, directory) if isinstance(error, OSError) else "."
        what = "the directory" if file == "." else f"{file}:"
        return Task(directory.name, "", split, problem=f"{what} cannot be read: {reason}", payload=None)
    settings = small.get("task.toml", b"")
    unreadable = [problem for name, data in small.items() for problem in _no_text(name, data)]
    config, found = parse_task_toml(settings.decode("utf-8", "replace") if not unreadable else "")
    problems = [_not_missing(directory, problem) for problem in layout_problems(small, config)] + unreadable
    if "task.toml" in small:
        problems += found
    payload = None
    if config is not None and not problems:
        payload, problems = read_stages(directory, config, small)
    if payload is None or problems:
        reasons = "\n".join(str(problem) for problem in problems)
        return Task(directory.name, digest, split, problem=reasons, payload=None)
    return Task(directory.name, digest, split, payload.config.family, _limits(payload), payload)


def _no_text(name: str, data: bytes) -> Iterator[TaskProblem]:
    """Yield why a file that we read cannot be taken for text."""
    if len(data) > _MAX_BYTES:
        yield TaskProblem(name, "", 0, "larger than 1 MiB")
    elif name.endswith(("task.toml", "instruction.md")):
        try:
            data.decode()
        except UnicodeDecodeError as error:
            yield TaskProblem(name, "", 0, f"no UTF-8 text (byte {error.start})")


def _not_missing(directory: Path, problem: TaskProblem) -> TaskProblem:
    if problem.reason != "missing" or not os.path.lexists(directory / problem.file):
        return problem
    return replace(problem, reason="no regular file, or below a link")


def _limits(task: TaskDir) -> dict[str, float]:
    """Return the seconds of the budget's nodes that the task asks for, all stages together."""
    environment = task.config.environment
    verify = sum(stage.verifier.timeout_sec + STAGING_SECONDS for stage in task.stages)
    verify += sum(_COLLECTING_SECONDS for stage in task.stages if stage.artifacts)
    limits = {"verify": verify + sum(hook.timeout_sec for s in task.stages for hook in s.verifier.collect)}
    agent = [stage.agent_seconds for stage in task.stages]
    if None not in agent:
        limits["agent"] = sum(seconds for seconds in agent if seconds is not None)
    built = task.box.dockerfile is not None and task.box.docker_image is None
    if built or "build_timeout_sec" in environment.model_fields_set:
        limits["create"] = environment.build_timeout_sec
    checks = [environment.healthcheck, *(stage.healthcheck for stage in task.stages)]
    if any(checks):
        limits["setup"] = DEFAULTS["setup"] + max(check.longest for check in checks if check is not None)
    return limits


def _task_directories(root: Path) -> Iterator[Path]:
    if not root.is_dir():
        raise UsageError(f"tasks_dir {root} is not a directory")
    for entry in sorted(os.scandir(root), key=lambda entry: entry.name):
        if _is_directory(entry) and not entry.name.startswith(".") and entry.name not in _IGNORED:
            files = {"task.toml", "instruction.md"}
            if any(os.path.exists(f"{entry.path}/{name}") for name in files):
                yield Path(entry.path)


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _hash(root: str) -> tuple[str, dict[str, bytes]]:
    """Return the content hash of a directory (names, exec bits, bytes), and the beginning of what we read.

    A symbolic link counts with its target's text; other special files with their kind alone.
    """
    digest, small = hashlib.sha256(), {}
    for path, mode in _walk(root, ""):
        full = f"{root}/{path}"
        if stat.S_ISLNK(mode):
            digest.update(b"l%s\0%s\0" % (os.fsencode(path), os.fsencode(os.readlink(full))))
        elif stat.S_ISREG(mode):
            kind = b"x" if mode & 0o100 else b"f"
            with open(full, "rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
                if _OURS.fullmatch(path):
                    file.seek(0)
                    small[path] = file.read(_MAX_BYTES + 1)
            digest.update(kind + os.fsencode(path) + b"\0" + content)
        else:
            digest.update(b"s" + os.fsencode(path) + b"\0")
    return digest.hexdigest(), small


def _walk(root: str, prefix: str) -> Iterator[tuple[str, int]]:
    with os.scandir(f"{root}/{prefix}" if prefix else root) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        path = f"{prefix}{entry.name}"
        if entry.name in _IGNORED:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(root, f"{path}/")
        else:
            yield path, entry.stat(follow_symlinks=False).st_mode


def _splits_file(root: Path) -> dict[str, list[str]]:
    path = root / "splits.json"
    splits = _json_object(path)
    for name, ids in splits.items():
        if not isinstance(ids, list) or not all(isinstance(task, str) for task in ids):
            raise UsageError(f"{path}: {name} must be a list of task ids")
    return splits  # type: ignore[return-value]


def _json_object(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} must hold a JSON object")
    return value


def ids_of(value: str | Sequence[str]) -> list[str]:
    """Return ids as they are, or those of a file with one per line. Raises UsageError without the file."""
    if not isinstance(value, str):
        return list(value)
    try:
        lines = Path(value).read_text().splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text, or its name is none"
        raise UsageError(f"split file {value!r} cannot be read: {reason}") from error
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
