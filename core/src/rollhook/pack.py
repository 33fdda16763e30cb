"""Packs: generated data sets, written once per user and named `pack:NAME/...` in recipes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollhook.component import BuildContext


class Pack(ABC):
    """A generator of data; the same configuration gives the same bytes on every machine."""

    def __init__(self, config: Any, context: BuildContext) -> None:
        self.config = config
        self.context = context

    @abstractmethod
    def digest(self) -> str:
        """Return a hex digest of generator version and configuration, without generating."""

    @abstractmethod
    def write(self, directory: Path, progress: Callable[[int, int], None] | None = None) -> None:
        """Write the whole pack into an empty directory; deterministic: no times, no machine.

        `progress(done, total)` is called now and then where it is given.
        """
