"""`trainer.torch`: the class that the cluster places; torch is imported when it is set up, not before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rollhook.errors import TrainerError, UsageError
from rollhook.trainer import NativeTrainer
from rollhook_torch import quiet
from rollhook_torch.config import TrainerConfig

if TYPE_CHECKING:
    from rollhook.records import Sample
    from rollhook_torch.learner import Learner


class TorchTrainer(NativeTrainer):
    """GRPO and SFT with AdamW, in one process, on CPU or one GPU."""

    config: TrainerConfig
    can_initialise: ClassVar[bool] = True

    def __init__(self, config: Any, context: Any) -> None:
        super().__init__(config, context)
        self._learner: Learner | None = None

    @classmethod
    def needs_rollouts(cls, config: Any) -> bool:
        """SFT brings its own data."""
        return bool(config.algorithm == "grpo")

    @classmethod
    def initialise_model(cls, model: Mapping[str, Any], directory: Path, seed: int) -> None:
        """Write fresh weights and, if asked for, a tokenizer trained on a corpus."""
        quiet.prepare()
        quiet.quiet_transformers()
        from rollhook_torch.fresh import initialise

        initialise(model, Path(directory), seed)

    @classmethod
    def fetch_model(cls, name: str) -> Path:
        """Return the directory of a model of the Hugging Face hub, from its cache or fetched."""
        quiet.prepare()
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(name))
        except Exception as error:
            why = " ".join(str(error).split())
            raise UsageError(
                f"model.path: {name} is no directory here, and the hub did not give it: {why}"
            ) from error

    def setup(self, model_dir: Path, *, total_steps: int, seed: int) -> None:
        """Load weights and make the optimizer."""
        quiet.prepare(self.config.threads)
        quiet.quiet_transformers()
        from rollhook_torch.learner import Learner

        self._learner = Learner(self.config, Path(model_dir), total_steps=total_steps, seed=seed)

    def step(self, groups: Sequence[Sequence[Sample]], step: int) -> dict[str, float]:
        """Train on a batch of groups, or on the next rows."""
        return self._ready.step(groups, step)

    def publish(self, directory: Path) -> None:
        """Write weights, config and tokenizer, durably."""
        self._ready.publish(Path(directory))

    def save(self, directory: Path) -> None:
        """Write everything that the next step depends on, durably."""
        self._ready.save(Path(directory))

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote."""
        self._ready.load(Path(directory))

    def close(self) -> None:
        """Release memory."""
        self._learner = None

    @property
    def _ready(self) -> Learner:
        if self._learner is None:
            raise TrainerError("the trainer was not set up, or is closed")
        return self._learner
