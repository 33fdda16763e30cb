"""Text of models, sandboxes and tasks made fit to be shown: nothing that a terminal would obey."""

from __future__ import annotations

import re

_UNSHOWN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)


def plain(text: str) -> str:
    """Return a text with what would not be seen as it is (control characters and the like) as escapes."""
    return _UNSHOWN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """Return a text as `plain` does, with line breaks and tabs as escapes too."""
    return plain(text).replace("\n", "\\n").replace("\t", "\\t")
