"""Directory transfer: what is packed on this side, and hostile archives unpacked without harm."""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import stat
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

from rollhook.errors import SandboxError

_SIMPLE_FILES = 32
_SIMPLE_BYTES = 4 << 20

_UNPACK = 'mkdir -p -- "$1" && exec tar -x -p -f - -C "$1"'
#: the exit codes tell a directory that is not there from a failing tar
_PACK = """
[ -e "$1" ] || [ -L "$1" ] || exit 65
[ -d "$1" ] || exit 66
exec tar -c -f - -C "$1" .
"""


@dataclass
class TransferReport:
    """What was transferred; `skipped` lists (path, reason) of what was not, `altered` of what was changed."""

    files: int = 0
    bytes: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)
    altered: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class UploadPlan:
    """What an upload consists of, names relative to its root."""

    root: Path
    files: list[tuple[str, Path, int]] = field(default_factory=list)
    directories: list[tuple[str, int]] = field(default_factory=list)
    links: list[tuple[str, str]] = field(default_factory=list)
    bytes: int = 0

    @property
    def simple(self) -> bool:
        """Whether writing each file gives the same as unpacking an archive."""
        parents = {posixpath.dirname(name) for name, _, _ in self.files}
        implied = {
            "/".join(parent.split("/")[: i + 1]) for parent in parents for i in range(parent.count("/") + 1)
        }
        return (
            not self.links
            and 0 < len(self.files) <= _SIMPLE_FILES
            and self.bytes <= _SIMPLE_BYTES
            and all(name in implied and mode == 0o755 for name, mode in self.directories)
        )


def plan_upload(root: Path) -> tuple[UploadPlan, TransferReport]:
    """List what is in `root`, following no link below it."""
    if not root.exists():
        raise FileNotFoundError(f"{root} is not there to upload")
    if not root.is_dir():
        raise NotADirectoryError(f"{root} is not a directory")
    plan, report = UploadPlan(root), TransferReport()
    pending = [(root, "")]
    while pending:
        directory, prefix = pending.pop()
        with os.scandir(directory) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            name = prefix + entry.name
            info = entry.stat(follow_symlinks=False)
            mode = stat.S_IMODE(info.st_mode)
            if stat.S_ISLNK(info.st_mode):
                plan.links.append((name, os.readlink(entry.path)))
            elif stat.S_ISDIR(info.st_mode):
                plan.directories.append((name, mode))
                pending.append((Path(entry.path), name + "/"))
            elif stat.S_ISREG(info.st_mode):
                plan.files.append((name, Path(entry.path), mode))
                plan.bytes += info.st_size
            else:
                report.skipped.append((name, f"{_kind(info.st_mode)} is not transferred"))
    report.files, report.bytes = len(plan.files) + len(plan.links), plan.bytes
    return plan, report


def pack(plan: UploadPlan, archive: BinaryIO) -> None:
    """Write the plan as a tar whose members belong to root."""
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, mode in plan.directories:
            tar.addfile(_member(name, tarfile.DIRTYPE, mode))
        for name, source, mode in plan.files:
            with source.open("rb") as stream:
                member = _member(name, tarfile.REGTYPE, mode)
                member.size = os.fstat(stream.fileno()).st_size
                tar.addfile(member, stream)
        for name, target in plan.links:
            member = _member(name, tarfile.SYMTYPE, 0o777)
            member.linkname = target
            tar.addfile(member)


def unpack_argv(remote: str) -> list[str]:
    """Return the argv that unpacks a tar from stdin into `remote`."""
    return ["/bin/sh", "-c", _UNPACK, "rollhook-unpack", remote]


def pack_argv(remote: str) -> list[str]:
    """Return the argv that packs what is in `remote` to stdout."""
    return ["/bin/sh", "-c", _PACK, "rollhook-pack", remote]


def check_packed(remote: str, code: int | None, said: str) -> None:
    """Raise when `pack_argv` ended without a usable archive."""
    if code == 65:
        raise FileNotFoundError(f"{remote} is not in the sandbox")
    if code == 66:
        raise NotADirectoryError(f"{remote} in the sandbox is not a directory")
    if code not in (0, 1, 2):  # 1 and 2: some files could not be read; tar names them
        raise SandboxError(f"packing {remote} failed with exit code {code}: {said.strip()[:500]}")


def unpack(archive: BinaryIO, target: Path, limit: int, said: str = "") -> TransferReport:
    """Unpack an untrusted tar into `target`; nothing is written, linked or made outside it.

    Links are made last, so that no member is written through one, and those that resolve outside
    `target` are taken back. Raises SandboxError for an archive that cannot be read or that holds more than
    `limit` bytes.
    """
    target.mkdir(parents=True, exist_ok=True)
    run = _Unpacking(Path(os.path.realpath(target)), limit)
    run.report.skipped.extend(_named_by_tar(said))
    archive.seek(0)
    try:
        with tarfile.open(
            fileobj=archive, mode="r|", encoding="utf-8", errors="surrogateescape", ignore_zeros=False
        ) as tar:
            for member in tar:
                run.add(tar, member)
    except tarfile.ReadError as error:
        if run.report.files or run.seen:
            raise SandboxError(f"the sandbox sent a broken archive: {error}") from error
        raise SandboxError(f"the sandbox sent no archive: {error}") from error
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise SandboxError(f"the sandbox sent a broken archive: {error}") from error
    run.finish()
    return run.report


class _Unpacking:
    def __init__(self, root: Path, limit: int) -> None:
        self.root = root
        self.limit = limit
        self.seen = 0
        self.report = TransferReport()
        self._links: list[tuple[str, str]] = []
        self._hard: list[tuple[str, str]] = []
        self._modes: list[tuple[Path, int]] = []
        self._made: set[str] = set()

    def add(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        self.seen += 1
        if self.seen > 1_000_000:
            raise SandboxError("the sandbox sent an archive of more than a million members", kind="user")
        name = _inside(member.name)
        if name is None:
            self._skip(member.name, "its name leads outside the target")
            return
        if name == "":
            return
        try:
            if member.issym():
                self._links.append((name, member.linkname))
            elif member.islnk():
                self._hard.append((name, member.linkname))
            elif member.isdir():
                self._directory(name, member.mode)
            elif member.isreg():
                self._file(tar, member, name)
            else:
                self._skip(name, f"{_tar_kind(member)} is not transferred")
        except (OSError, ValueError) as error:
            self._skip(name, str(error))

    def _parent(self, name: str) -> Path:
        """Make the parents of a member and return its path; no component may be a link."""
        path = self.root
        for part in name.split("/")[:-1]:
            path = path / part
            try:
                path.mkdir()
            except FileExistsError:
                if not stat.S_ISDIR(os.lstat(path).st_mode):
                    raise NotADirectoryError("one of its parents is not a directory") from None
        return path / name.rpartition("/")[2]

    def _directory(self, name: str, mode: int) -> None:
        path = self._parent(name)
        try:
            path.mkdir()
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                raise
        self._modes.append((path, mode))

    def _file(self, tar: tarfile.TarFile, member: tarfile.TarInfo, name: str) -> None:
        if self.report.bytes + member.size > self.limit:
            raise SandboxError(f"the sandbox sent more than the limit of {self.limit} bytes", kind="user")
        path = self._parent(name)
        _clear(path)
        source = tar.extractfile(member)
        if source is None:
            raise OSError("the archive does not hold it")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o600), "wb") as stream:
            shutil.copyfileobj(source, stream, 1 << 18)
            os.fchmod(stream.fileno(), member.mode & 0o777)
        if member.mode & 0o7000:
            self.report.altered.append((name, f"mode bits {member.mode & 0o7000:#o} dropped"))
        if name not in self._made:
            self._made.add(name)
            self.report.files += 1
        self.report.bytes += member.size

    def finish(self) -> None:
        for name, target in self._hard:
            self._attempt(name, partial(self._hard_link, name, target))
        links = []
        for name, target in self._links:
            if posixpath.isabs(target):
                self._skip(name, f"a link to {target!r}, outside the target")
            elif self._attempt(name, partial(self._soft_link, name, target)):
                links.append((name, target))
        for name, target in links:
            path = self.root / name
            if not self._stays_inside(path):
                path.unlink()
                self.report.files -= 1
                self._skip(name, f"a link to {target!r}, outside the target")
        for path, mode in reversed(self._modes):
            path.chmod((mode & 0o777) | 0o700)

    def _stays_inside(self, link: Path) -> bool:
        resolved = os.path.realpath(link)
        return resolved == str(self.root) or resolved.startswith(f"{self.root}/")

    def _hard_link(self, name: str, target: str) -> None:
        source = _inside(target)
        if source is None or source not in self._made:
            raise OSError(f"a hard link to {target!r}, which was not delivered")
        path = self._parent(name)
        _clear(path)
        os.link(self.root / source, path, follow_symlinks=False)
        self._made.add(name)
        self.report.files += 1

    def _soft_link(self, name: str, target: str) -> None:
        path = self._parent(name)
        _clear(path)
        path.symlink_to(target)
        self.report.files += 1

    def _attempt(self, name: str, act: Callable[[], None]) -> bool:
        try:
            act()
        except (OSError, ValueError) as error:
            self._skip(name, str(error))
            return False
        return True

    def _skip(self, name: str, reason: str) -> None:
        self.report.skipped.append((name, reason))


def _inside(name: str) -> str | None:
    """Return a member's name below the root ("" for the root itself), or None when it leads outside."""
    if name.startswith("/") or "\0" in name or ".." in name.split("/"):
        return None
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def _clear(path: Path) -> None:
    """Remove what a later member of the same name replaces."""
    path.unlink(missing_ok=True)


def _member(name: str, kind: bytes, mode: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.uid, member.gid = kind, mode, 0, 0
    member.uname = member.gname = ""
    return member


def _kind(mode: int) -> str:
    if stat.S_ISFIFO(mode):
        return "a FIFO"
    if stat.S_ISSOCK(mode):
        return "a socket"
    return "a device"


def _tar_kind(member: tarfile.TarInfo) -> str:
    if member.isfifo():
        return "a FIFO"
    if member.isdev():
        return "a device"
    return f"a member of type {member.type!r}"


_TAR_SAYS = re.compile(r"^tar: (?:\./)?(?P<name>.*): (?P<reason>socket ignored|Cannot .*|can't .*)$")


def _named_by_tar(said: str) -> list[tuple[str, str]]:
    """Return what the sandbox's tar said that it left out."""
    found = (_TAR_SAYS.match(line) for line in said.splitlines())
    return [(match["name"], match["reason"]) for match in found if match]
