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

#: in the order in which a template's signs are looked for
FORMS = (
    CallForm("glm", ("<tool_call>",), "</tool_call>", _GLM, ("<arg_key>",), ("glm45", "glm47")),
    CallForm(
        "qwen3_coder",
        ("<tool_call>",),
        "</tool_call>",
        _QWEN_CODER,
        ("<function=",),
        ("qwen3_xml", "nemotron3"),
    ),
    CallForm(
        "minimax_m2",
        ("<minimax:tool_call>",),
        "</minimax:tool_call>",
        _MINIMAX,
        ("<minimax:tool_call>",),
        ("minimax-m2",),
    ),
    CallForm(
        "deepseek_v32",
        ("<｜DSML｜function_calls>",),
        "</｜DSML｜function_calls>",
        _DSML,
        ("<｜DSML｜",),
        ("deepseekv32",),
    ),
    CallForm(
        "deepseek_v3",
        ("<｜tool▁calls▁begin｜>",),
        "<｜tool▁calls▁end｜>",
        _DEEPSEEK,
        ("<｜tool▁calls▁begin｜>",),
        ("deepseek_v31", "deepseekv3", "deepseekv31"),
        frames=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ),
    CallForm(
        "kimi_k2",
        ("<|tool_calls_section_begin|>",),
        "<|tool_calls_section_end|>",
        _KIMI,
        ("<|tool_calls_section_begin|>",),
        frames=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    CallForm(
        "mistral", ("[TOOL_CALLS]",), "", mistral_calls, ("[TOOL_CALLS]",), frames=("[ARGS]", "[CALL_ID]")
    ),
    CallForm("nemotron", ("<TOOLCALL>",), "</TOOLCALL>", json_calls, ("<TOOLCALL>",)),
    CallForm("hermes", ("<tool_call>",), "</tool_call>", json_calls, ("<tool_call>",), ("qwen", "qwen25")),
    CallForm(
        "llama3_json",
        ("<|python_tag|>", "{"),
        "",
        json_sequence,
        ("<|python_tag|>", '"parameters": dictionary of argument name'),
        ("llama3", "llama4_json"),
        whole=True,
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
#: what `call_form` and `thinking` take
FORM_NAMES = ("auto", *sorted(name for form in FORMS for name in (form.name, *form.aliases)))
THINKING_NAMES = ("auto", *_THINKING, *_THINK_ALIASES)


def check_known(template: str) -> None:
    """Raise UsageError for a template whose replies no parser here reads."""
    if "<|channel|>" in template and "<|start|>" in template:
        raise UsageError("the chat template writes replies in channels (gpt-oss), which is not supported")


def call_form(name: str, template: str) -> CallForm | None:
    """Return the form of that name, or with `auto` the one of which the template has a sign.

    A template that does not know tools gets the form that is most in use, one that takes tools without a
    known sign None. Raises UsageError for an unknown name.
    """
    if name == "auto":
        return sniffed(template) or (None if re.search(r"\btools\b", template) else _DEFAULT)
    for form in FORMS:
        if name == form.name or name in form.aliases:
            return form
    raise UsageError(f"model.tool_parser: {name!r} is unknown; there are {', '.join(FORM_NAMES)}")


def sniffed(template: str) -> CallForm | None:
    """Return the form of which the template has a sign."""
    return next((form for form in FORMS if any(sign in template for sign in form.signs)), None)


def thinking(name: str, template: str) -> Thinking | None:
    """Return the marks of reasoning of that name, or with `auto` those that the template has, if any.

    Raises UsageError for an unknown name.
    """
    if name == "auto":
        marks = (each for each in _THINKING.values() if each is not None)
        return next((each for each in marks if each.end in template or each.start in template), None)
    name = "think" if name in _THINK_ALIASES else name
    if name not in _THINKING:
        names = ", ".join(THINKING_NAMES)
        raise UsageError(f"model.reasoning_parser: {name!r} is unknown; there are {names}")
    return _THINKING[name]


def mismatches(tool_parser: str, reasoning_parser: str, template: str) -> dict[str, str]:
    """Return what is wrong with names, given the template, by key; an unknown name is not looked at."""
    found = {}
    shown = sniffed(template)
    if tool_parser in FORM_NAMES and shown not in (None, call_form(tool_parser, template)):
        found["tool_parser"] = f"{tool_parser} is not what the chat template shows: {shown.name}"
    marks = thinking(reasoning_parser, template) if reasoning_parser in THINKING_NAMES else None
    if marks is not None and marks.end not in template and marks.start not in template:
        found["reasoning_parser"] = f"{reasoning_parser} is not what the chat template shows: no {marks.end}"
    return found
