"""A model's chat template: read from its files, compiled as transformers does, given messages in its form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rollhook.errors import UsageError
from rollhook.messages import Message

_TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty where there is none. Raises UsageError for what is no JSON."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from error
    return data if isinstance(data, dict) else {}


def template_text(directory: Path, config: Mapping[str, Any], given: str | None) -> str:
    """Return the template: the given one, else of `chat_template.jinja`, else of `tokenizer_config.json`."""
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


def template_name(directory: Path, given: str | None) -> str:
    """Return what to call the template that `template_text` returns, without a path of this machine."""
    if given is not None:
        return "the template of model.chat_template"
    file = "chat_template.jinja"
    return f"the {file if (directory / file).is_file() else 'chat_template'} of {directory.name}"


def shows_tools(template: str, variables: Mapping[str, Any]) -> bool:
    """Return whether a tool alters what is rendered; True where nothing can be rendered."""
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
    user = {"role": "user", "content": "u"}
    try:
        compiled = compile_template(template)
        for messages in ([user], [{"role": "system", "content": "s"}, user]):
            with_tool, without = (
                compiled.render(messages=messages, tools=tools, add_generation_prompt=True, **variables)
                for tools in ([tool], None)
            )
            if with_tool != without:
                return True
    except (jinja2.TemplateError, UsageError, TypeError, ValueError, KeyError, AttributeError):
        return True
    return False


def token_variables(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the named tokens that templates refer to, such as `bos_token`."""
    found = {}
    for role in _TOKEN_ROLES:
        value = config.get(role)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[role] = text
    return found


def compile_template(text: str) -> jinja2.Template:
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


def for_template(message: Message, *, arguments_as_text: bool = False) -> dict[str, Any]:
    """Return a message as templates expect it: no null fields, arguments of calls as objects (or text)."""
    plain: dict[str, Any] = {key: value for key, value in message.items() if value is not None}
    if plain.get("tool_calls") and not arguments_as_text:
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
