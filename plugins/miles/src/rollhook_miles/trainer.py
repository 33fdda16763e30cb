"""`trainer.miles`: the job of a run whose loop and engines are miles'."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import ClassVar

from rollhook.launcher import Probe
from rollhook.recipe.schema import Recipe
from rollhook.trainer import HostedTrainer, Place, Rendered, Treatment
from rollhook_miles.arguments import Run, arguments
from rollhook_miles.config import MilesConfig

#: delivered beside the script: environment of all workers
WORKER_ENV = "miles_env.json"
#: of every worker, as the reference sets it; `MilesConfig.env` goes before
_ENV = {
    "PYTHONUNBUFFERED": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "4096",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/tmp/nccl_trace",  # noqa: S108 - NCCL adds rank and pid
    "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "256",
    "SGLANG_NSA_FORCE_MLA": "1",
    "TRITON_CACHE_DIR": "/tmp/triton_cache",  # noqa: S108 - on the node: on shared storage compilers race
    "TVM_FFI_CACHE_DIR": "/tmp/tvm_ffi_cache",  # noqa: S108
    "INDEXER_ROPE_NEOX_STYLE": "0",
    "NVSHMEM_DISABLE_NCCL": "1",
}
_MODEL_ARGUMENTS = (
    "import sys; from miles.utils.external_utils.model_args_utils import shell_safe_model_args as a; "
    "print(a(sys.argv[1]))"
)


class MilesTrainer(HostedTrainer):
    """Renders the command line; `rollhook_miles.bridge` is what miles calls."""

    config: MilesConfig

    treatment: ClassVar[Mapping[str, Treatment]] = {
        "name": "run",
        "needs": "refused",
        "model": "refused",
        "model.path": "rendered",
        "model.context_length": "run",
        "environment": "run",
        "environment.weight": "refused",
        "agent": "run",
        "sandbox": "run",
        "router": "refused",
        "router.use": "rendered",
        "budgets": "run",
        "budgets.max_seq_len": "rendered",
        "budgets.reply_tokens": "rendered",
        "engine": "rendered",
        "rollout": "refused",
        "rollout.max_concurrent": "rendered",
        "rollout.group_size": "rendered",
        "rollout.batch_groups": "rendered",
        "rollout.submission": "rendered",
        "rollout.max_staleness": "rendered",
        "rollout.pause_mode": "rendered",
        "rollout.buffer_groups": "rendered",
        "rollout.unused": "rendered",
        "rollout.refill_limit": "run",
        "rollout.drop_zero_variance": "run",
        "rollout.sampling": "rendered",
        "outcomes": "run",
        "evaluation": "refused",
        "evaluation.every": "rendered",
        "evaluation.split": "rendered",
        "evaluation.samples": "rendered",
        "checkpoint": "refused",
        "checkpoint.every": "rendered",
        "checkpoint.load_from": "rendered",
        "storage": "run",
        "gateway": "refused",
        "trainer": "rendered",
        "launcher": "run",
        "trackers": "run",
        "plugins": "run",
        "seed": "run",
        "steps": "rendered",
    }

    def render(self, recipe: Recipe, engine: Sequence[str], place: Place) -> Rendered:
        """Return the job: data from the recipe's tasks, the router if it is ours, then miles."""
        run = Run(recipe, self.config, engine, place)
        words = " \\\n    ".join(_lines(arguments(run)))
        script = [
            "set -euo pipefail",
            f"cd {shlex.quote(self.config.root)}",
            f"export PYTHONPATH={shlex.quote(self.config.root)}:{shlex.quote(self.config.megatron_path)}"
            '"${PYTHONPATH:+:$PYTHONPATH}"',
        ]
        if self.config.replay is None:
            script.append(
                'python3 -m rollhook_miles.bridge.data "$ROLLHOOK_JOB_FILES/recipe.lock.yaml" '
                '"$ROLLHOOK_JOB_DIR/data"'
            )
        if run.has_own_router:
            script += self._router(recipe)
        script += [
            f"words=$(python3 -c {shlex.quote(_MODEL_ARGUMENTS)} {shlex.quote(self.config.model_type)})",
            'eval "model=($words)"',
            f'python3 -m rollhook_miles.start "$ROLLHOOK_JOB_FILES/{WORKER_ENV}" '
            f'python3 {shlex.quote(self.config.train_script)} "${{model[@]}}" \\\n    {words}',
        ]
        return Rendered(
            script="\n".join(script) + "\n",
            files={WORKER_ENV: json.dumps(_ENV | self.config.env, indent=2) + "\n"},
            probes=self._probes(),
        )

    def _router(self, recipe: Recipe) -> list[str]:
        """Return the lines that start `rollhook router` here, for miles to register its engines at."""
        keys = [
            f"--set {shlex.quote(f'{policy}.{key}={value}')}"
            for policy, each in recipe.router.keys.items()
            for key, value in dict(each).items()
        ]
        return [
            "ROUTER_IP=$(python3 -m rollhook_miles.start --address)",
            " ".join(
                [
                    f'rollhook router --policy {shlex.quote(recipe.router.use)} --host "$ROUTER_IP"',
                    f"--port {self.config.router_port} --trust-network --dp-aware {recipe.router.dp_aware}",
                    *keys,
                    '>> "$ROLLHOOK_JOB_DIR/logs/router.log" 2>&1 &',
                ]
            ),
            "trap 'kill %1 2>/dev/null || true' EXIT",
        ]

    def _probes(self) -> list[Probe]:
        """Return what is looked at on a node before miles starts, twenty minutes before it would fail."""
        root, megatron = shlex.quote(self.config.root), shlex.quote(self.config.megatron_path)
        script = shlex.quote(self.config.train_script)
        model = shlex.quote(f"scripts/models/{self.config.model_type}.py")
        found = [
            Probe("miles", f"test -f {root}/{script} && test -f {root}/{model}"),
            Probe(
                "python", f"PYTHONPATH={root} python3 -c 'import miles, sglang, ray, rollhook_miles.bridge'"
            ),
            Probe("megatron", f"test -d {megatron}/megatron"),
            Probe("weights", f"test -e {shlex.quote(self.config.ref_load)}"),
        ]
        if (directory := self.config.memory.stream_optimizer_to) is not None:
            place = shlex.quote(directory)
            found.append(Probe("streaming", f"mkdir -p {place} && test -w {place}"))
        return found


def _lines(words: Sequence[str]) -> list[str]:
    """Return the arguments as they stand in the script, an option and its values on a line."""
    lines: list[str] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append(_quoted(word))
        else:
            lines[-1] += f" {_quoted(word)}"
    return lines


def _quoted(word: str) -> str:
    for name in ("$ROLLHOOK_JOB_DIR", "$ROUTER_IP"):
        if word.startswith(name):
            rest = word.removeprefix(name)
            return f'"{name}"{shlex.quote(rest) if rest else ""}'
    return shlex.quote(word)
