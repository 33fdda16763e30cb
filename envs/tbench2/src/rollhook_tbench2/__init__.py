"""Terminal-Bench 2 tasks, and the pocket pack of small ones."""

from __future__ import annotations

from rollhook.component import Component
from rollhook.hookspecs import hookimpl
from rollhook_tbench2.config import PocketConfig, SplitConfig, TBench2Config


@hookimpl
def rollhook_environments() -> list[Component]:
    """Supply environment.tbench2."""
    return [
        Component(
            name="tbench2",
            config=TBench2Config,
            load="rollhook_tbench2.environment:TBench2",
            summary="terminal tasks in the Terminal-Bench 2 / Harbor directory form",
        )
    ]


@hookimpl
def rollhook_packs() -> list[Component]:
    """Supply pack.pocket and pack.tbench2."""
    return [
        Component(
            name="tbench2",
            config=SplitConfig,
            load="rollhook_tbench2.split:SplitPack",
            summary="a directory of tasks, split into train and held-out",
        ),
        Component(
            name="pocket",
            config=PocketConfig,
            load="rollhook_tbench2.pocket.pack:PocketPack",
            summary="small terminal tasks in 13 families, with noisy demonstrations",
        ),
    ]
