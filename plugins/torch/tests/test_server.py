"""The endpoints: SGLang's shapes out, sentences for what is wrong."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from rollhook.engine.generation import parse_generation
from rollhook_torch.server import Server, _parse, build

PROMPT = [5, 6, 7, 8]


@pytest.fixture
async def server(model_dir: Path) -> AsyncIterator[Server]:
    arguments = ["--model", str(model_dir), "--port", "1", "--weight-version", "4", "--device", "cpu"]
    server = build(vars(_parse(arguments)))
    yield server
    server.decoder.stop()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[TestClient[Any, Any]]:
    async with TestClient(TestServer(server.app())) as client:
        yield client


async def post(client: TestClient[Any, Any], path: str, body: Any) -> tuple[int, Any]:
    async with client.post(path, json=body) as response:
        return response.status, await response.json()


async def get(client: TestClient[Any, Any], path: str) -> tuple[int, str]:
    async with client.get(path) as response:
        return response.status, await response.text()


async def test_an_answer_has_sglangs_shape(client: TestClient[Any, Any]) -> None:
    body = {"rid": "a", "input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3, "sampling_seed": 1}}
    status, answer = await post(client, "/generate", {**body, "return_logprob": True})
    assert status == 200
    meta = answer["meta_info"]
    ids = [row[1] for row in meta["output_token_logprobs"]]
    assert ids == answer["output_ids"]
    assert meta["id"] == "a"
    assert meta["prompt_tokens"] == 4
    assert meta["completion_tokens"] == len(ids) == 3
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert meta["weight_version"] == "4"
    assert meta["weight_versions"] == ["4"] * 3
    assert 0 <= meta["queue_time"] <= meta["e2e_latency"]
    assert meta["cached_tokens"] == 0
    assert parse_generation(answer).versions == [4, 4, 4]
    _, plain = await post(client, "/generate", body)
    assert "output_token_logprobs" not in plain["meta_info"]
    assert plain["output_ids"] == ids


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, "input_ids is missing"),
        ({"text": "hello"}, "takes token ids, not text"),
        ({"input_ids": []}, "at least one integer"),
        ({"input_ids": "5 6"}, "one list of at least one integer"),
        ({"input_ids": [[5], [6]]}, "one list of at least one integer"),
        ({"input_ids": [5, True]}, "one list of at least one integer"),
        ({"input_ids": [5, 10**9]}, "ids outside 0 to"),
        ({"input_ids": [-1]}, "ids outside 0 to"),
        ({"input_ids": [5] * 256}, "256 tokens, the model's context 256"),
        ({"input_ids": [5] * 100_000}, "100000 tokens"),
        ({"input_ids": PROMPT, "extra_key": ["a"]}, "extra_key must be a string"),
        ({"input_ids": PROMPT, "sampling_params": [1]}, "sampling_params must be an object"),
        ({"input_ids": PROMPT, "sampling_params": {"temperature": -1}}, "temperature must be at least 0"),
        ({"input_ids": PROMPT, "sampling_params": {"temperature": "hot"}}, "temperature must be at least 0"),
        ({"input_ids": PROMPT, "sampling_params": {"temperature": float("nan")}}, "at least 0, not nan"),
        (
            {"input_ids": PROMPT, "sampling_params": {"temperature": 10**400}},
            "temperature must be at least 0",
        ),
        ({"input_ids": PROMPT, "sampling_params": {"top_p": 0}}, "top_p must be above 0"),
        ({"input_ids": PROMPT, "sampling_params": {"top_k": 0}}, "top_k must be -1"),
        (
            {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 0}},
            "max_new_tokens must be at least 1",
        ),
        (
            {"input_ids": PROMPT, "sampling_params": {"stop_token_ids": ["a"]}},
            "stop_token_ids must be a list",
        ),
        (
            {"input_ids": PROMPT, "sampling_params": {"sampling_seed": "a"}},
            "sampling_seed must be an integer",
        ),
        ({"input_ids": PROMPT, "sampling_params": {"stop": ["\n"]}}, "stop = .* is not supported"),
        ({"input_ids": PROMPT, "sampling_params": {"min_p": 0.1}}, "min_p = 0.1 is not supported"),
        ({"input_ids": PROMPT, "sampling_params": {"mirostat": 2}}, "mirostat = 2 is not supported"),
    ],
)
async def test_a_malformed_request_is_answered_with_a_sentence(
    client: TestClient[Any, Any], body: dict[str, Any], reason: str
) -> None:
    status, answer = await post(client, "/generate", body)
    assert status == 400
    assert answer["success"] is False
    assert __import__("re").search(reason, answer["error"]["message"])
    assert (await get(client, "/health"))[0] == 200


async def events(client: TestClient[Any, Any], body: Any) -> list[Any]:
    async with client.post("/generate", json={**body, "stream": True}) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        *events, end = (await response.text()).split("\n\n")
    assert end == ""
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def test_a_stream_tells_all_so_far_until_the_whole_answer(
    client: TestClient[Any, Any], server: Server
) -> None:
    params = {"max_new_tokens": 30, "sampling_seed": 1}
    body = {"rid": "a", "input_ids": PROMPT, "sampling_params": params, "return_logprob": True}
    _, whole = await post(client, "/generate", body)
    said = await events(client, body)
    assert len(said) > 1
    for event in said:
        meta, count = event["meta_info"], len(event["output_ids"])
        assert event["output_ids"] == whole["output_ids"][:count]
        assert [row[1] for row in meta["output_token_logprobs"]] == event["output_ids"]
        assert meta["completion_tokens"] == len(meta["weight_versions"]) == count
        assert (meta["finish_reason"] is None) == (event is not said[-1])
    assert parse_generation(said[-1]).token_ids == whole["output_ids"]
    assert said[-1]["meta_info"]["cached_tokens"] == 3


async def test_a_stream_that_fails_says_so(client: TestClient[Any, Any], server: Server) -> None:
    for parameter in server.decoder.model.parameters():
        parameter.data.fill_(float("nan"))
    said = await events(client, {"input_ids": PROMPT, "return_logprob": True})
    assert "give probabilities that are no numbers" in said[-1]["error"]["message"]
    async with client.post("/generate", json={"stream": True}) as response:
        assert response.status == 400


async def test_a_reader_that_goes_away_frees_its_place(model_dir: Path) -> None:
    arguments = ["--model", str(model_dir), "--port", "1", "--device", "cpu", "--context-length", "100000"]
    server = build(vars(_parse(arguments)))
    body = {"input_ids": PROMPT, "stream": True, "sampling_params": {"max_new_tokens": 90_000}}
    body["sampling_params"]["ignore_eos"] = True
    try:
        async with TestClient(TestServer(server.app())) as client:
            async with client.post("/generate", json=body) as response:
                await response.content.readuntil(b"\n\n")
                response.close()
            while server.decoder.running:
                await asyncio.sleep(0.01)
    finally:
        server.decoder.stop()


@pytest.mark.parametrize("raw", ["{", "[1]", '"x"', "[" * 100_000], ids=["torn", "list", "text", "deep"])
async def test_a_body_that_is_no_object_is_refused(client: TestClient[Any, Any], raw: str) -> None:
    async with client.post("/generate", data=raw) as response:
        assert response.status == 400
        assert "JSON" in (await response.json())["message"]


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e300])
async def test_an_extreme_temperature_still_gives_numbers(
    client: TestClient[Any, Any], temperature: float
) -> None:
    params = {"max_new_tokens": 2, "temperature": temperature}
    body = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True}
    status, answer = await post(client, "/generate", body)
    assert status == 200
    parse_generation(answer)


async def test_weights_that_are_no_numbers_are_said_in_words(
    client: TestClient[Any, Any], server: Server
) -> None:
    for parameter in server.decoder.model.parameters():
        parameter.data.fill_(float("nan"))
    status, answer = await post(client, "/generate", {"input_ids": PROMPT})
    assert status == 500
    assert "give probabilities that are no numbers" in answer["message"]
    assert (await get(client, "/health"))[0] == 200


async def test_neutral_parameters_of_sglang_are_taken(client: TestClient[Any, Any]) -> None:
    params = {
        "min_p": 0.0,
        "stop": None,
        "n": 1,
        "repetition_penalty": 1.0,
        "no_stop_trim": True,
        "max_new_tokens": 1,
    }
    status, _ = await post(client, "/generate", {"input_ids": PROMPT, "sampling_params": params})
    assert status == 200


async def test_control_endpoints_answer_as_sglangs_do(
    client: TestClient[Any, Any], make_model: Any, tmp_path: Path
) -> None:
    assert (await get(client, "/health_generate"))[0] == 200
    for path in ("/server_info", "/get_server_info"):
        status, text = await get(client, path)
        assert status == 200
        assert '"dp_size":1' in text
    assert '"weight_version":"4"' in (await get(client, "/model_info"))[1]
    assert await get(client, "/get_weight_version") == (200, '{"weight_version":"4"}')
    status, answer = await post(
        client, "/update_weights_from_disk", {"model_path": str(tmp_path), "weight_version": "5"}
    )
    assert (status, answer["success"]) == (400, False)
    assert (await post(client, "/update_weights_from_disk", {}))[0] == 400
    body = {"model_path": str(make_model(seed=3)), "weight_version": "5"}
    assert await post(client, "/update_weights_from_disk", body) == (
        200,
        {"success": True, "message": "weights updated", "num_paused_requests": 0},
    )
    assert await get(client, "/get_weight_version") == (200, '{"weight_version":"5"}')
    assert (await post(client, "/pause_generation", {"mode": "nap"}))[0] == 400
    assert (await post(client, "/pause_generation", {"mode": "in_place"}))[0] == 200
    assert (await get(client, "/health_generate"))[0] == 503
    waiting = asyncio.ensure_future(post(client, "/generate", {"rid": "w1", "input_ids": PROMPT}))
    while not client.server.app.router.routes() or not (await get(client, "/metrics"))[1].count(
        "num_queue_reqs 1"
    ):
        await asyncio.sleep(0.01)
    assert (await post(client, "/flush_cache", {}))[0] == 400
    assert (await post(client, "/abort_request", {}))[0] == 400
    assert (await post(client, "/abort_request", {"rid": "w", "prefix": True}))[1]["aborted"] == 1
    status, answer = await waiting
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await post(client, "/abort_request", {"abort_all": True}))[1]["aborted"] == 0
    assert (await post(client, "/continue_generation", {}))[0] == 200
    assert (await post(client, "/flush_cache", {}))[0] == 200
    metrics = (await get(client, "/metrics"))[1]
    assert "# TYPE sglang:generation_tokens_total counter" in metrics


async def test_a_caller_that_goes_away_frees_its_place(model_dir: Path) -> None:
    server = build(vars(_parse(["--model", str(model_dir), "--port", "1", "--device", "cpu"])))
    try:
        async with TestClient(TestServer(server.app(), handler_cancellation=True)) as client:
            server.decoder.pause("in_place").result(10)
            task = asyncio.ensure_future(post(client, "/generate", {"input_ids": PROMPT}))
            while not server.decoder.waiting:
                await asyncio.sleep(0.01)
            task.cancel()
            while server.decoder.waiting:
                await asyncio.sleep(0.01)
    finally:
        server.decoder.stop()


async def test_a_dead_decode_thread_is_unhealthy(
    client: TestClient[Any, Any], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**_: object) -> None:
        raise RuntimeError("no memory left")

    monkeypatch.setattr("threading.excepthook", lambda args: None)
    monkeypatch.setattr(server.decoder.model, "forward", broken)
    status, answer = await post(client, "/generate", {"input_ids": PROMPT})
    assert status == 503
    assert "no memory left" in answer["message"]
    assert (await get(client, "/health"))[0] == 503
