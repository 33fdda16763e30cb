"""What miles calls, by dotted path: generate, agent function, reward, and the filter of groups.

    --custom-generate-function-path rollhook_miles.bridge.generate
    --custom-agent-function-path rollhook_miles.bridge.run
    --custom-rm-path rollhook_miles.bridge.reward
    --dynamic-sampling-filter-path rollhook_miles.bridge.keep_group

Interfaces as of radixark/miles 31f1ca961 (miles/rollout/generate_hub/agentic_tool_call.py, rm_hub,
filter_hub). An agent function that returns nothing does not drop its sample there: turns that the session
server recorded train as reward 0. So `generate` asks for another episode in place of one that failed, and
what still failed is marked aborted, which miles' buffer never trains on."""

from __future__ import annotations

import asyncio
import logging
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import aiohttp

from rollhook.errors import RollhookError
from rollhook.runtime.hosted import HostedEpisodes, Row, asked_sampling
from rollhook.session import MessagePolicy
from rollhook_miles.bridge.session_engine import SessionEngine

if TYPE_CHECKING:
    from rollhook.records import EpisodeRecord

logger = logging.getLogger(__name__)
#: under which our part of a row's and of a sample's metadata stands
KEY = "rollhook"


class _Process:
    """What this process holds once the first episode was asked for."""

    opening: asyncio.Task[HostedEpisodes] | None = None
    http: aiohttp.ClientSession | None = None


_process = _Process()
#: what the agent function is not told: the sample's group, and whether it is an evaluation
_asked: ContextVar[tuple[str, bool]] = ContextVar("asked", default=("", False))


async def generate(input: Any) -> Any:  # noqa: A002 - miles' name
    """Generate one sample: miles' own agentic generation around our agent function.

    An episode whose outcome does not train is made again, up to `rollout.refill_limit` times; then its
    samples are marked aborted. Raises RollhookError, which ends the run, when no episode can be run at all.
    """
    from miles.rollout.generate_hub import agentic_tool_call

    episodes = await _episodes()
    _asked.set((f"g{input.sample.group_index}", bool(input.evaluation)))
    for left in range(episodes.recipe.rollout.refill_limit, -1, -1):
        output = await agentic_tool_call.generate(input)
        samples = output.samples if isinstance(output.samples, list) else [output.samples]
        if all(_trains(sample) for sample in samples):
            break
        note: dict[str, Any] = next(
            (sample.metadata[KEY] for sample in samples if "outcome" in sample.metadata.get(KEY, {})), {}
        )
        cause = note.get("cause") or "no turn was recorded"
        logger.warning("an episode does not train (%s); %d further tries", cause, left)
    else:
        for sample in samples:
            _give_up(sample, evaluation=bool(input.evaluation))
    return output


def _add_arguments(parser: Any) -> None:
    from miles.rollout.generate_hub import agentic_tool_call

    agentic_tool_call.generate.add_arguments(parser)


generate.add_arguments = _add_arguments  # type: ignore[attr-defined]


async def run(
    base_url: str, prompt: Any, request_kwargs: dict[str, Any], metadata: dict[str, Any], **_: Any
) -> dict[str, Any]:
    """Run one episode against a session of miles' session server; the agent function of miles."""
    episodes = await _episodes()
    group, evaluation = _asked.get()
    row = Row(**{name: metadata[KEY][name] for name in ("environment", "task_id", "digest")})
    policy = MessagePolicy(SessionEngine(base_url, _http_session()))
    try:
        result = await episodes.run(
            row,
            policy,
            group_id=group,
            purpose="eval" if evaluation else "train",
            sampling=asked_sampling(request_kwargs),
        )
    finally:
        await policy.close()
    record = result.record
    return {
        KEY: {**metadata[KEY], **_note(record)},
        "agent_metrics": _metrics(record),
        "end_reason": record.ended,
    }


async def reward(args: Any, samples: Any, **_: Any) -> float | list[float]:
    """Return the reward of a sample, or those of several. Raises RollhookError where one is missing."""
    if isinstance(samples, list):
        return [_reward(sample) for sample in samples]
    return _reward(samples)


def keep_group(args: Any, samples: list[Any], **_: Any) -> Any:
    """Say whether a group trains: none with an aborted sample, nor, by the recipe, one without variance."""
    from miles.rollout.filter_hub.base_types import DynamicFilterOutput

    flat = [each for sample in samples for each in (sample if isinstance(sample, list) else [sample])]
    if any(sample.status.value == "aborted" for sample in flat):
        return DynamicFilterOutput(keep=False, reason="group_has_aborted")
    episodes = _process.opening.result() if _process.opening is not None else None
    drop = episodes is not None and episodes.recipe.rollout.drop_zero_variance
    if drop and len({_reward(sample) for sample in flat}) == 1:
        return DynamicFilterOutput(keep=False, reason="zero_variance")
    return DynamicFilterOutput(keep=True)


async def close() -> None:
    """End the episodes of this process; miles does not call it, tests do."""
    opening, http = _process.opening, _process.http
    _process.opening = _process.http = None
    if opening is not None and not (opening.done() and opening.exception()):
        await (await opening).aclose()
    if http is not None:
        await http.close()


async def _episodes() -> HostedEpisodes:
    """Return the episodes of this process, opened once whoever asks first."""
    if _process.opening is None:
        _process.opening = asyncio.create_task(HostedEpisodes.of_job("miles"))
    return await asyncio.shield(_process.opening)


def _http_session() -> aiohttp.ClientSession:
    if _process.http is None:
        _process.http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    return _process.http


def _note(record: EpisodeRecord) -> dict[str, Any]:
    outcome = record.outcome
    return {
        "episode_id": record.episode_id,
        "outcome": outcome.kind,
        "boundary": outcome.boundary,
        "cause": outcome.cause,
        "ended": record.ended,
        "reward": outcome.reward,
        "fired": record.fired,
    }


def _metrics(record: EpisodeRecord) -> dict[str, float]:
    tools = sum(record.timings.get(name, 0.0) for name in ("agent/command", "create", "setup", "verify"))
    return {"total_tool_time": tools, "turns": sum(m["role"] == "assistant" for m in record.messages)}


def _trains(sample: Any) -> bool:
    return sample.status.value != "aborted" and sample.metadata.get(KEY, {}).get("reward") is not None


def _give_up(sample: Any, *, evaluation: bool) -> None:
    """Keep a sample out of training; miles' evaluation cannot leave one out, so there it counts as 0."""
    if evaluation:
        sample.reward = 0.0
        logger.warning("a failed episode counts as 0 in miles' evaluation; its record says why it failed")
    else:
        sample.status = type(sample.status).ABORTED


def _reward(sample: Any) -> float:
    note = sample.metadata.get(KEY, {})
    if note.get("reward") is None:
        raise RollhookError(f"a sample has no reward: {note.get('cause') or 'its episode has no outcome'}")
    return float(note["reward"])
