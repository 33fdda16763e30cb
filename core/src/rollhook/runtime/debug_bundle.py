"""The archive of a run for a bug report: text files, secrets masked, each cut to its end if it is long."""

from __future__ import annotations

import io
import os
import re
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rollhook.durable import cannot_write, to_json
from rollhook.errors import RollhookError, UsageError
from rollhook.rundir import RunDir
from rollhook.runtime.job_records import attempt_directory, records
from rollhook.runtime.jobs import build_launcher, collect
from rollhook.secrets import Secret

MASK = "***"
#: bytes of a file that are kept, its end
MOST_BYTES = 4 << 20
_TOP = ("recipe.yaml", "recipe.lock.yaml", "metrics.jsonl", "result.json")
#: below an attempt: patterns of what is packed
_OF_ATTEMPT = ("*.json", "*.jsonl", "exit_code", "signalled", "logs/**/*", "debug/**/*", "job/**/*")
_NAME = r"(?:[A-Za-z0-9_-]*[_-])?(?:TOKEN|SECRET|PASSWORD|PASSWD|API[_-]?KEY|ACCESS[_-]?KEY|CREDENTIALS?)"
_SECRET_NAME = re.compile(rf"{_NAME}$", re.IGNORECASE)
_VALUE = r"\"[^\"\n]*\"|'[^'\n]*'|[^\s\"',;]+"
_ASSIGNED = re.compile(rf"(\b{_NAME}[\"']?\s*[=:]\s*)({_VALUE})", re.IGNORECASE)
#: what may stand there: nothing, a reference, a variable
_HARMLESS = re.compile(r"[\"']?(?:(?:env|file|k8s):.*|\$.*|null|none|)[\"']?", re.IGNORECASE)
_USER = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s@]+@", re.IGNORECASE)
_BEARER = re.compile(r"(\b(?:Bearer|Basic)\s+)[A-Za-z0-9._~+/=-]{8,}")
_REFERENCE = re.compile(r"\b(?:env:[A-Za-z_]\w*|file:[^\s\"',]+)")


async def collect_now(run: RunDir) -> str:
    """Collect once more what the scheduler says of the run's newest job; nothing for a run without one.

    Returns why it could not be asked, if so.
    """
    for record in records(run)[-1:]:
        if record.handle is not None:
            try:
                launcher = build_launcher(record, Path(tempfile.gettempdir()))
            except RollhookError as error:
                return f"launcher {record.launcher} cannot be asked: {error}"
            await collect(launcher, record.handle, attempt_directory(run, record.attempt), "asked")
    return ""


def write_bundle(run: RunDir, target: Path) -> list[str]:
    """Write the archive and return the names in it. Raises RunError when it cannot be written."""
    values = secret_values(run)
    names = []
    try:
        with tarfile.open(target, "w:gz") as archive:
            for name, text in _contents(run):
                data = masked(text, values).encode("utf-8", errors="replace")
                info = tarfile.TarInfo(f"{run.run_id}/{name}")
                info.size, info.mtime, info.mode = len(data), int(_newest(run)), 0o644
                archive.addfile(info, io.BytesIO(data))
                names.append(name)
    except OSError as error:
        raise cannot_write(target, error) from error
    return names


def masked(text: str, values: list[str]) -> str:
    """Return text without these values, and without what is assigned to names such as API_KEY."""
    for value in values:
        text = text.replace(value, MASK)
    text = _BEARER.sub(rf"\1{MASK}", text)
    text = _USER.sub(rf"\1{MASK}@", text)
    return _ASSIGNED.sub(_mask_value, text)


def _mask_value(found: re.Match[str]) -> str:
    name, value = found.groups()
    if _HARMLESS.fullmatch(value):
        return str(found[0])
    quote = value[0] if value[0] in "\"'" else ""
    return f"{name}{quote}{MASK}{quote}"


def secret_values(run: RunDir) -> list[str]:
    """Return, longest first, the values that are secret: of the run's references that resolve here.

    Also of this process's environment, by names such as API_KEY.
    """
    texts = [
        path.read_text("utf-8", errors="replace")
        for path in (run.recipe_path, run.lock_path)
        if path.exists()
    ]
    texts += [str(dict(record.keys)) for record in records(run)]
    found = {value for name, value in os.environ.items() if _SECRET_NAME.search(name)}
    for reference in {match for text in texts for match in _REFERENCE.findall(text)}:
        try:
            found.add(Secret.parse(reference).resolve().get_secret_value())
        except (UsageError, ValueError):
            continue  # it is not here, so it is not in what was written here either
    return sorted((value for value in found if len(value) >= 4), key=len, reverse=True)


def _contents(run: RunDir) -> Iterator[tuple[str, str]]:
    yield "about.json", to_json(_about(run), indent=True).decode() + "\n"
    for name in _TOP:
        if _is_own(run, run.path / name):
            yield name, _end_of(run.path / name)
    for attempt in sorted((run.path / "attempts").glob("[0-9]*")):
        paths = {path for pattern in _OF_ATTEMPT for path in attempt.glob(pattern) if _is_own(run, path)}
        for path in sorted(paths):
            yield str(path.relative_to(run.path)), _end_of(path)


def _about(run: RunDir) -> dict[str, object]:
    import platform

    import rollhook
    from rollhook.installed import installed
    from rollhook.runtime.diagnosis import diagnose

    about: dict[str, object] = {
        "run_id": run.run_id,
        "rollhook": rollhook.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "distributions": sorted({f"{each.distribution} {each.version}" for each in installed()}),
    }
    try:
        about["diagnosis"] = diagnose(run).data()
    except (RollhookError, OSError, ValueError) as error:
        about["diagnosis"] = f"{type(error).__name__}: {error}"
    return about


def _is_own(run: RunDir, path: Path) -> bool:
    """Return whether it is a file of the run, not a link to what is elsewhere."""
    return path.is_file() and path.resolve().is_relative_to(run.path.resolve())


def _end_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MOST_BYTES))
            data = file.read(MOST_BYTES)
    except OSError as error:
        return f"[{path.name} cannot be read: {error.strerror}]\n"
    head = f"[the first {size - MOST_BYTES} bytes are left out]\n" if size > MOST_BYTES else ""
    return head + data.decode("utf-8", errors="replace")


def _newest(run: RunDir) -> float:
    return run.path.stat().st_mtime
