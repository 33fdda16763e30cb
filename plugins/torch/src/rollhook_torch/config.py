"""The keys of `engine: {use: transformers}` and `trainer: {use: torch}`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from rollhook.component import Config


def _switch(value: object) -> object:
    """Take YAML's own reading of `on` and `off`."""
    return ("on" if value else "off") if isinstance(value, bool) else value


Dtype = Literal["float32", "bfloat16", "float16"]


class EngineConfig(Config):
    """Servers that generate."""

    processes: Annotated[PositiveInt, Field(description="server processes, each with the whole model")] = 1
    threads: Annotated[
        PositiveInt | None, Field(description="CPU threads per process; default: the CPUs over the processes")
    ] = None
    dtype: Annotated[Dtype, Field(description="type of weights and activations")] = "float32"
    device: Annotated[
        str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto: a GPU if torch sees one, else cpu")
    ] = "auto"
    gpus: Annotated[
        NonNegativeFloat, Field(description="GPUs that one process takes of the cluster's; a share is fine")
    ] = 0.0
    max_batch: Annotated[PositiveInt, Field(description="sequences decoded together; others wait")] = 256
    prefill_tokens: Annotated[
        PositiveInt,
        Field(description="tokens of prompts computed between two decoding steps; a longer prompt is cut"),
    ] = 2048
    prefix_cache_bytes: Annotated[
        NonNegativeInt,
        Field(
            description="memory for keys and values of finished sequences, which later prompts that begin "
            "alike need not compute; 0: none"
        ),
    ] = 512 * 1024**2
    context_length: Annotated[
        PositiveInt | None, Field(description="tokens of prompt and reply; default: the model's own")
    ] = None
    host: Annotated[
        str,
        Field(
            description="address to listen on; node: that of the node; auto: loopback on one machine, "
            "node on a cluster"
        ),
    ] = "auto"
    start_timeout: Annotated[PositiveFloat, Field(description="seconds until a server must be healthy")] = 180


class TrainerConfig(Config):
    """GRPO on episodes, or SFT on rows of messages."""

    algorithm: Annotated[Literal["grpo", "sft"], Field(description="what is minimised")] = "grpo"
    data: Annotated[
        str | None,
        Field(description="sft: rows with `messages`, a .jsonl or .parquet file, or pack:NAME/FILE"),
    ] = None
    batch_rows: Annotated[PositiveInt, Field(description="sft: rows per step")] = 32

    lr: Annotated[PositiveFloat, Field(description="peak learning rate")] = 1e-6
    lr_schedule: Annotated[
        Literal["constant", "linear", "cosine"], Field(description="shape of the decay after warm-up")
    ] = "constant"
    warmup_steps: Annotated[NonNegativeInt, Field(description="steps of linear warm-up from 0")] = 0
    decay_fraction: Annotated[
        float,
        Field(gt=0, le=1, description="last share of the steps over which the rate decays; before, it holds"),
    ] = 1.0
    final_lr_fraction: Annotated[
        float, Field(ge=0, le=1, description="rate at the last step, as a share of the peak")
    ] = 0.0
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]],
        Field(description="AdamW's decay rates of the moments"),
    ] = (0.9, 0.95)
    eps: Annotated[PositiveFloat, Field(description="AdamW's epsilon")] = 1e-8
    weight_decay: Annotated[
        NonNegativeFloat, Field(description="decoupled decay of matrices (not of biases and norms)")
    ] = 0.0
    grad_clip: Annotated[
        PositiveFloat | None, Field(description="largest norm of the gradient; null: none")
    ] = 1.0

    advantage_std: Annotated[
        Literal["on", "off"],
        BeforeValidator(_switch),
        Field(description="grpo: divide by the group's standard deviation"),
    ] = "on"
    loss_mean: Annotated[
        Literal["token", "sequence"],
        Field(description="mean over all trained tokens, or over sequences of the mean over their tokens"),
    ] = "token"
    clip_low: Annotated[float, Field(gt=0, lt=1, description="grpo: ratio is clipped below 1 - clip_low")] = (
        0.2
    )
    clip_high: Annotated[PositiveFloat, Field(description="grpo: ratio is clipped above 1 + clip_high")] = (
        0.28
    )
    kl_coef: Annotated[
        NonNegativeFloat, Field(description="grpo: weight of the k3 estimate of KL to the initial weights")
    ] = 0.0
    importance_cap: Annotated[
        PositiveFloat | None,
        Field(
            description="grpo: per-token weights p_trainer/p_engine, cut off at this value, "
            "correct for engines that differ or lag; null: no correction"
        ),
    ] = 2.0
    updates_per_step: Annotated[
        PositiveInt, Field(description="grpo: optimizer updates that a batch is split into; 1 is on-policy")
    ] = 1
    temperature: Annotated[
        PositiveFloat, Field(description="grpo: temperature of the sampled distribution; as rollout.sampling")
    ] = 1.0

    max_tokens_per_microbatch: Annotated[
        PositiveInt,
        Field(description="tokens, padding included, of one forward pass; a longer row goes alone"),
    ] = 8192
    dtype: Annotated[Literal["float32", "bfloat16"], Field(description="type of weights and activations")] = (
        "float32"
    )
    device: Annotated[
        str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto: a GPU if torch sees one, else cpu")
    ] = "auto"
    gpus: Annotated[
        NonNegativeFloat,
        Field(description="GPUs that the trainer takes of the cluster's; 0: it may use one, and takes none"),
    ] = 0.0
    threads: Annotated[PositiveInt | None, Field(description="CPU threads; default: all")] = None

    @model_validator(mode="after")
    def _sft_has_data(self) -> Self:
        if self.algorithm == "sft" and self.data is None:
            raise ValueError("algorithm sft needs `data`, a file of rows with messages")
        if self.algorithm == "grpo" and self.data is not None:
            raise ValueError("`data` has no effect with algorithm grpo, which trains on episodes")
        return self
