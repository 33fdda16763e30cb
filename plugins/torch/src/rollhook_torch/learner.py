"""The learner behind `trainer.torch`: model, optimizer, and the two algorithms."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollhook.durable import fsync_tree
from rollhook.errors import TrainerError
from rollhook.records import Sample
from rollhook.session.render import Renderer
from rollhook_torch.config import TrainerConfig
from rollhook_torch.losses import advantages, kl_k3, policy_loss, token_weights
from rollhook_torch.microbatch import Scored, TokenRow, pack, score
from rollhook_torch.rows import Rows
from rollhook_torch.schedule import learning_rate
from rollhook_torch.weights import (
    choose_device,
    load_into,
    load_model,
    read_file,
    save_model,
    save_tensors,
)

OPTIMIZER_FILE = "optimizer.safetensors"
REFERENCE_FILE = "reference.safetensors"
STATE_FILE = "trainer.json"
STATE_FORMAT = 1

#: (indices of a micro-batch's rows, their scores) -> loss per trained token [N]
TokenLoss = Callable[[list[int], Scored], Tensor]


class Learner:
    """Weights and optimizer in this process.

    The model stays in evaluation mode (no dropout), so that its probabilities are those that the engine
    sampled from. Nothing is random but the order of SFT rows and of mini-batches, both seeded.
    """

    def __init__(self, config: TrainerConfig, model_dir: Path, *, total_steps: int, seed: int) -> None:
        self._config = config
        self._total_steps = total_steps
        self._seed = seed
        self._tokenizer_from = model_dir
        self._model = load_model(model_dir, config.dtype, choose_device(config.device))
        self._reference: Any = None
        if config.algorithm == "grpo" and config.kl_coef > 0:
            self._reference = load_model(model_dir, config.dtype, self._model.device).requires_grad_(False)
        self._named = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        self._optimizer = torch.optim.AdamW(
            [
                {
                    "params": [p for p in self._named.values() if p.dim() >= 2],
                    "weight_decay": config.weight_decay,
                },
                {"params": [p for p in self._named.values() if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        self._rows: Rows | None = None
        if config.algorithm == "sft":
            assert config.data is not None
            self._rows = Rows(
                Path(config.data).expanduser(),
                Renderer(model_dir),
                seed=seed,
                max_tokens=getattr(self._model.config, "max_position_embeddings", None),
            )

    def step(self, groups: Sequence[Sequence[Sample]], step: int) -> dict[str, float]:
        """Train once and return metrics; a batch without trained tokens changes nothing."""
        started = time.perf_counter()
        rate = self._rate(step)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        metrics = self._sft(step) if self._rows is not None else self._grpo(groups, step)
        return {**metrics, "train/lr": rate, "train/step_seconds": time.perf_counter() - started}

    def publish(self, directory: Path) -> None:
        """Write an HF directory that `from_pretrained` loads."""
        save_model(self._model, directory, self._tokenizer_from)
        fsync_tree(directory)

    def save(self, directory: Path) -> None:
        """Write the model, the optimizer, the data position and, with KL, the reference."""
        save_model(self._model, directory, self._tokenizer_from)
        moments = {}
        for name, parameter in self._named.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                moments[f"{key}/{name}"] = torch.as_tensor(value)
        save_tensors(moments, directory / OPTIMIZER_FILE)
        if self._reference is not None:
            save_tensors(dict(self._reference.named_parameters()), directory / REFERENCE_FILE)
        state = {
            "format": STATE_FORMAT,
            "algorithm": self._config.algorithm,
            "position": self._rows.position if self._rows is not None else 0,
        }
        (directory / STATE_FILE).write_text(json.dumps(state))
        fsync_tree(directory)

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote. Raises TrainerError where it is not of this trainer and model."""
        try:
            state = json.loads((directory / STATE_FILE).read_text())
            moments = read_file(directory / OPTIMIZER_FILE)
            load_into(self._model, directory)
        except (OSError, ValueError) as error:
            raise TrainerError(
                f"{directory} is no checkpoint of trainer torch for this model: {error}"
            ) from error
        if state.get("format") != STATE_FORMAT or state.get("algorithm") != self._config.algorithm:
            raise TrainerError(
                f"{directory} was written with algorithm {state.get('algorithm')!r} and format "
                f"{state.get('format')!r}; this run wants {self._config.algorithm!r} and {STATE_FORMAT}"
            )
        self._optimizer.state.clear()
        for key, value in moments.items():
            kind, _, name = key.partition("/")
            parameter = self._named[name]
            self._optimizer.state[parameter][kind] = value.to(parameter.device)
        if self._reference is not None:
            tensors = read_file(directory / REFERENCE_FILE)
            with torch.no_grad():
                for name, parameter in self._reference.named_parameters():
                    parameter.copy_(tensors[name])
        if self._rows is not None:
            self._rows.position = int(state["position"])

    def _rate(self, step: int) -> float:
        config = self._config
        return learning_rate(
            step,
            self._total_steps,
            peak=config.lr,
            shape=config.lr_schedule,
            warmup_steps=config.warmup_steps,
            decay_fraction=config.decay_fraction,
            final_fraction=config.final_lr_fraction,
        )

    def _sft(self, step: int) -> dict[str, float]:
        assert self._rows is not None
        rows = [TokenRow(r.token_ids, r.mask) for r in self._rows.take(self._config.batch_rows)]
        meter = Meter()

        def token_loss(indices: list[int], scored: Scored) -> Tensor:
            meter.add("train/entropy", scored.entropy)
            return -scored.logprobs

        norm = self._update(rows, token_loss, meter, step, temperature=1.0)
        return {**meter.means(), "train/grad_norm": norm, "train/rows_seen": float(self._rows.position)}

    def _grpo(self, groups: Sequence[Sequence[Sample]], step: int) -> dict[str, float]:
        config = self._config
        rows = [row for group in groups for row in self._token_rows(group) if row.trained]
        if not rows:
            return {"train/tokens": 0.0, "train/sequences": 0.0}
        batches = self._minibatches(rows, step)
        before = [self._logprobs(self._model, b) if len(batches) > 1 else None for b in batches]
        meter = Meter()
        norms = [
            self._update(
                batch, self._grpo_loss(batch, old, meter), meter, step, temperature=config.temperature
            )
            for batch, old in zip(batches, before, strict=True)
        ]
        metrics = meter.means()
        metrics["train/loss"] /= len(batches)
        return {
            **metrics,
            "train/grad_norm": sum(norms) / len(norms),
            "train/sequences": float(len(rows)),
        }

    def _grpo_loss(self, rows: Sequence[TokenRow], old: list[Tensor] | None, meter: Meter) -> TokenLoss:
        """Return the loss per token for `rows`; `old` are their log-probabilities before the first update."""
        config = self._config
        reference = None if self._reference is None else self._logprobs(self._reference, rows)

        def token_loss(indices: list[int], scored: Scored) -> Tensor:
            logprobs = scored.logprobs
            engine = _flat([rows[i].trained_logprobs for i in indices], logprobs)
            advantage = _flat([np.full(rows[i].trained, rows[i].advantage) for i in indices], logprobs)
            before = logprobs.detach() if old is None else torch.cat([old[i] for i in indices])
            result = policy_loss(
                logprobs,
                before,
                engine,
                advantage,
                clip_low=config.clip_low,
                clip_high=config.clip_high,
                importance_cap=config.importance_cap,
            )
            meter.add("train/entropy", scored.entropy)
            meter.add("train/ratio", result.importance)
            meter.add("train/clip_fraction", result.clipped)
            meter.add("train/logprob_diff", (before - engine).abs())
            if reference is None:
                return result.loss
            kl = kl_k3(logprobs, torch.cat([reference[i] for i in indices]))
            meter.add("train/kl", kl.detach())
            return result.loss + config.kl_coef * kl

        return token_loss

    def _update(
        self, rows: Sequence[TokenRow], token_loss: TokenLoss, meter: Meter, step: int, *, temperature: float
    ) -> float:
        """Do one optimizer update and return the norm of the gradient before it was clipped.

        Every token's weight is set by the whole batch, so that the result does not depend on the packing.
        """
        self._optimizer.zero_grad(set_to_none=True)
        weights = token_weights([row.trained for row in rows], self._config.loss_mean)
        for indices in self._portions(rows):
            scored = score(self._model, [rows[i] for i in indices], temperature)
            weight = _flat([np.full(rows[i].trained, weights[i]) for i in indices], scored.logprobs)
            loss = (weight * token_loss(indices, scored)).sum()
            loss.backward()
            meter.add_sum("train/loss", loss.detach())
            meter.tokens += len(scored.logprobs)
        norm = float(torch.nn.utils.clip_grad_norm_(self._named.values(), self._config.grad_clip or math.inf))
        if not math.isfinite(norm):
            raise TrainerError(
                f"the gradient of step {step} is not finite, so the weights were left as they are; "
                "a lower trainer.lr or a trainer.grad_clip may help"
            )
        self._optimizer.step()
        return norm

    def _logprobs(self, model: Any, rows: Sequence[TokenRow]) -> list[Tensor]:
        """Return log-probabilities of the trained tokens of every row, without gradient."""
        result: list[Tensor] = [torch.empty(0)] * len(rows)
        with torch.no_grad():
            for indices in self._portions(rows):
                scored = score(model, [rows[i] for i in indices], self._config.temperature)
                parts = scored.logprobs.split([rows[i].trained for i in indices])
                for index, part in zip(indices, parts, strict=True):
                    result[index] = part
        return result

    def _portions(self, rows: Sequence[TokenRow]) -> list[list[int]]:
        return pack([len(row.token_ids) for row in rows], self._config.max_tokens_per_microbatch)

    def _minibatches(self, rows: list[TokenRow], step: int) -> list[list[TokenRow]]:
        """Split a batch for its updates, at random when there are several."""
        count = min(self._config.updates_per_step, len(rows))
        if count == 1:
            return [rows]
        order = np.random.default_rng([self._seed, step]).permutation(len(rows))
        return [[rows[i] for i in part] for part in np.array_split(order, count)]

    def _token_rows(self, group: Sequence[Sample]) -> list[TokenRow]:
        values = advantages(group, divide_by_std=self._config.advantage_std == "on")
        rows = []
        for sample, advantage in zip(group, values, strict=True):
            if len(sample.mask) and sample.mask[0]:
                raise TrainerError(
                    f"episode {sample.episode_id}: its first token is trained, but nothing precedes it"
                )
            rows.append(TokenRow(sample.token_ids, sample.mask, sample.logprobs, advantage))
        return rows


class Meter:
    """Sums of per-token values, and their means over tokens."""

    def __init__(self) -> None:
        self.tokens = 0
        self._sums: dict[str, float] = {}
        self._totals: dict[str, float] = {}

    def add(self, name: str, values: Tensor) -> None:
        """Add values [N], to be averaged over tokens."""
        self._sums[name] = self._sums.get(name, 0.0) + float(values.sum(dtype=torch.float64))

    def add_sum(self, name: str, value: Tensor) -> None:
        """Add a number that is a sum already."""
        self._totals[name] = self._totals.get(name, 0.0) + float(value)

    def means(self) -> dict[str, float]:
        """Return everything, with the number of tokens."""
        means = {name: total / self.tokens for name, total in self._sums.items()}
        return {**self._totals, **means, "train/tokens": float(self.tokens)}


def _flat(parts: Sequence[NDArray[Any]], like: Tensor) -> Tensor:
    """Return per-token numbers of several rows as one tensor like `like`."""
    return torch.as_tensor(np.concatenate(parts), dtype=like.dtype, device=like.device)
