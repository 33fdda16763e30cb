"""The keys of `trainer: {use: miles}`; each says which flag of miles it becomes.

The defaults are those of the reference run, GLM-5.2 744B on 8 training nodes of 4 GB300 (288 GB, of which
CUDA shows 276 GB); where a default is a matter of that hardware or model, the description says why."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from rollhook.component import Config

_SECRET = re.compile(r"(^|[-_])(key|token|secret|password|passwd)s?$", re.IGNORECASE)


def _no_secret_arguments(arguments: list[str]) -> list[str]:
    for argument in arguments:
        option = argument.partition("=")[0]
        if option.startswith("--") and _SECRET.search(option) and "special" not in option:
            raise ValueError(f"may not hold {option}: what stands in a command line can be read by everyone")
    return arguments


def _no_secret_names(env: dict[str, str]) -> dict[str, str]:
    for name in env:
        if _SECRET.search(name):
            raise ValueError(f"may not hold {name}: a secret belongs into launcher.secrets, as a reference")
    return env


class Parallel(Config):
    """How the policy in training is cut up over its GPUs."""

    nodes: Annotated[PositiveInt, Field(description="nodes that train; --actor-num-nodes")] = 8
    gpus_per_node: Annotated[
        PositiveInt, Field(description="GPUs of each node; --actor-num-gpus-per-node and --num-gpus-per-node")
    ] = 4
    tensor: Annotated[
        PositiveInt,
        Field(description="--tensor-model-parallel-size; at 1 the weights overflow a GPU as they are loaded"),
    ] = 2
    sequence: Annotated[bool, Field(description="--sequence-parallel")] = True
    pipeline: Annotated[PositiveInt, Field(description="--pipeline-model-parallel-size")] = 4
    first_stage_layers: Annotated[
        PositiveInt | None, Field(description="--decoder-first-pipeline-num-layers; it holds the embedding")
    ] = 18
    last_stage_layers: Annotated[
        PositiveInt | None, Field(description="--decoder-last-pipeline-num-layers")
    ] = 20
    context: Annotated[
        PositiveInt,
        Field(description="--context-parallel-size; cuts a session of 65,536 tokens into 16,384 per rank"),
    ] = 4
    expert: Annotated[PositiveInt, Field(description="--expert-model-parallel-size")] = 8
    expert_tensor: Annotated[PositiveInt, Field(description="--expert-tensor-parallel-size")] = 1


class Size(Config):
    """What a rank's memory is estimated from; GLM-5.2: 75 layers of 256 experts of 3 x 6144 x 2048."""

    parameters: Annotated[PositiveFloat, Field(description="of the whole model")] = 744e9
    expert_parameters: Annotated[NonNegativeFloat, Field(description="of its experts")] = 724.8e9
    gpu_bytes: Annotated[PositiveFloat, Field(description="memory of a GPU")] = 276e9


class Memory(Config):
    """What keeps a training rank within its GPU's memory."""

    recompute: Annotated[
        bool, Field(description="full, uniform, one layer: --recompute-granularity, -method and -num-layers")
    ] = True
    dynamic_batch: Annotated[bool, Field(description="--use-dynamic-batch-size")] = True
    tokens_per_gpu: Annotated[PositiveInt, Field(description="--max-tokens-per-gpu")] = 8192
    pad_multiple: Annotated[PositiveInt, Field(description="--data-pad-size-multiplier")] = 1024
    log_probs_chunk: Annotated[PositiveInt, Field(description="--log-probs-chunk-size")] = 16384
    stream_optimizer_to: Annotated[
        str | None,
        Field(
            description="node-local directory; --stream-optimizer-state-to-disk, --offload-train-disk-dir. "
            "Without data parallelism the optimizer's state is not sharded, some 279 GB for each GPU of "
            "276 GB, so it must stream; null, for smoke runs only: it stays in memory"
        ),
    ] = "/scratch/opt_state"


class Algorithm(Config):
    """GRPO as miles has it."""

    kl_loss_coef: Annotated[NonNegativeFloat, Field(description="--kl-loss-coef")] = 0.0
    kl_loss_type: Annotated[str, Field(description="--kl-loss-type")] = "low_var_kl"
    kl_coef: Annotated[NonNegativeFloat, Field(description="--kl-coef")] = 0.0
    entropy_coef: Annotated[float, Field(description="--entropy-coef")] = 0.0
    clip_low: Annotated[PositiveFloat, Field(description="--eps-clip")] = 0.2
    clip_high: Annotated[
        PositiveFloat, Field(description="--eps-clip-high; above clip_low it lets rare tokens grow")
    ] = 0.28
    tis: Annotated[
        bool,
        Field(description="--use-tis: weights by trainer over rollout probability, as rollouts are stale"),
    ] = True
    tis_low: Annotated[NonNegativeFloat, Field(description="--tis-clip-low")] = 0.0
    tis_high: Annotated[PositiveFloat, Field(description="--tis-clip")] = 2.0


class Optimizer(Config):
    """Adam."""

    lr: Annotated[PositiveFloat, Field(description="--lr")] = 1e-6
    decay: Annotated[str, Field(description="--lr-decay-style")] = "constant"
    weight_decay: Annotated[NonNegativeFloat, Field(description="--weight-decay")] = 0.1
    beta1: Annotated[float, Field(ge=0, lt=1, description="--adam-beta1")] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1, description="--adam-beta2")] = 0.98


class MilesConfig(Config):
    """Keys of the miles trainer."""

    root: Annotated[str, Field(description="checkout of miles on the nodes")] = "/root/miles"
    megatron_path: Annotated[
        str,
        Field(
            description="checkout of Megatron-LM, goes on PYTHONPATH; streaming needs its checkpoint hooks"
        ),
    ] = "/root/Megatron-LM"
    train_script: Annotated[str, Field(description="program of that checkout")] = "train_async.py"
    model_type: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z0-9._-]+$", description="model arguments: a name below miles' scripts/models"
        ),
    ]
    ref_load: Annotated[
        str, Field(description="the converted checkpoint (torch_dist) that training starts from; --ref-load")
    ]
    parallel: Annotated[Parallel, Field(description="how the policy in training is cut up")] = Parallel()
    memory: Annotated[Memory, Field(description="what keeps a rank within its memory")] = Memory()
    size: Annotated[Size | None, Field(description="to estimate a rank's memory; null: it is not")] = Size()
    algorithm: Annotated[Algorithm, Field(description="GRPO")] = Algorithm()
    optimizer: Annotated[Optimizer, Field(description="Adam")] = Optimizer()
    tito_model: Annotated[
        str,
        Field(
            description="family by which the session server renders and parses; --tito-model, and it "
            "decides on the engines' parsers"
        ),
    ] = "glm47"
    session_server: Annotated[
        Literal["v1", "v2"],
        Field(description="v1: one line of turns; v2: a tree, for agents that branch; --use-session-server"),
    ] = "v1"
    session_server_port: Annotated[int, Field(ge=1024, le=65535, description="--session-server-port")] = 30000
    router_port: Annotated[
        int, Field(ge=1024, le=65535, description="of `rollhook router`, for policies that miles lacks")
    ] = 30100
    balance_data: Annotated[bool, Field(description="--balance-data: equal tokens for every rank")] = True
    shuffle: Annotated[bool, Field(description="--rollout-shuffle")] = True
    update_weight_buffer_bytes: Annotated[PositiveInt, Field(description="--update-weight-buffer-size")] = (
        2 * 1024**3
    )
    dashboard: Annotated[
        bool, Field(description="--use-miles-dashboard, and --dump-details into the run's directory")
    ] = True
    start_rollout: Annotated[
        NonNegativeInt | None,
        Field(description="--start-rollout-id; 0 with checkpoint.load_from evaluates it before any step"),
    ] = None
    replay: Annotated[
        str | None,
        Field(
            description="train only, on recorded batches: a path with {rollout_id} in it; "
            "--load-debug-rollout-data. Needs no engines and no sandboxes, 8 nodes suffice"
        ),
    ] = None
    env: Annotated[
        dict[str, str],
        AfterValidator(_no_secret_names),
        Field(default_factory=dict, description="environment variables of all workers, beside ours"),
    ]
    extra_args: Annotated[
        list[str],
        AfterValidator(_no_secret_arguments),
        Field(default_factory=list, description="further arguments, last on the command line, so they win"),
    ]
