"""The official OpenAI and Anthropic clients drive sessions, unmodified but for their base URL."""

import asyncio
import json
from contextlib import asynccontextmanager
from types import SimpleNamespace

import anthropic
import numpy as np
import openai
import pytest

from rollhook.engine.messages import Completion, MessageEngine, RequestLimits, Usage
from rollhook.session import MessagePolicy, Renderer
from rollhook.session.gateway import Gateway
from rollhook.testing.environment import build_context
from rollhook.testing.fake_engine import FakeEngine
from rollhook.testing.policy import says, serving
from rollhook.testing.tokenizer import write_tokenizer

TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls -l", "n": 1.0}}\n</tool_call>'
REPLIES = [
    f"<think>\nlet me see\n</think>\n\nI look 日本 \U0001f980.\n{CALL}",
    "<think>\nthat is all\n</think>\n\ndone",
]
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}, "n": {"type": "number"}}}
OPENAI_TOOLS = [
    {"type": "function", "function": {"name": "shell", "description": "runs", "parameters": SCHEMA}}
]
ANTHROPIC_TOOLS = [{"name": "shell", "description": "runs", "input_schema": SCHEMA}]
RESULT = "a\nb <|im_end|> c\n"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), template=TEMPLATE)


@asynccontextmanager
async def gateway_over(directory, *replies, engine=None, matcher="strict", **keys):
    """Serve a gateway over a fake engine that says these replies, with one session open."""
    engine = engine or FakeEngine(says(Renderer(directory), *replies))
    async with serving(engine, directory=directory) as policy:
        policy.matcher = matcher
        gateway = Gateway(policy, **keys)
        await gateway.start()
        try:
            session = policy.open("s", max_seq_len=20_000, reply_tokens=4000, turns=20, seed=1)
            url = f"{gateway.url}/sessions/{session.id}"
            yield SimpleNamespace(url=url, session=session, engine=engine, policy=policy, gateway=gateway)
        finally:
            await gateway.stop()


# -- one conversation with reasoning, a tool call and its result, in every way there is


def openai_conversation(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        chat = client.chat.completions
        history = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "look"}]
        first = chat.create(model="m", messages=history, tools=OPENAI_TOOLS)
        (choice,) = first.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look 日本 \U0001f980."
        assert choice.message.reasoning_content == "let me see"
        (call,) = choice.message.tool_calls
        assert json.loads(call.function.arguments) == {"command": "ls -l", "n": 1.0}
        history += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
        second = chat.create(model="m", messages=history, tools=OPENAI_TOOLS)
        assert second.choices[0].message.content == "done"
        assert second.usage.turns_left == second.rollhook["turns_left"] == 18
        return second.usage.tokens_left


async def openai_streamed(url):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        history = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "look"}]

        async def turn():
            said = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
            usage, left = None, None
            stream = await client.chat.completions.create(
                model="m",
                messages=history,
                tools=OPENAI_TOOLS,
                stream=True,
                stream_options={"include_usage": True},
            )
            async for chunk in stream:
                usage = chunk.usage or usage
                left = getattr(chunk, "rollhook", left)
                for choice in chunk.choices:
                    said["content"] += choice.delta.content or ""
                    said["reasoning_content"] += getattr(choice.delta, "reasoning_content", "")
                    said["tool_calls"] += [call.model_dump() for call in choice.delta.tool_calls or ()]
            assert left == {"turns_left": usage.turns_left, "tokens_left": usage.tokens_left}
            return said, usage

        first, _ = await turn()
        assert first["content"] == "I look 日本 \U0001f980."
        assert first["reasoning_content"] == "let me see"
        (call,) = first["tool_calls"]
        history += [first, {"role": "tool", "tool_call_id": call["id"], "content": RESULT}]
        second, usage = await turn()
        assert second["content"] == "done"
        return usage.tokens_left


def anthropic_conversation(url):
    with anthropic.Anthropic(base_url=url, api_key="any", max_retries=0) as client:
        history = [{"role": "user", "content": "look"}]

        def turn():
            asked = {"model": "m", "system": "be brief", "messages": history, "tools": ANTHROPIC_TOOLS}
            counted = client.messages.count_tokens(**asked).input_tokens
            reply = client.messages.create(max_tokens=4000, **asked)
            assert reply.usage.input_tokens + reply.usage.cache_read_input_tokens == counted
            return reply

        first = turn()
        assert first.stop_reason == "tool_use"
        thought, text, call = first.content
        assert thought.thinking == "let me see"
        assert text.text == "I look 日本 \U0001f980."
        assert (call.name, call.input) == ("shell", {"command": "ls -l", "n": 1.0})
        history += [{"role": "assistant", "content": first.content}, tool_result(call.id)]
        second = turn()
        assert second.stop_reason == "end_turn"
        assert second.content[-1].text == "done"
        assert second.usage.turns_left == 18
        return second.usage.tokens_left


async def anthropic_streamed(url):
    async with anthropic.AsyncAnthropic(base_url=url, api_key="any", max_retries=0) as client:
        history = [{"role": "user", "content": [{"type": "text", "text": "look"}]}]

        async def turn():
            async with client.messages.stream(
                model="m",
                max_tokens=4000,
                system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
                messages=history,
                tools=ANTHROPIC_TOOLS,
            ) as stream:
                events = [event async for event in stream]
                (usage,) = (event.usage for event in events if event.type == "message_delta")
                text = "".join(event.text for event in events if event.type == "text")
                return text, await stream.get_final_message(), usage

        text, first, _ = await turn()
        assert text == "I look 日本 \U0001f980."
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
        assert first.content[0].thinking == "let me see"
        assert first.stop_reason == "tool_use"
        history += [{"role": "assistant", "content": first.content}, tool_result(first.content[2].id)]
        text, second, usage = await turn()
        assert text == "done"
        assert second.usage.output_tokens > 0
        return usage.tokens_left


def tool_result(call_id):
    content = [{"type": "text", "text": RESULT}]
    return {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": call_id, "content": content, "is_error": False}],
    }


async def in_thread(converse, url):
    return await asyncio.to_thread(converse, url)


async def test_the_training_record_is_the_same_whichever_way_a_client_speaks(directory):
    """Invariant 2: tokens are exact."""
    records, left = [], set()
    for converse in (openai_conversation, openai_streamed, anthropic_conversation, anthropic_streamed):
        async with gateway_over(directory, *REPLIES) as served:
            if asyncio.iscoroutinefunction(converse):
                left.add(await converse(served.url))
            else:
                left.add(await in_thread(converse, served.url))
            (leaf,) = served.session.leaves()
            records.append((leaf, [body["input_ids"] for body in served.engine.requests]))
            assert served.session.tokens_left in left
    assert len(left) == 1
    (one, asked), *others = records
    assert one.mask.sum() == sum(len(Renderer(directory).encode(text)) + 1 for text in REPLIES)
    assert [m["role"] for m in one.messages] == ["system", "user", "assistant", "tool", "assistant"]
    for other, others_asked in others:
        assert others_asked == asked
        for name in ("token_ids", "mask", "logprobs", "spans"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name
        assert [m["content"] for m in other.messages] == [m["content"] for m in one.messages]


# -- token by token


async def test_text_comes_before_the_reply_is_whole(directory):
    async with gateway_over(directory, "one two") as served:
        served.engine.hold(after=3)
        openai_client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0)
        anthropic_client = anthropic.AsyncAnthropic(base_url=served.url, api_key="any", max_retries=0)
        async with openai_client, anthropic_client:
            chunks = await openai_client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "go"}], stream=True
            )
            said = ""
            async for chunk in chunks:
                said += chunk.choices[0].delta.content or ""
                if said == "one":
                    assert served.engine.running == 1
                    await served.engine.release()
            assert said == "one two"
            served.engine.hold(after=3)
            events = await anthropic_client.messages.create(
                model="m", max_tokens=100, messages=[{"role": "user", "content": "go"}], stream=True
            )
            said, kinds = "", []
            async for event in events:
                kinds.append(event.type)
                if event.type == "content_block_delta":
                    said += event.delta.text
                if said == "one" and served.engine.running:
                    await served.engine.release()
            assert said == "one two"
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


@pytest.mark.parametrize("cut", [1, 7, 30])
async def test_a_stream_goes_on_elsewhere_from_what_the_client_has_seen(directory, cut):
    renderer = Renderer(directory)
    text = "<think>\nwell, \U0001f980\n</think>\n\nall of 日本 is here"
    ids = [*renderer.encode(text), renderer.stop_token_ids[0]]
    start = len(renderer.first([{"role": "user", "content": "go"}]))
    engine = FakeEngine(lambda prompt, params: ids[len(prompt) - start :])
    engine.cut(cut)
    async with gateway_over(directory, engine=engine) as served:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client:
            thought = said = ""
            stream = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "go"}], stream=True
            )
            async for chunk in stream:
                thought += getattr(chunk.choices[0].delta, "reasoning_content", "")
                said += chunk.choices[0].delta.content or ""
        (leaf,) = served.session.leaves()
    assert (thought, said) == ("well, \U0001f980", "all of 日本 is here")
    first, second = engine.requests
    assert second["input_ids"] == first["input_ids"] + ids[:cut]
    assert second["sampling_params"]["max_new_tokens"] == first["sampling_params"]["max_new_tokens"] - cut
    assert leaf.token_ids[start:].tolist() == ids
    assert leaf.mask.sum() == len(ids)
    assert leaf.spans.tolist() == [[start, start + cut, 1, 1], [start + cut, start + len(ids), 1, 1]]


# -- budgets, errors, models


async def test_past_the_budget_both_clients_see_a_clean_length(directory):
    async with gateway_over(directory, "never said") as served:
        served.session.turns = 0
        user = [{"role": "user", "content": "go"}]
        openai_client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any")
        anthropic_client = anthropic.AsyncAnthropic(base_url=served.url, api_key="any")
        async with openai_client, anthropic_client:
            whole = await openai_client.chat.completions.with_raw_response.create(model="m", messages=user)
            assert whole.headers["X-Rollhook-Turns-Left"] == "0"
            assert whole.headers["X-Rollhook-Tokens-Left"] == "20000"
            (choice,) = whole.parse().choices
            assert (choice.finish_reason, choice.message.content) == ("length", "")
            assert whole.parse().usage.completion_tokens == 0
            chunks = await openai_client.chat.completions.create(model="m", messages=user, stream=True)
            assert [c.choices[0].finish_reason async for c in chunks] == [None, "length"]
            message = await anthropic_client.messages.create(model="m", max_tokens=9, messages=user)
            assert (message.stop_reason, message.content) == ("max_tokens", [])
            async with anthropic_client.messages.stream(model="m", max_tokens=9, messages=user) as stream:
                (ended,) = [event async for event in stream if event.type == "message_delta"]
                final = await stream.get_final_message()
            assert (final.stop_reason, final.content, ended.usage.turns_left) == ("max_tokens", [], 0)
        assert not served.engine.requests


async def test_errors_are_the_clients_own_exceptions_and_are_not_tried_again(directory):
    async with gateway_over(directory, "a") as served:
        openai_client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any")
        anthropic_client = anthropic.AsyncAnthropic(base_url=served.url, api_key="any")
        async with openai_client, anthropic_client:
            user = {"role": "user", "content": "go"}

            async def ask_openai(*messages, **more):
                return await openai_client.chat.completions.create(model="m", messages=messages, **more)

            async def ask_anthropic(*messages, **more):
                return await anthropic_client.messages.create(
                    model="m", messages=messages, **({"max_tokens": 100} | more)
                )

            with pytest.raises(openai.BadRequestError, match="n other than 1"):
                await ask_openai(user, n=2)
            with pytest.raises(anthropic.BadRequestError, match="stop_sequences other than"):
                await ask_anthropic(user, stop_sequences=["x"])
            cut = (await ask_openai(user, max_tokens=1)).choices[0].message
            with pytest.raises(openai.ConflictError, match="cut for length"):
                await ask_openai(user, cut, user)
            with pytest.raises(anthropic.ConflictError, match="cut for length") as caught:
                await ask_anthropic(user, {"role": "assistant", "content": cut.content}, user)
            assert caught.value.body["error"]["type"] == "invalid_request_error"
            await served.session.close()
            with pytest.raises(openai.NotFoundError, match="unknown or closed"):
                await ask_openai(user)
            with pytest.raises(anthropic.NotFoundError) as caught:
                await ask_anthropic(user)
            assert caught.value.body["error"]["type"] == "not_found_error"
        assert len(served.engine.requests) == 1


async def test_the_token_is_taken_where_each_client_puts_it(directory):
    async with gateway_over(directory, "a", token="s3cret") as served:
        user = [{"role": "user", "content": "go"}]
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="s3cret") as client:
            await client.chat.completions.create(model="m", messages=user)
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key="s3cret") as client:
            await client.messages.create(model="m", max_tokens=10, messages=user)
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(model="m", max_tokens=10, messages=user)


async def test_both_clients_can_list_the_models(directory):
    async with gateway_over(directory, "a") as served:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any") as client:
            assert [model.id async for model in client.models.list()] == ["policy"]
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key="any") as client:
            assert [model.id async for model in client.models.list()] == ["policy"]


# -- replies that come back without their reasoning


async def test_a_reply_without_its_reasoning_is_refused_in_words(directory):
    async with gateway_over(directory, *REPLIES) as served:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any") as client:
            history = [{"role": "user", "content": "look"}]
            first = await client.chat.completions.create(model="m", messages=history)
            thin = {"role": "assistant", "content": first.choices[0].message.content}
            with pytest.raises(openai.BadRequestError, match=r"gateway\.matcher=thin"):
                await client.chat.completions.create(model="m", messages=[*history, thin, *history])
        assert len(served.engine.requests) == 1


async def test_the_thin_matcher_takes_it_and_keeps_the_tokens(directory):
    async with gateway_over(directory, *REPLIES, matcher="thin") as served:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any") as client:
            history = [{"role": "user", "content": "look"}]
            first = await client.chat.completions.create(model="m", messages=history)
            thin = {"role": "assistant", "content": first.choices[0].message.content}
            await client.chat.completions.create(model="m", messages=[*history, thin, *history])
        (leaf,) = served.session.leaves()
    assert leaf.messages[1]["reasoning_content"] == "let me see"


class Endpoint(MessageEngine):
    """Says one thing."""

    limits = RequestLimits()

    async def start(self):
        pass

    async def complete(self, request):
        reply = {"role": "assistant", "content": "hi", "reasoning_content": "hm"}
        return Completion(reply, "stop", Usage(3, 2, 1))

    async def stop(self):
        pass


async def test_a_session_over_messages_speaks_the_same_dialects_and_streams_in_one_piece(directory):
    policy = MessagePolicy(Endpoint(None, build_context(directory)))
    gateway = Gateway(policy)
    await gateway.start()
    policy.open("s", max_seq_len=1000, reply_tokens=100, turns=3)
    user = [{"role": "user", "content": "go"}]
    async with (
        anthropic.AsyncAnthropic(base_url=f"{gateway.url}/sessions/s", api_key="any") as client,
        client.messages.stream(model="m", max_tokens=9, messages=user) as stream,
    ):
        final = await stream.get_final_message()
    await gateway.stop()
    assert [block.type for block in final.content] == ["thinking", "text"]
    usage = final.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (2, 1, 2)
