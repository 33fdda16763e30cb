"""The table of families: how each writes tool calls and sets off its reasoning.

The names are those of SGLang's `--tool-call-parser` and `--reasoning-parser` and of vLLM's options of the
same purpose, so that a deployment's names can be kept.
"""

# ruff: noqa: RUF001 - the control tokens are written so

from __future__ import annotations

import re

from rollhook.errors import UsageError
from rollhook.reply.calls import CallForm, Framed, Tagged, json_calls, json_sequence, mistral_calls
from rollhook.reply.parser import Thinking

_GLM = Tagged(
    re.compile(r"\s*(?P<name>[^\s<>]+)\s*"),
    re.compile(r"\s*<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>", re.DOTALL),
    re.compile(r"\s*\Z"),
    "<arg_value>",
    "</arg_value>",
)
_QWEN_CODER = Tagged(
    re.compile(r"\s*<function=(?P<name>[^\s<>]+)>"),
    re.compile(r"\s*<parameter=(?P<key>[^<>]+)>\n?(?P<value>.*?)\n?</parameter>", re.DOTALL),
    re.compile(r"\s*</function>"),
    "<parameter=",
    "</parameter>",
)
_MINIMAX = Tagged(
    re.compile(r'\s*<invoke name="?(?P<name>[^\s"<>]+)"?>'),
    re.compile(r'\s*<parameter name="?(?P<key>[^"<>]+)"?>(?P<value>.*?)</parameter>', re.DOTALL),
    re.compile(r"\s*</invoke>"),
    "<parameter ",
    "</parameter>",
)
_DSML = Tagged(
    re.compile(r'\s*<｜DSML｜invoke name="(?P<name>[^\s"<>]+)">'),
    re.compile(
        r'\s*<｜DSML｜parameter name="(?P<key>[^"<>]+)" string="(?P<string>true|false)">'
        r"(?P<value>.*?)</｜DSML｜parameter>",
        re.DOTALL,
    ),
    re.compile(r"\s*</｜DSML｜invoke>"),
    "<｜DSML｜parameter ",
    "</｜DSML｜parameter>",
)
_DEEPSEEK = Framed(
    re.compile(
        r"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?=[^\n]+\n```))?(?P<name>[^\n<]+?)"
        r"(?:<｜tool▁sep｜>|\n```json\n)(?P<arguments>.*?)(?:\n```)?<｜tool▁call▁end｜>",
        re.DOTALL,
    )
)
_KIMI = Framed(
    re.compile(
        r"\s*<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?)\s*"
        r"<\|tool_call_argument_begin\|>(?P<arguments>.*?)<\|tool_call_end\|>",
        re.DOTALL,
    )
)

#: in the order in which a template's signs are looked for; the last is that of a template without any
FORMS = (
    CallForm("glm", ("<tool_call>",), "</tool_call>", _GLM, "<arg_key>", ("glm45", "glm47")),
    CallForm(
        "qwen3_coder", ("<tool_call>",), "</tool_call>", _QWEN_CODER, "<function=", ("nemotron3", "qwen3_xml")
    ),
    CallForm(
        "minimax_m2",
        ("<minimax:tool_call>",),
        "</minimax:tool_call>",
        _MINIMAX,
        "<minimax:tool_call>",
        ("minimax-m2",),
    ),
    CallForm(
        "deepseek_v32",
        ("<｜DSML｜function_calls>",),
        "</｜DSML｜function_calls>",
        _DSML,
        "<｜DSML｜",
        ("deepseekv32",),
    ),
    CallForm(
        "deepseek_v3",
        ("<｜tool▁calls▁begin｜>",),
        "<｜tool▁calls▁end｜>",
        _DEEPSEEK,
        "<｜tool▁calls▁begin｜>",
        ("deepseek_v31", "deepseekv3", "deepseekv31"),
        frames=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ),
    CallForm(
        "kimi_k2",
        ("<|tool_calls_section_begin|>",),
        "<|tool_calls_section_end|>",
        _KIMI,
        "<|tool_calls_section_begin|>",
        frames=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    CallForm("mistral", ("[TOOL_CALLS]",), "", mistral_calls, "[TOOL_CALLS]", frames=("[ARGS]", "[CALL_ID]")),
    CallForm("nemotron", ("<TOOLCALL>",), "</TOOLCALL>", json_calls, "<TOOLCALL>"),
    CallForm("hermes", ("<tool_call>",), "</tool_call>", json_calls, "<tool_call>", ("qwen", "qwen25")),
    CallForm(
        "llama3_json", ("<|python_tag|>", "{"), "", json_sequence, "<|python_tag|>", ("llama3",), whole=True
    ),
)
_THINKING = {
    "think": Thinking("<think>", "</think>"),
    "mistral": Thinking("[THINK]", "[/THINK]"),
    "kimi": Thinking("◁think▷", "◁/think▷"),
    "none": None,
}
_THINK_ALIASES = (
    "deepseek_r1",
    "deepseek-r1",
    "deepseek-v3",
    "glm45",
    "kimi_k2",
    "minimax",
    "qwen3",
    "qwen3-thinking",
)
_DEFAULT = next(form for form in FORMS if form.name == "hermes")


def call_form(name: str, template: str) -> CallForm:
    """Return the form of that name, or with `auto` the one whose sign the template has.

    Raises UsageError for an unknown name.
    """
    if name == "auto":
        return sniffed(template) or _DEFAULT
    for form in FORMS:
        if name == form.name or name in form.aliases:
            return form
    names = ", ".join(sorted(form.name for form in FORMS))
    raise UsageError(f"model.tool_parser: {name!r} is unknown; there are auto, {names}")


def sniffed(template: str) -> CallForm | None:
    """Return the form whose sign the template has."""
    return next((form for form in FORMS if form.sign in template), None)


def thinking(name: str, template: str) -> Thinking | None:
    """Return the marks of reasoning of that name, or with `auto` those that the template has, if any.

    Raises UsageError for an unknown name.
    """
    if name == "auto":
        marks = (each for each in _THINKING.values() if each is not None)
        return next((each for each in marks if each.end in template), None)
    name = "think" if name in _THINK_ALIASES else name
    if name not in _THINKING:
        names = ", ".join(_THINKING)
        raise UsageError(f"model.reasoning_parser: {name!r} is unknown; there are auto, {names}")
    return _THINKING[name]
