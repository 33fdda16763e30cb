"""The contract of native trainers: inherit `TrainerContract`, give it a trainer and weights, run pytest."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from rollhook.component import BuildContext
from rollhook.errors import TrainerError
from rollhook.records import Sample
from rollhook.testing.contract import Contract
from rollhook.testing.tokenizer import write_tokenizer
from rollhook.trainer import NativeTrainer

MakeTrainer = Callable[[], NativeTrainer]
Groups = Sequence[Sequence[Sample]]
Weights = Mapping[str, NDArray[Any]]

TOTAL_STEPS = 10
#: what an engine of `vocab` equally likely tokens would report
DEFAULT_VOCAB = 32


class TrainerContract(Contract):
    """What every native trainer that trains on episodes must do. A suite gives two fixtures.

    `make_trainer` returns a callable that builds the trainer afresh, not set up; `model_dir` is what it
    starts from. `vocab` is the number of its tokens. Weights are compared within `tolerance`.
    """

    vocab: ClassVar[int] = DEFAULT_VOCAB
    tolerance: ClassVar[float] = 0.0

    @pytest.fixture
    def make_trainer(self) -> MakeTrainer:
        """Build the trainer under test, each time anew."""
        raise NotImplementedError("give the contract a fixture make_trainer that returns a builder")

    @pytest.fixture
    def model_dir(self) -> Path:
        """Return the weights that it starts from."""
        raise NotImplementedError("give the contract a fixture model_dir")

    # -- steps

    def test_a_step_reports_finite_metrics_under_train(
        self, make_trainer: MakeTrainer, model_dir: Path
    ) -> None:
        metrics = self._ready(make_trainer, model_dir).step(batch(0, self.vocab), 0)
        assert metrics
        assert all(name.startswith("train/") for name in metrics)
        assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())

    def test_a_step_changes_the_weights(
        self, make_trainer: MakeTrainer, model_dir: Path, tmp_path: Path
    ) -> None:
        trainer = self._ready(make_trainer, model_dir)
        before = _published(trainer, tmp_path / "before")
        trainer.step(batch(0, self.vocab), 0)
        assert not self._same(before, _published(trainer, tmp_path / "after"))

    def test_rewards_decide_the_direction(
        self, make_trainer: MakeTrainer, model_dir: Path, tmp_path: Path
    ) -> None:
        groups = batch(0, self.vocab)
        turned = [[replace(sample, reward=1.0 - sample.reward) for sample in group] for group in groups]
        ends = []
        for name, given in (("as-given", groups), ("turned", turned)):
            trainer = self._ready(make_trainer, model_dir)
            trainer.step(given, 0)
            ends.append(_published(trainer, tmp_path / name))
        assert not self._same(*ends)

    def test_the_same_batches_and_seed_give_the_same_weights(
        self, make_trainer: MakeTrainer, model_dir: Path, tmp_path: Path
    ) -> None:
        ends = []
        for name in ("one", "two"):
            trainer = self._ready(make_trainer, model_dir)
            for step in range(2):
                trainer.step(batch(step, self.vocab), step)
            ends.append(_published(trainer, tmp_path / name))
        assert self._same(*ends)

    def test_a_batch_without_groups_leaves_the_weights(
        self, make_trainer: MakeTrainer, model_dir: Path, tmp_path: Path
    ) -> None:
        trainer = self._ready(make_trainer, model_dir)
        before = _published(trainer, tmp_path / "before")
        trainer.step([], 0)
        assert self._same(before, _published(trainer, tmp_path / "after"))

    def test_samples_are_left_as_they_are(self, make_trainer: MakeTrainer, model_dir: Path) -> None:
        groups = batch(0, self.vocab)
        for sample in (sample for group in groups for sample in group):
            for array in (sample.token_ids, sample.mask, sample.logprobs):
                array.setflags(write=False)
        self._ready(make_trainer, model_dir).step(groups, 0)
        for given, made in zip(groups, batch(0, self.vocab), strict=True):
            for one, other in zip(given, made, strict=True):
                assert one.reward == other.reward
                assert np.array_equal(one.token_ids, other.token_ids)

    # -- weights on disk

    def test_published_weights_are_a_model_directory(
        self, make_trainer: MakeTrainer, model_dir: Path, tmp_path: Path
    ) -> None:
        _published(self._ready(make_trainer, model_dir), tmp_path / "weights")
        names = {path.name for path in (tmp_path / "weights").iterdir()}
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
        assert all(path.is_file() and not path.is_symlink() for path in (tmp_path / "weights").iterdir())

    def test_published_weights_can_be_started_from(
        self, make_trainer: MakeTrainer, model_dir: Path, tmp_path: Path
    ) -> None:
        trainer = self._ready(make_trainer, model_dir)
        trainer.step(batch(0, self.vocab), 0)
        weights = _published(trainer, tmp_path / "weights")
        again = self._ready(make_trainer, tmp_path / "weights")
        assert self._same(weights, _published(again, tmp_path / "again"))

    def test_publishing_changes_nothing(
        self, make_trainer: MakeTrainer, model_dir: Path, tmp_path: Path
    ) -> None:
        ends = []
        for name in ("quiet", "published"):
            trainer = self._ready(make_trainer, model_dir)
            trainer.step(batch(0, self.vocab), 0)
            if name == "published":
                _published(trainer, tmp_path / "between")
            trainer.step(batch(1, self.vocab), 1)
            ends.append(_published(trainer, tmp_path / name))
        assert self._same(*ends)

    # -- checkpoints

    def test_a_resumed_step_gives_what_it_would_have_given(
        self, make_trainer: MakeTrainer, model_dir: Path, tmp_path: Path
    ) -> None:
        trainer = self._ready(make_trainer, model_dir)
        for step in range(2):
            trainer.step(batch(step, self.vocab), step)
        trainer.save(_empty(tmp_path / "checkpoint"))
        straight = trainer.step(batch(2, self.vocab), 2)
        resumed = self._ready(make_trainer, model_dir)
        resumed.load(tmp_path / "checkpoint")
        again = resumed.step(batch(2, self.vocab), 2)
        assert self._same(_published(trainer, tmp_path / "one"), _published(resumed, tmp_path / "two"))
        assert again["train/loss"] == pytest.approx(straight["train/loss"], rel=1e-6, abs=1e-9)

    def test_the_same_batch_on_the_same_checkpoint_gives_the_same_metrics(
        self, make_trainer: MakeTrainer, model_dir: Path, tmp_path: Path
    ) -> None:
        """What `rollhook replay` relies on; metrics that end in `_seconds` or `_per_second` are times."""
        trainer = self._ready(make_trainer, model_dir)
        trainer.step(batch(0, self.vocab), 0)
        trainer.save(_empty(tmp_path / "checkpoint"))
        found = []
        for _ in range(2):
            # as a replay does: set up from the checkpoint itself
            again = self._ready(make_trainer, tmp_path / "checkpoint")
            again.load(tmp_path / "checkpoint")
            metrics = again.step(batch(1, self.vocab), 1)
            found.append({k: v for k, v in metrics.items() if not k.endswith(("_seconds", "_per_second"))})
        assert found[0] == pytest.approx(found[1], rel=1e-6, abs=1e-9, nan_ok=True)

    def test_saving_changes_nothing_and_a_checkpoint_does_not_change_later(
        self, make_trainer: MakeTrainer, model_dir: Path, tmp_path: Path
    ) -> None:
        trainer = self._ready(make_trainer, model_dir)
        trainer.step(batch(0, self.vocab), 0)
        before = _published(trainer, tmp_path / "before")
        trainer.save(_empty(tmp_path / "checkpoint"))
        assert self._same(before, _published(trainer, tmp_path / "after"))
        trainer.step(batch(1, self.vocab), 1)
        trainer.load(tmp_path / "checkpoint")
        assert self._same(before, _published(trainer, tmp_path / "loaded"))

    def test_a_directory_that_is_no_checkpoint_is_refused_in_words(
        self, make_trainer: MakeTrainer, model_dir: Path, tmp_path: Path
    ) -> None:
        trainer = self._ready(make_trainer, model_dir)
        with pytest.raises(TrainerError, match="empty"):
            trainer.load(_empty(tmp_path / "empty"))

    # -- life

    def test_absent_weights_are_refused_in_words(self, make_trainer: MakeTrainer, tmp_path: Path) -> None:
        with pytest.raises(TrainerError, match="absent"):
            make_trainer().setup(tmp_path / "absent", total_steps=TOTAL_STEPS, seed=0)

    def test_close_is_safe_before_setup_and_twice(self, make_trainer: MakeTrainer, model_dir: Path) -> None:
        make_trainer().close()
        trainer = self._ready(make_trainer, model_dir)
        trainer.close()
        trainer.close()

    def _ready(self, make_trainer: MakeTrainer, model_dir: Path) -> NativeTrainer:
        trainer = make_trainer()
        trainer.setup(model_dir, total_steps=TOTAL_STEPS, seed=0)
        return trainer

    def _same(self, one: Weights, other: Weights) -> bool:
        return one.keys() == other.keys() and all(
            np.allclose(one[name], other[name], rtol=0, atol=self.tolerance) for name in one
        )


def batch(step: int, vocab: int = DEFAULT_VOCAB, *, groups: int = 3, size: int = 4) -> list[list[Sample]]:
    """Return groups of samples with different lengths, replies and rewards; the same for the same step."""
    rng = np.random.default_rng([step, vocab])
    made = []
    for group in range(groups):
        prompt = rng.integers(3, vocab, 3 + group).tolist()
        rewards = rng.permutation([1.0] + [0.0] * (size - 1))
        made.append(
            [
                sample_of(prompt, rng.integers(3, vocab, 2 + index).tolist(), float(rewards[index]), vocab,
                          group_id=f"s{step}-g{group}", episode_id=f"s{step}-g{group}-e{index}")
                for index in range(size)
            ]
        )  # fmt: skip
    return made


def sample_of(
    prompt: Sequence[int], reply: Sequence[int], reward: float, vocab: int, *, group_id: str, episode_id: str
) -> Sample:
    """Return a sample of one turn, drawn from `vocab` equally likely tokens at version 1."""
    ids = np.array([*prompt, *reply], np.int32)
    mask = np.array([0] * len(prompt) + [1] * len(reply), np.uint8)
    return Sample(
        episode_id=episode_id,
        group_id=group_id,
        task_id=f"task-{group_id}",
        leaf=0,
        token_ids=ids,
        mask=mask,
        logprobs=(mask * -math.log(vocab)).astype(np.float32),
        spans=np.array([[len(prompt), len(ids), 1, 1]], np.int32),
        reward=reward,
        outcome="scored",
    )


class FakeTrainer(NativeTrainer):
    """A bigram model in numpy that learns by policy gradient with momentum; for tests without torch."""

    rate = 0.5
    momentum = 0.9
    can_initialise = True

    def __init__(self, config: Any, context: BuildContext) -> None:
        super().__init__(config, context)
        self._logits = np.zeros((0, 0), np.float32)
        self._velocity = np.zeros((0, 0), np.float32)
        self._model_dir = Path()

    @classmethod
    def initialise_model(cls, model: Mapping[str, Any], directory: Path, seed: int) -> None:
        """Write a model whose tokens are all about as likely, and a tokenizer."""
        write_tokenizer(directory)
        vocab = int(model.get("vocab", DEFAULT_VOCAB))
        logits = np.random.default_rng(seed).normal(0, 0.01, (vocab, vocab)).astype(np.float32)
        (directory / "config.json").write_text(json.dumps({"model_type": "bigram", "vocab_size": vocab}))
        save_file({"logits": logits}, directory / "model.safetensors")

    def setup(self, model_dir: Path, *, total_steps: int, seed: int) -> None:
        """Read the weights."""
        self._model_dir = model_dir
        self._logits = _read(model_dir / "model.safetensors")["logits"]
        self._velocity = np.zeros_like(self._logits)

    def step(self, groups: Groups, step: int) -> dict[str, float]:
        """Follow the gradient of reward-weighted log-probabilities."""
        gradient, loss, tokens = np.zeros_like(self._logits), 0.0, 0
        for group in groups:
            mean = sum(sample.reward for sample in group) / len(group)
            for sample in group:
                for position in np.flatnonzero(sample.mask):
                    before, token = sample.token_ids[position - 1], sample.token_ids[position]
                    likely = np.exp(self._logits[before]) / np.exp(self._logits[before]).sum()
                    loss -= (sample.reward - mean) * float(np.log(likely[token]))
                    gradient[before] -= (sample.reward - mean) * likely
                    gradient[before, token] += sample.reward - mean
                    tokens += 1
        if tokens:
            self._velocity = (self.momentum * self._velocity + gradient / tokens).astype(np.float32)
            self._logits = self._logits + np.float32(self.rate) * self._velocity
        return {"train/loss": loss / max(1, tokens), "train/tokens": float(tokens), "train/lr": self.rate}

    def publish(self, directory: Path) -> None:
        """Write weights, config and tokenizer."""
        self._write(directory)
        _fsync_all(directory)

    def _write(self, directory: Path) -> None:
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (self._model_dir / name).exists():
                shutil.copyfile(self._model_dir / name, directory / name)
        save_file({"logits": self._logits}, directory / "model.safetensors")

    def save(self, directory: Path) -> None:
        """Write weights and momentum."""
        self._write(directory)
        save_file({"velocity": self._velocity}, directory / "velocity.safetensors")
        _fsync_all(directory)

    def load(self, directory: Path) -> None:
        """Restore weights and momentum."""
        self._logits = _read(directory / "model.safetensors")["logits"]
        self._velocity = _read(directory / "velocity.safetensors")["velocity"]


def _read(path: Path) -> Weights:
    try:
        return dict(load_file(path))
    except OSError as error:
        raise TrainerError(f"{path} cannot be read: {error}") from error


def _published(trainer: NativeTrainer, directory: Path) -> Weights:
    trainer.publish(_empty(directory))
    return dict(load_file(directory / "model.safetensors"))


def _empty(directory: Path) -> Path:
    directory.mkdir()
    return directory


def _fsync_all(directory: Path) -> None:
    for path in [*directory.iterdir(), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
