"""SPDY/3.1 frames, as far as port-forwarding needs them; kubectl sends them inside a WebSocket.

Frames: the SPDY/3.1 draft, sections 2.2 and 2.6. Streams of a port-forward: KEP-4006 and client-go.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

# the words that are counted, then the rest
_WORDS = (
    "options head post put delete trace accept accept-charset accept-encoding accept-language accept-ra"
    "nges age allow authorization cache-control connection content-base content-encoding content-langua"
    "ge content-length content-location content-md5 content-range content-type date etag expect expires"
    " from host if-match if-modified-since if-none-match if-range if-unmodified-since last-modified loc"
    "ation max-forwards pragma proxy-authenticate proxy-authorization range referer retry-after server "
    "te trailer transfer-encoding upgrade user-agent vary via warning www-authenticate method get statu"
    "s"
)
_REST = (
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505203 Non-"
    "Authoritative Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized403 For"
    "bidden404 Not Found500 Internal Server Error501 Not Implemented503 Service UnavailableJan Feb Mar "
    "Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMTchunked,text/h"
    "tml,image/png,image/jpg,image/gif,application/xml,application/xhtml+xml,text/plain,text/javascript"
    ",publicprivatemax-age=gzip,deflate,sdchcharset=utf-8charset=iso-8859-1,utf-,*,enq=0."
)


def _word(text: str) -> bytes:
    return struct.pack("!I", len(text)) + text.encode()


#: what both sides prime zlib with
DICTIONARY = (
    b"".join(map(_word, _WORDS.split(" ")))
    + b"".join(
        map(_word, ("200 OK", "version", "HTTP/1.1", "url", "public", "set-cookie", "keep-alive", "origin"))
    )
    + _REST.encode()
)
assert zlib.adler32(DICTIONARY) == 0xE3C6A7C2

SYN_STREAM, SYN_REPLY, RST_STREAM, PING, GOAWAY = 1, 2, 3, 6, 7
FIN = 1


@dataclass(frozen=True)
class Frame:
    """A frame: `kind` 0 is data. `headers` are those of SYN_STREAM."""

    kind: int
    flags: int
    stream: int
    data: bytes = b""
    headers: dict[str, str] | None = None


class Framer:
    """The frames of one connection, both ways."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._in = zlib.decompressobj(zdict=DICTIONARY)
        self._out = zlib.compressobj(zdict=DICTIONARY)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Take in bytes and yield the frames that are whole."""
        self._buffer += data
        while len(self._buffer) >= 8:
            word, rest = struct.unpack("!II", self._buffer[:8])
            flags, length = rest >> 24, rest & 0xFFFFFF
            if len(self._buffer) < 8 + length:
                return
            body = bytes(self._buffer[8 : 8 + length])
            del self._buffer[: 8 + length]
            if not word >> 31:
                yield Frame(0, flags, word, body)
                continue
            kind, number = word & 0xFFFF, struct.unpack("!I", body[:4])[0] if len(body) >= 4 else 0
            headers = self._headers(body[10:]) if kind == SYN_STREAM else None
            yield Frame(kind, flags, number & 0x7FFFFFFF, body, headers)

    def _headers(self, block: bytes) -> dict[str, str]:
        raw = self._in.decompress(block)
        count, at, words = struct.unpack("!I", raw[:4])[0], 4, []
        for _ in range(2 * count):
            length = struct.unpack("!I", raw[at : at + 4])[0]
            words.append(raw[at + 4 : at + 4 + length].decode())
            at += 4 + length
        return dict(zip(words[::2], words[1::2], strict=True))

    def reply(self, stream: int) -> bytes:
        """Return a SYN_REPLY without headers."""
        block = self._out.compress(struct.pack("!I", 0)) + self._out.flush(zlib.Z_SYNC_FLUSH)
        return _control(SYN_REPLY, struct.pack("!I", stream) + block)

    def data(self, stream: int, data: bytes, *, fin: bool = False) -> bytes:
        """Return a data frame."""
        return struct.pack("!II", stream, (FIN if fin else 0) << 24 | len(data)) + data

    def pong(self, frame: Frame) -> bytes:
        """Return the answer to a PING."""
        return _control(PING, frame.data)


def _control(kind: int, body: bytes) -> bytes:
    return struct.pack("!HHI", 0x8003, kind, len(body)) + body
