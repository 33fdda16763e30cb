"""What a training rank holds, estimated: weights, gradients and the optimizer's state, in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from rollhook_miles.config import MilesConfig

#: bytes per parameter: bf16 weights; fp32 gradients (--accumulate-allreduce-grads-in-fp32); fp32 main weights
#: and moments
WEIGHT, GRADIENT, STATE = 2, 4, 12
GB = 1e9


@dataclass(frozen=True)
class Estimate:
    """Bytes of one rank. `data_parallel` is over how many ranks the state of experts is sharded."""

    weights: float
    gradients: float
    state: float
    gpu: float
    data_parallel: int

    @property
    def resident(self) -> float:
        """What is there in any case."""
        return self.weights + self.gradients

    @property
    def must_stream(self) -> bool:
        """Whether the optimizer's state does not fit beside the rest."""
        return self.resident + self.state > self.gpu

    def table(self) -> str:
        """Return the estimate as lines of a table."""
        rows = [
            ("weights (bf16)", self.weights),
            ("gradients (fp32)", self.gradients),
            ("optimizer state (fp32)", self.state),
            ("one GPU", self.gpu),
        ]
        lines = [f"{name:<24}{value / GB:>8.1f} GB" for name, value in rows]
        return "\n".join([*lines, f"data-parallel ranks of the experts: {self.data_parallel}"])


def estimate(config: MilesConfig) -> Estimate | None:
    """Return the estimate; None where the recipe gives no sizes or the ranks do not fit the GPUs.

    Expert weights are cut by EP x ETP x PP, the others by TP x PP; state is sharded over the data-parallel
    ranks, to which for the other weights context-parallel ranks count too. Layers are taken as equally large.
    """
    size, p = config.size, config.parallel
    if size is None:
        return None
    ranks = p.nodes * p.gpus_per_node
    dense_shards, expert_shards = (
        ranks // (p.tensor * p.pipeline),
        ranks // (p.expert * p.expert_tensor * p.pipeline),
    )
    if not dense_shards or not expert_shards:
        return None
    dense = (size.parameters - size.expert_parameters) / (p.tensor * p.pipeline)
    experts = size.expert_parameters / (p.expert * p.expert_tensor * p.pipeline)
    return Estimate(
        weights=WEIGHT * (dense + experts),
        gradients=GRADIENT * (dense + experts),
        state=STATE * (dense / dense_shards + experts / expert_shards),
        gpu=size.gpu_bytes,
        data_parallel=expert_shards,
    )
