"""Ids to text as they come, never half a character."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

_HALF = "\ufffd"
# tokens of a window that may stay though they never become text, and those of a character's bytes
_LONGEST, _BYTES = 16, 4


class Detokenizer:
    """Gives the text of ids in pieces; joined they are what decoding all ids at once gives.

    `hidden` ids (control tokens) have no text. `pieces_of_bytes` are ids like `<0xE2>`, of which a run is
    decoded together. Earlier ids stay in the window as long as they are not whole characters, and one more
    for decoders that treat the first token differently.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, hidden: Container[int], pieces_of_bytes: Container[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._bytes = pieces_of_bytes
        self._window: list[int] = []
        self._given = 0

    def feed(self, ids: Sequence[int]) -> str:
        """Return the text that these ids complete."""
        self._window += [index for index in ids if index not in self._hidden]
        whole = len(self._window)
        while whole and self._window[whole - 1] in self._bytes:
            whole -= 1
        text = self._decode(self._window[:whole])
        if text.endswith(_HALF):
            piece = self._give(text[:-1])
            if whole > _LONGEST:
                self._shorten(text, whole)
            return piece
        piece = self._give(text)
        if whole > 1:
            del self._window[: whole - 1]
            self._given = len(self._decode(self._window[:1]))
        return piece

    def finish(self) -> str:
        """Return the text of what was held back; bytes that are no text become U+FFFD."""
        return self._give(self._decode(self._window))

    def _shorten(self, text: str, whole: int) -> None:
        """Let go of what later ids cannot change: what is before a cut that goes through no character."""
        for cut in range(whole - 1, whole - _BYTES, -1):
            before, first = self._decode(self._window[:cut]), self._decode(self._window[cut - 1 : cut])
            after = self._decode(self._window[cut - 1 : whole])
            if after.startswith(first) and before + after[len(first) :] == text:
                del self._window[: cut - 1]
                self._given -= len(before) - len(first)
                return

    def _give(self, text: str) -> str:
        piece = text[self._given :]
        self._given = max(self._given, len(text))
        return piece

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False)) if ids else ""
