"""Keys of components given on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def parse_keys(options: Sequence[str] | None) -> dict[str, Any]:
    """Return `KEY=VALUE` options as a mapping; values are read as YAML, dots nest. Raises UsageError."""
    from omegaconf import OmegaConf

    from rollhook.errors import UsageError

    for option in options or []:
        if "=" not in option:
            raise UsageError(f"--set {option}: write KEY=VALUE")
    parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist(list(options or [])))
    return {str(key): value for key, value in parsed.items()}
