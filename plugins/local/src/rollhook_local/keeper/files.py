"""Files of a sandbox, from outside: the agent may have put links, FIFOs or devices anywhere."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from rollhook_local.keeper.linux import open_in_root

_DIRECTORY = os.O_PATH | os.O_DIRECTORY
_LISTED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: directories that a removal holds open at once
_DEEPEST = 64


def open_for_reading(root: int, path: str) -> int:
    """Open a regular file. Raises OSError: EISDIR for a directory, EINVAL for anything else."""
    fd = open_in_root(root, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    raise OSError(number, os.strerror(number), path)


def make_directories(root: int, path: str, mode: int = 0o755) -> int:
    """Open a directory, making it and its parents where they are missing."""
    try:
        return open_in_root(root, path, _DIRECTORY)
    except FileNotFoundError:
        pass
    parent_path, _, name = path.rstrip("/").rpartition("/")
    parent = make_directories(root, parent_path or "/")
    try:
        os.mkdir(name, mode, dir_fd=parent)
    except FileExistsError:
        pass  # made meanwhile, or a dangling link: the open below tells
    finally:
        os.close(parent)
    return open_in_root(root, path, _DIRECTORY)


def write(root: int, path: str, data: bytes | memoryview, mode: int) -> None:
    """Write a file under a temporary name and move it into place."""
    parent_path, _, name = path.rpartition("/")
    if name in ("", ".", ".."):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    parent = make_directories(root, parent_path or "/")
    temporary = f".rollhook-{os.urandom(8).hex()}"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600, dir_fd=parent)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fchmod(fd, mode)
        finally:
            os.close(fd)
        os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=parent)
        raise
    finally:
        os.close(parent)


def remove(root: int, path: str) -> bool:
    """Remove a path with all below it, following no link at its end; return whether it was there.

    A mount stays, empty and as it was made; it was there if it held anything.
    """
    parent_path, _, name = path.rstrip("/").rpartition("/")
    if name in ("", ".", ".."):
        raise OSError(errno.EINVAL, "not a path that can be removed", path)
    try:
        parent = open_in_root(root, parent_path or "/", os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        mode = os.lstat(name, dir_fd=parent).st_mode
        if stat.S_ISDIR(mode):
            return _remove_tree(name, parent)
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return False
    finally:
        os.close(parent)
    return True


def _remove_tree(name: str, parent: int) -> bool:
    """Remove a directory, following no link; return whether anything was removed.

    Every directory is listed once: an agent that made very many must not hold up the other sandboxes. What
    lies deep is moved up, so that depth takes neither the stack nor descriptors.
    """
    opened: list[tuple[str, int, list[str]]] = []
    inner: str | None = name
    removed = 0
    try:
        while inner is not None or opened:
            if inner is not None:
                above = opened[-1][1] if opened else parent
                if len(opened) < _DEEPEST:
                    opened.append((inner, os.open(inner, _LISTED, dir_fd=above), []))
                    removed += _emptied(*opened[-1][1:])
                else:  # to the second, as the first may hold it as a mount
                    moved = f".rollhook-{os.urandom(8).hex()}"
                    os.rename(inner, moved, src_dir_fd=above, dst_dir_fd=opened[1][1])
                    opened[1][2].append(moved)
            name, directory, waiting = opened[-1]
            inner = waiting.pop() if waiting else None
            if inner is None:
                above = opened[-2][1] if len(opened) > 1 else parent
                if os.fstat(directory).st_dev != os.fstat(above).st_dev:
                    _renew(directory)
                else:
                    os.rmdir(name, dir_fd=above)
                    removed += 1
                opened.pop()
                os.close(directory)
    finally:
        for _, directory, _ in opened:
            os.close(directory)
    return removed > 0


def _renew(directory: int) -> None:
    """Give a mount back the owner and mode that it was made with: another user's commands may need it."""
    for attribute in os.listxattr(directory):
        os.removexattr(directory, attribute)
    os.fchown(directory, 0, 0)
    os.fchmod(directory, 0o755)


def _emptied(directory: int, full: list[str]) -> int:
    """Remove what can be removed at once, return how much; add to `full` what holds something or is a mount.

    From outside the sandbox rmdir would take the mount away.
    """
    device = os.fstat(directory).st_dev
    removed = 0
    for entry in os.listdir(directory):
        try:
            os.unlink(entry, dir_fd=directory)
            removed += 1
        except IsADirectoryError:
            try:
                if os.lstat(entry, dir_fd=directory).st_dev == device:
                    os.rmdir(entry, dir_fd=directory)
                    removed += 1
                else:
                    full.append(entry)
            except OSError:
                full.append(entry)
    return removed
