"""Replies become messages: whole or token by token, in the form of each family."""

# ruff: noqa: RUF001, E501 - the control tokens are written so, and calls are not wrapped

import json
import re
from dataclasses import replace
from itertools import pairwise

import pytest
from families import FAMILIES, byte_pieces, write_family
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollhook.errors import UsageError
from rollhook.reply.calls import json_calls
from rollhook.reply.detokenizer import Detokenizer
from rollhook.reply.forms import FORM_NAMES, FORMS, call_form, mismatches, thinking
from rollhook.reply.parser import StreamParser, Thinking
from rollhook.reply.values import typed
from rollhook.session import Renderer
from rollhook.testing.tokenizer import CHATML, write_tokenizer

PARAMETERS = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "deep": {"type": "boolean"},
    "names": {"type": "array"},
    "options": {"type": "object"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {"properties": PARAMETERS}}}]
THINK = Thinking()
QUIET = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def renderers(tmp_path_factory):
    made = {name: Renderer(write_family(name, tmp_path_factory.mktemp(name))) for name in FAMILIES}
    made["plain"] = Renderer(write_tokenizer(tmp_path_factory.mktemp("plain")))
    return made


class Plain:
    """A detokenizer double whose ids are code points."""

    def feed(self, ids):
        return "".join(map(chr, ids))

    def finish(self):
        return ""


def parse(text, form="hermes", marks=None, *, stop=True, tools=TOOLS):
    parser = StreamParser(Plain(), {0}, thinking=marks, calls=call_form(form, ""), tools=tools)
    parser.feed([*map(ord, text), *([0] if stop else ())])
    return parser.finish()


def calls(message):
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    ]


words = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="<>[]"), max_size=12)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": words,
        "count": st.integers(-(10**9), 10**9),
        "share": st.floats(allow_nan=False, allow_infinity=False),
        "deep": st.booleans(),
        "names": st.lists(words, max_size=3),
        "options": st.dictionaries(words, words, max_size=2),
        "maybe": st.none() | words.filter(lambda text: text != "null"),
    },
)


@pytest.mark.parametrize("family", FAMILIES)
@settings(QUIET, max_examples=25)
@given(said=arguments)
def test_a_call_has_the_arguments_that_the_model_wrote_in_their_types(renderers, family, said):
    renderer, made = renderers[family], FAMILIES[family]
    before = "" if made.form == "llama3_json" else "Let me see. "
    text = made.call("run", said)
    if made.form == "qwen3_coder":  # one line break on each side belongs to the tags
        said = {key: value for key, value in said.items() if not isinstance(value, str) or value.strip("\n")}
        said = {k: v.strip("\n") if isinstance(v, str) else v for k, v in said.items()}
        text = made.call("run", said)
    thought = f"hm{made.thinks[1]}" if made.thinks and made.thinks[0] == "" else ""
    ids = [*renderer.encode(thought + before + text), renderer.stop_token_ids[0]]
    message = renderer.parse(ids, TOOLS)
    assert calls(message) == [("run", said)]
    assert message["content"] == before.rstrip()


@pytest.mark.parametrize("family", [*FAMILIES, "plain"])
@settings(QUIET, max_examples=40)
@given(data=st.data())
def test_a_stream_gives_what_the_whole_reply_gives(renderers, family, data):
    renderer, form = renderers[family], FAMILIES.get(family)
    marks = ["<think>", "</think>", *(form.control + form.markup).split()] if form else ["<tool_call>"]
    call = form.call("run", {"text": "ü"}) if form else '<tool_call>{"name": "run"}</tool_call>'
    part = st.sampled_from(
        [*marks, *(mark[:-1] for mark in marks), call, call[:-3], call[3:], "\n", " ", "a 🙂"]
    )
    text = "".join(data.draw(st.lists(part, max_size=8)))
    ids = renderer.encode(text) + data.draw(st.sampled_from([[], list(renderer.stop_token_ids[:1])]))
    ids = ids[: data.draw(st.integers(0, len(ids)))] if data.draw(st.booleans()) else ids
    tools = data.draw(st.sampled_from([None, TOOLS]))
    whole, parser = renderer.parse(ids, tools), renderer.stream_parser(tools)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    cuts = list(range(len(ids) + 1)) if data.draw(st.booleans()) else [0, *cuts, len(ids)]
    deltas = [parser.feed(ids[a:b]) for a, b in pairwise(cuts)]
    assert parser.finish() == whole
    deltas.append(parser.tail)
    assert "".join(delta.text for delta in deltas) == whole["content"]
    assert "".join(delta.reasoning for delta in deltas) == whole.get("reasoning_content", "")
    assert all("\ufffd" not in delta.text + delta.reasoning for delta in deltas[:-1])
    seen = whole["content"] + whole.get("reasoning_content", "")
    shown = set() if tools is None or form is None else call_form(form.form, "").marks
    assert not [token for token in renderer._special.values() if token in seen and token not in shown]


@pytest.mark.parametrize("form", [form.name for form in FORMS])
@settings(QUIET, max_examples=40)
@given(data=st.data())
def test_nothing_of_a_reply_without_calls_is_lost(form, data):
    marks = [
        *call_form(form, "").marks,
        "{",
        "}",
        '"name"',
        ":",
        "x",
        " ",
        "\n",
        "<function=f>",
        "</arg_key>",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(marks), max_size=12)))
    message = parse(text, form)
    if "tool_calls" not in message:
        assert message["content"] == text


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>', {"x": "</tool_call>"}),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', {"x": 1}),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', {}),
        ("glm", "<tool_call>f</tool_call>", {}),
        ("glm", "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value> a\n</arg_value>\n</tool_call>", {"x": " a\n"}),
        ("glm", "<tool_call>f<arg_key>x</arg_key><arg_value></tool_call></arg_value></tool_call>", {"x": "</tool_call>"}),
        ("qwen3_coder", "<tool_call><function=f><parameter=x>\n1\n2\n</parameter></function></tool_call>", {"x": "1\n2"}),
        ("nemotron", '<TOOLCALL>[{"name": "f", "arguments": {}}]</TOOLCALL>', {}),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}, "id": "abcdefghi"}]', {"x": 1}),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"x": "[TOOL_CALLS]"}', {"x": "[TOOL_CALLS]"}),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"x": 1}}', {"x": 1}),
        ("llama3_json", ' {"type": "function", "name": "f", "parameters": {}}\n', {}),
        (
            "deepseek_v3",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
            '{"x": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            {"x": 1},
        ),
        (
            "deepseek_v32",
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="x" string="true">1'
            '</｜DSML｜parameter>\n<｜DSML｜parameter name="y" string="false">1</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
            {"x": "1", "y": 1},
        ),
    ],
)  # fmt: skip
def test_a_form_reads_its_variants(form, text, expected):
    message = parse(text, form)
    assert calls(message) == [("f", expected)]
    assert message["content"] == ""
    assert message["tool_calls"][0]["id"] in ("", "abcdefghi")


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "<tool_call>{not json}</tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}'),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>"),
        ("glm", "<tool_call>f<arg_key>x</arg_key></tool_call>"),
        ("glm", "<tool_call></tool_call>"),
        ("qwen3_coder", "<tool_call><function=f><parameter=x>1</function></tool_call>"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{"),
        ("llama3_json", '{"x": 1}'),
        ("llama3_json", '{"name": "f", "parameters": {}} and more'),
        ("llama3_json", "{" * 100_000),
    ],
)
def test_what_is_no_call_stays_text(form, text):
    assert parse(text, form) == {"role": "assistant", "content": text}


def test_several_calls_and_the_text_around_them():
    one, other, bad = (f"<tool_call>{text}</tool_call>" for text in ('{"name": "a"}', '{"name": "b"}', "?"))
    message = parse(f"First.\n{one}\n{other}\n\nThen {bad} end\n {one}\n")
    assert [name for name, _ in calls(message)] == ["a", "b", "a"]
    assert message["content"] == f"First.\nThen {bad} end"


def test_without_tools_a_call_is_text():
    text = '<tool_call>{"name": "a"}</tool_call>'
    assert "tool_calls" in parse(text)
    parser = StreamParser(Plain(), {0})
    parser.feed(map(ord, text))
    assert parser.finish() == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("marks", "text", "reasoning", "content"),
    [
        (THINK, "<think>\nhm\n</think>\n\nyes ", "hm", "yes "),
        (THINK, "\n <think></think>yes", "", "yes"),
        (THINK, " yes </think> no", None, " yes </think> no"),
        (THINK, "yes <think>hm</think>", None, "yes <think>hm</think>"),
        (THINK, "<think>hm", "hm", ""),
        (Thinking(opened=True), "hm\n</think>\n\nyes", "hm", "yes"),
        (Thinking(opened=True), "hm <think> \n", "hm <think> ", ""),
        (Thinking("[THINK]", "[/THINK]"), "[THINK]hm[/THINK]yes", "hm", "yes"),
    ],
)
def test_reasoning_is_what_stands_between_its_marks_at_the_beginning(marks, text, reasoning, content):
    message = parse(text, marks=marks)
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


def test_a_call_in_reasoning_counts_only_when_the_reply_stops_without_leaving_it():
    call = '<tool_call>{"name": "a"}</tool_call>'
    opened = Thinking(opened=True)
    closed = parse(f"hm {call}\n</think>yes", marks=opened)
    assert closed == {"role": "assistant", "reasoning_content": f"hm {call}", "content": "yes"}
    stopped = parse(f"hm\n{call}", marks=opened)
    assert (stopped["reasoning_content"], len(stopped["tool_calls"])) == ("hm", 1)
    cut = parse(f"hm\n{call}", marks=opened, stop=False)
    assert cut == {"role": "assistant", "reasoning_content": f"hm\n{call}", "content": ""}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("5", {"type": ["string", "null"]}, "5"),
        ("null", {"type": ["string", "null"]}, None),
        ("5", {"oneOf": [{"type": "string"}, {"type": "number"}]}, 5),
        ("5", None, 5),
        ("five", None, "five"),
        ("five", {"type": "integer"}, "five"),
        ("true", {"type": "integer"}, "true"),
        ("False", {"type": "boolean"}, False),
        ("1", {"enum": ["1", "2"]}, "1"),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
    ],
)
def test_a_schema_gives_a_value_its_type(text, schema, value):
    assert typed(text, schema) == value
    assert type(typed(text, schema)) is type(value)


@settings(QUIET, max_examples=60)
@given(data=st.data(), text=st.text(st.sampled_from(" abcé🙂\n"), max_size=20))
def test_pieces_of_text_join_to_the_text_also_where_bytes_are_pieces(data, text):
    tokenizer, pieces = byte_pieces(), frozenset(range(1, 257))
    noise = data.draw(st.lists(st.integers(1, 260), max_size=6))
    ids = tokenizer.encode(text).ids + noise + tokenizer.encode(text).ids
    detokenizer = Detokenizer(tokenizer, frozenset(), pieces)
    given_so_far = [detokenizer.feed([index]) for index in ids]
    assert "".join(given_so_far) + detokenizer.finish() == tokenizer.decode(ids, skip_special_tokens=False)


@settings(QUIET, max_examples=60)
@given(ids=st.lists(st.integers(3, 260), max_size=30))
def test_any_bytes_join_to_what_decoding_them_at_once_gives(renderers, ids):
    tokenizer = renderers["plain"]._tokenizer
    detokenizer = Detokenizer(tokenizer, frozenset(), frozenset())
    given_so_far = [detokenizer.feed([index]) for index in ids]
    assert "".join(given_so_far) + detokenizer.finish() == tokenizer.decode(ids, skip_special_tokens=False)


@settings(QUIET, max_examples=100)
@given(picks=st.lists(st.integers(0, 9), max_size=90))
def test_parts_of_characters_join_to_what_decoding_them_at_once_gives(renderers, picks):
    tokenizer, parts = renderers["plain"]._tokenizer, renderers["plain"].encode("aé€🙂")
    ids = [parts[pick] for pick in picks]
    detokenizer = Detokenizer(tokenizer, frozenset(), frozenset())
    given_so_far = [detokenizer.feed([index]) for index in ids]
    assert "".join(given_so_far) + detokenizer.finish() == tokenizer.decode(ids, skip_special_tokens=False)


class Counting:
    """A tokenizer that counts the ids that it decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.decoded = tokenizer, 0

    def decode(self, ids, **keys):
        self.decoded += len(ids)
        return self.tokenizer.decode(ids, **keys)


@pytest.mark.parametrize("text", ["\ufffd", "é"], ids=["a replacement character", "half a character"])
def test_text_that_never_becomes_whole_is_not_decoded_over_and_over(renderers, text):
    tokenizer = Counting(renderers["plain"]._tokenizer)
    ids = renderers["plain"].encode(text * 1000)[:: 1 if text == "\ufffd" else 2]
    detokenizer = Detokenizer(tokenizer, frozenset(), frozenset())
    given_so_far = [detokenizer.feed([index]) for index in ids]
    assert "".join(given_so_far) + detokenizer.finish() == tokenizer.decode(ids, skip_special_tokens=False)
    assert tokenizer.decoded < 100 * len(ids)


def test_an_end_that_is_inside_a_value_is_tried_once():
    tried = []

    def parse(block, tools):
        tried.append(block)
        return json_calls(block, tools)

    form = replace(call_form("hermes", ""), parse=parse)
    parser = StreamParser(Plain(), {0}, calls=form, tools=TOOLS)
    for character in '<tool_call>{"name": "run", "arguments": {"text": "' + "</tool_call>" * 50:
        parser.feed([ord(character)])
    assert len(tried) == 50
    for character in '"}}</tool_call>':
        parser.feed([ord(character)])
    assert len(tried) == 51
    assert calls(parser.finish()) == [("run", {"text": "</tool_call>" * 50})]


def test_a_template_shows_its_family(renderers):
    for name, family in FAMILIES.items():
        assert call_form("auto", family.template).name == family.form
        assert (thinking("auto", family.template) is None) == (family.thinks is None)
        assert mismatches(family.form, "auto", family.template) == {}
        assert renderers[name].parse([]) in ({"role": "assistant", "content": ""}, {"role": "assistant", "content": "", "reasoning_content": ""})  # fmt: skip
    assert call_form("auto", CHATML).name == "hermes"
    assert call_form("auto", "{{ tools }}") is None


def test_every_name_means_one_form():
    names = [name for form in FORMS for name in (form.name, *form.aliases)]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[a-z0-9_-]+", name) for name in FORM_NAMES)
    with pytest.raises(UsageError, match="'glm46' is unknown; there are auto, deepseek_v3"):
        call_form("glm46", "")
    with pytest.raises(UsageError, match="'thunk' is unknown"):
        thinking("thunk", "")


def test_a_name_that_does_not_fit_the_template_is_found():
    found = mismatches("hermes", "mistral", FAMILIES["glm"].template)
    assert found == {
        "tool_parser": "hermes is not what the chat template shows: glm",
        "reasoning_parser": "mistral is not what the chat template shows: no [/THINK]",
    }
    assert mismatches("hermes", "none", CHATML) == {}


def test_channels_are_refused_in_words(tmp_path):
    write_tokenizer(tmp_path)
    with pytest.raises(UsageError, match=r"channels \(gpt-oss\)"):
        Renderer(tmp_path, CHATML + "<|start|>assistant<|channel|>final")
