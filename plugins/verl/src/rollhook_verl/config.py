"""The keys of `trainer: {use: verl}`; each says which override of verl it becomes."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from rollhook.component import Config

_SECRET = re.compile(r"(^|[._-])(api_?key|token|secret|password)s?$", re.IGNORECASE)


def _overrides(given: list[str]) -> list[str]:
    for each in given:
        key = each.partition("=")[0].lstrip("+~")
        if not key or ("=" not in each and not each.startswith("~")):
            raise ValueError(f"{each!r} is no override of Hydra: write key=value, +key=value or ~key")
        if _SECRET.search(key):
            raise ValueError(f"may not hold {key}: what stands in a command line can be read by everyone")
    return given


class VerlConfig(Config):
    """Keys of the verl trainer."""

    algorithm: Annotated[
        Literal["grpo", "ppo", "sft"],
        Field(
            description="grpo, ppo: main_ppo on our episodes (algorithm.adv_estimator grpo or gae); sft: "
            "sft_trainer_ray on `data`"
        ),
    ] = "grpo"
    python: Annotated[str, Field(description="interpreter on the nodes that has verl")] = "python3"
    prompt_tokens: Annotated[
        PositiveInt,
        Field(description="longest first prompt; data.max_prompt_length. A session has budgets.max_seq_len"),
    ] = 4096
    lr: Annotated[PositiveFloat, Field(description="actor_rollout_ref.actor.optim.lr, or optim.lr")] = 1e-6
    critic_lr: Annotated[PositiveFloat, Field(description="critic.optim.lr, of ppo")] = 1e-5
    mini_batch_groups: Annotated[
        PositiveInt | None,
        Field(description="actor_rollout_ref.actor.ppo_mini_batch_size, in groups; default: the whole batch"),
    ] = None
    tokens_per_gpu: Annotated[
        PositiveInt | None,
        Field(
            description="tokens of a micro-batch: actor_rollout_ref.actor.ppo_max_token_len_per_gpu, or "
            "data.max_token_len_per_gpu of sft; default: budgets.max_seq_len"
        ),
    ] = None
    kl_loss_coef: Annotated[
        NonNegativeFloat, Field(description="actor_rollout_ref.actor.kl_loss_coef; 0: no reference policy")
    ] = 0.0
    data: Annotated[
        str | None,
        Field(description="sft: a parquet file of rows with `messages`, seen by all nodes; data.train_files"),
    ] = None
    batch_size: Annotated[PositiveInt, Field(description="sft: rows per step; data.train_batch_size")] = 64
    max_length: Annotated[PositiveInt, Field(description="sft: tokens of a row; data.max_length")] = 4096
    overrides: Annotated[
        list[str],
        AfterValidator(_overrides),
        Field(default_factory=list, description="further overrides, last on the command line, so they win"),
    ]

    @model_validator(mode="after")
    def _has_data(self) -> VerlConfig:
        if (self.algorithm == "sft") != (self.data is not None):
            raise ValueError("data is for algorithm sft, which needs it, and for no other")
        return self
