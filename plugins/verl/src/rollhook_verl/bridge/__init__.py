"""What verl calls: an agent loop that runs one of our episodes, tokens and all.

verl makes one `RollhookAgentLoop` per sample in its agent loop worker (verl 0.9.1,
verl/experimental/agent_loop); with `agent.num_workers=1` there is one such process. The episode's policy is
our own session, whose tokens verl's LLM servers generate, so what is trained on is what was generated. An
episode whose outcome does not train raises after `rollout.refill_limit` further tries: verl's group then
counts as failed, and is replaced.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollhook.errors import RollhookError
from rollhook.router import RouterPolicy, Worker
from rollhook.routing import Chain
from rollhook.runtime.hosted import HostedEpisodes, Row, asked_sampling
from rollhook.runtime.model import context_length, local_model, renderer, vocab_size
from rollhook.session import Limits, PolicyClient
from rollhook_verl.bridge.servers import Servers

if TYPE_CHECKING:
    from rollhook.records import Sample
    from rollhook.runtime.episode import EpisodeResult

logger = logging.getLogger(__name__)
#: under which our part of a row stands, in its `extra_info`
KEY = "rollhook"
#: verl balances its servers itself: for us they are one worker
ALL = Worker("http://verl")
#: one that fails is asked again, and is not waited for long: verl has started what can be started anew
LIMITS = Limits(attempts=3, no_worker=20.0, breaker_faults=1000)


@dataclass
class _Process:
    """What this process holds once the first episode was asked for."""

    opening: asyncio.Task[HostedEpisodes] | None = None
    policy: PolicyClient | None = None


_process = _Process()


class RollhookAgentLoop:
    """One sample: `_target_` of verl's agent loop configuration."""

    def __init__(self, trainer_config: Any, server_manager: Any, **_: Any) -> None:
        self._rollout = trainer_config.config.actor_rollout_ref.rollout
        self._servers = server_manager

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        """Return verl's output of a sample, a list of them where its agent branched.

        Raises RollhookError for an episode that does not train, or when none can be run at all.
        """
        episodes = await _episodes()
        about = dict(row["extra_info"][KEY])
        evaluation = about.pop("split") == "eval"
        group = f"g{row.get('uid') or row.get('index')}"
        cause = ""
        for left in range(episodes.recipe.rollout.refill_limit, -1, -1):
            result = await episodes.run(
                Row(**about),
                await _policy(episodes, self._servers),
                group_id=group,
                purpose="eval" if evaluation else "train",
                sampling=asked_sampling(sampling_params),
            )
            outcome = result.record.outcome
            if outcome.reward is not None and result.samples:
                return self._outputs(result)
            cause = outcome.cause or f"its outcome is {outcome.kind}"
            logger.warning("an episode does not train (%s); %d further tries", cause, left)
        raise RollhookError(f"an episode of task {about['task_id']} does not train: {cause}")

    def _outputs(self, result: EpisodeResult) -> Any:
        from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

        record = result.record
        versions = record.versions
        made = []
        for sample in result.samples:
            prompt, response, mask, logprobs = cut(sample)
            if len(prompt) > self._rollout.prompt_length:
                raise RollhookError(
                    f"the first prompt of task {record.task_id} has {len(prompt)} tokens, more than "
                    f"trainer.prompt_tokens, {self._rollout.prompt_length}"
                )
            output = AgentLoopOutput(
                prompt_ids=prompt,
                response_ids=response,
                response_mask=mask,
                response_logprobs=logprobs,
                reward_score=sample.reward,
                num_turns=sum(message["role"] != "system" for message in record.messages),
                metrics=AgentLoopMetrics(
                    generate_sequences=record.timings.get("agent/tokens", 0.0),
                    tool_calls=record.timings.get("agent/command", 0.0),
                ),
            )
            output.extra_fields.update(
                {
                    "turn_scores": [],
                    "tool_rewards": [],
                    "reward_extra_info": {"outcome": record.outcome.kind, "ended": record.ended},
                }
            )
            if versions is not None:
                output.extra_fields.update(min_global_steps=versions[0], max_global_steps=versions[1])
            made.append(output)
        return made[0] if len(made) == 1 else made


def cut(sample: Sample) -> tuple[list[int], list[int], list[int], list[float]]:
    """Return a sample as (prompt ids, response ids, response mask, response log-probabilities).

    The prompt ends before the first generated token; the mask is 1 where the policy generated. Tokens that
    were not generated have log-probability 0.
    """
    first = int(sample.mask.argmax())
    ids, mask = sample.token_ids.tolist(), sample.mask.tolist()
    return ids[:first], ids[first:], mask[first:], sample.logprobs[first:].tolist()


async def close() -> None:
    """End the episodes of this process; verl does not call it, tests do."""
    opening, policy = _process.opening, _process.policy
    _process.opening = _process.policy = None
    if policy is not None:
        await policy.close()
    if opening is not None and not (opening.done() and opening.exception()):
        await (await opening).aclose()


async def _episodes() -> HostedEpisodes:
    """Return the episodes of this process, opened once whoever asks first."""
    if _process.opening is None:
        _process.opening = asyncio.create_task(HostedEpisodes.of_job("verl"))
    return await asyncio.shield(_process.opening)


async def _policy(episodes: HostedEpisodes, servers: Any) -> PolicyClient:
    """Return the policy of this process: our sessions over verl's servers."""
    if _process.policy is None:
        recipe = episodes.recipe
        assert recipe.model is not None
        model_dir = local_model(str(recipe.model.path))
        made = PolicyClient(
            await asyncio.to_thread(renderer, recipe.model, model_dir),
            Chain([RouterPolicy(None, episodes.context("router"))]),
            Servers(servers, vocab_size(model_dir)),
            context_length=context_length(recipe.model, model_dir),
            pause_mode="in_place",
            limits=LIMITS,
        )
        made.matcher = recipe.gateway.matcher
        if _process.policy is None:
            _process.policy = made
            made.set_workers([ALL], 0)
    return _process.policy
