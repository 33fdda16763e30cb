"""Demonstrations of the pocket pack are conversations that the shell agent could have had."""

from __future__ import annotations

import pytest

from rollhook_agents.shell import Action, format_result, parse_reply
from rollhook_tbench2.pocket.demos import DONE, OUTPUT_LIMIT, command_message, observation_message
from rollhook_tbench2.pocket.tasks import draw_tasks


def test_every_command_is_parsed_as_itself_and_the_end_as_the_end() -> None:
    for task in draw_tasks(0, 5, 0):
        for command in (task.work.command, task.work.wrong[0]):
            assert parse_reply(command_message(command), "strict") == Action("command", command)
    assert parse_reply(DONE, "strict") == Action("done")


@pytest.mark.parametrize("output", ["", "one line", "two\nlines", "x" * 60, "x" * 61, "y" * 500])
@pytest.mark.parametrize("code", [0, 1, 127])
def test_observations_have_the_form_of_the_agents(code: int, output: str) -> None:
    assert observation_message(code, output) == format_result(code, output, limit=OUTPUT_LIMIT)
