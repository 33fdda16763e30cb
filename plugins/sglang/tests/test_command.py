"""The command line, its profiles, and what a recipe is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from rollhook_sglang.command import Start, command
from rollhook_sglang.config import PROFILES, SGLangConfig
from rollhook_sglang.engine import SGLangEngine

START = Start(Path("/w/v000003"), 3, "127.0.0.1", 31000, 9)
ALWAYS = [
    *["--model-path", "/w/v000003", "--host", "127.0.0.1", "--port", "31000", "--weight-version", "3"],
    *["--random-seed", "9", "--skip-server-warmup", "--enable-metrics", "--incremental-streaming-output"],
]


def argv(version: str = "0.5.23", start: Start = START, **keys: object) -> list[str]:
    return command(SGLangConfig(**keys), version, start)


def after(arguments: list[str], option: str) -> str:
    return arguments[arguments.index(option) + 1]


def test_without_keys_there_is_what_is_always_given() -> None:
    assert argv() == [sys.executable, "-m", "sglang.launch_server", *ALWAYS]
    assert argv(python="/opt/sglang/bin/python")[:3] == [
        "/opt/sglang/bin/python",
        "-m",
        "sglang.launch_server",
    ]


def test_a_release_that_cannot_stream_increments_is_not_asked_to() -> None:
    assert argv("0.5.7") == [sys.executable, "-m", "sglang.launch_server", *ALWAYS[:-1]]


def test_each_key_is_an_option_and_free_arguments_come_last() -> None:
    keys = {"tp_size": 2, "mem_fraction_static": 0.8, "attention_backend": "fa3", "chunked_prefill_size": -1}
    found = argv(**keys, trust_remote_code=True, deterministic=True, extra_args=["--schedule-policy", "fcfs"])
    assert found[3 + len(ALWAYS) :] == [
        *["--tp-size", "2", "--mem-fraction-static", "0.8", "--chunked-prefill-size", "-1"],
        *["--attention-backend", "fa3", "--trust-remote-code", "--enable-deterministic-inference"],
        *["--schedule-policy", "fcfs"],
    ]


def test_the_balanced_profile_is_one_node_of_four_ranks_with_attention_each() -> None:
    found = argv("0.5.16", profile="balanced")
    assert found[3 + len(ALWAYS) :] == [
        *["--dp-size", "4", "--enable-dp-attention", "--tp-size", "4", "--ep-size", "4"],
        *["--mem-fraction-static", "0.85", "--max-running-requests", "256"],
        *["--chunked-prefill-size", "32768", "--cuda-graph-max-bs-decode", "32", "--page-size", "64"],
        *["--kv-cache-dtype", "fp8_e4m3", "--moe-a2a-backend", "deepep", "--watchdog-timeout", "3600"],
        *["--speculative-algorithm", "EAGLE", "--speculative-num-steps", "1"],
        *["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "2"],
    ]
    assert SGLangConfig(profile="balanced").gpus_needed == 4


def test_the_low_latency_profile_is_eight_gpus_without_ranks_that_draft_deeper() -> None:
    found = argv(profile="low-latency")
    assert not {"--dp-size", "--attn-dp-size", "--enable-dp-attention"} & set(found)
    assert (after(found, "--tp-size"), after(found, "--speculative-num-draft-tokens")) == ("8", "6")
    assert (after(found, "--max-running-requests"), after(found, "--chunked-prefill-size")) == (
        "512",
        "16384",
    )
    assert SGLangConfig(profile="low-latency", nnodes=2, host="node").gpus_needed == 8


@pytest.mark.parametrize("profile", PROFILES)
def test_a_key_that_is_given_wins_over_the_profile(profile: str) -> None:
    found = argv(profile=profile, mem_fraction_static=0.7, speculative="none")
    assert after(found, "--mem-fraction-static") == "0.7"
    assert not [argument for argument in found if argument.startswith("--speculative")]


@pytest.mark.parametrize(
    ("version", "graph", "sparse", "ranks"),
    [
        ("0.5.7", "--cuda-graph-max-bs", "--nsa-decode-backend", ["--dp-size", "2", "--enable-dp-attention"]),
        (
            "0.5.16",
            "--cuda-graph-max-bs-decode",
            "--dsa-decode-backend",
            ["--dp-size", "2", "--enable-dp-attention"],
        ),
        ("0.5.23", "--cuda-graph-max-bs-decode", "--dsa-decode-backend", ["--attn-dp-size", "2"]),
    ],
)
def test_options_have_the_names_of_the_release(
    version: str, graph: str, sparse: str, ranks: list[str]
) -> None:
    keys = {"cuda_graph_max_bs": 8, "nsa_decode_backend": "fa3", "tp_size": 2, "dp_size": 2}
    found = argv(version, **keys, dp_attention=True)
    assert (after(found, graph), after(found, sparse)) == ("8", "fa3")
    begin = 3 + len(ALWAYS) - (version == "0.5.7")  # which streams no increments
    assert found[begin:][: len(ranks)] == ranks


def test_ranks_without_shared_attention_are_replicas() -> None:
    assert argv(dp_size=2, tp_size=2)[3 + len(ALWAYS) :] == ["--dp-size", "2", "--tp-size", "2"]
    assert SGLangConfig(dp_size=2, tp_size=2, pp_size=2).gpus_needed == 8


def test_the_nodes_of_a_server_find_each_other_at_the_first() -> None:
    start = Start(Path("/w"), 1, "{host}", 4000, 9, node_rank=1, first="10.0.0.7:4100")
    found = argv(start=start, tp_size=16, nnodes=2, host="node")
    assert (after(found, "--nnodes"), after(found, "--node-rank")) == ("2", "1")
    assert (after(found, "--dist-init-addr"), after(found, "--host")) == ("10.0.0.7:4100", "{host}")


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"extra_args": ["--tp-size", "2"]}, "set engine.tp_size"),
        (
            {"extra_args": ["--tp=2", "--schedule-policy", "fcfs", "--api-key=sk-sentinel", "--port", "1"]},
            "--tp: set engine.tp_size; may not hold --api-key: what stands in a command line can be read by"
            " everyone; may not hold --port: set nothing",
        ),
        ({"extra_args": ["--tensor-parallel-size=2"]}, "set engine.tp_size"),
        ({"extra_args": ["--tp", "8"]}, "set engine.tp_size"),
        ({"extra_args": ["--ep=8"]}, "set engine.ep_size"),
        ({"extra_args": ["--api-k", "sk-sentinel"]}, "can be read by everyone"),
        ({"extra_args": ["--port=1"]}, "a free one is chosen"),
        ({"extra_args": ["--speculative-num-steps=1"]}, "set engine.speculative.num_steps"),
        ({"extra_args": ["--api-key", "sk-sentinel"]}, "can be read by everyone"),
        ({"extra_args": ["--admin-api-key=sk-sentinel"]}, "can be read by everyone"),
        ({"extra_args": ["--ssl-keyfile-password=sk-sentinel"]}, "can be read by everyone"),
        ({"env": {"HF_TOKEN": "sk-sentinel"}}, "has no place in a recipe"),
        ({"nnodes": 2, "tp_size": 16}, "set host to node"),
        ({"nnodes": 3, "host": "node", "tp_size": 16}, "shared out to 3 nodes evenly"),
        ({"tp_size": 4, "dp_size": 3, "dp_attention": True}, "multiple of dp_size"),
        ({"profile": "fast"}, "balanced"),
        ({"tensor_parallel": 2}, "Extra inputs"),
    ],
)
def test_what_cannot_be_is_refused_without_quoting_a_secret(keys: dict[str, object], told: str) -> None:
    with pytest.raises(ValidationError, match=told) as caught:
        SGLangConfig(**keys)
    assert "sk-sentinel" not in "".join(each["msg"] for each in caught.value.errors())


def test_free_arguments_that_have_no_key_are_taken() -> None:
    arguments = [
        "--disable-radix-cache",
        "--tokenizer-worker-num=2",
        "--ssl-keyfile=/k",
        "--config",
        "/etc/sglang.yaml",
    ]
    assert argv(extra_args=arguments)[-5:] == arguments


def test_the_options_for_a_framework_that_starts_servers_are_those_of_the_command_line() -> None:
    config = SGLangConfig(profile="balanced", version="0.5.10", extra_args=["--log-level", "info"])
    options = list(SGLangEngine.options(config))
    argv = command(config, "0.5.10", START)
    assert argv[-len(options) :] == options
    assert options[:3] == ["--dp-size", "4", "--enable-dp-attention"]
    assert "--model-path" not in options
    assert "--port" not in options


def test_a_key_of_speculative_that_is_given_is_added_to_the_profiles() -> None:
    found = argv(profile="low-latency", speculative={"draft_attention_backend": "nsa", "num_steps": 3})
    assert after(found, "--speculative-algorithm") == "EAGLE"
    assert after(found, "--speculative-num-steps") == "3"
    assert after(found, "--speculative-num-draft-tokens") == "6"
    assert after(found, "--speculative-draft-attention-backend") == "nsa"


def test_speculative_without_a_profile_needs_an_algorithm() -> None:
    with pytest.raises(ValidationError, match="speculative needs an algorithm"):
        SGLangConfig(speculative={"num_steps": 3})
