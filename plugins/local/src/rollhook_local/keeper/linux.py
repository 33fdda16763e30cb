"""The system calls that Python 3.11 does not offer."""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import os
import platform
import socket
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2

_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_SIOCSIFFLAGS = 0x8914
_IFF_UP, _IFF_RUNNING = 0x1, 0x40
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_IN_ROOT = 0x10
_SYS_OPENAT2 = 437
_SYS_PIVOT_ROOT = 155 if platform.machine() == "x86_64" else 41

#: capabilities that a command in a sandbox keeps, as Docker's default: chown, dac_override, fowner, fsetid,
#: kill, setgid, setuid, setpcap, net_bind_service, net_raw, sys_chroot, mknod, audit_write, setfcap
_KEPT_CAPABILITIES = {0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31}
_LAST_CAPABILITY = 40

#: the number of seccomp, then per architecture of a system call (native, and the older one that the machine
#: runs too): its name, the first and the last of add_key, request_key and keyctl, and prlimit64
_REFUSED_CALLS = {
    "x86_64": (317, [(0xC000003E, 248, 250, 302), (0x40000003, 286, 288, 340)]),
    "aarch64": (277, [(0xC00000B7, 217, 219, 261), (0x40000028, 309, 311, 369)]),
}
_X32_BIT = 0x40000000
_LOAD, _AND, _IF_EQUAL, _IF_AT_LEAST, _IF_ABOVE, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x25, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050001  # the second: with EPERM
_SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_SPEC_ALLOW = 1, 4

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


def unshare(flags: int) -> None:
    """Leave the namespaces in `flags` for new ones."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def setns(fd: int, flags: int) -> None:
    """Enter namespaces: those of a pidfd that `flags` name, or the one that `fd` is."""
    _check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(flags)), "setns")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """mount(2)."""
    arguments = [ctypes.c_char_p(os.fsencode(text)) for text in (source, target, kind)]
    _check(_libc.mount(*arguments, ctypes.c_ulong(flags), ctypes.c_char_p(os.fsencode(data))), target)


def pivot_root(new_root: str) -> None:
    """Make `new_root` the root and drop the old one."""
    os.chdir(new_root)
    dot = ctypes.c_char_p(b".")
    _check(_libc.syscall(ctypes.c_long(_SYS_PIVOT_ROOT), dot, dot), "pivot_root")
    _check(_libc.umount2(dot, ctypes.c_int(MNT_DETACH)), "umount")
    os.chdir("/")


def raise_loopback() -> None:
    """Bring up the loopback interface of the calling process's network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sh22x", b"lo", _IFF_UP | _IFF_RUNNING)
        fcntl.ioctl(sock, _SIOCSIFFLAGS, request)


def set_dumpable(value: bool) -> None:
    """Say whether other processes of the same user may look into this one and its forks until they exec."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, ctypes.c_ulong(int(value)), 0, 0, 0), "prctl")


def drop_capabilities() -> None:
    """Take from the next exec every capability that a container does not have; no way back."""
    for capability in range(_LAST_CAPABILITY + 1):
        if capability not in _KEPT_CAPABILITIES:
            _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0)
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), 0, 0, 0), "prctl")


def forbid_calls() -> None:
    """Refuse from here on the kernel's keyrings and setting the limits of another process.

    No namespace divides the keyrings, as Docker knows; and a limit can kill process 1, which no signal
    from inside does: whoever fails could end the sandbox instead. Needs "no new privileges". Where the kernel
    has no filters, hardening is missed.
    """
    if platform.machine() not in _REFUSED_CALLS:
        return
    number, architectures = _REFUSED_CALLS[platform.machine()]
    steps = [step for architecture in architectures for step in _refusals(*architecture)]
    steps.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(code)))
    with contextlib.suppress(OSError):
        flags = ctypes.c_ulong(_SECCOMP_FILTER_FLAG_SPEC_ALLOW)
        mode = ctypes.c_ulong(_SECCOMP_SET_MODE_FILTER)
        _check(_libc.syscall(ctypes.c_long(number), mode, flags, program), "seccomp")


def _refusals(architecture: int, first: int, last: int, prlimit: int) -> list[tuple[int, int, int, int]]:
    """Return the part of the filter for one architecture; another one's calls run through it."""
    return [
        (_LOAD, 0, 0, 4),  # the architecture
        (_IF_EQUAL, 0, 13, architecture),
        (_LOAD, 0, 0, 0),  # the number of the call
        (_AND, 0, 0, 0xFFFFFFFF ^ _X32_BIT),
        (_IF_AT_LEAST, 0, 1, first),
        (_IF_ABOVE, 0, 7, last),
        (_IF_EQUAL, 0, 7, prlimit),
        (_LOAD, 0, 0, 16),  # whose limit: 0 is one's own
        (_IF_EQUAL, 5, 0, 0),
        (_LOAD, 0, 0, 32),  # where the new limit is, in two halves: 0 only asks for the old one
        (_IF_EQUAL, 0, 2, 0),
        (_LOAD, 0, 0, 36),
        (_IF_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]


def receive(sock: socket.socket, most: int, most_fds: int) -> tuple[bytes, list[int]]:
    """Return a message and its descriptors, which no program inherits.

    `socket.recv_fds` does not pass its flags on (Python 3.11): what it returns would reach every command.
    """
    fds = array.array("i")
    space = socket.CMSG_LEN(most_fds * fds.itemsize)
    data, ancillary, _, _ = sock.recvmsg(most, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds)


def open_in_root(root: int, path: str, flags: int, mode: int = 0) -> int:
    """Open `path` as if `root` were "/": neither "..", nor a link, nor a rename race leads out of it."""
    resolve = _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS
    how = struct.pack("QQQ", flags | os.O_CLOEXEC, mode, resolve)
    name = os.fsencode(path) or b"."
    for _ in range(64):
        fd = _libc.syscall(
            ctypes.c_long(_SYS_OPENAT2),
            ctypes.c_int(root),
            ctypes.c_char_p(name),
            ctypes.c_char_p(how),
            ctypes.c_size_t(len(how)),
        )
        if fd >= 0:
            return int(fd)
        number = ctypes.get_errno()
        if number != 11:  # EAGAIN: something was renamed while the path was walked
            raise OSError(number, os.strerror(number), path)
    raise OSError(11, "the path keeps changing", path)
