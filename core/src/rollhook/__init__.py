"""Rollhook: the names that a plugin author imports."""

from rollhook.component import BuildContext, Component, Config
from rollhook.hookspecs import hookimpl

__version__ = "0.1.0"
__all__ = ["BuildContext", "Component", "Config", "__version__", "hookimpl"]
