"""What a provider hook returns, and what the class behind it is built with."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Base of every component's configuration: unknown keys and inf are errors, instances do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Component:
    """One named implementation of a kind.

    `name` is the entry point's name behind the dot, `config` the pydantic model of its keys, `load`
    the dotted path `module:Class` (imported only when the component is built), `summary` one line.
    The class is constructed as `Class(config, context)`, does no I/O there, and is used as the
    interface of its kind says.
    """

    name: str
    config: type[BaseModel]
    load: str
    summary: str


@dataclass(frozen=True)
class BuildContext:
    """What the runtime gives every component at construction.

    `scratch` is a directory of this process inside the run's attempt; `cache` is shared by all runs
    of the user; `secret(reference)` resolves `env:NAME` or `file:PATH` on this node;
    `build(kind, spec)` builds a component that a `ComponentRef` field names.
    """

    logger: logging.Logger
    scratch: Path
    cache: Path
    seed: int = 0
    run_id: str = ""
    attempt: int = 0
    secret: Callable[[str], str] = field(default=lambda reference: _no_secrets(reference))  # noqa: PLW0108
    build: Callable[[str, Any], Any] = field(default=lambda kind, spec: _no_build(kind, spec))  # noqa: PLW0108


def _no_secrets(reference: str) -> str:
    raise LookupError(f"no secret resolver here for {reference!r}")


def _no_build(kind: str, spec: Any) -> Any:
    raise LookupError(f"no builder here for {kind} {spec!r}")
