"""What an actor of a cluster is: the process around an object that was placed."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollhook.errors import RollhookError
from rollhook.failures import Failure
from rollhook.secrets import Secret


class Resident:
    """The actor: holds one object, gives its failures back as data (not every exception can be pickled)."""

    def __init__(self, name: str, log: str) -> None:
        self._name = name
        self._object: Any = None
        self._log = log
        self._unseen: OSError | None = None
        try:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            self._unseen = error
            return
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(output, 1)
        os.dup2(output, 2)

    def construct(
        self, target: str, args: Sequence[Any], env: Mapping[str, str], secrets: Mapping[str, str]
    ) -> Any:
        """Make the object, with variables and secrets in place; return the node's address, or a Failure."""
        for variable, reference in secrets.items():
            secret = Secret.parse(reference)
            if variable not in os.environ and not secret.absent():  # who uses an absent one says so
                os.environ[variable] = secret.resolve().get_secret_value()
        os.environ.update(env)
        return self._guard("construct", lambda: self._construct(target, args))

    def call(self, method: str, args: Sequence[Any], keys: Mapping[str, Any]) -> Any:
        """Call a method of the object; return its result, or a Failure."""
        return self._guard(method, lambda: getattr(self._object, method)(*args, **keys))

    def release(self) -> Any:
        """Let the object close what it has, where it can."""
        close = getattr(self._object, "close", None)
        return self._guard("close", close) if close is not None else None

    def _construct(self, target: str, args: Sequence[Any]) -> str:
        from rollhook.cluster import node_address

        if self._unseen is not None:
            raise RollhookError(
                f"node {node_address()} cannot write {self._log} ({self._unseen.strerror}): "
                "storage.root must be a directory that all nodes of the cluster see",
                kind="user",
            )
        module, _, name = target.partition(":")
        self._object = getattr(importlib.import_module(module), name)(*args)
        return node_address()

    def _guard(self, method: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:  # noqa: BLE001 - handed to the caller, and in the log in full
            traceback.print_exc()
            sys.stderr.flush()
            return Failure.of(error, f"{self._name}.{method}")
