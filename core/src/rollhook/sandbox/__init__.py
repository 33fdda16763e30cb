"""The sandbox interface: what callers see, and what a backend supplies."""

from rollhook.sandbox.backend import (
    RawProcess,
    RawSandbox,
    SandboxBackend,
    SandboxInfo,
    SandboxSpec,
)
from rollhook.sandbox.sandbox import ExecResult, Sandbox

__all__ = [
    "ExecResult",
    "RawProcess",
    "RawSandbox",
    "Sandbox",
    "SandboxBackend",
    "SandboxInfo",
    "SandboxSpec",
]
