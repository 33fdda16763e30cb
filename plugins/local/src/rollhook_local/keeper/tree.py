"""Where the keeper lives: its user namespaces, and a root that holds only what sandboxes may see."""

from __future__ import annotations

import contextlib
import os
import stat

from rollhook_local.keeper import linux

TYPE_CHECKING = False  # importing typing would make every fork dearer
if TYPE_CHECKING:
    from collections.abc import Sequence

#: a range of user ids that no distribution hands out (systemd leaves it unused)
SHIFTED_BASE = 0x70000000
SHIFTED_COUNT = 65536

_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_COPIED = (
    "alternatives",
    "bash.bashrc",
    "debian_version",
    "inputrc",
    "java-17-openjdk",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "magic",
    "mime.types",
    "os-release",
    "perl",
    "profile",
    "protocols",
    "python3",
    "python3.11",
    "services",
    "shells",
    "terminfo",
)
_WRITTEN = {
    "passwd": (
        "root:x:0:0:root:/root:/bin/bash\n"
        "daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\n"
        "bin:x:2:2:bin:/bin:/usr/sbin/nologin\n"
        "agent:x:1000:1000:agent:/home/agent:/bin/bash\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    ),
    "group": (
        "root:x:0:\ndaemon:x:1:\nbin:x:2:\ntty:x:5:\nstaff:x:50:\nusers:x:100:\nagent:x:1000:\nnogroup:x:65534:\n"
    ),
    "hosts": "127.0.0.1\tlocalhost sandbox\n::1\tlocalhost\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\n",
    "resolv.conf": "",
    "host.conf": "multi on\n",
}


class Home:
    """What the keeper needs of its place: the inner user namespace, its own process namespace, many ids?"""

    def __init__(self, inner: int, processes: int, many_ids: bool) -> None:
        self.inner = inner
        self.processes = processes
        self.many_ids = many_ids


def enter(read_only: Sequence[str], hidden: Sequence[str], tools: dict[str, str]) -> Home:
    """Enter the keeper's namespaces and its root; afterwards nothing else of the host is reachable.

    Sandboxes belong to the outer user namespace; their commands run in the inner one, and so can neither
    change their mounts nor look into process 1. `tools` maps names to programs that are copied to `/tools`.
    """
    kept_tools = {name: _read(path) for name, path in tools.items()}
    many = os.geteuid() == 0 and _maps_everything()
    outer = f"0 {SHIFTED_BASE} {SHIFTED_COUNT}" if many else f"0 {os.geteuid()} 1"
    group = f"0 {SHIFTED_BASE} {SHIFTED_COUNT}" if many else f"0 {os.getegid()} 1"
    _mapped_from_outside(outer, group, deny_groups=not many)
    if many:
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    linux.set_dumpable(True)
    inner = _inner_namespace(f"0 0 {SHIFTED_COUNT if many else 1}")
    _forbid_more()
    linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWPID)
    _go_on_as_child()
    _build(read_only, hidden, kept_tools)
    linux.set_dumpable(False)
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    return Home(inner, own, many)


def _go_on_as_child() -> None:
    """Fork and go on in the child, process 1 of the keeper's own process namespace; the parent waits.

    Only in a namespace of its own may the keeper go to and fro between those of its sandboxes, and the
    kernel ends them all with it.
    """
    child = os.fork()
    if child:
        os.closerange(3, 64)
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _maps_everything() -> bool:
    with open("/proc/self/uid_map") as stream:
        first, outside, count = (int(word) for word in stream.readline().split())
    return first == 0 and outside == 0 and count >= SHIFTED_BASE + SHIFTED_COUNT


def _mapped_from_outside(users: str, groups: str, *, deny_groups: bool) -> None:
    """Unshare the user namespace while a child that stays outside writes its maps."""
    parent = os.getpid()
    ready_read, ready_write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(ready_write)
            os.read(ready_read, 1)
            _write_maps(parent, users, groups, deny_groups=deny_groups)
            code = 0
        finally:
            os._exit(code)
    os.close(ready_read)
    try:
        linux.unshare(linux.CLONE_NEWUSER)
    finally:
        os.close(ready_write)
        _, status = os.waitpid(child, 0)
    if status != 0:
        raise PermissionError("the ids of a user namespace could not be mapped")


def _inner_namespace(ids: str) -> int:
    ready_read, ready_write = os.pipe()
    done_read, done_write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            linux.unshare(linux.CLONE_NEWUSER)
            os.write(ready_write, b"1")
            os.close(done_write)
            os.read(done_read, 1)
        finally:
            os._exit(0)
    os.close(ready_write)
    os.close(done_read)
    try:
        if os.read(ready_read, 1) != b"1":
            raise PermissionError("user namespaces cannot be nested here")
        _write_maps(child, ids, ids, deny_groups=False)
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(ready_read)
        os.close(done_write)
        os.waitpid(child, 0)


def _write_maps(pid: int, users: str, groups: str, *, deny_groups: bool) -> None:
    if deny_groups:
        _write(f"/proc/{pid}/setgroups", "deny")
    _write(f"/proc/{pid}/uid_map", users)
    _write(f"/proc/{pid}/gid_map", groups)


def _forbid_more() -> None:
    """Let nothing below make user namespaces, a large part of what an attacker could reach."""
    with contextlib.suppress(OSError):  # a read-only /proc/sys: hardening that is missed, not a fault
        _write("/proc/sys/user/max_user_namespaces", "1")


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _build(read_only: Sequence[str], hidden: Sequence[str], tools: dict[str, bytes]) -> None:
    linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
    root = next(path for path in ("/mnt", "/media", "/srv", "/tmp") if os.path.isdir(path))  # noqa: S108
    etc = _etc_files()
    sources = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in ("/usr", "/dev", *read_only)}
    for name in _SYSTEM:
        path = f"/{name}"
        if os.path.isdir(path) and not os.path.islink(path):
            sources[path] = os.open(path, os.O_PATH | os.O_CLOEXEC)
    links = {name: os.readlink(f"/{name}") for name in _SYSTEM if os.path.islink(f"/{name}")}
    linux.mount("tmpfs", root, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=0755,size=64m")
    for path, fd in sources.items():
        target = root + path
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            _put(target, b"", 0o644)
        linux.mount(f"/proc/self/fd/{fd}", target, "", linux.MS_BIND | linux.MS_REC)
        os.close(fd)
    os.mkdir(f"{root}/proc")
    linux.mount("proc", f"{root}/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    for name, target in links.items():
        os.symlink(target, f"{root}/{name}")
    for path in hidden:
        if os.path.isdir(root + path):
            linux.mount("tmpfs", root + path, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=0755,size=1m")
    for name, content in etc:
        target = f"{root}/etc/{name}"
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if isinstance(content, str):
            os.symlink(content, target)
        else:
            _put(target, content, 0o644)
    os.makedirs(f"{root}/tools")
    os.makedirs(f"{root}/tmp")  # noqa: S108 - inside
    for name, data in tools.items():
        _put(f"{root}/tools/{name}", data, 0o755)
    linux.pivot_root(root)


def _etc_files() -> list[tuple[str, bytes | str]]:
    """Return what a sandbox's /etc holds: (name, content, or a link's target)."""
    found: list[tuple[str, bytes | str]] = [(name, text.encode()) for name, text in _WRITTEN.items()]
    for name in _COPIED:
        path = f"/etc/{name}"
        if os.path.islink(path):
            found.append((name, os.readlink(path)))
        elif os.path.isdir(path):
            for directory, _, files in os.walk(path):
                for file in files:
                    source = os.path.join(directory, file)
                    content = os.readlink(source) if os.path.islink(source) else _read_if_allowed(source)
                    if content is not None:
                        found.append((os.path.relpath(source, "/etc"), content))
        elif os.path.isfile(path) and (data := _read_if_allowed(path)) is not None:
            found.append((name, data))
    return found


def _read_if_allowed(path: str) -> bytes | None:
    try:
        return _read(path)
    except OSError:
        return None


def _read(path: str) -> bytes:
    with open(path, "rb") as stream:
        return stream.read()


def _put(path: str, data: bytes, mode: int) -> None:
    with open(path, "wb") as stream:
        stream.write(data)
        os.fchmod(stream.fileno(), mode)
