"""The trainer as a whole: its contract, and steps against slow implementations of what they minimise."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollhook.component import BuildContext
from rollhook.errors import TrainerError
from rollhook.records import Sample
from rollhook.testing.trainer import MakeTrainer, TrainerContract, batch
from rollhook_torch.config import TrainerConfig
from rollhook_torch.trainer import TorchTrainer
from rollhook_torch.weights import load_model, read_tensors

VOCAB = 250


def make(context: BuildContext, **keys: Any) -> TorchTrainer:
    return TorchTrainer(TrainerConfig(lr=1e-2, threads=1, **keys), context)


def ready(context: BuildContext, model_dir: Path, total_steps: int = 10, **keys: Any) -> TorchTrainer:
    trainer = make(context, **keys)
    trainer.setup(model_dir, total_steps=total_steps, seed=0)
    return trainer


def published(trainer: TorchTrainer, directory: Path) -> dict[str, torch.Tensor]:
    trainer.publish(directory)
    return read_tensors(directory)


def gradients(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    """Return the gradients of the step before."""
    learner = trainer._learner
    assert learner is not None
    return {name: p.grad for name, p in learner._model.named_parameters() if p.grad is not None}


class TestTorchTrainer(TrainerContract):
    vocab = VOCAB
    tolerance = 1e-7

    @pytest.fixture
    def make_trainer(self, context: BuildContext) -> MakeTrainer:
        return lambda: make(context)

    @pytest.fixture
    def model_dir(self, model_dir: Path) -> Path:
        return model_dir


class TestTorchTrainerWithEverything(TestTorchTrainer):
    @pytest.fixture
    def make_trainer(self, context: BuildContext) -> MakeTrainer:
        return lambda: make(
            context, kl_coef=0.1, updates_per_step=3, loss_mean="sequence", weight_decay=0.1,
            lr_schedule="cosine", warmup_steps=2, max_tokens_per_microbatch=20,
        )  # fmt: skip


# -- GRPO against loops


def on_policy(groups: Sequence[Sequence[Sample]], model_dir: Path, shift: float = 0.0) -> list[list[Sample]]:
    """Return the groups with the engine's log-probabilities near those of the model."""
    model = load_model(model_dir, "float64", torch.device("cpu"))
    rng = np.random.default_rng(1)
    made = []
    for group in groups:
        made.append([])
        for sample in group:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([sample.token_ids.tolist()])).logits[0]
            logps = logits.log_softmax(-1)
            own = [0.0] + [float(logps[i - 1, t]) for i, t in enumerate(sample.token_ids) if i]
            noise = shift * rng.normal(size=len(own))
            made[-1].append(
                replace(sample, logprobs=((np.array(own) + noise) * sample.mask).astype(np.float32))
            )
    return made


def slow_grpo(
    model: Any, groups: Sequence[Sequence[Sample]], *, divide: bool, mean: str, cap: float, temperature: float
) -> torch.Tensor:
    """One on-policy update: GRPO's objective, a loop over groups, episodes and tokens, float64."""
    sequences = []
    for group in groups:
        rewards = [s.reward for s in group]
        average = sum(rewards) / len(rewards)
        deviation = math.sqrt(sum((r - average) ** 2 for r in rewards) / (len(rewards) - 1))
        for sample in group:
            advantage = (sample.reward - average) / ((deviation + 1e-6) if divide else 1.0)
            logits = model(input_ids=torch.tensor([sample.token_ids.tolist()])).logits[0] / temperature
            losses = []
            for position in np.flatnonzero(sample.mask):
                row = logits[position - 1]
                logp = row[sample.token_ids[position]] - row.exp().sum().log()
                ratio = (logp - logp.detach()).exp()
                weight = min(math.exp(float(logp.detach()) - float(sample.logprobs[position])), cap)
                losses.append(-weight * ratio * advantage)
            sequences.append(losses)
    if mean == "token":
        flat = [loss for losses in sequences for loss in losses]
        return torch.stack(flat).mean()
    return torch.stack([torch.stack(losses).mean() for losses in sequences]).mean()


@pytest.mark.parametrize("divide", [True, False], ids=["std", "no-std"])
@pytest.mark.parametrize("mean", ["token", "sequence"])
@pytest.mark.parametrize(("shift", "temperature"), [(0.0, 1.0), (0.9, 1.0), (0.5, 0.8)])
def test_a_grpo_step_is_the_papers_gradient(
    context: BuildContext, model_dir: Path, divide: bool, mean: str, shift: float, temperature: float
) -> None:
    groups = on_policy(batch(0, VOCAB), model_dir, shift)
    model = load_model(model_dir, "float64", torch.device("cpu"))
    loss = slow_grpo(model, groups, divide=divide, mean=mean, cap=2.0, temperature=temperature)
    loss.backward()
    trainer = ready(
        context,
        model_dir,
        advantage_std="on" if divide else "off",
        loss_mean=mean,
        grad_clip=None,
        temperature=temperature,
    )
    metrics = trainer.step(groups, 0)
    assert metrics["train/loss"] == pytest.approx(loss.item(), abs=1e-5)
    found = gradients(trainer)
    for name, parameter in model.named_parameters():
        assert torch.allclose(found[name].double(), parameter.grad, atol=1e-5), name
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in model.parameters()))
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_a_second_update_is_clipped_against_the_probabilities_before_the_step(
    context: BuildContext, model_dir: Path
) -> None:
    groups = on_policy(batch(0, VOCAB), model_dir)
    one = ready(context, model_dir).step(groups, 0)
    several = ready(context, model_dir, updates_per_step=4).step(groups, 0)
    assert one["train/clip_fraction"] == 0.0
    assert several["train/clip_fraction"] > 0.0
    assert several["train/logprob_diff"] == pytest.approx(one["train/logprob_diff"], abs=1e-6)


def test_on_policy_the_ratio_is_one_and_the_difference_nothing(
    context: BuildContext, model_dir: Path
) -> None:
    metrics = ready(context, model_dir).step(on_policy(batch(0, VOCAB), model_dir), 0)
    assert metrics["train/logprob_diff"] < 1e-5
    assert metrics["train/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["train/tokens"] == sum(int(s.mask.sum()) for g in batch(0, VOCAB) for s in g)
    assert 0 < metrics["train/entropy"] <= math.log(300)


def test_kl_is_k3_to_the_initial_weights_and_pulls_back(context: BuildContext, model_dir: Path) -> None:
    groups = on_policy(batch(0, VOCAB), model_dir)
    trainer = ready(context, model_dir, kl_coef=0.5)
    first = trainer.step(groups, 0)
    assert first["train/kl"] == pytest.approx(0.0, abs=1e-7)
    model = trainer._learner._model  # type: ignore[union-attr]
    initial = load_model(model_dir, "float64", torch.device("cpu"))
    wanted = []
    with torch.no_grad():
        for sample in (s for g in groups for s in g):
            ids = torch.tensor([sample.token_ids.tolist()])
            now = model(input_ids=ids).logits[0].double().log_softmax(-1)
            then = initial(input_ids=ids).logits[0].log_softmax(-1)
            for position in np.flatnonzero(sample.mask):
                token = sample.token_ids[position]
                d = float(then[position - 1, token] - now[position - 1, token])
                wanted.append(math.exp(d) - d - 1)
    second = trainer.step(groups, 1)
    assert second["train/kl"] == pytest.approx(sum(wanted) / len(wanted), rel=1e-3)
    free = ready(context, model_dir)
    free.step(groups, 0)
    for step in range(1, 6):
        trainer.step(groups, step)
        free.step(groups, step)
    assert trainer.step(groups, 6)["train/kl"] > 0
    assert trainer.step(groups, 6)["train/logprob_diff"] < free.step(groups, 6)["train/logprob_diff"]


@pytest.mark.parametrize("max_tokens", [1, 20, 10_000])
def test_the_packing_does_not_change_the_step(
    context: BuildContext, model_dir: Path, tmp_path: Path, max_tokens: int
) -> None:
    groups = on_policy(batch(0, VOCAB), model_dir, 0.3)
    whole = ready(context, model_dir)
    parts = ready(context, model_dir, max_tokens_per_microbatch=max_tokens)
    a, b = whole.step(groups, 0), parts.step(groups, 0)
    for name in set(a) - {"train/step_seconds"}:
        assert a[name] == pytest.approx(b[name], abs=1e-5), name
    for name, gradient in gradients(whole).items():
        assert torch.allclose(gradient, gradients(parts)[name], atol=1e-6), name


def test_the_likelihood_of_what_was_rewarded_rises(context: BuildContext, model_dir: Path) -> None:
    groups = on_policy(batch(0, VOCAB, groups=1), model_dir)
    trainer = ready(context, model_dir, importance_cap=None)

    def likelihood(sample: Sample) -> float:
        model = trainer._learner._model  # type: ignore[union-attr]
        with torch.no_grad():
            logps = model(input_ids=torch.tensor([sample.token_ids.tolist()])).logits[0].log_softmax(-1)
        return sum(float(logps[i - 1, sample.token_ids[i]]) for i in np.flatnonzero(sample.mask))

    (good,) = [s for s in groups[0] if s.reward == 1.0]
    before = likelihood(good)
    for step in range(3):
        trainer.step(groups, step)
    assert likelihood(good) > before + 1


def test_a_first_token_cannot_be_trained(context: BuildContext, model_dir: Path) -> None:
    sample = batch(0, VOCAB)[0][0]
    broken = replace(sample, mask=np.ones_like(sample.mask))
    with pytest.raises(TrainerError, match=f"episode {sample.episode_id}.*first token"):
        ready(context, model_dir).step([[broken]], 0)


def test_a_gradient_that_is_not_finite_leaves_the_weights(
    context: BuildContext, model_dir: Path, tmp_path: Path
) -> None:
    groups = batch(0, VOCAB)
    poisoned = [[replace(s, reward=float("nan")) for s in g] for g in groups]
    trainer = ready(context, model_dir)
    before = published(trainer, tmp_path / "before")
    with pytest.raises(TrainerError, match="step 0 is not finite"):
        trainer.step(poisoned, 0)
    after = published(trainer, tmp_path / "after")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_matrices_decay_and_norms_do_not(context: BuildContext, model_dir: Path, tmp_path: Path) -> None:
    groups = on_policy(batch(0, VOCAB), model_dir)
    flat = [[replace(s, reward=0.0) for s in g] for g in groups]
    trainer = ready(context, model_dir, weight_decay=0.5)
    before = published(trainer, tmp_path / "before")
    trainer.step(flat, 0)
    after = published(trainer, tmp_path / "after")
    for name, tensor in before.items():
        wanted = tensor * (1 - 1e-2 * 0.5) if tensor.dim() > 1 else tensor
        assert torch.allclose(after[name], wanted, atol=1e-6), name


# -- SFT


def sft(context: BuildContext, model_dir: Path, rows: Path, **keys: Any) -> TorchTrainer:
    return ready(context, model_dir, **{"algorithm": "sft", "data": str(rows), "batch_rows": 3, **keys})


@pytest.mark.parametrize("mean", ["token", "sequence"])
def test_an_sft_step_is_the_mean_of_the_replies_negative_log_likelihood(
    context: BuildContext, model_dir: Path, rows_file: Path, mean: str
) -> None:
    trainer = sft(context, model_dir, rows_file, loss_mean=mean, grad_clip=None)
    rows = trainer._learner._rows.take(3)  # type: ignore[union-attr]
    trainer._learner._rows.position = 0  # type: ignore[union-attr]
    model = load_model(model_dir, "float64", torch.device("cpu"))
    sequences = []
    for item in rows:
        logits = model(input_ids=torch.tensor([item.token_ids.tolist()])).logits[0]
        losses = []
        for position in np.flatnonzero(item.mask):
            losses.append(
                logits[position - 1].exp().sum().log() - logits[position - 1][item.token_ids[position]]
            )
        sequences.append(losses)
    if mean == "token":
        loss = torch.stack([one for losses in sequences for one in losses]).mean()
    else:
        loss = torch.stack([torch.stack(losses).mean() for losses in sequences]).mean()
    loss.backward()
    metrics = trainer.step([], 0)
    assert metrics["train/loss"] == pytest.approx(loss.item(), abs=1e-5)
    found = gradients(trainer)
    for name, parameter in model.named_parameters():
        assert torch.allclose(found[name].double(), parameter.grad, atol=1e-5), name


def test_sft_learns_its_rows(context: BuildContext, model_dir: Path, rows_file: Path) -> None:
    trainer = sft(context, model_dir, rows_file, batch_rows=7)
    losses = [trainer.step([], step)["train/loss"] for step in range(30)]
    assert losses[-1] < losses[0] / 10
    assert not TorchTrainer.needs_rollouts(trainer.config)


def test_a_resumed_sft_step_sees_the_next_rows(
    context: BuildContext, model_dir: Path, rows_file: Path, tmp_path: Path
) -> None:
    trainer = sft(context, model_dir, rows_file)
    for step in range(3):
        trainer.step([], step)
    (tmp_path / "checkpoint").mkdir()
    trainer.save(tmp_path / "checkpoint")
    straight = [trainer.step([], step)["train/loss"] for step in range(3, 6)]
    resumed = sft(context, model_dir, rows_file)
    resumed.load(tmp_path / "checkpoint")
    assert [resumed.step([], step)["train/loss"] for step in range(3, 6)] == pytest.approx(straight, rel=1e-6)


def test_a_checkpoint_of_another_algorithm_is_refused(
    context: BuildContext, model_dir: Path, rows_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "checkpoint").mkdir()
    sft(context, model_dir, rows_file).save(tmp_path / "checkpoint")
    with pytest.raises(TrainerError, match=r"'sft'.*'grpo'"):
        ready(context, model_dir).load(tmp_path / "checkpoint")


def test_published_weights_load_with_transformers_and_generate(
    context: BuildContext, model_dir: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer = ready(context, model_dir)
    trainer.publish(tmp_path / "weights")
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path / "weights"))
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path / "weights"))
    chat = [{"role": "user", "content": "Delete amber.txt."}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == "<|im_start|>user\nDelete amber.txt.<|im_end|>\n<|im_start|>assistant\n"
    assert (
        model.config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    )
    output = model(input_ids=torch.tensor([ids]))
    assert output.logits.shape == (1, len(ids), model.config.vocab_size)


def test_a_step_before_setup_says_so(context: BuildContext) -> None:
    with pytest.raises(TrainerError, match="not set up"):
        make(context).step([], 0)


def test_a_gpu_that_is_not_there_is_said_in_one_sentence(context: BuildContext, model_dir: Path) -> None:
    with pytest.raises(TrainerError, match="device cuda:99: torch sees no such GPU here; cpu or auto works"):
        ready(context, model_dir, device="cuda:99")


def test_the_tied_embedding_is_stored_once(model_dir: Path) -> None:
    names = read_tensors(model_dir)
    assert "lm_head.weight" not in names
    assert json.loads((model_dir / "config.json").read_text())["tie_word_embeddings"] is True


@pytest.mark.parametrize("keys", [{"algorithm": "sft"}, {"data": "rows.jsonl"}])
def test_keys_that_do_not_belong_together_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="data"):
        TrainerConfig(**keys)


MakeModel = Callable[..., Path]


def test_weights_of_another_shape_are_refused_and_nothing_changes(
    context: BuildContext, model_dir: Path, make_model: MakeModel, tmp_path: Path
) -> None:
    (tmp_path / "checkpoint").mkdir()
    ready(context, make_model(hidden_size=16)).save(tmp_path / "checkpoint")
    trainer = ready(context, model_dir)
    before = published(trainer, tmp_path / "before")
    with pytest.raises(TrainerError, match="do not fit"):
        trainer.load(tmp_path / "checkpoint")
    after = published(trainer, tmp_path / "after")
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("value", [False, "off"])
def test_yamls_own_reading_of_off_is_off(value: object) -> None:
    assert TrainerConfig(advantage_std=value).advantage_std == "off"
