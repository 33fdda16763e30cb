"""Messages to token ids and back, by the model's own tokenizer and chat template.

Text is rendered once and never again: a later turn's prompt is the ids of the turn before, exactly as
the engine emitted them, plus the ids of what was appended.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rollhook.errors import AgentError, UsageError
from rollhook.messages import Message, ToolCall, ToolSchema

# no threads of its own, which a later fork would warn of
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Stands for an assistant's text when an increment is rendered; letters only, so that no template alters it.
_SENTINEL = "RollhookAssistantText"
# Private-use characters around control tokens that occur in somebody's text; they never reach the tokenizer.
_OPEN, _CLOSE = "\U000ff7f0", "\U000ff7f1"
_THINK_END = "</think>"
_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
# A text longer than this is encoded by the batched call, the only one that lets other threads run meanwhile.
_LONG_TEXT = 32_768
_TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class RenderError(AgentError):
    """The chat template or the tokenizer refuses these messages."""

    kind = "user"


class Renderer:
    """Renders for one model. Reads `tokenizer.json`, `tokenizer_config.json` and the like once.

    The template is `chat_template` if given, else `chat_template.jinja` or the tokenizer's own. Control
    tokens (`<|im_end|>` and its like) that occur inside a message's text are encoded as plain text:
    what a sandbox prints cannot open a turn. Raises UsageError when the files are missing or unusable.
    """

    def __init__(self, tokenizer_dir: Path, chat_template: str | None = None) -> None:
        self.directory = Path(tokenizer_dir)
        config = _json(self.directory / "tokenizer_config.json")
        self._tokenizer = _tokenizer(self.directory)
        self._plain: tokenizers.Tokenizer | None = None
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {index: token.content for index, token in added.items() if token.special}
        self._control = _alternatives(self._special.values())
        self._marked = re.compile(f"{_OPEN}(.*?){_CLOSE}|[{_OPEN}{_CLOSE}]", re.DOTALL)
        self._variables = _token_variables(config)
        template = _template_text(self.directory, config, chat_template)
        self._template = _compile(template)
        self._thinks = _THINK_END in template
        self.vocab_size = int(self._tokenizer.get_vocab_size(with_added_tokens=True))
        #: ids that end a reply: of the model's files, and what follows an assistant's text in the template
        self.stop_token_ids = self._stop_ids()
        self._stops = frozenset(self.stop_token_ids)

    def first(self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None = None) -> list[int]:
        """Return the ids of a whole conversation up to the point where the assistant speaks."""
        return self.encode(self._render(messages, tools, generate=True))

    def increment(
        self,
        appended: Sequence[Message],
        *,
        last_token: int | None,
        tools: Sequence[ToolSchema] | None = None,
    ) -> list[int]:
        """Return the ids that follow an assistant's turn when `appended` comes after it.

        They begin with what closes that turn in the template (for ChatML `<|im_end|>` and a newline);
        what of it the engine emitted itself, its last token, is left out.
        """
        text = self._following(appended, tools)
        ids = self.encode(text)
        return ids[1:] if ids and ids[0] == last_token and last_token in self._stops else ids

    def parse(self, ids: Sequence[int], *, tool_calls: bool = False) -> Message:
        """Return what the assistant said: its text without control tokens.

        Where the template knows `</think>`, what is before it becomes `reasoning_content`. With `tool_calls`,
        blocks of the form `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` become calls; a
        block that is not such JSON stays in the text.
        """
        end = len(ids)
        while end and ids[end - 1] in self._stops:
            end -= 1
        text = self._tokenizer.decode(list(ids[:end]))
        message: Message = {"role": "assistant", "content": text}
        if self._thinks and _THINK_END in text:
            thought, _, text = text.partition(_THINK_END)
            message["reasoning_content"] = thought.removeprefix("<think>").strip("\n")
            message["content"] = text = text.lstrip("\n")
        if tool_calls and (calls := _tool_calls(text)):
            message["content"] = text[: text.index("<tool_call>")].rstrip()
            message["tool_calls"] = calls
        return message

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

        A made-up exchange is rendered with and without `appended`; what is new, and what closes the
        assistant's turn, is the increment.
        """
        try:
            text = self._render([*_exchange(), *appended], tools, generate=True)
        except RenderError:
            if appended and appended[0]["role"] == "tool":
                return self._following_calls(appended, tools)
            raise
        return _after_sentinel(text)

    def _following_calls(self, appended: Sequence[Message], tools: Sequence[ToolSchema] | None) -> str:
        """As `_following`, for templates that accept tool results only after the calls that they answer."""
        history = _exchange([m.get("tool_call_id", "") for m in appended if m["role"] == "tool"])
        without = self._render(history, tools, generate=False)
        with_appended = self._render([*history, *appended], tools, generate=True)
        if not with_appended.startswith(without):
            raise RenderError("the chat template alters earlier turns when tool results follow")
        closing = _after_sentinel(self._render(_exchange(), tools, generate=False))
        return closing + with_appended[len(without) :]

    def _stop_ids(self) -> tuple[int, ...]:
        stops: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            value = _json(self.directory / name).get("eos_token_id")
            if value is not None:
                stops.update(value if isinstance(value, list) else [value])
                break
        eos = self._variables.get("eos_token")
        if eos is not None and (index := self._tokenizer.token_to_id(eos)) is not None:
            stops.add(index)
        following = self.encode(self._following([{"role": "user", "content": "u"}], None))
        if following and following[0] in self._special:
            stops.add(following[0])
        return tuple(sorted(stops))

    def _render(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None, *, generate: bool
    ) -> str:
        try:
            return self._template.render(
                messages=[self._mark(_for_template(message)) for message in messages],
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
            return {key: self._mark(item) for key, item in value.items()}
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


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from error
    return data if isinstance(data, dict) else {}


def _template_text(directory: Path, config: Mapping[str, Any], given: str | None) -> str:
    if given is not None:
        return given
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default") or next(iter(named.values()), None)
    if not template:
        raise UsageError(
            f"{directory} holds no chat template (chat_template.jinja, or chat_template in"
            " tokenizer_config.json); name one with model.chat_template"
        )
    return str(template)


def _token_variables(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the named tokens that templates refer to, such as `bos_token`."""
    found = {}
    for role in _TOKEN_ROLES:
        value = config.get(role)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[role] = text
    return found


def _alternatives(tokens: Any) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _exchange(call_ids: Sequence[str] = ()) -> list[Message]:
    """Return a made-up exchange that ends with an assistant's turn, with these tool calls if any."""
    assistant: Message = {"role": "assistant", "content": _SENTINEL}
    if call_ids:
        assistant["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}
            for call_id in call_ids
        ]
    return [{"role": "user", "content": "u"}, assistant]


def _after_sentinel(text: str) -> str:
    found = text.find(_SENTINEL)
    if found < 0:
        raise RenderError("the chat template leaves out earlier replies, so it cannot be continued")
    return text[found + len(_SENTINEL) :]


def _tool_calls(text: str) -> list[ToolCall]:
    """Return the calls of a text in the `<tool_call>` form; none at all when one of them is malformed."""
    calls: list[ToolCall] = []
    for number, block in enumerate(_TOOL_CALL.findall(text)):
        try:
            call = json.loads(block)
            function = {"name": str(call["name"]), "arguments": json.dumps(call.get("arguments") or {})}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return []
        calls.append({"id": f"call_{number}", "type": "function", "function": function})
    return calls


def _for_template(message: Message) -> dict[str, Any]:
    """Return a message as templates expect it: no null fields, arguments of tool calls as objects."""
    plain: dict[str, Any] = {key: value for key, value in message.items() if value is not None}
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_call_for_template(call) for call in plain["tool_calls"]]
    return plain


def _call_for_template(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (TypeError, ValueError, RecursionError):
        arguments = None
    if isinstance(arguments, dict):
        function["arguments"] = arguments
    return {**call, "function": function}


def _compile(text: str) -> jinja2.Template:
    """Compile a chat template with what transformers gives one."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(text)
    except jinja2.TemplateError as error:
        raise UsageError(f"the chat template cannot be compiled: {error}") from error


class _Generation(jinja2.ext.Extension):
    """Accepts `{% generation %}` blocks, which some templates use to mark the assistant's text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own form

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)
