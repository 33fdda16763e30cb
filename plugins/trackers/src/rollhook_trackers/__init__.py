"""Trackers: jsonl, the smallest example of a tracker for authors."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rollhook.component import Component, Config
from rollhook.hookspecs import hookimpl


class JsonlConfig(Config):
    """Keys of the jsonl tracker."""

    path: Annotated[
        str | None,
        Field(
            description="file that rows are appended to; {run_id} stands for the run;"
            " default: tracker.jsonl among the attempt's files"
        ),
    ] = None


@hookimpl
def rollhook_trackers() -> list[Component]:
    """Supply the tracker."""
    return [Component("jsonl", JsonlConfig, "rollhook_trackers.jsonl:Jsonl", "a copy of metrics to a path")]
