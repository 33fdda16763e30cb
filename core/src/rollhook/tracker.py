"""Trackers: where metrics go besides the run's own metrics.jsonl."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from rollhook.component import BuildContext


class Tracker(ABC):
    """Receives metrics rows; called on the observers' thread, never on the event loop.

    An exception is logged with the distribution's name and counted; it never stops a run.
    """

    def __init__(self, config: Any, context: BuildContext) -> None:
        self.config = config
        self.context = context

    def start(self, run_id: str, attempt: int, recipe: Mapping[str, Any]) -> None:
        """Begin an attempt; `recipe` is the resolved recipe without secrets."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one row."""

    def finish(self, status: str) -> None:
        """End the attempt (`succeeded`, `failed`, `stopped`) and flush; safe to call twice."""
