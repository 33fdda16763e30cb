"""The trainer contract holds for a correct trainer, and each broken one fails just its cases."""

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollhook.component import BuildContext
from rollhook.testing.contract import failing_cases
from rollhook.testing.trainer import FakeTrainer, Groups, MakeTrainer, TrainerContract

CONTEXT = BuildContext(logging.getLogger("test"), scratch=Path(), cache=Path())


def make(kind: type[FakeTrainer]) -> MakeTrainer:
    return lambda: kind(None, CONTEXT)


class TestFakeTrainer(TrainerContract):
    @pytest.fixture
    def make_trainer(self) -> MakeTrainer:
        return make(FakeTrainer)

    @pytest.fixture
    def model_dir(self, tmp_path: Path) -> Path:
        FakeTrainer.initialise_model({}, tmp_path / "model", 0)
        return tmp_path / "model"


class NamesLoss(FakeTrainer):
    def step(self, groups: Groups, step: int) -> dict[str, float]:
        return {"loss": super().step(groups, step)["train/loss"], "train/loss": 0.0}


class Stands(FakeTrainer):
    rate = 0.0


class IgnoresRewards(FakeTrainer):
    def step(self, groups: Groups, step: int) -> dict[str, float]:
        metrics = super().step(groups, step)
        self._logits = self._logits * np.float32(0) + np.float32(step + 1 if groups else 0)
        return metrics


class ThrowsDice(FakeTrainer):
    def step(self, groups: Groups, step: int) -> dict[str, float]:
        metrics = super().step(groups, step)
        if groups:
            noise = np.random.default_rng(os.getpid() + id(self)).normal(size=self._logits.shape)
            self._logits = self._logits + noise.astype(np.float32)
        return metrics


class DecaysAnyway(FakeTrainer):
    def step(self, groups: Groups, step: int) -> dict[str, float]:
        metrics = super().step(groups, step)
        self._logits = self._logits * np.float32(0.9)
        return metrics


class WritesIntoSamples(FakeTrainer):
    def step(self, groups: Groups, step: int) -> dict[str, float]:
        for group in groups:
            for sample in group:
                sample.logprobs[:] = 0
        return super().step(groups, step)


class ForgetsTheTokenizer(FakeTrainer):
    def publish(self, directory: Path) -> None:
        super().publish(directory)
        (directory / "tokenizer.json").unlink(missing_ok=True)


class PublishesWhatItStartedWith(FakeTrainer):
    def setup(self, model_dir: Path, *, total_steps: int, seed: int) -> None:
        super().setup(model_dir, total_steps=total_steps, seed=seed)
        self._first = self._logits

    def publish(self, directory: Path) -> None:
        now, self._logits = self._logits, self._first
        super().publish(directory)
        self._logits = now


class LosesMomentumOnPublishing(FakeTrainer):
    def publish(self, directory: Path) -> None:
        super().publish(directory)
        self._velocity = np.zeros_like(self._velocity)


class ForgetsMomentum(FakeTrainer):
    def load(self, directory: Path) -> None:
        super().load(directory)
        self._velocity = np.zeros_like(self._velocity)


class ReportsDice(FakeTrainer):
    def step(self, groups: Groups, step: int) -> dict[str, float]:
        return {**super().step(groups, step), "train/dice": float(np.random.default_rng().normal())}


class StartsAfresh(FakeTrainer):
    def load(self, directory: Path) -> None:
        if not any(directory.iterdir()):
            self.setup(self._model_dir, total_steps=1, seed=0)
            return
        super().load(directory)


class MovesWhileSaving(FakeTrainer):
    def save(self, directory: Path) -> None:
        super().save(directory)
        self._logits = self._logits + np.float32(1)


class StartsFromNothing(FakeTrainer):
    def setup(self, model_dir: Path, *, total_steps: int, seed: int) -> None:
        if not model_dir.exists():
            return
        super().setup(model_dir, total_steps=total_steps, seed=seed)


class ClosesOnce(FakeTrainer):
    _closed = False

    def close(self) -> None:
        if self._closed:
            raise RuntimeError("closed already")
        self._closed = True


BROKEN: dict[type[FakeTrainer], set[str]] = {
    NamesLoss: {"test_a_step_reports_finite_metrics_under_train"},
    Stands: {"test_a_step_changes_the_weights", "test_rewards_decide_the_direction"},
    IgnoresRewards: {"test_rewards_decide_the_direction", "test_a_batch_without_groups_leaves_the_weights"},
    ThrowsDice: {
        "test_the_same_batches_and_seed_give_the_same_weights",
        "test_publishing_changes_nothing",
        "test_a_resumed_step_gives_what_it_would_have_given",
    },
    DecaysAnyway: {"test_a_batch_without_groups_leaves_the_weights"},
    WritesIntoSamples: {"test_samples_are_left_as_they_are"},
    ForgetsTheTokenizer: {"test_published_weights_are_a_model_directory"},
    PublishesWhatItStartedWith: {
        "test_a_step_changes_the_weights",
        "test_rewards_decide_the_direction",
    },
    LosesMomentumOnPublishing: {"test_publishing_changes_nothing"},
    ForgetsMomentum: {"test_a_resumed_step_gives_what_it_would_have_given"},
    ReportsDice: {"test_the_same_batch_on_the_same_checkpoint_gives_the_same_metrics"},
    StartsAfresh: {"test_a_directory_that_is_no_checkpoint_is_refused_in_words"},
    MovesWhileSaving: {
        "test_a_resumed_step_gives_what_it_would_have_given",
        "test_saving_changes_nothing_and_a_checkpoint_does_not_change_later",
    },
    StartsFromNothing: {"test_absent_weights_are_refused_in_words"},
    ClosesOnce: {"test_close_is_safe_before_setup_and_twice"},
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda kind: kind.__name__)
def test_a_broken_trainer_fails_just_its_cases(broken: type[FakeTrainer], tmp_path: Path) -> None:
    FakeTrainer.initialise_model({}, tmp_path / "model", 0)
    fixtures: dict[str, Callable[[], Any]] = {
        "make_trainer": lambda: make(broken),
        "model_dir": lambda: tmp_path / "model",
        "tmp_path": lambda: Path(tempfile.mkdtemp(dir=tmp_path)),
    }
    assert failing_cases(TrainerContract, fixtures) == BROKEN[broken]
