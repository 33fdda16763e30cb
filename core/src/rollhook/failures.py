"""An exception on its way to another process, which may not know its class or be able to unpickle it."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

from rollhook.errors import RollhookError

MAX_ERROR_CHARS = 500


@dataclass(frozen=True)
class Failure:
    """A RollhookError as it is where it can be pickled, its text anyway; of others one line of text."""

    text: str
    error: bytes | None

    @classmethod
    def of(cls, error: BaseException, what: str) -> Failure:
        """Return an error that came of `what`, such as `trainer.step`."""
        if isinstance(error, RollhookError):
            try:
                payload = pickle.dumps(error)
                pickle.loads(payload)  # noqa: S301 - our own
                return cls(str(error), payload)
            except Exception:  # noqa: BLE001 - the text is kept
                return cls(str(error), None)
        return cls(f"{what} failed: {one_line(error)}", None)

    def to_error(self, log: Path) -> RollhookError:
        """Return what is raised here; `log` has the traceback."""
        if self.error is not None:
            error = pickle.loads(self.error)  # noqa: S301 - from our own process
            assert isinstance(error, RollhookError)
            return error
        return RollhookError(f"{self.text}; the traceback is in {log}")


def one_line(error: BaseException) -> str:
    """Return class and text of an exception in one line of bounded length."""
    text = " ".join(str(error).split())
    text = text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + " ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
