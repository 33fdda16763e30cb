"""Messages to token ids and back, by the model's own tokenizer and chat template.

Text is rendered once and never again: a later turn's prompt is the ids of the turn before, exactly as
the engine emitted them, plus the ids of what was appended.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import tokenizers

from rollhook.errors import AgentError, UsageError
from rollhook.messages import Message, ToolSchema
from rollhook.reply.calls import CallForm
from rollhook.reply.detokenizer import Detokenizer
from rollhook.reply.forms import call_form, check_known, thinking
from rollhook.reply.parser import StreamParser, Thinking
from rollhook.session.template import (
    compile_template,
    for_template,
    read_json,
    template_name,
    template_text,
    token_variables,
)

# no threads of its own, which a later fork would warn of
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Stands for an assistant's text when an increment is rendered; letters only, so that no template alters it.
_SENTINEL = "RollhookAssistantText"
# Likewise what is appended, to see whether a template shows it at all.
_APPENDED = "RollhookAppendedText"
_USER: Message = {"role": "user", "content": "u"}
_NEXT: dict[str, Message] = {
    "user": {"role": "user", "content": _APPENDED},
    "system": {"role": "system", "content": _APPENDED},
    "tool": {"role": "tool", "content": _APPENDED, "tool_call_id": "c00000000"},
}
# Private-use characters around control tokens that occur in somebody's text; they never reach the tokenizer.
_OPEN, _CLOSE = "\U000ff7f0", "\U000ff7f1"
# Enough tokens at a prompt's end for a mark that opens reasoning, and white space.
_TAIL = 24
# A text longer than this is encoded by the batched call, the only one that lets other threads run meanwhile.
_LONG_TEXT = 32_768


class RenderError(AgentError):
    """The chat template or the tokenizer refuses these messages."""

    kind = "user"


class ToolsNotShownError(RenderError):
    """The chat template would leave the tools out."""


class Renderer:
    """Renders for one model. Reads `tokenizer.json`, `tokenizer_config.json` and the like once.

    The template is `chat_template` if given, else `chat_template.jinja` or the tokenizer's own. Control
    tokens (`<|im_end|>` and its like) that occur inside a message's text are encoded as plain text:
    what a sandbox prints cannot open a turn. Parsers of tool calls and reasoning are those of
    `rollhook.reply.forms` by name, or as the template shows (`auto`); `template_variables` reach the template
    beside the messages. Raises UsageError when the files are missing or unusable, or a parser is unknown.
    """

    def __init__(
        self,
        tokenizer_dir: Path,
        chat_template: str | None = None,
        *,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
        template_variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.directory = Path(tokenizer_dir)
        config = read_json(self.directory / "tokenizer_config.json")
        self._tokenizer = _tokenizer(self.directory)
        self._plain: tokenizers.Tokenizer | None = None
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {index: token.content for index, token in added.items() if token.special}
        #: ids of control tokens
        self.control_ids = frozenset(self._special)
        self._control = _alternatives(self._special.values())
        self._marked = re.compile(f"{_OPEN}(.*?){_CLOSE}|[{_OPEN}{_CLOSE}]", re.DOTALL)
        self._variables = {**token_variables(config), **(template_variables or {})}
        template = template_text(self.directory, config, chat_template)
        self._template_name = template_name(self.directory, chat_template)
        check_known(template)
        self._template = compile_template(template)
        self._calls = call_form(tool_parser, template)
        self._arguments_as_text = False
        if not self._takes_calls():
            self._arguments_as_text = True
            self._arguments_as_text = self._takes_calls()
        self._results_want_calls = False
        self._results_want_calls = not self._shows("tool")
        self._lost = frozenset(role for role in _NEXT if not self._shows(role))
        self.vocab_size = int(self._tokenizer.get_vocab_size(with_added_tokens=True))
        self._closing = self._closing_id()
        #: ids that end a reply: of the model's files, and what follows an assistant's text in the template
        self.stop_token_ids = self._stop_ids()
        self._stops = frozenset(self.stop_token_ids)
        self._thinking = self._opened(thinking(reasoning_parser, template), self.first([_USER]))
        self._hidden = (self._hidden_ids(None), self._hidden_ids(self._calls))
        pieces = (self._index_of(f"<0x{byte:02X}>") for byte in range(256))
        self._bytes = frozenset(index for index in pieces if index is not None)

    def first(self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None = None) -> list[int]:
        """Return the ids of a whole conversation up to the point where the assistant speaks.

        Raises RenderError where the template refuses the messages, as ToolsNotShownError the tools.
        """
        self._check_tools(tools)
        text = self._render(messages, tools, generate=True)
        if tools and text == self._render(messages, None, generate=True):
            raise ToolsNotShownError(
                f"{self._template_name} leaves tools out, so the model would not know of them; name one that"
                " shows them with model.chat_template, or describe them in a message and send none"
            )
        return self.encode(text)

    def increment(
        self,
        appended: Sequence[Message],
        *,
        last_token: int | None,
        tools: Sequence[ToolSchema] | None = None,
    ) -> list[int]:
        """Return the ids that follow an assistant's turn when `appended` comes after it.

        They begin with what closes that turn in the template (for ChatML `<|im_end|>` and a newline);
        what of it the engine emitted itself, its last token, is left out. Raises RenderError where the
        template does not show such a message, or cannot be continued.
        """
        self._check_tools(tools)
        text = self._following(appended, tools)
        if lost := next((message["role"] for message in appended if message["role"] in self._lost), None):
            raise RenderError(f"the chat template leaves out a {lost} message that follows a reply")
        ids = self.encode(text)
        ended = last_token in self._stops and ids and ids[0] in (last_token, self._closing)
        return ids[1:] if ended else ids

    def stream_parser(
        self, tools: Sequence[ToolSchema] | None = None, prompt: Sequence[int] | None = None
    ) -> StreamParser:
        """Return what parses one reply as its ids come; calls are looked for where there are tools.

        Whether the prompt's ids end inside reasoning is looked up in them, by default in a first prompt's.
        """
        form = self._calls if tools else None
        return StreamParser(
            Detokenizer(self._tokenizer, self._hidden[form is not None], self._bytes),
            self._stops,
            thinking=self._thinking if prompt is None else self._opened(self._thinking, prompt),
            calls=form,
            tools=tools or (),
        )

    def parse(
        self,
        ids: Sequence[int],
        tools: Sequence[ToolSchema] | None = None,
        prompt: Sequence[int] | None = None,
    ) -> Message:
        """Return what the assistant said: text without control tokens, reasoning and calls apart.

        Calls are looked for where there are tools; what is no well-formed call stays text. A call has the id
        that the model gave it, else "".
        """
        parser = self.stream_parser(tools, prompt)
        parser.feed(ids)
        return parser.finish()

    def encode(self, text: str) -> list[int]:
        """Return the ids of rendered text; marked control tokens in it are plain text.

        Raises RenderError for text that is no Unicode (lone surrogates).
        """
        try:
            if _OPEN not in text and _CLOSE not in text:
                return _ids(self._tokenizer, text)
            ids: list[int] = []
            start = 0
            for match in self._marked.finditer(text):
                ids += _ids(self._tokenizer, text[start : match.start()])
                ids += _ids(self._without_control(), match[1] or "")
                start = match.end()
            return ids + _ids(self._tokenizer, text[start:])
        except (UnicodeEncodeError, TypeError) as error:
            raise RenderError("a message holds lone surrogates, which are no Unicode text") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, control tokens shown; for people."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _following(self, appended: Sequence[Message], tools: Sequence[ToolSchema] | None) -> str:
        """Return the text after an assistant's words when `appended` comes after them.

        They are those after the assistant's words in a made-up exchange that `appended` follows.
        """
        if self._results_want_calls and appended[0]["role"] == "tool":
            return self._following_calls(appended, tools)
        return _after_sentinel(self._render([*_exchange(), *appended], tools, generate=True))

    def _following_calls(self, appended: Sequence[Message], tools: Sequence[ToolSchema] | None) -> str:
        """As `_following`, for templates that show tool results only after the calls that they answer."""
        history = _exchange([message for message in appended if message["role"] == "tool"])
        without = self._render(history, tools, generate=False)
        with_appended = self._render([*history, *appended], tools, generate=True)
        closing = _after_sentinel(self._render(_exchange(), tools, generate=False))
        if not with_appended.startswith(without) or not without.endswith(closing):
            raise RenderError("the chat template alters a turn that calls tools when their results follow")
        return closing + with_appended[len(without) :]

    def _shows(self, role: str) -> bool:
        """Return whether the template shows a message of that role after a reply."""
        try:
            return _APPENDED in self._following([_NEXT[role]], None)
        except RenderError:
            return False

    def _takes_calls(self) -> bool:
        """Return whether the template takes a call with its arguments as they are given to it now."""
        try:
            self._render(_exchange([_NEXT["tool"]]), None, generate=False)
        except RenderError:
            return False
        return True

    def _check_tools(self, tools: Sequence[ToolSchema] | None) -> None:
        if tools and self._calls is None:
            raise RenderError(
                "the chat template takes tools, but shows no known form of calls; say which it is with"
                " model.tool_parser"
            )

    def _stop_ids(self) -> tuple[int, ...]:
        stops: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            value = read_json(self.directory / name).get("eos_token_id")
            if value is not None:
                stops.update(value if isinstance(value, list) else [value])
                break
        eos = self._variables.get("eos_token")
        if eos is not None and (index := self._index_of(eos)) is not None:
            stops.add(index)
        following = [self._following([_NEXT["user"]], None)]
        if "tool" not in self._lost:
            following.append(self._following([_NEXT["tool"]], None))
        stops.update(ids[0] for ids in map(self.encode, following) if ids and ids[0] in self._special)
        return tuple(sorted(stops))

    def _closing_id(self) -> int | None:
        """Return the control token that closes an assistant's turn; None where none does."""
        ids = self.encode(_after_sentinel(self._render(_exchange(), None, generate=False)))
        return ids[0] if ids and ids[0] in self._special else None

    def _opened(self, marks: Thinking | None, prompt: Sequence[int]) -> Thinking | None:
        """Return the marks of reasoning, knowing whether the prompt ends with the one that opens it."""
        if marks is None:
            return None
        return replace(marks, opened=self.decode(prompt[-_TAIL:]).rstrip().endswith(marks.start))

    def _hidden_ids(self, form: CallForm | None) -> frozenset[int]:
        """Return the control tokens that a parser need not see."""
        shown = set() if form is None else set(form.marks)
        if self._thinking is not None:
            shown |= {self._thinking.start, self._thinking.end}
        return frozenset(index for index, token in self._special.items() if token not in shown)

    def _index_of(self, token: str) -> int | None:
        index: int | None = self._tokenizer.token_to_id(token)
        return index

    def _render(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None, *, generate: bool
    ) -> str:
        try:
            return self._template.render(
                messages=[
                    self._mark(for_template(message, arguments_as_text=self._arguments_as_text))
                    for message in messages
                ],
                tools=None if tools is None else self._mark(list(tools)),
                add_generation_prompt=generate,
                **self._variables,
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            RecursionError,
        ) as error:
            raise RenderError(f"the chat template refuses the messages: {error}") from error

    def _mark(self, value: Any) -> Any:
        """Return a copy with every control token inside a text marked as plain."""
        if isinstance(value, str):
            return self._control.sub(f"{_OPEN}\\g<0>{_CLOSE}", value)
        if isinstance(value, Mapping):
            return {self._mark(key): self._mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._mark(item) for item in value]
        return value

    def _without_control(self) -> tokenizers.Tokenizer:
        if self._plain is None:
            self._plain = _tokenizer(self.directory)
            self._plain.encode_special_tokens = True
        return self._plain


def _tokenizer(directory: Path) -> tokenizers.Tokenizer:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise UsageError(f"{path} does not exist; `save_pretrained` of a fast tokenizer writes it")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise UsageError(f"{path} is no tokenizer that `tokenizers` can read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _ids(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    if len(text) > _LONG_TEXT:
        return list(tokenizer.encode_batch([text], add_special_tokens=False)[0].ids)
    return list(tokenizer.encode(text, add_special_tokens=False).ids) if text else []


def _alternatives(tokens: Any) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _exchange(results: Sequence[Message] = ()) -> list[Message]:
    """Return a made-up exchange that ends with an assistant's turn, with the calls of these results."""
    assistant: Message = {"role": "assistant", "content": _SENTINEL}
    if results:
        assistant["tool_calls"] = [
            {
                "id": result.get("tool_call_id", ""),
                "type": "function",
                "function": {"name": result.get("name", "f"), "arguments": "{}"},
            }
            for result in results
        ]
    return [_USER, assistant]


def _after_sentinel(text: str) -> str:
    found = text.find(_SENTINEL)
    if found < 0:
        raise RenderError("the chat template leaves out earlier replies, so it cannot be continued")
    return text[found + len(_SENTINEL) :]
