"""One seed, from which every other is derived by hash."""

from __future__ import annotations

import hashlib


def derive(seed: int, *parts: object) -> int:
    """Return a 63-bit seed for the thing that `parts` name."""
    text = "/".join([str(seed), *map(str, parts)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
