"""What befalls a process: a full disk, a file system that cannot be written, a clock that runs backwards."""

import errno
import itertools
import os
import time

from rollhook.journal import Journal
from rollhook.metrics_file import MetricsWriter
from rollhook.sandbox.pool import SandboxPool


def full_disk(size):
    """After so many bytes a write takes what still fits, and the next one fails."""
    write, left = os.write, [size]

    def limited(fd, data):
        if left[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(fd, data[: left[0]])
        left[0] -= written
        return written

    os.write = limited


def read_only(after):
    """After so many files were opened for writing, nothing can be opened, made or removed any more."""
    opened = itertools.count(1)

    def guarded(real, writes):
        def call(*args, **keys):
            if writes(args) and next(opened) > after:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return real(*args, **keys)

        return call

    os.open = guarded(os.open, lambda args: args[1] & (os.O_WRONLY | os.O_RDWR))
    for name in ("mkdir", "rename", "replace"):
        setattr(os, name, guarded(getattr(os, name), lambda args: True))
    # what the sandboxes' provider keeps is elsewhere
    os.unlink = guarded(os.unlink, lambda args: "provider" not in str(args[0]))


def clock_backwards():
    """Each look at the wall clock sees an earlier time."""
    now = itertools.count(2_000_000_000, -1000)
    time.time = lambda: float(next(now))
    for function, name in (
        (Journal.__init__, "clock"), (MetricsWriter.__init__, "clock"), (SandboxPool.__init__, "wall"),
    ):  # fmt: skip
        function.__kwdefaults__[name] = time.time
