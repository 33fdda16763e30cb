"""Rollhook: the names that a plugin author imports.

They are looked up on first use, so that `rollhook --help` starts without pydantic and pluggy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollhook.component import BuildContext, Component, Config
    from rollhook.hookspecs import hookimpl
    from rollhook.recipe.refs import ComponentRef
    from rollhook.secrets import Secret

__version__ = "0.1.0"
__all__ = ["BuildContext", "Component", "ComponentRef", "Config", "Secret", "__version__", "hookimpl"]

_HOMES = {
    "BuildContext": "rollhook.component",
    "Component": "rollhook.component",
    "ComponentRef": "rollhook.recipe.refs",
    "Config": "rollhook.component",
    "Secret": "rollhook.secrets",
    "hookimpl": "rollhook.hookspecs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rollhook' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
