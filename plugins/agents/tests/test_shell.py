"""The shell agent: what is a command, what is shown of it, and how an episode ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollhook.agent import StopReason
from rollhook.messages import message
from rollhook.testing.agent import (
    ChatAgentContract,
    ScriptedSandbox,
    ScriptedSession,
    context,
    result,
)
from rollhook.testing.environment import build_context
from rollhook_agents import ShellConfig
from rollhook_agents.shell import CORRECTION, Shell, cut_middle, format_exec, format_result, parse_reply


def shell(**keys):
    return Shell(ShellConfig(**keys), build_context())


class TestShell(ChatAgentContract):
    @pytest.fixture(params=["strict", "fenced", "lenient"])
    def agent(self, request):
        return shell(parse=request.param)


class TestQuickstart(ChatAgentContract):
    @pytest.fixture
    def agent(self):
        return shell(parse="strict", show_budget=False, output_limit=60, corrections=0)


COMMAND, MALFORMED, DONE = "command", "malformed", "done"


@pytest.mark.parametrize(
    ("text", "strict", "fenced", "lenient"),
    [
        ("```bash\nls -l\n```", "ls -l", "ls -l", "ls -l"),
        ("  ```bash\nls\n```\n", "ls", "ls", "ls"),
        ("```bash\na\nb\n```", "a\nb", "a\nb", "a\nb"),
        ("```bash\nls```", "ls", "ls", "ls"),
        ("```sh\nls\n```", None, "ls", "ls"),
        ("```\nls\n```", None, "ls", "ls"),
        ("```python\nls\n```", None, "ls", "ls"),
        ("I will list.\n```bash\nls\n```", None, "ls", "ls"),
        ("```bash\nls\n```\n```bash\nrm x\n```", None, "ls", "ls"),
        ("```bash\nls", None, "ls", "ls"),
        ("```ls```", None, "ls", "ls"),
        ("ls -l", None, None, "ls -l"),
        ("I am not sure.", None, None, "I am not sure."),
        ("", None, None, None),
        (" \n", None, None, None),
        ("```bash\n```", None, None, None),
        ("```bash\n\n```", None, None, None),
        ("```bash\n  \n```", None, None, None),
        ("```", None, None, None),
        ("```bash\nls\x00\n```", None, None, None),
        ("```bash\n" + "a" * 130_000 + "\n```", None, None, None),
        ("TASK_COMPLETE", DONE, DONE, DONE),
        (" TASK_COMPLETE\n", DONE, DONE, DONE),
        ("task_complete, I think", None, DONE, DONE),
        ("```bash\nTASK_COMPLETE\n```", "TASK_COMPLETE", DONE, DONE),
        ("TASK_COMPLETE\n```bash\nls\n```", None, DONE, DONE),
        ("Not TASK_COMPLETE", None, None, "Not TASK_COMPLETE"),
    ],
)
def test_a_reply_is_a_command_the_end_or_malformed(text, strict, fenced, lenient):
    for mode, expected in {"strict": strict, "fenced": fenced, "lenient": lenient}.items():
        action = parse_reply(text, mode)
        kind = MALFORMED if expected is None else DONE if expected == DONE else COMMAND
        assert action.kind == kind, mode
        if kind == COMMAND:
            assert action.command == expected


@given(st.text(max_size=60), st.sampled_from(["strict", "fenced", "lenient"]))
def test_any_text_is_parsed(text, mode):
    action = parse_reply(text, mode)
    assert (action.kind == COMMAND) == bool(action.command)


@given(st.text(st.characters(exclude_characters="`\0", exclude_categories=("Cs",)), min_size=1, max_size=60))
def test_a_command_in_one_block_comes_out_as_it_went_in(command):
    if command.strip() and not command.endswith("\n"):
        assert parse_reply(f"```bash\n{command}\n```", "strict").command == command


@pytest.mark.parametrize(
    ("code", "stdout", "stderr", "shown"),
    [
        (0, b"", b"", "exit code 0\n"),
        (0, b"a.txt\n", b"", "exit code 0\na.txt"),
        (1, b"", b"cat: x: No such file\n", "exit code 1\ncat: x: No such file"),
        (2, b"one\n", b"two\n", "exit code 2\none\ntwo"),
        (0, b"\n\nx\n\n", b"", "exit code 0\n\n\nx"),
        (137, b"\xff", b"", "exit code 137\n\ufffd"),
        (None, b"half\n", b"", "timed out after 5 s\nhalf"),
        (0, "text", "", "exit code 0\ntext"),
    ],
)
def test_a_result_is_its_exit_code_and_its_output(code, stdout, stderr, shown):
    assert format_result(code, stdout, stderr, limit=60, seconds=5.0) == shown


@pytest.mark.parametrize(
    ("text", "limit", "lost", "shown"),
    [
        ("abcdef", 6, 0, "abcdef"),
        ("abcdefg", 6, 0, "abc[1 characters cut]efg"),
        ("abcdefghij", 5, 0, "abc[5 characters cut]ij"),
        ("abcdef", 6, 100, "abc[100 characters cut]def"),
        ("", 6, 0, ""),
        ("ab", 1, 0, "a[1 characters cut]"),
    ],
)
def test_the_middle_is_cut_and_counted(text, limit, lost, shown):
    assert cut_middle(text, limit, lost) == shown


@given(st.text("ab\n", max_size=200), st.integers(1, 100))
def test_what_is_shown_and_what_is_counted_as_cut_are_the_whole(text, limit):
    shown = cut_middle(text, limit)
    if len(text) <= limit:
        assert shown == text
        return
    head, _, rest = shown.partition("[")
    cut, _, tail = rest.partition(" characters cut]")
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head) + len(tail) == limit == len(text) - int(cut)


def test_what_the_sandbox_dropped_is_counted():
    ended = result(b"a" * 10, stdout_bytes=1000, truncated=True)
    assert format_exec(ended, limit=60) == "exit code 0\naaaaa[990 characters cut]aaaaa"


async def test_a_malformed_reply_is_corrected_a_few_times_and_never_run():
    session, sandbox = ScriptedSession(["rm -rf /"]), ScriptedSandbox()
    reason = await shell(parse="strict", corrections=2, show_budget=False).run(context(session, sandbox))
    assert reason == StopReason.DONE
    assert len(session.requests) == 3
    assert [m["content"] for m in session.requests[2] if m["role"] == "user"][1:] == [CORRECTION] * 2
    assert not sandbox.commands


async def test_without_corrections_a_malformed_reply_ends_the_episode():
    session = ScriptedSession(["hello"])
    assert await shell(parse="strict", corrections=0).run(context(session)) == StopReason.DONE
    assert len(session.requests) == 1


async def test_the_budget_is_shown_unless_that_is_turned_off():
    for show in (True, False):
        session = ScriptedSession(["```bash\nls\n```", "TASK_COMPLETE"])
        await shell(show_budget=show).run(context(session))
        told = session.requests[1][-1]["content"]
        assert told == "exit code 0\ndone" + ("\n[left: 19 turns, 985 tokens, 600 s]" if show else "")


async def test_the_command_goes_to_the_configured_shell_with_its_timeout():
    session, sandbox = ScriptedSession(["```bash\nls\n```", "TASK_COMPLETE"]), ScriptedSandbox()
    await shell(shell=["sh", "-e", "-c"], command_timeout=7).run(context(session, sandbox))
    assert sandbox.commands == [["sh", "-e", "-c", "ls"]]
    assert sandbox.timeouts == [7]


async def test_what_the_environment_says_follows_the_result():
    session = ScriptedSession(["```bash\nls\n```", "TASK_COMPLETE"])
    spoken = {"```bash\nls\n```": [message("user", "faster")]}
    await shell(show_budget=False).run(context(session, respond=spoken))
    assert [m["content"] for m in session.requests[1][-2:]] == ["exit code 0\ndone", "faster"]


async def test_the_turn_that_used_the_last_of_the_budget_still_runs_its_command():
    session, sandbox = ScriptedSession(["```bash\nls\n```"], turns=1), ScriptedSandbox()
    assert await shell().run(context(session, sandbox)) == StopReason.MAX_TURNS
    assert len(sandbox.commands) == 1
