"""The error tree: one root, one class per boundary, and a kind that says who can mend it."""

from __future__ import annotations

from typing import ClassVar, Literal

Kind = Literal["retryable", "infrastructure", "user"]


class RollhookError(Exception):
    """Anything Rollhook raises on purpose; the text is one sentence with the way out.

    `boundary` names what failed (it becomes the `boundary` of an `infra_error`), `kind` says whether
    another try may help (`retryable`), the machinery is at fault (`infrastructure`) or the caller
    (`user`).
    """

    boundary: ClassVar[str] = "rollhook"
    kind: Kind = "infrastructure"

    def __init__(self, message: str, *, kind: Kind | None = None) -> None:
        super().__init__(message)
        if kind is not None:
            self.kind = kind


class UsageError(RollhookError):
    """Wrong usage or an invalid recipe: exit code 2."""

    boundary = "usage"
    kind: Kind = "user"


class PluginError(UsageError):
    """A plugin that is unknown, ambiguous, broken, or of another API range."""

    boundary = "plugin"


class EngineError(RollhookError):
    """An inference engine did not do what was asked; `status` is that of its HTTP answer, if it gave one."""

    boundary = "engine"

    def __init__(self, message: str, *, kind: Kind | None = None, status: int | None = None) -> None:
        super().__init__(message, kind=kind)
        self.status = status


class SandboxError(RollhookError):
    """A sandbox could not be made, reached or used."""

    boundary = "sandbox"


class SandboxDead(SandboxError):  # noqa: N818 - a state, not a fault of the program
    """The sandbox is gone (as opposed to: a command in it failed)."""


class ToolError(RollhookError):
    """A tool call failed in its machinery (a failing tool result is data, not an error)."""

    boundary = "tool"


class AgentError(RollhookError):
    """The agent's own code failed."""

    boundary = "agent"


class TaskError(RollhookError):
    """The environment's own code or data failed."""

    boundary = "environment"


class VerifierError(RollhookError):
    """Verification was due and gave no verdict."""

    boundary = "verifier"


class BudgetExceeded(RollhookError):  # noqa: N818 - a state, not a fault of the program
    """A node of the budget tree ran out; `node` names it (`agent`, `turn`, `create`, ...)."""

    boundary = "budget"

    def __init__(self, message: str, *, node: str) -> None:
        super().__init__(message)
        self.node = node


class TrainerError(RollhookError):
    """The trainer failed."""

    boundary = "trainer"


class LauncherError(RollhookError):
    """A launcher could not render, submit or reach a job."""

    boundary = "launcher"


class RunError(RollhookError):
    """A run directory cannot be used: claimed by another driver, full, read-only, or not a run."""

    boundary = "run"
    kind: Kind = "user"


class Unsupported(UsageError):  # noqa: N818 - a state, not a fault of the program
    """A feature that was asked for by name and that the chosen part does not have."""

    boundary = "unsupported"


def first_of(error: BaseException) -> BaseException:
    """Return what went wrong first: the first exception of a group (of groups), or the exception itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
