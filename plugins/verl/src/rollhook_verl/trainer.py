"""`trainer.verl`: the job of a run whose loop and engines are verl's."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import ClassVar

from rollhook.launcher import Probe
from rollhook.recipe.schema import Recipe
from rollhook.trainer import HostedTrainer, Place, Rendered, Treatment
from rollhook_verl.config import VerlConfig
from rollhook_verl.overrides import LOOP, LOOP_FILE, MAIN, SFT, main_ppo, sft

_LOOP_CLASS = "rollhook_verl.bridge.RollhookAgentLoop"


class VerlTrainer(HostedTrainer):
    """Renders the overrides; `rollhook_verl.bridge` is the agent loop that verl calls."""

    config: VerlConfig

    treatment: ClassVar[Mapping[str, Treatment]] = {
        "name": "rendered",
        "needs": "refused",
        "model": "run",
        "model.path": "rendered",
        "model.init": "refused",
        "environment": "run",
        "environment.weight": "refused",
        "agent": "run",
        "sandbox": "run",
        "router": "refused",
        "router.use": "refused",
        "budgets": "run",
        "budgets.max_seq_len": "rendered",
        "engine": "rendered",
        "rollout": "refused",
        "rollout.group_size": "rendered",
        "rollout.batch_groups": "rendered",
        "rollout.refill_limit": "run",
        "rollout.drop_zero_variance": "rendered",
        "rollout.sampling": "rendered",
        "outcomes": "run",
        "evaluation": "refused",
        "evaluation.every": "rendered",
        "evaluation.split": "run",
        "evaluation.samples": "rendered",
        "evaluation.first": "rendered",
        "checkpoint": "rendered",
        "storage": "run",
        "gateway": "refused",
        "gateway.matcher": "run",
        "trainer": "rendered",
        "launcher": "run",
        "trackers": "run",
        "plugins": "run",
        "seed": "rendered",
        "steps": "rendered",
    }

    @classmethod
    def needs_rollouts(cls, config: VerlConfig) -> bool:
        """SFT has data of its own."""
        return config.algorithm != "sft"

    def render(self, recipe: Recipe, engine: Sequence[str], place: Place) -> Rendered:
        """Return the job: data from the recipe's tasks, then verl."""
        python = shlex.quote(self.config.python)
        probe = Probe("verl", f"{python} -c 'import verl, ray; import {MAIN}'")
        if self.config.algorithm == "sft":
            words = sft(recipe, self.config, place)
            return Rendered(_script(python, SFT, words), probes=[probe, _file(str(self.config.data))])
        words = main_ppo(recipe, self.config, engine, place)
        lock = '"$ROLLHOOK_JOB_FILES/recipe.lock.yaml"'
        data = f'{python} -m rollhook_verl.bridge.data {lock} "$ROLLHOOK_JOB_DIR/data"\n'
        loop = f"- name: {LOOP}\n  _target_: {_LOOP_CLASS}\n"
        bridge = Probe("bridge", f"{python} -c 'import rollhook_verl.bridge, sglang'")
        return Rendered(_script(python, MAIN, words, data), files={LOOP_FILE: loop}, probes=[probe, bridge])


def _script(python: str, module: str, words: Sequence[str], before: str = "") -> str:
    lines = " \\\n    ".join(_quoted(word) for word in words)
    return f"set -euo pipefail\n{before}exec {python} -m {module} \\\n    {lines}\n"


def _file(path: str) -> Probe:
    return Probe("data", f"test -e {shlex.quote(path)}")


def _quoted(word: str) -> str:
    """Return an override as it stands in the script; the job's own variables are the shell's to fill in."""
    key, equals, value = word.partition("=")
    if value.startswith(('"$ROLLHOOK_', "$ROLLHOOK_")):
        inner = value.strip('"')
        name, slash, rest = inner.partition("/")
        return f'{shlex.quote(key + equals)}"{name}"{shlex.quote(slash + rest) if slash else ""}'
    return shlex.quote(word)
