"""Secrets are references; only this module turns one into a value, and only on the node that uses it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import GetCoreSchemaHandler, SecretStr
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from rollhook.errors import UsageError

FORMS = "env:NAME, file:PATH or k8s:SECRET/KEY"
MAX_BYTES = 1 << 20
#: where a node of a job on Kubernetes has the Secrets that the job names: <Secret>/<key>
K8S_VARIABLE, K8S_DIRECTORY = "ROLLHOOK_K8S_SECRETS", "/var/run/rollhook/secrets"

_PATTERNS = {
    "env": re.compile(r"[A-Za-z_][A-Za-z0-9_]*"),
    "file": re.compile(r"[^\0\n]+"),
    "k8s": re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?/[-._A-Za-z0-9]+"),
}


@dataclass(frozen=True)
class Secret:
    """A reference to a secret, and the type of a config field that takes one; a value is refused.

    `env:NAME` is an environment variable, `file:PATH` a file (a trailing newline is dropped),
    `k8s:SECRET/KEY` a key of a Kubernetes Secret, which a launcher on Kubernetes mounts on the nodes of a job
    (below ROLLHOOK_K8S_SECRETS, by default /var/run/rollhook/secrets).
    """

    scheme: str
    name: str

    @classmethod
    def parse(cls, text: object) -> Secret:
        """Return the reference. Raises ValueError, which never quotes `text`: it may be a value."""
        if isinstance(text, Secret):
            return text
        scheme, _, name = text.partition(":") if isinstance(text, str) else ("", "", "")
        if scheme not in _PATTERNS or not _PATTERNS[scheme].fullmatch(name):
            raise ValueError("not a reference to a secret")
        return cls(scheme, name)

    def resolve(self) -> SecretStr:
        """Return the value, wrapped so that neither str nor repr shows it. Raises UsageError without one."""
        if self.scheme == "env":
            value = os.environ.get(self.name, "")
            if not value:
                raise UsageError(
                    f"the environment variable {self.name} is not set; it should hold the secret {self}"
                )
            return SecretStr(value)
        if self.scheme == "file":
            return SecretStr(_read(self.name))
        path = Path(os.environ.get(K8S_VARIABLE) or K8S_DIRECTORY, *self.name.split("/"))
        if not path.exists():
            raise UsageError(
                f"the secret {self} can only be read inside a job on Kubernetes that mounts it: "
                f"{path} is not there"
            )
        return SecretStr(_read(str(path)))

    def absent(self) -> str:
        """Return why the secret cannot be resolved here, or an empty string; the value is not returned."""
        try:
            self.resolve()
        except UsageError as error:
            return str(error)
        return ""

    def __str__(self) -> str:
        return f"{self.scheme}:{self.name}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            _validate,
            serialization=core_schema.to_string_ser_schema(),
            json_schema_input_schema=core_schema.str_schema(pattern=r"^(env|file|k8s):.+"),
        )


def resolve_secret(reference: str) -> str:
    """Return the bare value of a reference, for `BuildContext.secret`. Raises UsageError."""
    try:
        secret = Secret.parse(reference)
    except ValueError:
        raise UsageError(f"that is not a reference to a secret; write {FORMS}") from None
    return secret.resolve().get_secret_value()


def _validate(value: object) -> Secret:
    try:
        return Secret.parse(value)
    except ValueError:
        raise PydanticCustomError("secret_reference", "is not a reference to a secret") from None


def _read(name: str) -> str:
    path = Path(name).expanduser()
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for, and read only once
            raise UsageError(f"the secret file {name} is no regular file; write the secret into one")
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(f"the secret file {name} is larger than {MAX_BYTES} bytes, so it is no secret")
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not text"
        raise UsageError(f"the secret file {name} cannot be read: {reason}") from None
    if not text.strip():
        raise UsageError(f"the secret file {name} is empty")
    return text.rstrip("\r\n")
