"""The sandbox interface: what callers see, and what a backend supplies."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollhook.sandbox.backend import (
        RawProcess,
        RawSandbox,
        SandboxBackend,
        SandboxInfo,
        SandboxSpec,
    )
    from rollhook.sandbox.prices import Prices
    from rollhook.sandbox.results import Census, ExecResult, Spawned
    from rollhook.sandbox.sandbox import Sandbox
    from rollhook.sandbox.transfer import TransferReport

__all__ = [
    "Census",
    "ExecResult",
    "Prices",
    "RawProcess",
    "RawSandbox",
    "Sandbox",
    "SandboxBackend",
    "SandboxInfo",
    "SandboxSpec",
    "Spawned",
    "TransferReport",
]
_MODULES = {
    **dict.fromkeys(("Census", "ExecResult", "Spawned"), "results"),
    "Prices": "prices",
    "Sandbox": "sandbox",
    "TransferReport": "transfer",
}


def __getattr__(name: str) -> Any:
    """Import on first use: a plugin's keys name `Prices` and need nothing else of this."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'backend')}"), name)
