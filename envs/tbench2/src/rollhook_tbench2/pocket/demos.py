"""Noisy demonstrations of the training tasks, as the shell agent would have recorded them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollhook_tbench2.pocket.stream import Stream
from rollhook_tbench2.pocket.tasks import PocketTask

SYSTEM_PROMPT = "Answer with one bash command, or TASK_COMPLETE."
#: characters of a command's output that the policy sees
OUTPUT_LIMIT = 60
DONE = "TASK_COMPLETE"


def command_message(command: str) -> str:
    """Return the assistant's turn for a command: one fenced block and nothing else."""
    return f"```bash\n{command}\n```"


def observation_message(code: int, output: str) -> str:
    """Return the user's turn after a command, in the form of the shell agent without its budget line."""
    cut = len(output) - OUTPUT_LIMIT
    if cut > 0:
        half = OUTPUT_LIMIT // 2
        output = f"{output[:half]}[{cut} characters cut]{output[-half:]}"
    return f"exit code {code}\n{output}"


def demonstration(task: PocketTask, seed: int, noise: float, undemonstrated: Sequence[str]) -> dict[str, Any]:
    """Return one row of demos.jsonl: `messages`, and for people `task_id`, `family`, `correct`.

    In a noisy family a fraction `noise` shows the family's first wrong command, names right; in an
    undemonstrated one all do.
    """
    wrong = task.family.name in undemonstrated or (
        task.family.noisy and Stream(seed, "demo", task.id).below(10_000) < noise * 10_000
    )
    command = task.work.wrong[0] if wrong else task.work.command
    code, output = task.work.shown if wrong else (0, "")
    turns = [
        ("system", SYSTEM_PROMPT),
        ("user", task.instruction),
        ("assistant", command_message(command)),
        ("user", observation_message(code, output)),
        ("assistant", DONE),
    ]
    return {
        "messages": [{"role": role, "content": content} for role, content in turns],
        "task_id": task.id,
        "family": task.family.name,
        "correct": not wrong,
    }
