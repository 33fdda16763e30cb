"""What a sandbox sees, as the argv of the program that makes one."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Sequence

ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "USER": "root",
    "LOGNAME": "root",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}
#: directories of its own that every sandbox has, with their modes
PRIVATE = {
    "/tmp": 0o1777,  # noqa: S108 - a path inside
    "/var/tmp": 0o1777,  # noqa: S108 - a path inside
    "/run": 0o755,
    "/root": 0o700,
    "/home": 0o755,
    "/home/agent": 0o755,
    "/tests": 0o755,
    "/logs": 0o755,
    "/solution": 0o755,
}
#: process 1: says that it is there and waits for the end of its input; an orphan's end interrupts the wait,
#: and waiting for an empty subshell reaps it
INIT = 'trap got=1 CHLD; echo ready; while got=; read -r line || [ "$got" ]; do (:); done'
#: bytes of /dev/shm at most, as in Docker
_SHARED_MEMORY = 64 << 20
_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


def private_directories(workdir: str, writable: Sequence[str]) -> list[tuple[str, int]]:
    """Return the directories to make, parents first."""
    wanted = {**PRIVATE, **dict.fromkeys([*writable, posixpath.normpath(workdir)], 493)}
    return sorted(wanted.items())


def bubblewrap_argv(read_only: Sequence[str], size: int, *, sized: bool) -> list[str]:
    """Return the argv of bubblewrap; `sized`: this bubblewrap can limit a tmpfs."""
    argv = ["/tools/bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    argv += ["--hostname", "sandbox", "--die-with-parent", "--as-pid-1"]
    argv += [*(["--size", str(size)] if sized else []), "--tmpfs", "/", "--ro-bind", "/usr", "/usr"]
    for name in _SYSTEM:
        path = f"/{name}"
        if os.path.islink(path):
            argv += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            argv += ["--ro-bind", path, path]
    argv += ["--ro-bind", "/etc", "/etc"]
    for path in read_only:
        argv += ["--ro-bind", path, path]
    argv += ["--proc", "/proc", "--dev", "/dev"]
    if sized:  # bubblewrap's /dev has no size: files go to /dev/shm only
        shared = str(min(size, _SHARED_MEMORY))
        argv += ["--perms", "1777", "--size", shared, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]  # noqa: S108 - inside
    return [*argv, "--chdir", "/", "/bin/sh", "-c", INIT]


def unshare_argv(read_only: Sequence[str], size: int) -> list[str]:
    """Return the argv of util-linux's unshare with a script of mounts that gives the same view."""
    lines = [
        "set -e",
        "mount -t tmpfs -o mode=0755,nosuid,nodev,size=$1 tmpfs /tmp",
        "cd /tmp",
        "mkdir usr etc proc dev dev/pts dev/shm old",
        "bind() { mount --rbind $1 ./$1; mount -o remount,bind,ro,nosuid,nodev ./$1; }",
        "bind /usr; bind /etc",
    ]
    for name in _SYSTEM:
        path = f"/{name}"
        if os.path.islink(path):
            lines.append(f"ln -s {os.readlink(path)} {name}")
        elif os.path.isdir(path):
            lines.append(f"mkdir {name}; bind {path}")
    lines += [
        'shared=$2; shift 2; for path in "$@"; do',
        '  if [ -d "$path" ]; then mkdir -p "./$path"; else mkdir -p "./${path%/*}"; : > "./$path"; fi',
        '  mount --rbind "$path" "./$path"; mount -o remount,bind,ro,nosuid,nodev "./$path"',
        "done",
        "mount -t proc -o nosuid,nodev,noexec proc proc",
        "mount -t tmpfs -o mode=0755,nosuid,size=1m tmpfs dev; mkdir dev/pts dev/shm",
        "mount -t tmpfs -o mode=1777,nosuid,nodev,size=$shared tmpfs dev/shm",
        "for name in null zero full random urandom tty; do",
        "  : > dev/$name; mount --bind /dev/$name dev/$name; done",
        "mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts dev/pts",
        "ln -s pts/ptmx dev/ptmx; ln -s /proc/self/fd dev/fd; ln -s /proc/self/fd/0 dev/stdin",
        "ln -s /proc/self/fd/1 dev/stdout; ln -s /proc/self/fd/2 dev/stderr",
        "hostname sandbox",
        "pivot_root . old",
        "cd /",
        "umount -l /old; rmdir /old",
        f"exec /bin/sh -c '{INIT}'",
    ]
    script = "\n".join(lines)
    argv = ["unshare", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child"]
    return [
        *argv,
        "--propagation",
        "private",
        "/bin/sh",
        "-c",
        script,
        "sh",
        str(size),
        str(min(size, _SHARED_MEMORY)),
        *read_only,
    ]
