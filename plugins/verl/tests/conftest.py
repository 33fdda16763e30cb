"""A run of toy parts with a real tokenizer, and stand-ins for verl's outputs and LLM servers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollhook.testing.distributions import write_distribution
from rollhook.testing.tokenizer import write_tokenizer

TOYS = '''
from rollhook import Component, Config, hookimpl
from rollhook.agent import Agent, StopReason
from rollhook.errors import SandboxError
from rollhook.testing.fake_environment import SumsConfig


class Asks(Agent):
    """Asks once, and once more where it is told to; the policy's word `break` breaks the machinery."""

    async def run(self, context):
        messages = list(context.observation.messages)
        while True:
            reply = await context.session.chat(messages)
            said = reply.message.get("content") or ""
            if "break" in said:
                raise SandboxError("the sandbox is gone")
            if "more" not in said:
                return StopReason.LENGTH if reply.finish_reason == "length" else StopReason.DONE
            messages += [reply.message, {"role": "user", "content": "And?"}]


@hookimpl
def rollhook_environments():
    return [Component("sums", SumsConfig, "rollhook.testing.fake_environment:Sums", "sums")]


@hookimpl
def rollhook_agents():
    return [Component("asks", Config, "toys_of_verl:Asks", "asks")]
'''
RECIPE = """\
name: sums
model: {{path: {model}, context_length: 4096}}
environment: {{use: sums, split: train}}
agent: asks
engine: {{use: sglang}}
budgets: {{max_seq_len: 2048, reply_tokens: 64}}
rollout: {{group_size: 2, batch_groups: 1, refill_limit: 2}}
trainer: {{use: verl}}
launcher: {{use: ray, gpus_per_node: 8}}
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of a run whose job has been delivered."""
    site, job, model = tmp_path / "site", tmp_path / "runs/sums-1/attempts/1", tmp_path / "model"
    site.mkdir()
    points = {"environment.sums": "toys_of_verl", "agent.asks": "toys_of_verl"}
    write_distribution(site, "rollhook-toys", entry_points=points, modules={"toys_of_verl": TOYS})
    monkeypatch.syspath_prepend(site)
    monkeypatch.syspath_prepend(Path(__file__).parent / "stand_in")
    model.mkdir()
    write_tokenizer(model)
    (job / "job").mkdir(parents=True)
    (job / "job/recipe.lock.yaml").write_text(RECIPE.format(model=model))
    monkeypatch.setenv("ROLLHOOK_JOB_DIR", str(job))
    monkeypatch.setenv("ROLLHOOK_JOB_FILES", str(job / "job"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield job.parent.parent
    for name in [name for name in sys.modules if name.split(".")[0] in ("verl", "toys_of_verl")]:
        del sys.modules[name]


class StandInServers:
    """A stand-in for verl's LLM servers: says `words`, one per request, then the last for ever."""

    def __init__(self, model: Path) -> None:
        import tokenizers

        self._tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
        self._end = self._tokenizer.token_to_id("<|im_end|>")
        self.words: list[str] = ["42"]
        self.asked: list[dict[str, Any]] = []
        self.emitted: list[list[int]] = []

    async def generate(self, request_id: str, *, prompt_ids: Any, sampling_params: Any) -> Any:
        self.asked.append({"request_id": request_id, "prompt_ids": prompt_ids, **sampling_params})
        word = self.words.pop(0) if len(self.words) > 1 else self.words[0]
        if word == "down":
            raise RuntimeError("the actor died")
        if word == "right":
            text = self._tokenizer.decode(prompt_ids, skip_special_tokens=False)
            terms = text.rpartition("What is ")[2].split()
            word = str(int(terms[0]) + int(terms[2].rstrip("?")))
        ids = [*self._tokenizer.encode(word).ids, self._end]
        self.emitted.append(ids)
        return SimpleNamespace(
            token_ids=ids, log_probs=[-0.5 - n / 100 for n in range(len(ids))], stop_reason="completed"
        )


@pytest.fixture
def servers(run: Path, tmp_path: Path) -> StandInServers:
    """What generates."""
    return StandInServers(tmp_path / "model")
