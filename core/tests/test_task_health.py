"""What the agent that looks around keeps, and for which episode."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rollhook.runtime.task_health import Looker
from rollhook.testing.environment import build_context


class Box:
    """Prints the sizes that it is asked for."""

    async def exec(self, argv: list[str], **_: Any) -> Any:
        return SimpleNamespace(text=" ".join(argv[4:]), timed_out=False, exit_code=0)


async def test_what_was_seen_belongs_to_its_own_episode() -> None:
    """Also where the name of one begins like another's."""
    looker = Looker(build_context())
    sizes = {"run-a1-x-looker-0": {30}, "run-a1-x-looker-0-y-looker-0": {40}}
    looker.sizes = dict(sizes)
    for name in reversed(sizes):
        context: Any = SimpleNamespace(sandbox=Box(), episode_id=name)
        await looker.run(context)
    assert [looker.take(name) for name in sizes] == [["30"], ["40"]]
