"""What a look at a detached command answers, and its output streams as far as they have arrived."""

from __future__ import annotations

import base64
import binascii
from collections import deque
from dataclasses import dataclass

from rollhook.errors import SandboxError

#: bytes of each stream that one answer brings at most
CHUNK = 1 << 20
_BUFFER = 4 * CHUNK


@dataclass(frozen=True)
class Answer:
    """What a look found: the exit code or None, bytes of both streams so far, and new ones of each."""

    code: int | None
    sizes: tuple[int, int]
    news: tuple[bytes, bytes]
    broken: bool


def parse(said: str, user: str | None = None) -> Answer:
    """Return the answer in what a look printed; whatever stands before and after it is ignored.

    Raises SandboxError(kind="retryable") for an answer that is not whole, kind="user" for a user that is not
    there.
    """
    lines = [line.rstrip("\r") for line in said.split("\n")]
    heads = [n for n, line in enumerate(lines) if line.startswith("rollhook: ")]
    words = lines[heads[0]].split() if heads else []
    if words[1:] == ["nouser"]:
        raise SandboxError(f"there is no user {user!r} in the sandbox", kind="user")
    if words[1:] == ["notroot"]:
        raise SandboxError(f"commands do not run as root here, so none can run as {user!r}", kind="user")
    try:
        code, out, err, broken = words[1:]
        if lines[heads[0] + 3] != "rollhook: end":
            raise ValueError("no end")
        news = [base64.b64decode(lines[heads[0] + n], validate=True) for n in (1, 2)]
        sizes = _size(out, news[0]), _size(err, news[1])
        return Answer(None if code == "-" else int(code), sizes, (news[0], news[1]), broken == "1")
    except (ValueError, IndexError, binascii.Error):
        raise SandboxError(f"the sandbox gave half an answer: {said[-200:]!r}", kind="retryable") from None


def _size(said: str, news: bytes) -> int:
    """Return a stream's size; "?" is that of a first answer, which brings all unless it is full."""
    return int(said) if said != "?" else len(news) + (len(news) >= CHUNK)


class Stream:
    """One output stream: what has arrived of it and was not taken yet."""

    def __init__(self) -> None:
        self.read = False  # somebody takes it
        self.offset = 0  # bytes that have arrived
        self.size = 0  # bytes that there are
        self.buffer: deque[bytes | int] = deque()  # a number stands for so many bytes that were left out
        self.waiting = 0  # bytes in the buffer
        self.kept: tuple[int, int] | None = None  # bytes at the beginning and the end that are wanted

    def take_in(self, data: bytes, size: int) -> None:
        """Add what has arrived; `size` is what there is by now."""
        self.size = max(size, self.offset + len(data))
        self.offset += len(data)
        if data:
            self.buffer.append(data)
            self.waiting += len(data)

    def leave_out(self) -> None:
        """Pass over what lies between the wanted beginning and the wanted end, where it is much."""
        if self.kept is None or self.offset < self.kept[0]:
            return
        middle = self.size - self.kept[1] - self.offset
        if middle > CHUNK:
            self.offset += middle
            self.buffer.append(middle)

    @property
    def open(self) -> bool:
        """Whether more has to be fetched for its reader."""
        return self.read and self.offset < self.size

    @property
    def full(self) -> bool:
        """Whether no more is fetched until somebody takes what has arrived."""
        return self.waiting >= _BUFFER or (not self.read and self.waiting >= CHUNK)
