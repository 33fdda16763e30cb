"""A directory of code as the zip that a Ray job unpacks as its working directory on every node.

Ray's own client leaves out what `.gitignore` names, often files that the job needs, and finds out about a
size that the dashboard refuses by sending it. Here everything goes but what `exclude` names.
"""

from __future__ import annotations

import fnmatch
import hashlib
import io
import os
import stat
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rollhook.errors import LauncherError
from rollhook.ray_jobs import MAX_PACKAGE_BYTES

#: what no job needs; a pattern is matched with a file's or directory's name and with its path
EXCLUDE = (".git", ".hg", ".svn", "__pycache__", "*.pyc", ".venv", "venv", "node_modules", ".mypy_cache",
           ".pytest_cache", ".ruff_cache", "*.egg-info")  # fmt: skip
_EPOCH = (1980, 1, 1, 0, 0, 0)
_SHOWN = 5


def pack(
    directory: str | Path | None,
    files: Mapping[str, str],
    *,
    exclude: Sequence[str] = EXCLUDE,
    limit: int = MAX_PACKAGE_BYTES,
) -> tuple[bytes, str]:
    """Return a zip of a directory's content and of `files` (path -> text), and its name by content.

    The same content gives the same bytes. Raises LauncherError for a directory that cannot be read, for a
    link that leads out of it, and for a package above `limit` bytes, with the largest files.
    """
    found = dict(_walk(Path(directory), exclude)) if directory is not None else {}
    sizes = {name: path.stat().st_size for name, path in found.items()}
    if sum(sizes.values()) > 20 * limit:  # no compression brings that below the limit
        raise _too_large(directory, sizes, sum(sizes.values()), limit)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted({*found, *files}):
            executable = name in found and found[name].stat().st_mode & stat.S_IXUSR
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = (stat.S_IFREG | (0o755 if executable else 0o644)) << 16
            data = files[name].encode() if name in files else found[name].read_bytes()
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)
    package = buffer.getvalue()
    if len(package) > limit:
        raise _too_large(directory, sizes, len(package), limit)
    return package, f"_ray_pkg_{hashlib.sha256(package).hexdigest()[:32]}.zip"


def _walk(root: Path, exclude: Sequence[str]) -> Iterator[tuple[str, Path]]:
    if not root.is_dir():
        raise LauncherError(f"the code to upload, {root}, is no directory here", kind="user")
    inside = root.resolve()

    def unreadable(error: OSError) -> None:
        raise LauncherError(
            f"{error.filename} cannot be read for the upload: {error.strerror}", kind="user"
        ) from error

    for parent, directories, names in os.walk(root, onerror=unreadable):
        here = Path(parent)
        directories[:] = [name for name in directories if not _excluded(here / name, root, exclude)]
        links = [name for name in directories if (here / name).is_symlink()]
        for name in [*names, *links]:
            path = here / name
            if _excluded(path, root, exclude) or path.is_socket() or path.is_fifo():
                continue
            target = path.resolve()
            if not target.is_relative_to(inside) or not target.is_file():
                raise LauncherError(
                    f"{path} is a link to {target}, which no upload carries; put a file there, or exclude it",
                    kind="user",
                )
            yield path.relative_to(root).as_posix(), path


def _excluded(path: Path, root: Path, exclude: Sequence[str]) -> bool:
    relative = path.relative_to(root).as_posix()
    return any(fnmatch.fnmatch(path.name, each) or fnmatch.fnmatch(relative, each) for each in exclude)


def _too_large(
    directory: str | Path | None, sizes: Mapping[str, int], total: int, limit: int
) -> LauncherError:
    largest = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))[:_SHOWN]
    listed = ", ".join(f"{name} ({_mib(size)})" for name, size in largest)
    return LauncherError(
        f"the upload of {directory} has {_mib(total)}, and Ray takes {_mib(limit)}; leave out what the job "
        f"does not need, or use code: path on a shared file system; the largest files are {listed}",
        kind="user",
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
