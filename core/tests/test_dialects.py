"""What the dialects make of messages: a reply that comes back is the reply that went out."""

import json

from hypothesis import given
from hypothesis import strategies as st

from rollhook.agent import Reply
from rollhook.engine.base import SamplingParams
from rollhook.reply.parser import Delta
from rollhook.session.anthropic_messages import AnthropicMessages
from rollhook.session.chat_completions import ChatCompletions
from rollhook.session.dialect import Left
from rollhook.session.tree import message_key

USER = {"role": "user", "content": "go"}
text = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
value = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(text, value, max_size=3).map(json.dumps)
call = st.fixed_dictionaries(
    {
        "id": st.text("abc123", min_size=1, max_size=9),
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": text.filter(bool), "arguments": arguments}),
    }
)
reply = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": text},
    optional={"reasoning_content": text, "tool_calls": st.lists(call, min_size=1, max_size=2)},
)


def wire(body):
    """Send a body as JSON."""
    return json.loads(json.dumps(body))


def request_of(dialect, *messages):
    return dialect.request(wire({"messages": messages, "max_tokens": 5}), SamplingParams())


def body_of(dialect, message, reason="stop"):
    request = request_of(dialect, USER)
    return wire(dialect.reply(request, Reply(message, reason, 7, 3, 90, 2), Left(4, 90)))


@given(reply)
def test_openais_reply_comes_back_as_it_went(message):
    dialect = ChatCompletions()
    body = body_of(dialect, message)
    back = request_of(dialect, USER, body["choices"][0]["message"], USER).messages[1]
    assert message_key(back) == message_key(message)


@given(reply)
def test_anthropics_reply_comes_back_as_it_went(message):
    dialect = AnthropicMessages()
    body = body_of(dialect, message)
    back = request_of(dialect, USER, {"role": "assistant", "content": body["content"]}, USER).messages[1]
    assert message_key(back) == message_key(message)


def events_of(dialect, message, reason="stop"):
    """Return the data of the events of a streamed reply whose text came in two pieces."""
    events = dialect.events(request_of(dialect, USER))
    said, thought = message.get("content") or "", message.get("reasoning_content") or ""
    raw = [*events.begin(), *events.delta(Delta(thought, "")), *events.delta(Delta("", said[:3]))]
    raw += [*events.delta(Delta("", said[3:])), *events.end(Reply(message, reason, 7, 3, 90), Left(4, 90))]
    lines = [line for event in raw for line in event.decode().split("\n") if line.startswith("data: {")]
    return [json.loads(line[6:]) for line in lines]


@given(reply)
def test_anthropics_events_build_the_blocks_of_the_whole_reply(message):
    dialect = AnthropicMessages()
    blocks = []
    for event in events_of(dialect, message):
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            for key in ("thinking", "text", "signature"):
                if key in delta:
                    block[key] += delta[key]
            block["json"] += delta.get("partial_json", "")
    for block in blocks:
        written = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(written)
    assert blocks == body_of(dialect, message)["content"]


@given(reply)
def test_openais_chunks_build_the_whole_message(message):
    dialect = ChatCompletions()
    built = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in events_of(dialect, message):
        delta = chunk["choices"][0]["delta"]
        built["content"] += delta.get("content", "")
        built["reasoning_content"] += delta.get("reasoning_content", "")
        for each in delta.get("tool_calls", ()):
            assert each.pop("index") == len(built["tool_calls"])
            built["tool_calls"].append(each)
    assert message_key({"role": "assistant", **built}) == message_key(message)


def test_arguments_that_are_no_object_are_wrapped_for_anthropic():
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": given}}
        for given in ("[1]", "{broken", '"\\ud800"', "")
    ]
    body = body_of(AnthropicMessages(), {"role": "assistant", "content": "", "tool_calls": calls})
    assert [block["input"] for block in body["content"]] == [
        {"arguments": [1]},
        {"arguments": "{broken"},
        {"arguments": '"\\ud800"'},
        {},
    ]


def test_tool_results_are_messages_of_their_own_in_their_order():
    blocks = [
        {"type": "text", "text": "a"},
        {"type": "tool_result", "tool_use_id": "1", "content": "one"},
        {"type": "tool_result", "tool_use_id": "2"},
        {"type": "text", "text": "b"},
        {"type": "text", "text": "c"},
    ]
    assert request_of(AnthropicMessages(), {"role": "user", "content": blocks}).messages == [
        {"role": "user", "content": "a"},
        {"role": "tool", "content": "one", "tool_call_id": "1"},
        {"role": "tool", "content": "", "tool_call_id": "2"},
        {"role": "user", "content": "bc"},
    ]


def test_tools_are_the_same_in_both_dialects():
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    openai = {"type": "function", "function": {"name": "f", "description": "does", "parameters": schema}}
    anthropic = {"name": "f", "description": "does", "input_schema": schema}
    asked = [
        dialect.request(wire({"messages": [USER], "tools": [tool]}), SamplingParams()).tools
        for dialect, tool in ((ChatCompletions(), openai), (AnthropicMessages(), anthropic))
    ]
    assert asked == [[openai], [openai]]
    assert json.dumps(asked[0]) == json.dumps(asked[1])
