"""A reply's ids to a message, token by token."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rollhook.messages import Message, ToolCall, ToolSchema
from rollhook.reply.calls import CallForm
from rollhook.reply.detokenizer import Detokenizer


@dataclass(frozen=True)
class Delta:
    """What a stream adds to a message's `reasoning_content` and to its `content`."""

    reasoning: str = ""
    text: str = ""


@dataclass(frozen=True)
class Thinking:
    """How a model's reasoning is set off; `opened`: the prompt ends inside it."""

    start: str = "<think>"
    end: str = "</think>"
    opened: bool = False


class StreamParser:
    """Parses one reply as its ids come. Made by `Renderer.stream_parser`.

    However the ids are cut into calls of `feed`, the message is the same, and its texts begin with what was
    given before. What might still become a character, a marker or a tool call is held back until it is known.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Container[int],
        *,
        thinking: Thinking | None = None,
        calls: CallForm | None = None,
        tools: Sequence[ToolSchema] = (),
    ) -> None:
        #: what `finish` added, for a client that has got the deltas
        self.tail = Delta()
        self._detokenizer = detokenizer
        self._stops = stops
        self._text = _Text(thinking, calls, tools)
        self._stopped = False

    def feed(self, ids: Sequence[int]) -> Delta:
        """Take the next ids of the reply, the stop token included."""
        kept = []
        for index in ids:
            self._stopped = index in self._stops
            if not self._stopped:
                kept.append(index)
        return self._text.feed(self._detokenizer.feed(kept))

    def finish(self) -> Message:
        """Return the whole message; nothing can be fed after it. `tail` is what it adds to the deltas."""
        before = self._text.feed(self._detokenizer.finish())
        after = self._text.finish(stopped=self._stopped)
        self.tail = Delta(before.reasoning + after.reasoning, before.text + after.text)
        return self._text.message()


@dataclass
class _Text:
    """The same over text: a machine that goes from reasoning to content, and from there to calls and back."""

    thinking: Thinking | None
    form: CallForm | None
    tools: Sequence[ToolSchema]
    state: Literal["start", "reasoning", "content", "call"] = "start"
    held: str = ""
    #: white space of the content that is given only if more of it follows
    space: str = ""
    #: characters of what is held that were looked at for the end of a call
    tried: int = 0
    #: whether white space at the front of what comes next belongs to a marker before it
    trim: str = ""
    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    thought: bool = False

    def __post_init__(self) -> None:
        if self.thinking is None:
            self.state = "content"
        elif self.thinking.opened:
            self._think()

    def feed(self, text: str) -> Delta:
        self.held += text
        return self._advance(final=False, stopped=False)

    def finish(self, *, stopped: bool) -> Delta:
        delta = self._advance(final=True, stopped=stopped)
        if self.space and not self.calls:
            self.content.append(self.space)
            delta = Delta(delta.reasoning, delta.text + self.space)
        return delta

    def message(self) -> Message:
        message: Message = {"role": "assistant", "content": "".join(self.content)}
        if self.thought:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return message

    def _advance(self, *, final: bool, stopped: bool) -> Delta:
        reasoning, content = len(self.reasoning), len(self.content)
        steps = {"start": self._start, "reasoning": self._reason, "content": self._speak, "call": self._call}
        while steps[self.state](final, stopped):
            pass
        return Delta("".join(self.reasoning[reasoning:]), "".join(self.content[content:]))

    # -- each returns whether there is more to do with what is held

    def _start(self, final: bool, stopped: bool) -> bool:
        """Find out whether the reply begins with reasoning."""
        assert self.thinking is not None
        text = self.held.lstrip()
        if text.startswith(self.thinking.start):
            self.held = text[len(self.thinking.start) :]
            self._think()
            return True
        if not final and self.thinking.start.startswith(text):
            return False
        self.state = "content"
        return True

    def _think(self) -> None:
        self.state, self.thought, self.trim = "reasoning", True, "\n"

    def _reason(self, final: bool, stopped: bool) -> bool:
        """Give reasoning up to its end; a call inside it counts only if the reply stops without an end."""
        assert self.thinking is not None
        end = self.thinking.end
        self._trim_front()
        if (found := self.held.find(end)) >= 0:
            self._give(self.reasoning, self.held[:found].rstrip("\n"))
            self.held = self.held[found + len(end) :]
            self.state, self.trim = "content", "\n"
            return True
        call = self._opening()
        if final and stopped and call is not None and self._is_call(self.held[call:]):
            self._give(self.reasoning, self.held[:call].rstrip("\n"))
            self.held, self.state = self.held[call:], "content"
            return True
        kept = 0 if final else len(self.held) - call if call is not None else self._unsure(end)
        ready = self.held[: len(self.held) - kept].rstrip("\n")
        self._give(self.reasoning, ready)
        self.held = "" if final else self.held[len(ready) :]
        return False

    def _speak(self, final: bool, stopped: bool) -> bool:
        """Give content up to the next call."""
        self._trim_front()
        if (call := self._opening()) is not None:
            self._say(self.held[:call])
            self.held, self.state, self.tried = self.held[call:], "call", 0
            return True
        kept = 0 if final else self._unsure()
        self._say(self.held[: len(self.held) - kept])
        self.held = self.held[len(self.held) - kept :]
        return False

    def _call(self, final: bool, stopped: bool) -> bool:
        """Take a block of calls; what is none stays text."""
        assert self.form is not None
        block = self.form.take(self.held, self.tools, final=final, tried=self.tried)
        self.tried = len(self.held)
        if block is None:
            return False
        self.state = "content"
        text, self.held = self.held[: block.end], self.held[block.end :]
        if block.calls:
            self.calls += block.calls
            self.trim = " \t\r\n"
        else:
            self._say(text)
        return bool(self.held)

    # -- what is given

    def _say(self, text: str) -> None:
        """Give content; white space at its end is held back while a call may follow it."""
        text = self.space + text
        said = text if self.form is None else text.rstrip()
        self.space = text[len(said) :]
        self._give(self.content, said)

    @staticmethod
    def _give(to: list[str], text: str) -> None:
        if text:
            to.append(text)

    def _trim_front(self) -> None:
        if self.trim:
            self.held = self.held.lstrip(self.trim)
            if self.held:
                self.trim = ""

    # -- what may come

    def _opening(self) -> int | None:
        """Return where a block of calls opens in what is held."""
        if self.form is None or (self.form.whole and (self.content or self.state == "reasoning")):
            return None
        return self.form.find(self.held)

    def _is_call(self, text: str) -> bool:
        block = None if self.form is None else self.form.take(text, self.tools, final=True)
        return block is not None and bool(block.calls)

    def _unsure(self, *markers: str) -> int:
        """Return how many characters at the end may be the beginning of a marker."""
        if self.form is not None:
            markers += self.form.openings
        longest = max((len(marker) - 1 for marker in markers), default=0)
        for count in range(min(longest, len(self.held)), 0, -1):
            if any(marker.startswith(self.held[-count:]) for marker in markers):
                return count
        return 0
