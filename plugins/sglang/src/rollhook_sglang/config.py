"""The keys of `engine: {use: sglang}`, and the profiles that set several of them."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from rollhook.component import Config

#: key -> option of SGLang that takes its value
VALUES = {
    "tp_size": "--tp-size",
    "pp_size": "--pp-size",
    "ep_size": "--ep-size",
    "mem_fraction_static": "--mem-fraction-static",
    "context_length": "--context-length",
    "max_running_requests": "--max-running-requests",
    "chunked_prefill_size": "--chunked-prefill-size",
    "cuda_graph_max_bs": "--cuda-graph-max-bs",
    "page_size": "--page-size",
    "dtype": "--dtype",
    "quantization": "--quantization",
    "kv_cache_dtype": "--kv-cache-dtype",
    "attention_backend": "--attention-backend",
    "prefill_attention_backend": "--prefill-attention-backend",
    "decode_attention_backend": "--decode-attention-backend",
    "nsa_prefill_backend": "--nsa-prefill-backend",
    "nsa_decode_backend": "--nsa-decode-backend",
    "moe_runner_backend": "--moe-runner-backend",
    "moe_a2a_backend": "--moe-a2a-backend",
    "tool_call_parser": "--tool-call-parser",
    "reasoning_parser": "--reasoning-parser",
    "watchdog_timeout": "--watchdog-timeout",
}
#: key of `speculative` -> option
SPECULATIVE = {
    "algorithm": "--speculative-algorithm",
    "num_steps": "--speculative-num-steps",
    "eagle_topk": "--speculative-eagle-topk",
    "num_draft_tokens": "--speculative-num-draft-tokens",
    "draft_model": "--speculative-draft-model-path",
    "draft_attention_backend": "--speculative-draft-attention-backend",
}
#: key -> option without a value
SWITCHES = {
    "trust_remote_code": "--trust-remote-code",
    "deterministic": "--enable-deterministic-inference",
}
#: options that the engine gives itself
OURS = {
    "--model-path": "model.path",
    "--model": "model.path",
    "--host": "engine.host",
    "--port": "nothing: a free one is chosen",
    "--weight-version": "nothing: it is the run's",
    "--random-seed": "seed",
    "--nnodes": "engine.nnodes",
    "--node-rank": "engine.nnodes",
    "--dist-init-addr": "engine.nnodes",
    "--dp-size": "engine.dp_size",
    "--attn-dp-size": "engine.dp_size",
    "--enable-dp-attention": "engine.dp_attention",
    "--skip-server-warmup": "nothing: it is always given",
    "--enable-metrics": "nothing: it is always given",
    "--incremental-streaming-output": "nothing: it is given to every release that has it",
}
_ALIASES = {
    "--tensor-parallel-size": "tp_size",
    "--pipeline-parallel-size": "pp_size",
    "--expert-parallel-size": "ep_size",
    "--data-parallel-size": "dp_size",
    "--cuda-graph-max-bs-decode": "cuda_graph_max_bs",
    "--dsa-prefill-backend": "nsa_prefill_backend",
    "--dsa-decode-backend": "nsa_decode_backend",
}
_SECRETS = ("--api-key", "--admin-api-key", "--ssl-keyfile-password")
_SECRET = re.compile(r"(^|[-_])(api[-_]?key|key|token|secret|password|passwd)$", re.IGNORECASE)


def _free(arguments: list[str]) -> list[str]:
    """Refuse options that have a key, and secrets, also abbreviated, all at once; a value is never quoted."""
    wrong = []
    taken = OURS | {option: f"engine.{key}" for key, option in (VALUES | SWITCHES).items()}
    taken |= {option: f"engine.speculative.{key}" for key, option in SPECULATIVE.items()}
    taken |= {option: f"engine.{key}" for option, key in _ALIASES.items()}
    for argument in arguments:
        option = argument.partition("=")[0]
        if not option.startswith("--"):
            continue
        meant = option
        if (
            option != "--ssl-keyfile"
        ):  # an option of its own; SGLang takes every other beginning of one for it
            meant = next((each for each in (*_SECRETS, *taken) if each.startswith(option)), option)
        if _SECRET.search(meant):
            wrong.append(f"may not hold {option}: what stands in a command line can be read by everyone")
        elif meant in taken:
            wrong.append(f"may not hold {option}: set {taken[meant]}")
    if wrong:
        raise ValueError("; ".join(dict.fromkeys(wrong)))
    return arguments


def _no_secrets(env: dict[str, str]) -> dict[str, str]:
    for name in env:
        if _SECRET.search(name):
            raise ValueError(f"may not hold {name}: a secret has no place in a recipe")
    return env


class Speculative(Config):
    """Speculative decoding. A key that is not given is the profile's."""

    algorithm: Annotated[
        str | None, Field(description="EAGLE, EAGLE3, NGRAM, ...; needed without a profile")
    ] = None
    num_steps: Annotated[PositiveInt | None, Field(description="steps of the draft model")] = None
    eagle_topk: Annotated[PositiveInt | None, Field(description="branches of each step")] = None
    num_draft_tokens: Annotated[PositiveInt | None, Field(description="tokens that are verified at once")] = (
        None
    )
    draft_model: Annotated[
        str | None, Field(description="path or name of the draft model; default: the model's own layers")
    ] = None
    draft_attention_backend: Annotated[str | None, Field(description="attention of the draft model")] = None


_COMMON: dict[str, Any] = {
    "mem_fraction_static": 0.85,
    "kv_cache_dtype": "fp8_e4m3",
    "page_size": 64,
    "cuda_graph_max_bs": 32,
    "watchdog_timeout": 3600.0,
}
#: what a profile sets where the recipe says nothing; after the reference run of GLM-5.2 on nodes of 4 GPUs
PROFILES: dict[str, dict[str, Any]] = {
    "balanced": {
        **_COMMON,
        "tp_size": 4,
        "dp_size": 4,
        "dp_attention": True,
        "ep_size": 4,
        "moe_a2a_backend": "deepep",
        "max_running_requests": 256,
        "chunked_prefill_size": 32768,
        "speculative": Speculative(algorithm="EAGLE", num_steps=1, eagle_topk=1, num_draft_tokens=2),
    },
    "low-latency": {
        **_COMMON,
        "tp_size": 8,
        "ep_size": 8,
        "moe_runner_backend": "flashinfer_trtllm_routed",
        "max_running_requests": 512,
        "chunked_prefill_size": 16384,
        "speculative": Speculative(algorithm="EAGLE", num_steps=5, eagle_topk=1, num_draft_tokens=6),
    },
}


class SGLangConfig(Config):
    """Servers of SGLang. A key that is not given is SGLang's own default, or the profile's."""

    python: Annotated[
        str | None, Field(description="interpreter that has SGLang; default: the one that runs this")
    ] = None
    version: Annotated[
        str | None,
        Field(
            pattern=r"^\d+\.\d+",
            description="SGLang's release; default: the interpreter on this machine is asked",
        ),
    ] = None
    engines: Annotated[PositiveInt, Field(description="servers, each with the whole model")] = 1
    profile: Annotated[
        Literal["balanced", "low-latency"] | None,
        Field(description="values for keys that are not given: for many requests at once, or for few"),
    ] = None

    tp_size: Annotated[PositiveInt | None, Field(description="tensor parallelism")] = None
    pp_size: Annotated[PositiveInt | None, Field(description="pipeline parallelism")] = None
    ep_size: Annotated[PositiveInt | None, Field(description="expert parallelism")] = None
    dp_size: Annotated[PositiveInt | None, Field(description="data-parallel ranks")] = None
    dp_attention: Annotated[
        bool | None, Field(description="the ranks share the weights and have attention and a cache each")
    ] = None
    nnodes: Annotated[PositiveInt, Field(description="nodes that one server spans")] = 1
    gpus: Annotated[
        NonNegativeFloat | None,
        Field(description="GPUs that one server takes of the cluster's; default: what its parallelism needs"),
    ] = None
    host: Annotated[
        str,
        Field(
            description="address to listen on; node: that of the node, which servers across nodes need; "
            "auto: loopback on one machine, node on a cluster"
        ),
    ] = "auto"

    context_length: Annotated[PositiveInt | None, Field(description="tokens of prompt and reply")] = None
    mem_fraction_static: Annotated[
        float | None, Field(gt=0, lt=1, description="share of a GPU's memory for weights and cache")
    ] = None
    max_running_requests: Annotated[PositiveInt | None, Field(description="requests decoded together")] = None
    chunked_prefill_size: Annotated[
        int | None, Field(description="tokens of one chunk of a prefill; -1: whole prompts")
    ] = None
    cuda_graph_max_bs: Annotated[PositiveInt | None, Field(description="largest batch with a graph")] = None
    page_size: Annotated[PositiveInt | None, Field(description="tokens of one page of the cache")] = None
    dtype: Annotated[str | None, Field(description="type of weights and activations")] = None
    quantization: Annotated[str | None, Field(description="how the weights are quantized")] = None
    kv_cache_dtype: Annotated[str | None, Field(description="type of the cache")] = None
    attention_backend: Annotated[str | None, Field(description="attention kernels")] = None
    prefill_attention_backend: Annotated[str | None, Field(description="attention kernels of a prefill")] = (
        None
    )
    decode_attention_backend: Annotated[str | None, Field(description="attention kernels of decoding")] = None
    nsa_prefill_backend: Annotated[
        str | None, Field(description="kernels of sparse attention in a prefill")
    ] = None
    nsa_decode_backend: Annotated[
        str | None, Field(description="kernels of sparse attention in decoding")
    ] = None
    moe_runner_backend: Annotated[str | None, Field(description="kernels of the experts")] = None
    moe_a2a_backend: Annotated[str | None, Field(description="how tokens reach the experts")] = None
    speculative: Annotated[
        Speculative | Literal["none"] | None,
        Field(description="speculative decoding; none: also where the profile has it"),
    ] = None
    tool_call_parser: Annotated[
        str | None, Field(description="of the servers' own chat endpoint, which Rollhook does not ask")
    ] = None
    reasoning_parser: Annotated[
        str | None, Field(description="of the servers' own chat endpoint, which Rollhook does not ask")
    ] = None
    trust_remote_code: Annotated[bool, Field(description="run code that comes with the model")] = False
    deterministic: Annotated[
        bool, Field(description="kernels that do not depend on the batch; without them no seed is kept")
    ] = False

    watchdog_timeout: Annotated[
        PositiveFloat | None, Field(description="seconds of one batch after which a server ends itself")
    ] = None
    extra_args: Annotated[
        list[str],
        AfterValidator(_free),
        Field(
            default_factory=list,
            description="further arguments, last in the command line, as SGLang spells them",
        ),
    ]
    env: Annotated[
        dict[str, str],
        AfterValidator(_no_secrets),
        Field(default_factory=dict, description="environment variables of the servers"),
    ]
    start_timeout: Annotated[
        PositiveFloat, Field(description="seconds until a server must generate a token")
    ] = 1800
    max_restarts: Annotated[
        NonNegativeInt, Field(description="times that one server is started anew after it has died")
    ] = 5
    restart_seconds: Annotated[
        PositiveFloat, Field(description="wait before the first restart; doubled for each further one")
    ] = 5.0

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.nnodes > 1 and self.host != "node":
            raise ValueError("a server that spans nodes listens on their own addresses: set host to node")
        decoding = self.get("speculative")
        if isinstance(decoding, Speculative) and decoding.algorithm is None:
            raise ValueError("speculative needs an algorithm where no profile has one")
        tp, dp = self.get("tp_size") or 1, self.get("dp_size") or 1
        if self.get("dp_attention") and tp % dp:
            raise ValueError(f"with dp_attention tp_size ({tp}) must be a multiple of dp_size ({dp})")
        if self.gpus_needed % self.nnodes:
            raise ValueError(f"{self.gpus_needed:g} GPUs cannot be shared out to {self.nnodes} nodes evenly")
        return self

    def get(self, key: str) -> Any:
        """Return a key's value, or the profile's where it is not given; None for SGLang's own default."""
        value = getattr(self, key)
        of_profile = PROFILES[self.profile].get(key) if self.profile is not None else None
        if isinstance(value, Speculative) and isinstance(of_profile, Speculative):
            return of_profile.model_copy(update=value.model_dump(exclude_none=True))
        return of_profile if value is None else value

    @property
    def gpus_needed(self) -> float:
        """GPUs of one server."""
        if self.gpus is not None:
            return self.gpus
        replicas = 1 if self.get("dp_attention") else self.get("dp_size") or 1
        return float((self.get("tp_size") or 1) * (self.get("pp_size") or 1) * replicas)
