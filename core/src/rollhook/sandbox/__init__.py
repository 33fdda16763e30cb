"""The sandbox interface: what callers see, and what a backend supplies."""

from rollhook.sandbox.backend import (
    RawProcess,
    RawSandbox,
    SandboxBackend,
    SandboxInfo,
    SandboxSpec,
)
from rollhook.sandbox.sandbox import Census, ExecResult, Sandbox, Spawned
from rollhook.sandbox.transfer import TransferReport

__all__ = [
    "Census",
    "ExecResult",
    "RawProcess",
    "RawSandbox",
    "Sandbox",
    "SandboxBackend",
    "SandboxInfo",
    "SandboxSpec",
    "Spawned",
    "TransferReport",
]
