"""The command line of one server, in the words of the release that is to run it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from rollhook_sglang import releases
from rollhook_sglang.config import SPECULATIVE, SWITCHES, VALUES, SGLangConfig, Speculative

MODULE = "sglang.launch_server"
#: of every server: `/health` says whether it lives, not whether it generates, which it does not in a pause
ENVIRONMENT = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false", "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True)
class Start:
    """What differs from start to start: weights, addresses, and which node of the server this is.

    `host` may be `{host}`, which the placement fills in; `first` is the address and port at which the nodes
    of one server find each other, None on a single node.
    """

    model_dir: Path
    weight_version: int
    host: str
    port: int
    seed: int
    node_rank: int = 0
    first: str | None = None


def command(config: SGLangConfig, version: str, start: Start) -> list[str]:
    """Return the arguments of one process, the interpreter first.

    Always given are `--skip-server-warmup` (the first request proves as much), `--enable-metrics` (without
    it no reply tells how long it queued), `--random-seed` (for requests that bring no seed), and, where the
    release has it, `--incremental-streaming-output`.
    """
    argv = [config.python or sys.executable, "-m", MODULE, "--model-path", str(start.model_dir)]
    argv += ["--host", start.host, "--port", str(start.port), "--weight-version", str(start.weight_version)]
    argv += ["--random-seed", str(start.seed), "--skip-server-warmup", "--enable-metrics"]
    if releases.streams_increments(version):
        argv.append("--incremental-streaming-output")
    if start.first is not None:
        argv += ["--nnodes", str(config.nnodes), "--node-rank", str(start.node_rank)]
        argv += ["--dist-init-addr", start.first]
    return [*argv, *shape(config, version)]


def shape(config: SGLangConfig, version: str) -> list[str]:
    """Return what the keys say of a server, wherever it runs: ranks, memory, kernels, decoding."""
    argv = _ranks(config, version)
    for key, option in VALUES.items():
        if (value := config.get(key)) is not None:
            argv += [releases.flag(option, version), _text(value)]
    speculative = config.get("speculative")
    if isinstance(speculative, Speculative):
        for key, option in SPECULATIVE.items():
            if (value := getattr(speculative, key)) is not None:
                argv += [option, _text(value)]
    argv += [option for key, option in SWITCHES.items() if config.get(key)]
    return [*argv, *config.extra_args]


def _ranks(config: SGLangConfig, version: str) -> list[str]:
    size = config.get("dp_size")
    if not config.get("dp_attention"):
        return [] if size is None else ["--dp-size", str(size)]
    if releases.attention_ranks_are_apart(version):
        return ["--attn-dp-size", str(size or 1)]
    return ["--dp-size", str(size or 1), "--enable-dp-attention"]


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
