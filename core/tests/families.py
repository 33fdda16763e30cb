"""Small chat templates in the manner of model families, and tokenizers for them: what renderers meet.

Each shows a way in which families differ: who closes a turn, where tools stand, what of earlier reasoning is
rendered again, how calls are written.
"""

# ruff: noqa: RUF001, E501 - the control tokens are written so, and templates are not wrapped

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers

from rollhook.testing.tokenizer import write_tokenizer

#: a macro for what several families do with tool results: one turn for all of a row
_RESULTS = """
{%- macro results(loop, m, opening, closing) %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- opening }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- closing }}{% endif %}
{%- endmacro %}
"""

# ChatML; reasoning of turns before the last question is left out
_QWEN3 = (
    _RESULTS
    + """
{%- if tools %}{{- '<|im_start|>system\\nCall with <tool_call>. Tools: ' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- set last = namespace(question=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{- results(loop, m, '<|im_start|>user', '<|im_end|>\\n') }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > last.question and m.reasoning_content %}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content or '' }}
{%- for call in m.tool_calls or [] %}{{- '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
)
_QWEN_CODER = _QWEN3.replace(
    "call.function | tojson", "'<function=' + call.function.name + '>\\n</function>'"
).replace(
    "'<|im_start|>assistant\\n' }}{% endif %}\n", "'<|im_start|>assistant\\n<think>\\n' }}{% endif %}\n"
)
# no token closes a turn: the next role does, and is what the model stops at
_GLM = (
    _RESULTS
    + """[gMASK]<sop>
{%- if tools %}{{- '<|system|>\\n<arg_key>, tools: ' + tools | tojson }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{- results(loop, m, '<|observation|>', '') }}
{%- elif m.role == 'assistant' %}
{{- '<|assistant|>\\n<think>' + ('' if clear_thinking else m.reasoning_content or '') + '</think>\\n' + (m.content or '') | trim }}
{%- else %}{{- '<|' + m.role + '|>\\n' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n<think>' }}{% endif %}
"""
)
# tools stand with the user's turn; calls end with another token than text
_LLAMA3 = """{{- bos_token }}
{%- for m in messages %}
{%- set role = 'ipython' if m.role == 'tool' else m.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
{%- if tools and loop.index0 == 0 %}{{- tools | tojson + '\\n<|python_tag|>\\n' }}{% endif %}
{%- if m.role == 'tool' %}{{- m.content | tojson }}{% else %}{{- (m.content or '') | trim }}{% endif %}
{{- '<|eom_id|>' if m.tool_calls else '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
# strict about who follows whom and about ids; tools before the last question
_MISTRAL = """{{- bos_token }}
{%- set questions = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and m == questions[-1] %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('ids of calls have nine characters') }}{% endif %}
{{- '[TOOL_RESULTS]' + {'content': m.content, 'call_id': m.tool_call_id} | tojson + '[/TOOL_RESULTS]' }}
{%- elif m.role == 'assistant' %}
{%- if m.tool_calls %}{{- '[TOOL_CALLS]' + m.tool_calls | tojson }}{% else %}{{- m.content }}{% endif %}{{- eos_token }}
{%- else %}{{ raise_exception('only user, assistant and tool') }}{% endif %}
{%- endfor %}
"""
# results only after calls, and no new turn of the assistant after them
_DEEPSEEK = """{{- bos_token }}
{%- if tools %}{{- 'Tools: ' + tools | tojson }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<｜User｜>' + m.content + '<｜Assistant｜>' }}
{%- elif m.role == 'tool' %}
{%- if not messages[loop.index0 - 1].tool_calls and messages[loop.index0 - 1].role != 'tool' %}
{{- raise_exception('a result without a call') }}{% endif %}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- elif m.role == 'assistant' %}
{%- if '</think>' in (m.content or '') %}{{- m.content.split('</think>')[-1] }}{% else %}{{- m.content or '' }}{% endif %}
{%- if m.tool_calls %}{{- '<｜tool▁calls▁begin｜>' }}
{%- for call in m.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments | tojson + '<｜tool▁call▁end｜>' }}
{%- endfor %}{{- '<｜tool▁calls▁end｜>' }}{% endif %}
{{- eos_token }}
{%- else %}{{- m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role == 'system' %}{{- '<｜Assistant｜>' }}{% endif %}
"""
_KIMI = """
{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}{% endif %}
{%- for m in messages %}
{{- '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' }}
{%- if m.role == 'tool' %}{{- '## Return of ' + m.tool_call_id + '\\n' }}{% endif %}
{{- m.content or '' }}
{%- if m.tool_calls %}{{- '<|tool_calls_section_begin|>' }}
{%- for call in m.tool_calls %}
{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' + call.function.arguments | tojson + '<|tool_call_end|>' }}
{%- endfor %}{{- '<|tool_calls_section_end|>' }}{% endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}
"""
_MINIMAX = """
{%- if tools %}{{- ']~b]system\\n' + tools | tojson + '[e~[\\n' }}{% endif %}
{%- for m in messages %}
{{- ']~b]' + ('ai' if m.role == 'assistant' else m.role) + '\\n' + (m.content or '') }}
{%- if m.tool_calls %}{{- '\\n<minimax:tool_call>\\n</minimax:tool_call>' }}{% endif %}
{{- '[e~[\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- ']~b]ai\\n<think>\\n' }}{% endif %}
"""


def _hermes(name: str, arguments: Mapping[str, Any]) -> str:
    return (
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"
    )


def _untyped(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _glm(name: str, arguments: Mapping[str, Any]) -> str:
    pairs = "".join(
        f"\n<arg_key>{key}</arg_key>\n<arg_value>{_untyped(value)}</arg_value>"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}{pairs}\n</tool_call>"


def _qwen_coder(name: str, arguments: Mapping[str, Any]) -> str:
    pairs = "".join(
        f"<parameter={key}>\n{_untyped(value)}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"


def _minimax(name: str, arguments: Mapping[str, Any]) -> str:
    pairs = "".join(
        f'<parameter name="{k}">{_untyped(value)}</parameter>\n' for k, value in arguments.items()
    )
    return f'<minimax:tool_call>\n<invoke name="{name}">\n{pairs}</invoke>\n</minimax:tool_call>'


def _deepseek(name: str, arguments: Mapping[str, Any]) -> str:
    call = f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"


def _kimi(name: str, arguments: Mapping[str, Any]) -> str:
    call = f"functions.{name}:0<|tool_call_argument_begin|>{json.dumps(arguments)}"
    return f"<|tool_calls_section_begin|><|tool_call_begin|>{call}<|tool_call_end|><|tool_calls_section_end|>"


def _llama(name: str, arguments: Mapping[str, Any]) -> str:
    return json.dumps({"name": name, "parameters": arguments})


def _mistral(name: str, arguments: Mapping[str, Any]) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}"


@dataclass(frozen=True)
class Family:
    """One way of writing; `call` writes a call as the model does, `stops` are tokens that it ends a reply with.

    `control`, `stops` and `markup` (tokens that are no control tokens) stand in a row, with spaces between.
    """

    template: str
    stops: str
    call: Callable[[str, Mapping[str, Any]], str]
    form: str
    control: str = ""
    markup: str = ""
    #: what stands around reasoning; the beginning is "" where the prompt ends with it
    thinks: tuple[str, str] | None = None
    bos: str = ""


_TAGS = "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response>"
FAMILIES = {
    "qwen3": Family(
        _QWEN3,
        "<|im_end|> <|endoftext|>",
        _hermes,
        "hermes",
        markup=_TAGS,
        thinks=("<think>\n", "\n</think>\n\n"),
    ),
    "qwen3_coder": Family(
        _QWEN_CODER, "<|im_end|>", _qwen_coder, "qwen3_coder", markup=_TAGS, thinks=("", "\n</think>\n\n")
    ),
    "glm": Family(
        _GLM,
        "<|user|> <|observation|> <|endoftext|>",
        _glm,
        "glm",
        control="[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>",
        markup=f"{_TAGS} <arg_key> </arg_key> <arg_value> </arg_value>",
        thinks=("", "</think>\n"),
    ),
    "llama3": Family(
        _LLAMA3,
        "<|eot_id|> <|eom_id|>",
        _llama,
        "llama3_json",
        control="<|bos|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> <|python_tag|>",
        bos="<|bos|>",
    ),
    "mistral": Family(
        _MISTRAL,
        "</s>",
        _mistral,
        "mistral",
        control="<s> </s> [INST] [/INST] [TOOL_CALLS] [ARGS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS]"
        " [TOOL_RESULTS] [/TOOL_RESULTS]",
        bos="<s>",
    ),
    "deepseek": Family(
        _DEEPSEEK,
        "<｜eos｜>",
        _deepseek,
        "deepseek_v3",
        control="<｜bos｜> <｜eos｜> <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜>"
        " <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>",
        bos="<｜bos｜>",
        thinks=("<think>\n", "\n</think>\n\n"),
    ),
    "kimi": Family(
        _KIMI,
        "<|im_end|>",
        _kimi,
        "kimi_k2",
        control="<|im_system|> <|im_user|> <|im_assistant|> <|im_tool|> <|im_middle|> <|tool_call_end|>"
        " <|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|>",
    ),
    "minimax": Family(
        _MINIMAX,
        "[e~[",
        _minimax,
        "minimax_m2",
        control="]~b] [e~[",
        markup="<think> </think> <minimax:tool_call> </minimax:tool_call>",
        thinks=("", "\n</think>\n\n"),
    ),
}


def write_family(name: str, directory: Path) -> Path:
    """Write the tokenizer and the template of a family there and return the directory."""
    family = FAMILIES[name]
    write_tokenizer(
        directory,
        corpus=["the files in the directory", "<tool_call> name arguments"] * 4,
        vocab_size=320,
        template=family.template,
        control=family.control.split(),
        markup=family.markup.split(),
        eos=family.stops.split()[0],
    )
    name_tokens(directory, family)
    return directory


def write_pieces(name: str, directory: Path) -> Path:
    """As `write_family`, with a tokenizer as SentencePiece's are."""
    family = FAMILIES[name]
    tokenizer = byte_pieces()
    tokenizer.add_special_tokens(family.control.split())
    tokenizer.add_tokens(family.markup.split())
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": family.stops.split()[0]}))
    (directory / "chat_template.jinja").write_text(family.template)
    name_tokens(directory, family)
    return directory


def byte_pieces() -> tokenizers.Tokenizer:
    """Return a tokenizer with `▁` for a space, the first one dropped, and ids 1 to 256 for single bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefgé"]
    made = tokenizers.Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def name_tokens(directory: Path, family: Family) -> None:
    """Write which tokens begin a conversation and end a reply."""
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    stops = [tokenizer.token_to_id(token) for token in family.stops.split()]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bos_token": family.bos}))
