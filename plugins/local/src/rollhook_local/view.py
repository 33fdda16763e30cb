"""What a sandbox sees, as the argv of the program that makes one."""

from __future__ import annotations

import os
import posixpath
import shlex
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
    "/logs/verifier": 0o755,
    "/solution": 0o755,
}
#: process 1: says that it is there and waits for the end of its input; an orphan's end interrupts the wait,
#: and waiting for an empty subshell reaps it. What a shell handles is to be ignored: SIGINT would end it
INIT = (
    'trap "" HUP INT QUIT ALRM TERM USR1 USR2; '
    'trap got=1 CHLD; echo ready; while got=; read -r line || [ "$got" ]; do (:); done'
)
#: bytes of /dev/shm at most, as in Docker
_SHARED_MEMORY = 64 << 20
#: where the unshare script builds the root
_NEW = "/tmp"  # noqa: S108 - in the keeper's own root
#: what the verifier needs is no part of the agent's file system: when that is full there is a verdict,
#: too. Bytes of each at most; mounts can be neither removed nor renamed
_APART = {"/tests": 256 << 20, "/logs": 64 << 20, "/logs/verifier": 64 << 20}
_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


def private_directories(workdir: str, writable: Sequence[str]) -> list[tuple[str, int]]:
    """Return the directories to make, parents first."""
    wanted = {**PRIVATE, **dict.fromkeys([*writable, posixpath.normpath(workdir)], 493)}
    return sorted(wanted.items())


def _system() -> list[str]:
    """Return the system directories. Links among them are mounted, too: root inside could replace a link."""
    return ["/usr", "/etc", *(f"/{name}" for name in _SYSTEM if os.path.isdir(f"/{name}"))]


def _roofs(read_only: Sequence[str], own: Sequence[str]) -> list[str]:
    """Return the topmost parents of host paths: read-only as well, or what they hold could be replaced.

    Not those that hold a directory of the sandbox's own.
    """
    tops = {_top(path) for path in read_only if path.count("/") > 1}
    return sorted(tops - {_top(path) for path in own} - {*_system(), "/proc", "/dev"})


def _top(path: str) -> str:
    return "/" + posixpath.normpath(path).lstrip("/").partition("/")[0]


def bubblewrap_argv(read_only: Sequence[str], own: Sequence[str], size: int, *, sized: bool) -> list[str]:
    """Return the argv of bubblewrap; `own`: private directories, `sized`: it can limit a tmpfs."""
    argv = ["/tools/bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    argv += ["--hostname", "sandbox", "--die-with-parent", "--as-pid-1"]
    argv += [*_limit(size, sized), "--tmpfs", "/"]
    for path in _system():
        argv += ["--ro-bind", path, path]
    for path, most in _APART.items():
        argv += [*_limit(min(size, most), sized), "--tmpfs", path]
    roofs = _roofs(read_only, own)
    for path in roofs:
        argv += ["--tmpfs", path]
    for path in read_only:
        argv += ["--ro-bind", path, path]
    for path in roofs:
        argv += ["--remount-ro", path]
    argv += ["--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev"]
    if sized:  # bubblewrap's /dev has no size: files go to /dev/shm only
        argv += ["--perms", "1777", *_limit(min(size, _SHARED_MEMORY), sized), "--tmpfs", "/dev/shm"]  # noqa: S108 - inside
        argv += ["--remount-ro", "/dev"]
    return [*argv, "--chdir", "/", "/bin/sh", "-c", INIT]


def _limit(size: int, sized: bool) -> list[str]:
    return ["--size", str(size)] if sized else []


def unshare_argv(read_only: Sequence[str], own: Sequence[str], size: int) -> list[str]:
    """Return the argv of util-linux's unshare with a script of mounts that gives the same view."""
    system, roofs = _system(), [path.replace(" ", r"\040") for path in _roofs(read_only, own)]
    tmpfs = "tmpfs {} tmpfs mode={},nosuid,nodev,X-mount.mkdir,size={}".format
    names = ("null", "zero", "full", "random", "urandom", "tty")
    first = [
        *(f"{path} {_NEW}{path} none rbind,ro,nosuid,nodev,X-mount.mkdir" for path in system),
        *(tmpfs(_NEW + path, "0755", min(size, most)) for path, most in _APART.items()),
        f"proc {_NEW}/proc proc nosuid,nodev,noexec,X-mount.mkdir",
        f"{_NEW}/proc/sys {_NEW}/proc/sys none bind,ro,nosuid,nodev,noexec",
        f"tmpfs {_NEW}/dev tmpfs mode=0755,nosuid,size=1m,X-mount.mkdir",
        tmpfs(f"{_NEW}/dev/shm", "1777", min(size, _SHARED_MEMORY)),  # noqa: S108 - inside
        f"devpts {_NEW}/dev/pts devpts newinstance,ptmxmode=0666,mode=620,X-mount.mkdir",
        *(tmpfs(_NEW + path, "0755", "1m") for path in roofs),
    ]
    second = [f"/dev/{name} {_NEW}/dev/{name} none bind" for name in names]
    second += [f"tmpfs {_NEW}{path} none remount,bind,ro,nosuid,nodev" for path in roofs]
    lines = [
        "set -e",
        f"mount -t tmpfs -o mode=0755,nosuid,nodev,size={size} tmpfs {_NEW}",
        f"cd {_NEW}",
        "mkdir old",
        *_mounts(first),
        f"for name in {' '.join(names)}; do : > dev/$name; done",
        'for path in "$@"; do',
        '  if [ -d "$path" ]; then mkdir -p "./$path"; else mkdir -p "./${path%/*}"; : > "./$path"; fi',
        '  mount --rbind "$path" "./$path"; mount -o remount,bind,ro,nosuid,nodev "./$path"',
        "done",
        *_mounts(second),
        "ln -s pts/ptmx dev/ptmx; ln -s /proc/self/fd dev/fd; ln -s /proc/self/fd/0 dev/stdin",
        "ln -s /proc/self/fd/1 dev/stdout; ln -s /proc/self/fd/2 dev/stderr",
        "hostname sandbox",
        "pivot_root . old",
        "cd /",
        "umount -l /old; rm -r /old",
        f"exec /bin/sh -c '{INIT}'",
    ]
    script = "\n".join(lines)
    argv = ["unshare", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child"]
    return [*argv, "--propagation", "private", "/bin/sh", "-c", script, "sh", *read_only]


def _mounts(table: Sequence[str]) -> list[str]:
    """Return the lines of a script that mounts a whole table with one process."""
    text = "".join(f"{line} 0 0\n" for line in table)
    return [f"printf %s {shlex.quote(text)} > old/table", f"mount -a -T {_NEW}/old/table"]
