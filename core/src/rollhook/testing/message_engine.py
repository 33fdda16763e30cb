"""The contract of engines that take messages: inherit `MessageEngineContract` and give it a server."""

from __future__ import annotations

import asyncio

import pytest

from rollhook.engine.base import SamplingParams
from rollhook.engine.messages import Completion, MessageEngine, MessageRequest
from rollhook.errors import EngineError
from rollhook.messages import Message, message
from rollhook.testing.contract import Contract

USER: list[Message] = [message("system", "Be brief."), message("user", "Say hello.")]
CALLED: list[Message] = [
    *USER,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "call_0", "content": "hello"},
]
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


class MessageEngineContract(Contract):
    """What every engine that takes messages must do. A suite gives the fixtures.

    `engine` is one that is not started, of a server that runs; `absent` one whose server does not.
    """

    patience = 60.0
    reply_tokens = 64

    @pytest.fixture
    def engine(self) -> MessageEngine:
        """Return an engine that is not started, of a server that runs."""
        raise NotImplementedError("give the contract a fixture engine")

    @pytest.fixture
    def absent(self) -> MessageEngine:
        """Return an engine whose server does not run."""
        raise NotImplementedError("give the contract a fixture absent")

    async def test_it_gives_no_tokens_and_takes_requests(self, engine: MessageEngine) -> None:
        assert not engine.gives_tokens
        assert engine.limits.max_concurrent >= 1

    async def test_stop_is_safe_before_start_and_twice(self, engine: MessageEngine) -> None:
        await engine.stop()
        await engine.stop()

    async def test_a_start_without_a_server_fails_in_words(self, absent: MessageEngine) -> None:
        try:
            with pytest.raises(EngineError, match=r"\w"):
                await asyncio.wait_for(absent.start(), self.patience)
        finally:
            await absent.stop()

    async def test_a_conversation_is_answered(self, engine: MessageEngine) -> None:
        completion = await self._asked(engine, USER)
        assert completion.message["role"] == "assistant"
        assert isinstance(completion.message["content"], str)
        assert completion.finish_reason in ("stop", "length")
        if completion.usage is not None:
            assert completion.usage.prompt > 0
            assert 0 <= completion.usage.completion <= self.reply_tokens

    async def test_results_of_tools_are_taken(self, engine: MessageEngine) -> None:
        completion = await self._asked(engine, CALLED)
        assert completion.message["content"] or completion.message.get("tool_calls")

    async def test_a_cancelled_request_ends_and_the_engine_answers_on(self, engine: MessageEngine) -> None:
        await engine.start()
        try:
            cut = asyncio.ensure_future(engine.complete(self._request(USER)))
            await asyncio.sleep(0)
            if cut.cancel():  # unless it was answered at once
                await asyncio.wait({cut}, timeout=self.patience)
                assert cut.cancelled()
            many = await asyncio.gather(*(engine.complete(self._request(USER)) for _ in range(4)))
            assert len(many) == 4
        finally:
            await engine.stop()

    def _request(self, messages: list[Message]) -> MessageRequest:
        sampling = SamplingParams(temperature=0.0, max_new_tokens=self.reply_tokens)
        tools = [LOOK] if messages is CALLED else []
        return MessageRequest(messages, tools, sampling)

    async def _asked(self, engine: MessageEngine, messages: list[Message]) -> Completion:
        await engine.start()
        try:
            return await asyncio.wait_for(engine.complete(self._request(messages)), self.patience)
        finally:
            await engine.stop()
