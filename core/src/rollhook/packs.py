"""Generated packs on disk: written once per user, found by digest, named `pack:NAME/FILE` in recipes."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from rollhook.component import BuildContext
from rollhook.errors import UsageError
from rollhook.pack import Pack

if TYPE_CHECKING:
    from rich.console import Console

    from rollhook.plugins import Plugins

logger = logging.getLogger(__name__)

PREFIX = "pack:"
#: seconds after which a half-written pack of a killed process is removed
_ABANDONED = 24 * 3600.0


@dataclass(frozen=True)
class PackReference:
    """What `pack:NAME[?KEY=VALUE&...]/FILE` says; without a file it means the pack's directory."""

    name: str
    keys: dict[str, Any] = field(default_factory=dict)
    file: str = ""


def parse_reference(text: str) -> PackReference | None:
    """Return what a reference names, or None for a plain path.

    Values of keys are read as pydantic reads text (`noise=0.5` gives a number where one is wanted).
    """
    if not text.startswith(PREFIX):
        return None
    name, _, file = text.removeprefix(PREFIX).partition("/")
    name, _, query = name.partition("?")
    if not name or ".." in Path(file).parts or file.startswith("/"):
        raise UsageError(
            f"{text!r} is not a pack reference: write pack:NAME/FILE, e.g. pack:pocket/demos.jsonl"
        )
    return PackReference(name, dict(parse_qsl(query, keep_blank_values=True)), file)


#: names the cache of a job on several nodes, which all of them see
SHARED_CACHE = "ROLLHOOK_CACHE"


def cache_directory() -> Path:
    """Return the user's cache directory (XDG), or the one that a job on several nodes has in common."""
    if shared := os.environ.get(SHARED_CACHE):
        return Path(shared)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollhook"


def packs_directory() -> Path:
    """Return where packs are kept."""
    return cache_directory() / "packs"


def ensure(pack: Pack, *, name: str = "pack", console: Console | None = None) -> Path:
    """Return the directory of a pack, writing it first if it is not there.

    Atomic: it is written beside its place and renamed, so that two processes may do so at once and a
    killed one leaves nothing that counts. A console (default: stderr) that is a terminal shows a bar.
    Raises UsageError when the cache cannot be written.
    """
    root = packs_directory()
    place = root / pack.digest()
    if place.is_dir():
        return place
    temporary = root / f".{place.name}.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _sweep(root)
        temporary.mkdir()
        with _progress(name, console) as progress:
            pack.write(temporary, progress)
        _rename(temporary, place)
    except OSError as error:
        raise UsageError(
            f"pack {name} cannot be written to {root} ({error.strerror or error}): "
            "set XDG_CACHE_HOME to a directory with room"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return place


def resolve(reference: str, plugins: Plugins) -> Path:
    """Return the path of `pack:NAME/FILE`, or of a plain path, writing the pack if it is absent.

    Raises LoadError for an unknown pack, RecipeError for its keys, UsageError for a file it has not.
    """
    parsed = parse_reference(reference)
    if parsed is None:
        return Path(reference)
    plugins.add([("pack", parsed.name)])
    directory = ensure(build(parsed.name, parsed.keys, plugins), name=parsed.name)
    path = directory / parsed.file
    if not path.exists():
        files = ", ".join(sorted(entry.name for entry in directory.iterdir() if entry.is_file()))
        raise UsageError(f"pack {parsed.name} has no file {parsed.file!r}; it has {files}")
    return path


def resolve_all(value: Any, plugins: Plugins) -> Any:
    """Return plain data with every `pack:` reference in it turned into a path; raises as `resolve` does."""
    if isinstance(value, Mapping):
        return {key: resolve_all(each, plugins) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [resolve_all(each, plugins) for each in value]
    if isinstance(value, str) and value.startswith(PREFIX):
        return str(resolve(value, plugins))
    return value


def build(name: str, keys: dict[str, Any], plugins: Plugins) -> Pack:
    """Build a pack outside a run."""
    root = packs_directory()
    context = BuildContext(logging.getLogger(f"rollhook.pack.{name}"), scratch=root, cache=root.parent)
    pack: Pack = plugins.build("pack", name, keys, context, PREFIX + name)
    return pack


def _rename(temporary: Path, place: Path) -> None:
    try:
        temporary.rename(place)
    except OSError:
        # another process was first: a directory that is not empty is never replaced
        if not place.is_dir():
            raise


def _sweep(root: Path) -> None:
    """Remove what killed processes left half-written."""
    for entry in root.glob(".*.*"):
        if time.time() - entry.stat().st_mtime > _ABANDONED:
            logger.info("removing the abandoned half-written pack %s", entry)
            shutil.rmtree(entry, ignore_errors=True)


def _progress(
    name: str, console: Console | None
) -> AbstractContextManager[Callable[[int, int], None] | None]:
    """Return what gives the callback of a progress bar, or None where there is no terminal."""
    from rich.console import Console

    console = console or Console(stderr=True)
    return _Bar(name, console) if console.is_terminal else nullcontext()


class _Bar(AbstractContextManager[Callable[[int, int], None]]):
    """A progress bar as a callback of (done, total)."""

    def __init__(self, name: str, console: Console) -> None:
        from rich.progress import Progress

        self._progress = Progress(console=console, transient=True)
        self._name = name

    def __enter__(self) -> Callable[[int, int], None]:
        self._progress.start()
        task = self._progress.add_task(f"writing pack {self._name}", total=None)
        return lambda done, total: self._progress.update(task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
