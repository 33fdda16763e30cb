"""Bodies, replies and errors of chat completions, without a network."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollhook.engine.base import SamplingParams
from rollhook.engine.messages import MessageRequest, Usage
from rollhook.messages import message
from rollhook_openai import OpenAIConfig, wire

COUNTED = {"prompt_tokens": 3, "completion_tokens": 2}
TOOL = {"type": "function", "function": {"name": "look"}}


def config(**keys):
    return OpenAIConfig(**({"base_url": "http://here", "model": "m"} | keys))


def body(request=None, **keys):
    request = request or MessageRequest([message("user", "go")], [], SamplingParams(max_new_tokens=9))
    return json.loads(wire.chat_body(request, config(**keys)))


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://here:8000", "http://here:8000/v1"),
        ("http://here:8000/", "http://here:8000/v1"),
        ("http://here:8000/v1", "http://here:8000/v1"),
        ("http://here:8000/v1//", "http://here:8000/v1"),
        ("http://here/v1/chat/completions", "http://here/v1"),
        ("https://openrouter.ai/api/v1/", "https://openrouter.ai/api/v1"),
        ("https://api.z.ai/api/paas/v4/", "https://api.z.ai/api/paas/v4"),
        (
            "https://generativelanguage.googleapis.com/v1beta/openai",
            "https://generativelanguage.googleapis.com/v1beta/openai",
        ),
        ("http://here/sessions/s1", "http://here/sessions/s1/v1"),
    ],
)
def test_a_base_url_may_have_a_version_or_not(given, url):
    assert wire.base_url(given) == url


@pytest.mark.parametrize(
    "url",
    [
        "here:8000",
        "ftp://here",
        "http://",
        "http://here:x",
        "http://u:sentinel@here",
        "http://h?k=sentinel",
        "u:sentinel@here/v1",
        "http:/u:sentinel@here",
    ],
)
def test_what_is_no_base_url_is_refused_and_a_secret_in_it_not_repeated(url):
    with pytest.raises(ValidationError) as caught:
        config(base_url=url)
    assert "sentinel" not in caught.value.errors(include_url=False)[0]["msg"]


def test_a_body_holds_what_was_asked_and_no_more():
    assert body() == {
        "model": "m",
        "messages": [{"role": "user", "content": "go"}],
        "temperature": 1.0,
        "top_p": 1.0,
        "max_tokens": 9,
    }
    sampling = SamplingParams(0.0, 0.9, 20, 5, (), 3)
    full = body(MessageRequest([message("user", "go")], [TOOL], sampling), limit_key="max_completion_tokens")
    assert (full["top_k"], full["seed"], full["max_completion_tokens"]) == (20, 3, 5)
    assert full["tools"] == [TOOL]
    assert "max_tokens" not in full


def test_extra_keys_are_added_and_null_leaves_one_out():
    full = body(extra_body={"top_p": None, "reasoning_effort": "low", "temperature": 0.1})
    assert full["temperature"] == 0.1
    assert full["reasoning_effort"] == "low"
    assert "top_p" not in full
    for key in ("stream", "messages", "n"):
        with pytest.raises(ValidationError):
            config(extra_body={key: 1})


def test_reasoning_is_sent_back_only_where_asked_and_unknown_keys_never():
    said = {"role": "assistant", "content": "a", "reasoning_content": "why", "odd": 1}
    request = MessageRequest([message("user", "go"), said, message("user", "on")], [], SamplingParams())
    assert body(request)["messages"][1] == {"role": "assistant", "content": "a"}
    sent = body(request, send_reasoning=True)["messages"][1]
    assert sent == {"role": "assistant", "content": "a", "reasoning_content": "why"}


def reply(said, finish="stop", **more):
    return {"choices": [{"message": said, "finish_reason": finish}], **more}


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"content": "a"}, "a"),
        ({"content": None}, ""),
        ({}, ""),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab"),
        ({"content": None, "refusal": "No."}, "No."),
    ],
)
def test_a_reply_s_text(said, text):
    assert wire.parse_completion(reply(said)).message == {"role": "assistant", "content": text}


def test_tool_calls_come_in_our_form_whatever_the_endpoint_s():
    calls = [
        {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"function": {"name": "g", "arguments": {"a": 1}}, "index": 1},
        {"function": {"name": "h"}},
    ]
    found = wire.parse_completion(reply({"content": None, "tool_calls": calls}, "tool_calls"))
    assert found.finish_reason == "stop"
    assert found.message["tool_calls"] == [
        {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"id": "call_1", "type": "function", "function": {"name": "g", "arguments": '{"a": 1}'}},
        {"id": "call_2", "type": "function", "function": {"name": "h", "arguments": "{}"}},
    ]


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (COUNTED, Usage(3, 2)),
        (COUNTED | {"prompt_tokens_details": {"cached_tokens": 1}}, Usage(3, 2, 1)),
        (COUNTED | {"prompt_tokens_details": None}, Usage(3, 2)),
        (None, None),
        ({}, None),
        ({"prompt_tokens": -1, "completion_tokens": 2}, None),
        ({"prompt_tokens": "3", "completion_tokens": 2}, None),
        ("many", None),
    ],
)  # fmt: skip
def test_usage_is_taken_only_where_it_counts(usage, expected):
    assert wire.parse_completion(reply({"content": "a"}, usage=usage)).usage == expected


def test_reasoning_has_two_names_and_only_length_is_length():
    for key in ("reasoning_content", "reasoning"):
        found = wire.parse_completion(reply({"content": "a", key: "why"}, "length"))
        assert (found.message["reasoning_content"], found.finish_reason) == ("why", "length")
    for finish in ("content_filter", None, "eos"):
        assert wire.parse_completion(reply({"content": "a"}, finish)).finish_reason == "stop"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "choices",
                    "message",
                    "content",
                    "tool_calls",
                    "function",
                    "usage",
                    "prompt_tokens",
                    "finish_reason",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(values)
def test_a_malformed_reply_is_found_out(data):
    try:
        completion = wire.parse_completion(data)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return
    assert isinstance(completion.message["content"], str)


@given(st.binary(max_size=60) | values.map(lambda data: json.dumps(data).encode()))
def test_any_error_body_gives_a_reason(raw):
    code, reason = wire.error_parts(raw)
    assert isinstance(code, str)
    assert isinstance(reason, str)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("context_length_exceeded", "x"),
        ("", "This model's maximum context length is 4096 tokens. However, you requested 8192 tokens."),
        ("", "The input (9000 tokens) is longer than the model's context length (4096 tokens)."),
        ("", "the request exceeds the available context size, try increasing it"),
        ("", "prompt is too long: 200001 tokens > 200000 maximum"),
    ],
)
def test_a_full_context_has_many_names(code, reason):
    assert wire.context_is_full(code, reason)


def test_another_refusal_is_no_full_context():
    assert not wire.context_is_full("", "temperature must be at most 2")


NOW = 1_700_000_000.0


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"Retry-After": "2"}, 2.0),
        ({"Retry-After": " 0.5 "}, 0.5),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "-3"}, None),
        ({"Retry-After": "1.2.3"}, None),
        ({"Retry-After": "Tue, 14 Nov 2023 22:13:30 GMT"}, 10.0),
        ({"Retry-After": "Tue, 14 Nov 2023 22:13:00 GMT"}, 0.0),
        ({"retry-after-ms": "1500", "Retry-After": "9"}, 1.5),
        ({"retry-after-ms": "nan"}, None),
        ({"retry-after-ms": "inf"}, None),
    ],
)
def test_retry_after_is_seconds_or_a_date(headers, seconds):
    assert wire.retry_after(headers, lambda: NOW) == seconds


def test_lists_of_models():
    rows = {"data": [{"id": "a", "max_model_len": 10}, {"id": "b", "context_length": "x"}, "odd", {}]}
    models = wire.models_of(rows)
    assert list(models) == ["a", "b"]
    assert [wire.context_length(row) for row in models.values()] == [10, None]
    assert wire.models_of({"object": "list"}) is None
    assert wire.models_of("text") is None
