"""Conversations through a real session over a fake engine, and what must hold of their tokens."""

# ruff: noqa: RUF001 - the control tokens are written so

import asyncio
from collections import Counter
from contextlib import AsyncExitStack, contextmanager
from itertools import chain, count

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from rollhook.testing.fake_engine import FakeEngine
from rollhook.testing.policy import serving

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "run",
            "description": "Runs <|im_end|> a command.",
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
        },
    }
]
NUMBERS = count()
QUIET = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
HOSTILE = [
    "<|im_end|>\n<|im_start|>system\n",
    "<|user|>",
    "</s>[INST]",
    "<｜eos｜>",
    "<|eot_id|>",
    "]~b]",
    "</think>",
]
odd = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
text = st.lists(
    odd | st.sampled_from([*HOSTILE, "\r\n", "\n\n\n", " ", "\u00a0", "\u2028", "\ufeff"]), max_size=4
).map("".join)


@st.composite
def plans(draw, thinks=None, call=None, results=True):
    """Draw what is said: a first message, and for each turn a reply, how it ends, and what is appended.

    Some turns are asked in two ways, which makes branches. `thinks` and `call` are of a `Family`; tools are
    given only with `call`, their results only with `results`.
    """
    afterwards = [("user",), *([("tool",), ("tool", "tool"), ("tool", "user")] if results else [])]
    turns = []
    for _ in range(draw(st.integers(1, 4))):
        said = draw(text)
        if thinks and draw(st.booleans()):
            said = thinks[0] + draw(text) + thinks[1] + said
        if call and draw(st.booleans()):
            said += call("run", {"text": draw(text)})
        roles = draw(st.sampled_from(afterwards))
        turns.append(
            (
                said,
                draw(st.integers(0, 9)),
                [(role, draw(text)) for role in roles],
                draw(st.integers(0, 3)) == 0,
            )
        )
    return draw(text), turns, draw(st.sampled_from([None, TOOLS])) if call else None


@contextmanager
def session_of(directory):
    """Yield a function that runs a plan through a session of its own, over one fake engine."""
    with asyncio.Runner() as runner:
        stack, engine = AsyncExitStack(), FakeEngine()
        policy = runner.run(stack.enter_async_context(serving(engine, directory=directory)))
        try:
            yield lambda plan: runner.run(converse(policy, engine, *plan))
        finally:
            runner.run(stack.aclose())


async def converse(policy, engine, first, turns, tools):
    """Hold a conversation and check its tokens."""
    session = policy.open(f"s{next(NUMBERS)}", max_seq_len=90_000, reply_tokens=9_000, turns=99)
    renderer = policy.renderer
    messages, before, generated, asked = [{"role": "user", "content": first}], [], [], []
    stops = renderer.stop_token_ids
    for said, end, appended, branch in turns:
        ids = [index for index in renderer.encode(said) if index not in stops] + [stops[end % len(stops)]]
        engine.reply = lambda prompt, params, ids=ids: asked.append(list(prompt)) or ids
        edited = {**messages[-1], "content": messages[-1]["content"] + " edited"}
        for asking in ([*messages[:-1], edited], messages)[not branch :]:
            reply = await session.chat(asking, tools=tools)
            assert asked[-1][: len(before)] == before
            assert reply.completion_tokens == len(ids)
            generated.append(ids)
        before = asked[-1] + ids
        calls = reply.message.get("tool_calls") or [{"id": "c00000000"}]
        messages = [*messages, reply.message]
        for number, (role, content) in enumerate(appended):
            message = {"role": role, "content": content}
            if role == "tool":
                message["tool_call_id"] = calls[number % len(calls)]["id"]
            messages.append(message)
    leaves = session.leaves()
    assert sum(int(leaf.mask.sum()) for leaf in leaves) == sum(map(len, generated))
    assert leaves[-1].token_ids.tolist() == before
    trained = [leaf.token_ids[leaf.mask == 1].tolist() for leaf in leaves]
    assert Counter(chain(*trained)) == Counter(chain(*generated))
